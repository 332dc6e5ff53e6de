"""Chaos that takes minutes: thirty agents of which three stand still, and faults drawn at random for as long."""

import random
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from tests.agent.testing import wait_until_sync
from tests.chaos.checker import Checker
from tests.chaos.machines import holders_of, nodes_of

pytestmark = [pytest.mark.root, pytest.mark.acceptance]

PAUSE_S = 20.0
STORM_S = 150.0


def test_three_of_thirty_agents_that_stand_still_make_nobody_else_suspect(build_swarm):
    swarm = build_swarm(30)
    frozen = ("n10", "n20", "n30")
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=4, gpus_per_rank=1, nodes=["n2", "n3", "n4", "n5"])
        swarm.wait_for_beats(job, 4, timeout_s=40)
        with ExitStack() as stack:
            for name in frozen:
                stack.enter_context(swarm[name].frozen_agent())
            swarm.watch(PAUSE_S, may_fail=frozen)
        swarm.converge(60)
        swarm.end(job)
        done = swarm.wait_ended(job, 60)
        assert (done["shell_exit_code"], done["attempt"]) == (0, 1)
        checker.verify(120)


def test_machines_that_run_a_gang_for_a_while_need_not_keep_its_record(build_swarm):
    """Then the gang survives the death of both of its machines."""
    swarm = build_swarm(5)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=2, gpus_per_rank=1, nodes=["n2", "n3", "n4", "n5"])
        swarm.wait_for_beats(job, 2)
        gang = nodes_of(swarm.document(job))
        wait_until_sync(lambda: not set(gang) & set(holders_of(swarm.document(job))), 90, "others are the holders")
        for name in gang:
            swarm[name].cut_power()
        swarm.wait_for_beats(job, 2, attempt=2, timeout_s=40)
        for name in gang:
            swarm[name].power_on()
        swarm.converge()
        swarm.end(job)
        assert swarm.wait_ended(job)["shell_exit_code"] == 0
        checker.verify()


class Storm:
    """Faults drawn by a seed: one machine or two are hurt in some way, and after a while all is undone."""

    def __init__(self, swarm, seed):
        self._swarm, self._draw = swarm, random.Random(seed)
        self._faults = (self.kill, self.stop, self.reboot, self.freeze, self.cut, self.deafen, self.gag)
        self.struck = []

    def strike(self):
        victims = self._draw.sample(list(self._swarm), self._draw.choice((1, 1, 2)))
        duration_s = self._draw.uniform(0.0, 18.0)
        with ExitStack() as stack:
            for machine in victims:
                fault = self._draw.choice(self._faults)
                self.struck.append(f"{fault.__name__} {machine.name} {duration_s:.1f} s")
                stack.enter_context(fault(machine))
            threading.Event().wait(duration_s)

    @contextmanager
    def kill(self, machine):
        machine.kill_agent()
        yield
        machine.start_agent()

    @contextmanager
    def stop(self, machine):
        machine.stop_agent()
        yield
        machine.start_agent()

    @contextmanager
    def reboot(self, machine):
        machine.cut_power()
        yield
        machine.power_on()

    def freeze(self, machine):
        return machine.frozen_agent()

    @contextmanager
    def cut(self, machine):
        self._swarm.isolate(machine.name)
        yield
        self._swarm.network.heal()

    @contextmanager
    def deafen(self, machine):
        self._swarm.network.drop(machine.host, self._others(machine))
        yield
        self._swarm.network.heal()

    @contextmanager
    def gag(self, machine):
        self._swarm.network.refuse(machine.host, self._others(machine))
        yield
        self._swarm.network.heal()

    def _others(self, machine):
        return [each.host for each in self._swarm.others(machine.name)]


@pytest.mark.parametrize("seed", [1, 2])
def test_storm_of_faults_loses_nothing_and_never_runs_two_attempts_at_once(build_swarm, seed):
    swarm = build_swarm(5, gpus=2)
    storm = Storm(swarm, seed)
    with Checker(swarm, seed) as checker:
        jobs = [swarm.submit("n1", ranks=3, gpus_per_rank=1, max_restarts=1_000) for _ in range(2)]
        until_s = time.monotonic() + STORM_S
        while time.monotonic() < until_s:
            storm.strike()
        print(storm.struck, [sorted(swarm.attempts(job)) for job in jobs])
        swarm.converge(60)
        for job in jobs:
            swarm.end(job, 5)
        for job in jobs:
            assert swarm.wait_ended(job, 120)["shell_exit_code"] == 5
        checker.verify(120)

"""Agents that get too little time and too slow a disk for a while: when it is over, so is the trouble."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from swarmsched.errors import AgentUnreachable
from tests.agent.testing import wait_until_sync

pytestmark = pytest.mark.root

TURN_S, STOPPED_RATIO = 0.3, 0.95
THROTTLED_S, BACK_S = 30.0, 60.0
SPIN = "while True: pass"
WRITE = """
import os, sys
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(200):
            file.write(bytes(2**20))
        file.flush()
        os.fsync(file.fileno())
"""


@contextmanager
def throttled(machines):
    """Each agent runs for a twentieth of the time."""
    is_over = threading.Event()

    def turn():
        while not is_over.is_set():
            for number, pause_s in ((signal.SIGSTOP, STOPPED_RATIO), (signal.SIGCONT, 1.0 - STOPPED_RATIO)):
                for machine in machines:
                    os.kill(machine.agent.process.pid, number)
                is_over.wait(TURN_S * pause_s)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for machine in machines:
            os.kill(machine.agent.process.pid, signal.SIGCONT)


@contextmanager
def busy_machine(folder):
    """Three programs that write and fsync, and three that compute, somewhat less urgently than others."""
    with ExitStack() as stack:
        for number in range(3):
            for words in ((WRITE, str(folder / f"filler-{number}")), (SPIN,)):
                process = subprocess.Popen(["nice", "-n", "10", sys.executable, "-c", *words])
                stack.callback(process.wait)
                stack.callback(process.kill)
        yield


class Flood:
    """Jobs without GPUs, so many at once, at all agents in turn."""

    def __init__(self, swarm, count, at_once):
        self._agents = [machine.agent for machine in swarm]
        self._pool = ThreadPoolExecutor(at_once)
        self._count = count
        self.accepted = []

    def __enter__(self):
        for number in range(self._count):
            self._pool.submit(self._submit, self._agents[number % len(self._agents)])
        return self

    def __exit__(self, *_error):
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, agent):
        with suppress(AgentUnreachable):  # nobody can say whether it was accepted
            status, job = agent.call("POST", "/v1/jobs", {"spec": {"command": ["true"]}}, timeout_s=60)
            if status == 201:
                self.accepted.append(job["id"])

    def wait(self):
        """Until all of them were submitted."""
        self._pool.shutdown()

    def total(self, name):
        """A counter's sum over all agents and labels; 0 for an agent that does not answer."""
        return sum(count(agent, name) for agent in self._agents)

    def are_ended(self):
        """True when no agent acts for a job any more."""
        listed = [agent.get("/v1/jobs?limit=1") for agent in self._agents]
        return all(not each["items"] for each in listed)


def count(agent, name):
    request = urllib.request.Request(f"{agent.url}/metrics", headers={"Authorization": f"Bearer {agent.token}"})
    with suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
        lines = (line.rsplit(" ", 1) for line in answer.read().decode().splitlines())
        return sum(float(line[1]) for line in lines if line[0].split("{")[0] == name)
    return 0


def story(flood, started_s):
    names = ("swarm_jobs_total", "swarm_jobs_taken_over_total", "swarm_jobs_stepped_down_total")
    counts = " ".join(f"{name[6:-6]} {flood.total(name):.0f}" for name in names)
    print(f"{time.monotonic() - started_s:.0f} s: accepted {len(flood.accepted)}, {counts}", flush=True)


@pytest.mark.acceptance
def test_agents_that_were_too_slow_work_at_full_speed_when_they_can(build_swarm):
    swarm = build_swarm(3)
    with Flood(swarm, 600, at_once=120) as flood:
        with throttled(list(swarm)):
            threading.Event().wait(THROTTLED_S)
        flood.wait()
        wait_until_sync(flood.are_ended, BACK_S, "all jobs have ended")
        assert len(flood.accepted) > 200


@pytest.mark.acceptance
def test_three_thousand_jobs_survive_a_busy_machine(build_swarm, tmp_path):
    """The machine is busy for 75 s; a minute later the throughput is what it was, and nothing changes hands."""
    swarm = build_swarm(3)
    started_s = time.monotonic()
    with Flood(swarm, 3_000, at_once=50) as flood:
        with busy_machine(tmp_path):
            while time.monotonic() < started_s + 75.0:
                threading.Event().wait(15.0)
                story(flood, started_s)
        threading.Event().wait(BACK_S)
        ended, taken_over = flood.total("swarm_jobs_total"), flood.total("swarm_jobs_taken_over_total")
        threading.Event().wait(20.0)
        story(flood, started_s)
        assert flood.are_ended() or flood.total("swarm_jobs_total") - ended >= 20 * 10
        assert flood.total("swarm_jobs_taken_over_total") - taken_over < 20
        flood.wait()
        wait_until_sync(flood.are_ended, 300, "all jobs have ended")

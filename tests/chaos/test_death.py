"""Agents, machines and several machines at once die while jobs run and a user goes on submitting."""

import pytest

from tests.agent.testing import wait_until_sync
from tests.chaos.checker import Checker
from tests.chaos.history import gap_s
from tests.chaos.machines import nodes_of

pytestmark = [pytest.mark.root, pytest.mark.chaos]

SHEPHERD_WITHIN_S = 20.0
RESTART_WITHIN_S = 15.0
UNDISTURBED_GAP_S = 4.0  # a freeze lasts longer than a busy machine keeps a rank waiting


def test_another_agent_acts_when_the_shepherd_is_killed_and_ranks_are_untouched(build_swarm):
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=2, gpus_per_rank=1, nodes=["n2", "n3"])
        pids = {beat.pid for beat in swarm.wait_for_beats(job, 2)}
        before = swarm.document(job)
        assert before["shepherd"] == "n1"
        swarm["n1"].kill_agent()

        def is_taken_over():
            after = swarm.document(job, "n4")
            return after["shepherd"] not in (None, "n1") and after["epoch"] > before["epoch"]

        wait_until_sync(is_taken_over, SHEPHERD_WITHIN_S, "another agent is the job's shepherd")
        beats = len(swarm.beats(job))
        wait_until_sync(lambda: len(swarm.beats(job)) > beats + 20, 10, "the ranks go on")
        swarm.end(job, 5)
        done = swarm.wait_ended(job)
        assert (done["shell_exit_code"], done["attempt"]) == (5, 1)
        assert {beat.pid for beat in swarm.beats(job)} == pids
        assert gap_s(swarm.beats(job)) < UNDISTURBED_GAP_S
        swarm["n1"].start_agent()
        swarm.converge()
        checker.verify()


def test_owner_killed_and_back_at_once_keeps_its_ranks(build_swarm):
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=1, gpus_per_rank=1, nodes=["n2"])
        pids = {beat.pid for beat in swarm.wait_for_beats(job, 1)}
        swarm["n2"].kill_agent()
        swarm["n2"].start_agent()
        swarm.converge()
        beats = len(swarm.beats(job))
        wait_until_sync(lambda: len(swarm.beats(job)) > beats + 20, 20, "the rank goes on")
        assert swarm["n2"].rank_pids() >= pids
        swarm.end(job, 6)
        done = swarm.wait_ended(job)
        assert (done["shell_exit_code"], done["attempt"]) == (6, 1)
        assert {beat.pid for beat in swarm.beats(job)} == pids
        checker.verify()


def test_job_of_an_owner_that_stays_away_moves_and_the_frozen_rank_ends_when_it_returns(build_swarm):
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=1, gpus_per_rank=1, nodes=["n2", "n3"])
        (pid,) = {beat.pid for beat in swarm.wait_for_beats(job, 1)}
        (owner,) = nodes_of(swarm.document(job))
        swarm[owner].kill_agent()
        swarm.wait_for_beats(job, 1, attempt=2, timeout_s=40)
        assert pid in swarm[owner].rank_pids()
        after = swarm.document(job)
        assert (after["attempt"], after["restarts"]) == (2, 1)
        assert nodes_of(after) != [owner]
        swarm[owner].start_agent()
        wait_until_sync(lambda: pid not in swarm[owner].rank_pids(), 30, "the rank of the old attempt is ended")
        swarm.end(job, 4)
        assert swarm.wait_ended(job)["shell_exit_code"] == 4
        checker.verify()


def commit_checkpoint(swarm, job, name):
    swarm.tell(job, "checkpoint", name)
    words = f"checkpoint {name} "

    def answers():
        return [beat.word for beat in swarm.beats(job) if beat.word.startswith(words)]

    wait_until_sync(answers, 20, f"{name} is committed")
    assert answers()[-1].startswith(f"{words}0 "), answers()


def test_gang_that_loses_a_machine_runs_again_as_a_whole_from_its_newest_checkpoint(build_swarm):
    swarm = build_swarm(5)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=2, gpus_per_rank=1, nodes=["n2", "n3", "n4", "n5"])
        first = swarm.wait_for_beats(job, 2)
        for name in ("step-1", "step-2"):
            commit_checkpoint(swarm, job, name)
        lost, survivor = nodes_of(swarm.document(job))
        killed_s = swarm[lost].cut_power()
        again = swarm.wait_for_beats(job, 2, attempt=2, timeout_s=40)
        begun = [beat for beat in again if beat.word.startswith("begin")]
        assert max(beat.at_s for beat in begun) - killed_s < RESTART_WITHIN_S
        assert lost not in {beat.node for beat in again}
        assert all("step-2" in beat.word and "unreadable" not in beat.word for beat in begun), begun
        assert not {beat.pid for beat in first} & swarm[survivor].rank_pids()
        after = swarm.document(job)
        assert (after["attempt"], after["restarts"]) == (2, 1)
        swarm.end(job, 3)
        assert swarm.wait_ended(job)["shell_exit_code"] == 3
        swarm[lost].power_on()
        swarm.converge()
        checker.verify()


def test_gang_goes_on_elsewhere_when_two_of_five_machines_lose_power(build_swarm):
    """Both run ranks; the job's holders are the other three.  Jobs that lost two holders go on when they return."""
    swarm = build_swarm(5)
    with Checker(swarm) as checker:
        lost, others = ["n2", "n3"], ["n4", "n5"]
        fillers = [swarm.submit("n1", ranks=1, gpus_per_rank=1, nodes=[name]) for name in others]
        for filler in fillers:
            swarm.wait_for_beats(filler, 1)
        ticket = swarm.ticket_held_by("n1", "n1", *others)
        job = swarm.submit_with(ticket, "n1", ranks=2, gpus_per_rank=1, nodes=lost + others)
        assert {beat.node for beat in swarm.wait_for_beats(job, 2)} == set(lost)
        for filler in fillers:
            swarm.end(filler)
            swarm.wait_ended(filler)
        for name in lost:
            swarm[name].cut_power()
        again = swarm.wait_for_beats(job, 2, attempt=2, timeout_s=40)
        assert not {beat.node for beat in again} & set(lost)
        for name in lost:
            swarm[name].power_on()
        swarm.converge()
        swarm.end(job, 2)
        assert swarm.wait_ended(job)["shell_exit_code"] == 2
        checker.verify()

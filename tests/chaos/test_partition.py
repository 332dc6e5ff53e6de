"""Links are cut both ways, one way and a little, while ranks write down when they are at work."""

import threading
import time

import pytest

from tests.agent.testing import wait_until_sync
from tests.chaos.checker import Checker
from tests.chaos.history import gap_s

pytestmark = [pytest.mark.root, pytest.mark.chaos]
rarely = pytest.mark.acceptance

FREEZE_S = 8.0
FREEZE_SLACK_S = 1.5
UNDISTURBED_GAP_S = 4.0


def cut_off(swarm, name, how):
    """Cut one machine off from all others."""
    host, others = swarm[name].host, [machine.host for machine in swarm.others(name)]
    if how == "both ways":
        swarm.network.cut([host], others)
    elif how == "deaf":
        swarm.network.drop(host, others)
    elif how == "mute":
        for other in others:
            swarm.network.drop(other, [host])
    else:
        swarm.network.refuse(host, others)
    return time.monotonic()


@pytest.mark.parametrize(
    "how", ["both ways", *(pytest.param(how, marks=rarely) for how in ("deaf", "mute", "may not send"))]
)
def test_ranks_of_a_machine_that_is_cut_off_freeze_before_the_next_attempt_begins(build_swarm, how):
    """Deaf: all that it is sent is dropped; mute: all that it sends; may not send: its own kernel refuses (EPERM)."""
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=1, gpus_per_rank=1, nodes=["n3", "n4"])
        first = swarm.wait_for_beats(job, 1)
        owner, pid = first[0].node, first[0].pid
        cut_s = cut_off(swarm, owner, how)
        again = swarm.wait_for_beats(job, 1, attempt=2, timeout_s=45)
        assert again[0].node != owner
        assert pid in swarm[owner].rank_pids(), "frozen, not killed: it may have to go on"
        last_s = max(beat.at_s for beat in swarm.beats(job) if beat.attempt == 1)
        assert last_s - cut_s < FREEZE_S + FREEZE_SLACK_S
        swarm.network.heal()
        wait_until_sync(lambda: pid not in swarm[owner].rank_pids(), 40, "the rank of the old attempt is ended")
        swarm.converge()
        swarm.end(job, 3)
        done = swarm.wait_ended(job)
        assert (done["shell_exit_code"], done["attempt"], done["restarts"]) == (3, 2, 1)
        checker.verify()


def test_short_cut_freezes_nobody_for_long_and_costs_no_attempt(build_swarm):
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=1, gpus_per_rank=1, nodes=["n4"])
        swarm.wait_for_beats(job, 1)
        swarm.isolate("n4")
        wait_until_sync(lambda: swarm.statuses("n1")["n4"] != "alive", 15, "the cut is seen")
        swarm.network.heal()
        swarm.converge()
        beats = len(swarm.beats(job))
        wait_until_sync(lambda: len(swarm.beats(job)) > beats + 20, 15, "the rank goes on")
        swarm.end(job)
        done = swarm.wait_ended(job)
        assert (done["shell_exit_code"], done["attempt"]) == (0, 1)
        checker.verify()


@rarely
def test_one_link_cut_in_one_direction_disturbs_nobody(build_swarm):
    """n1 shepherds, n2 runs; n1 cannot reach n2 by itself, everybody else can."""
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=1, gpus_per_rank=1, nodes=["n2"])
        swarm.wait_for_beats(job, 1)
        (n1, n2) = swarm.hosts("n1", "n2")
        swarm.network.refuse(n1, [n2])
        swarm.watch(10.0)
        swarm.network.heal()
        swarm.end(job, 9)
        done = swarm.wait_ended(job)
        assert (done["shell_exit_code"], done["attempt"]) == (9, 1)
        assert gap_s(swarm.beats(job)) < UNDISTURBED_GAP_S
        checker.verify()


def test_split_swarm_runs_each_job_where_most_of_its_holders_are_and_is_one_again_afterwards(build_swarm):
    """Three machines and two.  A gang over both sides runs again on the larger one; a job of the smaller one, whose
    holders are mostly there, runs on; both sides take new jobs."""
    swarm = build_swarm(5)
    larger, smaller = ("n1", "n2", "n3"), ("n4", "n5")
    with Checker(swarm) as checker:
        filler = swarm.submit("n1", ranks=1, gpus_per_rank=1, nodes=["n2"])
        swarm.wait_for_beats(filler, 1)
        ticket = swarm.ticket_held_by("n1", *larger)
        gang = swarm.submit_with(ticket, "n1", ranks=2, gpus_per_rank=1, nodes=["n2", "n3", "n4"])
        assert {beat.node for beat in swarm.wait_for_beats(gang, 2)} == {"n3", "n4"}
        swarm.end(filler)
        swarm.wait_ended(filler)
        ticket = swarm.ticket_held_by("n4", *smaller)
        apart = swarm.submit_with(ticket, "n4", ranks=1, gpus_per_rank=1, nodes=["n5"])
        swarm.wait_for_beats(apart, 1)
        swarm.isolate(*smaller)
        again = swarm.wait_for_beats(gang, 2, attempt=2, timeout_s=45)
        assert {beat.node for beat in again} == {"n2", "n3"}
        wait_until_sync(lambda: swarm.statuses("n4")["n1"] == "failed", 20, "the smaller side is alone")
        for name in ("n1", "n4"):
            wait_ended_at(swarm, name, swarm.submit(name, limit_s=0.1))
        beats = len(swarm.beats(apart))
        wait_until_sync(lambda: len(swarm.beats(apart)) > beats + 20, 15, "the smaller side's rank goes on")
        assert gap_s(swarm.beats(apart)) < UNDISTURBED_GAP_S
        swarm.network.heal()
        swarm.converge()
        for job, code, attempt in ((gang, 4, 2), (apart, 5, 1)):
            swarm.end(job, code)
            done = swarm.wait_ended(job)
            assert (done["shell_exit_code"], done["attempt"]) == (code, attempt)
        checker.verify()


def test_quarter_of_all_packets_lost_fails_nobody_and_stops_no_job(build_swarm):
    swarm = build_swarm(5)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=2, gpus_per_rank=1, nodes=["n2", "n3", "n4", "n5"])
        swarm.wait_for_beats(job, 2)
        swarm.network.lose(25)
        swarm.watch(15.0)
        swarm.end(job, 8)
        done = swarm.wait_ended(job, 60)
        assert (done["shell_exit_code"], done["attempt"]) == (8, 1)
        swarm.network.heal()
        checker.verify()


def wait_ended_at(swarm, name, job):
    """As one machine tells it."""
    wait_until_sync(lambda: swarm.document(job, name)["state"] == "ended", 30, f"{job} ends for {name}")


@pytest.mark.parametrize("fate", ["is cut off", pytest.param("loses power", marks=rarely)])
def test_job_that_continues_in_isolation_never_starts_again_before_its_owner_answers(build_swarm, fate):
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=1, gpus_per_rank=1, nodes=["n3", "n4"], on_isolation="continue")
        owner = swarm.wait_for_beats(job, 1)[0].node
        if fate == "is cut off":
            swarm.isolate(owner)
        else:
            swarm[owner].cut_power()
        wait_until_sync(lambda: swarm.statuses("n1")[owner] == "failed", 20, "the owner is believed dead")
        threading.Event().wait(FREEZE_S * 1.5)  # longer than it takes to run a job again that may be paused
        assert swarm.attempts(job) == {1}
        assert swarm.document(job, "n1")["attempt"] == 1
        if fate == "is cut off":
            assert time.monotonic() - swarm.beats(job)[-1].at_s < UNDISTURBED_GAP_S, "the rank writes on"
            assert gap_s(swarm.beats(job)) < UNDISTURBED_GAP_S
            swarm.network.heal()
        else:
            swarm[owner].power_on()
            swarm.wait_for_beats(job, 1, attempt=2, timeout_s=40)
        swarm.converge()
        swarm.end(job, 1)
        done = swarm.wait_ended(job)
        assert (done["shell_exit_code"], done["attempt"]) == (1, 1 if fate == "is cut off" else 2)
        checker.verify()

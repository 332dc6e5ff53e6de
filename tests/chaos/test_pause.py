"""Agents stand still (SIGSTOP) and go on as if nothing had been."""

from contextlib import ExitStack

import pytest

from tests.chaos.checker import Checker

pytestmark = pytest.mark.root

PAUSE_S = 20.0
STALL_S = 6.0


@pytest.mark.chaos
def test_a_machine_of_which_every_process_stands_still_for_6_s_keeps_its_attempt(build_swarm):
    """As one does whose memory is being reclaimed, or whose hypervisor moves it: no other attempt can have started."""
    swarm = build_swarm(3)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=1, gpus_per_rank=1, nodes=["n3"])
        swarm.wait_for_beats(job, 1)
        with swarm["n3"].stalled():
            swarm.watch(STALL_S, may_fail=["n3"])
        swarm.converge()
        swarm.end(job, 3)
        done = swarm.wait_ended(job)
        assert (done["shell_exit_code"], done["attempt"]) == (3, 1)
        checker.verify()


@pytest.mark.acceptance
def test_three_of_ten_agents_that_stand_still_for_20_s_make_nobody_else_suspect_and_cost_no_attempt(build_swarm):
    """One of the three shepherds the job, the ranks are on others.  Three of thirty: see `test_long`."""
    swarm = build_swarm(10)
    frozen = ("n1", "n5", "n9")
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=2, gpus_per_rank=1, nodes=["n2", "n3"])
        swarm.wait_for_beats(job, 2)
        with ExitStack() as stack:
            for name in frozen:
                stack.enter_context(swarm[name].frozen_agent())
            swarm.watch(PAUSE_S, may_fail=frozen)
        swarm.converge()
        swarm.end(job, 3)
        done = swarm.wait_ended(job)
        assert (done["shell_exit_code"], done["attempt"]) == (3, 1)
        checker.verify()

"""Agents stand still (SIGSTOP) and go on as if nothing had been."""

from contextlib import ExitStack

import pytest

from tests.chaos.checker import Checker

pytestmark = [pytest.mark.root, pytest.mark.acceptance]

PAUSE_S = 20.0


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

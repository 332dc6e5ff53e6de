"""Eight jobs share the aggregators of two nodes: rounds are waited for as briefly as by a job alone."""

from contextlib import ExitStack
from statistics import median, quantiles

import pytest

from swarmsched.ids import JobId
from tests.elastic.test_outer import Gang, nodes  # noqa: F401  # a fixture
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.acceptance, pytest.mark.xdist_group("elastic-shared")]

JOBS = 8
STEP_S, EVERY, STEPS = 0.1, 32, 224


def figures(gangs):
    """The median of a step, and the 99th percentile of how much longer a step with a round is, of all ranks."""
    lines = [line for gang in gangs for rank in gang.ranks for line in rank.lines if line.get("step", 0) > EVERY]
    step_s = median(line["took_s"] for line in lines if line["step"] % EVERY)
    waits_s = [line["took_s"] - step_s for line in lines if line["step"] % EVERY == 0]
    return step_s, quantiles(waits_s, n=100)[-1], median(waits_s)


def test_eight_jobs_share_the_aggregators_of_two_nodes(tmp_path, template, nodes, capsys):  # noqa: F811
    given = {"STEPS": str(STEPS), "EVERY": str(EVERY), "PAUSE_S": str(STEP_S), "WIDTH": "32000"}
    both = [nodes(), nodes()]

    def started(number):
        job = JobId(f"{number:026d}")
        folder = tmp_path / str(job)
        folder.mkdir()
        return Gang(folder, template, [node.socket_of(job) for node in both], 2, SWARM_JOB_ID=job, **given)

    with started(1) as gang:
        gang.ends()
        alone = figures([gang])
    with ExitStack() as stack:
        gangs = [stack.enter_context(started(number)) for number in range(2, 2 + JOBS)]
        for gang in gangs:
            gang.ends()
    shared = figures(gangs)
    window_s = EVERY * shared[0]
    with capsys.disabled():
        print(
            f"\n  step {shared[0]:.4f} s, {shared[0] / alone[0]:.3f} of alone; a round is waited for {shared[2]:.3f} s "
            f"(alone {alone[2]:.3f}), p99 {shared[1]:.3f} s, {shared[1] / window_s:.1%} of the steps between two"
        )
    assert shared[0] < 1.2 * alone[0]
    assert shared[1] < 0.2 * window_s

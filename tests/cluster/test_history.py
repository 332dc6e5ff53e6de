"""What the swarm has learned of jobs that have ended: at every agent, on disk, and told to who has lost it."""

import sys
import time

import pytest

from swarmsched.gossip.state import SAVE_DELAY_S
from tests.agent.testing import wait_until_sync

pytestmark = [pytest.mark.cluster]


def known(agent):
    return agent.counted("swarm_history_jobs")


def test_ended_jobs_are_known_everywhere_and_after_a_restart_of_all(fresh_swarm):
    job = fresh_swarm[0].submit(sys.executable, "-c", "import time; time.sleep(1.5)", user="ada", gpus_per_rank=1)
    assert fresh_swarm[0].ended(job)["end_reason"] == "completed"
    wait_until_sync(lambda: all(known(agent) == 1 for agent in fresh_swarm), what="all have heard of its end")

    time.sleep(SAVE_DELAY_S + 2.0)
    for agent in fresh_swarm:
        agent.kill()
    for file in fresh_swarm[2].data_dir.glob("agent.db*"):
        file.unlink()
    for agent in fresh_swarm[:2]:
        agent.restart()
    assert [known(agent) for agent in fresh_swarm[:2]] == [1, 1]
    fresh_swarm[2].restart()
    wait_until_sync(lambda: known(fresh_swarm[2]) == 1, what="who has lost its disk hears of it from the others")

"""What documents repeat from the code stays equal to it."""

import re
from pathlib import Path

import pytest

from swarm_agent.checkpoints import commits, pack
from swarm_agent.supervision import tasksocket
from swarmsched.jobs.lifecycle import diagram

ROOT = Path(__file__).resolve().parents[2]


def test_picture_of_the_life_cycle_is_that_of_the_table():
    assert diagram() in (ROOT / "docs/architecture.md").read_text()


@pytest.mark.parametrize("module", [commits, pack, tasksocket])
def test_every_code_with_which_the_task_socket_refuses_is_documented(module):
    codes = set(re.findall(r'Refusal\(\s*"(\w+)"', Path(module.__file__).read_text()))
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/checkpoints.md").read_text()))
    assert codes
    assert codes <= documented, codes - documented

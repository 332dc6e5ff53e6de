"""What documents repeat from the code stays equal to it."""

import re
from pathlib import Path

import pytest

from swarm_agent.checkpoints import commits, pack
from swarm_agent.task import membership, reports, tasksocket
from swarmsched.jobs.lifecycle import diagram
from swarmsched.models.progress import FIGURES

ROOT = Path(__file__).resolve().parents[2]


def test_picture_of_the_life_cycle_is_that_of_the_table():
    assert diagram() in (ROOT / "docs/architecture.md").read_text()


@pytest.mark.parametrize("module", [commits, membership, pack, reports, tasksocket])
def test_every_code_with_which_the_task_socket_refuses_is_documented(module):
    codes = set(re.findall(r'Declined\(\s*"(\w+)"', Path(module.__file__).read_text()))
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/checkpoints.md").read_text()))
    assert codes
    assert codes <= documented, codes - documented


def test_every_figure_and_every_oddity_of_reports_is_documented():
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/reports.md").read_text()))
    assert {*FIGURES, *reports.ODDITIES} <= documented


def test_every_file_that_the_guide_to_the_code_names_is_there():
    text = (ROOT / "docs/code.md").read_text().partition("## Words of the house")[0]
    names = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`", text)) - {"step"}
    modules = {path.with_suffix("") for room in ("swarmsched", "agent") for path in (ROOT / room).rglob("*")}
    missing = [name for name in names if not any(str(module).endswith(f"/{name}") for module in modules)]
    assert missing == []


def test_remedies_name_commands_that_there_are():
    from swarm_client.cli import COMMANDS

    sources = [path for room in ("swarmsched", "agent", "client") for path in (ROOT / room).rglob("*.py")]
    named = {word for path in sources for word in re.findall(r"`swarm ([a-z]+)\b", path.read_text())}
    assert named - set(COMMANDS) == set()

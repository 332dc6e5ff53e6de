"""What documents repeat from the code stays equal to it."""

import re
from pathlib import Path

import pytest

from swarm_agent.checkpoints import commits, pack
from swarm_agent.task import membership, reports, tasksocket
from swarmsched.jobs.lifecycle import diagram
from swarmsched.models.progress import FIGURES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "ansible").rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"\b(?:docs|tests|ansible)/[\w./-]+\.[a-z0-9]+\b")
PATTERNS = {"docs/decisions/NNNN-what-was-chosen.md"}
SOURCES = ("swarmsched", "agent", "client", "tests", "ansible", ".ci")


def test_picture_of_the_life_cycle_is_that_of_the_table():
    assert diagram() in (ROOT / "docs/explanation/architecture.md").read_text()


@pytest.mark.parametrize("module", [commits, membership, pack, reports, tasksocket])
def test_every_code_with_which_the_task_socket_refuses_is_documented(module):
    codes = set(re.findall(r'Declined\(\s*"(\w+)"', Path(module.__file__).read_text()))
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/reference/checkpoints.md").read_text()))
    assert codes
    assert codes <= documented, codes - documented


def test_every_figure_and_every_oddity_of_reports_is_documented():
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/reference/reports.md").read_text()))
    assert {*FIGURES, *reports.ODDITIES} <= documented


def test_every_file_that_the_guide_to_the_code_names_is_there():
    text = (ROOT / "docs/explanation/code.md").read_text().partition("## In which order to read")[2]
    names = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`", text)) - {"step"}
    modules = {path.with_suffix("") for room in ("swarmsched", "agent", "client") for path in (ROOT / room).rglob("*")}
    missing = [name for name in names if not any(str(module).endswith(f"/{name}") for module in modules)]
    assert missing == []


def test_a_sentence_has_the_owner_that_the_guide_to_the_code_names():
    owners = re.findall(r'"`([^`]+)`": `([\w/]+\.py)`', (ROOT / "docs/explanation/code.md").read_text())
    assert len(owners) >= 10
    texts = {path: (ROOT / path).read_text() if (ROOT / path).exists() else "" for _, path in owners}
    assert [each for each in owners if each[0] not in texts[each[1]]] == []


def test_remedies_name_commands_that_there_are():
    from swarm_client.cli import COMMANDS

    sources = [path for room in ("swarmsched", "agent", "client") for path in (ROOT / room).rglob("*.py")]
    named = {word for path in sources for word in re.findall(r"`swarm ([a-z]+)\b", path.read_text())}
    assert named - set(COMMANDS) == set()


def anchors_of(page):
    """Every heading as a link names it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"[^\w\s-]", "", each).strip().lower() for each in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"\s+", "-", each) for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    missing = []
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        there = (page.parent / path) if path else page
        if ":" not in path and (not there.exists() or (anchor and anchor not in anchors_of(there))):
            missing.append(link)
    assert missing == []


def test_every_file_of_the_repository_that_is_named_exists():
    """In pages, comments, help texts and messages alike: users are sent there."""
    sources = [
        path for room in SOURCES for path in (ROOT / room).rglob("*") if path.suffix in {".py", ".sh", ".yml", ".j2"}
    ]
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in [*sources, *PAGES, ROOT / "Makefile", ROOT / "pyproject.toml"]
        for name in NAMED.findall(path.read_text(errors="replace"))
        if name not in PATTERNS
    }
    assert len(named) > 50
    assert sorted((where, name) for where, name in named if not (ROOT / name).exists()) == []

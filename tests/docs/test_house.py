"""Rules of the house that no linter knows."""

import ast
import dataclasses
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.docs import sentences

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("swarmsched", "agent", "client")
REWRITTEN_NEXT = ("swarmsched/negotiation",)
"""Rooms whose docstrings are not held to the rule of first sentences yet."""
OF_TWO_FRAMEWORKS = {"ReportCallback"}
"""Names that users import from one of two modules, each for a framework of its own."""


@cache
def modules():
    paths = [path for room in PRODUCT for path in sorted((ROOT / room).rglob("*.py"))]
    return [(path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def test_the_name_of_a_public_class_exists_once():
    places = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert len(places) > 500
    twice = {name: where for name, where in places.items() if len(where) > 1 and name not in OF_TWO_FRAMEWORKS}
    assert twice == {}


def helps():
    """Help texts, each with where it stands."""
    from swarm_agent.config import AgentConfig
    from swarm_agent.eventlog import KINDS as EVENTS
    from swarm_agent.http.problem import KINDS as PROBLEMS
    from swarm_client.cli import COMMANDS, COMMON, load_command
    from swarmsched.specification import FIELDS

    for name in COMMANDS:
        command = load_command(name)
        yield f"swarm {name}", command.summary
        yield f"swarm {name}", command.details
        yield from ((f"swarm {name} {option.names[-1]}", option.summary) for option in command.options)
    yield from ((option.key, option.summary) for option in COMMON)
    yield from ((field.name, field.metadata["key"].help_text) for field in dataclasses.fields(AgentConfig))
    yield from ((row.key, row.text) for row in FIELDS)
    yield from EVENTS.items()
    yield from ((code, kind.explanation) for code, kind in PROBLEMS.items())


def texts(kind):
    """Texts of a kind, each with where it stands."""
    if kind == "help":
        yield from helps()
    elif kind == "manual":
        for page in sentences.pages(ROOT / "docs"):
            yield from ((f"{page.relative_to(ROOT)}:{line}", text) for line, text in sentences.paragraphs(page))
    else:
        for path, tree in modules():
            if kind != "docstrings" or not str(path).startswith(REWRITTEN_NEXT):
                yield from ((f"{path}:{line}", text) for line, text in getattr(sentences, kind)(tree))


@pytest.mark.parametrize(("kind", "least"), [("docstrings", 2_000), ("messages", 300), ("help", 300), ("manual", 300)])
def test_a_first_sentence_names_its_object_in_25_words_at_most(kind, least):
    found = list(texts(kind))
    assert len(found) > least
    wrong = [f"{where} {mistake}" for where, text in found if text for mistake in sentences.mistakes(text)]
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("It has taken all.", True),
        ("Those that wait.", True),
        ("Its ranks run.", True),
        ("This node's name.", False),
        ("Those jobs wait.", False),
        (f"{'word ' * 25}end.", True),
        (f"{'word ' * 24}end. It goes on with a second sentence that may be as long as it likes.", False),
    ],
)
def test_what_counts_as_a_mistake(text, is_wrong):
    assert bool(list(sentences.mistakes(text))) is is_wrong

"""Rules of the house that no linter knows."""

import ast
import dataclasses
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import group_of
from tests.docs import sentences

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("swarmsched", "agent", "client")
OF_TWO_FRAMEWORKS = {"ReportCallback"}
"""Names that users import from one of two modules, each for a framework of its own."""
WRITES_ANYTHING = "swarmsched/simulator/breaks.py"
"""Breaks the rules of others so that somebody notices it."""
CONTAINERS = ("Sequence", "Mapping", "Iterable", "Collection", "Callable", "Iterator", "dict", "list", "set", "tuple")


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
            yield from ((f"{path}:{line}", text) for line, text in getattr(sentences, kind)(tree))


@pytest.mark.parametrize(("kind", "least"), [("docstrings", 3_000), ("messages", 300), ("help", 300), ("manual", 300)])
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


class Writers:
    """Who writes which attribute, as far as annotations and constructors tell of what class an object is."""

    def __init__(self):
        self.modules = [(str(path), tree) for path, tree in modules() if str(path) != WRITES_ANYTHING]
        found = defaultdict(list)
        for _, tree in self.modules:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(node)
        self.classes = {name: nodes[0] for name, nodes in found.items() if len(nodes) == 1}
        self.types = defaultdict(dict)  # class -> attribute -> class
        self.own = defaultdict(set)  # class -> attributes that it gives its objects
        for name, node in self.classes.items():
            self._learn(name, node)
        self.places = defaultdict(set)  # (class, attribute) -> modules
        for path, tree in self.modules:
            self._visit(path, tree, {})

    def _named(self, annotation):
        names = re.findall(r"\w+", ast.unparse(annotation)) if annotation is not None else []
        known = [name for name in names if name in self.classes]
        return known[0] if known and names[0] not in CONTAINERS else None

    def _learn(self, name, node):
        for child in node.body:
            if isinstance(child, ast.AnnAssign):
                self.own[name].add(child.target.id)
                self.types[name][child.target.id] = self._named(child.annotation)
            if isinstance(child, ast.FunctionDef) and any(
                ast.unparse(each) == "property" for each in child.decorator_list
            ):
                self.types[name][child.name] = self._named(child.returns)
        for function in ast.walk(node):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                scope = self._parameters(function)
                for target, value, annotation in _assignments(function):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        self.own[name].add(target.attr)
                        told = self._named(annotation) or self._type(value, scope)
                        self.types[name].setdefault(target.attr, told)

    def _parameters(self, function):
        arguments = (*function.args.args, *function.args.kwonlyargs)
        return {each.arg: self._named(each.annotation) for each in arguments}

    def _lineage(self, name):
        while name in self.classes:
            yield name
            bases = [ast.unparse(base) for base in self.classes[name].bases]
            name = next((base for base in bases if base in self.classes), None)

    def _type(self, value, scope):
        if isinstance(value, ast.Name):
            return scope.get(value.id)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            return value.func.id if value.func.id in self.classes else None
        if isinstance(value, ast.Attribute):
            lineage = self._lineage(self._type(value.value, scope))
            return next((found for each in lineage if (found := self.types[each].get(value.attr))), None)
        return None

    def _visit(self, path, node, scope):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self._visit(path, child, {"self": child.name})
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self._note(path, child, {**scope, **{k: v for k, v in self._parameters(child).items() if v}})
            else:
                self._visit(path, child, scope)

    def _note(self, path, function, scope):
        for target, value, _ in _assignments(function):
            if isinstance(target, ast.Name) and (known := self._type(value, scope)):
                scope[target.id] = known
        for target, _, _ in _assignments(function):
            if isinstance(target, ast.Attribute):
                lineage = [
                    each for each in self._lineage(self._type(target.value, scope)) if target.attr in self.own[each]
                ]
                if lineage:
                    self.places[lineage[-1], target.attr].add(path)


def _assignments(function):
    """(target, value or None, annotation or None) of each assignment in it."""
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value, node.annotation
        elif isinstance(node, ast.AugAssign):
            yield node.target, None, None
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)


def _pairs(target, value):
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value, None
        return
    values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else ()
    for index, each in enumerate(target.elts):
        yield from _pairs(each, values[index] if values else None)


def test_each_attribute_is_written_in_one_module():
    """Whoever else wants it changed calls a method: who reads the class knows all that can happen to it."""
    places = Writers().places
    assert len(places) > 1_500
    several = {f"{name}.{attribute}": sorted(paths) for (name, attribute), paths in places.items() if len(paths) > 1}
    assert several == {}


def test_a_file_whose_tests_share_something_is_of_a_group_and_each_group_is_one_file():
    """Made in each worker, what they share would cost more than tests that wait for one another."""
    shared = re.compile(r'scope="module"|\((.*, )?(swarm|template)(, .*|: Template.*)?\)( -> None)?:')
    groups = defaultdict(list)
    for room in ("cluster", "elastic"):
        for path in sorted((ROOT / "tests" / room).glob("test_*.py")):
            name = str(path.relative_to(ROOT))
            if shared.search(path.read_text(encoding="utf-8")):
                groups[group_of(name)].append(name)
    assert len(groups) > 12
    assert [names for names in groups.values() if len(names) > 1] == []

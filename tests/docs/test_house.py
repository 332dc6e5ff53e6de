"""Rules of the house that no linter knows."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("swarmsched", "agent", "client")
OF_TWO_FRAMEWORKS = {"ReportCallback"}
"""Names that users import from one of two modules, each for a framework of its own."""


def modules():
    for room in PRODUCT:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def test_the_name_of_a_public_class_exists_once():
    places = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert len(places) > 500
    twice = {name: where for name, where in places.items() if len(where) > 1 and name not in OF_TWO_FRAMEWORKS}
    assert twice == {}

"""The page on invariants names what there is."""

from pathlib import Path

from swarmsched.simulator.checks.liveness import all_rules
from swarmsched.simulator.checks.sometimes import NAMES
from swarmsched.simulator.checks.suite import all_checkers

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/explanation/invariants.md").read_text()


def test_every_checker_is_described():
    files = {type(checker).__module__.rpartition(".")[2] for checker in all_checkers().checkers}
    missing = {name for name in files - {"decided", "sometimes"} if f"`{name}.py`" not in PAGE}
    assert not missing


def test_every_rule_of_a_healed_swarm_is_described():
    assert all(f"\n| {rule.invariant} | " in PAGE for rule in all_rules(5, 60.0))


def test_every_rare_path_is_described_in_the_words_of_the_code():
    assert all(f"\n| {name} | {meaning} |" in PAGE for name, meaning in NAMES.items())

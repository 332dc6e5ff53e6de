"""Plans that people have changed by hand."""

import copy
import json

import pytest

from swarmsched.errors import ConfigError
from swarmsched.simulator import plan_check
from swarmsched.simulator.fault import FAULT_CLASSES
from swarmsched.simulator.fault_draw import DRAWS
from swarmsched.simulator.story import StoryOptions, StoryPlan, draw_plan
from swarmsched.simulator.workload import WORK_KINDS


def drawn(seed, **options):
    return json.loads(json.dumps(draw_plan(seed, StoryOptions(**options)).to_json()))


def one_of_each(items, key):
    return {item[key]: index for index, item in enumerate(items)}


def refusal(plan):
    with pytest.raises(ConfigError) as caught:
        StoryPlan.from_json(plan)
    return caught.value


def test_every_parameter_that_is_drawn_is_known_and_no_other():
    assert list(plan_check.FAULTS) == list(FAULT_CLASSES) == list(DRAWS)
    assert list(plan_check.WORK) == list(WORK_KINDS)
    seen = {}
    for seed in range(60):
        plan = drawn(seed, nodes=5)
        for key, items in (("class", plan["faults"]), ("work", plan["work"])):
            for item in items:
                assert seen.setdefault(item[key], item.keys()) == item.keys()
    known = {**plan_check.FAULTS, **plan_check.WORK}
    assert {kind: keys - {"at_s", "class", "work"} for kind, keys in seen.items()} == {
        kind: set(table) for kind, table in known.items()
    }


@pytest.fixture(scope="module")
def plan():
    """One with every class of faults and every kind of work."""
    for seed in range(100):
        found = drawn(seed, nodes=3, fault_classes=tuple(FAULT_CLASSES))
        if {each["work"] for each in found["work"]} == set(WORK_KINDS):
            return found
    raise AssertionError("no seed draws every kind of work")


def test_whatever_is_left_out_is_named_with_its_place(plan):
    count = 0
    for key, part in (("class", "faults"), ("work", "work")):
        for kind, index in one_of_each(plan[part], key).items():
            for name in plan[part][index]:
                changed = copy.deepcopy(plan)
                del changed[part][index][name]
                error = refusal(changed)
                assert (error.key, error.problem) == (f"{part}[{index}].{name}", "is missing")
                assert error.remedy.startswith("write one of" if name == key else f"{kind!r} needs {name}: ")
                count += 1
    for name in plan_check.PLAN:
        error = refusal({key: value for key, value in plan.items() if key != name})
        assert (error.key, error.problem) == (name, "is missing")
    assert count > 70


@pytest.mark.parametrize(
    ("part", "kind", "name", "value", "problem", "remedy"),
    [
        ("work", "submit", "priority", "high", "is 'high'", "priority of 'submit' is a whole number"),
        ("work", "submit", "does", "dance", "is 'dance'", "one of train, sleep"),
        ("work", "submit", "ranks", 0, "is 0", "a whole number from 1"),
        ("work", "submit", "node", "gpu1", "is 'gpu1'", "the name of a node, n000 for the first"),
        ("work", "submit", "exclude", ["n003"], "is ['n003']", "a list of names of nodes"),
        ("work", "submit", "on_isolation", "stop", "is 'stop'", "one of pause, continue"),
        ("faults", "crash", "at_s", "soon", "is 'soon'", "a number from 0"),
        ("faults", "crash", "duration_s", float("nan"), "is nan", "a number from 0"),
        ("faults", "crash", "duration_s", True, "is True", "a number from 0"),
        ("faults", "loss", "ratio", 30, "is 30", "a number from 0 to 1"),
        ("faults", "partition", "side", "n000", "is 'n000'", "a list of names of nodes"),
        ("faults", "crash", "class", "crahs", "is 'crahs'; did you mean 'crash'?", "write one of loss"),
    ],
)
def test_value_that_makes_no_sense_is_named_with_what_would(plan, part, kind, name, value, problem, remedy):
    changed = copy.deepcopy(plan)
    index = one_of_each(plan[part], "class" if part == "faults" else "work")[kind]
    changed[part][index][name] = value
    error = refusal(changed)
    assert (error.key, error.problem) == (f"{part}[{index}].{name}", problem)
    assert remedy in error.remedy


@pytest.mark.parametrize("document", [[], None, "plan", 3])
def test_what_is_no_plan_at_all_is_refused(document):
    assert "must be an object" in refusal(document).problem


def test_item_that_is_no_object_is_refused(plan):
    assert refusal({**plan, "faults": [3]}).key == "faults[0]"
    assert refusal({**plan, "nodes": 0}).remedy == "nodes of a plan is a whole number from 1 to 1000"

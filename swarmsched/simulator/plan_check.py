"""What a plan must have that comes from a file: people cut plans down and change them by hand.

A mistake is named with its place before the run; without this it would be met in the middle of a story, as a mistake of
ours.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmsched.api import Isolation, nearest
from swarmsched.errors import ConfigError
from swarmsched.simulator.fault import FAULT_CLASSES
from swarmsched.simulator.fault_draw import GPU_TROUBLES, START_FAILURES
from swarmsched.simulator.workload import JOB_KINDS, WORK_KINDS
from swarmsched.view import Elasticity

REMEDY = "give one of the `violations` that -o json prints; what is left out of it must be left out as a whole"
NODES_MAX, GPUS_MAX = 1_000, 64


@dataclass(frozen=True, slots=True)
class ValueKind:
    """What a value may be: in words, and whether one is, given the swarm's nodes."""

    words: str
    fits: Callable[[object, Sequence[str]], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object, least: float = 0, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _are_nodes(value: object, nodes: Sequence[str]) -> bool:
    return isinstance(value, list) and all(each in nodes for each in value)


def _are_numbers_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(_is_number(each) for each in value.values())


def _one_of(*names: str) -> ValueKind:
    return ValueKind(f"one of {', '.join(dict.fromkeys(names))}", lambda value, _: value in names)


NUMBER = ValueKind("a number", lambda value, _: _is_number(value))
AMOUNT = ValueKind("a number from 0", lambda value, _: _is_number(value) and value >= 0)  # type: ignore[operator]
POSITIVE = ValueKind("a number above 0", lambda value, _: _is_number(value) and value > 0)  # type: ignore[operator]
RATIO = ValueKind("a number from 0 to 1", lambda value, _: _is_number(value) and 0 <= value <= 1)  # type: ignore[operator]
WHOLE = ValueKind("a whole number from 0", lambda value, _: _is_whole(value))
COUNT = ValueKind("a whole number from 1", lambda value, _: _is_whole(value, 1))
FLAG = ValueKind("true or false", lambda value, _: isinstance(value, bool))
TEXT = ValueKind("text", lambda value, _: isinstance(value, str))
NODE = ValueKind("the name of a node, n000 for the first", lambda value, nodes: value in nodes)
NODES = ValueKind("a list of names of nodes, n000 for the first", _are_nodes)
NUMBERS = ValueKind("an object of numbers", lambda value, _: _are_numbers_by_name(value))

_LASTING = {"node": NODE, "duration_s": AMOUNT}
_WEATHER = {"ratio": RATIO, "duration_s": AMOUNT}
FAULTS: Mapping[str, Mapping[str, ValueKind]] = {
    "loss": _WEATHER,
    "duplicate": _WEATHER,
    "replay": _WEATHER,
    "delay": {"median_s": POSITIVE, "sigma": AMOUNT, "duration_s": AMOUNT},
    "clog": {"source": NODE, "destination": NODE, "duration_s": AMOUNT},
    "partition": {"side": NODES, "duration_s": AMOUNT},
    "one-way-partition": {"deaf": NODES, "duration_s": AMOUNT},
    "crash": _LASTING,
    "restart": {"node": NODE, "times": COUNT},
    "power-cut": _LASTING,
    "lost-host": {"node": NODE},
    "lost-holders": {"gap_s": POSITIVE, "duration_s": AMOUNT},
    "wipe": _LASTING,
    "pause": _LASTING,
    "slow-loop": {**_LASTING, "lag_s": POSITIVE},
    "slow-disk": {**_LASTING, "fsync_median_s": POSITIVE},
    "full-disk": _LASTING,
    "clock-drift": {**_LASTING, "rate": POSITIVE},
    "clock-jump": {"nodes": NODES, "by_s": NUMBER},
    "send-error": {**_LASTING, "to": NODES},
    "slow-planner": {**_LASTING, "plan_s": POSITIVE, "fails": FLAG},
    "gpu-trouble": {**_LASTING, "health": _one_of(*GPU_TROUBLES)},
    "failing-starts": {**_LASTING, "how": _one_of(*START_FAILURES)},
    "short-disk": _LASTING,
    "lost-files": _LASTING,
    "lost-database": _LASTING,
    "same-name": _LASTING,
    "lost-connection": {"which": WHOLE, "in_switch": FLAG},
    "killed-workers": {"which": WHOLE},
    "killed-shim": {"which": WHOLE},
}
ELASTICITY = _one_of(*(each.value for each in Elasticity))
WORK: Mapping[str, Mapping[str, ValueKind]] = {
    "submit": {
        "job": WHOLE,
        "node": NODE,
        "ranks": COUNT,
        "priority": ValueKind("a whole number", lambda value, _: _is_whole(value, -math.inf)),
        "exclude": NODES,
        "does": _one_of(*JOB_KINDS),
        "name": TEXT,
        "gpus": WHOLE,
        "cores": WHOLE,
        "memory_gib": WHOLE,
        "per_node": FLAG,
        "ranks_most": WHOLE,
        "nodes": NODES,
        "duration_s": AMOUNT,
        "checkpoint_period_s": AMOUNT,
        "time_limit_s": AMOUNT,
        "grace_s": AMOUNT,
        "max_restarts": WHOLE,
        "on_isolation": _one_of(*(each.value for each in Isolation)),
        "copies": WHOLE,
        "answers_lost": WHOLE,
    },
    "repeat": {"job": WHOLE},
    "cancel": {"job": WHOLE, "grace_s": AMOUNT},
    "scale": {"job": WHOLE, "ranks": COUNT, "ranks_most": WHOLE},
    "migrate": {"job": WHOLE, "avoid": NODES},
    "policy": {"node": NODE, "policy": TEXT, "parameters": NUMBERS, "elasticity": ELASTICITY},
    "recover": {},
}
PLAN: Mapping[str, ValueKind] = {
    "seed": ValueKind("a whole number", lambda value, _: _is_whole(value, -math.inf)),
    "nodes": ValueKind(f"a whole number from 1 to {NODES_MAX}", lambda value, _: _is_whole(value, 1, NODES_MAX)),
    "gpus_per_node": ValueKind(f"a whole number from 1 to {GPUS_MAX}", lambda value, _: _is_whole(value, 1, GPUS_MAX)),
    "heal_s": AMOUNT,
    "faults": ValueKind("a list of objects", lambda value, _: isinstance(value, list)),
    "work": ValueKind("a list of objects", lambda value, _: isinstance(value, list)),
}


def check_plan(document: object) -> None:
    """Raises `ConfigError` with the place of the first mistake as its key: `work[3].priority`."""
    if not isinstance(document, Mapping):
        raise ConfigError("plan", f"must be an object, not {type(document).__name__}", REMEDY)
    _check("", "a plan", document, PLAN, ())
    nodes = [f"n{index:03}" for index in range(document["nodes"])]
    for index, fault in enumerate(document["faults"]):
        _check_item(f"faults[{index}]", "class", fault, FAULTS, list(FAULT_CLASSES), nodes)
    for index, work in enumerate(document["work"]):
        _check_item(f"work[{index}]", "work", work, WORK, WORK_KINDS, nodes)


def _check_item(
    place: str,
    key: str,
    item: object,
    tables: Mapping[str, Mapping[str, ValueKind]],
    kinds: Sequence[str],
    nodes: Sequence[str],
) -> None:
    if not isinstance(item, Mapping):
        raise ConfigError(place, f"must be an object, not {type(item).__name__}", REMEDY)
    kind = item.get(key)
    if kind not in kinds:
        problem = f"is {kind!r}{nearest(str(kind), kinds)}" if key in item else "is missing"
        raise ConfigError(f"{place}.{key}", problem, f"write one of {', '.join(kinds)}")
    _check(f"{place}.", f"{kind!r}", item, {"at_s": AMOUNT, **tables[str(kind)]}, nodes)


def _check(
    place: str, whose: str, item: Mapping[str, Any], table: Mapping[str, ValueKind], nodes: Sequence[str]
) -> None:
    for name, kind in table.items():
        if name not in item:
            raise ConfigError(f"{place}{name}", "is missing", f"{whose} needs {name}: {kind.words}")
        if not kind.fits(item[name], nodes):
            shown = repr(item[name])[:80]
            raise ConfigError(f"{place}{name}", f"is {shown}", f"{name} of {whose} is {kind.words}")

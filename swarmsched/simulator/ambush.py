"""Faults that are timed by what users do, since drawn at random they hardly ever meet what they are for.

Some strike an agent while it places a job that it has just accepted, in the tenth of a second between the decision for
a place and the start of the ranks.  Some keep an agent away while ranks there commit checkpoints, until the gang runs
elsewhere: what it has to tell then comes from an attempt that is over.
"""

import random
from collections.abc import Collection, Sequence

from swarmsched.ids import NodeId
from swarmsched.simulator.fault import Fault
from swarmsched.simulator.workload import Work

AMBUSH_RATIO = 0.4  # of the runs
AMBUSHES_MAX = 3
PLACING_S = (0.005, 0.06)  # after the submit
AWAY_S = (12.0, 40.0)  # long enough for another shepherd
AMBUSH_CLASSES = ("crash", "power-cut", "pause")
TRAINING_RATIO = 0.6  # of the runs
TRAINING_S = (3.0, 12.0)  # after the submit
GONE_S = (16.0, 32.0)  # long enough for another attempt
TRAINING_CLASSES = ("pause", "partition")


def draw_ambushes(
    rng: random.Random, work: Sequence[Work], nodes: Sequence[NodeId], end_s: float, classes: Collection[str] | None
) -> list[Fault]:
    """Ambushes of one run; `classes` None: all may be drawn."""
    submits = [each for each in work if each.kind == "submit" and each.at_s < end_s]
    return [*_at_placing(rng, submits, end_s, classes), *_at_training(rng, submits, nodes, end_s, classes)]


def _at_placing(rng: random.Random, submits: list[Work], end_s: float, classes: Collection[str] | None) -> list[Fault]:
    """At the agents where jobs are submitted.

    Jobs that run none of their ranks there come first: such a gang outlives its shepherd.
    """
    kinds = [kind for kind in AMBUSH_CLASSES if classes is None or kind in classes]
    if not kinds or not submits or rng.random() >= AMBUSH_RATIO:
        return []
    rng.shuffle(submits)
    submits.sort(key=lambda each: not each.parameters["exclude"])
    struck = submits[: rng.randint(1, AMBUSHES_MAX)]
    return [
        _strike(rng, each, rng.choice(kinds), each.parameters["node"], (PLACING_S, AWAY_S), end_s) for each in struck
    ]


def _at_training(
    rng: random.Random, submits: Sequence[Work], nodes: Sequence[NodeId], end_s: float, classes: Collection[str] | None
) -> list[Fault]:
    """At some agent that is not asked to shepherd the job and perhaps has ranks of it."""
    kinds = [kind for kind in TRAINING_CLASSES if classes is None or kind in classes]
    trained = [each for each in submits if each.parameters["does"] == "train" and each.parameters["max_restarts"]]
    if not kinds or not trained or rng.random() >= TRAINING_RATIO:
        return []
    each = max(trained, key=lambda work: (bool(work.parameters["exclude"]), work.parameters["duration_s"]))
    others = [node for node in nodes if node != each.parameters["node"]] or list(nodes)
    return [_strike(rng, each, rng.choice(kinds), rng.choice(others), (TRAINING_S, GONE_S), end_s)]


def _strike(
    rng: random.Random, work: Work, kind: str, node: NodeId, spans_s: tuple[tuple[float, float], ...], end_s: float
) -> Fault:
    after_s, away_s = spans_s
    at_s = min(work.at_s + rng.uniform(*after_s), end_s)
    duration_s = round(min(rng.uniform(*away_s), max(0.001, end_s - at_s)), 3)
    where = {"side": [node]} if kind == "partition" else {"node": node}
    return Fault(round(at_s, 3), kind, {**where, "duration_s": duration_s})

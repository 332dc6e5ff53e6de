"""How far one submitted job wanders through the code: `python -m tests.benchmarks.walk`.

Three simulated nodes of four GPUs, and a gang from its submission to its end: one of four ranks with two GPUs each,
which so spans two of them; and an elastic one that somebody scales from two workers to four while it trains.  In every
step of a node whose event or effects name the job, each call from one file of the core into another is counted, and
each return.  Vocabulary (modules of types alone) and the codec are nowhere one goes to.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import swarmsched
from swarmsched.api import JobSpec, JobState
from swarmsched.commands import ScaleJob
from swarmsched.effects import Effect
from swarmsched.events import Event
from swarmsched.node.node import Node
from swarmsched.resources import Demand
from swarmsched.simulator.swarm import SimulatedSwarm
from swarmsched.simulator.tasks import RankPlan

CORE = Path(swarmsched.__file__).parent
ELSEWHERE = ("simulator", "replay", "wire")
VOCABULARY: tuple[str, ...] = (
    "api",
    "card",
    "checkpoint",
    "commands",
    "effects",
    "errors",
    "estimate",
    "events",
    "fields",
    "holders",
)
VOCABULARY += ("ids", "message", "record", "resources", "specification", "task", "view")
TRAINS_S, TRAINS_ON_S, SETTLES_S, ENDS_S = 1.0, 15.0, 10.0, 60.0


class Walk:
    """Steps that concern a job, and moves between files in them."""

    def __init__(self) -> None:
        self.steps = 0
        self.moves = 0
        self.visits: Counter[str] = Counter()

    def add(self, moves: Sequence[str]) -> None:
        """One step."""
        self.steps += 1
        self.moves += len(moves)
        self.visits.update(moves)


def _place(frame: FrameType) -> str:
    """The file of a frame, relative to the core; empty for one that is not counted."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(CORE):
        return ""
    relative = path.relative_to(CORE)
    is_counted = relative.parts[0] not in ELSEWHERE and relative.stem not in VOCABULARY
    return str(relative) if is_counted else ""


@contextmanager
def _watched(moves: list[str]) -> Iterator[None]:
    places: dict[Any, str] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event not in ("call", "return") or frame.f_back is None:
            return
        code, caller = frame.f_code, frame.f_back.f_code
        for each, one in ((code, frame), (caller, frame.f_back)):
            if each not in places:
                places[each] = _place(one)
        there = code if event == "call" else caller
        if places[code] and places[caller] and places[code] != places[caller]:
            moves.append(places[there])

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def walk(*, is_elastic: bool = False) -> Walk:
    """Of one job, from its submission to its end; of an elastic one through a change of its size."""
    seen: list[tuple[str, list[str]]] = []

    class Watched(Node):
        def step(self, event: Event, now_s: float) -> list[Effect]:
            moves: list[str] = []
            with _watched(moves):
                effects = super().step(event, now_s)
            seen.append((f"{event!r} {effects!r}", moves))
            return effects

    plan = RankPlan(TRAINS_ON_S if is_elastic else TRAINS_S)
    swarm = SimulatedSwarm(3, 4, 1, make_node=Watched, behaviour=lambda order, rank: plan)
    swarm.start()
    swarm.run_for(SETTLES_S)
    seen.clear()
    spec = JobSpec(("train",), ranks=2 if is_elastic else 4, demand=Demand(gpus=2), elastic=is_elastic)
    job_id = swarm.submit(next(iter(swarm.hosts)), spec)
    if is_elastic:
        swarm.run_until(lambda: swarm.record(job_id).state is JobState.RUNNING, ENDS_S)
        swarm.run_for(SETTLES_S / 5.0)
        swarm.ask(swarm.record(job_id).shepherd, ScaleJob(job_id, 4))
    swarm.run_until(lambda: swarm.record(job_id).is_ended, ENDS_S)
    result = Walk()
    for text, moves in seen:
        if job_id in text:
            result.add(moves)
    return result


def main() -> None:
    """Print it."""
    for name, found in (("rigid", walk()), ("elastic", walk(is_elastic=True))):
        steps = f"{found.steps} steps concern the job"
        print(f"{name}: {steps}; {len(found.visits)} files; {found.moves} moves between files")
        print(", ".join(f"{file} {count}" for file, count in found.visits.most_common(8)))


if __name__ == "__main__":
    main()

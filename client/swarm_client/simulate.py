"""Running many seeds of the simulator, one process per core, and adding up what came out.

The stories themselves are pure; processes, clocks and the name of the commit live here.  Results are taken in the
order of seeds, so that nothing but the speed depends on the number of processes.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
import subprocess
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType

from swarmsched.simulator.loop import Spins
from swarmsched.simulator.seeds import SeedOptions, SeedResult, Tally, judged
from swarmsched.simulator.story import Story, StoryPlan, draw_plan, run_story

GIT_TIMEOUT_S = 5.0
STEP_CPU_S = 30.0  # between two looks whether a story has gone on


@dataclass(slots=True)
class Timed:
    """A seed's result and the processor time of its story (what shrinking took is left out)."""

    result: SeedResult
    cpu_s: float


@dataclass(slots=True)
class Report:
    """What a run of the command found."""

    tally: Tally = field(default_factory=Tally)
    cpu_s: float = 0.0

    @property
    def events_per_s(self) -> float:
        """On one core, checkers included."""
        return self.tally.events / self.cpu_s if self.cpu_s else 0.0

    def add(self, timed: Timed) -> None:
        """One more seed."""
        self.tally.add(timed.result)
        self.cpu_s += timed.cpu_s


def run_seeds(
    seeds: Sequence[int], options: SeedOptions, jobs: int, *, stops_at_first: bool = False
) -> Iterator[Timed]:
    """Results in the order of seeds; the last one is the first with a violation, if that is wanted."""
    with contextlib.closing(_results(partial(_run, options), seeds, jobs)) as results:
        for timed in results:
            yield timed
            if stops_at_first and timed.result.violation is not None:
                return


def replay(plan: StoryPlan, options: SeedOptions) -> Timed:
    """Live through a plan that was printed before."""
    with _without_collector():
        started_s = time.process_time()
        story = run_story(plan, options.story.break_name, _moving)
        cpu_s = time.process_time() - started_s
    return Timed(judged(story, replace(options, watch=_moving)), cpu_s)


def report(results: Iterable[Timed]) -> Report:
    """All of them together."""
    total = Report()
    for timed in results:
        total.add(timed)
    return total


def commit_name() -> str:
    """The commit of this source tree, with `-dirty` if something was changed since; empty outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@contextlib.contextmanager
def _without_collector() -> Generator[None, None, None]:
    """A story makes millions of objects and hardly a cycle: looking for cycles is left until it is over."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _moving(story: Story) -> Generator[None, None, None]:
    """A loop without an end lets no virtual time pass; it is broken off by an error where it is.

    By processor time, so that a busy machine ends no story.
    """
    seen = -1

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal seen
        if story.events == seen:
            where = f", in {frame.f_code.co_qualname}, line {frame.f_lineno}" if frame is not None else ""
            raise Spins(f"no step came to an end in {STEP_CPU_S:g} s{where}")
        seen = story.events

    former = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, STEP_CPU_S, STEP_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, former)


def _run(options: SeedOptions, seed: int) -> Timed:
    return replay(draw_plan(seed, options.story), options)


def _results(run: partial[Timed], seeds: Sequence[int], jobs: int) -> Generator[Timed, None, None]:
    """Lazily, so that whoever stops early leaves no work behind."""
    if jobs == 1 or len(seeds) == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(seeds))) as pool:
        yield from pool.imap(run, seeds)

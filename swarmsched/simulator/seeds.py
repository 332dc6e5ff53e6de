"""One seed from its number to its result, and what many results come to."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from swarmsched.simulator.shrink import Shrinker
from swarmsched.simulator.story import StoryOptions, StoryPlan, StoryResult, Watch, draw_plan, run_story

SHRINK_RUNS_MAX = 120
SHRINK_EVENTS_MAX = 400_000


@dataclass(frozen=True, slots=True)
class SeedResult:
    """How a seed went.  `violation` is None if no invariant broke; its faults are those that it needs."""

    seed: int
    events: int
    digest: int
    violation: Mapping[str, Any] | None = None
    sometimes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SeedOptions:
    """As for a story; `shrinks` false leaves a failing plan as it was drawn, and `watch` is for each story."""

    story: StoryOptions = StoryOptions()  # noqa: RUF009  # frozen
    shrinks: bool = True
    watch: Watch = nullcontext


def run_seed(seed: int, options: SeedOptions = SeedOptions()) -> SeedResult:  # frozen
    """Draw the seed's plan, live through it and, if an invariant breaks, find out what that takes."""
    return judged(run_story(draw_plan(seed, options.story), options.story.break_name, options.watch), options)


def judged(result: StoryResult, options: SeedOptions) -> SeedResult:
    """What is told of a story; one that failed is lived through again and again with less and less."""
    violation = None
    if result.failure is not None:
        violation = describe(_shrunk(result, options) if options.shrinks else result)
    return SeedResult(result.plan.seed, result.events, result.digest, violation, result.sometimes)


def _shrunk(result: StoryResult, options: SeedOptions) -> StoryResult:
    def trial(plan: StoryPlan) -> StoryResult:
        return run_story(plan, options.story.break_name, options.watch)

    return Shrinker(trial, SHRINK_RUNS_MAX, SHRINK_EVENTS_MAX).shrink(result)


def describe(result: StoryResult) -> dict[str, Any]:
    """A violation as JSON values."""
    assert result.failure is not None
    return {
        "seed": result.plan.seed,
        "invariant": result.failure.invariant,
        "time_s": round(result.failure.time_s, 6),
        "message": result.failure.message,
        "nodes": result.plan.nodes,
        "gpus_per_node": result.plan.gpus_per_node,
        "heal_s": result.plan.heal_s,
        "faults": [fault.to_json() for fault in result.plan.faults],
        "work": [work.to_json() for work in result.plan.work],
        "retained_jobs": result.plan.retained_jobs,
        "machines": list(result.plan.machines),
        "recent": list(result.failure.recent),
        "trails": list(result.failure.trails),
    }


@dataclass(slots=True)
class Tally:
    """Results of many seeds, added up."""

    seeds: int = 0
    events: int = 0
    violations: list[Mapping[str, Any]] = field(default_factory=list)
    sometimes: dict[str, int] = field(default_factory=dict)

    def add(self, result: SeedResult) -> None:
        """One more; in the order of seeds, so that the sum does not depend on who was faster."""
        self.seeds += 1
        self.events += result.events
        if result.violation is not None:
            self.violations.append(result.violation)
        for name, count in result.sometimes.items():
            self.sometimes[name] = self.sometimes.get(name, 0) + count


def tally(results: Iterable[SeedResult]) -> Tally:
    """All of them."""
    total = Tally()
    for result in results:
        total.add(result)
    return total

"""Cutting a failing plan down to what its failure needs.

Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002): leave out ever
smaller parts of the list of faults and work as long as the same invariant still breaks.  Each trial is a whole story,
so there is a budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from swarmsched.simulator.fault import Fault
from swarmsched.simulator.story import StoryPlan, StoryResult
from swarmsched.simulator.workload import Work

Item = Fault | Work
Trial = Callable[[StoryPlan], StoryResult]


class Shrinker:
    """Looks for a smaller plan of the same seed that breaks the same invariant."""

    def __init__(self, trial: Trial, runs_max: int, events_max: int) -> None:
        self._trial = trial
        self.runs_left = runs_max
        self.events_left = events_max

    def shrink(self, failed: StoryResult) -> StoryResult:
        """The smallest failing result that was found within the budget; `failed` itself if none is smaller."""
        assert failed.failure is not None
        best = self._drop_what_came_later(failed)
        count = 2
        while len(items_of(best.plan)) > 1 and count <= 2 * len(items_of(best.plan)) and self._has_budget:
            smaller = self._without_some_part(best, count)
            if smaller is not None:
                best, count = smaller, max(2, count - 1)
            elif count >= len(items_of(best.plan)):
                break
            else:
                count = min(2 * count, len(items_of(best.plan)))
        return best

    @property
    def _has_budget(self) -> bool:
        return self.runs_left > 0 and self.events_left > 0

    def _drop_what_came_later(self, failed: StoryResult) -> StoryResult:
        """What had not happened when the invariant broke cannot have caused it."""
        assert failed.failure is not None
        early = [item for item in items_of(failed.plan) if item.at_s <= failed.failure.time_s]
        return self._try(failed, early) or failed

    def _without_some_part(self, best: StoryResult, count: int) -> StoryResult | None:
        items = items_of(best.plan)
        size = max(1, len(items) // count)
        for start in range(0, len(items), size):
            if not self._has_budget:
                return None
            smaller = self._try(best, [*items[:start], *items[start + size :]])
            if smaller is not None:
                return smaller
        return None

    def _try(self, best: StoryResult, items: Sequence[Item]) -> StoryResult | None:
        """The result of a plan with these items, if it fails in the same way."""
        assert best.failure is not None
        if len(items) == len(items_of(best.plan)):
            return None
        result = self._trial(with_items(best.plan, items))
        self.runs_left -= 1
        self.events_left -= result.events
        is_same = result.failure is not None and result.failure.invariant == best.failure.invariant
        return result if is_same else None


def items_of(plan: StoryPlan) -> list[Item]:
    """Faults and work together, in order of time."""
    return sorted([*plan.faults, *plan.work], key=lambda item: item.at_s)


def with_items(plan: StoryPlan, items: Sequence[Item]) -> StoryPlan:
    """The plan with these faults and this work instead."""
    faults = tuple(item for item in items if isinstance(item, Fault))
    work = tuple(item for item in items if isinstance(item, Work))
    return replace(plan, faults=faults, work=work)

"""All liveness rules together, for a swarm of a size and the jobs that it was given."""

from collections.abc import Callable

from swarmsched.simulator.checks.healed_jobs import (
    AllEnded,
    Ends,
    FormerHoldersKnow,
    NothingStuck,
    OneShepherd,
    QueueEmpties,
    TopIsPlaced,
)
from swarmsched.simulator.checks.healed_placed import PlacedGoOn, WorldsSettle
from swarmsched.simulator.checks.healed_views import DeadAreKnown, EqualMembership, EqualState, LiveStayKnown
from swarmsched.simulator.checks.healing import Rule


def all_rules(node_count: int, jobs_bound_s: float, ends: Callable[[], Ends] = dict) -> list[Rule]:
    """Invariants 12 to 17, and that every accepted job has ended within `jobs_bound_s` and left nothing."""
    return [
        EqualMembership(),
        EqualState(node_count),
        DeadAreKnown(node_count),
        LiveStayKnown(),
        OneShepherd(),
        FormerHoldersKnow(),
        NothingStuck(),
        TopIsPlaced(),
        QueueEmpties(),
        PlacedGoOn(),
        WorldsSettle(),
        AllEnded(jobs_bound_s, ends),
    ]

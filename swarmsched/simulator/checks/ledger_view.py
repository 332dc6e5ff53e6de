"""How checkers read the room `ledger`: the writes tell what changed, the ledger's entries what stands."""

from collections.abc import Iterator, Sequence

from swarmsched.effects import Effect, Persist
from swarmsched.ids import JobId
from swarmsched.ledger.booking import BOOKING_PREFIX, FENCE_PREFIX, ROOM
from swarmsched.ledger.ledger import Ledger
from swarmsched.simulator.host import Host

Key = tuple[JobId, int]
"""(job id, attempt)."""


def ledger_of(host: Host) -> Ledger:
    """The ledger of a machine whose agent runs."""
    assert host.node is not None
    return host.node.ledger


def changed_bookings(effects: Sequence[Effect]) -> Iterator[tuple[Key, bool]]:
    """Bookings that a step has written, in order; false for one that was deleted."""
    for effect in effects:
        if isinstance(effect, Persist) and effect.room == ROOM and effect.key.startswith(BOOKING_PREFIX):
            job_id, attempt = effect.key.removeprefix(BOOKING_PREFIX).split("/")
            yield (JobId(job_id), int(attempt)), effect.value is not None


def dropped_fences(effects: Sequence[Effect]) -> Iterator[JobId]:
    """Jobs of which a step has forgotten epoch and released attempt."""
    for effect in effects:
        if not isinstance(effect, Persist) or effect.room != ROOM or effect.value is not None:
            continue
        if effect.key.startswith(FENCE_PREFIX):
            yield JobId(effect.key.removeprefix(FENCE_PREFIX))

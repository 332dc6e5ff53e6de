"""How checkers read the room `ledger`: by what is written there, and not by what a ledger says of itself."""

from collections.abc import Iterator, Mapping, Sequence

from swarmsched.effects import Effect, Persist
from swarmsched.ids import JobId, TaskKey
from swarmsched.ledger.booking import BOOKING_PREFIX, FENCE_PREFIX, ROOM, Booking
from swarmsched.ledger.ledger import Ledger
from swarmsched.simulator.host import Host
from swarmsched.wire.codec import decode_value


def ledger_of(host: Host) -> Ledger:
    """The ledger of a machine whose agent runs."""
    assert host.node is not None
    return host.node.ledger


def changed_bookings(effects: Sequence[Effect]) -> Iterator[tuple[TaskKey, Booking | None]]:
    """Bookings that a step has written, in order; None for one that was deleted."""
    for effect in effects:
        if isinstance(effect, Persist) and effect.room == ROOM and effect.key.startswith(BOOKING_PREFIX):
            key = TaskKey.read(effect.key.removeprefix(BOOKING_PREFIX))
            yield key, None if effect.value is None else decode_value(Booking, effect.value)


def stored_bookings(entries: Mapping[str, bytes]) -> list[Booking]:
    """What a disk has."""
    return [decode_value(Booking, value) for key, value in entries.items() if key.startswith(BOOKING_PREFIX)]


def dropped_fences(effects: Sequence[Effect]) -> Iterator[JobId]:
    """Jobs of which a step has forgotten epoch and released attempt."""
    for effect in effects:
        if not isinstance(effect, Persist) or effect.room != ROOM or effect.value is not None:
            continue
        if effect.key.startswith(FENCE_PREFIX):
            yield JobId(effect.key.removeprefix(FENCE_PREFIX))

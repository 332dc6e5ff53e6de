"""Rumours: news of members, sent a bounded number of times and then forgotten (SWIM, section 4.1)."""

import math
from operator import attrgetter

from swarmsched.gossip.message import Update
from swarmsched.ids import NodeId
from swarmsched.wire.codec import encode_value

SENDS_FACTOR = 4
SENDS_MIN = 8


def rumour_sends(member_count: int) -> int:
    """How often one piece of news is sent: 4 x ceil(log10(N + 1)), never below 8."""
    return max(SENDS_MIN, SENDS_FACTOR * math.ceil(math.log10(member_count + 1)))


class _Rumour:
    __slots__ = ("sends", "size_bytes", "update")

    def __init__(self, update: Update) -> None:
        self.update = update
        self.size_bytes = len(encode_value(Update, update))
        self.sends = 0


class RumourQueue:
    """At most one rumour per member (the newest replaces the older), so members bound the queue."""

    def __init__(self) -> None:
        self._rumours: dict[NodeId, _Rumour] = {}

    def __len__(self) -> int:
        return len(self._rumours)

    def __bool__(self) -> bool:
        return bool(self._rumours)

    def put(self, update: Update) -> None:
        """Spread this; an older rumour of the same member is dropped."""
        self._rumours.pop(update.node, None)
        self._rumours[update.node] = _Rumour(update)

    def drop(self, node: NodeId) -> None:
        """Stop spreading news of a member."""
        self._rumours.pop(node, None)

    def take(self, room_bytes: int, sends_limit: int) -> tuple[Update, ...]:
        """Up to 64 rumours that fit into `room_bytes`, least sent first; each counts as sent once more."""
        if not self._rumours:
            return ()
        waiting = (
            sorted(self._rumours.values(), key=attrgetter("sends"))
            if len(self._rumours) > 1
            else [*self._rumours.values()]
        )
        taken: list[Update] = []
        for rumour in waiting:
            if len(taken) == RUMOURS_PER_PACKET or room_bytes < SMALLEST_UPDATE_BYTES:
                break
            if rumour.size_bytes > room_bytes:
                continue
            room_bytes -= rumour.size_bytes
            taken.append(rumour.update)
            rumour.sends += 1
            if rumour.sends >= sends_limit:
                del self._rumours[rumour.update.node]
        return tuple(taken)


RUMOURS_PER_PACKET = 64
SMALLEST_UPDATE_BYTES = 40

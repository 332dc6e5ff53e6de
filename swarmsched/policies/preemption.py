"""Which running jobs must make room for one that ranks higher, planned for the whole gang.

Victims come from the end of the order, and none is taken in vain: without enough of them for the whole demand nobody
is stopped, and whoever turns out not to be needed is spared.
"""

from collections.abc import Sequence

from swarmsched.policies.placement import place_in
from swarmsched.policies.room import Room
from swarmsched.resources import Share
from swarmsched.view import JobView

VICTIMS_MAX = 64


def choose_victims(
    taker: JobView, room: Room, running: Sequence[JobView]
) -> tuple[tuple[Share, ...], tuple[JobView, ...]] | None:
    """Where the taker fits once some of `running` (the first to be stopped first) have stopped, and who that is."""
    chosen: list[JobView] = []
    later = room.copy()
    for victim in running[:VICTIMS_MAX]:
        chosen.append(victim)
        later.release(victim.shares, victim.demand)
        if place_in(later, taker) is not None:
            break
    else:
        return None
    for spared in chosen[:-1]:  # those stopped first may have freed the wrong places
        fewer = [victim for victim in chosen if victim is not spared]
        if _place_without(taker, room, fewer) is not None:
            chosen = fewer
    shares = _place_without(taker, room, chosen)
    assert shares is not None, "the last victim made it fit, and nobody was spared who was needed"
    return shares, tuple(chosen)


def _place_without(taker: JobView, room: Room, victims: Sequence[JobView]) -> tuple[Share, ...] | None:
    later = room.copy()
    for victim in victims:
        later.release(victim.shares, victim.demand)
    return place_in(later, taker)

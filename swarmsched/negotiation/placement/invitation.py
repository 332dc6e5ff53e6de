"""Who hears at once that something is free here: the shepherds whose jobs are first in line for it.

Gossip tells everybody in seconds; a GPU that idles so long beside a queue is lost.  An owner therefore tells a few
shepherds itself, in the order of the queue as it knows it, and goes on down the line while what it has stays free: its
queue is out of date by seconds, and whoever it asks may have nothing left that waits.  Whoever is invited need not wait
for jobs that rank before its own and would fit as well: those were asked before, or wait no more.
"""

from collections.abc import Callable, Iterable

from swarmsched.ids import NodeId
from swarmsched.resources import Free, ranks_that_fit
from swarmsched.view import JobView

AT_ONCE = 3
AGAIN_S = 0.2
AGAIN_S_MAX = 5.0
LOOKED_AT_MAX = 500


class Inviter:
    """One owner's invitations."""

    def __init__(self, me: NodeId) -> None:
        self._me = me
        self._asked: dict[NodeId, None] = {}  # since something came free, or since all were asked
        self._pause_s = AGAIN_S
        self.next_deadline_s = float("inf")

    def freed(self, now_s: float) -> None:
        """Something has come free: begin at the head of the line."""
        self._asked.clear()
        self._pause_s = AGAIN_S
        self.next_deadline_s = now_s

    def queued(self, now_s: float) -> None:
        """Others have jobs that wait, while something is free here."""
        self.next_deadline_s = min(self.next_deadline_s, now_s + self._pause_s)

    def due(
        self, queue: Iterable[JobView], free: Free, can_act: Callable[[JobView, float], bool], now_s: float
    ) -> list[NodeId]:
        """The next shepherds to invite; nobody when nothing is free or nobody waits for it."""
        self.next_deadline_s = float("inf")
        invited: list[NodeId] = []
        is_wanted = False
        for _, job in zip(range(LOOKED_AT_MAX), queue, strict=False):
            shepherd = job.card.shepherd
            if not can_act(job, now_s) or not self._is_for(job, free):
                continue
            is_wanted = True
            if shepherd not in self._asked:
                self._asked[shepherd] = None
                invited.append(shepherd)
                if len(invited) == AT_ONCE:
                    break
        if is_wanted:
            if not invited:  # all know: once more from the head, after a longer while each time
                self._asked.clear()
                self._pause_s = min(AGAIN_S_MAX, 2.0 * self._pause_s)
            self.next_deadline_s = now_s + self._pause_s
        return invited

    def _is_for(self, job: JobView, free: Free) -> bool:
        card = job.card
        is_allowed = (not card.nodes or self._me in card.nodes) and self._me not in card.exclude
        return is_allowed and ranks_that_fit(free, card.demand) > 0

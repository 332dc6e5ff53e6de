"""Jobs that have ended, wherever in the swarm: what policies learn lengths from.

The last version of a card, which every agent hears anyway, tells what became of its job.  Each agent keeps the same of
them, in whatever order they came: at most `HISTORY_LIMIT`, of one user `OF_USER_MOST`; where there is no more room, the
user who has the most gives up the oldest.  So nobody's jobs, however many, push out those of others.
"""

import hashlib
import random
from bisect import insort
from collections.abc import Mapping
from contextlib import suppress

from swarmsched.api import JobState
from swarmsched.card import JobCard, decode_card
from swarmsched.errors import RemoteProtocolError
from swarmsched.ids import JobId
from swarmsched.view import HISTORY_LIMIT, EndedJob

OF_USER_MOST = HISTORY_LIMIT // 4
HISTORY_ROOM = "history"
_Place = tuple[float, JobId]


class History:
    """See above.  Invariant: what is kept depends on what was noted, and not on the order."""

    def __init__(self) -> None:
        self._kept: dict[JobId, tuple[EndedJob, bytes]] = {}
        self._by_user: dict[str, list[_Place]] = {}  # ascending
        self._ended: tuple[EndedJob, ...] | None = ()  # as asked for last
        self._digest = 0
        self._changed: dict[JobId, None] = {}  # of which the disk does not know

    def __len__(self) -> int:
        return len(self._kept)

    def note(self, card: JobCard, body: bytes) -> None:
        """Note the card, as it travels, of a job that has ended. One that never ran, or of which nobody has told when
        it ended, teaches nothing."""
        if card.state is not JobState.ENDED or not card.ended_utc_s or not card.first_started_utc_s:
            return
        known = self._kept.get(card.job_id)
        if known is not None:
            if (known[0].card.stamp, known[1]) >= (card.stamp, body):
                return
            self._drop(known[0])
        self._kept[card.job_id] = (EndedJob(card, card.has_completed, card.ended_utc_s), body)
        insort(self._by_user.setdefault(card.user, []), (card.ended_utc_s, card.job_id))
        if len(self._by_user[card.user]) > OF_USER_MOST:
            self._drop_oldest(card.user)
        if len(self._kept) > HISTORY_LIMIT:
            self._drop_oldest(min(self._by_user, key=lambda user: (-len(self._by_user[user]), user)))
        self._ended = None
        self._changed[card.job_id] = None

    @property
    def ended(self) -> tuple[EndedJob, ...]:
        """All of them, the oldest first."""
        if self._ended is None:
            kept = [each for each, _ in self._kept.values()]
            self._ended = tuple(sorted(kept, key=lambda each: (each.ended_utc_s, each.card.job_id)))
            told = [f"{each.card.job_id} {each.card.stamp}" for each in self._ended]
            self._digest = int.from_bytes(hashlib.blake2b("\n".join(told).encode(), digest_size=6).digest())
        return self._ended

    @property
    def digest(self) -> int:
        """The same for the same jobs, and never 0."""
        assert self.ended is not None
        return 2 * self._digest + 1

    def bodies(self, budget_bytes: int, overhead_bytes: int, rng: random.Random) -> list[bytes]:
        """As many as go into the budget: all of them, or some from a random one on."""
        bodies = [self._kept[each.card.job_id][1] for each in self.ended]
        if sum([len(body) + overhead_bytes for body in bodies]) > budget_bytes:
            first = rng.randrange(len(bodies))
            bodies = bodies[first:] + bodies[:first]
        taken = []
        for body in bodies:
            budget_bytes -= len(body) + overhead_bytes
            if budget_bytes < 0:
                break
            taken.append(body)
        return taken

    def take_changes(self) -> list[tuple[JobId, bytes | None]]:
        """Jobs that have come (as they travel) or gone (None) since this was last asked: what a disk lacks."""
        changed, self._changed = self._changed, {}
        return [(job_id, self._kept[job_id][1] if job_id in self._kept else None) for job_id in changed]

    @property
    def has_changes(self) -> bool:
        """True when `take_changes` has something."""
        return bool(self._changed)

    def restore(self, stored: Mapping[str, bytes]) -> None:
        """What an earlier life has kept; what nobody can read of it is left out."""
        for body in stored.values():
            with suppress(RemoteProtocolError):
                self.note(decode_card(body), body)
        self._changed.clear()

    def _drop_oldest(self, user: str) -> None:
        _, job_id = self._by_user[user][0]
        self._drop(self._kept[job_id][0])

    def _drop(self, job: EndedJob) -> None:
        del self._kept[job.card.job_id]
        self._changed[job.card.job_id] = None
        places = self._by_user[job.card.user]
        places.remove((job.ended_utc_s, job.card.job_id))
        if not places:
            del self._by_user[job.card.user]

    def validate(self) -> None:
        """Re-derive the cross-references."""
        places = [(user, *place) for user, found in self._by_user.items() for place in found]
        assert sorted(places) == sorted(
            [(each.card.user, each.ended_utc_s, job_id) for job_id, (each, _) in self._kept.items()]
        )
        assert len(self._kept) <= HISTORY_LIMIT
        assert all(found == sorted(found) and len(found) <= OF_USER_MOST for found in self._by_user.values())

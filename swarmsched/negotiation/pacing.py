"""When a job may be placed again, where not, and under which number: longer waits after each failure.

Attempts that found no place back off for moments, so that rival shepherds do not meet again and again.  A gang that was
restarted waits for seconds: whatever broke it may break it again.  For the same reason nobody joins a running gang
for a while after newcomers of it have failed, or members.  A script of which each newcomer parts is given up at last.
"""

import random

from swarmsched.ids import NodeId
from swarmsched.ledger.message import Refusal
from swarmsched.record import JobRecord
from swarmsched.resources import Share

BACKOFF_S = 0.05
BACKOFF_S_MAX = 2.0
BACKOFF_ALONE_S = 0.2
AVOID_NODE_S = 15.0  # doubled with each further failure there
AVOID_NODE_S_MAX = 60.0
FILES_AWAY_S = 30.0  # three times as long as it takes until that is told again
ATTEMPTS_SKIPPED_MAX = 1_024
STARVING_ATTEMPTS = 5
RESTART_DELAY_S = 1.0  # doubled with each restart but the first, which comes at once
RESTART_DELAY_S_MAX = 60.0
SETBACKS_FORGOTTEN_S = 600.0
REFUSALS_MOST = 5  # in a row, after which no other newcomer is tried


class Pacing:
    """Volatile, but for the numbers, of which the record knows the last one that was decided."""

    def __init__(self, record: JobRecord, rng: random.Random) -> None:
        self._rng = rng
        self._failed_attempts = 0  # since the last success
        self.last_attempt = record.attempt  # that has begun: numbers are never used twice
        self.released = (0, 0)  # attempt, and part of it, up to which owners have said that they refuse holds
        self._skipped_attempts = 0
        self._may_try_after_s = 0.0
        self.avoided: dict[NodeId, float] = {}  # node -> until when
        self._avoidances: dict[NodeId, int] = {}  # how often it has failed there
        self._setbacks = 0
        self._files_away_until_s = 0.0
        self.may_join_after_s = float("-inf")

    @property
    def may_try_after_s(self) -> float:
        """Until when nothing new of it is begun."""
        return max(self._may_try_after_s, self._files_away_until_s)

    @property
    def has_failed_often(self) -> bool:
        """True where the job found no place again and again."""
        return self._failed_attempts >= STARVING_ATTEMPTS

    def next_number(self, record: JobRecord) -> int:
        """Of a new attempt: above all that were used, or may have been."""
        used = (self.last_attempt, record.attempt, record.attempts_in_doubt, self.released[0])
        return max(used) + 1 + self._skipped_attempts

    def began(self, number: int) -> None:
        """An attempt of that number is under way: it is used."""
        self.last_attempt = number

    def note_released(self, attempt: int, part: int) -> None:
        """An owner says that up to there it refuses holds."""
        self.released = max(self.released, (attempt, part))

    def succeeded(self) -> None:
        """All owners have launched it."""
        self._failed_attempts = self._skipped_attempts = 0

    def failed(self, refusal: Refusal, refusing_node: NodeId | None, now_s: float, *, was_alone: bool = False) -> None:
        """The job found no place; `refusing_node` is not asked again at once, unless its answer told what it has
        left.

        A job that asked one owner alone was in nobody's way and others in its own once: no reason to wait for long.
        Nor is it one that an earlier life went further than the record says.
        """
        is_number_used = refusal is Refusal.RELEASED_ATTEMPT
        if is_number_used and self.released[0] < self.last_attempt:
            # The owner does not tell up to which, being of 0.1.0: leap ahead instead of counting up.
            self._skipped_attempts = min(ATTEMPTS_SKIPPED_MAX, 2 * self._skipped_attempts + 1)
        if is_number_used or (was_alone and refusal is Refusal.DOES_NOT_FIT):
            self._may_try_after_s = now_s + self._rng.uniform(0.0, BACKOFF_ALONE_S)
            return
        self._failed_attempts += 1
        self.back_off(now_s)
        if refusing_node is not None and refusal is not Refusal.DOES_NOT_FIT:
            self.avoided[refusing_node] = now_s + BACKOFF_S_MAX

    def back_off(self, now_s: float) -> None:
        """Wait for a moment that others do not wait for as well."""
        longest = min(BACKOFF_S_MAX, BACKOFF_S * 2 ** min(self._failed_attempts, 10))
        self._may_try_after_s = now_s + self._rng.uniform(0.0, longest)

    def files_looked(self, now_s: float, *, is_away: bool) -> None:
        """The files that the job ships can be had, or cannot for now."""
        self._files_away_until_s = now_s + FILES_AWAY_S if is_away else 0.0

    def rests_until_s(self, now_s: float) -> float:
        """Until when no other attempt follows, where that is longer than rivals wait for one another; 0: it is not."""
        return self.may_try_after_s if self.may_try_after_s > now_s + BACKOFF_S_MAX else 0.0

    def avoided_at(self, time_s: float) -> list[NodeId]:
        """Nodes that are still avoided then."""
        return [node for node, until_s in self.avoided.items() if until_s > time_s]

    def avoid(self, node: NodeId, now_s: float) -> None:
        """A node could not start its part of the gang, or reach rank 0."""
        count = self._avoidances.get(node, 0)
        if now_s > self.avoided.get(node, now_s) + SETBACKS_FORGOTTEN_S:
            count = 0
        self._avoidances[node] = count + 1
        self.avoided[node] = now_s + min(AVOID_NODE_S_MAX, AVOID_NODE_S * 2.0 ** min(count, 10))

    def restarted(self, restarts: int, now_s: float) -> None:
        """The gang was given up, for that many times by now."""
        self._may_try_after_s = now_s + (_delay_s(restarts - 2) if restarts > 1 else 0.0)

    def set_back(self, now_s: float) -> None:
        """Newcomers of the running gang have failed, or members: those that fail together count once."""
        if now_s < self.may_join_after_s:
            return
        if now_s > self.may_join_after_s + SETBACKS_FORGOTTEN_S:
            self._setbacks = 0
        self.may_join_after_s = now_s + _delay_s(self._setbacks)
        self._setbacks += 1


class Refusals:
    """Newcomers of one attempt that could not train as the others do, by their own last words, one after the other."""

    def __init__(self) -> None:
        self._count, self._last_part, self._last_s = 0, 0, float("-inf")
        self._nodes: set[NodeId] = set()
        self.verdict = ""  # once they are too many

    def note(self, share: Share, problem: str, record: JobRecord, now_s: float) -> None:
        """One of them, which is no member any more; those that were begun together count once.

        Many say something of the script unless all were on one node that may compute wrongly: no older member is there.
        """
        if share.part <= self._last_part:
            return
        if now_s > self._last_s + SETBACKS_FORGOTTEN_S:
            self._count, self._nodes = 0, set()
        self._nodes.add(share.node)
        older = {member.node for member in record.members if member.part <= self._last_part}
        self._count, self._last_part, self._last_s = self._count + 1, record.last_part, now_s
        if self._count >= REFUSALS_MOST and (len(self._nodes) > 1 or self._nodes & older):
            last = f"worker {share.part} on {share.node}: {problem}"
            self.verdict = f"{self._count} newcomers in a row could not train as the others do; the last: {last}"


def _delay_s(doublings: int) -> float:
    return min(RESTART_DELAY_S_MAX, RESTART_DELAY_S * 2.0 ** min(doublings, 10))

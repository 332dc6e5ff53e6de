"""Idempotency keys: a repeated POST at the same agent gets the first answer, for ten minutes.

Kept in memory only: a restart forgets them, and other agents do not know them.  A ticket has neither limit.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from swarm_agent.http.exchange import HttpReply
from swarm_agent.http.parameter import header
from swarm_agent.http.problem import Problem
from swarmsched.errors import FieldProblem

KEPT_S = 600.0
KEYS_LIMIT = 10_000  # beyond it the oldest is forgotten
KEY_LENGTH_LIMIT = 128
FAILED_STATUS = 400

KEY = header("Idempotency-Key", "Makes a repetition at this agent harmless for 10 min.", KEY_LENGTH_LIMIT)


@dataclass(slots=True)
class _Entry:
    body_digest: bytes
    since_s: float
    answer: HttpReply | None = None
    is_under_way: bool = False
    memo: dict[str, object] = field(default_factory=dict)  # what a repetition after a failure must use again


class IdempotencyKeys:
    """The latest keys and the answers they got."""

    def __init__(self, limit: int = KEYS_LIMIT, kept_s: float = KEPT_S) -> None:
        self._entries: dict[str, _Entry] = {}
        self._limit, self._kept_s = limit, kept_s

    async def once(self, key: str, body: bytes, act: Callable[[dict[str, object]], Awaitable[HttpReply]]) -> HttpReply:
        """Run `act` unless the key has an answer; a failure can be repeated.

        `act` is given a memo that is the same for all repetitions: the ticket in it makes a repetition after an
        unknown outcome harmless.
        """
        if not key:
            return await act({})
        _check(key)
        now_s = asyncio.get_running_loop().time()
        digest = hashlib.sha256(body).digest()
        self._forget(now_s)
        entry = self._entries.setdefault(key, _Entry(digest, now_s))
        if entry.body_digest != digest:
            raise Problem("idempotency_key_reused", "this Idempotency-Key came with another body before")
        if entry.is_under_way:
            raise Problem("idempotency_in_progress", "the first request with this key has no answer yet")
        if entry.answer is not None:
            headers = {**entry.answer.headers, "Idempotency-Replayed": "true"}
            return replace(entry.answer, status=200, headers=headers)
        entry.is_under_way = True
        try:
            answer = await act(entry.memo)
        finally:
            entry.is_under_way = False
        if answer.status < FAILED_STATUS:  # another agent's refusal comes as an answer too
            entry.answer = answer
        return answer

    def _forget(self, now_s: float) -> None:
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now_s - entry.since_s < self._kept_s and len(self._entries) < self._limit:
                return
            del self._entries[key]


def _check(key: str) -> None:
    if len(key) > KEY_LENGTH_LIMIT or not key.isascii() or not key.isprintable():
        where = FieldProblem("Idempotency-Key", "is too long or not printable", "1 to 128 printable ASCII characters")
        raise Problem("bad_parameter", "the Idempotency-Key cannot be used", where.remedy, (where,))

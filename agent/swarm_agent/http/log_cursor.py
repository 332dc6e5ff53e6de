"""The cursor of a job's merged output: which attempt, and how far each rank was delivered.

Positions are those of the nodes' own logs, so any agent can go on from a cursor that another one gave.
"""

import re
from dataclasses import dataclass, field

from swarm_agent.http import exchange

ATTEMPTS_MAX, RANKS_MAX = 2**32, 2**16
_POSITION = re.compile(r"[0-9a-f]{1,14}\.[0-9a-f]{1,14}")  # of a node's own log


@dataclass(slots=True)
class LogCursor:
    """Grows as records are delivered; `attempt` 0 before the first."""

    attempt: int = 0
    ranks: dict[str, str] = field(default_factory=dict)

    def advance(self, attempt: int, rank: int, cursor: str) -> None:
        """Note that a record was delivered."""
        self.begin(attempt)
        self.ranks[str(rank)] = cursor

    def begin(self, attempt: int) -> None:
        """Another attempt starts from the beginning of its logs."""
        if attempt != self.attempt:
            self.attempt, self.ranks = attempt, {}

    def encode(self) -> str:
        """Opaque text without line breaks."""
        return exchange.encode_cursor([self.attempt, self.ranks])


def decode_cursor(text: str) -> LogCursor:
    """Inverse of `encode`; empty text is the beginning."""
    if not text:
        return LogCursor()
    try:
        attempt, ranks = exchange.decode_cursor(text)
        attempt, positions = int(attempt), {str(int(rank)): str(cursor) for rank, cursor in ranks.items()}
        if not 0 <= attempt < ATTEMPTS_MAX or not all(0 <= int(rank) < RANKS_MAX for rank in positions):
            raise ValueError("out of range")
        if not all(_POSITION.fullmatch(position) for position in positions.values()):
            raise ValueError("no position")
        return LogCursor(attempt, positions)
    except (ValueError, TypeError, AttributeError) as error:
        raise exchange.bad_cursor(error) from error

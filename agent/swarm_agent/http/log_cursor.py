"""The cursor of a job's merged output: which attempt, and how far each rank was delivered.

Positions are those of the nodes' own logs, so any agent can go on from a cursor that another one gave.
"""

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from swarm_agent.http import exchange
from swarmsched.fields import U32

Position = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,14}\.[0-9a-f]{1,14}\Z")]  # of a node's own log


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

    def go_back(self, ranks: dict[str, str]) -> None:
        """A record was not delivered after all."""
        self.ranks = ranks

    def encode(self) -> str:
        """Opaque text without line breaks."""
        return exchange.encode_cursor([self.attempt, self.ranks])


def decode_cursor(text: str) -> LogCursor:
    """Inverse of `encode`; empty text is the beginning."""
    attempt, ranks = exchange.decode_cursor(text, tuple[U32, dict[U32, Position]], (0, {}))
    return LogCursor(attempt, {str(rank): position for rank, position in ranks.items()})

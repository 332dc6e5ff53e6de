"""The cursor of a job's merged output: which attempt, and how far each rank was delivered.

Positions are those of the nodes' own logs, so any agent can go on from a cursor that another one gave.
"""

import base64
import json
from dataclasses import dataclass, field

from swarm_agent.http.problem import bad_parameter


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
        document = json.dumps([self.attempt, self.ranks], separators=(",", ":"))
        return base64.urlsafe_b64encode(document.encode()).decode().rstrip("=")


def decode_cursor(text: str) -> LogCursor:
    """Inverse of `encode`; empty text is the beginning."""
    if not text:
        return LogCursor()
    try:
        attempt, ranks = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        return LogCursor(int(attempt), {str(int(rank)): str(cursor) for rank, cursor in ranks.items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise bad_parameter("cursor", "is not one that this API gave", "use the cursor of a record") from error

"""Reading the output of tasks: skeleton of signatures, filled in shortly."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from swarmsched.ids import JobId


class Stream(Enum):
    """Where a record comes from."""

    STDOUT = "stdout"
    STDERR = "stderr"
    SYSTEM = "system"  # the agent's own words, one line each


@dataclass(frozen=True, slots=True)
class LogRecord:
    """Bytes as they were read from the rank; they may end within a line or a character.

    `cursor` continues after this record.  `dropped_bytes` above 0: a marker, `data` is empty, so much is missing here.
    """

    stream: Stream
    utc_s: float
    data: bytes
    cursor: str
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Limits of kept output.  `head_bytes` of each rank are kept from its beginning, the rest from its end."""

    directory: Path
    limit_bytes: int = 64 * 2**20
    head_bytes: int = 8 * 2**20
    retention_s: float = 14 * 86_400.0
    total_limit_bytes: int = 20 * 2**30


class LogStore:
    """Output of all tasks of this node, running or not."""

    def __init__(self, config: LogConfig) -> None:
        self.config = config

    def ranks(self, job_id: JobId, attempt: int) -> tuple[int, ...]:
        """Ranks of the attempt that have a log here, in order."""
        raise NotImplementedError

    def attempts(self, job_id: JobId) -> tuple[int, ...]:
        """Attempts of the job that have logs here, in order."""
        raise NotImplementedError

    def read(
        self, job_id: JobId, attempt: int, rank: int, cursor: str = "", limit_bytes: int = 2**20
    ) -> tuple[tuple[LogRecord, ...], str]:
        """Records after the cursor ('' is the beginning), about `limit_bytes` of them, and the next cursor."""
        raise NotImplementedError

    def follow(self, job_id: JobId, attempt: int, rank: int, cursor: str = "") -> AsyncIterator[LogRecord]:
        """Records after the cursor and new ones as they come; ends when the task has exited and all was read."""
        raise NotImplementedError

    def tail(self, job_id: JobId, attempt: int, rank: int, lines: int) -> str:
        """Cursor at which the last `lines` lines begin."""
        raise NotImplementedError

    def since(self, job_id: JobId, attempt: int, rank: int, utc_s: float) -> str:
        """Cursor of the first record at or after `utc_s`."""
        raise NotImplementedError

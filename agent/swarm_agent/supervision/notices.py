"""The notices of shims: one FIFO into which each writes a line when its record, or a log, has grown."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from swarmsched.ids import AttemptKey, JobId, TaskKey

NOTICE_BYTES = 2**16


class NoticePipe:
    """Reads the FIFO `notify` of a folder; `facts_came` and `log_came` are told once of what one read has."""

    def __init__(
        self, folder: Path, facts_came: Callable[[TaskKey], None], log_came: Callable[[AttemptKey], None]
    ) -> None:
        self._path, self._facts_came, self._log_came = folder / "notify", facts_came, log_came
        self._fd = -1
        self._rest = b""  # of a line that the last read cut

    def open(self) -> None:
        """Make the FIFO where there is none, and read it from now on."""
        if not self._path.is_fifo():
            self._path.unlink(missing_ok=True)
            os.mkfifo(self._path, 0o600)
        self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def close(self) -> None:
        """Read no more."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        try:
            data = os.read(self._fd, NOTICE_BYTES)
        except BlockingIOError:
            return
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        for line in dict.fromkeys(whole.decode("ascii", "replace").split("\n")):
            match line.split():
                case [job_id, *numbers, "facts"] if all(map(str.isdecimal, numbers)) and len(numbers) in (1, 2):
                    self._facts_came(TaskKey(JobId(job_id), *map(int, numbers)))
                case [job_id, attempt, *_, "log", _] if attempt.isdecimal():
                    self._log_came(AttemptKey(JobId(job_id), int(attempt)))
                case _:
                    continue  # the end of a line whose beginning an earlier agent has read

"""Readers for whom a rank is slowed down rather than output dropped that they have not read.

A file beside each log tells its writer, the shim, what is still needed and until when: see `shim.reader_text`.  The
time is short and is extended while the reader is there, so an agent that dies holds nobody for long.  What a reader has
taken may still be on its way to it, or lost with the agent in between: so some of that is kept as well, and for a while
after a reader has gone, until it comes back.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field

from swarm_agent.task import shim

HELD_S = 45.0  # after the last sign of a reader; three times the interval of `keep_up`
RETURN_S = 30.0  # for a client that has lost its agent to go on at another one
KEPT_SEGMENTS = 4  # of the seven behind which a rank waits; two connections may hold 10 MiB each


@dataclass(slots=True, eq=False)
class Reader:
    """One reader of one log, and the position behind which it needs everything."""

    directory: str
    position: int
    gone_s: float = 0.0  # when it went, on the shim's clock; 0 while it is there


@dataclass(slots=True)
class _Told:
    """The readers of one log, and what its writer was told last; -1 before the first time."""

    readers: list[Reader] = field(default_factory=list)
    position: int = -1


class Readers:
    """All of this node, by the folders of the logs; `segment_bytes` is the unit in which logs are cut."""

    def __init__(self, segment_bytes: int) -> None:
        least_bytes = segment_bytes - min(segment_bytes // 2, shim.RECORD_BYTES_MAX + shim.HEADER_BYTES)
        self._behind = KEPT_SEGMENTS * least_bytes  # or who has taken all there is would be waited for
        self._step = segment_bytes // 4  # a file is written so often
        self._logs: dict[str, _Told] = {}
        self.waiting = 0  # logs whose writers waited at the last `keep_up`

    def open(self, directory: str, position: int) -> Reader:
        """A reader from that position on; it takes the place of one that went and has not come back."""
        log = self._logs.setdefault(directory, _Told())
        gone = [each for each in log.readers if each.gone_s and each.position <= position]
        if gone:
            log.readers.remove(max(gone, key=lambda each: each.position))
        reader = Reader(directory, position)
        log.readers.append(reader)
        self._tell(directory, log)
        return reader

    def advance(self, reader: Reader, position: int) -> None:
        """A reader has taken all before that position."""
        reader.position = max(reader.position, position - self._behind)
        log = self._logs[reader.directory]
        if log.position < 0 or min(each.position for each in log.readers) >= log.position + self._step:
            self._tell(reader.directory, log)

    def close(self, reader: Reader) -> None:
        """A reader has gone, for good or to come back soon."""
        reader.gone_s = shim.now()

    def keep_up(self) -> None:
        """Extend the time of those that are there, and forget who has not come back."""
        now_s = shim.now()
        for directory, log in list(self._logs.items()):
            log.readers = [each for each in log.readers if not each.gone_s or now_s < each.gone_s + RETURN_S]
            if log.readers:
                self._tell(directory, log)
            else:
                del self._logs[directory]
        self.waiting = sum(_is_crowded(directory) for directory in self._logs)

    @staticmethod
    def _tell(directory: str, log: _Told) -> None:
        """A log that does not exist yet is told of when it does; its writer waits for that, too."""
        position = min(each.position for each in log.readers)
        until_s = max(each.gone_s + RETURN_S if each.gone_s else shim.now() + HELD_S for each in log.readers)
        with suppress(OSError):
            file = os.open(f"{directory}/{shim.READER_NAME}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(file, shim.reader_text(position, until_s), 0)
                log.position = position
            finally:
                os.close(file)


def _is_crowded(directory: str) -> bool:
    """True for a log that has more than it keeps, which is then only for its readers."""
    try:
        return len(shim.segments(directory)) > 1 + shim.TAIL_SEGMENTS
    except FileNotFoundError:
        return False

"""What proves that a database has come back with all that was acknowledged.

SQLite ignores its write-ahead log from the first frame on that is not whole, without an error.  What a power cut leaves
of a transaction that was never acknowledged, and what a damaged disk makes of one that was, look the same to it.

Two things tell them apart.  Each transaction is synced before the next begins, so behind what is torn there is nothing
but the rest of that one.  And a file beside the database counts what was acknowledged.  It is not synced each time, so
after a power cut it may count too few, and never too many.
"""

import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0x377F0682  # the lowest bit of the one in the file: whether checksums take words as big-endian
HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24


@dataclass(frozen=True, slots=True)
class LogFrames:
    """The frames of a write-ahead log, by what their headers say: of the present round, and whether they end a commit.

    A log begins anew once all of it is in the database, over what is left of its former round.
    """

    is_empty: bool = False
    is_readable: bool = False
    present: tuple[bool, ...] = ()
    ends: tuple[bool, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "LogFrames":
        """Of this file.  Raises OSError."""
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            if not header:
                return cls(is_empty=True)
            if len(header) < HEADER_BYTES:
                return cls()
            magic, _, page_bytes, _, *salts, sum1, sum2 = struct.unpack(">8I", header)
            is_sound = magic & ~1 == MAGIC and _checksum(header[:24], is_big=bool(magic & 1)) == (sum1, sum2)
            if not is_sound or not 512 <= page_bytes <= 65_536:
                return cls()
            frame_bytes = FRAME_HEADER_BYTES + page_bytes
            found = []
            for start in range(HEADER_BYTES, os.fstat(file.fileno()).st_size, frame_bytes):
                file.seek(start)
                frame = file.read(FRAME_HEADER_BYTES)
                is_whole = len(frame) == FRAME_HEADER_BYTES  # of one that was cut, it may be of either round
                _, size, *own, _, _ = struct.unpack(">6I", frame) if is_whole else (0, 0, *salts, 0, 0)
                found.append((own == salts, size > 0))
        return cls(False, True, tuple(each[0] for each in found), tuple(each[1] for each in found))

    def is_damaged(self, valid: int, *, may_be_torn: bool) -> bool:
        """Whether more of it was acknowledged than the `valid` frames that SQLite takes.

        Where it is known that all which was acknowledged is there, a torn transaction behind that is none.
        """
        if self.is_empty:  # for a moment at the start of an agent; then there is a transaction in it
            return not may_be_torn
        if not self.is_readable or not self.present:
            return True
        behind = [number for number in range(valid, len(self.present)) if self.present[number]]
        if not may_be_torn:
            return bool(behind)
        ends = [number for number in behind if self.ends[number]]
        return bool(ends) and ends[0] < behind[-1]


class Acknowledged:
    """The file that counts transactions whose writes were acknowledged, of one database by its identity."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def read(self, store_id: str) -> int | None:
        """How many; None where nothing can be known."""
        with suppress(OSError, ValueError):
            about, _, check = self._path.read_bytes().strip().rpartition(b" ")
            owner, count = about.decode("ascii").split()
            if int(check, 16) == zlib.crc32(about) and owner == store_id:
                return int(count)
        return None

    def begin(self, store_id: str, count: int) -> None:
        """Count for this database from now on: durable before this returns.  Raises OSError."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, 0)
        self.note(store_id, count)
        os.fsync(self._descriptor)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def note(self, store_id: str, count: int) -> None:
        """So many are durable.  One that cannot be written counts too few, which is no more than a power cut does."""
        about = f"{store_id} {count:016}".encode("ascii")
        with suppress(OSError):
            os.pwrite(self._descriptor, b"%s %08x\n" % (about, zlib.crc32(about)), 0)

    def close(self) -> None:
        """No other call may follow."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _checksum(data: bytes, *, is_big: bool) -> tuple[int, int]:
    """As SQLite's file format has it, over pairs of words."""
    sum1 = sum2 = 0
    words = struct.unpack(f"{'>' if is_big else '<'}{len(data) // 4}I", data)
    for first, second in zip(words[::2], words[1::2], strict=True):
        sum1 = (sum1 + first + sum2) & 0xFFFF_FFFF
        sum2 = (sum2 + second + sum1) & 0xFFFF_FFFF
    return sum1, sum2

"""Room on this node's disks: what is kept back, what may still be written, and whether a node is too full for jobs.

A part of each disk is kept back for the agent's own database and for the logs of jobs that run: a disk that is full to
the last byte takes neither.  What a job brings has to fit beside it, and a node with less takes no new jobs.
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

RESERVE_BYTES = 64 * 2**20
ROOMY_BYTES = RESERVE_BYTES * 5 // 4  # from here on a disk that was nearly full counts as one with room again
SPARE_BYTES = 2**30  # left free by what a node keeps for others: what runs here comes first
RESERVE_FILES = 1_024  # further files and folders, where a file system counts them
MIB = 2**20


class NoRoom(OSError):
    """Something does not fit onto a disk beside what is kept back there."""

    def __init__(self, size_bytes: int, free_bytes: int, folder: Path) -> None:
        told = f"{_amount(size_bytes)} do not fit: {_amount(free_bytes)} are free at {folder}, {KEPT_BACK}"
        super().__init__(errno.ENOSPC, told)


def check_room(folder: Path, size_bytes: int) -> None:
    """Raise `NoRoom` where so much does not fit beside the reserve."""
    free_bytes = _free(os.statvfs(folder))
    if size_bytes + RESERVE_BYTES > free_bytes:
        raise NoRoom(size_bytes, free_bytes, folder)


def room_for_others(folder: Path) -> int:
    """Bytes that a node may still take on behalf of others; below 0 where too little is free.  Raises OSError."""
    return _free(os.statvfs(folder)) - SPARE_BYTES


def shortage(folders: Iterable[Path], *, was_short: bool) -> str:
    """Why no new job should come, in a few words; empty where each of the folders has room.  Raises OSError."""
    wanted_bytes = ROOMY_BYTES if was_short else RESERVE_BYTES
    for folder in folders:
        disk = os.statvfs(folder)
        if _free(disk) < wanted_bytes:
            return f"disk nearly full: {_amount(_free(disk))} free at {folder}, {KEPT_BACK}"
        if disk.f_files and disk.f_favail < RESERVE_FILES:
            return f"disk nearly full: room for {disk.f_favail} more files at {folder}, {RESERVE_FILES} are kept back"
    return ""


def _free(disk: os.statvfs_result) -> int:
    return disk.f_bavail * disk.f_frsize


def _amount(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB" if size_bytes >= MIB else f"{size_bytes} bytes"


KEPT_BACK = f"and {RESERVE_BYTES // MIB} MiB are kept back"

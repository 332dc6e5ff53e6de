"""Keeps the resident memory of an idle agent low; a server's memory belongs to its jobs."""

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4  # madvise(2)


def give_back_memory() -> None:
    """Return what the start-up needed only once to the kernel; glibc keeps it otherwise."""
    gc.collect()
    gc.freeze()  # what was imported stays for good: later collections need not look at it
    libc = ctypes.CDLL(None)
    for begin, length in _unchanged_file_pages():
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_DONTNEED)
    trim = getattr(libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _unchanged_file_pages() -> Iterator[tuple[int, int]]:
    """Address and bytes of the mapped parts of programs and libraries that are as in their files.

    A third of what is resident after the start is code that ran once; what runs again comes back from the page cache.
    """
    begin = length = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):  # a mapping: its span, rights, offset, device, inode and path
            first, end = (int(each, 16) for each in key.split("-"))
            is_fixed = "w" not in values[0] and values[3] != "0"
            begin, length = first, end - first if is_fixed else 0
        elif key == "Anonymous:" and length and values[0] == "0":
            yield begin, length

"""Keeps the resident memory of the agent below 60 MB; a server's memory belongs to its jobs."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_tls() -> Iterator[None]:
    """Import aiohttp in this block as on a Python without `ssl`: it makes two TLS contexts at import, 0.7 MB.

    Agents speak to one another through sealed bodies and are neither servers nor clients of TLS.
    """
    # These cannot be imported without it.
    import ssl  # noqa: PLC0415  # keeps --check-config and --help quick, as do the next ones

    import prometheus_client.core  # noqa: F401, PLC0415
    import uvloop  # noqa: F401, PLC0415

    sys.modules["ssl"] = None  # type: ignore[assignment]  # documented: importing it fails
    try:
        yield
    finally:
        sys.modules["ssl"] = ssl


def give_back_memory() -> None:
    """Return what the start-up needed only once to the kernel; glibc keeps it otherwise."""
    gc.collect()
    gc.freeze()  # what was imported stays for good: later collections need not look at it
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

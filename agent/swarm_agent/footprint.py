"""Keeps the resident memory of the agent below 60 MB; a server's memory belongs to its jobs."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


@contextmanager
def without_trusted_certificates() -> Iterator[None]:
    """Import aiohttp in this block: it parses the system's certificates at import, 2 MB that no agent needs.

    Agents speak to one another through sealed bodies and never act as a TLS client with public certificates.
    """
    before = {name: os.environ.get(name) for name in _CERTIFICATE_VARIABLES}
    os.environ.update(dict.fromkeys(_CERTIFICATE_VARIABLES, os.devnull))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def give_back_memory() -> None:
    """Return what the start-up needed only once to the kernel; glibc keeps it otherwise."""
    gc.collect()
    gc.freeze()  # what was imported stays for good: later collections need not look at it
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""Threads that may wait in C++ for as long as they like, and the end of the process.

The interpreter ends a daemon thread when it comes back from C++ while the process ends, and gloo answers that with an
abort.  So the end waits a moment for those that are about to come back; one that waits for a peer does not come back.
Once it has come nothing is begun any more: a plan that is heard of meanwhile would have its thread come back too late.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any

EXIT_S = 1.0

_threads: set[threading.Thread] = set()
_is_ending = threading.Event()
_starts = threading.Lock()


def start(name: str, act: Callable[..., None], *arguments: Any) -> None:
    """Run something in a thread of its own; nothing happens where the process is ending."""

    def run() -> None:
        try:
            act(*arguments)
        finally:
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _starts:
        if not _is_ending.is_set():
            _threads.add(thread)
            thread.start()


def _settle() -> None:
    with _starts:
        _is_ending.set()
    end_s = time.monotonic() + EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, end_s - time.monotonic()))


def _forked() -> None:
    _threads.clear()
    _starts.release()


atexit.register(_settle)
os.register_at_fork(before=_starts.acquire, after_in_parent=_starts.release, after_in_child=_forked)

"""A bar on standard error for what takes long: how much is done, and how long it may still take."""

from __future__ import annotations

import sys
import time
from typing import Self, TextIO

from swarm_client.output import terminal_width
from swarm_client.quantity import show_duration

PATIENCE_S = 1.0
"""What is done sooner needs no bar."""
PAUSE_S = 0.2
WIDTH = 30
CLEAR_LINE = "\r\x1b[K"


class ProgressBar:
    """Drawn on a terminal alone, and gone at the end of its `with`."""

    def __init__(self, name: str, stream: TextIO | None = None, *, is_quiet: bool = False) -> None:
        self._name = name
        self._stream = stream or sys.stderr
        self._is_on = not is_quiet and self._stream.isatty()
        self._began_s = self._drawn_s = time.monotonic()
        self._is_drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_drawn:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()

    def show(self, part: float, text: str = "") -> None:
        """`part` of 1 is done; cheap enough to call at each step."""
        now_s = time.monotonic()
        if not self._is_on or now_s - self._began_s < PATIENCE_S or now_s - self._drawn_s < PAUSE_S:
            return
        self._drawn_s, self._is_drawn = now_s, True
        left = f", {show_duration((now_s - self._began_s) * (1.0 - part) / part)} left" if part else ""
        bar = "#" * int(part * WIDTH)
        line = f"{self._name} [{bar:<{WIDTH}}] {part:4.0%} {text}{left}"
        self._stream.write(CLEAR_LINE + line[: terminal_width(self._stream) - 1])
        self._stream.flush()

"""A view of the terminal that is drawn again and again, until it was looked at for long enough."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from swarm_client.failure import OK, Failure
from swarm_client.session import Session
from swarm_client.signals import Keyboard

HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def watch(
    session: Session, make_lines: Callable[[], Sequence[str]], interval_s: float = 1.0, *, is_once: bool = False
) -> int:
    """Draw again and again over the last frame, each with one write, so that nothing flickers.

    Without a terminal there is nothing to draw over: one frame, then the end.
    """
    if is_once or not session.printer.is_terminal:
        for line in make_lines():
            session.printer.line(line)
        return OK
    out = sys.stdout
    try:
        out.write(ENTER)
        with Keyboard(session.waiter, _quit, b"q"):
            _draw(session, make_lines, interval_s)
    except _Quit:
        return OK
    finally:
        out.write(LEAVE)
        out.flush()


class _Quit(Exception):
    """The viewer has seen enough."""


def _quit() -> None:
    raise _Quit


def _draw(session: Session, make_lines: Callable[[], Sequence[str]], interval_s: float) -> NoReturn:
    out = sys.stdout
    while True:
        try:
            lines = list(make_lines())
        except Failure as failure:
            lines = [f"swarm: {failure.problem}", f"  {failure.remedy}"]
        height = os.get_terminal_size(out.fileno()).lines
        text = "".join(f"{line}{CLEAR_LINE}\r\n" for line in lines[: height - 1])
        out.write(HOME + text + CLEAR_BELOW)
        out.flush()
        session.waiter.sleep(interval_s)

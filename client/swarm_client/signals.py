"""Signals and detach keys of a command that follows a job (docs/reference/cli.md, "Signals")."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from swarm_client.failure import INTERRUPTED
from swarm_client.http import Waiter

CANCEL_WINDOW_S = 2.0
CTRL_P, CTRL_Q = b"\x10", b"\x11"
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT)


def has_input() -> bool:
    """True when something was put into standard input: a file, or what is in a pipe already."""
    try:
        mode = os.fstat(0).st_mode
        if stat.S_ISREG(mode):
            return os.fstat(0).st_size > os.lseek(0, 0, os.SEEK_CUR)
        return stat.S_ISFIFO(mode) and any(fcntl.ioctl(0, termios.FIONREAD, bytes(4)))
    except OSError:
        return False


class SignalWatch:
    """While entered, signals wake the waiter, which calls `on_signal(number)` outside of the signal handler.

    The third SIGINT and the second SIGTERM end the process at once, even if the first is still being dealt with.
    """

    def __init__(self, waiter: Waiter, on_signal: Callable[[int], None]) -> None:
        self._waiter, self._on_signal = waiter, on_signal
        self._before: dict[int, Any] = {}
        self._interrupts = 0
        self._terminations = 0
        self._reading = self._writing = -1
        self.keyboard: Keyboard | None = None

    def __enter__(self) -> Self:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
                self._before[number] = signal.signal(number, self._note)
        self._waiter.watch(self._reading, self._drain)
        return self

    def __exit__(self, *_: object) -> None:
        self._waiter.forget(self._reading)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self._reading)
        os.close(self._writing)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= 3:
                self._leave(INTERRUPTED, b"swarm: left at once; `swarm ps` shows what became of the job\n")
        elif number == signal.SIGTERM:
            self._terminations += 1
            if self._terminations >= 2:
                self._leave(128 + number)

    def _leave(self, code: int, words: bytes = b"") -> None:
        if self.keyboard is not None:
            self.keyboard.restore()
        with suppress(OSError):  # nobody is there to read it
            os.write(2, words)
        os._exit(code)

    def forget_interrupts(self) -> None:
        """The window for a second Ctrl-C has passed: the next one is the first again."""
        self._interrupts = 0

    def _drain(self) -> None:
        try:
            numbers = os.read(self._reading, 64)
        except BlockingIOError:
            return
        for number in numbers:
            if number == signal.SIGCONT and self.keyboard is not None:
                self.keyboard.prepare()
            elif number in self._before:
                self._on_signal(number)


class Keyboard:
    """Watches the terminal for Ctrl-P Ctrl-Q or one of `keys`; Ctrl-\\ arrives as SIGQUIT.  Needs a terminal.

    Other keys are read and dropped: a job has no standard input.  The terminal's settings are restored on exit.
    """

    def __init__(self, waiter: Waiter, on_detach: Callable[[], None], keys: bytes = b"") -> None:
        self._waiter, self._on_detach, self._keys = waiter, on_detach, keys
        self._descriptor = 0
        self._settings: list[Any] | None = None
        self._last = b""
        self.is_active = False

    def __enter__(self) -> Self:
        try:
            is_foreground = sys.stdin.isatty() and os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except (OSError, ValueError):
            is_foreground = False
        if is_foreground:
            self.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def prepare(self) -> None:
        """Turn off line editing, echo and flow control, which would swallow Ctrl-Q."""
        try:
            if self._settings is None:
                self._settings = termios.tcgetattr(self._descriptor)
            changed = [*self._settings[:6], list(self._settings[6])]
            changed[0] &= ~termios.IXON
            changed[3] &= ~(termios.ICANON | termios.ECHO)
            termios.tcsetattr(self._descriptor, termios.TCSANOW, changed)
        except termios.error:
            return
        self.is_active = True
        self._waiter.watch(self._descriptor, self._read)

    def restore(self) -> None:
        """Put the terminal back as it was."""
        if self.is_active and self._settings is not None:
            self.is_active = False
            self._waiter.forget(self._descriptor)
            try:
                termios.tcsetattr(self._descriptor, termios.TCSANOW, self._settings)
            except termios.error:
                return  # the terminal is gone

    def _read(self) -> None:
        if not select.select([self._descriptor], [], [], 0)[0]:
            return
        try:
            keys = os.read(self._descriptor, 256)
        except OSError:
            keys = b""
        if not keys:
            self._waiter.forget(self._descriptor)  # hung up
            return
        for key in (keys[i : i + 1] for i in range(len(keys))):
            if (self._last == CTRL_P and key == CTRL_Q) or key in self._keys:
                self._on_detach()
            self._last = key

"""A command attached to a job: prints its output, forwards signals, says what it waits for, returns its exit code."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from swarm_client.conversation import ONCE_TO_SHEPHERD, TO_SHEPHERD
from swarm_client.failure import OK, SWARM_FAILED, TIMED_OUT, Failure
from swarm_client.follow import JobStream, OutputWriter, describe_end, describe_state, record_data
from swarm_client.job_id import job_path
from swarm_client.session import Session
from swarm_client.signals import CANCEL_WINDOW_S, Keyboard, SignalWatch, has_input

LAST_OUTPUT_CHARS = 2**16  # what a job wrote last usually says why it failed
QUIET_START_S = 1.0  # a job that runs within this time needs no words


class _Leave(Exception):
    """Ends the command with a code while the job goes on."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(exit_code)


class Attachment:
    """Follows one job until it ends or the user leaves."""

    def __init__(
        self,
        session: Session,
        reference: str,
        *,
        handle: str = "",
        query: Mapping[str, str] | None = None,
        label: bool = False,
        timeout_s: float = 0.0,
        cancels_on_timeout: bool = True,
        kill_on_disconnect: bool = False,
        is_known: bool = False,
    ) -> None:
        self._session, self._reference, self._handle = session, reference, handle or reference
        self._timeout_s, self._cancels_on_timeout = timeout_s, cancels_on_timeout
        self._kill_on_disconnect = kill_on_disconnect
        self._writer = OutputWriter(label=label)
        self._last_records: deque[Mapping[str, Any]] = deque()
        self._last_chars = 0
        self._shown_state = self._state = self._last_words = ""
        self._shows_states = False
        self._is_running = False
        self._is_new, self._was_introduced = is_known, False
        self._job_state, self._has_ended = "", False
        self._attempt = self._written_attempt = 0
        self._timed_out = False
        self._interrupted_s = float("-inf")
        contact_timeout_s = float(session.config.values["contact_timeout"])
        self._stream = JobStream(
            session.agents,
            reference,
            {"follow": "1", **(query or {})},
            is_known=is_known,
            contact_timeout_s=contact_timeout_s,
            is_lossless=self._writer.is_for_program,
        )

    def follow(self) -> int:
        """Stream until the end and return the job's exit code (`shell_exit_code`)."""
        try:
            return self._follow()
        except BrokenPipeError:  # as in `| head`
            if not self._has_ended:
                self._session.tell(
                    f"nobody reads the output any more; job {self._handle} goes on (`swarm cancel` stops it)"
                )
            raise

    def _follow(self) -> int:
        waiter = self._session.waiter
        waiter.do_before_wait(self._writer.flush)
        waiter.call_after(QUIET_START_S, self._show_states)
        if self._timeout_s:
            waiter.call_after(self._timeout_s, self._on_timeout)
        try:
            with SignalWatch(waiter, self._on_signal) as self._signals, Keyboard(waiter, self._detach) as keyboard:
                self._signals.keyboard = keyboard
                self._has_keyboard = keyboard.is_active
                if self._is_new:
                    self._introduce()
                end = self._print_records()
        except _Leave as leave:
            return leave.exit_code
        finally:
            waiter.do_before_wait(None)
            self._writer.finish()
        return self._finish(end)

    def _introduce(self) -> None:
        """Name the job, so that what a script logs can be followed up, and the keys where there are any."""
        if self._was_introduced:
            return
        self._was_introduced = True
        if self._is_new or self._has_keyboard:
            keys = " (detach: Ctrl-\\ or Ctrl-P Ctrl-Q)" if self._has_keyboard else ""
            self._session.tell(f"job {self._handle}{keys}")
        if self._is_new and has_input():
            self._session.tell("standard input is not passed to jobs; put it into a file of the working directory")

    def _print_records(self) -> Mapping[str, Any]:
        for record in self._stream.records():
            kind = record["type"]
            if kind in ("log", "gap"):
                self._note_attempt()
            self._writer.write(record)
            if kind in ("log", "gap"):
                self._remember(record)
                if record.get("stream") == "system":
                    self._last_words = str(record.get("text", ""))
            elif kind == "state":
                self._on_state(record)
            elif kind in ("attempt", "warning"):
                self._session.tell(str(record.get("text", "")))
            elif kind == "end":
                return record
        raise Failure(
            f"job {self._handle}: its output ended, but not the job", "`swarm status` tells more", SWARM_FAILED
        )

    def _remember(self, record: Mapping[str, Any]) -> None:
        self._last_records.append(record)
        self._last_chars += _length(record)
        while self._last_chars > LAST_OUTPUT_CHARS and len(self._last_records) > 1:
            self._last_chars -= _length(self._last_records.popleft())

    def last_output(self) -> str:
        """The end of what the job's ranks wrote, and of what the agents said of it."""
        return "".join(record_data(record).decode("utf-8", "replace") for record in self._last_records)

    def _note_attempt(self) -> None:
        """A program that reads the output has to be told, -q or not, where that of another attempt begins."""
        if self._written_attempt not in (0, self._attempt) and self._writer.is_for_program:
            self._writer.flush()
            self._session.warn(
                f"job {self._handle} runs again: the output of attempt {self._attempt} follows that of attempt"
                f" {self._written_attempt} (--max-restarts 0 lets it end instead)"
            )
        self._written_attempt = self._attempt

    def _finish(self, end: Mapping[str, Any]) -> int:
        code = end.get("shell_exit_code")
        if end.get("end_reason") != "completed" or code:
            self._session.tell(describe_end(self._handle, end, self._last_words))
        if self._timed_out:
            return TIMED_OUT
        if not code:
            self._writer.check_whole(self._handle)
        return SWARM_FAILED if code is None else int(code)

    def _on_state(self, record: Mapping[str, Any]) -> None:
        job = record.get("job") or {}
        self._writer.note(job)
        self._job_state = str(record.get("state"))
        self._attempt = int(record.get("attempt") or 0)
        self._has_ended = self._job_state == "ended"
        if job.get("handle"):
            self._handle = str(job["handle"])
            if not self._has_ended:
                self._introduce()
        self._is_running = self._job_state in ("running", "stopping", "ended")
        if self._has_ended:
            return  # the end record follows and says more
        self._state = describe_state(record)
        if self._shows_states and (self._shown_state or not self._is_running):
            self._show_state()

    def _show_states(self) -> None:
        """The start takes long enough to be explained."""
        self._shows_states = True
        if not self._is_running and self._state:
            self._show_state()

    def _show_state(self) -> None:
        if self._state != self._shown_state:
            self._shown_state = self._state
            self._session.tell(f"job {self._handle} {self._state}")

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            self._on_interrupt()
        elif number == signal.SIGTERM:
            self._session.tell(f"terminated: cancelling job {self._handle}")
            self._cancel()
        elif number == signal.SIGHUP:
            if self._kill_on_disconnect:
                self._cancel()
            raise _Leave(128 + number)
        elif number == signal.SIGQUIT:
            self._detach()

    def _on_interrupt(self) -> None:
        now_s = time.monotonic()
        is_second = now_s - self._interrupted_s <= CANCEL_WINDOW_S
        self._interrupted_s = now_s
        if is_second or self._job_state == "queued":
            self._session.tell(f"cancelling job {self._handle}; Ctrl-C once more leaves at once")
            self._cancel()
            return
        self._session.waiter.call_after(CANCEL_WINDOW_S, self._signals.forget_interrupts)
        try:
            path = job_path(self._reference, "/signal")
            body = {"signal": int(signal.SIGINT)}
            self._session.agents.call("cannot forward Ctrl-C", "POST", path, body=body, terms=ONCE_TO_SHEPHERD)
        except Failure as failure:
            self._session.tell(f"{failure.problem}; Ctrl-C again within 2 s cancels the job")
            return
        self._session.tell("Ctrl-C was sent to all ranks; again within 2 s cancels the job")

    def _cancel(self) -> None:
        try:
            path = job_path(self._reference, "/cancel")
            self._session.agents.call("cannot cancel", "POST", path, body={}, terms=TO_SHEPHERD)
        except Failure as failure:
            self._session.tell(failure.problem)

    def _on_timeout(self) -> None:
        if self._cancels_on_timeout:
            self._timed_out = True
            self._session.tell(f"the timeout of {self._timeout_s:g} s was reached: cancelling job {self._handle}")
            self._cancel()
            return
        self._session.tell(f"the timeout of {self._timeout_s:g} s was reached; job {self._handle} goes on")
        raise _Leave(TIMED_OUT)

    def _detach(self) -> None:
        self._session.tell(f"detached; job {self._handle} goes on (`swarm attach {self._handle}`)")
        raise _Leave(OK)


def _length(record: Mapping[str, Any]) -> int:
    return len(record.get("data") or record.get("text") or "")

"""Follows a job: its records from any agent, from where they stopped, until its end; and prints its output."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from swarm_client.agents import Agents
from swarm_client.conversation import STREAM_SILENCE_S, Contact, passes
from swarm_client.failure import SWARM_FAILED, AgentRefusal, Failure, NoAgentAnswered
from swarm_client.http import ConnectionBroken, Waiter
from swarm_client.job_id import job_path
from swarm_client.quantity import show_time
from swarm_client.start_phase import with_phase

PART_BYTES_MAX = 2**16  # of a line that is waited for


class LostContact(Failure):
    """No agent could continue the stream; what became of the job is unknown."""

    def __init__(self, job: str, cause: str, seconds: float) -> None:
        super().__init__(
            f"lost contact with job {job}: {cause} (tried for {seconds:.0f} s); its outcome is unknown",
            f"`swarm attach {job}` goes on when an agent answers; `swarm status {job}` tells its state",
            SWARM_FAILED,
        )


def wait_for_contact(contact: Contact, waiter: Waiter, job: str, cause: str) -> None:
    """Nobody could be asked about a job that is known: wait a little, or raise `LostContact`."""
    now_s = time.monotonic()
    pause_s = contact.pause_s(now_s)
    if pause_s is None:
        raise LostContact(job, cause, contact.lost_s(now_s))
    waiter.sleep(pause_s)


def may_pass(failure: Failure, *, is_known: bool) -> bool:
    """True for a failure that passes: another agent, or the same one soon, may do better."""
    if isinstance(failure, AgentRefusal):
        return passes(failure.status, is_known=is_known)
    return is_known and failure.exit_code == SWARM_FAILED


class JobStream:
    """The records of one job's log stream (docs/reference/http-api.md, "Logs"), across agents.

    With `is_known` the job was accepted before: then even "no such job" is a passing state of an agent that has not
    heard of it, and is retried like a broken connection.  With `is_lossless` ranks that are too far ahead
    wait for us.
    """

    def __init__(
        self,
        agents: Agents,
        reference: str,
        query: dict[str, str],
        *,
        is_known: bool,
        contact_timeout_s: float,
        is_lossless: bool = False,
    ) -> None:
        self._agents, self._reference, self._query = agents, reference, query
        self._is_known = is_known
        self._contact = Contact(contact_timeout_s)
        self._headers = {"X-Swarm-Lossless": "1"} if is_lossless else {}
        self._cursor = ""
        self._follows = query.get("follow") == "1"

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield records until `end` (when following) or the end of what there is."""
        while True:
            try:
                for record in self._connected():
                    self._contact.found()
                    yield record
                    if record["type"] == "end":
                        return
                if not self._follows:
                    return
                cause = "the agent ended the stream"
                self._agents.demote(self._agents.addresses[0])  # it stops, or could not go on either
            except (ConnectionBroken, NoAgentAnswered) as error:
                cause = str(error)
            except AgentRefusal as refusal:
                if not may_pass(refusal, is_known=self._is_known):
                    raise
                cause = refusal.problem
            wait_for_contact(self._contact, self._agents.waiter, self._reference, cause)

    def _connected(self) -> Iterator[dict[str, Any]]:
        headers = self._headers | ({"Last-Event-ID": self._cursor} if self._cursor else {})
        path, action = job_path(self._reference, "/logs"), f"cannot read the output of {self._reference}"
        response = self._agents.stream(action, path, query=self._query, headers=headers)
        try:
            for event in response.events(STREAM_SILENCE_S):
                if event.id:
                    self._cursor = event.id
                record = event.json()
                if isinstance(record, dict) and isinstance(record.get("type"), str):
                    self._remember(record)
                    yield record
        except ConnectionBroken:
            self._agents.demote(response.address)
            self._is_known = True
            raise
        finally:
            response.close()

    def _remember(self, record: Mapping[str, Any]) -> None:
        """A name or `@last` may mean another job later: hold on to the id."""
        self._is_known = True
        job = record.get("job")
        if isinstance(job, dict) and job.get("id"):
            self._reference = str(job["id"])


def record_data(record: Mapping[str, Any]) -> bytes:
    """What a `log` record holds, as it was written."""
    return base64.b64decode(record["data"]) if "data" in record else str(record.get("text", "")).encode()


def rank_name(record: Mapping[str, Any]) -> str:
    """What people call a rank: `3`, or `server.0` of a job with groups."""
    return f"{record['group']}.{record.get('rank')}" if record.get("group") else str(record.get("rank"))


class OutputWriter:
    """Writes records where they belong: the job's stdout to ours; its stderr, and the agents' own words, to stderr.

    Of a job with several ranks a part of a line waits for the rest of it, so that lines of two ranks never mix; a
    progress bar (carriage return) does not wait.

    A program that reads standard output must be able to trust that it has all of it; a person sees what is missing.
    """

    def __init__(self, *, label: bool = False, timestamps: bool = False) -> None:
        self._label, self._timestamps = label, timestamps
        self._out: BinaryIO = sys.stdout.buffer
        self._err: BinaryIO = sys.stderr.buffer
        self.is_for_program = not sys.stdout.isatty()
        self._missing = ""
        self._missing_bytes = 0
        self._is_alone = False
        self._parts: dict[tuple[Any, Any], bytes] = {}  # rank and stream -> the beginning of a line
        self._is_inside: set[tuple[Any, Any]] = set()  # what was printed last of these ended within a line

    def note(self, job: Mapping[str, Any]) -> None:
        """How many ranks write; output of a single one is printed as it comes."""
        if job:
            sizes = (job.get("ranks", 1), job.get("ranks_most"), job.get("world_size"))
            self._is_alone = max(each or 0 for each in sizes) == 1 and not job.get("world") and not job.get("groups")

    def write(self, record: Mapping[str, Any]) -> None:
        """Print one `log` or `gap` record, and note what others say of output that is missing."""
        if record["type"] not in ("log", "gap"):
            if record.get("is_missing"):
                self._missing = self._missing or str(record.get("text", ""))
            return
        rank = rank_name(record)
        key = (rank, record.get("stream"))
        if record["type"] == "gap":
            self._missing_bytes += int(record.get("skipped_bytes", 0))
            cause = f": {record['text']}" if record.get("text") else ""
            text = f"swarm: {record.get('skipped_bytes', 0)} bytes of output of rank {rank} were not kept{cause}\n"
            self._err.write(text.encode())
            return
        data = record_data(record)
        if data and (self._label or self._timestamps):
            data = self._marked(key, data, self._prefix(record))
        data = self._parts.pop(key, b"") + data
        end = data.rfind(b"\n") + 1
        if self._is_alone or b"\r" in data[end:] or len(data) - end > PART_BYTES_MAX:
            end = len(data)
        if end < len(data):
            self._parts[key] = data[end:]
        self._stream(key).write(data[:end])

    def _marked(self, key: tuple[Any, Any], data: bytes, prefix: bytes) -> bytes:
        first = b"" if key in self._is_inside else prefix
        is_whole = data.endswith(b"\n")
        self._is_inside.discard(key) if is_whole else self._is_inside.add(key)
        return first + data[: len(data) - is_whole].replace(b"\n", b"\n" + prefix) + b"\n" * is_whole

    def _prefix(self, record: Mapping[str, Any]) -> bytes:
        parts = [show_time(record.get("time"), has_fraction=True)] if self._timestamps else []
        if self._label:
            parts.append(f"{rank_name(record)}:")
        return (" ".join(parts) + " ").encode()

    def _stream(self, key: tuple[Any, Any]) -> BinaryIO:
        return self._out if key[1] in ("stdout", None) else self._err

    def flush(self) -> None:
        """Show what was written so far."""
        self._out.flush()
        self._err.flush()

    def check_whole(self, handle: str) -> None:
        """Raise `Failure` where a program was given less than all."""
        missing = f"{self._missing_bytes} bytes are missing" if self._missing_bytes else self._missing
        if missing and self.is_for_program:
            raise Failure(
                f"the output of job {handle} is not whole: {missing}",
                "have the job write a file; nodes keep `task_log_bytes_max` of each rank, and wait 5 min for a reader",
                SWARM_FAILED,
            )

    def finish(self) -> None:
        """Show everything, parts of lines as well, for nothing more comes."""
        for index, (key, part) in enumerate(self._parts.items(), 1):
            self._stream(key).write(part if index == len(self._parts) else part + b"\n")
        self._parts.clear()
        self.flush()


def describe_state(record: Mapping[str, Any]) -> str:
    """`queued: needs 4 GPUs, 2 free`, `starting: copying files`, `running on gpu1, gpu2`."""
    state, phase, reason = str(record.get("state", "")), record.get("phase") or "", record.get("reason") or ""
    job = record.get("job") or {}
    nodes = [str(share.get("node")) for share in job.get("nodes") or []]
    if state == "running":
        return f"running on {', '.join(nodes)}" if nodes else "running"
    if phase:
        return with_phase(state, phase) + (f" ({reason})" if reason else "")
    return f"{state}: {reason}" if reason else state


def describe_end(handle: str, end: Mapping[str, Any], last_words: str = "") -> str:
    """One line about how the job ended; the cause is not said again where the agent's `last_words` were just that."""
    job = end.get("job") or {}
    reason = str(end.get("end_reason") or "ended")
    words = {"timeout": "reached its time limit", "node_lost": "lost a node", "oom": "ran out of memory"}
    text = f"job {handle} {words.get(reason, reason)}"
    if end.get("signal"):
        text += f" (signal {end['signal']})"
    elif end.get("exit_code"):
        text += f" (exit code {end['exit_code']})"
    detail = str(job.get("detail") or "")
    return f"{text}: {detail}" if detail and detail != reason and detail not in last_words else text

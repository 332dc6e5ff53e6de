"""A small agent for the client's tests: real HTTP on loopback, shapes of docs/reference/http-api.md, scripted jobs."""

import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

JOB_ID = "01jkzzzzzzk3j9x0ab00000000"
HANDLE = "k3j9x0ab"
TOKEN = "t" * 32


def job_document(**changes: Any) -> dict[str, Any]:
    """A running job of four ranks on two nodes, with changes."""
    document: dict[str, Any] = {
        "api_version": "v1",
        "id": JOB_ID,
        "handle": HANDLE,
        "name": "digits",
        "user": "ada",
        "queue": "default",
        "priority": 0,
        "state": "running",
        "phase": "",
        "reason": "",
        "end_reason": None,
        "exit_code": None,
        "signal": None,
        "shell_exit_code": None,
        "submitted_at": "2025-01-31T12:00:00.000Z",
        "started_at": "2025-01-31T12:00:01.000Z",
        "ended_at": None,
        "elapsed_seconds": 75.0,
        "queued_seconds": 1.0,
        "gpus": 4,
        "gpus_per_rank": 1,
        "ranks": 4,
        "ranks_most": 0,
        "world_size": 4,
        "nodes": [{"node": "gpu1", "ranks": 2, "first_rank": 0}, {"node": "gpu2", "ranks": 2, "first_rank": 2}],
        "attempt": 1,
        "epoch": 1,
        "version": 7,
        "shepherd": "gpu1",
        "holders": ["gpu1", "gpu2", "gpu3"],
        "leaving_holders": [],
        "survives_deaths": 1,
        "has_majority": True,
        "is_forced": False,
        "restarts": 0,
        "preemptions": 0,
        "rescales": 0,
        "rescalings": [],
        "world": None,
        "leftovers": [],
        "checkpoint": None,
        "progress": None,
        "attained_gpu_seconds": 300.0,
        "spec": {"command": ["python", "train.py"], "ranks": 4, "gpus_per_rank": 1, "env": {"SEED": "1"}},
        "detail": "",
        "failed_node": None,
        "failed_rank": None,
        "relaunches": 0,
        "source": "record",
        "as_of": "2025-01-31T12:01:16.000Z",
        "staleness_seconds": 0.0,
    }
    return document | changes


def ended(code: int = 0, reason: str = "completed", **changes: Any) -> dict[str, Any]:
    """A job that has ended with this shell exit code."""
    known = {"state": "ended", "end_reason": reason, "exit_code": code, "shell_exit_code": code}
    return job_document(**{**known, **changes})


class TaskAgent:
    """A task's socket; each answer is a dictionary, bytes, or None to hang up."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.answers, self.requests = path, [], []
        monkeypatch.setenv("SWARM_TASK_SOCKET", str(path))
        monkeypatch.setenv("SWARM_TASK_TOKEN", "secret")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._serve)

    def start(self) -> None:
        self._listening.bind(str(self.path))
        self._listening.listen()
        self._thread.start()

    def stop(self) -> None:
        if self._thread.ident:
            self._listening.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                self.requests.append(json.loads(stream.readline()))
                answer = self.answers.pop(0)
                if answer is not None:
                    stream.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n")


class FakeAgent:
    """Serves scripted answers; records requests.  Use as a context manager.

    `answers` maps "METHOD /path" to a document, a (status, document) pair, or a function of the request's body and
    query that returns either.  `stream` is a function that yields log records for one connection, given the cursor;
    it may wait on events of the test, and end without an `end` record to break off.
    """

    def __init__(self, name: str = "gpu1", *, token: str = TOKEN) -> None:
        self.name, self.token = name, token
        self.requests: list[tuple[str, str, Any]] = []
        self.answers: dict[str, Any] = {}
        self.blobs: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.stream: Callable[[str], Iterator[dict[str, Any]]] = lambda _: iter(())
        self.is_asked_for_all = False  # by whoever opened a stream last
        self.delay_s = 0.0
        self.gpus = 0  # in all of the swarm, as the answer to a submission tells
        self._condition = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.agent = self
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def note(self, method: str, path: str, body: Any) -> None:
        """Record a request and wake who waits for it."""
        with self._condition:
            self.requests.append((method, path, body))
            self._condition.notify_all()

    def wait_for(self, method: str, path: str, count: int = 1, limit_s: float = 60.0) -> list[Any]:
        """Bodies of the matching requests once there are `count`; `TimeoutError` otherwise."""
        end_s = time.monotonic() + limit_s
        with self._condition:
            while True:
                bodies = [body for m, p, body in self.requests if (m, p) == (method, path)]
                if len(bodies) >= count:
                    return bodies
                if not self._condition.wait(end_s - time.monotonic()):
                    raise TimeoutError(f"{method} {path} did not arrive; {[r[:2] for r in self.requests]} did")

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """The scripted answer, else a plausible one."""
        scripted = self.answers.get(f"{method} {path}")
        if scripted is not None:
            result = scripted(body, query) if callable(scripted) else scripted
            return result if isinstance(result, tuple) else (200, result)
        if path == "/v1/tickets":
            ticket = {
                "api_version": "v1",
                "job_id": JOB_ID,
                "handle": HANDLE,
                "holders": [self.name],
                "stores": ["0000000000002a"],
                "node": self.name,
            }
            return 200, ticket
        if (method, path) == ("POST", "/v1/jobs"):
            return self._submit(body)
        if path == "/v1/blobs/missing":
            return 200, {"missing": [d for d in body["digests"] if d not in self.blobs], "node": self.name}
        if path == "/v1/members":
            member = {"name": self.name, "address": self.address, "status": "alive", "version": "0.1.0"}
            return 200, {"api_version": "v1", "items": [member], "next_cursor": None}
        if path == "/v1/events":
            return 200, {"api_version": "v1", "items": [], "next_cursor": None, "silent_nodes": []}
        if path.startswith("/v1/jobs/") and method == "POST":
            return 202, job_document()
        return 404, problem(404, "unknown_job", f"no such job: {unquote(path.rsplit('/', 1)[-1])}", nearest=["digits"])

    def _submit(self, body: dict[str, Any]) -> tuple[int, Any]:
        job_id = body["ticket"]["job_id"]
        was_known = job_id in self.jobs
        document = job_document(id=job_id, spec=body["spec"], state="queued", nodes=[], was_known=was_known)
        document["swarm_gpus"] = self.gpus
        if not body["dry_run"]:
            self.jobs.setdefault(job_id, document)
        return (200 if was_known or body["dry_run"] else 201), document | {"dry_run": body["dry_run"]}

    def store(self, kind: str, path: str, body: bytes) -> dict[str, Any]:
        """Take blobs, packed or alone, checking digests as an agent does."""
        if path != "/v1/blobs":
            self._keep(path.rsplit("/", 1)[-1], body)
            return {"sha256": path.rsplit("/", 1)[-1], "size_bytes": len(body), "node": self.name}
        assert kind == "application/vnd.swarmsched.blobs"
        count = 0
        while body:
            digest, size = body[:32].hex(), int.from_bytes(body[32:40], "big")
            self._keep(digest, body[40 : 40 + size])
            body = body[40 + size :]
            count += 1
        return {"stored": count, "known": 0, "size_bytes": 0, "node": self.name}

    def _keep(self, digest: str, content: bytes) -> None:
        assert hashlib.sha256(content).hexdigest() == digest
        self.blobs[digest] = content


def event(time: str, kind: str, text: str = "completed", **changes: Any) -> dict[str, Any]:
    """An event of gpu1."""
    known = {"time": time, "agent": "gpu1", "sequence": 1, "kind": kind, "text": text, "job_id": None, "node": None}
    return {**known, "fields": {}, "cursor": time, **changes}


def status_document(members: dict[str, int], gpus: dict[str, int], jobs: dict[str, int], **changes: Any) -> Any:
    """The swarm in a few numbers, as 0.1.0 tells it."""
    unusable = dict.fromkeys(("foreign", "unhealthy", "stale", "draining", "away"), 0)
    return {
        "api_version": "v1",
        "node": "gpu1",
        "version": "0.1.0",
        "policy": {"name": "las", "parameters": {}, "elasticity": "on", "version": 1},
        "members": members,
        "gpus": {**unusable, **gpus},
        "jobs": jobs,
        "survival": {"jobs": {}, "without_majority": 0, "unknown": 0, "weakest": []},
        "silent_nodes": [],
        "as_of": "2025-01-31T12:00:00.000Z",
        "staleness_seconds": 0.0,
        **changes,
    }


def why_document(*, needs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Why a job of one rank waits, as 0.1.0 tells it."""
    nothing = ("cpus_per_rank", "memory_bytes_per_rank", "gpu_memory_bytes", "gpus_per_rank", "gpus", "ranks_most")
    return {
        "api_version": "v1",
        "job_id": JOB_ID,
        "handle": HANDLE,
        "state": "queued",
        "summary": "x",
        "policy": "fifo",
        "needs": {**dict.fromkeys(nothing, 0), "ranks": 1, "gpu_type": "", **(needs or {})},
        "needs_text": "",
        "free": {"gpus": 0, "total_gpus": 0, "nodes": 0},
        "free_text": "",
        "nodes": [],
        "ahead": [],
        "ahead_count": 0,
        "position": 1,
        "job_reason": "",
        "sentences": [],
        "as_of": "2025-01-31T12:00:00.000Z",
        "staleness_seconds": 0.0,
        "progress": None,
        "model": None,
        **changes,
    }


def problem(status: int, code: str, detail: str, **more: Any) -> dict[str, Any]:
    """An error document (RFC 9457)."""
    return {"type": f"/errors/{code}", "title": code, "status": status, "detail": detail, "code": code, **more}


def log(text: str, cursor: str, *, rank: int = 0, stream: str = "stdout") -> dict[str, Any]:
    """A record of output; bytes that are not text are sent as base64."""
    record = {"type": "log", "rank": rank, "node": "gpu1", "stream": stream, "time": "2025-01-31T12:00:02.000Z"}
    try:
        text.encode()
    except UnicodeEncodeError:
        data = base64.b64encode(text.encode("utf-8", "surrogateescape")).decode()
        return record | {"data": data, "cursor": cursor}
    return record | {"text": text, "cursor": cursor}


def state(name: str, cursor: str, **changes: Any) -> dict[str, Any]:
    """A record of a change of state."""
    job = job_document(state=name, **changes)
    return {
        "type": "state",
        **{k: job[k] for k in ("state", "phase", "reason", "attempt")},
        "job": job,
        "cursor": cursor,
    }


def end(cursor: str, code: int = 0, reason: str = "completed", **changes: Any) -> dict[str, Any]:
    """The last record of a followed stream."""
    job = ended(code, reason, **changes)
    keys = ("state", "exit_code", "signal", "end_reason", "shell_exit_code")
    return {"type": "end", **{key: job[key] for key in keys}, "job": job, "cursor": cursor}


class _Server(ThreadingHTTPServer):
    agent: FakeAgent
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is normal; tests look at the client's side."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:  # the name that http.server asks for
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PUT(self) -> None:
        self._handle("PUT")

    def do_DELETE(self) -> None:
        self._handle("DELETE")

    def _handle(self, method: str) -> None:
        agent = self.server.agent
        split = urlsplit(self.path)
        query = dict(parse_qsl(split.query))
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.headers.get("Content-Type", "")
        body = json.loads(raw) if raw and kind == "application/json" else raw
        agent.note(method, split.path, body or query)
        if agent.delay_s:
            time.sleep(agent.delay_s)
        if self.headers.get("Authorization") != f"Bearer {agent.token}":
            self._send(401, problem(401, "unauthorised", "the token is missing or wrong"))
        elif self.headers.get("Accept") == "text/event-stream":
            self._send_stream(agent)
        elif split.path.startswith("/v1/blobs") and split.path != "/v1/blobs/missing":
            self._send(200, agent.store(kind, split.path, raw))
        else:
            self._send(*agent.answer(method, unquote(split.path), query, body))

    def _send(self, status: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if status < 400 else "application/problem+json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"3"')
        self.send_header("X-Swarm-Node", self.server.agent.name)
        self.end_headers()
        self.wfile.write(data)

    def _send_stream(self, agent: FakeAgent) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        agent.is_asked_for_all = self.headers.get("X-Swarm-Lossless") == "1"
        self._chunk(b": hello\n\n")
        for record in agent.stream(self.headers.get("Last-Event-ID", "")):
            text = f"event: {record.get('type', 'message')}\nid: {record['cursor']}\ndata: {json.dumps(record)}\n\n"
            self._chunk(text.encode())
        self._chunk(b"")
        self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Nothing is printed: tests compare standard error."""

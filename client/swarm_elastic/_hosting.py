"""Where the shards of a training are served: each rank has its agent host one, and all find them in their store."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from swarm_elastic._commits import AWAY_S, VERSION
from swarm_elastic._membership import meeting
from swarm_elastic._shard_link import ShardPlace

BOARD = "swarm_elastic/outer"
MEET_S = 300.0
ANSWER_BYTES_MAX = 1 << 16
POLL_S = 60.0  # an agent answers within 20
LEAVE_S = 60.0
MEET_INTERVAL_S = 0.02
AWAY_MOST_S = 60.0


class Hosting:
    """One rank's part of it.  The first rank draws the key that all learners show."""

    def __init__(
        self,
        rank: int,
        size: int,
        parts: Sequence[tuple[int, int]],
        layout: str,
        rule: Mapping[str, Any],
        quorum: int,
        key: str,
        every: int,
    ) -> None:
        """`every`: steps between rounds to begin with, where the first shard decides how many there are; else 0."""
        self.key = key
        self._rank, self._size, self._parts = rank, size, parts
        self._told = {"layout": layout, "rule": dict(rule), "quorum": quorum}
        self._every = every
        self._store: Store | None = None
        self._address = ""  # of the own shard, as last heard
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="swarm-hosting", daemon=True)

    def begin(self) -> bool:
        """Meet the other ranks and have the own share hosted; False where any agent hosts none."""
        store = self._store = meeting()[0]
        if self._rank == 0:
            store.set(f"{BOARD}/key", self.key)
        self.key = _text(store, f"{BOARD}/key")
        place = self._ask(AWAY_MOST_S) if self._is_host else None
        if place:
            store.set(f"{BOARD}/place/{self._rank}", json.dumps(place))
        store.set(f"{BOARD}/answer/{self._rank}", json.dumps(bool(place) or not self._is_host))
        answers = [json.loads(_text(store, f"{BOARD}/answer/{rank}")) for rank in range(self._size)]
        if not all(answers):
            return False
        if self._is_host:
            self._thread.start()
        return True

    def place(self, index: int) -> ShardPlace | None:
        """Where a shard is now."""
        assert self._store is not None
        told = json.loads(_text(self._store, f"{BOARD}/place/{index}"))
        return ShardPlace(told["address"], told["fingerprint"])

    def meet(self, where: str, timeout_s: float, told: str = "") -> list[str]:
        """Tell the other ranks something, and hear what all have told; fewer where some have not come there in time."""
        assert self._store is not None
        self._store.set(f"{BOARD}/{where}/{self._rank}", told or "-")
        end_s = time.monotonic() + timeout_s
        while (count := self.count(where)) < self._size and time.monotonic() < end_s:
            time.sleep(MEET_INTERVAL_S)
        names = [f"{BOARD}/{where}/{rank}" for rank in range(self._size)]
        return [_text(self._store, name) for name in names if count == self._size or self._store.check([name])]

    def count(self, where: str) -> int:
        """How many ranks have come there."""
        assert self._store is not None
        return sum(bool(self._store.check([f"{BOARD}/{where}/{rank}"])) for rank in range(self._size))

    def close(self, *, is_done: bool) -> None:
        """Let the first rank, whose process has the store, wait for the others where all have come to the end."""
        self._is_closed = True
        if self._store is not None and is_done:
            self.meet("left", LEAVE_S if self._rank == 0 else 0.0)

    @property
    def _is_host(self) -> bool:
        return self._rank < len(self._parts)

    def _run(self) -> None:
        """Tell the others where the own shard has gone: an aggregator that was started anew has another port."""
        assert self._store is not None
        while not self._is_closed:
            try:
                place = self._ask()
                if place is not None and not self._is_closed:
                    self._store.set(f"{BOARD}/place/{self._rank}", json.dumps(place))
            except Exception:  # noqa: BLE001  # the store ends with the first rank
                time.sleep(AWAY_S)

    def _ask(self, away_s: float = 0.0) -> dict[str, str] | None:
        """What the agent says: at once where the address is another than was last heard, else after a while.

        An agent that is away is waited for; None where it stays away for so long, or hosts nothing.
        """
        start, stop = self._parts[self._rank]
        learners = [str(rank) for rank in range(self._size)]
        request = {"v": VERSION, "type": "outer", "token": os.environ.get("SWARM_TASK_TOKEN", ""), **self._told}
        request |= {"every": self._every} if self._rank == 0 else {}
        request |= {"start": start, "size": stop - start, "learners": learners, "key": self.key, "known": self._address}
        end_s = time.monotonic() + away_s
        while (answer := _exchange(request)) is None and time.monotonic() < end_s:
            time.sleep(AWAY_S)
        if answer is None or answer.get("ok") is not True:
            time.sleep(AWAY_S)
            return None
        self._address = str(answer["address"])
        return {"address": self._address, "fingerprint": str(answer["fingerprint"])}


def _exchange(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """One request to the agent; None where it is away."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(POLL_S)
            connection.connect(os.environ["SWARM_TASK_SOCKET"])
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer = json.loads(stream.readline(ANSWER_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _text(store: Store, name: str) -> str:
    store.wait([name], timedelta(seconds=MEET_S))
    return bytes(store.get(name)).decode()

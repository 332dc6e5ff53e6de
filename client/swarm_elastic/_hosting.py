"""Where the shards of a training are served: for each range one learner of the plan asks its agent, and shows where.

Which learner that is follows from the plan alone, and changes with it as little as may be.  A range that moves is
hosted anew before the former host gives it up, or without it: the new shard has its weights from the learners.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from swarm_elastic._commits import AWAY_S, VERSION
from swarm_elastic._plan import hosts_of
from swarm_elastic._roster import LearnerPlan, LearnerRoster
from swarm_elastic._shard_link import ShardPlace

ANSWER_BYTES_MAX = 1 << 16
POLL_S = 60.0  # an agent answers within 20
REFUSED_S = 2.0
LOOK_S, LOOK_MOST_S = 0.02, 0.25
AWAY_MOST_S = 60.0
ANSWERS_S = 300.0


class Hosting:
    """One learner's part of it.  `told` is what all requests have in common, `every` what that for the first range has.

    `every` are the steps between rounds to begin with, where the first shard decides how many there are; else 0.
    """

    def __init__(
        self, roster: LearnerRoster, parts: Sequence[tuple[int, int]], told: Mapping[str, Any], every: int
    ) -> None:
        self._roster, self._parts, self._told, self._every = roster, parts, dict(told), every
        self._plan: LearnerPlan | None = None
        self._hosted: set[int] = set()
        self._lock = threading.Lock()

    def follow(self, plan: LearnerPlan) -> None:
        """Have what this learner is to host hosted under that plan, in threads, and nothing else any more."""
        hosts = hosts_of(len(self._parts), plan.learners)
        mine = {index for index, host in enumerate(hosts) if host == self._roster.learner}
        with self._lock:
            given_up, self._hosted, self._plan = self._hosted - mine, mine, plan
        for index in mine:
            _start(f"swarm-host-{index}", self._host, index, plan)
        for index in given_up:
            _start(f"swarm-drop-{index}", self._drop, index, plan)

    def is_hosted(self) -> bool:
        """Whether all shards are, by the first answer of each agent: so all learners come to the same."""
        assert self._plan is not None
        hosts = hosts_of(len(self._parts), self._plan.learners)
        end_s, pause_s = time.monotonic() + ANSWERS_S, LOOK_S
        for index, host in enumerate(hosts):
            answer = None
            while answer is None and time.monotonic() < end_s:
                with suppress(OSError):
                    answer = self._roster.read(host, f"answer/{index}")
                if answer is None:
                    time.sleep(pause_s)
                    pause_s = min(LOOK_MOST_S, 1.5 * pause_s)
            if answer != "yes":
                return False
        return True

    def place(self, index: int) -> ShardPlace | None:
        """Where a shard is now, under this plan.  Raises OSError where that cannot be read."""
        plan = self._plan
        if plan is None:
            return None
        text = self._roster.read(hosts_of(len(self._parts), plan.learners)[index], f"place/{index}")
        told = json.loads(text) if text else None
        if told is None or tuple(told["plan"]) < plan.number:
            return None
        return ShardPlace(told["address"], told["fingerprint"])

    def close(self) -> None:
        """Ask no more."""
        self._plan = None

    def _host(self, index: int, plan: LearnerPlan) -> None:
        """Tell the others where a shard is, and where it has gone: its address may change at any time."""
        known, end_s = "", time.monotonic() + AWAY_MOST_S
        while self._plan is plan:
            answer = _exchange(self._request(index, plan) | {"known": known})
            if self._plan is not plan:
                return
            is_hosted = answer is not None and answer.get("ok") is True
            with suppress(OSError, RuntimeError):  # a store that ends with the first rank
                if answer is not None and is_hosted:
                    known = str(answer["address"])
                    place = {"plan": plan.number, "address": known, "fingerprint": str(answer["fingerprint"])}
                    self._roster.show(f"place/{index}", json.dumps(place))
                if answer is not None or time.monotonic() > end_s:
                    self._answer_once(index, "yes" if is_hosted else "no")
            if not is_hosted:
                time.sleep(AWAY_S if answer is None else REFUSED_S)

    def _drop(self, index: int, plan: LearnerPlan) -> None:
        _exchange({**self._request(index, plan), "drop": True})

    def _answer_once(self, index: int, answer: str) -> None:
        name = f"answer/{index}"
        if self._roster.read(self._roster.learner, name) is None:
            self._roster.show(name, answer)

    def _request(self, index: int, plan: LearnerPlan) -> dict[str, Any]:
        start, stop = self._parts[index]
        who = {"v": VERSION, "type": "outer", "token": os.environ.get("SWARM_TASK_TOKEN", "")}
        what = {"start": start, "size": stop - start, "plan": list(plan.number), "learners": list(plan.learners)}
        every = {"every": self._every} if self._every and index == 0 else {}
        return {**who, **self._told, **what, **every, "key": plan.key, "known": ""}


def _start(name: str, act: Callable[[int, LearnerPlan], None], index: int, plan: LearnerPlan) -> None:
    """In a thread that the process's end does not wait for: agents answer late."""
    threading.Thread(target=act, name=name, args=(index, plan), daemon=True).start()


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

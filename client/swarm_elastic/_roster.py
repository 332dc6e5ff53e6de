"""Who learns: the plans of a training whose ranks train apart, and where each learner shows what the others need.

The learners of a gang of fixed size are its ranks, for good, and all that they show is in the store at which ranks
meet.  The workers of an elastic job hear of plans from their agents, and each has a board of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from swarm_elastic import _board
from swarm_elastic._board import Board
from swarm_elastic._link import AgentLink
from swarm_elastic._membership import meeting, number_of_training, own_host
from swarm_elastic._plan import GangPlan, PlanMember

SHOWN = "swarm_elastic/outer"
MEET_S = 300.0
FLUSH_S = 2.0


class LearnerPlan(NamedTuple):
    """Who learns from some moment on.  Numbers only grow: the attempt, and the version of the gang in it."""

    number: tuple[int, int]
    learners: tuple[str, ...]
    key: str  # what learners show to shards
    is_first: bool = True  # nobody has trained yet


class LearnerRoster(Protocol):
    """Of one learner.  `keeps_board`: what it shows ends with it, so it stays until the others have read it."""

    learner: str
    is_changing: bool  # whether other plans may come
    keeps_board: bool

    def begin(self, layout: str, on_plan: Callable[[LearnerPlan], None]) -> None:
        """Ask for plans; `on_plan` is called with each, in another thread, or before this returns."""

    def show(self, name: str, text: str) -> None:
        """Show a text to all learners."""

    def read(self, learner: str, name: str) -> str | None:
        """What a learner shows.  Raises OSError where it is not there."""

    def tell(self, **changes: Any) -> None:
        """Let the agent know how this learner stands."""

    def close(self) -> None:
        """The last word was said, and all was read."""


class RankRoster:
    """Of a gang of fixed size."""

    is_changing = False

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._store, rank, self._size = meeting()
        self.learner, self.keeps_board = str(rank), rank == 0

    def begin(self, layout: str, on_plan: Callable[[LearnerPlan], None]) -> None:
        """See `LearnerRoster`.  The first rank draws the key."""
        if self.learner == "0":
            self._store.set(f"{SHOWN}/key", secrets.token_hex(16))
        self._store.wait([f"{SHOWN}/key"], timedelta(seconds=MEET_S))
        key = bytes(self._store.get(f"{SHOWN}/key")).decode()
        on_plan(LearnerPlan((self._attempt, 1), tuple(map(str, range(self._size))), key))

    def show(self, name: str, text: str) -> None:
        """See `LearnerRoster`."""
        self._store.set(f"{SHOWN}/{self.learner}/{name}", text)

    def read(self, learner: str, name: str) -> str | None:
        """See `LearnerRoster`."""
        at = f"{SHOWN}/{learner}/{name}"
        try:
            return bytes(self._store.get(at)).decode() if self._store.check([at]) else None
        except RuntimeError as error:  # the store ends with the first rank
            raise ConnectionError(str(error)) from error

    def tell(self, **changes: Any) -> None:
        """The agent sees to a gang of fixed size by itself."""

    def close(self) -> None:
        """The store is torch's."""


class WorkerRoster:
    """Of an elastic job."""

    is_changing = keeps_board = True

    def __init__(self, path: str, job: str, attempt: int) -> None:
        self.learner = os.environ["SWARM_WORKER"]
        self._job, self._attempt = job, attempt
        self._board = Board(own_host())
        self._members: dict[str, PlanMember] = {}
        self._on_plan: Callable[[LearnerPlan], None] = lambda plan: None
        token = os.environ.get("SWARM_TASK_TOKEN", "")
        self._link = AgentLink(path, token, self.learner, self._board.address, self._hear, self._board.secret)

    def begin(self, layout: str, on_plan: Callable[[LearnerPlan], None]) -> None:
        """See `LearnerRoster`."""
        self._on_plan = on_plan
        self._link.tell(state="ready", layout=layout)

    def _hear(self, plan: GangPlan) -> None:
        self._members |= {each.worker: each for each in plan.members}  # who has left still shows its last words
        known = json.dumps([self._job, self._attempt, plan.version, *(each.secret for each in plan.members)])
        key = hashlib.sha256(known.encode()).hexdigest()
        is_first = plan.version == 1 or plan.may_start
        self._on_plan(LearnerPlan((self._attempt, plan.version), plan.workers, key, is_first))

    def show(self, name: str, text: str) -> None:
        """See `LearnerRoster`."""
        self._board.show(name, text)

    def read(self, learner: str, name: str) -> str | None:
        """See `LearnerRoster`."""
        if learner == self.learner:
            return self._board.text(name)
        member = self._members[learner]
        return _board.read(member.endpoint, member.secret, name)

    def tell(self, **changes: Any) -> None:
        """See `LearnerRoster`."""
        self._link.tell(**changes)

    def close(self) -> None:
        """The agent goes on to hear of this worker: the script may not be at its end."""
        self._link.flush(FLUSH_S)
        self._board.close()


def find_roster() -> LearnerRoster | None:
    """Of this process, by its environment; None where it trains alone.  Raises RuntimeError for a second one."""
    path, attempt = os.environ.get("SWARM_TASK_SOCKET", ""), int(os.environ.get("SWARM_ATTEMPT", "1"))
    worker = os.environ.get("SWARM_WORKER", "")
    if not path or not (worker or rank_and_size()[1] > 1):
        return None
    if number_of_training():  # it would be given the weights of the first one
        raise RuntimeError("this process trains already, by an Outer or an Elastic; put all into one module")
    return WorkerRoster(path, os.environ.get("SWARM_JOB_ID", ""), attempt) if worker else RankRoster(attempt)


def rank_and_size() -> tuple[int, int]:
    """Of this process, by its environment.  Raises ValueError."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not rank.isdecimal() or not size.isdecimal() or int(rank) >= int(size):
        raise ValueError(f"RANK is {rank!r} and WORLD_SIZE {size!r}; leave both as the swarm sets them")
    return int(rank), int(size)

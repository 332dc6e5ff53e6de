"""Groups of coming memberships, built in threads beside the training.

Of the plans that an agent names the newest that was built is the candidate: what training may switch to.  A plan that
is replaced before all of its members came is waited for by nobody; its thread ends at its time limit.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from swarm_elastic import _background
from swarm_elastic._group import Group, build
from swarm_elastic._plan import GangPlan

BUILD_S = 60.0
STORE_S = 300.0
TURN_S = 0.05
PATIENCE_S = 1.0  # and at least so many steps: how long an operation may wait beside a newer group that stands ready
PATIENCE_STEPS = 3.0


class CandidatePlan(NamedTuple):
    """A plan that may be switched to.  Without a group it is one that this worker is not a member of."""

    plan: GangPlan
    group: Group | None

    def close(self) -> None:
        """Of no more use."""
        if self.group:
            self.group.close()


class Lodging:
    """A worker's own store, where the members of its plans meet, and that of others.

    A store knows no password, so its keys have names that only members can tell: each version has its own, made of a
    secret that agents hand on with the address.
    """

    def __init__(self, host: str, job: str) -> None:
        self._job = job
        self.secret = secrets.token_hex(16)
        # By itself a store listens on all interfaces.
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        options = {"wait_for_workers": False, "timeout": _seconds(STORE_S), "master_listen_fd": listening.detach()}
        self._own = TCPStore(host, port, is_master=True, **options)
        self.host, self.address = host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def of(self, plan: GangPlan) -> Store:
        """Where the members of a plan meet: at its first member's.  Raises RuntimeError where that does not answer."""
        host, port = plan.members[0].endpoint
        is_own = plan.members[0].address == self.address
        # A connection of its own for each: a reader that waits occupies it.
        store = self._own.clone() if is_own else TCPStore(host, port, is_master=False, timeout=_seconds(BUILD_S))
        store.set_timeout(_seconds(BUILD_S))
        return PrefixStore(self._name(plan), store)

    def _name(self, plan: GangPlan) -> str:
        """Of its keys; workers of the first version know but one."""
        name = f"{self._job}/g{plan.version}"
        if plan.is_former:
            return name
        return hashlib.sha256(f"{plan.members[0].secret}/{name}".encode()).hexdigest()


class Builder:
    """Has each new plan's group built, and ends waits that a newer plan has made vain.  One for each worker."""

    def __init__(self, worker: str, lodging: Lodging, device: torch.device, tell: Callable[..., None]) -> None:
        self._worker, self._lodging, self._device, self._tell = worker, lodging, device, tell
        self._changed = threading.Condition()
        self._newest: GangPlan | None = None
        self._candidate: CandidatePlan | None = None
        self._rejected = 0
        self._entered: CandidatePlan | None = None  # whose group training waits in, or may
        self._waits_since_s = 0.0  # 0: it does not wait
        self._patience_s = 0.0

    def on_plan(self, plan: GangPlan) -> None:
        """A newer plan was heard of."""
        with self._changed:
            self._newest, entered = plan, self._entered
        if entered and plan.lost.intersection(entered.plan.workers):
            entered.close()
        _background.start(f"swarm-build-{plan.version}", self._build, plan)

    # Training's side.

    def candidate(self, above: int) -> CandidatePlan | None:
        """What may be switched to, if it is newer than this version."""
        candidate = self._candidate
        return candidate if candidate and candidate.plan.version > max(above, self._rejected) else None

    def wait(self, above: int, timeout_s: float | None, *, as_member: bool) -> CandidatePlan | None:
        """Wait for a candidate above this version, `as_member`: of which this worker is a member; None: too late."""

        def found() -> CandidatePlan | None:
            candidate = self.candidate(above)
            return candidate if candidate and (candidate.group or not as_member) else None

        with self._changed:
            return self._changed.wait_for(found, timeout_s)

    def reject(self, candidate: CandidatePlan) -> None:
        """A plan came to nothing, or was lost: it is never offered again."""
        candidate.close()
        self._has_failed(candidate.plan)

    def _has_failed(self, plan: GangPlan, **told: str) -> None:
        with self._changed:
            self._rejected = max(self._rejected, plan.version)
        self._tell(failed=self._rejected, **told)

    def enter(self, candidate: CandidatePlan | None) -> None:
        """Training goes on in this group, or tries to."""
        with self._changed:
            self._entered = candidate
            self._changed.notify_all()

    @contextlib.contextmanager
    def waiting(self, step_s: float | None) -> Iterator[None]:
        """Around each operation of a group that may not end; `step_s` is how long a step takes, None for a newcomer."""
        self._patience_s = 0.0 if step_s is None else max(PATIENCE_S, PATIENCE_STEPS * step_s)
        self._waits_since_s = time.monotonic()
        try:
            yield
        finally:
            self._waits_since_s = 0.0

    # In a thread for each plan.

    def _build(self, plan: GangPlan) -> None:
        rank, size = plan.rank_of(self._worker), len(plan.members)
        entered, group = self._entered, None
        if entered and not set(plan.workers).intersection(entered.plan.workers):
            self._tell(problem=f"plan {plan.version} keeps no member of plan {entered.plan.version}; name one of both")
            return
        if rank >= 0:
            try:
                store: Any = self._lodging.of(plan) if size > 1 else None
                group = build(store, rank, size, self._device, self._lodging.host, BUILD_S)
            except Exception as error:  # noqa: BLE001  # of whatever kind: in this thread nobody else would tell of it
                if plan is self._newest:
                    self._has_failed(
                        plan, problem=f"plan {plan.version} was not built: {type(error).__name__}: {error}"
                    )
                return
        candidate = CandidatePlan(plan, group)
        if self._offer(candidate) and group is not None:  # who leaves waits until the others let it go
            self._free(candidate)

    def _offer(self, candidate: CandidatePlan) -> bool:
        """Make it the candidate; false when a newer one came first."""
        with self._changed:
            older = self._candidate
            is_newer = older is None or older.plan.version < candidate.plan.version
            if is_newer:
                self._candidate = candidate
                self._changed.notify_all()
            stale = older if is_newer else candidate
            is_used = stale is not None and stale is self._entered
        if stale and not is_used:
            stale.close()
        return is_newer

    def _free(self, candidate: CandidatePlan) -> None:
        """End training's wait in an older group if it lasts too long beside this one, until training is in this one."""
        while True:
            with self._changed:
                self._changed.wait(TURN_S)
                entered, since_s = self._entered, self._waits_since_s
                is_over = candidate is not self._candidate or entered is candidate
            if is_over:
                return
            if entered and since_s and time.monotonic() > since_s + self._patience_s:
                entered.close()


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)

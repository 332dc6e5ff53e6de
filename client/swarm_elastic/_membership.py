"""How a process comes to its groups: by plans of a swarm, by torchrun's environment, or alone."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store

from swarm_elastic._builder import BUILD_S, Builder, CandidatePlan, Lodging
from swarm_elastic._group import Alone, Group, build
from swarm_elastic._link import AgentLink
from swarm_elastic._plan import GangPlan, PlanMember

FLUSH_S = 2.0
RECOVERY_S = 600.0
WORLD = ("WORLD_SIZE", "LOCAL_RANK")

_hidden: dict[str, str] = {}  # of the environment
_numbers = itertools.count()  # of the groups of this process


class CandidateSource(Protocol):
    """Where candidates come from; see `Builder` for all but `tell`."""

    worker: str
    no_plan: str  # what is told where none came within RECOVERY_S

    def candidate(self, above: int) -> CandidatePlan | None:
        """What may be switched to."""

    def wait(self, above: int, timeout_s: float | None, *, as_member: bool) -> CandidatePlan | None:
        """Wait for it."""

    def reject(self, candidate: CandidatePlan) -> None:
        """A plan came to nothing."""

    def enter(self, candidate: CandidatePlan | None) -> None:
        """Training goes on in it."""

    def waiting(self, step_s: float | None) -> AbstractContextManager[None]:
        """Around operations."""

    def tell(self, **changes: Any) -> None:
        """Let the agent know how this worker stands."""

    def part(self) -> None:
        """Wait until it knows."""


class SwarmMembership(Builder):
    """By the plans of an agent."""

    no_plan = f"no plan without it came within {RECOVERY_S:g} s"

    def __init__(self, path: str, device: torch.device) -> None:
        self.worker = os.environ["SWARM_WORKER"]
        job = f"{os.environ.get('SWARM_JOB_ID', 'job')}.{os.environ.get('SWARM_ATTEMPT', '1')}"
        lodging = Lodging(own_host(), job)
        token = os.environ.get("SWARM_TASK_TOKEN", "")
        self._link = AgentLink(path, token, self.worker, lodging.address, self.on_plan, lodging.secret)
        super().__init__(self.worker, lodging, device, self._link.tell)

    def tell(self, **changes: Any) -> None:
        """With the first word the agent is asked for plans."""
        self._link.tell(**changes)

    def part(self) -> None:
        """The last word."""
        self._link.flush(FLUSH_S)


class StaticMembership:
    """One group that never changes."""

    no_plan = "outside of a swarm the others cannot go on without it: start the job again, from a checkpoint"

    def __init__(self, group: Group) -> None:
        members = tuple(PlanMember(f"rank-{rank}", f"localhost:{rank + 1}", "static") for rank in range(group.size))
        self.worker = members[group.rank].worker
        self._only: CandidatePlan | None = CandidatePlan(GangPlan(1, 0, members), group)

    def candidate(self, above: int) -> CandidatePlan | None:
        """There is but one."""
        return self._only if above < 1 else None

    def wait(self, above: int, timeout_s: float | None, *, as_member: bool) -> CandidatePlan | None:
        """Nothing comes."""
        return self.candidate(above)

    def reject(self, candidate: CandidatePlan) -> None:
        """Then there is none."""
        candidate.close()
        self._only = None

    def enter(self, candidate: CandidatePlan | None) -> None:
        """As it was."""

    def waiting(self, step_s: float | None) -> AbstractContextManager[None]:
        """Nobody ends it."""
        return nullcontext()

    def tell(self, **changes: Any) -> None:
        """There is nobody to tell."""

    def part(self) -> None:
        """See `tell`."""


def number_of_training() -> int:
    """How many trainings this process has begun before, whatever of."""
    return next(_numbers)


def find(device: torch.device) -> CandidateSource:
    """Of this process, by its environment."""
    path, worker = os.environ.get("SWARM_TASK_SOCKET", ""), os.environ.get("SWARM_WORKER", "")
    number = number_of_training()
    if path and worker:
        if number:  # it would tell the agent that the worker has not trained, and the job be ended for that
            problem = f"worker {worker} of this job has an Elastic already, and can train with one only"
            raise RuntimeError(f"{problem}; put all that is trained into one module, or into a job of its own")
        return SwarmMembership(path, device)
    return StaticMembership(_from_environment(device, number))


def _from_environment(device: torch.device, number: int) -> Group:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them; groups come in one order on all ranks."""
    size = _hidden.get("WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    if not size.isdecimal():
        raise ValueError(f"WORLD_SIZE is {size!r}; set it to the number of ranks, as torchrun does, or not at all")
    if int(size) == 1:
        return Alone()
    store, rank, world = meeting()
    return build(PrefixStore(f"swarm_elastic/{number}", store), rank, world, device, own_host(), BUILD_S)


@cache
def meeting() -> tuple[Store, int, int]:
    """The store where all ranks meet, with rank and number, once in a process: the first one has the port of it."""
    from torch.distributed import rendezvous

    with _shown():
        store, rank, size = next(iter(rendezvous("env://")))
    return store, rank, size


@contextmanager
def _shown() -> Iterator[None]:
    os.environ.update(_hidden)
    try:
        yield
    finally:
        for name in _hidden:
            del os.environ[name]


def hide_world() -> None:
    """Keep from other libraries what makes them form a process group of their own; each process sees its own GPU."""
    local = os.environ.get("LOCAL_RANK", "")
    if local.isdecimal():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", local).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(local)] if int(local) < len(visible) else visible[0]
    _hidden.update({name: os.environ.pop(name) for name in WORLD if name in os.environ})


def own_host() -> str:
    """The address under which others reach this process: as the swarm says, else on the way to the first rank."""
    given = os.environ.get("SWARM_FABRIC_HOST", "")
    if given:
        return given
    target = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])

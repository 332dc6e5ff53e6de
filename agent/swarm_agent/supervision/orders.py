"""A task's directory: what the agent writes for the shim and for its own next life, and what the shim writes back.

DATA/tasks/<job id>.<attempt>[.<part>]/
    order.json   the order and the GPUs, for an agent that restarts
    launch       the same for the shim, in its own simple format
    token        SWARM_TASK_TOKEN of its ranks
    facts, commands, lock, lease, shim.err   see `shim`
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from swarm_agent.task.account import Account
from swarm_agent.task.shim import LAUNCH_FORMAT, counted
from swarmsched.api import JobSpec
from swarmsched.checkpoint import Checkpoint
from swarmsched.errors import StorageError, SwarmError
from swarmsched.ids import JobId, NodeId, TaskKey, is_job_id
from swarmsched.resources import Gpu, GpuHealth, Share
from swarmsched.task import GroupPlace, RankExit, TaskFailure, TaskOrder

_FAILURES = {
    "none": TaskFailure.NONE,
    "not_found": TaskFailure.NOT_FOUND,
    "not_executable": TaskFailure.NOT_EXECUTABLE,
    "sync": TaskFailure.SYNC,
    "port_taken": TaskFailure.PORT_TAKEN,
    "internal": TaskFailure.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """Everything the shim needs; see `shim.Launch` for the reading side."""

    key: TaskKey
    log_dir: Path
    log_limit_bytes: int
    log_head_bytes: int
    workdir: Path
    umask: int
    account: Account
    grace_s: float
    listen_fd: int
    port: int
    argv: tuple[str, ...]
    common_env: Mapping[str, str]
    rank_envs: Mapping[int, Mapping[str, str]]
    scope: tuple[str, ...] = ()
    warm_argv: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Strings separated by NUL; none of them may hold one, which the specification's check has seen to."""
        account = self.account
        parts = [LAUNCH_FORMAT, str(self.key).replace("/", " "), str(self.log_dir)]
        parts += [str(self.log_limit_bytes), str(self.log_head_bytes), str(self.workdir), str(self.umask)]
        parts += [str(account.uid), str(account.gid), *counted([str(group) for group in account.groups])]
        parts += [str(self.grace_s), str(self.listen_fd), str(self.port)]
        parts += [*counted([*self.argv]), *counted(_pairs(self.common_env)), str(len(self.rank_envs))]
        for rank, env in self.rank_envs.items():
            parts += [str(rank), *counted(_pairs(env))]
        parts += [*counted([*self.scope]), *counted([*self.warm_argv])]
        return "\0".join(parts).encode("utf-8", "surrogateescape")


def _pairs(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in env.items()]


class FactKind(Enum):
    """What a line of the shim's record says."""

    SHIM = "shim"
    STARTED = "started"
    EXIT = "exit"
    EXITED = "exited"
    FROZEN = "frozen"
    THAWED = "thawed"


@dataclass(slots=True)
class ReadFacts:
    """The shim's record, read as far as it has been written."""

    offset: int = 0
    shim_pid: int = 0
    shim_start_ticks: int = 0
    started_utc_s: float = 0.0
    rank_starts: dict[int, int] = field(default_factory=dict)  # pid -> start in clock ticks since boot
    exits: dict[int, RankExit] = field(default_factory=dict)
    is_exited: bool = False
    is_frozen: bool = False
    is_damaged: bool = False  # a line says nothing that a shim says: how the task ends cannot be told any more
    failure: TaskFailure = TaskFailure.NONE
    detail: str = ""

    def read(self, path: Path) -> list[FactKind | RankExit]:
        """Take in what was appended since the last call; what happened, in order."""
        try:
            with path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:  # not there yet; or it is looked at again, when the shim has ended at the latest
            return []
        whole = data[: data.rfind(b"\n") + 1]  # behind it: zeros (reserved room) or a line being written
        self.offset += len(whole)
        told = []
        for line in whole.split(b"\n"):
            try:
                told += [self._take(line.decode("utf-8", "replace"))] if line else []
            except (ValueError, KeyError):
                self.is_damaged = True
        if self.is_damaged:
            self.failure, self.detail = TaskFailure.LOST, "what its supervising process wrote down cannot be read"
        return told

    def has_shim(self, pid: int) -> None:
        """The shim is known before it has written that down."""
        self.shim_pid = pid

    def _take(self, line: str) -> FactKind | RankExit:
        word, _, rest = line.partition(" ")
        kind = FactKind(word)
        if kind is FactKind.SHIM:
            self.shim_pid, self.shim_start_ticks = (int(number) for number in rest.split())
        elif kind is FactKind.STARTED:
            utc, *ranks = rest.split()
            self.started_utc_s = float(utc)
            triples = (entry.split(":") for entry in ranks)
            self.rank_starts = {int(pid): int(ticks) for _, pid, ticks in triples}
        elif kind is FactKind.EXIT:
            rank, code, signal, is_oom = (int(number) for number in rest.split()[:4])
            self.exits[rank] = RankExit(rank, code, signal, bool(is_oom))
            return self.exits[rank]
        elif kind in (FactKind.FROZEN, FactKind.THAWED):
            self.is_frozen = kind is FactKind.FROZEN
        else:
            _, failure, self.detail = rest.split(" ", 2)
            self.failure, self.is_exited = _FAILURES[failure], True
        return kind

    @property
    def exit_list(self) -> tuple[RankExit, ...]:
        """Exits in rank order."""
        return tuple(self.exits[rank] for rank in sorted(self.exits))


def directory_name(key: TaskKey) -> str:
    """Name of the task's directory."""
    return str(key).replace("/", ".")


def parse_directory_name(name: str) -> TaskKey | None:
    """The key behind a directory's name; None for anything else that lies there."""
    job_id, *numbers = name.split(".")
    is_key = is_job_id(job_id) and len(numbers) in (1, 2) and all(map(str.isdecimal, numbers))
    return TaskKey(JobId(job_id), *map(int, numbers)) if is_key else None


def order_to_json(order: TaskOrder, gpus: Sequence[Gpu]) -> bytes:
    """The durable form of an order."""
    document = {
        "format": 1,
        "job_id": order.job_id,
        "epoch": order.epoch,
        "attempt": order.attempt,
        "node": order.node,
        "spec": _without_defaults(order.spec),
        "part": order.part,
        "shares": [_shown(share) for share in order.shares],
        "first_number": order.first_number,
        "groups": msgspec.to_builtins(order.groups),
        "rendezvous": [order.rendezvous_host, order.rendezvous_port],
        "checkpoint": asdict(order.checkpoint) if order.checkpoint else None,
        "gpus": [asdict(gpu) | {"health": gpu.health.value} for gpu in gpus],
    }
    return json.dumps(document).encode()


def _without_defaults(spec: JobSpec) -> dict[str, Any]:
    """What differs from a job that says nothing: an earlier version, come back, refuses keys that it does not know."""
    defaults = JobSpec(()).to_json()
    return {key: value for key, value in spec.to_json().items() if value != defaults[key]}


def order_from_json(data: bytes, path: Path) -> tuple[TaskOrder, tuple[Gpu, ...]]:
    """Read it back; raises `StorageError` when it was written by another program or only half."""
    try:
        document = json.loads(data)
        host, port = document["rendezvous"]
        order = TaskOrder(
            job_id=JobId(document["job_id"]),
            epoch=document["epoch"],
            attempt=document["attempt"],
            node=NodeId(document["node"]),
            spec=JobSpec.from_json(document["spec"]),
            shares=tuple(_share(*share) for share in document["shares"]),
            rendezvous_host=host,
            rendezvous_port=port,
            checkpoint=_checkpoint(document.get("checkpoint")),
            part=document.get("part", 0),
            first_number=document.get("first_number", 0),
            groups=msgspec.convert(document.get("groups", ()), tuple[GroupPlace, ...]),
        )
        gpus = tuple(Gpu(**(gpu | {"health": GpuHealth(gpu["health"])})) for gpu in document["gpus"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SwarmError) as error:
        raise StorageError(str(path), f"is no task order: {error}", "the task is given up; its log is kept") from error
    return order, gpus


def _shown(share: Share) -> list[str | int]:
    """An earlier version, come back, reads three of these, and ran no jobs with groups."""
    return [share.node, share.ranks, share.part, *([share.group] if share.group else [])]


def _share(node: str, ranks: int, part: int = 0, group: int = 0) -> Share:
    """Those of an earlier version have no part and no group."""
    return Share(NodeId(node), ranks, part=part, group=group)


def _checkpoint(document: dict[str, Any] | None) -> Checkpoint | None:
    """Orders of an earlier version have none."""
    if document is None:
        return None
    return Checkpoint(**(document | {"copies": tuple(NodeId(node) for node in document["copies"])}))

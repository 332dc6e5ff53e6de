"""What supervision and staging are told about this node."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm_agent.checkpoints.service import CheckpointPeers
from swarm_agent.config import DEFAULT_ENV_ALLOW
from swarm_agent.supervision.logs import LogStore
from swarmsched.errors import ConfigError
from swarmsched.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Settings of the task runner.

    `fabric_address` is the IP address on which rank 0 listens; `rendezvous_ports` the inclusive range to choose from
    (default 20 per GPU by the caller), which should be disjoint from the kernel's ephemeral range.  `python` is the
    interpreter of the shim and of built environments; empty: the one under the agent's own virtual environment.
    `job_user` is the account that jobs run as when the agent is root; empty: the agent's own.
    With `limit_tasks` tasks are held to what they booked, where the machine can, and to `task_processes_max` each.
    `checkpoint_dir` is the root of checkpoint folders; None: `checkpoints` in `data_dir`.
    """

    node_id: NodeId
    data_dir: Path
    fabric_address: str = "127.0.0.1"
    rendezvous_ports: tuple[int, int] = (23_000, 23_319)
    python: str = ""
    job_user: str = ""
    env_allow: tuple[str, ...] = DEFAULT_ENV_ALLOW
    probe_timeout_s: float = 2.0
    probe_attempts: int = 3
    environment_limit_bytes: int = 50 * 2**30
    environment_timeout_s: float = 1_800.0
    work_limit_bytes: int = 20 * 2**30
    work_retention_s: float = 7 * 86_400.0
    checkpoint_dir: Path | None = None
    checkpoint_dir_shared: bool = False
    limit_tasks: bool = False
    task_processes_max: int = 16_384

    def __post_init__(self) -> None:
        low, high = self.rendezvous_ports
        if not 1 <= low <= high <= 65_535:
            raise ConfigError(
                "rendezvous_ports", f"{low}-{high} is not a range of ports", "give first-last, 1 to 65535"
            )
        if not self.data_dir.is_absolute():
            raise ConfigError("data_dir", f"{str(self.data_dir)!r} is relative", "give an absolute path")


class Peers(CheckpointPeers, Protocol):
    """The part of the agent that supervision uses: its stores, its core, its peers."""

    logs: LogStore

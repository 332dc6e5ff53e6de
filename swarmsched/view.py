"""What a policy sees and what it answers: a read-only picture of the swarm in, an ordered plan with reasons out.

A policy does not know that gossip exists: ages and staleness were resolved when the view was made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from swarmsched.api import JobState
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import Demand, Free, Gpu, Share

RankKey = tuple[int, ...]
"""At most four integers; smaller runs earlier.  The job id breaks ties after it."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as the planner sees it."""

    node: NodeId
    free: Free
    total_gpus: int
    is_available: bool = True  # alive, not suspect, not draining, not in conflict
    devices: tuple[Gpu, ...] = ()  # every offered device, booked or not; empty when not known


@dataclass(frozen=True, slots=True)
class JobView:
    """One live job as the planner sees it; times in seconds, `..._utc_s` for ordering only."""

    job_id: JobId
    state: JobState
    ranks: int
    demand: Demand
    submitted_utc_s: float
    priority: int = 0
    user: str = ""
    queue: str = ""
    attained_gpu_s: float = 0.0  # at the moment of the view
    queued_s: float = 0.0  # since it last became queued
    running_s: float = 0.0  # since it last started; 0 while queued
    time_limit_s: float = 0.0  # 0: none
    shares: tuple[Share, ...] = ()
    nodes: tuple[NodeId, ...] = ()  # only these, if any
    exclude: tuple[NodeId, ...] = ()
    first_started_utc_s: float = 0.0  # 0: never ran
    shepherd: str = ""  # the node that acts for it
    preemptions: int = 0  # how often it made room for others


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The whole swarm at one moment.  `version` lets the asker recognise the answer to its question."""

    version: int
    nodes: tuple[NodeView, ...]
    jobs: tuple[JobView, ...]


class Action(Enum):
    """What a plan says of one job."""

    START = "start"  # may try to be placed now
    WAIT = "wait"
    KEEP = "keep"  # running, leave it


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One job's line in a plan.  `shares` is a proposal for START; `reason` is a sentence for people."""

    job_id: JobId
    action: Action
    rank_key: RankKey
    reason: str
    shares: tuple[Share, ...] = ()
    victims: tuple[JobId, ...] = ()  # running jobs that must make room first; then `shares` is where the job will fit


@dataclass(frozen=True, slots=True)
class Plan:
    """Entries in rank order.  Advice on an old view: each action checks its own preconditions when taken."""

    version: int
    policy_id: str
    entries: tuple[PlanEntry, ...]
    elapsed_s: float = 0.0  # set by the driver: how long planning took


class Policy(Protocol):
    """A scheduling policy: pure, deterministic, without memory between calls."""

    @property
    def policy_id(self) -> str:
        """Name and parameters in canonical form; keys of different policies are never compared."""

    def rank_key(self, job: JobView) -> RankKey:
        """The job's place in the order; cheap enough to call for each job at each event."""

    def refuses_to_make_room(self, victim: JobView, taker_key: RankKey) -> str:
        """Why a running job need not stop for one with that key; empty when it must."""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Order all live jobs and say which queued ones may start now, and why the others may not."""


@dataclass(frozen=True, slots=True)
class PolicySetting:
    """Which policy the swarm uses: a name and its parameters, swarm-wide and versioned."""

    name: str = "backfill"
    parameters: Mapping[str, float] = field(default_factory=dict)

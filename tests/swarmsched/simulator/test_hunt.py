"""Random faults against whole swarms: once healed, every job has ended as it should and nothing is left of any.

Each seed draws its own jobs, network and mishaps.  A few run here; `SWARMSCHED_HUNT_SEEDS=first:last` runs others.
"""

import os
import random
from dataclasses import dataclass

import pytest

from swarmsched.api import EndReason, JobSpec
from swarmsched.commands import CancelJob, CreateTicket, JobAccepted, SubmitJob, TicketIssued
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import Demand
from swarmsched.simulator.network import NetworkFaults
from swarmsched.simulator.tasks import RankPlan
from swarmsched.task import TaskFailure, TaskOrder
from tests.swarmsched.simulator.testing import Watched

NODE_COUNT, GPUS_PER_NODE = 4, 2
JOB_COUNT, MISHAP_COUNT = 7, 6
HEALED_S = 150.0  # all jobs one after the other, and every backoff and repeat

KINDS = ("sleep", "sleep", "sleep", "code", "once", "environment", "no-port", "stubborn", "per-node", "forever")


def plan_of(order: TaskOrder, rank: int) -> RankPlan:
    """What the ranks of each kind of job do."""
    kind, seconds = order.spec.command
    duration_s = float(seconds)
    match kind:
        case "code":  # one rank fails, the others would go on for ever
            return RankPlan(duration_s, 3) if rank == order.world_size - 1 else RankPlan(1e6)
        case "once" if order.attempt == 1 and order.node_rank == 1:  # not its fault: tried again
            return RankPlan(duration_s, failure=TaskFailure.UNREACHABLE)
        case "no-port" if order.attempt == 1 and order.node_rank == 0:
            return RankPlan(duration_s, failure=TaskFailure.PORT_TAKEN)
        case "environment":
            return RankPlan(duration_s, failure=TaskFailure.ENVIRONMENT)
        case "stubborn":
            return RankPlan(1e6, obeys_sigterm=False)
        case "forever":
            return RankPlan(1e6)
        case _:
            return RankPlan(duration_s)


@dataclass
class Hunted:
    """A submitted job, and how it may end."""

    job_id: JobId
    kind: str
    ends: set[EndReason]


def ends_of(kind: str) -> set[EndReason]:
    if kind in ("stubborn", "forever"):
        return {EndReason.TIMEOUT}
    if kind in ("code", "environment"):
        return {EndReason.FAILED}
    return {EndReason.COMPLETED}


class Hunt:
    """One seed's story."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"hunt {seed}")
        self.faults = NetworkFaults(
            loss_ratio=self.rng.choice([0.0, 0.05, 0.2]),
            duplicate_ratio=self.rng.choice([0.0, 0.3]),
            delay_median_s=self.rng.choice([0.0005, 0.005, 0.02]),
            delay_sigma=self.rng.choice([0.3, 1.2]),
        )
        self.watched = Watched(NODE_COUNT, GPUS_PER_NODE, seed, self.faults, behaviour=plan_of)
        self.swarm = self.watched.swarm
        self.jobs: list[Hunted] = []

    def run(self) -> None:
        for _ in range(JOB_COUNT):
            self.submit()
        for _ in range(MISHAP_COUNT):
            self.swarm.run_for(self.rng.choice([0.01, 0.1, 1.0, 3.0]) * self.rng.random())
            self.mishap()
        self.heal()
        self.watched.finish([job.job_id for job in self.jobs], HEALED_S)
        for job in self.jobs:
            record = self.swarm.record(job.job_id)
            assert record.end_reason in job.ends, f"{job} ended as {record}"
        self.watched.assert_settled()
        self.assert_all_is_free()

    def submit(self) -> None:
        kind = self.rng.choice(KINDS)
        limit_s = self.rng.uniform(0.5, 4.0) if kind in ("stubborn", "forever") else 0.0
        grace_s = self.rng.choice([0.1, 1.0])
        ranks = self.rng.choice([1, 2, 3, 5, 8])
        command = (kind, str(round(self.rng.choice([0.0, 0.1, 2.0]) * self.rng.random(), 3)))
        per_node = kind == "per-node"
        spec = JobSpec(
            command,
            ranks=ranks,
            demand=Demand(gpus=1),
            time_limit_s=limit_s,
            grace_s=grace_s,
            per_node=per_node,
            tree="0" * 64 if kind == "environment" else "",  # so that there is something to stage on one node too
        )
        node = self.rng.choice(self.watched.nodes)
        self.jobs.append(Hunted(self.persist_in_submitting(node, spec), kind, ends_of(kind)))

    def persist_in_submitting(self, node: NodeId, spec: JobSpec) -> JobId:
        ticket = self.swarm.ask(node, CreateTicket())
        assert isinstance(ticket, TicketIssued)
        submit = SubmitJob(ticket.job_id, ticket.holders, spec)
        copies = [self.swarm.begin(node, submit) for _ in range(self.rng.choice([0, 0, 2]))]
        assert isinstance(self.swarm.ask(node, submit), JobAccepted)
        assert all(isinstance(self.swarm.hosts[node].replies[copy], JobAccepted) for copy in copies)
        return ticket.job_id

    def mishap(self) -> None:
        host = self.swarm.hosts[self.rng.choice(self.watched.nodes)]
        match self.rng.choice(["crash", "crash", "crash", "twice", "all", "pause", "cancel", "cancel", "cut"]):
            case "crash":
                host.crash()
                self.swarm.run_for(self.rng.choice([0.01, 0.5, 8.0]) * self.rng.random())
                host.start()
            case "twice":
                for _ in range(2):
                    host.crash()
                    host.start()
                    self.swarm.run_for(0.05 * self.rng.random())
            case "all":
                for each in self.swarm.hosts.values():
                    each.crash()
                self.swarm.run_for(self.rng.random())
                for each in self.swarm.hosts.values():
                    each.start()
            case "pause":
                host.pause()
                self.swarm.run_for(self.rng.uniform(0.5, 12.0))
                host.go_on()
            case "cancel":
                self.cancel(self.rng.choice(self.jobs))
            case "cut":
                others = [node for node in self.watched.nodes if node != host.node_id]
                self.swarm.network.partition([host.node_id], others)
                self.swarm.run_for(self.rng.uniform(0.1, 12.0))
                self.swarm.network.heal()

    def cancel(self, job: Hunted) -> None:
        shepherd = self.swarm.hosts[self.swarm.record(job.job_id).shepherd]
        if shepherd.node is not None and shepherd.node.is_awake:
            self.swarm.begin(shepherd.node_id, CancelJob(job.job_id, self.rng.choice([None, 0.0, 1.0])))
            job.ends = job.ends | {EndReason.CANCELLED}

    def heal(self) -> None:
        self.swarm.network.faults = NetworkFaults()
        assert self.swarm.run_until(self.swarm.is_converged, 60.0), "membership did not heal"

    def assert_all_is_free(self) -> None:
        for host in self.swarm.up:
            assert host.node is not None
            assert host.node.ledger.free.gpu_count == GPUS_PER_NODE
            assert host.node.ledger.report().running_ranks == 0
            host.node.validate()


def seeds() -> range:
    first, _, last = os.environ.get("SWARMSCHED_HUNT_SEEDS", "1:11").partition(":")
    return range(int(first), int(last))


@pytest.mark.parametrize("seed", seeds())
def test_after_any_mishaps_every_job_has_ended_and_nothing_is_left(seed):
    Hunt(seed).run()

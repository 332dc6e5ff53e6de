"""A simulated swarm with every checker attached, and the questions that tests ask of it."""

from collections.abc import Sequence
from typing import Any

from swarmsched.api import JobSpec, JobState
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import Demand
from swarmsched.simulator.checks.bookings import BookingChecker
from swarmsched.simulator.checks.gangs import GangChecker
from swarmsched.simulator.checks.suite import all_checkers
from swarmsched.simulator.network import NetworkFaults
from swarmsched.simulator.swarm import SimulatedSwarm

VALIDATE_INTERVAL = 100  # small swarms can afford more than a run of many seeds
REPORTS_END_S = 45.0  # an owner whose report is not heard repeats it every 30 s at last


class Watched:
    """A swarm with all checkers, started and knowing itself."""

    def __init__(
        self, node_count: int, gpus_per_node: int, seed: int, faults: NetworkFaults | None = None, **options: Any
    ) -> None:
        self.checks = all_checkers(VALIDATE_INTERVAL)
        self.bookings, self.gangs = self.checks.get(BookingChecker), self.checks.get(GangChecker)
        self.swarm = SimulatedSwarm(node_count, gpus_per_node, seed, faults, observers=[self.checks], **options)
        self.nodes = list(self.swarm.hosts)
        self.swarm.start()
        assert self.swarm.run_until(self.swarm.is_converged, 30.0), f"seed {seed}: members did not converge"
        assert self.swarm.run_until(self.knows_all_gpus, 30.0), f"seed {seed}: records did not converge"

    def knows_all_gpus(self) -> bool:
        """True when every running node counts the GPUs of all."""
        now_s = self.swarm.loop.now_s
        total = sum(len(host.resources.gpus) for host in self.swarm.hosts.values())
        views = (host.node.cluster_view(now_s).nodes for host in self.swarm.up if host.node is not None)
        return all(sum(node.total_gpus for node in nodes) == total for nodes in views)

    def submit(self, ranks: int, *command: str, gpus: int = 1, node: NodeId | None = None, **spec: Any) -> JobId:
        """Submit a job of that many ranks, at a node drawn at random unless one is named."""
        where = node or self.swarm.rng.choice(self.nodes)
        return self.swarm.submit(where, JobSpec(command=command, ranks=ranks, demand=Demand(gpus=gpus), **spec))

    def state(self, job_id: JobId) -> JobState:
        """Where the job is in its life."""
        return self.swarm.record(job_id).state

    def finish(self, jobs: Sequence[JobId], limit_s: float) -> None:
        """Run until all have ended; AssertionError if that takes longer."""
        done = self.swarm.run_until(lambda: all(self.swarm.record(job).is_ended for job in jobs), limit_s)
        open_jobs = [self.swarm.record(job) for job in jobs if not self.swarm.record(job).is_ended]
        assert done, f"seed {self.swarm.seed}: not ended after {limit_s:g} s: {open_jobs}"

    def assert_settled(self) -> None:
        """Nothing is left of ended jobs: no booking, no task, no port."""
        settled = self.swarm.run_until(lambda: not self.leftovers(), REPORTS_END_S)
        assert settled, f"seed {self.swarm.seed}: {self.leftovers()}"

    def leftovers(self) -> list[object]:
        """Bookings, tasks, processes and ports of all running nodes."""
        left: list[object] = []
        for host in self.swarm.up:
            assert host.node is not None
            left += host.node.ledger.entries
            left += host.node.tasks()
            left += host.tasks.running
            left += ["port"] * host.tasks.bound_ports
        return left

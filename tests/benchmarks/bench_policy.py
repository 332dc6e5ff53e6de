"""How long a plan takes, by itself and with its transport to and from a planner's process, what a look at the queue and
its hand-over to the planner cost the loop, how soon GPUs that come free are taken, and what an idle state plane sends.

`run()` returns (name, value, unit) rows.  Run by hand: `python tests/benchmarks/bench_policy.py`.
"""

import os
import random
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.msgpack import decode, encode
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.card import card_of
from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.commands import CreateTicket, SubmitJob, TicketIssued
from swarmsched.estimate import BatchRange, Estimate, NoisePoint, Resizable, SpeedPoint
from swarmsched.ids import JobId, NodeId, make_job_id
from swarmsched.models import ONE_THREAD
from swarmsched.models.speed import SpeedModel
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.told import FirstWritten
from swarmsched.policies.registry import POLICIES, compute_plan
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Free, GpuCount, Share
from swarmsched.simulator.swarm import SimulatedSwarm
from swarmsched.view import ClusterView, EndedJob, JobView, KindView, NodeView, Plan, PolicySetting
from tests.swarmsched.gossip.state_testing import StateNetwork, sample_record

SIZES = ((100, 1_000), (1_000, 2_000))
GPUS_PER_NODE = 8
REPEATS = 5
DEMANDS = (Demand(gpus=1), Demand(gpus=1, cpus=4), Demand(gpus=2), Demand(gpus=8), Demand(gpus=1, gpu_type="A100"))
MODEL = ("NVIDIA A100-SXM4-80GB", 80 * 2**30)
ME, OTHER = NodeId("me"), NodeId("other")


def busy_view(nodes: int, jobs: int, seed: int = 1) -> ClusterView:
    """Half of the GPUs are in use by jobs with time limits; the other jobs wait."""
    rng = random.Random(seed)
    there, live = [], []
    for index in range(nodes):
        name = NodeId(f"node{index:04}")
        held = rng.randrange(GPUS_PER_NODE + 1)
        if held:
            live.append(_job(rng, JobState.RUNNING, held, Demand(gpus=1), (Share(name, held),)))
        there.append(_node(name, GPUS_PER_NODE - held))
    while len(live) < jobs:
        live.append(_job(rng, JobState.QUEUED, rng.choice((1, 1, 1, 2, 4, 8, 16)), rng.choice(DEMANDS), ()))
    return ClusterView(1, tuple(there), tuple(live))


def _node(name: NodeId, free: int, gpus: int = GPUS_PER_NODE) -> NodeView:
    capacity = Free((GpuCount(*MODEL, gpus),), 96, 2**40)
    now = replace(capacity, gpus=(GpuCount(*MODEL, free),) if free else ())
    return NodeView(name, now, capacity, gpus)


def _job(
    rng: random.Random,
    state: JobState,
    ranks: int,
    demand: Demand,
    shares: tuple[Share, ...],
    shepherd: NodeId = OTHER,
) -> JobView:
    utc_s = 1_700_000_000.0 + rng.uniform(0, 86_400)
    limit_s = rng.choice((0.0, 600.0, 7_200.0))
    spec = JobSpec(("x",), ranks=ranks, demand=demand, priority=rng.randrange(3), time_limit_s=limit_s)
    record = JobRecord(make_job_id(utc_s, rng), spec, utc_s, 1, 4, shepherd, 1, (), state, shares=shares)
    record = replace(record, attained_gpu_s=rng.expovariate(1 / 4_000))
    return JobView(card_of(record, queued_s=rng.uniform(0, 9_000), running_s=rng.uniform(0, 500)))


def plan_milliseconds(name: str, nodes: int, jobs: int) -> float:
    """Median time of one plan."""
    view = busy_view(nodes, jobs)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        compute_plan(PolicySetting(name), view, 0.0)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1_000


@dataclass
class Growing:
    """A swarm of jobs that take 1 to 16 ranks: as many as there are GPUs run with one or two, the others wait.

    Each has reported from up to three sizes; from view to view all that run have come further, one in fifty of them has
    measured a new size, and is a stranger to what the planner remembers.
    """

    nodes: int
    gpus_per_node: int
    jobs: int
    _rng: random.Random = field(default_factory=lambda: random.Random(1))

    def views(self, count: int) -> Iterator[ClusterView]:
        """One after the other, as an agent would ask with them."""
        free = {NodeId(f"node{index:04}"): self.gpus_per_node for index in range(self.nodes)}
        live = [self._new(free) for _ in range(self.jobs)]
        nodes = tuple([_node(name, left, self.gpus_per_node) for name, left in free.items()])
        for version in range(1, count + 1):
            yield ClusterView(version, nodes, tuple(live))
            live = [self._further(job) if job.shares else job for job in live]

    def _new(self, free: dict[NodeId, int]) -> JobView:
        ranks = self._rng.choice((1, 2))
        node = next((name for name, left in free.items() if left >= ranks), None)
        state, shares = (JobState.RUNNING, (Share(node, ranks),)) if node else (JobState.QUEUED, ())
        if node:
            free[node] -= ranks
        job = _job(self._rng, state, 1, Demand(gpus=1), shares)
        batches = BatchRange(64, 4_096, 16, 128)
        card = replace(job.card, priority=0, elastic=Resizable(1, 16, batches, 64), estimate=self._estimate())
        return replace(job, card=card)

    def _estimate(self) -> Estimate:
        rng = self._rng
        scale = rng.lognormvariate(0.0, 1.0)
        model = SpeedModel(0.01 * scale, 0.001 * scale, 0.01 * scale, 0.001, 0.02 * scale, 0.001, 1.5)
        sizes = ((1, 1, 64), (2, 1, 32), (4, 1, 32))[: rng.randrange(1, 4)]
        points = [SpeedPoint(*size, *model.step_time(*size)) for size in sizes]
        left = rng.expovariate(1e-4)
        return Estimate(
            points=tuple(points), noise=(NoisePoint(64, rng.expovariate(0.1)),), remaining=left, is_partial=True
        )

    def _further(self, job: JobView) -> JobView:
        estimate = job.card.estimate
        assert estimate is not None
        estimate = replace(estimate, remaining=0.99 * estimate.remaining)
        if self._rng.random() < 0.02:
            estimate = replace(estimate, points=self._estimate().points)
        return replace(job, card=replace(job.card, estimate=estimate))


def planner_milliseconds(swarm: Growing, plans: int = 40) -> tuple[float, float, float]:
    """(the first plan, the median and the 99th percentile of the later ones), each from a view to the plan for it.

    Written, read by a planner's process of one thread, planned, written and read.
    """
    command, environment = [sys.executable, "-m", "swarm_agent.planner"], {**os.environ, **ONE_THREAD}
    length, times = struct.Struct(">I"), []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as planner:
        assert planner.stdin is not None
        assert planner.stdout is not None
        for view in swarm.views(plans):
            started = time.perf_counter()
            frame = encode(((PolicySetting("swarm"), view, 0.0), None))
            planner.stdin.write(length.pack(len(frame)) + frame)
            planner.stdin.flush()
            (size,) = length.unpack(planner.stdout.read(length.size))
            plan, _, problem = decode(planner.stdout.read(size), type=tuple[Plan | None, None, str])
            times.append((time.perf_counter() - started) * 1_000)
            assert plan is not None, problem
            assert len(plan.decisions) == swarm.jobs, plan.fault
    later = statistics.quantiles(times[1:], n=100, method="inclusive")
    return times[0], later[49], later[98]


class _Cluster(Cluster):
    """Others, as a placement sees them."""

    jobs: Any = None

    def __init__(self, nodes: list[NodeView], jobs: list[JobView]) -> None:
        self._known = nodes
        self.jobs = {job.job_id: job for job in jobs}
        self.news: tuple[JobId, ...] = tuple(self.jobs)

    history: tuple[EndedJob, ...] = ()
    pool = ()

    def prior(self, spec: JobSpec) -> None:
        """Nobody has measured anything."""

    def gpu_class(self, shares: Iterable[Share], demand: Demand) -> str:
        return ""

    def kinds(self, jobs: Iterable[JobView], nodes: Iterable[NodeView]) -> tuple[KindView, ...]:
        return ()

    def take_job_news(self) -> tuple[JobId, ...]:
        news, self.news = self.news, ()
        return news

    def can_act(self, job: JobView, now_s: float) -> bool:
        return True

    def nodes(self) -> list[NodeView]:
        return self._known

    def drained(self) -> set[NodeId]:
        return set()

    def could_take(self, spec: JobSpec, without: Collection[NodeId], *, once_well: bool) -> bool:
        return True


def slice_milliseconds(nodes: int = 1_000, jobs: int = 5_000, own: int = 50) -> tuple[float, float, float]:
    """(a look once 100 cards have changed, what a release costs, the hand-over to the planner)."""
    rng = random.Random(1)
    foreign = [_job(rng, JobState.QUEUED, 9, Demand(gpus=1), ()) for _ in range(jobs)]
    cluster = _Cluster([_node(NodeId(f"node{n:04}"), int(n % 100 == 0)) for n in range(nodes)], foreign)
    placement = Placement(ME, cluster, random.Random(2))
    for _ in range(own):
        view = _job(rng, JobState.QUEUED, 1, Demand(gpus=1), (), ME)
        spec = JobSpec(("x",), ranks=1, demand=Demand(gpus=1))
        utc_s = view.card.submitted_utc_s
        record = JobRecord(view.job_id, spec, utc_s, 1, 4, ME, 1, ())
        placement.shepherds.add(record).step(FirstWritten(), Clock(0.0, utc_s))
    placement.look(Clock(1.0, 1.0))
    looks, delays = [], []
    for turn in range(2, 2 + REPEATS):
        changed = [replace(job, written_s=float(turn)) for job in rng.sample(foreign, 100)]
        cluster.jobs.update({job.job_id: job for job in changed})
        cluster.news = tuple(job.job_id for job in changed)
        for times, work in ((delays, placement.capacity_released), (looks, placement.look)):
            started = time.perf_counter()
            work(Clock(100.0 * turn, 100.0 * turn))
            times.append(time.perf_counter() - started)
    setting, cluster_view = PolicySetting(), placement.policy.cluster_view(Clock(1.0, 1.0))
    frames = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        encode((setting, cluster_view, 1.0))
        frames.append(time.perf_counter() - started)
    return statistics.median(looks) * 1_000, statistics.median(delays) * 1_000, statistics.median(frames) * 1_000


def refill(nodes: int = 30, jobs: int = 300, duration_s: float = 5.0, seed: int = 1) -> float:
    """Virtual time to run many short jobs, submitted at all nodes at once, over what it takes if no GPU ever idles."""
    swarm = SimulatedSwarm(nodes, 2, seed)
    swarm.start(0.6)
    swarm.run_until(swarm.is_converged, 60.0)
    swarm.run_for(15.0)
    started_s = swarm.loop.now_s
    spec = JobSpec(("sleep", str(duration_s)), ranks=1, demand=Demand(gpus=1))
    for number in range(jobs):
        ticket = swarm.ask(NodeId(f"n{number * 7 % nodes:03}"), CreateTicket())
        assert isinstance(ticket, TicketIssued)
        swarm.begin(ticket.holders[0].node, SubmitJob(ticket.job_id, ticket.holders, spec))
    swarm.run_until(lambda: any(host.node._placement.shepherds.jobs for host in swarm.up), 10.0)
    swarm.run_until(lambda: not any(host.node._placement.shepherds.jobs for host in swarm.up), 600.0)
    return (swarm.loop.now_s - started_s) / (-(-jobs // (2 * nodes)) * duration_s)


def state_bytes_per_second(nodes: int = 30, duration_s: float = 120.0) -> tuple[float, float]:
    """(mean, most) bytes that a node sends per second when nothing changes, in virtual time."""
    net = StateNetwork(nodes, seed=1)
    for node in net.nodes:
        net.publish(node, sample_record(node))
    net.connect()
    net.run(20.0)
    net.sent_bytes.clear()
    net.run(duration_s)
    rates = [net.sent_bytes[node] / duration_s for node in net.nodes]
    return statistics.mean(rates), max(rates)


def run() -> list[tuple[str, float, str]]:
    """All rows."""
    rows = [
        (f"plan, {name}, {jobs} jobs x {nodes} nodes", plan_milliseconds(name, nodes, jobs), "ms")
        for nodes, jobs in SIZES
        for name in POLICIES
    ]
    for swarm in (Growing(16, 4, 160), Growing(1_000, 8, 2_000)):
        what = f"swarm, {swarm.jobs} jobs of 1 to 16 ranks x {swarm.nodes * swarm.gpus_per_node} GPUs, with transport"
        names = (f"first plan, {what}", f"plan, {what}, median", f"plan, {what}, 99 %")
        rows += [(name, value, "ms") for name, value in zip(names, planner_milliseconds(swarm), strict=True)]
    look_ms, delay_ms, slice_ms = slice_milliseconds()
    mean, most = state_bytes_per_second()
    return [
        *rows,
        ("a look at 5,000 waiting jobs and 1,000 nodes", look_ms, "ms"),
        ("what a release costs there", delay_ms, "ms"),
        ("its hand-over to the planner", slice_ms, "ms"),
        ("300 jobs of 5 s on 30 x 2 GPUs, over the ideal", refill(), "x"),
        ("state plane sent, 30 nodes idle, mean", mean, "B/s"),
        ("state plane sent, 30 nodes idle, most of any node", most, "B/s"),
    ]


if __name__ == "__main__":
    for label, value, unit in run():
        print(f"{label:60} {value:10.2f} {unit}")

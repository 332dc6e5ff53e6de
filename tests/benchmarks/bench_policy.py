"""How long a plan takes for 1,000 jobs on 100 nodes, and what an idle state plane sends at 30 nodes.

`run()` returns (name, value, unit) rows.  Run by hand: `python tests/benchmarks/bench_policy.py`.
"""

import random
import statistics
import time

from swarmsched.api import JobState
from swarmsched.gossip.state_testing import StateNetwork, sample_record
from swarmsched.ids import NodeId, make_job_id
from swarmsched.policies.registry import POLICIES, make_policy
from swarmsched.resources import Demand, Free, Gpu, Share
from swarmsched.view import ClusterView, JobView, NodeView, PolicySetting

NODES = 100
JOBS = 1_000
GPUS_PER_NODE = 8
REPEATS = 5
DEMANDS = (Demand(gpus=1), Demand(gpus=1, cpus=4), Demand(gpus=2), Demand(gpus=8), Demand(gpus=1, gpu_type="A100"))


def busy_view(seed: int = 1) -> ClusterView:
    """Half of the GPUs are in use by jobs with time limits; the other jobs wait."""
    rng = random.Random(seed)
    jobs, nodes = [], []
    for index in range(NODES):
        name = NodeId(f"node{index:03}")
        gpus = tuple(Gpu(f"{name}-{i}", i, "NVIDIA A100-SXM4-80GB", 80 * 2**30) for i in range(GPUS_PER_NODE))
        held = rng.randrange(GPUS_PER_NODE + 1)
        if held:
            jobs.append(_job(rng, JobState.RUNNING, held, Demand(gpus=1), (Share(name, held),)))
        nodes.append(NodeView(name, Free(gpus[held:], 96, 2**40), GPUS_PER_NODE, devices=gpus))
    while len(jobs) < JOBS:
        jobs.append(_job(rng, JobState.QUEUED, rng.choice((1, 1, 1, 2, 4, 8, 16)), rng.choice(DEMANDS), ()))
    return ClusterView(1, tuple(nodes), tuple(jobs))


def _job(rng: random.Random, state: JobState, ranks: int, demand: Demand, shares: tuple[Share, ...]) -> JobView:
    submitted = 1_700_000_000.0 + rng.uniform(0, 86_400)
    return JobView(
        make_job_id(submitted, rng),
        state,
        ranks,
        demand,
        submitted,
        rng.randrange(3),
        shares=shares,
        attained_gpu_s=rng.expovariate(1 / 4_000),
        queued_s=rng.uniform(0, 9_000),
        time_limit_s=rng.choice((0.0, 600.0, 7_200.0)),
        running_s=rng.uniform(0, 500) if shares else 0.0,
    )


def plan_milliseconds(name: str) -> float:
    """Median time of one plan."""
    view, policy = busy_view(), make_policy(PolicySetting(name))
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        policy.plan(view, 0.0)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1_000


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
    rows = [(f"plan, {name}, {JOBS} jobs x {NODES} nodes", plan_milliseconds(name), "ms") for name in POLICIES]
    mean, most = state_bytes_per_second()
    return [
        *rows,
        ("state plane sent, 30 nodes idle, mean", mean, "B/s"),
        ("state plane sent, 30 nodes idle, most of any node", most, "B/s"),
    ]


if __name__ == "__main__":
    for label, value, unit in run():
        print(f"{label:60} {value:10.2f} {unit}")

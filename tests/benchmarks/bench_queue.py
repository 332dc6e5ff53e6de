"""What a long queue costs: CPU time of all nodes for one more submission, and for waiting, with many jobs that wait."""

import time
from collections.abc import Callable

from swarmsched.api import JobSpec
from swarmsched.resources import Demand
from swarmsched.simulator.swarm import SimulatedSwarm

NODES, GPUS = 3, 2
LENGTHS = (50, 500, 2_000)  # jobs that wait
SUBMISSIONS = 50  # at each length, one at each node in turn
WAIT_S = 10.0  # of virtual time, in which nothing happens


def run() -> list[tuple[str, float, str]]:
    """(measure, value, unit): one swarm whose queue grows, so that all lengths are of the same run."""
    swarm = SimulatedSwarm(NODES, GPUS, seed=1)
    swarm.start()
    swarm.run_for(10.0)
    _submit(swarm, 1)
    swarm.run_for(5.0)
    results = []
    waiting = 0
    for length in LENGTHS:
        _submit(swarm, length - SUBMISSIONS - waiting)
        swarm.run_for(WAIT_S)
        submission_ms = _cpu_s(lambda: _submit(swarm, SUBMISSIONS)) / SUBMISSIONS * 1e3
        swarm.run_for(WAIT_S)
        waiting_share = _cpu_s(lambda: swarm.run_for(WAIT_S)) / WAIT_S / NODES
        waiting = length
        results += [
            (f"queue: one more job, {length} waiting, all {NODES} nodes together", submission_ms, "ms"),
            (f"queue: a node of {NODES} with {length} waiting, share of a core", 100.0 * waiting_share, "%"),
        ]
    return results


def _submit(swarm: SimulatedSwarm, count: int) -> None:
    """Jobs that need all GPUs: one runs, the others wait."""
    spec = JobSpec(("sleep", "1000000"), ranks=NODES * GPUS, demand=Demand(gpus=1))
    nodes = list(swarm.hosts)
    for number in range(count):
        swarm.submit(nodes[number % NODES], spec)


def _cpu_s(act: Callable[[], None]) -> float:
    started_s = time.process_time()
    act()
    return time.process_time() - started_s

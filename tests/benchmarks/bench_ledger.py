"""What one booking and one register update cost in the core, without the disk.

Run `python tests/benchmarks/bench_ledger.py`, or `make bench` for all benchmarks.
"""

import random
import statistics
import time
from collections.abc import Callable

from swarmsched.api import JobSpec
from swarmsched.effects import SendPeer
from swarmsched.events import PeerMessageReceived
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import NodeId, TaskKey, make_job_id
from swarmsched.jobs.register import Register
from swarmsched.jobs.update import UpdateDecided, UpdateRequested
from swarmsched.ledger.ledger import Ledger
from swarmsched.ledger.message import CommitRequest, HoldRequest, ReleaseRequest
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Gpu, NodeResources, Share
from swarmsched.task import TaskOrder

ROUNDS = 2_000
REPEATS = 5
GIB = 2**30
OWNER, SHEPHERD = NodeId("gpu1"), NodeId("gpu2")
SPEC = JobSpec(command=("python", "train.py"), ranks=8, demand=Demand(gpus=1))
JOBS = [make_job_id(float(n), random.Random(n)) for n in range(ROUNDS)]


def run() -> list[tuple[str, float, str]]:
    """(name, value, unit) of each figure; the median of some repeats."""
    return [
        ("ledger: hold, commit, release, end", _median_us(_book), "us"),
        ("ledger: hold refused", _median_us(_refuse), "us"),
        ("register: update, one holder", _median_us(_update_alone), "us"),
        ("register: update, three holders, all sides", _median_us(_update_by_three), "us"),
    ]


def _median_us(once: Callable[[], float]) -> float:
    return statistics.median(once() for _ in range(REPEATS)) / ROUNDS * 1e6


def _make_ledger() -> Ledger:
    ledger = Ledger(OWNER, 1)
    gpus = tuple(Gpu(f"GPU-{n}", n, "NVIDIA H100 80GB HBM3", 80 * GIB) for n in range(8))
    ledger.offer(NodeResources(gpus, 128, 1024 * GIB), 0.0)
    return ledger


def _hold(job_index: int, ranks: int) -> HoldRequest:
    job = JOBS[job_index]
    return HoldRequest(job, 1, 1, 1, SHEPHERD, ranks, SPEC.demand, "fifo", (0, 0), wants_rendezvous=True)


def _book() -> float:
    ledger = _make_ledger()
    started_s = time.perf_counter()
    for index, job in enumerate(JOBS):
        order = TaskOrder(job, 1, 1, OWNER, SPEC, (Share(OWNER, 8),), "10.0.0.1", 29_500)
        ledger.hold(_hold(index, 8), 0.0)
        ledger.commit(CommitRequest(job, 1, 1, 2, SHEPHERD, order), 0.1)
        ledger.release(ReleaseRequest(job, 1, 1, 3, SHEPHERD), 0.2)
        has_ended, _ = ledger.end(TaskKey(job, 1), 0.3)
        assert has_ended
    return time.perf_counter() - started_s


def _refuse() -> float:
    ledger = _make_ledger()
    started_s = time.perf_counter()
    for index in range(ROUNDS):
        ledger.hold(_hold(index, 9), 0.0)
    return time.perf_counter() - started_s


def _record(version: int, configuration: Configuration) -> JobRecord:
    return JobRecord(JOBS[0], SPEC, 1.7e9, 1, version, configuration.nodes[0], 1, configuration.holders)


def _request(version: int, holders: tuple[NodeId, ...]) -> UpdateRequested:
    expected = (1, version - 1) if version > 1 else None
    configuration = Configuration(tuple(Holder(node, 1) for node in holders))
    return UpdateRequested(version, JOBS[0], configuration, expected, _record(version, configuration))


def _update_alone() -> float:
    register = Register(OWNER, 1, 1, random.Random(1))
    started_s = time.perf_counter()
    for version in range(1, ROUNDS + 1):
        effects = register.step(_request(version, (OWNER,)), 0.0)
        assert isinstance(effects[-1], UpdateDecided)
    return time.perf_counter() - started_s


def _update_by_three() -> float:
    holders = (NodeId("a"), NodeId("b"), NodeId("c"))
    registers = {node: Register(node, 1, 1, random.Random(1)) for node in holders}
    started_s = time.perf_counter()
    for version in range(1, ROUNDS + 1):
        decided = 0
        queue = [(holders[0], effect) for effect in registers[holders[0]].step(_request(version, holders), 0.0)]
        while queue:
            source, effect = queue.pop()
            decided += isinstance(effect, UpdateDecided)
            if isinstance(effect, SendPeer):
                received = PeerMessageReceived(source, effect.message)
                queue += [(effect.recipient, each) for each in registers[effect.recipient].step(received, 0.0)]
        assert decided == 1
    return time.perf_counter() - started_s


if __name__ == "__main__":
    for name, value, unit in run():
        print(f"{name:45} {value:8.1f} {unit}")

"""How fast a job would train on given hosts, by its model and theirs alone: for jobs that never ran.

After Dike (Xu & Li, Electronics 8(3):327, 2019), which decides by a model's parameters and their kinds, the hosts'
ratio of CPUs to GPUs and the input.  Its own equations could not be had; these are a reconstruction: a step takes the
longer of compute and input pipeline, and then what its traffic takes through the busiest network interface or bus.
Synchronous workers wait for the slowest, asynchronous ones for their own host and the busiest one with a server.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from math import inf
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from swarmsched.errors import ConfigError
from swarmsched.estimate import Estimate, SpeedPoint, StepCost
from swarmsched.ids import NodeId

EFFICIENCY = 0.35
"""Of a GPU's peak that training reaches, before anybody has measured it."""
BUS_BYTES_PER_S = 10e9
"""Between ranks on one host."""
HOP_S = 20e-6
"""Latency of one step of a ring."""
MBIT = 125_000.0
"""A second, in bytes."""
NETWORK_BYTES_PER_S = 1.25e9
"""Of a node that does not tell: 10 Gbit/s."""
SERVER_CORES = 2
"""Of one that takes all gradients in each step; one that takes fewer is idle meanwhile."""
PREFETCHED = 2
"""Batches."""
GIB = 2**30

PEAKS = {
    "K80": 4.4e12, "P4": 5.5e12, "P40": 12e12, "P100": 21e12, "1080 TI": 11e12, "T4": 65e12, "V100": 125e12,
    "A10": 125e12, "A30": 165e12, "A40": 150e12, "A100": 312e12, "L4": 121e12, "L40": 181e12, "L40S": 362e12,
    "4090": 165e12, "H100": 989e12, "H200": 989e12, "B200": 2_250e12,
}  # fmt: skip
"""Dense operations a second, by the vendor's data sheets: 16 bit, or 32 bit where there is nothing better."""


class Tensor(NamedTuple):
    """Trainable parameters that are placed together; `row_bytes` of an embedding, of which a batch touches rows."""

    count_bytes: float
    row_bytes: float = 0.0

    def moved_bytes(self, rows: int) -> float:
        """Gradients of a step."""
        return min(self.count_bytes, rows * self.row_bytes) if self.row_bytes else self.count_bytes


class Offer(NamedTuple):
    """What a host could give to one job; a CPU-only host has no place for workers."""

    node: NodeId
    workers: int  # that fit
    cpus: int
    memory_bytes: float
    flops_per_s: float = 0.0  # peak of the GPUs of one worker
    gpu_memory_bytes: float = inf  # of one worker
    network_bytes_per_s: float = NETWORK_BYTES_PER_S


class Tasks(NamedTuple):
    """What a layout has on one host."""

    workers: int
    servers: int


Layout = Sequence[tuple[Offer, Tasks]]
"""The hosts that have anything.  Without servers the workers reduce among themselves in a ring."""


@lru_cache(maxsize=256)
def peak_flops(model: str) -> float:
    """Of one GPU by its name; 0 where that is not known."""
    found = [name for name in PEAKS if re.search(rf"(?<![A-Z0-9]){name}(?![0-9])", model.upper())]
    return PEAKS[max(found, key=len)] if found else 0.0


def moved(tensors: Sequence[Tensor], rows: int) -> tuple[float, float]:
    """Bytes of gradients in a step that touches so many rows of each embedding: of all tensors, and of the largest."""
    if not tensors or min(tensor.count_bytes for tensor in tensors) <= 0.0:
        raise ConfigError("tensors", f"{list(tensors)} are no model", "one or more, each of at least a byte")
    each = [tensor.moved_bytes(rows) for tensor in tensors]
    return sum(each), max(each)


def check(work: StepCost) -> None:
    """ConfigError names what no model has; the rest of the figures may be 0."""
    for name in ("local_batch", "sample_flops", "parameter_bytes", "moved_bytes"):
        if not 0.0 < getattr(work, name) < inf:
            raise ConfigError(f"work.{name}", f"{getattr(work, name)} is out of range", "measure it, or leave work out")
    for name in ("largest_bytes", "activation_bytes", "sample_bytes", "decode_core_s"):
        if not 0.0 <= getattr(work, name) < inf:
            raise ConfigError(f"work.{name}", f"{getattr(work, name)} is out of range", "measure it, or leave it 0")


DENSE_FLOPS = 1.5
"""Of a sample, forward and backward, for each byte of 32-bit parameters that are all used once, as in a perceptron:
where nobody counted them."""
MEASURED_MOST = 30.0
"""Times by which the part of a step that computes may be shorter than the step."""


@lru_cache(maxsize=2_048)
def measured_work(estimate: Estimate, gpus: int) -> StepCost | None:
    """The work that an estimate tells, with as many operations as its steps show; None where nobody tells any.

    So operations that nobody counted, and the part of a GPU's peak that a model reaches, are corrected by first steps.
    """
    work, peak = estimate.work, gpus * peak_flops(estimate.gpu)
    if work is None:
        return None
    known = corrected(work, estimate.points, peak, estimate.network_mbit_s * MBIT, estimate.data_wait)
    return None if known is work and work.sample_flops == DENSE_FLOPS * work.parameter_bytes else known


def model_alone(estimate: Estimate | None, gpus: int) -> Estimate | None:
    """What an estimate tells of the model, its steps taken into account, and nothing else; None where it tells none."""
    work = measured_work(estimate, gpus) if estimate is not None and gpus else None
    if estimate is None or work is None:
        return None
    return Estimate(
        work=work, data_wait=estimate.data_wait, network_mbit_s=estimate.network_mbit_s, is_prior=estimate.is_prior
    )


def corrected(
    work: StepCost, points: Sequence[SpeedPoint], peak: float, network_bytes_per_s: float, data_wait: float = 0.0
) -> StepCost:
    """The work with as many operations as steps show that were measured on such GPUs (0: not known).

    Steps on one node count, or where there are none those on several, if their network is known.
    """
    able = [each for each in points if each.local_batch and (each.nodes == 1 or network_bytes_per_s)]
    able = [each for each in able if each.nodes == 1] or able
    if not (able and peak):
        return work
    ratios = []
    for each in able:
        ring_s = ring_time_s(work, each.ranks, BUS_BYTES_PER_S if each.nodes == 1 else network_bytes_per_s)
        computes_s = max(each.step_s * (1.0 - min(data_wait, 0.9)) - ring_s, each.step_s / MEASURED_MOST)
        ratios.append(computes_s * EFFICIENCY * peak / (each.local_batch * work.sample_flops))
    flops = work.sample_flops * median(ratios)
    return replace(work, sample_flops=flops) if 0.0 < flops < inf else work


def server_cores(work: StepCost) -> float:
    """Of one server or shard."""
    return SERVER_CORES * min(1.0, work.moved_bytes / work.parameter_bytes)


def throughput(work: StepCost, layout: Layout, is_synchronous: bool = True) -> float:
    """Samples a second of all workers; 0 where something does not fit.  `work` was checked."""
    workers, servers = (sum([tasks[at] for _, tasks in layout]) for at in (0, 1))
    if not workers or not all(fits(work, host, tasks, servers) for host, tasks in layout):
        return 0.0
    moving = _served_s(work, layout) if servers else [_ring_s(work, layout)] * len(layout)
    local = [local_s(work, host, tasks) if tasks.workers else 0.0 for host, tasks in layout]
    if is_synchronous:
        return workers * work.local_batch / (max(local) + max(moving))
    busiest_s = max([seconds for seconds, (_, tasks) in zip(moving, layout, strict=True) if tasks.servers], default=0.0)
    each = zip(layout, local, moving, strict=True)
    return sum([tasks.workers * work.local_batch / (mine + max(own, busiest_s)) for (_, tasks), mine, own in each])


def fits(work: StepCost, host: Offer, tasks: Tasks, servers: int) -> bool:
    """Whether a host has GPUs, cores and memory for its tasks, of so many servers in all."""
    worker_bytes = 1.1 * (2.0 * work.parameter_bytes + work.local_batch * work.activation_bytes)
    input_bytes = 2.0 * PREFETCHED * work.local_batch * work.sample_bytes + GIB
    server_bytes = 0.0
    if servers:
        part = max(1.0 / servers, work.largest_bytes / work.moved_bytes)
        server_bytes = 1.2 * part * work.parameter_bytes * (2 + work.optimizer_slots) + 0.5 * GIB
    return (
        tasks.workers <= host.workers
        and (not tasks.workers or (host.flops_per_s > 0.0 and worker_bytes <= host.gpu_memory_bytes))
        and tasks.workers + server_cores(work) * tasks.servers <= host.cpus
        and tasks.workers * input_bytes + tasks.servers * server_bytes <= host.memory_bytes
    )


def local_s(work: StepCost, host: Offer, tasks: Tasks) -> float:
    """Of a worker: GPU and input pipeline overlap.  One core feeds the GPU, and does both where there is no other."""
    compute_s = work.local_batch * work.sample_flops / (EFFICIENCY * host.flops_per_s)
    cores = (host.cpus - server_cores(work) * tasks.servers) / tasks.workers - 1.0
    return max(compute_s, work.local_batch * work.decode_core_s / max(cores, 0.5))


def _ring_s(work: StepCost, layout: Layout) -> float:
    workers = sum(tasks.workers for _, tasks in layout)
    link = min(host.network_bytes_per_s for host, _ in layout) if len(layout) > 1 else BUS_BYTES_PER_S
    return ring_time_s(work, workers, link)


def ring_time_s(work: StepCost, workers: int, link_bytes_per_s: float) -> float:
    """Of the gradients of a step around a ring, over its slowest link."""
    return 2.0 * (workers - 1) / workers * work.moved_bytes / link_bytes_per_s + HOP_S * (workers - 1)


def _served_s(work: StepCost, layout: Layout) -> list[float]:
    """By host: gradients to the servers and parameters back, as much as crosses its network or its bus."""
    workers, held = sum(tasks.workers for _, tasks in layout), _held_bytes(work, [tasks for _, tasks in layout])
    whole, found = sum(held), []
    for (host, tasks), here in zip(layout, held, strict=True):
        remote = max(here * (workers - tasks.workers), (whole - here) * tasks.workers)
        found.append(2.0 * max(remote / host.network_bytes_per_s, here * tasks.workers / BUS_BYTES_PER_S))
    return found


def _held_bytes(work: StepCost, tasks: Sequence[Tasks]) -> list[float]:
    """By host: the server with the largest tensor is where most workers are; the others share the rest evenly."""
    servers = sum(each.servers for each in tasks)
    largest = max(work.largest_bytes, work.moved_bytes / servers)
    other = (work.moved_bytes - largest) / (servers - 1) if servers > 1 else 0.0
    first = max(range(len(tasks)), key=lambda at: (tasks[at].servers > 0, tasks[at].workers, -at))
    return [each.servers * other + (largest - other if at == first else 0.0) for at, each in enumerate(tasks)]

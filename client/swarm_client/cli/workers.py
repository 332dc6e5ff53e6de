"""Who of the workers of an elastic job trains, comes and goes, in one line for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from swarm_client.quantity import show_count

if TYPE_CHECKING:
    from swarmsched.documents import JobDocument, WorkerDocument

NODES_SHOWN = 16  # of each kind of workers
LOST_SHOWN = 8  # the last ones


def workers_line(job: JobDocument) -> str:
    """`4 train (membership 7) on n1 (2: 1 3), n2 (2: 4 5); joining: 6 on n3`; empty where there are none."""
    world = job.world
    if world is None:
        return ""
    by_state: dict[str, dict[str, list[int]]] = {}
    for each in world.workers:
        by_state.setdefault(each.state, {}).setdefault(each.node, []).append(each.worker)
    paused = {share.node for share in job.nodes if share.is_paused}
    parts = []
    main = "training" if world.version else "joining"
    if main in by_state:
        there = by_state.pop(main)
        count = sum(len(workers) for workers in there.values())
        shown = [f"{node} ({_on_node(workers, is_paused=node in paused)})" for node, workers in there.items()]
        parts.append(f"{count} {_verb(job, world.version, count)} on {_few(shown)}")
    for state, there in by_state.items():
        parts.append(f"{state}: {_few([f'{numbers(workers)} on {node}' for node, workers in there.items()])}")
    if parts and world.lost:
        parts.append(f"lost: {_lost(world.lost)}")
    return "; ".join(parts)


def problems(job: JobDocument) -> list[str]:
    """`worker 3 on n2: has waited for 30 s for ...`, of those with the same one the first and how many there are."""
    alike: dict[str, list[WorkerDocument]] = {}
    for each in job.world.workers if job.world else ():
        if each.problem:
            alike.setdefault(each.problem, []).append(each)
    told = []
    for problem, workers in alike.items():
        more = f" and {show_count(len(workers) - 1, 'other')}" if len(workers) > 1 else ""
        told.append(f"worker {workers[0].worker} on {workers[0].node}{more}: {problem}")
    return told


def _verb(job: JobDocument, version: int, count: int) -> str:
    if job.state == "ended":
        return f"trained (membership {version})" if version else "started"
    verb = ("train" if version else "start") + "s" * (count == 1)
    return f"{verb} (membership {version})" if version else verb


def _on_node(workers: Sequence[int], *, is_paused: bool) -> str:
    return f"{len(workers)}: {numbers(workers)}" + ", paused" * is_paused


def _few(nodes: Sequence[str]) -> str:
    more = f" and {show_count(len(nodes) - NODES_SHOWN, 'more node')}" if len(nodes) > NODES_SHOWN else ""
    return ", ".join(nodes[:NODES_SHOWN]) + more


def _lost(workers: Sequence[int]) -> str:
    earlier = f" and {len(workers) - LOST_SHOWN} before" if len(workers) > LOST_SHOWN else ""
    return numbers(workers[-LOST_SHOWN:]) + earlier


def numbers(workers: Iterable[int]) -> str:
    """`1-4 7 9`: in order, three or more in a row as a range."""
    runs: list[list[int]] = []
    for worker in sorted(workers):
        if runs and worker == runs[-1][-1] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)

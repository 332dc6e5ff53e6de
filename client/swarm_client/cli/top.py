"""`swarm top`: nodes, GPUs and jobs, again every second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from swarm_client.cli import nodes as nodes_command
from swarm_client.cli import ps
from swarm_client.failure import OK
from swarm_client.options import Arguments, Command, Option
from swarm_client.output import Column
from swarm_client.quantity import duration, show_bytes, show_count, show_ratio
from swarm_client.reading import read
from swarm_client.session import Session
from swarm_client.watch import watch

if TYPE_CHECKING:
    from swarmsched.documents import GpuCountsDocument, GpuDocument, NodeDocument, StatusDocument

COMMAND = Command(
    "top",
    "Live view of nodes, GPUs and jobs.  q or Ctrl-C ends it.",
    (
        Option("--once", "print one frame and end"),
        Option("--interval", "time between frames (default 1s)", "TIME", read=duration),
    ),
)
BAR_WIDTH = 10

NODE_COLUMNS = tuple(
    c
    for c in nodes_command.COLUMNS
    if c.title in ("NAME", "STATUS", "FREE GPUS", "FREE CPUS", "FREE MEMORY", "CPU", "HEARD")
)
JOB_COLUMNS = tuple(
    c
    for c in ps.COLUMNS
    if c.title in ("ID", "NAME", "USER", "STATE", "GPUS", "NODES", "ELAPSED", "PROGRESS", "ETA", "REASON")
)


def execute(session: Session, arguments: Arguments) -> int:
    """Frames until Ctrl-C (exit code 130), or one with --once."""
    interval_s = max(0.2, arguments.get("interval", 1.0))
    if session.printer.is_for_people:
        return watch(session, lambda: frame(session), interval_s, is_once=bool(arguments["once"]))
    status, gpus, jobs, nodes = _read(session)
    session.printer.document({**status, "node_items": nodes, "gpu_items": gpus, "job_items": jobs})
    return OK


def _read(session: Session) -> tuple[Any, Any, Any, Any]:
    call = session.agents.call
    status = call("cannot read the state of the swarm", "GET", "/v1/status")
    gpus = call("cannot list GPUs", "GET", "/v1/gpus")["items"]
    jobs = call("cannot list jobs", "GET", "/v1/jobs")["items"]
    nodes = call("cannot list nodes", "GET", "/v1/nodes")["items"]
    return status, gpus, jobs, nodes


def frame(session: Session) -> list[str]:
    """The lines of one picture of the swarm."""
    told_status, told_gpus, jobs, told_nodes = _read(session)
    from swarmsched.documents import GpuDocument, NodeDocument, StatusDocument

    status = read(told_status, StatusDocument)
    gpus, nodes = [read(gpu, GpuDocument) for gpu in told_gpus], [read(node, NodeDocument) for node in told_nodes]
    printer = session.printer
    node_columns: tuple[Column[NodeDocument], ...] = (*NODE_COLUMNS, Column("GPUS: LOAD OR JOB", _loads(gpus)))
    head = headline(status, *counted(status.gpus, gpus, nodes))
    lines = [printer.paint(printer.fit(head), "bold"), ""]
    in_order = sorted(nodes, key=lambda node: nodes_command.natural(node.name))
    lines += printer.table_lines(in_order, node_columns)
    lines += ["", *printer.table_lines(ps.by_turn(jobs), JOB_COLUMNS)]
    return lines


def counted(gossiped: GpuCountsDocument, gpus: Sequence[GpuDocument], nodes: Sequence[NodeDocument]) -> tuple[int, int]:
    """Free and busy GPUs as their owners tell; as gossip tells, which is seconds older, while not all owners answer."""
    if len(gpus) != gossiped.total:
        return gossiped.free, gossiped.leased
    draining = {node.name for node in nodes if node.is_draining}
    free = sum(gpu.state == "free" and gpu.node not in draining for gpu in gpus)
    return free, sum(gpu.state in ("held", "leased", "draining") for gpu in gpus)


def headline(status: StatusDocument, free: int, busy: int) -> str:
    """One line about the whole swarm."""
    members, jobs = status.members, status.jobs
    away = members.suspect + members.failed + members.conflict
    parts = [
        show_count(members.alive, "node") + (f" ({away} away)" if away else ""),
        f"{busy} of {status.gpus.total} GPUs busy, {free} free",
        f"{jobs.running} running, {jobs.queued} queued",
        f"policy {status.policy.name}",
    ]
    return "swarm: " + " | ".join(parts)


def _loads(gpus: Sequence[GpuDocument]) -> Callable[[NodeDocument], str]:
    """For each node, each GPU's load: a bar and memory where measured, else its state."""
    by_node: dict[str, list[str]] = {}
    for gpu in gpus:
        by_node.setdefault(gpu.node, []).append(gpu_load(gpu))
    return lambda node: "  ".join(by_node.get(node.name, ["-"]))


def gpu_load(gpu: GpuDocument) -> str:
    """`0 [#####     ] 48% 12.0 GiB` or `1 free`."""
    ratio = gpu.utilisation_ratio
    job = (gpu.job_id or "")[nodes_command.HANDLE]
    state = job or gpu.state
    if ratio is None or gpu.is_simulated:
        return f"{gpu.index} {state}"
    filled = round(min(1.0, max(0.0, ratio)) * BAR_WIDTH)
    bar = "#" * filled + " " * (BAR_WIDTH - filled)
    return f"{gpu.index} [{bar}] {show_ratio(ratio)} {show_bytes(gpu.memory_used_bytes)} {state}"

"""`swarm nodes`: members of the swarm, their GPUs, and who holds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm_client.address import quote
from swarm_client.failure import OK, UsageError
from swarm_client.options import Arguments, Command
from swarm_client.output import Column, state_style
from swarm_client.quantity import show_bytes, show_duration, show_few, show_ratio
from swarm_client.reading import read
from swarm_client.session import Session, one_positional

if TYPE_CHECKING:
    from swarmsched.documents import GpuDocument, NodeDocument

COMMAND = Command("nodes", "List nodes; with a name, the GPUs of one node.", positionals="[NODE]")
HANDLE = slice(10, 18)


def _of(node: NodeDocument, free: int | None, total: int | None) -> str:
    return "-" if total is None else f"{free if _is_present(node) else '-'}/{total}"


def _is_present(node: NodeDocument) -> bool:
    """Nothing is free on a node that is gone, whatever it said last."""
    return node.status in ("alive", "suspect")


def _memory(node: NodeDocument) -> str:
    if node.memory_bytes is None:
        return "-"
    free = show_bytes(node.free_memory_bytes) if _is_present(node) else "-"
    return f"{free}/{show_bytes(node.memory_bytes)}"


def _network(node: NodeDocument) -> str:
    mbit_s = node.network_mbit_per_second
    return f"{mbit_s / 1000:g} Gbit/s" if mbit_s else "-"


def _aggregation(node: NodeDocument) -> str:
    """What is left for shards of other nodes' jobs."""
    room = node.aggregation
    if room is None or not _is_present(node):
        return "-"
    return f"{room.cpus:g} cores, {show_bytes(room.memory_bytes)}, {show_bytes(room.bytes_per_second)}/s"


def _load(node: NodeDocument, ratio: float | None) -> str:
    return show_ratio(ratio) if _is_present(node) else "-"


def model(gpu: GpuDocument) -> str:
    """The model's name, with a word where it is simulated and the name does not say so: gossip tells names alone."""
    name = gpu.model
    return f"{name} (simulated)" if gpu.is_simulated and "simulated" not in name.lower() else name


def _models(node: NodeDocument) -> str:
    """As the node itself tells; while it does not, as it was gossiped."""
    counts: dict[str, int] = {}
    for gpu in node.gpus or []:
        label = model(gpu)
        counts[label] = counts.get(label, 0) + 1
    if not counts:
        counts = {group.model: group.total for group in node.gpu_groups}
    return ", ".join(f"{count}x {label}" for label, count in counts.items()) or "-"


def note(node: NodeDocument) -> str:
    """What keeps a node, its GPUs or its ranks from working, and whose processes they are."""
    parts = ["witness"] if node.is_witness else []
    reason = f": {node.drain_reason}" if node.drain_reason else ""
    parts += [f"draining{reason}"] if node.is_draining else []
    parts += ["disk takes no writes"] if node.is_disk_stalled else []
    parts += [node.avoided_reason or "starts nothing for now"] if node.is_avoided else []
    parts += [f"job {task.job_id[HANDLE]} paused" for task in node.tasks or [] if task.is_paused]
    ill = [gpu for gpu in node.gpus or [] if gpu.health != "ok"]
    parts += [f"GPU {gpu.index} {gpu.health}" + (f": {gpu.note}" if gpu.note else "") for gpu in ill]
    return "; ".join(parts) or "-"


COLUMNS: tuple[Column[NodeDocument], ...] = (
    Column("NAME", lambda node: node.name, is_name=True),
    Column("STATUS", lambda node: node.status, style=state_style),
    Column("ADDRESS", lambda node: node.address or "-", is_wide=True),
    Column("ZONE", lambda node: node.zone or "-", is_wide=True),
    Column("LABELS", lambda node: ",".join(node.labels or []) or "-", is_wide=True),
    Column("FREE GPUS", lambda node: _of(node, node.free_gpus, node.total_gpus), is_right=True),
    Column("FREE CPUS", lambda node: _of(node, node.free_cpus, node.cpu_count), is_right=True, gives_way=True),
    Column("FREE MEMORY", _memory, is_right=True, gives_way=True),
    Column("NETWORK", _network, is_right=True, is_wide=True),
    Column("AGGREGATION", _aggregation, is_right=True, is_wide=True),
    Column("CPU", lambda node: _load(node, node.cpu_utilisation_ratio), is_right=True, gives_way=True),
    Column("GPU", lambda node: _load(node, node.gpu_utilisation_ratio), is_right=True, gives_way=True),
    Column("HEARD", lambda node: show_duration(node.staleness_seconds), is_right=True),
    Column("VERSION", lambda node: node.version or "-", is_wide=True),
    Column("SINCE", lambda node: show_duration(node.since_seconds), is_wide=True, is_right=True),
    Column("JOBS", lambda node: show_few([job[HANDLE] for job in node.jobs or []])),
    Column("MODEL", _models, gives_way=True),
    Column("NOTE", note),
)

GPU_COLUMNS: tuple[Column[GpuDocument], ...] = (
    Column("GPU", lambda gpu: str(gpu.index), is_right=True),
    Column("STATE", lambda gpu: gpu.state, style=lambda text: {"free": "green", "leased": "cyan"}.get(text, "red")),
    Column("JOB", lambda gpu: (gpu.job_id or "")[HANDLE] or "-"),
    Column("UTIL", lambda gpu: show_ratio(gpu.utilisation_ratio), is_right=True),
    Column("USED", lambda gpu: show_bytes(gpu.memory_used_bytes), is_right=True),
    Column("MEMORY", lambda gpu: show_bytes(gpu.memory_bytes), is_right=True),
    Column("TEMP", lambda gpu: _unit(gpu.temperature_celsius, "C"), is_right=True),
    Column("POWER", lambda gpu: _unit(gpu.power_watts, "W"), is_right=True),
    Column("MODEL", model),
    Column("UUID", lambda gpu: gpu.uuid, is_wide=True),
    Column("NOTE", lambda gpu: gpu.note or "-"),
)


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f} {unit}"


def execute(session: Session, arguments: Arguments) -> int:
    """A line for each node, or for each GPU of the node that was named."""
    if len(arguments.positionals) > 1:
        raise UsageError(f"{len(arguments.positionals)} nodes were named", "name one, or none for all")
    if arguments.positionals:
        return _one(session, one_positional(arguments, "node"))
    document = session.agents.call("cannot list nodes", "GET", "/v1/nodes")

    from swarmsched.documents import NodeDocument

    nodes = sorted(document["items"], key=lambda node: natural(str(node["name"])))
    session.agents.remember(nodes)
    session.printer.listed({**document, "items": nodes}, COLUMNS, NodeDocument)
    return OK


def _one(session: Session, name: str) -> int:
    told = session.agents.call(f"cannot show node {name}", "GET", f"/v1/nodes/{quote(name)}")
    if not session.printer.is_for_people:
        session.printer.document(told)
        return OK
    from swarmsched.documents import NodeDocument

    node = read(told, NodeDocument)
    session.printer.line(", ".join(_facts(node)))
    if node.gpus:
        session.printer.table(node.gpus, session.printer.chosen(GPU_COLUMNS))
    return OK


def _facts(node: NodeDocument) -> Iterator[str]:
    """What is known of a node that may be gone."""
    since = show_duration(node.since_seconds)
    yield f"{node.name} at {node.address or '-'}: {node.status} for {since}"
    if _is_present(node) and node.cpu_count is not None:
        yield f"{node.free_cpus} of {node.cpu_count} CPUs free"
        yield f"{show_bytes(node.free_memory_bytes)} of {show_bytes(node.memory_bytes)} of memory free"
    if note(node) != "-":
        yield note(node)


def natural(name: str) -> list[tuple[int, str]]:
    """Order of names, with numbers in them as numbers: node10 comes after node2."""
    parts, digits = [""], False
    for character in name:
        if character.isdigit() is not digits:
            parts.append("")
            digits = not digits
        parts[-1] += character
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]

"""`swarm status`: everything about one job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from swarm_client.cli.ps import shown_gpus, shown_state
from swarm_client.cli.session import Session, one_positional
from swarm_client.failure import OK, Failure
from swarm_client.job_id import for_user, job_path
from swarm_client.job_request import caller, word_list
from swarm_client.options import Arguments, Command
from swarm_client.output import plain, state_style
from swarm_client.quantity import show_bytes, show_duration, show_wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any  # importing typing costs a tenth of what `swarm ps` may take

COMMAND = Command("status", "status", "Everything about one job.", positionals="JOB", aliases=("describe",))
EVENTS_SHOWN = 10


def execute(session: Session, arguments: Arguments) -> int:
    """Print facts in lines for people, the whole document with -o json."""
    reference = one_positional(arguments, "job")
    query = for_user({}, reference, caller(session.config.environment))
    job = session.agents.call(f"cannot show {reference}", "GET", job_path(reference), query=query)
    printer = session.printer
    if not printer.is_for_people:
        printer.document(job)
        return OK
    for name, text in facts(job):
        shown = printer.paint(text, state_style(text)) if name == "State" else text
        printer.line(f"{printer.paint(f'{name}:', 'bold'):{22 if printer.has_color else 14}} {shown}")
    _print_events(session, job)
    return OK


def _when(text: object) -> str:
    """A time of the API to the second, which is what people read."""
    whole, point, _ = str(text or "-").partition(".")
    return f"{whole}Z" if point else whole


def facts(job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) of what is known; what does not apply is left out."""
    spec = job.get("spec") or {}
    yield "Job", f"{job['handle']}  ({job['id']})"
    for name in ("Name", "User", "Queue", "Priority"):
        if job.get(name.lower()):
            yield name, plain(str(job[name.lower()]))
    yield "State", shown_state(job)
    if job.get("reason") and job.get("state") != "ended":
        yield "Reason", plain(job["reason"])
    if job.get("state") == "ended":
        yield from _outcome(job)
    yield "Needs", needs(spec) if spec else f"{job.get('gpus')} GPUs"
    if job.get("nodes"):
        yield "Nodes", ", ".join(_share(share) for share in job["nodes"])
    yield from _command(spec)
    yield from _times(job, spec)
    yield (
        "Attempt",
        str(job.get("attempt") or 0) + (f", {job['relaunches']} relaunched" if job.get("relaunches") else ""),
    )
    yield "Shepherd", f"{job.get('shepherd')} (kept by {', '.join(job.get('holders') or []) or '-'})"
    if job.get("source") == "card":
        yield "Note", f"from gossip, {show_duration(job.get('staleness_seconds'))} old: its shepherd does not answer"


def _command(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if spec.get("command"):
        yield "Command", plain(word_list(spec["command"]))
    if spec.get("tree"):
        yield "Files", f"shipped, {show_bytes(spec.get('tree_bytes'))}, tree {spec['tree'][:12]}"
    for name, key in (("Folder", "workdir"), ("Environment", "venv")):
        if spec.get(key):
            yield name, plain(spec[key])
    if spec.get("env"):
        yield "Variables", plain(" ".join(f"{key}={value}" for key, value in sorted(spec["env"].items())))


def _outcome(job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if job.get("signal"):
        yield "Signal", str(job["signal"])
    elif job.get("exit_code") is not None:
        yield "Exit code", str(job["exit_code"])
    if job.get("detail"):
        yield "Detail", plain(job["detail"])
    if job.get("failed_node"):
        rank = job.get("failed_rank")
        yield "Failed on", job["failed_node"] + (f", rank {rank}" if rank is not None else "")


def needs(spec: Mapping[str, Any]) -> str:
    """`4 ranks with 1 GPU (H200, >= 80.0 GiB), 8 cores, 16.0 GiB each`."""
    each = []
    gpus = spec.get("gpus_per_rank") or 0
    if gpus:
        kind = [spec["gpu_type"]] if spec.get("gpu_type") else []
        kind += [f">= {show_bytes(spec['gpu_memory_bytes'])}"] if spec.get("gpu_memory_bytes") else []
        each.append(f"{gpus} GPU{'s' * (gpus > 1)}" + (f" ({', '.join(kind)})" if kind else ""))
    if spec.get("cpus_per_rank"):
        each.append(f"{spec['cpus_per_rank']} cores")
    if spec.get("memory_bytes_per_rank"):
        each.append(show_bytes(spec["memory_bytes_per_rank"]))
    ranks = spec.get("ranks") or 1
    text = f"{ranks} rank{'s' * (ranks > 1)}"
    return f"{text} with {', '.join(each)}{' each' * (ranks > 1)}" if each else f"{text}, no GPU"


def _share(share: Mapping[str, Any]) -> str:
    first, count = share.get("first_rank", 0), share.get("ranks", 1)
    return f"{share['node']} (rank {first})" if count == 1 else f"{share['node']} (ranks {first}-{first + count - 1})"


def _times(job: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Submitted", _when(job.get("submitted_at"))
    if job.get("started_at"):
        yield "Started", f"{_when(job['started_at'])} (after {show_wait(job.get('queued_seconds'))} in the queue)"
    if job.get("ended_at"):
        yield "Ended", _when(job["ended_at"])
    if job.get("started_at"):
        yield "Elapsed", show_duration(job.get("elapsed_seconds"))
    if spec.get("time_limit_seconds"):
        yield "Time limit", show_duration(spec["time_limit_seconds"])
    yield "GPUs", f"{shown_gpus(job)} (now/wanted), {job.get('attained_gpu_seconds') or 0:.0f} GPU-seconds used"


def _print_events(session: Session, job: Mapping[str, Any]) -> None:
    query = {"job": str(job["id"]), "limit": str(EVENTS_SHOWN)}
    try:
        events = session.agents.call("cannot list events", "GET", "/v1/events", query=query)["items"]
    except Failure as failure:
        session.tell(failure.problem)
        return
    if events:
        session.printer.line(session.printer.paint("Events:", "bold"))
    for event in events:
        session.printer.line(f"  {event['time']}  {event['agent']}  {event['kind']}  {plain(event['text'])}")

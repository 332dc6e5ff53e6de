"""`swarm status`: everything about one job, or the swarm in a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from swarm_client import outlook
from swarm_client.cli.model import model_lines
from swarm_client.cli.ps import shown_gpus, shown_ratio, shown_state, survives
from swarm_client.cli.workers import problems, workers_line
from swarm_client.failure import OK, Failure
from swarm_client.job_id import job_path
from swarm_client.job_request import word_list
from swarm_client.options import Arguments, Command
from swarm_client.output import plain, state_style
from swarm_client.quantity import show_bytes, show_count, show_duration, show_moment, show_time, show_wait
from swarm_client.reading import items_of, read
from swarm_client.session import Session, one_positional

if TYPE_CHECKING:
    from swarmsched.documents import (
        CheckpointDocument,
        JobDocument,
        JobNodeDocument,
        PolicyDocument,
        ProgressDocument,
        RescalingDocument,
        StatusDocument,
        WeakestDocument,
    )

COMMAND = Command(
    "status",
    "Everything about one job; without one, the swarm in a few numbers.",
    positionals="[JOB]",
    aliases=("describe", "inspect"),
)
EVENTS_SHOWN, EVENTS_READ = 10, 200
LEFT_SHOWN = 8
LEARNERS_SHOWN = 8
REMAINING_BY = {"steps": "the declared steps", "epochs": "the declared epochs", "loss": "the curve of its loss"}
CHECKPOINTED = "job.checkpointed"  # of many the newest is enough; they would hide all others


def execute(session: Session, arguments: Arguments) -> int:
    """Print facts in lines for people, the whole document with -o json."""
    if not arguments.positionals:
        return _show_swarm(session)
    reference = one_positional(arguments, "job")
    query = session.query_for(reference)
    told = session.agents.call(f"cannot show {reference}", "GET", job_path(reference), query=query)
    if not session.printer.is_for_people:
        session.printer.document(told)
        return OK
    from swarmsched.documents import JobDocument

    job = read(told, JobDocument)
    _print_facts(session, facts(job))
    if job.state == "ended":
        _print_facts(session, _left(session, job.id))
    if job.model:
        for line in model_lines(job.model, job.gpus_per_rank, session.printer):
            session.printer.line(line)
    _print_events(session, job)
    if session.is_verbose:
        _print_trail(session, job)
    return OK


def _print_trail(session: Session, job: JobDocument) -> None:
    """Print what its shepherd was told last, and which changes of the job's record followed."""
    report = session.agents.call("cannot read its trail", "GET", job_path(job.id, "/why"))
    from swarmsched.documents import WhyDocument

    trail = read(report, WhyDocument).trail
    if trail:
        session.printer.line(session.printer.paint("Trail of its shepherd:", "bold"))
    for each in trail:
        by = f" by {each.by}" if each.by else ""
        changes = f" -> {', '.join(each.changes)}" if each.changes else ""
        session.printer.line(plain(f"  {show_time(each.at, has_fraction=True)}  {each.told}{by}{changes}"))


def _left(session: Session, job_id: str) -> Iterator[tuple[str, str]]:
    """Where what its ranks have written lies; an agent of an older version does not tell."""
    try:
        left = session.agents.call("cannot find its folders", "GET", job_path(job_id, "/left"))
    except Failure:
        return
    from swarmsched.documents import LeftDocument

    for each in (read(item, LeftDocument) for item in left["items"][:LEFT_SHOWN]):
        until = f"until {show_time(each.until)} at the latest"
        yield "Left behind", f"{each.node}, {show_bytes(each.size_bytes)} in {plain(each.path)}, {until}"
    if len(left["items"]) > LEFT_SHOWN:
        yield "Left behind", f"{len(left['items']) - LEFT_SHOWN} more folders (GET /v1/jobs/{job_id}/left lists them)"


def _show_swarm(session: Session) -> int:
    status = session.agents.call("cannot read the state of the swarm", "GET", "/v1/status")
    if session.printer.is_for_people:
        from swarmsched.documents import StatusDocument

        _print_facts(session, swarm_facts(read(status, StatusDocument)))
    else:
        session.printer.document(status)
    return OK


def _print_facts(session: Session, lines: Iterator[tuple[str, str]]) -> None:
    printer = session.printer
    for name, text in lines:
        shown = printer.paint(text, state_style(text)) if name == "State" else text
        head = f"{name + ':':14} "
        whole = printer.paragraph(head + shown, len(head)) if shown == text else head + shown
        printer.line(printer.paint(f"{name}:", "bold") + whole[len(name) + 1 :])


def _policy(policy: PolicyDocument) -> str:
    given = ", ".join(f"{name}={value:g}" for name, value in sorted(policy.parameters.items()))
    restartable = ", jobs restartable unless they say no" if policy.restartable else ""
    return f"{policy.name}{f' ({given})' if given else ''}, elasticity {policy.elasticity}{restartable}"


def swarm_facts(status: StatusDocument) -> Iterator[tuple[str, str]]:
    """(name, text) about members, GPUs, jobs, and how many deaths of holders the jobs survive."""
    members, gpus, jobs = status.members, status.gpus, status.jobs
    yield "Members", ", ".join(f"{count} {name}" for name, count in items_of(members) if count or name == "alive")
    draining = f", {gpus.draining} on draining nodes" if gpus.draining else ""
    yield "GPUs", f"{gpus.free} free, {gpus.leased} leased{draining}, {gpus.total} in all"
    more = f"; {status.between_shepherds} more between two shepherds" if status.between_shepherds else ""
    yield "Jobs", ", ".join(f"{count} {name}" for name, count in items_of(jobs)) + more
    yield "Policy", _policy(status.policy)
    fairness = status.fairness
    if fairness:
        of = f"of {show_count(fairness.jobs, 'job')}, time to the end over that alone on an equal share of the GPUs"
        worst = f"worst {fairness.rho_worst:.2f} ({fairness.worst_job.handle})"
        yield "Fairness", f"rho {fairness.rho_median:.2f} in the middle, {worst}: {of}"
    survival = status.survival
    for deaths, count in survival.jobs.items():
        if count:
            told = f"{show_count(count, 'job')} survive{'s' * (count == 1)}"
            yield "Survival", f"{told} {_deaths(int(deaths))}"
    if survival.without_majority:
        lost = show_count(survival.without_majority, "job")
        yield "Survival", f"{lost} lost most holders: nothing is decided until they return (`swarm recover`)"
    if survival.unknown:
        yield "Survival", f"of {show_count(survival.unknown, 'job')} it is not known: no holder answers"
    if survival.weakest:
        yield "Weakest", ", ".join(_weak(job) for job in survival.weakest)
    if status.silent_nodes:
        yield "Silent", ", ".join(status.silent_nodes)
    if status.unasked_nodes:
        yield "Not asked", f"{show_count(len(status.unasked_nodes), 'agent')}, for want of time"


def _deaths(count: int) -> str:
    return {0: "no death of a holder", 1: "the death of any one holder"}.get(
        count, f"the deaths of any {count} holders"
    )


def _weak(job: WeakestDocument) -> str:
    return (
        f"{job.handle}{f' {plain(job.name)}' if job.name else ''} ({survives(job.survives_deaths, job.has_majority)})"
    )


def facts(job: JobDocument) -> Iterator[tuple[str, str]]:
    """(name, text) of what is known; what does not apply is left out."""
    spec = job.spec or {}
    yield "Job", f"{job.handle}  ({job.id})"
    for name, value in (("Name", job.name), ("User", job.user), ("Queue", job.queue), ("Priority", job.priority)):
        if value:
            yield name, plain(str(value))
    yield "State", shown_state(job)
    if job.reason and job.state != "ended":
        yield "Reason", plain(job.reason)
    if job.state == "ended":
        yield from _outcome(job)
    yield from _place(job, spec)
    yield from _command(spec)
    yield from _files(job, spec)
    yield from _times(job, spec)
    if job.progress:
        yield from _progress(job.progress)
        yield from _apart(job.progress, spec)
    yield from outlook.facts(job)
    yield "Attempt", ", ".join([str(job.attempt), *_repeats(job, spec)])
    changes = job.rescalings or []
    for number, each in enumerate(changes, 1):
        is_last = number == len(changes) and job.state != "ended"
        yield "Rescaled", _rescaling(each, is_elastic=bool(spec.get("elastic")), is_last=is_last)
    if job.checkpoint:
        yield "Checkpoint", _checkpoint(job.checkpoint)
    if job.leftovers:
        nodes = ", ".join(f"{each.node} (attempt {each.attempt})" for each in job.leftovers)
        yield "Left over", f"ranks that may still run on {nodes}; nothing starts before they are surely over"
    yield "Shepherd", f"{job.shepherd} (kept by {', '.join(job.holders or []) or '-'})"
    if job.state != "ended":
        yield from _survival(job)
    if job.source == "card":
        yield "Note", f"from gossip, {show_duration(job.staleness_seconds)} old: its shepherd does not answer"
    elif job.staleness_seconds:
        age = show_duration(job.staleness_seconds)
        yield "Note", f"as of {age} ago: whoever answers for the job at this moment knows an older state"


def _place(job: JobDocument, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What it needs, how many ranks it has, why so many, and where; of a job with groups, what each of them does."""
    if not job.groups:
        yield "Needs", needs(spec) if spec else f"{job.gpus} GPUs"
    if job.size_reason:
        yield "Has", plain(f"{show_count(job.world_size or 0, 'rank')}: {job.size_reason}")
    if workers := workers_line(job):
        yield "Workers", workers
        yield from [("Problem", plain(problem)) for problem in problems(job)]
    elif job.nodes:
        yield "Nodes", ", ".join(_share(share) for share in job.nodes)
    for group in job.groups or ():
        where = f" on {', '.join(group.nodes)}" if group.nodes else ""
        size = str(group.ranks) + (f" to {group.ranks_most}" if group.ranks_most > group.ranks else "")
        has = f"{group.world_size} of {size} rank{'s' * (size != '1')}{where}; {group.needs}"
        yield f"Group {group.name}", plain(f"{has}; {word_list(group.command)}")


def _progress(progress: ProgressDocument) -> Iterator[tuple[str, str]]:
    """How far it has come, how fast, and what is left."""
    from swarmsched.estimate import STARVES  # other commands need none of it

    done = [shown_ratio(progress)] if progress.ratio is not None else []
    done += [_of_total("step", progress.step, progress.total_steps)] if progress.step is not None else []
    done += [_of_total("epoch", progress.epoch, progress.total_epochs)] if progress.epoch is not None else []
    done += [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
    if done:
        yield "Progress", ", ".join(done)
    speed = [f"{progress.step_seconds:.3g} s a step"] if progress.step_seconds else []
    speed += [f"{progress.samples_per_second:.4g} samples/s"] if progress.samples_per_second else []
    if speed:
        yield "Speed", ", ".join(speed)
    if progress.data_wait and progress.data_wait >= STARVES:
        yield "Starves", f"{progress.data_wait:.0%} of its time waits for data (an input group may load it; swarm why)"
    yield "Remaining", remaining(progress)
    newest = f" ({odd})" if (odd := oddities(progress)) else ""
    if progress.reported_at:
        yield "Reported", f"{show_time(progress.reported_at)} by rank {progress.rank}{newest}"
    elif newest:
        yield "Reported", f"nothing that could be taken{newest}"


def _apart(progress: ProgressDocument, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How ranks that train apart stand; of many those that are furthest behind."""
    learners = progress.learners or []
    if not learners:
        if spec.get("outer"):
            yield "Outer", "no rank has entered swarm_elastic.Outer: until one does, nothing is merged"
        return
    newest = max((each.version for each in learners), default=0)
    told = []
    for each in sorted(learners, key=lambda each: (each.version, each.rank))[:LEARNERS_SHOWN]:
        behind = f", {show_count(newest - each.version, 'version')} behind" if each.version < newest else ""
        told.append(f"rank {each.rank}: {show_count(each.rounds, 'round')}{behind}, waits {each.wait_ratio:.0%}")
    told += [f"and {len(learners) - LEARNERS_SHOWN} more"] if len(learners) > LEARNERS_SHOWN else []
    yield "Outer", f"version {newest}; {'; '.join(told)}"


def oddities(progress: ProgressDocument) -> str:
    """What was odd about its reports: how often what, and the newest problem in words; empty for nothing."""
    odd = ", ".join(f"{count} {kind}" for kind, count in sorted((progress.oddities or {}).items()))
    return f"{odd}{'; ' * bool(progress.problem)}{plain(progress.problem or '')}" if odd else ""


def _of_total(name: str, count: float, total: float | None) -> str:
    return f"{name} {count:.10g}" + (f" of {total:.10g}" if total else "")


def remaining(progress: ProgressDocument) -> str:
    """Time that is left, its interval, and by what."""
    source, left = progress.source, show_duration(progress.remaining_seconds)
    if source == "time_limit":
        return f"{left} at most, by its time limit"
    if source not in REMAINING_BY:
        if progress.target_loss:
            return f"unknown: whether the loss comes down to {progress.target_loss:g}"
        if progress.total_steps or progress.total_epochs:
            return "unknown until training is seen to advance"
        return "unknown: no time limit, and no total_steps, total_epochs or target_loss was reported"
    return f"{left}{_interval(progress)}, by {REMAINING_BY[source]}"


def _interval(progress: ProgressDocument) -> str:
    """What the time that is left may lie between; nothing where both ends read the same."""
    low, high = progress.remaining_seconds_low, progress.remaining_seconds_high
    if low is None or (high is not None and show_duration(low) == show_duration(high)):
        return ""
    return f" ({show_duration(low)} {'or more' if high is None else f'to {show_duration(high)}'})"


def _checkpoint(checkpoint: CheckpointDocument) -> str:
    """What the next attempt resumes from, and where it is."""
    where = f"copies on {', '.join(checkpoint.copies)}" if checkpoint.copies else "in a shared folder"
    size, when = show_bytes(checkpoint.size_bytes), show_time(checkpoint.committed_at)
    return f"{plain(checkpoint.name)} of attempt {checkpoint.attempt}, {size}, {when}, {where}"


def _rescaling(change: RescalingDocument, *, is_elastic: bool, is_last: bool) -> str:
    """One change of its size or place: from what to what, when, at what cost and why; only the last is under way."""
    before, after = change.ranks_before, change.ranks_after
    size = f"{before} to {show_count(after, 'rank')}" if after else f"from {show_count(before, 'rank')}"
    pause_s = change.pause_seconds or 0.0
    pause = f"{pause_s:.{1 if pause_s >= 1 else 3}f} s"
    unfinished = ("under way" if is_elastic else "not running again yet") if is_last else "overtaken"
    finished = f"paused {pause}" if is_elastic else f"its ranks ran again after {pause}"
    cost = finished if after else unfinished
    return f"{size}, {show_time(change.decided_at)}, {cost}: {plain(change.reason)}"


def _repeats(job: JobDocument, spec: Mapping[str, Any]) -> Iterator[str]:
    """How often it was run again, and why."""
    if job.relaunches:
        yield f"{job.relaunches} relaunched"
    if job.restarts:
        limit = spec.get("max_restarts")
        of = f" of {limit}" if limit is not None else ""
        yield f"restarted {job.restarts}{of} time{'s' * (bool(of) or job.restarts > 1)} after losing a node"
    if job.preemptions:
        yield f"preempted {job.preemptions} time{'s' * (job.preemptions > 1)}"


def _survival(job: JobDocument) -> Iterator[tuple[str, str]]:
    """What may happen to its holders before nothing can be decided about it."""
    if job.has_majority is False:
        yield (
            "Survives",
            "most of its holders are gone; nothing is decided until they return (`swarm recover` explains)",
        )
    elif job.survives_deaths is not None:
        yield "Survives", _deaths(job.survives_deaths)
    if job.leaving_holders:
        yield "Holders", f"changing; until it is done a majority of {', '.join(job.leaving_holders)} counts as well"
    if job.is_forced:
        yield "Forced", "an operator declared lost holders dead (`swarm recover`)"


def _command(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if spec.get("command") and not spec.get("groups"):
        yield "Command", plain(word_list(spec["command"]))
    for name, key in (("Folder", "workdir"), ("Environment", "venv")):
        if spec.get(key):
            yield name, plain(spec[key])
    if spec.get("env"):
        yield "Variables", plain(" ".join(f"{key}={value}" for key, value in sorted(spec["env"].items())))


def _files(job: JobDocument, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What travels with it, and which agents keep that; an agent of an older version does not tell."""
    told = [f"shipped, {show_bytes(spec.get('tree_bytes'))}, tree {spec['tree'][:12]}"] if spec.get("tree") else []
    if job.files_on is not None:
        told.append(f"kept on {', '.join(job.files_on) or 'no agent beside the one that took them'}")
    if told:
        yield "Files", ", ".join(told)


def _outcome(job: JobDocument) -> Iterator[tuple[str, str]]:
    if job.signal:
        yield "Signal", str(job.signal)
    elif job.exit_code is not None:
        yield "Exit code", str(job.exit_code)
    if job.detail:
        yield "Detail", plain(job.detail)
    if job.failed_node:
        rank = job.failed_rank
        name = f"{job.failed_group}.{rank}" if job.failed_group else rank
        yield "Failed on", job.failed_node + (f", rank {name}" if rank is not None else "")


def needs(spec: Mapping[str, Any]) -> str:
    """`4 ranks with 1 GPU (H200, >= 80.0 GiB), 8 cores, 16.0 GiB each`, or `1 to 4 ranks ..., elastic`."""
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
    most = max(ranks, spec.get("ranks_most") or 0)
    text = f"{ranks} to {most} ranks" if most > ranks else show_count(ranks, "rank")
    where = f", on nodes with {', '.join(spec['require'])}" if spec.get("require") else ""
    marks = ", elastic" * bool(spec.get("elastic")) + ", restartable" * bool(spec.get("restartable"))
    marks += ", GPUs of several models" * bool(spec.get("mixed_gpus"))
    return (f"{text} with {', '.join(each)}{' each' * (most > 1)}" if each else f"{text}, no GPU") + where + marks


def _share(share: JobNodeDocument) -> str:
    first, count = share.first_rank, share.ranks
    paused = ", paused" if share.is_paused else ""
    if first is None or count is None:
        return share.node
    ranks = f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
    ranks = f"{share.group} {ranks}" if share.group else ranks
    return f"{share.node} ({ranks}{paused})"


def _times(job: JobDocument, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Submitted", show_time(job.submitted_at)
    if job.started_at:
        first = "the first attempt " if job.attempt > 1 else ""
        waited = show_wait(job.queued_seconds)
        yield "Started", f"{show_time(job.started_at)} ({first}after {waited} in the queue)"
    if job.ended_at:
        yield "Ended", show_time(job.ended_at)
    if job.started_at:
        yield "Elapsed", show_duration(job.elapsed_seconds)
    if spec.get("time_limit_seconds"):
        yield "Time limit", show_duration(spec["time_limit_seconds"])
    if deadline := spec.get("deadline_utc_seconds"):
        is_open = job.state != "ended"
        yield "Deadline", outlook.deadline_text(job) if is_open else show_moment(deadline)
    now = "" if job.state == "ended" else " (now/wanted)"
    yield "GPUs", f"{shown_gpus(job)}{now}, {job.attained_gpu_seconds:.0f} GPU-seconds used"


def _print_events(session: Session, job: JobDocument) -> None:
    query = {"job": job.id, "limit": str(EVENTS_READ)}
    try:
        found = session.agents.call("cannot list events", "GET", "/v1/events", query=query)["items"]
    except Failure as failure:
        session.tell(failure.problem)
        return
    from swarmsched.documents import EventDocument

    events = [read(each, EventDocument) for each in found]
    if events:
        session.printer.line(session.printer.paint("Events:", "bold"))
    newest = next((each for each in reversed(events) if each.kind == CHECKPOINTED), None)
    shown = [each for each in events if each.kind != CHECKPOINTED or each is newest]
    for event in shown[-EVENTS_SHOWN:]:
        session.printer.line(f"  {event.time}  {event.agent}  {event.kind}  {plain(event.text)}")

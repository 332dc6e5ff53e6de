"""`swarm scale`: give a job another number of GPUs, or another range of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm_client.conversation import TO_SHEPHERD
from swarm_client.failure import OK, UsageError
from swarm_client.job_id import job_path
from swarm_client.job_key import gpu_range
from swarm_client.options import Arguments, Command
from swarm_client.quantity import show_count
from swarm_client.session import Session

COMMAND = Command(
    "scale",
    "Give a job that waits or runs another number of GPUs, or another range of them.",
    positionals="JOB N|MIN:MAX",
    details=(
        "A running job whose size is outside of the range is stopped with its grace time.  It goes on from its newest\n"
        "checkpoint with the nearest size of the range as soon as there is room.  Within the range the swarm chooses.\n"
        "Of an elastic job workers join or leave while the others train: nothing stops, and no checkpoint is needed.\n"
        "Of a job without GPUs N counts ranks.  Examples: swarm scale k3j9x0ab 4, swarm scale @last 2:8"
    ),
)


def execute(session: Session, arguments: Arguments) -> int:
    """Print the job; what it has now, and is to have, for people."""
    if len(arguments.positionals) != 2:
        raise UsageError("name one job and a number of GPUs", "for example swarm scale k3j9x0ab 4, or 2:8")
    reference, text = arguments.positionals
    query = session.query_for(reference)
    job = session.agents.call(f"cannot show {reference}", "GET", job_path(reference), query=query)
    least, most = _ranks(text, int(job.get("gpus_per_rank") or 0))
    scaled = session.agents.call(
        f"cannot scale {reference}",
        "POST",
        job_path(str(job["id"]), "/scale"),
        body={"ranks": least, "ranks_most": 0 if most == least else most},
        terms=TO_SHEPHERD,
    )
    session.printer.changed(scaled)
    if session.printer.is_for_people:
        session.tell(_told(scaled, least, most))
    return OK


def _ranks(text: str, per_rank: int) -> tuple[int, int]:
    try:
        least, most = gpu_range(text)
    except ValueError as error:
        raise UsageError(f"{text!r} {error}", "a number of GPUs, or MIN:MAX, as in 2:8") from None
    if per_rank and (least % per_rank or most % per_rank):
        raise UsageError(f"{text} cannot be split into ranks of {show_count(per_rank, 'GPU')}", "give multiples of it")
    return least // (per_rank or 1), most // (per_rank or 1)


def _told(job: Mapping[str, Any], least: int, most: int) -> str:
    sizes = show_count(most, "rank") if least == most else f"{least} to {most} ranks"
    has = int(job.get("world_size") or 0)
    if not has:
        return f"job {job['handle']} will begin with {sizes}"
    if least <= has <= most:
        return f"job {job['handle']} goes on with {show_count(has, 'rank')}, of {sizes}"
    how = ", while it trains" if job.get("world") else ""
    return f"job {job['handle']} has {show_count(has, 'rank')} and gets {sizes} as soon as there is room{how}"

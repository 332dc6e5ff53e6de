"""`swarm recover`: go on without the holders of a job that are lost for good; an operator's decision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swarm_client.conversation import ONCE
from swarm_client.failure import CONFLICT, OK, USAGE, Failure
from swarm_client.job_id import job_path
from swarm_client.options import Arguments, Command, Option
from swarm_client.session import Session, one_positional

COMMAND = Command(
    "recover",
    "Go on with a job of whose holders too many are lost for good.",
    (Option("--force", "do it; without it, only say what would happen"),),
    positionals="JOB",
    details=(
        "A job's record is kept by up to three holders, and a majority of them decides.  When a majority is lost\n"
        "for good (broken disks, sold machines), this declares the others to be all of them.  Never do it while the\n"
        "silent ones may come back: two halves of the swarm could then run the job twice."
    ),
    examples=("swarm recover k3j9x0ab", "swarm recover k3j9x0ab --force"),
)


def execute(session: Session, arguments: Arguments) -> int:
    """0 when the job was recovered; 2 without --force; 5 when there is no need."""
    reference = one_positional(arguments, "job")
    query = session.query_for(reference)
    if not arguments["force"]:
        return _explain(session, reference, query)
    path = job_path(reference, "/recover")
    job = session.agents.call(
        f"cannot recover {reference}", "POST", path, query=query, body={"force": True}, terms=ONCE
    )
    session.printer.changed(job)
    if session.printer.is_for_people:
        session.tell(f"job {job['handle']} goes on, kept by {', '.join(job.get('holders') or []) or 'nobody'}")
    return OK


def _explain(session: Session, reference: str, query: dict[str, str]) -> int:
    job = session.agents.call(f"cannot show {reference}", "GET", job_path(reference), query=query)
    if job.get("state") == "ended":
        raise Failure(f"job {job['handle']} has ended: there is nothing to recover", "", CONFLICT)
    statuses = {
        str(member["name"]): str(member["status"])
        for member in session.agents.call("cannot list members", "GET", "/v1/members")["items"]
    }
    for sentence in sentences(job, statuses):
        session.warn(sentence)
    return USAGE


def sentences(job: Mapping[str, Any], statuses: Mapping[str, str]) -> Iterator[str]:
    """What is known of the holders, and what --force would do."""
    handle, holders = job["handle"], [str(name) for name in job.get("holders") or []]
    if not holders:
        yield f"who holds job {handle} is not known: no agent that has its record answers"
    else:
        yield f"job {handle} is kept by " + ", ".join(f"{name} ({statuses.get(name, 'unknown')})" for name in holders)
    left = ", ".join(str(each["node"]) for each in job.get("leftovers") or [])
    if left:
        yield f"its ranks on {left} may still run, and nothing new starts before that is settled"
        yield "with --force you vouch for it that they are dead, and the job goes on at once"
    elif job.get("has_majority"):
        yield "a majority of them is there: nothing needs to be forced, and --force would be refused"
        return
    if not job.get("has_majority"):
        yield from _without_majority(holders, statuses)
    yield f"if you are sure: swarm recover {handle} --force"


def _without_majority(holders: Sequence[str], statuses: Mapping[str, str]) -> Iterator[str]:
    silent = [name for name in holders if statuses.get(name) not in ("alive", "suspect")]
    gone = ", ".join(silent) or "the silent ones"
    yield f"with --force the others decide alone, under a new epoch, as if {gone} had never held it"
    yield "what its ranks do on nodes that are cut off is not known: make sure that they are dead"

"""`swarm wait`: block until jobs have ended, or run; for scripts."""

from __future__ import annotations

import time

from swarm_client.conversation import Contact, RequestTerms
from swarm_client.failure import OK, SWARM_FAILED, TIMED_OUT, Failure, UsageError
from swarm_client.follow import describe_end, may_pass, wait_for_contact
from swarm_client.job_id import job_path
from swarm_client.options import Arguments, Command, Option
from swarm_client.quantity import duration
from swarm_client.session import Session, as_swarm_failure

COMMAND = Command(
    "wait",
    "Wait until jobs have ended (or run), and return the first failing job's exit code.",
    (
        Option("--for", "done or running", "STATE", choices=("done", "running")),
        Option("--timeout", "return 124 after this time", "TIME", read=duration),
    ),
    positionals="JOB...",
    examples=("swarm wait k3j9x0ab resnet", "swarm wait @last --for running --timeout 10m"),
    has_output=False,
)
ROUND_S = 20.0  # of one request; agents that die meanwhile cost no more than their connection


def execute(session: Session, arguments: Arguments) -> int:
    """0 when all succeeded; else the code of the first that did not; 124 at --timeout."""
    if not arguments.positionals:
        raise UsageError("no job was named", "for example swarm wait k3j9x0ab")
    limit_s = arguments["timeout"]
    end_s = time.monotonic() + limit_s if limit_s is not None else float("inf")
    code = OK
    session.agents.learn(is_for_now=True)  # whom to go on with, should this agent die
    try:
        for reference in arguments.positionals:
            found = _wait(session, reference, arguments.get("for", "done"), end_s)
            if found == TIMED_OUT and time.monotonic() >= end_s:
                session.tell(f"{reference} is not {arguments.get('for', 'done')} after {limit_s:g} s")
                return TIMED_OUT
            code = code or found
    except Failure as failure:
        raise as_swarm_failure(failure) from failure.__cause__
    return code


def _wait(session: Session, reference: str, goal: str, end_s: float) -> int:
    path = job_path(reference, "/wait")
    query = session.query_for(reference, {"for": goal})
    contact = Contact(float(session.config.values["contact_timeout"]))
    is_known = False
    while True:
        left_s = max(0.0, min(ROUND_S, end_s - time.monotonic()))
        query["timeout"] = f"{left_s:.3f}"
        action = f"cannot wait for {reference}"
        try:
            answer = session.agents.call(action, "GET", path, query=query, terms=RequestTerms(patience_s=left_s + 5.0))
        except Failure as failure:
            if not may_pass(failure, is_known=is_known):
                raise
            if time.monotonic() >= end_s:
                return TIMED_OUT
            wait_for_contact(contact, session.waiter, reference, failure.problem)
            continue
        job = answer["job"]
        path = job_path(str(job["id"]), "/wait")
        is_known = True
        contact.found()
        if job["state"] == "ended":
            if job["end_reason"] != "completed" or job["shell_exit_code"]:
                session.tell(describe_end(str(job["handle"]), {**job, "job": job}))
            return SWARM_FAILED if job["shell_exit_code"] is None else int(job["shell_exit_code"])
        if answer["met"]:
            return OK
        if time.monotonic() >= end_s:
            return TIMED_OUT

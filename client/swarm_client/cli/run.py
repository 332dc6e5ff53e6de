"""`swarm run`: submit, wait, stream the output, return the job's exit code."""

from __future__ import annotations

from swarm_client import job_key
from swarm_client.attached import Attachment
from swarm_client.cli import refuse_shaping
from swarm_client.cli.submit import print_dry_run
from swarm_client.failure import OK, Failure
from swarm_client.options import Arguments, Command, Option
from swarm_client.quantity import duration
from swarm_client.session import Session, as_swarm_failure
from swarm_client.submission import submit

COMMAND = Command(
    "run",
    "Submit a job, stream its output and return its exit code.",
    (
        *job_key.OPTIONS,
        Option("-d --detach", "print the id and return at once"),
        Option("--label", "begin each line with the rank that wrote it"),
        Option("--timeout", "wait so long at most, queue included, then cancel and return 124", "TIME", read=duration),
        Option("--kill-on-disconnect", "cancel the job when the terminal is lost"),
    ),
    positionals="[--] COMMAND...",
    takes_command=True,
    details=(
        "Everything after `--` is the command, untouched.  Ctrl-C is sent to the ranks; a second within 2 s\n"
        "cancels the job, a third leaves at once.  Ctrl-\\ or Ctrl-P Ctrl-Q detaches and leaves the job running."
    ),
    examples=("swarm run -g 4 -- python train.py --epochs 90", "swarm run --ranks 2 --timeout 1h -- ./evaluate.sh"),
)


def execute(session: Session, arguments: Arguments) -> int:
    """Exit code: the job's own; 124 at a time limit; 125 when the swarm failed."""
    if not arguments["detach"] and not arguments["dry_run"]:
        refuse_shaping(arguments, "`swarm run`, which prints the job's output")
    try:
        job, shipment = submit(session, arguments)
        if arguments["dry_run"]:
            return print_dry_run(session, job, shipment)
        if arguments["detach"]:
            session.printer.changed(job)
            return OK
        session.agents.learn(is_for_now=True)  # whom to go on with, should this agent die
        attachment = Attachment(
            session,
            job["id"],
            handle=job["handle"],
            label=bool(arguments["label"]),
            timeout_s=arguments.get("timeout", 0.0),
            kill_on_disconnect=bool(arguments["kill_on_disconnect"]),
            is_known=True,
        )
        code = attachment.follow()
        if code and not session.is_quiet:
            for sentence in shipment.missed(attachment.last_output(), job["id"]):
                session.tell(sentence)
    except Failure as failure:
        raise as_swarm_failure(failure) from failure.__cause__
    return code or OK

"""`swarm submit`: queue a job, print its id, return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm_client import job_key
from swarm_client.failure import OK, UsageError
from swarm_client.options import Arguments, Command
from swarm_client.outlook import deadline_text, start_text
from swarm_client.quantity import show_count
from swarm_client.reading import read
from swarm_client.session import Session
from swarm_client.submission import submit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from swarm_client.shipment import Shipment

COMMAND = Command(
    "submit",
    "Queue a job, print its id and return at once.",
    job_key.OPTIONS,
    positionals="FILE | [--] COMMAND...",
    takes_command=True,
    details="FILE is a job file (job.toml or job.yaml); anything else is the command.",
    examples=("swarm submit -g 8 -n resnet -- python train.py", "swarm submit job.toml"),
)


def execute(session: Session, arguments: Arguments) -> int:
    """Print the handle; `-o json` prints the job."""
    words = arguments.command
    if arguments.positionals and words[0].endswith((".toml", ".yaml", ".yml")):
        _take_file(arguments)
    job, shipment = submit(session, arguments)
    if arguments["dry_run"]:
        return print_dry_run(session, job, shipment)
    session.printer.changed(job)
    return OK


def _take_file(arguments: Arguments) -> None:
    if arguments["file"]:
        raise UsageError(f"two job files, {arguments['file']} and {arguments.command[0]}", "give one of them")
    if len(arguments.command) > 1 and arguments.command[1] != "--":
        raise UsageError(
            f"{arguments.command[1]!r} follows the job file", "put options before it, a command after `--`"
        )
    arguments.values["file"] = arguments.command[0]
    arguments.run(arguments.command[2:])


def print_dry_run(session: Session, told: Mapping[str, Any], shipment: Shipment) -> int:
    """What would happen, and what would be shipped; nothing was stored."""
    printer = session.printer
    if not printer.is_for_people:
        printer.document(told)
        return OK
    from swarmsched.documents import JobDocument

    job = read(told, JobDocument)
    shape = f"{show_count(job.ranks, 'rank')}, {show_count(job.gpus, 'GPU')}"
    printer.line(f"would be accepted: {shape}; {job.reason or 'it would be queued'}")
    if "outlook" in told:
        printer.line(f"expected start: {start_text(job)}")
    if "outlook" in told and (job.spec or {}).get("deadline_utc_seconds"):
        printer.line(f"deadline {deadline_text(job)}")
    printer.line(f"would be shipped: {shipment.summary()}")
    return OK

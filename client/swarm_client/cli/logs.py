"""`swarm logs`: output of a job; with -f until the job ends."""

from __future__ import annotations

from swarm_client.failure import OK, UsageError
from swarm_client.follow import JobStream, OutputWriter, describe_end, describe_state
from swarm_client.job_id import split_rank
from swarm_client.options import Arguments, Command, Option
from swarm_client.quantity import duration, whole
from swarm_client.session import Session, one_positional


def _since(text: str) -> str:
    if "T" in text.upper() and len(text) >= 20:
        return text
    if ":" in text:
        raise UsageError(f"--since {text!r}: a length of time or a time of day?", "write 10m, or 2026-01-31T11:04:00Z")
    return f"{duration(text):g}"


COMMAND = Command(
    "logs",
    "Print the output of a job.",
    (
        Option("-f --follow", "go on until the job ends"),
        Option("--tail", "only the last N lines of each rank", "N", read=whole(0, 10**9)),
        Option("--since", "only newer output: 10m, or an RFC 3339 time", "TIME", read=_since),
        Option("--rank", "only these ranks, comma separated: 0,3 or server.0", "RANKS"),
        Option("--group", "only ranks of these groups, comma separated", "NAMES"),
        Option("--attempt", "output of this attempt; default: the newest that has any", "N", read=whole(1, 2**32 - 1)),
        Option("--stream", "only stdout or stderr", "NAME", choices=("stdout", "stderr")),
        Option("--timestamps", "begin each line with its time"),
        Option("--label", "begin each line with its rank"),
    ),
    positionals="JOB[.RANK]",
    examples=("swarm logs -f @last", "swarm logs --since 10m --label k3j9x0ab"),
    has_output=False,
)


def execute(session: Session, arguments: Arguments) -> int:
    """Ends with the job when following; Ctrl-C ends only the viewer."""
    reference, rank = split_rank(one_positional(arguments, "job"))
    if arguments["follow"] and arguments["attempt"] is not None:
        raise UsageError("--attempt and --follow exclude one another", "leave out --follow to read one attempt")
    keys = ("tail", "since", "stream", "attempt", "group")
    query = {key: str(arguments[key]) for key in keys if arguments[key] is not None}
    ranks = arguments["rank"] or rank
    if ranks:
        if not all(part.rpartition(".")[2].isdigit() for part in ranks.split(",")):
            raise UsageError(f"--rank {ranks!r} is no list of ranks", "write --rank 0, --rank 0,3 or --rank server.0")
        query["rank"] = ranks
    if arguments["follow"]:
        query["follow"] = "1"
        session.agents.learn(is_for_now=True)  # whom to go on with, should this agent die
    query = session.query_for(reference, query)
    writer = OutputWriter(label=bool(arguments["label"]), timestamps=bool(arguments["timestamps"]))
    session.waiter.do_before_wait(writer.flush)
    stream = JobStream(
        session.agents,
        reference,
        query,
        is_known=False,
        contact_timeout_s=float(session.config.values["contact_timeout"]),
        is_lossless=writer.is_for_program,
    )
    has_output = False
    for record in stream.records():
        writer.note(record.get("job") or {})
        writer.write(record)
        if record["type"] in ("log", "gap"):
            has_output = True
        elif record["type"] in ("attempt", "warning"):
            session.tell(str(record.get("text", "")))
        elif record["type"] == "end" and not has_output:
            session.tell(describe_end(str((record.get("job") or {}).get("handle", reference)), record))
        elif record["type"] == "state" and not has_output and record.get("state") not in ("running", "ended"):
            session.tell(f"job {(record.get('job') or {}).get('handle', reference)} {describe_state(record)}")
    writer.finish()
    writer.check_whole(reference)
    return OK

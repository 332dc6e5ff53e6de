"""`swarm simulate generate` and `import`: workloads and profiles as tables that `swarm simulate replay` reads.

One draws them, the other reads what others have published, in their formats.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from swarm_client.cli.replay import NODES_DEFAULT, NODES_MOST, read_lines
from swarm_client.failure import OK, UsageError
from swarm_client.options import Option
from swarm_client.quantity import show_duration, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swarm_client.options import Arguments
    from swarm_client.session import Session

FOLDER_DEFAULT = "generated"
POLICIES = "swarm,tiresias,backfill"
FILES_MOST = 200_000
NAMED = 5  # rows left out that are named here; all are in a table
SKIPPED = "skipped.csv"


def _number(low: float, high: float) -> Callable[[str], float]:
    """A reader for numbers in a range."""

    def read(text: str) -> float:
        from swarmsched.replay.table import number

        try:
            value = number(text)
        except ValueError:
            value = high + 1
        if not low <= value <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return value

    return read


TO = Option(
    "--to", f"folder for the tables (generate, import; default {FOLDER_DEFAULT}, or the name of the format)", "DIR"
)
IMPORT_OPTIONS = (TO,)
OPTIONS = (
    TO,
    Option("--count", "jobs of the workload (generate; default 160)", "N", read=whole(1, 100_000)),
    Option(
        "--load",
        "GPU time that the jobs take over what the cluster has while they come (generate; default 1)",
        "RATIO",
        read=_number(0.01, 100),
    ),
    Option("--classes", "classes of GPUs, 1 to 3 (generate; default 1)", "N", read=whole(1, 3)),
    Option(
        "--rigid",
        "part of the jobs that have a run time and no profile (generate; default 0.3)",
        "RATIO",
        read=_number(0, 1),
    ),
    Option(
        "--sweeps",
        "part of the jobs that come as many alike at once (generate; default 0.3)",
        "RATIO",
        read=_number(0, 1),
    ),
    Option(
        "--swing", "how far arrivals rise by day and fall by night (generate; default 0.6)", "RATIO", read=_number(0, 1)
    ),
    Option("--deadlines", "part of the jobs that have a deadline (generate; default 0.1)", "RATIO", read=_number(0, 1)),
    Option(
        "--wishes",
        "how often users name sizes, a priority or a limit, and jobs fail; 0: never (generate; default 1)",
        "RATIO",
        read=_number(0, 1),
    ),
)


def generate(session: Session, arguments: Arguments) -> int:
    """Draw a workload and write it."""
    from swarmsched.errors import ConfigError
    from swarmsched.replay.generate import Wanted, files, jobs

    folder = arguments.get("to", FOLDER_DEFAULT)
    names = ("seed", "count", "load", "gpus_per_node", "classes", "rigid", "sweeps", "swing", "deadlines", "wishes")
    chosen = {name: arguments[name] for name in names if arguments[name] is not None}
    wanted = Wanted(nodes=_nodes(arguments["nodes"]), **chosen)
    try:
        tables, rows = files(wanted), jobs(wanted)
    except ConfigError as error:
        raise UsageError(f"--{error}", error.remedy) from error
    write(folder, tables)
    words = ["swarm", "simulate", "replay", f"{folder}/jobs.csv", "--profiles", f"{folder}/profiles"]
    words += ["--cluster", f"{folder}/cluster.csv", "--restart-costs", f"{folder}/restart_costs.csv"]
    command = shlex.join([*words, "--policy", POLICIES])
    told = {
        "folder": folder,
        "files": [*tables],
        "seed": wanted.seed,
        "jobs": len(rows),
        "profiled": sum(1 for row in rows if row[3]),
        "load": wanted.load,
        "span_s": rows[-1][1],
        "replay": command,
    }
    if session.printer.is_for_names:
        for name in tables:
            session.printer.line(f"{folder}/{name}")
    elif session.printer.is_for_people:
        servers = f"{wanted.nodes} servers of {wanted.gpus_per_node} GPUs"
        line = session.printer.line
        line(f"{folder}: {told['jobs']} jobs in {show_duration(rows[-1][1])}, load {wanted.load:g} on {servers}")
        line(f"  jobs.csv     {told['profiled']} by a profile, {len(rows) - told['profiled']} of a run time")
        line("  cluster.csv  the servers")
        line("  profiles/    speeds, gradients and limits of the models; restart_costs.csv what a start costs each")
        line(f"replay them: {command}")
    else:
        session.printer.document(told)
    return OK


def _nodes(text: str | None) -> int:
    try:
        return NODES_DEFAULT if text is None else whole(1, NODES_MOST)(text)
    except ValueError:
        raise UsageError(f"--nodes {text!r} is no number of servers", f"--nodes takes 1 to {NODES_MOST}") from None


def import_recordings(session: Session, arguments: Arguments, name: str, path: str) -> int:
    """Read others' recordings and write them as tables."""
    from swarmsched.errors import ConfigError
    from swarmsched.fields import cleaned
    from swarmsched.replay.formats import imported
    from swarmsched.replay.generate import table

    source, folder = Path(path), arguments.get("to", name)
    names = _names(source)
    root = source if source.is_dir() else source.parent
    try:
        found = imported(name, names, lambda each: read_lines(root / each))
    except (ConfigError, UsageError) as error:
        raise UsageError(cleaned(str(error)), cleaned(error.remedy)) from error
    tables = dict(found.tables)
    if found.skipped:
        rows = [(cleaned(each.key), cleaned(each.problem)) for each in found.skipped]
        tables[SKIPPED] = table(("where", "problem"), rows)
        some = "; ".join([f"{where}: {problem}" for where, problem in rows[:NAMED]])
        session.warn(f"{len(rows):,} left out, all in {folder}/{SKIPPED}: {some}{'; ...' * (len(rows) > NAMED)}")
    write(folder, tables)
    line = session.printer.line
    if session.printer.is_for_names:
        for each in tables:
            line(f"{folder}/{each}")
    elif session.printer.is_for_people:
        for each in found.tables:
            line(f"{folder}/{each}" + (f"  jobs: {found.jobs[each]:,}" if each in found.jobs else ""))
        for note in found.notes:
            line(f"  {cleaned(note)}")
    else:
        told = {"folder": folder, "files": [*tables], "jobs": found.jobs, "notes": found.notes}
        session.printer.document({**told, "skipped": len(found.skipped)})
    return OK


def _names(source: Path) -> list[str]:
    """All files of a folder, or the one that is named; hidden folders are none of ours."""
    if not source.is_dir():
        return [source.name]
    names: list[str] = []
    for folder, folders, files in os.walk(source):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        names += [(Path(folder) / each).relative_to(source).as_posix() for each in files]
        if len(names) > FILES_MOST:
            raise UsageError(f"{source} has more than {FILES_MOST:,} files", "name the folder of the recordings alone")
    return names


def write(folder: str, tables: Mapping[str, str]) -> None:
    """The tables into a folder; UsageError where one of them is there, or cannot be written."""
    if not folder:
        raise UsageError("--to '' names nothing", "leave --to out, or give it a value")
    root = Path(folder)
    try:
        for name in tables:
            if (root / name).exists():
                raise UsageError(f"{root / name} exists", "name another folder: --to DIR")
        for name, text in tables.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        cause = (getattr(error, "strerror", "") or str(error)).lower()
        raise UsageError(
            f"--to {folder!r} cannot be written: {cause}", "name a folder that can be made here"
        ) from error

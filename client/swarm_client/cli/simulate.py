"""`swarm simulate`: the simulator, which lives through faults that no test could wait for."""

from __future__ import annotations

import json
import os

from swarm_client.cli.replay import OPTIONS as REPLAY_OPTIONS
from swarm_client.cli.replay import replay
from swarm_client.cli.workload import IMPORT_OPTIONS, generate, import_recordings
from swarm_client.cli.workload import OPTIONS as GENERATE_OPTIONS
from swarm_client.failure import FAILED, OK, UsageError
from swarm_client.options import Arguments, Command, Option, nearest
from swarm_client.output import Column, Row
from swarm_client.quantity import whole
from swarm_client.session import Session, one_positional

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from swarm_client.simulate import Report
    from swarmsched.simulator.seeds import SeedOptions
    from swarmsched.simulator.story import StoryPlan

KINDS = ("faults", "replay", "generate", "import")
SEEDS_DEFAULT = 200
SEEDS_LIMIT = 10_000_000
NODES_LIMIT = 1_000
JOBS_LIMIT = 1_024
RECENT_SHOWN = 20
LINE_WIDTH = 240
DRAWING = ("seed", "seeds", "nodes", "fault_classes")  # options that say what is drawn; a plan is drawn already
REPLAYING = ("nodes", "fault_classes", "break")  # options without which a seed is another story

SHARED_OPTIONS = (
    Option(
        "--seed", "this seed only; with --seeds: the first one (replay, generate: default 0)", "S", read=whole(0, 2**63)
    ),
    Option(
        "--nodes", "nodes of every swarm (default: drawn from 1, 2, 3, 5, 30, 200; replay, generate: 16 servers)", "N"
    ),
)
FAULT_OPTIONS = (
    Option("--seeds", f"how many seeds (default {SEEDS_DEFAULT})", "N", read=whole(1, SEEDS_LIMIT)),
    Option("--fault-classes", "only these, in every run (default: drawn; `all` for every one)", "A,B,..."),
    Option("--break", "break that rule on purpose, to see whether it is noticed", "RULE"),
    Option("--list-breaks", "the rules that can be broken, and the classes of faults"),
    Option("--stop-at-first", "end with the first seed that finds something"),
    Option("--no-shrink", "show all faults of a failing seed, not only those that it needs"),
    Option("--plan", "live through the plan of this file, and its `break` (a violation of -o json)", "FILE"),
    Option("--jobs", "processes (default: one per core)", "J", read=whole(1, JOBS_LIMIT)),
)
OPTIONS = {
    "faults": (*SHARED_OPTIONS, *FAULT_OPTIONS),
    "replay": (*SHARED_OPTIONS, *REPLAY_OPTIONS),
    "generate": (*SHARED_OPTIONS, *GENERATE_OPTIONS, *(each for each in REPLAY_OPTIONS if each.key == "gpus_per_node")),
    "import": IMPORT_OPTIONS,
}
"""By kind, what goes with it."""
COMMAND = Command(
    "simulate",
    "Simulate a swarm under faults drawn from seeds, or a policy under a workload, and draw workloads.",
    (*SHARED_OPTIONS, *FAULT_OPTIONS, *REPLAY_OPTIONS, *GENERATE_OPTIONS),
    positionals="faults | replay FILE.csv | generate | import FORMAT PATH",
    details=(
        "faults puts real nodes through seeded faults in virtual time, prints what was found and exits with 1 if any\n"
        "invariant was violated.  A violation names its seed, the faults that it needs, the last events of the jobs\n"
        "concerned, and the command that finds it again.\n"
        "-q and -o name print the seeds that failed, one a line, and nothing if none did.\n"
        "\n"
        "replay runs the jobs of a CSV file under a policy and prints completion times; it exits\n"
        "with 1 unless all jobs finished.  The tables are described in docs/reference/replays.md.\n"
        "--as says how users submit these jobs, under the default settings of a swarm:\n"
        "  rigid        -g N alone: no reports, no checkpoints, no name; a policy that stops one ends the replay\n"
        "  restartable  the same with --restartable: stopped, it goes on where it was, after the pause\n"
        "  installed    -g MIN:MAX --batch N:MAX where a job takes several (--keeps-batch: without --batch),\n"
        "               reports, and a checkpoint once it trains\n"
        "  elastic      the same with --elastic: a change while it trains costs 1 s, a start the whole pause\n"
        "Without --as a plan may stop any job, which loses nothing, as published simulators have it.\n"
        "-q and -o name print the jobs that did not finish, one a line, and nothing if all did.\n"
        "\n"
        "generate draws a workload and the profiles of its models from a seed, and writes the tables that replay\n"
        "reads into a folder; equal options give equal tables.  -q and -o name print their files, one a line.\n"
        "\n"
        "import reads recordings in the formats of the repositories that publish them, from a file or a folder, and\n"
        "writes the same tables: pollux, sia, philly, helios, pai, elasticflow.  Rows that cannot be used are told."
    ),
)
BREAK_COLUMNS: tuple[Column[Row], ...] = (
    Column("KIND", lambda item: str(item["kind"])),
    Column("NAME", lambda item: str(item["name"])),
    Column("SUMMARY", lambda item: str(item["summary"])),
)


def execute(session: Session, arguments: Arguments) -> int:
    """Run what is asked for; UsageError where a package that it needs was not installed."""
    try:
        return _execute(session, arguments)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("swarm"):
            raise
        problem = f"`swarm simulate` needs the package {error.name}, which is not installed"
        raise UsageError(problem, "pip install 'swarmsched[lab]'") from error


def _execute(session: Session, arguments: Arguments) -> int:
    words = arguments.positionals
    _refuse(arguments, words[0] if words[:1] and words[0] in KINDS else "faults")
    if arguments["list_breaks"]:
        return _list(session)
    if words[:1] == ["replay"]:
        if len(words) != 2:
            raise UsageError("simulate replay takes one file of jobs", "swarm simulate replay FILE.csv")
        return replay(session, arguments, words[1])
    if words[:1] == ["import"]:
        if len(words) != 3:
            raise UsageError("simulate import takes a format and a path", "swarm simulate import FORMAT PATH")
        return import_recordings(session, arguments, words[1], words[2])
    kind = one_positional(arguments, "kind of simulation")
    if kind not in KINDS:
        raise UsageError(f"simulate {kind!r} is not known{nearest(kind, KINDS)}", f"one of {', '.join(KINDS)}")
    if kind == "generate":
        return generate(session, arguments)
    plan, broken = _plan(arguments)
    options = _options(arguments, broken)

    from swarm_client import simulate

    commit = simulate.commit_name()  # of what is imported now; the tree may change while this runs
    if plan is not None:
        found = simulate.report([simulate.replay(plan, options)])
    else:
        jobs = arguments.get("jobs", os.cpu_count() or 1)
        found = simulate.report(
            simulate.run_seeds(_seeds(arguments), options, jobs, stops_at_first=bool(arguments["stop_at_first"]))
        )
    _print(session, found, {"commit": commit, "break": broken}, arguments)
    return FAILED if found.tally.violations else OK


def _refuse(arguments: Arguments, kind: str) -> None:
    """UsageError for an option of another simulation: this one would go as if it had not been given."""
    own = {option.key for option in OPTIONS[kind]}
    foreign: dict[str, str] = {}
    for other, options in OPTIONS.items():
        foreign = {option.key: other for option in options if option.key not in own} | foreign
    useless = [key for key in foreign if arguments[key] is not None]
    if useless:
        problem = f"{', '.join(arguments.spellings[key] for key in useless)} cannot go with simulate {kind}"
        raise UsageError(problem, f"leave it out: it is for swarm simulate {foreign[useless[0]]}")


def _seeds(arguments: Arguments) -> range:
    first = arguments.get("seed", 0)
    count = arguments.get("seeds", SEEDS_DEFAULT if arguments["seed"] is None else 1)
    return range(first, first + count)


def _options(arguments: Arguments, broken: str) -> SeedOptions:
    from swarmsched.simulator.fault import FAULT_CLASSES
    from swarmsched.simulator.seeds import SeedOptions
    from swarmsched.simulator.story import StoryOptions

    classes = _classes(arguments["fault_classes"], list(FAULT_CLASSES))
    nodes = None if arguments["nodes"] is None else _nodes(arguments["nodes"])
    return SeedOptions(StoryOptions(nodes, classes, broken), shrinks=not arguments["no_shrink"])


def _break(name: str | None) -> str:
    """The rule to break.  An empty name is an unset variable of a script: breaking nothing would look like a pass."""
    from swarmsched.errors import ConfigError
    from swarmsched.simulator.breaks import BREAKS, find_break

    if name is None:
        return ""
    if not name:
        remedy = f"leave --break out, or name one of {', '.join(BREAKS)}; --list-breaks explains them"
        raise UsageError("--break '' names no rule", remedy)
    try:
        find_break(name)
    except ConfigError as error:
        raise UsageError(f"--break: {error.problem}", f"{error.remedy}; --list-breaks explains them") from error
    return name


def _nodes(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= NODES_LIMIT:
        raise UsageError(f"--nodes {text!r} is no size of a swarm", f"--nodes takes 1 to {NODES_LIMIT}")
    return int(text)


def _classes(text: str | None, known: list[str]) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = known if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:  # an unset variable of a script: a run without faults would look like a pass
        remedy = f"leave --fault-classes out, or give one or more of {', '.join(known)}, or all"
        raise UsageError(f"--fault-classes {text!r} names no class of faults", remedy)
    for name in names:
        if name not in known:
            problem = f"--fault-classes: {name!r} is no class of faults{nearest(name, known)}"
            raise UsageError(problem, f"one or more of {', '.join(known)}, or all")
    return tuple(names)


def _plan(arguments: Arguments) -> tuple[StoryPlan | None, str]:
    """The plan of the file, if one is named, and the rule to break: the plan's own unless the command names one."""
    named = _break(arguments["break"])
    path = arguments["plan"]
    if path is None:
        return None, named
    useless = [arguments.spellings[key] for key in DRAWING if arguments[key] is not None]
    if useless:
        problem = f"--plan {path!r} cannot go with {', '.join(useless)}: the plan has its own seed, nodes and faults"
        raise UsageError(problem, f"leave out {', '.join(useless)}, or --plan")

    from swarmsched.errors import ConfigError
    from swarmsched.simulator.breaks import BREAKS, find_break
    from swarmsched.simulator.story import StoryPlan

    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            document = json.load(file)
        plan = StoryPlan.from_json(document)
        own = document.get("break", "")
        if not isinstance(own, str):
            raise ConfigError("break", f"is {str(own)[:80]!r}", f"one of {', '.join(BREAKS)}, or empty")
        find_break(own)
        return plan, named or own
    except ConfigError as error:
        raise UsageError(f"--plan {path!r}: {error.key} {error.problem}", error.remedy) from error
    except (OSError, ValueError, RecursionError) as error:
        problem = f"--plan {path!r} cannot be read: {type(error).__name__}: {error}"
        raise UsageError(problem, "give one of the `violations` that -o json prints") from error


# --- printing


def _list(session: Session) -> int:
    from swarmsched.simulator.breaks import BREAKS
    from swarmsched.simulator.fault import FAULT_CLASSES

    items = [{"kind": "break", "name": name, "summary": each.summary} for name, each in BREAKS.items()]
    items += [{"kind": "fault", "name": name, "summary": summary} for name, summary in FAULT_CLASSES.items()]
    session.printer.items(items, BREAK_COLUMNS)
    return OK


def _print(session: Session, found: Report, origin: Mapping[str, str], arguments: Arguments) -> None:
    tally = found.tally
    if session.printer.is_for_names:
        for violation in tally.violations:
            session.printer.line(str(violation["seed"]))
        return
    if not session.printer.is_for_people:
        session.printer.document(
            {
                "seeds": tally.seeds,
                "events": tally.events,
                "events_per_s": round(found.events_per_s),
                "violations": [{**each, **origin} for each in tally.violations],
                "sometimes": tally.sometimes,
                **origin,
            }
        )
        return
    for violation in tally.violations:
        _print_violation(session, {**violation, **origin}, _replay(arguments, violation["seed"]))
    line = session.printer.line
    for name, count in tally.sometimes.items():
        line(f"{count:>10}  {name}")
    speed = f"{found.events_per_s:.0f} events per second and core"
    line(f"seeds: {tally.seeds}, events: {tally.events} ({speed}), violations: {len(tally.violations)}")


def _replay(arguments: Arguments, seed: int) -> str:
    """The command that finds this violation again, and only this one."""
    import shlex

    words = ["swarm", "simulate", "faults"]
    words += ["--seed", str(seed)] if arguments["plan"] is None else ["--plan", arguments["plan"]]
    for key in REPLAYING:
        if arguments[key] is not None:
            words += [arguments.spellings[key], arguments[key]]
    if arguments["no_shrink"]:
        words.append("--no-shrink")
    return shlex.join(words)


def _print_violation(session: Session, violation: Mapping[str, Any], replay: str) -> None:
    line = session.printer.line
    broken = f" with {violation['break']} broken" if violation["break"] else ""
    title = f"seed {violation['seed']}, commit {violation['commit'] or 'unknown'}{broken}"
    title += f": invariant {violation['invariant']} is violated at {violation['time_s']:.3f} s"
    line(session.printer.paint(title, "red"))
    line(f"  again: {replay}")
    line(f"  {violation['message']}")
    size = f"{violation['nodes']} nodes with {violation['gpus_per_node']} GPUs each"
    line(f"  {size}, healed at {violation['heal_s']:.3f} s")
    for item in [*violation["faults"], *violation["work"]]:
        line(f"  {json.dumps(item)}")
    line("  last events:")
    for text in violation["recent"][-RECENT_SHOWN:]:
        line(f"    {text[:LINE_WIDTH]}")
    for text in violation["trails"]:
        line(f"  {text[:LINE_WIDTH]}")
    line()

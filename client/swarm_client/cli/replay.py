"""`swarm simulate replay`: a recorded workload under a policy, in virtual time."""

from __future__ import annotations

import io
import os
import sys
import time
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from keyword import iskeyword
from pathlib import Path

from swarm_client.failure import FAILED, OK, UsageError
from swarm_client.options import Option
from swarm_client.output import Column, Row
from swarm_client.progress import ProgressBar
from swarm_client.quantity import show_duration, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from swarm_client.options import Arguments
    from swarm_client.session import Session
    from swarmsched.replay.cluster import Fleet
    from swarmsched.replay.results import RunLog
    from swarmsched.replay.setup import Measured, Replay
    from swarmsched.replay.workload import TraceJob
    from swarmsched.simulator.network import NetworkFaults
    from swarmsched.view import PolicySetting

NODES_DEFAULT, NODES_MOST = 16, 10_000
GPUS_MOST = 10**6  # of one job
TABLE_BYTES_MOST = 2**28
TITLE_MOST = 120
NAMED = 3  # jobs that are named where they have not finished
KNOWS_DEFAULT = "perfect"
COLUMNS: tuple[Column[Row], ...] = (
    Column("POLICY", lambda item: str(item["policy"])),
    Column("FINISHED", lambda item: f"{item['finished']}/{item['jobs']}", is_right=True),
    Column("AVERAGE", lambda item: _figure(item["avg_jct_s"]), is_right=True),
    Column("MEDIAN", lambda item: _figure(item["median_jct_s"]), is_right=True),
    Column("P99", lambda item: _figure(item["p99_jct_s"]), is_right=True),
    Column("MAKESPAN (s)", lambda item: _figure(item["makespan_s"]), is_right=True),
    Column("SLOWDOWN", lambda item: _figure(item["avg_slowdown"]), is_right=True),
    Column("RHO P99", lambda item: _figure(item["rho_p99"]), is_right=True),
    Column("GPUS HELD", lambda item: f"{item['gpu_utilisation_ratio']:.1%}", is_right=True),
    Column("SLOWDOWN P99", lambda item: _figure(item["p99_slowdown"]), is_right=True, is_wide=True),
    Column("RHO P50", lambda item: _figure(item["rho_p50"]), is_right=True, is_wide=True),
    Column("RHO WORST", lambda item: _figure(item["rho_worst"]), is_right=True, is_wide=True),
    Column("RESCALES", lambda item: str(item["rescales"]), is_right=True, is_wide=True),
    Column("PER JOB", lambda item: _figure(item["rescales_per_job"]), is_right=True, is_wide=True),
    Column("REVERSED", lambda item: str(item["reversed_decisions"]), is_right=True, is_wide=True),
    Column("PREEMPTIONS", lambda item: str(item["preemptions"]), is_right=True, is_wide=True),
)
AVERAGES = ("avg_jct_s", "median_jct_s", "p99_jct_s", "avg_slowdown", "p99_slowdown", "rho_p50", "rho_p99", "rho_worst")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _between(text: str, low: float, high: float) -> float | None:
    """The number, where it is one between these."""
    from swarmsched.replay.table import number

    try:
        value = number(text)
    except ValueError:
        return None
    return value if low <= value <= high else None


def _seconds(low: float, high: float, *, or_none: bool = False) -> Callable[[str], float]:
    """A reader for times in a range; `or_none`: 0 stands for none, whatever the range."""

    def read(text: str) -> float:
        value = _between(text, 0.0 if or_none else low, high)
        if value is None or 0.0 < value < low:
            bounds = f"{low:g} to {high:,.0f}"
            raise ValueError(f"must be a number of seconds: {'0, or ' if or_none else ''}from {bounds}")
        return value

    return read


def _ratio(text: str) -> float:
    value = _between(text, 0.0, 1.0)
    if value is None or value == 1.0:
        raise ValueError("must be a part, from 0 to below 1")
    return value


def _deviation(text: str) -> float:
    value = _between(text, 0.0, 5.0)
    if value is None:
        raise ValueError("must be a number from 0 to 5")
    return value


OPTIONS = (
    Option(
        "--profiles",
        "folder with *throughput.csv, *validation.csv and *models.csv, or a table of speeds (replay)",
        "DIR|FILE",
    ),
    Option(
        "--policy",
        "policy, a file with one of your own, or several, as in fifo,mine.py (replay; default swarm)",
        "NAME",
        repeats=True,
    ),
    Option("--parameter", "a parameter of those that have it (replay; may be repeated)", "NAME=VALUE", repeats=True),
    Option("--plot", "draw the policies side by side, into a .png, .svg or .html (replay)", "FILE"),
    Option("--gpus-per-node", "GPUs of each server (replay, generate; default 4)", "G", read=whole(1, 64)),
    Option("--cluster", "servers from a table node,gpus[,gpu_model], in place of --nodes (replay)", "FILE"),
    Option("--churn", "servers fail and return: a table time_s,node,event, down or up (replay)", "FILE"),
    Option(
        "--checkpoint-s",
        "training between checkpoints: lost with a server (replay; default 600)",
        "S",
        read=_seconds(1, 1e8),
    ),
    Option(
        "--as",
        "jobs as users submit them, under default settings: rigid, restartable, installed or elastic (replay)",
        "HOW",
    ),
    Option("--keeps-batch", "jobs name no range of batches, so theirs stay as they are (replay)"),
    Option("--kinds", "jobs of one kind share a name, a program or none (replay; with --as: program)", "HOW"),
    Option("--select", "only rows with these values (replay)", "COLUMN=VALUE,..."),
    Option(
        "--knows", "what is known of jobs: perfect, declared, learned or nothing (replay; or as --as has it)", "HOW"
    ),
    Option("--view", "perfect, or gossip: a node on each server, through the whole protocol (replay)", "HOW"),
    Option(
        "--membership",
        "swim, or ideal: nobody is probed, where no machine fails; with --view gossip (replay; default swim)",
        "HOW",
    ),
    Option(
        "--round-s",
        "seconds between rounds of the state gossip, with --view gossip (replay; default 1)",
        "S",
        read=_seconds(0.1, 60),
    ),
    Option("--loss", "part of all messages that is lost, with --view gossip (replay; default 0)", "RATIO", read=_ratio),
    Option(
        "--delay-s",
        "median delay of a message, with --view gossip (replay; default 0.0002)",
        "S",
        read=_seconds(1e-6, 1, or_none=True),
    ),
    Option("--asks-least", "jobs of several sizes ask for the least; always so with --view gossip (replay)"),
    Option(
        "--tick-s",
        "seconds between plans; 0: at arrivals, ends and on news of jobs (replay; default 60)",
        "S",
        read=_seconds(1, 1e6, or_none=True),
    ),
    Option(
        "--rescale-cost-s", "seconds that a change of GPUs costs a job (replay; default 30)", "S", read=_seconds(0, 1e5)
    ),
    Option("--restart-costs", "the same by model: a table model,seconds (replay)", "FILE"),
    Option("--tells-restart-costs", "cards tell what a start has cost; always so as installed or elastic (replay)"),
    Option(
        "--interference",
        "part of their speed that jobs on several servers lose where two share one (replay; default 0)",
        "RATIO",
        read=_ratio,
    ),
    Option(
        "--lies",
        "deviation of the logarithm of a factor by which each job counts its steps wrong (replay; default 0)",
        "SIGMA",
        read=_deviation,
    ),
    Option("--two-micro-steps", "above its first batch one GPU takes two, as in Pollux' simulator (replay)"),
    Option(
        "--gpu-speeds",
        "classes of GPUs that were not measured: a table gpu,speed[,model,max_local_bsz] (replay)",
        "FILE",
    ),
    Option("--gpus-most", "a model's largest number of GPUs (replay; may be repeated)", "MODEL=N", repeats=True),
)


def replay(session: Session, arguments: Arguments, file: str) -> int:
    """Replay the jobs of a file; exits with 1 unless all have finished."""
    from swarm_client import plot
    from swarmsched.errors import ConfigError
    from swarmsched.fields import cleaned
    from swarmsched.models import ONE_THREAD
    from swarmsched.policies.registry import policy_id

    os.environ.update(ONE_THREAD)
    if empty := next((option.names[0] for option in OPTIONS if arguments[option.key] == ""), ""):
        # An unset variable of a script: the replay of something else would look like an answer.
        raise UsageError(f"{empty} '' names nothing", f"leave {empty} out, or give it a value")
    picture = Path(arguments["plot"]) if arguments["plot"] else None
    try:
        if picture:
            plot.check(picture)
        settings = _settings(session, arguments)
        profiles = read_profiles(arguments["profiles"])
        _check_limits(settings[0].gpus_most, profiles)
        jobs = read_jobs(file, arguments["select"])
        runs = [(each, _observed(session, jobs, profiles, each)) for each in settings]
    except (ConfigError, UsageError) as error:  # what was typed and what files hold is told on one line
        raise UsageError(cleaned(str(error)), cleaned(error.remedy)) from error
    for each, observer in runs:
        _tell_unfinished(session, each, observer)
    summaries = [summary(each, observer) for each, observer in runs]
    _print(session, summaries)
    if picture:
        what = cleaned(f"{Path(file).name} {arguments['select'] or ''}", TITLE_MOST)
        title = f"{what}: {len(jobs)} jobs, {settings[0].cluster.total} GPUs"
        plot.draw(picture, [(policy_id(each.policy), observer) for each, observer in runs], title)
    return OK if all(each["finished"] == each["jobs"] for each in summaries) else FAILED


def _print(session: Session, summaries: list[dict[str, Any]]) -> None:
    if session.printer.is_for_names:
        for job_id in dict.fromkeys([each["job_id"] for one in summaries for each in one["unfinished"]]):
            session.printer.line(job_id)
    elif len(summaries) > 1:
        session.printer.items(summaries, COLUMNS)
    elif session.printer.is_for_people:
        for key, value in summaries[0].items():
            of = f"  of {summaries[0]['finished']} finished jobs" if key in AVERAGES else ""
            text = "-" if value is None else len(value) if isinstance(value, list) else value
            session.printer.line(f"{key:34}  {text}{of}")
    else:
        session.printer.document(summaries[0])


def _tell_unfinished(session: Session, settings: Replay, observer: RunLog) -> None:
    """Which jobs have not finished, and why; a few of many."""
    jobs = observer.unfinished()
    if jobs:
        some = "; ".join([f"{each['job_id']}: {each['reason']}" for each in jobs[:NAMED]])
        more = f"; and {len(jobs) - NAMED} more" if len(jobs) > NAMED else ""
        of = f"{len(jobs)} of {observer.jobs} jobs"
        session.tell(f"under {settings.policy.name}, {of} did not finish: {some}{more}")


def _observed(session: Session, jobs: list[TraceJob], profiles: Measured, settings: Replay) -> RunLog:
    from swarmsched.replay.setup import prepared

    run = prepared(jobs, profiles, settings, time.thread_time)
    observer = run.observer
    with ProgressBar(settings.policy.name, is_quiet=session.is_quiet) as progress:
        for now_s in run.steps():
            finished = len(observer.finished)
            progress.show(finished / len(jobs), f"{finished} of {len(jobs)} jobs, {show_duration(now_s)} of their time")
    if observer.policy_errors:
        count = f"first of {observer.policy_errors} errors; backfill planned in its place"
        session.warn(f"{_called(settings.policy)}: {observer.first_policy_error} ({count})")
    return observer


def _called(policy: PolicySetting) -> str:
    """A policy by its name, and its file where it is somebody's own."""
    from swarmsched.policies.registry import kind_of

    module = kind_of(policy).policy.partition(":")[0]
    if module.startswith("swarmsched."):
        return policy.name
    return f"{policy.name} ({getattr(sys.modules.get(module), '__file__', module)})"


def summary(settings: Replay, observer: RunLog) -> dict[str, Any]:
    """One result as a document: how it was run, and what came of it."""
    from swarmsched.policies.registry import policy_id
    from swarmsched.replay.setup import timings

    head = {
        "policy": policy_id(settings.policy),
        "view": settings.view,
        "membership": settings.membership if settings.view == "gossip" else "perfect",
        **timings(settings),
        "as": settings.manner,
        "kinds": settings.terms.kind_by,
        "keeps_batch": settings.keeps_batch,
        "elasticity": settings.setting.elasticity.value,
        "knows": settings.knowledge,
        "declared": settings.knowledge == "declared",
        "asks_least": settings.asks_least,
        "loss_ratio": settings.faults.loss_ratio,
        "interference": settings.pacing.interference,
        "lies": settings.lies,
    }
    return {**head, **observer.summary()}


def _policies(session: Session, arguments: Arguments) -> list[PolicySetting]:
    """Each with those of the parameters that it has; whoever is alone must have them all."""
    from importlib.metadata import entry_points

    from swarmsched.policies.registry import ENTRY_POINTS, add_installed, check_setting, kind_of
    from swarmsched.view import PolicySetting

    for problem in add_installed(entry_points(group=ENTRY_POINTS)):
        session.warn(f"left out: {problem}")
    names = [name.strip() for text in arguments["policy"] or ("swarm",) for name in text.split(",")]
    names = [_policy_of(Path(name)) if name.endswith(".py") else name for name in names]
    parameters = {name: _number("--parameter", name, value) for name, value in _pairs("--parameter", arguments)}
    known = {name: [spec.name for spec in kind_of(PolicySetting(name)).parameters] for name in names}
    settings = []
    for name in names:
        others = {each for other in names for each in known[other]} - set(known[name])
        settings.append(PolicySetting(name, {key: value for key, value in parameters.items() if key not in others}))
        check_setting(settings[-1])
    return settings


def _policy_of(file: Path) -> str:
    """The name of the policy in a file of somebody's own, known from now on; UsageError says what is wrong with it."""
    from swarmsched.errors import ConfigError
    from swarmsched.policies.registry import add

    name, file = file.stem, file.resolve()
    if not name.isidentifier() or iskeyword(name):
        raise UsageError(f"--policy {file}: no module can be called {name!r}", "letters, digits and _, as in my_own.py")
    there = sys.modules.get(name)
    if there is None or getattr(there, "__file__", "") != str(file):  # what is built in has none
        if there or find_spec(name):
            raise UsageError(f"--policy {file}: Python has another module {name!r}", "give the file a name of its own")
        _import(name, file)
    try:
        return add(getattr(sys.modules[name], "KIND", None)).name
    except ConfigError as error:
        raise UsageError(f"--policy {file}: {error}", error.remedy) from error


def _import(name: str, file: Path) -> None:
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(
            f"--policy {file}: {type(error).__name__}: {error}", "see docs/reference/replays.md"
        ) from error


def _settings(session: Session, arguments: Arguments) -> list[Replay]:
    from swarmsched.gossip.state import ROUND_S
    from swarmsched.replay.perfect import Ticks
    from swarmsched.replay.setup import CHECKPOINT_S, MANNERS, Replay
    from swarmsched.replay.workload import gpu_batches, gpu_speeds, restart_costs

    manner, costs, speeds = arguments["as"] or "", arguments["restart_costs"], arguments["gpu_speeds"]
    usual = MANNERS[manner].knows if manner in MANNERS else KNOWS_DEFAULT
    view, faults = _view(arguments)
    run = partial(
        Replay,
        cluster=_cluster(arguments),
        knowledge=arguments["knows"] or usual,
        pacing=Ticks(
            arguments.get("tick_s", 60.0),
            arguments.get("rescale_cost_s", 30.0),
            interference=arguments.get("interference", 0.0),
        ),
        restart_costs=restart_costs(costs, read_lines(Path(costs))) if costs else {},
        tells_costs=bool(arguments["tells_restart_costs"]),
        gpu_speeds=gpu_speeds(speeds, read_lines(Path(speeds))) if speeds else {},
        gpu_batches=gpu_batches(speeds, read_lines(Path(speeds))) if speeds else {},
        lies=arguments.get("lies", 0.0),
        is_split_alone=bool(arguments["two_micro_steps"]),
        seed=arguments.get("seed", 0),
        gpus_most=_limits(arguments),
        checkpoint_s=arguments.get("checkpoint_s", CHECKPOINT_S),
        view=view,
        faults=faults,
        asks_least=view == "gossip" or bool(arguments["asks_least"]),
        membership=arguments["membership"] or "swim",
        round_s=arguments.get("round_s", ROUND_S),
        manner=manner,
        kind_by=arguments["kinds"] or "",
        keeps_batch=bool(arguments["keeps_batch"]),
    )
    return [run(each) for each in _policies(session, arguments)]


def _view(arguments: Arguments) -> tuple[str, NetworkFaults]:
    """How planners see the cluster, and what the network between them does."""
    from swarmsched.simulator.network import NetworkFaults

    view, usual = arguments["view"] or "perfect", NetworkFaults()
    network = [option for option in ("loss", "delay_s", "membership", "round_s") if arguments[option] is not None]
    if network and view != "gossip":
        option = f"--{network[0].replace('_', '-')}"
        raise UsageError(f"{option} needs a network", "add --view gossip")
    if arguments["lies"] and (arguments["knows"] or "") in ("perfect", "nothing"):
        raise UsageError("--lies is for jobs that report", "--knows declared, or learned")
    if arguments["checkpoint_s"] is not None and not arguments["churn"]:
        raise UsageError("--checkpoint-s counts where servers fail", "add --churn, or leave it out")
    if view == "gossip" and arguments["tick_s"] is not None:
        raise UsageError("--tick-s is for --view perfect", "with --view gossip nodes plan when there is news")
    delay_s = arguments.get("delay_s", usual.delay_median_s) or usual.delay_median_s
    return view, NetworkFaults(loss_ratio=arguments.get("loss", 0.0), delay_median_s=delay_s)


def _cluster(arguments: Arguments) -> Fleet:
    from swarmsched.replay.churn import churn
    from swarmsched.replay.cluster import Fleet, read_cluster

    nodes, table, events = arguments["nodes"], arguments["cluster"], arguments["churn"]
    if table and (nodes is not None or arguments["gpus_per_node"]):
        raise UsageError("--cluster says which servers there are", "leave out --nodes and --gpus-per-node")
    if table:
        cluster = read_cluster(table, read_lines(Path(table)))
    else:
        cluster = Fleet.even(_servers(nodes), arguments.get("gpus_per_node", 4))
    cluster.events = churn(events, read_lines(Path(events)), cluster.gpus) if events else ()
    return cluster


def _servers(text: str | None) -> int:
    from swarmsched.replay.table import shown

    if text is None:
        return NODES_DEFAULT
    try:
        return whole(1, NODES_MOST)(text)
    except ValueError:
        raise UsageError(f"--nodes {shown(text)} is no number of servers", f"--nodes takes 1 to {NODES_MOST}") from None


def _limits(arguments: Arguments) -> dict[str, int]:
    """The largest number of GPUs by model."""
    limits = {}
    for model, text in _pairs("--gpus-most", arguments):
        try:
            limits[model] = whole(1, GPUS_MOST)(text)
        except ValueError as error:
            raise UsageError(f"--gpus-most {model}={text!r}: {error}", f"as in --gpus-most {model}=1") from None
    return limits


def _check_limits(limits: Mapping[str, int], profiles: Measured) -> None:
    for model in limits:
        if model not in profiles:
            there = f"one of {', '.join(profiles)}" if profiles else "add --profiles"
            raise UsageError(f"--gpus-most {model}: there is no profile of model {model!r}", there)


def _pairs(option: str, arguments: Arguments) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for text in arguments[option.lstrip("-").replace("-", "_")] or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{option} {text!r} is no NAME=VALUE", f"as in {option} name=1")
        if any(name == other for other, _ in pairs):
            raise UsageError(f"{option} {name} is given twice", "give it once")
        pairs.append((name, value))
    return pairs


def _number(option: str, name: str, text: str) -> float:
    from swarmsched.replay.table import number

    try:
        return number(text)
    except ValueError:
        raise UsageError(f"{option} {name}={text!r} is no number", f"as in {option} {name}=1") from None


def read_jobs(file: str, selection: str | None) -> list[TraceJob]:
    """The jobs of a table, or those with `COLUMN=VALUE,...`; UsageError or ConfigError names what cannot be used."""
    from swarmsched.replay.table import rows, select
    from swarmsched.replay.workload import JOBS, trace_jobs

    wanted = {}
    for part in (selection or "").split(","):
        column, equals, value = part.partition("=")
        if part and not (column and equals):
            raise UsageError(f"--select {part!r} is no COLUMN=VALUE", "as in --select load=1.0,workload=6")
        if column.strip() in wanted:
            raise UsageError(
                f"--select {column.strip()} is given twice", "a row has one value: select by another column"
            )
        if part:
            wanted[column.strip()] = value.strip()
    table = rows(file, read_lines(Path(file)), JOBS)
    if not table:
        raise UsageError(f"{file} has no jobs", "one row a job below the header")
    return trace_jobs(select(table, wanted))


def read_profiles(path: str | None) -> Measured:
    """Profiles by model from the tables of a folder, or speeds from one table; errors as above."""
    from swarmsched.replay.measurements import folder_profiles
    from swarmsched.replay.rates import read_rates

    if path is None:
        return {}
    folder = Path(path)
    if not folder.is_dir():
        return read_rates(path, read_lines(folder))
    return folder_profiles(path, os.listdir(folder), lambda name: read_lines(folder / name))  # noqa: PTH208  # names alone


def read_lines(file: Path) -> list[str]:
    """The lines of a table, of any system; what is not UTF-8 is left to be named by its row."""
    try:
        with file.open("rb") as stream:
            content = stream.read(TABLE_BYTES_MOST + 1)
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {file}", "name a CSV file with a header row") from error
    except (OSError, ValueError) as error:
        cause = (getattr(error, "strerror", "") or str(error)).lower()
        raise UsageError(f"{file} cannot be read: {cause}", "name a CSV file with a header row") from error
    if len(content) > TABLE_BYTES_MOST:
        raise UsageError(f"{file} is larger than {TABLE_BYTES_MOST:,} bytes", "a CSV file with a header row")
    text = content.decode("utf-8-sig", "surrogateescape")
    return list(io.StringIO(text, newline=None))

"""`swarm simulate replay`: a recorded workload under a policy, in virtual time."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from swarm_client.failure import FAILED, OK, UsageError
from swarm_client.options import Option
from swarm_client.quantity import whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from swarm_client.cli.session import Session
    from swarm_client.options import Arguments
    from swarmsched.replay.cluster import Cluster
    from swarmsched.replay.profiles import Profile
    from swarmsched.replay.setup import Replay
    from swarmsched.replay.workload import TraceJob

TABLES = ("throughput", "validation", "models")
JOBS_NEEDED = ("job_id", "submit_time_s")
KNOWS_DEFAULT = "perfect"
AVERAGES = ("avg_jct_s", "median_jct_s", "p99_jct_s", "avg_slowdown")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e9:
        raise ValueError("must be a number of seconds from 0")
    return value


OPTIONS = (
    Option("--profiles", "folder with *throughput.csv, *validation.csv and *models.csv (replay)", "DIR"),
    Option("--policy", "policy, as in `swarm config set --swarm policy` (replay; default swarm)", "NAME"),
    Option("--parameter", "a parameter of the policy (replay; may be repeated)", "NAME=VALUE", repeats=True),
    Option("--gpus-per-node", "GPUs of each server (replay; default 4)", "G", read=whole(1, 64)),
    Option("--cluster", "servers from a table node,gpus[,gpu_model], in place of --nodes (replay)", "FILE"),
    Option("--churn", "servers fail and return: a table time_s,node,event, down or up (replay)", "FILE"),
    Option(
        "--checkpoint-s", "training between checkpoints: lost with a server (replay; default 600)", "S", read=_seconds
    ),
    Option("--select", "only rows with these values (replay)", "COLUMN=VALUE,..."),
    Option("--knows", "what is known of jobs: perfect, declared, learned or nothing (replay)", "HOW"),
    Option("--tick-s", "seconds between plans; 0: at each arrival and end (replay; default 60)", "S", read=_seconds),
    Option("--rescale-cost-s", "seconds that a change of GPUs costs a job (replay; default 30)", "S", read=_seconds),
    Option("--gpus-most", "a model's largest number of GPUs (replay; may be repeated)", "MODEL=N", repeats=True),
)


def replay(session: Session, arguments: Arguments, file: str) -> int:
    """Replay the jobs of a file; exits with 1 unless all have finished."""
    from swarmsched.errors import ConfigError
    from swarmsched.models import ONE_THREAD

    os.environ.update(ONE_THREAD)
    try:
        settings = _settings(arguments)
        profiles = _profiles(arguments["profiles"])
        summary = _run(_jobs(file, arguments["select"]), profiles, settings)
    except ConfigError as error:
        raise UsageError(str(error), error.remedy) from error
    if session.printer.is_for_people:
        for key, value in summary.items():
            of = f"  of {summary['finished']} finished jobs" if key in AVERAGES else ""
            session.printer.line(f"{key:34}  {'-' if value is None else value}{of}")
    else:
        session.printer.document(summary)
    return OK if summary["finished"] == summary["jobs"] else FAILED


def _run(jobs: list[TraceJob], profiles: Mapping[str, Profile], settings: Replay) -> dict[str, Any]:
    from swarmsched.policies.registry import policy_id
    from swarmsched.replay.setup import prepared

    observer = prepared(jobs, profiles, settings, time.perf_counter).run()
    if observer.policy_errors:
        print(f"policy: {observer.first_policy_error} (the first of {observer.policy_errors})", file=sys.stderr)
    head = {
        "policy": policy_id(settings.policy),
        "view": "perfect",
        "membership": "perfect",
        "knows": settings.knowledge,
        "declared": settings.knowledge == "declared",
    }
    return {**head, **observer.summary()}


def _settings(arguments: Arguments) -> Replay:
    from swarmsched.policies.registry import check_setting
    from swarmsched.replay.perfect import Pacing
    from swarmsched.replay.setup import CHECKPOINT_S, Replay
    from swarmsched.view import PolicySetting

    parameters = {name: _number("--parameter", name, value) for name, value in _pairs("--parameter", arguments)}
    policy = PolicySetting(arguments["policy"] or "swarm", parameters)
    check_setting(policy)
    limits = {model: int(_number("--gpus-most", model, value)) for model, value in _pairs("--gpus-most", arguments)}
    pacing = Pacing(arguments.get("tick_s", 60.0), arguments.get("rescale_cost_s", 30.0))
    knows, checkpoint_s = arguments["knows"] or KNOWS_DEFAULT, arguments.get("checkpoint_s", CHECKPOINT_S)
    return Replay(policy, _cluster(arguments), knows, pacing, arguments.get("seed", 0), limits, checkpoint_s)


def _cluster(arguments: Arguments) -> Cluster:
    from swarmsched.replay.churn import churn
    from swarmsched.replay.cluster import Cluster, read_cluster

    nodes, table, events = arguments["nodes"], arguments["cluster"], arguments["churn"]
    if nodes is not None and not (nodes.isdecimal() and 1 <= int(nodes) <= 10_000):
        raise UsageError(f"--nodes {nodes!r} is no number of servers", "--nodes takes 1 to 10000")
    if table and (nodes or arguments["gpus_per_node"]):
        raise UsageError("--cluster says which servers there are", "leave out --nodes and --gpus-per-node")
    if table:
        cluster = read_cluster(table, _lines(Path(table)))
    else:
        cluster = Cluster.even(int(nodes or 16), arguments.get("gpus_per_node", 4))
    cluster.events = churn(events, _lines(Path(events)), cluster.gpus) if events else ()
    return cluster


def _pairs(option: str, arguments: Arguments) -> list[tuple[str, str]]:
    pairs = []
    for text in arguments[option.lstrip("-").replace("-", "_")] or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{option} {text!r} is no NAME=VALUE", f"as in {option} name=1")
        pairs.append((name, value))
    return pairs


def _number(option: str, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option} {name}={text!r} is no number", f"as in {option} {name}=1") from None


def _jobs(file: str, selection: str | None) -> list[TraceJob]:
    from swarmsched.replay.workload import rows, select, trace_jobs

    wanted = {}
    for part in (selection or "").split(","):
        column, equals, value = part.partition("=")
        if part and not (column and equals):
            raise UsageError(f"--select {part!r} is no COLUMN=VALUE", "as in --select load=1.0,workload=6")
        if part:
            wanted[column.strip()] = value.strip()
    table = rows(file, _lines(Path(file)), JOBS_NEEDED)
    return trace_jobs(file, select(file, table, wanted))


def _profiles(folder: str | None) -> Mapping[str, Profile]:
    from swarmsched.replay.workload import profiles

    if folder is None:
        return {}
    found = []
    for table in TABLES:
        # Tables that belong together begin alike: other measurements may lie beside them.
        files = [file for file in Path(folder).glob(f"*{table}.csv") if _sibling(file, table, "models").exists()]
        if len(files) != 1:
            there = f"{len(files)} files *{table}.csv that have a *models.csv beside them"
            raise UsageError(f"--profiles {folder}: {there}", "one *throughput.csv, *validation.csv and *models.csv")
        found.append(_lines(files[0]))
    return profiles(*found)


def _sibling(file: Path, table: str, other: str) -> Path:
    return file.with_name(f"{file.name.removesuffix(f'{table}.csv')}{other}.csv")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}", "a CSV file with a header row") from error

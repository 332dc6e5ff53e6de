"""Others' recordings, read in the formats in which their authors publish them, as the tables that replays read.

Each reader is given the names of all files of a folder and a function that reads one, and finds what it knows by their
names, at whatever depth.  A row that cannot be used is left out and told, by file and line; where nothing can be used,
or a file has not the columns of its format, ConfigError says so.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from io import StringIO
from math import ceil
from typing import Any

import numpy as np

from swarmsched.errors import ConfigError
from swarmsched.estimate import BatchRange
from swarmsched.replay.generate import table
from swarmsched.replay.measurements import MODELS, THROUGHPUT, VALIDATION, TableSource, profiles
from swarmsched.replay.physics import ProfiledPhysics
from swarmsched.replay.profiles import Profile
from swarmsched.replay.table import SECONDS_MOST, Row, rows, shown

DURATION_LEAST_S = 1e-3
POLLUX_GPUS_PER_NODE = 4
"""Of the servers on which Pollux's profiles were taken."""
NAMED_TABLES = {"195job_endtoend_trace": "itp195"}
"""Files whose jobs are known by another name."""
PAI_TASKS: tuple[str, ...] = ("job_name", "task_name", "inst_num", "status", "start_time", "end_time")
PAI_TASKS += ("plan_cpu", "plan_mem", "plan_gpu", "gpu_type")
PAI_JOBS = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
"""Columns of the two tables, which have no header of their own."""

Read = Callable[[str], Iterable[str]]


@dataclass
class Imported:
    """What a reader has found: tables by name, rows that it left out, and what else there is to say."""

    tables: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, int] = field(default_factory=dict)  # by the name of their table
    skipped: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_jobs(self, name: str, columns: Sequence[str], found: Iterable[tuple[str, *tuple[Any, ...]]]) -> None:
        """A table of jobs, if there are any, each behind the place where it was read; one of a name is enough."""
        last, kept = columns.index("job_id") + 1, dict[tuple[Any, ...], tuple[Any, ...]]()
        for place, *job in found:
            key = tuple(job[:last])
            if key in kept:
                self.skipped.append(ConfigError(place, f"job {shown(str(key[-1]))} is there twice", "one row a job"))
            else:
                kept[key] = tuple(job)
        if kept:
            self.tables[f"workloads/{name}_jobs.csv"] = table(columns, kept.values())
            self.jobs[f"workloads/{name}_jobs.csv"] = len(kept)

    @contextmanager
    def row_left_out(self) -> Iterator[None]:
        """In it, ConfigError means that something is left out, and told."""
        try:
            yield
        except ConfigError as error:
            self.skipped.append(error)

    def note(self, what: str, count: int) -> None:
        """Something that is no fault, where there is any of it."""
        if count:
            self.notes.append(f"{what}: {count:,}")


def imported(name: str, names: Iterable[str], read: Read) -> Imported:
    """The recordings of a folder by the name of their format."""
    reader = FORMATS.get(name)
    if reader is None:
        raise ConfigError("format", f"{shown(name)} is not known", f"one of {', '.join(FORMATS)}")
    found = Imported()
    reader(found, sorted(names), read)
    if not found.tables:
        first = f"; the first of {len(found.skipped):,} bad rows: {found.skipped[0]}" if found.skipped else ""
        raise ConfigError("path", f"nothing of the format {name} could be used{first}", f"a folder with {TOLD[name]}")
    return found


def _matching(pattern: str, names: Iterable[str]) -> list[tuple[str, re.Match[str]]]:
    """Names whose end matches, at whatever depth."""
    expression = re.compile(f"(?:.*/)?{pattern}")
    return [(name, match) for name in names if (match := expression.fullmatch(name))]


# --- Pollux, and Sia after it


def _pollux(found: Imported, names: list[str], read: Read) -> None:
    known = _models(found, names, read, has_classes=False)
    jobs = []
    submitted: dict[tuple[str, str], dict[str, float]] = {}
    for name, match in _matching(r"workloads(?:-([\w.]+))?/workload-(\d+)\.csv", names):
        load, workload = match[1] or "1.0", match[2]
        times = submitted.setdefault((load, workload), {})
        for place, *job in _pollux_jobs(found, name, read, known):
            jobs.append((place, load, workload, *job))
            times[job[0]] = float(job[1])
    columns = ("load", "workload", "job_id", "submit_time_s", "model", "num_gpus", "batch_size", "rigid_duration_s")
    found.add_jobs("pollux", columns, jobs)
    _pollux_results(found, names, read, submitted)


def _sia(found: Imported, names: list[str], read: Read) -> None:
    known = _models(found, names, read, has_classes=True)
    jobs = []
    for name, match in _matching(r"workloads\w*/([\w./-]+)/workload-(\d+)\.csv", names):
        jobs += [(place, match[1], match[2], *job[:-1]) for place, *job in _pollux_jobs(found, name, read, known)]
    found.add_jobs("sia", ("set", "workload", "job_id", "submit_time_s", "model", "num_gpus", "batch_size"), jobs)


def _pollux_jobs(found: Imported, name: str, read: Read, known: Mapping[str, Profile]) -> list[tuple[Any, ...]]:
    """Place, name, time, model, GPUs, batch, and the run time alone on these where no other class would change it."""
    jobs: list[tuple[Any, ...]] = []
    needed = ("name", "time", "application", "num_replicas", "batch_size")
    for row in rows(name, read(name), needed, found.skipped):
        with found.row_left_out():
            row.amount("time", 0.0, SECONDS_MOST, "seconds")
            model, gpus, batch = row.name("application"), row.count("num_replicas", 1), row.count("batch_size", 1)
            if known and model not in known:
                raise row.error("application", f"{shown(model)} has no profile", f"one of {', '.join(known)}")
            alone_s = _alone_s(row, known[model], gpus, batch) if known else ""
            jobs.append((row.place, row.name("name"), row["time"], model, gpus, batch, alone_s))
    return jobs


def _alone_s(row: Row, profile: Profile, gpus: int, batch: int) -> float | str:
    """Run time on the fewest servers with this batch; empty where that depends on the class of the GPUs."""
    limits = profile.limits
    least = min(limits.initial_batch, *profile.statistics)
    if not least <= batch <= limits.batch_max:
        raise row.error("batch_size", f"{batch} is no batch of {profile.name!r}", f"from {least} to {limits.batch_max}")
    if profile.classes != {""}:
        return ""
    batches = BatchRange(batch, batch, limits.local_batch_min, limits.local_batch_max)
    physics, now_s, progress = ProfiledPhysics(profile, batches), 0.0, 0.0
    whole, rest = divmod(gpus, POLLUX_GPUS_PER_NODE)
    shape = (POLLUX_GPUS_PER_NODE,) * whole + (rest,) * bool(rest)
    while progress < physics.total:
        pace = physics.pace(shape, batch, progress)
        if not pace.rate:
            raise row.error(
                "num_replicas", f"{gpus} cannot share a batch of {batch}", "as many as the batch can be dealt to"
            )
        now_s, progress = now_s + (pace.until - progress) / pace.rate, pace.until
    return round(now_s, 1)


def _models(found: Imported, names: list[str], read: Read, *, has_classes: bool) -> dict[str, Profile]:
    """The profiles of a folder `traces`, one folder a model; adds their tables, and what a start costs."""
    measured = [re.match(r"(.*?)traces/[^/]+/(?:placements|scalability)[^/]*\.csv$", name) for name in names]
    roots = sorted({match[1] for match in measured if match})
    if len(roots) > 1:
        raise ConfigError("path", f"has profiles in {len(roots)} places", f"one of {', '.join(roots)[:400]}")
    options, costs = _applications(found, names, read)
    suffix = r"(?:-([\w-]+))" if has_classes else "()"
    times: dict[str, list[tuple[Any, ...]]] = {}
    for kind in ("placements", "scalability"):
        for name, match in _matching(rf"traces/([^/]+)/{kind}{suffix}\.csv", names):
            times.setdefault(match[1], []).extend(_times(found, name, read, match[2] or ""))
    statistics: dict[str, dict[int, list[tuple[Any, ...]]]] = {}
    for name, match in _matching(r"traces/([^/]+)/validation-(\d+)\.csv", names):
        statistics.setdefault(match[1], {})[int(match[2])] = _epochs(found, name, read)
    limits, validation, throughput = [], [], []
    for model in sorted(times):
        said, batches = options.get(model, {}), statistics.get(model, {})
        if len(batches) < 2 or "num_stages" in said:
            found.notes.append(f"{model} is left out: it has no epochs of two batches, or is not data-parallel")
            continue
        epochs = said.get("max_epochs", min(map(len, batches.values())))
        whole = {batch: each[:epochs] for batch, each in sorted(batches.items()) if len(each) >= epochs}
        found.note(f"batches of {model} left out, with fewer than {epochs} epochs", len(batches) - len(whole))
        local = [*_local_batches(times[model])]
        limits.append((model, min(whole), max(whole), min(local), said.get("max_local_bsz", max(local)), epochs))
        throughput += [(model, *each) for each in times[model]]
        validation += [(model, batch, *each) for batch, every in whole.items() for each in every]
    if not limits:
        return {}
    prefix = "sia" if has_classes else "pollux"
    columns = (*THROUGHPUT, "gpu") if has_classes else THROUGHPUT
    found.tables[f"profiles/{prefix}_throughput.csv"] = table(
        columns, [each if has_classes else each[:-1] for each in throughput]
    )
    found.tables[f"profiles/{prefix}_validation.csv"] = table(VALIDATION, validation)
    found.tables[f"profiles/{prefix}_models.csv"] = table(MODELS, limits)
    if costs:
        found.tables["restart_costs.csv"] = table(
            ("model", "seconds"), [each for each in costs if each[0] in {limit[0] for limit in limits}]
        )
    sources = [
        TableSource(f"{prefix}_{name}", StringIO(found.tables[f"profiles/{prefix}_{name}"]))
        for name in ("throughput.csv", "validation.csv", "models.csv")
    ]
    return profiles(*sources)


def _local_batches(times: Sequence[tuple[Any, ...]]) -> tuple[int, int]:
    """Least and largest that were measured on every class."""
    by_class: dict[str, list[int]] = {}
    for each in times:
        by_class.setdefault(each[-1], []).append(each[3])
    return max(map(min, by_class.values())), min(map(max, by_class.values()))


def _times(found: Imported, name: str, read: Read, gpu: str) -> list[tuple[Any, ...]]:
    """Rows of times: placement, nodes, GPUs, local batch, step, exchange, class."""
    needed = ("local_bsz", "step_time", "sync_time")
    times = []
    for row in rows(name, read(name), needed, found.skipped):
        with found.row_left_out():
            digits = row.text("placement")
            if digits and not re.fullmatch("[0-9]+", digits):
                raise row.error("placement", f"{shown(digits)} cannot be used", "GPUs on each node, one digit a node")
            on = [int(digit) for digit in digits if digit != "0"]
            nodes = len(on) if digits else row.count("num_nodes", 1)
            gpus = sum(on) if digits else row.count("num_replicas", 1)
            step_s = row.amount("step_time", 1e-9, SECONDS_MOST, "seconds")
            row.amount("sync_time", 0.0, step_s, "a part of step_time,")
            times.append((digits, nodes, gpus, row.count("local_bsz", 1), row["step_time"], row["sync_time"], gpu))
    return times


def _epochs(found: Imported, name: str, read: Read) -> list[tuple[Any, ...]]:
    """Number, progress, and the two statistics of each epoch."""
    needed = ("progress", "grad_sqr", "grad_var")
    epochs: list[tuple[Any, ...]] = []
    for row in rows(name, read(name), needed, found.skipped):
        with found.row_left_out():
            values = [row.amount(column, most=1e30) for column in needed]
            if values[0] <= (float(epochs[-1][1]) if epochs else 0.0):
                raise row.error("progress", f"{shown(row['progress'])} is no more than before", "progress that grows")
            epochs.append((len(epochs) + 1, *[row[column] for column in needed]))
    return epochs


def _applications(
    found: Imported, names: list[str], read: Read
) -> tuple[dict[str, dict[str, int]], list[tuple[str, int]]]:
    """Whole numbers that the simulator's table of applications gives for each model, and its costs of a start."""
    options: dict[str, dict[str, int]] = {}
    costs: list[tuple[str, int]] = []
    for name, _ in _matching(r"applications\.py", names):
        try:
            tree = ast.parse("".join(read(name)))
        except (SyntaxError, ValueError, RecursionError) as error:
            found.skipped.append(ConfigError(name, f"is no Python: {error}", "the simulator's own file"))
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Call):
                        told = {
                            word.arg: word.value.value
                            for word in value.keywords
                            if word.arg and isinstance(word.value, ast.Constant) and type(word.value.value) is int
                        }
                        options.setdefault(str(key.value), {}).update(told)
            match node:  # if self.name == MODEL: self.rescale_time = SECONDS
                case ast.If(
                    test=ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(str(model))]),
                    body=[ast.Assign(targets=[ast.Attribute(attr="rescale_time")], value=ast.Constant(int(seconds)))],
                ):
                    costs.append((model, seconds))
    return options, costs


def _pollux_results(
    found: Imported, names: list[str], read: Read, submitted: Mapping[tuple[str, str], Mapping[str, float]]
) -> None:
    """Published completion times by policy, load and workload."""
    results = []
    for name, match in _matching(r"results-jobload/(\w+)-([\d.]+)/summary\.json", names):
        try:
            workloads = json.loads("".join(read(name)))["jcts"]
            for workload, times in sorted(workloads.items()):
                number = workload.removeprefix("workload-")
                came = submitted.get((match[2], number), {})
                each = np.array([float(time_s) for time_s in times.values()])
                ended_s = max(came[job] + float(time_s) for job, time_s in times.items())
                figures = [round(float(value), 1) for value in (each.mean(), np.median(each), np.percentile(each, 99))]
                results.append(
                    (match[2], number, match[1], len(each), *figures, round(ended_s - min(came.values()), 1))
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            found.skipped.append(ConfigError(name, f"cannot be used: {type(error).__name__}: {error}", "as published"))
    if results:
        columns = ("load", "workload", "policy", "jobs", "avg_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s")
        found.tables["reference/pollux_summary.csv"] = table(columns, sorted(results))


# --- jobs of known run time


def _philly(found: Imported, names: list[str], read: Read) -> None:
    jobs: list[tuple[Any, ...]] = []
    lost = 0
    for name, _ in _matching(r"[^/]*cluster_job_log[^/]*", names):
        for line, entry in _entries(name, "".join(read(name))):
            with found.row_left_out():
                job, attempts = _philly_job(name, line, entry)
                jobs.append(job)
                lost += attempts
    found.note("attempts not counted, without a beginning or an end", lost)
    columns = ("cluster", "job_id", "submit_time_s", "num_gpus", "duration_s", "user", "status")
    found.add_jobs("philly", columns, _since_first(jobs))


def _philly_job(name: str, line: int, entry: Any) -> tuple[tuple[Any, ...], int]:
    """The job of an entry, and the attempts of it that cannot be counted."""
    if not isinstance(entry, dict) or not isinstance(entry.get("attempts"), list):
        raise ConfigError(f"{name}, row {line}", f"is {shown(str(entry))}", "an object with a list of attempts")
    texts = {key: str(entry.get(key) or "") for key in ("vc", "jobid", "submitted_time", "user", "status")}
    row = Row(name, line, texts)
    run_s, gpus, lost = 0.0, 0, 0
    for attempt in entry["attempts"]:
        try:
            lasted_s = _clock(attempt["end_time"]) - _clock(attempt["start_time"])
            held = sum(len(host["gpus"]) for host in attempt["detail"])
        except (KeyError, TypeError, ValueError):
            lost += 1
            continue
        run_s, gpus = run_s + lasted_s, max(gpus, held)
    if not DURATION_LEAST_S <= run_s <= SECONDS_MOST or not gpus:
        raise row.error("attempts", f"none of job {shown(texts['jobid'])} has ended on GPUs, after its start", "one")
    told = (row.text("user"), row.text("status"))
    return (row.place, row.name("vc"), row.name("jobid"), _when(row, "submitted_time"), gpus, run_s, *told), lost


def _entries(name: str, text: str) -> Iterator[tuple[int, Any]]:
    """The line on which each object of a JSON list begins, and the object; ConfigError where it is none."""
    decoder, space = json.JSONDecoder(), re.compile(r"[\s,]*")
    opening = re.fullmatch(r"\s*\[", text[: text.find("[") + 1])
    if not opening:
        raise ConfigError(name, "is no list in JSON", "the file as published")
    at, line, counted = opening.end(), 1, 0
    while True:
        at = space.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing as well
        line, counted = line + text.count("\n", counted, at), at
        if text.startswith("]", at):
            return
        try:
            entry, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}, row {line}", f"is no JSON: {error}", "the whole file as published") from error
        yield line, entry


def _helios(found: Imported, names: list[str], read: Read) -> None:
    jobs, others = [], 0
    needed = ("job_id", "user", "vc", "gpu_num", "state", "submit_time", "duration")
    for name, _ in _matching(r"cluster_log\.csv", names):
        cluster = name.split("/")[-2] if "/" in name else "helios"
        for row in rows(name, read(name), needed, found.skipped):
            with found.row_left_out():
                if not row.count("gpu_num"):
                    others += 1
                    continue
                run_s = row.amount("duration", DURATION_LEAST_S, SECONDS_MOST, "seconds")
                told = (row.text("user"), row.text("state"))
                came_s, gpus = _when(row, "submit_time"), row.count("gpu_num", 1)
                job = row.name("job_id")
                jobs.append((row.place, cluster, job, came_s, gpus, run_s, *told, row.text("vc")))
    found.note("jobs left out, which want no GPU", others)
    columns = ("cluster", "job_id", "submit_time_s", "num_gpus", "duration_s", "user", "status", "vc")
    found.add_jobs("helios", columns, _since_first(jobs))


def _pai(found: Imported, names: list[str], read: Read) -> None:
    held: dict[str, list[tuple[Row, float, float, float]]] = {}
    others = rounded = 0
    for row in _headless(found, names, read, r"pai_task_table\.csv", PAI_TASKS):
        with found.row_left_out():
            share = row.amount("plan_gpu") if row["plan_gpu"] else 0.0
            if not share:
                others += 1
                continue
            began_s, ended_s = (row.amount(column, 0.0, 1e10, "seconds") for column in ("start_time", "end_time"))
            if ended_s - began_s < DURATION_LEAST_S:
                raise row.error("end_time", f"{shown(row['end_time'])} is no later than its start", "a later time")
            gpus = share / 100.0 * row.amount("inst_num", 1)
            held.setdefault(row.name("job_name"), []).append((row, gpus, began_s, ended_s))
    owners = {row["job_name"]: row for row in _headless(found, names, read, r"pai_job_table\.csv", PAI_JOBS)}
    jobs: list[tuple[Any, ...]] = []
    for job, parts in held.items():
        rows_of, gpus_of, begins_s, ends_s = zip(*parts, strict=True)
        first, owner, gpus, began_s = rows_of[0], owners.get(job), sum(gpus_of), min(begins_s)
        with found.row_left_out():
            came_s = min(began_s, owner.amount("start_time", 0.0, 1e10, "seconds")) if owner else began_s
            told = (owner.text("user") if owner else "", first.text("status"))
            classes = "+".join(sorted({row.text("gpu_type") for row in rows_of}))
            rounded += gpus != int(gpus)
            run_s = max(ends_s) - began_s
            jobs.append((first.place, "pai", job, came_s, ceil(gpus - 1e-9), run_s, *told, classes))
    found.note("tasks left out, which want no GPU", others)
    found.note("jobs that want parts of GPUs, and have whole ones here", rounded)
    if jobs and not owners:
        found.notes.append("there is no pai_job_table.csv: jobs are submitted when they start, by nobody")
    columns = ("cluster", "job_id", "submit_time_s", "num_gpus", "duration_s", "user", "status", "gpu_type")
    found.add_jobs("pai", columns, _since_first(jobs))


def _headless(found: Imported, names: list[str], read: Read, pattern: str, columns: tuple[str, ...]) -> list[Row]:
    """The rows of a table that is published without a header; somebody may have given it one."""
    table_rows: list[Row] = []
    for name, _ in _matching(pattern, names):
        lines = list(read(name))
        header = () if lines and lines[0].startswith(columns[0]) else columns
        table_rows += rows(name, lines, columns, found.skipped, header)
    return table_rows


def _elasticflow(found: Imported, names: list[str], read: Read) -> None:
    aliases = {"submit_time": "submission_time", "iteration": "num_iteration", "ddl": "deadline"}
    columns = ("job_id", "submit_time_s", "model", "batch_size", "iterations", "num_gpus", "duration_s", "deadline_s")
    speeds = []
    for name, match in _matching(r"([^/]+)\.csv", names):
        if measured := re.fullmatch(r"(?:.*/)?throughputs_([^/]+)/[^/]+", name):
            speeds += _elasticflow_speeds(found, name, read, measured[1], match[1])
            continue
        lines = list(read(name))
        header = [aliases.get(cell.strip(), cell.strip()) for cell in (lines or [""])[0].strip().split(",")]
        if not {"submission_time", "num_gpu", "duration"} <= {*header}:
            continue  # a table of something else
        if len({*header}) < len(header):
            raise ConfigError(name, "has a column twice, under two names", "the file as published")
        text = [",".join(header) + "\n", *lines[1:]]
        jobs = []
        for row in rows(name, text, ("job_id", "submission_time", "num_gpu", "duration"), found.skipped):
            with found.row_left_out():
                came_s = row.amount("submission_time", 0.0, SECONDS_MOST, "seconds")
                run_s = row.amount("duration", DURATION_LEAST_S, SECONDS_MOST, "seconds")
                more = [row.count(key, 1) if row.get(key) else "" for key in ("batch_size", "num_iteration")]
                later = f"seconds later than submission_time {shown(row['submission_time'])},"
                deadline_s = row.amount("deadline", came_s + 1e-3, SECONDS_MOST, later) if row.get("deadline") else ""
                gpus = row.count("num_gpu", 1)
                job, model = row.name("job_id"), row.text("model_name")
                jobs.append((row.place, job, came_s, model, *more, gpus, run_s, deadline_s))
        jobs.sort(key=lambda job: job[2])
        found.add_jobs(NAMED_TABLES.get(match[1], match[1]), columns, [tuple(map(_plain, job)) for job in jobs])
    if speeds:
        header = ["gpu", "model", "global_batch_size", "num_gpus", "iterations_per_s"]
        found.tables["profiles/elasticflow_throughput.csv"] = table(header, speeds)


def _elasticflow_speeds(found: Imported, name: str, read: Read, gpu: str, model: str) -> list[tuple[Any, ...]]:
    """A row of speeds for each batch, a column for each number of GPUs; 0 and nothing where it was not measured."""
    speeds, missing = [], 0
    for row in rows(name, read(name), ("global_batch_size",), found.skipped):
        with found.row_left_out():
            batch = row.count("global_batch_size", 1)
            sizes = [column for column in row if column.isdecimal()]
            measured = [size for size in sizes if row[size] and row.amount(size)]
            missing += len(sizes) - len(measured)
            speeds += [(gpu, model, batch, int(size), row[size]) for size in measured]
    found.note(f"speeds of {model} on {gpu} left out, empty or 0", missing)
    return speeds


def _since_first(jobs: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Jobs (place, cluster, name, time, ...) by time, in seconds since the first of all."""
    jobs.sort(key=lambda job: job[3])
    return [(*job[:3], *map(_plain, (job[3] - jobs[0][3], *job[4:]))) for job in jobs]


def _plain(value: Any) -> Any:
    """Numbers as people write them."""
    return f"{value:.10g}" if isinstance(value, float) else value


def _clock(text: str) -> float:
    """Seconds of a time as it was written, without a zone: only differences count."""
    return (datetime.fromisoformat(text) - datetime(2000, 1, 1)).total_seconds()


def _when(row: Row, column: str) -> float:
    try:
        return _clock(row.text(column))
    except (TypeError, ValueError):
        raise row.error(column, f"{shown(row[column])} cannot be used", "a time as in 2020-06-09 18:41:01") from None


FORMATS: Mapping[str, Callable[[Imported, list[str], Read], None]] = {
    "pollux": _pollux,
    "sia": _sia,
    "philly": _philly,
    "helios": _helios,
    "pai": _pai,
    "elasticflow": _elasticflow,
}
TOLD: Mapping[str, str] = {
    "pollux": "workloads/workload-N.csv, traces/MODEL/ and perhaps results-jobload/ (the simulator of AdaptDL)",
    "sia": "workloads/SET/workload-N.csv and traces/MODEL/*-CLASS.csv (the simulator of Sia)",
    "philly": "cluster_job_log, a list in JSON (Microsoft's Philly)",
    "helios": "CLUSTER/cluster_log.csv (SenseTime's Helios)",
    "pai": "pai_task_table.csv and pai_job_table.csv (Alibaba's GPU clusters of 2020)",
    "elasticflow": "tables with submission_time, num_gpu and duration, and throughputs_GPU/MODEL.csv (ElasticFlow)",
}
"""What each format is told by."""

"""Workloads and profiles from CSV text: one row a job, one row a measurement.

Every schema names its jobs by `job_id` and `submit_time_s`.  A job is *profiled* where `model` is a model of the
profiles, *rated* where it has `steps` (or `iterations`) of a model in a table of speeds (`rates`), and *rigid* where it
has `num_gpus` and `duration_s` (or `rigid_duration_s`): its run time on those GPUs.
"""

import csv
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from swarmsched.card import NAME_LENGTH
from swarmsched.errors import ConfigError
from swarmsched.replay.profiles import EpochStatistics, Limits, Measured, Profile

Row = Mapping[str, str]

DURATIONS = ("duration_s", "rigid_duration_s")
"""Columns that may say how long a rigid job runs, the first that is there counts."""
STEPS = ("steps", "iterations")
"""Columns that may say how much a job of a table of speeds has to do."""


@dataclass(frozen=True)
class TraceJob:
    """One row: when it comes, and what it asked for; 0 and "" where its trace does not say."""

    job_id: str
    submitted_s: float
    gpus: int
    duration_s: float = 0.0
    model: str = ""
    batch: int = 0
    user: str = ""
    steps: float = 0.0

    @property
    def kind(self) -> str:
        """What jobs of one sort share; hashed, since no policy may know a model by its name."""
        return hashlib.blake2b(f"{self.model}".encode(), digest_size=6).hexdigest() if self.model else ""


def rows(name: str, lines: Iterable[str], needed: Collection[str]) -> list[dict[str, str]]:
    """The rows of a table; ConfigError names the file, the column that is missing and those that are there."""
    reader = csv.DictReader(lines, restval="")
    columns = reader.fieldnames or ()
    for column in needed:
        if column not in columns:
            there = ", ".join(columns) or "none"
            raise ConfigError(name, f"has no column {column!r}", f"columns needed: {', '.join(needed)}; there: {there}")
    return list(reader)


def select(name: str, table: Sequence[dict[str, str]], wanted: Mapping[str, str]) -> list[dict[str, str]]:
    """Rows whose columns have these values, numbers compared as numbers; ConfigError where none is left."""
    for column, value in wanted.items():
        if table and column not in table[0]:
            raise ConfigError("select", f"{name} has no column {column!r}", f"one of {', '.join(table[0])}")
        kept = [row for row in table if _is_same(row[column], value)]
        if not kept:
            some = sorted({row[column] for row in table})[:8]
            raise ConfigError("select", f"no row of {name} has {column}={value}", f"values there: {', '.join(some)}")
        table = kept
    return list(table)


def trace_jobs(name: str, table: Iterable[Row]) -> list[TraceJob]:
    """The jobs by time of submission; ConfigError names file, row and column of what cannot be used."""
    jobs = [_trace_job(name, number, row) for number, row in enumerate(table, start=2)]
    return sorted(jobs, key=lambda job: (job.submitted_s, job.job_id))


def _trace_job(name: str, number: int, row: Row) -> TraceJob:
    duration, steps = (next((column for column in columns if row.get(column)), "") for columns in (DURATIONS, STEPS))
    return TraceJob(
        job_id=row.get("job_id") or f"row{number}",
        submitted_s=amount(name, number, row, "submit_time_s"),
        gpus=count(name, number, row, "num_gpus", least=1) if row.get("num_gpus") else 1,
        duration_s=amount(name, number, row, duration) if duration else 0.0,
        model=row.get("model", ""),
        batch=count(name, number, row, "batch_size") if row.get("batch_size") else 0,
        user=row.get("user", "")[:NAME_LENGTH],
        steps=amount(name, number, row, steps) if steps else 0.0,
    )


def count(name: str, number: int, row: Row, column: str, least: int = 0) -> int:
    """A cell that holds a whole number; ConfigError names file, row and column."""
    value = amount(name, number, row, column, least)
    if value != int(value):
        raise ConfigError(f"{name}, row {number}, {column}", f"{row[column]!r} is not whole", "a whole number")
    return int(value)


def amount(name: str, number: int, row: Row, column: str, least: float = 0.0) -> float:
    """A cell that holds a finite number; ConfigError names file, row and column."""
    text = row.get(column, "")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < least:
        raise ConfigError(f"{name}, row {number}, {column}", f"{text!r} cannot be used", f"a number from {least:g}")
    return value


def _is_same(cell: str, wanted: str) -> bool:
    try:
        return float(cell) == float(wanted)
    except ValueError:
        return cell == wanted


THROUGHPUT = ("model", "placement", "num_nodes", "num_gpus", "local_bsz", "step_time_s", "sync_time_s")
VALIDATION = ("model", "batch_size", "epoch", "progress", "grad_sqr", "grad_var")
MODELS = ("model", "init_batch_size", "max_batch_size", "min_local_bsz", "max_local_bsz", "epochs")


def profiles(throughput: Iterable[str], validation: Iterable[str], models: Iterable[str]) -> dict[str, Profile]:
    """Profiles by model from the three tables of measurements; ConfigError as above."""
    measured: dict[str, list[Measured]] = {}
    for model, each in _measured(rows("throughput", throughput, THROUGHPUT)):
        measured.setdefault(model, []).append(each)
    statistics: dict[str, dict[int, list[EpochStatistics]]] = {}
    for number, row in enumerate(rows("validation", validation, VALIDATION), start=2):
        progress, sqr, var = (amount("validation", number, row, each) for each in ("progress", "grad_sqr", "grad_var"))
        by_batch = statistics.setdefault(row["model"], {})
        by_batch.setdefault(int(row["batch_size"]), []).append(EpochStatistics(progress, sqr, var))
    found = {}
    for number, row in enumerate(rows("models", models, MODELS), start=2):
        limits = Limits(*[count("models", number, row, column, least=1) for column in MODELS[1:]])
        name = row["model"]
        _check(name, limits, measured, statistics)
        found[name] = Profile(name, limits, measured[name], statistics[name])
    return found


def _measured(table: Iterable[Row]) -> Iterator[tuple[str, Measured]]:
    for number, row in enumerate(table, start=2):
        nodes, gpus, batch, step_s, sync_s = (amount("throughput", number, row, column) for column in THROUGHPUT[2:])
        shape = tuple([int(digit) for digit in row["placement"]])
        yield (
            row["model"],
            Measured(shape, int(nodes), int(gpus), int(batch), step_s, sync_s, row.get("gpu", "").strip()),
        )


def _check(
    name: str,
    limits: Limits,
    measured: Mapping[str, Sequence[Measured]],
    statistics: Mapping[str, Mapping[int, Sequence[EpochStatistics]]],
) -> None:
    if name not in measured:
        raise ConfigError("throughput", f"has no row of model {name!r}", "measure it, or leave it out of the models")
    by_batch = statistics.get(name, {})
    if limits.initial_batch not in by_batch or len(by_batch) < 2:
        raise ConfigError(
            "validation",
            f"has too little of model {name!r}",
            f"epochs at the first batch size {limits.initial_batch} and at one more",
        )
    for batch, epochs in by_batch.items():
        if len(epochs) < limits.epochs:
            raise ConfigError(
                "validation",
                f"{name} at batch {batch} has {len(epochs)} epochs",
                f"one row for each of {limits.epochs}",
            )

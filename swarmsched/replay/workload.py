"""Workloads from CSV text: one row a job.

Every schema names its jobs by `job_id` and `submit_time_s`, and says what they ask for in `num_gpus`.  A job is
*profiled* where `model` is a model of the profiles, *rated* where it has `steps` (or `iterations`) of a model in a
table of speeds (`rates`), and *rigid* where it has `duration_s` (or `rigid_duration_s`): its run time on those GPUs.
`OPTIONAL` lists the columns that may say more; an empty cell says nothing.  `trace_jobs` alone reads workloads.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmsched.card import NAME_LENGTH
from swarmsched.estimate import StepCost
from swarmsched.replay.table import SECONDS_MOST, Row, rows, shown
from swarmsched.specification import BATCH_LIMIT, PRIORITY_LIMIT

JOBS = ("job_id", "submit_time_s", "num_gpus")
"""Columns that a table of jobs must have."""
DURATIONS = ("duration_s", "rigid_duration_s")
"""Columns that may say how long a rigid job runs, the first that is there counts."""
STEPS = ("steps", "iterations")
"""Columns that may say how much a job of a table of speeds has to do."""
SIZES = ("min_gpus", "max_gpus")
OPTIONAL: Mapping[str, str] = {
    "user": "whose job it is",
    "model": "a model of the profiles, or a kind of jobs",
    "batch_size": "samples in a step",
    SIZES[0]: "fewest GPUs that the job takes",
    SIZES[1]: "most GPUs that the job takes",
    "priority": f"from {-PRIORITY_LIMIT} to {PRIORITY_LIMIT}: jobs of a higher one go first",
    "time_limit_s": "seconds after its start at which an attempt is ended",
    "deadline_s": "by when the job is to have ended, on the clock of submit_time_s",
    "restartable": "1: the job may be stopped and goes on where it was; 0: it may not",
    "failure": "part of its work, to 1, after which the job fails",
    "parameter_bytes": "bytes of the model, by which its speed depends on cores, networks and classes of its servers",
    "local_batch": "with it: samples of a GPU in a step",
    "sample_flops": "with it: operations of a sample, forward and backward",
    "moved_bytes": "with it: bytes of gradients in a step, if they are other",
    "decode_core_s": "with it: core-seconds that loading a sample takes",
}
"""Columns that a table of jobs may have, beside those above."""
WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
LIMIT_LEAST_S = 1.0
LOCAL_BATCH_MOST, WORK_MOST = 1_000_000, 1e18
SPEED_LEAST, SPEED_MOST = 1e-3, 1e3
FAILURE_LEAST = 1e-6


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
    row: str = ""  # file and number
    gpus_least: int = 0
    gpus_most: int = 0
    priority: int = 0
    time_limit_s: float = 0.0
    deadline_s: float = 0.0
    restartable: bool | None = None
    failure: float = 0.0  # part of its work; 0: it does not fail
    work: StepCost | None = None  # as of --work

    @property
    def kind(self) -> str:
        """What jobs of one sort share; hashed, since no policy may know a model by its name."""
        return hashlib.blake2b(f"{self.model}".encode(), digest_size=6).hexdigest() if self.model else ""

    @property
    def place(self) -> str:
        """What errors call it."""
        return f"{self.row}, job {self.job_id!r}" if self.row else f"job {self.job_id!r}"


def trace_jobs(table: Iterable[Row]) -> list[TraceJob]:
    """The jobs by time of submission; ConfigError names file, row and column of what cannot be used."""
    jobs: dict[str, TraceJob] = {}
    for row in table:
        job = _trace_job(row)
        if jobs.setdefault(job.job_id, job) is not job:
            remedy = "a name of its own for each job, or --select the rows of one workload"
            raise row.error("job_id", f"{job.job_id!r} is there twice, first in {jobs[job.job_id].row}", remedy)
    return sorted(jobs.values(), key=lambda job: job.submitted_s)  # of one moment, in the order of their rows


def _trace_job(row: Row) -> TraceJob:
    duration, steps = (next((column for column in columns if row.get(column)), "") for columns in (DURATIONS, STEPS))
    submitted_s = row.amount("submit_time_s", 0.0, SECONDS_MOST, "seconds since the first submission,")
    least, most = (row.count(column, least=1) if row.get(column) else 0 for column in SIZES)
    if most and most < least:
        raise row.error(SIZES[1], f"{most} is less than the {least} of {SIZES[0]}", f"a number from {least}")
    return TraceJob(
        job_id=row.name("job_id"),
        submitted_s=submitted_s,
        gpus=row.count("num_gpus", least=1),
        duration_s=row.seconds(duration) if duration else 0.0,
        model=row.text("model"),
        batch=row.count("batch_size") if row.get("batch_size") else 0,
        user=row.text("user")[:NAME_LENGTH],
        steps=row.amount(steps, least=1) if steps else 0.0,
        row=row.place,
        gpus_least=least,
        gpus_most=most,
        priority=_priority(row) if row.get("priority") else 0,
        time_limit_s=row.seconds("time_limit_s", LIMIT_LEAST_S) if row.get("time_limit_s") else 0.0,
        deadline_s=_deadline_s(row, submitted_s) if row.get("deadline_s") else 0.0,
        restartable=_word(row, "restartable") if row.get("restartable") else None,
        failure=row.amount("failure", FAILURE_LEAST, 1.0, "a part of its work") if row.get("failure") else 0.0,
        work=_work(row) if row.get("parameter_bytes") else None,
    )


def _work(row: Row) -> StepCost:
    """What a step of a rank computes and moves: the columns have the names of `--work`."""
    parameter_bytes = row.amount("parameter_bytes", 1.0, WORK_MOST)
    moved_bytes = row.amount("moved_bytes", 1.0, WORK_MOST) if row.get("moved_bytes") else parameter_bytes
    decode_s = row.amount("decode_core_s") if row.get("decode_core_s") else 0.0
    batch, flops = row.count("local_batch", 1, LOCAL_BATCH_MOST), row.amount("sample_flops", 1.0, WORK_MOST)
    return StepCost(batch, flops, parameter_bytes, moved_bytes, decode_core_s=decode_s)


def _priority(row: Row) -> int:
    value = row.amount("priority", -PRIORITY_LIMIT, PRIORITY_LIMIT, "a whole number")
    if value != int(value):
        raise row.error("priority", f"{shown(row['priority'])} is not whole", "a whole number")
    return int(value)


def _deadline_s(row: Row, submitted_s: float) -> float:
    deadline_s = row.seconds("deadline_s")
    if deadline_s <= submitted_s:
        problem = f"{shown(row['deadline_s'])} has passed when the job is submitted, at {submitted_s:g}"
        raise row.error("deadline_s", problem, "a later time on the clock of submit_time_s, or empty")
    return deadline_s


def _word(row: Row, column: str) -> bool:
    word = row.text(column).lower()
    if word not in WORDS:
        raise row.error(column, f"{shown(row[column])} cannot be used", f"one of {', '.join(WORDS)}, or empty")
    return WORDS[word]


def restart_costs(name: str, lines: Iterable[str]) -> dict[str, float]:
    """Seconds that a change of GPUs costs jobs of each model, from a table `model,seconds`; errors as above."""
    costs: dict[str, float] = {}
    for row in rows(name, lines, ("model", "seconds")):
        if row.name("model") in costs:
            raise row.error("model", f"{shown(row['model'])} is there twice", "one row for each model")
        costs[row["model"]] = row.seconds("seconds")
    return costs


def gpu_speeds(name: str, lines: Iterable[str]) -> dict[str, dict[str, float]]:
    """Speed of a model ("": any) on each class of GPUs, over that where it was measured, from a table
    `gpu,speed[,model]`. Errors are as above."""
    speeds: dict[str, dict[str, float]] = {}
    for row in rows(name, lines, ("gpu", "speed")):
        of_model = speeds.setdefault(row.text("model"), {})
        if row.name("gpu") in of_model:
            raise row.error(
                "gpu", f"{shown(row['gpu'])} is there twice for one model", "one row for each class and model"
            )
        of_model[row["gpu"]] = row.amount("speed", SPEED_LEAST, SPEED_MOST)
    return speeds


def gpu_batches(name: str, lines: Iterable[str]) -> dict[str, dict[str, int]]:
    """The largest local batch of each model by class of GPUs, from the column `max_local_bsz` that such a table may
    have; errors as above."""
    limits: dict[str, dict[str, int]] = {}
    for row in rows(name, lines, ("gpu",)):
        if row.get("max_local_bsz"):
            limits.setdefault(row.name("model"), {})[row.name("gpu")] = row.count("max_local_bsz", 1, BATCH_LIMIT)
    return limits

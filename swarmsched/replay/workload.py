"""Workloads from CSV text: one row a job.

Every schema names its jobs by `job_id` and `submit_time_s`, and says what they ask for in `num_gpus`.  A job is
*profiled* where `model` is a model of the profiles, *rated* where it has `steps` (or `iterations`) of a model in a
table of speeds (`rates`), and *rigid* where it has `duration_s` (or `rigid_duration_s`): its run time on those GPUs.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from swarmsched.card import NAME_LENGTH
from swarmsched.replay.table import SECONDS_MOST, Row

JOBS = ("job_id", "submit_time_s", "num_gpus")
"""Columns that a table of jobs must have."""
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
    row: str = ""  # file and number

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
    return TraceJob(
        job_id=row.name("job_id"),
        submitted_s=row.amount("submit_time_s", 0.0, SECONDS_MOST, "seconds since the first submission,"),
        gpus=row.count("num_gpus", least=1),
        duration_s=row.seconds(duration) if duration else 0.0,
        model=row.text("model"),
        batch=row.count("batch_size") if row.get("batch_size") else 0,
        user=row.text("user")[:NAME_LENGTH],
        steps=row.amount(steps, least=1) if steps else 0.0,
        row=row.place,
    )

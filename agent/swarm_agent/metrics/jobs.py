"""The page of jobs: what the tasks of this node report of their training, one series for each attempt of a job.

A page of its own, since here a job is a label: who scrapes it decides to keep series that come and go with jobs.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from swarm_agent.metrics.exposition import encoded
from swarm_agent.task.reports import Reported
from swarmsched.ids import AttemptKey, TaskKey
from swarmsched.models.progress import Progress

GAUGES: dict[str, tuple[str, Callable[[Progress], float | None]]] = {
    "swarm_job_progress_ratio": ("Part of the declared steps or epochs that is done.", lambda job: job.ratio),
    "swarm_job_remaining_seconds": (
        "Time to the declared end at the pace of this attempt.",
        lambda job: job.remaining.seconds if job.remaining else None,
    ),
    "swarm_job_step_seconds": ("Time of one step, a median of the last ones.", lambda job: job.step_s),
    "swarm_job_samples_per_second": ("Samples that all ranks process in a second.", lambda job: job.samples_per_s),
    "swarm_job_step": ("Steps since training began.", lambda job: job.figures.get("step")),
    "swarm_job_loss": ("Loss, as reported.", lambda job: job.figures.get("loss")),
}


def render_jobs(reported: Mapping[TaskKey, Reported], accept: str = "") -> tuple[bytes, str]:
    """The page in the format that the Accept header asks for, and its content type."""
    return encoded(_families(reported), accept)


def _families(reported: Mapping[TaskKey, Reported]) -> Iterator[Metric]:
    for name, (text, value_of) in GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=("job_id", "attempt"))
        values: dict[AttemptKey, float] = {}
        for key, each in sorted(reported.items(), key=lambda told: told[1].reported_utc_s):
            value = value_of(each.progress)
            if value is not None:  # of several workers that were the first one after another the last has the word
                values[key.of_attempt] = value
        for (job_id, attempt), value in values.items():
            family.add_metric((job_id, str(attempt)), value)
        yield family

"""Policies on replays: the schedules of the papers, and the published results of independent simulators."""

import csv
from dataclasses import replace
from typing import Any

import pytest

from swarmsched.ids import NodeId
from swarmsched.replay.cluster import Cluster
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import PerfectKnowledge
from swarmsched.replay.perfect import Pacing
from swarmsched.replay.setup import Replay, prepared
from swarmsched.replay.workload import TraceJob, profiles, rows, select, trace_jobs
from swarmsched.view import PolicySetting
from tests.swarmsched.replay.testing import ends, replay, rigid, traces


def three_jobs() -> list[ReplayJob]:
    """Those of the Tiresias paper: (GPUs, seconds)."""
    return [rigid(1, 0.0, 2, 2.0), rigid(2, 0.0, 1, 8.0), rigid(3, 0.0, 2, 6.0)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("srsf", {"job1": 2.0, "job2": 10.0, "job3": 16.0}),
        ("srtf", {"job1": 2.0, "job2": 16.0, "job3": 8.0}),
    ],
)
def test_three_jobs_on_two_gpus_end_as_in_the_paper(policy: str, expected: dict[str, float]) -> None:
    assert ends(replay(three_jobs(), policy)) == expected


def test_tiresias_demotes_at_the_exact_moment_and_tells_when_to_look_again() -> None:
    """The long job leaves the first class after 10 GPU-seconds, at 5 s; then the short one, which came at 1 s, runs."""
    jobs = [rigid(1, 0.0, 2, 20.0), rigid(2, 1.0, 2, 3.0)]
    observer = replay(jobs, "tiresias", threshold1_gpu_s=10.0)
    assert ends(observer) == {"job2": 8.0, "job1": 23.0}
    assert sum(job.preemptions for job in observer.finished) == 1


def test_tiresias_promotes_a_job_that_has_waited_its_runtime_times_the_knob() -> None:
    """Without promotion the long job would wait until 42 s, when the stream of short ones ends."""
    jobs = [rigid(1, 0.0, 2, 12.0), *(rigid(2 + number, 4.0 * number, 2, 4.0) for number in range(1, 11))]
    never = ends(replay(list(jobs), "tiresias", threshold1_gpu_s=10.0, promote_knob=0.0))["job1"]
    again = [rigid(1, 0.0, 2, 12.0), *(rigid(2 + number, 4.0 * number, 2, 4.0) for number in range(1, 11))]
    promoted = ends(replay(again, "tiresias", threshold1_gpu_s=10.0, promote_knob=2.0))["job1"]
    assert promoted < never


def test_backfill_without_a_reservation_lets_everything_pass_that_fits() -> None:
    jobs = [rigid(1, 0.0, 1, 4.0), rigid(2, 0.0, 2, 2.0), rigid(3, 1.0, 1, 9.0)]
    assert ends(replay(jobs, "backfill", reserves=0.0)) == {"job1": 4.0, "job3": 10.0, "job2": 12.0}


def recorded(name: str, chosen: dict[str, str]) -> list[TraceJob]:
    lines = (traces() / "workloads" / f"{name}.csv").read_text().splitlines()
    return trace_jobs(name, select(name, rows(name, lines, ("job_id", "submit_time_s")), chosen))


def reference(name: str, **wanted: str) -> dict[str, str]:
    lines = (traces() / "reference" / f"{name}.csv").read_text().splitlines()
    (found,) = [row for row in csv.DictReader(lines) if all(row[key] == value for key, value in wanted.items())]
    return found


@pytest.mark.parametrize("workload", ["1", "6"])
@pytest.mark.parametrize(
    ("policy", "parameters", "theirs", "within"),
    [
        ("fifo", {}, "fifo", None),
        ("backfill", {"reserves": 0.0}, "fifo_backfill", None),
        ("srtf", {}, "srtf", None),
        ("srsf", {}, "srsf", None),
        ("tiresias", {"promote_knob": 0.0, "threshold2_gpu_s": 7_200.0}, "las2d_queues", 0.2),
    ],
)
def test_rigid_baselines_reproduce_an_independent_simulator(
    policy: str, parameters: dict[str, Any], theirs: str, within: float | None, workload: str
) -> None:
    """Exactly, but for the order of ties in the queues of attained service."""
    wanted = reference("rigid_summary", trace=f"pollux_jobs:1.0:{workload}", policy=theirs)
    trace = recorded("pollux_jobs", {"load": "1.0", "workload": workload})
    jobs = [rigid(number, job.submitted_s, job.gpus, job.duration_s) for number, job in enumerate(trace)]
    observer = replay(jobs, policy, Cluster({NodeId("all"): 64}), knowledge=PerfectKnowledge(64, 64), **parameters)
    wanted_s = float(wanted["avg_jct_s"])
    expected = pytest.approx(wanted_s, rel=within) if within else pytest.approx(wanted_s, abs=0.1)
    assert observer.summary()["avg_jct_s"] == expected


def pollux_replay(policy: str, workload: str, knowledge: str = "perfect", **parameters: float) -> dict[str, Any]:
    folder = traces() / "profiles"
    tables = [
        (folder / f"pollux_{name}.csv").read_text().splitlines() for name in ("throughput", "validation", "models")
    ]
    settings = Replay(
        PolicySetting(policy, parameters), knowledge=knowledge, pacing=Pacing(60.0, 30.0), gpus_most={"ncf": 1}
    )
    trace = recorded("pollux_jobs", {"load": "1.0", "workload": workload})
    return prepared(trace, profiles(*tables), settings).run().summary()


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [("optimus", {}), ("tiresias", {"threshold1_gpu_s": 57_600.0, "promote_knob": 0.0})],
)
def test_published_schedulers_come_within_a_tenth_of_their_published_results(
    policy: str, parameters: dict[str, Any]
) -> None:
    wanted_s = float(reference("pollux_summary", load="1.0", workload="6", policy=policy)["avg_jct_s"])
    summary = pollux_replay(policy, "6", **parameters)
    assert summary["finished"] == 160
    assert summary["avg_jct_s"] == pytest.approx(wanted_s, rel=0.1)


def test_the_default_policy_beats_the_published_one_where_everything_is_known() -> None:
    published = reference("pollux_summary", load="1.0", workload="6", policy="pollux")
    summary = pollux_replay("swarm", "6")
    assert summary["finished"] == 160
    assert summary["avg_jct_s"] < 0.85 * float(published["avg_jct_s"])
    assert summary["refused_holds"] == 0


def test_no_policy_learns_anything_from_the_name_of_a_model() -> None:
    folder = traces() / "profiles"
    texts = [(folder / f"pollux_{name}.csv").read_text() for name in ("throughput", "validation", "models")]
    trace = recorded("pollux_jobs", {"load": "0.5", "workload": "5"})[:20]
    settings = Replay(PolicySetting("swarm"), knowledge="learned", seed=3, gpus_most={"ncf": 1, "zz": 1})
    named = prepared(trace, profiles(*[text.splitlines() for text in texts]), settings).run().summary()
    renamed = [replace(job, model=job.model.replace("cifar10", "aa").replace("ncf", "zz")) for job in trace]
    others = [text.replace("cifar10", "aa").replace("ncf", "zz").splitlines() for text in texts]
    assert prepared(renamed, profiles(*others), settings).run().summary() == named

"""Policies on replays: the schedules of the papers, and the published results of independent simulators."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from swarmsched.api import JobState
from swarmsched.card import STATES, JobCard
from swarmsched.ids import JobId, NodeId
from swarmsched.policies.registry import compute_plan
from swarmsched.replay.cluster import GPU, Fleet
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import NothingKnown, PerfectKnowledge
from swarmsched.replay.measurements import SUFFIXES, TableSource, profiles
from swarmsched.replay.perfect import HISTORY, PerfectReplay, Planner, Ticks
from swarmsched.replay.setup import Replay, prepared
from swarmsched.replay.table import rows, select
from swarmsched.replay.workload import TraceJob, trace_jobs
from swarmsched.view import EndedJob, PolicySetting
from tests.swarmsched.replay.testing import ends, made_up, replay, rigid, traces


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


def test_three_jobs_under_attained_service_with_a_quantum_of_a_second_end_as_in_the_paper() -> None:
    observer = replay(three_jobs(), "tiresias", pacing=Ticks(1.0, 0.0), quantum_gpu_s=1.0)
    assert ends(observer) == {"job1": 5.0, "job2": 14.0, "job3": 16.0}


def test_three_jobs_by_the_gittins_index_of_their_services_end_as_with_known_ones() -> None:
    policy = remembering("gittins", [4.0, 8.0, 12.0], prior_jobs=0.0)
    cluster = Fleet({NodeId("n001"): 2})
    observer = PerfectReplay(three_jobs(), cluster, policy, NothingKnown(), Ticks(0.0, 0.0)).run()
    assert not observer.policy_errors
    assert ends(observer) == {"job1": 2.0, "job2": 10.0, "job3": 16.0}


def remembering(name: str, services_gpu_s: Sequence[float], **parameters: float) -> Planner:
    """A policy whose history is jobs of these services, in GPU-seconds, whatever else has ended."""
    setting = PolicySetting(name, parameters)
    card = JobCard(JobId("0" * 26), 1, 1, NodeId("n"), STATES.index(JobState.ENDED), 0, 1, GPU, 1.0)
    history = tuple([EndedJob(changed(card, attained_gpu_s=each), True, 1.0) for each in services_gpu_s])
    return lambda view, now_s: compute_plan(setting, changed(view, history=history), now_s)


@pytest.mark.parametrize("policy", ["tiresias", "gittins", "elastic-tiresias"])
def test_tiresias_demotes_at_the_exact_moment_and_tells_when_to_look_again(policy: str) -> None:
    """The long job leaves the first class after 10 GPU-seconds, at 5 s; then the short one, which came at 1 s, runs."""
    jobs = [rigid(1, 0.0, 2, 20.0), rigid(2, 1.0, 2, 3.0)]
    observer = replay(jobs, policy, threshold1_gpu_s=10.0)
    assert ends(observer) == {"job2": 8.0, "job1": 23.0}
    assert sum(job.preemptions for job in observer.finished) == 1


@pytest.mark.parametrize("policy", ["tiresias", "gittins", "elastic-tiresias"])
def test_tiresias_promotes_a_job_that_has_waited_its_runtime_times_the_knob(policy: str) -> None:
    """Without promotion the long job would wait until 42 s, when the stream of short ones ends."""
    jobs = [rigid(1, 0.0, 2, 12.0), *(rigid(2 + number, 4.0 * number, 2, 4.0) for number in range(1, 11))]
    never = ends(replay(list(jobs), policy, threshold1_gpu_s=10.0, promote_knob=0.0))["job1"]
    again = [rigid(1, 0.0, 2, 12.0), *(rigid(2 + number, 4.0 * number, 2, 4.0) for number in range(1, 11))]
    promoted = ends(replay(again, policy, threshold1_gpu_s=10.0, promote_knob=2.0))["job1"]
    assert promoted < never


def test_backfill_without_a_reservation_lets_everything_pass_that_fits() -> None:
    jobs = [rigid(1, 0.0, 1, 4.0), rigid(2, 0.0, 2, 2.0), rigid(3, 1.0, 1, 9.0)]
    assert ends(replay(jobs, "backfill", reserves=0.0)) == {"job1": 4.0, "job3": 10.0, "job2": 12.0}


def recorded(name: str, chosen: dict[str, str]) -> list[TraceJob]:
    lines = (traces() / "workloads" / f"{name}.csv").read_text().splitlines()
    return trace_jobs(select(rows(name, lines, ("job_id", "submit_time_s")), chosen))


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
    observer = replay(jobs, policy, Fleet({NodeId("all"): 64}), knowledge=PerfectKnowledge(64, 64), **parameters)
    wanted_s = float(wanted["avg_jct_s"])
    expected = pytest.approx(wanted_s, rel=within) if within else pytest.approx(wanted_s, abs=0.1)
    assert observer.summary()["avg_jct_s"] == expected


@pytest.mark.parametrize(
    ("name", "chosen", "nodes", "per_node"),
    [
        ("pollux_jobs", {"load": "1.0", "workload": "1"}, 16, 4),
        ("pollux_jobs", {"load": "1.0", "workload": "6"}, 16, 4),
        ("itp195_jobs", {}, 8, 8),
        pytest.param("muri_jobs", {"trace": "cluster"}, 8, 8, marks=pytest.mark.acceptance),
    ],
)
def test_the_gittins_index_of_the_published_sample_reproduces_an_independent_simulator(
    name: str, chosen: dict[str, str], nodes: int, per_node: int
) -> None:
    """Ties: running jobs first, then by first start, by submission, by number."""
    trace = ":".join([name, *chosen.values()])
    wanted = reference("rigid_summary", trace=trace, nodes=str(nodes), policy="gittins_in_queues")
    lines = (traces() / "profiles" / "tiresias_gputime_samples.csv").read_text().splitlines()
    sample = sorted(float(row["gpu_time_s"]) for row in csv.DictReader(lines))
    quantiles = [sample[(2 * number + 1) * len(sample) // (2 * HISTORY)] for number in range(HISTORY)]
    policy = remembering("gittins", quantiles, promote_knob=0.0, threshold2_gpu_s=7_200.0)
    jobs = [
        rigid(number, job.submitted_s, job.gpus, job.duration_s) for number, job in enumerate(recorded(name, chosen))
    ]
    cluster = Fleet({NodeId("all"): nodes * per_node})
    summary = PerfectReplay(jobs, cluster, policy, NothingKnown(), Ticks(0.0, 0.0)).run().summary()
    assert summary["avg_jct_s"] == pytest.approx(float(wanted["avg_jct_s"]), rel=0.05)
    assert summary["median_jct_s"] == pytest.approx(float(wanted["p50_jct_s"]), rel=0.05)


def pollux_replay(policy: str, workload: str, knowledge: str = "perfect", **parameters: float) -> dict[str, Any]:
    folder = traces() / "profiles"
    tables = [TableSource(suffix, (folder / f"pollux_{suffix}").read_text().splitlines()) for suffix in SUFFIXES]
    settings = Replay(
        PolicySetting(policy, parameters), knowledge=knowledge, pacing=Ticks(60.0, 30.0), gpus_most={"ncf": 1}
    )
    trace = recorded("pollux_jobs", {"load": "1.0", "workload": workload})
    return prepared(trace, profiles(*tables), settings).run().summary()


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [
        pytest.param("optimus", {}, marks=pytest.mark.acceptance),
        ("tiresias", {"threshold1_gpu_s": 57_600.0, "promote_knob": 0.0}),
    ],
)
def test_published_schedulers_come_within_a_tenth_of_their_published_results(
    policy: str, parameters: dict[str, Any]
) -> None:
    wanted_s = float(reference("pollux_summary", load="1.0", workload="6", policy=policy)["avg_jct_s"])
    summary = pollux_replay(policy, "6", **parameters)
    assert summary["finished"] == 160
    assert summary["avg_jct_s"] == pytest.approx(wanted_s, rel=0.1)


@pytest.mark.acceptance
def test_the_default_policy_beats_the_published_one_where_everything_is_known() -> None:
    published = reference("pollux_summary", load="1.0", workload="6", policy="pollux")
    summary = pollux_replay("swarm", "6")
    assert summary["finished"] == 160
    assert summary["avg_jct_s"] < 0.85 * float(published["avg_jct_s"])
    assert summary["refused_holds"] == 0


def test_no_policy_learns_anything_from_the_name_of_a_model() -> None:
    models = [made_up("slow", sync_s=0.05), made_up("fast", sync_s=0.001)]
    settings = Replay(PolicySetting("swarm"), Fleet({NodeId("n1"): 4, NodeId("n2"): 4}), knowledge="learned", seed=3)
    jobs = [TraceJob(f"j{each}", 9.0 * each, 1, model=models[each % 3 == 0].name, batch=32) for each in range(12)]

    def told(names: dict[str, str]) -> dict[str, Any]:
        trace = [replace(job, model=names.get(job.model, job.model)) for job in jobs]
        renamed = [
            made_up(names.get(model.name, model.name), 0.05 if model is models[0] else 0.001) for model in models
        ]
        return prepared(trace, {model.name: model for model in renamed}, settings).run().summary()

    assert told({})["finished"] == 12
    assert told({"slow": "zz", "fast": "aa"}) == told({})
    assert told({"slow": "fast", "fast": "slow"}) == told({})

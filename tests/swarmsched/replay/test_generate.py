"""Workloads that are drawn: what they promise, and that replays take them whatever the cluster."""

from collections import Counter
from dataclasses import astuple, replace
from io import StringIO
from itertools import pairwise

import pytest

from swarmsched.errors import ConfigError
from swarmsched.replay.cluster import Fleet, read_cluster
from swarmsched.replay.generate import FAMILIES, LENGTHS, Wanted, check, files, jobs, table
from swarmsched.replay.generate import JOBS as DRAWN
from swarmsched.replay.measurements import folder_profiles
from swarmsched.replay.perfect import Ticks
from swarmsched.replay.profiles import Profile, even
from swarmsched.replay.setup import Replay, prepared
from swarmsched.replay.table import rows
from swarmsched.replay.workload import JOBS, TraceJob, trace_jobs
from swarmsched.view import PolicySetting


def read(wanted: Wanted) -> tuple[list[TraceJob], dict[str, Profile], Fleet]:
    """The tables of a drawn workload, as a replay reads them."""
    tables = files(wanted)
    names = [name.removeprefix("profiles/") for name in tables if name.startswith("profiles/")]
    profiles = folder_profiles("profiles", names, lambda name: StringIO(tables[f"profiles/{name}"]))
    jobs = trace_jobs(rows("jobs.csv", StringIO(tables["jobs.csv"]), JOBS))
    return jobs, profiles, read_cluster("cluster.csv", StringIO(tables["cluster.csv"]))


def drawn(wanted: Wanted) -> list[TraceJob]:
    """Its jobs alone."""
    return trace_jobs(rows("jobs.csv", StringIO(table(DRAWN, jobs(wanted))), JOBS))


def ends(trace: list[TraceJob], profiles: dict[str, Profile], cluster: Fleet, policy: str) -> dict[str, float]:
    """When each job that finished did, where changes are free."""
    run = prepared(trace, profiles, Replay(PolicySetting(policy), cluster, pacing=Ticks(0.0, 0.0))).run()
    return {job.label: job.ended_s or 0.0 for job in run.finished}


def test_equal_seeds_draw_equal_tables_and_others_other_jobs() -> None:
    assert files(Wanted(seed=3, count=20)) == files(Wanted(seed=3, count=20))
    one, other = files(Wanted(seed=3, count=20)), files(Wanted(seed=4, count=20))
    assert [name for name in one if one[name] != other[name]] == ["jobs.csv"]


@pytest.mark.parametrize("load", [0.5, 2.0])
@pytest.mark.parametrize("classes", [1, 3])
def test_jobs_take_the_wanted_part_of_what_the_cluster_has_while_they_come(load: float, classes: int) -> None:
    wanted = Wanted(seed=5, count=1_500, load=load, classes=classes, nodes=9)
    trace = drawn(wanted)
    work_s = sum(job.gpus * job.duration_s for job in trace)
    assert work_s / (wanted.capacity * trace[-1].submitted_s) == pytest.approx(load, rel=0.03)


def test_a_job_that_is_alone_takes_what_its_row_says_by_its_profile_as_well() -> None:
    """The run time is by the formulas, the replay by measurements that it interpolates."""
    trace, profiles, cluster = read(Wanted(seed=1, count=150, rigid=0.0, sweeps=0.0, wishes=0.0))
    by_kind = {(job.model, job.gpus): job for job in trace}
    assert len(by_kind) > 25
    assert {job.model for job in trace} >= {family.name + "-1" for family in FAMILIES}
    for job in by_kind.values():
        alone = ends([replace(job, submitted_s=0.0)], profiles, cluster, "fifo")
        assert alone[job.job_id] == pytest.approx(job.duration_s, rel=0.02), job


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 16), (2, 1), (3, 8), (2, 12), (20, 2), (24, 6), (500, 1), pytest.param((500, 8), id="huge")]
)
def test_whatever_a_policy_chooses_on_whatever_cluster_was_measured(shape: tuple[int, int]) -> None:
    """All sizes and batches that a job may take, on the fewest servers and on the most."""
    nodes, gpus = shape
    wanted = Wanted(2, 12, nodes=nodes, gpus_per_node=gpus)
    trace, profiles, cluster = read(wanted)
    assert max(job.gpus for job in trace) <= max(1, cluster.total // 2)
    for family in FAMILIES:
        profile, limits = profiles[f"{family.name}-1"], family.local_batch
        most = min(family.most, cluster.total)
        for count in {*range(1, min(most, 40) + 1), *range(1, most, 37), most}:
            packed = (gpus,) * (count // gpus) + (count % gpus,) * bool(count % gpus)
            for placed in (packed, even(count, min(count, nodes))):
                for batch in limits:
                    assert profile.step_time(placed, batch).step_s == pytest.approx(
                        family.step(count, len(placed), batch)[0], rel=0.25
                    ), (family.name, placed, batch)


def test_a_few_jobs_are_most_of_the_work_and_a_part_comes_in_sweeps() -> None:
    trace = drawn(Wanted(seed=7, count=2_000, sweeps=0.4))
    work_s = sorted(job.gpus * job.duration_s for job in trace)
    assert sum(work_s[-200:]) > 0.5 * sum(work_s)
    assert 2_000 * 0.25 < sum(1 for job in trace if not job.model) < 2_000 * 0.35
    alike = Counter((job.user, job.model, job.gpus, job.duration_s) for job in trace if not job.model)
    swept = sum(count for count in alike.values() if count >= 4) / sum(alike.values())
    assert 0.3 < swept < 0.5
    lengths = Counter(int(job.model.partition("-")[2]) for job in trace if job.model)
    assert all(lengths[one] > 2 * lengths[other] > 0 for one, other in pairwise(LENGTHS))


def test_some_jobs_on_several_gpus_leave_a_server_to_others() -> None:
    trace = drawn(Wanted(seed=8, count=2_000))
    distributed = [job for job in trace if job.gpus > 4]
    shared = sum(1 for job in distributed if job.gpus % 4)
    assert 0.1 < shared / len(distributed) < 0.4


def test_what_users_say_beside_changes_none_of_their_jobs_and_none_of_it_is_impossible() -> None:
    plain, said = (drawn(Wanted(seed=6, count=1_000, deadlines=part, wishes=part)) for part in (0.0, 1.0))
    assert plain == [TraceJob(*astuple(job)[:9]) for job in said]
    models, others = ([job for job in said if bool(job.model) is kind] for kind in (True, False))
    assert all(1 <= job.gpus_least <= job.gpus <= job.gpus_most <= 64 for job in models)
    assert not any(job.gpus_least or job.time_limit_s or job.restartable for job in models if not job.gpus_most)
    limits = [job for job in others if job.time_limit_s]
    assert all(job.time_limit_s > job.duration_s + 60.0 for job in limits)
    assert all(job.deadline_s > job.submitted_s + job.duration_s for job in said)
    counts = [sum(map(bool, each)) for each in zip(*[astuple(job)[11:16] for job in said], strict=True)]
    priority, limited, deadline, restartable, failing = counts
    assert (deadline, priority > 20, failing > 20) == (1_000, True, True)
    assert limited == len(limits)
    assert 0.4 < limited / len(others) < 0.6
    assert 0.4 < restartable / len(others) < 0.6


@pytest.mark.parametrize(("swing", "least", "most"), [(0.0, 0.8, 1.25), (1.0, 4.0, 1e9)])
def test_more_jobs_come_by_day_than_by_night(swing: float, least: float, most: float) -> None:
    trace = drawn(Wanted(seed=9, count=1_500, sweeps=0.0, swing=swing, nodes=12))
    hours = Counter(int(job.submitted_s / 3_600 + 8) % 24 for job in trace)
    days = trace[-1].submitted_s // 86_400
    assert days >= 1
    assert least < sum(hours[hour] for hour in range(12, 18)) / max(1, sum(hours[hour] for hour in range(6))) < most


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Wanted(load=0.0), r"load: 0 cannot be used; from 0.01 to 100"),
        (Wanted(count=0), r"count: 0 cannot be used"),
        (Wanted(nodes=2, classes=3), r"classes: 3 need more than 2 nodes"),
        (Wanted(rigid=1.5), r"rigid: 1.5 cannot be used"),
    ],
)
def test_what_cannot_be_drawn_is_named(wanted: Wanted, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(wanted)
    assert told in f"{error.value}; {error.value.remedy}"

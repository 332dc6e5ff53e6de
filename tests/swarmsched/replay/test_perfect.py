"""Replays on the exact view: known schedules are reproduced, and no policy gets what is not there."""

import csv
from collections.abc import Mapping
from dataclasses import replace as replaced
from typing import Any

import pytest

from swarmsched.card import JobCard
from swarmsched.errors import ConfigError
from swarmsched.estimate import BatchRange, GpuBatch
from swarmsched.ids import NodeId
from swarmsched.models.kinds import informed
from swarmsched.policies.base import PolicyKind
from swarmsched.policies.registry import POLICIES, compute_plan
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import PerfectKnowledge, all_points
from swarmsched.replay.learning import LearnedKnowledge
from swarmsched.replay.perfect import EPOCH_UTC_S, PerfectReplay, Ticks
from swarmsched.replay.physics import ProfiledPhysics, RigidPhysics, TruePace
from swarmsched.replay.setup import Replay, prepared
from swarmsched.replay.table import rows, select
from swarmsched.replay.workload import TraceJob, trace_jobs
from swarmsched.resources import Share
from swarmsched.view import Allocation, Change, ClusterView, Decision, Plan, PolicySetting
from tests.swarmsched.replay.testing import BATCHES, elastic, ends, made_up, replay, rigid, traces

PATIENCE = 16.0


def test_fifo_blocks_behind_the_head_and_ends_at_the_exact_moments() -> None:
    jobs = [rigid(1, 0.0, 2, 2.0), rigid(2, 0.5, 2, 6.0), rigid(3, 1.0, 1, 8.0)]
    assert ends(replay(jobs, "fifo")) == {"job1": 2.0, "job2": 8.0, "job3": 16.0}


def test_with_a_tick_nothing_is_decided_between_its_multiples() -> None:
    jobs = [rigid(1, 1.0, 2, 5.0), rigid(2, 2.0, 2, 5.0)]
    assert ends(replay(jobs, "fifo", pacing=Ticks(60.0, 10.0))) == {"job1": 75.0, "job2": 135.0}


def test_what_can_never_run_ends_the_replay_and_is_missing_among_the_finished() -> None:
    summary = replay([rigid(1, 0.0, 3, 1.0), rigid(2, 0.0, 1, 1.0)], "backfill").summary()
    assert (summary["jobs"], summary["finished"], summary["avg_jct_s"]) == (2, 1, 1.0)


def test_the_default_policy_gives_an_elastic_job_all_that_pays_and_shares_with_the_next() -> None:
    profile, cluster = made_up(), Fleet.even(2, 4)
    alone = replay([elastic(1, 0.0, profile)], "swarm", cluster, Ticks(60.0, 30.0))
    shared = replay([elastic(1, 0.0, profile), elastic(2, 0.0, profile)], "swarm", cluster, Ticks(60.0, 30.0))
    assert alone.refused_holds == shared.refused_holds == 0
    assert alone.summary()["finished"] == 1
    assert len(shared.finished) == 2
    assert max(ends(shared).values()) < 2 * ends(alone)["job1"]


def test_a_wide_job_of_known_length_is_served_though_small_ones_come_without_end() -> None:
    jobs = [*(rigid(number, 25.6 * number, 1, 100.0) for number in range(1, 300)), rigid(300, 30.0, 4, 50.0)]
    observer = replay(jobs, "swarm", Fleet.even(1, 4))
    assert ends(observer)["job300"] < 30.0 + PATIENCE * (50.0 + 30.0) + 200.0


def test_a_job_that_waits_has_waited_since_its_submission() -> None:
    waited: dict[float, float] = {}

    def plan(view: ClusterView, now_s: float) -> Plan:
        waited.update([(now_s - EPOCH_UTC_S, job.queued_s(now_s)) for job in view.jobs if job.card.ranks == 1])
        return compute_plan(PolicySetting("fifo"), view, now_s)

    jobs = [rigid(1, 0.0, 2, 900.0), rigid(2, 500.0, 1, 10.0)]
    PerfectReplay(jobs, Fleet.even(1, 2), plan, PerfectKnowledge(2, 2), Ticks(100.0, 0.0)).run()
    assert waited == {at_s: at_s - 500.0 for at_s in (500.0, 600.0, 700.0, 800.0, 900.0)}


def test_no_plan_books_a_gpu_twice_or_starves_anybody() -> None:
    profile = made_up()
    jobs = [elastic(number, 7.0 * number, profile) for number in range(40)]
    observer = replay(jobs, "swarm", Fleet.even(2, 4), Ticks(60.0, 30.0))
    assert len(observer.finished) == 40
    assert observer.refused_holds == 0
    assert 0.0 < observer.busy_gpu_s <= 8 * observer.elapsed_s


def test_without_a_tick_a_job_that_nobody_disturbs_gets_a_larger_batch_once_it_has_reported_its_noise() -> None:
    known = LearnedKnowledge(0, declares=True)
    (alone,) = replay([elastic(1, 0.0, made_up())], "swarm", Fleet.even(1, 4), Ticks(0.0, 1.0), known).finished
    assert alone.batch > BATCHES.first


def test_of_a_job_that_nobody_declared_the_length_is_known_by_those_of_its_kind_that_have_completed() -> None:
    views: list[ClusterView] = []

    def seen(view: ClusterView, now_s: float) -> Plan:
        views.append(informed(view))
        return compute_plan(PolicySetting("swarm"), view, now_s)

    jobs = [elastic(number, 500.0 * number, made_up()) for number in range(2)]
    cluster, known = Fleet.even(1, 4), LearnedKnowledge(0, declares=False)
    PerfectReplay(jobs, cluster, seen, known, Ticks(20.0, 1.0)).run()

    def left(number: int) -> list[float]:
        cards = [job.card for view in views for job in view.jobs if job.job_id == jobs[number].job_id]
        return [card.estimate.remaining if card.estimate else 0.0 for card in cards]

    first, second = left(0), left(1)
    assert first[0] == 0.0
    assert first[2] == pytest.approx(views[2].jobs[0].card.estimate.done, rel=0.02), "as much as it has done"
    total = jobs[1].physics.total
    assert second[0] == pytest.approx(total, rel=0.02)
    assert 0.0 < second[-1] < total


def test_without_a_tick_an_idle_cluster_is_not_asked_until_the_next_arrival() -> None:
    jobs = [elastic(1, 0.0, made_up()), elastic(2, 1e5, made_up())]
    observer = replay(jobs, "swarm", Fleet.even(1, 4), Ticks(0.0, 1.0))
    assert ends(observer)["job2"] == pytest.approx(1e5 + ends(observer)["job1"], abs=1e-3)
    assert len(observer.plan_s) < 50


def test_perfect_knowledge_tells_each_size_on_the_fewest_nodes() -> None:
    points = all_points(made_up(), 4, 8)
    assert {(point.ranks, point.nodes) for point in points} >= {(ranks, -(-ranks // 4)) for ranks in range(1, 9)}


class Raises:
    """Fails whenever somebody waits and nobody runs."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        """It takes none."""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        if not any(job.shares for job in view.jobs):
            raise ZeroDivisionError("nobody runs")
        return Plan(())


class Overbooks(Raises):
    """Gives every job twice what the first node has."""

    ranks = 4

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        return Plan(
            tuple([Decision(job.job_id, Change.START, "", self.target(view)) for job in view.jobs]), memory=b"bad"
        )

    def target(self, view: ClusterView) -> Any:
        return Allocation((Share(view.nodes[0].node, self.ranks),))


class TakesNothing(Overbooks):
    ranks = 0


class TakesLessThanNothing(Overbooks):
    ranks = -1


class GoesElsewhere(Overbooks):
    def target(self, view: ClusterView) -> Any:
        return Allocation((Share(NodeId("nowhere"), 2),))


class GoesNowhere(Overbooks):
    def target(self, view: ClusterView) -> Any:
        return None


class DecidesTwice(Raises):
    def plan(self, view: ClusterView, now_s: float) -> Plan:
        return Plan(tuple([Decision(job.job_id, Change.KEEP, "") for job in view.jobs for _ in range(2)]))


class DecidesNothing(Raises):
    def plan(self, view: ClusterView, now_s: float) -> Plan:
        nothing: Any = None
        return Plan(nothing)


@pytest.mark.parametrize("view", ["perfect", "gossip"])
@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (Raises, "raised ZeroDivisionError: nobody runs"),
        (Overbooks, "planned more GPUs on n00"),
        (GoesElsewhere, "planned more GPUs on nowhere than it has"),
        (GoesNowhere, "made no plan that can be read: Plan: decisions[0].target: "),
        (DecidesNothing, "made no plan that can be read: Plan: decisions: "),
        (TakesLessThanNothing, "made no plan that can be read: Plan: decisions[0].target.shares[0].ranks: "),
        (TakesNothing, "planned no ranks of job "),
        (DecidesTwice, "decided twice on job "),
    ],
)
def test_a_policy_that_fails_is_counted_and_backfill_plans_meanwhile(
    policy: type, problem: str, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = policy.__name__
    monkeypatch.setitem(POLICIES, name, PolicyKind(name, "fails", (), f"{__name__}:{name}"))
    jobs = [TraceJob("a", 0.0, 2, 2.0), TraceJob("b", 0.5, 2, 6.0), TraceJob("c", 1.0, 1, 8.0)]
    settings = Replay(PolicySetting(name), Fleet.even(1, 2), pacing=Ticks(0.0, 0.0), view=view)
    observer = prepared(jobs, {}, settings).run()
    assert [*ends(observer)] == ["a", "b", "c"]
    if view == "perfect":
        assert ends(observer) == {"a": 2.0, "b": 8.0, "c": 16.0}
        assert observer.refused_holds == 0
    assert observer.first_policy_error.startswith(f"{name} {problem}"), observer.first_policy_error
    assert observer.summary()["policy_errors"] == observer.policy_errors > 2


def test_slowdown_is_over_the_best_possible_time_alone() -> None:
    jobs = [rigid(1, 0.0, 2, 2.0), rigid(2, 0.0, 2, 6.0)]
    assert replay(jobs, "fifo").summary()["avg_slowdown"] == pytest.approx((1.0 + 8.0 / 6.0) / 2, abs=1e-3)
    cluster = Fleet.even(2, 4)
    alone = replay([elastic(1, 0.0, made_up())], "swarm", cluster, Ticks(1.0, 0.0)).summary()
    crowded = [elastic(number, 0.0, made_up()) for number in range(4)]
    assert 1.0 <= alone["avg_slowdown"] < 1.1
    assert replay(crowded, "swarm", cluster, Ticks(1.0, 0.0)).summary()["avg_slowdown"] > 1.9


@pytest.mark.parametrize(
    ("trace", "chosen", "nodes"), [("itp195_jobs", {}, 8), ("pollux_jobs", {"load": "1.0", "workload": "6"}, 16)]
)
def test_fifo_reproduces_what_an_independent_simulator_finds(trace: str, chosen: dict[str, str], nodes: int) -> None:
    folder = traces()
    name = ":".join([trace, *chosen.values()])
    table = list(csv.DictReader((folder / "reference" / "rigid_summary.csv").read_text().splitlines()))
    (wanted,) = [row for row in table if (row["trace"], row["nodes"], row["policy"]) == (name, str(nodes), "fifo")]
    lines = (folder / "workloads" / f"{trace}.csv").read_text().splitlines()
    jobs = trace_jobs(select(rows(trace, lines, ("job_id", "submit_time_s")), chosen))
    gpus = nodes * int(wanted["gpus_per_node"])
    work: list[ReplayJob] = [
        rigid(number, job.submitted_s, job.gpus, job.duration_s) for number, job in enumerate(jobs)
    ]
    summary = replay(work, "fifo", Fleet({NodeId("all"): gpus}), knowledge=PerfectKnowledge(gpus, gpus)).summary()
    assert summary["avg_jct_s"] == pytest.approx(float(wanted["avg_jct_s"]), abs=0.1)
    assert summary["makespan_s"] == pytest.approx(float(wanted["makespan_s"]), abs=0.1)


def test_jobs_that_have_not_ended_are_named_with_the_reason() -> None:
    jobs = [rigid(1, 0.0, 1, 50.0), rigid(2, 0.0, 3, 1.0), rigid(3, 0.0, 2, 1.0)]
    observer = replay(jobs, "fifo")
    assert [*ends(observer)] == ["job1"]
    assert observer.summary()["unfinished"] == [
        {"job_id": "job2", "reason": "needs 3 GPUs, and there are 2"},
        {
            "job_id": "job3",
            "reason": "the policy let it wait: needs 2 GPUs; fits now and waits its turn; 1 job ahead (job2)",
        },
    ]


@pytest.mark.parametrize(
    ("pacing", "reason"),
    [
        (Ticks(1.0, 0.0, limit_s=10.0), "had not ended after 10 s, when the replay gave up"),
        (Ticks(1.0, 0.0, plans_most=5), "had not ended after 5 plans, at 4 s, when the replay gave up"),
    ],
)
def test_a_replay_that_gives_up_says_why(pacing: Ticks, reason: str) -> None:
    observer = replay([rigid(1, 0.0, 1, 50.0), rigid(2, 0.0, 1, 2.0)], "fifo", pacing=pacing)
    assert (len(observer.finished), observer.unfinished()) == (1, [{"job_id": "job1", "reason": reason}])


class Hesitates(Raises):
    """Starts nothing in the first minute, and everything after it."""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        return compute_plan(PolicySetting("fifo"), view, now_s) if now_s > 60.0 else Plan(())


def test_with_a_tick_a_policy_is_asked_again_that_has_started_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "hesitates", PolicyKind("hesitates", "", (), f"{__name__}:Hesitates"))
    jobs = [rigid(1, 0.0, 1, 50.0), rigid(2, 0.0, 3, 1.0)]
    observer = replay(jobs, "hesitates", pacing=Ticks(20.0, 0.0))
    assert ends(observer) == {"job1": 110.0}
    assert len(observer.plan_s) < 10, "the other needs more GPUs than there are: nobody is asked for it"


def test_gpus_count_as_unused_from_the_first_submission_on() -> None:
    """With a tick it waits for one, and holds its GPU until the next."""
    for tick_s, ratio in ((0.0, 80.0 / 160.0), (70.0, 140.0 / 360.0)):
        summary = replay([rigid(1, 100.0, 1, 80.0)], "fifo", pacing=Ticks(tick_s, 0.0)).summary()
        assert summary["gpu_utilisation_ratio"] == round(ratio, 4)


class Stands(RigidPhysics):
    """Takes GPUs and does nothing with them, where more than one is there."""

    def pace(self, shape: tuple[int, ...], batch: int, progress: float) -> TruePace:
        return TruePace(0.0, self.total)


@pytest.mark.parametrize("tick_s", [0.0, 1.0])
def test_a_job_that_makes_no_progress_does_not_run_for_ever(tick_s: float) -> None:
    standing = rigid(1, 0.0, 1, 50.0)
    standing.physics = Stands(1, 50.0)
    observer = replay([standing, rigid(2, 0.0, 1, 500.0)], "fifo", pacing=Ticks(tick_s, 0.0))
    assert [*ends(observer)] == ["job2"]
    assert observer.unfinished() == [{"job_id": "job1", "reason": "makes no progress on the 1 GPUs that it has"}]
    assert len(observer.plan_s) < 700


def test_finish_time_fairness_is_over_the_time_alone_on_an_equal_share() -> None:
    """Two jobs of both GPUs: alone on a half each takes 20 s, and they end at 10 and at 20 s."""
    summary = replay([rigid(1, 0.0, 2, 10.0), rigid(2, 0.0, 2, 10.0)], "fifo").summary()
    first, second = 10.0 / 20.0, 20.0 / (10.0 * 1.5)  # the second has one rival for half of its time
    assert summary["rho_worst"] == pytest.approx(second, abs=1e-3)
    assert summary["rho_p50"] == pytest.approx((first + second) / 2, abs=1e-3)
    assert replay([rigid(1, 0.0, 2, 10.0)], "fifo").summary()["rho_p99"] == 1.0


@pytest.mark.parametrize("view", ["perfect", "gossip"])
def test_what_rows_say_of_jobs_counts_and_is_told_in_the_results(view: str) -> None:
    rows = [
        TraceJob("first", 0.0, 2, 40.0, failure=0.5, deadline_s=100.0),
        TraceJob("low", 1.0, 2, 40.0, priority=-1, deadline_s=60.0),
        TraceJob("high", 2.0, 2, 40.0, priority=1, deadline_s=100.0),
        TraceJob("limited", 300.0, 2, 40.0, time_limit_s=20.0),
    ]
    observer = prepared(
        rows, {}, Replay(PolicySetting("fifo"), Fleet.even(1, 2), pacing=Ticks(0.0, 0.0), view=view)
    ).run()
    assert [*ends(observer)] == ["first", "high", "low", "limited"]
    assert ends(observer)["limited"] == pytest.approx(320.0, abs=3.0)
    summary = observer.summary()
    assert (summary["failed"], summary["deadlines"], summary["deadlines_met"]) == (2, 3, 1)


def test_cards_tell_deadlines_limits_and_what_a_start_has_cost() -> None:
    cards: list[JobCard] = []

    def seen(view: ClusterView, now_s: float) -> Plan:
        cards.extend(job.card for job in view.jobs)
        return compute_plan(PolicySetting("backfill"), view, now_s)

    rows = [TraceJob(each, 0.0, 2, 40.0, model=each, time_limit_s=500.0, deadline_s=900.0) for each in ("a", "b")]
    settings = Replay(PolicySetting("backfill"), Fleet.even(1, 2), pacing=Ticks(5.0, 30.0), restart_costs={"a": 7.0})
    run = prepared(rows, {}, settings_telling := replaced(settings, tells_costs=True))
    assert settings_telling.terms.tells_pause
    assert isinstance(run, PerfectReplay)
    run._plan = seen
    assert ends(run.run()) == {"a": 47.0, "b": 50.0 + 70.0}
    assert {(card.time_limit_s, card.deadline_utc_s) for card in cards} == {(500.0, 901.0)}
    assert {card.pause_s for card in cards if card.name == rows[0].kind} == {0.0, 7.0}
    assert {card.pause_s for card in cards if card.name == rows[1].kind} == {0.0, 30.0}


def test_the_sizes_of_a_row_bound_what_policies_choose_and_are_refused_where_nothing_is_known_of_them() -> None:
    settings = Replay(PolicySetting("swarm"), Fleet.even(2, 4), knowledge="declared")
    row = TraceJob("a", 0.0, 4, model="toy", gpus_least=2, gpus_most=3)
    run = prepared([row], {"toy": made_up()}, settings)
    assert isinstance(run, PerfectReplay)
    sizes = set()
    for _ in run.steps():
        sizes |= {job.ranks for job in run._live}
    assert sizes <= {0, 2, 3}
    assert 3 in sizes
    for bad, told in (
        (replaced(row, model="", duration_s=5.0), "min_gpus: 2 is not the 4 of num_gpus"),
        (replaced(row, gpus_least=9, gpus_most=9), "min_gpus: 9 is more than the 8 that there are"),
    ):
        with pytest.raises(ConfigError, match=told):
            prepared([bad], {"toy": made_up()}, settings)


def test_a_cluster_of_classes_that_were_not_measured_is_replayed_by_their_speeds() -> None:
    fast, slow = NodeId("fast"), NodeId("slow")
    rows = [TraceJob(name, 0.0, 1, model="toy", gpus_most=1) for name in ("a", "b")]
    cluster = Fleet({fast: 1, slow: 1}, {fast: "new", slow: "old"})
    settings = Replay(PolicySetting("swarm"), cluster, "declared", Ticks(5.0, 0.0))
    speeds = {"": {"new": 4.0, "old": 1.0}, "toy": {"new": 2.0}}
    observer = prepared(rows, {"toy": made_up()}, replaced(settings, gpu_speeds=speeds)).run()
    first, second = sorted(ends(observer).values())
    assert second > 1.3 * first, "one of them has had the slow GPU"
    with pytest.raises(ConfigError, match="gpu_model: 'new' was not measured with model 'toy'"):
        prepared(rows, {"toy": made_up()}, replaced(settings, gpu_speeds={"": {"old": 1.0}}))


def test_a_replayed_job_keeps_to_what_fits_into_the_memory_of_its_gpus() -> None:
    """A batch of 32 on one GPU: at once in 42 ms, in two passes of 16 in 52, in four of 8 in 72."""
    row = TraceJob("a", 0.0, 1, model="toy", gpus_most=1, batch=32)

    def end_s(gpu: str, **limits: int) -> float:
        cluster = Fleet({NodeId("n"): 1}, {NodeId("n"): gpu})
        settings = Replay(PolicySetting("optimus"), cluster, "declared", Ticks(0.0, 0.0))
        settings = replaced(settings, gpu_speeds={"": {"new": 1.0, "old": 1.0}}, gpu_batches={"toy": limits})
        return ends(prepared([row], {"toy": made_up()}, settings).run())["a"]

    assert end_s("new") == pytest.approx(84.0)
    assert end_s("new", new=16, old=8) == pytest.approx(104.0)
    assert end_s("old", new=16, old=8) == pytest.approx(144.0)
    assert end_s("old", new=16) == pytest.approx(84.0), "another class's limit"
    physics = ProfiledPhysics(made_up(), BatchRange(32, 32, 8, 64, (GpuBatch("old", 8),)), ranks_most=1)
    alone = [physics.alone_s(Fleet({NodeId("n"): 1}, {NodeId("n"): gpu})) for gpu in ("new", "old")]
    assert alone == pytest.approx([84.0, 144.0])
    with pytest.raises(ConfigError, match="4 of 'new' is less than the 8 of min_local_bsz of model 'toy'"):
        end_s("new", new=4)


def test_sizes_that_nobody_has_measured_are_replayed_and_counted() -> None:
    row = TraceJob("a", 0.0, 20, model="toy", batch=256)
    summary = prepared([row], {"toy": made_up()}, Replay(PolicySetting("fifo"), Fleet.even(1, 20))).run().summary()
    assert (summary["finished"], summary["guessed_shapes"]) == (1, 1)

"""What is told of the time to come: starts, ends, and how long a job would take alone on an equal share."""

import random
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import STATES
from swarmsched.estimate import BatchRange, Estimate, Resizable, SpeedPoint
from swarmsched.ids import JobId, NodeId, handle
from swarmsched.policies.outlook import ENDED_LEAST, WAITING_MOST, foresee
from swarmsched.policies.registry import compute_plan
from swarmsched.policies.room import Room
from swarmsched.resources import Demand, Share
from swarmsched.view import Change, ClusterView, EndedJob, JobView, NodeView, Outlook, PolicySetting, Span
from tests.swarmsched.building import job_id, make_node
from tests.swarmsched.policies.test_policies import NOW_S, job

ONE_GPU = Demand(gpus=1)
A, B = NodeId("a"), NodeId("b")
UTC_S = 1_700_010_000.0


def runs(number: int, ranks: int, limit_s: float, ran_s: float = 0.0, node: NodeId = A, **more: Any) -> JobView:
    shares = (Share(node, ranks),)
    return job(number, JobState.RUNNING, ranks, ONE_GPU, shares=shares, time_limit_s=limit_s, running_s=ran_s, **more)


def waits(number: int, ranks: int, limit_s: float, **more: Any) -> JobView:
    return job(number, JobState.QUEUED, ranks, ONE_GPU, time_limit_s=limit_s, **more)


def outlooks(nodes: Sequence[NodeView], *jobs: JobView, policy: str = "fifo", **more: Any) -> dict[JobId, Outlook]:
    view = ClusterView(1, tuple(nodes), jobs, utc_s=UTC_S, **more)
    setting = PolicySetting(policy)
    return {each.job_id: each for each in foresee(setting, view, compute_plan(setting, view, NOW_S), NOW_S)}


def declared(steps: float, step_s: float = 1.0, error: float = 0.0) -> Estimate:
    points = (SpeedPoint(1, 1, 64, step_s),)
    return Estimate(points=points, remaining=steps, remaining_error=error)


def test_a_job_starts_when_enough_of_those_have_ended_that_run_by_what_they_have_declared() -> None:
    first, second = runs(1, 1, 0.0, estimate=declared(100.0)), runs(2, 1, 0.0, estimate=declared(300.0))
    found = outlooks([make_node(A, 0, 2)], first, second, waits(3, 1, 60.0), waits(4, 2, 60.0))
    start = found[job_id(3)].start
    assert start is not None
    assert start.expected_s == pytest.approx(100.0)
    assert (start.low_s, start.high_s) == (pytest.approx(93.6), pytest.approx(106.4))
    after = found[job_id(4)].start
    assert after is not None
    assert after.expected_s == pytest.approx(300.0), "the one before it has ended by then"
    end = found[job_id(1)].end
    assert end is not None
    assert end.expected_s == pytest.approx(100.0)
    assert found[job_id(1)].start is None, "it runs"


def test_a_time_limit_bounds_what_is_told() -> None:
    found = outlooks([make_node(A, 0, 2)], runs(1, 2, 100.0, 40.0), waits(2, 1, 10.0))[job_id(2)]
    assert found.start is not None
    assert 0.0 < found.start.low_s <= found.start.expected_s <= (found.start.high_s or inf) <= 60.0


def test_nothing_is_told_where_nobody_has_said_how_long_it_takes_and_too_few_have_ended() -> None:
    endless = runs(1, 2, 0.0)
    asked = outlooks([make_node(A, 0, 2)], endless, waits(2, 1, 10.0))[job_id(2)]
    assert (asked.start, asked.end) == (None, None)
    assert asked.problem == (
        f"nobody can tell how long {handle(job_id(1))} runs: no time limit, no declared steps, and too few jobs have "
        "ended here"
    )
    ended = tuple(
        EndedJob(replace(runs(10 + number, 2, 0.0).card, attained_gpu_s=200.0), True, UTC_S)
        for number in range(ENDED_LEAST)
    )
    told = outlooks([make_node(A, 0, 2)], endless, waits(2, 1, 10.0), history=ended)[job_id(2)]
    assert told.start is not None
    assert told.start.low_s <= told.start.expected_s <= (told.start.high_s or inf)
    assert 50.0 < told.start.expected_s < 1_000.0


def test_why_a_start_is_not_known_is_said_of_absent_nodes_and_of_long_queues() -> None:
    nodes = [make_node(A, 0, 1), make_node(B, 4, 4, is_available=False)]
    many = [waits(2 + number, 1, 10.0) for number in range(WAITING_MOST + 1)]
    found = outlooks(nodes, runs(1, 1, 100.0), *many)
    assert found[job_id(WAITING_MOST + 1)].start is not None
    assert found[job_id(WAITING_MOST + 2)].problem == f"{WAITING_MOST} jobs wait before it"
    away = outlooks(nodes, runs(1, 1, 100.0), waits(2, 3, 10.0))[job_id(2)]
    assert (away.start, away.problem) == (None, "the nodes that could hold it are not available")


def test_what_the_plan_starts_begins_now_and_one_that_is_stopped_begins_again() -> None:
    rich = waits(2, 2, 50.0, priority=5)
    found = outlooks(
        [make_node(A, 0, 2)], runs(1, 2, 80.0, estimate=declared(60.0), restartable=True), rich, policy="srtf"
    )
    assert found[job_id(2)].start is not None
    now = outlooks([make_node(A, 2, 2)], waits(1, 2, 50.0))[job_id(1)]
    assert now.start == Span(0.0, 0.0, 0.0)


SIZES = Resizable(1, 4, BatchRange(64, 64, 1, 64), 64)
MEASURED = Estimate(
    points=tuple(SpeedPoint(ranks, 1, 64 // ranks, 1.0 / ranks) for ranks in (1, 2, 4)), remaining=800.0, done=200.0
)


def test_alone_on_an_equal_share_a_job_takes_as_long_as_its_share_makes_it() -> None:
    """Four GPUs for two jobs: an elastic one would have two of them, and a rigid one of four has them half the time."""
    elastic = runs(1, 1, 0.0, elastic=SIZES, estimate=MEASURED)
    rigid = waits(2, 4, 0.0, estimate=replace(declared(100.0), points=(SpeedPoint(4, 1, 16, 1.0),), speed=()))
    found = outlooks([make_node(A, 3, 4)], elastic, rigid)
    assert found[job_id(1)].alone_s == pytest.approx(1_000 / 2, rel=0.05)
    assert found[job_id(2)].alone_s == pytest.approx(200.0)


def test_the_fewest_ranks_that_meet_a_deadline_are_told_where_the_models_allow() -> None:
    def least(within_s: float, **more: Any) -> int:
        one = runs(1, 1, 0.0, deadline_utc_s=UTC_S + within_s, **{"elastic": SIZES, "estimate": MEASURED, **more})
        return outlooks([make_node(A, 3, 4)], one)[job_id(1)].ranks_least

    assert [least(within_s) for within_s in (900.0, 410.0, 205.0, 100.0)] == [1, 2, 4, 0]
    assert [least(within_s, elastic=None) for within_s in (900.0, 410.0)] == [1, 0]
    assert least(900.0, elastic=None, estimate=None) == 0, "nobody knows"


class Queue:
    """A closed queue that is planned again at each end, as agents do; each job takes its own length."""

    def __init__(self, policy: str, nodes: Sequence[NodeView], jobs: Sequence[JobView], lengths: Sequence[float]):
        self._setting, self._nodes, self._room = PolicySetting(policy), nodes, Room(nodes)
        self._jobs = {one.job_id: one for one in jobs}
        self._lengths = {one.job_id: length_s for one, length_s in zip(jobs, lengths, strict=True)}
        self._ends = {one.job_id: self._lengths[one.job_id] for one in jobs if one.shares}
        self.started: dict[JobId, float] = {}
        self.foretold: dict[JobId, Span] = {}

    def played(self) -> dict[JobId, float]:
        """When each starts."""
        now_s, ended = 0.0, 0
        while True:
            self._plan(now_s, is_first=not ended)
            if not self._ends:
                return self.started
            now_s = min(self._ends.values())
            for gone in [each for each, end_s in self._ends.items() if end_s == now_s]:
                self._room.release(self._jobs[gone].shares, self._jobs[gone].demand)
                del self._jobs[gone], self._ends[gone]
                ended += 1

    def _plan(self, now_s: float, *, is_first: bool) -> None:
        nodes = [replace(each, free=self._room.free(each.node)) for each in self._nodes]
        view = ClusterView(1, tuple(nodes), tuple([self._aged(each, now_s) for each in self._jobs.values()]))
        plan = compute_plan(self._setting, view, NOW_S)
        if is_first:
            told = foresee(self._setting, view, plan, NOW_S)
            self.foretold = {each.job_id: each.start for each in told if each.start}
        for decision in plan.decisions:
            if decision.change is Change.START:
                one = self._jobs[decision.job_id]
                self._room.take(decision.target.shares, one.demand)
                self.started[one.job_id], self._ends[one.job_id] = now_s, now_s + self._lengths[one.job_id]
                state = STATES.index(JobState.RUNNING)
                self._jobs[one.job_id] = replace(
                    one, card=replace(one.card, state_index=state, shares=decision.target.shares)
                )

    def _aged(self, one: JobView, now_s: float) -> JobView:
        times = {"running_s": now_s - self.started.get(one.job_id, 0.0)} if one.shares else {"queued_s": now_s}
        return replace(one, card=replace(one.card, **times))


Case = tuple[int, int]


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(["fifo", "backfill"]),
    cases=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=9),
    busy=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 9)), min_size=2, max_size=2),
)
def test_what_is_foretold_is_what_happens_where_lengths_are_known(
    policy: str, cases: list[Case], busy: list[Case]
) -> None:
    """Each has a limit, takes as long, and has declared it."""
    nodes = [make_node(node, 2 - ranks, 2) for node, (ranks, _) in zip((A, B), busy, strict=True)]
    jobs = [
        runs(number, ranks, 10.0 * length, node=node)
        for number, ((ranks, length), node) in enumerate(zip(busy, (A, B), strict=True), 1)
    ]
    jobs += [waits(number, ranks, 10.0 * length) for number, (ranks, length) in enumerate(cases, 3)]
    certain = [
        replace(
            one,
            card=replace(
                one.card,
                estimate=Estimate(points=(SpeedPoint(one.ranks, 1, 64, 1.0),), remaining=one.card.time_limit_s),
            ),
        )
        for one in jobs
    ]
    queue = Queue(policy, nodes, certain, [one.card.time_limit_s for one in jobs])
    happened = queue.played()
    assert {each: start.expected_s for each, start in queue.foretold.items()} == pytest.approx(happened)


@pytest.mark.parametrize("policy", ["backfill", "swarm"])
def test_most_starts_lie_within_their_interval_where_only_limits_are_known(policy: str) -> None:
    """People ask for up to five times what they need, of lengths with a heavy tail."""
    within = count = 0
    for seed in range(3):
        rng = random.Random(seed)
        lengths = [min(max(rng.lognormvariate(7.0, 1.2), 30.0), 60_000.0) for _ in range(40)]
        jobs = [
            waits(number, rng.choice((1, 1, 1, 2, 4)), length_s * rng.uniform(1.1, 5.0))
            for number, length_s in enumerate(lengths, 1)
        ]
        queue = Queue(policy, [make_node(A, 4), make_node(B, 4)], jobs, lengths)
        for one, happened_s in queue.played().items():
            start = queue.foretold[one]
            count += start.high_s != 0.0
            within += start.expected_s > 0.0 and start.low_s <= happened_s <= (start.high_s or inf)
    assert within / count > 0.65, (within, count)

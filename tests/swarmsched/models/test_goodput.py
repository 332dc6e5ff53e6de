"""Goodput tables: step times as measured, else as fitted; batches worth what their noise says."""

from types import SimpleNamespace
from weakref import WeakSet

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmsched.estimate import BatchRange, Estimate, NoisePoint, SpeedPoint
from swarmsched.models import goodput
from swarmsched.models.batch import candidates, split
from swarmsched.models.goodput import Goodput, GoodputBook, Question, StepTable, StepTimes, gains
from swarmsched.models.speed import SpeedModel

ALLOWED = BatchRange(32, 256, 8, 64)
SPEED = (0.01, 0.001, 0.02, 0.001, 0.05, 0.002, 1.0)


@given(st.integers(1, 4_096), st.integers(1, 64))
def test_a_dealt_batch_is_within_all_bounds_and_near_what_was_asked(batch: int, ranks: int) -> None:
    dealt = split(batch, ranks, ALLOWED)
    if dealt is None:
        return
    assert ALLOWED.local_least <= dealt.local_batch <= ALLOWED.local_most
    assert dealt.batch(ranks) <= ALLOWED.most
    assert abs(dealt.batch(ranks) - min(batch, ALLOWED.most)) <= ranks * dealt.micro_steps


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"),
    [(32, 1, (32, 1)), (256, 1, (64, 4)), (32, 4, (8, 1)), (32, 8, None), (100, 3, (34, 1))],
)
def test_a_batch_is_dealt_in_as_few_micro_steps_as_fit(
    batch: int, ranks: int, expected: tuple[int, int] | None
) -> None:
    assert split(batch, ranks, ALLOWED) == expected


def test_candidates_run_from_the_first_to_the_largest() -> None:
    assert candidates(ALLOWED, 4) == [32, 64, 128, 256]
    assert candidates(BatchRange(32, 32, 8, 32), 24) == [32]


def test_a_measured_step_wins_over_the_fit_and_lies_between_its_neighbours() -> None:
    points = (SpeedPoint(2, 1, 10, 1.0, 0.2), SpeedPoint(2, 1, 20, 2.0, 0.4))
    times = StepTimes(SPEED, points)
    assert times.step_s(2, 1, 15, 1) == pytest.approx(1.5)
    assert times.step_s(2, 1, 15, 3) == pytest.approx(1.5 + 2 * (1.5 - 0.3))
    assert times.step_s(2, 1, 40, 1) == pytest.approx(SpeedModel(*SPEED).step_time(2, 1, 40).step_s)
    assert StepTimes((), points).step_s(2, 2, 15, 1) == pytest.approx(1.5), (
        "the nearest number of nodes, if all else lacks"
    )
    assert StepTimes((), points).step_s(3, 1, 15, 1) == float("inf")


def test_larger_batches_are_worth_what_the_noise_says_and_nothing_more_unless_it_was_measured() -> None:
    sizes = np.array([32, 64, 128])
    assert gains(sizes, 32, ()).tolist() == [1.0, 1.0, 1.0]
    assert gains(sizes, 32, [NoisePoint(32, 1.0)]) == pytest.approx([1.0, 4 / 3, 1.6])
    assert gains(sizes, 32, [NoisePoint(32, 1e18)]) == pytest.approx([1.0, 2.0, 4.0])


def test_a_table_says_for_each_size_how_fast_and_with_which_batch() -> None:
    goodput = GoodputBook().goodputs([Question(Estimate(SPEED, noise=(NoisePoint(32, 4.0),)), ALLOWED, 8, 4)])[0]
    assert goodput.ranks_most == 8
    assert goodput.rate[0] == 0.0
    assert goodput.rate[4] > goodput.rate[1] > 0.0
    assert goodput.on(4, 1) == pytest.approx(goodput.rate[4])
    assert goodput.on(4, 4) < goodput.on(4, 1), "the network is slower than one machine"
    assert 32 <= goodput.batch(4, 1) <= 256


def test_tables_are_kept_for_equal_points_and_made_anew_for_others() -> None:
    book = GoodputBook()
    slow = tuple(SpeedPoint(ranks, 1, batch, 1.0) for ranks in range(1, 5) for batch in range(8, 65))
    fast = tuple(SpeedPoint(point.ranks, 1, point.local_batch, 0.5) for point in slow)
    rates = [
        book.goodputs([Question(Estimate(points=points), ALLOWED, 4, 4)])[0].rate[1] for points in (slow, fast, slow)
    ]
    assert rates == pytest.approx([1.0, 2.0, 1.0])


def test_tables_of_thousands_of_jobs_are_kept_from_plan_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StepTable] = []

    def is_made(table: StepTable) -> None:
        made.append(table)

    monkeypatch.setattr(StepTable, "__post_init__", is_made)
    monkeypatch.setattr(goodput, "Goodput", lambda table, noise: SimpleNamespace(noise=noise, own=None))
    jobs = [Estimate(points=(SpeedPoint(1, 1, 32, 0.1 + number / 1e5),)) for number in range(4_000)]
    book = GoodputBook()
    for _ in range(2):
        for job in jobs:
            book.begin()
            book.goodputs([Question(job, ALLOWED, 1, 1)])
    assert len(made) == len(jobs)


def test_tables_that_nobody_asks_for_any_more_are_forgotten() -> None:
    answers: WeakSet[Goodput] = WeakSet()
    book, jobs = GoodputBook(), 50
    for plan in range(40):
        book.begin()
        for job in range(jobs):
            changes = plan if job == 0 else 0  # it measures something new each time
            points = (SpeedPoint(1, 1, 32, 0.1 + job + changes / 100.0),)
            (found,) = book.goodputs([Question(Estimate(points=points), ALLOWED, 1, 1)])
            assert found
            answers.add(found)
    assert jobs <= len(answers) < jobs + 2 * goodput.ROUNDS_KEPT


def test_the_goodput_of_many_jobs_is_that_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "KEPT", 3)
    points = [tuple(SpeedPoint(ranks, 1, 32, seconds / ranks) for ranks in (1, 2)) for seconds in (0.1, 0.2, 0.4, 0.8)]
    jobs = [
        goodput.Question(Estimate(points=each, noise=(NoisePoint(32, noise),), is_partial=True), ALLOWED, 8, 4)
        for each in (*points, points[0])
        for noise in (1.0, 9.0)
    ]
    book = GoodputBook()
    for _ in range(2):
        for job, found in zip(jobs, book.goodputs(jobs), strict=True):
            assert list(found.rate) == list(GoodputBook().goodputs([job])[0].rate)


@pytest.mark.parametrize("is_fitted", [True, False])
@given(
    measured=st.dictionaries(
        st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(1, 40)),
        st.tuples(st.floats(1e-4, 10.0), st.floats(0.0, 1.0)),
        max_size=20,
    ),
    batches=st.tuples(st.integers(1, 300), st.integers(1, 6), st.integers(1, 40), st.integers(1, 3)),
    ranks_per_node=st.integers(1, 8),
)
def test_whole_tables_are_what_their_rows_are_one_by_one(is_fitted, measured, batches, ranks_per_node):
    """Measured, between, fitted, and batches that cannot be dealt; a step may be all synchronisation."""
    first, times, local_least, more = batches
    allowed = BatchRange(first, first * times, local_least, local_least * more)
    points = [SpeedPoint(a, b, c, step_s, part * step_s) for (a, b, c), (step_s, part) in measured.items()]
    model = SpeedModel(0.02, 0.001, 0.03, 0.004, 0.05, 0.006, 1.7) if is_fitted else ()
    table = StepTable(StepTimes(model, points), allowed, 12, ranks_per_node)
    assert table.packed[0].min() == float("inf")
    for ranks in range(1, 13):
        nodes, dealt = -(-ranks // ranks_per_node), [split(int(each), ranks, allowed) for each in table.batches]
        assert table.packed[ranks] == pytest.approx(table.times.row(ranks, nodes, dealt), rel=1e-9)


def test_of_too_many_new_jobs_some_are_left_for_the_plans_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "NEW_MOST", 4)
    questions = [Question(Estimate(points=(SpeedPoint(1, 1, 32, 0.1 + at),)), ALLOWED, 2, 1) for at in range(10)]
    book, known = GoodputBook(), []
    for _ in range(4):
        book.begin()
        answers = [*book.goodputs(questions[:6]), *book.goodputs(questions[6:])]
        known.append((sum(each is not None for each in answers), book.is_behind))
    assert known == [(4, True), (8, True), (10, False), (10, False)]


@given(noise=st.floats(0.01, 1e6), step_s=st.floats(0.05, 10.0), is_constant=st.booleans())
def test_a_job_that_measured_one_batch_tries_a_larger_one_at_little_cost_and_then_knows(noise, step_s, is_constant):
    """By its own reports: a step may be as long for any batch, or for each sample; the trial costs a fifth at most.

    Steps of some milliseconds are left out: two that are as long prove less there, and the job goes on by parts.
    """
    allowed = BatchRange(64, 4_096, 8, 4_096)

    def chosen(*batches: int) -> int:
        points = tuple(SpeedPoint(1, 1, each, step_s * (1.0 if is_constant else each / 64)) for each in batches)
        own = Estimate(points=points, noise=(NoisePoint(64, noise),), is_partial=True)
        (found,) = GoodputBook().goodputs([Question(own, allowed, 1, 4)])
        assert found
        return found.batch(1, 1)

    def progress(batch: int) -> float:
        gain = float(gains(np.array([batch]), 64, [NoisePoint(64, noise)])[0])
        return gain / (1.0 if is_constant else batch / 64)

    trial = chosen(64)
    assert trial > 64 or noise < 2.0
    assert progress(trial) >= 0.8 * progress(64)
    if trial > 64:
        assert progress(chosen(64, trial)) >= 0.95 * max(progress(each) for each in candidates(allowed, 24))

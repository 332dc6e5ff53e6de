"""Reports of training: what is taken, what is left out and how it is named, and that none does harm."""

import json
import random

import pytest

from swarm_agent.task import reports as module
from swarm_agent.task.reports import TaskReports
from swarm_agent.task.tasksocket import PER_SECOND_MOST, Declined
from swarmsched.estimate import Estimate, coarse
from swarmsched.fields import RANK_MOST
from swarmsched.ids import TaskKey, make_job_id
from swarmsched.models.progress import FIGURES
from swarmsched.wire.codec import encode_value
from tests.agent.supervision.testing import make_order

KEY = TaskKey(make_job_id(0.0, random.Random(1)), 1)
OTHER = (make_job_id(0.0, random.Random(2)), 1)


class Desk(TaskReports):
    """On a clock that the test moves; KEY is the one task that runs."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.told: list[tuple[TaskKey, Estimate]] = []
        self.told_batches: list[int] = []
        super().__init__(
            lambda key: make_order("true") if key == KEY else None,
            self.hear,
            lambda: 1.7e9,
            lambda: self.now_s,
        )

    def hear(self, key: TaskKey, estimate: Estimate, batch: int) -> None:
        self.told.append((key, estimate))
        self.told_batches.append(batch)

    async def tell(self, after_s: float = 1.0, **request) -> dict:
        self.now_s += after_s
        return await self.handle(KEY, request)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(module, "PENALTY_S", 0.0)
    return Desk()


def known(desk: TaskReports):
    return desk.tasks[KEY]


async def test_figures_are_kept_and_the_time_of_the_newest(desk) -> None:
    assert await desk.tell(step=1, loss=2.5, total_steps=11) == {"ok": True, "ignored": []}
    await desk.tell(step=3, loss=None)
    progress = known(desk).progress
    assert progress.figures == {"step": 3, "loss": 2.5, "total_steps": 11}
    assert (progress.step_s, progress.remaining.seconds, known(desk).reported_utc_s) == (0.5, 4.0, 1.7e9)
    assert desk.counters["taken"] == 2


BAD = [
    ("loss", float("nan"), "not_finite", "loss nan is not finite"),
    ("loss", float("-inf"), "not_finite", "loss -inf is not finite"),
    ("step", -1, "out_of_range", "step -1 is out of range"),
    ("samples", 10**400, "out_of_range", "samples a number of many digits is out of range"),
    ("loss", -1e300, "out_of_range", "loss -1e+300 is out of range"),
    ("step", float("nan"), "not_finite", "step nan is not finite"),
    ("global_batch", 0, "out_of_range", "global_batch 0 is no batch"),
    ("data_wait", 1.5, "out_of_range", "data_wait 1.5 is no part of its time"),
    ("global_batch", 1.5, "out_of_range", "global_batch 1.5 is no batch"),
    ("global_batch", 2**32, "out_of_range", "global_batch 4294967296 is no batch"),
    ("total_steps", 0, "out_of_range", "total_steps 0 is not above 0"),
    ("epoch", "3", "bad_type", "epoch '3' is not a number"),
    ("step", True, "bad_type", "step True is not a number"),
    ("grad_noise", [1], "bad_type", "grad_noise a list is not a number"),
    ("loss", "x" * 10_000, "bad_type", f"loss '{'x' * 40}'... is not a number"),
]


@pytest.mark.parametrize(("name", "value", "kind", "problem"), BAD, ids=lambda each: str(each)[:20])
async def test_a_figure_that_cannot_be_is_left_out_by_name_and_the_others_count(
    desk, name, value, kind, problem
) -> None:
    good = "samples" if name == "step" else "step"
    answer = await desk.tell(**{good: 5, name: value})
    assert (answer["ok"], [(each["field"], each["problem"]) for each in answer["ignored"]]) == (True, [(name, problem)])
    assert answer["ignored"][0]["remedy"]
    assert known(desk).progress.figures == {good: 5}
    assert (known(desk).oddities, desk.counters[kind]) == ({kind: 1}, 1)
    with pytest.raises(Declined) as refusal:
        await desk.tell(**{name: value})
    assert (refusal.value.code, refusal.value.problem) == ("bad_report", problem)


async def test_a_rank_that_trains_apart_is_known_by_its_figures_of_rounds_and_they_hide_no_others(desk) -> None:
    assert not desk.has_entered_outer(KEY)
    await desk.tell(rank=1, step=3, rounds=0, outer_version=0, round_wait=0.5)
    assert desk.has_entered_outer(KEY)
    assert known(desk).learners == {1: [0, 0, 0.5]}
    assert known(desk).progress.figures == {"step": 3}
    answer = await desk.tell(rank=1, rounds=1, outer_version=1, round_wait=1.5)
    assert [each["field"] for each in answer["ignored"]] == ["round_wait"]
    assert known(desk).learners == {1: [0, 0, 0.5]}


@pytest.mark.parametrize("rank", [-1, RANK_MOST + 1, 1.5, "0", True, None])
async def test_a_rank_that_cannot_be_is_refused(desk, rank) -> None:
    with pytest.raises(Declined, match="rank"):
        await desk.tell(rank=rank, step=1)


async def test_the_rank_of_a_late_worker_is_one(desk) -> None:
    await desk.tell(rank=RANK_MOST, step=1)
    assert known(desk).progress.figures == {"step": 1}


async def test_a_report_of_nothing_names_the_figures(desk) -> None:
    with pytest.raises(Declined, match="it has no figure") as refusal:
        await desk.tell(loss=None, stop=3)
    assert "total_epochs" in refusal.value.remedy


async def test_steps_that_fall_or_stand_are_counted_and_taken(desk) -> None:
    for step in (5, 5, 3, 4):
        await desk.tell(step=step)
    assert (known(desk).oddities, known(desk).problem) == ({"frozen": 1, "backward": 1}, "backward: step 5 -> 3")
    assert known(desk).progress.figures == {"step": 4}


async def test_too_many_in_a_second_are_refused_and_do_not_count(desk) -> None:
    for step in range(PER_SECOND_MOST):
        await desk.tell(0.0, step=step)
    with pytest.raises(Declined, match="more than 100 reports in a second"):
        await desk.tell(0.0, step=7_777)
    assert (known(desk).progress.figures["step"], known(desk).oddities) == (PER_SECOND_MOST - 1, {"too_many": 1})
    await desk.tell(1.0, step=7_778)
    assert known(desk).progress.figures["step"] == 7_778


async def test_a_moment_that_was_sent_counts_unless_it_cannot_be(desk) -> None:
    """The first is told late; the second from the future; the third from long ago, as a clock of another machine."""
    await desk.tell(step=0, time=1_000.5)
    await desk.tell(step=1, time=1_001.5)
    assert known(desk).progress.step_s == 1.0
    await desk.tell(step=2, time=9_999.0)
    await desk.tell(step=3, time=float("nan"))
    await desk.tell(step=4, time=3.0)
    assert known(desk).progress._newest_s == 1_005.0
    assert (known(desk).oddities["clock"], known(desk).problem.split(";")[0]) == (
        3,
        "clock: time 3.0 is not of the last 60 s",
    )


async def test_a_clock_that_runs_apart_and_figures_that_contradict_one_another_are_counted_and_told(desk) -> None:
    """A step a second; the script's clock runs at half speed."""
    for step in range(40):
        await desk.tell(step=step, time=1_000.0 + step / 2)
    assert known(desk).progress.step_s == 1.0
    assert known(desk).oddities["clock"] > 10
    assert known(desk).problem.startswith("clock: that of the script runs apart from this node's")
    await desk.tell(step=40, total_steps=30)
    assert known(desk).problem == "contradiction: step 40 is beyond total_steps 30"


async def test_a_task_that_is_over_is_told_so_and_forgotten(desk) -> None:
    with pytest.raises(Declined) as refusal:
        await desk.handle(OTHER, {"step": 1})
    assert refusal.value.code == "conflict"
    await desk.tell(step=1)
    desk.forget(KEY)
    assert desk.tasks == {}


async def test_a_task_that_reports_yields_an_estimate(desk) -> None:
    assert desk.estimate(KEY) is None
    for step in range(3):
        await desk.tell(step=step, samples=step * 32, total_steps=10)
    estimate = desk.estimate(KEY)
    assert [(point.ranks, point.nodes, point.local_batch, point.step_s) for point in estimate.points] == [
        (1, 1, 32, 1.0)
    ]
    assert (estimate.remaining, estimate.done) == (8.0, 2.0)
    assert desk.estimate(OTHER) is None


async def test_ranks_that_tell_their_batch_are_answered_with_the_one_to_go_on_with(desk) -> None:
    """It is told every five seconds although nothing else is new: the answer may have been lost."""
    answers = [await desk.tell(step=0, global_batch=64) for _ in range(11)]
    assert answers[-1] == {"ok": True, "ignored": []}
    assert desk.told_batches == [64, 64, 64]
    assert desk.told[-1][0] == KEY
    desk.set_batch(KEY, 256)
    assert (await desk.tell(step=1))["global_batch"] == 256


async def test_whatever_comes_as_json_is_answered(desk) -> None:
    """Drawn from a seed; nothing but an answer or a refusal may come of it."""
    rng = random.Random(11)
    odd = [None, True, -1, 0, 1, 2**53, 10**300, 0.5, -0.0, 1e308, "", "nan", [], {}, [[]], {"step": 1}]
    names = [*FIGURES, "rank", "time", "token", "what"]
    for _ in range(3_000):
        request = {name: rng.choice(odd) for name in rng.sample(names, rng.randrange(len(names)))}
        try:
            answer = await desk.tell(rng.random(), **json.loads(json.dumps(request)))
        except Declined:
            continue
        assert answer["ok"]
        progress = known(desk).progress
        assert progress.ratio is None or 0 <= progress.ratio <= 1
        assert progress.remaining is None or progress.remaining.seconds >= 0


async def test_what_was_taken_fits_into_what_other_agents_are_told(desk, monkeypatch) -> None:
    """Drawn from a seed, with the ends of every range: another agent must be able to read each estimate."""
    rng = random.Random(12)
    ends = [1e-300, 1e-9, 0.5, 1, 2, 3, 64, 1e3, 2**32 - 1, 2**32, 1e9, 1e15 - 1, 1e15, -1e15, 0, -1]
    told = set()
    for _ in range(300):
        desk.forget(KEY)
        desk.regroup(KEY, rng.choice((1, 2, 512)), rng.choice((1, 512)))
        goals = {name: rng.choice(ends) for name in FIGURES}
        grows = dict.fromkeys(("step", "samples", "epoch"), 0.0)
        for _ in range(12):
            grows = {name: value + abs(rng.choice(ends)) for name, value in grows.items()}
            request = {"loss": rng.random(), **goals, **grows}
            try:
                await desk.tell(rng.choice((0.001, 0.2, 1.0, 1e4)), **{n: request[n] for n in rng.sample(FIGURES, 7)})
            except Declined as refusal:
                assert refusal.code == "bad_report"  # noqa: PT017
            encode_value(Estimate, coarse(desk.estimate(KEY)))
            told.add(bool(desk.estimate(KEY).points))
    assert told == {False, True}
    monkeypatch.setattr(desk, "estimate", lambda key: Estimate(remaining=1e30))
    desk.now_s += 100.0
    with pytest.raises(Declined, match=r"other agents cannot be told of it: .*remaining"):
        await desk.tell(step=1)

"""What planners believe of a job by its card and its kind."""

import random
from typing import Any

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.card import card_of
from swarmsched.estimate import BatchRange, Estimate, NoisePoint, Resizable, SpeedPoint
from swarmsched.ids import NodeId
from swarmsched.models.kinds import believed, informed
from swarmsched.models.scaling import HOPEFUL, scaled
from swarmsched.resources import Demand, Share
from swarmsched.view import ClusterView, JobView, KindView
from swarmsched.wire.codec import encode_value
from tests.swarmsched.building import make_node, make_record
from tests.swarmsched.models.test_scaling import SIZES, drawn, measured, pool_of

POINTS = (SpeedPoint(1, 1, 32, 0.4), SpeedPoint(2, 1, 32, 0.5), SpeedPoint(4, 1, 32, 0.6))
KIND = KindView(
    "ada",
    "bert",
    encode_value(Estimate, Estimate(points=POINTS)),
    1_000.0,
    0.2,
    program="true",
)
RANGE = BatchRange(64, 512, 8, 64)
PRIOR = Estimate(is_prior=True)


def test_a_job_that_never_ran_is_taken_to_be_like_the_others_of_its_kind() -> None:
    known = believed(PRIOR, KIND)
    assert (known.points, known.is_partial, known.is_prior) == (POINTS, True, True)
    assert (known.remaining, known.remaining_error) == (1_000.0, 0.2)
    assert known.noise == ()


def test_its_own_reports_come_first() -> None:
    own = Estimate(points=(SpeedPoint(2, 1, 32, 0.55),), noise=(NoisePoint(128, 10.0),), remaining=70.0, done=200.0)
    known = believed(own, KIND)
    assert known.points == POINTS, "with which the planner has computed already"
    assert (known.remaining, known.remaining_error, known.is_prior) == (70.0, 0.0, False)
    assert known.noise == own.noise


def test_what_is_left_of_it_is_the_usual_length_less_what_it_has_done() -> None:
    own = Estimate(points=POINTS[:1], done=600.0)
    known = believed(own, KIND)
    assert (known.remaining, known.remaining_error) == (400.0, pytest.approx(0.5))
    assert believed(replace(own, done=1_200.0), KIND).remaining == 0.0, "nobody knows"


def test_one_whose_step_takes_another_time_is_of_its_kind_by_name_alone() -> None:
    own = Estimate(points=(SpeedPoint(1, 1, 32, 0.4), SpeedPoint(2, 1, 32, 0.9)), done=3.0)
    assert believed(own, KIND) is own


@pytest.mark.parametrize(
    ("point", "is_odd"),
    [
        (SpeedPoint(4, 1, 8, 0.95), True),
        (SpeedPoint(4, 1, 8, 0.5), False),
        (SpeedPoint(8, 1, 64, 0.1), True),
        (SpeedPoint(8, 2, 64, 20.0), False),
        (SpeedPoint(8, 2, 64, 60.0), True),
    ],
)
def test_what_it_has_measured_in_sizes_that_its_kind_does_not_know_belies_the_kind_too(
    point: SpeedPoint, is_odd: bool
) -> None:
    """Of two jobs that trained with other batches under its name a third one kept the times, whatever it measured."""
    own = Estimate(points=(point,), done=3.0)
    assert (believed(own, KIND) is own) == is_odd


def test_a_fit_of_its_own_is_not_replaced() -> None:
    own = Estimate((0.1, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0), points=POINTS[:1], done=3.0)
    known = believed(own, KIND)
    assert (known.speed, known.points, known.is_partial) == (own.speed, own.points, False)


def test_a_kind_of_which_little_is_known_takes_nothing_away() -> None:
    own = Estimate(points=POINTS[:1], noise=(NoisePoint(64, 3.0),), remaining=5.0)
    known = believed(own, KindView("ada", "bert"))
    assert known == own


def test_of_a_view_those_jobs_are_told_of_that_take_several_sizes() -> None:
    def of(number: int, name: str, elastic: Resizable | None) -> JobView:
        card = card_of(make_record("n1"))
        return JobView(replace(card, job_id=card.job_id[:-1] + str(number), user="ada", name=name, elastic=elastic))

    elastic = Resizable(1, 4, RANGE)
    jobs = (of(1, "bert", elastic), of(2, "bert", None), of(3, "resnet", elastic))
    view = informed(ClusterView(1, (), jobs, kinds=(KIND,)))
    first = view.jobs[0].card.estimate
    assert first is not None
    assert first.points == POINTS
    assert view.jobs[0].own == Estimate(is_prior=True)
    assert view.jobs[1:] == jobs[1:]
    assert informed(replace(view, kinds=())) == view


def test_a_job_is_known_by_its_kind_on_the_gpus_that_it_has_or_on_the_most_frequent_ones_that_suit_it() -> None:
    slow, fast = (replace(KIND, speed=encode_value(Estimate, Estimate(points=(each,))), gpu=gpu) for each, gpu in (
        (SpeedPoint(1, 1, 32, 0.4), "T4"), (SpeedPoint(1, 1, 32, 0.1), "A100"),
    ))  # fmt: skip
    nodes = (make_node("a", 4, 8, model="T4"), make_node("b", 4, model="A100"))

    def known(estimate: Estimate | None, **demand: Any) -> float:
        spec = JobSpec(("true",), name="bert", user="ada", demand=Demand(gpus=1, **demand), ranks_most=4)
        card = replace(card_of(make_record("n1", spec=spec), estimate=estimate), elastic=Resizable(1, 4, RANGE))
        (job,) = informed(ClusterView(1, nodes, (JobView(card),), kinds=(slow, fast))).jobs
        assert job.card.estimate is not None
        return job.card.estimate.points[0].step_s

    assert known(None) == 0.4
    assert known(None, gpu_type="a100") == 0.1
    assert known(Estimate(gpu="A100", done=3.0)) == 0.1


def test_how_a_job_scales_is_hoped_for_while_no_job_waits() -> None:
    rng = random.Random(3)
    pool = tuple(pool_of(rng, 12))
    own = Estimate(points=measured(drawn(rng), SIZES[:2], rng), is_partial=True)

    def speed(*waiting: JobView) -> tuple[float, ...]:
        card = replace(
            card_of(make_record("n1")), estimate=own, elastic=Resizable(1, 4, RANGE), shares=(Share(NodeId("a"), 2),)
        )
        job = informed(ClusterView(1, (), (JobView(card), *waiting), pool=pool)).jobs[0]
        assert job.own == own, "which chooses its batch"
        assert job.card.estimate is not None
        return job.card.estimate.speed

    assert speed() == scaled([own], pool, HOPEFUL)[0].speed
    assert speed(JobView(card_of(make_record("n1")))) == scaled([own], pool)[0].speed != speed()

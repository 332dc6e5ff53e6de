"""What stands in where a job has not measured how it scales: what kinds have in common, and nothing of their speed."""

import random
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from swarmsched.estimate import POOL_MOST, Estimate, SpeedPoint
from swarmsched.models.fit import fit_speed
from swarmsched.models.scaling import HOPEFUL, KINDS_LEAST, POINTS_MOST, prior_of, scaled
from swarmsched.models.speed import SpeedModel
from swarmsched.wire.codec import encode_value

SIZES = [(1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (16, 4)]


def drawn(rng: random.Random, network: float = 1.0) -> SpeedModel:
    """A kind whose network takes that part of a gradient's time, give or take a half; faster or slower by a hundred."""
    grad_s = 10 ** rng.uniform(-2.0, 0.0)
    inside, outside = (grad_s * part * rng.lognormvariate(0.0, 0.4) for part in (0.2, network))
    return SpeedModel(0.1 * grad_s, 0.9 * grad_s / 32, inside, 0.02 * inside, outside, 0.02 * outside, 1.5)


def measured(model: SpeedModel, sizes: Iterable[tuple[int, int]], rng: random.Random) -> tuple[SpeedPoint, ...]:
    found = []
    for size in sizes:
        time, factor = model.step_time(*size, 32), rng.lognormvariate(0.0, 0.05)
        found.append(SpeedPoint(*size, 32, time.step_s * factor, time.sync_s * factor))
    return tuple(found)


def packed(points: Iterable[SpeedPoint]) -> bytes:
    return encode_value(Estimate, Estimate(points=tuple(points)))


def pool_of(rng: random.Random, count: int, network: float = 1.0) -> list[bytes]:
    return [packed(measured(drawn(rng, network), SIZES, rng)) for _ in range(count)]


@pytest.mark.parametrize("network", [1.0, 3.0])
def test_what_was_not_measured_goes_as_other_kinds_do_or_as_the_better_ones(network: float) -> None:
    rng = random.Random(4)
    pool = pool_of(rng, 12, network)
    off: dict[str, list[float]] = {"likely": [], "hopeful": [], "alone": []}  # predicted over true: below 1 is hope
    for _ in range(20):
        truth = drawn(rng, network)
        own = Estimate(points=measured(truth, [(1, 1), (2, 1)], rng), is_partial=True)
        (likely,), (hopeful,) = scaled([own], pool), scaled([own], pool, HOPEFUL)
        assert likely.points == hopeful.points == own.points
        models = (SpeedModel(*likely.speed), SpeedModel(*hopeful.speed), fit_speed(own.points).model)
        for ratios, model in zip(off.values(), models, strict=True):
            ratios.append(model.step_time(8, 2, 32).step_s / truth.step_time(8, 2, 32).step_s)
    middle = {who: sorted(ratios)[10] for who, ratios in off.items()}
    assert middle["likely"] == pytest.approx(1.0, rel=0.35)
    assert 1.2 * middle["alone"] < middle["hopeful"] < middle["likely"]


def test_what_a_job_has_measured_itself_counts_more() -> None:
    rng = random.Random(5)
    pool, truth = pool_of(rng, 12, network=3.0), drawn(rng, network=0.1)
    own = Estimate(points=measured(truth, SIZES, rng), is_partial=True)
    (told,) = scaled([own], pool)
    for ranks, nodes in ((8, 2), (12, 3)):
        expected = fit_speed(own.points).model.step_time(ranks, nodes, 32).step_s
        assert SpeedModel(*told.speed).step_time(ranks, nodes, 32).step_s == pytest.approx(expected, rel=0.15)


def test_how_fast_others_are_says_nothing() -> None:
    kinds = [measured(drawn(random.Random(seed)), SIZES, random.Random(seed)) for seed in range(8)]
    slow = [[replace(each, step_s=1e3 * each.step_s, sync_s=1e3 * each.sync_s) for each in points] for points in kinds]
    fast, slower = prior_of([packed(points) for points in kinds]), prior_of([packed(points) for points in slow])
    assert fast is not None
    assert slower is not None
    assert slower.means[2:6] == pytest.approx(fast.means[2:6], abs=0.3)


def test_too_few_kinds_and_a_job_that_knows_more_change_nothing() -> None:
    rng = random.Random(6)
    own = Estimate(points=measured(drawn(rng), SIZES[:2], rng), is_partial=True)
    rich = Estimate(
        points=tuple([SpeedPoint(ranks, 1, 32, 1.0) for ranks in range(1, POINTS_MOST + 2)]), is_partial=True
    )
    fitted = replace(own, speed=tuple(drawn(rng)))
    assert scaled([own], pool_of(rng, KINDS_LEAST - 1))[0] is own
    asked = [rich, fitted, Estimate(), replace(own, is_partial=False)]
    assert all(a is b for a, b in zip(scaled(asked, pool_of(rng, 9)), asked, strict=True))


def test_whatever_cards_hold_a_step_takes_some_time() -> None:
    rng = random.Random(7)
    for _ in range(12):
        kinds = []
        for _ in range(rng.randrange(KINDS_LEAST, POOL_MOST // 2)):
            count = rng.randrange(1, 5)
            step_s = [10 ** rng.uniform(-18, 18) * rng.randrange(2) for _ in range(count)]
            where = [(rng.choice((1, 2, 65_535)), rng.choice((1, 2)), rng.choice((1, 2**32 - 1))) for _ in range(count)]
            kinds.append(
                tuple([SpeedPoint(*at, took, took * rng.random()) for at, took in zip(where, step_s, strict=True)])
            )
        asked = [Estimate(points=points, is_partial=True) for points in kinds]
        for told in scaled(asked, [packed(points) for points in kinds]):
            if told.speed:
                assert 0.0 < SpeedModel(*told.speed).step_time(7, 3, 32).step_s < 1e18

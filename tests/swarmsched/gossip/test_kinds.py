"""What jobs of one kind measured is a prior for the next one: speed, never a length."""

from typing import Any

from msgspec.structs import replace

from swarmsched.card import NAME_LENGTH, JobCard, card_of
from swarmsched.estimate import Estimate, NoisePoint, SpeedPoint
from swarmsched.gossip.kinds import KINDS_LIMIT, Kinds
from tests.swarmsched.building import make_record

MEASURED = Estimate(
    points=(SpeedPoint(2, 1, 32, 0.2),), noise=(NoisePoint(64, 9.0),), remaining=500.0, remaining_error=0.1, done=40.0
)


def card(name: str, user: str = "ada", estimate: Estimate | None = MEASURED) -> JobCard:
    return replace(card_of(make_record("n1"), estimate=estimate), name=name[:NAME_LENGTH], user=user)


def test_the_next_of_its_kind_begins_with_what_was_measured_and_not_with_what_was_left() -> None:
    kinds = Kinds()
    kinds.note(card("bert"))
    prior = kinds.prior("ada", "bert")
    assert prior is not None
    assert (prior.points, prior.noise, prior.is_prior) == (MEASURED.points, MEASURED.noise, True)
    assert (prior.remaining, prior.remaining_error, prior.done) == (0.0, 0.0, 0.0)
    assert kinds.prior("bob", "bert") is None


def test_names_too_long_for_cards_are_of_one_kind_by_what_the_card_tells() -> None:
    kinds = Kinds()
    kinds.note(card("x" * 40))
    assert kinds.prior("ada", "x" * 40) is not None


def test_what_is_no_measurement_of_a_named_kind_is_not_remembered() -> None:
    kinds = Kinds()
    nothing: tuple[Any, ...] = (None, Estimate(remaining=3.0), replace(MEASURED, is_prior=True))
    for estimate in nothing:
        kinds.note(card("bert", estimate=estimate))
    kinds.note(card(""))
    assert kinds.prior("ada", "bert") is None
    assert kinds.prior("ada", "") is None


def test_of_too_many_kinds_those_heard_of_longest_ago_are_forgotten() -> None:
    kinds = Kinds()
    for number in range(KINDS_LIMIT):
        kinds.note(card(f"job{number}"))
    kinds.note(card("job0"))
    kinds.note(card("another"))
    assert [kinds.prior("ada", name) is None for name in ("job0", "job1", "another")] == [False, True, False]

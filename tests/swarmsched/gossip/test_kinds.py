"""What jobs of one kind measured: a prior for the next one's card, and tables for planners."""

import random
from typing import Any

import pytest
from msgspec.structs import replace

from swarmsched.card import NAME_LENGTH, JobCard, card_of, tombstone
from swarmsched.estimate import POOL_MOST, Estimate, NoisePoint, SpeedPoint
from swarmsched.gossip.kinds import KINDS_KEPT, LENGTHS_MOST, POINTS_MOST, Kinds
from swarmsched.ids import JobId
from swarmsched.view import KindView
from swarmsched.wire.codec import decode_value
from tests.swarmsched.building import make_record

MEASURED = Estimate(
    points=(SpeedPoint(2, 1, 32, 0.2),), noise=(NoisePoint(64, 9.0),), remaining=500.0, remaining_error=0.1, done=40.0
)


def told(*points: SpeedPoint, done: float = 1.0, noise: float = 0.0, batch: int = 64) -> Estimate:
    return Estimate(points=points, done=done, noise=(NoisePoint(batch, noise),) if noise else ())


def seen(kinds: Kinds, gpu: str = "") -> KindView:
    view = kinds.view("ada", "bert", gpu)
    assert view is not None
    return view


def speeds(kinds: Kinds, gpu: str = "") -> dict[tuple[int, int, int], float]:
    points = decode_value(Estimate, seen(kinds, gpu).speed).points
    return {(each.ranks, each.nodes, each.local_batch): each.step_s for each in points}


def ended(done: float, number: int, *, has_completed: bool = True) -> JobCard:
    last = card("bert", estimate=Estimate(points=MEASURED.points, done=done), number=number)
    return tombstone(last, has_completed=has_completed)


def card(
    name: str, user: str = "ada", estimate: Estimate | None = MEASURED, number: int = 0, program: str = "train.py"
) -> JobCard:
    told = replace(card_of(make_record("n1"), estimate=estimate), name=name[:NAME_LENGTH], user=user, program=program)
    return replace(told, job_id=JobId(told.job_id[:-5] + f"{number:05}"))


def test_the_next_of_its_kind_begins_with_what_was_measured_and_not_with_what_was_left() -> None:
    kinds = Kinds()
    kinds.note(card("bert"))
    prior = kinds.prior("ada", "bert")
    assert prior is not None
    assert (prior.points, prior.noise, prior.is_prior) == (MEASURED.points, (), True)
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
    kinds.note(card("", program=""))
    assert kinds.prior("ada", "bert") is None
    assert kinds.prior("ada", "") is None


def test_of_too_many_kinds_those_heard_of_longest_ago_are_forgotten() -> None:
    kinds = Kinds()
    for number in range(KINDS_KEPT):
        kinds.note(card(f"job{number}", program=""))
    kinds.note(card("job0", program=""))
    kinds.note(card("another", program=""))
    assert [kinds.prior("ada", name) is None for name in ("job0", "job1", "another")] == [False, True, False]


def test_what_several_jobs_of_a_kind_measured_is_one_table() -> None:
    kinds = Kinds()
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 0.4), SpeedPoint(2, 1, 32, 0.5))))
    kinds.note(card("bert", estimate=told(SpeedPoint(4, 2, 32, 0.6))))
    assert speeds(kinds) == {(1, 1, 32): 0.4, (2, 1, 32): 0.5, (4, 2, 32): 0.6}
    assert kinds.view("bob", "bert") is kinds.view("ada", "") is kinds.view("ada", "resnet") is None


def points_of(kinds: Kinds, name: str = "", program: str = "", user: str = "ada") -> dict[tuple[int, int, int], float]:
    view = kinds.view(user, name, "", program)
    points = decode_value(Estimate, view.speed).points if view is not None else ()
    return {(each.ranks, each.nodes, each.local_batch): each.step_s for each in points}


def test_who_has_no_name_is_of_the_kind_of_its_program() -> None:
    kinds = Kinds()
    kinds.note(card("", estimate=told(SpeedPoint(1, 1, 32, 0.4)), program="train.py#be27@aaaaaaaa"))
    for program in ("train.py#be27@aaaaaaaa", "train.py#be27@bbbbbbbb", "train.py#9999@cccccccc", "train.py"):
        assert points_of(kinds, program=program) == {(1, 1, 32): 0.4}, program
    assert points_of(kinds, program="eval.py") == points_of(kinds, program="train.py", user="bob") == {}
    prior = kinds.prior("ada", "", "train.py#be27@bbbbbbbb")
    assert prior is not None
    assert prior.points == (SpeedPoint(1, 1, 32, 0.4),)


def test_what_a_narrow_kind_has_not_measured_a_wider_one_tells_where_they_agree() -> None:
    kinds = Kinds()
    old, new, other = "train.py#be27@aaaaaaaa", "train.py#be27@bbbbbbbb", "train.py#9999@bbbbbbbb"
    kinds.note(card("", estimate=told(SpeedPoint(1, 1, 32, 0.4), SpeedPoint(2, 1, 32, 0.5)), program=old))
    kinds.note(card("run-7", estimate=told(SpeedPoint(1, 1, 32, 0.42)), program=new, number=1))
    assert points_of(kinds, "run-7", new) == {(1, 1, 32): 0.42, (2, 1, 32): 0.5}, "each run has a name of its own"
    assert points_of(kinds, "", new) == {(1, 1, 32): 0.42, (2, 1, 32): 0.5}
    kinds.note(card("", estimate=told(SpeedPoint(1, 1, 32, 2.0)), program=other, number=2))
    assert points_of(kinds, "", other) == {(1, 1, 32): 2.0}, "another model of the same script"
    assert points_of(kinds, "", old)[2, 1, 32] == 0.5


def test_how_long_one_takes_is_told_by_the_narrowest_kind_of_which_one_has_completed() -> None:
    kinds = Kinds()
    for number, (name, length) in enumerate((("a", 100.0), ("b", 120.0), ("c", 140.0))):
        last = card(name, estimate=told(SpeedPoint(1, 1, 32, 0.4), done=length), number=number)
        kinds.note(last)
        kinds.note(tombstone(last, has_completed=True))
    kinds.note(card("d", estimate=told(SpeedPoint(1, 1, 32, 0.4), done=5.0), number=4))
    lengths = {name: view.length for name in "bd" if (view := kinds.view("ada", name, "", "train.py")) is not None}
    assert lengths == {"b": 120.0, "d": 120.0}


def test_one_name_for_everything_is_noticed_by_its_programs() -> None:
    kinds = Kinds()
    for number, (program, step_s) in enumerate((("a.py", 0.4), ("b.py", 0.44)) * 2):
        kinds.note(card("exp", estimate=told(SpeedPoint(1, 1, 32, step_s)), program=program, number=number))
    assert (points_of(kinds, "exp", "a.py"), points_of(kinds, "exp", "b.py")) == ({(1, 1, 32): 0.4}, {(1, 1, 32): 0.44})
    assert points_of(kinds, "exp", "c.py") == {}
    for number in range(LENGTHS_MOST):
        kinds.note(card("exp", estimate=told(SpeedPoint(2, 1, 32, 0.3)), program="b.py", number=100 + number))
    assert (1, 1, 32) in points_of(kinds, "exp", "new.py"), "long after the other program has gone"


def test_one_name_or_script_for_everything_is_noticed_by_its_step_times() -> None:
    """Three models in turn, by one name and of one script, which words tell apart."""
    kinds = Kinds()
    models = {"train.py#aaaa": 0.1, "train.py#bbbb": 0.9, "train.py#cccc": 4.0}
    for number in range(30):
        program = list(models)[number % 3]
        kinds.note(card("exp", estimate=told(SpeedPoint(1, 1, 32, models[program])), program=program, number=number))
    for program, step_s in models.items():
        assert points_of(kinds, "exp", program) == {(1, 1, 32): step_s}
    assert points_of(kinds, "exp", "train.py#dddd") == {}, "nothing is known of a fourth"


def test_a_script_that_was_made_faster_once_stays_one_kind() -> None:
    kinds = Kinds()
    for number in range(12):
        step_s = 0.9 if number < 6 else 0.3
        kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, step_s)), number=number))
    assert points_of(kinds, "bert", "train.py") == {(1, 1, 32): 0.3}


def test_one_users_kinds_push_out_nobody_elses() -> None:
    kinds = Kinds()
    kinds.note(card("bert", user="bob", program=""))
    for number in range(KINDS_KEPT + 50):
        kinds.note(card(f"job{number}", user="eve", program=""))
    assert len(kinds) == KINDS_KEPT
    assert points_of(kinds, "bert", user="bob")
    assert not points_of(kinds, "job50", user="eve")


def test_how_jobs_scale_is_told_of_the_last_kinds_and_of_no_user_more_than_of_others() -> None:
    kinds = Kinds()
    sizes = told(SpeedPoint(1, 1, 32, 0.4), SpeedPoint(2, 1, 32, 0.5))
    kinds.note(card("one-size", estimate=told(SpeedPoint(1, 1, 32, 0.4), SpeedPoint(1, 1, 64, 0.7))))
    assert kinds.pool == (), "it tells nothing of how it scales"
    for number, (name, program) in enumerate((("bert", "a.py"), ("bert", "a.py"), ("", "b.py"), ("", ""), ("", ""))):
        kinds.note(card(name, user="bob", estimate=sizes, program=program, number=number))
    assert len(kinds.pool) == 4, "one of each kind; whoever has none is one of his own"
    bobs = kinds.pool[0]
    for number in range(2 * POOL_MOST):
        other = told(SpeedPoint(1, 1, 32, 0.4), SpeedPoint(2, 1, 32, 0.601 + number / 1e3))
        kinds.note(card(f"job{number}", user="eve", estimate=other, number=number))
    assert len(kinds.pool) == POOL_MOST
    assert kinds.pool.count(bobs) == 4


def test_what_was_learned_comes_back_from_disk_and_nonsense_there_is_left_out() -> None:
    kinds = Kinds()
    kinds.note(card("bert", estimate=replace(told(SpeedPoint(1, 1, 32, 0.4), done=70.0), gpu="T4")))
    kinds.note(ended(70.0, 0))
    stored = {key: body for key, body in kinds.take_changes() if body}
    assert not kinds.has_changes
    again = Kinds()
    again.restore({**stored, "x": b"", "y": b"\x91", "z": next(iter(stored.values()))[:-3]})
    assert seen(again, "T4") == seen(kinds, "T4")
    assert len(again) == len(kinds) == len(stored) == 2
    assert not again.has_changes
    for number in (1, 2):
        again.note(card("bert", estimate=replace(told(SpeedPoint(1, 1, 32, 2.0)), gpu="T4"), number=number))
    assert speeds(again, "T4") == {(1, 1, 32): 2.0}, "who had told it is known as well"


def test_each_class_of_gpus_has_its_own_times_and_where_none_was_measured_those_heard_last_stand_in() -> None:
    kinds = Kinds()
    kinds.note(card("bert", estimate=replace(told(SpeedPoint(1, 1, 32, 0.4), SpeedPoint(2, 1, 32, 0.5)), gpu="T4")))
    kinds.note(card("bert", estimate=replace(told(SpeedPoint(1, 1, 32, 0.1)), gpu="A100"), number=1))
    assert speeds(kinds, "T4") == {(1, 1, 32): 0.4, (2, 1, 32): 0.5}
    assert speeds(kinds, "A100") == speeds(kinds, "V100") == {(1, 1, 32): 0.1}
    kinds.note(card("bert", estimate=replace(told(SpeedPoint(1, 1, 32, 0.3)), gpu="T4")))
    assert (speeds(kinds, "T4")[1, 1, 32], speeds(kinds, "A100")[1, 1, 32]) == (0.3, 0.1)
    prior = kinds.prior("ada", "bert")
    assert prior is not None
    assert prior.gpu == "T4"


def test_the_newest_time_of_a_step_counts_where_it_differs() -> None:
    kinds = Kinds()
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 0.40))))
    before = seen(kinds).speed
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 0.405))))
    assert seen(kinds).speed == before, "what a planner has computed of it serves again"
    kinds.note(card("bert", estimate=told(SpeedPoint(2, 1, 32, 0.5), SpeedPoint(1, 1, 32, 0.43))))
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 0.35), SpeedPoint(1, 1, 64, 0.8))))
    assert speeds(kinds) == {(1, 1, 32): 0.43, (1, 1, 64): 0.8, (2, 1, 32): 0.5}, "the card's last point is its newest"


def test_another_training_by_the_same_name_begins_a_new_table_once_two_of_it_agree() -> None:
    kinds = Kinds()
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 0.4), SpeedPoint(2, 1, 32, 0.5), done=30.0)))
    kinds.note(ended(70.0, 0))
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 0.9)), number=1))
    assert speeds(kinds) == {(1, 1, 32): 0.4, (2, 1, 32): 0.5}, "one alone may be anything"
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 2.5)), number=2))
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 0.95)), number=1))
    assert speeds(kinds)[1, 1, 32] == 0.4, "nor do two that say something else"
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 1.0), SpeedPoint(4, 1, 32, 1.1), done=2.0), number=3))
    assert speeds(kinds) == {(1, 1, 32): 1.0, (4, 1, 32): 1.1}
    assert seen(kinds).length == 2.0, "as long again as the second of them has trained"


def test_how_long_one_takes_is_told_by_those_that_have_completed() -> None:
    kinds = Kinds()
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 0.4), done=30.0)))
    assert (seen(kinds).length, seen(kinds).length_error) == (60.0, 1.0), "none has: it may take as long again"
    kinds.note(card("bert", estimate=told(SpeedPoint(1, 1, 32, 0.4), done=40.0), number=1))
    assert seen(kinds).length == 60.0, "none tells alone"
    kinds.note(ended(80.0, 1))
    kinds.note(ended(120.0, 2))
    assert seen(kinds).length == 80.0
    kinds.note(ended(5.0, 9, has_completed=False))
    kinds.note(ended(90.0, 3))
    assert (seen(kinds).length, seen(kinds).length_error) == (90.0, pytest.approx(1.4826 / 9.0))
    kinds.note(ended(90.0, 3))
    assert seen(kinds).length == 90.0, "a job completes once"


def test_a_kind_of_which_nothing_was_measured_has_no_length_either() -> None:
    kinds = Kinds()
    kinds.note(ended(80.0, 1))
    assert kinds.view("ada", "bert") is None


def test_tables_have_bounds() -> None:
    kinds = Kinds()
    for number in range(1, 400):
        kinds.note(card("bert", estimate=told(SpeedPoint(number, 1, 32, 0.4)), number=number))
        kinds.note(ended(7.0 * number, number))
    assert list(speeds(kinds)) == [(ranks, 1, 32) for ranks in range(400 - POINTS_MOST, 400)]
    assert seen(kinds).length == 7.0 * (399 - LENGTHS_MOST // 2)


def test_one_job_takes_nothing_from_what_others_have_told_whatever_it_reports() -> None:
    """Drawn from a seed: an honest kind, then one stranger by its name, and the next honest job in between."""
    rng = random.Random(5)
    for _ in range(40):
        kinds, honest = Kinds(), {}
        for number in range(3):
            points = [SpeedPoint(ranks, 1, 64 // ranks, 1.0 / ranks**0.8) for ranks in (1, 2, 4)]
            kinds.note(card("bert", estimate=told(*points, done=900.0 + number), number=number))
            kinds.note(ended(1_000.0 + number, number))
        honest, length = speeds(kinds), seen(kinds).length
        for _ in range(rng.choice((1, 30, 400))):
            ranks, batch = rng.choice((1, 2, 4, 7, 512)), rng.choice((1, 16, 32, 64, rng.randrange(1, 2**32)))
            lie = SpeedPoint(ranks, 1, batch, 10.0 ** rng.uniform(-12, 12))
            lies = told(lie, done=10.0 ** rng.uniform(0, 15), noise=10.0 ** rng.uniform(-9, 15), batch=batch)
            kinds.note(card("bert", estimate=lies, number=666))
        kinds.note(ended(10.0 ** rng.uniform(0, 15), 666))
        told_now = speeds(kinds)
        assert {key: value for key, value in told_now.items() if key in honest} == honest
        far = {key: value for key, value in told_now.items() if key[2] <= 64 and not 1e-4 < value < 1e3}
        assert not far
        assert abs(seen(kinds).length - length) <= 2.0
        assert seen(kinds).length_error < 0.1

"""The model of a job's speed as people see it: what was measured stays as it is, the rest is the fit's."""

from typing import Any

import pytest

from swarmsched.estimate import BatchRange, Estimate, SpeedPoint, SpeedQuestion
from swarmsched.models.table import tabulate

ALONE, PAIR = SpeedPoint(1, 1, 64, 0.4), SpeedPoint(2, 1, 32, 0.22)


def question(*points: SpeedPoint, least: int = 1, most: int = 4, **more: Any) -> SpeedQuestion:
    return SpeedQuestion(Estimate(points=points, is_partial=True), least, most, 2, **more)


def test_what_was_measured_is_told_as_it_is_and_the_rest_by_the_fit() -> None:
    table = tabulate(question(ALONE, PAIR))
    assert table.global_batch == 64
    assert [(row.ranks, row.nodes, row.is_measured) for row in table.rows] == [
        (1, 1, True),
        (2, 1, True),
        (3, 2, False),
        (4, 2, False),
    ]
    assert [row.step_s for row in table.rows[:2]] == [0.4, 0.22]
    assert [row.samples_per_s for row in table.rows[:2]] == pytest.approx([160.0, 64 / 0.22])
    assert 0.1 <= table.rows[3].step_s < table.rows[2].step_s < 0.22, "faster, but not by more than its GPUs"


def test_of_several_measurements_of_one_size_that_of_its_present_hosts_counts() -> None:
    spread = SpeedPoint(2, 2, 32, 0.3)
    rows = tabulate(question(ALONE, PAIR, spread, held=2, held_nodes=2)).rows
    assert (rows[1].nodes, rows[1].step_s) == (2, 0.3)
    rows = tabulate(question(ALONE, PAIR, spread, held=1, held_nodes=1)).rows
    assert (rows[1].nodes, rows[1].step_s) == (1, 0.22)


def test_speeds_are_told_with_the_batch_that_it_has_now() -> None:
    declared: dict[str, Any] = {"batches": BatchRange(64, 256, 1, 64), "global_batch": 128}
    table = tabulate(question(ALONE, PAIR, SpeedPoint(2, 1, 64, 0.4), **declared))
    assert table.global_batch == 128
    assert [row.is_measured for row in table.rows] == [False, True, False, False]
    assert table.rows[0].step_s == pytest.approx(0.8), "two micro-steps of what was measured"
    assert table.rows[1].samples_per_s == pytest.approx(128 / 0.4)


def test_where_ranks_do_not_divide_the_batch_all_of_it_counts() -> None:
    third = SpeedPoint(3, 1, 21, 0.15)
    table = tabulate(question(ALONE, third))
    assert [row.samples_per_s for row in table.rows if row.ranks == 3] == pytest.approx([64 / 0.15])


def test_of_many_sizes_the_ends_powers_of_two_and_what_was_measured_are_told() -> None:
    rows = tabulate(question(ALONE, SpeedPoint(5, 3, 13, 0.1), least=1, most=40, held=7)).rows
    assert [row.ranks for row in rows] == [1, 2, 4, 5, 7, 8, 16, 32, 40]


def test_of_very_many_sizes_no_more_are_told_than_a_table_holds() -> None:
    points = [SpeedPoint(ranks, 1, 4_096 // ranks, 1.0 / ranks) for ranks in range(1, 200)]
    rows = tabulate(question(*points, least=1, most=512, held=123, batches=BatchRange(4_096, 4_096, 1, 4_096))).rows
    assert len(rows) == 64
    assert {1, 123, 256, 512} <= {row.ranks for row in rows}


def test_without_a_measurement_there_is_nothing_to_tell() -> None:
    assert tabulate(question()).rows == ()

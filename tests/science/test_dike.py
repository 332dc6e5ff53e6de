"""The table of Dike's choice: what was measured is not measured again, and figures follow from it."""

from pathlib import Path
from typing import Any

import pytest

from swarmsched.ids import NodeId
from swarmsched.models.hosts import MBIT, Offer, Tasks, throughput
from tests.science import dike
from tests.science.__main__ import Science, UsageProblem, _with_dike
from tests.science.dike import CORE_FLOPS, MEMORY_BYTES, QUICK, Book, Layout, Plan
from tests.testbed.netns import why_not

WORK = "local_batch=32,sample_flops=4e7,parameter_bytes=4e5,moved_bytes={moved}"
TRAINER = dike.ROOT / ".venv-train/bin/python"


def speed(work: Any, layout: Layout, plan: Plan, slower: float = 1.0) -> float:
    """By the model, where operations take so many times as long as told."""
    kinds = [plan.fast] * layout[0] + [plan.slow] * layout[1]
    hosts = [
        Offer(
            NodeId(f"{at}"),
            1,
            2,
            MEMORY_BYTES,
            kind.cores * CORE_FLOPS / slower,
            network_bytes_per_s=kind.mbit_s * MBIT,
        )
        for at, kind in enumerate(kinds)
    ]
    return throughput(work, [(host, Tasks(1, 0)) for host in hosts])


def written(path: Path, plan: Plan, slower: float) -> Book:
    book = Book(path, plan, Path("/none"))
    for model, moved in zip(plan.models, ("1e4", "4e5", "1e7", "1e8"), strict=True):
        book._put("work", model, WORK.format(moved=moved))
        for layout in plan.layouts:
            step_s = sum(layout) * 32 / speed(book.work(model), layout, plan, slower)
            for late in (1.5, 1.0):
                book._put("step", model, *map(str, layout), str(step_s * late))
    return book


@pytest.mark.parametrize("slower", [1.0, 0.2, 20.0])
def test_first_steps_correct_the_operations_and_the_best_of_all_layouts_is_found(tmp_path: Path, slower: float) -> None:
    plan = Plan()
    written(tmp_path / "dike.csv", plan, slower)
    rows = dike.table(tmp_path / "dike.csv", Path("/none")).splitlines()[2:6]
    cells = [[each.strip() for each in row.split("|")] for row in rows]
    assert [row[1].split(",")[0] for row in cells] == list(plan.models)
    untrained, then = ([float(row[at].split()[0]) for row in cells] for at in (3, 4))
    assert min(then) >= 0.95, cells
    assert min(untrained) >= (0.95 if slower == 1.0 else 0.3), cells
    assert slower == 1.0 or min(untrained) < 0.95, "else there was nothing to correct"


def test_who_cannot_measure_leaves_the_table_as_it_is_unless_it_is_wanted_by_name(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(dike, "why_not", lambda: "needs root")
    plan = Science("abc", tmp_path, tmp_path, 1)
    assert _with_dike(plan, "page") == "page"
    assert "table dike stays as it is: needs root" in capsys.readouterr().out
    with pytest.raises(UsageProblem, match="needs root"):
        _with_dike(Science("abc", tmp_path, tmp_path, 1, tables=("dike",)), "page")


@pytest.mark.acceptance
@pytest.mark.root
def test_real_trainings_on_two_hosts_are_measured(tmp_path: Path) -> None:
    if why_not() or dike.why_not() or not TRAINER.exists():
        pytest.skip(why_not() or dike.why_not() or f"{TRAINER} is not there")
    told = dike.table(tmp_path / "dike.csv", TRAINER, is_quick=True)
    assert [line.split(",")[0] for line in told.splitlines()[2:4]] == [f"| {model}" for model in QUICK.models]
    book = Book(tmp_path / "dike.csv", QUICK, TRAINER)
    assert book.speed("perceptron", (1, 0)) > 1.5 * book.speed("perceptron", (1, 1)), "it moves much over a slow link"

"""Profiles are read strictly from their three tables, and found in a folder by the names of its files."""

import pytest

from swarmsched.errors import ConfigError
from swarmsched.replay.measurements import TableSource, folder_profiles, profiles
from swarmsched.replay.profiles import EpochStatistics, Profile
from tests.swarmsched.replay.testing import made_up

TABLES = {
    "throughput": [
        "model,placement,num_nodes,num_gpus,local_bsz,step_time_s,sync_time_s",
        "toy,1,1,1,8,0.1,0.0",
    ],
    "validation": [
        "model,batch_size,epoch,progress,grad_sqr,grad_var",
        "toy,8,1,10,1,2",
        "toy,16,1,10,1,3",
    ],
    "models": [
        "model,init_batch_size,max_batch_size,min_local_bsz,max_local_bsz,epochs",
        "toy,8,16,4,8,1",
    ],
}


def read(table: str = "", *lines: str) -> dict[str, Profile]:
    """With these lines in place of one table."""
    texts = {**TABLES, table: list(lines)}
    return profiles(*[TableSource(f"{name}.csv", texts[name]) for name in TABLES])


def test_profiles_are_put_together_from_their_three_tables() -> None:
    profile = read()["toy"]
    assert profile.total_progress == 10.0
    assert profile.step_time((1,), 8).step_s == 0.1
    assert profile.gain(16, 0) == pytest.approx((3 + 1) / (3 / 2 + 1))


@pytest.mark.parametrize(
    ("table", "lines", "told"),
    [
        ("throughput", TABLES["throughput"][:1], "throughput.csv: has no row of model 'toy'"),
        ("validation", TABLES["validation"][:2], "validation.csv: has too little of model 'toy'"),
        ("validation", ["model,epoch", "toy,1"], "validation.csv: has no column 'batch_size'"),
        ("models", [TABLES["models"][0], "toy,8,16,4,8,2"], "validation.csv: toy at batch 8 has 1 epochs"),
    ],
)
def test_profiles_that_lack_something_say_what(table: str, lines: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(table, *lines)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("table", "row", "told"),
    [
        ("throughput", ",1,1,1,8,0.1,0", "model: is empty"),
        ("throughput", "toy,x,1,1,8,0.1,0", "placement: 'x' cannot be used"),
        ("throughput", "toy,nan,1,1,8,0.1,0", "placement: 'nan' cannot be used"),
        ("throughput", "toy,0,1,1,8,0.1,0", "placement: '0' are 0 GPUs"),
        ("throughput", "toy,22,2,2,8,0.1,0", "placement: '22' are 4 GPUs on 2 nodes"),
        ("throughput", "toy,1,1.5,1,8,0.1,0", "num_nodes: '1.5' is not whole"),
        ("throughput", "toy,,2,1,8,0.1,0", "num_nodes: 2 are more than the 1 GPUs"),
        ("throughput", "toy,1,1,1e308,8,0.1,0", "num_gpus: '1e308' cannot be used"),
        ("throughput", "toy,1,1,1,inf,0.1,0", "local_bsz: 'inf' cannot be used"),
        ("throughput", "toy,1,1,1,8,0,0", "step_time_s: '0' cannot be used"),
        ("throughput", "toy,1,1,1,8,0.1,-1", "sync_time_s: '-1' cannot be used"),
        ("throughput", "toy,1,1,1,8,0.1,0.2", "sync_time_s: '0.2' is longer than the step of '0.1'"),
        ("validation", "toy,nan,1,10,1,2", "batch_size: 'nan' cannot be used"),
        ("validation", "toy,,1,10,1,2", "batch_size: is empty"),
        ("validation", "toy,8,2,10,1,2", "epoch: 2 follows 0 rows of model 'toy'"),
        ("validation", "toy,8,1,0,1,2", "progress: '0' is no more than before"),
        ("validation", "toy,8,1,1e308,1,2", "progress: '1e308' cannot be used"),
        ("validation", "toy,8,1,10,0,0", "grad_var: '0' beside a grad_sqr of 0"),
        ("validation", "toy,8,1,10,0,5e-324", "grad_var: '5e-324' beside a grad_sqr of 0"),
        ("validation", "toy,8,1,10,-1,2", "grad_sqr: '-1' cannot be used"),
        ("models", "toy,8,1e308,4,8,1", "max_batch_size: '1e308' cannot be used"),
        ("models", "toy,8,4,4,8,1", "max_batch_size: 4 is less than init_batch_size 8"),
        ("models", "toy,8,16,8,4,1", "max_local_bsz: 4 is less than min_local_bsz 8"),
        ("models", "toy,8,16,16,16,1", "min_local_bsz: 16 is more than init_batch_size 8"),
    ],
)
def test_a_cell_that_cannot_be_used_is_named_by_file_row_and_column(table: str, row: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(table, TABLES[table][0], row)
    assert str(refused.value).startswith(f"{table}.csv, row 2, {told}")
    assert refused.value.remedy


def test_the_largest_batch_is_worth_what_was_measured_of_it_however_far_the_others_are_from_that() -> None:
    toy = made_up()
    statistics = {32: [EpochStatistics(1.0, 1e30, 1e30)], 256: [EpochStatistics(1.0, 1.0, 1.0)]}
    assert Profile("toy", toy.limits, toy.measured, statistics).gain(256, 0) == 2.0 / (1.0 / 8.0 + 1.0)


def test_a_model_is_described_once() -> None:
    with pytest.raises(ConfigError, match=r"models\.csv, row 3, model: 'toy' is there twice"):
        read("models", *TABLES["models"], TABLES["models"][1])


def test_a_size_that_nobody_has_measured_takes_what_a_fit_has_between_it_and_the_nearest_one() -> None:
    """10 ms a step and 1 ms a sample, and 10 ms to synchronise, on up to 16 GPUs in nodes of four."""
    toy = made_up()
    for shape, batch in (((16, 16), 64), ((4,) * 8, 32), ((4, 4), 200)):
        assert not toy.knows(shape, batch)
        guessed = toy.step_time(shape, batch)
        assert guessed.step_s == pytest.approx(0.02 + 0.001 * batch, rel=0.1)
        assert 0.0 < guessed.sync_s < guessed.step_s


def test_of_two_classes_a_guess_is_that_of_the_slower() -> None:
    toy = made_up(speeds={"old": 1.0, "new": 2.0})
    old, new, both = (toy.on(gpus).step_time((16, 16), 64).step_s for gpus in (["old"], ["new"], ["old", "new"]))
    assert both == old == pytest.approx(2 * new, rel=0.01)


def test_tables_of_a_folder_belong_together_where_they_begin_alike() -> None:
    files = {f"a_{name}.csv": lines for name, lines in TABLES.items()} | {"b_throughput.csv": [], "notes.txt": []}
    assert [*folder_profiles("folder", files, files.__getitem__)] == ["toy"]
    bad = files | {"a_models.csv": TABLES["models"][:1] * 2}
    with pytest.raises(ConfigError, match=r"^folder/a_models\.csv, row 2, init_batch_size: "):
        folder_profiles("folder", bad, bad.__getitem__)
    two = files | {"b_models.csv": []}
    with pytest.raises(ConfigError, match=r"folder: has 2 files \*throughput\.csv that have a \*models\.csv"):
        folder_profiles("folder", two, two.__getitem__)

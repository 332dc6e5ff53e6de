"""Tables are read strictly: what is wrong is named by file, row, column and value."""

import pytest

from swarmsched.errors import ConfigError
from swarmsched.replay.table import Row, number, rows, select

NEEDED = ("job_id", "gpus")


def read(*lines: str) -> list[Row]:
    return rows("jobs.csv", lines, NEEDED)


def test_cells_are_found_by_column_without_blanks_and_rows_are_called_by_their_line() -> None:
    first, second = read("job_id, gpus", "", " a ,1", '"b, too",2')
    assert (first, first.number) == ({"job_id": "a", "gpus": "1"}, 3)
    assert (second["job_id"], second.place) == ("b, too", "jobs.csv, row 4")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((), "jobs.csv: has no column 'job_id'"),
        (("job_id,start", "a,1"), "jobs.csv: has no column 'gpus'"),
        (("job_id;gpus", "a;1"), "jobs.csv: has no column 'job_id'"),
        (("job_id,gpus,gpus", "a,1,2"), "jobs.csv, row 1, column 3: there is a second column 'gpus'"),
        (("job_id,gpus,\x1b[31m", "a,1,2"), "jobs.csv, row 1, column 3: '\\x1b[31m' is no name"),
        (("job_id,gpus", "a,1,2"), "jobs.csv, row 2: has 3 cells for 2 columns: 'a,1,2'"),
        (("job_id,gpus", "a,1", "b"), "jobs.csv, row 3: has 1 cells for 2 columns: 'b'"),
        (("job_id,gpus", '"a,1'), "jobs.csv, row 2: is no CSV: unexpected end of data"),
        (("job_id,gpus", "a" * 200_000 + ",1"), "jobs.csv, row 2: is no CSV: field larger than field limit"),
        (("job_id,gpus", "a,1", "b\udce9,1"), "jobs.csv, row 3, column 1: b'b\\xe9' is not UTF-8"),
    ],
)
def test_a_table_that_is_none_is_refused_with_the_place(lines: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(*lines)
    assert str(refused.value).startswith(told)
    assert refused.value.remedy


def test_columns_without_a_name_may_be_there_more_than_once() -> None:
    assert [row["job_id"] for row in read(",job_id,gpus,", "0,a,1,", "1,b,1,")] == ["a", "b"]


@pytest.mark.parametrize(
    "cell", ["", "nan", "inf", "-1", "x", "1_0", "1e400", "1e308", "\u0663", "0x10", "1 0", "9" * 30, "1.5"]
)
def test_a_cell_that_holds_no_number_in_its_bounds_is_named(cell: str) -> None:
    (row,) = read("job_id,gpus", f"a,{cell}")
    with pytest.raises(ConfigError, match=r"^jobs\.csv, row 2, gpus: ") as refused:
        row.count("gpus")
    assert not cell or repr(cell) in str(refused.value)
    assert refused.value.remedy.startswith("a whole number")


@pytest.mark.parametrize("cell", ["100000001", "1e9", "-0.5"])
def test_times_are_those_that_a_replay_comes_to(cell: str) -> None:
    (row,) = read("job_id,gpus", f"a,{cell}")
    with pytest.raises(ConfigError) as refused:
        row.seconds("gpus")
    assert refused.value.remedy == "seconds from 0 to 100,000,000"


def test_names_are_not_empty_and_do_not_steer_a_terminal() -> None:
    (row,) = read("job_id,gpus", "a\x1b[31m,")
    with pytest.raises(ConfigError, match=r"row 2, job_id: 'a\\x1b"):
        row.name("job_id")
    with pytest.raises(ConfigError, match="row 2, gpus: is empty"):
        row.name("gpus")


@pytest.mark.parametrize(("text", "value"), [("10", 10.0), ("+1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("2E3", 2_000.0)])
def test_numbers_are_decimal(text: str, value: float) -> None:
    assert number(text) == value


def test_rows_are_selected_by_their_values_numbers_as_numbers() -> None:
    table = read("job_id,gpus", "a,1", "b,2")
    (chosen,) = select(table, {"gpus": "2.0"})
    assert (chosen["job_id"], chosen.number) == ("b", 3)
    with pytest.raises(ConfigError, match=r"no row of jobs\.csv has gpus=3"):
        select(table, {"gpus": "3"})
    with pytest.raises(ConfigError, match="has no column 'ranks'"):
        select(table, {"ranks": "3"})

"""Tables from CSV text, read strictly: what cannot be used is named by file, row, column and value.

A row is called by the number of the line on which it begins, as editors and spreadsheets show it.
"""

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from swarmsched.errors import ConfigError

COUNT_MOST = 10**9
AMOUNT_MOST = 1e12
SECONDS_MOST = 1e8
"""Some three years: there replays give up."""
TEXT_MOST = 255
"""Characters of a name: all of it is told to people."""
SHOWN = 60
"""Characters of a cell in an error."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_FOREIGN = re.compile("[\ud800-\udfff]")  # what was not UTF-8, where it was read with `surrogateescape`


class Row(dict[str, str]):
    """Cells by column, without the blanks around them."""

    def __init__(self, file: str, number: int, cells: Mapping[str, str]) -> None:
        super().__init__(cells)
        self.file, self.number = file, number

    @property
    def place(self) -> str:
        """What errors call it."""
        return f"{self.file}, row {self.number}"

    def error(self, column: str, problem: str, remedy: str) -> ConfigError:
        """What is wrong with a cell."""
        return ConfigError(f"{self.place}, {column}", problem, remedy)

    def text(self, column: str) -> str:
        """A cell that may be empty; ConfigError where it holds what cannot be shown."""
        cell = self.get(column, "")
        if not cell.isprintable():
            raise self.error(
                column, f"{shown(cell)} cannot be used", "letters, digits and signs, no control characters"
            )
        if len(cell) > TEXT_MOST:
            raise self.error(column, f"{shown(cell)} has {len(cell):,} characters", f"at most {TEXT_MOST}")
        return cell

    def name(self, column: str) -> str:
        """The same of a cell that must not be empty."""
        cell = self.text(column)
        if not cell:
            raise self.error(column, "is empty", "a name")
        return cell

    def amount(self, column: str, least: float = 0.0, most: float = AMOUNT_MOST, what: str = "a number") -> float:
        """A cell that holds a number in these bounds."""
        cell = self.get(column, "")
        remedy = f"{what} from {least:,.15g} to {most:,.15g}"
        if not cell:
            raise self.error(column, "is empty", remedy)
        try:
            value = number(cell)
        except ValueError:
            raise self.error(column, f"{shown(cell)} cannot be used", remedy) from None
        if not least <= value <= most:
            raise self.error(column, f"{shown(cell)} cannot be used", remedy)
        return value

    def seconds(self, column: str, least: float = 0.0) -> float:
        """A cell that holds a time which a replay can come to."""
        return self.amount(column, least, SECONDS_MOST, "seconds")

    def count(self, column: str, least: int = 0, most: int = COUNT_MOST) -> int:
        """A cell that holds a whole number in these bounds."""
        value = self.amount(column, least, most, "a whole number")
        if value != int(value):
            raise self.error(column, f"{shown(self[column])} is not whole", "a whole number")
        return int(value)


def number(text: str) -> float:
    """The number of decimal digits, a point and an exponent that people mean; ValueError for all else."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is no number")
    return float(text)


def shown(cell: str) -> str:
    """A cell as errors show it: in quotes, in one line and short."""
    text = cell if len(cell) <= SHOWN else cell[: SHOWN - 3] + "..."
    return repr(text.encode("utf-8", "surrogateescape")) if _FOREIGN.search(text) else repr(text)


def rows(
    name: str,
    lines: Iterable[str],
    needed: Collection[str],
    skipped: list[ConfigError] | None = None,
    header: Sequence[str] = (),
) -> list[Row]:
    """The rows of a table; ConfigError names the file, the column that is missing and those that are there.

    With `skipped` a row of another length than the header goes there instead; `header`: that of a table without one.
    """
    records = _records(name, lines)
    columns = list(header) or next(records, (1, []))[1]
    _check_columns(name, columns, needed)
    found = []
    for line, cells in records:
        if len(cells) != len(columns):
            problem = f"has {len(cells)} cells for {len(columns)} columns: {shown(','.join(cells))}"
            error = ConfigError(f"{name}, row {line}", problem, f"one cell for each of {_listed(columns)}")
            if skipped is None:
                raise error
            skipped.append(error)
            continue
        found.append(Row(name, line, dict(zip(columns, cells, strict=True))))
    return found


def _records(name: str, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """All rows that are not blank, each with the number of its first line."""
    reader = csv.reader(lines, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            remedy = "commas between short cells, and a cell with commas in a pair of quotes"
            raise ConfigError(f"{name}, row {line}", f"is no CSV: {error}", remedy) from error
        if cells is None:
            return
        if foreign := next((each for each in enumerate(cells, start=1) if _FOREIGN.search(each[1])), None):
            column, cell = foreign
            raise ConfigError(f"{name}, row {line}, column {column}", f"{shown(cell)} is not UTF-8", "save it as UTF-8")
        if cells:
            yield line, [cell.strip() for cell in cells]


def _check_columns(name: str, columns: Sequence[str], needed: Collection[str]) -> None:
    for at, column in enumerate(columns, start=1):
        if not column.isprintable():
            remedy = "a header of printable names, in a file of text"
            raise ConfigError(f"{name}, row 1, column {at}", f"{shown(column)} is no name", remedy)
        if column and column in columns[: at - 1]:
            raise ConfigError(f"{name}, row 1, column {at}", f"there is a second column {column!r}", "leave one out")
    for column in needed:
        if column not in columns:
            remedy = f"columns needed: {', '.join(needed)}, with commas between them; there: {_listed(columns)}"
            raise ConfigError(name, f"has no column {column!r}", remedy)


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns)[:400] or "none"


def select(table: Sequence[Row], wanted: Mapping[str, str]) -> list[Row]:
    """Rows whose columns have these values, numbers compared as numbers; ConfigError where none is left."""
    for column, value in wanted.items():
        if table and column not in table[0]:
            raise ConfigError("select", f"{table[0].file} has no column {column!r}", f"one of {_listed([*table[0]])}")
        kept = [row for row in table if _is_same(row[column], value)]
        if table and not kept:
            some = ", ".join([each if each.isprintable() else shown(each) for each in _values(table, column)])
            raise ConfigError("select", f"no row of {table[0].file} has {column}={value}", f"values there: {some}")
        table = kept
    return list(table)


def _values(table: Sequence[Row], column: str) -> list[str]:
    return sorted({row[column][:SHOWN] for row in table})[:8]


def _is_same(cell: str, wanted: str) -> bool:
    try:
        return number(cell) == number(wanted)
    except ValueError:
        return cell == wanted

"""Prints what commands found: tables for people, documents for programs.

A table on a terminal is aligned, coloured and cut to the width; in a pipe it is aligned, plain and whole.  JSON has the
shape of the HTTP API: `{"api_version": "v1", "items": [...]}`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TextIO, TypeVar

from swarm_client.failure import UsageError
from swarm_client.options import nearest
from swarm_client.reading import read

STYLES = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "grey": "90", "bold": "1"}
STATE_STYLES = {
    "running": "green",
    "starting": "cyan",
    "stopping": "yellow",
    "queued": "yellow",
    "alive": "green",
    "suspect": "yellow",
    "failed": "red",
    "conflict": "red",
    "ok": "green",
    "warning": "yellow",
    "completed": "green",
}


NAME_WIDTH = 24  # of names on a terminal that is too narrow for all columns
READABLE = 36  # of a sentence in the last column


T = TypeVar("T")
Row = Mapping[str, Any]
"""An item of a list that no agent tells."""


class Column(Generic[T]):
    """One column: heading, how to get the text from an item, where it is shown, how it is coloured."""

    __slots__ = ("gives_way", "is_name", "is_right", "is_wide", "show", "style", "title")

    def __init__(
        self,
        title: str,
        show: Callable[[T], str],
        *,
        is_right: bool = False,
        is_wide: bool = False,
        gives_way: bool = False,
        is_name: bool = False,
        style: Callable[[str], str] | None = None,
    ) -> None:
        self.title, self.show, self.is_right, self.is_wide, self.style = title, show, is_right, is_wide, style
        self.gives_way, self.is_name = gives_way, is_name


class Printer:
    """Where and how to print; made once from the options of the command."""

    def __init__(
        self, output: str = "table", color: str = "auto", template: str = "", stream: TextIO | None = None
    ) -> None:
        self.stream = stream or sys.stdout
        self.output, self.template = output, template
        self.is_terminal = self.stream.isatty()
        self.has_color = color == "always" or (color == "auto" and self.is_terminal and not os.environ.get("NO_COLOR"))

    @property
    def is_for_people(self) -> bool:
        """True for tables, False for documents and templates."""
        return self.output in ("table", "wide") and not self.template

    @property
    def is_for_names(self) -> bool:
        """True if only names are wanted, one a line."""
        return self.output == "name" and not self.template

    def paint(self, text: str, style: str) -> str:
        """The text in a colour where colours are wanted."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.has_color and style else text

    def line(self, text: str = "") -> None:
        """Print one line."""
        self.stream.write(text + "\n")

    def items(self, items: Sequence[Mapping[str, Any]], columns: Sequence[Column[Row]], **more: Any) -> None:
        """Print a list; `more` are further keys of the JSON document."""
        if self.is_for_people:
            self.table(items, self.chosen(columns))
        elif self.output.startswith("custom-columns=") and not self.template:
            self.table(items, custom_columns(self.output.partition("=")[2]))
        elif self.output in ("json", "yaml") and not self.template:
            self.document({"api_version": "v1", **more, "items": list(items)})
        else:
            for item in items:
                self.document(item)

    def page(self, document: Mapping[str, Any]) -> None:
        """Print a list for programs, as an agent answered it."""
        self.items(document["items"], (), **{key: value for key, value in document.items() if key != "items"})

    def listed(self, document: Mapping[str, Any], columns: Sequence[Column[T]], kind: type[T]) -> None:
        """Print a list: for people a table of structs, for programs as an agent answered it."""
        if self.is_for_people:
            self.table([read(item, kind) for item in document["items"]], self.chosen(columns))
        else:
            self.page(document)

    def changed(self, document: Mapping[str, Any]) -> None:
        """Print what was changed: its name for people, all of it for programs."""
        if self.is_for_people:
            self.line(identity(document))
        else:
            self.document(document)

    def chosen(self, columns: Sequence[Column[T]]) -> list[Column[T]]:
        """Without the columns that only `-o wide` shows, unless that was asked for."""
        return [column for column in columns if not column.is_wide or self.output == "wide"]

    def document(self, document: Mapping[str, Any]) -> None:
        """Print one object as JSON, YAML, a template or its name."""
        if self.template:
            self.line(render(self.template, document))
        elif self.output == "yaml":
            import yaml  # only when asked for: the import costs more than a whole `swarm ps`

            self.stream.write(yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True))
        elif self.output == "name":
            self.line(identity(document))
        elif self.output.startswith("custom-columns="):
            self.table([document], custom_columns(self.output.partition("=")[2]))
        else:
            self.line(_json(document, indent=None if self.output == "jsonl" else 2))

    def table(self, items: Sequence[T], columns: Sequence[Column[T]]) -> None:
        """Print aligned columns below their headings; no items leave the headings."""
        for line in self.table_lines(items, columns):
            self.line(line)

    def fit(self, text: str) -> str:
        """A line cut to the terminal's width; whole in a pipe."""
        return _cut(text, terminal_width(self.stream)) if self.is_terminal else text

    def paragraph(self, text: str, indent: int = 0) -> str:
        """Text broken between words at the terminal's edge, with further lines indented; whole in a pipe."""
        width = terminal_width(self.stream)
        if not self.is_terminal or len(text) <= width or width < 2 * indent + 20:
            return text
        import textwrap  # only for what is longer than a line

        wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
        wrapper.break_long_words = False
        return wrapper.fill(text)

    def table_lines(self, items: Sequence[T], columns: Sequence[Column[T]]) -> list[str]:
        """The lines of a table."""
        rows = [[plain(column.show(item)) for column in columns] for item in items]
        widths = [max([len(c.title), *(len(row[i]) for row in rows)]) for i, c in enumerate(columns)]
        if self.is_terminal:
            total = terminal_width(self.stream)
            if _excess(widths, total) > 0:  # people choose names, and one long one must not cost all a column
                limits = [NAME_WIDTH if column.is_name else total for column in columns]
                widths = [min(*both) for both in zip(widths, limits, strict=True)]
            shown = _worth_showing(rows, widths, total, [column.gives_way for column in columns])
            columns, widths = [columns[i] for i in shown], _fitted([widths[i] for i in shown], total)
            rows = [[row[i] for i in shown] for row in rows]
        unpainted = [""] * len(columns)
        lines = [self.paint(self._line([column.title for column in columns], widths, columns, unpainted), "bold")]
        for row in rows:
            styles = [(column.style(text) if column.style else "") for column, text in zip(columns, row, strict=True)]
            lines.append(self._line(row, widths, columns, styles))
        return lines

    def _line(
        self, texts: Sequence[str], widths: Sequence[int], columns: Sequence[Column[T]], styles: Sequence[str]
    ) -> str:
        cells = []
        for text, width, column, style in zip(texts, widths, columns, styles, strict=True):
            cell = _cut(text, width)
            painted, padding = self.paint(cell, style), " " * (width - len(cell))
            cells.append(padding + painted if column.is_right else painted + padding)
        return "  ".join(cells).rstrip()


def state_style(state: str) -> str:
    """Colour of a job's or member's state."""
    return STATE_STYLES.get(state.split(" ", maxsplit=1)[0].split("(", maxsplit=1)[0].rstrip(":"), "")


def identity(item: Mapping[str, Any]) -> str:
    """What `-q` and `-o name` print: the handle of a job, the name of anything else."""
    return str(item.get("handle") or item.get("name") or item.get("node") or item.get("cursor") or "")


def plain(text: str) -> str:
    """Text without control characters: a job's name must not steer somebody's terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "?" for c in text.replace("\n", " ").replace("\t", " "))


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal; COLUMNS wins."""
    text = os.environ.get("COLUMNS", "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _excess(widths: Sequence[int], total: int) -> int:
    return sum(widths) + 2 * (len(widths) - 1) - total


def _worth_showing(
    rows: Sequence[Sequence[str]], widths: Sequence[int], total: int, give_way: Sequence[bool]
) -> list[int]:
    """Indices of columns on a narrow terminal, where some give way, the last ones first.

    First those that say nothing in any row; then those that say least, until the last column can say something.
    """
    shown = list(range(len(widths)))
    for index in reversed(shown[1:]):
        if rows and _excess([widths[i] for i in shown], total) > 0 and all(row[index] == "-" for row in rows):
            shown.remove(index)
    for index in [i for i in reversed(shown) if give_way[i]]:
        last = min(READABLE, widths[shown[-1]])
        if _excess([*(widths[i] for i in shown[:-1]), last], total) > 0:
            shown.remove(index)
    return shown


def _fitted(widths: list[int], total: int) -> list[int]:
    """Shrink the last column until the line fits, but not below 12; then the widest ones, but not below 8."""
    excess = _excess(widths, total)
    if excess > 0:
        widths = [*widths[:-1], max(min(12, widths[-1]), widths[-1] - excess)]
    while _excess(widths, total) > 0 and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1
    return widths


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(1, width - 1)] + "…"


def _json(document: object, indent: int | None) -> str:
    import json

    return json.dumps(document, indent=indent, ensure_ascii=False)


def custom_columns(text: str) -> list[Column[Row]]:
    """Read `ID:id,GPUS:gpus`; a bare path is its own heading."""
    columns = []
    for part in text.split(","):
        title, colon, path = part.partition(":")
        if not part or (colon and not path):
            raise UsageError(f"custom-columns {part!r} cannot be read", "write -o custom-columns=ID:handle,STATE:state")
        columns.append(Column(title, _getter(path or title)))
    return columns


def _getter(path: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda item: lookup(item, path)


def lookup(item: Mapping[str, Any], path: str) -> str:
    """The text at a dotted path (`nodes.0.node`); `<none>` for null.  A name that is not there is a usage error."""
    value: Any = item
    for step in path.strip().lstrip(".").split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal():
            value = value[int(step)] if int(step) < len(value) else None
        elif value is None:
            break
        else:
            known = [str(key) for key in value] if isinstance(value, Mapping) else []
            raise UsageError(f"there is no field {step!r}{nearest(step, known)}", "`-o json` shows all fields")
    if value is None:
        return "<none>"
    return value if isinstance(value, str) else _json(value, indent=None)


def render(template: str, item: Mapping[str, Any]) -> str:
    """Fill `{{path}}` or `{{.path}}` places; `\\t` and `\\n` stand for tab and newline."""
    parts = template.replace("\\t", "\t").replace("\\n", "\n").split("{{")
    text = parts[0]
    for part in parts[1:]:
        path, closed, rest = part.partition("}}")
        if not closed:
            raise UsageError(
                f"the format {template!r} has '{{{{' without '}}}}'", "write --format '{{.handle}} {{.state}}'"
            )
        text += lookup(item, path) + rest
    return text

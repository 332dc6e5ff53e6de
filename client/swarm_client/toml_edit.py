"""Changes single keys and tables of the user's TOML file and leaves comments and order as they are."""

import json
import os
import tomllib
from pathlib import Path

from swarm_client.failure import UsageError

Value = str | int | float | bool | list[str]


def set_key(text: str, section: str, key: str, value: Value) -> str:
    """Set `key` in `section` ("" for the top); the table is added at the end when there is none."""
    lines = text.splitlines()
    start, end = _section_span(lines, section)
    new = f"{key} = {_literal(value)}"
    if start < 0:
        gap = [""] if lines and lines[-1].strip() else []
        return "\n".join([*lines, *gap, f"[{section}]", new]) + "\n"
    for index in range(start, end):
        if lines[index].split("=")[0].strip() == key:
            lines[index] = new
            return "\n".join(lines) + "\n"
    while end > start and not lines[end - 1].strip():
        end -= 1
    lines.insert(end, new)
    return "\n".join(lines) + "\n"


def remove_key(text: str, section: str, key: str) -> str:
    """Remove a key; nothing changes when it is not there."""
    lines = text.splitlines()
    start, end = _section_span(lines, section)
    kept = [line for i, line in enumerate(lines) if not (start <= i < end and line.split("=")[0].strip() == key)]
    return "\n".join(kept) + "\n" if kept else ""


def remove_section(text: str, section: str) -> str:
    """Remove a table with its heading."""
    lines = text.splitlines()
    start, end = _section_span(lines, section)
    if start < 0:
        return text
    kept = lines[: max(0, start - 1)] + lines[end:]
    while kept and not kept[-1].strip():
        kept.pop()
    return "\n".join(kept) + "\n" if kept else ""


def save(file: Path, text: str) -> None:
    """Replace the file as a whole, after checking that the new text is TOML; an empty text removes the file."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{file} is written in a way that cannot be changed here: {error}", "edit it by hand"
        ) from error
    if not text.strip():
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o600)
    draft.replace(file)


def _section_span(lines: list[str], section: str) -> tuple[int, int]:
    """First line after the heading and the line after the last; (-1, -1) when there is no such table."""
    headings = [i for i, line in enumerate(lines) if line.strip().startswith("[") and "=" not in line.split("#")[0]]
    if not section:
        return 0, headings[0] if headings else len(lines)
    for position, index in enumerate(headings):
        if lines[index].split("#")[0].strip().strip("[]").replace('"', "").strip() == section:
            return index + 1, headings[position + 1] if position + 1 < len(headings) else len(lines)
    return -1, -1


def _literal(value: Value) -> str:
    """JSON's spelling of text, numbers, truth and lists is TOML's as well (text without surrogates)."""
    return json.dumps(value)

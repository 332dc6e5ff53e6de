"""Writes the picture of a replay."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING

from swarm_client.failure import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from swarmsched.replay.results import RunLog

SUFFIXES = (".png", ".svg", ".html")
DPI = 150


def check(file: Path) -> None:
    """UsageError where the picture could not be drawn there: before a run of hours, not after it."""
    if file.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {file} is no picture", f"a name that ends in {', '.join(SUFFIXES)}")
    try:
        _check_place(file)
    except OSError as error:
        raise UsageError(f"--plot cannot be written: {error.strerror}: {file}", "another name or folder") from error
    import matplotlib  # noqa: F401  # only asked whether it is there


def _check_place(file: Path) -> None:
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot {file}: there is no folder {file.parent}", "make it, or name another")
    is_there = file.exists()
    if is_there and not file.is_file():
        raise UsageError(f"--plot {file} is there, and no file", "another name")
    with file.open("ab"):  # nothing else tells for sure; what is there stays as it is until the picture is drawn
        pass
    if not is_there:
        file.unlink()


def draw(file: Path, runs: Sequence[tuple[str, RunLog]], title: str) -> None:
    """One picture of all runs, each with its name; HTML holds it in itself and loads nothing."""
    from swarmsched.replay.plot import figure

    try:
        drawn = figure(runs, title)
    except ValueError as error:
        raise UsageError(
            f"--plot {file}: {error}", "jobs that fit the servers; leave --plot out to see the figures"
        ) from error
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png" if file.suffix.lower() == ".png" else "svg", dpi=DPI)
    picture = buffer.getvalue()
    try:
        file.write_bytes(_page(picture, title) if file.suffix.lower() == ".html" else picture)
    except OSError as error:
        raise UsageError(f"--plot cannot be written: {error.strerror}: {file}", "make room, or name another") from error


def _page(picture: bytes, title: str) -> bytes:
    source, text = base64.b64encode(picture).decode("ascii"), html.escape(title)
    page = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{text}</title>\n'
        f'<img alt="{text}" style="width: 100%" src="data:image/svg+xml;base64,{source}">\n</html>\n'
    )
    return page.encode()

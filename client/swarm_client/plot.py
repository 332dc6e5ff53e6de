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

    from swarmsched.replay.results import Observer

SUFFIXES = (".png", ".svg", ".html")
DPI = 150


def check(file: Path) -> None:
    """UsageError where the picture could not be drawn there: before a run of hours, not after it."""
    if file.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {file} is no picture", f"a name that ends in {', '.join(SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot {file}: there is no folder {file.parent}", "make it, or name another")
    try:
        import matplotlib  # noqa: F401  # only asked whether it is there
    except ImportError as error:
        remedy = "pip install 'swarmsched[plots]', or leave --plot out"
        raise UsageError("--plot needs matplotlib, which is not installed", remedy) from error


def draw(file: Path, runs: Sequence[tuple[str, Observer]], title: str) -> None:
    """One picture of all runs, each with its name; HTML holds it in itself and loads nothing."""
    from swarmsched.replay.plot import figure

    try:
        drawn = figure(runs, title)
    except ValueError as error:
        raise UsageError(
            f"--plot {file}: {error}", "jobs that fit the servers; leave --plot out to see the figures"
        ) from error
    if file.suffix.lower() != ".html":
        drawn.savefig(file, dpi=DPI)
        return
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="svg")
    source = base64.b64encode(buffer.getvalue()).decode("ascii")
    text = html.escape(title)
    file.write_text(
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{text}</title>\n'
        f'<img alt="{text}" style="width: 100%" src="data:image/svg+xml;base64,{source}">\n</html>\n',
        encoding="utf-8",
    )

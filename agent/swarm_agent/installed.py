"""What is installed: the version of this software, and what other packages offer to it.

Read from the folders that every installer makes (PyPA's specification "Recording installed projects"):
`importlib.metadata` would cost each agent 4 MB and 200 ms.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def software_version() -> str:
    """For example `0.2.0`; `unknown` when it runs from a tree that was not installed."""
    for folder in _found("swarmsched-*.dist-info"):
        return folder.name.removesuffix(".dist-info").partition("-")[2]
    return "unknown"


def entry_points_of(group: str) -> "Iterable[EntryPoint]":
    """What packages offer to us under the name of a group; usually nothing."""
    if not any(f"[{group}]" in file.read_text("utf-8", "replace") for file in _found("*.dist-info/entry_points.txt")):
        return ()
    from importlib.metadata import entry_points  # noqa: PLC0415  # see above

    return entry_points(group=group)


def _found(pattern: str) -> Iterator[Path]:
    for entry in sys.path:
        yield from Path(entry).glob(pattern)

"""The version of this software, as installed."""

import sys
from functools import cache
from pathlib import Path

METADATA = "swarmsched-*.dist-info"
"""The folder that every installer makes; PyPA's specification "Recording installed projects"."""


@cache
def software_version() -> str:
    """For example `0.2.0`; `unknown` when it runs from a tree that was not installed.

    Read from the folder's name: `importlib.metadata` would cost each agent 0.8 MB and 50 ms for one word.
    """
    for entry in sys.path:
        for folder in Path(entry).glob(METADATA):
            return folder.name.removesuffix(".dist-info").partition("-")[2]
    return "unknown"

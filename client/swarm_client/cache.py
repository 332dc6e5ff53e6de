"""Small JSON files that only save time: what was learnt of a swarm's members, digests of files."""

# Importing pathlib costs a tenth of what `swarm ps` may take.
# ruff: noqa: PTH103, PTH105, PTH120, PTH123

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any


def read_cache(file: str) -> dict[str, Any]:
    """The document; empty when there is none yet, or a damaged one."""
    try:
        with open(file, encoding="utf-8") as stream:
            document = json.load(stream)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def write_cache(file: str, document: Mapping[str, Any]) -> bool:
    """Replace it as a whole; False where that cannot be done, as in a home that is read-only."""
    draft = f"{file}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
        with open(draft, "w", encoding="utf-8") as stream:
            json.dump(document, stream)
        os.replace(draft, file)
    except OSError:
        return False
    return True

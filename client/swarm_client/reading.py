"""Reads an agent's answer as the struct that it was made from.

Callers name the struct after the answer has come: msgspec costs a third of a command's start, and a command that
prints an answer as it is needs none of it.
"""

from __future__ import annotations

from collections.abc import ItemsView
from typing import Any, TypeVar

from swarm_client.failure import SWARM_FAILED, Failure

T = TypeVar("T")


def read(told: object, kind: type[T]) -> T:
    """The answer as a struct, or a list of structs; keys of a newer agent are left out."""
    import msgspec

    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        remedy = "compare `swarm version` with the VERSION of `swarm nodes -o wide`, and report it; -o json shows all"
        raise Failure(f"an agent's answer cannot be read: {error}", remedy, SWARM_FAILED) from error


def items_of(struct: object) -> ItemsView[str, Any]:
    """The keys of a struct with their values."""
    from msgspec.structs import asdict

    return asdict(struct).items()  # type: ignore[arg-type]

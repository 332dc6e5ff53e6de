"""Whether this agent may be given work: the checks behind /readyz, each with a sentence."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One condition; `detail` says how things stand, for people."""

    name: str
    is_ok: bool
    detail: str = ""
    remedy: str = ""


class Readiness:
    """A list of conditions that are evaluated each time they are asked for; all are cheap."""

    def __init__(self) -> None:
        self._conditions: dict[str, Callable[[], Check]] = {}

    def add(self, name: str, condition: Callable[[], Check]) -> None:
        """Register a condition; a later one of the same name replaces it."""
        self._conditions[name] = condition

    def checks(self, exclude: frozenset[str] = frozenset()) -> tuple[Check, ...]:
        """All conditions but the excluded ones, in order of registration."""
        return tuple(condition() for name, condition in self._conditions.items() if name not in exclude)

    def is_ready(self, exclude: frozenset[str] = frozenset()) -> bool:
        """True when every condition holds."""
        return all(check.is_ok for check in self.checks(exclude))

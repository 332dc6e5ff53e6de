"""What is wrong with a value on its way to or from the wire, and where in the message it sits."""

from typing import Any


class Problem(Exception):
    """What is wrong with a value; the path to it grows on the way up."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.path = ""

    def within(self, step: str) -> "Problem":
        """The same problem seen from one level further out."""
        self.path = f"{step}{'' if not self.path or self.path.startswith('[') else '.'}{self.path}"
        return self

    def __str__(self) -> str:
        return f"{self.path}: {self.args[0]}" if self.path else str(self.args[0])


def wrong(value: Any, expected: str, kind: type, span: str) -> Problem:
    """Out of its bounds, or not even of the kind that is expected."""
    if type(value) is kind:
        return Problem(f"{say(value)} is not within {span}")
    return Problem(f"expected {expected}, got {say(value)}")


def say(value: Any) -> str:
    """A short picture of an arbitrary value: never its whole text."""
    if isinstance(value, bool | int | float) or value is None:
        return str(value)[:40]
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, bytes | list | tuple | dict):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__

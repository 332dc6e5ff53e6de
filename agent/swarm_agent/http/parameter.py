"""Query parameters and headers: what each takes is told in /openapi.json by the limits that refuse anything else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm_agent.http.exchange import Call
from swarm_agent.http.problem import bad_parameter, refused_parameters
from swarm_agent.http.schema import FLAG, TEXT, Schema, at_most, between
from swarmsched.api import PROBLEMS_LIMIT, nearest
from swarmsched.errors import FieldProblem

WORD_SHOWN = 40

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Parameter(Generic[T]):
    """A query parameter, or a header: JSON Schema, a sentence, and how its text becomes a value.

    `read` gets None where it is not there; it raises `Problem` of the kind `code` for what cannot be used.
    """

    name: str
    schema: Schema
    text: str
    read: Callable[[str | None], T]
    code: str = "bad_parameter"
    place: str = "query"

    def of(self, call: Call) -> T:
        """The parameter's value in a request."""
        return self.read(call.query.get(self.name))


def text(name: str, about: str) -> Parameter[str]:
    """Any text; empty where it is not there."""
    return Parameter(name, TEXT, about, lambda given: given or "")


def header(name: str, about: str, length_most: int | None = None) -> Parameter[str]:
    """A header, which its route reads itself."""
    return Parameter(
        name, at_most(length_most) if length_most else TEXT, about, lambda given: given or "", place="header"
    )


def flag(name: str, about: str) -> Parameter[bool]:
    """On when it is there: `?all`, `?all=1`, `?all=true`."""

    def read(given: str | None) -> bool:
        if given is None or given.lower() in ("0", "false", "no"):
            return False
        if given.lower() in ("", "1", "true", "yes"):
            return True
        raise bad_parameter(name, f"{given[:WORD_SHOWN]!r} is neither true nor false", "use 1 or 0")

    return Parameter(name, FLAG, about, read)


def number(name: str, about: str, default: float, low: float, high: float) -> Parameter[float]:
    """A number within bounds."""
    schema = {**between("number", low, high), "default": default}
    return Parameter(name, schema, about, lambda given: _number(name, given, low, high) if given else default)


def integer(name: str, about: str, default: D, low: int, high: int) -> Parameter[int | D]:
    """A whole number within bounds; without a default it is told by the sentence what its absence means."""

    def read(given: str | None) -> int | D:
        if not given:
            return default
        value = _number(name, given, low, high)
        if value != int(value):
            raise bad_parameter(name, f"{value} is not whole", f"a whole number from {low} to {high}")
        return int(value)

    told = {} if default is None else {"default": default}
    return Parameter(name, {**between("integer", low, high), **told}, about, read)


def _number(name: str, given: str, low: float, high: float) -> float:
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise bad_parameter(name, f"{given[:WORD_SHOWN]!r} is not within bounds", f"a number from {low:g} to {high:g}")
    return value


def words(
    name: str, about: str, choices: Sequence[str] = (), code: str = "bad_parameter"
) -> Parameter[tuple[str, ...]]:
    """A list with commas, each word out of `choices` if there are any; the problem names all others."""

    def read(given: str | None) -> tuple[str, ...]:
        found = tuple(word.strip() for word in (given or "").split(",") if word.strip())
        wrong = [word for word in dict.fromkeys(found) if choices and word not in choices]
        if wrong:
            raise refused_parameters(code, [_unknown(name, word, choices) for word in wrong[:PROBLEMS_LIMIT]])
        return found

    return Parameter(name, TEXT, about, read, code)


def choice(name: str, about: str, choices: Sequence[str]) -> Parameter[str]:
    """One of a few words, the first one by default."""

    def read(given: str | None) -> str:
        if given is None:
            return choices[0]
        if given not in choices:
            problem = f"{given[:WORD_SHOWN]!r} is not known{nearest(given, choices)}"
            raise bad_parameter(name, problem, f"one of: {', '.join(choices)}")
        return given

    return Parameter(name, {"enum": list(choices), "default": choices[0]}, about, read)


def _unknown(name: str, word: str, choices: Sequence[str]) -> FieldProblem:
    problem = f"{word[:WORD_SHOWN]!r} is not known{nearest(word, choices)}"
    return FieldProblem(f"?{name}", problem, f"one or more of: {', '.join(choices)}")

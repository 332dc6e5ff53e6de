"""Who asks, and what a route asks of him: a principal has rights, and a route's row names the one that it needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Right(Enum):
    """What somebody may do with the swarm."""

    VIEW = "view"  # see jobs, nodes and events
    USE = "use"  # submit jobs and change them
    OPERATE = "operate"  # change nodes, members and the swarm-wide setting, override lost holders
    METRICS = "metrics"  # read what monitors scrape


@dataclass(frozen=True, slots=True)
class Principal:
    """A person or a program that was recognised, or nobody: then `rights` is empty."""

    name: str
    rights: frozenset[Right]

    def to_json(self) -> dict[str, Any]:
        """As it travels, sealed, with a request that another agent is to answer."""
        return {"name": self.name, "rights": sorted(right.value for right in self.rights)}


NOBODY = Principal("", frozenset())
OPERATOR = Principal("operator", frozenset(Right))
"""Whoever has the swarm's token."""

NAME_LENGTH = 64


def principal_from(told: Any) -> Principal:
    """Who asked the agent that passes a request on; an agent of 0.1.0 names nobody, and knows the token alone.

    A right of which this version knows nothing is left out.
    """
    if told is None:
        return OPERATOR
    if not isinstance(told, Mapping) or not isinstance(told.get("rights"), list):
        return NOBODY
    known = {right.value: right for right in Right}
    rights = [known[each] for each in told["rights"] if isinstance(each, str) and each in known]
    return Principal(str(told.get("name", ""))[:NAME_LENGTH], frozenset(rights))

"""Nodes that fail and return during a replay, as a table says."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from swarmsched.api import nearest
from swarmsched.ids import NodeId
from swarmsched.replay.table import rows

DOWN = (
    "down",
    "fail",
    "failed",
    "failure",
    "fails",
    "crash",
    "crashed",
    "dead",
    "kill",
    "leave",
    "left",
    "lost",
    "offline",
)
UP = (
    "up",
    "return",
    "returned",
    "returns",
    "back",
    "join",
    "joined",
    "online",
    "recover",
    "recovered",
    "repaired",
    "restart",
)
"""Words for the two events: what other simulators and people call them."""


class NodeEvent(NamedTuple):
    """A node fails, or is there again; seconds since the replay began."""

    time_s: float
    node: NodeId
    is_up: bool


def churn(name: str, lines: Iterable[str], nodes: Collection[NodeId]) -> list[NodeEvent]:
    """The events by time; ConfigError names file, row and column of what cannot be used."""
    events = []
    for row in rows(name, lines, ("time_s", "node", "event")):
        node, word = row.text("node"), row.text("event").lower()
        if node not in nodes:
            there = ", ".join([*list(nodes)[:3], "..."]) if len(nodes) > 4 else ", ".join(nodes)
            problem = f"there is no node {node!r}{nearest(node, list(nodes))}"
            raise row.error("node", problem, f"one of the {len(nodes)} nodes: {there}")
        if word not in DOWN + UP:
            problem = f"{row['event']!r} is not known{nearest(word, DOWN + UP)}"
            raise row.error("event", problem, "down or up")
        events.append(NodeEvent(row.seconds("time_s"), NodeId(node), word in UP))
    return sorted(events, key=lambda event: event.time_s)  # of one moment, in the order of their rows

"""Probing: whom to probe next, and what is known of the probes under way (SWIM, sections 3.1 and 4.3)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from swarmsched.ids import Address, NodeId


class ProbeOrder:
    """Shuffled round robin: every member is probed within 2 N - 1 periods, in an order that no two nodes share."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order: list[NodeId] = []

    def add(self, node: NodeId) -> None:
        """A new member joins the current round at a random place."""
        self._order.insert(self._rng.randint(0, len(self._order)), node)

    def pop(self) -> NodeId | None:
        """The next name; None when the round is over.  The caller skips those that are not to be probed."""
        return self._order.pop() if self._order else None

    def restart(self, nodes: Sequence[NodeId]) -> None:
        """Begin a new round over these."""
        self._order = list(nodes)
        self._rng.shuffle(self._order)


@dataclass(slots=True)
class Probe:
    """A probe under way: direct until `indirect_at_s`, then through helpers and the stream until `deadline_s`."""

    sequence: int
    target: NodeId
    indirect_at_s: float
    deadline_s: float
    is_indirect: bool = False
    no_count: int = 0  # helpers that live but did not reach the target either

    @property
    def next_deadline_s(self) -> float:
        """When something is to be done about it."""
        return self.deadline_s if self.is_indirect else self.indirect_at_s

    def postpone(self, lag_s: float) -> None:
        """This node stood still: give the answers time to be read."""
        self.indirect_at_s += lag_s
        self.deadline_s += lag_s


@dataclass(slots=True)
class Relay:
    """A probe that this node makes for another."""

    requester: Address
    sequence: int
    target: NodeId
    deadline_s: float

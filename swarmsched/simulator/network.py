"""A network with faults: which messages arrive, how often, and when.

Two kinds of traffic share the links.  Datagrams are lost in silence.  Peer messages are requests over a connection:
one that is lost is reported to its sender (`Fate.error`) after a while, though its delivery is not excluded, which is
all that a broken connection tells.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from swarmsched.ids import NodeId


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """What a link does to each message.  Ratios from 0 to 1, delays in seconds.

    The delay is log-normal around its median with the given sigma (of the logarithm).  Without `is_reordering`
    messages of one link keep their order.
    """

    loss_ratio: float = 0.0
    duplicate_ratio: float = 0.0
    delay_median_s: float = 0.000_2
    delay_sigma: float = 0.3
    is_reordering: bool = True
    peer_timeout_s: float = 2.0  # until a lost peer message is reported

    def __post_init__(self) -> None:
        if not 0.0 <= self.loss_ratio <= 1.0 or not 0.0 <= self.duplicate_ratio <= 1.0:
            raise ValueError(f"loss and duplicate ratios must lie from 0 to 1: {self}")
        if self.delay_median_s <= 0.0 or self.delay_sigma < 0.0 or self.peer_timeout_s <= 0.0:
            raise ValueError(f"delays must be positive: {self}")


@dataclass(frozen=True, slots=True)
class Fate:
    """When copies of one message arrive (seconds from now; none: lost) and, for a peer message, the sender's error."""

    arrivals_s: tuple[float, ...]
    error: str = ""
    error_after_s: float = 0.0


class Network:
    """Draws each message's fate; knows which links are cut."""

    def __init__(self, faults: NetworkFaults, rng: random.Random) -> None:
        self.faults = faults  # may be replaced at any time
        self._rng = rng
        self._cut: dict[tuple[NodeId, NodeId], None] = {}  # directed
        self._last_arrival_s: dict[tuple[NodeId, NodeId], float] = {}  # absolute; only without reordering

    def cut(self, source: NodeId, destination: NodeId) -> None:
        """Nothing gets from source to destination any more; the other way is not touched."""
        self._cut[source, destination] = None

    def partition(self, one_side: Iterable[NodeId], other_side: Iterable[NodeId]) -> None:
        """Cut every link between the two groups, both ways."""
        others = list(other_side)
        for one in one_side:
            for other in others:
                self.cut(one, other)
                self.cut(other, one)

    def heal(self) -> None:
        """Mend all links."""
        self._cut.clear()

    def is_cut(self, source: NodeId, destination: NodeId) -> bool:
        """True when nothing gets from source to destination."""
        return (source, destination) in self._cut

    def datagram(self, source: NodeId, destination: NodeId, now_s: float) -> Fate:
        """One gossip packet."""
        if self.is_cut(source, destination) or self._rng.random() < self.faults.loss_ratio:
            return Fate(())
        return Fate(self._arrivals(source, destination, now_s))

    def peer_message(self, source: NodeId, destination: NodeId, now_s: float) -> Fate:
        """One request of the peer channel; a lost answer looks to the sender like a lost request."""
        if source == destination:
            return Fate((self.faults.delay_median_s / 10.0,))
        if self.is_cut(source, destination):
            return Fate((), "timed out", self.faults.peer_timeout_s)
        if self._rng.random() < self.faults.loss_ratio:
            has_arrived = self._rng.random() < 0.5
            arrivals_s = self._arrivals(source, destination, now_s) if has_arrived else ()
            return Fate(arrivals_s, "connection lost", self.faults.peer_timeout_s)
        if self.is_cut(destination, source):
            return Fate(self._arrivals(source, destination, now_s), "timed out", self.faults.peer_timeout_s)
        return Fate(self._arrivals(source, destination, now_s))

    def _arrivals(self, source: NodeId, destination: NodeId, now_s: float) -> tuple[float, ...]:
        copies = 2 if self._rng.random() < self.faults.duplicate_ratio else 1
        return tuple(self._delay_s(source, destination, now_s) for _ in range(copies))

    def _delay_s(self, source: NodeId, destination: NodeId, now_s: float) -> float:
        delay_s = self._rng.lognormvariate(math.log(self.faults.delay_median_s), self.faults.delay_sigma)
        if self.faults.is_reordering:
            return delay_s
        arrival_s = max(now_s + delay_s, self._last_arrival_s.get((source, destination), 0.0))
        self._last_arrival_s[source, destination] = arrival_s
        return arrival_s - now_s

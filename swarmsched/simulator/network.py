"""A network with faults: which messages arrive, how often, and when.

Two kinds of traffic share the links.  Datagrams are lost in silence.  Peer messages are requests over a connection:
one that is lost or late is reported to its sender (`Fate.error`) after a while, though its delivery is not excluded,
which is all that a broken connection tells.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from swarmsched.ids import NodeId

REPLAY_S = (0.5, 8.0)  # how much later an old message comes again


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """What a link does to each message.  Ratios from 0 to 1, delays in seconds.

    The delay is log-normal around its median with the given sigma (of the logarithm).  Without `is_reordering`
    messages of one link keep their order.  A replayed message comes once more within `REPLAY_S`.
    """

    loss_ratio: float = 0.0
    duplicate_ratio: float = 0.0
    delay_median_s: float = 0.000_2
    delay_sigma: float = 0.3
    is_reordering: bool = True
    peer_timeout_s: float = 2.0  # until a lost peer message is reported
    replay_ratio: float = 0.0

    def __post_init__(self) -> None:
        ratios = (self.loss_ratio, self.duplicate_ratio, self.replay_ratio)
        if not all(0.0 <= ratio <= 1.0 for ratio in ratios):
            raise ValueError(f"loss, duplicate and replay ratios must lie from 0 to 1: {self}")
        if self.delay_median_s <= 0.0 or self.delay_sigma < 0.0 or self.peer_timeout_s <= 0.0:
            raise ValueError(f"delays must be positive: {self}")


@dataclass(slots=True)
class Fate:
    """When copies of one message arrive (seconds from now; none: lost) and, for a peer message, the sender's error."""

    arrivals_s: tuple[float, ...]
    error: str = ""
    error_after_s: float = 0.0


Link = tuple[NodeId, NodeId]
LOST = Fate(())
GOOD_LOSS_RATIO, GOOD_DELAY_S = 0.05, 0.05


class Network:
    """Draws each message's fate; knows which links are cut or clogged."""

    def __init__(self, faults: NetworkFaults, rng: random.Random) -> None:
        self.faults = faults  # may be replaced at any time
        self._rng = rng
        self._cut: dict[Link, int] = {}  # directed; how many faults cut it
        self._clogged_until_s: dict[Link, float] = {}
        self._last_arrival_s: dict[Link, float] = {}  # absolute; only without reordering

    def set_faults(self, faults: NetworkFaults) -> None:
        """The weather is another one from now on."""
        self.faults = faults

    def cut(self, source: NodeId, destination: NodeId) -> None:
        """Nothing gets from source to destination any more; the other way is not touched."""
        self._cut[source, destination] = self._cut.get((source, destination), 0) + 1

    def mend(self, source: NodeId, destination: NodeId) -> None:
        """Take back one `cut`; the link works again when all are taken back."""
        count = self._cut.pop((source, destination), 0)
        if count > 1:
            self._cut[source, destination] = count - 1

    def partition(self, one_side: Iterable[NodeId], other_side: Iterable[NodeId]) -> None:
        """Cut every link between the two groups, both ways."""
        others = list(other_side)
        for one in one_side:
            for other in others:
                self.cut(one, other)
                self.cut(other, one)

    def clog(self, source: NodeId, destination: NodeId, until_s: float) -> None:
        """What is sent before `until_s` (virtual time) arrives only after it."""
        self._clogged_until_s[source, destination] = max(until_s, self._clogged_until_s.get((source, destination), 0.0))

    def heal(self) -> None:
        """Mend and clear all links."""
        self._cut.clear()
        self._clogged_until_s.clear()

    def is_cut(self, source: NodeId, destination: NodeId) -> bool:
        """True when nothing gets from source to destination."""
        return (source, destination) in self._cut

    def is_good(self, source: NodeId, destination: NodeId, now_s: float) -> bool:
        """True when nearly everything gets from source to destination, soon."""
        faults, link = self.faults, (source, destination)
        is_calm = faults.loss_ratio <= GOOD_LOSS_RATIO and faults.delay_median_s <= GOOD_DELAY_S
        return is_calm and link not in self._cut and self._clogged_until_s.get(link, 0.0) <= now_s

    def datagram(self, source: NodeId, destination: NodeId, now_s: float) -> Fate:
        """One gossip packet."""
        loss = self.faults.loss_ratio
        if (self._cut and (source, destination) in self._cut) or (loss and self._rng.random() < loss):
            return LOST
        return Fate(self._arrivals(source, destination, now_s))

    def peer_message(self, source: NodeId, destination: NodeId, now_s: float) -> Fate:
        """One request of the peer channel; a lost answer looks to the sender like a lost request."""
        faults = self.faults
        if source == destination:
            return Fate((faults.delay_median_s / 10.0,))
        if self._cut and (source, destination) in self._cut:
            return Fate((), "timed out", faults.peer_timeout_s)
        if faults.loss_ratio and self._rng.random() < faults.loss_ratio:
            has_arrived = self._rng.random() < 0.5
            arrivals_s = self._arrivals(source, destination, now_s) if has_arrived else ()
            return Fate(arrivals_s, "connection lost", faults.peer_timeout_s)
        arrivals_s = self._arrivals(source, destination, now_s)
        if min(arrivals_s) > faults.peer_timeout_s or (self._cut and (destination, source) in self._cut):
            return Fate(arrivals_s, "timed out", faults.peer_timeout_s)
        return Fate(arrivals_s)

    def _arrivals(self, source: NodeId, destination: NodeId, now_s: float) -> tuple[float, ...]:
        faults, rng = self.faults, self._rng
        arrivals_s: tuple[float, ...] = (self._delay_s(source, destination, now_s),)
        if faults.duplicate_ratio and rng.random() < faults.duplicate_ratio:
            arrivals_s += (self._delay_s(source, destination, now_s),)
        if faults.replay_ratio and rng.random() < faults.replay_ratio:
            arrivals_s += (rng.uniform(*REPLAY_S),)
        return arrivals_s

    def _delay_s(self, source: NodeId, destination: NodeId, now_s: float) -> float:
        faults = self.faults
        delay_s = faults.delay_median_s * math.exp(self._rng.gauss(0.0, faults.delay_sigma))
        if self._clogged_until_s:
            delay_s += max(0.0, self._clogged_until_s.get((source, destination), 0.0) - now_s)
        if faults.is_reordering:
            return delay_s
        arrival_s = max(now_s + delay_s, self._last_arrival_s.get((source, destination), 0.0))
        self._last_arrival_s[source, destination] = arrival_s
        return arrival_s - now_s

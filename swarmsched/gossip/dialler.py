"""The dialler: who of the dead and of the absent seeds is greeted next, so that a split heals by itself."""

import random
from collections.abc import Sequence

from swarmsched.gossip.message import Standing
from swarmsched.gossip.roster import Roster
from swarmsched.ids import Address, NodeId

DIAL_INTERVAL_S = 5.0  # between two attempts to reach a dead member or an absent seed: bounds how long a split lasts
LONELY_DIAL_INTERVAL_S = 1.0  # the same while no other member is known at all
SLOW_DIAL_AFTER_S, SLOW_DIAL_EVERY = 3_600.0, 12  # one dead for longer is dialled at every so many attempts only
LONELY_DIALS_MAX = 8
DIALLED_MAX = 1_000


class Dialler:
    """Chooses addresses to greet.  `seeds` are those that were configured, without the own address."""

    def __init__(self, seeds: Sequence[Address], roster: Roster, rng: random.Random) -> None:
        self._absent_seeds = tuple(seeds)
        self._roster, self._rng = roster, rng
        self._count = 0
        self._dialled: dict[Address, int] = {}  # the last dial of each address by its number, the oldest first

    @property
    def has_work(self) -> bool:
        """Whether anybody is to be dialled, now or later."""
        return bool(self._absent_seeds or self._roster.dead)

    @property
    def interval_s(self) -> float:
        """How long after one attempt the next is due."""
        return DIAL_INTERVAL_S if len(self._roster) else LONELY_DIAL_INTERVAL_S

    def drop_seed(self, address: Address) -> None:
        """A configured seed is this node itself under another address."""
        self._absent_seeds = tuple(seed for seed in self._absent_seeds if seed != address)

    def next_to_greet(self, now_s: float) -> list[Address]:
        """One dead member or absent seed; all seeds, 8 at most, while this node knows nobody."""
        self._count += 1
        seeds = [seed for seed in self._absent_seeds if not self._is_present(seed)]
        if not len(self._roster):
            return self._rng.sample(seeds, min(len(seeds), LONELY_DIALS_MAX))
        candidates = seeds + [where for name in self._roster.dead if (where := self._address_of_dead(name, now_s))]
        return [self._longest_not_dialled(candidates)] if candidates else []

    def _longest_not_dialled(self, candidates: Sequence[Address]) -> Address:
        """Each has its turn: one that is lost for good must not keep two that live from finding one another."""
        chosen = min(candidates, key=lambda where: (self._dialled.get(where, 0), self._rng.random()))
        self._dialled.pop(chosen, None)
        self._dialled[chosen] = self._count
        if len(self._dialled) > DIALLED_MAX:
            del self._dialled[next(iter(self._dialled))]
        return chosen

    def _is_present(self, seed: Address) -> bool:
        member = self._roster.at(seed)
        return member is not None and member.is_live

    def _address_of_dead(self, node: NodeId, now_s: float) -> Address | None:
        member = self._roster.get(node)
        if member is None or member.update.standing is not Standing.FAILED:
            return None
        is_old = now_s - member.changed_s > SLOW_DIAL_AFTER_S
        return None if is_old and self._count % SLOW_DIAL_EVERY else member.update.address

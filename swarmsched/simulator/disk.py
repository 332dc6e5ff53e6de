"""A machine's disk: what is durable, and how long making something durable takes just now.

Writes of one group are one transaction: after a crash all of them are there or none (SQLite's journal; a torn page is
found by it and rolled back).  A full disk completes nothing until there is room.
"""

import math
import random
from collections.abc import Sequence

from swarmsched.effects import Persist
from swarmsched.gossip.identity import GENERATION_KEY, GENERATION_ROOM, next_generation

FSYNC_MEDIAN_S = 0.001
FSYNC_SIGMA = 0.5  # of the logarithm
STORE_ID_BITS = 53


class Disk:
    """Rooms of entries, the generation that was last used, and the identity of the database."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.rooms: dict[str, dict[str, bytes]] = {}
        self.store_id = rng.getrandbits(STORE_ID_BITS)
        self.generation = 0  # 0: none was stored
        self.fsync_median_s = FSYNC_MEDIAN_S
        self.full_until_s = 0.0  # virtual time

    def write(self, writes: Sequence[Persist]) -> None:
        """The writes are durable now."""
        for write in writes:
            room = self.rooms.setdefault(write.room, {})
            if write.value is None:
                room.pop(write.key, None)
            else:
                room[write.key] = write.value

    def fsync_s(self, now_s: float) -> float:
        """How long a commit that begins now takes."""
        return max(0.0, self.full_until_s - now_s) + self.fsync_median_s * math.exp(self._rng.gauss(0.0, FSYNC_SIGMA))

    def is_full(self, now_s: float) -> bool:
        """True while no commit can succeed."""
        return now_s < self.full_until_s

    def next_generation(self, utc_s: float) -> int:
        """A generation that this disk has not seen; durable when this returns."""
        risen_to = self.rooms.get(GENERATION_ROOM, {}).get(GENERATION_KEY)
        self.generation = next_generation(self.generation, risen_to, utc_s)
        return self.generation

    def speed_up(self) -> None:
        """As fast as a good disk."""
        self.fsync_median_s = FSYNC_MEDIAN_S

    def heal(self) -> None:
        """Fast and with room again."""
        self.speed_up()
        self.full_until_s = 0.0

    def wipe(self) -> None:
        """A new disk in the old machine."""
        self.rooms = {}
        self.generation = 0
        self.store_id = self._rng.getrandbits(STORE_ID_BITS)

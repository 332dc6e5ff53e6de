"""Which rank trains on which samples of an epoch: a table that every rank keeps for itself, and no leader.

Why every sample is used exactly once in an epoch, whatever joins, leaves, dies or is done again:

1. A table changes by `begin`, `agreed`, `resize` and `load` only.  Each is a pure function of the table and of values
   that are the same on all ranks: the members in rank order, the slots of all ranks as they came out of the step's
   reduction, the agreed batch, another rank's table.  All ranks do the same of these in the same order, so their tables
   are equal after each step, with no message of their own.  A membership that came to nothing on some ranks only leaves
   no trace: each `begin` goes back to the table of the last step that counted, which is also what `state` gives.  Each
   slot carries a digest of its rank's table, so a table that did differ ends the job with an error instead of training
   twice on something.
2. In a table every position of an epoch is in one place: used; held by one member; returned; or fresh (behind the
   counter up to which positions were handed out).  Of a reproducible order, used is what lies below the cursor, and the
   rest is fresh.  Handing out moves from returned and fresh to held, a member that is gone moves from held to returned,
   a slot moves from held to used.  Nothing is copied, nothing is dropped, and nothing leaves used within the epoch.
3. A rank trains only on the first of what it holds, and its slot says only how many that were.  So what becomes used by
   a slot is what that rank's gradient was made of, and `agreed` is called just when this gradient is in the sum that
   updates the parameters.
4. A step whose reduction failed applies nothing: its samples are still held by the survivors, who train on them again,
   or are returned with the rest of what the dead held.  Where the reduction failed on some ranks only, those that
   finished it hold newer parameters and a newer table, and give both to those that did not (`load`, then `begin`): the
   step counts for all, with the samples of ranks that died in it.  If nobody is left that finished it, its update is
   lost with its table, and it is done again.  Parameters and table move together, also in a checkpoint; that is all
   that exactly once needs.
5. It ends: while anything of the epoch is left, a member that asks for samples holds some (what was returned is handed
   out first, and the next epoch's only when the pool has nothing of this one), and uses one at least in each step.  The
   epoch is over when nothing is left in the pool and nobody holds any; of unknown length, when furthermore a rank has
   told where it met the end, which cuts off all that was handed out behind it.

A rank is handed samples for `ahead` further steps, so that it can load them before it needs them.  Near the end of an
epoch the rest is dealt evenly, so that ranks run dry together.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

LIMIT = 1 << 24  # beyond it not every integer is a float32
AHEAD = 2  # steps
ROUNDS = 6  # an even number
MASK = (1 << 64) - 1
Range = tuple[int, int, int]  # epoch, first position, position behind the last


class DataWord(NamedTuple):
    """What one rank says of its data in a step's reduction; each word is below LIMIT."""

    used: int  # samples that its gradient is made of
    want: int  # samples that it would hold for the steps to come
    end_low: int  # one more than the epoch's length, where it has met the end; else 0
    end_high: int
    digest: int  # of its table

    @property
    def end(self) -> int | None:
        """The epoch's length, if this rank has met it."""
        told = self.end_high * LIMIT + self.end_low
        return told - 1 if told else None


WORDS = len(DataWord._fields)


class Cut(NamedTuple):
    """Samples of one rank in one step: positions in the order of an epoch."""

    epoch: int
    positions: tuple[int, ...]


class RanksDiffer(RuntimeError):
    """The ranks of a job do not train on the same data, or do not agree on how far they are; the table is unchanged."""


class RangeTable(Protocol):
    """What both modes do."""

    batch: int

    @property
    def epoch(self) -> int:
        """The epoch of the step to come, from 0."""

    @property
    def progress(self) -> float:
        """Epochs done, with a fraction where the length is known."""

    @property
    def is_done(self) -> bool:
        """Whether no step is left."""

    def begin(self, members: Sequence[str], me: str) -> None:
        """Go on with these members, in rank order."""

    def resize(self, batch: int) -> None:
        """Go on with this global batch; to be called on all ranks between the same two steps."""

    def upcoming(self, steps: int) -> list[Cut]:
        """This rank's samples of the step to come, and what it will probably use in those after it."""

    def words(self) -> list[int]:
        """This rank's slot."""

    def agreed(self, words: Sequence[Sequence[int]]) -> None:
        """Count a step as done, by the slots of all ranks; RanksDiffer where they contradict each other."""

    def state(self) -> dict[str, Any]:
        """All that `load` needs, for JSON."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there; `begin` must follow."""


class Permutation:
    """A seeded order of [0, length) that keeps no list: a Feistel network, walked until it hits the range.

    Each round changes one half of the bits by a hash of the other, so it can be undone, so the network is one to one;
    and following a one-to-one map from inside the range until it is inside again is one to one on the range.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        bits = max(2, (length - 1).bit_length())
        self._length = length
        self._low_bits = bits // 2
        self._low, self._high = (1 << self._low_bits) - 1, (1 << (bits - self._low_bits)) - 1
        digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]

    def __getitem__(self, position: int) -> int:
        index = self._network(position)
        while index >= self._length:
            index = self._network(index)
        return index

    def _network(self, value: int) -> int:
        high, low = value >> self._low_bits, value & self._low
        for at in range(0, ROUNDS, 2):
            high ^= _mixed(low, self._keys[at]) & self._high
            low ^= _mixed(high, self._keys[at + 1]) & self._low
        return high << self._low_bits | low


def _mixed(value: int, key: int) -> int:
    value = (value ^ key) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ value >> 32) * 0xBF58476D1CE4E5B9 & MASK
    return value >> 32


class Reproducible:
    """A step's samples are the next `batch` in the order of the epoch, whatever the world size; a rank has a slice."""

    def __init__(self, *, length: int, batch: int, epochs: int, seed: int | None, first_epoch: int = 0) -> None:
        _check(length=length, epochs=epochs)
        self.batch = checked_batch(batch)
        self._length, self._epochs, self._seed = length, first_epoch + epochs, seed
        self._epoch, self._cursor = first_epoch, 0
        self._members: tuple[str, ...] = ()
        self._rank = 0

    @property
    def epoch(self) -> int:
        """See `RangeTable`."""
        return self._epoch

    @property
    def progress(self) -> float:
        """See `RangeTable`."""
        return self._epoch + self._cursor / max(1, self._length)

    @property
    def is_done(self) -> bool:
        """See `RangeTable`."""
        return self._epoch >= self._epochs or self._length == 0

    def begin(self, members: Sequence[str], me: str) -> None:
        """See `RangeTable`."""
        self._members, self._rank = tuple(members), _rank(members, me)

    def resize(self, batch: int) -> None:
        """See `RangeTable`."""
        self.batch = checked_batch(batch)

    def upcoming(self, steps: int) -> list[Cut]:
        """See `RangeTable`."""
        epoch, cursor = self._epoch, self._cursor
        cuts = [self._slice(epoch, cursor)]
        for _ in range(steps - 1):
            epoch, cursor = self._after(epoch, cursor)
            if epoch < self._epochs:
                cuts.append(self._slice(epoch, cursor))
        return cuts

    def words(self) -> list[int]:
        """See `RangeTable`."""
        return list(DataWord(len(self.upcoming(1)[0].positions), 0, 0, 0, _digest(self.state(), self._epochs)))

    def agreed(self, words: Sequence[Sequence[int]]) -> None:
        """See `RangeTable`."""
        slots = _slots(words, self._members, _digest(self.state(), self._epochs))
        size = self._size(self._cursor)
        for rank, slot in enumerate(slots):
            if slot.used != share(size, len(slots), rank):
                raise RanksDiffer(
                    f"rank {rank} used {slot.used} samples of {size}, not {share(size, len(slots), rank)}"
                )
        self._epoch, self._cursor = self._after(self._epoch, self._cursor)

    def state(self) -> dict[str, Any]:
        """See `RangeTable`."""
        return {
            "mode": "reproducible",
            "length": self._length,
            "seed": self._seed,
            "batch": self.batch,
            "epoch": self._epoch,
            "cursor": self._cursor,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """See `RangeTable`."""
        _expect(state, mode="reproducible", length=self._length, seed=self._seed)
        self.batch = checked_batch(state["batch"])
        self._epoch, self._cursor = state["epoch"], state["cursor"]

    def _size(self, cursor: int) -> int:
        return max(0, min(self.batch, self._length - cursor))

    def _after(self, epoch: int, cursor: int) -> tuple[int, int]:
        cursor += self._size(cursor)
        return (epoch, cursor) if cursor < self._length else (epoch + 1, 0)

    def _slice(self, epoch: int, cursor: int) -> Cut:
        size, world = self._size(cursor), len(self._members)
        first = cursor + sum(share(size, world, rank) for rank in range(self._rank))
        return Cut(epoch, tuple(range(first, first + share(size, world, self._rank))))


class OnDemand:
    """Ranks are handed ranges as they use them up: for data of unknown length, or where ranks differ in speed.

    `length` is None where it is not known; then `met_end` tells where this rank has seen the end of the data.
    """

    def __init__(
        self,
        *,
        length: int | None,
        batch: int,
        epochs: int,
        seed: int | None,
        ahead: int = AHEAD,
        first_epoch: int = 0,
    ) -> None:
        _check(length=length or 0, epochs=epochs, ahead=ahead)
        self.batch = checked_batch(batch)
        self._length, self._epochs, self._seed, self._ahead = length, first_epoch + epochs, seed, ahead
        self._epoch, self._used = first_epoch, 0
        self._fresh = [0, 0]  # of this epoch and of the next: the first position that was never handed out
        self._ends = [length, length]  # of both, where known
        self._held: dict[str, list[Range]] = {}  # in the order of use
        self._returned: list[Range] = []  # sorted
        self._wants: dict[str, int] = {}
        self._members: tuple[str, ...] = ()
        self._me = ""
        self._share = 0
        self._met: dict[int, int] = {}  # length of an epoch, as far as this rank alone knows
        self.found: tuple[int, int] | None = None  # the last epoch whose length was agreed on, and that
        self._base = self._written()  # after the last step that counted

    @property
    def epoch(self) -> int:
        """See `RangeTable`."""
        return self._epoch

    @property
    def progress(self) -> float:
        """See `RangeTable`."""
        return self._epoch + self._used / (self._ends[0] or self._used + 1)

    @property
    def is_done(self) -> bool:
        """See `RangeTable`."""
        return self._epoch >= self._epochs or self._length == 0

    def begin(self, members: Sequence[str], me: str) -> None:
        """See `RangeTable`: begins from the last step that counted, whatever was begun since and came to nothing."""
        rank = _rank(members, me)
        self._members, self._me = tuple(members), me
        self._read(self._base)
        for worker in [worker for worker in self._held if worker not in members]:
            self._give_back(self._held.pop(worker))
        self._ask_all(rank)

    def resize(self, batch: int) -> None:
        """See `RangeTable`."""
        self.batch = checked_batch(batch)
        self._ask_all(_rank(self._members, self._me))
        self._base = self._written()

    def ask(self, samples: int) -> None:
        """Use `samples` in a step from now on, on this rank alone, until the members or the batch change.

        For a rank that is slower or faster than the others.
        """
        self._share = samples
        self._want = min(samples * (1 + self._ahead), LIMIT - 1)

    def met_end(self, epoch: int, length: int) -> None:
        """Note that this rank saw the data of an epoch end behind `length` samples; told to all with the next slot."""
        self._met[epoch] = min(length, self._met.get(epoch, length))

    def upcoming(self, steps: int) -> list[Cut]:
        """See `RangeTable`.  The first is of this epoch, and empty for a rank that has nothing left of it."""
        cuts: list[Cut] = []
        for epoch in (self._epoch, self._epoch + 1):
            positions = self._mine(epoch) if self._share else ()
            cuts += [Cut(epoch, positions[at : at + self._share]) for at in range(0, len(positions), self._share or 1)]
            cuts = cuts or [Cut(self._epoch, ())]
        return cuts[:steps]

    def words(self) -> list[int]:
        """See `RangeTable`."""
        end = self._met.get(self._epoch)
        high, low = divmod(0 if end is None or self._length is not None else end + 1, LIMIT)
        used = len(self.upcoming(1)[0].positions)
        return list(DataWord(used, self._want, low, high, _digest(self._written(), self._epochs)))

    def agreed(self, words: Sequence[Sequence[int]]) -> None:
        """See `RangeTable`."""
        slots = _slots(words, self._members, _digest(self._written(), self._epochs))
        ends = [end for end in (self._ends[0], *(slot.end for slot in slots)) if end is not None]
        end = min(ends) if ends else None
        for rank, slot in enumerate(slots):
            held = _size(_below(self._held.get(self._members[rank], []), self._epoch, end), self._epoch)
            if slot.used > held:
                raise RanksDiffer(
                    f"rank {rank} used {slot.used} samples and holds {held} of epoch {self._epoch}: "
                    "does the dataset end at the same place on all ranks?"
                )
        self._end_at(end)
        for rank, slot in enumerate(slots):
            self._use(self._members[rank], slot.used)
            self._wants[self._members[rank]] = slot.want
        self._turn()
        self._deal()
        self._base = self._written()

    def state(self) -> dict[str, Any]:
        """See `RangeTable`.  After the last step that counted."""
        return self._base

    def load(self, state: Mapping[str, Any]) -> None:
        """See `RangeTable`."""
        _expect(state, mode="on_demand", length=self._length, seed=self._seed, ahead=self._ahead)
        self._read(state)
        self._base = self._written()

    def _written(self) -> dict[str, Any]:
        return {
            "mode": "on_demand",
            "length": self._length,
            "seed": self._seed,
            "batch": self.batch,
            "ahead": self._ahead,
            "epoch": self._epoch,
            "used": self._used,
            "fresh": list(self._fresh),
            "ends": list(self._ends),
            "held": {worker: [list(each) for each in ranges] for worker, ranges in self._held.items() if ranges},
            "returned": [list(each) for each in self._returned],
        }

    def _read(self, state: Mapping[str, Any]) -> None:
        self.batch = checked_batch(state["batch"])
        self._epoch, self._used = state["epoch"], state["used"]
        self._fresh, self._ends = list(state["fresh"]), list(state["ends"])
        self._held = {worker: [_range(each) for each in ranges] for worker, ranges in state["held"].items()}
        self._returned = [_range(each) for each in state["returned"]]

    def _ask_all(self, rank: int) -> None:
        """Every rank wants its even share from now on, until its slot says otherwise."""
        shares = [share(self.batch, len(self._members), each) for each in range(len(self._members))]
        self._wants = {
            worker: min(shares[each] * (1 + self._ahead), LIMIT - 1) for each, worker in enumerate(self._members)
        }
        self._share, self._want = shares[rank], self._wants[self._me]
        self._deal()

    def _mine(self, epoch: int) -> tuple[int, ...]:
        """Positions that this rank holds and that are there, in the order of use."""
        held = _below(self._held.get(self._me, []), epoch, self._met.get(epoch))
        return tuple(position for at, start, stop in held if at == epoch for position in range(start, stop))

    def _use(self, worker: str, count: int) -> None:
        held = self._held.get(worker, [])
        self._used += count
        while count:
            epoch, start, stop = held.pop(0)
            used = min(count, stop - start)
            count -= used
            if start + used < stop:
                held.insert(0, (epoch, start + used, stop))

    def _end_at(self, end: int | None) -> None:
        """Cut off what was handed out behind the end of this epoch."""
        if end is None:
            return
        if self._ends[0] is None:
            self.found = (self._epoch, end)
        self._ends[0] = end
        self._held = {worker: _below(ranges, self._epoch, end) for worker, ranges in self._held.items()}
        self._returned = _below(self._returned, self._epoch, end)

    def _turn(self) -> None:
        """Begin the next epoch, if nothing is left of this one."""
        is_held = any(_size(ranges, self._epoch) for ranges in self._held.values())
        if self._left(self._epoch) == 0 and not is_held:
            self._epoch, self._used = self._epoch + 1, 0
            self._fresh, self._ends = [self._fresh[1], 0], [self._ends[1], self._length]

    def _left(self, epoch: int) -> int | None:
        """How many samples of an epoch are in the pool; None where that is not known."""
        end = self._ends[epoch - self._epoch]
        return None if end is None else _size(self._returned, epoch) + max(0, end - self._fresh[epoch - self._epoch])

    def _deal(self) -> None:
        """Let each member hold as much as it wants: of this epoch first, of the next when the pool has nothing else."""
        for worker in self._members:
            self._trim(worker)
        for epoch in range(self._epoch, min(self._epoch + 2, self._epochs)):
            self._deal_from(epoch)
            if self._left(epoch) != 0:
                return

    def _trim(self, worker: str) -> None:
        """Take back what a member holds beyond what it wants."""
        held = self._held.setdefault(worker, [])
        excess = sum(stop - start for _, start, stop in held) - self._wants[worker]
        while excess > 0:
            epoch, start, stop = held.pop()
            kept = max(start, stop - excess)
            excess -= stop - kept
            self._give_back([(epoch, kept, stop)])
            if start < kept:
                held.append((epoch, start, kept))

    def _deal_from(self, epoch: int) -> None:
        while True:
            left = self._left(epoch)
            needs = {worker: self._wants[worker] - self._holds(worker, epoch) for worker in self._members}
            hungry = [worker for worker, need in needs.items() if need > 0]
            if not hungry or left == 0:
                return
            most = LIMIT if left is None else max(1, left // len(hungry))
            for worker in hungry:
                if self._left(epoch) != 0:
                    self._hold(worker, self._take(epoch, min(most, needs[worker])))

    def _holds(self, worker: str, epoch: int) -> int:
        """How many samples of this epoch, and of those before the given one, a member holds."""
        return sum(stop - start for at, start, stop in self._held[worker] if at <= epoch)

    def _take(self, epoch: int, most: int) -> Range:
        """Out of the pool, what was returned first; never empty while something is left."""
        for at, (each, start, stop) in enumerate(self._returned):
            if each == epoch:
                self._returned[at : at + 1] = [(epoch, start + most, stop)] if start + most < stop else []
                return epoch, start, min(start + most, stop)
        end, start = self._ends[epoch - self._epoch], self._fresh[epoch - self._epoch]
        stop = start + most if end is None else min(start + most, end)
        self._fresh[epoch - self._epoch] = stop
        return epoch, start, stop

    def _hold(self, worker: str, taken: Range) -> None:
        """Put a range behind the others of its epoch."""
        held = self._held[worker]
        at = sum(each[0] <= taken[0] for each in held)
        if at and held[at - 1][0] == taken[0] and held[at - 1][2] == taken[1]:
            at -= 1
            taken = (taken[0], held.pop(at)[1], taken[2])
        held.insert(at, taken)

    def _give_back(self, ranges: Sequence[Range]) -> None:
        merged: list[Range] = []
        for each in sorted([*self._returned, *ranges]):
            if merged and merged[-1][0] == each[0] and merged[-1][2] == each[1]:
                merged[-1] = (each[0], merged[-1][1], each[2])
            else:
                merged.append(each)
        self._returned = merged


def is_between(state: Mapping[str, Any]) -> bool:
    """Whether a table is between two epochs: nothing of the one to come was used or handed out."""
    return not any(state.get(name) for name in ("cursor", "used", "held", "returned")) and not any(
        state.get("fresh", ())
    )


def share(batch: int, world: int, rank: int) -> int:
    """This rank's part of a batch; parts differ by one at most."""
    return batch // world + (rank < batch % world)


def checked_batch(batch: int) -> int:
    """The global batch, or ValueError."""
    if not 1 <= batch < LIMIT:
        raise ValueError(f"global_batch is {batch}; it must be from 1 to {LIMIT - 1}")
    return batch


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise ValueError(f"{name} is {value}; it must be 0 or more")


def _rank(members: Sequence[str], me: str) -> int:
    if len(set(members)) != len(members):
        raise ValueError(f"members are {list(members)}; each must be there once")
    if me not in members:
        raise ValueError(f"worker {me!r} is none of the members {list(members)}")
    return list(members).index(me)


def _below(ranges: Sequence[Range], epoch: int, end: int | None) -> list[Range]:
    """Without what lies behind the end of this epoch."""
    if end is None:
        return list(ranges)
    cut = [(at, start, min(stop, end) if at == epoch else stop) for at, start, stop in ranges]
    return [each for each in cut if each[1] < each[2]]


def _size(ranges: Sequence[Range], epoch: int) -> int:
    return sum(stop - start for at, start, stop in ranges if at == epoch)


def _digest(state: Mapping[str, Any], epochs: int) -> int:
    return zlib.crc32(json.dumps([state, epochs], sort_keys=True).encode()) % LIMIT


def _slots(words: Sequence[Sequence[int]], members: Sequence[str], digest: int) -> list[DataWord]:
    """The slots of all ranks, whose tables must be this one's."""
    if len(words) != len(members):
        raise RanksDiffer(f"there are slots of {len(words)} ranks, and {len(members)} members")
    slots = [DataWord(*each) for each in words]
    others = [rank for rank, slot in enumerate(slots) if slot.digest != digest]
    if others:
        raise RanksDiffer(
            f"the data of ranks {others} are not this rank's: dataset length, seed, epochs, batch, mode and prefetch "
            "must be the same on all ranks"
        )
    return slots


def _expect(state: Mapping[str, Any], **own: object) -> None:
    for name, value in own.items():
        if state.get(name) != value:
            raise ValueError(
                f"{name} of the data is {value!r}, and was {state.get(name)!r} where training left off: "
                "go on with the same, or start anew"
            )


def _range(value: Sequence[int]) -> Range:
    epoch, start, stop = value
    return epoch, start, stop

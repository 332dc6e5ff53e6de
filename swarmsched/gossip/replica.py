"""One node's copy of everyone's owned records of one kind: newest version per key, and the order of their changes.

Invariants: a key's stamp never falls, not even through an entry's expiry (its last stamp is remembered as a grave);
an entry's bytes are the ones that its owner wrote.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Generic, TypeVar

from swarmsched.fields import Value
from swarmsched.gossip.exchange import ID_LENGTH, Stamp, short_id

GRAVES_LIMIT = 20_000
QUARANTINE_LIMIT = 1_000
VERSION_JUMP_LIMIT = 2**20

T = TypeVar("T")


class Verdict(Enum):
    """What became of an offered entry."""

    ADOPTED = "adopted"
    OLD = "old"  # known, or older than what is known
    REFUSED = "refused"  # too far ahead, too old in age, quarantined, or no space


class Entry(Value, Generic[T]):
    """One record.  `born_s`: when its owner wrote it, on our clock; `origin` is that owner."""

    key: str
    identity: bytes
    origin: str
    stamp: Stamp
    value: T
    body: bytes
    born_s: float
    changed_round: int


class Replica(Generic[T]):
    """Versioned entries by key.  At `limit` entries new keys are refused."""

    def __init__(self, limit: int, keep_s: float) -> None:
        self._limit = limit
        self._keep_s = keep_s
        self._entries: OrderedDict[str, Entry[T]] = OrderedDict()  # oldest change first
        self._keys: dict[bytes, str] = {}
        self._graves: OrderedDict[str, Stamp] = OrderedDict()
        self._quarantine: OrderedDict[bytes, Stamp] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def get(self, key: str) -> Entry[T] | None:
        """The newest entry of a key."""
        return self._entries.get(key)

    def by_id(self, identity: bytes) -> Entry[T] | None:
        """The newest entry of a digest's id."""
        key = self._keys.get(identity)
        return None if key is None else self._entries[key]

    def offer(
        self,
        key: str,
        origin: str,
        stamp: Stamp,
        value: T,
        body: bytes,
        *,
        age_s: float,
        now_s: float,
        round_number: int,
    ) -> Verdict:
        """Keep an entry that is newer than what is known or was known."""
        known = self._entries.get(key)
        last = known.stamp if known else self._graves.get(key)
        if last is not None and stamp <= last:
            return Verdict.OLD
        if age_s > self._keep_s or is_jump(last, stamp):
            return Verdict.REFUSED
        if known is None and len(self._entries) >= self._limit:
            return Verdict.REFUSED
        identity = known.identity if known else short_id(key)
        if self._keys.setdefault(identity, key) != key:
            return Verdict.REFUSED  # two keys with one 48-bit id: the first one stays
        self._graves.pop(key, None)
        self._quarantine.pop(identity, None)
        self._entries[key] = Entry(key, identity, origin, stamp, value, body, now_s - age_s, round_number)
        self._entries.move_to_end(key)
        return Verdict.ADOPTED

    def wants(self, identity: bytes, stamp: Stamp) -> Stamp | None:
        """The stamp that we have of an id if the given one would be news, else None."""
        entry = self.by_id(identity)
        known = entry.stamp if entry else (0, 0)
        banned = self._quarantine.get(identity)
        return known if stamp > known and (banned is None or stamp > banned) else None

    def quarantine(self, identity: bytes, stamp: Stamp) -> None:
        """Do not ask for this version (or an older one) again."""
        self._quarantine[identity] = stamp
        if len(self._quarantine) > QUARANTINE_LIMIT:
            self._quarantine.popitem(last=False)

    @property
    def quarantined(self) -> int:
        """Ids under quarantine."""
        return len(self._quarantine)

    def changed_since(self, round_number: int) -> list[Entry[T]]:
        """Entries that changed here in or after a round, newest change first."""
        result = []
        for entry in reversed(self._entries.values()):
            if entry.changed_round < round_number:
                break
            result.append(entry)
        return result

    def expire(self, now_s: float, spared: Iterable[str] = ()) -> list[str]:
        """Drop entries older than `keep_s`, except spared keys; remember their stamps."""
        kept = set(spared)
        old = [
            entry.key
            for entry in self._entries.values()
            if now_s - entry.born_s > self._keep_s and entry.key not in kept
        ]
        for key in old:
            self.bury(key)
        return old

    def bury(self, key: str) -> None:
        """Forget an entry; only a newer version of it is taken again."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        del self._keys[entry.identity]
        self._graves[key] = entry.stamp
        if len(self._graves) > GRAVES_LIMIT:
            self._graves.popitem(last=False)

    def validate(self) -> None:
        """Re-derive the cross references."""
        assert len(self._keys) == len(self._entries) <= self._limit
        for key, entry in self._entries.items():
            assert entry.key == key
            assert self._keys[entry.identity] == key
            assert len(entry.identity) == ID_LENGTH
            assert key not in self._graves
        rounds = [entry.changed_round for entry in self._entries.values()]
        assert rounds == sorted(rounds)
        assert len(self._graves) <= GRAVES_LIMIT


def is_jump(known: Stamp | None, offered: Stamp) -> bool:
    """True when a version of the same generation (or epoch) is further ahead than an honest owner gets."""
    return known is not None and known[0] == offered[0] and offered[1] > known[1] + VERSION_JUMP_LIMIT


def fair_order(entries: Iterable[Entry[T]]) -> list[Entry[T]]:
    """Newest change first within an origin, one of each origin in turn, new and old origins alternating.

    Cut anywhere, such a list leaves no origin out for ever: the newest news goes first, and right behind it what
    has waited longest.
    """
    by_origin: dict[str, list[Entry[T]]] = {}
    for entry in entries:
        by_origin.setdefault(entry.origin, []).append(entry)
    turns: list[list[Entry[T]]] = []
    for queue in by_origin.values():
        for position, entry in enumerate(queue):
            if position == len(turns):
                turns.append([])
            turns[position].append(entry)
    return [entry for turn in turns for entry in _from_both_ends(turn)]


def _from_both_ends(turn: list[Entry[T]]) -> Iterator[Entry[T]]:
    low, high = 0, len(turn) - 1
    while low <= high:
        yield turn[low]
        if low < high:
            yield turn[high]
        low, high = low + 1, high - 1

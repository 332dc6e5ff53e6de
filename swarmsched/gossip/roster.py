"""The table of members: who is live, who is dead, who lives at which address, and the hash of it all."""

import random
from collections.abc import Collection, Iterator

from msgspec.structs import replace

from swarmsched.gossip.member import Member, fingerprint
from swarmsched.gossip.message import Standing, Update
from swarmsched.ids import Address, NodeId

MEMBERS_MAX = 20_000
AGE_S_MAX = 2**31  # of a verdict that is heard of; half of what an age may be when it is told on


class Roster:
    """Members other than this node, at most 20,000.

    `hash` is the exclusive or of the members' fingerprints, kept up to date with each change.
    """

    def __init__(self, rng: random.Random) -> None:
        self.hash = 0
        self._rng = rng
        self._members: dict[NodeId, Member] = {}
        self._by_address: dict[Address, NodeId] = {}  # the member that last claimed the address
        self._dead: dict[NodeId, None] = {}  # failed or left
        self._live: list[NodeId] | None = None  # cache, made when asked for

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    @property
    def is_full(self) -> bool:
        """True when unknown members are refused."""
        return len(self._members) >= MEMBERS_MAX

    @property
    def live(self) -> list[NodeId]:
        """Names that are alive, suspect or in conflict, in order of arrival.  Do not change the list."""
        if self._live is None:
            self._live = [name for name in self._members if name not in self._dead]
        return self._live

    @property
    def dead(self) -> Collection[NodeId]:
        """Names that failed or left and are not yet forgotten."""
        return self._dead.keys()

    def get(self, node: NodeId) -> Member | None:
        """The member of that name."""
        return self._members.get(node)

    def at(self, address: Address) -> Member | None:
        """The member that lives at an address."""
        name = self._by_address.get(address)
        return None if name is None else self._members[name]

    def put(self, update: Update, now_s: float) -> Member:
        """Make `update` what is known of its member; `age_s` turns into the time of the verdict."""
        stored = replace(update, age_s=0) if update.age_s else update
        verdict_s = now_s - min(update.age_s, AGE_S_MAX)
        member = self._members.get(update.node)
        is_new = member is None
        if member is None:
            member = self._members[update.node] = Member(stored, verdict_s)
        else:
            self.hash ^= member.fingerprint
            self._forget_address(member)
            member.learn(stored, verdict_s)
        self.hash ^= member.fingerprint
        self._index(member, is_new=is_new)
        return member

    def remove(self, node: NodeId) -> None:
        """Forget a member altogether."""
        member = self._members.pop(node)
        self.hash ^= member.fingerprint
        self._forget_address(member)
        self._dead.pop(node, None)
        self._live = None

    def sample(self, count: int, excluding: Collection[NodeId] = ()) -> list[NodeId]:
        """Up to `count` different live names, drawn at random."""
        live = self.live
        if excluding:
            live = [name for name in live if name not in excluding]
        return self._rng.sample(live, min(count, len(live)))

    def claim(self, member: Member, now_s: float) -> Update:
        """What to tell others of a member: the dead with the age of the verdict."""
        if member.update.standing < Standing.FAILED:
            return member.update
        return replace(member.update, age_s=int(max(0.0, now_s - member.changed_s)))

    def validate(self) -> None:
        """Re-derive every cross-reference; AssertionError if one is wrong."""
        expected = 0
        for name, member in self._members.items():
            assert member.update.node == name
            assert member.fingerprint == fingerprint(member.update), name
            assert (name in self._dead) == (not member.is_live), name
            expected ^= member.fingerprint
        assert self.hash == expected
        assert len(self._members) <= MEMBERS_MAX
        assert set(self.live) == {name for name, member in self._members.items() if member.is_live}
        assert all(self._members[name].update.address == where for where, name in self._by_address.items())

    def _index(self, member: Member, *, is_new: bool) -> None:
        name = member.update.node
        self._by_address[member.update.address] = name
        was_dead = name in self._dead
        if member.is_live:
            self._dead.pop(name, None)
        else:
            self._dead[name] = None
        if is_new or was_dead == member.is_live:
            self._live = None

    def _forget_address(self, member: Member) -> None:
        address = member.update.address
        if self._by_address.get(address) == member.update.node:
            del self._by_address[address]

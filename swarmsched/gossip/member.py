"""What a node knows of one member, and the picture of it that others are shown."""

from enum import Enum
from functools import lru_cache
from hashlib import blake2b

from swarmsched.fields import Value
from swarmsched.gossip.message import Standing, Update
from swarmsched.ids import Address, NodeId


class MemberStatus(Enum):
    """The published verdict.  SUSPECT only stops new placements; FAILED starts recovery."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    FAILED = "failed"
    LEFT = "left"
    CONFLICT = "conflict"  # two live processes answer under this name: no new placements, running work goes on


FINGERPRINTS_REMEMBERED = 1_024

_STATUS = {standing: MemberStatus[standing.name] for standing in Standing}


class MemberView(Value):
    """One member at one moment.  `since_s` is the age of the status in seconds, by the viewer's clock."""

    node_id: NodeId
    address: Address
    generation: int
    incarnation: int
    status: MemberStatus
    since_s: float
    instance_id: bytes
    software_version: str
    lowest_minor: int
    highest_minor: int
    degraded_udp: bool = False  # the viewer reaches it over the peer channel only
    indirect_only: bool = False  # the viewer's packets do not reach it, those of others do

    @property
    def is_available(self) -> bool:
        """True if new work may be placed there."""
        return self.status is MemberStatus.ALIVE


class MemberChanged(Value):
    """An announcement: this member's status or generation is new; `previous` is None for one never heard of."""

    member: MemberView
    previous: MemberStatus | None


class Member:
    """The mutable record behind a view.  Only `Roster` and `Membership` touch it."""

    __slots__ = ("changed_s", "degraded_udp", "fingerprint", "indirect_only", "update")

    def __init__(self, update: Update, now_s: float) -> None:
        self.update = update  # the largest claim known, with `age_s` 0
        self.changed_s = now_s  # when the verdict was reached, by this node's clock
        self.fingerprint = fingerprint(update)
        self.degraded_udp = False
        self.indirect_only = False

    def learn(self, update: Update, verdict_s: float) -> None:
        """A larger claim is known, with `age_s` 0; the verdict was reached then, where it is another one."""
        if self.update.standing is not update.standing or self.update.generation != update.generation:
            self.changed_s = verdict_s
        self.update, self.fingerprint = update, fingerprint(update)

    @property
    def is_live(self) -> bool:
        """True while it is to be probed and gossiped with: alive, suspect or in conflict."""
        return self.update.standing <= Standing.SUSPECT

    @property
    def status(self) -> MemberStatus:
        """The published verdict."""
        return status_of(self.update)

    def view(self, now_s: float) -> MemberView:
        """The picture of it at `now_s`."""
        known = self.update
        return MemberView(
            node_id=known.node,
            address=known.address,
            generation=known.generation,
            incarnation=known.incarnation,
            status=self.status,
            since_s=max(0.0, now_s - self.changed_s),
            instance_id=known.instance_id,
            software_version=known.software_version,
            lowest_minor=known.lowest_minor,
            highest_minor=known.highest_minor,
            degraded_udp=self.degraded_udp,
            indirect_only=self.indirect_only,
        )


def status_of(update: Update) -> MemberStatus:
    """Conflict shows only while the name is live at all."""
    if update.is_conflict and update.standing <= Standing.SUSPECT:
        return MemberStatus.CONFLICT
    return _STATUS[update.standing]


@lru_cache(FINGERPRINTS_REMEMBERED)
def fingerprint(update: Update) -> int:
    """64 bits of (id, generation, incarnation, standing, conflict), the same at every node."""
    text = f"{update.node} {update.generation} {update.incarnation} {update.standing.value} {update.is_conflict:d}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")

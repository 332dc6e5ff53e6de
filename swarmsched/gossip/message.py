"""Plane A messages: probes, acknowledgements, rumours, hashes and member lists.

The first byte of an encoded message is its kind: 1 to 31 are plane A's, 32 to 63 plane B's, 64 and above peer
messages of the other planes.  `MemberList`, `StreamPing` and `StreamPong` also travel on the peer channel.
"""

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from swarmsched.fields import U8, U32, U53, U64, Host, NodeName, Port, Value
from swarmsched.ids import Address
from swarmsched.wire.codec import Codec

MEMBERS_PER_LIST = 500
"""A longer member list goes in several messages, so that no single step takes long."""

FIRST_KIND, LAST_KIND = 1, 31


class Standing(IntEnum):
    """What is claimed of a member, in the order in which claims of one incarnation override one another."""

    ALIVE = 0
    SUSPECT = 1
    FAILED = 2
    LEFT = 3


InstanceId = Annotated[bytes, Meta(max_length=16)]


class Update(Value):
    """A claim about one member.

    Claims are ordered by (generation, incarnation, standing); the largest wins wherever they meet, so members agree
    whatever the order of arrival.  `age_s`, in whole seconds since the verdict, travels with FAILED and LEFT alone:
    it lets every node forget the dead at nearly the same time instead of teaching one another for ever.
    """

    node: NodeName
    host: Host
    port: Port
    generation: U53
    incarnation: U32
    standing: Standing
    instance_id: InstanceId
    is_conflict: bool = False
    accuser: Annotated[str, Meta(max_length=63)] = ""  # who suspects; independent accusers shorten the suspicion
    age_s: U32 = 0
    software_version: Annotated[str, Meta(max_length=32)] = ""
    lowest_minor: U8 = 0
    highest_minor: U8 = 0

    @property
    def address(self) -> Address:
        """Where the member says that it can be reached."""
        return (self.host, self.port)

    @property
    def key(self) -> tuple[int, int, int]:
        """(generation, incarnation, standing): the larger claim wins."""
        return (self.generation, self.incarnation, self.standing)


Rumours = Annotated[tuple[Update, ...], Meta(max_length=64)]


class Ping(Value):
    """Are you there?  Answered only by the node called `target`."""

    sequence: U32
    target: NodeName
    sender: NodeName
    updates: Rumours = ()


class Ack(Value):
    """`sender` is there; answers the `Ping` of that sequence number."""

    sequence: U32
    sender: NodeName
    generation: U53
    incarnation: U32
    instance_id: InstanceId
    updates: Rumours = ()


class PingRequest(Value):
    """I did not reach `target`: try for me, and tell me within `timeout_ms` whether you did."""

    sequence: U32
    target: NodeName
    host: Host
    port: Port
    sender: NodeName
    timeout_ms: U32
    updates: Rumours = ()


class RelayAnswer(Value):
    """A helper's answer to `PingRequest`: whether `target` acknowledged.  A "no" proves that the helper lives."""

    sequence: U32
    helper: NodeName
    target: NodeName
    is_reached: bool
    updates: Rumours = ()


class Gossip(Value):
    """Rumours alone; also the direct correction of a peer whose news is old."""

    updates: Rumours


class Hello(Value):
    """Who I am and the hash of all that I know of the membership: greets seeds, the dead, and one peer every 5 s.

    Equal hashes need no answer unless `wants_answer`; different ones are answered with the member list.
    """

    sender: Update
    membership_hash: U64
    wants_answer: bool
    updates: Rumours = ()


class MemberList(Value):
    """What the sender knows of members; over the peer channel if it exceeds a packet, in parts if it is long."""

    sender: NodeName
    updates: Annotated[tuple[Update, ...], Meta(max_length=MEMBERS_PER_LIST)]
    wants_answer: bool  # send yours in return


class StreamPing(Value):
    """The probe over the peer channel, when no packet of it was answered.  Not answered under another name."""

    sequence: U32
    target: NodeName


class StreamPong(Value):
    """Answers `StreamPing`: the node lives, though its UDP does not get through."""

    sequence: U32
    sender: NodeName
    generation: U53
    incarnation: U32


MEMBERSHIP_KINDS: dict[int, type] = {
    1: Ping,
    2: Ack,
    3: PingRequest,
    4: RelayAnswer,
    5: Gossip,
    6: Hello,
    7: MemberList,
}
MEMBERSHIP_PEER_KINDS: dict[int, type] = {7: MemberList, 8: StreamPing, 9: StreamPong}

MEMBERSHIP_CODEC = Codec(MEMBERSHIP_KINDS)


def is_membership_payload(payload: bytes) -> bool:
    """True if a datagram's payload is plane A's, by its first byte."""
    return bool(payload) and FIRST_KIND <= payload[0] <= LAST_KIND

"""Packs digests and answers into datagrams or peer messages, and keeps what is sent under the byte cap.

Nothing is queued here: what the cap or a packet's size leaves out is dropped and said to be cut; a later round, or
the other side's next question, brings it.
"""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from swarmsched.effects import Effect, SendDatagram, SendPeer
from swarmsched.gossip.budget import TokenBucket, byte_cap
from swarmsched.gossip.exchange import (
    DATAGRAM_CODEC,
    PARCELS_LIMIT,
    FullStateAnswer,
    FullStateRequest,
    Parcel,
    StateDelta,
    StateDigest,
    pack_listing,
)
from swarmsched.gossip.library import PARCEL_OVERHEAD_BYTES, DueParcels
from swarmsched.ids import Address, NodeId

PACKET_OVERHEAD_BYTES = 72  # what IP, UDP and sealing add; counted against the byte cap
PACKETS_PER_ANSWER = 4
STREAM_BURST_S = 20.0
STREAM_BYTES_MAX = 262_144
MESSAGE_OVERHEAD_BYTES = 32
WANTS_PER_PACKET = 16
RANGE_OVERHEAD_BYTES = 48

Route = Address | NodeId
"""Where an answer goes: an address for datagrams, a node over the peer channel."""


class Courier:
    """Sends for one state plane."""

    def __init__(self, packet_bytes: int, counters: Counter[str]) -> None:
        self._packet_bytes = packet_bytes
        self._counters = counters
        self._packets = TokenBucket(byte_cap(1), burst_s=1.0)
        self._streams = TokenBucket(byte_cap(1), burst_s=STREAM_BURST_S)
        self._was_capped = False

    def take_capped(self) -> bool:
        """Whether the cap has held something back since this was last asked."""
        was_capped, self._was_capped = self._was_capped, False
        return was_capped

    def set_members(self, count: int, now_s: float) -> None:
        """The cap follows the size of the swarm."""
        self._packets.set_rate(byte_cap(count), now_s)
        self._streams.set_rate(byte_cap(count), now_s)

    def stream_budget(self, now_s: float) -> int:
        """Bytes of one page that may go over the peer channel now."""
        return min(STREAM_BYTES_MAX, int(self._streams.available(now_s)))

    def send_digest(self, digest: StateDigest, address: Address, node_id: NodeId | None, now_s: float) -> list[Effect]:
        """One datagram if it fits, else (if the node is known) over the peer channel."""
        payload = DATAGRAM_CODEC.encode(digest)
        if len(payload) <= self._packet_bytes and not digest.is_full:
            return self._datagram(address, payload, now_s)
        return [] if node_id is None else self.send_message(node_id, digest, len(payload), now_s)

    def send_message(
        self,
        node_id: NodeId,
        message: StateDigest | StateDelta | FullStateRequest | FullStateAnswer,
        size: int,
        now_s: float,
    ) -> list[Effect]:
        """One message over the peer channel, or nothing when the cap does not allow it."""
        if not self._streams.take(size + PACKET_OVERHEAD_BYTES, now_s):
            return self._capped()
        self._counters["stream_messages_sent"] += 1
        self._counters["stream_bytes_sent"] += size + PACKET_OVERHEAD_BYTES
        return [SendPeer(node_id, message)]

    def send_answer(self, answer: DueParcels, route: Route, now_s: float) -> list[Effect]:
        """As much of an answer as packets and cap allow; nothing for an empty one."""
        if answer.is_empty:
            return []
        if isinstance(route, str):
            return self._answer_by_stream(answer, route, now_s)
        return self._answer_by_datagrams(answer, route, now_s)

    def push(self, parcels: Sequence[Parcel], addresses: Sequence[Address], now_s: float) -> list[Effect]:
        """The same parcels to each address, in as many datagrams as they need."""
        effects = []
        for packet in self._packets_of(parcels, self._packet_bytes):
            payload = DATAGRAM_CODEC.encode(StateDelta(parcels=tuple(packet)))
            for address in addresses:
                effects += self._datagram(address, payload, now_s)
        return effects

    def _answer_by_stream(self, answer: DueParcels, node_id: NodeId, now_s: float) -> list[Effect]:
        wants = len(answer.want_nodes) + len(answer.want_cards) + len(answer.want_locations)
        fixed = MESSAGE_OVERHEAD_BYTES + 24 * wants
        fixed += sum(RANGE_OVERHEAD_BYTES + len(span.listing) for span in answer.ranges)
        parcels, is_cut = fill(answer, self.stream_budget(now_s) - fixed)
        delta = StateDelta(
            tuple(parcels[:PARCELS_LIMIT]),
            pack_listing(answer.want_nodes),
            pack_listing(answer.want_cards),
            pack_listing(answer.want_locations),
            answer.wants_setting,
            is_cut or len(parcels) > PARCELS_LIMIT,
            tuple(answer.ranges),
        )
        return self.send_message(node_id, delta, fixed + _size(parcels), now_s)

    def _answer_by_datagrams(self, answer: DueParcels, address: Address, now_s: float) -> list[Effect]:
        room = min(PACKETS_PER_ANSWER * self._packet_bytes, int(self._packets.available(now_s)))
        wants = self._first_packet(answer)
        reserved = len(DATAGRAM_CODEC.encode(wants))
        parcels, is_cut = fill(answer, room - reserved - PACKETS_PER_ANSWER * MESSAGE_OVERHEAD_BYTES)
        packets = self._packets_of(parcels, self._packet_bytes, reserved) or [[]]
        effects: list[Effect] = []
        for number, packet in enumerate(packets):
            last_cut = is_cut and number == len(packets) - 1
            asked = wants if number == 0 else StateDelta()
            delta = replace(asked, parcels=tuple(packet), is_cut=last_cut)
            effects += self._datagram(address, DATAGRAM_CODEC.encode(delta), now_s)
        self._counters["answers_cut"] += is_cut
        return effects

    def _first_packet(self, answer: DueParcels) -> StateDelta:
        """The wants of an answer as far as they go into one packet beside some parcels."""
        return StateDelta(
            want_nodes=pack_listing(answer.want_nodes[:WANTS_PER_PACKET]),
            want_cards=pack_listing(answer.want_cards[:WANTS_PER_PACKET]),
            want_locations=pack_listing(answer.want_locations[: WANTS_PER_PACKET // 2]),
            wants_setting=answer.wants_setting,
        )

    def _packets_of(
        self, parcels: Sequence[Parcel], limit: int, reserved: int = MESSAGE_OVERHEAD_BYTES
    ) -> list[list[Parcel]]:
        packets: list[list[Parcel]] = []
        left = -1
        for parcel in parcels:
            size = len(parcel.body) + PARCEL_OVERHEAD_BYTES
            if size > left:
                left = limit - (MESSAGE_OVERHEAD_BYTES if packets else max(reserved, MESSAGE_OVERHEAD_BYTES))
                packets.append([])
            packets[-1].append(parcel)
            left -= size
        return packets

    def _datagram(self, address: Address, payload: bytes, now_s: float) -> list[Effect]:
        if not self._packets.take(len(payload) + PACKET_OVERHEAD_BYTES, now_s):
            return self._capped()
        self._counters["datagrams_sent"] += 1
        self._counters["datagram_bytes_sent"] += len(payload) + PACKET_OVERHEAD_BYTES
        return [SendDatagram(address, payload)]

    def _capped(self) -> list[Effect]:
        self._was_capped = True
        self._counters["sends_capped"] += 1
        return []


def fill(answer: DueParcels, budget_bytes: int) -> tuple[list[Parcel], bool]:
    """(parcels to send, whether something is left out): cards get half of the budget, then whatever is not used."""
    classes = (answer.nodes, answer.cards, answer.locations)
    shares = (budget_bytes * 3 // 8, budget_bytes // 2, budget_bytes // 8)
    rests: list[Sequence[Parcel]] = []
    taken: list[Parcel] = []
    for parcels, share in zip(classes, shares, strict=True):
        count = _count_within(parcels, share)
        taken += parcels[:count]
        rests.append(parcels[count:])
    left = budget_bytes - _size(taken)
    is_cut = False
    for rest in rests:
        count = _count_within(rest, left)
        taken += rest[:count]
        left -= _size(rest[:count])
        is_cut = is_cut or count < len(rest)
    return taken, is_cut


def _count_within(parcels: Sequence[Parcel], budget_bytes: int) -> int:
    for count, parcel in enumerate(parcels):
        budget_bytes -= len(parcel.body) + PARCEL_OVERHEAD_BYTES
        if budget_bytes < 0:
            return count
    return len(parcels)


def _size(parcels: Sequence[Parcel]) -> int:
    return sum(len(parcel.body) + PARCEL_OVERHEAD_BYTES for parcel in parcels)

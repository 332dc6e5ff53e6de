"""The bytes of every kind of message and stored value stay what they were in version 1.0 of the wire.

`golden.txt` holds least and rich samples.  Fields that came later follow those of the sample, at whatever depth.
"""

import random
import resource
from pathlib import Path

import msgpack
import pytest

from swarmsched.card import JobCard
from swarmsched.errors import RemoteProtocolError
from swarmsched.gossip.exchange import DATAGRAM_CODEC
from swarmsched.gossip.location import _Wire
from swarmsched.gossip.message import MEMBERSHIP_CODEC
from swarmsched.gossip.record import NodeRecord
from swarmsched.gossip.setting import SwarmSetting
from swarmsched.jobs.acceptor import Slot
from swarmsched.ledger.booking import Booking, StoredFence
from swarmsched.negotiation.owner import StoredTask
from swarmsched.node.protocol import PEER_CODEC
from swarmsched.wire.codec import decode_value, encode_value

STORED = (Slot, Booking, StoredFence, StoredTask, NodeRecord, JobCard, _Wire, SwarmSetting)
SAMPLES = [line.split() for line in Path(__file__).with_name("golden.txt").read_text().splitlines()]


def begins_with(new: object, old: object) -> bool:
    """True if `new` is `old`, or lists more in the place of a list of it."""
    if isinstance(old, list):
        return isinstance(new, list) and len(new) >= len(old) and all(map(begins_with, new, old))
    return bool(msgpack.packb(new) == msgpack.packb(old))  # 1, 1.0 and True are equal, but not the same on the wire


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_a_sample_is_read_and_written_again_as_it_was(name: str, sample: str) -> None:
    old = bytes.fromhex(sample)
    stored = next((cls for cls in STORED if cls.__name__ == name), None)
    if stored:
        new = encode_value(stored, decode_value(stored, old))
        assert begins_with(msgpack.unpackb(new), msgpack.unpackb(old))
        return
    codec = next(each for each in (MEMBERSHIP_CODEC, DATAGRAM_CODEC, PEER_CODEC) if old[0] in each.kinds)
    message = codec.decode(old)
    new = codec.encode(message)
    assert (type(message).__name__, new[0]) == (name, old[0])
    assert begins_with(msgpack.unpackb(new[1:]), msgpack.unpackb(old[1:]))
    assert len(new) > len(old) or new == old


HEADS = [
    b"\x91" * 3_000, b"\x81\xa1a" * 1_500, b"\xcb\x7f\xf8" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xc0", b"\xc1",
    b"\xd6\xff\0\0\0\1", b"\xa2\xff\xfe", *(bytes([head]) + b"\xff" * 4 for head in range(0xC4, 0xE0)),
]  # fmt: skip


def mutilated(rng: random.Random) -> bytes:
    """A sample, but for a few bytes, cuts, foreign parts, and promises of gigabytes."""
    data = bytearray.fromhex(rng.choice(SAMPLES)[1])
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        cut = rng.choice((0, 0, 1, rng.randint(1, 9), rng.randint(1, 200)))
        other = bytes.fromhex(rng.choice(SAMPLES)[1])
        start = rng.randrange(len(other))
        data[at : at + cut] = rng.choice((rng.choice(HEADS), rng.randbytes(1), b"", other[start : start + cut]))
    return bytes(data)


@pytest.mark.parametrize("count", [5_000, pytest.param(300_000, marks=pytest.mark.acceptance)])
def test_mutilated_samples_raise_protocol_errors_or_are_values_within_bounds_and_cost_little(count: int) -> None:
    rng, before = random.Random(count), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        data = mutilated(rng)
        for cls in STORED:
            try:
                value: object = decode_value(cls, data)
            except RemoteProtocolError:
                continue
            assert decode_value(cls, encode_value(cls, value)) == value, data.hex()
        for codec in (MEMBERSHIP_CODEC, DATAGRAM_CODEC, PEER_CODEC):
            try:
                message = codec.decode(data)
            except RemoteProtocolError:
                continue
            assert codec.decode(codec.encode(message)) == message, data.hex()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024

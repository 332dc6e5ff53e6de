"""The codec: round trips, bounds in both directions, and nothing but protocol errors for bad bytes."""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from swarmsched.errors import LocalProtocolError, RemoteProtocolError
from swarmsched.fields import I32, U8, U32, U64, Name, NodeName, Ratio, Real, Seconds, Value
from swarmsched.gossip.exchange import DATAGRAM_CODEC
from swarmsched.gossip.message import MEMBERSHIP_CODEC
from swarmsched.ids import NodeId
from swarmsched.node.protocol import PEER_CODEC
from swarmsched.wire.codec import Codec, decode_value, encode_value


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 0
    HIGH = 1


class Inner(Value):
    count: U8
    label: Name = "none"


class Everything(Value):
    node: NodeName
    number: I32
    big: U64
    ratio: Ratio
    free: Real
    flag: bool
    raw: Annotated[bytes, Meta(max_length=8)]
    colour: Colour
    level: Level
    inner: Inner
    maybe: Inner | None
    many: Annotated[tuple[Inner, ...], Meta(max_length=3)]
    pair: tuple[Name, U32]
    table: Annotated[Mapping[Name, U32], Meta(max_length=3)]
    wait_s: Seconds = 1.5
    tags: tuple[str, ...] = ()


class Other(Value):
    count: U8


CODEC = Codec({1: Everything, 2: Inner})
EXAMPLE = Everything(
    NodeId("n1"), -5, 2**64 - 1, 0.5, -1e18, True, b"\x00\xff", Colour.BLUE, Level.HIGH, Inner(1), None,
    (Inner(2, "two"), Inner(3)), ("a", 7), {"x": 1},
)  # fmt: skip

inner = st.builds(Inner, st.integers(0, 255), st.text(max_size=63))
everything = st.builds(
    Everything,
    node=st.text(max_size=63),
    number=st.integers(-(2**31), 2**31 - 1),
    big=st.integers(0, 2**64 - 1),
    ratio=st.floats(0, 1),
    free=st.floats(-1e18, 1e18),
    flag=st.booleans(),
    raw=st.binary(max_size=8),
    colour=st.sampled_from(Colour),
    level=st.sampled_from(Level),
    inner=inner,
    maybe=st.none() | inner,
    many=st.lists(inner, max_size=3).map(tuple),
    pair=st.tuples(st.text(max_size=63), st.integers(0, 2**32 - 1)),
    table=st.dictionaries(st.text(max_size=63), st.integers(0, 2**32 - 1), max_size=3),
    wait_s=st.floats(0, 1e10),
    tags=st.lists(st.text(max_size=10), max_size=4).map(tuple),
)


@given(everything)
@settings(max_examples=150, deadline=None)
def test_every_message_comes_back_equal(message: Everything) -> None:
    assert CODEC.decode(CODEC.encode(message)) == message
    assert decode_value(Everything, encode_value(Everything, message)) == message
    assert msgpack.unpackb(encode_value(Everything, message))[0] == message.node


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_only_protocol_errors(data: bytes) -> None:
    for candidate in (data, b"\x01" + data, b"\x02" + data):
        try:
            CODEC.decode(candidate)
        except RemoteProtocolError:
            continue


@given(everything, st.data())
@settings(max_examples=200, deadline=None)
def test_mutated_messages_decode_to_valid_ones_or_raise_protocol_errors(message: Everything, data: Any) -> None:
    encoded = bytearray(CODEC.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    for candidate in (bytes(encoded), bytes(encoded[:cut])):
        try:
            decoded = CODEC.decode(candidate)
        except RemoteProtocolError:
            continue
        assert CODEC.decode(CODEC.encode(decoded)) == decoded  # what is accepted is within bounds


def altered(index: int, value: object) -> bytes:
    fields = msgpack.unpackb(encode_value(Everything, EXAMPLE))
    fields[index] = value
    return b"\x01" + msgpack.packb(fields)


@pytest.mark.parametrize(
    ("index", "value", "problem"),
    [
        (0, "x" * 64, "node: Expected `str` of length <= 63"),
        (0, 5, "node: Expected `str`, got `int`"),
        (0, b"n1", "node: Expected `str`, got `bytes`"),
        (1, 2**31, "number: Expected `int` <= 2147483647"),
        (1, True, "number: Expected `int`, got `bool`"),
        (1, 1.0, "number: Expected `int`, got `float`"),
        (3, 1.01, "ratio: Expected `float` <= 1.0"),
        (3, math.nan, "ratio: Expected `float` >= 0.0"),
        (4, math.inf, "free: Expected `float` <= 1e+18"),
        (4, math.nan, "free: Expected `float` >= -1e+18"),
        (4, True, "free: Expected `float`, got `bool`"),
        (5, 1, "flag: Expected `bool`, got `int`"),
        (6, b"123456789", "raw: Expected `bytes` of length <= 8"),
        (6, "12", "raw: Expected `bytes`, got `str`"),
        (7, "green", "colour: Invalid enum value 'green'"),
        (7, [], "colour: Expected `str`, got `array`"),
        (8, True, "level: Expected `int`, got `bool`"),
        (8, 1.0, "level: Expected `int`, got `float`"),
        (8, 9, "level: Invalid enum value 9"),
        (9, [256], "inner.count: Expected `int` <= 255"),
        (9, [], "inner: field count is missing"),
        (9, None, "inner: Expected `array`, got `None`"),
        (10, [256], "maybe.count: Expected `int` <= 255"),
        (10, [], "maybe: field count is missing"),
        (11, [[1], [2], [3], [4]], "many: Expected `array` of length <= 3"),
        (11, [[1], [999]], "many[1].count: Expected `int` <= 255"),
        (12, ["a"], "pair: Expected `array` of length 2, got 1"),
        (12, ["a", -1], "pair[1]: Expected `int` >= 0"),
        (13, {"a": 1, "b": 2, "c": 3, "d": 4}, "table: Expected `object` of length <= 3"),
        (13, {"k": "v"}, "table[...]: Expected `int`, got `str`"),
        (13, {"x" * 64: 1}, "table: Expected `str` of length <= 63"),
        (13, [], "table: Expected `object`, got `array`"),
    ],
)
def test_a_bad_field_is_named_with_its_kind_and_problem(index: int, value: object, problem: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        CODEC.decode(altered(index, value))
    assert str(caught.value).startswith(f"Everything: {problem}")
    assert caught.value.kind == "Everything"


def test_framing_faults_are_told_apart() -> None:
    encoded = CODEC.encode(EXAMPLE)
    for data, problem in (
        (b"", "the message is empty"),
        (b"\x63\x90", "unknown message kind 99"),
        (encoded[:-1], "not well-formed msgpack, or cut short"),
        (encoded + b"\x00", "bytes follow the end of the message"),
        (b"\x01\x05", "Expected `array`, got `int`"),
        (b"\x01\x90", "field node is missing"),
        (b"\x01\xdc\x00\x11" + encoded[4:] + b"\x91" * 2_000_000 + b"\x00", "nested too deeply"),
        (b"\x01\xc7\x05\x01hello", "Expected `array`, got `ext`"),
        (b"\x02\x92\x01\xa1\xff", "not well-formed"),
        (b"\x02\xdd\xff\xff\xff\xff", "not well-formed"),
    ):
        with pytest.raises(RemoteProtocolError, match=problem):
            CODEC.decode(data)


def test_fields_of_a_newer_peer_are_skipped_and_those_an_older_one_lacks_take_defaults() -> None:
    fields = msgpack.unpackb(encode_value(Everything, EXAMPLE))
    newer = msgpack.packb([*fields, {"what": ["ever"]}, None])
    older = msgpack.packb(fields[:-2])
    assert CODEC.decode(b"\x01" + newer) == EXAMPLE
    assert CODEC.decode(b"\x01" + older) == EXAMPLE
    assert decode_value(Inner, msgpack.packb([7])) == Inner(7, "none")


@pytest.mark.parametrize(
    "message",
    [
        Inner(256),
        Inner(-1),
        Inner(True),
        Inner(1, "x" * 64),
        Inner(1, "\ud800"),
        Inner("1"),  # type: ignore[arg-type]
        Other(1),
    ],
)
def test_what_we_would_refuse_we_do_not_send(message: object) -> None:
    with pytest.raises(LocalProtocolError):
        CODEC.encode(message)


def test_an_integer_may_stand_for_a_float_but_not_a_huge_one() -> None:
    class Wait(Value):
        wait_s: Seconds

    codec = Codec({1: Wait})
    assert codec.decode(codec.encode(Wait(3))) == Wait(3.0)
    with pytest.raises(LocalProtocolError, match="wait_s"):
        codec.encode(Wait(10**15))


@pytest.mark.parametrize("codec", [PEER_CODEC, MEMBERSHIP_CODEC, DATAGRAM_CODEC])
def test_every_message_of_the_protocol_has_a_declaration_that_is_understood(codec: Codec) -> None:
    for kind, cls in codec.kinds.items():
        with pytest.raises(RemoteProtocolError, match=f"{cls.__name__}: Expected `array`, got `int`"):
            codec.decode(bytes([kind]) + msgpack.packb(0))
    with pytest.raises(LocalProtocolError, match="outside 1"):
        Codec({0: Inner})
    with pytest.raises(LocalProtocolError, match="two kind numbers"):
        Codec({1: Inner, 2: Inner})


def test_every_peer_message_of_the_swarm_compiles() -> None:
    from swarmsched.node.protocol import PEER_CODEC

    assert len(PEER_CODEC.kinds) > 10


def test_values_of_another_class_are_not_encoded_under_a_name() -> None:
    with pytest.raises(LocalProtocolError, match="expected Inner, got Other"):
        encode_value(Inner, Other(1))
    with pytest.raises(LocalProtocolError, match="no kind number"):
        Codec({1: Other}).encode(Inner(1))

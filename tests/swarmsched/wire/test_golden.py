"""What the last released version sends and stores is read, and what is sent and stored today it reads.

Fields that came later follow those of that version, at whatever depth.
"""

import json
import random
import resource

import msgpack
import msgspec
import pytest
from msgspec import inspect

from swarmsched.errors import RemoteProtocolError
from swarmsched.wire.codec import decode_value
from tests.swarmsched.wire.released import CODECS, HERE, STORED, Layout, Released, encoded, layout, readers, sample

NO_ROOM_TOLD = "goes to nodes whose records tell room for aggregation alone, and to those that have asked"
NEW_KINDS: dict[str, str] = dict.fromkeys([f"peer {number}" for number in range(100, 107)], NO_ROOM_TOLD)
"""Messages, as `peer 100`, of which the released version knows nothing, and why it does no harm that it drops them."""
NEW_VALUES: dict[str, str] = {}
"""Values, as `swarmsched.api.EndReason value`, that it does not know, and why it is told none."""

SAMPLES = [line.split(": ") for line in (HERE / "golden.txt").read_text().splitlines()]
LAYOUT = json.loads((HERE / "released.json").read_text())
TODAY = layout()
READERS = dict(readers())


def decoded(key: str, data: bytes) -> object:
    codec = CODECS.get(key.partition(" ")[0])
    return codec.decode(data) if codec else decode_value(STORED[key], data)


def body(key: str, data: bytes) -> bytes:
    """Without the byte that tells the kind of a message."""
    return data if key in STORED else data[1:]


def begins_with(new: object, old: object) -> bool:
    """True if `new` is `old`, or lists more in the place of a list of it."""
    if isinstance(old, list):
        return isinstance(new, list) and len(new) >= len(old) and all(map(begins_with, new, old))
    return bool(msgpack.packb(new) == msgpack.packb(old))  # 1, 1.0 and True are equal, but not the same on the wire


@pytest.mark.parametrize(("key", "text"), SAMPLES)
def test_a_sample_of_the_released_version_is_read_and_written_again_as_it_was(key: str, text: str) -> None:
    old = bytes.fromhex(text)
    new = encoded(key, READERS[key], decoded(key, old))
    assert begins_with(msgpack.unpackb(body(key, new)), msgpack.unpackb(body(key, old)))
    assert len(new) > len(old) or new == old


def differences(old: Layout, new: Layout, seen: set[str]) -> list[str]:
    """What the released version would refuse, or misread, of a type as it is today."""
    match old, new:
        case {"struct": before}, {"struct": after}:
            return [] if after in seen else _in_struct(before, after, seen | {after})
        case {"enum": before}, {"enum": after}:
            return _in_enum(before, after)
        case {"union": before}, {"union": after} if len(before) == len(after):
            return [each for pair in zip(before, after, strict=True) for each in differences(*pair, seen)]
        case {"tuple": before}, {"tuple": after} if len(before) == len(after):
            return [each for pair in zip(before, after, strict=True) for each in differences(*pair, seen)]
        case {"list": before, **least}, {"list": after, **most} if least == most:
            return differences(before, after, seen)
        case {"map": before, **least}, {"map": after, **most} if least == most:
            return [each for pair in zip(before, after, strict=True) for each in differences(*pair, seen)]
    return [] if old == new else [f"is {new}, was {old}"]


def _in_struct(before: str, after: str, seen: set[str]) -> list[str]:
    old, new = LAYOUT["structs"][before], TODAY["structs"][after]
    if [name for name, _, _ in new[: len(old)]] != [name for name, _, _ in old]:
        return [f"{after}: the first fields are not {', '.join(name for name, _, _ in old)}"]
    found = [f"{after}.{name}: has no default" for name, _, is_required in new[len(old) :] if is_required]
    for (name, was, _), (_, now, _) in zip(old, new, strict=False):
        found += [each if ": " in each else f"{after}.{name}: {each}" for each in differences(was, now, seen)]
    return found


def _in_enum(before: str, after: str) -> list[str]:
    old, new = LAYOUT["enums"][before], TODAY["enums"][after]
    if new[: len(old)] != old:
        return [f"{after}: does not begin with {old}"]
    return [f"{after}: {value} is new" for value in new[len(old) :] if f"{after} {value}" not in NEW_VALUES]


@pytest.mark.parametrize("key", READERS)
def test_the_released_version_finds_each_field_where_it_looks_for_it(key: str) -> None:
    if key in NEW_KINDS:
        return
    assert key in LAYOUT["roots"], f"{key} is new: it drops that; say in NEW_KINDS why this does no harm"
    old, new = LAYOUT["roots"][key], TODAY["roots"][key]
    assert differences({"struct": old}, {"struct": new}, set()) == []


def test_no_kind_of_message_is_given_up() -> None:
    assert LAYOUT["roots"].keys() <= READERS.keys()


def test_the_released_version_reads_what_is_written_today() -> None:
    """By decoders made from its layout: they skip what follows the fields that it knows."""
    rng, old = random.Random(1), Released(LAYOUT)
    for key in READERS.keys() - NEW_KINDS.keys():
        info = inspect.type_info(READERS[key])
        decoder = msgspec.msgpack.Decoder(old.classes[key])
        for is_least in (True, *[False] * 10):
            new = body(key, encoded(key, READERS[key], sample(info, rng, is_least=is_least)))
            kept = msgspec.msgpack.encode(decoder.decode(new))
            assert begins_with(msgpack.unpackb(new), msgpack.unpackb(kept)), key


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda fields: fields.insert(0, ["odd", {"plain": "int"}, True]), "the first fields are not"),
        (lambda fields: fields.append(["odd", {"plain": "int"}, True]), "odd: has no default"),
        (lambda fields: fields[0].__setitem__(1, {"plain": "str", "max_length": 9}), "is {'plain': 'str'"),
        (lambda fields: fields.pop(), "the first fields are not"),
    ],
    ids=["in-front", "required", "narrower", "fewer"],
)
def test_what_would_part_the_versions_is_found(change, problem, monkeypatch) -> None:
    name = TODAY["roots"]["peer 64"]
    fields = json.loads(json.dumps(TODAY["structs"][name]))
    change(fields)
    monkeypatch.setitem(TODAY["structs"], name, fields)
    assert any(problem in each for each in differences({"struct": name}, {"struct": name}, set()))


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
        for cls in STORED.values():
            try:
                value: object = decode_value(cls, data)
            except RemoteProtocolError:
                continue
            assert decode_value(cls, encoded(cls.__name__, cls, value)) == value, data.hex()
        for codec in CODECS.values():
            try:
                message = codec.decode(data)
            except RemoteProtocolError:
                continue
            assert codec.decode(codec.encode(message)) == message, data.hex()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024

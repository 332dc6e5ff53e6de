"""Sealing: who can open what, what is refused and why, and what a refusal leaves behind."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmsched.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from swarmsched.wire.sealing import BODY_FRAME_BYTES, PACKET_OVERHEAD_BYTES, WIRE_MAJOR, Keyring, Sealer

OLD, NEW, FOREIGN = b"o" * 32, b"n" * 32, b"f" * 32


def sealer(instance: bytes = b"a" * 16, *keys: bytes, label: str = "lab", **options: object) -> Sealer:
    ring = keys or (OLD,)
    return Sealer(keyring=Keyring(ring[0], ring[1:]), label=label, instance_id=instance, **options)  # type: ignore[arg-type]


def test_a_packet_opens_at_another_member_with_its_sender_named() -> None:
    opened = sealer(b"b" * 16).open(sealer(b"a" * 16).seal(b"hello"))
    assert (opened.instance_id, opened.payload) == (b"a" * 16, b"hello")


def test_the_overhead_is_fixed_and_the_payload_is_hidden() -> None:
    packet = sealer().seal(b"plain words")
    assert len(packet) == len(b"plain words") + PACKET_OVERHEAD_BYTES == 11 + 45
    assert b"plain" not in packet


def test_counters_make_equal_payloads_differ_and_never_repeat_a_nonce() -> None:
    one = sealer()
    packets = [one.seal(b"same") for _ in range(100)]
    assert len({packet[21:29] for packet in packets}) == 100
    assert len({packet[29:] for packet in packets}) == 100


@pytest.mark.parametrize(
    ("receiver", "problem"),
    [
        (sealer(b"b" * 16, FOREIGN), "wrong cluster key"),
        (sealer(b"b" * 16, label="other"), "another swarm's label"),
        (Sealer(keyring=None, label="lab", instance_id=b"b" * 16), "this agent has no cluster key"),
    ],
)
def test_another_swarm_cannot_open_it_and_is_told_why(receiver: Sealer, problem: str) -> None:
    with pytest.raises(RemoteProtocolError, match=problem) as caught:
        receiver.open(sealer().seal(b"x"), "10.0.0.9:7400")
    assert "from 10.0.0.9:7400" in str(caught.value)


def test_a_foreign_wire_major_is_refused_by_name() -> None:
    packet = bytearray(sealer().seal(b"x"))
    packet[3] = 3
    with pytest.raises(RemoteProtocolError, match=rf"wire major 3 from 10\.0\.0\.9:1, this agent speaks {WIRE_MAJOR}"):
        sealer(b"b" * 16).open(bytes(packet), "10.0.0.9:1")


def test_a_replayed_packet_is_refused_and_reordered_ones_are_not() -> None:
    sender, receiver = sealer(), sealer(b"b" * 16)
    packets = [sender.seal(bytes([number])) for number in range(50)]
    random.Random(3).shuffle(packets)
    assert {receiver.open(packet).payload[0] for packet in packets} == set(range(50))
    for packet in packets:
        with pytest.raises(RemoteProtocolError, match="seen before"):
            receiver.open(packet)


@given(st.binary(max_size=100), st.data())
@settings(max_examples=200, deadline=None)
def test_altered_cut_or_random_packets_raise_only_protocol_errors_and_change_nothing(junk: bytes, data: object) -> None:
    sender, receiver = sealer(), sealer(b"b" * 16)
    packet = bytearray(sender.seal(b"payload"))
    position = data.draw(st.integers(0, len(packet) - 1))  # type: ignore[attr-defined]
    packet[position] ^= data.draw(st.integers(1, 255))  # type: ignore[attr-defined]
    for bad in (junk, bytes(packet[:position]), packet[:5] + junk, bytes(packet)):
        with pytest.raises(RemoteProtocolError):
            receiver.open(bytes(bad))
    assert not receiver._senders
    assert receiver.open(sender.seal(b"next")).payload == b"next"


def test_a_key_rotation_in_three_steps_loses_no_packet() -> None:
    agents = [sealer(bytes([number]) * 16, OLD) for number in (1, 2, 3)]

    def all_hear_all() -> None:
        for sender in agents:
            for receiver in agents:
                assert receiver.open(sender.seal(b"x")).payload == b"x"

    for ring in (Keyring(OLD, (NEW,)), Keyring(NEW, (OLD,)), Keyring(NEW)):
        for agent in agents:
            agent.set_keyring(ring)
            all_hear_all()
    with pytest.raises(RemoteProtocolError):
        agents[0].open(sealer(b"z" * 16, OLD).seal(b"x"))


def test_a_rotation_does_not_reopen_the_replay_window() -> None:
    sender, receiver = sealer(), sealer(b"b" * 16, OLD)
    packet = sender.seal(b"x")
    receiver.open(packet)
    receiver.set_keyring(Keyring(NEW, (OLD,)))
    with pytest.raises(RemoteProtocolError, match="seen before"):
        receiver.open(packet)


def test_switching_encryption_on_in_steps_loses_no_packet() -> None:
    plain = Sealer(keyring=None, label="lab", instance_id=b"a" * 16)
    keyed = sealer(b"b" * 16, verify_incoming=False, verify_outgoing=False)
    sending = sealer(b"c" * 16, verify_incoming=False)
    strict = sealer(b"d" * 16)
    assert keyed.open(plain.seal(b"1")).payload == b"1"
    assert plain.open(keyed.seal(b"2")).payload == b"2"
    assert keyed.open(sending.seal(b"3")).payload == b"3"
    assert sending.open(keyed.seal(b"4")).payload == b"4"
    assert strict.open(sending.seal(b"5")).payload == b"5"
    with pytest.raises(RemoteProtocolError, match="not encrypted"):
        strict.open(keyed.seal(b"6"))


def test_remembered_senders_are_bounded_and_the_quietest_is_dropped() -> None:
    receiver = sealer(b"r" * 16, senders_max=3)
    senders = [sealer(bytes([number]) * 16) for number in range(5)]
    for sender in senders:
        receiver.open(sender.seal(b"x"))
        receiver.open(senders[0].seal(b"y"))
    assert len(receiver._senders) == 3
    assert senders[0]._instance_id in receiver._senders


def test_strangers_leave_no_trace() -> None:
    receiver = sealer(b"r" * 16)
    for number in range(20):
        with pytest.raises(RemoteProtocolError):
            receiver.open(sealer(bytes([number]) * 16, FOREIGN).seal(b"x"))
    assert not receiver._senders


@pytest.mark.parametrize("size", [0, 1, BODY_FRAME_BYTES, BODY_FRAME_BYTES + 1, 200_000])
def test_a_body_of_any_size_comes_back(size: int) -> None:
    body = random.Random(size).randbytes(size)
    sealed = sealer(purpose="body").seal_body("POST", "/peer/v1/messages", body, b"ctx")
    assert sealer(b"b" * 16, purpose="body").open_body("POST", "/peer/v1/messages", sealed, b"ctx").payload == body


def test_a_body_is_bound_to_method_path_context_and_purpose() -> None:
    sealed = sealer(purpose="body").seal_body("POST", "/a", b"x", b"1")
    for method, path, context, purpose in (
        ("PUT", "/a", b"1", "body"),
        ("POST", "/b", b"1", "body"),
        ("POST", "/a", b"2", "body"),
        ("POST", "/a", b"1", "answer"),
    ):
        with pytest.raises(RemoteProtocolError):
            sealer(b"b" * 16, purpose=purpose).open_body(method, path, sealed, context)


def test_a_body_that_is_cut_extended_reordered_or_repeated_is_refused() -> None:
    sender, receiver = sealer(purpose="body"), sealer(b"b" * 16, purpose="body")
    writer = sender.body_writer("POST", "/a")
    first, second, last = writer.frame(b"1"), writer.frame(b"2"), writer.frame(b"3", is_last=True)
    for frames, problem in (
        ((first, second), "cut short"),
        ((first,), "cut short"),
        ((second, first, last), "opens with none"),
        ((first, last), "opens with none"),
        ((first, second, last, b"more"), "bytes follow"),
    ):
        with pytest.raises(RemoteProtocolError, match=problem):
            sealer(b"b" * 16, purpose="body").open_body("POST", "/a", writer.head + b"".join(frames))
    whole = writer.head + first + second + last
    assert receiver.open_body("POST", "/a", whole).payload == b"123"
    with pytest.raises(RemoteProtocolError, match="seen before"):
        receiver.open_body("POST", "/a", whole)


def test_a_stream_of_frames_is_opened_as_it_arrives_byte_by_byte() -> None:
    writer = sealer(purpose="body").body_writer("GET", "/logs")
    reader = sealer(b"b" * 16, purpose="body").body_reader("GET", "/logs")
    data = writer.head + writer.frame(b"line 1\n") + writer.frame(b"line 2\n") + writer.frame(b"", is_last=True)
    pieces = [piece for byte in data for piece in reader.feed(bytes([byte]))]
    reader.finish()
    assert b"".join(pieces) == b"line 1\nline 2\n"


def test_an_oversized_frame_is_refused_before_it_is_collected() -> None:
    writer = sealer(purpose="body").body_writer("GET", "/x")
    with pytest.raises(LocalProtocolError):
        writer.frame(bytes(BODY_FRAME_BYTES + 1))
    reader = sealer(b"b" * 16, purpose="body").body_reader("GET", "/x")
    with pytest.raises(RemoteProtocolError, match="exceeds the limit"):
        list(reader.feed(writer.head + b"\x7f\xff\xff\xff"))


def test_keys_and_instance_ids_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 5 bytes"):
        Keyring(b"short")
    with pytest.raises(LocalProtocolError, match="16 bytes"):
        Sealer(keyring=None, label="x", instance_id=b"short")


def _forged(rng: random.Random, sealed: list[bytes]) -> bytes:
    """A sealed packet or body with a few bytes changed, cut out, doubled or added; or mere noise."""
    data = bytearray(rng.choice(sealed) if rng.random() < 0.95 else rng.randbytes(rng.randrange(200)))
    for _ in range(rng.randint(1, 3)):
        at, cut = rng.randrange(len(data) + 1), rng.choice((0, 0, 1, 1, rng.randint(1, 40)))
        data[at : at + cut] = rng.choice((rng.randbytes(1), rng.randbytes(8), b"", data[at : at + 8] * 2))
    return bytes(data)


@pytest.mark.parametrize("count", [5_000, pytest.param(200_000, marks=pytest.mark.acceptance)])
def test_forged_packets_and_bodies_are_refused_and_no_sender_suffers(count: int) -> None:
    """All but those whose only change is in the byte that tells of a minor version, which no key covers."""
    rng, sender, receiver = random.Random(count), sealer(b"a" * 16), sealer(b"b" * 16)
    body = sealer(b"a" * 16, purpose="body")
    sealed = [sender.seal(rng.randbytes(size)) for size in (0, 1, 100, 1_200)]
    bodies = [body.seal_body("POST", "/x", rng.randbytes(size)) for size in (0, 100, BODY_FRAME_BYTES + 5)]
    body_receiver = sealer(b"b" * 16, purpose="body")
    for number in range(count):
        is_packet = number % 4 > 0
        data = _forged(rng, sealed if is_packet else bodies)
        originals = {each[:4] + each[5:] for each in (sealed if is_packet else bodies)}
        if data[:4] + data[5:] in originals:
            continue
        with pytest.raises(RemoteProtocolError):
            receiver.open(data) if is_packet else body_receiver.open_body("POST", "/x", data)
    assert [receiver.open(packet).instance_id for packet in sealed] == [b"a" * 16] * len(sealed)

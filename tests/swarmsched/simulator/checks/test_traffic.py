"""Invariant 11: no node sends more than its cap."""

import pytest

from swarmsched.effects import SendDatagram, SendPeer
from swarmsched.events import DatagramReceived
from swarmsched.gossip.exchange import FullStateAnswer, Parcel
from swarmsched.ids import NodeId
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.traffic import TrafficChecker, state_cap
from swarmsched.simulator.checks.violation import Violation
from tests.swarmsched.simulator.checks.testing import History

TO = ("10.0.0.2", 7400)
STATE = bytes([40])
LIVENESS = bytes([1])


@pytest.fixture
def history():
    return History(lambda: Suite([TrafficChecker()]))


def send(history, payload, packets_per_s, seconds=11, name="a"):
    for _ in range(seconds):
        history.step(name, None, *[SendDatagram(TO, payload)] * packets_per_s)
        history.wait(1.0)


def send_pages(history):
    page = FullStateAnswer((Parcel(1, 0, bytes(2_000)),) * 10, 0, b"", is_last=False)
    for _ in range(11):
        history.step("a", None, SendPeer(NodeId("b"), page))
        history.wait(1.0)


def test_a_node_below_its_cap_may_go_on(history):
    send(history, STATE + bytes(900), 5, seconds=60)
    assert 4_000 < history.suite.get(TrafficChecker).busiest_bytes_per_s < 5_000


def test_a_node_above_its_cap_is_found(history):
    with pytest.raises(Violation, match="bytes of state in packets") as caught:
        send(history, STATE + bytes(900), 7)
    assert caught.value.invariant == "11"


def test_what_an_earlier_life_sent_is_judged_too(history):
    send(history, STATE + bytes(900), 70, seconds=2)
    with pytest.raises(Violation, match="bytes of state"):
        history.restart("a")


def test_a_life_of_a_moment_may_send_its_first_packets(history):
    history.restart("a")
    history.step("a", None, *[SendDatagram(TO, LIVENESS)] * 5)
    history.restart("a")


def test_pages_over_the_peer_channel_have_a_cap_of_their_own(history):
    with pytest.raises(Violation, match="over the peer channel"):
        send_pages(history)


def test_a_packet_above_the_ceiling_is_found_at_once(history):
    with pytest.raises(Violation, match="1201 bytes"):
        history.step("a", None, SendDatagram(TO, LIVENESS + bytes(1_200)))


def test_a_storm_of_probes_is_found_unless_others_ask_for_it(history):
    for _ in range(11):
        for _ in range(100):
            history.step("a", DatagramReceived(TO, LIVENESS), SendDatagram(TO, LIVENESS))
        history.wait(1.0)
    with pytest.raises(Violation, match="packets of the liveness plane"):
        send(history, LIVENESS, 100, name="b")


@pytest.mark.parametrize(
    ("members", "cap"), [(1, 5_000), (30, 5_000), (100, 12_000), (10_000, 200_000), (20_000, 200_000)]
)
def test_the_cap_follows_the_table(members, cap):
    assert state_cap(members) == pytest.approx(cap)


def test_the_cap_grows_between_the_sizes_of_the_table():
    assert 5_000 < state_cap(50) < 12_000

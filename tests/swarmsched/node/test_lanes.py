"""What passes the queue of events, and when a node says that it is late."""

from swarmsched.authority.message import ContactAnswered, LeaseGranted, LeaseRenewal, OwnerContact
from swarmsched.events import DatagramReceived, PeerMessageReceived, RendezvousFailed
from swarmsched.ids import NodeId
from swarmsched.ledger.message import TaskReportReceived
from swarmsched.node.lanes import LAG_REPORTED_S, Lanes
from tests.swarmsched.building import JOB


def said(message):
    return PeerMessageReceived(NodeId("b"), message)


WORK = [said(TaskReportReceived(JOB, 1, 1)), RendezvousFailed(JOB, 1, "")]
URGENT = [
    said(LeaseRenewal(1)),
    said(LeaseGranted(1)),
    said(OwnerContact(1, ())),
    said(ContactAnswered(1)),
    DatagramReceived(("10.0.0.1", 1), b""),
]


def test_leases_contacts_and_probes_pass_work_and_each_keeps_its_order():
    lanes = Lanes()
    for event in (*WORK, *URGENT):
        lanes.put(event, 0.0)
    assert len(lanes) == len(WORK) + len(URGENT)
    assert [lanes.take() for _ in range(len(lanes))] == [*URGENT, *WORK]


def test_what_stands_longest_says_how_late_the_node_is():
    lanes = Lanes()
    assert lanes.waited_s(5.0) == 0.0
    lanes.put(WORK[0], 1.0)
    lanes.put(WORK[1], 2.0)
    assert lanes.waited_s(5.0) == 4.0
    lanes.take()
    assert lanes.waited_s(5.0) == 3.0


def test_lag_is_news_once_a_second_and_only_when_it_matters():
    lanes = Lanes()
    lanes.put(WORK[0], 0.0)
    assert lanes.news_of_lag_s(LAG_REPORTED_S / 2) == 0.0
    assert lanes.news_of_lag_s(3.0) == 3.0
    assert lanes.news_of_lag_s(3.5) == 0.0
    assert lanes.news_of_lag_s(4.0) == 4.0


def test_a_slow_disk_is_lag_as_well():
    assert Lanes().news_of_lag_s(3.0, disk_s=2.0) == 2.0

import random
import statistics
from itertools import pairwise

import pytest

from swarmsched.ids import NodeId
from swarmsched.simulator.network import Network, NetworkFaults

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def make(**faults) -> Network:
    return Network(NetworkFaults(**faults), random.Random(3))


def test_delays_are_lognormal_around_the_median():
    network = make(delay_median_s=0.010, delay_sigma=0.5)
    delays_s = [network.datagram(A, B, 0.0).arrivals_s[0] for _ in range(4000)]
    assert 0.0095 < statistics.median(delays_s) < 0.0105
    assert 0.008 < statistics.mean(delays_s) - 0.003 < 0.010  # median x exp(0.125) = 11.3 ms


def test_loss_and_duplication_happen_as_often_as_asked():
    network = make(loss_ratio=0.3, duplicate_ratio=0.5)
    copies = [len(network.datagram(A, B, 0.0).arrivals_s) for _ in range(4000)]
    assert 0.27 < copies.count(0) / 4000 < 0.33
    assert 0.45 < copies.count(2) / (4000 - copies.count(0)) < 0.55


def test_without_reordering_a_link_keeps_its_order():
    ordered, shuffled = make(delay_sigma=2.0, is_reordering=False), make(delay_sigma=2.0)
    for network, expected in ((ordered, True), (shuffled, False)):
        arrivals_s = [0.0001 * n + network.datagram(A, B, 0.0001 * n).arrivals_s[0] for n in range(200)]
        in_order = all(later >= earlier - 1e-12 for earlier, later in pairwise(arrivals_s))
        assert in_order == expected


def test_a_partition_cuts_both_ways_and_a_cut_only_one():
    network = make()
    network.cut(A, B)
    assert network.datagram(A, B, 0.0).arrivals_s == ()
    assert network.datagram(B, A, 0.0).arrivals_s != ()
    network.partition([A], [B, C])
    assert network.datagram(C, A, 0.0).arrivals_s == ()
    assert network.datagram(B, C, 0.0).arrivals_s != ()
    network.heal()
    assert network.datagram(C, A, 0.0).arrivals_s != ()


def test_the_sender_of_a_lost_peer_message_is_told_later_and_cannot_know_whether_it_arrived():
    network = make(loss_ratio=1.0)
    fates = [network.peer_message(A, B, 0.0) for _ in range(200)]
    assert all(fate.error == "connection lost" and fate.error_after_s == 2.0 for fate in fates)
    assert {len(fate.arrivals_s) for fate in fates} == {0, 1}


def test_a_one_way_cut_loses_the_answer_of_a_peer_message():
    network = make()
    network.cut(B, A)
    fate = network.peer_message(A, B, 0.0)
    assert len(fate.arrivals_s) == 1
    assert fate.error == "timed out"
    assert network.peer_message(B, A, 0.0).arrivals_s == ()


def test_a_message_to_oneself_meets_no_fault():
    network = make(loss_ratio=1.0)
    assert len(network.peer_message(A, A, 0.0).arrivals_s) == 1


@pytest.mark.parametrize("wrong", [{"loss_ratio": 1.5}, {"duplicate_ratio": -0.1}, {"delay_median_s": 0.0}])
def test_impossible_faults_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        NetworkFaults(**wrong)

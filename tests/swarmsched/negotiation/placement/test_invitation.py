"""Whom an owner tells what is free: the first of the queue that could use it, a few at a time, and all in time."""

from swarmsched.api import JobSpec
from swarmsched.card import card_of
from swarmsched.ids import JobId, NodeId
from swarmsched.negotiation.placement.invitation import AGAIN_S, AGAIN_S_MAX, AT_ONCE, Inviter
from swarmsched.resources import Demand, Free, GpuCount
from swarmsched.view import JobView
from tests.swarmsched.building import make_record

ME = NodeId("owner")
ONE_GPU = Free((GpuCount("H100", 2**36, 1),), 8, 2**36)


def job(number, shepherd, **spec):
    values = {"ranks": 1, "demand": Demand(gpus=1), **spec}
    record = make_record(shepherd, job_id=JobId(f"01{number:024}"), spec=JobSpec(("x",), **values), submitted_utc_s=1.0)
    return JobView(card_of(record))


def invited(inviter, queue, free=ONE_GPU, now_s=10.0, can_act=lambda job, now_s: job.card.shepherd != ME):
    return inviter.due(queue, free, can_act, now_s)


def test_the_first_shepherds_of_the_queue_are_invited_each_once():
    inviter = Inviter(ME)
    queue = [job(n, shepherd) for n, shepherd in enumerate(["b", "b", "a", "c", "d"])]
    inviter.freed(10.0)
    assert inviter.next_deadline_s == 10.0
    assert invited(inviter, queue) == ["b", "a", "c"]
    assert inviter.next_deadline_s == 10.0 + AGAIN_S
    assert invited(inviter, queue) == ["d"]


def test_whoever_cannot_use_it_is_not_invited():
    queue = [
        job(1, "large", demand=Demand(gpus=2)),
        job(2, "elsewhere", nodes=(NodeId("x"),)),
        job(3, "never_here", exclude=(ME,)),
        job(4, "dead"),
        job(5, "good"),
    ]
    assert invited(Inviter(ME), queue, can_act=lambda job, now_s: job.card.shepherd != "dead") == ["good"]


def test_nothing_is_said_while_nothing_is_free_or_nobody_waits():
    inviter = Inviter(ME)
    for queue, free in (([job(1, "a")], Free()), ([], ONE_GPU), ([job(1, ME)], ONE_GPU)):
        inviter.freed(10.0)
        assert invited(inviter, queue, free) == []
        assert inviter.next_deadline_s == float("inf")


def test_when_all_were_asked_it_begins_again_after_longer_and_longer():
    inviter = Inviter(ME)
    queue = [job(n, f"s{n}") for n in range(AT_ONCE)]
    pauses, rounds, now_s = [], 0, 10.0
    for _ in range(40):
        rounds += bool(invited(inviter, queue, now_s=now_s))
        pauses.append(inviter.next_deadline_s - now_s)
        now_s = inviter.next_deadline_s
    assert rounds == 20
    assert pauses == sorted(pauses, key=lambda pause_s: round(pause_s, 3))
    assert round(pauses[-1], 3) == AGAIN_S_MAX
    inviter.freed(now_s)
    assert invited(inviter, queue, now_s=now_s)
    assert inviter.next_deadline_s < now_s + 2 * AGAIN_S

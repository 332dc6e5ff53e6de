"""Workers leave drained nodes, failed GPUs and slow machines while the others train, if there is a place for them."""

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.card import card_of
from swarmsched.ids import NodeId
from swarmsched.negotiation.gang import Gang
from swarmsched.negotiation.placement.relief import SPARED_S, relief
from swarmsched.policies.room import Room
from swarmsched.resources import Demand, Share
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import JobView
from swarmsched.world import Worker, WorkerState, World
from tests.swarmsched.building import JOB, make_node, make_record

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
WHERE = ((A, 1), (A, 2), (B, 3))


def job(least=1, busy_s=(), ailing=(), nodes=()):
    shares = tuple(Share(node, 1, part=part) for node, part in WHERE)
    spec = JobSpec(("t.py",), ranks=least, ranks_most=4, demand=Demand(gpus=1), elastic=True, nodes=nodes)
    world = World(1, (1, 2, 3), has_trained=True)
    record = make_record("boss", spec=spec, state=JobState.RUNNING, attempt=1, shares=shares, world=world)
    gang = Gang(shares)
    for share, each_s in zip(shares, busy_s or (0.0, 0.0, 0.0), strict=True):
        worker = Worker(WorkerState.TRAINING, f"10.0.0.{share.part}:7000", 1, 1, busy_s=each_s)
        status = TaskStatus(JOB, 1, 1, share.node, TaskStage.STARTED, revision=1, part=share.part, worker=worker)
        gang.put(replace(status, is_ailing=share.part in ailing), record, 0.0)
    return record, gang


def found(known, free, drained=(), spared=()):
    record, gang = known
    room = Room([make_node(name, gpus) for name, gpus in free.items()])
    return relief(record, gang, JobView(card_of(record)), room, drained, spared)


def places(each):
    return {share.node: share.ranks for share in each.target.shares}


def test_nothing_is_done_as_a_rule():
    assert found(job(busy_s=(1.0, 1.1, 1.15)), {C: 4}) is None


def test_workers_leave_a_drained_node_for_others():
    each = found(job(), {B: 1, C: 4}, {A})
    assert (each.leave, places(each), each.why) == ((1, 2), {B: 1, C: 2}, "drained: a")


def test_without_room_they_leave_as_long_as_the_job_keeps_its_least():
    each = found(job(least=1), {}, {A})
    assert (each.leave, places(each)) == ((1, 2), {B: 1})
    assert found(job(least=2), {}, {A}) is None
    each = found(job(least=2), {C: 1}, {A})
    assert (each.leave, places(each)) == ((1, 2), {B: 1, C: 1})
    assert found(job(least=2, nodes=(A, B)), {C: 1}, {A}) is None, "it does not want to be there"


def test_a_worker_whose_gpu_has_failed_goes_to_another_of_the_same_machine_too():
    each = found(job(ailing=(2,)), {A: 1})
    assert (each.leave, places(each)) == ((2,), {A: 2, B: 1})
    assert "failed GPU of 1 worker on a" in each.why
    assert places(found(job(ailing=(2,)), {})) == {A: 1, B: 1}


@pytest.mark.parametrize(("busy_s", "slow"), [((1.0, 1.0, 1.3), 3), ((2.0, 1.0, 1.0), 1), ((1.0, 0.5, 1.0), None)])
def test_a_slow_worker_is_replaced(busy_s, slow):
    each = found(job(busy_s=busy_s), {C: 1})
    assert (each.leave if each else ()) == ((slow,) if slow else ())


def test_a_slow_worker_is_better_than_none_and_its_own_machine_no_better_place():
    assert found(job(busy_s=(1.0, 1.0, 2.0)), {B: 4}) is None
    assert found(job(busy_s=(1.0, 0.0, 2.0)), {C: 4}) is None, "one has not told yet"


def test_whoever_came_for_a_slow_worker_is_not_called_slow_itself_but_others_are():
    slow = job(busy_s=(3.0, 1.0, 1.0))
    assert found(slow, {C: 1}).spared_s == SPARED_S
    assert found(slow, {C: 1}, spared=(2, 3)).leave == (1,)
    assert found(slow, {C: 1}, spared=(1,)) is None
    assert found(slow, {C: 1}, spared=(1, 2, 3)) is None
    drained = found(slow, {C: 2}, {A}, spared=(1, 2))
    assert (drained.leave, drained.spared_s) == ((1, 2), 0.0)

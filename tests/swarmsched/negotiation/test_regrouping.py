"""The gang of an elastic job changes while it trains, whatever its owners and workers answer, lose or repeat."""

import itertools
from collections import Counter

import pytest
from msgspec.structs import replace

from swarmsched.api import EndReason, JobState
from swarmsched.checkpoint import Checkpoint
from swarmsched.estimate import Estimate
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.ids import NodeId, Place
from swarmsched.ledger.message import (
    CheckpointAnswer,
    CheckpointRequest,
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    Refusal,
    ReleaseRequest,
    StatusRequest,
    StopRequest,
    TaskEstimate,
    TaskReportReceived,
    WorldRequest,
)
from swarmsched.negotiation import regrouping
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.members import JOIN_S, LEAVE_S, PARTED_S, PARTED_SOME_S
from swarmsched.negotiation.pacing import BACKOFF_S_MAX, REFUSALS_MOST, SETBACKS_FORGOTTEN_S
from swarmsched.negotiation.told import ChangeWished, NodeLost, NodeReturned, StartWished, StopAsked
from swarmsched.record import Leftover, shell_exit_code
from swarmsched.resources import Share
from swarmsched.task import RankExit, TaskFailure, TaskStage
from swarmsched.view import Allocation
from swarmsched.world import Worker, WorkerState
from tests.swarmsched.building import word
from tests.swarmsched.negotiation.scene import ME, A, B, Scene

C = NodeId("c")
ORDER = Ranking("swarm", (1,))


class ElasticScene(Scene):
    """Workers are told of by their part; `places` are where the parts are."""

    def __init__(self, **spec):
        super().__init__(elastic=True, ranks=2, ranks_most=8, **spec)
        self.places, self.revision = {}, 10
        self.workers = {}

    def wish(self, *shares):
        target = Allocation(tuple(Share(node, ranks) for node, ranks in shares))
        self.do(self.shepherd.step(ChangeWished(target, "somebody wants it", ORDER), self.clock))

    def told(self, part, stage=TaskStage.STARTED, **more):
        self.revision += 1
        self.workers[part] = more.pop("worker", self.workers.get(part, Worker()))
        self.report(self.places[part], stage, self.revision, part=part, worker=self.workers[part], **more)

    def ready(self, *parts):
        for part in parts:
            self.told(part, worker=Worker(WorkerState.READY, f"10.0.0.{part}:7000"))

    def trains(self, *parts, pause_s=0.25):
        version = self.record.world.version
        for part in parts:
            address = f"10.0.0.{part}:7000"
            self.told(part, worker=Worker(WorkerState.TRAINING, address, version, version, pause_s))

    def dies(self, part, signal=9):
        self.told(part, TaskStage.EXITED, exits=(RankExit(part - 1, 0, signal),))

    def leaves(self, part, code=0):
        self.told(part, TaskStage.EXITED, exits=(RankExit(part - 1, code),))

    def granted(self, kind, **more):
        requests = self.take(kind)
        for node, request in requests:
            self.places[request.part] = node
        self.answer(requests, **more)
        return requests

    def run(self):
        """Parts 1 and 2 on a and 3 on b have started, and train as world 1."""
        self.do(self.shepherd.step(StartWished((Share(A, 2), Share(B, 1)), ORDER), self.clock))
        self.granted(HoldRequest)
        self.granted(CommitRequest, is_staged=True)
        self.granted(LaunchRequest)
        for part in self.places:
            self.told(part)
        self.ready(1, 2, 3)
        self.take(WorldRequest)
        self.trains(1, 2, 3)
        assert self.members == (1, 2, 3)

    def join(self):
        self.granted(HoldRequest)
        self.granted(CommitRequest, is_staged=True)
        self.granted(LaunchRequest)

    def wait(self, seconds):
        self.now_s += seconds
        self.do(self.shepherd.step(TimerFired(), self.clock))

    @property
    def members(self):
        return self.record.world.members


@pytest.fixture
def scene():
    return ElasticScene()


@pytest.fixture
def training(scene):
    scene.run()
    return scene


def test_a_gang_starts_as_parts_of_one_rank_that_are_told_of_one_another_once_all_are_ready(scene):
    scene.do(scene.shepherd.step(StartWished((Share(A, 2), Share(B, 1)), ORDER), scene.clock))
    holds = scene.granted(HoldRequest)
    assert [(node, request.part, request.ranks, request.wants_rendezvous) for node, request in holds] == [
        (A, 1, 1, False),
        (A, 2, 1, False),
        (B, 3, 1, False),
    ]
    orders = [request.order for _, request in scene.granted(CommitRequest, is_staged=True)]
    assert [(order.part, order.first_rank, order.local_ranks) for order in orders] == [(1, 0, 1), (2, 1, 1), (3, 2, 1)]
    scene.granted(LaunchRequest)
    for part in (1, 2, 3):
        scene.told(part)
    assert scene.record.state is JobState.RUNNING
    assert (scene.record.world.version, scene.members) == (1, (1, 2, 3))
    scene.ready(1, 3)
    assert scene.take(WorldRequest) == []
    scene.ready(2)
    told = scene.take(WorldRequest)
    assert [(node, request.part) for node, request in told] == [(A, 1), (A, 2), (B, 3)]
    plan = told[0][1].plan
    assert [(each.part, each.address) for each in plan.members] == [(n, f"10.0.0.{n}:7000") for n in (1, 2, 3)]
    assert (plan.version, plan.may_start, plan.nodes) == (1, True, 2)
    scene.trains(1)
    scene.wait(1.1)
    assert [request.part for _, request in scene.take(WorldRequest)] == [2, 3], "until they say that they have heard"
    scene.trains(2, 3)
    assert scene.record.world.has_trained
    scene.wait(60.0)
    assert scene.take(WorldRequest) == []


def test_a_gang_grows_while_it_trains_and_its_record_is_ahead_of_its_owners(training):
    training.wish((A, 2), (B, 1), (C, 2))
    holds = training.take(HoldRequest)
    assert [(node, request.part) for node, request in holds] == [(C, 4), (C, 5)]
    training.places |= {4: C, 5: C}
    training.answer(holds[:1])
    assert training.record.world.joining == ()
    training.is_register_silent = True
    training.answer(holds[1:])
    assert training.take(CommitRequest) == []
    training.decide()
    assert (training.record.world.joining, training.record.last_part, training.members) == ((4, 5), 5, (1, 2, 3))
    order = training.granted(CommitRequest, is_staged=True)[0][1].order
    assert [share.part for share in order.shares] == [1, 2, 3, 4, 5]
    training.granted(LaunchRequest)
    training.told(4)
    training.ready(5)
    assert training.members == (1, 2, 3), "all of them, or none yet"
    training.now_s += 7.0
    training.ready(4)
    assert (training.record.world.version, training.members, training.record.world.joining) == (2, (1, 2, 3, 4, 5), ())
    told = training.take(WorldRequest)
    assert [request.part for _, request in told] == [1, 2, 3, 4, 5]
    assert not told[0][1].plan.may_start
    training.trains(1, 2, 3, 4, 5)
    last = training.record.rescalings[-1]
    assert (last.ranks_before, last.ranks_after, last.pause_s) == (3, 5, 0.25)
    news = [(each.kind, each.fields) for each in training.announced]
    assert news[-1] == ("job.resumed", {"pause_s": 0.25}), "the page of metrics counts these"
    assert training.record.state is JobState.RUNNING
    assert training.record.attempt == 1
    assert (training.record.counted_s, training.record.attained_gpu_s) == (7.0, 7.0 * 3), "newcomers serve from now on"
    training.now_s += 2.0
    training.wish((A, 2), (B, 1))
    assert (training.record.counted_s, training.record.attained_gpu_s) == (9.0, 7.0 * 3 + 2.0 * 5)


def test_whoever_is_to_leave_is_told_ends_by_itself_and_is_released(training):
    training.wish((A, 1), (B, 1))
    assert (training.record.world.version, training.members) == (2, (1, 3))
    assert [request.part for _, request in training.take(WorldRequest)] == [1, 3, 2]
    training.trains(1, 3)
    training.wait(LEAVE_S - 1.0)
    assert training.take(StopRequest) == []
    training.leaves(2)
    assert [share.part for share in training.record.shares] == [1, 3]
    assert training.record.gpus == 2
    assert [(node, message.part) for node, message in training.sent if isinstance(message, TaskReportReceived)][-1] == (
        A,
        2,
    )
    released = training.take(ReleaseRequest)
    assert [(node, request.part) for node, request in released] == [(A, 2)], "or a late launch could start it again"
    training.leaves(1)
    training.leaves(3)
    record = training.record
    assert (record.end_reason, record.exit_code, [each.ranks_after for each in record.rescalings]) == (
        EndReason.COMPLETED,
        0,
        [2],
    )


def test_one_that_does_not_leave_is_stopped_again_and_again(training):
    training.wish((A, 1), (B, 1))
    training.trains(1, 3)
    training.wait(LEAVE_S + 0.1)
    assert [(node, request.part) for node, request in training.take(StopRequest)] == [(A, 2)]
    training.wait(2.1)
    assert [(node, request.part) for node, request in training.take(StopRequest)] == [(A, 2)]
    training.dies(2, signal=15)
    assert training.record.state is JobState.RUNNING
    assert [share.part for share in training.record.shares] == [1, 3]


def test_a_worker_that_dies_is_left_behind_and_the_others_go_on(training):
    training.dies(1)
    world = training.record.world
    assert (world.version, world.members, world.lost) == (2, (2, 3), (1,))
    plan = training.take(WorldRequest)[0][1].plan
    assert ([each.part for each in plan.members], plan.lost) == ([2, 3], (1,))
    assert [share.part for share in training.record.shares] == [2, 3]
    assert "worker 1 on a ended: signal 9" in training.record.rescalings[-1].reason
    training.trains(2, 3)
    training.leaves(2)
    training.leaves(3)
    assert training.record.end_reason is EndReason.COMPLETED, "the death of one that was replaced is no failure"


def test_newcomers_that_come_when_the_training_is_over_are_ended_and_the_job_is_completed(training):
    training.wish((A, 2), (B, 1), (C, 1))
    training.join()
    training.ready(4)
    for part in (1, 2, 3):
        training.leaves(part)
    assert training.take(StopRequest) == [], "it may train by now, and have yet to say so"
    waits = Worker(WorkerState.READY, "10.0.0.4:7000", 2, failed=2, problem="plan 2 was not built: timeout")
    training.told(4, worker=waits)
    assert training.members == (1, 2, 3, 4), "a world without anybody who has the state would be refused by all"
    assert [(node, request.part) for node, request in training.take(StopRequest)] == [(C, 4)]
    training.dies(4, signal=15)
    assert (training.record.end_reason, training.record.exit_code) == (EndReason.COMPLETED, 0)


def test_who_has_trained_and_is_done_is_at_the_end_though_not_all_had_said_that_they_train(scene):
    scene.do(scene.shepherd.step(StartWished((Share(A, 2),), ORDER), scene.clock))
    scene.join()
    for part in (1, 2):
        scene.told(part)
    scene.ready(1, 2)
    scene.wish((A, 2), (C, 1))
    scene.join()
    scene.ready(3)
    assert (scene.members, scene.record.world.has_trained) == ((1, 2, 3), False)
    for part in (1, 2):
        scene.told(part, worker=Worker(WorkerState.TRAINING, f"10.0.0.{part}:7000", 1, 1))
        scene.leaves(part)
    waits = Worker(WorkerState.READY, "10.0.0.3:7000", 2, failed=2, problem="plan 2 was not built: timeout")
    scene.told(3, worker=waits)
    assert (C, 3) in [(node, request.part) for node, request in scene.take(StopRequest)]
    scene.dies(3, signal=15)
    assert scene.record.end_reason is EndReason.COMPLETED, "and does not begin anew"


@pytest.mark.parametrize("how_far", ["held", "launched", "ready"])
def test_newcomers_that_are_members_of_no_world_yet_are_ended_too_once_the_members_are_done(training, how_far):
    training.wish((A, 2), (B, 1), (C, 1))
    if how_far == "held":
        training.granted(HoldRequest)
    else:
        training.join()
    for part in (1, 2, 3):
        training.leaves(part)
    if how_far == "ready":
        training.ready(4)
    assert training.record.state is JobState.RUNNING, "there may be processes of the newcomer"
    assert (C, 4) in [(node, request.part) for node, request in training.take(StopRequest)]
    training.dies(4, signal=15)
    assert (training.record.end_reason, training.record.exit_code) == (EndReason.COMPLETED, 0)


@pytest.mark.parametrize("late", [TaskStage.STARTED, TaskStage.EXITED])
def test_a_report_that_was_overtaken_by_a_newer_one_changes_nothing(training, late):
    """A worker that has died does not come to life again, and one that trains in a world not to the one before."""
    before = Worker(WorkerState.TRAINING, "10.0.0.2:7000", 1, 1, problem="plan 1 lost a member")
    old, training.revision = training.revision + 1, training.revision + 1
    exits = (RankExit(1, 0, 9),) if late is TaskStage.EXITED else ()
    training.told(2, worker=Worker(WorkerState.TRAINING, "10.0.0.2:7000", 1, 1, busy_s=2.0))
    training.report(A, late, old, part=2, worker=before, exits=exits)
    assert training.shepherd.gang.tasks[Place(A, 2)].worker.busy_s == 2.0
    training.dies(2)
    assert training.members == (1, 3)
    training.report(A, TaskStage.STARTED, old, part=2, worker=before)
    assert (training.members, [share.part for share in training.record.shares]) == ((1, 3), [1, 3])


def test_members_that_have_not_switched_to_the_next_world_do_not_train_in_it(training):
    training.dies(3)
    training.trains(1)
    assert training.record.rescalings[-1].ranks_after == 0
    training.told(2, worker=Worker(WorkerState.TRAINING, "10.0.0.2:7000", 2, 1))
    assert training.record.rescalings[-1].ranks_after == 0, "it has heard of it, and trains in the one before"
    training.trains(2)
    assert training.record.rescalings[-1].ranks_after == 2


def test_a_gang_of_which_all_die_has_failed(training):
    for part in (1, 2, 3):
        training.leaves(part, code=3)
    record = training.record
    assert (record.state, record.end_reason, record.exit_code) == (JobState.ENDED, EndReason.FAILED, 3)


def test_a_lost_node_costs_its_parts_alone_and_they_are_settled_as_leftovers(training):
    training.do(training.shepherd.step(NodeLost(A), training.clock))
    record = training.record
    assert (record.state, record.restarts, record.world.members, record.world.lost) == (
        JobState.RUNNING,
        0,
        (3,),
        (1, 2),
    )
    assert record.leftovers == (Leftover(A, 1, part=1), Leftover(A, 1, part=2))
    assert [share.place for share in record.shares] == [Place(B, 3)]
    assert {(node, request.part) for node, request in training.take(StopRequest)} == {(A, 1), (A, 2)}
    training.trains(3)
    training.do(training.shepherd.step(NodeReturned(A), training.clock))
    training.dies(1)
    training.told(2)
    assert (A, 2) in [(node, request.part) for node, request in training.take(ReleaseRequest)]
    training.dies(2)
    assert training.record.leftovers == ()
    training.leaves(3)
    assert training.record.end_reason is EndReason.COMPLETED


def test_what_a_node_without_members_tells_late_of_checkpoints_and_of_the_training_counts_for_nothing(training):
    def saves(node, part, world, sequence):
        checkpoint = Checkpoint(f"step-{sequence}", 1, node, sequence=sequence, world=world)
        request = CheckpointRequest(training.record.job_id, 1, sequence, node, checkpoint, part)
        training.do(training.shepherd.step(word(request), training.clock))
        ((_, answer),) = training.take(CheckpointAnswer)
        return answer.detail

    def tells(node, done):
        told = TaskEstimate(training.record.job_id, 1, Estimate(remaining=100.0 - done, done=done))
        training.do(training.shepherd.step(PeerMessageReceived(node, told), training.clock))

    assert saves(A, 1, 1, 20) == ""
    tells(A, 20.0)
    training.do(training.shepherd.step(NodeLost(A), training.clock))
    training.trains(3)
    assert saves(B, 3, 2, 9) == ""
    tells(B, 60.0)
    assert saves(A, 1, 1, 40) == "worker 1 trains no more"
    tells(A, 40.0)
    assert training.record.checkpoint.name == "step-9"
    assert training.shepherd.estimate.done == 60.0


def test_a_node_that_is_back_while_it_is_asked_for_newcomers_is_asked_for_its_members_too(training):
    """It may have lost its memory, and what it says of a newcomer says nothing of them."""
    training.wish((A, 3), (B, 1))
    training.granted(HoldRequest)
    (commit,) = training.take(CommitRequest)
    training.do(training.shepherd.step(NodeReturned(A), training.clock))
    asked = training.take(StatusRequest)
    assert {(node, request.part) for node, request in asked} == {(A, 1), (A, 2)}
    training.answer([commit], refusal=Refusal.EXPIRED)
    training.answer(asked, refusal=Refusal.UNKNOWN)
    assert training.members == (3,)
    assert training.record.state is JobState.RUNNING


def test_the_loss_of_a_node_with_newcomers_alone_is_nothing_to_those_that_train(training):
    training.wish((A, 2), (B, 1), (C, 1))
    training.join()
    before = training.record
    training.do(training.shepherd.step(NodeLost(C), training.clock))
    record = training.record
    assert (record.world.version, record.world.members, record.world.joining) == (1, (1, 2, 3), ())
    assert record.leftovers == (Leftover(C, 1, part=4),)
    assert (record.shares, record.rescalings) == (before.shares[:3], before.rescalings)
    assert training.take(WorldRequest) == []
    assert training.shepherd.is_steady


def test_the_loss_of_all_who_have_trained_is_a_restart_also_where_newcomers_have_not_heard_that_they_are_members(
    training,
):
    training.wish((A, 2), (B, 1), (C, 1))
    training.join()
    training.ready(4)
    assert training.members == (1, 2, 3, 4)
    training.do(training.shepherd.step(NodeLost(A), training.clock))
    assert (training.record.state, training.members) == (JobState.RUNNING, (3, 4))
    training.lose(B)
    assert (training.record.state, training.record.restarts) == (JobState.QUEUED, 1)


@pytest.mark.parametrize("has_trained", [True, False])
def test_whoever_takes_over_leaves_the_dead_behind_once_somebody_is_known_to_have_the_state(training, has_trained):
    training.wish((A, 2), (B, 1), (C, 1))
    training.join()
    training.ready(4)
    training.succeed()
    for part in (1, 2, 3):
        training.dies(part)
    assert training.members == (1, 2, 3, 4), "the fourth has not told whether it has trained"
    trains = 2 if has_trained else 0
    state = WorkerState.TRAINING if has_trained else WorkerState.READY
    training.told(4, worker=Worker(state, "10.0.0.4:7000", 2, trains))
    if has_trained:
        assert (training.record.state, training.members) == (JobState.RUNNING, (4,))
    else:
        assert (C, 4) in [(node, request.part) for node, request in training.take(StopRequest)]
        training.dies(4, signal=15)
        assert (training.record.state, training.record.restarts) == (JobState.QUEUED, 1)


def test_the_loss_of_the_last_node_is_a_restart(training):
    training.do(training.shepherd.step(NodeLost(A), training.clock))
    training.lose(B)
    record = training.record
    assert (record.state, record.restarts, record.shares, record.world.version) == (JobState.QUEUED, 1, (), 0)
    assert {leftover.part for leftover in record.leftovers} == {1, 2, 3}


def test_a_move_of_all_goes_by_two_worlds_the_old_ones_leave_when_the_new_ones_train(training):
    training.wish((C, 3))
    training.join()
    training.ready(4, 5, 6)
    assert (training.record.world.version, training.members) == (2, (1, 2, 3, 4, 5, 6))
    training.trains(1, 2, 3)
    assert training.members == (1, 2, 3, 4, 5, 6)
    training.trains(4, 5, 6)
    assert (training.record.world.version, training.members) == (3, (4, 5, 6))
    training.trains(4, 5, 6)
    for part in (1, 2, 3):
        training.leaves(part)
    assert [share.place for share in training.record.shares] == [Place(C, 4), Place(C, 5), Place(C, 6)]
    assert training.shepherd.is_steady


def test_a_move_of_all_before_anybody_has_trained_goes_by_two_worlds_too(scene):
    scene.do(scene.shepherd.step(StartWished((Share(A, 2),), ORDER), scene.clock))
    scene.join()
    scene.told(1)
    scene.told(2)
    scene.wish((C, 2))
    scene.join()
    scene.ready(3, 4)
    assert scene.members == (3, 4)
    members = [update.world.members for update in scene.updates if update.world.version]
    assert (1, 2, 3, 4) in members, "each keeps somebody who was in the one before"


def test_a_partial_move_is_one_change(training):
    training.wish((A, 2), (C, 1))
    training.join()
    training.ready(4)
    assert (training.record.world.version, training.members) == (2, (1, 2, 4))


def test_newcomers_that_are_refused_cost_nothing(training):
    before = training.record
    training.wish((A, 1), (B, 1), (C, 2))
    training.answer(training.take(HoldRequest), Refusal.DOES_NOT_FIT)
    assert [node for node, _ in training.take(ReleaseRequest)] == [C, C]
    assert (training.record.shares, training.record.world) == (before.shares, before.world)
    assert training.shepherd.is_steady
    training.wish((A, 2), (B, 1), (C, 1))
    assert [request.part for _, request in training.take(HoldRequest)] == [6], "owners refuse what they released"


@pytest.mark.parametrize("how", ["dies", "refuses", "is late", "owner forgets"])
def test_newcomers_that_come_to_nothing_are_given_up_and_nobody_leaves_for_them(training, how):
    training.wish((A, 1), (B, 1), (C, 2))
    training.join()
    training.ready(4)
    if how == "dies":
        training.dies(5)
    elif how == "refuses":
        training.told(5, worker=Worker(WorkerState.REFUSED, "10.0.0.5:7000"))
    elif how == "owner forgets":
        training.told(5, TaskStage.EXITED, failure=TaskFailure.LOST)
    else:
        training.wait(JOIN_S + 1.0)
    assert 5 not in training.record.world.joining
    if how in ("refuses", "is late"):
        assert [(node, request.part) for node, request in training.take(StopRequest)] == [(C, 5)]
        training.dies(5, signal=15)
    assert training.members == (1, 2, 3, 4), "the other one trains all the same"
    assert [share.part for share in training.record.shares] == [1, 2, 3, 4]
    assert training.record.state is JobState.RUNNING


def part_newcomers(scene, *nodes, how_often=REFUSALS_MOST, together=1):
    """Newcomers join on these nodes in turn, and part from the others: most often, or until the job stops."""
    for count in range(how_often):
        target = ((A, 2), (B, 1), (nodes[count % len(nodes)], together))
        ranks = Counter()
        for node, more in target:
            ranks[node] += more
        while holds_off(scene, *ranks.items()):
            scene.wait(1.0)
        scene.wish(*ranks.items())
        scene.join()
        new = tuple(scene.record.world.joining)
        scene.ready(*new)
        assert scene.members == (1, 2, 3, *new)
        for part in new:
            problem = f"replicas have parted before step 9: worker {part} differs from worker 1"
            scene.told(part, worker=Worker(WorkerState.REFUSED, "", scene.record.world.version, problem=problem))
            scene.leaves(part, code=1)
            scene.wait(2.5)
        if scene.record.state is not JobState.RUNNING:
            return count + 1
        scene.trains(1, 2, 3)
    return how_often


@pytest.mark.parametrize(("nodes", "together"), [((B,), 1), ((C, B), 1), ((B,), 3)])
def test_a_script_of_which_each_newcomer_parts_ends_with_an_error_after_a_few(training, nodes, together):
    assert part_newcomers(training, *nodes, how_often=9, together=together) == REFUSALS_MOST
    assert training.record.state is JobState.STOPPING
    if len(nodes) > 1:
        training.succeed()
    for share in training.record.shares:
        training.dies(share.part, signal=15)
    last = training.record.last_part - together + 1
    told = f"replicas have parted before step 9: worker {last} differs from worker 1"
    node = nodes[(REFUSALS_MOST - 1) % len(nodes)]
    assert training.record.detail == (
        f"5 newcomers in a row could not train as the others do; the last: worker {last} on {node}: {told}"
    )
    assert (training.record.end_reason, shell_exit_code(training.record)) == (EndReason.FAILED, 1)


def test_newcomers_that_part_on_one_node_alone_or_long_after_one_another_end_no_job(training):
    assert part_newcomers(training, C, how_often=9) == 9, "that node may be what computes wrongly"
    training.wait(2 * SETBACKS_FORGOTTEN_S)
    for _ in range(3):
        part_newcomers(training, B, how_often=REFUSALS_MOST - 1)
        training.wait(2 * SETBACKS_FORGOTTEN_S)
    assert training.record.state is JobState.RUNNING


def test_newcomers_that_die_of_something_else_end_no_job(training):
    for _ in range(2 * REFUSALS_MOST):
        while holds_off(training, (A, 2), (B, 2)):
            training.wait(1.0)
        training.wish((A, 2), (B, 2))
        training.join()
        training.ready(*training.record.world.joining)
        training.leaves(training.members[-1], code=1)
        training.trains(1, 2, 3)
        training.wait(2.5)
    assert training.record.state is JobState.RUNNING


def holds_off(scene, *shares, unwanted=()):
    target = Allocation(tuple(Share(node, ranks) for node, ranks in shares))
    return regrouping.holds_off(scene.shepherd, target, scene.now_s, unwanted)


def test_after_newcomers_have_failed_others_follow_later_and_later_and_not_there(training):
    waits_s = []
    for part in range(4, 10):
        training.wish((A, 2), (B, 1), (C, 1))
        training.join()
        training.dies(part)
        assert C in training.shepherd.pacing.avoided
        assert holds_off(training, (A, 3), (B, 1))
        assert holds_off(training, (A, 2), (B, 1), unwanted=(1,)), "also one that comes for another"
        assert not holds_off(training, (A, 1), (B, 1)), "whoever leaves is not waited for"
        begun_s = training.now_s
        while holds_off(training, (A, 3), (B, 1)):
            training.wait(0.5)
        waits_s.append(training.now_s - begun_s)
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    training.wait(SETBACKS_FORGOTTEN_S + 1.0)
    training.dies(1)
    training.dies(2)
    assert holds_off(training, (A, 1), (B, 1))
    training.wait(1.0)
    assert not holds_off(training, (A, 1), (B, 1)), "long ago; and those that die together count once"


def test_owners_that_refuse_newcomers_are_not_asked_again_at_once(training):
    for _ in range(12):
        training.wish((A, 2), (B, 1), (C, 2))
        training.answer(training.take(HoldRequest), Refusal.DOES_NOT_FIT)
    assert holds_off(training, (A, 2), (B, 1), (C, 2))
    training.wait(BACKOFF_S_MAX)
    assert not holds_off(training, (A, 2), (B, 1), (C, 2))


def test_newcomers_are_numbered_above_all_that_owners_say_they_have_released(training):
    """A shepherd that is gone may have asked for many of which no record tells."""
    training.wish((A, 2), (B, 1), (C, 1))
    told = {"released_attempt": training.record.attempt, "released_part": 70}
    training.answer(training.take(HoldRequest), Refusal.RELEASED_ATTEMPT, **told)
    training.wish((A, 2), (B, 1), (C, 1))
    assert [request.part for _, request in training.take(HoldRequest)] == [71]


def test_parts_that_were_released_of_an_earlier_attempt_say_nothing_of_newcomers(training):
    training.wish((A, 2), (B, 1), (C, 1))
    told = {"released_attempt": training.record.attempt - 1, "released_part": 70}
    training.answer(training.take(HoldRequest), Refusal.RELEASED_ATTEMPT, **told)
    training.wish((A, 2), (B, 1), (C, 1))
    assert [request.part for _, request in training.take(HoldRequest)] == [5]


def test_whoever_takes_over_goes_on_from_the_record(training):
    training.wish((A, 2), (B, 1), (C, 1))
    training.granted(HoldRequest)
    training.succeed()
    commits = training.take(CommitRequest)
    assert [(node, request.part) for node, request in commits] == [(C, 4)]
    training.answer(commits, is_staged=True)
    training.granted(LaunchRequest)
    training.workers.clear()
    training.ready(4)
    assert training.members == (1, 2, 3, 4)
    assert training.take(WorldRequest) == [], "where the others are it has not heard yet"
    training.ready(1, 2, 3)
    assert [request.part for _, request in training.take(WorldRequest)] == [1, 2, 3, 4]
    training.trains(1, 2, 3, 4)
    assert [each.ranks_after for each in training.record.rescalings] == [4]
    assert [each.kind for each in training.announced][-1] == "job.resumed"
    assert training.record.rescalings[-1].reason == "begun by its shepherd before"


def test_whoever_takes_over_changes_nothing_before_all_have_told_for_how_long_they_have_run(training):
    training.succeed()
    training.wait(30.0)
    for part in (1, 2, 3):
        assert not training.shepherd.is_steady, "newcomers would be counted from the start of the others on"
        training.told(part, ran_s=100.0)
    assert training.shepherd.is_steady


def test_commits_that_come_too_late_after_a_take_over_are_given_up(training):
    training.wish((A, 2), (B, 1), (C, 1))
    training.granted(HoldRequest)
    training.succeed()
    training.answer(training.take(CommitRequest), Refusal.EXPIRED)
    assert training.record.world.joining == ()
    stops = training.take(StopRequest)
    assert [(node, request.part) for node, request in stops] == [(C, 4)]
    training.answer(stops, Refusal.UNKNOWN)
    assert [share.part for share in training.record.shares] == [1, 2, 3]


def test_a_job_that_is_cancelled_while_it_changes_stops_all_its_parts(training):
    training.wish((A, 2), (B, 1), (C, 1))
    training.join()
    training.do(training.shepherd.step(StopAsked(7, None, ""), training.clock))
    assert [request.part for _, request in training.take(StopRequest)] == [1, 2, 3, 4]
    training.wait(1.5)
    assert training.shepherd.next_deadline_s > training.now_s, "nobody looks after the change any more"
    for part in (1, 2, 3, 4):
        training.dies(part, signal=15)
    assert training.record.end_reason is EndReason.CANCELLED


def test_a_member_that_ends_well_while_others_miss_it_is_left_behind(training):
    training.leaves(1)
    assert training.record.world.version == 1, "they may be about to end as well"
    problem = Worker(WorkerState.TRAINING, "10.0.0.2:7000", 1, 1, problem="plan 1 lost a member")
    training.told(2, worker=problem)
    assert training.members == (2, 3)
    assert training.record.shepherd == ME


WAITS = "has waited for 30 s for all ranks to call step(), in round 7"


def stands(training, part, **more):
    """It trains, as told last."""
    training.told(part, worker=Worker(WorkerState.TRAINING, f"10.0.0.{part}:7000", 1, 1, **more))


def test_a_member_that_stands_still_is_left_behind_once_others_wait_for_it_and_is_stopped(training):
    stands(training, 1, is_silent=True)
    training.wait(600.0)
    assert training.members == (1, 2, 3), "the others train: it may be its agent that is busy"
    stands(training, 2, problem=WAITS)
    world = training.record.world
    assert (world.version, world.members, world.lost) == (2, (2, 3), (1,))
    assert training.record.rescalings[-1].reason == "worker 1 on a stands still"
    assert [(node, request.part) for node, request in training.take(StopRequest)] == [(A, 1)]
    training.trains(2, 3)
    training.dies(1)
    assert [share.part for share in training.record.shares] == [2, 3]


def test_a_member_that_hangs_is_left_behind_once_the_wait_of_others_has_timed_out(training):
    stands(training, 2, problem=WAITS)
    stands(training, 3, problem=WAITS)
    training.wait(1_700.0)
    assert training.members == (1, 2, 3)
    stands(training, 3, problem=WAITS, has_timed_out=True)
    assert (training.members, training.record.world.lost) == ((2, 3), (1,))
    told = "worker 1 on a does not come to its step, for which others wait"
    assert training.record.rescalings[-1].reason == told
    assert [(node, request.part) for node, request in training.take(StopRequest)] == [(A, 1)]


@pytest.mark.parametrize("state", [WorkerState.TRAINING, WorkerState.UNKNOWN])
def test_more_members_than_wait_for_them_and_those_not_heard_of_again_are_not_given_up(training, state):
    """Evaluation on all ranks but one, say, or an agent that has just started again."""
    training.told(1, worker=Worker(state))
    if state is WorkerState.UNKNOWN:
        stands(training, 2, problem=WAITS)
    stands(training, 3, problem=WAITS, has_timed_out=True)
    assert training.members == (1, 2, 3)


def test_a_member_that_waits_too_or_that_its_agent_has_paused_is_left_to_others(training):
    stands(training, 1, problem=WAITS)
    stands(training, 2, problem=WAITS)
    training.told(3, is_frozen=True, worker=Worker(WorkerState.TRAINING, "10.0.0.3:7000", 1, 1, is_silent=True))
    training.wait(600.0)
    assert training.members == (1, 2, 3)


def test_the_only_member_with_the_state_of_the_training_is_not_given_up(training):
    training.wish((A, 2), (B, 2))
    training.join()
    training.told(4)
    training.ready(4)
    assert training.members == (1, 2, 3, 4)
    training.dies(1)
    training.dies(2)
    stands(training, 3, is_silent=True)
    training.told(4, worker=Worker(WorkerState.READY, "10.0.0.4:7000", problem=WAITS))
    assert training.members == (3, 4)
    assert training.record.world.lost == (1, 2), "the first too, of whom something may come late"


LOST = "plan 1 lost a member: [/build/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:7: reset"


def parts(training, *parts, failed=0, trains=0):
    """They live, and the present world came to nothing for them."""
    version = training.record.world.version
    for part in parts:
        worker = Worker(WorkerState.TRAINING, f"10.0.0.{part}:7000", version, trains or version, problem=LOST)
        training.told(part, worker=replace(worker, failed=failed or version))


def test_members_that_lose_one_another_and_live_go_on_as_the_next_world(training):
    training.take(WorldRequest)
    parts(training, 1, 2, 3)
    training.wait(PARTED_S - 0.5)
    assert training.record.world.version == 1, "one may be about to die"
    training.wait(0.6)
    world = training.record.world
    assert (world.version, world.members, world.lost) == (2, (1, 2, 3), ())
    told = "its workers lost one another: plan 1 lost a member: Read error [10.0.0.2]:7: reset"
    assert (training.record.rescalings[-1].reason, training.record.rescalings[-1].is_forced) == (told, True)
    assert [request.part for _, request in training.take(WorldRequest)] == [1, 2, 3]
    assert training.take(StopRequest) == []
    training.trains(1, 2, 3)
    assert training.shepherd.is_steady
    assert [each.ranks_after for each in training.record.rescalings] == [3]


def test_members_that_wait_for_one_that_does_not_notice_go_on_with_it_later(training):
    parts(training, 1, 2)
    training.wait(PARTED_SOME_S - 1.0)
    assert training.record.world.version == 1, "the third may compute, or be about to die"
    training.wait(1.1)
    assert (training.record.world.version, training.members) == (2, (1, 2, 3))


def test_a_connection_that_ends_again_and_again_is_waited_for_longer_each_time(training):
    tried_s = []
    for _ in range(7):
        version = training.record.world.version
        parts(training, 1, 2, 3)
        while training.record.world.version == version:
            training.wait(0.5)
        tried_s.append(training.now_s)
    waits_s = [later - before for before, later in itertools.pairwise(tried_s)]
    assert waits_s == pytest.approx([2.0, 2.0, 4.0, 8.0, 16.0, 32.0], abs=0.6)


def test_whoever_goes_back_from_a_switch_and_whoever_came_through_meet_in_the_next_world(training):
    """Worker 1 trains in world 2, which the others could not switch to: they have gone on in world 1 until it left."""
    training.dies(3)
    parts(training, 1, trains=2)
    parts(training, 2, trains=1)
    training.wait(PARTED_S + 0.1)
    assert (training.record.world.version, training.members) == (3, (1, 2))


def test_a_death_that_is_told_late_is_a_death(training):
    parts(training, 1, 2)
    training.wait(1.0)
    training.dies(3)
    assert (training.record.world.version, training.members) == (2, (1, 2))
    training.trains(1, 2)
    training.wait(PARTED_SOME_S + 10.0)
    assert training.record.world.version == 2


@pytest.mark.parametrize("how", ["frozen", "silent", "not heard of since a take-over"])
def test_nobody_is_thrown_out_of_a_step_while_it_may_be_another_s_turn(training, how):
    if how == "not heard of since a take-over":
        training.succeed()
    parts(training, 1, 2)
    if how == "frozen":
        training.told(3, is_frozen=True)
    elif how == "silent":
        training.told(3, worker=Worker(WorkerState.TRAINING, "10.0.0.3:7000", 1, 1, is_silent=True))
        assert training.members == (1, 2), "it stands still, and the others say that they wait"
        return
    training.wait(PARTED_SOME_S + 10.0)
    assert training.record.world.version == 1


def test_newcomers_that_a_world_cannot_take_in_are_given_up_and_the_others_go_on(training):
    training.wish((A, 2), (B, 1), (C, 1))
    training.join()
    training.ready(4)
    assert training.members == (1, 2, 3, 4)
    parts(training, 1, 2, 3, trains=1)
    training.told(4, worker=Worker(WorkerState.READY, "10.0.0.4:7000", 2, failed=2))
    training.wait(PARTED_S + 0.1)
    world = training.record.world
    assert (world.version, world.members, world.lost) == (3, (1, 2, 3), (4,))
    assert [(node, request.part) for node, request in training.take(StopRequest)] == [(C, 4)]
    assert holds_off(training, (A, 2), (B, 1), (C, 1))
    assert C in training.shepherd.pacing.avoided


def test_a_gang_that_is_killed_at_once_goes_on_from_its_checkpoint_as_another_attempt(training):
    training.dies(2)
    training.dies(1)
    training.dies(3)
    record = training.record
    assert (record.state, record.restarts, record.shares) == (JobState.QUEUED, 1, ())
    assert record.reason == "restarting (1 of 5): worker 3 on b was killed by signal 9"


def test_a_gang_is_lost_too_of_which_nothing_is_heard_since_its_agents_have_started_again(training):
    for part in (1, 2, 3):
        training.told(part, worker=Worker())
    for part in (1, 2, 3):
        training.dies(part)
    assert (training.record.state, training.record.restarts) == (JobState.QUEUED, 1)


def test_workers_that_end_because_the_others_are_lost_are_lost_too(training):
    parts(training, 1, 2, 3)
    for part in (1, 2, 3):
        training.leaves(part, code=1)
    record = training.record
    assert (record.state, record.restarts) == (JobState.QUEUED, 1)
    assert record.reason == "restarting (1 of 5): worker 3 on b lost the others, and went on in no other world"


def test_a_job_that_may_not_be_restarted_tells_how_its_last_workers_ended():
    ends = {}
    for how in ("killed", "left alone"):
        scene = ElasticScene(max_restarts=0)
        scene.run()
        if how == "left alone":
            parts(scene, 1, 2, 3)
        for part in (1, 2, 3):
            scene.dies(part) if how == "killed" else scene.leaves(part, code=1)
        ends[how] = (scene.record.end_reason, scene.record.signal, scene.record.exit_code)
    assert ends == {"killed": (EndReason.FAILED, 9, 0), "left alone": (EndReason.NODE_LOST, 0, 125)}


@pytest.mark.parametrize("how", ["memory", "refuses", "code"])
def test_a_gang_that_fails_by_itself_has_failed(training, how):
    for part in (1, 2, 3):
        if how == "memory":
            training.told(part, TaskStage.EXITED, exits=(RankExit(part - 1, 0, 9, is_oom=True),))
        elif how == "refuses":
            training.told(part, worker=Worker(WorkerState.REFUSED, "", 1, 1, failed=1))
            training.leaves(part, code=1)
        else:
            training.leaves(part, code=1)
    assert training.record.end_reason is (EndReason.OOM if how == "memory" else EndReason.FAILED)


def test_a_newcomer_that_is_stopped_with_the_others_does_not_hide_their_failure(training):
    training.wish((A, 2), (B, 1), (C, 1))
    training.join()
    training.ready(4)
    training.told(4, worker=Worker(WorkerState.READY, "10.0.0.4:7000", 2))
    training.dies(1)
    training.dies(2)
    training.leaves(3, code=3)
    assert (C, 4) in [(node, request.part) for node, request in training.take(StopRequest)]
    training.dies(4, signal=15)
    assert (training.record.end_reason, training.record.exit_code) == (EndReason.FAILED, 3)

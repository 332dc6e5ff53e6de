"""One node alone: what it routes, refuses before it is ready, and remembers of jobs that have ended."""

import random

import pytest
from msgspec.structs import replace

from swarmsched import record as record_module
from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.card import card_of
from swarmsched.clock import Clock
from swarmsched.commands import (
    CancelJob,
    CreateTicket,
    ForgetMember,
    JobAccepted,
    Refused,
    SetSwarmSetting,
    SettingStored,
    SignalJob,
    SubmitJob,
)
from swarmsched.effects import Persist, ReplyToClient, SendPeer
from swarmsched.errors import RemoteProtocolError
from swarmsched.events import (
    ClientCommandReceived,
    DatagramReceived,
    PeerMessageReceived,
    ResourcesRead,
    TasksFound,
    TimerFired,
)
from swarmsched.gossip.member import MemberChanged, MemberStatus
from swarmsched.gossip.message import MEMBERSHIP_CODEC, Gossip
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId, make_job_id
from swarmsched.jobs.acceptor import SCHEMA_KEY, SCHEMA_VERSION, Slot
from swarmsched.jobs.message import AcceptAnswer, AcceptRequest, Ballot, PrepareAnswer, PrepareRequest
from swarmsched.ledger.message import HoldRequest, OwnerAnswer, Refusal, TaskReport, TaskReportReceived
from swarmsched.negotiation import shepherd_state as state_module
from swarmsched.negotiation.placement import own_view as view_module
from swarmsched.node import Node, NodeConfig, Restored
from swarmsched.resources import Demand, FreeReport
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import PolicySetting
from swarmsched.wire.codec import encode_value
from tests.swarmsched.building import make_record, make_resources

ME, OTHER = NodeId("n1"), NodeId("n2")
STORE = 77
UTC = 1_700_000_000.0
RESOURCES = make_resources(2, 16, 2**37)
SPEC = JobSpec(("true",), ranks=1, demand=Demand(gpus=1))


class Scene:
    """A node whose disk is kept and whose messages to itself are looped back."""

    def __init__(self, entries=None, is_awake=True, seeds=(), **config):
        self.now_s = 1.0
        self.disk = entries or {}
        self.requests = 0
        self.sent = []
        restored = Restored({room: dict(values) for room, values in self.disk.items()})
        options = {
            "generation": 5,
            "store_id": STORE,
            "instance_id": b"i" * 16,
            "seeds": seeds,
            "started_s": self.now_s,
            "utc_offset_s": UTC,
            **config,
        }
        self.node = Node(NodeConfig(node_id=ME, address=("10.0.0.1", 7400), **options), restored, random.Random(3))
        if is_awake:
            self.step(TasksFound(()))
            self.step(ResourcesRead(RESOURCES))

    def step(self, event):
        replies = []
        work = [event]
        while work:
            for effect in self.node.step(work.pop(0), self.now_s):
                match effect:
                    case Persist(room=room, key=key, value=None):
                        self.disk.get(room, {}).pop(key, None)
                    case Persist(room=room, key=key, value=value):
                        self.disk.setdefault(room, {})[key] = value
                    case SendPeer(recipient=recipient, message=message) if recipient == ME:
                        work.append(PeerMessageReceived(ME, message))
                    case SendPeer():
                        self.sent.append((effect.recipient, effect.message))
                    case ReplyToClient():
                        replies.append(effect)
        return replies

    def ask(self, command):
        self.requests += 1
        (reply,) = self.step(ClientCommandReceived(self.requests, command, UTC + self.now_s))
        assert reply.request_id == self.requests
        return reply.reply

    def submit(self, spec=SPEC, **options):
        ticket = self.ask(CreateTicket())
        return ticket, self.ask(SubmitJob(ticket.job_id, ticket.holders, spec, **options))

    def end(self, spec=SPEC):
        """Submit a job that cannot start, and cancel it."""
        ticket, _ = self.submit(spec)
        self.now_s += 1.0
        self.ask(CancelJob(ticket.job_id))
        return ticket.job_id


@pytest.fixture
def scene():
    return Scene()


WAITING = JobSpec(("true",), ranks=9, demand=Demand(gpus=1))


def waiting_scene(**options):
    """A node that does not know the swarm's totals yet takes jobs that are too large for what it knows."""
    return Scene(seeds=(("10.0.0.2", 7400),), **options)


def test_nothing_is_taken_before_resources_are_read_and_old_tasks_are_looked_for():
    scene = Scene(is_awake=False)
    assert scene.ask(CreateTicket()).code == "not_ready"
    scene.step(TasksFound(()))
    assert scene.ask(CreateTicket()).code == "not_ready"
    scene.step(ResourcesRead(RESOURCES))
    assert not isinstance(scene.ask(CreateTicket()), Refused)


def test_a_submitted_job_is_on_disk_before_the_answer(scene):
    ticket, reply = scene.submit()
    assert isinstance(reply, JobAccepted)
    assert not reply.was_known
    assert scene.disk["register"]
    assert scene.node.is_shepherd(ticket.job_id)


def test_an_update_that_cannot_be_stored_is_left_out_and_holds_up_none_behind_it(scene, monkeypatch):
    ticket, _ = scene.submit()
    with monkeypatch.context() as patched:
        patched.setattr(record_module, "cleaned", lambda text: text)
        patched.setattr(state_module, "cleaned", lambda text: text[:1])
        scene.ask(CancelJob(ticket.job_id, reason="\udce9"))
    assert scene.node.counters["updates_refused"] == 1
    assert scene.node.record(ticket.job_id).stop_reason is EndReason.NONE
    scene.ask(CancelJob(ticket.job_id, reason="caf\udce9"))
    record = scene.node.record(ticket.job_id)
    assert (record.stop_reason, record.reason) == (EndReason.CANCELLED, "caf\\udce9")


def test_a_card_that_cannot_be_written_ends_no_step_and_is_counted(monkeypatch):
    monkeypatch.setattr(view_module, "card_of", lambda *args, **more: replace(card_of(*args, **more), pause_s=-1.0))
    scene = waiting_scene()
    ticket, _ = scene.submit(WAITING)
    scene.now_s += 5.0
    scene.step(TimerFired())
    assert scene.node.counters["cards_refused"] == 1
    assert scene.node.record(ticket.job_id).state is JobState.QUEUED


def test_a_dry_run_makes_no_job_and_says_what_would_happen(scene):
    ticket, reply = scene.submit(is_dry_run=True)
    assert reply.record.reason.startswith("needs ")
    assert reply.record.reason.endswith("; no job is ahead of it")
    assert scene.node.record(ticket.job_id) is None


def test_a_repeated_ticket_meets_the_same_job_and_another_job_is_refused(scene):
    ticket, _ = scene.submit()
    again = scene.ask(SubmitJob(ticket.job_id, ticket.holders, SPEC))
    assert again.was_known
    other = scene.ask(SubmitJob(ticket.job_id, ticket.holders, JobSpec(("false",))))
    assert other.code == "conflict"


@pytest.mark.parametrize(
    ("holders", "problem"),
    [((Holder(OTHER, 5),), "names holders n2"), ((), "names holders"), ((Holder(ME, 5),), "n1 has lost the store")],
)
def test_a_ticket_that_does_not_name_this_holder_is_refused(scene, holders, problem):
    refused = scene.ask(SubmitJob(make_job_id(UTC, random.Random(1)), holders, SPEC))
    assert (refused.code, refused.remedy) == ("conflict", "ask for a new ticket")
    assert problem in refused.problem


def test_a_malformed_job_id_is_refused_by_field(scene):
    refused = scene.ask(SubmitJob(JobId("nonsense"), (Holder(ME, STORE),), SPEC))
    assert (refused.code, refused.fields[0].pointer) == ("invalid", "/ticket/job_id")


def test_more_than_the_swarm_has_is_refused_only_when_its_totals_are_known():
    alone = Scene()
    assert alone.submit(WAITING)[1].code == "impossible"
    starting = waiting_scene()
    assert isinstance(starting.submit(WAITING)[1], JobAccepted)
    starting.now_s += 10.0
    assert starting.submit(WAITING)[1].code == "impossible"


@pytest.mark.parametrize("key", ["nodes", "exclude"])
def test_a_choice_of_nodes_that_are_not_there_is_refused_by_name_once_all_are_known(key):
    spec = replace(WAITING, ranks=1, demand=Demand(), **{key: (ME, NodeId("n11"))})
    refused = Scene().submit(spec)[1]
    assert (refused.code, refused.fields[0].pointer) == ("impossible", f"/{key}")
    assert refused.problem == "there is no node 'n11'; did you mean 'n1'?"
    starting = waiting_scene()
    assert isinstance(starting.submit(spec)[1], JobAccepted)


def test_cancelling_twice_and_cancelling_an_unknown_job():
    scene = waiting_scene()
    job = scene.end(WAITING)
    again = scene.ask(CancelJob(job))
    assert (again.record.state, again.record.end_reason) == (JobState.ENDED, EndReason.CANCELLED)
    assert scene.ask(CancelJob(make_job_id(UTC, random.Random(1)))).code == "not_found"


@pytest.mark.parametrize("signal", [0, 65])
def test_an_impossible_signal_is_refused(scene, signal):
    ticket, _ = scene.submit()
    assert scene.ask(SignalJob(ticket.job_id, signal)).code == "invalid"


def test_a_setting_is_stored_and_a_wrong_one_is_refused_with_its_field(scene):
    stored = scene.ask(SetSwarmSetting(PolicySetting("backfill")))
    assert isinstance(stored, SettingStored)
    assert scene.node.setting.policy == "backfill"
    refused = scene.ask(SetSwarmSetting(PolicySetting("bakfill")))
    assert refused.code == "invalid"
    assert refused.fields
    assert scene.node.setting.policy == "backfill"
    assert Scene(scene.disk).node.setting.policy == "backfill"


def test_what_jobs_are_by_default_is_kept_with_the_setting(scene):
    scene.ask(SetSwarmSetting(PolicySetting(is_restartable=True)))
    assert Scene(scene.disk).node.setting.policy_setting.is_restartable


def test_a_deadline_in_the_past_is_refused_by_field_unless_the_job_is_known(scene):
    late = replace(SPEC, deadline_utc_s=UTC - 5)
    _, refused = scene.submit(late)
    assert (refused.code, refused.fields[0].pointer, refused.problem) == (
        "invalid",
        "/deadline_utc_seconds",
        "1699999995 is 6 s in the past",
    )
    ticket, _ = scene.submit(soon := replace(SPEC, deadline_utc_s=UTC + 5))
    scene.now_s += 60
    assert scene.ask(SubmitJob(ticket.job_id, ticket.holders, soon)).was_known


def test_a_repeated_ticket_meets_its_job_though_the_swarms_default_has_changed(scene):
    ticket, _ = scene.submit(replace(SPEC, restartable=True))
    assert scene.ask(SubmitJob(ticket.job_id, ticket.holders, SPEC)).was_known


def test_forgetting_an_unknown_or_live_member_is_refused(scene):
    assert scene.ask(ForgetMember(OTHER)).code == "not_found"
    assert scene.ask(ForgetMember(ME)).code == "conflict"


def test_the_oldest_retention_are_dropped_beyond_the_limit():
    scene = waiting_scene(retained_jobs=2)
    jobs = [scene.end(WAITING) for _ in range(4)]
    assert sorted(scene.node.records()) == sorted(jobs[2:])
    assert sorted(Scene(scene.disk, retained_jobs=2).node.records()) == sorted(jobs[2:])


def test_a_restarted_node_tells_again_that_a_job_has_ended():
    """It may have died before anybody heard; others would queue behind the job's card for minutes."""
    scene = waiting_scene()
    job = scene.end(WAITING)
    assert Scene(scene.disk, generation=6).node.locations()[job].ended_utc_s > 0


def test_a_restarted_node_takes_its_jobs_up_under_a_new_epoch():
    scene = waiting_scene()
    ticket, _ = scene.submit(WAITING)
    again = waiting_scene(entries=scene.disk, generation=6)
    record = again.node.record(ticket.job_id)
    assert (record.epoch, record.shepherd_generation) == (2, 6)


def report(job, stage):
    return TaskReport(TaskStatus(job, 1, 1, OTHER, stage, revision=4, generation=9), FreeReport(9, 1, 0, 0, 0))


@pytest.mark.parametrize("stage", [TaskStage.STARTED, TaskStage.EXITED])
def test_a_report_on_an_unknown_job_is_left_to_its_holders(scene, stage):
    """This node may have lost its disk: the result may be wanted by whoever takes the job over."""
    scene.sent = []
    scene.step(PeerMessageReceived(OTHER, report(make_job_id(UTC, random.Random(1)), stage)))
    assert scene.sent == []


def test_the_result_of_a_job_that_ended_here_is_acknowledged():
    scene = waiting_scene()
    job = scene.end(WAITING)
    for again in (scene, Scene(scene.disk, generation=6)):
        again.sent = []
        again.step(PeerMessageReceived(OTHER, report(job, TaskStage.EXITED)))
        assert again.sent == [(OTHER, TaskReportReceived(job, 1, 4, 9))]


@pytest.fixture
def in_doubt():
    """A node that has accepted a job's end, as one of three holders, and does not know whether it was decided."""
    job, third = make_job_id(UTC, random.Random(1)), NodeId("n3")
    holders = (Holder(ME, STORE), Holder(OTHER, 5), Holder(third, 6))
    ended = {"state": JobState.ENDED, "attempt": 1, "version": 6}
    record = make_record(ME, holders, job_id=job, spec=SPEC, submitted_utc_s=UTC, shepherd_generation=5, **ended)
    slot = Slot(job, Ballot(3, ME, 5), Ballot(2, ME, 5), record)
    scene = Scene({"register": {SCHEMA_KEY: SCHEMA_VERSION, job: encode_value(Slot, slot)}}, generation=6)
    scene.sent = []
    return scene, record


def decide(scene, record):
    """Time to ask, and the other holder's promise."""
    scene.now_s += 1.0
    scene.step(TimerFired())
    (asked,) = [message for node, message in scene.sent if node == OTHER and isinstance(message, PrepareRequest)]
    promise = PrepareAnswer(record.job_id, asked.ballot, True, asked.ballot, Ballot(2, ME, 5), record, 5)
    scene.step(PeerMessageReceived(OTHER, promise))
    (spread,) = [message for node, message in scene.sent if node == OTHER and isinstance(message, AcceptRequest)]
    accepted = AcceptAnswer(record.job_id, spread.ballot, True, spread.next_ballot, 5)
    scene.step(PeerMessageReceived(OTHER, accepted))
    scene.sent = []


def test_a_result_is_acknowledged_only_once_the_end_of_its_job_is_decided(in_doubt):
    """Otherwise whoever takes the job over would need it."""
    scene, record = in_doubt
    scene.step(PeerMessageReceived(OTHER, report(record.job_id, TaskStage.EXITED)))
    assert scene.sent == []
    decide(scene, record)
    scene.step(PeerMessageReceived(OTHER, report(record.job_id, TaskStage.EXITED)))
    assert scene.sent == [(OTHER, TaskReportReceived(record.job_id, 1, 4, 9))]


def test_no_client_is_told_that_a_job_has_ended_before_that_is_decided(in_doubt):
    scene, record = in_doubt
    refused = scene.ask(CancelJob(record.job_id))
    assert (refused.code, refused.remedy) == ("unavailable", "ask again soon")
    decide(scene, record)
    assert scene.ask(CancelJob(record.job_id)) == JobAccepted(record)


def test_a_message_that_no_machine_takes_is_the_peers_fault(scene):
    with pytest.raises(RemoteProtocolError, match="no machine"):
        scene.step(PeerMessageReceived(OTHER, object()))


def hold_answer(scene, job):
    scene.sent = []
    scene.step(PeerMessageReceived(OTHER, HoldRequest(job, 1, 1, 1, OTHER, 1, SPEC.demand, "fifo", (1,), False)))
    (answer,) = [message for _, message in scene.sent if isinstance(message, OwnerAnswer)]
    return answer.refusal


def test_a_node_whose_name_is_shared_begins_nothing_new_until_that_is_over(scene):
    def become(status, previous):
        (view,) = scene.node.members(scene.now_s)
        changed = MemberChanged(replace(view, status=status), previous)
        scene.node._settle([changed], Clock(scene.now_s, UTC + scene.now_s))

    jobs = [make_job_id(UTC, random.Random(seed)) for seed in range(3)]
    assert hold_answer(scene, jobs[0]) is Refusal.NONE
    become(MemberStatus.CONFLICT, MemberStatus.ALIVE)
    assert hold_answer(scene, jobs[0]) is Refusal.NONE, "what was promised stands"
    assert hold_answer(scene, jobs[1]) is Refusal.CONFLICT
    become(MemberStatus.ALIVE, MemberStatus.CONFLICT)
    assert hold_answer(scene, jobs[2]) is Refusal.NONE


def test_a_node_whose_peers_knew_a_newer_life_of_it_speaks_under_a_newer_generation(scene):
    """Otherwise its record and its answers would lose against those of the life that they remember."""
    earlier = replace(scene.node._membership._identity.update, generation=39, instance_id=b"another process.")
    scene.step(DatagramReceived(("10.0.0.9", 7400), MEMBERSHIP_CODEC.encode(Gossip((earlier,)))))
    assert scene.node.generation == 40
    (status,) = scene.node.node_records(scene.now_s)
    assert status.record.generation == 40
    assert scene.node.ledger.report().generation == 40
    scene.node.validate()

"""The jobs that this node shepherds, as one machine: what owners, other shepherds, planners and members tell them.

Whatever is delivered to a shepherd may have changed how others should see its job; they hear of it at the end of the
step, when the queue has been looked at too.
"""

from collections.abc import Iterable, Mapping

from swarmsched.authority.message import SilenceAnswer
from swarmsched.clock import Clock
from swarmsched.effects import Announce, ReplyToClient, SendPeer
from swarmsched.errors import RemoteProtocolError
from swarmsched.events import FilesAway, PeerMessageReceived, PeerSendFailed, PlanComputed, PlanFailed, TimerFired
from swarmsched.facts import Awoke, CapacityChanged, JobChanged, JobClosed, NodeChanged, SettingChanged
from swarmsched.gossip.member import MemberChanged, MemberStatus
from swarmsched.gossip.state import StatePlane
from swarmsched.holder.holding import Holding
from swarmsched.holder.machine import Answered, NodeEffect, Taker
from swarmsched.holder.retention import past_retention
from swarmsched.ids import NodeId
from swarmsched.jobs.update import (
    Asker,
    JobOver,
    RecordAccepted,
    UpdateConflicted,
    UpdateDecided,
    UpdateUncertain,
)
from swarmsched.ledger.message import (
    CheckpointRequest,
    Opening,
    OwnerAnswer,
    OwnerCommand,
    PreemptAnswer,
    PreemptRequest,
    TaskEstimate,
    TaskReport,
    YieldRequest,
)
from swarmsched.negotiation.gang import dismissal, heard
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.negotiation.told import FilesLooked, MakeRoom, NodeReturned, NodeSilent, SteppedDown
from swarmsched.node.publication import STATE_TRAFFIC
from swarmsched.node.resources import Resources
from swarmsched.resources import Free
from swarmsched.task import TaskStage, TaskStatus

FOR_SHEPHERDS = (SilenceAnswer, TaskEstimate, CheckpointRequest, PreemptRequest, PreemptAnswer, YieldRequest)


class Jobs:
    """All shepherds of one node."""

    def __init__(
        self, me: NodeId, placement: Placement, state: StatePlane, resources: Resources, holding: Holding
    ) -> None:
        self._me = me
        self._placement, self._shepherds = placement, placement.shepherds
        self._state = state
        self._resources = resources
        self._holding = holding
        self._free = Free()  # here, as last seen
        self._openings = 0  # elsewhere, as last seen
        self._is_awake = False
        self.takes: Mapping[object, Taker] = {
            **dict.fromkeys((OwnerAnswer, TaskReport, Opening), self._owner_said),
            **dict.fromkeys(FOR_SHEPHERDS, self._pass_on),
            **dict.fromkeys(STATE_TRAFFIC, self._heard_gossip),
            PeerSendFailed: self._undelivered,
            TimerFired: self._on_timer,
            PlanComputed: self._plan_computed,
            PlanFailed: self._plan_failed,
            FilesAway: self._files_away,
            Awoke: self._awoke,
            MemberChanged: self._member_changed,
            SettingChanged: self._setting_changed,
            CapacityChanged: self._capacity_changed,
            RecordAccepted: self._accepted,
            UpdateDecided: self._decided,
            JobOver: self._over,
            Asker.SHEPHERD: self._answered,
        }

    @property
    def next_deadline_s(self) -> float:
        """Earliest of the jobs' own timers, the next look at the queue and the next invitations; once awake."""
        return (self._placement if self._is_awake else self._shepherds).next_deadline_s

    # What comes from outside.

    def _owner_said(self, event: PeerMessageReceived, clock: Clock) -> Iterable[NodeEffect]:
        """An owner answered, reported or has something free: its free counts repair our view first."""
        message: OwnerAnswer | TaskReport | Opening = event.message
        if event.sender != self._me:
            self._state.repair(event.sender, message.free, clock.now_s)
            self._note_openings(clock)
        if isinstance(message, Opening):
            self._placement.invited(clock.now_s)
            return []
        job_id = message.job_id if isinstance(message, OwnerAnswer) else message.status.job_id
        shepherd = self._shepherds.jobs.get(job_id)
        if shepherd is None:
            return self._answer_stray(message.status) if isinstance(message, TaskReport) else []
        return shepherd.step(event, clock)

    def _answer_stray(self, status: TaskStatus) -> Iterable[NodeEffect]:
        """A report on a job that has ended here: it was lost news to the owner, so say again that it is heard.

        Of any other job, and of one whose record is lost here, the owner hears from whoever acts, or from the holders.
        """
        if self._holding.is_over(status.job_id) and status.stage is TaskStage.EXITED:
            return [heard(status)]  # of ranks that still run it hears by its contacts
        record = self._holding.record(status.job_id)
        if record is None or not record.is_ended or self._holding.is_in_doubt(record):
            return []
        return dismissal(record, self._me, status)

    def _pass_on(self, event: PeerMessageReceived, clock: Clock) -> Iterable[NodeEffect]:
        """To the job's shepherd.  Where there is none, it is asked again at whoever acts by then, or given up."""
        message = event.message
        shepherd = self._shepherds.jobs.get(message.taker if isinstance(message, PreemptAnswer) else message.job_id)
        if shepherd is None:
            return []
        if isinstance(message, CheckpointRequest) and message.owner != event.sender:
            raise RemoteProtocolError(f"names owner {message.owner}", kind="CheckpointRequest", peer=event.sender)
        if isinstance(message, TaskEstimate):
            return self._placement.estimated(shepherd, event.sender, message, clock)
        if isinstance(message, PreemptRequest):
            refusal = self._placement.plans.refuses_to_make_room(message, clock)
            return shepherd.step(MakeRoom(message, refusal), clock)
        return shepherd.step(event, clock)

    def _undelivered(self, event: PeerSendFailed, clock: Clock) -> Iterable[NodeEffect]:
        command = event.message
        shepherd = self._shepherds.jobs.get(command.job_id) if isinstance(command, OwnerCommand) else None
        return shepherd.step(event, clock) if shepherd is not None else []

    def _files_away(self, event: FilesAway, clock: Clock) -> Iterable[NodeEffect]:
        effects: list[NodeEffect] = []
        for job_id, is_away in self._shepherds.files_away(event.jobs, clock.now_s):
            effects += self._shepherds.jobs[job_id].step(FilesLooked(is_away), clock)
            if not is_away:
                self._placement.look_soon(clock.now_s)
        return effects

    def _plan_computed(self, event: PlanComputed, clock: Clock) -> Iterable[NodeEffect]:
        told = self._placement.plan_computed(event.plan, clock)
        for job_id in self._shepherds.jobs:  # their ranks may be other ones
            self._shepherds.stir(job_id)
        return told

    def _plan_failed(self, event: PlanFailed, clock: Clock) -> None:
        self._placement.plan_failed(event.version, clock.now_s)

    def _on_timer(self, event: TimerFired, clock: Clock) -> Iterable[NodeEffect]:
        effects: list[NodeEffect] = []
        for shepherd in self._shepherds.due(clock.now_s):
            effects += shepherd.step(event, clock)
        return [*effects, *self._invite(clock)] if self._is_awake else effects

    # What other machines tell.

    def _awoke(self, told: Awoke, clock: Clock) -> None:
        self._is_awake = True
        self._placement.look_soon(clock.now_s)

    def _heard_gossip(self, event: object, clock: Clock) -> None:
        """News on nodes and jobs; where it tells of room for what waits here, the queue is looked at."""
        self._resources.drop_claims()
        self._note_openings(clock)
        if self._state.has_job_news and (self._free.gpus or self._free.cpus):
            self._placement.inviter.queued(clock.now_s)
        if self._state.has_job_news and (self._placement.may_change_jobs or self._state.job_news_is_long):
            self._placement.make_room_for_others(clock)

    def _note_openings(self, clock: Clock) -> None:
        if self._state.opening_count != self._openings:
            self._openings = self._state.opening_count
            self._capacity_released(clock)

    def _capacity_changed(self, told: CapacityChanged, clock: Clock) -> None:
        before, self._free = self._free, self._resources.ledger.free
        if self._free.gpu_count > before.gpu_count or self._free.cpus > before.cpus:
            self._capacity_released(clock)
            self._placement.inviter.freed(clock.now_s)

    def _capacity_released(self, clock: Clock) -> None:
        if self._placement.may_change_jobs or self._shepherds.waits_for_room:
            self._placement.capacity_released(clock)

    def _setting_changed(self, told: SettingChanged, clock: Clock) -> None:
        self._placement.set_policy(self._state.setting.policy_setting, clock.now_s)

    def _member_changed(self, change: MemberChanged, clock: Clock) -> Iterable[NodeEffect]:
        member = change.member
        self._placement.look_soon(clock.now_s)
        effects: list[NodeEffect] = []
        for shepherd in self._shepherds.jobs.values():
            if member.status is MemberStatus.FAILED and shepherd.has_share(member.node_id):
                effects += shepherd.step(NodeSilent(member.node_id), clock)
            if member.status is MemberStatus.ALIVE:
                effects += shepherd.step(NodeReturned(member.node_id), clock)
        return effects

    def _accepted(self, told: RecordAccepted, clock: Clock) -> Iterable[NodeEffect]:
        """A record came into our store, by our own hand or by another's."""
        record = told.record
        shepherd = self._shepherds.jobs.get(record.job_id)
        if shepherd is None or record.shepherd == self._me or record.epoch <= shepherd.record.epoch:
            return []
        return self._placement.step_down(shepherd, f"epoch {record.epoch} is {record.shepherd}'s", clock)

    def _decided(self, answer: Answered, clock: Clock) -> None:
        """A record that names this node, as a rule: its shepherd acts from now on, or goes on."""
        self._shepherds.stir(answer.request.job_id)

    def _answered(self, answer: Answered, clock: Clock) -> Iterable[NodeEffect]:
        """The register has spoken about an update of a shepherd's."""
        result = answer.result
        shepherd = self._shepherds.jobs.get(answer.request.job_id)
        if shepherd is None:
            return []
        match result:
            case UpdateDecided() | UpdateUncertain():
                return shepherd.step(result, clock)
            case UpdateConflicted(current=current) if current is not None:
                # Somebody else wrote the record: our epoch is over, so we touch nothing of the job any more.
                return self._placement.step_down(shepherd, f"epoch {current.epoch} is {current.shepherd}'s", clock)
            case _:
                return []

    def _over(self, answer: Answered, clock: Clock) -> Iterable[NodeEffect]:
        """It had ended long ago: whatever is here of it is old."""
        job_id = answer.request.job_id
        shepherd = self._shepherds.jobs.get(job_id)
        if shepherd is None:
            return []
        self._placement.let_go(job_id)
        replies = [ReplyToClient(request_id, past_retention(job_id)) for request_id in shepherd.unanswered_clients()]
        text = "the job has ended, and its record is past its retention"
        stepped_down = Announce("job.stepped_down", text, job_id, self._me)
        return [*replies, stepped_down, JobClosed(shepherd.record, is_over=True)]

    # The end of a step.

    def is_unsettled(self, now_s: float) -> bool:
        """True while the queue wants to be looked at, or others should hear of something."""
        return bool(self._shepherds.touched) or (self._is_awake and self._placement.look_due_s <= now_s)

    def settle(self, clock: Clock) -> list[NodeEffect]:
        """Look at the queue if it is time to, invite others to what is free here, and say what has changed."""
        effects: list[NodeEffect] = []
        news, has_openings = self._shepherds.take_news()
        if has_openings:
            self._placement.look_soon(clock.now_s)
        if self._is_awake and self._placement.look_due_s <= clock.now_s:
            effects += self._placement.look(clock)
            news = [*dict.fromkeys((*news, *self._shepherds.take_news()[0]))]
        effects += self._invite(clock)
        return [*[told for job in news for told in self._tell(job, clock)], *effects]

    def _invite(self, clock: Clock) -> list[SendPeer]:
        """Tell those who are first in line of what is free here."""
        shepherds = self._placement.invitations(self._resources.ledger.free, clock)
        return [SendPeer(shepherd, Opening(self._resources.ledger.report())) for shepherd in shepherds]

    def _tell(self, job: JobShepherd, clock: Clock) -> list[NodeEffect]:
        record = job.record
        if record.shepherd != self._me:
            self._placement.let_go(job.job_id)
            return [*job.step(SteppedDown(), clock)]
        if not record.is_ended or job.is_writing:
            return [JobChanged(job.job_id)]
        self._placement.let_go(job.job_id)
        return [JobClosed(record), NodeChanged()]

    def validate(self) -> None:
        """The queue and each shepherd; and at the end of a step nothing is left to be told."""
        self._placement.validate()
        assert not self._shepherds.touched, "a step is over, and news of a job are not told"

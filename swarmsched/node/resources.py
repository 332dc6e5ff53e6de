"""Plane D of one node: its ledger, its tasks and what their ranks want, as one machine.

Only here the ledger is changed, and whoever changes it hears of nobody else: that it has changed is told as a fact.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from swarmsched.api import JobState
from swarmsched.authority.message import ContactAnswered
from swarmsched.clock import Clock
from swarmsched.commands import CommitCheckpoint, Done, DrainNode, Refused
from swarmsched.effects import ReplyToClient
from swarmsched.events import DiskFilled, PeerMessageReceived, ResourcesRead, TaskEvent, TimerFired
from swarmsched.facts import Admitted, Awoke, CapacityChanged, GenerationRaised, JobClosed, LookedAfterJobs
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberChanged, MemberStatus
from swarmsched.holder.machine import NodeEffect, Taker
from swarmsched.ids import JobId, origin_of
from swarmsched.jobs.update import RecordAccepted
from swarmsched.ledger.ledger import Ledger
from swarmsched.ledger.message import CheckpointAnswer, ClaimRequest, OwnerCommand, TaskBatch, TaskReportReceived
from swarmsched.negotiation.checkpointing import CheckpointDesk
from swarmsched.negotiation.owner import Owner
from swarmsched.node.config import NodeConfig, Restored
from swarmsched.node.parts import Parts
from swarmsched.record import JobRecord

Locations = Mapping[JobId, Location]


class Resources:
    """The owner of this node's devices."""

    def __init__(
        self,
        config: NodeConfig,
        restored: Restored,
        parts: Parts,
        records: Mapping[JobId, JobRecord],
        locations: Callable[[], Locations],
    ) -> None:
        """`records`: those that this node holds; `locations`: of all jobs, as far as others have told."""
        me = config.node_id
        self._config = config
        self.ledger: Ledger = parts.make_ledger(me, config.generation, origin_of(config.address))
        self.ledger.restore(restored.room("ledger"), config.started_s)
        line = parts.make_contact_line(me, config.generation, parts.quorum)
        self.owner = Owner(me, self.ledger, line)
        self.owner.restore(restored.room("task"), config.started_s)
        self.checkpoints = CheckpointDesk(me, config.generation)
        self._records, self._locations = records, locations
        self._told_version = -1
        owner = self.owner
        takes: dict[object, Taker] = {
            **dict.fromkeys(get_args(OwnerCommand), self._obey),
            **dict.fromkeys(get_args(TaskEvent), lambda event, clock: owner.step(event, clock.now_s)),
            TaskReportReceived: lambda event, clock: owner.answered(event.message),
            TaskBatch: lambda event, clock: owner.answered(event.message),
            ContactAnswered: lambda event, clock: owner.contact_answered(event.sender, event.message, clock.now_s),
            CheckpointAnswer: lambda event, clock: self.checkpoints.answered(event.message),
            ResourcesRead: self._read,
            DiskFilled: lambda event, clock: owner.disk_filled(event.shortage, clock.now_s),
            TimerFired: self._on_timer,
            DrainNode: self._drain,
            CommitCheckpoint: self._commit_checkpoint,
            Awoke: self._awoke,
            GenerationRaised: self._generation_raised,
            MemberChanged: self._member_changed,
            RecordAccepted: lambda told, clock: owner.learn(told.record, clock.now_s),
            JobClosed: lambda told, clock: owner.forget(told.record.job_id, clock.now_s),
            LookedAfterJobs: lambda told, clock: owner.end_left_over(self._ended_epoch, clock.now_s),
        }
        self.takes: Mapping[object, Taker] = {kind: self._announcing(take) for kind, take in takes.items()}

    def _announcing(self, take: Taker) -> Taker:
        """The same, and the others hear of it when the ledger is another one than before."""

        def taking(taken: object, clock: Clock) -> Iterable[NodeEffect]:
            effects = take(taken, clock) or ()
            if self.ledger.version == self._told_version:
                return effects
            self._told_version = self.ledger.version
            return [*effects, CapacityChanged()]

        return taking

    @property
    def next_deadline_s(self) -> float:
        """When a report, a contact, the end of a hold or of a claim, or a checkpoint's repetition is due."""
        return min(self.owner.next_deadline_s, self.checkpoints.next_deadline_s)

    def drop_claims(self) -> None:
        """Keep no place any more for a job that has ended, or has another shepherd, who does not know of it."""
        if self.ledger.claims:
            self.ledger.drop_claims(self._is_succeeded)

    def _is_succeeded(self, claim: ClaimRequest) -> bool:
        location = self._locations().get(claim.job_id)
        return location is not None and (location.state is JobState.ENDED or location.epoch > claim.epoch)

    def _ended_epoch(self, job_id: JobId) -> int:
        location = self._locations().get(job_id)
        return location.epoch if location is not None and location.state is JobState.ENDED else 0

    def _obey(self, event: PeerMessageReceived, clock: Clock) -> Iterable[NodeEffect]:
        return self.owner.obey(event.sender, event.message, clock.now_s)

    def _read(self, event: ResourcesRead, clock: Clock) -> Iterable[NodeEffect]:
        self.ledger.offer(event.resources, clock.now_s)
        return self.owner.looked_at_gpus(clock.now_s)

    def _on_timer(self, event: TimerFired, clock: Clock) -> Iterable[NodeEffect]:
        now_s = clock.now_s
        effects: list[NodeEffect] = []
        if now_s >= self.owner.next_deadline_s:
            effects += self.owner.step(event, now_s)
        if now_s >= self.checkpoints.next_deadline_s:
            effects += self.checkpoints.on_timer(self.owner.shepherd_of, now_s)
        return effects

    def _drain(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        command: DrainNode = asked.command
        if self._config.is_witness:
            problem = f"{self._config.node_id} is a witness: it runs no jobs that it could refuse"
            refusal = Refused("conflict", problem, "stop its agent, if the machine must go")
            return [ReplyToClient(asked.request_id, refusal)]
        drained = self.owner.drain(command.reason if command.is_draining else None)
        return [*drained, ReplyToClient(asked.request_id, Done())]

    def _commit_checkpoint(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        command: CommitCheckpoint = asked.command
        shepherd = self.owner.shepherd_of(command.of_attempt)
        return self.checkpoints.wish(asked.request_id, command, shepherd, clock.now_s)

    def _awoke(self, told: Awoke, clock: Clock) -> Iterable[NodeEffect]:
        return [effect for record in list(self._records.values()) for effect in self.owner.learn(record, clock.now_s)]

    def _generation_raised(self, told: GenerationRaised, clock: Clock) -> None:
        self.ledger.set_generation(told.generation)
        self.owner.generation_changed(clock.now_s)

    def _member_changed(self, change: MemberChanged, clock: Clock) -> None:
        if change.member.node_id == self._config.node_id:
            self.owner.note_conflict(is_there=change.member.status is MemberStatus.CONFLICT)

    def validate(self) -> None:
        """Bookings, tasks and wishes."""
        for part in (self.ledger, self.owner, self.checkpoints):
            part.validate()

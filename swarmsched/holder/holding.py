"""What a node owes the jobs whose records it holds, and what it needs to act for those that it shepherds.

As a holder it grants leases, tells owners whether their tasks may run on, stands for shepherd when a lease is over, and
keeps what has ended for a while.  As a shepherd it keeps its leases, steps back from jobs for which it has no majority,
gives up gangs whose nodes are lost, and sees to it that the holders are there.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from swarmsched.api import JobState
from swarmsched.authority.contact_book import ContactBook
from swarmsched.authority.message import LeaseGranted, LeaseRenewal, OwnerContact, SilenceRequest
from swarmsched.clock import Clock
from swarmsched.cluster import Candidate, Cluster
from swarmsched.commands import RecoverJob
from swarmsched.effects import Announce, SendPeer
from swarmsched.events import DiskChanged, PeerMessageReceived, TimerFired, WorkLagged
from swarmsched.facts import Admitted, Awoke, JobClosed, LookedAfterJobs
from swarmsched.gossip.member import MemberChanged
from swarmsched.holder.election import Election
from swarmsched.holder.leases import LeaseBook, LeaseKeeper
from swarmsched.holder.machine import Answered, NodeEffect, Taker
from swarmsched.holder.presence import Presence
from swarmsched.holder.read_repair import ReadRepair
from swarmsched.holder.records import Records
from swarmsched.holder.recovery import Recovery
from swarmsched.holder.replacement import Replacement
from swarmsched.holder.retention import Retention
from swarmsched.holders import Quorum
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.update import (
    Asker,
    EndConfirmed,
    JobOver,
    ReadDecided,
    RecordAccepted,
    UpdateConflicted,
    UpdateDecided,
)
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.negotiation.told import NodeLost, TakenUp
from swarmsched.record import JobRecord

LOOK_INTERVAL_S = 1.0
REVIEW_INTERVAL_S = 5.0
CONFIRMED_S = 6.0  # that an accepted record stands for a lease: two renewals, and well within what holders grant


@dataclass(frozen=True, slots=True)
class HolderLife:
    """Who holds, in one life of its process."""

    own: Candidate
    generation: int
    quorum: Quorum
    retained_jobs: int
    started_s: float


class Holding:
    """One node's duties around the register."""

    def __init__(
        self,
        life: HolderLife,
        records: Records,
        placement: Placement,
        cluster: Cluster,
        lease_book: LeaseBook,
        contact_book: ContactBook,
        fork: Callable[[], random.Random],
    ) -> None:
        self._own, self._me = life.own, life.own.holder
        self._records, self._register = records, records.register
        self._placement, self._shepherds, self._cluster = placement, placement.shepherds, cluster
        self._lease_book, self._contact_book = lease_book, contact_book
        self._keeper = LeaseKeeper(self._me.node, life.generation, life.quorum)
        rng = fork()
        self._presence = Presence(self._me.node)
        self._election = Election(self._me.node, life.generation, lease_book, rng)
        self._replacement = Replacement(life.own, self._shepherds, rng)
        self._read_repair = ReadRepair()
        self._recovery = Recovery(life.own, life.generation, self._shepherds)
        self._retention = Retention(
            self._me,
            self._register,
            self._shepherds,
            self._read_repair,
            contact_book,
            fork(),
            life.retained_jobs,
            life.started_s,
        )
        self._is_awake = self._is_disk_stalled = False  # stalled: what this node shepherds must become another's
        self._stalled_s: dict[NodeId, float] = {}  # nodes that cannot write: since when
        self._confirmed_s: dict[JobId, float] = {}  # when a majority last accepted a record of ours
        self._look_s = self._review_s = 0.0
        for record in self._register.records.values():
            contact_book.accepted(record, life.started_s)
        self.takes: Mapping[object, Taker] = {
            LeaseRenewal: lambda event, clock: lease_book.renew(event.sender, event.message, clock.now_s),
            LeaseGranted: lambda event, clock: self._keeper.granted(event.sender, event.message),
            OwnerContact: self._contacted,
            SilenceRequest: self._asked_for_silence,
            TimerFired: self._on_timer,
            WorkLagged: lambda event, clock: self._election.lagged(event.lag_s, clock.now_s),
            DiskChanged: self._disk_changed,
            RecoverJob: self._recover,
            Awoke: self._awoke,
            MemberChanged: self._member_changed,
            JobClosed: self._closed,
            RecordAccepted: self._accepted,
            EndConfirmed: lambda told, clock: self._retention.confirmed(told.job_id),
            UpdateDecided: self._confirmed,
            ReadDecided: lambda answer, clock: self._retention.read(answer.result.record),
            JobOver: self._over,
            Asker.ELECTION: self._elected,
            Asker.READ_REPAIR: lambda answer, clock: self._read_repair.answered(answer),
            Asker.REPLACEMENT: self._replacement.probed,
            Asker.RECOVERY: self._recovered,
        }

    @property
    def next_deadline_s(self) -> float:
        """When to renew, to look for jobs without a shepherd, or to review holders."""
        if not self._is_awake:
            return float("inf")
        return min(self._look_s, self._keeper.next_deadline_s, self._election.next_deadline_s)

    # What is known here of jobs.

    @property
    def known(self) -> Mapping[JobId, JobRecord]:
        """Jobs that this node shepherds or holds, ended ones as long as they are kept."""
        live = {job_id: shepherd.record for job_id, shepherd in self._shepherds.jobs.items()}
        held = {job_id: record for job_id, record in self._register.records.items() if self._may_tell(record)}
        return {**held, **live}

    def record(self, job_id: JobId) -> JobRecord | None:
        """One of `known`."""
        shepherd = self._shepherds.jobs.get(job_id)
        if shepherd is not None:
            return shepherd.record
        held = self._register.records.get(job_id)
        return held if held is not None and self._may_tell(held) else None

    def _may_tell(self, record: JobRecord) -> bool:
        """What a former holder has kept, for those who look for the present ones, is no news of the job."""
        return record.is_ended or record.job_id in self._register.open_records

    def is_over(self, job_id: JobId) -> bool:
        """True for a job that has ended and of which this node keeps no record any more."""
        return self._register.is_over(job_id)

    def is_in_doubt(self, record: JobRecord) -> bool:
        """True for an end that this node has accepted and that may turn out not to be decided; it finds out then."""
        return self._retention.is_in_doubt(record)

    # As a holder.

    def _contacted(self, event: PeerMessageReceived, clock: Clock) -> Iterable[NodeEffect]:
        contact: OwnerContact = event.message
        records, over = self._register.records, self._register.over
        for task in contact.tasks:
            record = records.get(task.job_id)
            if record is not None and record.stamp < (task.epoch, task.version):
                self._read_repair.suspect(task.job_id)
        answer = self._contact_book.contacted(event.sender, contact, records, self._me, clock.now_s, over)
        return [SendPeer(event.sender, answer)]

    def _asked_for_silence(self, event: PeerMessageReceived, clock: Clock) -> Iterable[NodeEffect]:
        answer = self._contact_book.silence(event.message, self._register.records, self._me, clock.now_s)
        return [SendPeer(event.sender, answer)]

    def _accepted(self, told: RecordAccepted, clock: Clock) -> Iterable[NodeEffect]:
        """This node's acceptor took over a record: a shepherd that wrote it is alive."""
        record, now_s = told.record, clock.now_s
        self._contact_book.accepted(record, now_s)
        if told.is_by_shepherd:
            self._lease_book.touch(record.shepherd, record.shepherd_generation, now_s)
        if record.shepherd == self._me.node and not record.is_ended:
            self._election.look_soon(now_s)
        return self._retention.accepted(record, now_s)

    def _closed(self, told: JobClosed, clock: Clock) -> Iterable[NodeEffect]:
        return [] if told.is_over else self._retention.closed(told.record.job_id)

    def _over(self, answer: Answered, clock: Clock) -> Iterable[NodeEffect]:
        """A holder had the job's decided end and keeps it no more: whatever is here of the job is old."""
        job_id = answer.request.job_id
        effects: list[NodeEffect] = []
        if job_id in self._register.open_records:
            text = "it ended while this node knew it open; others have dropped its record, and so does this one"
            effects.append(Announce("job.over", text, job_id, self._me.node))
        return [*effects, *self._retention.bury(job_id)]

    def _suspect_older_than(self, record: JobRecord) -> None:
        held = self._register.records.get(record.job_id)
        if held is not None and held.stamp < record.stamp:
            self._read_repair.suspect(record.job_id)

    # Becoming a shepherd, and ceasing to be one.

    def _stand(self, now_s: float) -> Iterable[NodeEffect]:
        held = self._register.open_records
        if self._own.is_witness:  # whoever could act may never have heard of the job
            for record in held.values():
                if self._lease_book.may_change(record.shepherd, record.shepherd_generation, now_s):
                    self._read_repair.suspect(record.job_id)
            held = {}
        acting = {*self._shepherds.jobs, *self._records.asked_by((Asker.CREATION, Asker.RECOVERY))}
        return self._election.on_timer(held, acting, self._shepherds.update_ids, now_s)

    def _elected(self, answer: Answered, clock: Clock) -> Iterable[NodeEffect]:
        if isinstance(answer.result, UpdateDecided):
            self._election.won(answer.request, clock.now_s)
            return self._take_up(answer.result.record, clock)
        self._election.lost(answer.request, clock.now_s)
        if isinstance(answer.result, UpdateConflicted) and answer.result.current is not None:
            self._suspect_older_than(answer.result.current)
        return []

    def _recover(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        held = self._register.records.get(asked.command.job_id)
        candidates = self._cluster.candidates(clock.now_s)
        return self._recovery.begin(asked.request_id, asked.command, held, candidates, clock)

    def _recovered(self, answer: Answered, clock: Clock) -> Iterable[NodeEffect]:
        replies, result = self._recovery.answered(answer), answer.result
        if not isinstance(result, UpdateDecided) or result.record.shepherd != self._me.node:
            return replies
        return [*self._take_up(result.record, clock), *replies]

    def _take_up(self, record: JobRecord, clock: Clock) -> Iterable[NodeEffect]:
        """The register names us: act from now on."""
        shepherd = self._shepherds.add(record)
        text = f"{self._me.node} shepherds it in epoch {record.epoch}"
        taken = Announce("job.taken_over", text, record.job_id, self._me.node, {"epoch": record.epoch})
        return [taken, *shepherd.step(TakenUp(self._presence.lost(clock.now_s)), clock)]

    def _confirmed(self, answer: Answered, clock: Clock) -> None:
        """A majority of the holders has accepted a record of ours."""
        self._confirmed_s[answer.request.job_id] = clock.now_s

    def _has_authority(self, record: JobRecord, now_s: float) -> bool:
        """A majority of the holders votes for nobody else for now."""
        configuration = record.configuration
        is_confirmed = now_s < self._confirmed_s.get(record.job_id, float("-inf")) + CONFIRMED_S
        return configuration.is_quorum([self._me]) or is_confirmed or self._keeper.holds(configuration, now_s)

    def check_authority(self, job_id: JobId, clock: Clock) -> list[ShepherdEffect]:
        """Before a client is told anything: after a pause, another may act for the job already."""
        job = self._shepherds.jobs.get(job_id)
        if job is None or self._has_authority(job.record, clock.now_s):
            return []
        return self._step_back(job_id, job, clock)

    def _step_back(self, job_id: JobId, job: JobShepherd, clock: Clock) -> list[ShepherdEffect]:
        record = self._register.records.get(job_id)
        if record is not None and record.is_ended:
            self._read_repair.suspect(job_id)  # nobody stands for what has ended here, and others wait while we live
        return self._placement.step_down(
            job, "no majority of its holders answers; its ranks run on as long as they may", clock
        )

    # Time, and what happens to this node and to others.

    def _on_timer(self, event: TimerFired, clock: Clock) -> Iterable[NodeEffect]:
        told = self._retention.on_timer(self._presence, clock.now_s)
        return [*told, *self._whatever_is_due(clock)]

    def _awoke(self, told: Awoke, clock: Clock) -> Iterable[NodeEffect]:
        self._is_awake = True
        return self._whatever_is_due(clock)

    def _whatever_is_due(self, clock: Clock) -> list[NodeEffect]:
        now_s = clock.now_s
        effects: list[NodeEffect] = []
        is_look_due = now_s >= self._look_s
        if is_look_due:
            self._look_s = self._next_look_s(now_s)
            effects += [*self._look_after_jobs(clock), LookedAfterJobs()]
        if now_s >= self._review_s:
            self._review_s = now_s + REVIEW_INTERVAL_S
            effects += self._review(clock)
        if now_s >= self._keeper.next_deadline_s:
            effects += self._renew(now_s)
        if is_look_due or now_s >= self._election.next_deadline_s:
            effects += self._stand(now_s)
        return effects

    def _next_look_s(self, now_s: float) -> float:
        verdict_s = self._presence.next_verdict_s(now_s)
        return verdict_s if verdict_s < float("inf") else now_s + LOOK_INTERVAL_S

    def _disk_changed(self, event: DiskChanged, clock: Clock) -> None:
        self._is_disk_stalled = not event.is_writing

    def _member_changed(self, change: MemberChanged, clock: Clock) -> None:
        if self._presence.changed(change.member, clock.now_s):
            self._look_s = min(self._look_s, self._next_look_s(clock.now_s))

    def _renew(self, now_s: float) -> list[SendPeer]:
        """A shepherd that cannot write can do nothing for its jobs, and lets its leases run out."""
        renewals = self._keeper.on_timer(now_s)
        return [] if self._is_disk_stalled else renewals

    def _look_after_jobs(self, clock: Clock) -> list[ShepherdEffect]:
        """Give up gangs whose nodes are lost, and step back where the leases have run out."""
        now_s, jobs = clock.now_s, self._shepherds.jobs
        nodes = {holder.node for job in jobs.values() for holder in job.record.configuration.members}
        self._keeper.set_holders(sorted(nodes - {self._me.node}), now_s)
        effects: list[ShepherdEffect] = [*self._renew(now_s)] if now_s >= self._keeper.next_deadline_s else []
        effects += self._read_repair.on_timer(self._register.records, self._shepherds.update_ids, now_s)
        self._presence.look_for_strangers(jobs.values(), now_s)
        lost = self._presence.lost(now_s)
        for job_id, job in list(jobs.items()):
            if not self._has_authority(job.record, now_s):
                effects += self._step_back(job_id, job, clock)
                continue
            for node in self._presence.lost_of(job, lost, now_s):
                effects += job.step(NodeLost(node), clock)
        self._confirmed_s = {job_id: at_s for job_id, at_s in self._confirmed_s.items() if job_id in jobs}
        return effects

    def _review(self, clock: Clock) -> list[ShepherdEffect]:
        """Compare with what others tell, replace holders that are lost, remind others, and hand over what is too
        much."""
        now_s = clock.now_s
        candidates = self._cluster.candidates(now_s)
        self._compare_with_locations()
        succeeded = self._step_back_where_succeeded(clock)
        self._stalled_s = {node: self._stalled_s.get(node, now_s) for node in self._cluster.stalled(now_s)}
        gone = self._stalled_s | self._presence.away
        mended = self._replacement.mend(self._presence.failed, gone, candidates, clock)
        reminders = self._register.remind(lambda node: self._presence.is_there(node) and node not in gone)
        # Each hand-over is three more rounds for disks that do not keep up.
        handed_over = [] if self._election.is_late else self._replacement.hand_over(candidates, clock)
        return [*succeeded, *reminders, *mended, *handed_over]

    def _compare_with_locations(self) -> None:
        """Jobs that have ended, or that others hold by now, without this node's hearing of it.

        A former holder keeps what it has until the job has ended: whoever looks for the present ones by an old record
        must not find it empty.
        """
        locations = self._cluster.locations
        for job_id, record in self._register.records.items():
            location = None if record.is_ended else locations.get(job_id)
            if location is None or job_id in self._shepherds.jobs:
                continue
            is_succeeded = location.stamp > record.stamp and self._me.node not in location.holders
            is_news = is_succeeded and job_id in self._register.open_records
            if is_news or location.state is JobState.ENDED:
                self._read_repair.suspect(job_id)

    def _step_back_where_succeeded(self, clock: Clock) -> list[ShepherdEffect]:
        """Others tell of a later epoch: were it wrong, this node would take the job up again."""
        locations = self._cluster.locations
        effects: list[ShepherdEffect] = []
        for job_id, job in list(self._shepherds.jobs.items()):
            location = locations.get(job_id)
            if location is None or location.epoch <= job.record.epoch or location.shepherd == self._me.node:
                continue
            self._read_repair.suspect(job_id)
            effects += self._placement.step_down(job, f"epoch {location.epoch} is {location.shepherd}'s", clock)
        return effects

    def validate(self) -> None:
        """Re-derive who is asked for what, and what is kept."""
        for part in (self._election, self._read_repair, self._presence, self._recovery, self._retention):
            part.validate()

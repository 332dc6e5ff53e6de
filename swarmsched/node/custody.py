"""What a node owes the jobs whose records it holds, and what it needs to act for those that it shepherds.

As a holder it grants leases, tells owners whether their tasks may run on, and stands for shepherd when a lease is
over.  As a shepherd it keeps its leases, steps back from jobs for which it has no majority, replaces lost holders, and
hands jobs over when it has far more than its share.
"""

import random
from collections.abc import Callable, Mapping

from swarmsched.api import JobState
from swarmsched.authority.contact_book import ContactBook
from swarmsched.authority.lease_book import LeaseBook
from swarmsched.authority.leases import LeaseKeeper
from swarmsched.authority.message import LeaseGranted, LeaseRenewal, OwnerContact, SilenceRequest
from swarmsched.effects import Announce, SendPeer
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.holders import Configuration, Holders, Quorum
from swarmsched.ids import JobId, NodeId
from swarmsched.jobs.register import Register
from swarmsched.jobs.update import ReadDecided, ReadRequested, UpdateConflicted, UpdateDecided, UpdateUncertain
from swarmsched.negotiation.catching_up import CatchingUp
from swarmsched.negotiation.holding import Candidate, excess_jobs, next_holders, successor
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.record_writer import ReadRecord, ShepherdEffect
from swarmsched.negotiation.shepherd import Clock, JobShepherd
from swarmsched.negotiation.succession import Succession
from swarmsched.record import JobRecord

LOOK_INTERVAL_S = 1.0
REVIEW_INTERVAL_S = 5.0
CHANGES_PER_REVIEW = 32
SETTLED_S = 30.0  # that a gang runs before its nodes are relieved of holding: short jobs are not worth two updates
CONFIRMED_S = 6.0  # that an accepted record stands for a lease: two renewals, and well within what holders grant
STRANGER_S = 15.0  # that nobody has told of a node: by then a swarm that was split knows all its members again
NAMESAKE_S = 10.0  # that only another machine answers under a name: by then a swarm knows names with two holders
REFUTED_S = 1.0  # that a verdict "failed" stands before its node's ranks count as lost
PLANNED_STOP_S = 120.0  # that an agent that said goodbye may stay away before its ranks count as lost

CustodyMessage = LeaseRenewal | LeaseGranted | OwnerContact | SilenceRequest
Outcome = UpdateDecided | UpdateConflicted | UpdateUncertain | ReadDecided
CUSTODY_MESSAGES = (LeaseRenewal, LeaseGranted, OwnerContact, SilenceRequest)


class Custody:
    """One node's side of plane C, around the register."""

    def __init__(
        self,
        own: Candidate,
        generation: int,
        quorum: Quorum,
        register: Register,
        placement: Placement,
        lease_book: LeaseBook,
        contact_book: ContactBook,
        candidates: Callable[[float], list[Candidate]],
        stalled: Callable[[float], list[NodeId]],
        creating: Callable[[], Mapping[JobId, object]],
        locations: Callable[[], Mapping[JobId, Location]],
        rng: random.Random,
        *,
        started_s: float,
    ) -> None:
        self._own, self._me = own, own.holder
        self._register = register
        self._placement = placement
        self._lease_book = lease_book
        self._contact_book = contact_book
        self._candidates = candidates
        self._stalled = stalled
        self._stalled_s: dict[NodeId, float] = {}  # nodes that cannot write: since when
        self.is_disk_stalled = False  # here: what this node shepherds must become another's
        self._creating = creating
        self._locations = locations
        self._catching_up = CatchingUp()
        self._probes: dict[int, tuple[JobId, Holders]] = {}  # by update: whose holders would be which
        self._rng = rng
        self._keeper = LeaseKeeper(self._me.node, generation, quorum)
        self.succession = Succession(self._me.node, generation, lease_book, rng)
        self._confirmed_s: dict[JobId, float] = {}  # when a majority last accepted a record of ours
        self._gone: dict[NodeId, tuple[float, MemberStatus]] = {}  # members that are not alive: since when, and how
        self._met: dict[NodeId, None] = {self._me.node: None}  # members that were ever heard of in this life
        self._strangers: dict[NodeId, float] = {}  # nodes of our jobs that were not: since when
        self._shared: set[NodeId] = set()  # names with two holders: what answers under them says little
        self._look_s = self._review_s = 0.0
        for record in register.records.values():
            contact_book.accepted(record, started_s)

    @property
    def next_deadline_s(self) -> float:
        """When to renew, to look for jobs without a shepherd, or to review holders."""
        return min(self._look_s, self._keeper.next_deadline_s, self.succession.next_deadline_s)

    def receive(self, sender: NodeId, message: CustodyMessage, clock: Clock) -> list[SendPeer]:
        """A message of leases or contacts."""
        now_s = clock.now_s
        match message:
            case LeaseRenewal():
                return self._lease_book.renew(sender, message, now_s)
            case LeaseGranted():
                self._keeper.granted(sender, message)
                return []
            case OwnerContact():
                return [self._answer_contact(sender, message, now_s)]
            case SilenceRequest():
                return [SendPeer(sender, self._contact_book.silence(message, self._register.records, self._me, now_s))]

    def _answer_contact(self, sender: NodeId, message: OwnerContact, now_s: float) -> SendPeer:
        records = self._register.records
        for task in message.tasks:
            record = records.get(task.job_id)
            if record is not None and record.stamp < (task.epoch, task.version):
                self._catching_up.suspect(task.job_id)
        return SendPeer(
            sender, self._contact_book.contacted(sender, message, records, self._me, now_s, self._register.over)
        )

    def accepted(self, record: JobRecord, now_s: float, *, is_by_shepherd: bool) -> None:
        """This node's acceptor took over a record: a shepherd that wrote it is alive."""
        self._contact_book.accepted(record, now_s)
        if is_by_shepherd:
            self._lease_book.touch(record.shepherd, record.shepherd_generation, now_s)
        if record.shepherd == self._me.node and not record.is_ended:
            self.succession.look_soon(now_s)

    def dropped(self, job_id: JobId) -> None:
        """The record is past its retention."""
        self._contact_book.dropped(job_id)

    def doubt(self, job_id: JobId) -> None:
        """Find out what was decided, and have it decided if it was not: the record here may never have been."""
        self._catching_up.suspect(job_id)

    def may_ask_holders(self, record: JobRecord) -> bool:
        """True while enough of them seem to be there to answer."""
        configuration = record.configuration
        present = [each for each in configuration.members if each.node in self._met and each.node not in self._gone]
        return configuration.is_quorum(present)

    def confirmed(self, record: JobRecord, clock: Clock) -> None:
        """A majority of the holders has accepted a record of ours."""
        self._confirmed_s[record.job_id] = clock.now_s

    def member_changed(self, member: MemberView, now_s: float) -> None:
        """Keep in mind since when members are away."""
        self._met[member.node_id] = None
        self._strangers.pop(member.node_id, None)
        if member.status in (MemberStatus.FAILED, MemberStatus.LEFT):
            since_s, _ = self._gone.get(member.node_id, (now_s, member.status))
            self._gone[member.node_id] = (since_s, member.status)
            self._look_s = min(self._look_s, self._next_look_s(now_s))
        elif member.status is MemberStatus.ALIVE:
            self._gone.pop(member.node_id, None)
            self._shared.discard(member.node_id)  # no other status ends a conflict: of two, one may leave
        elif member.status is MemberStatus.CONFLICT:
            self._shared.add(member.node_id)

    def lost_nodes(self, now_s: float) -> frozenset[NodeId]:
        """Nodes whose ranks count as lost: failed, stopped on purpose for too long, or heard of by nobody.

        An agent that restarts while others are down never meets those, and nobody may be left who tells of them.
        A verdict must stand for a moment: the halves of a healed split bring fresh ones about nodes that are well and
        refute them within a round trip, and an attempt is worth more than that.
        """
        lost = [
            node
            for node, (since_s, status) in self._gone.items()
            if now_s >= since_s + (REFUTED_S if status is MemberStatus.FAILED else PLANNED_STOP_S)
        ]
        return frozenset((*lost, *(node for node, at_s in self._strangers.items() if now_s >= at_s + STRANGER_S)))

    def _next_look_s(self, now_s: float) -> float:
        """In time for the next verdict that comes to count."""
        verdicts = (since_s + REFUTED_S for since_s, status in self._gone.values() if status is MemberStatus.FAILED)
        return min((at_s for at_s in verdicts if now_s < at_s), default=now_s + LOOK_INTERVAL_S)

    def _look_for_strangers(self, now_s: float) -> None:
        strangers: dict[NodeId, float] = {}
        for job in self._placement.jobs.values():
            nodes = (share.node for share in job.record.shares)
            holders = (holder.node for holder in job.record.configuration.members)
            strangers |= {
                node: self._strangers.get(node, now_s) for node in (*nodes, *holders) if node not in self._met
            }
        self._strangers = strangers

    def on_timer(self, clock: Clock) -> list[ShepherdEffect]:
        """Whatever is due."""
        now_s = clock.now_s
        effects: list[ShepherdEffect] = []
        if now_s >= self._look_s:
            self._look_s = self._next_look_s(now_s)
            effects += self._look_after_jobs(clock)
        if now_s >= self._review_s:
            self._review_s = now_s + REVIEW_INTERVAL_S
            effects += self._review(clock)
        if now_s >= self._keeper.next_deadline_s:
            effects += self._renew(now_s)
        if now_s >= self.succession.next_deadline_s:
            effects += self._stand(now_s)
        return effects

    def shepherded(self, now_s: float) -> list[SendPeer]:
        """The jobs here may have changed: their holders are asked for leases."""
        nodes = {
            holder.node for job in self._placement.jobs.values() for holder in job.record.configuration.members
        } - {self._me.node}
        self._keeper.set_holders(sorted(nodes), now_s)
        return self._renew(now_s) if now_s >= self._keeper.next_deadline_s else []

    def _renew(self, now_s: float) -> list[SendPeer]:
        """A shepherd that cannot write can do nothing for its jobs, and lets its leases run out."""
        renewals = self._keeper.on_timer(now_s)
        return [] if self.is_disk_stalled else renewals

    def has_authority(self, record: JobRecord, now_s: float) -> bool:
        """A majority of the holders votes for nobody else for now."""
        configuration = record.configuration
        is_confirmed = now_s < self._confirmed_s.get(record.job_id, float("-inf")) + CONFIRMED_S
        return configuration.is_quorum([self._me]) or is_confirmed or self._keeper.holds(configuration, now_s)

    # What the register has said.

    def concerns(self, update_id: int) -> bool:
        """True for the outcome of a candidacy, or of a read, of ours."""
        is_asked = update_id in self._probes or self._catching_up.concerns(update_id)
        return is_asked or self.succession.concerns(update_id)

    # Acting for jobs.

    def _look_after_jobs(self, clock: Clock) -> list[ShepherdEffect]:
        """Give up gangs whose nodes are lost, and step back where the leases have run out."""
        effects: list[ShepherdEffect] = [*self.shepherded(clock.now_s)]
        effects += self._catching_up.on_timer(self._register.records, self._placement.update_ids, clock.now_s)
        self._look_for_strangers(clock.now_s)
        lost = self.lost_nodes(clock.now_s)
        for job_id, job in list(self._placement.jobs.items()):
            if not self.has_authority(job.record, clock.now_s):
                effects += self._step_back(job_id, job)
                continue
            replaced = job.only_namesakes_answered(clock.now_s, NAMESAKE_S)
            given_up = lost.union(node for node in replaced if node not in self._shared or job.hangs_on(node))
            for node in dict.fromkeys(share.node for share in job.record.shares if share.node in given_up):
                effects += job.note_lost_node(node, clock)
        self._confirmed_s = {
            job_id: at_s for job_id, at_s in self._confirmed_s.items() if job_id in self._placement.jobs
        }
        return effects

    def check_authority(self, job_id: JobId, clock: Clock) -> list[ShepherdEffect]:
        """Before a client is told anything: after a pause, another may act for the job already."""
        job = self._placement.jobs.get(job_id)
        if job is None or self.has_authority(job.record, clock.now_s):
            return []
        return self._step_back(job_id, job)

    def _step_back(self, job_id: JobId, job: JobShepherd) -> list[ShepherdEffect]:
        record = self._register.records.get(job_id)
        if record is not None and record.is_ended:
            self.doubt(job_id)  # nobody stands for a job that has ended here, and others wait as long as we are there
        return self._placement.step_down(
            job, "no majority of its holders answers; its ranks run on as long as they may"
        )

    def _stand(self, now_s: float) -> list[ShepherdEffect]:
        held = self._register.open_records
        if self._own.is_witness:  # whoever could act may never have heard of the job
            for record in held.values():
                if self._lease_book.may_change(record.shepherd, record.shepherd_generation, now_s):
                    self.doubt(record.job_id)
            held = {}
        acting = {**self._placement.jobs, **self._creating()}
        return [*self.succession.on_timer(held, acting, self._placement.update_ids, now_s)]

    def over(self, update_id: int, clock: Clock) -> None:
        """A candidacy, a read or a probe of ours is for a job that ended long ago: its record here is dropped."""
        if update_id in self._probes:
            del self._probes[update_id]
        elif self._catching_up.concerns(update_id):
            self._catching_up.read(update_id, is_answered=True)
        else:
            self.succession.failed(update_id, clock.now_s)

    def decided(self, result: Outcome, clock: Clock) -> list[ShepherdEffect]:
        """The register has spoken about a candidacy or a read of ours."""
        if result.update_id in self._probes:
            return self._probed(result, clock)
        if self._catching_up.concerns(result.update_id):
            self._catching_up.read(result.update_id, is_answered=isinstance(result, ReadDecided))
            return []
        if not isinstance(result, UpdateDecided):
            self.succession.failed(result.update_id, clock.now_s)
            if isinstance(result, UpdateConflicted) and result.current is not None:
                self._suspect_older_than(result.current)
            return []
        self.succession.decided(result.update_id, clock.now_s)
        return self.take_up(result.record, clock)

    def take_up(self, record: JobRecord, clock: Clock) -> list[ShepherdEffect]:
        """The register names us: act from now on."""
        self.confirmed(record, clock)
        shepherd = self._placement.add(record)
        text = f"{self._me.node} shepherds it in epoch {record.epoch}"
        self._placement.look_soon(clock.now_s)
        taken = Announce("job.taken_over", text, record.job_id, self._me.node, {"epoch": record.epoch})
        return [taken, *shepherd.take_up(self.lost_nodes(clock.now_s), clock)]

    # Holders.

    def _review(self, clock: Clock) -> list[ShepherdEffect]:
        """Replace holders that are lost, remind others, end joint configurations, and hand over what is too much."""
        candidates = self._candidates(clock.now_s)
        self._compare_with_locations()
        succeeded = self._step_back_where_succeeded()
        failed = {node for node, (_, status) in self._gone.items() if status is MemberStatus.FAILED}
        # Those that lost a node start again within a moment: new holders do not know yet how long it has been silent.
        jobs = [
            job
            for job in self._placement.jobs.values()
            if job.is_calm and not any(share.node in failed for share in job.record.shares)
        ]
        changes = 0
        effects: list[ShepherdEffect] = []
        self._stalled_s = {node: self._stalled_s.get(node, clock.now_s) for node in self._stalled(clock.now_s)}
        away = {node: since_s for node, (since_s, _) in self._gone.items()}
        gone = self._strangers | self._stalled_s | away
        for job in jobs:
            if changes >= CHANGES_PER_REVIEW:
                break
            made = self._mend(job, candidates, gone, clock)
            changes += bool(made)
            effects += made
        reminders = self._register.remind(lambda node: node in self._met and node not in gone)
        return [*succeeded, *reminders, *effects, *self._hand_over(candidates, clock)]

    def _compare_with_locations(self) -> None:
        """Jobs that have ended without this node's hearing of it.

        A former holder keeps what it has until then: whoever looks for the present ones by an old record must not find
        it empty.
        """
        locations = self._locations()
        for job_id, record in self._register.records.items():
            location = None if record.is_ended else locations.get(job_id)
            if location is not None and location.state is JobState.ENDED and job_id not in self._placement.jobs:
                self._catching_up.suspect(job_id)

    def _step_back_where_succeeded(self) -> list[ShepherdEffect]:
        """Others tell of a later epoch: were it wrong, this node would take the job up again."""
        locations = self._locations()
        effects: list[ShepherdEffect] = []
        for job_id, job in list(self._placement.jobs.items()):
            location = locations.get(job_id)
            if location is None or location.epoch <= job.record.epoch or location.shepherd == self._me.node:
                continue
            self._catching_up.suspect(job_id)
            effects += self._placement.step_down(job, f"epoch {location.epoch} is {location.shepherd}'s")
        return effects

    def _suspect_older_than(self, record: JobRecord) -> None:
        held = self._register.records.get(record.job_id)
        if held is not None and held.stamp < record.stamp:
            self._catching_up.suspect(record.job_id)

    def _mend(
        self, job: JobShepherd, candidates: list[Candidate], gone: Mapping[NodeId, float], clock: Clock
    ) -> list[ShepherdEffect]:
        record = job.record
        if record.leaving_holders:
            return job.change_holders(record.holders, (), clock)
        is_settled = clock.now_s >= job.running_since_s + SETTLED_S
        chosen = next_holders(
            record, self._me.node, [self._own, *candidates], gone, self._rng, clock.now_s, is_settled=is_settled
        )
        if chosen is None:
            return []
        newcomers = tuple(holder for holder in chosen if holder not in record.holders)
        return self._probe(job.job_id, newcomers, chosen) if newcomers else []

    def _probe(self, job_id: JobId, newcomers: Holders, chosen: Holders) -> list[ShepherdEffect]:
        """Hear from new holders first, by the store that is meant: an exchange with one that cannot answer is never
        decided, and until it is nothing else can be."""
        if any(job_id == asked for asked, _ in self._probes.values()):
            return []
        update_id = next(self._placement.update_ids)
        self._probes[update_id] = (job_id, chosen)
        return [ReadRecord(ReadRequested(update_id, job_id, Configuration(newcomers)))]

    def _probed(self, result: Outcome, clock: Clock) -> list[ShepherdEffect]:
        job_id, chosen = self._probes.pop(result.update_id)
        job = self._placement.jobs.get(job_id)
        if job is None or not job.is_calm or not isinstance(result, ReadDecided) or job.record.leaving_holders:
            return []
        return job.change_holders(chosen, job.record.holders, clock)

    def _hand_over(self, candidates: list[Candidate], clock: Clock) -> list[ShepherdEffect]:
        effects: list[ShepherdEffect] = []
        if self.succession.is_late:  # each hand-over is three more rounds for disks that do not keep up
            return effects
        surplus = min(CHANGES_PER_REVIEW, excess_jobs(len(self._placement.jobs), candidates, self._me.node))
        for job in list(self._placement.jobs.values()):
            if surplus <= 0:
                break
            to = successor(job.record, self._me.node, candidates) if job.is_calm else None
            if to is not None:
                surplus -= 1
                effects += job.hand_over(to, clock)
        return effects

    def validate(self) -> None:
        """Re-derive who is asked for what."""
        self.succession.validate()
        self._catching_up.validate()
        jobs = [job_id for job_id, _ in self._probes.values()]
        assert len(set(jobs)) == len(jobs), "new holders of a job are heard once"
        assert self._gone.keys() <= self._met.keys(), "a member is gone that was never there"
        assert self._me.node not in self._gone

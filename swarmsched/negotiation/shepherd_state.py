"""All that a shepherd knows of its job: the decided record, what owners have told, and what is wished of it.

Plain data and questions about it.  The record in the register is the truth; everything else is volatile and can be
rebuilt from it and from what the owners answer.  `due` says what follows from it, `shepherd` what changes it.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from swarmsched.api import COMING_BACK, EndReason, JobSpec, JobState, StartPhase
from swarmsched.effects import Announce, Effect, SendPeer
from swarmsched.estimate import Estimate, coarse, merged
from swarmsched.fields import cleaned
from swarmsched.holders import Quorum, majority
from swarmsched.ids import JobId, NodeId, Place
from swarmsched.ledger.message import StatusRequest
from swarmsched.negotiation.attempt import Attempt, AttemptPhase, Ranking
from swarmsched.negotiation.blame import failed_nodes
from swarmsched.negotiation.changes import REASON_LENGTH, RecordChange, Scaled, StopWished
from swarmsched.negotiation.checkpointing import CommitRule, is_of_present_attempt
from swarmsched.negotiation.claiming import Claiming
from swarmsched.negotiation.gang import ELASTIC, RIGID, Gang, GangEnd, RigidGang
from swarmsched.negotiation.inquiry import Commands, Inquiry
from swarmsched.negotiation.namesakes import Namesakes
from swarmsched.negotiation.pacing import Pacing, Refusals
from swarmsched.negotiation.record_writer import RecordWriter, WriteRecord
from swarmsched.negotiation.settlement import Settlement, Suspicions
from swarmsched.negotiation.window import Window
from swarmsched.record import JobRecord, StartFault
from swarmsched.resources import Share
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import Allocation

STARVING_S = 60.0


class CouldTake(Protocol):
    """What is asked of all others when a start has failed."""

    def __call__(self, spec: JobSpec, without: Collection[NodeId], *, once_well: bool) -> bool:
        """Whether the nodes that are there, without some, could hold a job, or could once their disks are well."""


@dataclass(frozen=True, slots=True)
class ShepherdParts:
    """What the simulator replaces to see that its checkers notice."""

    make_attempt: type[Attempt] = Attempt
    may_commit: CommitRule = is_of_present_attempt
    quorum: Quorum = majority


PRODUCTION = ShepherdParts()


@dataclass(slots=True)
class Regrouping:
    """What is wished and known of a change of a running gang; parts by their numbers."""

    leave: dict[int, None] = field(default_factory=dict)  # members that are to leave, and why
    reason: str = ""
    last_part: int = 0  # that owners were asked to hold
    addresses: dict[int, str] = field(default_factory=dict)  # that workers have given
    told: dict[int, tuple[int, float]] = field(default_factory=dict)  # the world that each was told of, and when
    leaving_since_s: dict[int, float] = field(default_factory=dict)
    stopped_s: dict[int, float] = field(default_factory=dict)  # when those were told to stop
    join_until_s: float = float("inf")  # newcomers that are not ready by then are given up
    again_s: float = float("inf")  # when to look again
    spared_s: dict[int, float] = field(default_factory=dict)  # until when newcomers are not called slow
    parted_s: float = float("inf")  # since when members tell that the present world came to nothing
    refusals: Refusals = field(default_factory=Refusals)


Openings = tuple[bool, bool, bool, bool]
"""Whether a job waits, is steady, is not being placed, and has its place kept: what a look at the queue goes by."""


class ShepherdState:
    """One job under one epoch."""

    def __init__(
        self,
        record: JobRecord,
        me: NodeId,
        rng: random.Random,
        update_ids: Iterator[int],
        parts: ShepherdParts = PRODUCTION,
        stirred: Callable[[JobId], None] = lambda job_id: None,
        window: Window[JobId] | None = None,
        could_take: CouldTake = lambda spec, without, once_well: True,
    ) -> None:
        """`stirred` is told whenever `next_deadline_s` may become another one, and the `window` of the agent's attempts
        of each of this job's."""
        self.me = me
        self.parts = parts
        self.stirred = stirred
        self.window = Window() if window is None else window
        self._could_take = could_take
        self.job_id = record.job_id
        self.decided = record
        self.now_s = self.utc_offset_s = 0.0
        self.writer = RecordWriter(update_ids)
        self.commands = Commands(me, record.epoch)
        # What owners have told of the present attempt, and what is still asked of them.
        self.gang = Gang(record.shares)
        self.inquiry = Inquiry()
        self.namesakes = Namesakes()
        self.silent: dict[NodeId, None] = {}  # nodes of ours that are believed failed
        self.vouched: dict[NodeId, None] = {}  # for which an operator says that nothing is left there
        self.suspicions = Suspicions(parts.quorum)
        self.settlement = Settlement(self.commands, parts.quorum)
        self.stop_grace_s = record.spec.grace_s
        self.stop_again_s = float("inf")  # when the ranks are next told to stop
        # The way to a place.
        self.attempt: Attempt | None = None
        self.withdrawn: Attempt | None = None  # the last that was given up; it may be decided all the same
        self.claim = Claiming(me, self.commands)
        self.pacing = Pacing(record, rng)
        self.global_batch = 0  # that the attempt was planned with; 0: as before
        self.next_place = Allocation()  # whoever takes over leaves it to the next plan
        self.rescale_to: tuple[Allocation, str] | None = None  # and why: once its place is kept
        self.regrouping = Regrouping()
        # What others look at.
        self.reason = record.reason  # why it waits
        self.queued_since_s = 0.0  # when it last became queued
        self.running_since_s = float("inf")
        self.is_warming = False  # its ranks have begun under us, and told nothing of their training yet
        self.hears_owners_until_s = 0.0  # before that the gang is not given up: its service would be forgotten
        self.estimate: Estimate | None = None  # of how it trains; told by its card
        self.asking: dict[int, tuple[int, bool]] = {}  # clients: the change they wait for, and if they name a known job
        self._shown = self._shown_of = record  # as others saw it last, and what it was made of

    @property
    def record(self) -> JobRecord:
        """The decided record with the volatile phase and reason laid over it."""
        decided = self.decided
        if decided.is_ended:
            return decided
        phase, reason = self._phase, self._reason
        # Read for every job at each look at the queue, and rarely another one: a copy each time would cost most of it.
        if self._shown_of is not decided or self._shown.phase is not phase or self._shown.reason != reason:
            self._shown_of, self._shown = decided, replace(decided, phase=phase, reason=reason)
        return self._shown

    @property
    def _phase(self) -> StartPhase:
        decided, attempt = self.decided, self.attempt
        if decided.state is JobState.QUEUED:
            return StartPhase.PLACE if attempt and attempt.phase is AttemptPhase.HELD else StartPhase.NONE
        is_committing = attempt is not None and attempt.phase is AttemptPhase.COMMITTING and not self.gang.is_heard
        return decided.phase if decided.phase is StartPhase.NONE or is_committing else self.gang.phase

    @property
    def _reason(self) -> str:
        decided = self.decided
        reason = self.reason if decided.state is JobState.QUEUED else decided.reason
        if decided.leftovers and decided.state is JobState.QUEUED:
            nodes = ", ".join(sorted({leftover.node for leftover in decided.leftovers}))
            reason = f"{reason}; waiting until what is left on {nodes} has surely stopped"[:REASON_LENGTH]
        if self.silent and (silent := [share.node for share in decided.shares if share.node in self.silent]):
            reason = f"{', '.join(silent)} does not answer any more; its ranks may still run"
        return reason

    @property
    def is_waiting(self) -> bool:
        """Queued, with no attempt, no write under way and nothing left of an earlier attempt: may be placed."""
        is_free = self.decided.state is JobState.QUEUED and self.attempt is None and not self.is_writing
        return is_free and not self.decided.leftovers

    @property
    def conduct(self) -> RigidGang:
        """How its gang behaves now."""
        is_elastic = self.decided.spec.elastic and self.decided.state is JobState.RUNNING
        return ELASTIC if is_elastic else RIGID

    @property
    def is_steady(self) -> bool:
        """Runs, no change of its place is under way, and all have told: a change counts for how long they have run."""
        record = self.decided
        if record.state is not JobState.RUNNING:
            return False
        is_rescaling = self.claim.is_open or self.rescale_to is not None or self.attempt is not None
        is_changing = self.is_writing or is_rescaling or bool(record.joining or record.leaving or self.regrouping.leave)
        are_heard = all(share.place in self.gang.tasks for share in record.members)
        return not is_changing and are_heard

    @property
    def openings(self) -> Openings:
        """What a look at the queue may do for it: see `Openings`."""
        waits = self.is_waiting
        return (waits, self.is_steady, self.attempt is None, waits and self.claim.stands_in_line)

    @property
    def is_between_places(self) -> bool:
        """It is being placed: others would see it without any place."""
        return self.attempt is not None and self.decided.state is not JobState.RUNNING

    @property
    def is_writing(self) -> bool:
        """A register update is under way."""
        return self.writer.in_flight is not None

    @property
    def is_calm(self) -> bool:
        """Nothing is under way that a change of holders or of the shepherd would disturb."""
        return not self.is_writing and self.attempt is None and not self.decided.is_ended

    @property
    def unanswered_holds(self) -> tuple[Share, ...]:
        """What this job asked for and nobody's free counts show yet."""
        return self.attempt.unanswered_holds if self.attempt else ()

    def is_starving(self, now_s: float) -> bool:
        """It has waited or tried for so long that its place must be kept for it."""
        waited_s = now_s - self.queued_since_s
        return self.is_waiting and (waited_s >= STARVING_S or self.pacing.has_failed_often)

    @property
    def waits_for_lost(self) -> bool:
        """Something of it may be left on nodes that do not answer."""
        return bool(self.settlement.open) or any(self.has_share(node) for node in self.silent)

    def only_namesakes_answered(self, now_s: float, for_s: float) -> list[NodeId]:
        """Nodes under whose names none but other machines have answered for so long."""
        return self.namesakes.standing(now_s, for_s)

    def hangs_on(self, node: NodeId) -> bool:
        """Its start or its end waits for that node's word."""
        is_starting = self.attempt is not None and self.attempt.awaits(node)
        return is_starting or self.decided.state is JobState.STOPPING

    @property
    def next_deadline_s(self) -> float:
        """Earliest of: attempt timers, repeats of stops and questions, the job's time limit."""
        return min(
            self.attempt.next_deadline_s if self.attempt else float("inf"),
            self.stop_again_s,
            self.inquiry.next_deadline_s,
            self.suspicions.next_deadline_s,
            self.settlement.next_deadline_s,
            self.claim.next_deadline_s,
            self.time_limit_at_s,
            self.regrouping.again_s if self.decided.state is JobState.RUNNING else float("inf"),
        )

    # What shepherding asks.

    @property
    def barred(self) -> tuple[NodeId, ...]:
        """Nodes that could not start it, as long as others could take it: all, or else those that failed it last.

        One whose disk takes no writes is not waited for: it may stay so while these are well again.
        """
        faults = self.decided.start_faults
        if not faults:
            return ()
        last = [fault for fault in faults if fault.attempt == faults[-1].attempt]
        candidates = (failed_nodes(faults), failed_nodes(last))
        spec = self.decided.spec
        return next((nodes for nodes in candidates if self._could_take(spec, nodes, once_well=False)), ())

    def has_elsewhere(self, failed: TaskStatus, found: Iterable[StartFault]) -> bool:
        """Whether nodes that have not failed it so could take it, now or once they are well: no moment ends a job.

        `found`: failures that the record has not named.
        """
        known = (*self.decided.start_faults, *found)
        alike = {fault.node for fault in known if fault.failure is failed.failure}
        return self._could_take(self.decided.spec, alike, once_well=True)

    def has_share(self, node: NodeId) -> bool:
        """Ranks of it may be there."""
        return not self.decided.is_ended and bool(self.shares_on(node))

    def shares_on(self, node: NodeId) -> list[Share]:
        """The parts of its gang there."""
        return [share for share in self.decided.shares if share.node == node]

    @property
    def may_restart(self) -> bool:
        """Another attempt may follow one whose ranks had run."""
        record = self.decided
        has_run = record.state in (JobState.STARTING, JobState.RUNNING)
        return has_run and record.stop_reason is EndReason.NONE and record.restarts < record.spec.max_restarts

    @property
    def why_no_restart(self) -> str:
        """Where it has been run again as often as it may be."""
        restarts, most = self.decided.restarts, self.decided.spec.max_restarts
        times = "once" if restarts == 1 else f"{restarts} times"
        return f"it was restarted {times} already" if restarts else f"max_restarts is {most}"

    @property
    def time_limit_at_s(self) -> float:
        """When it has run for as long as it may."""
        record = self.decided
        has_limit = record.spec.time_limit_s > 0 and record.stop_reason is EndReason.NONE
        is_running = record.state is JobState.RUNNING and not self.is_writing
        return self.running_since_s + record.spec.time_limit_s if has_limit and is_running else float("inf")

    @property
    def utc_s(self) -> float:
        """The time of day, for the record."""
        return self.now_s + self.utc_offset_s

    def announce(self, kind: str, text: str, **fields: str | float) -> Announce:
        """News of this job."""
        return Announce(kind, text, self.job_id, self.me, fields)

    # What is wished of it.

    def write(self, change: RecordChange) -> list[WriteRecord]:
        """Have it decided, at once if nothing is before it."""
        self.writer.wish(change)
        return self.writer.go_on(self.decided)

    def wish_stop(self, why: EndReason, reason: str) -> None:
        """Have it stopped; if that is decided already, tell its ranks again, perhaps with another grace."""
        if self.decided.stop_reason in (EndReason.NONE, *COMING_BACK):
            self.writer.wish(StopWished(why, cleaned(reason), self.utc_s))
        else:
            self.stop_again_s = self.now_s

    def wish_size(self, spec: JobSpec) -> Announce:
        """Have it take other numbers of ranks."""
        self.writer.wish(Scaled(spec))
        text = f"is to have {spec.size_range} ranks instead of {self.decided.spec.size_range}"
        return self.announce("job.scaled", text)

    def ask_status(self, places: Iterable[Place]) -> list[SendPeer]:
        """Ask what is known of the record's attempt there."""
        record = self.decided
        questions = {place: self.commands.to(place, StatusRequest, record, record.attempt) for place in places}
        return self.inquiry.ask(questions, self.now_s)

    def put(self, status: TaskStatus) -> list[Effect]:
        """The newest that is known of one task, and since when what it amounts to."""
        gang, now_s = self.gang, self.now_s
        gang.put(status)
        if status.ran_s and self.decided.started_utc_s:
            self.hears_owners_until_s = 0.0
            self.running_since_s = min(self.running_since_s, now_s - status.ran_s)
        if gang.has_started and self.decided.state is JobState.STARTING:
            self.running_since_s = min(self.running_since_s, now_s)
        self.note_end()
        is_staged = status.stage not in (TaskStage.ORDERED, TaskStage.EXITED)
        return self.attempt.staged(status.place, now_s) if self.attempt is not None and is_staged else []

    def note_end(self) -> None:
        """Nobody of the gang is left, since this moment if it was not seen before."""
        gang, now_s = self.gang, self.now_s
        if gang.has_ended and gang.end is None:
            self.attempt, gang.end = None, GangEnd(now_s, now_s - self.running_since_s, self.decided.stop_reason)

    @property
    def served_gpu_s(self) -> float:
        """What the gang has had by now, or until its end."""
        ran_s = self.gang.end.ran_s if self.gang.end else self.now_s - self.running_since_s
        return self.conduct.served_gpu_s(self.decided, max(0.0, ran_s))

    @property
    def ran_s(self) -> float:
        """For how long the attempt has run."""
        return max(0.0, self.now_s - self.running_since_s)

    def learn(self, told: Estimate) -> None:
        """What its ranks have told of their training."""
        if self.is_warming and told != Estimate():
            self.is_warming = False
            told = coarse(replace(told, warmup_s=self.ran_s))
        self.estimate = merged(self.estimate, told)

    def explain(self, reason: str) -> None:
        """Why it waits, for people; volatile."""
        self.reason = cleaned(reason)

    def begin_attempt(self, number: int, shares: tuple[Share, ...], ranking: Ranking) -> Attempt:
        """A new gang, of which nothing is told yet."""
        self.gang, self.stop_again_s = Gang(shares), float("inf")
        self.withdrawn = None
        self.pacing.last_attempt = number
        self.window.begun(self.job_id, self.now_s)
        self.attempt = self.parts.make_attempt(self.decided, number, shares, ranking, self.commands.ids)
        return self.attempt

    def end_attempt(self) -> None:
        """Nothing more is asked or expected of its owners."""
        self.attempt, self.stop_again_s = None, float("inf")
        self.inquiry.forget()
        self.suspicions.forget()
        self.namesakes.forget()

    def validate(self) -> None:
        """Re-derive what binds attempt, claim, updates and what is left over to the record."""
        self.writer.validate(self.decided)
        self.claim.validate()
        record, attempt = self.decided, self.attempt
        if attempt is not None:
            attempt.validate()
            is_growing = record.spec.elastic and record.state is JobState.RUNNING
            assert is_growing or record.state in (JobState.QUEUED, JobState.STARTING), record.state
            assert attempt.phase is not AttemptPhase.LAUNCHED
            assert attempt.phase is not AttemptPhase.FAILED or self.is_writing, "nobody looks after it"
            assert attempt.number >= record.attempt, "an older attempt goes on"
        assert set(self.settlement.open) <= set(record.leftovers), "what is settled is not left over"
        is_running = record.state is JobState.RUNNING and not self.is_writing
        assert not is_running or self.running_since_s < float("inf"), "it runs since never"
        assert record.state in (JobState.QUEUED, JobState.ENDED) or record.shares, "a gang without nodes"
        assert self.gang.end is None or record.state is not JobState.QUEUED, "a gang that is over is not let go"

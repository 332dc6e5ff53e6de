"""All that a shepherd knows of its job: the decided record, what owners have told, and what is wished of it.

Plain data, questions about it, and the few ways in which it changes.  The record in the register is the truth;
everything else is volatile and can be rebuilt from it and from what the owners answer.  `heard` says what each word
changes, `due` what follows from it.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from swarmsched.api import COMING_BACK, EndReason, JobSpec, JobState, StartPhase
from swarmsched.commands import JobAccepted
from swarmsched.effects import Announce, Effect, ReplyToClient, SendPeer
from swarmsched.estimate import Estimate, coarse, merged
from swarmsched.fields import cleaned
from swarmsched.holders import Quorum, majority
from swarmsched.ids import JobId, NodeId, Place
from swarmsched.ledger.message import StatusRequest
from swarmsched.negotiation.attempt import Attempt, AttemptPhase, Ranking
from swarmsched.negotiation.blame import failed_nodes
from swarmsched.negotiation.changes import REASON_LENGTH, RecordChange, StopWished
from swarmsched.negotiation.checkpointing import CommitRule, is_of_present_attempt
from swarmsched.negotiation.claiming import Claiming
from swarmsched.negotiation.formation import Formation, look_at
from swarmsched.negotiation.gang import ELASTIC, RIGID, Gang, RigidGang
from swarmsched.negotiation.inquiry import Commands, Inquiry
from swarmsched.negotiation.members import Regrouping
from swarmsched.negotiation.namesakes import Namesakes
from swarmsched.negotiation.pacing import Pacing
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
        estimate: Estimate | None = None,
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
        self.regrouping = Regrouping()
        self.inquiry = Inquiry()
        self.namesakes = Namesakes()
        self.silent: dict[NodeId, None] = {}  # nodes of ours that are believed failed
        self.vouched: dict[NodeId, None] = {}  # for which an operator says that nothing is left there
        self.suspicions = Suspicions(parts.quorum)
        self.settlement = Settlement(self.commands, parts.quorum)
        # The way to a place.
        self.attempt: Attempt | None = None  # at a change of the gang: from nothing to all of it, or by newcomers
        self.claim = Claiming(me, self.commands)
        self.pacing = Pacing(record, rng)
        self._rng = rng
        self.secret = ""  # that ranks of the attempt's groups show one another
        self.global_batch = 0  # that the attempt was planned with; 0: as before
        self.next_place = Allocation()  # whoever takes over leaves it to the next plan
        self.rescale_to: tuple[Allocation, str] | None = None  # and why: once its place is kept
        # What others look at.
        self.reason = record.reason  # why it waits
        self.queued_since_s = 0.0  # when it last became queued
        self.estimate = estimate  # of how it trains; told by its card
        self._asking: dict[int, tuple[int, bool]] = {}  # clients: the change they wait for, and if it was known
        self._shown = self._shown_of = record  # as others saw it last, and what it was made of
        self._formation: Formation | None = None  # of its workers, and what it was made of
        self._formation_of: tuple[JobRecord, Gang, int] | None = None

    # As others see it.

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
        """True while the job is being placed: others would see it without any place."""
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
        """True where the job has waited or tried for so long that its place must be kept for it."""
        waited_s = now_s - self.queued_since_s
        return self.is_waiting and (waited_s >= STARVING_S or self.pacing.has_failed_often)

    @property
    def waits_for_lost(self) -> bool:
        """Something of it may be left on nodes that do not answer."""
        return bool(self.settlement.open) or any(self.has_share(node) for node in self.silent)

    def hangs_on(self, node: NodeId) -> bool:
        """True where the start or the end of the job waits for that node's word."""
        is_starting = self.attempt is not None and self.attempt.awaits(node)
        return is_starting or self.decided.state is JobState.STOPPING

    @property
    def next_deadline_s(self) -> float:
        """Earliest of: attempt timers, repeats of stops and questions, the job's time limit."""
        return min(
            self.attempt.next_deadline_s if self.attempt else float("inf"),
            self.gang.stop_again_s,
            self.inquiry.next_deadline_s,
            self.suspicions.next_deadline_s,
            self.settlement.next_deadline_s,
            self.claim.next_deadline_s,
            self.time_limit_at_s,
            self.regrouping.again_s if self.decided.state is JobState.RUNNING else float("inf"),
        )

    # What shepherding asks.

    @property
    def conduct(self) -> RigidGang:
        """How its gang behaves now."""
        is_elastic = self.decided.spec.elastic and self.decided.state is JobState.RUNNING
        return ELASTIC if is_elastic else RIGID

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
        return self.gang.running_since_s + record.spec.time_limit_s if has_limit and is_running else float("inf")

    @property
    def is_named(self) -> bool:
        """The record names the gang, or the newcomers, of the attempt that is under way."""
        record, attempt = self.decided, self.attempt
        if attempt is None or attempt.number != record.attempt:
            return False
        is_starting = record.state is JobState.STARTING
        return is_starting or {share.part for share in attempt.shares} <= set(record.world.joining)

    @property
    def formation(self) -> Formation | None:
        """How the workers of its elastic gang stand while it runs; None of any other."""
        record, gang, seen = self.decided, self.gang, self._formation_of
        if not record.world.version or record.state is not JobState.RUNNING:
            return None
        if seen is None or seen[0] is not record or seen[1] is not gang or seen[2] != gang.revision:
            self._formation_of = (record, gang, gang.revision)
            self._formation = look_at(record, gang.tasks)
        return self._formation

    @property
    def ran_s(self) -> float:
        """For how long the attempt has run."""
        return self.gang.ran_s(self.now_s)

    @property
    def served_gpu_s(self) -> float:
        """What its gang has had, and the record has not counted: GPU-seconds (Tiresias' attained service, W x t).

        By a monotonic clock: a wall clock that jumps must not add or take service.
        """
        record = self.decided
        is_serving = bool(record.started_utc_s and record.shares)
        return record.serving_gpus * max(0.0, self.ran_s - record.counted_s) if is_serving else 0.0

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

    def wish_stop(self, why: EndReason, reason: str, grace_s: float | None = None) -> None:
        """Have it stopped; if that is decided already, tell its ranks again, perhaps with another grace."""
        self.gang.allow_grace(grace_s)
        if self.decided.stop_reason in (EndReason.NONE, *COMING_BACK):
            self.writer.wish(StopWished(why, cleaned(reason), self.utc_s))
        else:
            self.gang.stop(self.now_s)

    def wish_answer(self, request_id: int, *, was_known: bool = False) -> None:
        """Have a client told the record after the updates under way. Others may have told of their outcome already,
        and nobody may be told of an older one then."""
        self._asking[request_id] = (self.writer.wished_count, was_known)

    def answered_clients(self) -> list[ReplyToClient]:
        """Clients for whom all is decided that was wished before they asked."""
        done = self.writer.done_count
        ready = [
            (request_id, was_known) for request_id, (awaited, was_known) in self._asking.items() if awaited <= done
        ]
        for request_id, _ in ready:
            del self._asking[request_id]
        return [
            ReplyToClient(request_id, JobAccepted(self.record, was_known=was_known)) for request_id, was_known in ready
        ]

    def unanswered_clients(self) -> list[int]:
        """Clients who wait for an answer, none of whom will be given any."""
        asking, self._asking = list(self._asking), {}
        return asking

    def explain(self, reason: str) -> None:
        """Why it waits, for people; volatile."""
        self.reason = cleaned(reason)

    def go_to(self, target: Allocation, reason: str) -> None:
        """Have it end its attempt, and go on there, once that place is kept."""
        self.rescale_to = (target, reason)

    def leave_for_kept_place(self) -> None:
        """The attempt ends so that the job goes on in the place that is kept for it."""
        if self.rescale_to is not None:
            (self.next_place, reason), self.rescale_to = self.rescale_to, None
            self.wish_stop(EndReason.RESCALED, reason)

    def stay(self) -> None:
        """The job is not to go elsewhere any more."""
        self.rescale_to, self.next_place = None, Allocation()

    # What owners have told.

    def see(self, now_s: float, utc_s: float) -> None:
        """The time, and that something has happened to it."""
        self.now_s, self.utc_offset_s = now_s, utc_s - now_s
        self.stirred(self.job_id)

    def take(self, record: JobRecord) -> JobRecord:
        """The register has decided this record; returned is the one before."""
        before, self.decided = self.decided, record
        self.settlement.keep(record.leftovers)
        return before

    def ask_status(self, places: Iterable[Place]) -> list[SendPeer]:
        """Ask what is known of the record's attempt there."""
        record = self.decided
        questions = {place: self.commands.to(place, StatusRequest, record, record.attempt) for place in places}
        return self.inquiry.ask(questions, self.now_s)

    def put(self, status: TaskStatus) -> list[Effect]:
        """The newest that is known of one task."""
        self.gang.put(status, self.decided, self.now_s)
        self.note_end()
        is_staged = status.stage not in (TaskStage.ORDERED, TaskStage.EXITED)
        return self.attempt.staged(status.place, self.now_s) if self.attempt is not None and is_staged else []

    def note_end(self) -> None:
        """Nothing joins a gang of which nobody is left."""
        if self.gang.end is not None:
            self.attempt = None

    def learn(self, told: Estimate) -> None:
        """What its ranks have told of their training."""
        if told != Estimate() and self.gang.trains():
            told = coarse(replace(told, warmup_s=self.ran_s))
        self.estimate = merged(self.estimate, told)

    # Its gang.

    def begin(self, shares: tuple[Share, ...], ranking: Ranking, global_batch: int) -> Attempt:
        """A new gang, of which nothing is told yet."""
        self.namesakes.forget()  # what was said of leftovers says nothing of what begins now
        self.silent.clear()
        self.global_batch = global_batch
        self.gang = Gang(shares)
        self.secret = f"{self._rng.getrandbits(128):032x}" if self.decided.spec.groups else ""
        return self._attempt(self.pacing.next_number(self.decided), shares, ranking)

    def join(self, shares: tuple[Share, ...], ranking: Ranking) -> Attempt:
        """Newcomers to the gang that runs."""
        return self._attempt(self.decided.attempt, shares, ranking)

    def resume(self, shares: tuple[Share, ...]) -> Attempt:
        """What the record names, and another shepherd has left: nobody knows how far it came."""
        attempt = self._attempt(self.decided.attempt, shares, Ranking("", ()))
        attempt.may_have_run = True
        return attempt

    def _attempt(self, number: int, shares: tuple[Share, ...], ranking: Ranking) -> Attempt:
        self.pacing.began(number)
        self.window.begun(self.job_id, self.now_s)
        self.attempt = self.parts.make_attempt(self.decided, number, shares, ranking, self.commands.ids)
        return self.attempt

    def commit(self) -> list[Effect]:
        """Have owners commit to what they hold for it, once the record names that."""
        attempt = self.attempt
        is_due = attempt is not None and attempt.phase is AttemptPhase.HELD and self.is_named
        return attempt.prepared(self.decided, self.now_s) if attempt is not None and is_due else []

    def drop_attempt(self) -> None:
        """The change of the gang is over, or is not wanted any more."""
        self.attempt = None

    def end_attempt(self) -> None:
        """Nothing more is asked or expected of its owners."""
        self.attempt = None
        self.gang.told_to_stop(float("inf"))
        self.inquiry.forget()
        self.suspicions.forget()
        self.namesakes.forget()

    def let_members_be(self) -> None:
        """Who is to join or leave does not matter any more."""
        self.attempt, self.regrouping = None, Regrouping()

    def back_in_queue(self) -> None:
        """The job's gang is over, or was given up."""
        self.end_attempt()
        self.gang, self.regrouping, self.vouched = Gang(), Regrouping(), {}
        self.reason, self.queued_since_s = self.decided.reason, self.now_s

    def wait_since_now(self) -> None:
        """The job has come to this shepherd."""
        self.queued_since_s = self.now_s

    def vouch(self, nodes: Iterable[NodeId]) -> None:
        """An operator says that nothing is left there."""
        self.vouched = dict.fromkeys(nodes)

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
        assert not is_running or self.gang.running_since_s < float("inf"), "it runs since never"
        assert record.state in (JobState.QUEUED, JobState.ENDED) or record.shares, "a gang without nodes"
        assert self.gang.end is None or record.state is not JobState.QUEUED, "a gang that is over is not let go"

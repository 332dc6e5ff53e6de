"""Rules broken on purpose, to see that the checkers are not blind.

Each break is a substitute for one part of a node, handed in where nodes are made (`swarmsched.node.parts`), for a part
of the machine, or for single methods while a story is lived through.  Production code knows none of them.
"""

import math
import random
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from swarmsched.aggregation.broker import Broker
from swarmsched.aggregation.lender import Lender
from swarmsched.api import JobState
from swarmsched.authority.contact import ContactLine, WatchedAttempt
from swarmsched.authority.contact_book import ContactBook
from swarmsched.authority.message import ContactAnswered, LeaseRenewal, OwnerContact, SilenceAnswer, SilenceRequest
from swarmsched.effects import Effect, ExtendAttempt, Persist, SendPeer
from swarmsched.errors import ConfigError
from swarmsched.gossip.membership import Membership
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import Update
from swarmsched.gossip.rumour import RumourQueue
from swarmsched.holder.leases import LeaseBook
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.booking import Booking, BookingState
from swarmsched.ledger.ledger import Ledger
from swarmsched.ledger.message import CheckpointRequest, HoldRequest, OwnerAnswer, OwnerCommand, Refusal
from swarmsched.negotiation import blame, changes, formation, gang, heard, regrouping
from swarmsched.negotiation.attempt import Attempt, AttemptPhase
from swarmsched.negotiation.changes import Fields
from swarmsched.negotiation.formation import Formation, Present
from swarmsched.negotiation.members import Regrouping
from swarmsched.negotiation.owner import Owner
from swarmsched.negotiation.shepherd_state import ShepherdState
from swarmsched.negotiation.trouble import Trouble
from swarmsched.negotiation.world_changes import Joined, Regrouped, WorldTrains
from swarmsched.node.parts import PRODUCTION, Parts
from swarmsched.policies.turns import SERVED, Turn
from swarmsched.record import JobRecord
from swarmsched.resources import Free, less
from swarmsched.simulator.clock import HostClock
from swarmsched.simulator.disk import Disk
from swarmsched.simulator.tasks import RunningTask, TaskModel
from swarmsched.task import TaskStage
from swarmsched.view import JobView
from swarmsched.world import WorldPlan


@dataclass(frozen=True, slots=True)
class Break:
    """One broken rule: what is put in its place on every machine."""

    summary: str
    make_parts: Callable[[HostClock], Parts] = lambda clock: PRODUCTION
    make_disk: Callable[[random.Random], Disk] = Disk
    patches: Mapping[tuple[object, str], Callable[..., Any]] = field(default_factory=dict)
    """From (class or module, name of what it has) to what makes the substitute from the original."""

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """The patched methods are replaced meanwhile, for all nodes of this process."""
        originals = {where: getattr(*where) for where in self.patches}
        for where, make in self.patches.items():
            setattr(*where, make(originals[where]))
        try:
            yield
        finally:
            for where, original in originals.items():
                setattr(*where, original)


class UnfencedLedger(Ledger):
    """Obeys whatever epoch a command carries."""

    def _early_answer(self, command: OwnerCommand) -> OwnerAnswer | None:
        return self.repeated(command)


class FickleLedger(Ledger):
    """Takes back a yes when an older job asks for the same GPUs."""

    def hold(self, request: HoldRequest, now_s: float) -> tuple[OwnerAnswer, list[Persist]]:
        """As its parent, after making room."""
        answer, writes = super().hold(request, now_s)
        if answer.refusal is not Refusal.DOES_NOT_FIT:
            return answer, writes
        held = [booking for booking in self._bookings.values() if booking.state is BookingState.HELD]
        lower = [booking for booking in held if booking.job_id > request.job_id]
        if not lower:
            return answer, writes
        for booking in lower:
            writes += self._remove(booking, now_s)
        self._refresh()
        again, more = super().hold(replace(request, command_id=request.command_id + 2**30), now_s)
        return replace(again, command_id=request.command_id), [*writes, *more]


class HastyAttempt(Attempt):
    """Launches as soon as the first owner has committed."""

    def _launch_when_ready(self, now_s: float) -> list[Effect]:
        if self.phase not in (AttemptPhase.COMMITTING, AttemptPhase.STAGING):
            return []
        self.phase = AttemptPhase.LAUNCHING
        return self._send_all(now_s, self._launch_request)


class WallClockLeaseBook(LeaseBook):
    """Counts leases by the time of day."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__(clock.utc_s)
        self._clock = clock

    def renew(self, sender: NodeId, message: LeaseRenewal, now_s: float) -> list[SendPeer]:
        """From now on."""
        return super().renew(sender, message, self._clock.utc_s)

    def touch(self, shepherd: NodeId, generation: int, now_s: float) -> None:
        """As good as a renewal."""
        super().touch(shepherd, generation, self._clock.utc_s)

    def may_change(self, shepherd: NodeId, generation: int, now_s: float) -> bool:
        """By the time of day."""
        return self._clock.utc_s >= super().free_s(shepherd, generation)

    def free_s(self, shepherd: NodeId, generation: int) -> float:
        """As the node's clock will show it."""
        return super().free_s(shepherd, generation) - self._clock.utc_s + self._clock.now_s


class WallClockContactBook(ContactBook):
    """Counts silence by the time of day."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__(clock.utc_s)
        self._clock = clock

    def accepted(self, record: JobRecord, now_s: float) -> None:
        """First sight of a configuration."""
        super().accepted(record, self._clock.utc_s)

    def contacted(
        self,
        sender: NodeId,
        message: OwnerContact,
        records: Mapping[JobId, JobRecord],
        me: Holder,
        now_s: float,
        over: Container[JobId] = (),
    ) -> ContactAnswered:
        """Let run on from now."""
        return super().contacted(sender, message, records, me, self._clock.utc_s, over)

    def silence(
        self, request: SilenceRequest, records: Mapping[JobId, JobRecord], me: Holder, now_s: float
    ) -> SilenceAnswer:
        """Since then."""
        return super().silence(request, records, me, self._clock.utc_s)


class RumoursToldOnce(RumourQueue):
    """Forgets a rumour when it was told once."""

    def take(self, room_bytes: int, sends_limit: int) -> tuple[Update, ...]:
        """What fits."""
        return super().take(room_bytes, 1)


class DeafMembership(Membership):
    """Tells each rumour once and never compares what it knows with anybody."""

    def __init__(self, config: MembershipConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._outbox.rumours = RumoursToldOnce()

    @property
    def membership_hash(self) -> int:
        """The same for everybody: nothing ever seems to differ."""
        return 0


class ForgetfulDisk(Disk):
    """Takes the second of the start for a generation and keeps none."""

    def next_generation(self, utc_s: float) -> int:
        """A generation that may have been used before."""
        return int(utc_s)


def _wall_clock_parts(clock: HostClock) -> Parts:
    return Parts(
        make_lease_book=lambda started_s: WallClockLeaseBook(clock),
        make_contact_book=lambda started_s, quorum: WallClockContactBook(clock),
    )


def _constant(parts: Parts) -> Callable[[HostClock], Parts]:
    return lambda clock: parts


def _nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: None


def _never_extended_once_frozen(original: Callable[..., Any]) -> Callable[..., Any]:
    def recount(line: ContactLine, task: WatchedAttempt) -> list[ExtendAttempt]:
        newest_s = max((heard.valid_s for heard in task.heard.values()), default=-math.inf)
        return [] if task.told_s < newest_s else list(original(line, task))

    return recount


def _launched_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_timer(attempt: Attempt, now_s: float) -> list[Effect]:
        effects: list[Effect] = original(attempt, now_s)
        return [] if attempt.phase is AttemptPhase.LAUNCHING else effects

    return on_timer


def _silent_after_a_restart(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore(owner: Owner, entries: Mapping[str, bytes], now_s: float) -> None:
        original(owner, entries, now_s)
        owner._line._lines.clear()  # noqa: SLF001  # no other way: production always asks

    return restore


def _never(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: False


def _first_holders_for_ever(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: False


def _leases_written(write: Callable[[Booking, Persist], list[Persist]]) -> Callable[..., Any]:
    """A ledger's `_change` that writes a lease otherwise."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def change(ledger: Ledger, before: Booking, after: Booking, now_s: float) -> list[Persist]:
            writes: list[Persist] = original(ledger, before, after, now_s)
            if after.state is BookingState.LEASED:
                return [each for persist in writes for each in write(after, persist)]
            return writes

        return change

    return make


def _offers_one_less(original: Callable[..., Any]) -> Callable[..., Any]:
    def free(ledger: Ledger) -> Free:
        whole: Free = original(ledger)
        return replace(whole, gpus=less(whole.gpus, [replace(gpus, count=1) for gpus in whole.gpus[:1]]))

    return free


def _a_world_ahead(original: Callable[..., Any]) -> Callable[..., Any]:
    def plan(members: Regrouping, record: JobRecord, formation: Formation) -> WorldPlan | None:
        found: WorldPlan | None = original(members, record, formation)
        return found and replace(found, version=found.version + 1)

    return plan


def _waits_for_whoever_runs(original: Callable[..., Any]) -> Callable[..., Any]:
    def gone(present: Present, **told: bool) -> tuple[int, ...]:
        over = [part for part, task in present.items() if task is not None and task.stage is TaskStage.EXITED]
        return tuple(part for part in original(present, **told) if part in over)

    return gone


def _with_rule(rule: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """The same rules with another one in the place of this."""
    return lambda rules: tuple(other if each is rule else each for each in rules)


def _trains_early(job: ShepherdState, formation: Formation) -> WorldTrains | None:
    version = job.decided.world.version
    has_switched = [task.worker.trains >= version - 1 for task in job.gang.tasks.values()]
    return None if formation.is_settled or not all(has_switched) else WorldTrains(version, 0.0)


def _all_beside(original: Callable[..., Any]) -> Callable[..., Any]:
    def left_by(model: TaskModel, task: RunningTask) -> list[RunningTask]:
        return [each for each in model.running if each.key.of_attempt == task.key.of_attempt and each is not task]

    return left_by


def _always_due(original: property) -> property:
    def next_deadline_s(job: ShepherdState) -> float:
        planned_s: float = type(original).__get__(original, job)
        return job.now_s if job.decided.state is JobState.RUNNING else planned_s

    return property(next_deadline_s)


def _of_all_that_run(original: property) -> property:
    return property(lambda job: job.state in (JobState.QUEUED, JobState.RUNNING))


def _by_service(turn: Turn) -> tuple[int, float]:
    return (SERVED, turn.service_gpu_s)


def _commits_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def granted(attempt: Attempt, answer: OwnerAnswer, now_s: float) -> list[Effect]:
        effects: list[Effect] = original(attempt, answer, now_s)
        record = attempt._record  # noqa: SLF001  # no other way: production waits for the decision
        if attempt.phase is not AttemptPhase.HELD or not record.world.version:
            return effects
        return [*effects, *attempt.prepared(replace(record, shares=(*record.shares, *attempt.shares)), now_s)]

    return granted


def _with_fields(change: Callable[[JobRecord], Fields]) -> Callable[..., Any]:
    """A change of the record that makes some of its fields otherwise."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def fields(self: Joined | Regrouped, record: JobRecord) -> Fields | None:
            found: Fields | None = original(self, record)
            return found and found | change(record)

        return fields

    return make


def _ordered_by_node(original: Callable[..., Any]) -> Callable[..., Any]:
    def why_stale(record: JobRecord, request: CheckpointRequest) -> str:
        present, asked = record.checkpoint, request.checkpoint
        is_same = present is not None and (present.attempt, present.node) == (asked.attempt, asked.node)
        return "overtaken" if present is not None and is_same and asked.sequence < present.sequence else ""

    return why_stale


BREAKS: Mapping[str, Break] = {
    "quorum-of-one": Break("one holder's word decides", _constant(Parts(quorum=lambda count: 1))),
    "no-epoch-check": Break("owners obey an epoch that is over", _constant(Parts(make_ledger=UnfencedLedger))),
    "unilateral-withdrawal": Break(
        "owners take back a hold when an older job asks", _constant(Parts(make_ledger=FickleLedger))
    ),
    "launch-before-commits": Break(
        "ranks start when the first owner has committed", _constant(Parts(make_attempt=HastyAttempt))
    ),
    "wall-clock-leases": Break("leases and silence are counted by the time of day", _wall_clock_parts),
    "unpersisted-generation": Break("an agent does not remember its last generation", make_disk=ForgetfulDisk),
    "no-hash-check": Break(
        "members tell a rumour once and never compare what they know",
        _constant(Parts(make_membership=DeafMembership)),
    ),
    "checkpoint-by-rename": Break(
        "whoever writes last has the latest checkpoint", _constant(Parts(may_commit=lambda record, attempt: ""))
    ),
    "frozen-for-ever": Break(
        "an owner gives no more time to ranks whose time was over",
        patches={(ContactLine, "_recount"): _never_extended_once_frozen},
    ),
    "no-thaw": Break("a shim lets no frozen rank go on", patches={(TaskModel, "_thaw"): _nothing}),
    "launched-once": Break(
        "a launch that was lost is not repeated",
        patches={
            (Attempt, "on_timer"): _launched_once,
            (heard, "launch_again"): lambda original: lambda *arguments: [],
        },
    ),
    "silent-after-restart": Break(
        "an owner that starts again asks no holder", patches={(Owner, "restore"): _silent_after_a_restart}
    ),
    "first-holders": Break(
        "an owner follows the holders of its order for ever",
        patches={(ContactLine, "_replace_configuration"): _first_holders_for_ever},
    ),
    "lease-unwritten": Break(
        "a lease is not written", patches={(Ledger, "_change"): _leases_written(lambda lease, write: [])}
    ),
    "lease-as-hold": Break(
        "a lease is written as a hold",
        patches={
            (Ledger, "_change"): _leases_written(
                lambda lease, write: [replace(lease, state=BookingState.HELD).persisted()]
            )
        },
    ),
    "hidden-gpu": Break(
        "a ledger offers one GPU less than is free", patches={(Ledger, "_compute_free"): _offers_one_less}
    ),
    "no-tombstones": Break("nothing is left of a record that is dropped", _constant(Parts(tombstones_max=0))),
    "world-ahead": Break(
        "workers are told of a world before it is decided", patches={(Regrouping, "plan"): _a_world_ahead}
    ),
    "unnamed-newcomers": Break(
        "parts that join a gang start before the record names them",
        patches={(Attempt, "_hold_granted"): _commits_at_once},
    ),
    "parts-again": Break(
        "parts of an attempt may be numbered as earlier ones were",
        patches={(Joined, "_fields"): _with_fields(lambda record: {"last_part": record.last_part})},
    ),
    "lost-node-forgotten": Break(
        "what a gang has on a lost node is not remembered",
        patches={(Regrouped, "_fields"): _with_fields(lambda record: {"leftovers": record.leftovers})},
    ),
    "still-member-kept": Break(
        "a worker that stands still is waited for", patches={(formation, "_gone"): _waits_for_whoever_runs}
    ),
    "lost-connection-kept": Break(
        "members that have lost one another wait for somebody to die",
        patches={(regrouping, "_may_try_again"): lambda original: lambda job, formation: False},
    ),
    "killed-gang-fails": Break(
        "what is done to a gang is its own failure", patches={(gang, "_blamed"): lambda original: lambda task, *_: task}
    ),
    "neighbours-killed": Break(
        "the death of a shim ends all of its attempt on that machine",
        patches={(TaskModel, "_left_by"): _all_beside},
    ),
    "older-world-trains": Break(
        "members of the world before count as training in the next",
        patches={(regrouping, "CHANGES"): _with_rule(regrouping.trains, _trains_early)},
    ),
    "always-due": Break(
        "the shepherd of a job that runs is due at every moment",
        patches={(ShepherdState, "next_deadline_s"): _always_due},
    ),
    "nodes-fault-ends-jobs": Break(
        "a job ends with the first start that fails", patches={(blame, "is_tried_again"): _never}
    ),
    "failing-node-offers": Break(
        "a node takes jobs whatever has failed on it", patches={(Trouble, "reason"): lambda original: lambda *told: ""}
    ),
    "hanging-member-kept": Break(
        "a worker that hangs is waited for", patches={(formation, "_hanging"): lambda original: lambda live: set()}
    ),
    "newcomers-kept": Break(
        "newcomers outlive the training that they came for",
        patches={(formation, "_is_over"): lambda original: lambda present, **told: False},
    ),
    "anybody-stopped": Break(
        "a job that cannot be stopped is stopped for others", patches={(JobView, "can_be_stopped"): _of_all_that_run}
    ),
    "waiting-unbounded": Break(
        "the bound on waiting is ignored", patches={(Turn, "place"): lambda original: property(_by_service)}
    ),
    "former-first-commits": Break(
        "checkpoints of an elastic gang are ordered by their node alone",
        patches={(changes, "why_stale"): _ordered_by_node},
    ),
    "rooms-lent-twice": Break(
        "a node gives room to shards that it has given already",
        patches={(Lender, "_refusal"): lambda original: lambda *told: ""},
    ),
    "ranges-kept": Break(
        "ranges are wanted for ever, by whichever task has asked",
        patches={(Broker, "give_up"): lambda original: lambda *told: []},
    ),
}
NO_BREAK = Break("nothing is broken")


def find_break(name: str) -> Break:
    """The break of that name, or none for an empty one.  Raises `ConfigError` with the nearest names."""
    if not name:
        return NO_BREAK
    if name not in BREAKS:
        raise ConfigError("break", f"{name!r} is no rule that can be broken", f"one of {', '.join(BREAKS)}")
    return BREAKS[name]

"""What a shepherd decides, as data: each change of its job's record, and what becomes of the record by it.

Each makes fields of the record as it then is, or None when it is no longer wanted: those that somebody wishes wait, and
what came before may have made them obsolete.  States follow the life cycle's table.  What must happen once a change is
decided is not said here: it follows from the decided record (`due`).
"""

from collections.abc import Iterable

from msgspec.structs import replace

from swarmsched.api import COMING_BACK, EndReason, JobSpec, JobState, StartPhase
from swarmsched.fields import SECONDS_MOST, Value
from swarmsched.holders import Holders
from swarmsched.ids import NodeId
from swarmsched.jobs.lifecycle import JobEvent, next_state
from swarmsched.ledger.message import CheckpointRequest
from swarmsched.negotiation.checkpointing import CommitRule, as_named, is_named, why_stale
from swarmsched.negotiation.outcome import Failures
from swarmsched.record import (
    RESCALING_REASON_LENGTH,
    RESCALINGS_KEPT,
    JobRecord,
    Leftover,
    PlanState,
    Rescaling,
    StartFault,
)
from swarmsched.resources import Share, of_first, world_size
from swarmsched.task import Meeting
from swarmsched.view import Allocation
from swarmsched.world import World

REASON_LENGTH = 1_024
Fields = dict[str, object]


class RecordChange(Value):
    """Base of all; fields that are not named stay as they are."""

    def of(self, record: JobRecord) -> Fields | None:
        """What it makes of the record as it now is."""
        return self._fields(record)

    def _fields(self, record: JobRecord) -> Fields | None:
        raise NotImplementedError


class Placed(RecordChange):
    """Every owner holds: durable before any commit."""

    attempt: int
    target: Allocation
    meetings: tuple[Meeting, ...]  # of all groups, by their numbers
    secret: str = ""

    def _fields(self, record: JobRecord) -> Fields | None:
        first, *others = self.meetings
        return _moved(record, JobEvent.PLACED) | {
            "phase": StartPhase.PLACE,
            "reason": "",
            "attempt": self.attempt,
            "plan_state": PlanState.PREPARED,
            "shares": self.target.shares,
            "last_part": max((share.part for share in of_first(self.target.shares)), default=0),
            "global_batch": (record.spec.batches.first and self.target.global_batch) or record.global_batch,
            "rendezvous_host": first.host,
            "rendezvous_port": first.port,
            "meetings": tuple(others),
            "secret": self.secret,
        }


class Started(RecordChange):
    """All ranks run."""

    utc_s: float

    def _fields(self, record: JobRecord) -> Fields | None:
        return _moved(record, JobEvent.STARTED) | {
            "phase": StartPhase.NONE,
            "plan_state": PlanState.LAUNCHED,
            "started_utc_s": self.utc_s,
            "first_started_utc_s": record.first_started_utc_s or self.utc_s,
            **_resumed(record, self.utc_s),
            "start_faults": (),
            **(
                {"world": World(1, tuple(share.part for share in of_first(record.shares)))}
                if record.spec.elastic
                else {}
            ),
        }


class StartAborted(RecordChange):
    """Nothing of the attempt is left, and it was not the job's fault."""

    reason: str
    faults: tuple[StartFault, ...] = ()  # all that are known since it ran last, where it was a node's word

    def _fields(self, record: JobRecord) -> Fields | None:
        aborted = _moved(record, JobEvent.START_ABORTED) | _without_gang(self.reason)
        if not self.faults:
            return aborted
        return aborted | {"relaunches": record.relaunches + 1, "start_faults": self.faults}


class GivenUp(RecordChange):
    """A part of the gang is lost and with it the attempt; what may be left of it is named."""

    reason: str
    left: tuple[Leftover, ...]
    served_gpu_s: float

    def _fields(self, record: JobRecord) -> Fields | None:
        given_up = _moved(record, JobEvent.GANG_LOST) | _without_gang(self.reason) | _served(record, self.served_gpu_s)
        return given_up | {
            "leftovers": with_leftovers(record, self.left),
            "restarts": record.restarts + 1,
            "started_utc_s": 0.0,
        }


class MadeRoom(RecordChange):
    """A gang that was to make room, or to have another size, has ended.

    What it had on lost nodes before may not be settled yet.
    """

    reason: str
    served_gpu_s: float
    left: tuple[Leftover, ...] = ()

    def _fields(self, record: JobRecord) -> Fields | None:
        is_rescaled = record.stop_reason is EndReason.RESCALED
        requeued = _moved(record, JobEvent.REQUEUED) | _without_gang(self.reason) | _served(record, self.served_gpu_s)
        return requeued | {
            "stop_reason": EndReason.NONE,
            "detail": "",
            "leftovers": self.left,
            "preemptions": record.preemptions + (not is_rescaled),
            "rescales": record.rescales + is_rescaled,
            "started_utc_s": 0.0,
        }


class Ended(RecordChange):
    """Nothing runs any more, and this is the result."""

    outcome: Fields
    utc_s: float
    served_gpu_s: float
    event: JobEvent = JobEvent.EXITED

    def _fields(self, record: JobRecord) -> Fields | None:
        ended = _moved(record, self.event) | self.outcome | _served(record, self.served_gpu_s)
        return ended | {"phase": StartPhase.NONE, "leftovers": (), "ended_utc_s": self.utc_s}


class Settled(RecordChange):
    """Nothing is left of earlier attempts."""

    def _fields(self, record: JobRecord) -> Fields | None:
        return {"leftovers": ()}


# Wishes, each of which waits its turn.


class StopWished(RecordChange):
    """Somebody wants it to end, or to make room."""

    why: EndReason
    reason: str
    utc_s: float

    def _fields(self, record: JobRecord) -> Fields | None:
        # One that makes room for another comes back; whoever wants it to end for good has the last word.
        comes_back = record.stop_reason in (EndReason.NONE, *COMING_BACK)
        is_new = comes_back and (record.stop_reason is EndReason.NONE or self.why not in COMING_BACK)
        if record.is_ended or not is_new:
            return None
        wish: Fields = {"stop_reason": self.why, "reason": self.reason, "detail": self.reason}
        if record.state is not JobState.QUEUED:
            if self.why is EndReason.RESCALED:
                wish |= begun_rescaling(record, world_size(record.shares), self.utc_s, self.reason)
            return _moved(record, JobEvent.STOP_REQUESTED) | wish
        outcome = Failures().outcome(self.why) | wish
        return Ended(outcome, self.utc_s, 0.0, JobEvent.STOP_REQUESTED).of(record)


class Unreachable(RecordChange):
    """A gang that is being stopped ends without waiting for those."""

    left: tuple[Leftover, ...]

    def _fields(self, record: JobRecord) -> Fields | None:
        leftovers = with_leftovers(record, self.left)
        is_new = record.state is JobState.STOPPING and leftovers != record.leftovers
        return {"leftovers": leftovers} if is_new else None


class Scaled(RecordChange):
    """Somebody wants it to have other numbers of ranks."""

    spec: JobSpec

    def _fields(self, record: JobRecord) -> Fields | None:
        is_new = record.state is not JobState.ENDED and record.spec != self.spec
        return {"spec": self.spec, "scalings": record.scalings + 1} if is_new else None


class Rebatched(RecordChange):
    """A job's ranks are to train with another batch from now on."""

    global_batch: int

    def _fields(self, record: JobRecord) -> Fields | None:
        is_choice = record.state is JobState.RUNNING and bool(record.spec.batches.first)
        is_new = is_choice and record.global_batch != self.global_batch
        return {"global_batch": self.global_batch} if is_new else None


class CheckpointSaved(RecordChange):
    """Ranks have completed a checkpoint; `may_commit` says whether their attempt may have it named."""

    request: CheckpointRequest
    may_commit: CommitRule

    def refusal(self, record: JobRecord) -> str:
        """Why it may not be, or nothing."""
        return self.may_commit(record, self.request.attempt) or why_stale(record, self.request)

    def _fields(self, record: JobRecord) -> Fields | None:
        is_new = not is_named(record, self.request) and not self.refusal(record)
        return {"checkpoint": as_named(record, self.request)} if is_new else None


class HoldersExchanged(RecordChange):
    """These hold it from now on, and both these and the leaving ones must agree until none is leaving."""

    holders: Holders
    leaving: Holders

    def _fields(self, record: JobRecord) -> Fields | None:
        return {"holders": self.holders, "leaving_holders": self.leaving}


class HandedOver(RecordChange):
    """Another holder is the shepherd from now on, in whichever life it is."""

    successor: NodeId

    def _fields(self, record: JobRecord) -> Fields | None:
        return {"epoch": record.epoch + 1, "shepherd": self.successor, "shepherd_generation": 0}


def begun_rescaling(
    record: JobRecord, ranks_before: int, utc_s: float, reason: str, *, is_forced: bool = False
) -> Fields:
    """One more change of its size or hosts; whoever has it trained on says so later."""
    begun = Rescaling(utc_s, ranks_before, reason=reason[:RESCALING_REASON_LENGTH], is_forced=is_forced)
    return {"rescalings": (*record.rescalings, begun)[-RESCALINGS_KEPT:]}


def ended_rescaling(record: JobRecord, ranks_after: int, pause_s: float) -> Fields:
    """The last change of its size or hosts is over, if one was under way."""
    *before, last = record.rescalings or (None,)
    if last is None or last.ranks_after:
        return {}
    rescalings = (*before, replace(last, ranks_after=ranks_after, pause_s=pause_s))
    return {"rescalings": rescalings, "paused_s": record.paused_s + (0.0 if last.is_forced else pause_s)}


def _resumed(record: JobRecord, utc_s: float) -> Fields:
    begun_s = record.rescalings[-1].utc_s if record.rescalings else utc_s
    pause_s = min(max(0.0, utc_s - begun_s), SECONDS_MOST)  # a wall clock may be set to any year
    return ended_rescaling(record, world_size(record.shares), pause_s)


def _served(record: JobRecord, served_gpu_s: float) -> Fields:
    return {"attained_gpu_s": record.attained_gpu_s + served_gpu_s}


def _without_gang(reason: str) -> Fields:
    return {
        "phase": StartPhase.NONE,
        "reason": reason[:REASON_LENGTH],
        "plan_state": PlanState.ABORTED,
        "shares": (),
        "world": World(),
        "counted_s": 0.0,
    }


def left_by(shares: Iterable[Share], attempt: int) -> tuple[Leftover, ...]:
    """What an attempt may leave there."""
    return tuple(Leftover(share.node, attempt, share.origin, share.part) for share in shares)


def with_leftovers(record: JobRecord, left: tuple[Leftover, ...]) -> tuple[Leftover, ...]:
    """The leftovers that a record names, and these."""
    known = {*record.leftovers}
    return (*record.leftovers, *(each for each in left if each not in known))


def _moved(record: JobRecord, event: JobEvent) -> Fields:
    return {"state": next_state(record.state, event, f"job {record.job_id}")}

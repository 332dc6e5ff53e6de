"""What a shepherd writes into its job's record at each turn of the job's life.

Every function takes the record as it then is and gives the fields that change, or None when the change is no longer
wanted: updates wait their turn, and what came before may have made them obsolete.  States follow the life cycle's
table.
"""

from collections.abc import Callable

from swarmsched.api import COMING_BACK, EndReason, JobState, StartPhase
from swarmsched.ids import NodeId
from swarmsched.jobs.lifecycle import JobEvent, next_state
from swarmsched.negotiation.outcome import Failures
from swarmsched.record import JobRecord, Leftover, PlanState
from swarmsched.view import Allocation

REASON_LENGTH = 1_024
Change = Callable[[JobRecord], dict[str, object] | None]


def prepared(attempt: int, target: Allocation, rendezvous: tuple[str, int]) -> Change:
    """Every owner holds: durable before any commit."""
    host, port = rendezvous

    def change(record: JobRecord) -> dict[str, object] | None:
        if record.state is not JobState.QUEUED:
            return None
        return _moved(record, JobEvent.PLACED) | {
            "phase": StartPhase.PLACE,
            "reason": "",
            "attempt": attempt,
            "plan_state": PlanState.PREPARED,
            "shares": target.shares,
            "global_batch": target.global_batch or record.global_batch,
            "rendezvous_host": host,
            "rendezvous_port": port,
        }

    return change


def started(utc_s: float) -> Change:
    """All ranks run."""

    def change(record: JobRecord) -> dict[str, object] | None:
        if record.state is not JobState.STARTING:
            return None
        return _moved(record, JobEvent.STARTED) | {
            "phase": StartPhase.NONE,
            "plan_state": PlanState.LAUNCHED,
            "started_utc_s": utc_s,
            "first_started_utc_s": record.first_started_utc_s or utc_s,
        }

    return change


def rebatched(global_batch: int) -> Change:
    """Its ranks are to train with another batch from now on."""

    def change(record: JobRecord) -> dict[str, object] | None:
        is_new = record.state is JobState.RUNNING and record.global_batch != global_batch
        return {"global_batch": global_batch} if is_new else None

    return change


def aborted(reason: str, *, relaunches: int = 0) -> Change:
    """Nothing of the attempt is left, and nothing has run: queued again."""

    def change(record: JobRecord) -> dict[str, object] | None:
        if record.state is not JobState.STARTING:  # one that is being stopped meanwhile goes on being stopped
            return None
        more = {"relaunches": record.relaunches + relaunches} if relaunches else {}
        return _moved(record, JobEvent.START_ABORTED) | _without_gang(reason) | more

    return change


def given_up(reason: str, left: tuple[Leftover, ...], ran_s: float) -> Change:
    """A node of the gang is lost: queued again, and what is left of the attempt is named."""

    def change(record: JobRecord) -> dict[str, object] | None:
        if record.state not in (JobState.STARTING, JobState.RUNNING):
            return None
        return (
            _moved(record, JobEvent.GANG_LOST)
            | _without_gang(reason)
            | {
                "leftovers": _with(record, left),
                "restarts": record.restarts + 1,
                "attained_gpu_s": record.attained_gpu_s + served_gpu_s(record, ran_s),
                "started_utc_s": 0.0,
            }
        )

    return change


def unreachable(left: tuple[Leftover, ...]) -> Change:
    """A gang that is being stopped ends without waiting for those."""

    def change(record: JobRecord) -> dict[str, object] | None:
        leftovers = _with(record, left)
        is_new = record.state is JobState.STOPPING and leftovers != record.leftovers
        return {"leftovers": leftovers} if is_new else None

    return change


def settled(record: JobRecord) -> dict[str, object] | None:
    """Nothing is left of earlier attempts."""
    return {"leftovers": ()} if record.leftovers else None


def stopped(why: EndReason, reason: str, end: Change) -> Change:
    """Somebody wants it to end; a queued job has no process and ends by the wish alone."""
    wish: dict[str, object] = {"stop_reason": why, "reason": reason, "detail": reason}

    def change(record: JobRecord) -> dict[str, object] | None:
        # One that makes room for another comes back; whoever wants it to end for good has the last word.
        comes_back = record.stop_reason in (EndReason.NONE, *COMING_BACK)
        is_new = comes_back and (record.stop_reason is EndReason.NONE or why not in COMING_BACK)
        if record.is_ended or not is_new:
            return None
        if record.state is JobState.QUEUED:
            ended_by_wish = end(record)
            return None if ended_by_wish is None else ended_by_wish | wish
        return _moved(record, JobEvent.STOP_REQUESTED) | wish

    return change


def ended(event: JobEvent, failures: Failures, stop_reason: EndReason, utc_s: float, ran_s: float) -> Change:
    """Nothing runs any more, and this is the result."""

    def change(record: JobRecord) -> dict[str, object] | None:
        if record.is_ended:
            return None
        return (
            _moved(record, event)
            | failures.outcome(stop_reason)
            | {
                "phase": StartPhase.NONE,
                "leftovers": (),
                "ended_utc_s": utc_s,
                "attained_gpu_s": record.attained_gpu_s + served_gpu_s(record, ran_s),
            }
        )

    return change


def made_room(reason: str, ran_s: float) -> Change:
    """A gang that made room, or is to have another size, has ended: queued again with the service that it has had."""

    def change(record: JobRecord) -> dict[str, object] | None:
        if record.state is not JobState.STOPPING or record.stop_reason not in COMING_BACK:
            return None
        is_rescaled = record.stop_reason is EndReason.RESCALED
        return (
            _moved(record, JobEvent.REQUEUED)
            | _without_gang(reason)
            | {
                "stop_reason": EndReason.NONE,
                "detail": "",
                "leftovers": (),
                "preemptions": record.preemptions + (not is_rescaled),
                "rescales": record.rescales + is_rescaled,
                "attained_gpu_s": record.attained_gpu_s + served_gpu_s(record, ran_s),
                "started_utc_s": 0.0,
            }
        )

    return change


def handed_over(successor: NodeId) -> Change:
    """Another holder is the shepherd from now on, in whichever life it is."""
    return lambda record: {"epoch": record.epoch + 1, "shepherd": successor, "shepherd_generation": 0}


def served_gpu_s(record: JobRecord, ran_s: float) -> float:
    """GPU-seconds of the attempt that now ends (Tiresias' attained service, W x t).

    `ran_s` is a duration on a monotonic clock: a wall clock that jumps must not add or take service.
    """
    return record.gpus * ran_s if record.started_utc_s and record.shares else 0.0


def _without_gang(reason: str) -> dict[str, object]:
    return {
        "phase": StartPhase.NONE,
        "reason": reason[:REASON_LENGTH],
        "plan_state": PlanState.ABORTED,
        "shares": (),
    }


def _with(record: JobRecord, left: tuple[Leftover, ...]) -> tuple[Leftover, ...]:
    return (*record.leftovers, *(each for each in left if each not in record.leftovers))


def _moved(record: JobRecord, event: JobEvent) -> dict[str, object]:
    return {"state": next_state(record.state, event, f"job {record.job_id}")}

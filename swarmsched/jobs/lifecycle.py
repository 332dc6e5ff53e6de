"""The life of a job as a table: every allowed change of `JobState`, and nothing else changes it.

Theory.  A job waits, is placed as a whole gang, runs, and ends; the only loops lead back to waiting.  Two rules shape
the table:

* *Ending is final.*  No edge leaves ENDED: whoever has read an ended record may keep it for ever.
* *A job that may have processes leaves through STOPPING or by their exit.*  STARTING and RUNNING therefore never
  go straight to ENDED or QUEUED on a wish, only on a report that no process is left (EXITED, START_ABORTED,
  REQUEUED).  QUEUED has no process, so a stop ends it at once.
* *A lost gang is queued with its leftovers.*  GANG_LOST alone leads to QUEUED while processes may be left, on nodes
  that do not answer or are just being told; the record names them, its holders forbid them to run on, and nothing new
  starts before each is settled.

Reports of a gang come from several owners and overtake one another.  That is why EXITED is allowed in STARTING (a
short job is over before the last owner said that it began) and STARTED in STOPPING (the stop overtook the report).
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from swarmsched.api import JobState
from swarmsched.errors import InvalidTransition


class JobEvent(Enum):
    """What happened to a job, as its shepherd sees it."""

    PLACED = "placed"  # every owner holds: PREPARED goes into the register
    STARTED = "started"  # every owner reported that its ranks run
    START_ABORTED = "start aborted"  # not the job's fault, nothing is left of the attempt: try again
    STOP_REQUESTED = "stop requested"  # a user, the time limit, or the death of one rank ends the whole gang
    EXITED = "exited"  # no process is left and the result stands
    REQUEUED = "requeued"  # no process is left of a gang that had to make room
    GANG_LOST = "gang lost"  # a node of the gang is gone: what is left of the attempt is given up


TRANSITIONS: Mapping[tuple[JobState, JobEvent], JobState] = MappingProxyType(
    {
        (JobState.QUEUED, JobEvent.PLACED): JobState.STARTING,
        (JobState.QUEUED, JobEvent.STOP_REQUESTED): JobState.ENDED,
        (JobState.STARTING, JobEvent.STARTED): JobState.RUNNING,
        (JobState.STARTING, JobEvent.START_ABORTED): JobState.QUEUED,
        (JobState.STARTING, JobEvent.STOP_REQUESTED): JobState.STOPPING,
        (JobState.STARTING, JobEvent.EXITED): JobState.ENDED,
        (JobState.STARTING, JobEvent.GANG_LOST): JobState.QUEUED,
        (JobState.RUNNING, JobEvent.GANG_LOST): JobState.QUEUED,
        (JobState.RUNNING, JobEvent.STOP_REQUESTED): JobState.STOPPING,
        (JobState.RUNNING, JobEvent.EXITED): JobState.ENDED,
        (JobState.STOPPING, JobEvent.STARTED): JobState.STOPPING,
        (JobState.STOPPING, JobEvent.STOP_REQUESTED): JobState.STOPPING,
        (JobState.STOPPING, JobEvent.EXITED): JobState.ENDED,
        (JobState.STOPPING, JobEvent.REQUEUED): JobState.QUEUED,
    }
)


def next_state(state: JobState, event: JobEvent, subject: str) -> JobState:
    """The state after `event`.

    Raises `InvalidTransition` with `subject` (the job id) when the table has no such edge; nothing was changed.
    """
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise InvalidTransition(subject, state.value, event.value)
    return following


def diagram() -> str:
    """The table as a mermaid state diagram; edges between the same two states share an arrow."""
    arrows: dict[tuple[JobState, JobState], list[str]] = {}
    for (state, event), following in TRANSITIONS.items():
        arrows.setdefault((state, following), []).append(event.value)
    lines = ["stateDiagram-v2", f"    [*] --> {JobState.QUEUED.value}"]
    for (state, following), events in arrows.items():
        lines.append(f"    {state.value} --> {following.value}: {', '.join(events)}")
    lines.append(f"    {JobState.ENDED.value} --> [*]")
    return "\n".join(lines) + "\n"

"""Whose fault a start that failed is: the job's, that of the node, or nobody can say yet.

What a node lacks, another may have: no room, no process, no way to rank 0.  Files, an environment or a program that
cannot be had on one node may be missing everywhere, and then that is the job's own fault: it is known once another node
fails alike, or where no other node could take the job.  A program that is missing is a mistyped command as a rule: it
is laid to the node only where its path names a place on nodes, or the same job has run elsewhere before.

Tries are few: the job ends with the last of them, and says where all have failed.
"""

from collections.abc import Iterable, Sequence

from swarmsched.api import JobSpec
from swarmsched.ids import NodeId
from swarmsched.negotiation.gang import Gang
from swarmsched.record import START_FAULTS_MOST, JobRecord, StartFault
from swarmsched.task import TaskFailure, TaskStatus

STARTS_MOST = 5  # that fail one after the other
NODE_FAILURES = (TaskFailure.UNREACHABLE, TaskFailure.INTERNAL)
PROGRAM_FAILURES = (TaskFailure.NOT_FOUND, TaskFailure.NOT_EXECUTABLE)
DOUBTFUL = (TaskFailure.SYNC, TaskFailure.ENVIRONMENT, *PROGRAM_FAILURES)


def faults(gang: Gang, attempt: int) -> tuple[StartFault, ...]:
    """What has kept an attempt from its start, on each of its nodes that has told so."""
    found = [status for status in gang.tasks.values() if status.failure is not TaskFailure.NONE]
    return tuple(dict.fromkeys(StartFault(attempt, status.node, status.failure) for status in found))


def is_tried_again(record: JobRecord, failed: TaskStatus, found: Sequence[StartFault], *, has_elsewhere: bool) -> bool:
    """Whether another start follows one that has failed so; `has_elsewhere`: other nodes could take the job."""
    known = (*record.start_faults, *found)
    if len({fault.attempt for fault in known}) >= STARTS_MOST:
        return False
    if failed.failure not in DOUBTFUL:
        return failed.failure in (TaskFailure.PORT_TAKEN, *NODE_FAILURES)
    if failed.failure in PROGRAM_FAILURES and not (_is_of_nodes(record.spec) or record.first_started_utc_s):
        return False
    return has_elsewhere and len({fault.node for fault in known if fault.failure is failed.failure}) == 1


def kept(record: JobRecord, found: Sequence[StartFault]) -> tuple[StartFault, ...]:
    """All that the record keeps of them."""
    return (*record.start_faults, *found)[-START_FAULTS_MOST:]


def failed_nodes(known: Iterable[StartFault]) -> tuple[NodeId, ...]:
    """Nodes that are to blame for some of them, or may be."""
    return tuple(dict.fromkeys(fault.node for fault in known if fault.failure is not TaskFailure.PORT_TAKEN))


def obituary(record: JobRecord, failed: TaskStatus) -> str:
    """Why it is tried no more; nothing where its first start was its last."""
    nodes = list(dict.fromkeys([*failed_nodes(record.start_faults), failed.node]))
    if not record.start_faults:
        return ""
    tries = len({fault.attempt for fault in record.start_faults}) + 1
    where = ", ".join(nodes) if len(nodes) <= STARTS_MOST else f"{len(nodes)} nodes"
    return f"could not be started in {tries} tries, on {where}; the last: {failed.detail}"


def proven(before: JobRecord, after: JobRecord) -> list[StartFault]:
    """Faults that were those of their nodes, for the job runs on others now.

    What lies on nodes by somebody's own doing, a path, may well be on some of them only: that says nothing of the rest.
    """
    spec, runs_on = after.spec, {share.node for share in after.shares}
    brought = [TaskFailure.SYNC] * bool(spec.tree) + [TaskFailure.ENVIRONMENT] * bool(
        spec.requirements and not spec.venv
    )
    return [fault for fault in before.start_faults if fault.failure in brought and fault.node not in runs_on]


def _is_of_nodes(spec: JobSpec) -> bool:
    """True for a program that is named by its place on nodes."""
    return bool(spec.command) and spec.command[0].startswith("/")

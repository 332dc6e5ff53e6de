"""Invariant "starts": a node's fault ends no job at once, and a node that has had one takes no new job for a while.

What the fault was is read from what the machine's tasks tell.  A job ends by one only after as many tries as there may
be; by one that may be its own only after another node has failed alike, or where no other is up that could take it.
"""

from collections.abc import Sequence

from swarmsched.api import EndReason
from swarmsched.effects import Effect, SendPeer
from swarmsched.events import Event, PeerMessageReceived, TaskExited, TaskStaged, TaskStageFailed, TaskStarted
from swarmsched.gossip.member import MemberStatus
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.ledger.message import HoldRequest, OwnerAnswer, Refusal
from swarmsched.record import JobRecord
from swarmsched.resources import Free, counted, ranks_that_fit
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.task import TaskFailure

INVARIANT = "starts"
STARTS_MOST = 5
AVOIDED_S = 15.0
SEEN_S = 5.0  # for so long a machine must have been seen alive when the job's end is decided, and judged before that
DOUBTFUL = (TaskFailure.SYNC, TaskFailure.ENVIRONMENT)
NODES = (TaskFailure.UNREACHABLE, TaskFailure.INTERNAL)


class StartChecker(Checker):
    """Starts that fail, and what becomes of their jobs and nodes."""

    EVENTS = (TaskExited, TaskStageFailed, TaskStaged, TaskStarted, HoldRequest)

    def __init__(self, decided: DecidedRecords) -> None:
        self.outlived_count = 0  # jobs that were placed again after a fault of a node
        self._avoided_until_s: dict[NodeId, float] = {}  # by the owner's clock
        self._held: dict[NodeId, dict[TaskKey, None]] = {}
        self._told: dict[tuple[JobId, int, NodeId], TaskFailure] = {}
        self._hosts: dict[NodeId, Host] = {}
        decided.subscribe(self._decided_next)

    def agent_started(self, host: Host) -> None:
        """A new life of a node knows of no fault."""
        self._hosts[host.node_id] = host
        self._avoided_until_s.pop(host.node_id, None)

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Note how starts go, and whether holds are granted meanwhile."""
        self._hosts[host.node_id] = host
        if isinstance(event, TaskExited | TaskStageFailed | TaskStaged | TaskStarted):
            # Taken before, though its yes may have waited for a port: a copy of the request is answered alike.
            self._held.setdefault(host.node_id, {})[event.key] = None
        if isinstance(event, TaskStaged | TaskStarted):
            self._avoided_until_s.pop(host.node_id, None)  # of which kind is not asked here
        elif isinstance(event, TaskExited | TaskStageFailed):
            if event.failure is not TaskFailure.NONE:
                self._told[event.job_id, event.attempt, host.node_id] = event.failure
            if event.failure is TaskFailure.INTERNAL and self._is_known(host, event.key):
                self._avoided_until_s.setdefault(host.node_id, host.now_s + AVOIDED_S)
        elif isinstance(event, PeerMessageReceived) and isinstance(event.message, HoldRequest):
            self._note_hold(host, event.message.key, effects)

    def _is_known(self, host: Host, key: TaskKey) -> bool:
        assert host.node is not None
        return any(task.key == key and task.failure is TaskFailure.INTERNAL for task in host.node.tasks())

    def _note_hold(self, host: Host, key: TaskKey, effects: Sequence[Effect]) -> None:
        answers = [effect.message for effect in effects if isinstance(effect, SendPeer)]
        granted = any(
            isinstance(each, OwnerAnswer) and each.key == key and each.refusal is Refusal.NONE for each in answers
        )
        held = self._held.setdefault(host.node_id, {})
        if not granted or key in held:
            return
        held[key] = None
        until_s = self._avoided_until_s.get(host.node_id, 0.0)
        if host.now_s < until_s:
            left_s = until_s - host.now_s
            raise Violation(INVARIANT, f"{host.node_id} takes {key}, {left_s:.1f} s too early after a fault of its own")
        self._avoided_until_s.pop(host.node_id, None)

    def _decided_next(self, job_id: JobId, before: JobRecord | None, after: JobRecord) -> None:
        if before is None or before.is_ended:
            return
        self.outlived_count += len(after.start_faults) > len(before.start_faults)
        failed = NodeId(after.failed_node)
        failure = self._told.get((job_id, before.attempt, failed), TaskFailure.NONE)
        is_failure = after.is_ended and after.end_reason is EndReason.FAILED and not after.started_utc_s
        if not is_failure or failure not in (*NODES, *DOUBTFUL) or after.exit_code != 125:
            return
        tries = len({fault.attempt for fault in before.start_faults}) + 1
        alike = {fault.node for fault in before.start_faults if fault.failure is failure} | {failed}
        alike |= {
            node
            for (job, attempt, node), told in self._told.items()
            if (job, attempt) == (job_id, before.attempt) and told is failure
        }
        if tries >= STARTS_MOST or (failure in DOUBTFUL and (len(alike) > 1 or not self._has_elsewhere(after, alike))):
            return
        raise Violation(INVARIANT, f"{job_id} ends after {tries} tries by a fault of {failed}: {after.detail}")

    def _has_elsewhere(self, record: JobRecord, without: set[NodeId]) -> bool:
        """Machines that are up, as its shepherd sees them too, and could take it."""
        spec, host = record.spec, self._hosts[record.shepherd]
        if host.node is None:
            return False
        judged_s = SEEN_S + max(0.0, host.clock.utc_s - record.ended_utc_s)  # a register may take long to decide it
        members = host.node.members(host.now_s)
        seen = {each.node_id for each in members if each.status is MemberStatus.ALIVE and each.since_s > judged_s}
        offered = [
            host.resources
            for node, host in self._hosts.items()
            if host.node is not None and not host.is_witness and node not in (*without, *spec.exclude)
            if node in seen and (not spec.nodes or node in spec.nodes)
        ]
        free = [Free(counted(each.gpus), each.cpu_count, each.memory_bytes) for each in offered]
        return sum(ranks_that_fit(each, spec.demand) for each in free) >= spec.ranks

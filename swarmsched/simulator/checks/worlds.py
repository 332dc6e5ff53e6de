"""The worlds of elastic attempts: workers hear of decided ones alone, and each keeps somebody of the one before. That
one has trained if anybody has; nothing starts that the record does not name, and nothing leaves the record while it
lives. Nobody is ended whose end was not ordered, and what is done to a gang does not end a job that may be restarted.
"""

import math

from swarmsched.api import EndReason, JobState
from swarmsched.effects import Effect, PublishWorld, StartTask
from swarmsched.ids import AttemptKey, JobId, NodeId, TaskKey
from swarmsched.negotiation.world_changes import is_settled
from swarmsched.record import JobRecord
from swarmsched.resources import of_first
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords, is_new_beginning
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.simulator.tasks import SIGKILL, RunningTask, TaskChange

INVARIANT = "worlds"


class WorldChecker(Checker):
    """What was decided of the worlds of each attempt, and where its parts have run."""

    PERFORMED = (PublishWorld, StartTask)

    def __init__(self, decided: DecidedRecords) -> None:
        self.changed_count = self.joined_count = self.lost_count = 0
        self._decided = decided
        decided.subscribe(self._decided_next)
        self._members: dict[AttemptKey, dict[int, tuple[int, ...]]] = {}  # of each version
        self._named: dict[AttemptKey, dict[int, NodeId]] = {}  # parts, and where they are to be
        self._alive: dict[TaskKey, Host] = {}
        self._trains: dict[TaskKey, int] = {}  # the newest world in which each has trained
        self._forced: dict[JobId, None] = {}  # an operator went on with an older record: anything may be told twice

    def _decided_next(self, job_id: JobId, before: JobRecord | None, after: JobRecord) -> None:
        if is_new_beginning(before, after):
            self._forced[job_id] = None
        attempt = AttemptKey(job_id, after.attempt)
        named = self._named.setdefault(attempt, {})
        for share in after.shares:
            if share.part and named.setdefault(share.part, share.node) != share.node and job_id not in self._forced:
                raise Violation(INVARIANT, f"part {share.part} of {attempt} is on {share.node} and {named[share.part]}")
        if after.world.version:
            self._members.setdefault(attempt, {})[after.world.version] = after.world.members
        goes_on = before is not None and before.attempt == after.attempt and before.world.version > 0
        if before is None or not goes_on or job_id in self._forced:
            return
        if after.state is JobState.RUNNING:
            self._compare(before, after)
        elif after.is_ended:
            self._check_end(after)

    def _check_end(self, record: JobRecord) -> None:
        is_done_to_it = bool(record.signal) or record.end_reason is EndReason.NODE_LOST
        is_own = record.end_reason not in (EndReason.FAILED, EndReason.NODE_LOST)
        if is_done_to_it and not is_own and record.restarts < record.spec.max_restarts:
            raise Violation(
                INVARIANT,
                f"{record.job_id} ended after {record.restarts} restarts, by no fault of its: {record.detail}",
            )

    def _compare(self, before: JobRecord, after: JobRecord) -> None:
        old, new, name = before.world, after.world, f"{after.job_id}/{after.attempt}"
        is_next = new.version == old.version + 1
        if new.version != old.version and not is_next:
            raise Violation(INVARIANT, f"world {new.version} of {name} follows {old.version}")
        if is_next and not set(old.members) & set(new.members):
            raise Violation(INVARIANT, f"world {new.version} of {name} keeps nobody of {old.members}: {new.members}")
        trained = {key.part for key in self._trains if key.of_attempt == AttemptKey(after.job_id, after.attempt)}
        if is_next and old.has_trained and trained & set(old.members) and not trained & set(new.members):
            raise Violation(INVARIANT, f"world {new.version} of {name} keeps nobody who has trained: {new.members}")
        if is_settled(after) and not is_settled(before):
            self._check_settled(after)
        if not is_next and new.members != old.members:
            raise Violation(INVARIANT, f"world {new.version} of {name} had {old.members} and has {new.members}")
        if after.last_part < max((share.part for share in of_first(after.shares)), default=0):
            raise Violation(INVARIANT, f"parts of {name} may be numbered {after.last_part + 1} twice")
        self.changed_count += is_next
        self.joined_count += len(set(new.members) - set(old.members))
        self.lost_count += len(set(new.lost) - set(old.lost))
        kept = {*(share.place for share in after.shares), *(each.place for each in after.leftovers)}
        for share in before.shares:
            host = self._alive.get(TaskKey(after.job_id, after.attempt, share.part))
            if share.place not in kept and host is not None and host.node_id == share.node:
                raise Violation(
                    INVARIANT, f"part {share.part} of {name} lives on {share.node} and is not named any more"
                )

    def _check_settled(self, record: JobRecord) -> None:
        keys = [TaskKey(record.job_id, record.attempt, part) for part in record.world.members]
        late = [key.part for key in keys if key in self._alive and self._trains.get(key, 0) < record.world.version]
        if late:
            name = f"world {record.world.version} of {record.job_id}/{record.attempt}"
            raise Violation(INVARIANT, f"{name} is said to train, and parts {late} do not yet")

    def performed(self, host: Host, effect: Effect) -> None:
        """Workers are told of a world, or a part is started."""
        assert isinstance(effect, PublishWorld | StartTask)
        key = effect.key if isinstance(effect, PublishWorld) else effect.order.key
        is_worker = isinstance(effect, PublishWorld) or effect.order.is_worker
        if not is_worker or key.job_id in self._forced:
            return
        self._decided.settle(host)
        if isinstance(effect, StartTask):
            if self._named.get(key.of_attempt, {}).get(key.part) != host.node_id:
                raise Violation(INVARIANT, f"{key} starts on {host.node_id}, and the record never named it there")
            return
        plan = effect.plan
        told, decided = tuple(each.part for each in plan.members), self._members.get(key.of_attempt, {})
        if decided.get(plan.version) != told:
            raise Violation(
                INVARIANT, f"{key} is told of world {plan.version} of {told}, decided was {decided.get(plan.version)}"
            )

    def task_changed(self, host: Host, task: RunningTask, change: TaskChange) -> None:
        """Which parts have processes."""
        if not task.order.is_worker:
            return
        if change is TaskChange.ENDED:
            self._alive.pop(task.key, None)
            is_killed = any(each.signal == SIGKILL for each in task.exits)
            if is_killed and math.isinf(task.kill_s) and not task.is_struck:
                raise Violation(INVARIANT, f"{task.key} was killed on {host.node_id}, and nobody had ordered that")
        elif change is TaskChange.REGROUPED:
            self._trains[task.key] = task.worker.trains
        elif change is TaskChange.STARTED:
            other = self._alive.setdefault(task.key, host)
            if other is not host and task.key.job_id not in self._forced:
                raise Violation(INVARIANT, f"{task.key} runs on {other.node_id} and on {host.node_id}")

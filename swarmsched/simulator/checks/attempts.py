"""No two attempts of a job ever run at once ("attempts"), and another one runs only with a cause.

A rank runs from the start of its task's processes to their end, unless it is frozen, wherever that is: on a machine
that is cut off, or one whose agent is down, it counts just the same.
"""

from collections.abc import Sequence

from swarmsched.effects import Effect, StartTask
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords, is_new_beginning
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.simulator.tasks import RunningTask, TaskChange

INVARIANT = "attempts"


class AttemptChecker(Checker):
    """Which attempts of each job have ranks that run."""

    PERFORMED = (StartTask,)

    def __init__(self, decided: DecidedRecords) -> None:
        self.started: dict[JobId, dict[int, None]] = {}  # attempts with started ranks, since the last forced recovery
        self._decided = decided
        decided.subscribe(self._decided_next)
        self._running: dict[
            JobId, dict[tuple[NodeId, int, int], None]
        ] = {}  # (machine, attempt, part) of ranks that run

    def _decided_next(self, job_id: JobId, before: JobRecord | None, after: JobRecord) -> None:
        """An operator goes on with what is left, which may tell of fewer attempts than there were: counted anew."""
        if is_new_beginning(before, after):
            self.started.pop(job_id, None)

    def performed(self, host: Host, effect: Effect) -> None:
        """Another attempt may start ranks only if the record counts a cause for it."""
        assert isinstance(effect, StartTask)
        order = effect.order
        attempts = self.started.setdefault(order.job_id, {})
        attempts[order.attempt] = None
        self._decided.settle(host)
        record = self._decided.last(order.job_id)
        causes = 0 if record is None else record.relaunches + record.restarts + record.preemptions + record.rescales
        if len(attempts) > 1 + causes:
            raise Violation(
                INVARIANT, f"{order.job_id} runs again without need: attempts {list(attempts)}, {causes} causes"
            )

    def task_changed(self, host: Host, task: RunningTask, change: TaskChange) -> None:
        """Ranks run, or run no more."""
        job_id, attempt, part = task.key
        running = self._running.setdefault(job_id, {})
        is_out_of_time = change is TaskChange.STARTED and task.until_s <= host.now_s  # frozen before its first step
        if change in (TaskChange.FROZEN, TaskChange.ENDED) or is_out_of_time:
            running.pop((host.node_id, attempt, part), None)
            return
        running[host.node_id, attempt, part] = None
        others = [where for where in running if where[1] != attempt]
        if others:
            told = ", ".join(f"attempt {other} on {node}" for node, other, _ in others)
            raise Violation(
                INVARIANT, f"{job_id}: attempt {attempt} is {change.value} on {host.node_id} while there runs {told}"
            )

    def looked(self, hosts: Sequence[Host]) -> None:
        """Compare with the task models, in case a change was not told."""
        running: dict[JobId, dict[int, NodeId]] = {}
        for host in hosts:
            for task in host.tasks.running:
                if not task.is_frozen and task.until_s > host.now_s:
                    running.setdefault(task.order.job_id, {})[task.order.attempt] = host.node_id
        for job_id, attempts in running.items():
            if len(attempts) > 1:
                raise Violation(INVARIANT, f"{job_id} runs as attempts {attempts} at once")

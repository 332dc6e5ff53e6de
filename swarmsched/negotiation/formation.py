"""How the workers of a running elastic gang stand: one look at what the record names and what they have told.

Whatever is due of such a gang is read off this: who is gone, who waits for whom, who is ready, who has not heard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmsched.ids import Place
from swarmsched.negotiation.gang import is_clean, may_have_trained
from swarmsched.negotiation.world_changes import is_settled
from swarmsched.record import JobRecord
from swarmsched.resources import Share, of_first
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.world import Worker, WorkerState

SILENT = Worker()  # of whom nothing is heard


@dataclass(frozen=True, slots=True)
class Formation:
    """Parts by their numbers; those that are not in `tasks` have not told anything yet."""

    members: Sequence[Share]  # in rank order
    joining: Sequence[Share]
    leaving: Sequence[Share]
    tasks: Mapping[int, TaskStatus]
    workers: Mapping[int, Worker]
    exited: frozenset[int]  # no process of them is left
    gone: tuple[int, ...]  # members that failed, or whom others miss
    parted: tuple[int, ...]  # members for which the present world came to nothing, though all live
    are_all_parted: bool
    is_settled: bool
    is_over: bool  # the training is at its end, and none is left but newcomers
    is_changing: bool  # somebody is to join or to leave, has not heard of the world, or found that it came to nothing
    is_quiet: bool  # nothing is due of them

    def trains(self, part: int) -> bool:
        """Whether its worker has the state of the training, by its own word."""
        return self.workers[part].trains > 0


def look_at(record: JobRecord, told: Mapping[Place, TaskStatus]) -> Formation:
    """At a gang of which its owners have told that."""
    members, joining, leaving, world = record.members, record.joining, record.leaving, record.world
    parts = of_first(record.shares)
    tasks = {share.part: told[share.place] for share in parts if share.place in told}
    workers = {share.part: tasks[share.part].worker if share.part in tasks else SILENT for share in parts}
    exited = frozenset(part for part, task in tasks.items() if task.stage is TaskStage.EXITED)
    present = {share.part: tasks.get(share.part) for share in members}
    gone = _gone(present, has_trained=world.has_trained)
    parted, are_all = _parted(present, world.version)
    has_settled = is_settled(record)
    is_unheard = any(workers[part].heard < world.version for part in present)
    is_changing = bool(joining or leaving or is_unheard or parted)
    is_over = _is_over(present, has_trained=world.has_trained)
    is_quiet = has_settled and not (is_changing or gone or exited)
    found = (exited, gone, parted, are_all, has_settled, is_over, is_changing, is_quiet)
    return Formation(members, joining, leaving, tasks, workers, *found)


Present = Mapping[int, TaskStatus | None]
"""Members, with what they have told."""


def _gone(present: Present, *, has_trained: bool) -> tuple[int, ...]:
    """Members that failed, and those that others miss: that ended as if all were done, stand still, or hang.

    Whoever waits for one that stands still tells so only after a while.  It is not given up for members without state.
    """
    tasks = {part: task for part, task in present.items() if task is not None}
    over = [part for part, task in tasks.items() if task.stage is TaskStage.EXITED]
    live = {part: task for part, task in tasks.items() if part not in over and not task.is_frozen}
    stuck = {part for part, task in live.items() if task.worker.is_silent} | _hanging(live)
    others = [task for part, task in tasks.items() if part not in over and part not in stuck]
    if any(task.worker.problem for task in others):
        goes_on = not has_trained or any(task.worker.trains for task in others)
        return (*over, *(sorted(stuck) if goes_on else ()))
    return tuple(part for part in over if not is_clean(tasks[part]))


def _hanging(live: Mapping[int, TaskStatus]) -> set[int]:
    """Members that at least as many others have waited for until that timed out: they run, and do not wait themselves.

    One whose agent has started again has not told yet how it stands.
    """
    waiting = [part for part, task in live.items() if task.worker.problem and not task.worker.is_silent]
    if not any(live[part].worker.has_timed_out for part in waiting):
        return set()
    idle = {
        part
        for part, task in live.items()
        if not task.worker.problem and task.worker.state in (WorkerState.READY, WorkerState.TRAINING)
    }
    return idle if len(idle) <= len(waiting) else set()


def _is_over(present: Present, *, has_trained: bool) -> bool:
    """Whether the training has come to its end, and none is left but newcomers: nobody could take them in any more.

    Those that are members already say first that they wait for the others, who may not have been heard of yet.
    """
    left = [task for task in present.values() if task is None or task.stage is not TaskStage.EXITED]
    clean = [task for task in present.values() if task is not None and is_clean(task)]
    if not left:
        return bool(clean)
    has_ever_trained = has_trained or any(task.worker.trains for task in clean)
    is_waited = any(task is not None and task.worker.problem for task in left)
    return bool(clean) and has_ever_trained and is_waited and not any(map(may_have_trained, left))


def _parted(present: Present, version: int) -> tuple[tuple[int, ...], bool]:
    """Members for which the present world came to nothing, though all live, and whether that is so of all of them.

    None where somebody is frozen or stands still, or is not heard of yet: whatever becomes of that comes first.
    """
    live: dict[int, TaskStatus] = {}
    for part, task in present.items():
        if task is None or (task.stage is not TaskStage.EXITED and (task.is_frozen or task.worker.is_silent)):
            return (), False
        if task.stage is not TaskStage.EXITED:
            live[part] = task
    parted = tuple(part for part, task in live.items() if task.worker.failed >= version)
    return parted, len(parted) == len(live)

"""How a gang's end becomes the job's: which failure came first, and the code that `swarm run` returns for it."""

from collections.abc import Callable, Sequence

from swarmsched.api import EndReason
from swarmsched.ids import NodeId, Place
from swarmsched.record import SIGTERM
from swarmsched.task import RankExit, TaskFailure, TaskStatus


class Failures:
    """The first failing rank and the first failing task of an attempt, in the order in which they were told."""

    def __init__(self) -> None:
        self.rank: tuple[Place, RankExit] | None = None
        self.task: TaskStatus | None = None  # that failed as a whole

    def see(self, status: TaskStatus) -> None:
        """Take in a task's newest status.

        A rank that was terminated stands aside for one that failed by itself: after a shepherd's restart the
        victims of a gang's stop may be told before its cause.
        """
        if status.failure is not TaskFailure.NONE and self.task is None:
            self.task = status
        culprit = _first_failing(status.exits)
        if culprit is not None and (self.rank is None or (_is_victim(self.rank[1]) and not _is_victim(culprit))):
            self.rank = (status.place, culprit)

    def outcome(self, stop_reason: EndReason, name: Callable[[int], str] = str) -> dict[str, object]:
        """Changes of the record: end reason, exit code, and what failed where; `name` is how people call a rank."""
        outcome: dict[str, object] = {"end_reason": EndReason.COMPLETED, "exit_code": 0, "signal": 0, "reason": ""}
        is_victim = self.rank is not None and self.task is not None and _is_victim(self.rank[1])
        if self.rank is not None and not is_victim:  # ranks that were terminated since a task could not start
            place, failed = self.rank
            outcome |= _failed_rank(place.node, failed, name(failed.rank))
        elif self.task is not None:
            outcome |= _failed_task(self.task)
        if stop_reason is not EndReason.NONE:
            # Nobody failed: the ranks did what they were told, and the record says already who told them.
            outcome = {key: outcome[key] for key in ("exit_code", "signal", "reason")}
            outcome["end_reason"] = stop_reason
            if stop_reason is EndReason.FAILED and not outcome["exit_code"]:  # whose code it was is not known any more
                outcome |= {"exit_code": 1, "signal": 0}
        return outcome


def _is_failure(rank_exit: RankExit) -> bool:
    return rank_exit.exit_code != 0 or rank_exit.signal != 0


def _is_victim(rank_exit: RankExit) -> bool:
    return rank_exit.signal == SIGTERM


def _first_failing(exits: Sequence[RankExit]) -> RankExit | None:
    """The culprit among ranks that are told of together: rather one that was not merely terminated with the rest."""
    failed = [each for each in exits if _is_failure(each)]
    own = [each for each in failed if not _is_victim(each)]
    return next(iter(own or failed), None)


def _failed_rank(node: NodeId, failed: RankExit, name: str) -> dict[str, object]:
    how = f"was killed by signal {failed.signal}" if failed.signal else f"exited with {failed.exit_code}"
    return {
        "end_reason": EndReason.OOM if failed.is_oom else EndReason.FAILED,
        "exit_code": failed.exit_code,
        "signal": failed.signal,
        "failed_node": node,
        "failed_rank": failed.rank,
        "detail": f"rank {name} on {node} {how}",
    }


def _failed_task(status: TaskStatus) -> dict[str, object]:
    is_lost = status.failure is TaskFailure.LOST
    codes = {TaskFailure.NOT_FOUND: 127, TaskFailure.NOT_EXECUTABLE: 126}
    return {
        "end_reason": EndReason.NODE_LOST if is_lost else EndReason.FAILED,
        "exit_code": codes.get(status.failure, 125),
        "failed_node": status.node,
        "detail": status.detail or f"{status.node}: {status.failure.value}",
    }

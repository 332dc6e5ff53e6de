"""The task runner: skeleton of signatures, filled in shortly."""

from collections.abc import Callable

from swarm_agent.supervision.settings import Peers, TaskConfig
from swarmsched.effects import (
    BindRendezvous,
    ForgetTask,
    ReleaseRendezvous,
    SignalTask,
    StageTask,
    StartTask,
    StopTask,
)
from swarmsched.events import Event
from swarmsched.task import TaskStatus

TaskEffect = BindRendezvous | ReleaseRendezvous | StageTask | StartTask | SignalTask | StopTask | ForgetTask


class TaskRunner:
    """Performs the effects that concern processes and posts what becomes of them."""

    def __init__(self, config: TaskConfig, post: Callable[[Event], None], agent: Peers) -> None:
        self._config, self._post, self._agent = config, post, agent

    async def start(self) -> tuple[TaskStatus, ...]:
        """Find the tasks of earlier lives and attach to those that run; call once, before `perform`."""
        raise NotImplementedError

    def perform(self, effect: TaskEffect) -> None:
        """Do it, or begin to; the outcome is posted as an event."""
        raise NotImplementedError

    def own_pids(self) -> set[int]:
        """Every process of every task here: shims, ranks and their descendants."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Leave the shims running, drop everything of this process."""
        raise NotImplementedError

"""One task of this node, as the task runner and its parts hold it in memory."""

import asyncio
import logging
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from swarm_agent.supervision.shimlink import ShimLink, end_leftovers
from swarm_agent.supervision.stager import PreparedTask
from swarm_agent.supervision.warm import WarmStart
from swarm_agent.task.account import Account
from swarmsched.api import StartPhase
from swarmsched.events import TaskExited
from swarmsched.ids import TaskKey
from swarmsched.resources import Gpu
from swarmsched.task import TaskFailure, TaskOrder, TaskStage, TaskStatus

log = logging.getLogger(__name__)

LEFTOVER_INTERVAL_S = 0.05


@dataclass(slots=True, eq=False)
class LocalTask:
    """One task of this node, from its first effect to `ForgetTask`."""

    key: TaskKey
    order: TaskOrder
    link: ShimLink
    stage: TaskStage = TaskStage.ORDERED
    work: asyncio.Task[None] | None = None  # staging, launching after staging, or cleaning up after a lost shim
    account: Account | None = None
    prepared: PreparedTask | None = None
    failure: TaskFailure = TaskFailure.NONE
    detail: str = ""
    revision: int = 0
    phase: StartPhase = StartPhase.NONE
    gpus: tuple[Gpu, ...] = field(default=())
    until_s: float = math.inf  # monotonic: how long the ranks may run
    warm_start: WarmStart | None = None  # what waits for workers like it was started with

    @property
    def is_running(self) -> bool:
        """True from the launch until nothing of it is left."""
        return self.stage in (TaskStage.LAUNCHED, TaskStage.STARTED)

    @property
    def environment_dirs(self) -> tuple[Path, ...]:
        """The environments that it was given; none before it is staged."""
        return self.prepared.environment_dirs if self.prepared else ()

    def status(self) -> TaskStatus:
        """The task as the core knows it."""
        return TaskStatus(
            job_id=self.order.job_id,
            epoch=self.order.epoch,
            attempt=self.order.attempt,
            node=self.order.node,
            stage=self.stage,
            exits=self.link.facts.exit_list,
            failure=self.failure,
            detail=self.detail[:1_000],
            phase=self.phase.value,
            revision=self.revision,
            is_frozen=self.is_running and self.link.facts.is_frozen,
            ran_s=max(0.0, time.time() - facts.started_utc_s) if (facts := self.link.facts).started_utc_s else 0.0,
            part=self.order.part,
        )

    def exited_event(self) -> TaskExited:
        """The last word about it."""
        return TaskExited.about(self.key, self.link.facts.exit_list, self.failure, self.detail[:1_000])

    def begin(self, order: TaskOrder, gpus: tuple[Gpu, ...], until_s: float) -> None:
        """The core wants it started; `until_s` by the monotonic clock."""
        self.order, self.gpus, self.until_s = order, gpus, until_s

    def reached(self, stage: TaskStage) -> None:
        """The task has come that far."""
        self.stage = stage

    def fail(self, failure: TaskFailure, detail: str) -> None:
        """Keep why it ended, or never began."""
        self.failure, self.detail = failure, detail

    def heard(self) -> None:
        """The shim, or the task runner, has told something new of the task."""
        self.revision += 1

    def starts_like(self, warm_start: WarmStart) -> None:
        """Processes that wait for workers like it are of this kind."""
        self.warm_start = warm_start

    def go_on(self) -> None:
        """Take in what the shim of an earlier life of the agent has recorded; it lives."""
        facts = self.link.facts
        self.revision += len(facts.exits) + bool(facts.started_utc_s)
        self.revision += len(facts.read(self.link.facts_path))
        if facts.started_utc_s:
            self.stage = TaskStage.STARTED
        if self.account is not None and self.order.is_worker:
            self.warm_start = self.link.warm_start(self.account)
        if facts.is_exited:
            self.reached(TaskStage.EXITED)
            self.fail(facts.failure, facts.detail)

    async def close_account(self) -> None:
        """The shim of an earlier life is gone: its record tells the end, or nobody does."""
        facts = self.link.facts
        self.reached(TaskStage.EXITED)
        self.revision = len(facts.exits) + 2
        self.fail(facts.failure, facts.detail)
        if not facts.is_exited:
            await self.end_leftovers()
            cause = "ended without a record (power cut or kill -9)"
            self.fail(TaskFailure.LOST, f"the supervising process on {self.order.node} {cause}")

    async def close_without_a_word(self) -> None:
        """The shim of this life is gone without having told the end."""
        await self.end_leftovers()
        cause = self.link.last_error()
        if self.link.facts.offset or self.link.facts.is_damaged:
            self.failure, event = TaskFailure.LOST, "was killed, so the ranks were ended too"
        else:  # not even its own pid was recorded: no rank was started
            self.failure, event = TaskFailure.INTERNAL, "could not start"
        self.detail = f"the supervising process on {self.order.node} {event}" + (f": {cause}" if cause else "")

    def extend(self, until_s: float) -> None:
        """Let the ranks run until then; what has not started yet hears of it when it does."""
        is_sooner, self.until_s = until_s < self.until_s, until_s
        if not self.is_running:
            return
        try:
            self.link.set_lease(until_s)
        except OSError as error:
            told = "lease not written, the task may freeze job_id=%s attempt=%d error=%s"
            log.warning(told, *self.key.of_attempt, error)
        else:
            if is_sooner or self.link.facts.is_frozen:  # otherwise the shim looks when the time it knows is over
                self.link.tell("lease")

    async def end_leftovers(self) -> None:
        """End what a shim that was killed has left, and wait until nothing of it is there."""
        while await asyncio.to_thread(end_leftovers, self.order, self.link.facts):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(LEFTOVER_INTERVAL_S)  # SIGKILL takes a moment; processes in the kernel take longer

    def let_go(self) -> None:
        """Close what this process holds of the shim; one that has said its last word is reaped."""
        if self.link.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self.link.pidfd)
            if self.stage is TaskStage.EXITED:
                self._reap_later()
        self.link.close()

    def _reap_later(self) -> None:
        """The shim has said its last word and ends this instant."""
        pidfd, link = os.dup(self.link.pidfd), self.link
        loop = asyncio.get_running_loop()

        def reap() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            link.reap()

        loop.add_reader(pidfd, reap)

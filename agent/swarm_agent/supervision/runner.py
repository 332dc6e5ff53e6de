"""The task runner: performs the effects that concern processes and posts what becomes of them.

A task goes: staged (if it needs to be) -> launched (its shim was started) -> started -> exited -> forgotten.  All
that matters is in the task's directory, so a runner of a later life picks up where this one stopped; in memory is
only what speeds that up.  Nothing is polled: a shim's news arrive through the FIFO `notify`, its end through a pidfd.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from swarm_agent.aggregation.service import Aggregation
from swarm_agent.checkpoints.folders import CheckpointFolders
from swarm_agent.checkpoints.service import CheckpointPeers, CheckpointService
from swarm_agent.config import AgentConfig
from swarm_agent.folder import make_folder
from swarm_agent.staging.fetch import BlobFetcher
from swarm_agent.staging.requirements import EnvironmentStore, default_python
from swarm_agent.supervision.environment import (
    inherited,
    process_ranks,
)
from swarm_agent.supervision.forkserver import ForkServer
from swarm_agent.supervision.kept_work import KeptWork
from swarm_agent.supervision.launcher import Launcher
from swarm_agent.supervision.limits import TaskLimits
from swarm_agent.supervision.local_task import LocalTask
from swarm_agent.supervision.logs import LogStore
from swarm_agent.supervision.notices import NoticePipe
from swarm_agent.supervision.orders import (
    FactKind,
    directory_name,
    order_from_json,
    parse_directory_name,
)
from swarm_agent.supervision.shimlink import ShimLink, compile_shim
from swarm_agent.supervision.stager import PreparedTask, Stager, StagingFailed, failure_of
from swarm_agent.supervision.tools import install_tools
from swarm_agent.supervision.upkeep import Upkeep
from swarm_agent.supervision.warm import WarmPool, WarmStart
from swarm_agent.task import shim
from swarm_agent.task.account import Account, JobAccounts, NoAccount
from swarm_agent.task.membership import TaskMemberships, document_of
from swarm_agent.task.rendezvous import Rendezvous
from swarm_agent.task.reports import TaskReports
from swarm_agent.task.tasksocket import SocketFolder, TaskSockets
from swarmsched.api import StartPhase
from swarmsched.effects import (
    BindRendezvous,
    ExtendAttempt,
    ForgetTask,
    PublishWorld,
    ReleaseRendezvous,
    SetBatch,
    SignalTask,
    StageTask,
    StartTask,
    StopTask,
    TaskEffect,
)
from swarmsched.errors import ConfigError, StorageError
from swarmsched.events import (
    Event,
    FoundTask,
    RankExited,
    RendezvousBound,
    RendezvousFailed,
    TaskEstimated,
    TaskExited,
    TaskFreezeChanged,
    TaskPhaseChanged,
    TaskStaged,
    TaskStageFailed,
    TaskStarted,
    WorkerTold,
)
from swarmsched.ids import AttemptKey, TaskKey
from swarmsched.task import RankExit, TaskFailure, TaskOrder, TaskStage
from swarmsched.world import WorldPlan

log = logging.getLogger(__name__)

UNREADABLE_S = 15.0  # for a task to end whose order cannot be read
INSTALLER_ENV = ("PIP_*", "UV_*", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
NOT_ENTERED = "swarm: --outer did nothing: the script never entered swarm_elastic.Outer, so nothing was merged"


@contextmanager
def _told(task: LocalTask) -> Iterator[None]:
    """Whatever fails in it fails the staging: a shepherd that never hears of it waits for ever, with its GPUs kept."""
    try:
        yield
    except StagingFailed:
        raise
    except Exception as error:
        log.exception("staging failed job_id=%s attempt=%d", *task.key.of_attempt)
        failure = failure_of(error, TaskFailure.SYNC)
        raise StagingFailed(failure, f"staging on {task.order.node} failed: {error!r}") from error


class AgentParts(CheckpointPeers, Protocol):
    """The part of the agent that supervision uses: its stores, its core, its peers."""

    logs: LogStore


class TaskRunner:
    """Performs `TaskEffect`s; call `start` first, `stop` last, everything in the loop's thread.

    `fabric_address` is the IP address on which rank 0 of a job listens.  `upkeep` is of what tasks leave behind.
    """

    _server: ForkServer
    _launcher: Launcher

    def __init__(
        self,
        config: AgentConfig,
        fabric_address: str,
        post: Callable[[Event], None],
        agent: AgentParts,
        accounts: JobAccounts | None = None,
    ) -> None:
        self._config, self._post, self._agent = config, post, agent
        self._fabric_address = fabric_address
        self._tasks_dir = config.data_dir / "tasks"
        self._jobs_dir = config.data_dir / "jobs"
        self._accounts = accounts or JobAccounts(config.job_user)
        self._inherit = inherited(os.environ, config.env_allow)
        self.fetcher = BlobFetcher(agent.blobs, agent, config.name)
        self._environments = EnvironmentStore(
            config.data_dir / "envs",
            default_python(),
            self._inherit | inherited(os.environ, INSTALLER_ENV),
            config.environment_cache_bytes_max,
        )
        self._folders = CheckpointFolders(config.checkpoint_root, config.checkpoint_dir_shared)
        self._sockets = TaskSockets(SocketFolder(config.data_dir))
        self.memberships = TaskMemberships(
            self._order_of, lambda key, worker: self._post(WorkerTold.about(key, worker))
        )
        self._checkpoints = CheckpointService(
            config.name,
            config.data_dir,
            self._folders,
            agent,
            self._order_of,
            self._account_of,
            self.memberships.world,
            config.work_retention_s,
            config.checkpoint_bytes_max,
        )
        self._sockets.on_request("checkpoint", self._checkpoints.commits.handle)
        self.reports = TaskReports(self._order_of, lambda key, *told: self._post(TaskEstimated(*key.of_attempt, *told)))
        self._sockets.on_request("report", self.reports.handle)
        self._sockets.on_request("member", self.memberships.handle)
        self.aggregation = Aggregation(
            fabric_address,
            lambda key: self._order_of(key) is not None,
            post,
            hosts=config.aggregation and not config.witness,
        )
        self._sockets.on_request("outer", self.aggregation.handle)
        self.limits = TaskLimits(config.task_processes_max, "limit_tasks is false")
        self._stager = Stager(
            self._jobs_dir,
            self._folders,
            self._checkpoints.restorer,
            agent.blobs,
            self.fetcher,
            self._environments,
            environments_in_use=lambda: frozenset(
                path for task in self._tasks.values() for path in task.environment_dirs
            ),
        )
        self.warm = WarmPool(self._tasks_dir, config.warm_workers)
        self._rendezvous = Rendezvous(fabric_address, config.rendezvous_range)
        self._tasks: dict[TaskKey, LocalTask] = {}
        self._notices = NoticePipe(self._tasks_dir, self._facts_came, agent.logs.wake)
        is_apart = not config.checkpoint_dir_shared  # what is full everywhere at once must not stop the whole swarm
        self.upkeep = Upkeep(
            (config.data_dir, config.checkpoint_root) if is_apart else (config.data_dir,),
            agent.logs,
            self._checkpoints,
            KeptWork(self._jobs_dir, config.work_retention_s, config.work_cache_bytes_max),
            self._environments,
            self._live_attempts,
            lambda: self.warm.adjust(self._warm_starts(), self._server, self.limits),
            post,
        )

    async def start(self) -> tuple[FoundTask, ...]:
        """Find the tasks of earlier lives and attach to those that run; call once, before `perform`."""
        own = (self._tasks_dir, self._agent.logs.config.directory, self._agent.blobs.directory)
        passed = (self._jobs_dir, self._config.data_dir / "tools")
        _make_folders(self._config, own, passed, may_switch=self._accounts.may_switch)
        self._sockets.start()
        self._checkpoints.start()
        if self._config.limit_tasks and not self._config.witness:
            self.limits = await asyncio.to_thread(TaskLimits.find, self._config.task_processes_max)
        self._launcher = Launcher(
            self._fabric_address,
            self._inherit,
            install_tools(self._config.data_dir / "tools"),
            self.limits,
            self._agent.logs.config,
            self._sockets,
            self._rendezvous,
            self.warm,
        )
        self._notices.open()
        self._server = ForkServer(default_python(), compile_shim(self._tasks_dir))
        self._server.start()
        self.warm.start()
        for directory in sorted(self._tasks_dir.iterdir()):
            key = parse_directory_name(directory.name)
            if key:
                await self._find_whatever_it_is(key, directory)
        self._sockets.sweep()
        self.fetcher.serve()
        self.upkeep.start()
        self.aggregation.start()
        return tuple(
            FoundTask(task.status(), task.order, tuple(gpu.uuid for gpu in task.gpus)) for task in self._tasks.values()
        )

    async def stop(self) -> None:
        """Leave the shims running, drop everything of this process; staging ends."""
        working = [task.work for task in self._tasks.values() if task.work]
        for work in working:
            work.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await self.upkeep.stop()
        for task in self._tasks.values():
            task.let_go()
        self._tasks.clear()
        self.warm.stop()
        self._server.stop()
        self._sockets.stop()
        await self._checkpoints.stop()
        await self.aggregation.stop()
        self._rendezvous.close()
        self._notices.close()

    def perform(self, effect: TaskEffect) -> None:
        """Do it, or begin to; the outcome is posted as an event.  Never raises for what a job can cause."""
        match effect:
            case BindRendezvous():
                self._bind(effect.key)
            case ReleaseRendezvous():
                self._rendezvous.release(effect.key)
            case StageTask():
                self._stage(effect.order)
            case StartTask():
                self._start_task(effect)
            case ExtendAttempt():
                for task in self._parts(effect.of_attempt):
                    task.extend(effect.until_s)
            case StopTask():
                self._stop_task(effect.key, effect.grace_s)
            case ForgetTask():
                self._forget(effect.key)
            case _:
                self._pass_on(effect)

    def _pass_on(self, effect: SignalTask | SetBatch | PublishWorld) -> None:
        """What ranks that run are told."""
        match effect:
            case SignalTask():
                self._tell(effect.key, f"signal {effect.signal}")
            case SetBatch():
                for task in self._parts(effect.of_attempt):
                    self.reports.set_batch(task.key, effect.global_batch)
            case PublishWorld():
                self._publish(effect.key, effect.plan)

    def own_pids(self) -> set[int]:
        """The shims of this node; every process of a task is a descendant of one, daemons included."""
        return {pid for task in self._tasks.values() if task.is_running and (pid := task.link.facts.shim_pid)}

    def own_gpus(self) -> dict[int, frozenset[str]]:
        """The uuids of the GPUs that each task was given, by the pid of its shim."""
        tasks = self._tasks.values()
        return {task.link.facts.shim_pid: frozenset(gpu.uuid for gpu in task.gpus) for task in tasks if task.is_running}

    def processes(self) -> set[int]:
        """The shims and all their descendants.  One pass over /proc."""
        roots = self.own_pids()
        return roots | {pid for pid, _, _ in shim.descendants(*roots)} if roots else roots

    def workdir(self, attempt: AttemptKey) -> Path | None:
        """Where its tasks run, while one is known here."""
        return next((task.prepared.workdir for task in self._parts(attempt) if task.prepared), None)

    # Rendezvous.

    def _bind(self, key: TaskKey) -> None:
        try:
            bound = self._rendezvous.bind(key)
        except OSError as error:
            self._post(RendezvousFailed.about(key, str(error)))
        else:
            self._post(RendezvousBound.about(key, bound.host, bound.port))

    # Staging.

    def _stage(self, order: TaskOrder) -> None:
        key = order.key
        if known := self._tasks.get(key):
            if known.stage is TaskStage.STAGED:
                self._post(TaskStaged.about(key))
            return
        task = self._tasks[key] = self._new_task(order)
        self._agent.logs.opened(key)
        task.work = asyncio.create_task(self._stage_and_tell(task))

    async def _stage_and_tell(self, task: LocalTask) -> None:
        try:
            task.prepared = await self._prepare(task)
        except StagingFailed as error:
            self._explain(task, error)
            del self._tasks[task.key]
            self._agent.logs.closed(task.key)
            self._post(TaskStageFailed.about(task.key, error.failure, error.detail[:1_000]))
        else:
            task.work, task.phase = None, StartPhase.NONE
            task.reached(TaskStage.STAGED)
            self._post(TaskStaged.about(task.key))

    async def _prepare(self, task: LocalTask) -> PreparedTask:
        def tell(phase: StartPhase) -> None:
            task.phase = phase
            self._post(TaskPhaseChanged.about(task.key, phase.value))

        with _told(task):
            return await self._stager.prepare(task.order, self._found_account(task), tell)

    def _found_account(self, task: LocalTask) -> Account:
        """The account that the task runs as, looked up when it is first needed."""
        if task.account is None:
            try:
                task.account = self._accounts.of(task.order)
            except NoAccount as error:
                raise StagingFailed(TaskFailure.INTERNAL, f"{task.order.node}: {error}") from error
        return task.account

    def _explain(self, task: LocalTask, error: StagingFailed) -> None:
        self.upkeep.start_failed()
        text = f"{error.output}\nswarm: {error.detail}" if error.output else f"swarm: {error.detail}"
        self._agent.logs.say(*task.key.of_attempt, process_ranks(task.order)[0], text)

    def _new_task(self, order: TaskOrder) -> LocalTask:
        return LocalTask(order.key, order, ShimLink(self._tasks_dir / directory_name(order.key)))

    # Starting.

    def _start_task(self, effect: StartTask) -> None:
        order = effect.order
        key = order.key
        task = self._tasks.get(key)
        if task and task.stage is not TaskStage.STAGED:
            return  # repeated: it is on its way already
        task = self._tasks[key] = task or self._new_task(order)
        task.begin(order, effect.gpus, effect.until_s)
        self._agent.logs.opened(key)
        try:
            if task.prepared is None and not self._stager.is_quick(order):
                task.work = asyncio.create_task(self._locate_and_launch(task))
                return
            with _told(task):
                task.prepared = task.prepared or self._stager.locate_quickly(order, self._found_account(task))
        except StagingFailed as error:
            self._give_up(task, error)
        else:
            self._launch(task)

    async def _locate_and_launch(self, task: LocalTask) -> None:
        """For a task that was staged in an earlier life of the agent."""
        try:
            task.prepared = await self._prepare(task)
        except StagingFailed as error:
            self._give_up(task, error)
        else:
            task.work = None
            self._launch(task)

    def _launch(self, task: LocalTask) -> None:
        try:
            self._launcher.launch(task, self._server, lambda: self._watch(task))
        except StagingFailed as error:
            self._give_up(task, error)
        except OSError as error:
            self._not_started(task, error)

    def _not_started(self, task: LocalTask, error: OSError) -> None:
        task.let_go()
        self._sockets.close(task.key)
        task.link.remove()
        problem = f"{task.order.node} could not start the task: {error.strerror or error}"
        self._give_up(task, StagingFailed(TaskFailure.INTERNAL, problem))

    def _watch(self, task: LocalTask) -> None:
        """The shim was started; if nobody knows whether it was, its lock tells."""
        if task.link.pidfd >= 0:
            asyncio.get_running_loop().add_reader(task.link.pidfd, self._shim_ended, task)
        elif task.stage is not TaskStage.EXITED:
            task.work = asyncio.create_task(self._find_forked(task))

    async def _find_forked(self, task: LocalTask) -> None:
        """The server has died under this request."""
        is_found = await asyncio.to_thread(task.link.attach)
        task.work, facts = None, task.link.facts
        if not is_found and facts.is_exited:
            task.fail(facts.failure, facts.detail)
            self._ended(task)
            return
        try:
            if not is_found:
                task.link.start_alone(self._server.command)
        except OSError as error:
            self._not_started(task, error)
        else:
            self._watch(task)

    def _give_up(self, task: LocalTask, error: StagingFailed) -> None:
        """It never ran: say so to the user and to the core."""
        self._explain(task, error)
        task.fail(error.failure, error.detail)
        self._ended(task)

    # News of shims.

    def _facts_came(self, key: TaskKey) -> None:
        task = self._tasks.get(key)
        if task and task.is_running:
            self._take_facts(task)

    def _take_facts(self, task: LocalTask) -> None:
        facts, was_damaged = task.link.facts, task.link.facts.is_damaged
        told = facts.read(task.link.facts_path)
        if facts.is_damaged and not was_damaged:
            self._tell_damaged(task)
        for fact in told:
            task.heard()
            if isinstance(fact, RankExit):
                self._post(RankExited.about(task.key, fact))
            elif fact is FactKind.STARTED:
                task.reached(TaskStage.STARTED)
                self._post(TaskStarted.about(task.key, facts.started_utc_s))
                if task.warm_start and (cause := task.link.last_error()):
                    log.warning("worker has started as if none had waited job_id=%s cause=%s", task.key.job_id, cause)
            elif fact in (FactKind.FROZEN, FactKind.THAWED):
                self._post(TaskFreezeChanged.about(task.key, fact is FactKind.FROZEN))
            elif fact is FactKind.EXITED:
                task.fail(facts.failure, facts.detail)
                self._ended(task)

    def _tell_damaged(self, task: LocalTask) -> None:
        log.error("record of the task cannot be read, it is stopped job_id=%s attempt=%d", *task.key.of_attempt)
        self._tell(task.key, "stop 0")

    def _shim_ended(self, task: LocalTask) -> None:
        asyncio.get_running_loop().remove_reader(task.link.pidfd)
        task.link.reap()
        self._take_facts(task)
        task.link.close()
        if not task.link.facts.is_exited:
            task.work = asyncio.create_task(self._bury(task))

    async def _bury(self, task: LocalTask) -> None:
        """The shim is gone without a last word: end what it left, then report the task lost."""
        await task.close_without_a_word()
        self._agent.logs.say(*task.key.of_attempt, process_ranks(task.order)[0], f"swarm: {task.detail}")
        task.work = None
        self._ended(task)

    def _ended(self, task: LocalTask) -> None:
        task.reached(TaskStage.EXITED)
        task.heard()
        is_clean = all(not each.exit_code and not each.signal for each in task.link.facts.exit_list)
        is_success = is_clean and task.failure is TaskFailure.NONE
        is_known = task.prepared is not None  # an earlier life may have heard of it
        if is_known and is_success and task.order.spec.outer and not self.reports.has_entered_outer(task.key):
            self._agent.logs.say(*task.key.of_attempt, process_ranks(task.order)[0], NOT_ENTERED)
        self._agent.logs.closed(task.key)
        self._sockets.close(task.key)
        if task.warm_start:
            self.warm.leave(self._warm_starts())
        self.upkeep.task_ended(task.key.of_attempt, is_success=is_success)
        self._post(task.exited_event())

    # Orders about running tasks.

    def _tell(self, key: TaskKey, command: str) -> None:
        task = self._tasks.get(key)
        if task and task.is_running and not task.link.tell(command):
            log.warning("shim does not listen job_id=%s attempt=%d command=%s", *key.of_attempt, command)

    def _parts(self, attempt: AttemptKey) -> list[LocalTask]:
        return [task for key, task in self._tasks.items() if key.of_attempt == attempt]

    def _publish(self, key: TaskKey, plan: WorldPlan) -> None:
        task = self._tasks.get(key)
        if task is None or not task.is_running:
            return
        self.memberships.publish(key, document_of(plan))
        self.reports.regroup(key, len(plan.members), plan.nodes)

    def _stop_task(self, key: TaskKey, grace_s: float) -> None:
        task = self._tasks.get(key)
        if task is None:
            self._rendezvous.release(key)
            self._post(TaskExited.about(key, ()))
        elif task.stage is TaskStage.EXITED:
            self._post(task.exited_event())
        elif task.is_running:
            self._tell(key, f"stop {grace_s:.3f}")
        else:
            self._abandon(task)

    def _abandon(self, task: LocalTask) -> None:
        """Stopped before it was launched."""
        if task.work:
            task.work.cancel()
            task.work = None
        self._rendezvous.release(task.key)
        task.fail(TaskFailure.NONE, "stopped before it was started")
        self._ended(task)

    def _forget(self, key: TaskKey) -> None:
        task = self._tasks.get(key)
        if task is None:
            return
        if task.stage is not TaskStage.EXITED:
            log.warning("not forgotten, since it has not exited job_id=%s attempt=%d", *key.of_attempt)
            return
        task.let_go()
        task.link.remove()
        self.reports.forget(key)
        self.memberships.forget(key)
        self.aggregation.forget(key)
        del self._tasks[key]

    def _warm_starts(self) -> list[WarmStart]:
        """Of the workers that run, the latest first."""
        running = [task for task in self._tasks.values() if task.stage is TaskStage.STARTED]
        return [task.warm_start for task in reversed(running) if task.warm_start]

    def _live_attempts(self) -> set[AttemptKey]:
        """Those with a task that is not over."""
        return {key.of_attempt for key, task in self._tasks.items() if task.stage is not TaskStage.EXITED}

    def _order_of(self, key: TaskKey) -> TaskOrder | None:
        task = self._tasks.get(key)
        return task.order if task else None

    def _account_of(self, key: TaskKey) -> Account | None:
        task = self._tasks.get(key)
        return task.account if task else None

    # Earlier lives.

    async def _find_whatever_it_is(self, key: TaskKey, directory: Path) -> None:
        """One directory that is not as it should be costs its task, never the agent's start."""
        try:
            await self._find(key, directory)
        except Exception:
            log.exception("task directory cannot be used, its task is lost path=%s", directory)
            task = self._tasks.get(key)
            if task is None:
                return
            task.let_go()  # and the loop as well: libuv aborts a process that polls a closed descriptor
            await task.end_leftovers()
            task.reached(TaskStage.EXITED)
            task.fail(TaskFailure.LOST, f"what {task.order.node} knew of it cannot be read")

    async def _find(self, key: TaskKey, directory: Path) -> None:
        path = directory / "order.json"
        link = ShimLink(directory)
        try:
            order, gpus = order_from_json(path.read_bytes(), path)
        except (OSError, StorageError) as error:
            log.error("task directory cannot be read, its task is stopped path=%s error=%s", directory, error)
            await _end_unreadable(link)
            return
        task = self._tasks[key] = LocalTask(key, order, link, TaskStage.LAUNCHED, gpus=gpus)
        task.account = link.account()
        if await asyncio.to_thread(link.attach):
            self._adopt(task)
        else:
            await task.close_account()

    def _adopt(self, task: LocalTask) -> None:
        """The shim lives: go on as if nothing had happened."""
        self._agent.logs.opened(task.key)
        task.go_on()
        if task.stage is TaskStage.EXITED:
            self._agent.logs.closed(task.key)
            task.link.close()
            return
        asyncio.get_running_loop().add_reader(task.link.pidfd, self._shim_ended, task)
        if task.link.facts.is_damaged:
            self._tell_damaged(task)
        self._open_socket_again(task)
        if task.order.is_worker:
            self.memberships.expect(task.key)
        log.info("task found job_id=%s attempt=%d shim_pid=%d", *task.key.of_attempt, task.link.facts.shim_pid)

    def _open_socket_again(self, task: LocalTask) -> None:
        token = task.link.token()
        if not token:
            return
        try:
            self._sockets.open(task.key, token, self._found_account(task))
        except (OSError, StagingFailed) as error:
            log.error("task socket not opened job_id=%s attempt=%d error=%s", *task.key.of_attempt, error)


async def _end_unreadable(link: ShimLink) -> None:
    """Stop a task of which nobody knows which GPUs it has; of one that is over remove what is left."""
    if await asyncio.to_thread(link.attach):
        link.tell("stop 0")
        await asyncio.to_thread(link.wait_end, UNREADABLE_S)
        link.close()
    else:
        link.remove()


def _make_folders(config: AgentConfig, plain: Iterable[Path], shared: Iterable[Path], *, may_switch: bool) -> None:
    """Make those of the agent alone, and those that accounts of jobs pass through.  Raises `ConfigError`."""
    for folder in (config.data_dir, *plain):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in shared:
        make_folder(folder, 0o711)
    try:
        make_folder(config.checkpoint_root, 0o711)
    except OSError as error:
        problem = f"{config.checkpoint_root} cannot be created: {error.strerror or error}"
        raise ConfigError("checkpoint_dir", problem, "create it, or choose another") from error
    if may_switch:
        config.data_dir.chmod(config.data_dir.stat().st_mode & 0o777 | 0o011)

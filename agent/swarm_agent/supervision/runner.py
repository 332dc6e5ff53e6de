"""The task runner: performs the effects that concern processes and posts what becomes of them.

A task goes: staged (if it needs to be) -> launched (its shim was started) -> started -> exited -> forgotten.  All
that matters is in the task's directory, so a runner of a later life picks up where this one stopped; in memory is
only what speeds that up.  Nothing is polled: a shim's news arrive through the FIFO `notify`, its end through a pidfd.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from swarm_agent.aggregation.service import Aggregation
from swarm_agent.checkpoints.folders import CheckpointFolders
from swarm_agent.checkpoints.service import CheckpointPeers, CheckpointService
from swarm_agent.config import AgentConfig
from swarm_agent.folder import make_folder
from swarm_agent.room import shortage
from swarm_agent.staging.fetch import BlobFetcher
from swarm_agent.staging.requirements import EnvironmentStore, default_python
from swarm_agent.supervision.environment import (
    common_environment,
    inherited,
    process_ranks,
    rank_environment,
)
from swarm_agent.supervision.forkserver import ForkServer
from swarm_agent.supervision.kept_work import KeptFolder, KeptWork
from swarm_agent.supervision.limits import TaskLimits
from swarm_agent.supervision.logs import LogStore
from swarm_agent.supervision.orders import (
    FactKind,
    LaunchFile,
    directory_name,
    order_from_json,
    order_to_json,
    parse_directory_name,
)
from swarm_agent.supervision.shimlink import CHILD_LISTEN_FD, ShimLink, compile_shim, end_leftovers
from swarm_agent.supervision.stager import PreparedTask, Stager, StagingFailed, failure_of
from swarm_agent.supervision.tools import Tools, install_tools
from swarm_agent.supervision.warm import WarmPool, WarmStart, warm_start
from swarm_agent.task import shim
from swarm_agent.task.account import Account, JobAccounts, NoAccount
from swarm_agent.task.interfaces import interface_of
from swarm_agent.task.membership import TaskMemberships, member
from swarm_agent.task.rendezvous import BoundPort, Rendezvous, listen
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
    DiskFilled,
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
from swarmsched.ids import AttemptKey, JobId, TaskKey
from swarmsched.resources import Gpu
from swarmsched.task import RankExit, TaskFailure, TaskOrder, TaskStage, TaskStatus
from swarmsched.world import WorldPlan

log = logging.getLogger(__name__)

NOTICE_BYTES = 2**16
LEFTOVER_INTERVAL_S = 0.05
PRUNE_INTERVAL_S = 3_600.0
TIDY_INTERVAL_S = 1.0
ROOM_INTERVAL_S = 5.0
MEASURE_INTERVAL_S = 15.0  # about as often as it is asked for
UNREADABLE_S = 15.0  # for a task to end whose order cannot be read
INSTALLER_ENV = ("PIP_*", "UV_*", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


@dataclass(slots=True, eq=False)
class _Task:
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


@contextmanager
def _tried_again(what: str) -> Iterator[None]:
    """The next time does the rest: an administrator may delete at the same time, and a job may leave anything."""
    try:
        yield
    except OSError as error:
        log.debug("could not %s: %s", what, error)
    except Exception:
        log.exception("could not %s", what)


@contextmanager
def _told(task: _Task) -> Iterator[None]:
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

    `fabric_address` is the IP address on which rank 0 of a job listens.
    """

    _server: ForkServer

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
        self.aggregation = Aggregation(fabric_address, lambda key: self._order_of(key) is not None)
        self._sockets.on_request("outer", self.aggregation.handle)
        self._tools: Tools | None = None
        self.limits = TaskLimits(config.task_processes_max, "limit_tasks is false")
        self._stager = Stager(
            self._jobs_dir,
            self._folders,
            self._checkpoints.restorer,
            agent.blobs,
            self.fetcher,
            self._environments,
            environments_in_use=self._environments_in_use,
        )
        self.warm = WarmPool(self._tasks_dir, config.warm_workers)
        self._rendezvous = Rendezvous(fabric_address, config.rendezvous_range)
        self._tasks: dict[TaskKey, _Task] = {}
        self._notify = -1
        self._notice_rest = b""  # of a line that the last read cut
        self._work = KeptWork(self._jobs_dir, config.work_retention_s, config.work_cache_bytes_max)
        self._closed: dict[AttemptKey, bool] = {}  # attempts with tasks that are over, and whether all succeeded
        self._has_closed = asyncio.Event()
        self._pruning: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        is_apart = not config.checkpoint_dir_shared  # what is full everywhere at once must not stop the whole swarm
        self._disks = (config.data_dir, config.checkpoint_root) if is_apart else (config.data_dir,)
        self._has_shortage = False
        self._looking_for_room: asyncio.Task[None] | None = None
        self._look_for_room = asyncio.Event()

    async def start(self) -> tuple[FoundTask, ...]:
        """Find the tasks of earlier lives and attach to those that run; call once, before `perform`."""
        self._make_folders()
        self._sockets.start()
        self._tools = install_tools(self._config.data_dir / "tools")
        self._checkpoints.start()
        if self._config.limit_tasks and not self._config.witness:
            self.limits = await asyncio.to_thread(TaskLimits.find, self._config.task_processes_max)
        self._open_notify()
        self._server = ForkServer(default_python(), compile_shim(self._tasks_dir))
        self._server.start()
        self.warm.start()
        for directory in sorted(self._tasks_dir.iterdir()):
            key = parse_directory_name(directory.name)
            if key:
                await self._find_whatever_it_is(key, directory)
        self._sockets.sweep()
        self.fetcher.serve()
        self._tell_room()
        self._looking_for_room = asyncio.create_task(self._watch_room())
        self._pruning = asyncio.create_task(self._prune())
        self._measuring = asyncio.create_task(self._measure())
        return tuple(
            FoundTask(task.status(), task.order, tuple(gpu.uuid for gpu in task.gpus)) for task in self._tasks.values()
        )

    async def stop(self) -> None:
        """Leave the shims running, drop everything of this process; staging ends."""
        loop = asyncio.get_running_loop()
        working = [task.work for task in self._tasks.values()]
        working += [self._pruning, self._measuring, self._looking_for_room]
        for work in working:
            if work:
                work.cancel()
        await asyncio.gather(*(work for work in working if work), return_exceptions=True)
        for task in self._tasks.values():
            self._let_go(task)
        self._tasks.clear()
        self.warm.stop()
        self._server.stop()
        self._sockets.stop()
        await self._checkpoints.stop()
        await self.aggregation.stop()
        self._rendezvous.close()
        if self._notify >= 0:
            loop.remove_reader(self._notify)
            os.close(self._notify)
            self._notify = -1

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
                    self._extend(task, effect.until_s)
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
        pids = (task.link.facts.shim_pid for task in self._tasks.values() if task.is_running)
        return {pid for pid in pids if pid}

    def own_gpus(self) -> dict[int, frozenset[str]]:
        """The uuids of the GPUs that each task was given, by the pid of its shim."""
        running = (task for task in self._tasks.values() if task.is_running)
        return {task.link.facts.shim_pid: frozenset(gpu.uuid for gpu in task.gpus) for task in running}

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
        known = self._tasks.get(key)
        if known:
            if known.stage is TaskStage.STAGED:
                self._post(TaskStaged.about(key))
            return
        task = self._tasks[key] = self._new_task(order)
        self._agent.logs.opened(key)
        task.work = asyncio.create_task(self._stage_and_tell(task))

    async def _stage_and_tell(self, task: _Task) -> None:
        try:
            task.prepared = await self._prepare(task)
        except StagingFailed as error:
            self._explain(task, error)
            del self._tasks[task.key]
            self._agent.logs.closed(task.key)
            self._post(TaskStageFailed.about(task.key, error.failure, error.detail[:1_000]))
        else:
            task.stage, task.work, task.phase = TaskStage.STAGED, None, StartPhase.NONE
            self._post(TaskStaged.about(task.key))

    async def _prepare(self, task: _Task) -> PreparedTask:
        def tell(phase: StartPhase) -> None:
            task.phase = phase
            self._post(TaskPhaseChanged.about(task.key, phase.value))

        with _told(task):
            return await self._stager.prepare(task.order, self._found_account(task), tell)

    def _found_account(self, task: _Task) -> Account:
        """The account that the task runs as, looked up when it is first needed."""
        if task.account is None:
            try:
                task.account = self._accounts.of(task.order)
            except NoAccount as error:
                raise StagingFailed(TaskFailure.INTERNAL, f"{task.order.node}: {error}") from error
        return task.account

    def _explain(self, task: _Task, error: StagingFailed) -> None:
        self._look_for_room.set()
        text = f"{error.output}\nswarm: {error.detail}" if error.output else f"swarm: {error.detail}"
        self._agent.logs.say(*task.key.of_attempt, process_ranks(task.order)[0], text)

    def _new_task(self, order: TaskOrder) -> _Task:
        key = order.key
        return _Task(key, order, ShimLink(self._tasks_dir / directory_name(key)))

    # Starting.

    def _start_task(self, effect: StartTask) -> None:
        order = effect.order
        key = order.key
        task = self._tasks.get(key)
        if task and task.stage is not TaskStage.STAGED:
            return  # repeated: it is on its way already
        task = self._tasks[key] = task or self._new_task(order)
        task.order, task.gpus, task.until_s = order, effect.gpus, effect.until_s
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

    async def _locate_and_launch(self, task: _Task) -> None:
        """For a task that was staged in an earlier life of the agent."""
        try:
            task.prepared = await self._prepare(task)
        except StagingFailed as error:
            self._give_up(task, error)
        else:
            task.work = None
            self._launch(task)

    def _launch(self, task: _Task) -> None:
        try:
            bound = self._take_port(task)
            try:
                self._spawn(task, bound)
            finally:
                if bound:
                    bound.socket.close()  # the shim has its own copy now
        except StagingFailed as error:
            self._give_up(task, error)
        except OSError as error:
            self._not_started(task, error)

    def _not_started(self, task: _Task, error: OSError) -> None:
        self._let_go(task)
        self._sockets.close(task.key)
        task.link.remove()
        problem = f"{task.order.node} could not start the task: {error.strerror or error}"
        self._give_up(task, StagingFailed(TaskFailure.INTERNAL, problem))

    def _watch(self, task: _Task) -> None:
        """The shim was started; if nobody knows whether it was, its lock tells."""
        if task.link.pidfd >= 0:
            asyncio.get_running_loop().add_reader(task.link.pidfd, self._shim_ended, task)
        elif task.stage is not TaskStage.EXITED:
            task.work = asyncio.create_task(self._find_forked(task))

    async def _find_forked(self, task: _Task) -> None:
        """The server has died under this request."""
        is_found = await asyncio.to_thread(task.link.attach)
        task.work, facts = None, task.link.facts
        if not is_found and facts.is_exited:
            task.failure, task.detail = facts.failure, facts.detail
            self._ended(task)
            return
        try:
            if not is_found:
                task.link.start_alone(self._server.command)
        except OSError as error:
            self._not_started(task, error)
        else:
            self._watch(task)

    def _take_port(self, task: _Task) -> BoundPort | None:
        order = task.order
        if order.node_rank or not order.rendezvous_port:
            self._rendezvous.release(task.key)
            return None
        bound = self._rendezvous.take(task.key)
        if bound:
            return bound
        listening = listen(order.rendezvous_host, order.rendezvous_port)  # bound in an earlier life of the agent
        if listening is None:
            problem = f"port {order.rendezvous_port} of {order.rendezvous_host} was taken before the task started"
            raise StagingFailed(TaskFailure.PORT_TAKEN, problem)
        return BoundPort(order.rendezvous_host, order.rendezvous_port, listening)

    def _spawn(self, task: _Task, bound: BoundPort | None) -> None:
        directory = task.link.directory
        directory.mkdir(mode=0o700)
        draft = directory / "order.new"
        draft.write_bytes(order_to_json(task.order, task.gpus))
        draft.rename(directory / "order.json")
        task.link.set_lease(task.until_s)
        token = task.link.make_token()
        self._sockets.open(task.key, token, self._found_account(task))
        launch = self._launch_file(task, bound, self._task_variables(task, token))
        task.stage = TaskStage.LAUNCHED
        if not self._start_warm(task, launch):
            task.link.start(launch, bound.socket.fileno() if bound else -1, self._server, lambda: self._watch(task))

    def _start_warm(self, task: _Task, launch: LaunchFile) -> bool:
        """Start it if a process like it waits."""
        is_elastic = task.order.is_worker
        found = warm_start(launch.argv, launch.common_env, launch.account) if is_elastic else None
        if found is None:
            return False
        task.warm_start, argv = found
        waiting = self.warm.take(task.warm_start)
        if waiting is None:
            return False
        task.link.start_warm(replace(launch, warm_argv=argv), waiting)
        self._watch(task)
        return True

    def _task_variables(self, task: _Task, token: str) -> dict[str, str]:
        assert task.prepared is not None
        variables = {
            "SWARM_TASK_SOCKET": str(self._sockets.path(task.key)),
            "SWARM_TASK_TOKEN": token,
            "SWARM_CHECKPOINT_DIR": str(task.prepared.checkpoint_dir),
        }
        if task.order.is_worker:
            variables["SWARM_FABRIC_HOST"] = self._fabric_address
        if task.prepared.resume_from:
            variables["SWARM_RESUME_FROM"] = str(task.prepared.resume_from)
        return variables

    def _launch_file(self, task: _Task, bound: BoundPort | None, variables: Mapping[str, str]) -> LaunchFile:
        assert task.prepared is not None
        order, logs, account = task.order, self._agent.logs.config, self._found_account(task)
        return LaunchFile(
            key=task.key,
            log_dir=logs.directory / order.job_id / str(order.attempt),
            log_limit_bytes=logs.limit_bytes,
            log_head_bytes=logs.head_bytes,
            workdir=task.prepared.workdir,
            umask=order.spec.umask,
            account=account,
            grace_s=order.spec.grace_s,
            listen_fd=CHILD_LISTEN_FD if bound else -1,
            port=order.rendezvous_port,
            argv=order.spec.command,
            common_env=common_environment(
                order,
                task.gpus,
                inherit=self._inherit,
                account=account,
                environment_dirs=task.prepared.environment_dirs,
                tools=self._tools,
                task=variables,
                cpu_count=len(os.sched_getaffinity(0)),
                fabric_interface=interface_of(self._fabric_address),
                workdir=task.prepared.workdir,
            ),
            rank_envs={rank: rank_environment(order, index) for index, rank in enumerate(process_ranks(order))},
            scope=self.limits.scope(order, task.gpus),
        )

    def _give_up(self, task: _Task, error: StagingFailed) -> None:
        """It never ran: say so to the user and to the core."""
        self._explain(task, error)
        task.failure, task.detail = error.failure, error.detail
        self._ended(task)

    # News of shims.

    def _open_notify(self) -> None:
        path = self._tasks_dir / "notify"
        if not path.is_fifo():
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)
        self._notify = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._notify, self._read_notices)

    def _read_notices(self) -> None:
        try:
            data = os.read(self._notify, NOTICE_BYTES)
        except BlockingIOError:
            return
        whole, _, self._notice_rest = (self._notice_rest + data).rpartition(b"\n")
        for line in dict.fromkeys(whole.decode("ascii", "replace").split("\n")):
            match line.split():
                case [job_id, *numbers, "facts"] if all(map(str.isdecimal, numbers)) and len(numbers) in (1, 2):
                    task = self._tasks.get(TaskKey(JobId(job_id), *map(int, numbers)))
                    if task and task.is_running:
                        self._take_facts(task)
                case [job_id, attempt, *_, "log", _] if attempt.isdecimal():
                    self._agent.logs.wake(AttemptKey(JobId(job_id), int(attempt)))
                case _:
                    continue  # the end of a line whose beginning an earlier agent has read

    def _take_facts(self, task: _Task) -> None:
        facts, was_damaged = task.link.facts, task.link.facts.is_damaged
        told = facts.read(task.link.facts_path)
        if facts.is_damaged and not was_damaged:
            self._tell_damaged(task)
        for fact in told:
            task.revision += 1
            if isinstance(fact, RankExit):
                self._post(RankExited.about(task.key, fact))
            elif fact is FactKind.STARTED:
                task.stage = TaskStage.STARTED
                self._post(TaskStarted.about(task.key, facts.started_utc_s))
                if task.warm_start and (cause := task.link.last_error()):
                    log.warning("worker has started as if none had waited job_id=%s cause=%s", task.key.job_id, cause)
            elif fact in (FactKind.FROZEN, FactKind.THAWED):
                self._post(TaskFreezeChanged.about(task.key, fact is FactKind.FROZEN))
            elif fact is FactKind.EXITED:
                task.failure, task.detail = facts.failure, facts.detail
                self._ended(task)

    def _tell_damaged(self, task: _Task) -> None:
        log.error("record of the task cannot be read, it is stopped job_id=%s attempt=%d", *task.key.of_attempt)
        self._tell(task.key, "stop 0")

    def _shim_ended(self, task: _Task) -> None:
        asyncio.get_running_loop().remove_reader(task.link.pidfd)
        task.link.reap()
        self._take_facts(task)
        task.link.close()
        if not task.link.facts.is_exited:
            task.work = asyncio.create_task(self._bury(task))

    async def _bury(self, task: _Task) -> None:
        """The shim is gone without a last word: end what it left, then report the task lost."""
        await self._end_leftovers(task)
        cause = task.link.last_error()
        if task.link.facts.offset or task.link.facts.is_damaged:
            task.failure, event = TaskFailure.LOST, "was killed, so the ranks were ended too"
        else:  # not even its own pid was recorded: no rank was started
            task.failure, event = TaskFailure.INTERNAL, "could not start"
        task.detail = f"the supervising process on {task.order.node} {event}" + (f": {cause}" if cause else "")
        self._agent.logs.say(*task.key.of_attempt, process_ranks(task.order)[0], f"swarm: {task.detail}")
        task.work = None
        self._ended(task)

    async def _end_leftovers(self, task: _Task) -> None:
        while await asyncio.to_thread(end_leftovers, task.order, task.link.facts):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(LEFTOVER_INTERVAL_S)  # SIGKILL takes a moment; processes in the kernel take longer

    def _ended(self, task: _Task) -> None:
        task.stage = TaskStage.EXITED
        task.revision += 1
        self._agent.logs.closed(task.key)
        self._sockets.close(task.key)
        if task.warm_start:
            self.warm.leave(self._warm_starts())
        is_clean = all(not each.exit_code and not each.signal for each in task.link.facts.exit_list)
        is_success = is_clean and task.failure is TaskFailure.NONE
        self._closed[task.key.of_attempt] = is_success and self._closed.get(task.key.of_attempt, True)
        self._has_closed.set()
        self._post(task.exited_event())

    # Orders about running tasks.

    def _tell(self, key: TaskKey, command: str) -> None:
        task = self._tasks.get(key)
        if task and task.is_running and not task.link.tell(command):
            log.warning("shim does not listen job_id=%s attempt=%d command=%s", *key.of_attempt, command)

    def _parts(self, attempt: AttemptKey) -> list[_Task]:
        return [task for key, task in self._tasks.items() if key.of_attempt == attempt]

    def _publish(self, key: TaskKey, plan: WorldPlan) -> None:
        task = self._tasks.get(key)
        if task is None or not task.is_running:
            return
        members = [member(str(each.part), each.address) for each in plan.members]
        lost = [str(part) for part in plan.lost]
        told = {"version": plan.version, "epoch": plan.epoch, "members": members, "lost": lost}
        self.memberships.publish(key, told | {"may_start": plan.may_start})
        self.reports.regroup(key, len(members), plan.nodes)

    def _extend(self, task: _Task, until_s: float) -> None:
        is_sooner, task.until_s = until_s < task.until_s, until_s
        if not task.is_running:
            return  # it is written when the shim starts
        try:
            task.link.set_lease(until_s)
        except OSError as error:
            log.warning(
                "lease not written, the task may freeze job_id=%s attempt=%d error=%s", *task.key.of_attempt, error
            )
        else:
            if is_sooner or task.link.facts.is_frozen:  # otherwise the shim looks when the time it knows is over
                task.link.tell("lease")

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

    def _abandon(self, task: _Task) -> None:
        """Stopped before it was launched."""
        if task.work:
            task.work.cancel()
            task.work = None
        self._rendezvous.release(task.key)
        task.detail = "stopped before it was started"
        self._ended(task)

    def _forget(self, key: TaskKey) -> None:
        task = self._tasks.get(key)
        if task is None:
            return
        if task.stage is not TaskStage.EXITED:
            log.warning("not forgotten, since it has not exited job_id=%s attempt=%d", *key.of_attempt)
            return
        self._let_go(task)
        task.link.remove()
        self.reports.forget(key)
        self.memberships.forget(key)
        self.aggregation.forget(key)
        del self._tasks[key]

    def _let_go(self, task: _Task) -> None:
        if task.link.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(task.link.pidfd)
            if task.stage is TaskStage.EXITED:
                self._reap_later(task)
        task.link.close()

    def _reap_later(self, task: _Task) -> None:
        """The shim has said its last word and ends this instant."""
        pidfd, link = os.dup(task.link.pidfd), task.link
        loop = asyncio.get_running_loop()

        def reap() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            link.reap()

        loop.add_reader(pidfd, reap)

    def _order_of(self, key: TaskKey) -> TaskOrder | None:
        task = self._tasks.get(key)
        return task.order if task else None

    def _account_of(self, key: TaskKey) -> Account | None:
        task = self._tasks.get(key)
        return task.account if task else None

    def _environments_in_use(self) -> frozenset[Path]:
        prepared = [task.prepared for task in self._tasks.values() if task.prepared]
        return frozenset(path for one in prepared for path in one.environment_dirs)

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
            self._let_go(task)  # and the loop as well: libuv aborts a process that polls a closed descriptor
            await self._end_leftovers(task)
            task.stage, task.failure = TaskStage.EXITED, TaskFailure.LOST
            task.detail = f"what {task.order.node} knew of it cannot be read"

    async def _find(self, key: TaskKey, directory: Path) -> None:
        path = directory / "order.json"
        link = ShimLink(directory)
        try:
            order, gpus = order_from_json(path.read_bytes(), path)
        except (OSError, StorageError) as error:
            log.error("task directory cannot be read, its task is stopped path=%s error=%s", directory, error)
            if await asyncio.to_thread(link.attach):
                link.tell("stop 0")
                await asyncio.to_thread(link.wait_end, UNREADABLE_S)  # nobody knows which GPUs it has
                link.close()
            else:
                link.remove()
            return
        task = self._tasks[key] = _Task(key, order, link, TaskStage.LAUNCHED, gpus=gpus)
        task.account = link.account()
        if await asyncio.to_thread(link.attach):
            self._adopt(task)
        else:
            await self._close_account(task)

    def _adopt(self, task: _Task) -> None:
        """The shim lives: go on as if nothing had happened."""
        self._agent.logs.opened(task.key)
        facts = task.link.facts
        task.revision += len(facts.exits) + bool(facts.started_utc_s)
        task.revision += len(facts.read(task.link.facts_path))
        if facts.started_utc_s:
            task.stage = TaskStage.STARTED
        if task.account is not None and task.order.is_worker:
            task.warm_start = task.link.warm_start(task.account)
        if facts.is_exited:
            task.stage, task.failure, task.detail = TaskStage.EXITED, facts.failure, facts.detail
            self._agent.logs.closed(task.key)
            task.link.close()
            return
        asyncio.get_running_loop().add_reader(task.link.pidfd, self._shim_ended, task)
        if facts.is_damaged:
            self._tell_damaged(task)
        self._open_socket_again(task)
        if task.order.is_worker:
            self.memberships.expect(task.key)
        log.info("task found job_id=%s attempt=%d shim_pid=%d", *task.key.of_attempt, facts.shim_pid)

    def _open_socket_again(self, task: _Task) -> None:
        token = task.link.token()
        if not token:
            return
        try:
            self._sockets.open(task.key, token, self._found_account(task))
        except (OSError, StagingFailed) as error:
            log.error("task socket not opened job_id=%s attempt=%d error=%s", *task.key.of_attempt, error)

    async def _close_account(self, task: _Task) -> None:
        """The shim is gone: its record tells the end, or nobody does."""
        facts = task.link.facts
        task.stage = TaskStage.EXITED
        task.revision = len(facts.exits) + 2
        task.failure, task.detail = facts.failure, facts.detail
        if not facts.is_exited:
            await self._end_leftovers(task)
            task.failure = TaskFailure.LOST
            task.detail = f"the supervising process on {task.order.node} ended without a record (power cut or kill -9)"

    # Housekeeping.

    async def left_behind(self, job_id: JobId) -> list[KeptFolder]:
        """The folders of a job's attempts that are over, as far as they are still here."""
        live = {key.of_attempt for key, task in self._tasks.items() if task.stage is not TaskStage.EXITED}
        return await asyncio.to_thread(self._work.of_job, job_id, live)

    def _make_folders(self) -> None:
        self._config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._tasks_dir, self._agent.logs.config.directory, self._agent.blobs.directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._jobs_dir, self._config.data_dir / "tools"):
            make_folder(folder, 0o711)
        try:
            make_folder(self._folders.root, 0o711)
        except OSError as error:
            problem = f"{self._folders.root} cannot be created: {error.strerror or error}"
            raise ConfigError("checkpoint_dir", problem, "create it, or choose another") from error
        if self._accounts.may_switch:  # the job's account must be able to pass through to its own folders
            mode = self._config.data_dir.stat().st_mode & 0o777
            self._config.data_dir.chmod(mode | 0o011)

    async def _prune(self) -> None:
        """Old logs and checkpoints go once an hour, work folders soon after a task has ended."""
        next_utc_s = 0.0
        while True:
            now_utc_s = time.time()
            tasks = self._tasks.values()
            live = {task.key.of_attempt for task in tasks if task.stage is not TaskStage.EXITED}
            with _tried_again("remove what is over"):
                if now_utc_s >= next_utc_s:
                    next_utc_s = now_utc_s + PRUNE_INTERVAL_S
                    await asyncio.to_thread(self._agent.logs.prune, now_utc_s)
                    await self._checkpoints.prune(now_utc_s)
                closed = {key: self._closed.pop(key) for key in list(self._closed) if key not in live}
                await asyncio.to_thread(self._tidy_work, closed, live, now_utc_s)
            await asyncio.sleep(TIDY_INTERVAL_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PRUNE_INTERVAL_S):
                    await self._has_closed.wait()
            self._has_closed.clear()

    @property
    def held_bytes(self) -> dict[str, int | None]:
        """What is kept of tasks beside their output and shipped files; None where it is not known yet."""
        return {
            "work": self._work.held_bytes,
            "environment": self._environments.held_bytes,
            "checkpoint": self._checkpoints.held_bytes,
        }

    async def _measure(self) -> None:
        """What logs take is known to /metrics, which must not wait for a look at their files; and what waits."""
        while True:
            await asyncio.sleep(MEASURE_INTERVAL_S)
            with _tried_again("measure logs"):
                self._agent.logs.keep_up()
                self.warm.adjust(self._warm_starts(), self._server, self.limits)
                await asyncio.to_thread(self._agent.logs.measure)
                await asyncio.to_thread(self._environments.measure)

    async def _watch_room(self) -> None:
        """A disk that fills is known within seconds, and at once where a start has failed."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_INTERVAL_S):
                    await self._look_for_room.wait()
            self._look_for_room.clear()
            self._tell_room()

    def _tell_room(self) -> None:
        with _tried_again("look for room on disk"):
            told = shortage(self._disks, was_short=self._has_shortage)
            if bool(told) != self._has_shortage:
                self._has_shortage = bool(told)
                self._post(DiskFilled(told))

    def _warm_starts(self) -> list[WarmStart]:
        """Of the workers that run, the latest first."""
        running = [task for task in self._tasks.values() if task.stage is TaskStage.STARTED]
        return [task.warm_start for task in reversed(running) if task.warm_start]

    def _tidy_work(self, closed: Mapping[AttemptKey, bool], live: set[AttemptKey], now_utc_s: float) -> None:
        for key, is_success in closed.items():
            self._work.close(key, now_utc_s, is_success=is_success)
        self._work.prune(now_utc_s, live)

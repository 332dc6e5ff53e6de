"""The launcher: what a task that is staged needs to start, which is a port, a socket, its variables, and a shim."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from swarm_agent.supervision.environment import common_environment, process_ranks, rank_environment
from swarm_agent.supervision.forkserver import ForkServer
from swarm_agent.supervision.limits import TaskLimits
from swarm_agent.supervision.local_task import LocalTask
from swarm_agent.supervision.logs import LogConfig
from swarm_agent.supervision.orders import LaunchFile, order_to_json
from swarm_agent.supervision.shimlink import CHILD_LISTEN_FD
from swarm_agent.supervision.stager import StagingFailed
from swarm_agent.supervision.tools import Tools
from swarm_agent.supervision.warm import WarmPool, warm_start
from swarm_agent.task.interfaces import interface_of
from swarm_agent.task.rendezvous import BoundPort, Rendezvous, listen
from swarm_agent.task.tasksocket import TaskSockets
from swarmsched.task import TaskFailure, TaskStage


class Launcher:
    """Starts the shims of tasks.  `fabric_address` is the IP address on which rank 0 of a job listens.

    `inherit` are the variables of the agent that tasks get.
    """

    def __init__(
        self,
        fabric_address: str,
        inherit: Mapping[str, str],
        tools: Tools,
        limits: TaskLimits,
        logs: LogConfig,
        sockets: TaskSockets,
        rendezvous: Rendezvous,
        warm: WarmPool,
    ) -> None:
        self._fabric_address, self._inherit, self._tools, self._limits = fabric_address, inherit, tools, limits
        self._logs, self._sockets, self._rendezvous, self._warm = logs, sockets, rendezvous, warm

    def launch(self, task: LocalTask, server: ForkServer, watch: Callable[[], None]) -> None:
        """Start the shim of a task that is staged; see `ShimLink.start` for `watch`.

        Raises `StagingFailed` where it cannot be, and OSError.
        """
        bound = self._take_port(task)
        try:
            self._spawn(task, bound, server, watch)
        finally:
            if bound:
                bound.socket.close()  # the shim has its own copy now

    def _take_port(self, task: LocalTask) -> BoundPort | None:
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

    def _spawn(self, task: LocalTask, bound: BoundPort | None, server: ForkServer, watch: Callable[[], None]) -> None:
        directory = task.link.directory
        directory.mkdir(mode=0o700)
        draft = directory / "order.new"
        draft.write_bytes(order_to_json(task.order, task.gpus))
        draft.rename(directory / "order.json")
        task.link.set_lease(task.until_s)
        token = task.link.make_token()
        assert task.account is not None
        self._sockets.open(task.key, token, task.account)
        launch = self._launch_file(task, bound, self._task_variables(task, token))
        task.reached(TaskStage.LAUNCHED)
        if self._start_warm(task, launch):
            watch()
        else:
            task.link.start(launch, bound.socket.fileno() if bound else -1, server, watch)

    def _start_warm(self, task: LocalTask, launch: LaunchFile) -> bool:
        """Start it if a process like it waits."""
        is_elastic = task.order.is_worker
        found = warm_start(launch.argv, launch.common_env, launch.account) if is_elastic else None
        if found is None:
            return False
        like, argv = found
        task.starts_like(like)
        waiting = self._warm.take(like)
        if waiting is None:
            return False
        task.link.start_warm(replace(launch, warm_argv=argv), waiting)
        return True

    def _task_variables(self, task: LocalTask, token: str) -> dict[str, str]:
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

    def _launch_file(self, task: LocalTask, bound: BoundPort | None, variables: Mapping[str, str]) -> LaunchFile:
        assert task.prepared is not None
        assert task.account is not None
        order, logs, account = task.order, self._logs, task.account
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
            scope=self._limits.scope(order, task.gpus),
        )

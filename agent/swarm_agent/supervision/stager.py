"""Everything that must be in place before a task's shim starts: reach of rank 0, files, environment."""

import asyncio
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakValueDictionary

from swarm_agent.checkpoints.folders import CheckpointFolders
from swarm_agent.checkpoints.restore import NotRestored, Restorer
from swarm_agent.folder import is_folder, make_folder
from swarm_agent.staging.blobs import BlobError, BlobStore, NotStored
from swarm_agent.staging.fetch import BlobFetcher, NotReached
from swarm_agent.staging.held_files import sources_of
from swarm_agent.staging.requirements import EnvironmentFailed, EnvironmentStore
from swarm_agent.staging.tree import Unpacker
from swarm_agent.task.account import Account
from swarm_agent.task.rendezvous import probe
from swarmsched.api import StartPhase
from swarmsched.errors import SwarmError
from swarmsched.ids import AttemptKey, NodeId
from swarmsched.task import TaskFailure, TaskOrder
from swarmsched.tree import BadTree, Tree

REFUSALS = frozenset(
    {errno.EACCES, errno.EAGAIN, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ENOMEM, errno.ENOTCONN}
    | {errno.ENXIO, errno.EPERM, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT}
)
"""By which a system says that something is wrong with it, whatever the job has asked for."""


def failure_of(error: BaseException | None, otherwise: TaskFailure) -> TaskFailure:
    """Whose fault it is that something could not be brought. It is this node's own, for sure (INTERNAL), one that
    another node need not share (UNREACHABLE), or perhaps the job's."""
    if isinstance(error, NotReached):
        return TaskFailure.UNREACHABLE
    if isinstance(error, NotStored):
        error = error.error
    if not isinstance(error, OSError):
        return otherwise
    if error.errno in (errno.ENOSPC, errno.EDQUOT):  # for that job: a disk that is full for all is looked after
        return TaskFailure.UNREACHABLE
    return TaskFailure.INTERNAL if error.errno in REFUSALS else otherwise


class StagingFailed(SwarmError):
    """A task cannot start here.  `failure` is what the shepherd acts on; `output` is for the job's log."""

    def __init__(self, failure: TaskFailure, detail: str, output: str = "") -> None:
        self.failure, self.detail, self.output = failure, detail, output
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """Where a task will run, and the virtual environments on its PATH, the first one foremost."""

    workdir: Path
    environment_dirs: tuple[Path, ...] = ()
    checkpoint_dir: Path | None = None  # to write to
    resume_from: Path | None = None


@dataclass(frozen=True, slots=True)
class Stager:
    """Prepares tasks.  Repeating a preparation finds what the first one left."""

    jobs_dir: Path
    folders: CheckpointFolders
    restorer: Restorer
    blobs: BlobStore
    fetcher: BlobFetcher
    environments: EnvironmentStore
    probe_timeout_s: float = 2.0
    probe_attempts: int = 3
    environments_in_use: Callable[[], frozenset[Path]] = frozenset  # those of running tasks must not be evicted
    _turns: WeakValueDictionary[AttemptKey, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def prepare(
        self, order: TaskOrder, account: Account, tell_phase: Callable[[StartPhase], None]
    ) -> PreparedTask:
        """Do all that the order needs, telling each phase; raises `StagingFailed`.

        Parts of one attempt share its folders: one after the other, and all but the first find what it left.
        """
        async with self._turns.setdefault(order.key.of_attempt, asyncio.Lock()):
            return await self._prepare(order, account, tell_phase)

    async def _prepare(
        self, order: TaskOrder, account: Account, tell_phase: Callable[[StartPhase], None]
    ) -> PreparedTask:
        spec = order.spec
        if order.node_rank > 0 and order.rendezvous_port:
            await self._reach_rank_zero(order)
        if spec.tree:
            tell_phase(StartPhase.SYNC)
            await self._bring_tree(order, account)
        if spec.requirements:
            tell_phase(StartPhase.ENVIRONMENT)
            await self._build_environment(order, account)
        if order.checkpoint:
            tell_phase(StartPhase.SYNC)
        resume_from = await self._restore(order, account)
        return replace(await self.locate(order, account), resume_from=resume_from)

    async def locate(self, order: TaskOrder, account: Account) -> PreparedTask:
        """Where everything of a prepared task is; makes an empty folder when the job brings none.

        Raises `StagingFailed` for what is not there.
        """
        workdir, environment_dirs = self._workdir(order, account), await self._environment_dirs(order, account)
        return PreparedTask(workdir, environment_dirs, await asyncio.to_thread(self._checkpoint_dir, order, account))

    def is_quick(self, order: TaskOrder) -> bool:
        """True when `locate_quickly` can answer: nothing is shipped or built, no other machine's disk is touched."""
        return not (order.spec.tree or order.spec.requirements or order.checkpoint or self.folders.is_shared)

    def locate_quickly(self, order: TaskOrder, account: Account) -> PreparedTask:
        """As `locate`, without waiting, for orders that are quick."""
        return PreparedTask(self._workdir(order, account), self._venv_dirs(order), self._checkpoint_dir(order, account))

    async def _reach_rank_zero(self, order: TaskOrder) -> None:
        host, port = order.rendezvous_host, order.rendezvous_port
        problem = await probe(host, port, timeout_s=self.probe_timeout_s, attempts=self.probe_attempts)
        if problem:
            where = f"{order.node} cannot reach {host}:{port} of {order.shares[0].node}: {problem}"
            remedy = "open the rendezvous ports between these nodes, or correct fabric_address"
            raise StagingFailed(TaskFailure.UNREACHABLE, f"{where}; {remedy}")

    async def _bring_tree(self, order: TaskOrder, account: Account) -> None:
        work = self._folder(order) / "work"
        if work.exists():
            return
        spec, sources = order.spec, _sources(order)
        try:
            with self.blobs.pinned([spec.tree]):
                await self.fetcher.ensure([spec.tree], sources)
                tree = await asyncio.to_thread(Tree.from_bytes, await self._content(spec.tree))
                with self.blobs.pinned(tree.blobs):
                    await self.fetcher.ensure(tree.blobs, sources)
                    await asyncio.to_thread(self._unpack, tree, work, account)
        except (BlobError, BadTree) as error:
            failure = failure_of(error, TaskFailure.SYNC)
            raise StagingFailed(failure, f"files could not be brought to {order.node}: {error}") from error
        except OSError as error:
            problem = f"files could not be unpacked on {order.node}: {error.strerror or error} ({work})"
            raise StagingFailed(failure_of(error, TaskFailure.SYNC), problem) from error

    def _unpack(self, tree: Tree, work: Path, account: Account) -> None:
        """Under another name until it is complete, so that a half-unpacked tree is never taken for a whole one."""
        draft = work.with_name(f"work.{secrets.token_hex(4)}")
        Unpacker(self.blobs, account.uid, account.gid).unpack(tree, draft)
        try:
            draft.rename(work)
        except OSError:
            shutil.rmtree(draft)
            if not work.is_dir():
                raise
            return  # a part of the attempt that was cancelled has unpacked on
        os.utime(work.parent, ns=(time.time_ns(),) * 2)  # tells what was shipped from what the job writes

    async def _build_environment(self, order: TaskOrder, account: Account) -> None:
        try:
            await self.fetcher.ensure([order.spec.requirements], _sources(order))
            text = await self._content(order.spec.requirements)
            await self.environments.ensure(text, account, self.environments_in_use())
        except BlobError as error:
            failure = failure_of(error, TaskFailure.SYNC)
            raise StagingFailed(failure, f"requirements could not be brought to {order.node}: {error}") from error
        except EnvironmentFailed as error:
            failure = failure_of(error.error, TaskFailure.INTERNAL if error.error else TaskFailure.ENVIRONMENT)
            raise StagingFailed(failure, f"{order.node}: {error}", error.output) from error

    async def _content(self, digest: str) -> bytes:
        return b"".join([chunk async for chunk in self.blobs.read(digest)])

    def _folder(self, order: TaskOrder) -> Path:
        """DATA/jobs/<id>/<attempt>; others than the agent may pass through, so the job's account reaches its files."""
        folder = self.jobs_dir / order.job_id / str(order.attempt)
        make_folder(folder, 0o711)
        return folder

    def _workdir(self, order: TaskOrder, account: Account) -> Path:
        spec = order.spec
        if spec.tree:
            workdir = self._folder(order) / "work" / spec.workdir.lstrip("/")
        elif spec.workdir:
            workdir = Path(spec.workdir)
            if not workdir.is_absolute():
                problem = f"working directory {spec.workdir!r} is relative, but no files were shipped"
                raise StagingFailed(TaskFailure.SYNC, f"{problem}; give an absolute path on the nodes, or --sync")
        else:
            return self._scratch(order, account)
        if not is_folder(workdir):
            problem = f"working directory {workdir} does not exist on {order.node}"
            remedy = "it is not in the shipped files" if spec.tree else "create it there, or ship files with --sync"
            raise StagingFailed(TaskFailure.SYNC, f"{problem}; {remedy}")
        return workdir

    def _scratch(self, order: TaskOrder, account: Account) -> Path:
        scratch = self._folder(order) / "work"
        if not scratch.exists():
            make_folder(scratch, 0o755)
            if account.uid >= 0:
                os.chown(scratch, account.uid, account.gid)
        return scratch

    async def _restore(self, order: TaskOrder, account: Account) -> Path | None:
        try:
            return await self.restorer.bring(order, account)
        except NotRestored as error:
            raise StagingFailed(failure_of(error.__cause__, TaskFailure.SYNC), str(error)) from error

    def _checkpoint_dir(self, order: TaskOrder, account: Account) -> Path:
        try:
            return self.folders.make(order.job_id, order.attempt, account)
        except OSError as error:
            where = error.filename or self.folders.root
            problem = f"the checkpoint folder {where} cannot be made on {order.node}: {error.strerror or error}"
            remedy = "see that checkpoint_dir has room and that the agent may write and give away files there"
            raise StagingFailed(failure_of(error, TaskFailure.INTERNAL), f"{problem}; {remedy}") from error

    async def _environment_dirs(self, order: TaskOrder, account: Account) -> tuple[Path, ...]:
        if not order.spec.requirements:
            return self._venv_dirs(order)
        try:
            text = await self._content(order.spec.requirements)
            built = self.environments.path(await self.environments.name_of(text, account))
        except (BlobError, EnvironmentFailed) as error:
            raise StagingFailed(TaskFailure.ENVIRONMENT, str(error)) from error
        if built is None:
            raise StagingFailed(TaskFailure.ENVIRONMENT, f"the environment built on {order.node} is gone; submit again")
        return (built, *self._venv_dirs(order))

    def _venv_dirs(self, order: TaskOrder) -> tuple[Path, ...]:
        if not order.spec.venv:
            return ()
        venv = Path(order.spec.venv)
        if not venv.is_absolute() or not is_folder(venv / "bin"):
            problem = f"there is no virtual environment {order.spec.venv} on {order.node} (it has no bin directory)"
            raise StagingFailed(TaskFailure.ENVIRONMENT, f"{problem}; create it, or use --requirements FILE")
        python = venv / "bin" / "python"
        if os.path.lexists(python) and not (python.is_file() and python.stat().st_mode & 0o111):
            problem = f"{python} leads to no program that can be executed on {order.node}"
            raise StagingFailed(TaskFailure.ENVIRONMENT, f"{problem}; create the environment there anew")
        return (venv,)


def _sources(order: TaskOrder) -> tuple[NodeId, ...]:
    return sources_of(order.spec, (holder.node for holder in order.configuration.members))

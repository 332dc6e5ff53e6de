"""Python environments built from a requirements file, one per content, shared by all jobs of this node.

An environment lives at DATA/envs/<hash>, the hash over the requirements' text and the interpreter's version.  It is
built in place, since virtual environments cannot be moved, and counts only once its mark DATA/envs-done/<hash>.json is
written; a build that fails or is abandoned is removed, so the next job tries again.

A build runs whatever the packages bring along, as the account of jobs.  So the agent writes nothing below what that
account may write (marks lie in a folder of the agent's own), what a build leaves running is ended with it, and the
finished environment is given to the agent's account, so that no job changes what others use.
"""

import asyncio
import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarm_agent.folder import make_folder, remove_tree
from swarm_agent.task import shim
from swarm_agent.task.account import Account, passable_path
from swarmsched.errors import SwarmError

PROBE_S = 30.0  # of a program that is asked for its version
OUTPUT_BYTES = 2**16  # of an installer, its last words
NO_ROOM = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""By which an installer tells that what it installs does not fit here."""

BUILD_ENV = {"UV_LINK_MODE": "copy", "UV_COMPILE_BYTECODE": "1"}
"""No file is shared with a cache that jobs may write, and all byte code is there: jobs cannot add to it."""


class EnvironmentFailed(SwarmError):
    """The requirements could not be installed; nothing is kept.  `output` are the last lines of the installer.

    `error` is what this node's system has refused, where it is not the installer that failed.
    """

    code = "environment"

    def __init__(self, problem: str, output: str = "", error: OSError | None = None) -> None:
        self.problem, self.output, self.error = problem, output, error
        self.remedy = "correct the requirements file, or use an environment of the nodes with --venv"
        super().__init__(f"environment build failed: {problem}")


@dataclass(slots=True)
class _Build:
    task: "asyncio.Task[Path]"
    waiting: int = 0


@dataclass(slots=True)
class EnvironmentStore:
    """Builds and keeps environments.

    `python`: the interpreter they are made from; `base_env`: what pip may see; `directory` is made by it, and another
    beside it for the marks.
    """

    directory: Path
    python: str
    base_env: Mapping[str, str]
    limit_bytes: int = 50 * 2**30
    timeout_s: float = 1_800.0
    uv: str | None = field(default_factory=lambda: shutil.which("uv"))
    _builds: dict[str, _Build] = field(default_factory=dict)
    _version: str = ""
    held_bytes: int | None = None  # by all of them; unknown until they were looked at

    async def ensure(self, requirements: bytes, account: Account, in_use: Collection[Path] = ()) -> Path:
        """The environment of these requirements, built if need be; jobs that ask meanwhile share the build.

        Personal accounts have environments of their own: whose build it is can write to it until it is done.

        When the last of them is cancelled the build ends too.  Raises `EnvironmentFailed`.
        """
        name = await self.name_of(requirements, account)
        while (build := self._builds.get(name)) and build.task.cancelling():
            await asyncio.wait([build.task])  # it is tidying up the folder that the next build will use
        if build is None:
            build = _Build(asyncio.create_task(self._obtain(name, requirements, account, in_use)))
            self._builds[name] = build
            build.task.add_done_callback(lambda _: self._builds.pop(name, None))
        build.waiting += 1
        try:
            return await asyncio.shield(build.task)
        finally:
            build.waiting -= 1
            if not build.waiting and not build.task.done():
                build.task.cancel()
                with suppress(asyncio.CancelledError):
                    await build.task

    async def name_of(self, requirements: bytes, account: Account) -> str:
        """The hash under which these requirements are kept for an account."""
        if not self._version:
            try:
                code, output = await self._run([self.python, "-c", "import sys; print(sys.version)"], PROBE_S)
            except OSError as error:
                raise EnvironmentFailed(f"the interpreter {self.python} does not run", str(error), error) from error
            if code:
                broken = OSError(errno.ENOEXEC, f"{self.python} ends with {code}")
                raise EnvironmentFailed(f"the interpreter {self.python} does not run", output, broken)
            self._version = output
        whose = f"\0{account.uid}" if account.is_personal else ""
        return hashlib.sha256(requirements + f"\0{self._version}{whose}".encode()).hexdigest()[:32]

    def path(self, name: str) -> Path | None:
        """The finished environment of that name, or None."""
        path = self.directory / name
        return path if self._mark(name).exists() and path.is_dir() else None

    async def _obtain(self, name: str, requirements: bytes, account: Account, in_use: Collection[Path]) -> Path:
        path = self.path(name)
        if path:
            os.utime(self._mark(name))
            return path
        path, mark = self.directory / name, self._mark(name)
        make_folder(self.directory, 0o711)
        mark.parent.mkdir(mode=0o700, exist_ok=True)
        mark.unlink(missing_ok=True)
        await asyncio.to_thread(remove_tree, path)
        try:
            await self._build(path, requirements, account)
            size_bytes = await asyncio.to_thread(_take_over, path, account.uid)
            document = {"size_bytes": size_bytes, "built_utc_s": time.time()}
            await asyncio.to_thread(_write_mark, mark, document)
        except OSError as error:
            await asyncio.to_thread(remove_tree, path)
            raise EnvironmentFailed(f"{error.strerror or error} at {path}", error=error) from error
        except BaseException:
            await asyncio.shield(asyncio.to_thread(remove_tree, path))
            raise
        await asyncio.to_thread(self._evict, {path, *in_use})
        return path

    def _mark(self, name: str) -> Path:
        return self.directory.with_name(f"{self.directory.name}-done") / f"{name}.json"

    async def _build(self, path: Path, requirements: bytes, account: Account) -> None:
        make_folder(path, 0o755)
        wanted = path / "requirements.txt"
        wanted.write_bytes(requirements)
        wanted.chmod(0o644)
        if account.uid >= 0:
            os.chown(path, account.uid, account.gid)
        inner = str(path / "bin" / "python")
        if self.uv and (await self._run([self.uv, "--version"], PROBE_S))[0]:
            self.uv = None  # what is found may be a shim of a version manager, which does not run
        if self.uv:
            steps = [
                [self.uv, "venv", "--quiet", "--allow-existing", "--python", self.python, str(path)],
                [self.uv, "pip", "install", "--python", inner, "-r", str(wanted)],
            ]
        else:
            pip = [inner, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
            steps = [[self.python, "-I", "-m", "venv", str(path)], [*pip, "-r", str(wanted)]]
        deadline_s = time.monotonic() + self.timeout_s
        for step in steps:
            code, output = await self._run(step, deadline_s - time.monotonic(), account, cwd=path)
            if code:
                what = " ".join(Path(step[0]).name if word is step[0] else word for word in step[:4])
                last = output.strip().rpartition("\n")[2]
                full = OSError(errno.ENOSPC, last) if any(each in output for each in NO_ROOM) else None
                raise EnvironmentFailed(f"{what} ended with {code}" + (f": {last[:300]}" if last else ""), output, full)

    async def _run(
        self, argv: list[str], timeout_s: float, account: Account | None = None, cwd: Path | None = None
    ) -> tuple[int, str]:
        """Run to the end; exit code and the last lines of output."""
        ids = ",".join(map(str, (account.uid, account.gid, *account.groups))) if account else "-1,-1"
        own = {"HOME": account.home, "USER": account.name} if account else {}
        if account and "PATH" in self.base_env:
            own["PATH"] = passable_path(self.base_env["PATH"], account)
        output = b""
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(self.python, "-I", "-S", shim.__file__, "confine", ids, *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**self.base_env, **own, **BUILD_ENV},
                cwd=cwd,
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A start that is cancelled kills the one that confines at once, who then ends nothing of what it has begun.
            await _end(await starting)
            raise
        assert process.stdout is not None
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                while data := await process.stdout.read(OUTPUT_BYTES):
                    output = (output + data)[-OUTPUT_BYTES:]
                return await process.wait(), output.decode("utf-8", "replace")
        except TimeoutError as error:
            raise EnvironmentFailed(
                f"not done within {self.timeout_s:g} s", output.decode("utf-8", "replace")
            ) from error
        finally:
            await _end(process)

    def measure(self) -> None:
        """Learn what they take; for a worker thread, once: each build tells it anew."""
        if self.held_bytes is None:
            marks = filter(None, map(_read_mark, self._mark("").parent.glob("*.json")))
            self.held_bytes = sum(size_bytes for _, _, size_bytes in marks)

    def _evict(self, keep: Collection[Path]) -> None:
        """Remove the least recently used while all are larger than the limit, and those with a damaged mark."""
        found = sorted(filter(None, map(_read_mark, self._mark("").parent.glob("*.json"))))
        total = sum(size_bytes for _, _, size_bytes in found)
        for _, mark, size_bytes in found:
            path = self.directory / mark.stem
            if path not in keep and (total > self.limit_bytes or not size_bytes):
                mark.unlink(missing_ok=True)
                remove_tree(path)
                total -= size_bytes
        self.held_bytes = total


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all that it has begun."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.shield(process.wait())


def _read_mark(mark: Path) -> tuple[float, Path, int] | None:
    """When the environment was last used, its mark, and its size, 0 where the mark is damaged; nothing of one that has
    gone this instant, for its environment is being built again."""
    try:
        return mark.stat().st_mtime, mark, int(json.loads(mark.read_text())["size_bytes"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, mark, 0


def _write_mark(mark: Path, document: Mapping[str, object]) -> None:
    """After the environment itself is on disk: a power cut leaves no mark of one that is empty.  Raises OSError."""
    os.sync()
    draft = mark.with_suffix(".new")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(mark)


def default_python() -> str:
    """The interpreter under the agent's own virtual environment."""
    return getattr(sys, "_base_executable", "") or sys.executable


def _take_over(folder: Path, uid: int) -> int:
    """Give what account `uid` has built to this process's account, readable for all; its size in bytes.

    Each folder before what is in it, by open folders and never through links: the account cannot swap or add anything
    on the way.  With uid -1, the agent's own, it only measures.  Raises OSError.
    """
    size_bytes = 0
    above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _own(folder.name, uid, above)
    finally:
        os.close(above)
    for _, folders, others, here in os.fwalk(folder):
        for name in (*folders, *others):
            size_bytes += os.stat(name, dir_fd=here, follow_symlinks=False).st_size
            _own(name, uid, here)
    return size_bytes


def _own(name: str, uid: int, here: int) -> None:
    """Only what the account has made: a hard link may lead to a file of somebody else's."""
    found = os.stat(name, dir_fd=here, follow_symlinks=False)
    if found.st_uid != uid:
        return
    if stat.S_ISLNK(found.st_mode):
        os.chown(name, os.geteuid(), os.getegid(), dir_fd=here, follow_symlinks=False)
    elif not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        os.unlink(name, dir_fd=here)  # a pipe, a socket or a device is no part of an environment
    else:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
        try:
            os.fchown(opened, os.geteuid(), os.getegid())
            is_folder = stat.S_ISDIR(found.st_mode)
            os.fchmod(opened, found.st_mode & 0o755 | (0o555 if is_folder else 0o444))
        finally:
            os.close(opened)

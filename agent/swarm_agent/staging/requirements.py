"""Python environments built from a requirements file, one per content, shared by all jobs of this node.

An environment lives at DATA/envs/<hash>, the hash over the requirements' text and the interpreter's version.  It is
built in place, since virtual environments cannot be moved, and counts only once its `.complete` file is written; a
build that fails or is abandoned is removed, so the next job tries again.
"""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from swarm_agent.supervision.environment import Account
from swarmsched.errors import SwarmError

OUTPUT_BYTES = 2**16  # of an installer, its last words
COMPLETE = ".complete"

# Becoming another user is done by the child itself: uvloop's subprocesses cannot.
_AS_USER = (
    "import os,sys;u,g,*gs=map(int,sys.argv[1].split(','));"
    "u<0 or (os.setgroups(gs),os.setgid(g),os.setuid(u));os.execv(sys.argv[2],sys.argv[2:])"
)


class EnvironmentFailed(SwarmError):
    """The requirements could not be installed; nothing is kept.  `output` are the last lines of the installer."""

    code = "environment"

    def __init__(self, problem: str, output: str = "") -> None:
        self.problem, self.output = problem, output
        self.remedy = "correct the requirements file, or use an environment of the nodes with --venv"
        super().__init__(f"environment build failed: {problem}")


@dataclass(slots=True)
class _Build:
    task: "asyncio.Task[Path]"
    waiting: int = 0


@dataclass(slots=True)
class EnvironmentStore:
    """Builds and keeps environments.  `python`: the interpreter they are made from; `base_env`: what pip may see."""

    directory: Path
    python: str
    base_env: Mapping[str, str]
    limit_bytes: int = 50 * 2**30
    timeout_s: float = 1_800.0
    uv: str | None = field(default_factory=lambda: shutil.which("uv"))
    _builds: dict[str, _Build] = field(default_factory=dict)
    _version: str = ""

    async def ensure(self, requirements: bytes, account: Account, in_use: Collection[Path] = ()) -> Path:
        """The environment of these requirements, built if need be; jobs that ask meanwhile share the build.

        When the last of them is cancelled the build ends too.  Raises `EnvironmentFailed`.
        """
        name = await self.name_of(requirements)
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

    async def name_of(self, requirements: bytes) -> str:
        """The hash under which these requirements are kept."""
        if not self._version:
            try:
                code, output = await self._run([self.python, "-c", "import sys; print(sys.version)"], 30.0)
            except OSError as error:
                code, output = 127, str(error)
            if code:
                raise EnvironmentFailed(f"the interpreter {self.python} does not run", output)
            self._version = output
        return hashlib.sha256(requirements + b"\0" + self._version.encode()).hexdigest()[:32]

    def path(self, name: str) -> Path | None:
        """The finished environment of that name, or None."""
        path = self.directory / name
        return path if (path / COMPLETE).exists() else None

    async def _obtain(self, name: str, requirements: bytes, account: Account, in_use: Collection[Path]) -> Path:
        path = self.path(name)
        if path:
            os.utime(path / COMPLETE)
            return path
        path = self.directory / name
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        try:
            await self._build(path, requirements, account)
            size_bytes = await asyncio.to_thread(_tree_bytes, path)
            document = {"size_bytes": size_bytes, "built_utc_s": time.time()}
            (path / COMPLETE).write_text(json.dumps(document))
        except OSError as error:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            raise EnvironmentFailed(f"{error.strerror or error} at {path}") from error
        except BaseException:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, path, ignore_errors=True))
            raise
        await asyncio.to_thread(self._evict, {path, *in_use})
        return path

    async def _build(self, path: Path, requirements: bytes, account: Account) -> None:
        path.mkdir(mode=0o755)
        wanted = path / "requirements.txt"
        wanted.write_bytes(requirements)
        if account.uid >= 0:
            os.chown(path, account.uid, account.gid)
        inner = str(path / "bin" / "python")
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
                raise EnvironmentFailed(f"{what} ended with {code}" + (f": {last[:300]}" if last else ""), output)

    async def _run(
        self, argv: list[str], timeout_s: float, account: Account | None = None, cwd: Path | None = None
    ) -> tuple[int, str]:
        """Run to the end; exit code and the last lines of output."""
        ids = ",".join(map(str, (account.uid, account.gid, *account.groups))) if account else "-1,-1"
        home = {"HOME": account.home, "USER": account.name} if account else {}
        output = b""
        process = await asyncio.create_subprocess_exec(
            *(self.python, "-I", "-S", "-c", _AS_USER, ids, shutil.which(argv[0]) or argv[0], *argv[1:]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self.base_env, **home},
            cwd=cwd,
            start_new_session=True,
        )
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
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.shield(process.wait())

    def _evict(self, keep: Collection[Path]) -> None:
        """Remove the least recently used while all are larger than the limit."""
        finished = sorted(self.directory.glob(f"*/{COMPLETE}"), key=lambda path: path.stat().st_mtime)
        sizes = {path.parent: int(json.loads(path.read_text())["size_bytes"]) for path in finished}
        total = sum(sizes.values())
        for path, size_bytes in sizes.items():
            if total <= self.limit_bytes:
                return
            if path not in keep:
                (path / COMPLETE).unlink()
                shutil.rmtree(path, ignore_errors=True)
                total -= size_bytes


def default_python() -> str:
    """The interpreter under the agent's own virtual environment."""
    return getattr(sys, "_base_executable", "") or sys.executable


def _tree_bytes(path: Path) -> int:
    return sum(entry.lstat().st_size for entry in path.rglob("*"))

"""A process that waits with torch imported becomes the next worker and is then like any other."""

import dataclasses
import fcntl
import os
import signal
import subprocess
import venv
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm_agent.supervision.limits import TaskLimits
from swarm_agent.supervision.warm import PREFIX, REQUEST_BYTES_MAX, has_ended, warm_start
from swarm_agent.task import shim
from swarm_agent.task.account import Account
from swarmsched.effects import SignalTask, StartTask, StopTask
from swarmsched.events import TaskExited, TaskStarted
from swarmsched.ids import NodeId
from swarmsched.resources import Share
from swarmsched.task import RankExit, TaskOrder
from tests.agent.supervision.testing import Bench, make_order
from tests.agent.testing import wait_until

SCRIPT = """
import os, sys, time
told = "torch" in sys.modules, os.getcwd(), sys.argv, os.environ["SWARM_WORKER"], oct(os.umask(0)), sys.stdin.read()
print(*told, sep="|")
print("error", file=sys.stderr)
if sys.argv[1:] == ["wait"]:
    time.sleep(60)
sys.exit(3)
"""
STUB_OF_TORCH = """
class Names(type):
    def __getattr__(cls, name):
        return Anything
    def __getitem__(cls, key):
        return Anything
class Anything(metaclass=Names):
    pass
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
def set_num_threads(count):
    pass
"""
ENV = {"PATH": "/bin", "HOME": "/"}
NO_LIMITS = TaskLimits(0, "none here")
OWN = Account("me", "/", "/bin/sh")


@pytest.fixture
async def bench(tmp_path: Path):
    async with Bench(tmp_path / "data") as bench:
        yield bench


@pytest.fixture(scope="session")
def stub_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that finds a torch without anything to compute with: what waits imports it in a moment."""
    folder = tmp_path_factory.mktemp("stub") / "venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("__init__", "distributed", "_dynamo", "utils/__init__", "utils/data"):
        path = site / "torch" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STUB_OF_TORCH)
    return folder / "bin" / "python"


@pytest.fixture
def first(stub_python: Path, tmp_path: Path) -> TaskOrder:
    """The order of a worker that runs until it is stopped."""
    return first_worker(stub_python, tmp_path)


@pytest.fixture
def first_with_torch(train_venv: Path, tmp_path: Path) -> TaskOrder:
    """The same, and what waits beside it has imported a real torch."""
    return first_worker(train_venv / "bin" / "python", tmp_path)


def first_worker(python: Path, folder: Path) -> TaskOrder:
    (folder / "train.py").write_text(SCRIPT)
    return worker(str(python), "train.py", "wait", workdir=str(folder), umask=0o027)


def worker(*command: str, **spec) -> TaskOrder:
    return replace(make_order(*command, **spec), part=1, shares=(Share(NodeId("n1"), 1, part=1),))


def another(first: TaskOrder, part: int, *arguments: str) -> TaskOrder:
    """A newcomer of the same job."""
    command = (*first.spec.command[:2], *arguments)
    return replace(
        first, part=part, shares=(Share(NodeId("n1"), 1, part=part),), spec=replace(first.spec, command=command)
    )


async def run(bench: Bench, order: TaskOrder) -> None:
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for(TaskStarted, order.key)


async def one_waits(bench: Bench, first: TaskOrder) -> int:
    """Start the first, and have one wait beside it; the pid of that one's shim."""
    await run(bench, first)
    adjust(bench)
    await wait_until(lambda: len(bench.runner.warm) == 1)
    return bench.runner.warm._waiting[0].pid


def adjust(bench: Bench) -> None:
    bench.runner.warm.adjust(bench.runner._warm_starts(), bench.runner._server, NO_LIMITS)


def is_alive(pid: int) -> bool:
    fields = shim.read_stat(pid)
    return bool(fields and fields[0] != b"Z")


def left(bench: Bench) -> list[Path]:
    return [*(bench.config.data_dir / "tasks").glob(f"{PREFIX}*")]


async def told(bench: Bench, order: TaskOrder) -> list[str]:
    """What the script has printed, field by field, once the worker has ended."""
    exited = await bench.finish(order)
    assert exited.exits == (RankExit(order.first_rank, 3),)
    out, err = bench.output(order, order.first_rank).decode().splitlines()
    assert err == "error"
    return out.split("|")


async def test_a_newcomer_is_what_has_waited_and_is_like_any_other(bench: Bench, first_with_torch: TaskOrder) -> None:
    first = first_with_torch
    pid = await one_waits(bench, first)
    second = another(first, 2, "--now", "é\x01")
    await run(bench, second)
    facts = bench.runner._tasks[second.key].link.facts
    assert facts.shim_pid == pid
    assert not left(bench)
    was_imported, *rest = await told(bench, second)
    assert was_imported == "True"
    assert rest == [first.spec.workdir, repr(["train.py", "--now", "é\x01"]), "2", "0o27", ""]
    await wait_until(lambda: not is_alive(pid))


async def test_once_it_has_its_task_it_outlives_the_fork_server_as_others_do(bench: Bench, first: TaskOrder) -> None:
    pid = await one_waits(bench, first)
    second = another(first, 2, "wait")
    await run(bench, second)
    (rank,) = bench.runner._tasks[second.key].link.facts.rank_starts
    server = bench.runner._server.pid
    os.kill(server, signal.SIGKILL)
    await wait_until(lambda: not is_alive(server))
    bench.runner.perform(
        SignalTask(second.job_id, 1, signal.SIGUSR2, part=2)
    )  # obeyed, so all that came before as well
    exited: TaskExited = await bench.finish(second)
    assert [each.signal for each in exited.exits] == [signal.SIGUSR2]
    await wait_until(lambda: not is_alive(pid) and not is_alive(rank))


async def test_one_whose_shim_is_killed_while_it_waits_ends_with_it(bench: Bench, first: TaskOrder) -> None:
    """It stands still, so it would never read that nobody is there any more."""
    pid = await one_waits(bench, first)
    (waiting,) = shim.listed_children(pid)
    os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: not is_alive(waiting))


async def test_it_is_stopped_like_any_other(bench: Bench, first_with_torch: TaskOrder) -> None:
    """Its threads are those of a real torch."""
    first = first_with_torch
    await one_waits(bench, first)
    second = another(first, 2, "wait")
    await run(bench, second)
    (rank,) = bench.runner._tasks[second.key].link.facts.rank_starts
    assert os.getsid(rank) == rank
    assert rank in bench.runner.processes()
    threads = [int(path.name) for path in Path(f"/proc/{rank}/task").iterdir()]
    assert {os.getpriority(os.PRIO_PROCESS, each) for each in threads} == {os.getpriority(os.PRIO_PROCESS, 0)}
    bench.runner.perform(StopTask(second.job_id, 1, 0.2, part=2))
    exited: TaskExited = await bench.finish(second)
    assert [each.signal for each in exited.exits] == [signal.SIGTERM]


async def test_one_that_does_not_answer_is_replaced_by_an_ordinary_start(
    bench: Bench, first: TaskOrder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = "import os, sys, time\nif 'template' in str(sys.orig_argv):\n    os.chdir = lambda path: time.sleep(60)"
    (tmp_path / "sitecustomize.py").write_text(stuck)
    first = replace(first, spec=replace(first.spec, env={"PYTHONPATH": str(tmp_path)}))
    pid = await one_waits(bench, first)
    (process,) = shim.listed_children(pid)
    second = another(first, 2)
    await run(bench, second)
    assert (await told(bench, second))[0] == "False"
    assert not is_alive(process)
    assert "what waited does not answer" in caplog.text


async def test_a_script_that_is_not_there_is_told_as_ever(bench: Bench, first: TaskOrder) -> None:
    await one_waits(bench, first)
    second = another(first, 2)
    second = replace(second, spec=replace(first.spec, command=(first.spec.command[0], "gone.py")))
    await run(bench, second)
    assert (await bench.finish(second)).exits[0].exit_code == 2
    assert b"can't open file" in bench.output(second, second.first_rank)


async def test_one_that_dies_while_it_waits_is_replaced(bench: Bench, first: TaskOrder) -> None:
    pid = await one_waits(bench, first)
    (process,) = shim.listed_children(pid)
    os.kill(process, signal.SIGKILL)
    await wait_until(lambda: not is_alive(pid))
    await wait_until(lambda: not left(bench))
    adjust(bench)
    await wait_until(lambda: len(bench.runner.warm) == 1)


async def test_where_nothing_can_be_imported_nothing_waits(bench: Bench, tmp_path: Path, stub_python: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    (tmp_path / "train.py").write_text("import time; time.sleep(60)")
    env = {"PYTHONPATH": str(tmp_path)}
    order = worker(str(stub_python), "train.py", workdir=str(tmp_path), env=env)
    await run(bench, order)
    adjust(bench)
    assert left(bench)
    await wait_until(lambda: not left(bench))
    adjust(bench)
    assert not left(bench)
    second = replace(another(order, 2), spec=replace(order.spec, command=(*order.spec.command[:1], "-c", "print(1)")))
    await run(bench, second)
    assert not (await bench.finish(second)).exits[0].exit_code


async def test_it_ends_with_the_agent_and_the_next_one_begins_anew(first: TaskOrder, tmp_path: Path) -> None:
    async with Bench(tmp_path / "data") as bench:
        pid = await one_waits(bench, first)
        (process,) = shim.listed_children(pid)
        bench.runner.warm._waiting.clear()  # as if the agent had been killed
        await bench.runner.stop()
        await wait_until(lambda: not is_alive(pid) and not is_alive(process))
        assert left(bench)
        async with Bench(tmp_path / "data") as later:
            assert not left(later)
            adjust(later)  # for a worker of the earlier life
            assert left(later)
            later.runner.perform(StopTask(first.job_id, 1, 0.0, part=1))
            await later.finish(first)


async def test_there_are_no_more_than_allowed_and_none_for_long_without_a_worker(
    bench: Bench, first: TaskOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = await one_waits(bench, first)
    adjust(bench)
    (old,) = left(bench)
    found = warm_start(first.spec.command, ENV, OWN)
    assert found
    other = found[0]
    bench.runner.warm.adjust([], bench.runner._server, NO_LIMITS)
    assert is_alive(pid), "it may be needed again"
    bench.runner.warm.adjust([other], bench.runner._server, NO_LIMITS)
    assert [each for each in left(bench) if each != old], "it makes room for what is needed now"
    await wait_until(lambda: not is_alive(pid))
    monkeypatch.setattr("swarm_agent.supervision.warm.KEPT_S", -1.0)
    bench.runner.warm.adjust([], bench.runner._server, NO_LIMITS)
    await wait_until(lambda: not left(bench))


async def test_what_its_shim_adds_while_it_is_removed_keeps_no_folder(
    bench: Bench, first: TaskOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await one_waits(bench, first)
    (directory,) = left(bench)
    remove = os.rmdir

    def remove_late(path: str, **given) -> None:
        with suppress(FileNotFoundError):
            (directory / "ready").touch()
        remove(path, **given)

    monkeypatch.setattr(os, "rmdir", remove_late)
    bench.runner.warm.stop()
    assert not left(bench)


STRAYS = """
import os, subprocess, sys, threading, time
if "template" in str(sys.orig_argv):
    def go_on():
        while True:
            with open("{out}", "a") as file:
                start = ["sh", "-c", "sleep 1000 & echo $!"]  # its parent is gone at once, as a daemon's is
                subprocess.run(start, start_new_session=True, env={}, stdout=file)
            time.sleep(0.05)
    threading.Thread(target=go_on, daemon=True).start()
"""


@pytest.mark.parametrize("end", ["cancel", "killed"])
async def test_code_of_a_job_that_runs_while_it_waits_ends_with_it(tmp_path: Path, first: TaskOrder, end: str) -> None:
    """A thread of its imports that starts daemons goes on until all is imported, and leaves nothing."""
    (tmp_path / "sitecustomize.py").write_text(STRAYS.replace("{out}", str(tmp_path / "out")))
    secret = {"PYTHONPATH": str(tmp_path), "WANDB_API_KEY": "hush", "MY_NAME": "x", "LC_ALL": "C"}
    first = replace(first, spec=replace(first.spec, env=secret))
    async with Bench(tmp_path / "data") as bench:
        pid = await one_waits(bench, first)
        (process,) = (child for child in shim.listed_children(pid) or () if is_alive(child))
        environment = Path(f"/proc/{process}/environ").read_bytes()
        assert b"LC_ALL=C" in environment
        assert b"hush" not in environment
        assert b"MY_NAME" not in environment
        fields = shim.read_stat(process)
        assert fields
        assert fields[0] == b"T", "it stands still"
        before = (tmp_path / "out").read_text()
        strays = {int(line) for line in before.splitlines()}
        assert strays
        assert not any(map(is_alive, strays))
        if end == "cancel":
            bench.runner.perform(StopTask(first.job_id, 1, 0.0, part=1))
            await bench.finish(first)
        else:
            os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not is_alive(pid) and not is_alive(process))
        assert (tmp_path / "out").read_text() == before


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (("python", "train.py", "-x"), ("train.py", "-x")),
        (("/venv/bin/python3.11", "-u", "/a/train.py"), ("/a/train.py",)),
        (("python3", "-m", "package.train", "1"), ("-m", "package.train", "1")),
        (("python", "-X", "dev", "train.py"), None),
        (("python", "-c", "1", "x"), ("-c", "1", "x")),
        (("python", "-"), None),
        (("python", "-m"), None),
        (("python",), None),
        (("venv/bin/python", "train.py"), None),
        (("torchrun", "train.py"), None),
        (("pythonic", "train.py"), None),
        (("python", "train.py", "x" * REQUEST_BYTES_MAX), None),
    ],
)
def test_what_can_be_started_warm(command: tuple[str, ...], argv: tuple[str, ...] | None) -> None:
    found = warm_start(command, ENV, OWN)
    assert (found and found[1]) == argv


def test_what_tasks_have_of_their_own_makes_no_difference() -> None:
    command = ("python", "train.py")
    own = {"SWARM_WORKER": "7", "CUDA_VISIBLE_DEVICES": "GPU-1", "OMP_NUM_THREADS": "3", "LOCAL_RANK": "0"}
    plain = warm_start(command, ENV, OWN)
    assert warm_start(command, ENV | own, OWN) == plain
    assert warm_start(command, ENV | {"LD_PRELOAD": "x.so"}, OWN) != plain
    assert warm_start(command, ENV | {"AWS_REGION": "x", "HF_TOKEN": "y", "PYTHON_TOKEN": "z"}, OWN) == plain
    assert warm_start(command, ENV, dataclasses.replace(OWN, uid=5)) != plain


async def test_modules_and_texts_run_as_python_runs_them(bench: Bench, first: TaskOrder, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import sys; print(sys.argv[1:], __name__, sys.path[0])")
    text = "import sys, module; print(sys.argv, __name__, sys.path[0] or 'here'); raise ValueError('bad')"
    python = first.spec.command[0]
    await one_waits(bench, first)
    module = another(first, 2)
    module = replace(module, spec=replace(first.spec, command=(python, "-m", "module", "a")))
    await run(bench, module)
    await bench.finish(module)
    assert bench.output(module, module.first_rank).decode() == f"['a'] __main__ {tmp_path}\n"
    adjust(bench)
    await wait_until(lambda: len(bench.runner.warm) == 1)
    said = replace(another(first, 3), spec=replace(first.spec, command=(python, "-c", text, "a")))
    await run(bench, said)
    assert (await bench.finish(said)).exits[0].exit_code == 1
    output = bench.output(said, said.first_rank).decode()
    assert "['-c', 'a'] __main__ here\n" in output
    assert output.endswith("ValueError: bad\n")


def test_the_end_of_a_process_is_seen_whatever_the_number_of_its_descriptor() -> None:
    child = subprocess.Popen(["sleep", "60"])
    low = os.pidfd_open(child.pid)
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1_100)
    try:
        assert not has_ended(high)
        child.kill()
        assert has_ended(high, limit_s=10.0)
    finally:
        child.wait()
        os.close(low)
        os.close(high)

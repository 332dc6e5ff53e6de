"""Leases: ranks stop when their time is over, with or without an agent, and go on when there is more.

Where the state of a rank is looked at its shell must not be forking: a parent whose child is stopped within vfork
shows as waiting (D), not as stopped (T).
"""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarm_agent.supervision.orders import directory_name, order_to_json
from swarm_agent.task import shim
from swarmsched.effects import ExtendAttempt, SignalTask, StartTask, StopTask
from swarmsched.events import TaskFreezeChanged, TaskStarted
from swarmsched.ids import TaskKey
from swarmsched.task import RankExit, TaskOrder
from tests.agent.supervision.testing import DEADLINE_S, Bench, make_order

LONG_S = 3_600.0
SHORT_S = 3.0  # over within a test, and long enough for a shim that is given little of the processor


@pytest.fixture
async def bench(tmp_path: Path):
    async with Bench(tmp_path / "data") as bench:
        yield bench


def state(pid: int) -> bytes:
    fields = shim.read_stat(pid)
    return fields[0] if fields else b""


async def until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def is_pending(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd"))
    return bool(mask >> (number - 1) & 1)


def start(bench: Bench, script: str, lease_s: float = LONG_S, **spec) -> TaskOrder:
    order = make_order("sh", "-c", script, **spec)
    bench.runner.perform(StartTask(order, (), until_s=shim.now() + lease_s))
    return order


def extend(bench: Bench, order: TaskOrder, lease_s: float) -> None:
    bench.runner.perform(ExtendAttempt(order.job_id, order.attempt, shim.now() + lease_s))


async def frozen(bench: Bench, order: TaskOrder, count: int = 1) -> None:
    """Wait for the `count`-th change, which must be a freeze."""
    change = await bench.wait_for(TaskFreezeChanged, order.key, count)
    assert change.is_frozen


async def thawed(bench: Bench, order: TaskOrder, count: int = 2) -> None:
    change = await bench.wait_for(TaskFreezeChanged, order.key, count)
    assert not change.is_frozen


def status(bench: Bench, order: TaskOrder):
    return bench.runner._tasks[order.key].status()


async def test_ranks_freeze_at_their_deadline_and_go_on_after_an_extension(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    order = start(bench, f"read line < {go}; echo on; exit 4", lease_s=0.4)
    await frozen(bench, order)
    (root,) = bench.runner.own_pids()
    (pid,) = shim.listed_children(root)
    await until(lambda: state(pid) == b"T")
    assert status(bench, order).is_frozen
    extend(bench, order, LONG_S)
    await thawed(bench, order)
    await asyncio.to_thread(go.write_text, "go\n")
    exited = await bench.finish(order)
    assert exited.exits == (RankExit(0, 4),)
    assert bench.output(order) == b"on\n"
    assert not status(bench, order).is_frozen


async def test_an_extension_in_time_keeps_ranks_from_freezing(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"trap 'echo told' USR1; echo up; while [ ! -e {go} ]; do sleep 0.01; done"
    order = start(bench, script)
    await bench.wait_for_output(order, b"up")
    over_s = time.monotonic() + SHORT_S
    extend(bench, order, SHORT_S)
    bench.runner.perform(SignalTask(order.job_id, 1, signal.SIGUSR1))  # obeyed after the other one
    await bench.wait_for_output(order, b"told")
    extend(bench, order, LONG_S)
    await until(lambda: time.monotonic() > over_s + 0.5)
    go.touch()
    assert (await bench.finish(order)).exits == (RankExit(0, 0),)
    assert not any(isinstance(event, TaskFreezeChanged) for event in bench.events)


async def test_nothing_starts_once_its_time_is_over_and_all_does_once_there_is_more(
    bench: Bench, tmp_path: Path
) -> None:
    """The start was performed long after it was decided: another attempt may be running."""
    order = make_order("mkdir", str(tmp_path / "made"))
    bench.runner.perform(StartTask(order, (), until_s=shim.now() - 10.0))
    await frozen(bench, order)
    assert not (tmp_path / "made").exists()
    extend(bench, order, LONG_S)
    assert (await bench.finish(order)).exits == (RankExit(0, 0),)
    assert (tmp_path / "made").exists()


async def test_a_stop_ends_what_waits_for_its_time_without_starting_it(bench: Bench, tmp_path: Path) -> None:
    order = make_order("mkdir", str(tmp_path / "made"))
    bench.runner.perform(StartTask(order, (), until_s=0.0))
    await frozen(bench, order)
    bench.runner.perform(StopTask(order.job_id, 1, 5.0))
    assert (await bench.finish(order)).exits == ()
    assert not (tmp_path / "made").exists()


async def test_a_sooner_time_freezes_at_once(bench: Bench) -> None:
    order = start(bench, "echo up; exec sleep 600")
    await bench.wait_for_output(order, b"up")
    extend(bench, order, 0.0)
    await frozen(bench, order)


async def test_an_extension_before_the_launch_is_the_one_that_counts(bench: Bench, tmp_path: Path) -> None:
    order = make_order("sh", "-c", "echo up; exec sleep 600")
    bench.runner.perform(StartTask(order, (), until_s=math.inf))
    bench.runner.perform(ExtendAttempt(order.job_id, 1, 0.0))
    await frozen(bench, order)


async def test_children_and_daemons_of_ranks_freeze_too(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    script = f"""
        cd {folder}
        (setsid sh -c 'echo $$ > daemon.new; mv daemon.new daemon; exec sleep 600' &) &
        sh -c 'echo $$ > child.new; mv child.new child; exec sleep 600' &
        echo $$ > self.new; mv self.new self; exec sleep 600
    """
    order = start(bench, script)
    await until(lambda: {"self", "child", "daemon"} <= {path.name for path in folder.iterdir()})
    pids = [int((folder / name).read_text()) for name in ("self", "child", "daemon")]
    extend(bench, order, 0.0)
    await frozen(bench, order)
    await until(lambda: all(state(pid) == b"T" for pid in pids))
    extend(bench, order, LONG_S)
    await thawed(bench, order)
    await until(lambda: all(state(pid) != b"T" for pid in pids))


FORKER = """
import os, sys, time
count, end_s = int(sys.argv[1]), time.monotonic() + 30  # no test may leave it behind for ever
print("up", flush=True)
while time.monotonic() < end_s:
    pid = os.fork()
    if pid:
        os._exit(0) if count else os.waitpid(pid, 0)
    count += 1
"""


async def test_a_process_that_forks_on_and_on_is_caught(bench: Bench) -> None:
    script = f"{sys.executable} -c '{FORKER}' 1 & exec sleep 600"
    order = start(bench, script)
    await bench.wait_for_output(order, b"up")
    extend(bench, order, 0.0)
    await frozen(bench, order)
    (root,) = bench.runner.own_pids()

    def running() -> list[int]:
        return [pid for pid, _, kind in shim.descendants(root) if kind not in shim.NOT_RUNNING]

    await until(lambda: not running())
    assert len(shim.descendants(root)) >= 2


def test_a_long_list_of_children_is_read_to_its_end(tmp_path: Path) -> None:
    """A pid that was cut off at the end of a buffer would be somebody else's."""
    pids = b" ".join(b"%d" % pid for pid in range(100_000, 130_000))
    (tmp_path / "children").write_bytes(pids)
    assert shim.read_file(str(tmp_path / "children")) == pids
    assert shim.read_file(str(tmp_path / "none")) == b""


def test_the_kernels_lists_of_children_agree_with_a_look_at_all_processes() -> None:
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    try:
        everybody = [pid for pid, _, _ in shim.processes_by_parent()[os.getpid()]]
        assert {process.pid for process in processes} <= set(shim.listed_children(os.getpid())) == set(everybody)
        assert shim.listed_children(2**22 + 1) == []
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def test_a_process_that_was_stopped_before_stays_stopped(bench: Bench) -> None:
    order = start(bench, "echo $$; exec sleep 600")
    pid = int(await bench.wait_for_output(order, b"\n"))
    bench.runner.perform(SignalTask(order.job_id, 1, signal.SIGSTOP))
    await until(lambda: state(pid) == b"T")
    extend(bench, order, 0.0)
    await frozen(bench, order)
    extend(bench, order, LONG_S)
    await thawed(bench, order)
    assert state(pid) == b"T"


async def test_the_thaw_lets_go_on_what_the_freeze_stopped_and_nobody_else(bench: Bench) -> None:
    order = start(bench, "sleep 600 & echo $! $$; exec sleep 600")
    child, pid = map(int, (await bench.wait_for_output(order, b"\n")).split())
    os.kill(child, signal.SIGSTOP)
    await until(lambda: state(child) == b"T")
    extend(bench, order, 0.0)
    await frozen(bench, order)
    extend(bench, order, LONG_S)
    await thawed(bench, order)
    await until(lambda: state(pid) == b"S")
    assert state(child) == b"T"


async def test_a_signal_to_go_on_waits_for_the_thaw(bench: Bench) -> None:
    order = start(bench, "echo $$; exec sleep 600")
    pid = int(await bench.wait_for_output(order, b"\n"))
    bench.runner.perform(SignalTask(order.job_id, 1, signal.SIGSTOP))
    await until(lambda: state(pid) == b"T")
    extend(bench, order, 0.0)
    await frozen(bench, order)
    bench.runner.perform(SignalTask(order.job_id, 1, signal.SIGCONT))
    bench.runner.perform(SignalTask(order.job_id, 1, signal.SIGUSR1))  # obeyed after the other one
    await until(lambda: is_pending(pid, signal.SIGUSR1))
    assert state(pid) == b"T"
    extend(bench, order, LONG_S)
    await thawed(bench, order)
    assert (await bench.finish(order)).exits == (RankExit(0, 0, signal=signal.SIGUSR1),)


async def test_a_stop_with_grace_lets_frozen_ranks_end_in_order_only_once_their_lease_is_extended(bench: Bench) -> None:
    order = start(bench, "trap 'echo saving; exit 7' TERM; echo up; while :; do sleep 0.01; done")
    await bench.wait_for_output(order, b"up")
    extend(bench, order, 0.0)
    await frozen(bench, order)
    bench.runner.perform(StopTask(order.job_id, 1, LONG_S))
    extend(bench, order, LONG_S)
    assert (await bench.finish(order)).exits == (RankExit(0, 7),)
    assert b"saving" in bench.output(order)


@pytest.mark.parametrize("grace_s", [0.3, 0.0])
async def test_a_stop_never_lets_frozen_ranks_run_without_a_lease(bench: Bench, grace_s: float) -> None:
    order = start(bench, "trap 'echo ran' TERM; echo up; while :; do sleep 0.01; done")
    await bench.wait_for_output(order, b"up")
    extend(bench, order, 0.0)
    await frozen(bench, order)
    bench.runner.perform(StopTask(order.job_id, 1, grace_s))
    assert (await bench.finish(order)).exits == (RankExit(0, 0, signal=signal.SIGKILL),)
    assert b"ran" not in bench.output(order)


async def test_ranks_that_freeze_within_their_grace_are_killed_at_its_end(bench: Bench) -> None:
    order = start(bench, "trap 'echo ignored' TERM; echo up; while :; do sleep 0.01; done")
    await bench.wait_for_output(order, b"up")
    bench.runner.perform(StopTask(order.job_id, 1, SHORT_S))
    await bench.wait_for_output(order, b"ignored")
    extend(bench, order, 0.0)
    await frozen(bench, order)
    assert (await bench.finish(order)).exits == (RankExit(0, 0, signal=signal.SIGKILL),)


FIRST_LIFE = """
import asyncio, sys
from pathlib import Path
from swarm_agent.task import shim
from swarm_agent.supervision.orders import order_from_json
from tests.agent.supervision.testing import Bench
from swarmsched.effects import StartTask
from swarmsched.events import TaskStarted

async def main():
    bench = Bench(Path(sys.argv[1]))
    await bench.runner.start()
    order, gpus = order_from_json(Path(sys.argv[2]).read_bytes(), Path(sys.argv[2]))
    bench.runner.perform(StartTask(order, gpus, until_s=shim.now() + float(sys.argv[3])))
    await bench.wait_for(TaskStarted, order.key)
    print("started", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def dead_agent(tmp_path: Path, order: TaskOrder, lease_s: float) -> None:
    """An agent that started this task and was killed at once."""
    path = tmp_path / "order"
    path.write_bytes(order_to_json(order, ()))
    command = [sys.executable, "-c", FIRST_LIFE, str(tmp_path / "data"), str(path), str(lease_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert await asyncio.to_thread(process.stdout.readline) == b"started\n"
    process.kill()
    process.wait()
    process.stdout.close()


def frozen_utc_s(tmp_path: Path, order: TaskOrder) -> float:
    """When the shim says that it froze its ranks; 0 before."""
    facts = tmp_path / "data" / "tasks" / directory_name(TaskKey(order.job_id, 1)) / "facts"
    lines = facts.read_bytes().split(b"\n")
    return next((float(line.split()[1]) for line in lines if line.startswith(b"frozen")), 0.0)


@pytest.fixture
async def afterwards(tmp_path: Path):
    """Ends what a dead agent left, whatever becomes of the test."""
    yield
    async with Bench(tmp_path / "data"):
        pass


@pytest.mark.usefixtures("afterwards")
async def test_ranks_freeze_although_the_agent_is_dead_and_the_next_agent_knows(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    order = make_order("sh", "-c", f"read line < {go}; exit 5")
    await dead_agent(tmp_path, order, lease_s=1.0)
    await until(lambda: frozen_utc_s(tmp_path, order))
    async with Bench(tmp_path / "data") as bench:
        (root,) = bench.runner.own_pids()
        (pid,) = shim.listed_children(root)
        assert state(pid) == b"T"
        (found,) = bench.found
        assert found.is_frozen
        extend(bench, order, LONG_S)
        await thawed(bench, order, 1)
        await asyncio.to_thread(go.write_text, "go\n")
        assert (await bench.finish(order)).exits == (RankExit(0, 5),)


@pytest.mark.usefixtures("afterwards")
async def test_the_freeze_follows_the_deadline_and_does_not_precede_it(tmp_path: Path) -> None:
    """The bound is wide, since no test on a busy machine can be strict."""
    order = make_order("sleep", "600")
    await dead_agent(tmp_path, order, lease_s=0.5)
    await until(lambda: frozen_utc_s(tmp_path, order))
    directory = tmp_path / "data" / "tasks" / directory_name(TaskKey(order.job_id, 1))
    deadline_s = shim.read_lease(str(directory / "lease"), 0.0)
    offset_s = time.time() - shim.now()
    assert 0.0 <= frozen_utc_s(tmp_path, order) - offset_s - deadline_s < 5.0


async def test_a_shim_without_a_lease_file_runs_without_limit(tmp_path: Path) -> None:
    """A shim of an earlier version knows no leases, and its directory has no such file."""
    async with Bench(tmp_path / "data") as bench:
        order = make_order("sh", "-c", "echo up; exec sleep 600")
        bench.runner._tasks[TaskKey(order.job_id, 1)] = task = bench.runner._new_task(order)
        task.link.set_lease = lambda until_s: None
        task.prepared = bench.runner._stager.locate_quickly(order, bench.runner._found_account(task))
        bench.runner._launch(task)
        await bench.wait_for(TaskStarted)
        del task.link.set_lease
        assert not (task.link.directory / "lease").exists()
        extend(bench, order, 0.0)
        assert not (task.link.directory / "lease").exists()
        bench.runner.perform(SignalTask(order.job_id, 1, signal.SIGUSR1))
        assert (await bench.finish(order)).exits == (RankExit(0, 0, signal=signal.SIGUSR1),)
        assert not any(isinstance(event, TaskFreezeChanged) for event in bench.events)


def test_a_lease_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    for until_s in (0.0, 12.25, 123_456_789.125, 1e11, math.inf):
        text = shim.lease_text(until_s)
        assert len(text) == shim.LEASE_BYTES
        path.write_bytes(text)
        assert shim.read_lease(str(path), -1.0) == until_s
    assert shim.read_lease(str(tmp_path / "none"), 7.0) == 7.0
    assert len(shim.lease_text(1e300)) == shim.LEASE_BYTES


def test_a_half_rewritten_lease_is_not_believed(tmp_path: Path) -> None:
    """A reader that sees old and new digits mixed might otherwise grant time that nobody gave."""
    path = tmp_path / "lease"
    old, new = shim.lease_text(199.9), shim.lease_text(200.1)
    for cut in range(1, len(old.split()[0])):
        path.write_bytes(new[:cut] + old[cut:])
        assert shim.read_lease(str(path), 42.0) in (42.0, 199.9)
    path.write_bytes(b"nonsense nonsense")
    assert shim.read_lease(str(path), 42.0) == 42.0

"""The agent is killed and started again: its tasks, their output and their exit codes are still there."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from swarm_agent.supervision.orders import order_from_json, order_to_json
from swarm_agent.supervision.runner import TaskRunner
from swarm_agent.supervision.shimlink import ShimLink
from swarm_agent.task import shim
from swarmsched.effects import ForgetTask, SignalTask, StartTask, StopTask
from swarmsched.errors import StorageError
from swarmsched.events import TaskExited, TaskStarted
from swarmsched.ids import NodeId
from swarmsched.resources import Share
from swarmsched.task import RankExit, TaskFailure, TaskOrder, TaskStage
from tests.agent.supervision.testing import DEADLINE_S, Bench, make_gpu, make_order
from tests.agent.testing import wait_until

FIRST_LIFE = """
import asyncio, sys
from pathlib import Path
from swarm_agent.supervision.orders import order_from_json
from tests.agent.supervision.testing import Bench
from swarmsched.effects import StartTask
from swarmsched.events import TaskStarted

async def main():
    bench = Bench(Path(sys.argv[1]))
    await bench.runner.start()
    for path in map(Path, sys.argv[2:]):
        order, gpus = order_from_json(path.read_bytes(), path)
        bench.runner.perform(StartTask(order, gpus))
        await bench.wait_for(TaskStarted, order.key)
    print("started", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def first_life(tmp_path: Path, *orders: TaskOrder) -> subprocess.Popen[bytes]:
    """An agent's runner in a process of its own, with these tasks running."""
    paths = []
    for index, order in enumerate(orders):
        path = tmp_path / f"order-{index}"
        path.write_bytes(order_to_json(order, (make_gpu(0),)))
        paths.append(str(path))
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST_LIFE, str(tmp_path / "data"), *paths], stdout=subprocess.PIPE
    )
    line = await asyncio.to_thread(process.stdout.readline)
    assert line == b"started\n"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def shim_of(tmp_path: Path, order: TaskOrder) -> int:
    return int((tmp_path / "data/tasks" / f"{order.job_id}.1" / "facts").read_bytes().split()[1])


@asynccontextmanager
async def ended(pid: int) -> AsyncIterator[None]:
    """Wait at the end of the block until the process, which need not be a child, has ended."""
    pidfd, over = os.pidfd_open(pid), asyncio.Event()
    yield
    asyncio.get_running_loop().add_reader(pidfd, over.set)
    async with asyncio.timeout(DEADLINE_S):
        await over.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)


def gate(path: Path) -> str:
    return f"while [ ! -e {path} ]; do sleep 0.01; done"


async def test_a_running_task_is_found_with_its_output_and_its_exit_code(tmp_path: Path) -> None:
    go = tmp_path / "go"
    order = make_order("sh", "-c", f"echo $$; {gate(go)}; echo after; exit 9")
    kill(await first_life(tmp_path, order))
    async with Bench(tmp_path / "data") as bench:
        (status,) = bench.found
        assert (status.job_id, status.attempt, status.epoch) == (order.job_id, 1, 1)
        assert status.stage is TaskStage.STARTED
        rank_pid = int(await bench.wait_for_output(order, b"\n"))
        assert rank_pid in bench.runner.processes()
        go.touch()
        assert (await bench.finish(order)).exits == (RankExit(0, 9),)
        assert bench.output(order) == f"{rank_pid}\nafter\n".encode()


async def test_a_found_task_obeys_signals_and_stops(tmp_path: Path) -> None:
    order = make_order("sh", "-c", "trap 'echo got' USR1; echo ready; while :; do sleep 0.02; done")
    kill(await first_life(tmp_path, order))
    async with Bench(tmp_path / "data") as bench:
        await bench.wait_for_output(order, b"ready")
        bench.runner.perform(SignalTask(order.job_id, 1, signal.SIGUSR1))
        await bench.wait_for_output(order, b"got")
        bench.runner.perform(StopTask(order.job_id, 1, 5.0))
        assert (await bench.finish(order)).exits == (RankExit(0, 0, signal=signal.SIGTERM),)


async def test_a_task_that_ended_meanwhile_is_found_with_its_result(tmp_path: Path) -> None:
    go = tmp_path / "go"
    order = make_order("sh", "-c", f"{gate(go)}; exit $RANK", shares=(Share(NodeId("n1"), 2),), ranks=2)
    process = await first_life(tmp_path, order)
    async with ended(shim_of(tmp_path, order)):
        kill(process)
        go.touch()
    async with Bench(tmp_path / "data") as bench:
        (status,) = bench.found
        assert status.stage is TaskStage.EXITED
        assert status.exits == (RankExit(0, 0), RankExit(1, 1))
        assert status.failure is TaskFailure.NONE
        bench.runner.perform(ForgetTask(order.job_id, 1))
    async with Bench(tmp_path / "data") as bench:
        assert bench.found == ()


def runs(pid: int) -> bool:
    fields = shim.read_stat(pid)
    return fields is not None and fields[0] != b"Z"


async def test_a_task_whose_shim_died_with_the_agent_is_lost_and_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"setsid sleep 300 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 300"
    order = make_order("sh", "-c", script)
    kept = make_order("sleep", "300")
    process = await first_life(tmp_path, order, kept)
    await wait_until(pid_file.exists, what="the daemon is there")
    shim_pid = shim_of(tmp_path, order)
    async with ended(shim_pid):
        os.kill(shim_pid, signal.SIGKILL)
    kill(process)
    async with Bench(tmp_path / "data") as bench:
        by_id = {status.job_id: status for status in bench.found}
        assert by_id[order.job_id].stage is TaskStage.EXITED
        assert by_id[order.job_id].failure is TaskFailure.LOST
        assert by_id[kept.job_id].stage is TaskStage.STARTED
        assert not runs(int(pid_file.read_text()))
        bench.runner.perform(StopTask(kept.job_id, 1, 0.0))
        await bench.finish(kept)


async def test_the_death_of_one_shim_costs_its_own_part_of_the_attempt_alone(tmp_path: Path) -> None:
    """A node may have several parts of an elastic gang."""
    shares = tuple(Share(NodeId("n1"), 1, part=part) for part in (1, 2, 3))
    script = (
        f"setsid sleep 300 & echo $! > {tmp_path}/$SWARM_WORKER.new; mv {tmp_path}/$SWARM_WORKER{{.new,}}; sleep 300"
    )
    first = replace(make_order("bash", "-c", script, shares=shares, elastic=True), part=1)
    orders = {part: replace(first, part=part) for part in (1, 2, 3)}
    async with Bench(tmp_path / "data") as bench:
        for order in orders.values():
            bench.runner.perform(StartTask(order, ()))
        await wait_until(lambda: all((tmp_path / str(part)).exists() for part in orders), what="all have a daemon")
        # Of each part: its shim, the sleep that the script has become, and the daemon; `mv` is over.
        await wait_until(lambda: len(bench.runner.processes()) == 3 * len(orders))
        victim = bench.runner._tasks[orders[2].key].link.facts.shim_pid
        others = bench.runner.processes() - {victim, *(pid for pid, _, _ in shim.descendants(victim))}
        os.kill(victim, signal.SIGKILL)
        exited = await bench.finish(orders[2])
        assert (exited.failure, exited.exits) == (TaskFailure.LOST, ())
        assert not runs(int((tmp_path / "2").read_text())), "what it left has ended"
        assert others
        assert all(map(runs, others))
        assert [event.key.part for event in bench.events if isinstance(event, TaskExited)] == [2]


async def test_a_reused_pid_is_not_taken_for_the_shim(tmp_path: Path) -> None:
    """The record names a living process that started at another time, and the lock is free."""
    order = make_order("true")
    directory = tmp_path / "data/tasks" / f"{order.job_id}.1"
    directory.mkdir(parents=True)
    (directory / "order.json").write_bytes(order_to_json(order, ()))
    (directory / "facts").write_text(f"shim {os.getpid()} 1\n")
    (directory / "lock").touch()
    async with Bench(tmp_path / "data") as bench:
        assert bench.found[0].failure is TaskFailure.LOST


async def test_an_unreadable_order_is_dropped_and_the_others_are_found(tmp_path: Path) -> None:
    order = make_order("sleep", "300")
    process = await first_life(tmp_path, order)
    broken = make_order("true")
    directory = tmp_path / "data/tasks" / f"{broken.job_id}.1"
    directory.mkdir()
    (directory / "order.json").write_bytes(b'{"format": 1')
    kill(process)
    async with Bench(tmp_path / "data") as bench:
        assert [status.job_id for status in bench.found] == [order.job_id]
        assert not directory.exists()
        bench.runner.perform(StopTask(order.job_id, 1, 0.0))
        await bench.finish(order)


@pytest.mark.parametrize(
    "facts", [b"shim 1 2\n: not a fact\n", b"shim x\n", b"started\n", b"\xff\xfe\n", b"exit 0 zero 0 0\n"]
)
async def test_a_record_that_cannot_be_read_costs_its_task_and_not_the_agents_start(
    tmp_path: Path, facts: bytes
) -> None:
    order = make_order("sleep", "300")
    process = await first_life(tmp_path, order)
    broken = make_order("true")
    directory = tmp_path / "data/tasks" / f"{broken.job_id}.1"
    directory.mkdir()
    (directory / "order.json").write_bytes(order_to_json(broken, ()))
    (directory / "facts").write_bytes(facts + b"exited 1.0 none \n")
    kill(process)
    async with Bench(tmp_path / "data") as bench:
        found = {status.job_id: status for status in bench.found}
        assert set(found) == {order.job_id, broken.job_id}
        assert (found[broken.job_id].stage, found[broken.job_id].failure) == (TaskStage.EXITED, TaskFailure.LOST)
        bench.runner.perform(StopTask(order.job_id, 1, 0.0))
        await bench.finish(order)


async def test_a_directory_that_no_code_foresaw_costs_its_task_and_not_the_agents_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = make_order("true")
    directory = tmp_path / "data/tasks" / f"{order.job_id}.1"
    directory.mkdir(parents=True)
    (directory / "order.json").write_bytes(order_to_json(order, ()))

    def attach(link: ShimLink) -> bool:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(ShimLink, "attach", attach)
    async with Bench(tmp_path / "data") as bench:
        assert [status.failure for status in bench.found] == [TaskFailure.LOST]


async def test_a_fault_after_a_task_was_found_leaves_no_closed_descriptor_to_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libuv ends the whole agent for one, without a word."""
    process = await first_life(tmp_path, make_order("sleep", "300"))
    kill(process)
    watched = []

    def fails(runner: TaskRunner, task: Any) -> None:
        watched.append(task.link.pidfd)
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(TaskRunner, "_open_socket_again", fails)
    async with Bench(tmp_path / "data") as bench:
        assert [status.failure for status in bench.found] == [TaskFailure.LOST]
        (pidfd,) = watched
        assert not asyncio.get_running_loop().remove_reader(pidfd)


async def test_a_token_that_is_damaged_costs_the_task_nothing_but_its_requests(tmp_path: Path) -> None:
    order = make_order("sleep", "300")
    process = await first_life(tmp_path, order)
    kill(process)
    (tmp_path / "data/tasks" / f"{order.job_id}.1" / "token").write_bytes(b"\xb6" * 20)
    async with Bench(tmp_path / "data") as bench:
        assert bench.found[0].stage is TaskStage.STARTED
        bench.runner.perform(StopTask(order.job_id, 1, 0.0))
        await bench.finish(order)


async def test_stop_of_the_runner_leaves_tasks_running(tmp_path: Path) -> None:
    order = make_order("sleep", "300")
    bench = Bench(tmp_path / "data")
    await bench.runner.start()
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for(TaskStarted)
    await bench.runner.stop()
    async with Bench(tmp_path / "data") as second:
        assert second.found[0].stage is TaskStage.STARTED
        second.runner.perform(StopTask(order.job_id, 1, 0.0))
        await second.finish(order)


def test_an_order_survives_its_file(tmp_path: Path) -> None:
    order = make_order(
        "a", "b c", ranks=3, shares=(Share(NodeId("n1"), 2), Share(NodeId("n2"), 1)), env={"X": "1"}, grace_s=3.5
    )
    gpus = (make_gpu(0), make_gpu(1, is_simulated=True))
    assert order_from_json(order_to_json(order, gpus), tmp_path) == (order, gpus)


def test_an_order_has_no_key_for_what_its_job_does_not_say() -> None:
    """An earlier version, come back, stops tasks whose orders have keys of a specification that it does not know."""
    assert json.loads(order_to_json(make_order("true"), ()))["spec"] == {"command": ["true"]}


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"rendezvous": 3}', b"\xff"])
def test_a_damaged_order_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(StorageError, match=r"order\.json"):
        order_from_json(data, tmp_path / "order.json")

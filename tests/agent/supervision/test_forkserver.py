"""Shims are forked from a process that waits for that; whatever becomes of it, no task is lost and none runs twice."""

import os
import signal
from pathlib import Path

import pytest

from swarm_agent.supervision import forkserver
from swarm_agent.task import shim
from swarmsched.effects import StartTask, StopTask
from swarmsched.events import TaskStarted
from swarmsched.task import RankExit
from tests.agent.supervision.testing import Bench, make_order
from tests.agent.testing import free_port, wait_until


@pytest.fixture
async def bench(tmp_path: Path):
    async with Bench(tmp_path / "data") as bench:
        yield bench


def parent_of(pid: int) -> int:
    fields = shim.read_stat(pid)
    return int(fields[1]) if fields else 0


def is_alive(pid: int) -> bool:
    fields = shim.read_stat(pid)
    return bool(fields and fields[0] != b"Z")


async def start(bench: Bench, *command: str, **options):
    """A task that runs: its order and the pid of its shim."""
    before = bench.runner.own_pids()
    order = make_order(*command, **options)
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for(TaskStarted, order.key)
    await wait_until(lambda: bench.runner.own_pids() - before)
    (pid,) = bench.runner.own_pids() - before
    return order, pid


async def test_shims_are_forked_and_reaped_and_have_nothing_of_one_another(bench: Bench) -> None:
    server = bench.runner._server.pid
    first, first_pid = await start(bench, "sleep", "60")
    _, second_pid = await start(bench, "sleep", "60")
    assert {parent_of(first_pid), parent_of(second_pid)} == {server}
    assert os.getsid(first_pid) == first_pid != os.getsid(second_pid)
    open_files = [str(path.readlink()) for path in Path(f"/proc/{second_pid}/fd").iterdir()]
    assert not [path for path in open_files if first.job_id in path or "pidfd" in path]
    bench.runner.perform(StopTask(first.job_id, 1, 0.0))
    await bench.finish(first)
    await wait_until(lambda: shim.read_stat(first_pid) is None)


async def test_tasks_outlive_the_server_and_later_ones_get_another(bench: Bench, monkeypatch) -> None:
    monkeypatch.setattr(forkserver, "RESTART_S", 0.0)
    order, pid = await start(bench, "sleep", "60")
    server = bench.runner._server.pid
    os.kill(server, signal.SIGKILL)
    await wait_until(lambda: bench.runner._server.pid != server)
    later, later_pid = await start(bench, "sleep", "60")
    assert is_alive(pid)
    assert parent_of(later_pid) == bench.runner._server.pid != server
    for each in (order, later):
        bench.runner.perform(StopTask(each.job_id, 1, 0.0))
        assert (await bench.finish(each)).exits == (RankExit(0, 0, signal.SIGTERM),)


async def test_without_a_server_shims_are_started_by_themselves(bench: Bench) -> None:
    bench.runner._server.stop()  # and it was started too recently to be started again
    _, pid = await start(bench, "sleep", "60")
    assert parent_of(pid) == os.getpid()


async def test_a_request_that_the_server_takes_with_it_is_not_lost(bench: Bench) -> None:
    """It is stopped, so that the request lies there unread when it is killed."""
    server = bench.runner._server.pid
    os.kill(server, signal.SIGSTOP)
    order = make_order("sh", "-c", "echo once; exit 3", port=free_port())
    bench.runner.perform(StartTask(order, ()))
    os.kill(server, signal.SIGKILL)
    assert (await bench.finish(order)).exits == (RankExit(0, 3),)
    assert bench.output(order) == b"once\n"


async def test_the_server_ends_with_the_agent_and_its_shims_do_not(tmp_path: Path) -> None:
    async with Bench(tmp_path / "data") as bench:
        server = bench.runner._server.pid
        order, pid = await start(bench, "sleep", "60")
        await bench.runner.stop()
        assert not is_alive(server)
        assert is_alive(pid)
    async with Bench(tmp_path / "data") as bench:
        assert [each.job_id for each in bench.found] == [order.job_id]
        bench.runner.perform(StopTask(order.job_id, 1, 0.0))
        assert (await bench.finish(order)).exits == (RankExit(0, 0, signal.SIGTERM),)

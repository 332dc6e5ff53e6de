"""The port of rank 0: held, probed, handed over, and free for rank 0 at once."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from swarm_agent.task.rendezvous import NoFreePort, Rendezvous, listen, probe
from swarmsched.effects import BindRendezvous, ReleaseRendezvous, StageTask, StartTask
from swarmsched.events import RendezvousBound, RendezvousFailed, TaskExited, TaskStaged, TaskStageFailed, TaskStarted
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.resources import Share
from swarmsched.task import RankExit, TaskFailure, TaskOrder
from tests.agent.supervision.testing import Bench, make_order

PYTHON = getattr(sys, "_base_executable", sys.executable)
HOST = "127.0.0.1"
KEY = TaskKey(JobId("0" * 26), 1)
BIND = """
import os, socket
listening = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
print("bound", flush=True)
"""


def free_ports(count: int) -> tuple[int, int]:
    """A range that is free now.  (Below the ephemeral ports, so only another test could take one meanwhile.)"""
    for first in range(15_000, 30_000, count):
        sockets = [listen(HOST, port) for port in range(first, first + count)]
        for held in sockets:
            if held:
                held.close()
        if all(sockets):
            return (first, first + count - 1)
    raise AssertionError("no free range")


def test_a_taken_port_is_passed_over_and_a_full_range_is_refused() -> None:
    first, last = free_ports(2)
    rendezvous = Rendezvous(HOST, (first, last))
    taken = listen(HOST, first)
    try:
        bound = rendezvous.bind(KEY)
        assert bound.port == last
        assert rendezvous.bind(KEY) is bound
        with pytest.raises(NoFreePort, match="widen rendezvous_ports"):
            rendezvous.bind(KEY._replace(attempt=2))
        rendezvous.release(KEY)
        assert rendezvous.bind(KEY._replace(attempt=2)).port == last
    finally:
        rendezvous.close()
        taken.close()


async def test_probe_reaches_a_held_port_and_says_why_it_cannot() -> None:
    ports = free_ports(1)
    rendezvous = Rendezvous(HOST, ports)
    rendezvous.bind(KEY)
    assert await probe(HOST, ports[0], timeout_s=2.0, attempts=1) == ""
    rendezvous.close()
    assert "refused" in (await probe(HOST, ports[0], timeout_s=2.0, attempts=2)).lower()


async def two_nodes(tmp_path: Path) -> tuple[Bench, Bench]:
    ports = free_ports(4)
    first, second = (Bench(tmp_path / node, node=node, rendezvous_ports=ports) for node in ("n1", "n2"))
    return first, second


def for_node(order: TaskOrder, node: str) -> TaskOrder:
    values = {name: getattr(order, name) for name in order.__struct_fields__}
    return TaskOrder(**{**values, "node": node})


async def test_rank_zero_binds_the_port_at_once_after_it_was_probed(tmp_path: Path) -> None:
    first, second = await two_nodes(tmp_path)
    async with first, second:
        job = make_order("true")
        first.runner.perform(BindRendezvous(job.job_id, 1))
        bound = await first.wait_for(RendezvousBound)
        shares = (Share(NodeId("n1"), 1), Share(NodeId("n2"), 1))
        order = make_order(PYTHON, "-c", BIND, shares=shares, ranks=2, host=bound.host, port=bound.port)
        first.runner.perform(ReleaseRendezvous(job.job_id, 1))
        first.runner.perform(BindRendezvous(order.job_id, 1))
        bound = await first.wait_for(RendezvousBound, count=2)
        values = {name: getattr(order, name) for name in order.__struct_fields__}
        order = TaskOrder(**{**values, "rendezvous_port": bound.port})
        second.runner.perform(StageTask(for_node(order, "n2")))
        await second.wait_for(TaskStaged)
        first.runner.perform(StartTask(order, ()))
        exited = await first.finish(order)
        assert first.output(order) == b"bound\n"
        assert exited.exits == (RankExit(0, 0),)


async def test_unreachable_rank_zero_is_reported_with_both_nodes(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # and does not listen: refused, and nobody else can listen there meanwhile
        port = taken.getsockname()[1]
        shares = (Share(NodeId("n1"), 1), Share(NodeId("n2"), 1))
        order = make_order("true", node="n2", shares=shares, ranks=2, port=port)
        async with Bench(tmp_path, node="n2") as bench:
            bench.runner.perform(StageTask(order))
            failed = await bench.wait_for(TaskStageFailed)
            assert failed.failure is TaskFailure.UNREACHABLE
            assert f"n2 cannot reach 127.0.0.1:{port} of n1" in failed.detail
            assert f"n2 cannot reach 127.0.0.1:{port} of n1".encode() in bench.output(order, rank=1)


async def test_a_port_lost_before_the_start_is_reported(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with socket.create_server((HOST, port)):
        async with Bench(tmp_path) as bench:
            order = make_order("true", port=port)
            bench.runner.perform(StartTask(order, ()))
            assert (await bench.finish(order)).failure is TaskFailure.PORT_TAKEN


async def test_rank_zero_that_finds_its_port_taken_is_told_apart_from_other_failures(tmp_path: Path) -> None:
    """Somebody binds it in the instant between the shim's close and the rank's bind."""
    ports = free_ports(2)
    script = f"""
import os, socket
port = int(os.environ["MASTER_PORT"])
thief = socket.create_server(("{HOST}", port))
raise OSError(f"cannot listen on port {{port}}: Address already in use")
"""
    async with Bench(tmp_path, rendezvous_ports=ports) as bench:
        order = make_order(PYTHON, "-c", script, port=ports[0])
        bench.runner.perform(BindRendezvous(order.job_id, 1))
        bench.runner.perform(StartTask(order, ()))
        exited: TaskExited = await bench.finish(order)
        assert exited.failure is TaskFailure.PORT_TAKEN
        assert exited.exits == (RankExit(0, 1),)


async def test_an_address_that_is_not_ours_is_reported(tmp_path: Path) -> None:
    async with Bench(tmp_path, fabric_address="203.0.113.7") as bench:
        bench.runner.perform(BindRendezvous.about(KEY))
        await asyncio.sleep(0)
        assert isinstance(bench.events[0], RendezvousFailed)
        assert "assign" in bench.events[0].error


async def test_another_agent_of_the_machine_leaves_a_port_alone_that_rank_zero_has_yet_to_bind(tmp_path: Path) -> None:
    ports = free_ports(2)
    first, second = (Bench(tmp_path / node, node=node, rendezvous_ports=ports) for node in ("n1", "n2"))
    async with first, second:
        order = make_order("sleep", "60", port=ports[0])
        first.runner.perform(BindRendezvous(order.job_id, 1))
        first.runner.perform(StartTask(order, ()))
        await first.wait_for(TaskStarted)
        second.runner.perform(BindRendezvous(order.job_id, 1))
        second.runner.perform(BindRendezvous(order.job_id, 2))
        given = [await second.wait_for(RendezvousBound, count=count) for count in (1, 2)]
        assert [each.port for each in given] == [ports[1], ports[0]], "the promised one is the last resort"

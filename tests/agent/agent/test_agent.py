import asyncio
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_agent import agent as agent_module
from swarm_agent import barrier, startup
from swarm_agent.agent import Agent
from swarm_agent.doctor import examine
from swarm_agent.http.facts import AgentFacts
from swarm_agent.readiness import Check
from swarm_agent.security import generate_key
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.startup import running_agent
from swarmsched.api import JobSpec
from swarmsched.authority.message import SilenceAnswer, SilenceRequest
from swarmsched.commands import CreateTicket, Done, DrainNode, JobAccepted, Refused, SubmitJob, TicketIssued
from swarmsched.effects import Announce, SendPeer
from swarmsched.errors import AgentUnreachable
from swarmsched.events import PeerMessageReceived
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import Demand
from tests.agent.testing import ScriptedMachine, agent_config, free_port, wait_until

Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts whole agents in this process, on loopback, with one key."""
    for secret in ("key", "token"):
        (tmp_path / secret).touch(0o600)
        (tmp_path / secret).write_text(generate_key())
    async with AsyncExitStack() as stack:

        async def start_one(name: str, **settings: Any) -> Agent:
            secrets = {"cluster_key_file": tmp_path / "key", "token_file": tmp_path / "token"}
            config = agent_config(tmp_path, name, **{**secrets, **settings})
            agent = await stack.enter_async_context(running_agent(config))
            await wait_until(agent.readiness.is_ready)
            return agent

        yield start_one


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(filler: Path) -> None:
    """Write until the disk is full."""
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while stream.write(b"x" * 4_096):
            continue


@pytest.mark.usefixtures("start")  # makes the secrets
@pytest.mark.parametrize(("ahead_days", "is_refused"), [(3.0, True), (0.9, False), (-400.0, False)])
async def test_an_agent_that_was_started_by_a_clock_far_ahead_says_that_others_refuse_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ahead_days: float,
    is_refused: bool,
) -> None:
    config = agent_config(tmp_path, cluster_key_file=tmp_path / "key", token_file=tmp_path / "token")
    with monkeypatch.context() as patch:
        patch.setattr(startup, "time", SimpleNamespace(time=lambda: time.time() + ahead_days * 86_400))
        async with running_agent(config):
            caplog.clear()
    async with running_agent(config) as agent:
        membership = agent.readiness.checks()[0]
    assert (membership.is_ok, "3 days ahead" in membership.detail) == (not is_refused, is_refused)
    assert (f"{membership.detail}: {membership.remedy}" in caplog.text) == is_refused


async def test_a_holder_tells_no_silence_from_before_its_start(start: Start) -> None:
    begun_s = time.monotonic()
    agent = await start("a")
    question = SilenceRequest(JobId("01m8035rqx9za6x4pwhg75xv0a"), 1, NodeId("b"), 1, 1)
    now_s = agent.now_s()
    (effect,) = agent.node.step(PeerMessageReceived(NodeId("c"), question), now_s)
    assert isinstance(effect, SendPeer)
    assert isinstance(effect.message, SilenceAnswer)
    assert effect.message.silent_s <= now_s - begun_s


async def test_an_agent_is_there_while_it_still_reads_what_files_it_keeps(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of a million files takes minutes to look at: peers would think that the node has died."""
    goes_on = threading.Event()
    monkeypatch.setattr(BlobStore, "load", lambda self: goes_on.wait(60.0))
    try:
        async with asyncio.timeout(20.0):
            agent = await start("a")
        assert isinstance(await agent.command(CreateTicket()), TicketIssued)
    finally:
        goes_on.set()


async def test_a_command_is_answered_by_the_core(start: Start) -> None:
    agent = await start("a")
    reply = await agent.command(CreateTicket())

    assert isinstance(reply, TicketIssued)
    assert [holder.node for holder in reply.holders] == ["a"]


async def test_a_command_without_an_answer_has_an_unknown_outcome(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await start("a")
    monkeypatch.setattr(agent.driver, "_machine", ScriptedMachine())
    reply = await agent.command(CreateTicket(), timeout_s=0.05)

    assert isinstance(reply, Refused)
    assert reply.code == "unavailable"
    assert agent._replies == {}


async def test_too_many_waiting_commands_are_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await start("a")
    monkeypatch.setattr(agent_module, "COMMANDS_LIMIT", 0)
    reply = await agent.command(CreateTicket())

    assert isinstance(reply, Refused)
    assert reply.code == "not_ready"


@pytest.mark.root
async def test_a_full_disk_refuses_commands_loses_nothing_and_recovers(
    start: Start, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barrier, "RETRY_S", 0.05)
    agent = await start("a", data_dir=small_disk)
    ticket = await agent.command(CreateTicket())
    assert isinstance(ticket, TicketIssued)
    filler = small_disk / "filler"
    fill(filler)
    submit = SubmitJob(ticket.job_id, ticket.holders, JobSpec(("true",), name="n" * 60, demand=Demand(gpus=1)))
    unanswered = await agent.command(submit, timeout_s=1.0)
    assert isinstance(unanswered, Refused)
    assert unanswered.code == "unavailable"
    await wait_until(lambda: not agent.readiness.is_ready())
    refused = await agent.command(CreateTicket())
    assert isinstance(refused, Refused)
    assert refused.code == "not_ready"
    failing = [check for check in agent.readiness.checks() if not check.is_ok]
    assert [check.name for check in failing] == ["disk"]
    assert "full" in failing[0].detail

    filler.unlink()
    await wait_until(agent.readiness.is_ready)
    reply = await agent.command(submit)
    assert isinstance(reply, JobAccepted)
    assert reply.was_known


async def test_agents_ask_one_another(start: Start) -> None:
    a = await start("a")
    b = await start("b", seeds=(a.config.listen,))

    async def name(sender: NodeId, payload: dict[str, Any]) -> dict[str, Any]:
        return {"asked_by": sender, **payload}

    b.on_query("test_name", name)
    await wait_until(lambda: a.node.address_of(NodeId("b")) == b.config.listen)
    assert await a.query(NodeId("b"), "test_name", {"x": 1}) == {"asked_by": "a", "x": 1}
    assert a.node.address_of(NodeId("nobody")) is None
    await b.channel.close()
    with pytest.raises((AgentUnreachable, RuntimeError)):
        await b.query(NodeId("a"), "test_name", {})


async def test_announcements_reach_log_and_observers(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    agent = await start("a")
    seen: list[Announce] = []
    agent.on_announce(seen.append)
    announce = Announce("job.started", "all ranks run", node=NodeId("a"), fields={"ranks": 4})
    with caplog.at_level("INFO", "swarm.agent"):
        agent._perform(announce)

    assert seen == [announce]
    assert agent.events.since()[-1].kind == "job.started"
    assert "job.started: all ranks run" in caplog.text


async def test_an_agent_on_a_wildcard_address_needs_to_be_named(start: Start) -> None:
    agent = await start("a", listen=("0.0.0.0", port := free_port()), advertise=("127.0.0.1", port))

    assert agent.address == ("127.0.0.1", port)
    assert agent.node.address_of(NodeId("a")) == ("127.0.0.1", port)


async def test_holders_of_a_job_are_sought_in_other_zones_than_the_node_that_is_asked(start: Start) -> None:
    """Two agents of one rack, and one of each of two others: whoever of the rack is asked leaves its neighbour out."""
    seed = await start("n1", zone="rack-1")
    seeds = (seed.address,)
    others = [await start(name, zone=zone, seeds=seeds) for name, zone in (("n2", "rack-1"), ("n3", "b"), ("n4", "c"))]
    for agent in (seed, others[0]):
        told = {"n1": "rack-1", "n2": "rack-1", "n3": "b", "n4": "c"}
        await wait_until(lambda: {each.record.node_id: each.record.zone for each in AgentFacts(agent).nodes()} == told)  # noqa: B023
        for _ in range(20):
            ticket = await agent.command(CreateTicket())
            assert isinstance(ticket, TicketIssued)
            assert {holder.node for holder in ticket.holders} == {agent.config.name, "n3", "n4"}


async def test_a_drained_node_finishes_its_work_takes_none_and_remembers_that_over_a_restart(tmp_path: Path) -> None:
    config = agent_config(tmp_path, simulated_gpus=2)

    async def submit(agent: Agent, *command: str) -> JobId:
        ticket = await agent.command(CreateTicket())
        assert isinstance(ticket, TicketIssued)
        spec = JobSpec(command=command, demand=Demand(gpus=1))
        assert isinstance(await agent.command(SubmitJob(ticket.job_id, ticket.holders, spec)), JobAccepted)
        return ticket.job_id

    def state(agent: Agent, job: JobId) -> str:
        record = agent.node.record(job)
        assert record is not None
        return record.state.value

    go = tmp_path / "go"
    async with running_agent(config) as agent:
        await wait_until(agent.readiness.is_ready)
        running = await submit(agent, "sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done")
        await wait_until(lambda: state(agent, running) == "running")
        assert await agent.command(DrainNode(True, "new disk")) == Done()
        waiting = await submit(agent, "true")
        await wait_until(lambda: [each.record.drain_reason for each in AgentFacts(agent).nodes()] == ["new disk"])
        go.touch()
        await wait_until(lambda: state(agent, running) == "ended")
    async with running_agent(config) as agent:
        await wait_until(agent.readiness.is_ready)
        assert Check("work", is_ok=True, detail="draining, takes no new work: new disk") in agent.readiness.checks()
        assert ("work", "warning") in [(each.name, each.status) for each in examine(agent)]
        assert state(agent, waiting) == "queued"
        report = agent.node.why(waiting, agent.now_s())
        assert report is not None
        assert [each.reason for each in report.nodes] == ["draining"]
        assert await agent.command(DrainNode(is_draining=False)) == Done()
        await wait_until(lambda: state(agent, waiting) == "ended")

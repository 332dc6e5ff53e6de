"""The core raises: the agent goes on from its disk in the same process, without what it met."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm_agent import startup
from swarm_agent.__main__ import _serve
from swarm_agent.agent import Agent
from swarmsched.api import JobSpec
from swarmsched.commands import CancelJob, CreateTicket, JobAccepted, Refused, SubmitJob, TicketIssued
from swarmsched.effects import Effect
from swarmsched.events import ClientCommandReceived, Event
from swarmsched.node import Node
from tests.agent.testing import agent_config, wait_until


async def test_an_agent_whose_core_raises_serves_again_and_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: list[Agent] = []
    build, step = startup._build, Node.step

    async def remembered(*arguments: object) -> Agent:
        lives.append(await build(*arguments))  # type: ignore[arg-type]
        return lives[-1]

    def raising(node: Node, event: Event, now_s: float) -> Sequence[Effect]:
        effects = step(node, event, now_s)
        if isinstance(event, ClientCommandReceived) and isinstance(event.command, CancelJob):
            raise RuntimeError("a bug behind a change of memory")
        return effects

    monkeypatch.setattr(startup, "_build", remembered)
    monkeypatch.setattr(Node, "step", raising)
    serving = asyncio.create_task(_serve(agent_config(tmp_path)))
    await wait_until(lambda: bool(lives) and lives[0].node.is_awake, timeout_s=30.0)
    ticket = await lives[0].command(CreateTicket())
    assert isinstance(ticket, TicketIssued)
    job = SubmitJob(ticket.job_id, ticket.holders, JobSpec(("sleep", "60")))
    assert isinstance(await lives[0].command(job), JobAccepted)

    refused = await lives[0].command(CancelJob(ticket.job_id, None, ""))
    assert isinstance(refused, Refused)
    assert (refused.code, "core failed" in refused.problem) == ("unavailable", True)
    await wait_until(lambda: len(lives) == 2 and lives[1].node.is_awake, timeout_s=30.0)
    record = lives[1].node.record(ticket.job_id)
    assert record is not None
    assert not record.is_ended
    assert lives[1].faults.counts["steps"] == 1

    again = await lives[1].command(CancelJob(ticket.job_id, None, ""), timeout_s=0.5)
    assert isinstance(again, Refused)
    assert lives[1].faults.counts == {"steps": 1, "effects": 0, "refused_events": 1}
    assert isinstance(await lives[1].command(CreateTicket()), TicketIssued)
    monkeypatch.setattr(Node, "step", step)
    lives[1].faults.__init__()  # type: ignore[misc]  # ten minutes later
    await lives[1].command(CancelJob(ticket.job_id, 0.0, ""))
    await wait_until(lambda: (record := lives[1].node.record(ticket.job_id)) is None or record.is_ended, 30.0)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving

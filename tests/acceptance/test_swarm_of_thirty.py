"""Thirty agents in thirty processes on loopback."""

import pytest

from tests.agent.testing import start_agents, wait_until_sync

pytestmark = [pytest.mark.acceptance, pytest.mark.cluster]

AGENTS = 30


def statuses(agent):
    return {each["name"]: each["status"] for each in agent.get("/v1/members", timeout_s=15)["items"]}


def test_thirty_agents_converge_and_all_see_one_killed(stopwatch, report):
    with start_agents(AGENTS, gpus=1, wait_live=False) as agents:
        with stopwatch("30 processes started and answering"):
            for agent in agents:
                wait_until_sync(agent.is_live, 120, f"{agent.name} answers")
        everybody = {agent.name: "alive" for agent in agents}
        with stopwatch("then all 30 see all 30 alive"):
            for agent in agents:
                wait_until_sync(lambda agent=agent: statuses(agent) == everybody, 60, f"{agent.name} sees all")
        with stopwatch("all know the GPUs of all"):
            for agent in agents:
                wait_until_sync(lambda agent=agent: agent.get("/v1/status")["gpus"]["total"] == AGENTS, 60)
        job = agents[3].submit("sh", "-c", "echo $RANK", ranks=AGENTS, gpus_per_rank=1)
        with stopwatch("a gang of 30 ranks on 30 nodes"):
            done = agents[17].ended(job, 60)
        assert done["end_reason"] == "completed"
        assert len({node["node"] for node in done["nodes"]}) == AGENTS
        victim = agents.pop(11)
        with stopwatch("kill -9 of one: all 29 others see it failed"):
            victim.kill()
            for agent in agents:
                wait_until_sync(lambda agent=agent: statuses(agent)[victim.name] == "failed", 60, agent.name)
        wrong = [agent.name for agent in agents if list(statuses(agent).values()).count("alive") != AGENTS - 1]
        assert wrong == []
        with stopwatch("restarted: all see it alive"):
            victim.restart()
            for agent in agents:
                wait_until_sync(lambda agent=agent: statuses(agent)[victim.name] == "alive", 60, agent.name)

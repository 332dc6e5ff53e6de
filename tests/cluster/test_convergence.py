from pathlib import Path
from typing import Any

import pytest

from swarm_agent.security import generate_key
from swarmsched.errors import AgentUnreachable
from tests.agent.testing import RunningAgent, start_agents, wait_until_sync

pytestmark = pytest.mark.cluster


def statuses(agent: RunningAgent) -> dict[str, str]:
    """Members by name as one agent sees them; empty while it does not answer."""
    try:
        items: list[dict[str, Any]] = agent.get("/v1/members")["items"]
    except AgentUnreachable:
        return {}
    return {item["name"]: item["status"] for item in items}


def test_three_agents_see_one_another_alive() -> None:
    with start_agents(3) as agents:
        everybody = {agent.name: "alive" for agent in agents}
        for agent in agents:
            wait_until_sync(lambda agent=agent: statuses(agent) == everybody, what=f"{agent.name} sees all")


def test_a_killed_agent_is_seen_as_failed_and_welcomed_back_with_its_name() -> None:
    with start_agents(3) as agents:
        everybody = {agent.name: "alive" for agent in agents}
        for agent in agents:
            wait_until_sync(lambda agent=agent: statuses(agent) == everybody)
        agents[2].kill()
        for agent in agents[:2]:
            wait_until_sync(lambda agent=agent: statuses(agent).get("n3") == "failed", what="n3 is seen as failed")

        agents[2].restart()
        for agent in agents:
            wait_until_sync(lambda agent=agent: statuses(agent) == everybody, what=f"{agent.name} sees n3 again")


def test_an_agent_with_another_key_stays_outside_and_both_say_why(tmp_path: Path) -> None:
    key = tmp_path / "other.key"
    key.touch(0o600)
    key.write_text(generate_key())
    with start_agents(1) as (insider,):
        seeds = [f"127.0.0.1:{insider.address[1]}"]
        with start_agents(1, settings={"name": "stranger", "seeds": seeds, "cluster_key_file": str(key)}) as (
            outsider,
        ):
            wait_until_sync(lambda: "wrong cluster key" in insider.log_file.read_text())
            assert set(statuses(insider)) == {"n1"}
            assert outsider.is_live()

"""Real agents on loopback, shared by the tests of a module that do not break them."""

import pytest

from swarm_agent.testing import start_agents, wait_until_sync


def alive_count(agent):
    return sum(member["status"] == "alive" for member in agent.get("/v1/members")["items"])


def converge(agents, timeout_s=20.0):
    wait_until_sync(lambda: all(alive_count(agent) == len(agents) for agent in agents), timeout_s, "all see all")
    wait_until_sync(lambda: all(knows_gpus(agent, len(agents)) for agent in agents), timeout_s, "all know all GPUs")


def knows_gpus(agent, count):
    nodes = agent.get("/v1/nodes")["items"]
    return len(nodes) == count and all(node["total_gpus"] is not None for node in nodes)


@pytest.fixture(scope="module")
def swarm():
    """Three agents with two simulated GPUs each."""
    with start_agents(3) as agents:
        converge(agents)
        yield agents


@pytest.fixture
def fresh_swarm():
    """Three agents for a test that breaks them."""
    with start_agents(3) as agents:
        converge(agents)
        yield agents

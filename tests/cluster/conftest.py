"""Real agents on loopback, shared by the tests of a module that do not break them, and the `swarm` command."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.agent.testing import start_agents, wait_until_sync


def alive_count(agent):
    return sum(member["status"] == "alive" for member in agent.get("/v1/members")["items"])


def converge(agents):
    wait_until_sync(lambda: all(alive_count(agent) == len(agents) for agent in agents), what="all see all")
    wait_until_sync(lambda: all(knows_gpus(agent, len(agents)) for agent in agents), what="all know all GPUs")


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


@dataclass
class Shell:
    """A user with a home of their own who types `swarm`."""

    home: Path
    folder: Path

    def environment(self, agents, **more):
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SWARM_", "XDG_", "GIT_"))}
        hosts = ",".join("{}:{}".format(*agent.address) for agent in agents)
        ours = {"HOME": str(self.home), "LOGNAME": "ada", "SWARM_HOSTS": hosts, "SWARM_TOKEN": agents[0].token}
        return {**kept, **ours, **more}

    def start(self, agents, *words, folder=None, **variables):
        command = [str(Path(sys.executable).with_name("swarm")), *map(str, words)]
        environment = self.environment(agents, **variables)
        return subprocess.Popen(
            command,
            cwd=folder or self.folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, agents, *words, folder=None, timeout_s=120, **variables):
        """Exit code, standard output and standard error."""
        with self.start(agents, *words, folder=folder, **variables) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, out, err


@pytest.fixture
def shell(tmp_path):
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    return Shell(home, folder)

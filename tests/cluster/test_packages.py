"""What is installed beside an agent, and what a workstation does without."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.agent.testing import Contact, start_agents, wait_until_sync
from tests.testbed.packages import own_policies, without

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-packages")]
NOBODY = [Contact("n1", ("127.0.0.1", 1), "t" * 32)]


@pytest.fixture
def workstation(tmp_path):
    """Variables of a user whose Python has what the client needs and no more."""
    return {"PYTHONPATH": str(without(tmp_path / "missing"))}


def test_a_policy_of_an_installed_package_decides_in_a_live_swarm_and_its_removal_stops_no_agent(tmp_path, shell):
    installed = own_policies(tmp_path / "packages")
    with start_agents(1, gpus=2, packages=installed.parent) as (agent,):
        assert shell([agent], "config", "set", "--swarm", "policy=smallest-first", "patience_s=0")[0] == 0
        first = agent.submit("sleep", "60", gpus_per_rank=2)
        wait_until_sync(lambda: agent.get(f"/v1/jobs/{first['id']}")["state"] == "running", what="one job has all GPUs")
        large = agent.submit("true", gpus_per_rank=2)
        small = agent.submit("true", gpus_per_rank=1)
        why = f"/v1/jobs/{small['id']}/why"
        wait_until_sync(lambda: "asks for 1 GPU" in json.dumps(agent.get(why)), what="the policy has given its reason")
        agent.call("POST", f"/v1/jobs/{first['id']}/cancel", {})
        began = [agent.ended(job)["started_at"] for job in (small, large)]
        assert began == sorted(began)
        assert agent.counted("swarm_plans_total", policy="smallest-first", result="planned")
        assert not agent.counted("swarm_plans_total", policy="smallest-first", result="fell_back")
        assert "policy broken (no_such_package:KIND): ModuleNotFoundError" in agent.log_file.read_text()
        agent.stop()
        shutil.rmtree(installed)
        agent.restart()
        assert agent.get("/v1/config")["policy"] == "swarm"
        assert "cannot be used here: is a package with its policy missing?" in agent.log_file.read_text()


def test_a_workstation_without_the_packages_of_servers_runs_jobs(swarm, shell, workstation):
    assert shell(swarm, "--help", **workstation)[0] == 0
    (shell.folder / "train.py").write_text("print('trained')")
    assert shell(swarm, "run", "--", "python3", "train.py", **workstation)[:2] == (0, "trained\n")
    script = (
        "import asyncio, swarm_client, swarm_elastic\n"
        "async def main():\n"
        "    async with swarm_client.SwarmClient() as swarm:\n"
        "        job = await swarm.submit(['echo', 'hi'])\n"
        "        print([record.text async for record in swarm.logs(job.id, follow=True)])\n"
        "asyncio.run(main())"
    )
    environment = shell.environment(swarm, **workstation)
    assert subprocess.check_output([sys.executable, "-c", script], env=environment, text=True) == "['hi\\n']\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["simulate", "faults", "--seeds", "1"], "needs the package cryptography, which is not installed\n"),
        (["simulate", "generate"], "needs the package numpy, which is not installed\n"),
        (["local", "up"], "swarm-agent needs the package uvloop, which is not installed"),
    ],
)
def test_what_a_workstation_lacks_is_said_with_the_extra_that_has_it(shell, workstation, words, told):
    code, out, err = shell(NOBODY, *words, **workstation)
    extra = "agent" if words[0] == "local" else "lab"
    assert (code, out) == (125 if words[0] == "local" else 2, "")
    assert told in err
    assert f"pip install 'swarmsched[{extra}]'" in err

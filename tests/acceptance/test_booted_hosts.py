"""The Ansible role on three hosts that boot: the first roll, one without changes, an upgrade, refusals, another key."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.testbed.booted import BootedHost, boot, why_no_hosts
from tests.testbed.netns import Network

pytestmark = [pytest.mark.acceptance, pytest.mark.root]

ROOT = Path(__file__).resolve().parents[2]
ANSIBLE = ROOT / "ansible"
BIN = ROOT / ".venv-ansible/bin"
ROLL_LIMIT_S = 1_200
NEXT_VERSION = "0.1.1"
WHEELS_ON_HOSTS = "srv/wheelhouse"
RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE)


@dataclass
class Fleet:
    """Three hosts, what Ansible is told of them, and a client."""

    hosts: list[BootedHost]
    folder: Path
    wheels: dict[str, Path]
    variables: dict = field(default_factory=dict)

    def play(self, book, **variables):
        """Run a playbook over all hosts; how it ended and what it said."""
        given = self.folder / "variables.json"
        given.write_text(json.dumps({**self.variables, **variables}))
        known = {"ansible_user": "root", "ansible_ssh_private_key_file": str(self.folder / "id")}
        inventory = {
            "swarm": {"hosts": {each.name: {"ansible_host": each.host.address} | known for each in self.hosts}}
        }
        (self.folder / "inventory.json").write_text(json.dumps(inventory))
        return subprocess.run(
            [BIN / "ansible-playbook", "-i", self.folder / "inventory.json", "-e", f"@{given}", f"playbooks/{book}"],
            cwd=ANSIBLE, text=True, capture_output=True, timeout=ROLL_LIMIT_S, check=False,
            env=os.environ | {
                "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOST_KEY_CHECKING": "false", "ANSIBLE_LOCALHOST_WARNING": "false",
                "ANSIBLE_HOME": str(self.folder / "ansible"),
                "ANSIBLE_SSH_ARGS": "-o UserKnownHostsFile=/dev/null -o ControlMaster=auto -o ControlPersist=60s",
            },
        )  # fmt: skip

    def ask(self, path, *, at=0, body=None):
        """A document of an agent's API."""
        request = urllib.request.Request(
            f"http://{self.hosts[at].host.address}:7433{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self.variables['swarm_agent_token']}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def versions(self):
        return [self.ask("/v1/status", at=index)["version"] for index in range(len(self.hosts))]

    def main_pids(self):
        """Of the agents."""
        return [each.run("systemctl", "show", "-p", "MainPID", "--value", "swarm-agent").strip() for each in self.hosts]


def changes(done):
    """Changed tasks of each host."""
    return {name: int(changed) for name, _, changed, _, _ in RECAP.findall(done.stdout)}


def said(done):
    return done.stdout[-6_000:] + done.stderr[-2_000:]


def build_wheel(tree, folder):
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(tree)]
    subprocess.run(command, check=True, timeout=300)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """This version and a later one, and a folder of all that they depend on."""
    folder = tmp_path_factory.mktemp("wheels")
    build_wheel(ROOT, folder)
    later = folder / "later"
    kept = shutil.ignore_patterns(".git", ".venv*", ".tools", "tests", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, later, ignore=kept)
    project = later / "pyproject.toml"
    project.write_text(
        re.sub(r'^version = ".*"', f'version = "{NEXT_VERSION}"', project.read_text(), flags=re.MULTILINE)
    )
    build_wheel(later, folder)
    house = folder / "house"
    found = sorted(folder.glob("swarmsched-*.whl"))
    constrained = ["-c", str(ROOT / "constraints.txt")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        "-d",
        str(house),
        *constrained,
    ]
    subprocess.run([*command, str(found[0])], check=True, timeout=600)
    return {path.name.split("-")[1]: path for path in found} | {"house": house}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, wheels):
    """Booted hosts after their first roll."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        network = stack.enter_context(Network.build(3))
        hosts = stack.enter_context(boot(network, folder))
        for each in hosts:
            shutil.copytree(wheels["house"], each.root / WHEELS_ON_HOSTS)
        secret = [
            subprocess.check_output([Path(sys.prefix) / "bin/swarm-agent", "--generate-key"], text=True).strip()
            for _ in range(2)
        ]
        first = min(version for version in wheels if version != "house")
        variables = {
            "swarm_agent_wheel": str(wheels[first]),
            "swarm_agent_wheelhouse": f"/{WHEELS_ON_HOSTS}",
            "swarm_agent_python_packages": [],
            "swarm_agent_cluster_key": secret[0],
            "swarm_agent_token": secret[1],
            "swarm_agent_settings": {"simulated_gpus": 2},
        }
        fleet = Fleet(hosts, folder, wheels, variables)
        done = fleet.play("site.yml")
        assert done.returncode == 0, said(done)
        yield fleet


@pytest.fixture
def job(fleet):
    """A job of six ranks that runs on all hosts; at the end of the test it runs as it did, and is cancelled."""
    spec = {"command": ["sleep", "86400"], "ranks": 6, "gpus_per_rank": 1}
    job_id = fleet.ask("/v1/jobs", body={"spec": spec})["id"]
    before = ranks_of(fleet, job_id)
    yield job_id
    document = fleet.ask(f"/v1/jobs/{job_id}")
    assert (document["state"], document["attempt"]) == ("running", 1)
    assert ranks_of(fleet, job_id) == before
    fleet.ask(f"/v1/jobs/{job_id}/cancel", body={})


def ranks_of(fleet, job_id):
    """Process ids of the ranks on each host, once all run."""
    waited = threading.Event()
    for _ in range(300):
        if fleet.ask(f"/v1/jobs/{job_id}")["state"] == "running":
            break
        waited.wait(0.2)
    found = [sorted(each.run("pgrep", "-x", "sleep").split()) for each in fleet.hosts]
    assert sum(map(len, found)) == 6, found
    return found


class Caller(threading.Thread):
    """Somebody who asks any agent all the time, and the next one where that one does not answer."""

    def __init__(self, fleet):
        super().__init__(daemon=True)
        self.fleet, self.asked, self.refused, self.lost = fleet, 0, 0, 0
        self.is_over = threading.Event()

    def run(self):
        while not self.is_over.wait(0.2):
            self.asked += 1
            self.lost += not any(self._answers((self.asked + step) % 3) for step in range(3))

    def _answers(self, index):
        try:
            return bool(self.fleet.ask("/v1/status", at=index))
        except OSError:
            self.refused += 1
            return False


def test_the_first_roll_leaves_three_agents_that_found_one_another(fleet):
    assert [len(fleet.ask("/v1/nodes", at=index)["items"]) for index in range(3)] == [3, 3, 3]
    assert [each.run("systemctl", "--failed", "--no-legend") for each in fleet.hosts] == ["", "", ""]


def test_a_second_roll_changes_nothing(fleet, stopwatch):
    before = fleet.main_pids()
    with stopwatch("second roll"):
        done = fleet.play("site.yml")
    assert done.returncode == 0, said(done)
    assert set(changes(done).values()) == {0}, said(done)
    assert fleet.main_pids() == before


def test_a_bad_setting_is_refused_and_nothing_is_replaced(fleet):
    before = fleet.main_pids()
    done = fleet.play("site.yml", swarm_agent_settings={"simulated_gpus": 2, "log_levle": "debug"})
    assert done.returncode != 0
    assert "log_level" in done.stdout
    assert len(changes(done)) == 1  # the roll stopped at the first host
    assert fleet.main_pids() == before
    assert "log_levle" not in fleet.hosts[0].run("cat", "/etc/swarm/agent.toml")


@pytest.mark.parametrize("key", ["x" * 24, "5e" * 32], ids=["no-key", "another-key"])
def test_a_bad_key_is_refused_and_nothing_is_replaced(fleet, key):
    before = fleet.main_pids()
    done = fleet.play("site.yml", swarm_agent_cluster_key=key)
    assert done.returncode != 0
    assert set(changes(done).values()) == {0}, said(done)
    assert fleet.main_pids() == before
    assert fleet.hosts[0].run("cat", "/etc/swarm/cluster.key").strip() == fleet.variables["swarm_agent_cluster_key"]


def test_an_upgrade_disturbs_no_job_and_no_client(fleet, job, stopwatch, report):
    caller = Caller(fleet)
    caller.start()
    fleet.variables["swarm_agent_wheel"] = str(fleet.wheels[NEXT_VERSION])
    with stopwatch("upgrade"):
        done = fleet.play("upgrade.yml")
    caller.is_over.set()
    caller.join()
    report(f"{caller.asked} questions of a client, {caller.refused} not answered by one agent, {caller.lost} by none")
    assert done.returncode == 0, said(done)
    assert fleet.versions() == [NEXT_VERSION] * 3
    assert caller.lost == 0


def test_another_key_disturbs_no_job_and_the_old_one_is_gone(fleet, job, stopwatch):
    old, new = fleet.variables["swarm_agent_cluster_key"], "a7" * 32
    with stopwatch("another key"):
        done = fleet.play("rotate-key.yml", swarm_agent_new_key=new)
    assert done.returncode == 0, said(done)
    fleet.variables["swarm_agent_cluster_key"] = new
    for each in fleet.hosts:
        assert each.run("sh", "-c", "cat /etc/swarm/*.key").split() == [new]
    assert old not in done.stdout
    again = fleet.play("rotate-key.yml", swarm_agent_new_key=new)
    assert again.returncode == 0, said(again)
    assert set(changes(again).values()) == {0}, said(again)

"""The Ansible role on hosts that boot, Debian 12 and 13 in turn: what each playbook does, and that no job notices."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest

from tests.testbed.booted import SUITES, BootedHost, boot, why_no_hosts
from tests.testbed.netns import Network
from tests.testbed.released import RELEASED, build_wheel, released_wheel, why_not_released

pytestmark = [pytest.mark.acceptance, pytest.mark.root]

ROOT = Path(__file__).resolve().parents[2]
ANSIBLE = ROOT / "ansible"
BIN = ROOT / ".venv-ansible/bin"
ROLL_LIMIT_S = 1_200
PYTHONS = ("3.11", "3.13")  # of the suites
WHEELS_ON_HOSTS = "srv/wheelhouse"
RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE)


@dataclass
class Fleet:
    """Three hosts and a fourth that is no part of the swarm yet, what Ansible is told of them, and a client."""

    hosts: list[BootedHost]
    spare: BootedHost
    folder: Path
    wheels: dict[str, Path]
    variables: dict = field(default_factory=dict)

    def play(self, book, *options, **variables):
        """Run a playbook over all hosts; how it ended and what it said."""
        given = self.folder / "variables.json"
        given.write_text(json.dumps({**self.variables, **variables}))
        known = {"ansible_user": "root", "ansible_ssh_private_key_file": str(self.folder / "id")}
        inventory = {
            "swarm": {"hosts": {each.name: {"ansible_host": each.host.address} | known for each in self.hosts}}
        }
        (self.folder / "inventory.json").write_text(json.dumps(inventory))
        return subprocess.run(
            [
                BIN / "ansible-playbook", "-i", self.folder / "inventory.json", "-e", f"@{given}", *options,
                f"playbooks/{book}",
            ],
            cwd=ANSIBLE, text=True, capture_output=True, timeout=ROLL_LIMIT_S, check=False,
            env=os.environ | {
                "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOST_KEY_CHECKING": "false", "ANSIBLE_LOCALHOST_WARNING": "false",
                "ANSIBLE_HOME": str(self.folder / "ansible"),
                "ANSIBLE_SSH_ARGS": "-o UserKnownHostsFile=/dev/null -o ControlMaster=auto -o ControlPersist=60s",
            },
        )  # fmt: skip

    def ask(self, path, *, at=0, body=None, token=None):
        """A document of an agent's API."""
        request = urllib.request.Request(
            f"http://{self.hosts[at].host.address}:7433{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {token or self.variables['swarm_agent_token']}",
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


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The last released version and today's, and a folder of all that they depend on, for the Pythons of all suites."""
    folder = tmp_path_factory.mktemp("wheels")
    build_wheel(ROOT, folder)
    today = next(folder.glob("swarmsched-*.whl"))
    found = {today.name.split("-")[1]: today, "today": today, "house": folder / "house"}
    if not why_not_released():
        found[RELEASED] = released_wheel(folder)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "-d", str(found["house"])]
    for python in PYTHONS:
        constrained = ["-c", str(ROOT / "constraints.txt"), "--python-version", python]
        subprocess.run([*command, *constrained, f"{today}[agent]"], check=True, timeout=600)
    return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, wheels):
    """Booted hosts after their first roll."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        network = stack.enter_context(Network.build(4))
        hosts = stack.enter_context(boot(network, folder, SUITES))
        for each in hosts:
            shutil.copytree(wheels["house"], each.root / WHEELS_ON_HOSTS)
        secret = [
            subprocess.check_output([Path(sys.prefix) / "bin/swarm-agent", "--generate-key"], text=True).strip()
            for _ in range(2)
        ]
        variables = {
            "swarm_agent_wheel": str(wheels.get(RELEASED, wheels["today"])),
            "swarm_agent_wheelhouse": f"/{WHEELS_ON_HOSTS}",
            "swarm_agent_python_packages": [],
            "swarm_agent_cluster_key": secret[0],
            "swarm_agent_token": secret[1],
            "swarm_agent_settings": {"simulated_gpus": 2},
        }
        # Which is the first by name: all others have it among their seeds as soon as it comes.
        fleet = Fleet(hosts[1:], hosts[0], folder, wheels, variables)
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


@contextmanager
def asking(fleet, report):
    """For the time of a block somebody asks; no question is answered by nobody."""
    caller = Caller(fleet)
    caller.start()
    yield
    caller.is_over.set()
    caller.join()
    report(f"{caller.asked} questions of a client, {caller.refused} not answered by one agent, {caller.lost} by none")
    assert caller.lost == 0


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


def test_an_upgrade_from_the_released_version_disturbs_no_job_and_no_client(fleet, job, stopwatch, report):
    if reason := why_not_released():
        pytest.skip(reason)
    assert set(fleet.versions()) == {RELEASED}
    with asking(fleet, report), stopwatch("upgrade"):
        fleet.variables["swarm_agent_wheel"] = str(fleet.wheels["today"])
        done = fleet.play("upgrade.yml")
    assert done.returncode == 0, said(done)
    assert RELEASED not in fleet.versions()


def test_a_check_foretells_nothing_for_hosts_that_are_as_they_should_be(fleet):
    before = fleet.main_pids()
    done = fleet.play("site.yml", "--check")
    assert done.returncode == 0, said(done)
    assert set(changes(done).values()) == {0}, said(done)
    done = fleet.play("site.yml", "--check", swarm_agent_settings={"simulated_gpus": 2, "log_level": "debug"})
    assert done.returncode == 0, said(done)
    assert set(changes(done).values()) == {2}, said(done)  # the file, and the restart that follows
    assert fleet.main_pids() == before


def test_commands_on_a_host_find_their_agent(fleet):
    for each in fleet.hosts:
        assert "warning" not in each.run("env", "HOME=/root", "swarm", "nodes")
        doctor = each.run("sh", "-c", "HOME=/root swarm doctor -o wide; echo code $?")
        assert "no agent answered" not in doctor
        assert doctor.rstrip().endswith(("code 0", "code 1")), doctor


def test_a_host_comes_and_goes_and_no_other_is_restarted(fleet, job, stopwatch):
    before, name = fleet.main_pids(), fleet.spare.name
    together = Fleet([*fleet.hosts, fleet.spare], fleet.spare, fleet.folder, fleet.wheels, fleet.variables)
    foretold = together.play("site.yml", "--check")
    assert foretold.returncode == 0, said(foretold)
    assert changes(foretold)[name] > 5
    assert fleet.spare.run("sh", "-c", "ls -A /etc/swarm 2>/dev/null || true") == ""
    with stopwatch("a fourth host"):
        done = together.play("site.yml")
    assert done.returncode == 0, said(done)
    assert changes(done)[name] > 5
    assert fleet.main_pids() == before
    assert len(fleet.ask("/v1/nodes")["items"]) == 4
    assert set(changes(together.play("site.yml", "--check")).values()) == {0}

    last = fleet.ask("/v1/jobs", body={"spec": {"command": ["sleep", "25"], "nodes": [name]}})["id"]
    with stopwatch("its removal"):
        done = together.play("remove.yml", swarm_agent_remove_hosts=name)
    assert done.returncode == 0, said(done)
    assert fleet.ask(f"/v1/jobs/{last}")["end_reason"] == "completed"  # it was waited for
    there = fleet.spare.run("sh", "-c", "ls -d /etc/swarm /usr/local/bin/swarm* /opt/swarmsched /var/lib/swarm || true")
    assert there.split() == ["/var/lib/swarm"]
    assert fleet.spare.run("sh", "-c", "grep -rl swarm-agent /etc/systemd || true") == ""
    members = {each["name"]: each["status"] for each in fleet.ask("/v1/members")["items"]}
    assert members.pop(name, "left") == "left"
    assert set(members.values()) == {"alive"}
    again = together.play("remove.yml", swarm_agent_remove_hosts=name)
    assert again.returncode == 0, said(again)
    assert fleet.play("site.yml").returncode == 0
    done = fleet.play("site.yml")
    assert set(changes(done).values()) == {0}, said(done)
    assert fleet.main_pids() == before

    assert together.play("site.yml").returncode == 0
    assert not fleet.ask(f"/v1/nodes/{name}")["is_draining"]  # though it drained when it went
    done = together.play("remove.yml", swarm_agent_remove_hosts=name, swarm_agent_remove_data=True)
    assert done.returncode == 0, said(done)
    assert fleet.play("site.yml").returncode == 0
    assert fleet.main_pids() == before


def test_whoever_is_to_be_removed_must_be_named(fleet):
    for named in ("", "nobody", ",".join(each.name for each in fleet.hosts)):
        done = fleet.play("remove.yml", swarm_agent_remove_hosts=named)
        assert done.returncode != 0
        assert "swarm_agent_remove_hosts" in done.stdout + done.stderr
    assert {each["status"] for each in fleet.ask("/v1/members")["items"] if each["name"] != fleet.spare.name} == {
        "alive"
    }


def test_another_token_turns_nobody_away(fleet, job, stopwatch, report):
    old, new = fleet.variables["swarm_agent_token"], "b9" * 32
    at_once = fleet.play("site.yml", swarm_agent_token=new)
    assert at_once.returncode != 0
    assert "rotate-token.yml" in at_once.stdout
    with asking(fleet, report), stopwatch("another token"):
        done = fleet.play("rotate-token.yml", swarm_agent_new_token=new)
    assert done.returncode == 0, said(done)
    for at, token in product(range(3), (old, new)):
        assert len(fleet.ask("/v1/nodes", at=at, token=token)["items"]) >= 3
    assert old not in done.stdout + done.stderr
    fleet.variables["swarm_agent_token"] = new
    ended = fleet.play("rotate-token.yml", swarm_agent_new_token=new, swarm_agent_end_old_tokens=True)
    assert ended.returncode == 0, said(ended)
    for at in range(3):
        assert fleet.ask("/v1/nodes", at=at)["items"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fleet.ask("/v1/nodes", at=at, token=old)
    done = fleet.play("site.yml")
    assert set(changes(done).values()) == {0}, said(done)


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

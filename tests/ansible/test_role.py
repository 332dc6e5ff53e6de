"""The role `swarm_agent`: lint, syntax, what its templates become, and what its checks refuse.

Hosts that boot, transient units and upgrades are not covered here (see the role's README).
"""

import base64
import json
import os
import pwd
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarm_client import config as swarm_client_config
from tests.testbed.found import working

ROOT = Path(__file__).parents[2]
ANSIBLE = ROOT / "ansible"
ROLE = ANSIBLE / "roles/swarm_agent"
BIN = ROOT / ".venv-ansible/bin"
KEY = "6f" * 32

OLD_KEY = "77" * 32

CHECKPOINTS = "/var/lib/swarm-check points"  # begins like the data's folder and is not below it

FIRST_THREE = ["10.0.0.11:7433", "10.0.0.12:7433", "10.0.0.13:7433"]
ALONE = 'seeds = [\n]\nkeyring_files = [\n  "/etc/swarm/previous-0.key",\n]\n'
OTHERS = ALONE.replace("[\n", '[\n  "10.9.9.9:7433",\n  "[fd00::9]:7433",\n', 1)
# By host: the members that its agent knows, the configuration that is there, and the seeds that are written at first.
JOINED: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "y-joined": ({"gpu2": "alive", "y-joined": "alive"}, OTHERS, ["10.9.9.9:7433", "[fd00::9]:7433"]),
    "y-lost": ({"gpu2": "failed", "xlate": "alive"}, OTHERS, FIRST_THREE),
    "y-alone": ({"gpu2": "alive"}, ALONE, FIRST_THREE),
    "y-fresh": ({}, "", FIRST_THREE),
}

REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "jobs-as-root": ({"swarm_agent_job_user": "root"}, "account other than root"),
    "key-that-is-none": ({"swarm_agent_cluster_key": "x" * 24}, "64 hexadecimal digits"),
    "another-key-at-once": ({"swarm_agent_cluster_key": "5e" * 32}, "playbooks/rotate-key.yml"),
    "another-token-at-once": ({"swarm_agent_token": "5e" * 32, "swarm_agent_previous_tokens": []}, "rotate-token.yml"),
    "short-token": ({"swarm_agent_token": "short"}, "swarm-agent --generate-key"),
    "one-port-twice": ({"swarm_agent_people_port": 7433}, "another number than swarm_agent_port"),
    "port-beyond-all": ({"swarm_agent_port": 65536}, "number from 1 to 65535"),
}

pytestmark = [
    pytest.mark.xdist_group("ansible"),
    pytest.mark.skipif(
        not (BIN / "ansible-playbook").exists(),
        reason="no .venv-ansible (ansible-core, ansible-lint); make it with make test",
    ),
]


def ansible(*arguments, cwd=ANSIBLE, **environment):
    """Run one of Ansible's commands in the room's folder."""
    command = [str(BIN / arguments[0]), *map(str, arguments[1:])]
    given = {
        "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        **environment,
    }
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **given}, capture_output=True, text=True, timeout=300, check=False
    )


@dataclass(frozen=True)
class Played:
    """One run of the role's checks and templates over all hosts; starting Ansible takes longer than what it does."""

    folder: Path  # what was rendered, in a folder for each host
    code: int
    said: str

    def lines(self, host, name):
        """Of a rendered file."""
        return (self.folder / host / name).read_text().splitlines()

    def config(self, host):
        """Rendered for that host."""
        return tomllib.loads((self.folder / host / "agent.toml").read_text())

    def failures(self, host):
        """What Ansible said of the host's failed tasks."""
        return [line for line in self.said.splitlines() if line.startswith(f"fatal: [{host}]: FAILED!")]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The example inventory, and in group `refused` hosts whose variables are wrong.

    The secrets lie where the configuration says.
    """
    folder = tmp_path_factory.mktemp("rendered")
    secrets = {"cluster.key": KEY, "token": f"{KEY}\n{OLD_KEY}\n", "previous-0.key": OLD_KEY}
    for name, text in secrets.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    given = {
        "swarm_agent_wheel": "dist/swarmsched-1.2.3-py3-none-any.whl",
        "swarm_agent_python": sys.executable,
        "swarm_agent_config_dir": str(folder),
        "swarm_agent_venv": str(Path(sys.prefix)),
        "swarm_agent_previous_keys": [OLD_KEY],
        "swarm_agent_previous_tokens": [OLD_KEY],
        "swarm_agent_service_environment": {"LD_LIBRARY_PATH": "/opt/with space"},
        "ansible_python_interpreter": str(BIN / "python"),
    }
    (folder / "variables.json").write_text(json.dumps(given))
    (folder / "inventory.json").write_text(json.dumps(inventory(folder)))
    sources = [word for each in (ANSIBLE / "inventory/example.ini", folder / "inventory.json") for word in ("-i", each)]
    book = Path(__file__).with_name("role.yml")
    result = ansible("ansible-playbook", *sources, "-e", f"@{folder / 'variables.json'}", book)
    return Played(folder, result.returncode, result.stdout + result.stderr)


def inventory(folder):
    """Variables of hosts, beside those of the example inventory."""
    account = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    good: dict[str, object] = {
        "swarm_agent_token": KEY,
        "swarm_agent_cluster_key": KEY,
        "swarm_agent_job_user": account,
    }
    settings = {"dcgm_metrics": True, "log_level": "debug", "telemetry_period_s": 2, "checkpoint_dir": CHECKPOINTS}
    hosts = {
        "gpu1": good | {"swarm_agent_settings": settings, "swarm_agent_people_port": 0},
        "gpu2": good | {"swarm_agent_people_port": 7444},
        "witness": good | {"swarm_agent_settings": {"checkpoint_dir": "/var/lib/swarm/saved"}},
        "xlate": good | {"ansible_host": "fd00::4"},
    }
    for name, (members, present, _) in JOINED.items():
        items = [{"name": member, "status": status} for member, status in members.items()]
        hosts[name] = good | {
            "swarm_agent_members": {"json": {"items": items}},
            "swarm_agent_config_there": {"content": base64.b64encode(present.encode()).decode()},
        }
    refused = {name: good | variables for name, (variables, _) in REFUSED.items()}
    for name, variables in (hosts | refused).items():
        (folder / name).mkdir()
        variables["render_dir"] = str(folder / name)
    return {"swarm": {"hosts": hosts}, "refused": {"hosts": refused}}


def agent_command():
    return str(Path(sys.prefix) / "bin/swarm-agent")


def test_lint_is_clean_at_the_production_profile():
    result = ansible("ansible-lint", "--offline", "--profile", "production", "-q")
    assert result.returncode == 0, result.stdout + result.stderr


def test_playbooks_have_no_syntax_errors():
    result = ansible("ansible-playbook", "--syntax-check", *ANSIBLE.glob("playbooks/*.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("host", ["gpu1", "gpu2", "witness", "xlate"])
def test_checks_pass_and_the_agent_accepts_the_rendered_configuration(played, host):
    assert played.failures(host) == [], played.said
    path = played.folder / host / "agent.toml"
    result = subprocess.run([agent_command(), "--check-config", str(path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_rendered_configuration_names_the_first_three_hosts_as_seeds(played):
    config = played.config("gpu1")
    assert config["name"] == "gpu1"
    assert config["listen"] == "10.0.0.11:7433"
    assert config["seeds"] == ["10.0.0.12:7433", "10.0.0.13:7433"]
    assert played.config("xlate")["seeds"] == FIRST_THREE  # and nobody has it as a seed: it may come and go
    assert config["dcgm_metrics"] is True
    assert config["telemetry_period_s"] == 2
    assert config["checkpoint_dir"] == CHECKPOINTS


def test_people_have_a_door_of_their_own_where_a_port_is_set_and_clients_ask_there(played):
    assert "people_listen" not in played.config("gpu1")
    assert played.config("gpu2")["people_listen"] == "10.0.0.12:7444"
    hosts = ("gpu1", "gpu2")
    asked = {host: tomllib.loads((played.folder / host / "config.toml").read_text())["hosts"] for host in hosts}
    assert asked["gpu1"] == ["10.0.0.11:7433", "10.0.0.12:7444", "10.0.0.13:7433"]
    assert asked["gpu2"] == ["10.0.0.12:7444", "10.0.0.11:7433", "10.0.0.13:7444"], (
        "one that says nothing is as this one"
    )
    assert played.config("gpu1")["seeds"] == ["10.0.0.12:7433", "10.0.0.13:7433"]


@pytest.mark.parametrize("host", JOINED)
def test_an_agent_that_has_a_member_among_its_new_seeds_is_not_restarted_for_them(played, host):
    assert played.config(host)["seeds"] == JOINED[host][2]


def test_a_witness_is_configured_as_one_and_checkpoints_below_the_data_need_no_further_rule(played):
    assert "witness" not in played.config("gpu1")
    assert played.config("witness")["witness"] is True
    lines = played.lines("witness", "swarm-agent.service")
    assert values(lines, "ReadWritePaths") == ["/var/lib/swarm", "-/home", "-/tmp", "-/var/tmp"]
    assert values(lines, "RequiresMountsFor") == []


def test_the_client_on_a_host_asks_its_own_agent_first(played):
    client = tomllib.loads((played.folder / "xlate/config.toml").read_text())
    assert client["hosts"][0] == "[fd00::4]:7433"
    assert client["token_file"] == played.config("xlate")["token_file"]
    assert swarm_client_config.SYSTEM_FILE in (ROLE / "tasks/configure.yml").read_text()


def test_agent_refuses_a_misspelt_setting_before_it_replaces_anything(played, tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text((played.folder / "gpu1/agent.toml").read_text() + "log_levle = 'debug'\n")
    result = subprocess.run(
        [agent_command(), "--check-config", str(broken)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "log_level" in result.stderr


@pytest.mark.skipif(not working("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_accepts_the_rendered_unit(played):
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(played.folder / "gpu1/swarm-agent.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in result.stderr.splitlines() if "swarm-agent.service" in line]
    assert complaints == []


def test_unit_lets_jobs_outlive_the_agent(played):
    lines = played.lines("gpu1", "swarm-agent.service")
    for line in ("KillMode=process", "OOMPolicy=continue", "NoNewPrivileges=yes", "LimitCORE=0:infinity"):
        assert line in lines
    assert 'Environment="LD_LIBRARY_PATH=/opt/with space"' in lines
    closing = {"PrivateDevices", "ProtectClock", "DeviceAllow", "PrivateTmp"}  # would hide the GPUs or part the jobs
    assert not closing & {line.partition("=")[0] for line in lines}


def test_unit_lets_checkpoints_be_written_outside_of_the_data_and_waits_for_their_mount(played):
    lines = played.lines("gpu1", "swarm-agent.service")
    assert lines[0].startswith("# Written by Ansible")
    apart = f'"{CHECKPOINTS}"'
    assert values(lines, "ReadWritePaths") == ["/var/lib/swarm", apart, "-/home", "-/tmp", "-/var/tmp"]
    assert values(lines, "RequiresMountsFor") == [apart]


def values(lines, key):
    """What a unit file sets a key to, in order."""
    return [line.partition("=")[2] for line in lines if line.partition("=")[0] == key]


@pytest.mark.parametrize("host", REFUSED)
def test_checks_refuse_bad_variables_with_a_remedy_and_render_nothing(played, host):
    _, remedy = REFUSED[host]
    assert len(played.failures(host)) == 1
    assert remedy in played.said  # beside the failure, which says nothing itself where it would show a secret
    assert list((played.folder / host).iterdir()) == []
    assert played.code == 2


def test_no_secret_is_shown(played):
    shown = played.said.replace("short-token", "")
    assert "short" not in shown
    assert KEY not in shown


def test_every_default_is_described_and_every_description_has_a_default():
    import yaml

    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    options = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    assert defaults.keys() == options.keys()

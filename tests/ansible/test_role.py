"""The role `swarm_agent`: lint, syntax, what its templates become, and what its checks refuse.

Hosts that boot, transient units and upgrades are not covered here (see the role's README).
"""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANSIBLE = ROOT / "ansible"
ROLE = ANSIBLE / "roles/swarm_agent"
BIN = ROOT / ".venv-ansible/bin"
KEY = "b2Zmc2V0LW9mLWEta2V5LXRoYXQtaXMtbG9uZy1lbm91Z2g="

pytestmark = pytest.mark.skipif(
    not (BIN / "ansible-playbook").exists(),
    reason="no .venv-ansible (ansible-core, ansible-lint); make it with make setup-ansible",
)


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


def playbook(name, tmp_path, **variables):
    """Run one of the playbooks beside this file against the example inventory."""
    given = {
        "swarm_agent_wheel": "dist/swarmsched-1.2.3-py3-none-any.whl",
        "swarm_agent_cluster_key": KEY,
        "swarm_agent_token": KEY,
        "swarm_agent_python": sys.executable,
        "ansible_python_interpreter": str(BIN / "python"),
        **variables,
    }
    extra = tmp_path / "variables.json"
    extra.write_text(json.dumps(given))
    inventory = ANSIBLE / "inventory/example.ini"
    return ansible("ansible-playbook", "-i", inventory, "-e", f"@{extra}", Path(__file__).parent / name)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """The configuration and the unit of host gpu1, with secrets where the configuration says."""
    folder = tmp_path_factory.mktemp("rendered")
    for name in ("cluster.key", "token", "previous-0.key"):
        (folder / name).write_text(subprocess.check_output([agent_command(), "--generate-key"], text=True))
        (folder / name).chmod(0o600)
    account = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    result = playbook(
        "render.yml",
        folder,
        render_dir=str(folder),
        swarm_agent_config_dir=str(folder),
        swarm_agent_venv=str(Path(sys.prefix)),
        swarm_agent_job_user=account,
        swarm_agent_previous_keys=[KEY],
        swarm_agent_settings={"dcgm_metrics": True, "log_level": "debug", "telemetry_period_s": 2},
        swarm_agent_service_environment={"LD_LIBRARY_PATH": "/opt/with space"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def agent_command():
    return str(Path(sys.prefix) / "bin/swarm-agent")


def test_lint_is_clean_at_the_production_profile():
    result = ansible("ansible-lint", "--offline", "--profile", "production", "-q")
    assert result.returncode == 0, result.stdout + result.stderr


def test_playbook_has_no_syntax_errors():
    result = ansible("ansible-playbook", "--syntax-check", "playbooks/site.yml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_agent_accepts_the_rendered_configuration(rendered):
    result = subprocess.run(
        [agent_command(), "--check-config", str(rendered / "agent.toml")], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_rendered_configuration_names_the_other_hosts_as_seeds(rendered):
    config = tomllib.loads((rendered / "agent.toml").read_text())
    assert config["name"] == "gpu1"
    assert config["listen"] == "10.0.0.11:7433"
    assert config["seeds"] == ["10.0.0.12:7433", "10.0.0.13:7433"]
    assert config["dcgm_metrics"] is True
    assert config["telemetry_period_s"] == 2


def test_agent_refuses_a_misspelt_setting_before_it_replaces_anything(rendered):
    broken = rendered / "broken.toml"
    broken.write_text((rendered / "agent.toml").read_text() + "log_levle = 'debug'\n")
    result = subprocess.run(
        [agent_command(), "--check-config", str(broken)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "log_level" in result.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_rendered_unit(rendered):
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(rendered / "swarm-agent.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in result.stderr.splitlines() if "swarm-agent.service" in line]
    assert complaints == []


def test_unit_lets_jobs_outlive_the_agent(rendered):
    lines = (rendered / "swarm-agent.service").read_text().splitlines()
    for line in ("KillMode=process", "OOMPolicy=continue", "NoNewPrivileges=yes"):
        assert line in lines
    assert 'Environment="LD_LIBRARY_PATH=/opt/with space"' in lines
    closing = {"PrivateDevices", "ProtectClock", "DeviceAllow", "PrivateTmp"}  # would hide the GPUs or part the jobs
    assert not closing & {line.partition("=")[0] for line in lines}


def test_checks_pass_for_good_variables(tmp_path):
    result = playbook("preflight.yml", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        ({"swarm_agent_job_user": "root"}, "account other than root"),
        ({"swarm_agent_token": "short"}, "swarm-agent --generate-key"),
    ],
)
def test_checks_refuse_bad_variables_with_a_remedy(tmp_path, variables, remedy):
    result = playbook("preflight.yml", tmp_path, **variables)
    assert result.returncode == 2
    assert remedy in result.stdout
    assert "short" not in result.stdout


def test_every_default_is_described_and_every_description_has_a_default():
    import yaml

    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    options = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    assert defaults.keys() == options.keys()

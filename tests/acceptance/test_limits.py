"""A machine of its own, with Debian's kernel and systemd: what jobs booked is what they get, and nothing more."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testbed import booted
from tests.testbed.booted import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
GUEST = Path(__file__).with_name("limits_guest.py")
KERNEL = booted.BASES.with_name("swarm-booted-kernel")
BOOT_LIMIT_S = 540
EMULATOR = "qemu-system-x86_64"
NEEDED = (*PROGRAMS, EMULATOR, "cpio", "apt-get", "dpkg-deb")
LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt", "var/cache/apt")
MASKED = ("serial-getty@.service", "getty@.service", "e2scrub_reap.service", "systemd-logind.service", "ssh.service")
SETTINGS = """name = "n1"
listen = "127.0.0.1:7433"
data_dir = "/var/lib/swarm"
job_user = "nobody"
simulated_gpus = 2
task_processes_max = 64
"""
CHECKS_UNIT = """[Service]
Type=oneshot
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
Environment=PYTHONPATH=/opt/swarm/site:/opt/swarm/src
ExecStart=/usr/bin/python3 -u /opt/swarm/limits_guest.py
ExecStopPost=/usr/bin/journalctl -u swarm-agent --no-pager -n 40
ExecStopPost=/usr/bin/systemctl poweroff -f
[Install]
WantedBy=multi-user.target
"""
AGENT_PROGRAM = """#!/bin/sh
export PYTHONPATH=/opt/swarm/site:/opt/swarm/src
exec python3 -c '
import sys
from pathlib import Path
from swarm_agent.supervision import limits
from swarm_agent.__main__ import main
limits.GPU_FOLDER = Path("/run/gpus")
sys.exit(main())' "$@"
"""
RENDER = """
import json, sys, jinja2
environment = jinja2.Environment(trim_blocks=True)
environment.filters["to_json"] = json.dumps
print(environment.from_string(open(sys.argv[1]).read()).render(**json.loads(sys.argv[2])))
"""
ROLE_VARIABLES = {
    "swarm_agent_settings": {}, "swarm_agent_data_dir": "/var/lib/swarm", "swarm_agent_venv": "/opt/swarm",
    "swarm_agent_config_dir": "/etc/swarm", "swarm_agent_service_environment": {}, "swarm_agent_start_timeout_s": 300,
    "swarm_agent_job_paths": ["/tmp"], "swarm_agent_cluster_label": "swarm",
}  # fmt: skip


def why_no_machine() -> str:
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing or os.geteuid():
        return f"not found: {', '.join(missing)}" if missing else "needs root"
    if sys.version_info[:2] != (3, 11) or os.uname().machine != "x86_64":
        return "the machine runs Debian 12 for x86_64: its Python is 3.11, and this one's packages must fit"
    return ""


def quietly(*words: object, **options) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True, **options).stdout


def kernel() -> Path:
    """Debian's for virtual machines; fetched at the first call, installed nowhere."""
    if not list(KERNEL.glob("boot/vmlinuz-*")):
        KERNEL.mkdir(exist_ok=True)
        words = quietly("apt-cache", "depends", "linux-image-cloud-amd64").split()
        quietly("apt-get", "download", words[words.index("Depends:") + 1], cwd=KERNEL)
        quietly("dpkg-deb", "-x", next(KERNEL.glob("*.deb")), KERNEL)
    return next(KERNEL.glob("boot/vmlinuz-*"))


def lay_out(root: Path) -> None:
    """Debian with this agent, its unit as the Ansible role writes it, and a unit that runs the checks and ends."""
    quietly("cp", "-a", booted._base(booted.SUITES[0]), root)
    for path in LEFT_OUT:
        shutil.rmtree(root / path, ignore_errors=True)
    units = root / "etc/systemd/system"
    for name in MASKED:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
    swarm = root / "opt/swarm"
    (swarm / "bin").mkdir(parents=True)
    packages = Path(sys.prefix) / "lib/python3.11/site-packages"
    unused = shutil.ignore_patterns(
        "mypy*", "ruff*", "uv", "uv-*", "pip*", "setuptools*", "hypothesis*", "*.pth", "__pycache__"
    )
    shutil.copytree(packages, swarm / "site", ignore=unused, symlinks=True)
    for package in ("swarmsched", "agent/swarm_agent", "client/swarm_client", "client/swarm_elastic"):
        shutil.copytree(
            ROOT / package, swarm / "src" / Path(package).name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(GUEST, swarm)
    (swarm / "bin/swarm-agent").write_text(AGENT_PROGRAM)
    (swarm / "bin/swarm-agent").chmod(0o755)
    for folder in ("etc/swarm", "var/lib/swarm"):
        (root / folder).mkdir(parents=True)
    (root / "etc/swarm/agent.toml").write_text(SETTINGS)
    template = ROOT / "ansible/roles/swarm_agent/templates/swarm-agent.service.j2"
    unit = quietly(ROOT / ".venv-ansible/bin/python", "-c", RENDER, template, json.dumps(ROLE_VARIABLES))
    (units / "swarm-agent.service").write_text(unit)
    (units / "checks.service").write_text(CHECKS_UNIT)
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "multi-user.target.wants/checks.service").symlink_to("../checks.service")
    (root / "init").symlink_to("usr/lib/systemd/systemd")


@pytest.mark.acceptance
@pytest.mark.root
@pytest.mark.skipif(bool(why_no_machine()), reason=why_no_machine() or "-")
def test_jobs_are_held_to_what_they_booked(tmp_path):
    lay_out(tmp_path / "root")
    image = tmp_path / "root.cpio"
    quietly("sh", "-c", f"find . -print0 | cpio --null -o -H newc --quiet > {image}", cwd=tmp_path / "root")
    shutil.rmtree(tmp_path / "root")
    told = subprocess.run(
        [
            EMULATOR, "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "2560", "-net", "none", "-nographic",
            "-no-reboot", "-kernel", str(kernel()), "-initrd", str(image), "-append",
            "console=ttyS0 panic=-1 loglevel=4 rdinit=/init systemd.show_status=no",
        ],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=BOOT_LIMIT_S, check=False,
    ).stdout  # fmt: skip
    assert "ALL HOLD" in told, told[-6_000:]

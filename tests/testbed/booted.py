"""Hosts that boot a real systemd by systemd-nspawn, on the network of `tests.testbed.netns`, with ssh for Ansible.

    with Network.build(3) as network, boot(network, folder) as hosts:
        hosts[0].run("systemctl", "is-active", "ssh")

Those of a suite share one Debian tree, which debootstrap makes once and which is kept outside of the project; each host
writes to a layer of its own.  Root only; needs systemd-container, debootstrap and openssh-client.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.testbed.netns import Host, Network, run, why_not

BASES = Path(tempfile.gettempdir()) / "swarm-booted-suites"
SUITES = ("bookworm", "trixie")  # Debian 12 with Python 3.11, and 13 with 3.13
OLD_CGROUPS = (
    "SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1"  # systemd of Debian 13 does not boot on control groups v1 otherwise
)
PROGRAMS = ("systemd-nspawn", "debootstrap", "ssh", "ssh-keygen")
PACKAGES = (
    "systemd,systemd-sysv,libpam-systemd,dbus,openssh-server,python3,python3-venv,python3-packaging,"
    "iproute2,procps,ca-certificates"
)
BOOT_TIMEOUT_S = 60.0
HALT_TIMEOUT_S = 20.0
CGROUPS = Path("/sys/fs/cgroup")
POWER_OFF = signal.SIGRTMIN + 4
QUIET_TIMERS = ("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer", "fstrim.timer")


def why_no_hosts() -> str:
    """Why no host can be booted here; empty when one can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return why_not() or (f"not found: {', '.join(missing)}" if missing else "")


@dataclass
class BootedHost:
    """One machine with an init of its own."""

    host: Host
    folder: Path  # holds the layer, the mounted root and the console's log
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def name(self) -> str:
        """Host name."""
        return self.host.namespace

    @property
    def root(self) -> Path:
        """Where its file system is seen from outside."""
        return self.folder / "root"

    def run(self, *words: str, is_checked: bool = True) -> str:
        """Output of a command inside; `RuntimeError` with what it said when it fails and is checked."""
        inside = [
            "nsenter",
            "-t",
            str(self._init()),
            "-a",
            "env",
            "-i",
            "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        ]
        if is_checked:
            return run(*inside, *words)
        return subprocess.run([*inside, *words], capture_output=True, text=True, check=False).stdout

    def boot(self) -> None:
        """Start it and wait until systemd has settled; `RuntimeError` names the console's log when it does not."""
        command = [
            "systemd-nspawn", "-q", "-D", str(self.root), "--register=no", "--keep-unit", "--resolv-conf=off",
            f"--machine={self.name}", f"--hostname={self.name}",
            f"--network-namespace-path=/run/netns/{self.name}", "-b", OLD_CGROUPS,
        ]  # fmt: skip
        entered = "".join(f"echo $$ > {group}/cgroup.procs; " for group in self._cgroups())
        with (self.folder / "console.log").open("ab") as console:
            self._process = subprocess.Popen(
                ["sh", "-c", f'{entered}exec "$@"', "sh", *command],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        self._wait_for_boot()
        # nspawn mounts them read-only, and limits of units would silently not hold.
        for name in ("memory", "cpu", "pids"):
            self.run("mount", "-o", "remount,bind,rw", f"/sys/fs/cgroup/{name}", is_checked=False)
        self.run("systemctl", "daemon-reexec")

    def _wait_for_boot(self) -> None:
        deadline_s = time.monotonic() + BOOT_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with suppress(RuntimeError):
                if self.run("systemctl", "is-system-running", is_checked=False).strip() in ("running", "degraded"):
                    return
            time.sleep(0.1)
        raise RuntimeError(
            f"{self.name} does not boot: {(self.folder / 'console.log').read_text(errors='replace')[-2000:]}"
        )

    def halt(self) -> None:
        """Switch it off, by force when it does not go by itself."""
        if self._process is None:
            return
        with suppress(RuntimeError, ProcessLookupError):
            os.kill(self._init(), POWER_OFF)
        try:
            self._process.wait(HALT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _init(self) -> int:
        assert self._process is not None, f"{self.name} is off"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not children:
            raise RuntimeError(f"{self.name} has no init yet")
        return int(children[0])

    def _cgroups(self) -> list[Path]:
        """A group of its own in each hierarchy, below ours: its systemd must not meet the machine's."""
        groups = []
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            name = "systemd" if controllers == "name=systemd" else controllers or "unified"
            if name in ("systemd", "unified", "memory", "cpu", "pids") and (CGROUPS / name).is_dir():
                groups.append(CGROUPS / name / path.strip("/") / self.name)
        for group in groups:
            group.mkdir(exist_ok=True)
        return groups

    def remove(self) -> None:
        """Unmount it and take its groups away."""
        subprocess.run(["umount", "--lazy", str(self.root)], check=False, capture_output=True)
        for group in self._cgroups():
            for below in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                with suppress(OSError):
                    below.rmdir()
            with suppress(OSError):
                group.rmdir()


@contextmanager
def boot(network: Network, folder: Path, suites: Sequence[str] = SUITES[:1]) -> Iterator[list[BootedHost]]:
    """All hosts of a network, booted, for the time of a block; root may come in by ssh with the key `folder`/id.

    The hosts take `suites` in turn.
    """
    bases = [_base(suite) for suite in suites]
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id"))
    names = "".join(f"{host.address} {host.namespace}\n" for host in network.hosts)
    with ExitStack() as stack:
        booted = []
        for index, host in enumerate(network.hosts):
            machine = BootedHost(host, folder / host.namespace)
            _lay_out(machine, bases[index % len(bases)], names, (folder / "id.pub").read_text())
            stack.callback(machine.remove)
            stack.callback(machine.halt)
            machine.boot()
            booted.append(machine)
        yield booted


def _lay_out(machine: BootedHost, base: Path, names: str, public_key: str) -> None:
    for name in ("up", "work", "root"):
        (machine.folder / name).mkdir(parents=True)
    layers = f"lowerdir={base},upperdir={machine.folder / 'up'},workdir={machine.folder / 'work'}"
    run("mount", "-t", "overlay", "overlay", "-o", layers, str(machine.root))
    (machine.root / "etc/hostname").write_text(f"{machine.name}\n")
    (machine.root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{names}")
    (machine.root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    (machine.root / "root/.ssh/authorized_keys").write_text(public_key)
    run("ssh-keygen", "-A", "-q", "-f", str(machine.root))


def _base(suite: str) -> Path:
    """The Debian tree that all of a suite share; made at the first call, in one or two minutes."""
    base = BASES / suite
    if (base / ".done").exists():
        return base
    shutil.rmtree(base, ignore_errors=True)
    BASES.mkdir(exist_ok=True)
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(base))
    for name in ("etc/apt/sources.list", "etc/machine-id"):
        (base / name).write_text("")
    for path in (base / "etc/resolv.conf", base / "var/lib/dbus/machine-id", *base.glob("etc/ssh/ssh_host_*")):
        path.unlink(missing_ok=True)
    switch = base / "etc/nsswitch.conf"
    lines = ["hosts: files" if line.startswith("hosts:") else line for line in switch.read_text().splitlines()]
    switch.write_text("\n".join(lines) + "\n")
    run("chroot", str(base), "systemctl", "mask", "-q", *QUIET_TIMERS)
    (base / ".done").touch()
    return base

"""What holds a task to its booking: a systemd scope around each, where the machine allows it.

The scope limits memory and processes and closes the GPUs that the task was not given; it is systemd's, so it stays when
the agent is restarted.  The shim has it made, with the command from here, before it starts the ranks.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from swarm_agent.task import shim
from swarmsched.resources import Gpu
from swarmsched.task import TaskOrder

GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
MAJORS_FILE = Path("/proc/devices")
GPU_MAJOR = 195
GPU_CONTROL_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-modeset")
SYSTEMD = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
CALL_LIMIT_S = 5
TRIAL_BYTES = 64 * 2**20
WARM_BYTES = 4 * 2**30
WARM_CPU_WEIGHT = 10  # a task has 100


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """`processes_max` counts threads as well.  `complaint` says why jobs are not limited; empty: they are."""

    processes_max: int
    complaint: str = ""
    has_oom_policy: bool = True  # older systemd does not know it, and stops no scope for a kill

    @classmethod
    def find(cls, processes_max: int) -> Self:
        """What this machine allows, by making a scope; takes some 50 ms."""
        controllers = shim.read_file(f"{shim.CGROUPS}/cgroup.controllers").split()
        if os.geteuid() != 0:
            return cls(processes_max, "the agent does not run as root")
        if not {b"memory", b"pids"} <= set(controllers):
            return cls(processes_max, "this machine has no unified hierarchy of control groups with memory and pids")
        if shutil.which("busctl") is None:
            return cls(processes_max, "there is no systemd (busctl)")
        complaint = ""
        for has_oom_policy in (True, False):
            found = cls(processes_max, has_oom_policy=has_oom_policy)
            complaint = found._try()
            if not complaint:
                return found
        return cls(processes_max, complaint)

    def scope(self, order: TaskOrder, gpus: Sequence[Gpu]) -> tuple[str, ...]:
        """The command that makes the scope of a task; nothing where there can be none."""
        if self.complaint:
            return ()
        memory_bytes = order.local_ranks * order.spec.demand.memory_bytes
        return self._command(scope_name(order, shim.OWN_PID), shim.OWN_PID, memory_bytes, allowed_devices(gpus))

    def warm_scope(self, name: str) -> tuple[str, ...]:
        """The same of a process that waits for workers: room for imports, which step back for tasks, and no GPU.

        The weight stays behind in this scope.  A nice value would not: to take one back needs a power that the agent
        of the role's unit does not have.
        """
        if self.complaint:
            return ()
        weight = ("CPUWeight", "t", str(WARM_CPU_WEIGHT))
        return self._command(warm_scope_name(name), shim.OWN_PID, WARM_BYTES, allowed_devices(()), weight)

    def _command(
        self, name: str, pid: str, memory_bytes: int, devices: Sequence[str] | None, *more: tuple[str, ...]
    ) -> tuple[str, ...]:
        # Not stopped with the other units at shutdown: the agent would tell of ranks that fail, not of a lost node.
        properties = [
            ("PIDs", "au", "1", pid),
            ("Delegate", "b", "true"),
            ("DefaultDependencies", "b", "false"),
            ("CollectMode", "s", "inactive-or-failed"),
            ("TasksMax", "t", str(self.processes_max)),
            *more,
        ]
        if self.has_oom_policy:
            properties.append(("OOMPolicy", "s", "continue"))
        if memory_bytes:
            properties += [("MemoryMax", "t", str(memory_bytes)), ("MemorySwapMax", "t", "0")]
        if devices is not None:
            allowed = [word for device in devices for word in (device, "rwm")]
            properties += [("DevicePolicy", "s", "closed"), ("DeviceAllow", "a(ss)", str(len(devices)), *allowed)]
        words = [word for each in properties for word in each]
        call = (shutil.which("busctl") or "", f"--timeout={CALL_LIMIT_S}", "call", *SYSTEMD, "StartTransientUnit")
        return (*call, "ssa(sv)a(sa(sv))", name, "fail", str(len(properties)), *words, "0")

    def _try(self) -> str:
        """Limit a process that waits; what went wrong, or nothing."""
        with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as waiting:
            try:
                name = f"swarm-trial-{waiting.pid}.scope"
                asked = subprocess.run(
                    self._command(name, str(waiting.pid), TRIAL_BYTES, None), capture_output=True, check=False
                )
                if asked.returncode:
                    return f"systemd makes no scope: {asked.stderr.decode(errors='replace').strip()}"
                deadline_s = time.monotonic() + CALL_LIMIT_S
                limit = f"{group_of(name)}/memory.max"
                while time.monotonic() < deadline_s:
                    if name.encode() in shim.read_file(f"/proc/{waiting.pid}/cgroup"):
                        is_held = shim.read_file(limit).strip() == b"%d" % TRIAL_BYTES
                        return "" if is_held else f"{limit} does not hold the limit that was set"
                    time.sleep(shim.SCOPE_INTERVAL_S)
                return "systemd does not put processes into scopes"
            finally:
                waiting.kill()


def scope_name(order: TaskOrder, shim_pid: int | str) -> str:
    """The unit of one task; agents that share a machine have others."""
    return f"swarm-{order.job_id}-{order.attempt}-{shim_pid}.scope"


def warm_scope_name(name: str) -> str:
    """The unit of a process that waits, by the name of its folder."""
    return f"swarm-{name}.scope"


def group_of(scope: str) -> str:
    """The folder of a scope's control group."""
    return f"{shim.CGROUPS}/system.slice/{scope}"


def kill_scope(scope: str) -> None:
    """SIGKILL for all that is left in a scope, if there is one."""
    shim.write_small(f"{group_of(scope)}/cgroup.kill", b"1")


def allowed_devices(gpus: Sequence[Gpu]) -> list[str] | None:
    """All devices of the machine but the GPUs that are not among these; None: do not filter.

    Everything else stays as its permissions say: the network's, those of file systems, the driver's own.
    """
    minors = gpu_minors()
    if not minors or any(gpu.uuid not in minors for gpu in gpus if not gpu.is_simulated):
        return None
    characters, _, _ = MAJORS_FILE.read_text().partition("Block devices:")
    majors = dict.fromkeys(int(major) for major in re.findall(r"^ *(\d+) ", characters, re.MULTILINE))
    own = [f"/dev/nvidia{minors[gpu.uuid]}" for gpu in gpus if not gpu.is_simulated]
    return ["block-*", *(f"char-{major}" for major in majors if major != GPU_MAJOR), *GPU_CONTROL_DEVICES, *own]


def gpu_minors() -> dict[str, int]:
    """The number of each GPU's device file, by uuid, as the driver tells; nothing without a driver."""
    found = {}
    for path in sorted(GPU_FOLDER.glob("*/information")):
        with suppress(OSError):
            told = dict(re.findall(r"^(GPU UUID|Device Minor):\s+(\S+)", path.read_text(), re.MULTILINE))
            if {"GPU UUID", "Device Minor"} <= told.keys():
                found[told["GPU UUID"]] = int(told["Device Minor"])
    return found

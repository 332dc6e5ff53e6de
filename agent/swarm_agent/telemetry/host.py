"""Cores, memory, load and network of the host, from /proc, /sys and the control group that the agent runs in.

The files are local and answer at once, so they are read in the event loop.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from swarm_agent.telemetry.reading import HostReading

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
INTERFACES = Path("/sys/class/net")
LIMITS_EVERY = 30
MBIT_S_MOST = 10_000_000  # more is no speed: drivers that know none say 2**32 - 1


class HostProbe:
    """Reads the host; keeps the last CPU counters to turn them into a utilisation."""

    def __init__(self, proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT, interface: str = "") -> None:
        """`interface`: over which ranks train, whose speed is told."""
        self._interface = interface
        self._network_mbit_s = 0
        self._proc = proc
        self._cgroup_root = cgroup_root
        self._last_busy = 0.0
        self._last_total = 0.0
        self._utilisation = 0.0
        self._reads = 0
        self._limits = (1, 2**62)  # cores, bytes of memory: change rarely, read every LIMITS_EVERY readings

    def read(self) -> HostReading:
        """One reading.  Raises `OSError` or `ValueError` only where /proc is not Linux's."""
        memory = _meminfo(self._proc / "meminfo")
        total, available = memory["MemTotal"], memory.get("MemAvailable", memory["MemFree"])
        if self._reads % LIMITS_EVERY == 0:
            self._limits = (self._cpu_count(), self._memory_limit())
            self._network_mbit_s = link_mbit_s(self._interface)
        self._reads += 1
        cpu_count, limit = self._limits
        return HostReading(
            cpu_count=cpu_count,
            memory_total_bytes=min(total, limit),
            memory_available_bytes=min(available, limit),
            cpu_utilisation_ratio=self._cpu_utilisation(),
            network_mbit_s=self._network_mbit_s,
        )

    def _cpu_utilisation(self) -> float:
        """Busy part of all cores since the last call; the average since boot at the first."""
        fields = [float(word) for word in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        total, idle = sum(fields), fields[3] + fields[4]
        busy = total - idle
        if total > self._last_total:
            self._utilisation = min(1.0, max(0.0, (busy - self._last_busy) / (total - self._last_total)))
            self._last_busy, self._last_total = busy, total
        return self._utilisation

    def _cpu_count(self) -> int:
        cores = len(os.sched_getaffinity(0))
        quotas = [_cpu_quota(directory) for directory in self._cgroup_directories("cpu")]
        return max(1, min([cores, *(math.ceil(quota) for quota in quotas if quota > 0)]))

    def _memory_limit(self) -> int:
        limits = [_memory_limit(directory) for directory in self._cgroup_directories("memory")]
        return min([limit for limit in limits if limit > 0], default=2**62)

    def _cgroup_directories(self, controller: str) -> Iterator[Path]:
        """The agent's group and all above it, for version 2 and for the version 1 hierarchy of `controller`."""
        for line in _lines(self._proc / "self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = self._cgroup_root / controller if controllers else self._cgroup_root
            group = root / path.lstrip("/")
            yield group
            yield from (parent for parent in group.parents if parent.is_relative_to(root))


def link_mbit_s(interface: str, interfaces: Path = INTERFACES) -> int:
    """Speed of an interface, or of the fastest behind a bridge, as its driver tells; 0 where none is told."""
    name = interface.partition(":")[0]
    if not name:
        return 0
    ports = [interfaces / port.name for port in (interfaces / name).glob("brif/*")]
    return max([_told_mbit_s(each) for each in (interfaces / name, *ports)])


def _told_mbit_s(interface: Path) -> int:
    try:
        speed = int((interface / "speed").read_text())
    except (OSError, ValueError):  # it is down, or virtual
        return 0
    return speed if 0 < speed <= MBIT_S_MOST else 0


def _meminfo(file: Path) -> dict[str, int]:
    return {
        name: int(rest.split()[0]) * 1024
        for name, rest in (line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
    }


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []  # no such file in this kernel or container: no limit is known


def _cpu_quota(directory: Path) -> float:
    """Cores that the group may use, 0 for no limit."""
    for line in _lines(directory / "cpu.max"):
        quota, period = line.split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    quota = "".join(_lines(directory / "cpu.cfs_quota_us"))
    period = "".join(_lines(directory / "cpu.cfs_period_us"))
    return int(quota) / int(period) if quota and period and int(quota) > 0 else 0.0


def _memory_limit(directory: Path) -> int:
    """Bytes that the group may use, 0 for no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = "".join(_lines(directory / name))
        if text.isdecimal():
            return int(text)
    return 0

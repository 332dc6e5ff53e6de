"""Readings of one node: frozen values for HTTP, metrics and `swarm top`.

A value that the driver does not support, or does not permit, is None and is left out everywhere; it is never
replaced by zero or by a sentinel number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from swarmsched.resources import GpuHealth


class TelemetryState(Enum):
    """How far the GPU readings of a node can be trusted."""

    STARTING = "starting"  # no answer yet, still within the first deadline
    OK = "ok"
    ABSENT = "absent"  # no NVIDIA driver or no device: zero GPUs, asked again every minute
    STALE = "stale"  # at least one GPU has no reading younger than the deadline
    FAILED = "failed"  # the driver is there but refuses to start


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU.  `user` and `command` are empty once it has gone from /proc."""

    pid: int
    memory_bytes: int | None
    user: str
    command: str
    is_own: bool  # started by this agent, or a descendant of what it started

    def __str__(self) -> str:
        """`pid 4242 python (alice) 3.1 GiB`."""
        parts = [f"pid {self.pid}", self.command, f"({self.user})" if self.user else ""]
        if self.memory_bytes is not None:
            parts.append(f"{self.memory_bytes / 2**30:.1f} GiB")
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU.  `age_s` is the age of the values at the moment of the snapshot; inf before the first reading."""

    index: int
    uuid: str
    model: str
    memory_total_bytes: int
    health: GpuHealth
    note: str = ""
    age_s: float
    is_simulated: bool = False
    is_mig: bool = False  # Multi-Instance GPU mode: the device is cut into instances
    pci_bus_id: str = ""
    memory_used_bytes: int | None = None
    utilisation_ratio: float | None = None
    memory_utilisation_ratio: float | None = None  # part of the time in which memory was read or written
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None  # since the driver was loaded
    sm_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    ecc_corrected_count: int | None = None  # volatile: since the GPU was last reset
    ecc_uncorrected_count: int | None = None
    pcie_replay_count: int | None = None
    xid_last: int | None = None  # newest XID code seen by this agent
    xid_counts: Mapping[int, int] = field(default_factory=dict)  # code -> how often, seen by this agent
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class HostReading:
    """Cores and memory that this agent may use: the machine's, or its control group's where that is less."""

    cpu_count: int
    memory_total_bytes: int
    memory_available_bytes: int
    cpu_utilisation_ratio: float  # since the reading before
    network_mbit_s: int = 0  # 0: not known


@dataclass(frozen=True, slots=True)
class TelemetrySnapshot:
    """Everything known about the node's resources.  `sentence` says in words what `state` means here."""

    state: TelemetryState
    sentence: str
    gpus: tuple[GpuReading, ...]
    host: HostReading
    age_s: float  # of the last complete round; inf before the first, 0 for simulated GPUs
    is_simulated: bool = False
    restarts: int = 0  # times the sampler child had to be started again

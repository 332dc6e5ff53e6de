"""From readings and events to `GpuHealth`: which XID means broken hardware, and what each state's note says.

XID codes: NVIDIA's "XID Errors" catalogue.  Codes that an application causes (13 illegal instruction, 31 page fault,
43 and 45 channel torn down, 68 video processor, ...) do not speak against the device.  A hardware XID holds until the
GPU was seen lost and came back, which takes a reset, or until the agent is restarted after a repair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm_agent.telemetry.reading import GpuProcess, GpuReading
from swarmsched.resources import Gpu, GpuHealth

GPU_OFF_BUS_XID = 79
HARDWARE_XIDS = {
    48: "double-bit ECC error",
    54: "auxiliary power is not connected",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "memory row remapping or page retirement recorded",
    64: "memory row remapping or page retirement failed",
    74: "NVLink error",
    GPU_OFF_BUS_XID: "fell off the bus",
    92: "high single-bit ECC error rate",
    94: "contained ECC error",
    95: "uncontained ECC error",
    110: "security fault",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
    140: "unrecovered ECC error",
    143: "GPU could not be initialised",
}
NOTE_LENGTH = 200
NAME_LENGTH = 63
MEMORY_CHANGE_BYTES = 2**29  # a note about foreign processes is renewed when their memory changed by this much


@dataclass(slots=True)
class GpuState:
    """What is known of one GPU, kept under its uuid for as long as the agent runs."""

    uuid: str
    index: int
    model: str
    memory_total_bytes: int
    pci_bus_id: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # of the newest reading, named as in `GpuReading`
    read_s: float = float("-inf")  # monotonic time of the newest reading
    is_lost: bool = False
    problem: str = ""  # why it could not be read although it is not lost
    xid_last: int | None = None
    xid_counts: dict[int, int] = field(default_factory=dict)
    hardware_xid: int | None = None  # the first one that stands against it
    processes: tuple[GpuProcess, ...] = ()
    foreign_note: str = ""
    _noted: dict[int, int] = field(default_factory=dict)  # pid -> bytes as `foreign_note` says them

    def take_reading(self, values: dict[str, Any], now_s: float) -> None:
        """A fresh reading.  After a loss it means that the GPU was reset: what stood against it is over."""
        if self.is_lost:
            self.is_lost, self.hardware_xid = False, None
        self.values, self.read_s, self.problem = values, now_s, ""

    def take_xid(self, code: int) -> None:
        """The driver reported an XID on this GPU."""
        self.xid_last = code
        self.xid_counts[code] = self.xid_counts.get(code, 0) + 1
        if code in HARDWARE_XIDS and self.hardware_xid is None:
            self.hardware_xid = code

    def take_processes(self, processes: Sequence[GpuProcess]) -> None:
        """Who computes on it; renews the note only when it says something new, since each change is gossiped."""
        self.processes = tuple(processes)
        foreign = {each.pid: each for each in processes if not each.is_own}
        if foreign.keys() == self._noted.keys() and all(
            abs((each.memory_bytes or 0) - self._noted[pid]) < MEMORY_CHANGE_BYTES for pid, each in foreign.items()
        ):
            return
        self._noted = {pid: each.memory_bytes or 0 for pid, each in foreign.items()}
        self.foreign_note = ", ".join(str(each) for each in foreign.values())[:NOTE_LENGTH]

    def health(self, now_s: float, deadline_s: float) -> tuple[GpuHealth, str]:
        """What to think of it, and the note that people read."""
        trouble = self._trouble()
        if trouble:
            return GpuHealth.UNHEALTHY, trouble
        if now_s - self.read_s > deadline_s:
            return GpuHealth.STALE, self.problem or f"no reading within {deadline_s:g} s"
        if self.foreign_note:
            return GpuHealth.FOREIGN, self.foreign_note
        return GpuHealth.OK, ""

    def reading(self, now_s: float, deadline_s: float) -> GpuReading:
        """The value for HTTP and metrics."""
        health, note = self.health(now_s, deadline_s)
        # Old values would look like present ones (an idle GPU, a cool one): they are left out instead.
        is_fresh = now_s - self.read_s <= deadline_s and not self.is_lost
        values = self.values if is_fresh else {}
        known = {name: value for name, value in values.items() if name in GpuReading.__dataclass_fields__}
        return GpuReading(
            **known,
            index=self.index,
            uuid=self.uuid,
            model=self.model,
            memory_total_bytes=self.memory_total_bytes,
            pci_bus_id=self.pci_bus_id,
            health=health,
            note=note,
            age_s=max(0.0, now_s - self.read_s),
            xid_last=self.xid_last,
            xid_counts=dict(self.xid_counts),
            processes=self.processes if is_fresh else (),
        )

    def _trouble(self) -> str:
        if self.hardware_xid is not None:
            return f"XID {self.hardware_xid}: {HARDWARE_XIDS[self.hardware_xid]}"
        if self.is_lost:
            return "GPU is lost: it no longer answers the driver"
        uncorrected = self.values.get("ecc_uncorrected_count") or 0
        if uncorrected:
            return f"{uncorrected} uncorrectable ECC error{'s' if uncorrected > 1 else ''} since its last reset"
        if self.values.get("is_remap_failed"):
            return "memory row remapping failed: the GPU needs replacement"
        if self.values.get("is_remap_pending"):
            return "memory row remapping is pending: the GPU needs a reset"
        if self.values.get("is_mig"):
            return "MIG mode is on: it cannot be given out as a whole"
        return ""


def gpu_of(reading: GpuReading) -> Gpu:
    """The device as the core and the ledger know it, within the bounds of the wire."""
    return Gpu(
        uuid=reading.uuid,
        index=reading.index,
        model=reading.model[:NAME_LENGTH],
        memory_bytes=reading.memory_total_bytes,
        health=reading.health,
        is_simulated=reading.is_simulated,
        note=reading.note[:NOTE_LENGTH],
    )

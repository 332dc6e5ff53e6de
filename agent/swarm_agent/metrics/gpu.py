"""GPU telemetry, idle devices included: `swarm_gpu_...` in base units, and DCGM exporter's names where asked for.

A value that the driver does not support, or whose reading is stale, is left out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from swarm_agent.telemetry.reading import GpuReading, TelemetrySnapshot, TelemetryState
from swarmsched.ids import NodeId
from swarmsched.resources import GpuHealth

MIB = 2**20
LABELS = ("gpu", "uuid")
DCGM_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname", "GPU_I_PROFILE", "GPU_I_ID")
Value = Callable[[GpuReading], float | None]

GAUGES: Mapping[str, tuple[str, Value]] = {
    "swarm_gpu_utilization_ratio": (
        "Part of the last sample period in which a kernel ran.",
        lambda gpu: gpu.utilisation_ratio,
    ),
    "swarm_gpu_memory_utilization_ratio": (
        "Part of the last sample period in which memory was read or written.",
        lambda gpu: gpu.memory_utilisation_ratio,
    ),
    "swarm_gpu_memory_used_bytes": (
        "Memory in use, without what the driver reserves.",
        lambda gpu: gpu.memory_used_bytes,
    ),
    "swarm_gpu_memory_size_bytes": ("Memory of the device.", lambda gpu: gpu.memory_total_bytes),
    "swarm_gpu_temperature_celsius": ("Core temperature.", lambda gpu: gpu.temperature_celsius),
    "swarm_gpu_power_watts": ("Power drawn.", lambda gpu: gpu.power_watts),
    "swarm_gpu_power_limit_watts": ("Enforced power limit.", lambda gpu: gpu.power_limit_watts),
    "swarm_gpu_sm_clock_hertz": ("Clock of the multiprocessors.", lambda gpu: gpu.sm_clock_hz),
    "swarm_gpu_memory_clock_hertz": ("Clock of the memory.", lambda gpu: gpu.memory_clock_hz),
    "swarm_gpu_mig_mode": ("1 when Multi-Instance GPU mode is on.", lambda gpu: float(gpu.is_mig)),
    "swarm_gpu_processes": ("Processes that compute on the device.", lambda gpu: _if_fresh(gpu, len(gpu.processes))),
    "swarm_gpu_foreign_processes": (
        "Processes on the device that this agent did not start.",
        lambda gpu: _if_fresh(gpu, sum(not each.is_own for each in gpu.processes)),
    ),
    "swarm_gpu_reading_age_seconds": (
        "Age of the newest reading; left out before the first one.",
        lambda gpu: gpu.age_s if gpu.age_s < 1e9 else None,
    ),
}
COUNTERS: Mapping[str, tuple[str, Value]] = {
    "swarm_gpu_energy_joules": ("Energy used since the driver was loaded.", lambda gpu: gpu.energy_joules),
    "swarm_gpu_pcie_replays": ("PCIe packets that had to be sent again.", lambda gpu: gpu.pcie_replay_count),
}
DCGM_GAUGES: Mapping[str, tuple[str, Value]] = {
    "DCGM_FI_DEV_GPU_UTIL": ("GPU utilization (in %).", lambda gpu: _times(gpu.utilisation_ratio, 100)),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("Memory utilization (in %).", lambda gpu: _times(gpu.memory_utilisation_ratio, 100)),
    "DCGM_FI_DEV_FB_USED": ("Framebuffer memory used (in MiB).", lambda gpu: _times(gpu.memory_used_bytes, 1 / MIB)),
    "DCGM_FI_DEV_FB_FREE": (
        "Framebuffer memory free (in MiB).",
        lambda gpu: (
            (gpu.memory_total_bytes - gpu.memory_used_bytes) / MIB if gpu.memory_used_bytes is not None else None
        ),
    ),
    "DCGM_FI_DEV_GPU_TEMP": ("GPU temperature (in C).", lambda gpu: gpu.temperature_celsius),
    "DCGM_FI_DEV_POWER_USAGE": ("Power draw (in W).", lambda gpu: gpu.power_watts),
    "DCGM_FI_DEV_SM_CLOCK": ("SM clock frequency (in MHz).", lambda gpu: _times(gpu.sm_clock_hz, 1e-6)),
    "DCGM_FI_DEV_MEM_CLOCK": ("Memory clock frequency (in MHz).", lambda gpu: _times(gpu.memory_clock_hz, 1e-6)),
    "DCGM_FI_DEV_XID_ERRORS": (
        "Value of the last XID error encountered.",
        lambda gpu: float(gpu.xid_last or 0) if not gpu.is_simulated else None,
    ),
}
DCGM_COUNTERS: Mapping[str, tuple[str, Value]] = {
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": (
        "Total energy consumption since boot (in mJ).",
        lambda gpu: _times(gpu.energy_joules, 1_000),
    ),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("Total number of PCIe retries.", lambda gpu: gpu.pcie_replay_count),
}


def gpu_families(snapshot: TelemetrySnapshot, bookings: Mapping[str, str]) -> Iterator[Metric]:
    """All native families.  `bookings` maps uuid to held, leased or draining."""
    gpus = snapshot.gpus
    yield _counts(gpus, bookings)
    yield _telemetry_up(snapshot)
    yield _info(gpus)
    yield _health(gpus)
    for name, (text, value) in GAUGES.items():
        yield from _family(GaugeMetricFamily(name, text, labels=LABELS), gpus, value, _labels)
    for name, (text, value) in COUNTERS.items():
        yield from _family(CounterMetricFamily(name, text, labels=LABELS), gpus, value, _labels)
    yield from _errors(gpus)


def dcgm_families(snapshot: TelemetrySnapshot, host: NodeId, *, is_openmetrics: bool) -> Iterator[Metric]:
    """The same values under the names, units and labels that DCGM exporter uses.

    In OpenMetrics a counter's name must end in `_total`, which DCGM's do not: there they are gauges.
    """

    def labels(gpu: GpuReading) -> tuple[str, ...]:
        return (str(gpu.index), gpu.uuid, f"nvidia{gpu.index}", gpu.model, host, "", "")

    for name, (text, value) in DCGM_GAUGES.items():
        yield from _family(GaugeMetricFamily(name, text, labels=DCGM_LABELS), snapshot.gpus, value, labels)
    for name, (text, value) in DCGM_COUNTERS.items():
        family = Metric(name, text, "gauge" if is_openmetrics else "untyped")
        for gpu in snapshot.gpus:
            if (number := value(gpu)) is not None:
                family.add_sample(name, dict(zip(DCGM_LABELS, labels(gpu), strict=True)), number)
        if family.samples:
            yield family


def _family(
    family: GaugeMetricFamily | CounterMetricFamily,
    gpus: Iterable[GpuReading],
    value: Value,
    labels: Callable[[GpuReading], tuple[str, ...]],
) -> Iterator[Metric]:
    """The family, unless no GPU has the value."""
    for gpu in gpus:
        if (number := value(gpu)) is not None:
            family.add_metric(labels(gpu), number)
    if family.samples:
        yield family


def _labels(gpu: GpuReading) -> tuple[str, ...]:
    return (str(gpu.index), gpu.uuid)


def _counts(gpus: Iterable[GpuReading], bookings: Mapping[str, str]) -> Metric:
    states = ["free", "held", "leased", "draining", *(each.value for each in GpuHealth if each is not GpuHealth.OK)]
    count = Counter(
        bookings.get(gpu.uuid) or ("free" if gpu.health is GpuHealth.OK else gpu.health.value) for gpu in gpus
    )
    family = GaugeMetricFamily("swarm_gpus", "GPUs of this node; a booked one counts as booked.", labels=("state",))
    for state in states:
        family.add_metric((state,), count[state])
    return family


def _telemetry_up(snapshot: TelemetrySnapshot) -> Metric:
    is_up = snapshot.state in (TelemetryState.OK, TelemetryState.ABSENT)
    return GaugeMetricFamily(
        "swarm_telemetry_up", "1 when GPU readings are fresh, or when the node has no GPUs.", value=float(is_up)
    )


def _info(gpus: Iterable[GpuReading]) -> Metric:
    family = InfoMetricFamily("swarm_gpu", "What the device is.", labels=LABELS)
    for gpu in gpus:
        facts = {"model": gpu.model, "pci_bus_id": gpu.pci_bus_id, "simulated": str(gpu.is_simulated).lower()}
        family.add_metric(_labels(gpu), facts)
    return family


def _health(gpus: Iterable[GpuReading]) -> Metric:
    text = "1 for the health that the device has: ok, foreign (others use it), unhealthy, stale (not read)."
    family = GaugeMetricFamily("swarm_gpu_health", text, labels=(*LABELS, "health"))
    for gpu in gpus:
        for health in GpuHealth:
            family.add_metric((*_labels(gpu), health.value), float(gpu.health is health))
    return family


def _errors(gpus: Iterable[GpuReading]) -> Iterator[Metric]:
    xid = CounterMetricFamily("swarm_gpu_xid_errors", "XID errors seen by this agent.", labels=(*LABELS, "xid"))
    ecc_text = "ECC errors since the last reset of the device."
    ecc = CounterMetricFamily("swarm_gpu_ecc_errors", ecc_text, labels=(*LABELS, "kind"))
    for gpu in gpus:
        for code, count in sorted(gpu.xid_counts.items()):
            xid.add_metric((*_labels(gpu), str(code)), count)
        for kind, errors in (("corrected", gpu.ecc_corrected_count), ("uncorrected", gpu.ecc_uncorrected_count)):
            if errors is not None:
                ecc.add_metric((*_labels(gpu), kind), errors)
    yield from (family for family in (xid, ecc) if family.samples)


def _if_fresh(gpu: GpuReading, value: float) -> float | None:
    return None if gpu.health is GpuHealth.STALE or gpu.is_simulated else value


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor

"""What this node has and how it is: GPUs through NVML in a child process, cores and memory through /proc.

Import `Telemetry`, `TelemetrySnapshot` and the reading types from here.  They are resolved on first use, because the
sampler child imports this package too and must stay small.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_agent.telemetry.reading import (
        GpuProcess,
        GpuReading,
        HostReading,
        TelemetrySnapshot,
        TelemetryState,
    )
    from swarm_agent.telemetry.source import Telemetry

__all__ = ["GpuProcess", "GpuReading", "HostReading", "Telemetry", "TelemetrySnapshot", "TelemetryState"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "source" if name == "Telemetry" else "reading"
    return getattr(import_module(f"{__name__}.{module}"), name)

"""NVML as the sampler child uses it: one init kept open, a round of readings, events, and re-initialisation.

Only the child imports this module: any call here may block for ever.  Rules that the code keeps:

- A call that fails leaves out its value and nothing else.  `GPU_IS_LOST` ends the round for that GPU only.
- After UNINITIALIZED, GPU_IS_LOST or UNKNOWN the library is shut down and initialised again, at most once per pause;
  the pause doubles from 1 to 60 s and falls back after a clean round.
- Events are drained without waiting once a round.  After any error but TIMEOUT they are left alone for a pause, since
  a broken event set answers at once and would otherwise be asked in a busy loop.

Slow-moving values (limits, ECC totals, row remapping, MIG mode) are asked every `FULL_EVERY_S`.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 60.0
FULL_EVERY_S = 30.0
EVENTS_LIMIT = 64
PROCESSES_LIMIT = 256
REINIT_CODES = frozenset((pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN))
LOST_CODES = frozenset((pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND))
WATCHED_EVENTS = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
ECC_XID = 48  # what a double-bit ECC event stands for when the driver sends no XID with it

Message = dict[str, Any]


class Unavailable(Exception):
    """NVML cannot be used at all.  `is_absent`: there is no driver or no device, which is no fault."""

    def __init__(self, sentence: str, *, is_absent: bool) -> None:
        self.is_absent = is_absent
        super().__init__(sentence)


class _Lost(Exception):
    """This GPU answers GPU_IS_LOST."""


class Pause:
    """A pause that doubles with each failure, and says whether it is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._length_s = PAUSE_S_MIN
        self._until_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """True when the thing may be tried again."""
        return self._clock() >= self._until_s

    def begin(self) -> None:
        """The call failed: wait, and twice as long the next time."""
        self._until_s = self._clock() + self._length_s
        self._length_s = min(PAUSE_S_MAX, self._length_s * 2)

    def reset(self) -> None:
        """The call worked."""
        self._length_s = PAUSE_S_MIN


class NvmlSession:
    """An initialised NVML.  `open` first; then `round` as often as wanted; `close` at the end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._devices: list[tuple[int, str, Any]] = []  # (index, uuid, handle); handle None when refused
        self._refusals: dict[int, pynvml.NVMLError] = {}  # why a handle was refused, by index
        self._slow: dict[str, Message] = {}
        self._next_full_s = float("-inf")
        self._events: Any = None
        self._event_pause = Pause(clock)
        self._reinit_pause = Pause(clock)
        self._wants_reinit = False

    def open(self) -> Message:
        """Initialise and list the devices.  Raises `Unavailable`."""
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            raise _unavailable(error) from error
        if not count:
            self.close()
            raise Unavailable("the NVIDIA driver is loaded but reports no GPU", is_absent=True)
        self._list_devices(count)
        self._watch_events()
        self._next_full_s = self._clock()
        return {
            "kind": "hello",
            "driver_version": self._value(pynvml.nvmlSystemGetDriverVersion) or "",
            "gpus": list(self._descriptions()),
        }

    def close(self) -> None:
        """Shut the library down; failures do not matter any more."""
        try:
            if self._events is not None:
                pynvml.nvmlEventSetFree(self._events)
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            self._events = None  # the library is gone either way
        self._events = None

    def round(self, skip: frozenset[str], last: frozenset[str]) -> Iterator[Message]:
        """Read all GPUs but those in `skip`, those in `last` after the others; then drain the events.

        Raises `Unavailable` when a re-initialisation failed.
        """
        if self._wants_reinit and self._reinit_pause.is_over:
            self._reinit_pause.begin()
            self.close()
            yield self.open()
        self._wants_reinit = False
        is_full = self._clock() >= self._next_full_s
        if is_full:
            self._next_full_s = self._clock() + FULL_EVERY_S
        for index, uuid, handle in sorted(self._devices, key=lambda device: device[1] in last):
            if uuid not in skip:
                yield self._read(index, uuid, handle, is_full)
        yield from self._drain_events()
        if not self._wants_reinit:
            self._reinit_pause.reset()

    def _list_devices(self, count: int) -> None:
        """Find the handles anew; a device that is lost keeps the uuid that it had before."""
        before = [uuid for _, uuid, _ in self._devices if uuid]
        devices: list[tuple[int, str, Any]] = []
        self._refusals.clear()
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                devices.append((index, pynvml.nvmlDeviceGetUUID(handle), handle))
            except pynvml.NVMLError as error:
                devices.append((index, "", None))
                self._refusals[index] = error
        found = {uuid for _, uuid, _ in devices}
        missing = iter([uuid for uuid in before if uuid not in found])
        self._devices = [(index, uuid or next(missing, ""), handle) for index, uuid, handle in devices]
        # Drivers that no longer count a lost device: keep speaking of it.
        self._devices += [(index, uuid, None) for index, uuid in enumerate(missing, count)]

    def _descriptions(self) -> Iterator[Message]:
        for index, uuid, handle in self._devices:
            if handle is not None:
                try:
                    yield self._describe(index, uuid, handle)
                except _Lost:
                    self._wants_reinit = True  # the round that follows reports it

    def _describe(self, index: int, uuid: str, handle: Any) -> Message:
        memory = self._value(lambda: _memory(handle))
        pci = self._value(lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId)
        return {
            "index": index,
            "uuid": uuid,
            "model": self._value(lambda: pynvml.nvmlDeviceGetName(handle)) or "unknown",
            "memory_total_bytes": memory[0] if memory else 0,
            "pci_bus_id": pci or "",
        }

    def _read(self, index: int, uuid: str, handle: Any, is_full: bool) -> Message:
        message: Message = {"kind": "gpu", "index": index, "uuid": uuid}
        if handle is None:
            self._wants_reinit = True
            return message | self._refusal(index)
        try:
            if is_full or uuid not in self._slow:
                self._slow[uuid] = self._read_slow(handle)
            values = self._read_fast(handle)
            processes = self._value(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
        except _Lost as error:
            self._wants_reinit = True
            return message | {"error": "lost", "detail": str(error)}
        if processes is not None:
            values["processes"] = [(item.pid, item.usedGpuMemory) for item in processes[:PROCESSES_LIMIT]]
        values = {name: value for name, value in values.items() if value is not None}
        if not values:
            return message | {"error": "unreadable", "detail": "every NVML call on it fails"}
        return message | {"values": self._slow.get(uuid, {}) | values}

    def _refusal(self, index: int) -> Message:
        error = self._refusals.get(index)
        is_lost = error is None or error.value in LOST_CODES
        return {"error": "lost" if is_lost else "unreadable", "detail": str(error or "the driver lists it no more")}

    def _read_fast(self, handle: Any) -> Message:
        value = self._value
        memory = value(lambda: _memory(handle))
        use = value(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
        power = value(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
        energy = value(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        sm_clock = value(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        memory_clock = value(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM))
        return {
            "memory_used_bytes": memory[1] if memory else None,
            "utilisation_ratio": use.gpu / 100 if use else None,
            "memory_utilisation_ratio": use.memory / 100 if use else None,
            "temperature_celsius": value(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            "power_watts": power / 1000 if power is not None else None,
            "energy_joules": energy / 1000 if energy is not None else None,
            "sm_clock_hz": sm_clock * 10**6 if sm_clock is not None else None,
            "memory_clock_hz": memory_clock * 10**6 if memory_clock is not None else None,
            "ecc_uncorrected_count": value(lambda: _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)),
        }

    def _read_slow(self, handle: Any) -> Message:
        value = self._value
        limit = value(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        remapped = value(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
        mig = value(lambda: pynvml.nvmlDeviceGetMigMode(handle))
        slow = {
            "power_limit_watts": limit / 1000 if limit is not None else None,
            "ecc_corrected_count": value(lambda: _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)),
            "pcie_replay_count": value(lambda: pynvml.nvmlDeviceGetPcieReplayCounter(handle)),
            "is_remap_pending": bool(remapped[2]) if remapped else None,
            "is_remap_failed": bool(remapped[3]) if remapped else None,
            "is_mig": mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE if mig else None,
        }
        return {name: each for name, each in slow.items() if each is not None}

    def _value(self, call: Callable[[], Any]) -> Any:
        """The call's answer, None where it has none.  Raises `_Lost`."""
        try:
            return call()
        except pynvml.NVMLError as error:
            if error.value in LOST_CODES:
                raise _Lost(str(error)) from error
            self._wants_reinit |= error.value in REINIT_CODES
            return None

    def _watch_events(self) -> None:
        self._events = None
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return  # old driver or no permission: health then rests on ECC counters and lost devices
        for _, _, handle in self._devices:
            if handle is not None:
                self._watch_device(handle, events)
        self._events = events

    def _watch_device(self, handle: Any, events: Any) -> None:
        try:
            supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
            pynvml.nvmlDeviceRegisterEvents(handle, supported & WATCHED_EVENTS, events)
        except pynvml.NVMLError as error:
            self._wants_reinit |= error.value in REINIT_CODES

    def _drain_events(self) -> Iterator[Message]:
        if self._events is None or not self._event_pause.is_over:
            return
        for _ in range(EVENTS_LIMIT):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_TIMEOUT:
                    self._event_pause.reset()
                else:
                    self._event_pause.begin()
                    self._wants_reinit |= error.value in REINIT_CODES
                return
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                yield {"kind": "xid", "uuid": self._uuid_of(event.device), "xid": int(event.eventData)}
            else:
                yield {"kind": "xid", "uuid": self._uuid_of(event.device), "xid": ECC_XID, "is_implied": True}

    def _uuid_of(self, device: Any) -> str:
        """By address: a lost device no longer answers a question for its uuid."""
        address = ctypes.cast(device, ctypes.c_void_p).value
        for _, uuid, handle in self._devices:
            if handle is not None and ctypes.cast(handle, ctypes.c_void_p).value == address:
                return uuid
        return ""


def _memory(handle: Any) -> tuple[int, int]:
    """(total, used) bytes.  The newer call does not count what the driver reserves for itself as used."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.used)


def _ecc(handle: Any, kind: int) -> int:
    return int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC))


def _unavailable(error: pynvml.NVMLError) -> Unavailable:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return Unavailable("no NVIDIA driver: libnvidia-ml.so.1 is not installed", is_absent=True)
    if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return Unavailable("the NVIDIA driver is installed but its kernel module is not loaded", is_absent=True)
    return Unavailable(f"NVML cannot be initialised: {error} (code {error.value})", is_absent=False)

"""`Telemetry`: the agent's one source of facts about its own hardware.

It posts `ResourcesRead` to the core whenever the resources change and about once a period otherwise, and keeps a
snapshot for HTTP and metrics.  Nothing here can hang: the driver is asked by a child process, under a deadline.
Until the driver has answered, or has failed to within the time that the sampler has for its start, nothing is posted,
so that the core never takes "not asked yet" for "has no GPUs".

A witness runs no jobs, so it asks no driver and posts that it has nothing: whatever counts capacity would count it.
"""

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarm_agent.config import AgentConfig
from swarm_agent.telemetry.child import ARGV, ChildEnd, Message, SamplerChild
from swarm_agent.telemetry.health import GpuState, gpu_of
from swarm_agent.telemetry.host import HostProbe
from swarm_agent.telemetry.ownership import Ownership
from swarm_agent.telemetry.reading import GpuReading, HostReading, TelemetrySnapshot, TelemetryState
from swarmsched.events import ResourcesRead
from swarmsched.ids import NodeId
from swarmsched.resources import LABELS_MOST, GpuHealth, NodeResources

AVERAGE_S = 30.0
ABSENT_RETRY_S = 60.0
RETRY_S_MIN, RETRY_S_MAX = 1.0, 60.0
HEALTHY_LIFE_S = 120.0  # a child that lived this long was well: the next pause starts small again
ENGINES = ("docker", "podman", "apptainer", "enroot")
INFINIBAND = Path("/sys/class/infiniband")
GPUS_LIMIT = 64  # of `NodeResources`; further devices are not offered

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Hang:
    count: int = 0  # in a row
    retry_s: float = 0.0  # monotonic time before which it is left alone


class Average:
    """Exponential moving average over `AVERAGE_S`, for samples at uneven times; 0 before the first."""

    def __init__(self) -> None:
        self._value: float | None = None
        self._last_s = 0.0

    def add(self, sample: float, now_s: float) -> float:
        """Take a sample in and return the average."""
        if self._value is None:
            self._value = sample
        else:
            self._value += (sample - self._value) * (1.0 - math.exp(-(now_s - self._last_s) / AVERAGE_S))
        self._last_s = now_s
        return self._value


class Telemetry:
    """Readings of this node.  `start` it in a running loop, after supervision has found its old tasks again.

    `own_gpus` gives the ids of shims with the uuids of their tasks' GPUs (descendants are found through /proc);
    `booked_gpus` gives the uuids of GPUs that the ledger has leased, and serves simulated GPUs only.
    """

    def __init__(
        self,
        config: AgentConfig,
        post: Callable[[ResourcesRead], None],
        node_id: NodeId,
        *,
        interface: str = "",
        own_gpus: Callable[[], Mapping[int, Collection[str]]] = dict,
        booked_gpus: Callable[[], Collection[str]] = frozenset,
        clock: Callable[[], float] = time.monotonic,
        argv: Sequence[str] = ARGV,
    ) -> None:
        self._config = config
        self._post = post
        self._node_id = node_id
        self._booked_gpus = booked_gpus
        self._clock = clock
        self._argv = tuple(argv)
        self._ownership = Ownership(own_gpus)
        self._host_probe = HostProbe(interface=interface)
        self._host = HostReading(1, 0, 0, 0.0)
        self._gpus: dict[str, GpuState] = {}
        self._unnamed_losses: set[int] = set()  # indexes of lost GPUs that never told their uuid
        self._hangs: dict[str, _Hang] = {}  # GPUs on which a call did not return, by uuid
        self._read_this_round: set[str] = set()
        self._state = TelemetryState.STARTING
        self._sentence = "the NVIDIA driver has not answered yet"
        self._round_s = float("-inf")
        self._driver_version = ""
        self._restarts = 0
        self._child: SamplerChild | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._averages = {name: Average() for name in ("gpu", "gpu_memory", "cpu")}
        self._posted: NodeResources | None = None
        self._labels = _labels(config.labels)

    @property
    def snapshot(self) -> TelemetrySnapshot:
        """What is known at this moment; ages are counted up to now."""
        now_s = self._clock()
        gpus = self._simulated() if self._is_simulated else self._readings(now_s)
        state, sentence = self._judge(gpus)
        return TelemetrySnapshot(
            state=state,
            sentence=sentence,
            gpus=gpus,
            host=self._host,
            age_s=now_s - self._round_s if self._asks_driver else 0.0,
            is_simulated=self._is_simulated,
            restarts=self._restarts,
        )

    async def start(self) -> None:
        """Begin to sample; returns at once."""
        self._read_host()
        if self._asks_driver:
            self._tasks.append(asyncio.create_task(self._sample(), name="telemetry-sampler"))
        self._tasks.append(asyncio.create_task(self._tick(), name="telemetry-tick"))
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    async def stop(self) -> None:
        """End the child (politely, then not) and all tasks; returns within a few seconds whatever the driver does."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A task of ours that ends by itself is a bug: say so instead of showing old values for ever."""
        if not task.cancelled():
            self._state, self._sentence = TelemetryState.FAILED, f"{task.get_name()} ended: {task.exception()!r}"
            log.error("telemetry failed task=%s", task.get_name(), exc_info=task.exception())

    @property
    def _is_simulated(self) -> bool:
        return self._config.simulated_gpus > 0

    @property
    def _asks_driver(self) -> bool:
        return not self._is_simulated and not self._config.witness

    # The ticker: staleness, host load, posts.

    async def _tick(self) -> None:
        while True:
            self._read_host()
            self._publish(is_periodic=True)
            await asyncio.sleep(self._config.telemetry_period_s)

    def _read_host(self) -> None:
        try:
            self._host = self._host_probe.read()
        except (OSError, ValueError, KeyError) as error:
            log.warning("host cannot be read error=%r kept=last", error)  # cores and memory hardly change

    def _publish(self, *, is_periodic: bool) -> None:
        """Post if the resources changed, or if it is time to."""
        now_s = self._clock()
        self._own(now_s)
        if self._state is TelemetryState.STARTING and self._asks_driver:
            return
        gpus = self._simulated() if self._is_simulated else self._readings(now_s)
        resources = self._offered(gpus)
        if not is_periodic and resources == self._posted:
            return
        self._posted = resources
        used_bytes = sum(gpu.memory_used_bytes or 0 for gpu in gpus)
        self._post(
            ResourcesRead(
                resources,
                gpu_utilisation_ratio=self._averages["gpu"].add(_mean_utilisation(gpus), now_s),
                gpu_memory_used_bytes=int(self._averages["gpu_memory"].add(used_bytes, now_s)),
                cpu_utilisation_ratio=self._averages["cpu"].add(self._host.cpu_utilisation_ratio, now_s),
            )
        )

    def _offered(self, gpus: tuple[GpuReading, ...]) -> NodeResources:
        if self._config.witness:
            return NodeResources((), 0, 0)
        offered = tuple(gpu_of(gpu) for gpu in gpus[:GPUS_LIMIT])
        host, told_mbit_s = self._host, self._config.network_mbit_s
        network_mbit_s = told_mbit_s or host.network_mbit_s
        return NodeResources(offered, host.cpu_count, host.memory_total_bytes, self._labels, network_mbit_s)

    def _own(self, now_s: float) -> None:
        """Say of each process on the GPUs whose it is."""
        self._ownership.refresh(now_s)
        for uuid, gpu in self._gpus.items():
            listed = [self._ownership.classify(pid, uuid, used, now_s) for pid, used in gpu.values.get("pids", ())]
            gpu.take_processes([each for each in listed if each is not None])

    def _readings(self, now_s: float) -> tuple[GpuReading, ...]:
        deadline_s = self._config.telemetry_deadline_s
        readings = [gpu.reading(now_s, deadline_s) for gpu in self._gpus.values()]
        return tuple(sorted(readings, key=lambda gpu: (gpu.index, gpu.uuid)))

    def _simulated(self) -> tuple[GpuReading, ...]:
        booked = self._booked_gpus()
        return tuple(self._simulated_gpu(index, booked) for index in range(self._config.simulated_gpus))

    def _simulated_gpu(self, index: int, booked: Collection[str]) -> GpuReading:
        """Busy when booked, idle otherwise; nothing else is made up."""
        uuid = f"SIM-{self._node_id}-{index}"
        return GpuReading(
            index=index,
            uuid=uuid,
            model=self._config.simulated_gpu_model,
            memory_total_bytes=self._config.simulated_gpu_memory_bytes,
            health=GpuHealth.OK,
            age_s=0.0,
            is_simulated=True,
            utilisation_ratio=1.0 if uuid in booked else 0.0,
        )

    def _judge(self, gpus: tuple[GpuReading, ...]) -> tuple[TelemetryState, str]:
        if self._config.witness:
            return TelemetryState.OK, "none are offered: this agent is a witness"
        if self._is_simulated:
            return TelemetryState.OK, f"{len(gpus)} simulated GPUs, as configured; NVML is not asked"
        if self._state is not TelemetryState.OK:
            return self._state, self._sentence
        stale = [str(gpu.index) for gpu in gpus if gpu.age_s > self._config.telemetry_deadline_s]
        if stale and any(gpu.health is GpuHealth.STALE for gpu in gpus):
            limit = f"{self._config.telemetry_deadline_s:g} s"
            return TelemetryState.STALE, f"no reading of GPU {', '.join(stale)} within {limit}; not offered to jobs"
        lost = f"; GPU {', '.join(map(str, sorted(self._unnamed_losses)))} is lost" if self._unnamed_losses else ""
        return TelemetryState.OK, f"{len(gpus)} GPUs, driver {self._driver_version or 'unknown'}{lost}"

    # The sampler child and what it says.

    async def _sample(self) -> None:
        """Run one child after another, with growing pauses after faults.

        After a hang that can be laid to one GPU the pause stays short: that GPU is left alone for a growing pause of
        its own, and the others deserve fresh readings.
        """
        pause_s = RETRY_S_MIN
        while True:
            begun_s, hangs_before = self._clock(), sum(hang.count for hang in self._hangs.values())
            outcome = await self._run_child()
            is_laid_to_gpu = sum(hang.count for hang in self._hangs.values()) > hangs_before
            if is_laid_to_gpu or self._clock() - begun_s > HEALTHY_LIFE_S:
                pause_s = RETRY_S_MIN
            self._note_silence(outcome)
            self._publish(is_periodic=False)
            if outcome is ChildEnd.STOPPED and self._state is TelemetryState.ABSENT:
                await asyncio.sleep(ABSENT_RETRY_S)
                continue
            log.warning("sampler starts again outcome=%s pause_s=%g", outcome.value, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_S_MAX, pause_s * 2)
            self._restarts += 1

    async def _run_child(self) -> ChildEnd:
        self._child = SamplerChild(
            self._take,
            period_s=self._config.telemetry_period_s,
            deadline_s=self._config.telemetry_deadline_s,
            ask=self._ask,
            on_hung=self._on_hung,
            argv=self._argv,
        )
        try:
            return await self._child.run()
        except OSError as error:
            self._state, self._sentence = TelemetryState.FAILED, f"the sampler cannot be started: {error}"
            return ChildEnd.CRASHED

    def _ask(self) -> Message:
        """Which GPUs to leave out of the next round because they hung, and which of those to try again, last."""
        now_s = self._clock()
        skip = [uuid for uuid, hang in self._hangs.items() if now_s < hang.retry_s]
        self._read_this_round = set(skip)
        return {"skip": skip, "last": [uuid for uuid in self._hangs if uuid not in skip]}

    def _on_hung(self) -> None:
        """The first GPU in the order of the round that has not been read is the one that hangs."""
        unread = [uuid for uuid in self._gpus if uuid not in self._read_this_round]
        for uuid in sorted(unread, key=lambda each: (each in self._hangs, self._gpus[each].index))[:1]:
            hang = self._hangs.setdefault(uuid, _Hang())
            hang.count += 1
            hang.retry_s = self._clock() + min(RETRY_S_MAX, RETRY_S_MIN * 2.0**hang.count)
            gpu = self._gpus[uuid]
            gpu.problem = f"the driver did not answer within {self._config.telemetry_deadline_s:g} s"
            log.warning("gpu hangs index=%d uuid=%s count=%d", gpu.index, uuid, hang.count)
        self._publish(is_periodic=False)

    def _note_silence(self, outcome: ChildEnd) -> None:
        if outcome is not ChildEnd.STOPPED and self._state is TelemetryState.STARTING:
            self._state = TelemetryState.FAILED
            self._sentence = f"the sampler {outcome.value} before the NVIDIA driver had answered"

    def _take(self, message: Message) -> None:
        match message["kind"]:
            case "hello":
                self._take_hello(message)
            case "gpu":
                self._take_gpu(message)
            case "xid":
                self._take_xid(message)
            case "round":
                self._take_round()
            case "absent" | "failed" as kind:
                self._take_unavailable(TelemetryState(kind), str(message["sentence"]))

    def _take_hello(self, message: Message) -> None:
        self._driver_version = str(message["driver_version"])
        self._unnamed_losses.clear()
        for gpu in message["gpus"]:
            known = self._gpus.get(gpu["uuid"])
            if known is None:
                self._gpus[gpu["uuid"]] = GpuState(**gpu)
            else:
                known.index = gpu["index"]

    def _take_gpu(self, message: Message) -> None:
        uuid, error = str(message["uuid"]), message.get("error")
        self._read_this_round.add(uuid)
        gpu = self._gpus.get(uuid)
        if gpu is None:
            self._unnamed_losses.add(int(message["index"]))
        elif error == "lost":
            gpu.is_lost = True
        elif error is not None:
            gpu.problem = str(message["detail"])
        else:
            values = dict(message["values"])
            values["pids"] = values.pop("processes", ())
            gpu.take_reading(values, self._clock())
            self._hangs.pop(uuid, None)

    def _take_xid(self, message: Message) -> None:
        gpu = self._gpus.get(str(message["uuid"]))
        if gpu is None:
            return
        code = int(message["xid"])
        if not (message.get("is_implied") and code in gpu.xid_counts):
            gpu.take_xid(code)
            log.warning("gpu error index=%d uuid=%s xid=%d", gpu.index, gpu.uuid, code)
        self._publish(is_periodic=False)

    def _take_round(self) -> None:
        self._round_s = self._clock()
        self._state = TelemetryState.OK
        self._publish(is_periodic=False)

    def _take_unavailable(self, state: TelemetryState, sentence: str) -> None:
        if (state, sentence) != (self._state, self._sentence):
            log.warning("no GPU readings state=%s reason=%s", state.value, sentence)
        self._state, self._sentence = state, sentence
        for gpu in self._gpus.values():
            gpu.problem = sentence[:200]


def _mean_utilisation(gpus: tuple[GpuReading, ...]) -> float:
    """Over the GPUs that can say; a stale value is no statement about now."""
    values = [
        gpu.utilisation_ratio for gpu in gpus if gpu.utilisation_ratio is not None and gpu.health is not GpuHealth.STALE
    ]
    return sum(values) / len(values) if values else 0.0


def _labels(given: Sequence[str]) -> tuple[str, ...]:
    """The operator's, and those of what is found here: engines of containers, and InfiniBand."""
    engines = [f"engine={name}" for name in ENGINES if shutil.which(name)]
    found = [*engines, *(["infiniband"] if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) else [])]
    labels = list(dict.fromkeys((*given, *found)))
    if len(labels) > LABELS_MOST:
        left_out = ", ".join(labels[LABELS_MOST:])
        log.warning("more than %d labels: jobs cannot require %s here", LABELS_MOST, left_out)
    return tuple(labels[:LABELS_MOST])

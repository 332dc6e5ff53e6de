"""What a task costs: the shim's memory, the time to its first output, and many short tasks in a row."""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from swarmsched.effects import ForgetTask, StartTask, StopTask
from swarmsched.events import TaskStarted
from tests.agent.supervision.testing import Bench, make_order

REPEATS = 15
TASKS = 200
AT_ONCE = 16


async def _latency(bench: Bench) -> tuple[float, float]:
    order = make_order("echo", "hello")
    began_s = time.perf_counter()
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for(TaskStarted, order.key)
    started_s = time.perf_counter()
    await bench.wait_for_output(order, b"hello")
    first_output_s = time.perf_counter()
    await bench.finish(order)
    bench.runner.perform(ForgetTask.about(order.key))
    bench.events.clear()
    return (started_s - began_s) * 1e3, (first_output_s - began_s) * 1e3


async def _shim_rss_kb(bench: Bench) -> int:
    order = make_order("sleep", "60")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for(TaskStarted, order.key)
    shims = [pid for pid in bench.runner.processes() if b"shim" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    status = Path(f"/proc/{shims[0]}/status").read_text().splitlines()
    bench.runner.perform(StopTask(order.job_id, 1, 0.0))
    await bench.finish(order)
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


async def _throughput(bench: Bench) -> float:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with slots:
            order = make_order("true")
            bench.runner.perform(StartTask(order, ()))
            await bench.finish(order)
            bench.runner.perform(ForgetTask.about(order.key))

    began_s = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(TASKS)))
    return TASKS / (time.perf_counter() - began_s)


async def _measure(data_dir: Path) -> list[tuple[str, float, str]]:
    async with Bench(data_dir) as bench:
        latencies = [await _latency(bench) for _ in range(REPEATS)]
        rss_kb = await _shim_rss_kb(bench)
        tasks_per_s = await _throughput(bench)
    return [
        ("shim resident memory", float(rss_kb), "kB"),
        ("StartTask to TaskStarted, median", statistics.median(started for started, _ in latencies), "ms"),
        ("StartTask to first output, median", statistics.median(output for _, output in latencies), "ms"),
        (f"{TASKS} tasks of `true`, {AT_ONCE} at a time", tasks_per_s, "tasks/s"),
    ]


def run() -> list[tuple[str, float, str]]:
    """(what, figure, unit) of each measurement."""
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(_measure(Path(folder)))


if __name__ == "__main__":
    for name, figure, unit in run():
        print(f"{name:45} {figure:10.1f} {unit}")

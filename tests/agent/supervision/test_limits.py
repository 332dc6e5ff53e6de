"""What tasks are held to; that the kernel holds it is shown on a machine with systemd: `tests.acceptance`."""

import os
import subprocess
from pathlib import Path

import pytest

from swarm_agent.supervision import limits
from swarm_agent.supervision.limits import TaskLimits, allowed_devices
from swarm_agent.task import shim
from swarmsched.effects import StartTask
from swarmsched.resources import Demand
from swarmsched.task import RankExit
from tests.agent.supervision.testing import Bench, make_gpu, make_order
from tests.agent.testing import wait_until

UNIFIED = next(
    (path for path in map(Path, ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")) if (path / "cgroup.procs").exists()), None
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch):
    """Two GPUs, as their driver tells of them."""
    for minor in range(2):
        (tmp_path / f"gpus/0000:0{minor}:00.0").mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {make_gpu(minor).uuid}\nDevice Minor: \t {minor}\n"
        (tmp_path / f"gpus/0000:0{minor}:00.0/information").write_text(text)
    (tmp_path / "devices").write_text(
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n234 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
    )
    monkeypatch.setattr(limits, "GPU_FOLDER", tmp_path / "gpus")
    monkeypatch.setattr(limits, "MAJORS_FILE", tmp_path / "devices")


@pytest.mark.usefixtures("machine")
def test_all_devices_stay_open_but_the_gpus_that_a_task_was_not_given() -> None:
    rest = ["block-*", "char-1", "char-234", "/dev/nvidiactl", "/dev/nvidia-modeset"]
    assert allowed_devices([make_gpu(1)]) == [*rest, "/dev/nvidia1"]
    assert allowed_devices([]) == allowed_devices([make_gpu(5, is_simulated=True)]) == rest


@pytest.mark.usefixtures("machine")
def test_a_gpu_that_the_driver_does_not_name_leaves_all_devices_open() -> None:
    """A part of one (MIG), or a driver that has not looked yet: rather no filter than a job without its GPU."""
    assert allowed_devices([make_gpu(7)]) is None


def test_without_a_driver_no_device_is_filtered(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(limits, "GPU_FOLDER", tmp_path / "none")
    assert allowed_devices([]) is None


def test_memory_is_that_of_all_ranks_of_the_node() -> None:
    order = make_order("true", ranks=3, demand=Demand(memory_bytes=2**20))
    words = " ".join(TaskLimits(500).scope(order, ()))
    assert f"swarm-{order.job_id}-1-{shim.OWN_PID}.scope" in words
    assert "MemoryMax t 3145728" in words
    assert "TasksMax t 500" in words
    assert "MemoryMax" not in " ".join(TaskLimits(500).scope(make_order("true"), ()))
    assert TaskLimits(500, "it cannot").scope(order, ()) == ()


async def test_a_task_without_its_scope_runs_and_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(TaskLimits, "scope", lambda *_: ("/bin/false", "none.scope"))
    async with Bench(tmp_path / "data") as bench:
        order = make_order("echo", "hi")
        bench.runner.perform(StartTask(order, ()))
        assert (await bench.finish(order)).exits == (RankExit(0, 0),)
        output = bench.output(order)
    assert b"are not limited: systemd has made no scope for it\n" in output
    assert output.endswith(b"hi\n")


@pytest.fixture
def group():
    """A control group with a process that waits; its pid and the group."""
    if os.geteuid() or UNIFIED is None or not os.access(UNIFIED / "cgroup.procs", os.W_OK):
        pytest.skip("needs root and a unified hierarchy of control groups that it may write to")
    path = UNIFIED / f"swarm-test-{os.getpid()}"
    path.mkdir()
    with subprocess.Popen(["sleep", "60"]) as waiting:
        (path / "cgroup.procs").write_text(f"{waiting.pid}")
        yield waiting, path
        shim.write_small(f"{path}/cgroup.kill", b"1")
        waiting.kill()
    path.rmdir()


async def test_a_control_group_is_frozen_at_once_and_thawed(group) -> None:
    _, path = group
    freezer = shim.Freezer()
    freezer.group = str(path)
    freezer.freeze()
    await wait_until(lambda: "frozen 1" in (path / "cgroup.events").read_text())
    assert not freezer.claim()
    freezer.thaw()
    await wait_until(lambda: "frozen 0" in (path / "cgroup.events").read_text())
    assert not freezer.is_frozen

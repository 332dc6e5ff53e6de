"""The fake NVML library, compiled once, and a telemetry that runs the real sampler on it."""

import asyncio
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from swarm_agent.config import AgentConfig
from swarm_agent.telemetry.source import Telemetry
from swarmsched.ids import NodeId

TESTBED = Path(__file__).parents[2] / "testbed"
PERIOD_S = 0.1
DEADLINE_S = 10.0  # a sampler that is given little of the processor is no hung driver


def load_fake_nvml():
    spec = importlib.util.spec_from_file_location("fake_nvml", TESTBED / "fake_nvml.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fake_nvml():
    return load_fake_nvml()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory, fake_nvml):
    """A folder with a libnvidia-ml.so.1 whose answers come from a state file."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the fake NVML library (Debian package gcc)")
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    flags = ["-O2", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", target, TESTBED / "fake_nvml.c"], check=True)
    return folder


@pytest.fixture
def nvml(nvml_library, fake_nvml, tmp_path, monkeypatch):
    """Four GPUs whose state the test changes; the sampler child finds them through the environment."""
    path = tmp_path / "nvml.state"
    state = fake_nvml.State.create(path, gpus=4)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library))
    monkeypatch.setenv("FAKE_NVML_STATE", str(path))
    yield state
    for gpu in range(4):
        state.recover(gpu)


class Bench:
    """A telemetry under test, what it posted, and waiting with a deadline."""

    def __init__(self, telemetry, posts):
        self.telemetry = telemetry
        self.posts = posts

    @property
    def snapshot(self):
        return self.telemetry.snapshot

    def gpu(self, index):
        return self.snapshot.gpus[index]

    def healths(self):
        return [gpu.health.value for gpu in self.snapshot.gpus]

    async def until(self, condition, timeout_s=60.0):
        """Wait until the condition holds; on failure show the snapshot."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {self.snapshot}")
            await asyncio.sleep(0.01)

    async def rounds(self, count):
        """Wait until so many further posts were made."""
        target = len(self.posts) + count
        await self.until(lambda: len(self.posts) >= target)


@pytest.fixture
async def start():
    """Start telemetries; all are stopped at the end of the test."""
    running = []

    async def start_one(*, own_gpus=dict, booked_gpus=frozenset, argv=None, **config):
        settings = {"telemetry_period_s": PERIOD_S, "telemetry_deadline_s": DEADLINE_S} | config
        posts = []
        more = {"argv": argv} if argv else {}
        telemetry = Telemetry(
            AgentConfig(name=NodeId("n1"), **settings),
            posts.append,
            NodeId("n1"),
            own_gpus=own_gpus,
            booked_gpus=booked_gpus,
            **more,
        )
        await telemetry.start()
        running.append(telemetry)
        return Bench(telemetry, posts)

    yield start_one
    for telemetry in running:
        await telemetry.stop()

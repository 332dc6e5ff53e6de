"""A telemetry that runs the real sampler, on the fake NVML library where a test asks for it."""

import asyncio

import pytest

from swarm_agent.config import AgentConfig
from swarm_agent.telemetry.source import Telemetry
from swarmsched.ids import NodeId

PERIOD_S = 0.1
DEADLINE_S = 10.0  # a sampler that is given little of the processor is no hung driver


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

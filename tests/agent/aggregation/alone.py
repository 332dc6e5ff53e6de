"""The agent's side of aggregation with the core's part of it, as on a node that knows no others."""

import asyncio
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from swarm_agent.aggregation.service import Aggregation
from swarmsched.clock import Clock
from swarmsched.effects import AggregationEffect, SendPeer
from swarmsched.events import PeerMessageReceived, TimerFired
from swarmsched.ids import NodeId, TaskKey
from swarmsched.node.aggregation import AggregationDesk

ME = NodeId("n1")


class AloneAggregation(Aggregation):
    """Hosts by leases that it gives itself."""

    def __init__(self, host: str, is_running: Callable[[TaskKey], bool], **more: Any) -> None:
        super().__init__(host, is_running, self._take, **more)
        config: Any = SimpleNamespace(node_id=ME, generation=1, is_witness=False)
        ledger: Any = SimpleNamespace(free=SimpleNamespace(cpus=4), is_draining=False, avoided_reason="")
        nobody: Any = SimpleNamespace(others=lambda now_s: [])
        self.desk = AggregationDesk(config, ledger, nobody, random.Random(1))
        self._timer: asyncio.TimerHandle | None = None

    def _take(self, event: Any) -> None:
        asyncio.get_running_loop().call_soon(self._step, event)

    def _step(self, event: Any) -> None:
        now_s = time.monotonic()
        kind = type(event.message) if isinstance(event, PeerMessageReceived) else type(event)
        for effect in self.desk.takes[kind](event, Clock(now_s, now_s)) or ():
            if isinstance(effect, SendPeer):
                self._take(PeerMessageReceived(ME, effect.message))
            elif isinstance(effect, AggregationEffect):
                self.perform(effect)
        if self._timer is not None:
            self._timer.cancel()
        due_s = max(0.0, self.desk.next_deadline_s - now_s)
        self._timer = asyncio.get_running_loop().call_later(min(due_s, 60.0), self._step, TimerFired())

    async def stop(self) -> None:
        """End the child, and time."""
        await super().stop()
        if self._timer is not None:
            self._timer.cancel()

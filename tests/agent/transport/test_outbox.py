"""When the batches to one peer leave."""

import asyncio

from swarm_agent.transport.outbox import Outbox, Outgoing
from swarmsched.ids import NodeId

TURNS = 5


class Sent:
    """What was sent, and whatever else a test notes beside it, in order."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.outbox = Outbox(NodeId("b"), self.send, self.log.append, (OSError,))

    def add(self, text: str) -> None:
        self.outbox.add(Outgoing(text, text.encode()))

    async def send(self, recipient: NodeId, sequence: int, batch: list[Outgoing]) -> None:
        self.log.append((sequence, [each.message for each in batch]))


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_messages_of_one_turn_share_a_batch() -> None:
    sent = Sent()
    sent.add("1")
    sent.add("2")
    await turns()
    sent.add("3")
    await turns()
    assert sent.log == [(0, ["1", "2"]), (1, ["3"])]
    assert sent.outbox.is_idle


async def test_what_a_turn_has_woken_runs_before_its_batches() -> None:
    sent, answer = Sent(), asyncio.get_running_loop().create_future()

    async def client() -> None:
        await answer
        sent.log.append("answered")

    task = asyncio.create_task(client())
    await turns()
    sent.add("1")
    answer.set_result(None)
    await task
    await turns()
    assert sent.log == ["answered", (0, ["1"])]


async def test_a_closed_outbox_begins_no_batch() -> None:
    sent = Sent()
    sent.add("1")
    await sent.outbox.close()
    await turns()
    assert sent.log == []
    assert sent.outbox.is_idle

"""When the batches to one peer leave."""

import asyncio

from swarm_agent.transport.outbox import IN_FLIGHT_MAX, UNORDERED, Outbox, Outgoing
from swarmsched.authority.message import LeaseRenewal
from swarmsched.ids import NodeId

TURNS = 5


class Sent:
    """An outbox, and what became of its messages, in order: batches that were sent, and failures that were told."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.is_answered = asyncio.Event()
        self.is_answered.set()
        self.outbox = Outbox(NodeId("b"), self.send, self.log.append, (OSError,))

    def add(self, text: str) -> None:
        self.outbox.add(Outgoing(text, text.encode()))

    async def send(self, recipient: NodeId, sequence: int, batch: list[Outgoing]) -> None:
        self.log.append((sequence, [each.message for each in batch]))
        await self.is_answered.wait()


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
    assert sent.log == [(1, ["1", "2"]), (2, ["3"])]
    assert sent.outbox.is_idle


async def test_a_closed_outbox_begins_no_batch() -> None:
    sent = Sent()
    sent.add("1")
    await sent.outbox.close()
    await turns()
    assert sent.log == []
    assert sent.outbox.is_idle


async def test_an_urgent_message_waits_for_no_batch_that_is_in_flight() -> None:
    sent = Sent()
    sent.is_answered.clear()
    for number in range(IN_FLIGHT_MAX + 1):
        sent.add(str(number))
        await turns()
    renewal = LeaseRenewal(1)
    sent.outbox.add(Outgoing(renewal, b"r"))
    await turns()
    numbers = [(number, [str(number - 1)]) for number in range(1, IN_FLIGHT_MAX + 1)]
    assert sent.log == [*numbers, (UNORDERED, [renewal])]
    await sent.outbox.close()

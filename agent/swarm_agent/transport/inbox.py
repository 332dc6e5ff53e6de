"""Restores the order of batches from one sending process; several may be in flight on different connections.

Order is a courtesy that spares the core needless repairs, not a promise: a missing batch is waited for `GAP_WAIT_S`
at most, and the core takes late, doubled and reordered messages as normal.
"""

import asyncio
from collections import OrderedDict

GAP_WAIT_S = 0.1
SENDERS_LIMIT = 2_000


class _Sender:
    def __init__(self, next_sequence: int) -> None:
        self.next_sequence = next_sequence
        self.waiting: dict[int, asyncio.Future[None]] = {}


class Inbox:
    """Lets batches of each sending process pass in order of their sequence."""

    def __init__(self) -> None:
        self._senders: OrderedDict[bytes, _Sender] = OrderedDict()

    async def wait_turn(self, instance_id: bytes, sequence: int) -> None:
        """Return when all earlier batches passed, or after `GAP_WAIT_S`; call `passed` once this one was posted."""
        sender = self._senders.get(instance_id)
        if sender is None:
            sender = self._senders[instance_id] = _Sender(sequence)
            if len(self._senders) > SENDERS_LIMIT:
                self._senders.popitem(last=False)
        self._senders.move_to_end(instance_id)
        if sequence <= sender.next_sequence:
            return
        turn = sender.waiting[sequence] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([turn], timeout=GAP_WAIT_S)
        finally:
            del sender.waiting[sequence]

    def passed(self, instance_id: bytes, sequence: int) -> None:
        """The batch was posted: let the next one pass."""
        sender = self._senders.get(instance_id)
        if sender is None:
            return
        sender.next_sequence = max(sender.next_sequence, sequence + 1)
        turn = sender.waiting.get(sender.next_sequence)
        if turn is not None and not turn.done():
            turn.set_result(None)

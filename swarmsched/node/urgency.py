"""Which effects need not wait for the disk, because they promise nothing that must be durable.

Datagrams carry hints.  A contact asks until when ranks may run, and a renewal for how long this node may act: both are
in memory alone, and a disk that stalls must neither freeze ranks nor change shepherds.  An extension follows an answer.

Of one attempt, starts and extensions keep their order: an extension that overtakes the start is lost, and an older
one that comes after a newer one would let ranks run on whose time is over.
"""

from collections import Counter

from swarmsched.effects import Effect, ExtendAttempt, SendDatagram, SendPeer, StartTask
from swarmsched.ids import AttemptKey
from swarmsched.node.protocol import UNBARRED_MESSAGES


class Urgency:
    """Tells a driver what may leave at once; it must be asked for every effect, in order, and heard of each that had to
    wait."""

    def __init__(self) -> None:
        self._waiting: Counter[AttemptKey] = Counter()  # starts and extensions that wait, by attempt

    def may_pass(self, effect: Effect) -> bool:
        """True when it may be performed before anything that waits."""
        if type(effect) is SendDatagram:
            return True
        if type(effect) is SendPeer:
            return isinstance(effect.message, UNBARRED_MESSAGES)
        if not isinstance(effect, StartTask | ExtendAttempt):
            return False
        key = _attempt(effect)
        if isinstance(effect, ExtendAttempt) and not self._waiting[key]:
            del self._waiting[key]
            return True
        self._waiting[key] += 1
        return False

    def performed(self, effect: Effect) -> None:
        """One that had to wait."""
        if isinstance(effect, StartTask | ExtendAttempt):
            key = _attempt(effect)
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]


def _attempt(effect: StartTask | ExtendAttempt) -> AttemptKey:
    return effect.order.key.of_attempt if isinstance(effect, StartTask) else effect.of_attempt

"""Answers under an owner's name from another place than the one where it granted its hold.

Two machines may have one name, by mistake.  It takes moments until that is known and days until it is mended, and all
the while messages to the name reach the one or the other.  What the second one knows nothing of is not lost: only who
answers from where the hold was granted can say that nothing is left, or silence proves it (`settlement`).  An owner
that came back elsewhere with an empty disk says the same as a second machine; time tells them apart.
"""

from swarmsched.ids import NodeId
from swarmsched.record import JobRecord


class Namesakes:
    """Owners of one job whose names somebody else answers to, and since when."""

    def __init__(self) -> None:
        self._since_s: dict[NodeId, float] = {}

    def is_one(self, node: NodeId, attempt: int, origin: int, record: JobRecord, now_s: float) -> bool:
        """True when what was said of an attempt of `record` was not said by the owner that granted its hold."""
        granted_from = _granted_from(node, attempt, record)
        if 0 in (granted_from, origin) or granted_from == origin:
            self._since_s.pop(node, None)
            return False
        self._since_s.setdefault(node, now_s)
        return True

    def met(self, node: NodeId) -> None:
        """The owner itself has reported, or is asked anew: time begins again."""
        self._since_s.pop(node, None)

    def forget(self) -> None:
        """The attempt is over."""
        self._since_s.clear()

    def standing(self, now_s: float, for_s: float) -> list[NodeId]:
        """Owners of whom only namesakes have been heard for so long."""
        return [node for node, since_s in self._since_s.items() if now_s >= since_s + for_s]


def _granted_from(node: NodeId, attempt: int, record: JobRecord) -> int:
    tasks = [(each.node, each.attempt, each.origin) for each in record.leftovers]
    tasks += [(share.node, record.attempt, share.origin) for share in record.shares]
    return next((origin for where, number, origin in tasks if (where, number) == (node, attempt)), 0)

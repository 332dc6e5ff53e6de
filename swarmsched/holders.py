"""Who keeps a job's record, and when enough of them have spoken.

A holder is a node together with the identity of its store: a machine that lost its disk comes back under its old name
with another store, and is not the holder that it was (docs/explanation/protocol.md, plane C).

Holders change through two overlapping configurations (joint consensus; Ongaro and Ousterhout, "In Search of an
Understandable Consensus Algorithm", 2014, section 6): while `leaving` is set, both the present and the leaving
holders must agree by majority, so that no two quorums, old or new, can miss one another.
"""

from collections.abc import Callable, Collection
from typing import Annotated

from msgspec import Meta

from swarmsched.fields import U53, NodeName, Value
from swarmsched.ids import NodeId

HOLDERS_MAX = 5
HOLDERS_WANTED = 3

Quorum = Callable[[int], int]
"""How many of that many holders must answer; any two quorums must share a holder."""


class Holder(Value, order=True):
    """A node and the random identity of the database that it keeps records in."""

    node: NodeName
    store: U53


Holders = Annotated[tuple[Holder, ...], Meta(max_length=HOLDERS_MAX)]


def majority(holder_count: int) -> int:
    """More than half."""
    return holder_count // 2 + 1


class Configuration(Value):
    """The holders of one job; `leaving` are those of the configuration that is being replaced, if any."""

    holders: Holders = ()
    leaving: Holders = ()

    @property
    def members(self) -> tuple[Holder, ...]:
        """All who are asked, each once, present ones first."""
        return tuple(dict.fromkeys((*self.holders, *self.leaving)))

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Names of the present holders."""
        return tuple(holder.node for holder in self.holders)

    def is_quorum(self, answered: Collection[Holder], quorum: Quorum = majority) -> bool:
        """True when enough have answered, in the present and, while there is one, in the leaving configuration."""
        groups = [group for group in (self.holders, self.leaving) if group]
        enough = [sum([holder in answered for holder in group]) >= quorum(len(group)) for group in groups]
        return bool(groups) and all(enough)

    def is_lost(self, refused: Collection[Holder], quorum: Quorum = majority) -> bool:
        """True when so many have refused that the others are no quorum."""
        return not self.is_quorum([holder for holder in self.members if holder not in refused], quorum)

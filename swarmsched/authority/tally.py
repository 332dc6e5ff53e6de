"""What the holders of a configuration agree on, when each of them has told a value."""

from collections.abc import Mapping
from typing import TypeVar

from swarmsched.api import Isolation
from swarmsched.holders import Configuration, Holder, Holders, Quorum
from swarmsched.ids import NodeId

Value = TypeVar("Value", float, tuple[int, int])


def agreed(configuration: Configuration, values: Mapping[Holder, Value], lowest: Value, quorum: Quorum) -> Value:
    """The greatest value that a quorum of each group of holders reaches; `lowest` stands for holders without one."""
    reached = [_reached(group, values, lowest, quorum) for group in _groups(configuration)]
    return min(reached, default=lowest)


def runs_free(owner: NodeId, configuration: Configuration, isolation: Isolation, quorum: Quorum) -> bool:
    """True when ranks on that node run without contact, so that no silence says anything about them.

    Either the job asked for it, or no quorum can exist without the owner's own vote: then nothing can be decided about
    the job behind the node's back, and freezing would protect it from nobody (protocol notes, 3.5).  A quorum of a
    joint configuration needs both groups, so one such group is enough.
    """
    if isolation is Isolation.CONTINUE:
        return True
    return any(sum(holder.node != owner for holder in group) < quorum(len(group)) for group in _groups(configuration))


def _groups(configuration: Configuration) -> list[Holders]:
    return [group for group in (configuration.holders, configuration.leaving) if group]


def _reached(group: Holders, values: Mapping[Holder, Value], lowest: Value, quorum: Quorum) -> Value:
    return sorted((values.get(holder, lowest) for holder in group), reverse=True)[quorum(len(group)) - 1]

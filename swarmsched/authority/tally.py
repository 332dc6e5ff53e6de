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


def may_run_free(owner: NodeId, configuration: Configuration, isolation: Isolation, quorum: Quorum) -> bool:
    """True when ranks on that node may run without contact, so that no silence says anything about them.

    Either the job asked for it, or no quorum can exist without the owner's own vote: then nothing can be decided about
    the job behind the node's back, and freezing would protect it from nobody.
    """
    return isolation is Isolation.CONTINUE or any(_are_needed(owner, configuration, quorum))


def runs_free(owner: NodeId, configuration: Configuration, isolation: Isolation, quorum: Quorum) -> bool:
    """True when the owner itself may take it that they do.

    Of a joint configuration each group must need the owner: before the record that names it is decided the leaving
    holders may decide something else among themselves, and the present ones alone decide what follows it.
    """
    needed = _are_needed(owner, configuration, quorum)
    return isolation is Isolation.CONTINUE or (bool(needed) and all(needed))


def _are_needed(owner: NodeId, configuration: Configuration, quorum: Quorum) -> list[bool]:
    """Of each group, whether it has no quorum without the owner."""
    return [sum(holder.node != owner for holder in group) < quorum(len(group)) for group in _groups(configuration)]


def _groups(configuration: Configuration) -> list[Holders]:
    return [group for group in (configuration.holders, configuration.leaving) if group]


def _reached(group: Holders, values: Mapping[Holder, Value], lowest: Value, quorum: Quorum) -> Value:
    return sorted((values.get(holder, lowest) for holder in group), reverse=True)[quorum(len(group)) - 1]

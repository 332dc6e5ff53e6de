"""Which of a job's holders are there, and how many more of them may die before nothing can be decided about it.

A view like all of membership: right within seconds, and good for people, never for a decision of the core.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.gossip.record import NodeStatus
from swarmsched.holders import Configuration, Holder, majority
from swarmsched.ids import NodeId

PRESENT = (MemberStatus.ALIVE, MemberStatus.SUSPECT)  # a suspicion lasts seconds and often ends well


@dataclass(frozen=True, slots=True)
class Attendance:
    """`stores` are the databases of the nodes as they tell it themselves: another one is another holder."""

    present: frozenset[NodeId] = frozenset()
    stores: Mapping[NodeId, int] = field(default_factory=dict)

    def has(self, holder: Holder) -> bool:
        """True when the holder seems to be there, with the database that it held the record in."""
        return holder.node in self.present and self.stores.get(holder.node, 0) in (0, holder.store)

    def has_majority(self, configuration: Configuration) -> bool:
        """False: nothing about the job can be decided before holders come back, or an operator decides it."""
        return configuration.is_quorum([each for each in configuration.members if self.has(each)])

    def survives_deaths(self, configuration: Configuration) -> int:
        """How many of the holders that are there may die, whichever they are."""
        groups = [group for group in (configuration.holders, configuration.leaving) if group]
        spare = [sum(self.has(each) for each in group) - majority(len(group)) for group in groups]
        return max(0, min(spare, default=0))


def no_majority(whose: str, holders: Iterable[NodeId], there: Collection[NodeId]) -> str:
    """Who is missing of the holders of a job about which nothing can be decided."""
    names = list(dict.fromkeys(holders))
    silent, heard = [each for each in names if each not in there], [each for each in names if each in there]
    others = f"; {', '.join(heard)} {'does' if len(heard) == 1 else 'do'}" if heard else ""
    lost = f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer" if silent else "a disk was changed"
    return f"no majority of {whose} is there, and nothing is decided about it: {lost}{others}"


def present(members: Iterable[MemberView]) -> frozenset[NodeId]:
    """Members of whom an answer can be expected."""
    return frozenset(member.node_id for member in members if member.status in PRESENT)


def attendance_by(members: Iterable[MemberView], nodes: Iterable[NodeStatus]) -> Attendance:
    """By what membership and the nodes' records say."""
    return Attendance(present(members), {each.record.node_id: each.record.store_id for each in nodes})

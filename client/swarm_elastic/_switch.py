"""What the members of a new group agree on before they train in it: from which step, and who gives his state to whom.

All read the same table of claims, so all come to the same verdict.  Of those that have trained the one with the newest
membership, and within it the most steps, is the authority: only it can have finished a step that others lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from swarm_elastic._group import Group
    from swarm_elastic._plan import GangPlan


class SwitchRefused(Exception):
    """A plan that would do harm.  `culprits` are the ranks that must not take part in it."""

    def __init__(self, problem: str, culprits: frozenset[int]) -> None:
        self.culprits = culprits
        super().__init__(problem)


class SwitchVote(NamedTuple):
    """One rank's word.

    `trains` is the version of the membership in which it has trained last, 0 for none, and `step` its step then;
    `start` is the step from which it could begin anew, -1 for none; `layout` is a hash of what its state looks like.
    """

    trains: int
    step: int
    start: int
    layout: int


class SwitchVerdict(NamedTuple):
    """The step that all have done when training goes on; `holders` give to those that are `behind`."""

    step: int
    holders: tuple[int, ...]
    behind: tuple[int, ...]


def agree(group: Group, plan: GangPlan, claim: SwitchVote) -> SwitchVerdict:
    """Ask all members of the new group.  Raises `SwitchRefused`, on all of them, and `GroupLost`."""
    return judge(plan, [SwitchVote(*row) for row in group.gather(list(claim))])


def judge(plan: GangPlan, claims: Sequence[SwitchVote]) -> SwitchVerdict:
    """The verdict on the claims of all ranks."""
    trained = [rank for rank, claim in enumerate(claims) if claim.trains]
    verdict = _from_trained(plan, claims, trained) if trained else _from_start(plan, claims)
    _check_layouts(plan, claims, verdict.holders[0])
    return verdict


def _from_trained(plan: GangPlan, claims: Sequence[SwitchVote], trained: Sequence[int]) -> SwitchVerdict:
    first = max(trained, key=lambda rank: claims[rank][:2])
    authority = claims[first]
    for rank in trained:
        if claims[rank].step > authority.step:
            raise _contradiction(plan, claims, first, [rank], [rank])
    peers = [rank for rank in trained if claims[rank].trains == authority.trains]
    torn = [rank for rank in peers if claims[rank].step < authority.step - 1]
    if torn:
        near = [rank for rank in peers if rank not in torn]
        # Within one membership steps differ by one at most; the majority is believed, and of two nobody.
        culprits = min(torn, near, key=len) if len(torn) != len(near) else peers
        raise _contradiction(plan, claims, first, torn, culprits)
    holders = tuple(rank for rank in trained if claims[rank].step == authority.step)
    return SwitchVerdict(authority.step, holders, _others(claims, holders))


def _contradiction(
    plan: GangPlan, claims: Sequence[SwitchVote], first: int, others: Sequence[int], culprits: Sequence[int]
) -> SwitchRefused:
    told = ", ".join(f"{_name(plan, rank)} says step {claims[rank].step}" for rank in (first, *others))
    problem = f"steps of plan {plan.version} contradict one another: {told}; start the wrong one anew"
    return SwitchRefused(problem, frozenset(culprits))


def _from_start(plan: GangPlan, claims: Sequence[SwitchVote]) -> SwitchVerdict:
    """Nobody has trained: from the beginning or from a checkpoint, with the weights of one, as random ones differ."""
    step = max(claim.start for claim in claims)
    if step < 0:
        problem = (
            f"plan {plan.version} keeps no member that has trained, and no checkpoint is named: "
            "training would begin anew; publish one plan with old and new members first"
        )
        raise SwitchRefused(problem, frozenset(range(len(claims))))
    holders = (next(rank for rank, claim in enumerate(claims) if claim.start == step),)
    return SwitchVerdict(step, holders, _others(claims, holders))


def _check_layouts(plan: GangPlan, claims: Sequence[SwitchVote], holder: int) -> None:
    layout = claims[holder].layout
    wrong = [rank for rank, claim in enumerate(claims) if claim.layout != layout]
    if wrong:
        names = ", ".join(f"{_name(plan, rank)} has {claims[rank].layout:015x}" for rank in wrong)
        problem = f"model or optimizer differs: {names}, {_name(plan, holder)} has {layout:015x}; start the same script"
        raise SwitchRefused(problem, frozenset(wrong))


def _others(claims: Sequence[SwitchVote], holders: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank in range(len(claims)) if rank not in holders)


def _name(plan: GangPlan, rank: int) -> str:
    return plan.members[rank].worker

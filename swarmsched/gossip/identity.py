"""A node's own identity: its generation and incarnation, and what it does when others say otherwise.

A node jumps above any generation of its name that it meets and is not its own: after a clock that went back and a
lost disk this makes the restarted node the newest again.  If the jump is answered by exactly one generation more,
another live process jumped too: the name has two holders, and both go into conflict.
"""

from dataclasses import replace
from enum import Enum, auto

from swarmsched.gossip.message import Standing, Update

JUMPS_MAX = 4
"""More jumps than any single holder of a name could need; then it is a conflict, whatever the numbers."""


class Reaction(Enum):
    """What hearing of oneself led to."""

    NOTHING = auto()
    CORRECT = auto()  # the speaker's news is old: tell it ours
    REFUTED = auto()  # incarnation raised: spread it
    JUMPED = auto()  # generation raised: store and spread it
    CONFLICT = auto()  # another process holds the name: store the generation and spread it


class Identity:
    """This node's claim about itself; `update` is what is spread."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self._jump_count = 0

    @property
    def has_left(self) -> bool:
        """True after `leave`."""
        return self.update.standing is Standing.LEFT

    def leave(self) -> None:
        """Claim to have left."""
        self.update = replace(self.update, standing=Standing.LEFT)

    def hear(self, claim: Update) -> Reaction:
        """React to a claim about this node.  Repetitions and old claims change nothing."""
        if self.has_left:
            return Reaction.NOTHING
        if claim.generation < self.update.generation:
            return Reaction.CORRECT
        is_foreign = bool(claim.instance_id) and claim.instance_id != self.update.instance_id
        if claim.generation > self.update.generation:
            return self._hear_newer(claim)
        is_known_conflict = self.update.is_conflict or (claim.is_conflict and self._jump_count > 0)
        if is_foreign and is_known_conflict:  # who has not jumped yet may be the only one that is left: it tries that
            return self._share_name(claim)
        if is_foreign:
            return self._jump(claim.generation)
        return self._refute(claim)

    def _hear_newer(self, claim: Update) -> Reaction:
        answers_our_jump = self._jump_count > 0 and claim.generation == self.update.generation + 1
        if answers_our_jump or self._jump_count >= JUMPS_MAX:
            self._enter_conflict(claim)
            return Reaction.CONFLICT
        return self._jump(claim.generation)

    def _jump(self, above: int) -> Reaction:
        self._jump_count += 1
        self.update = replace(
            self.update, generation=above + 1, incarnation=0, standing=Standing.ALIVE, is_conflict=False
        )
        return Reaction.JUMPED

    def _share_name(self, claim: Update) -> Reaction:
        if not self.update.is_conflict:
            self._enter_conflict(claim)
            return Reaction.CONFLICT
        if claim.standing is not Standing.ALIVE:
            return self._refute(claim)
        if claim.incarnation > self.update.incarnation:  # the other holder refuted for both of us
            self.update = replace(self.update, incarnation=claim.incarnation)
        return Reaction.NOTHING

    def _enter_conflict(self, claim: Update) -> None:
        self.update = replace(
            self.update, generation=claim.generation, incarnation=claim.incarnation + 1, is_conflict=True
        )

    def _refute(self, claim: Update) -> Reaction:
        own = self.update
        if claim.standing is Standing.ALIVE and claim.incarnation <= own.incarnation:
            return Reaction.NOTHING
        if claim.incarnation < own.incarnation:
            return Reaction.CORRECT
        self.update = replace(own, incarnation=claim.incarnation + 1)
        return Reaction.REFUTED

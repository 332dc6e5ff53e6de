"""A node's own identity: its generation and incarnation, and what it does when others say otherwise.

A node jumps above any claim to its name that is not its own: after a clock that went back and a lost disk this makes
the restarted node the newest again.  Neither what others say nor a packet of the claimant itself proves that it still
lives, since packets come late and peers know different old claims; but what a process has left behind runs out after a
few jumps.  One that has heard of this very process lives, and so does whatever contests the name for longer: then the
name has two holders, and both go into conflict.
"""

from enum import Enum, auto

from msgspec.structs import replace

from swarmsched.errors import StorageError
from swarmsched.gossip.message import Standing, Update

GENERATION_ROOM, GENERATION_KEY = "meta", "generation"
"""Where the generation is durable that a life has risen to, as a decimal number in ASCII."""

JUMPS_MAX = 4
"""More jumps than a single holder of a name needs to get past old claims; what contests the name then is alive."""

PEACE_S = 60.0
"""Without a jump for so long, the name is contested no more: what comes then is another quarrel."""


def next_generation(begun_with: int, risen_to: bytes | None, now_utc_s: float) -> int:
    """A generation above all of earlier lives: those that they began with, and those that they had to rise to.

    `begun_with` is 0 and `risen_to` None where there was none.  Raises `StorageError` for an entry that is no number.
    """
    if risen_to is not None and not risen_to.isdigit():
        raise StorageError(f"{GENERATION_ROOM}/{GENERATION_KEY}", f"unreadable entry: {risen_to[:16]!r}", "")
    return max(begun_with + 1, int(risen_to or 0) + 1, int(now_utc_s))


GREETINGS_MAX = 100
"""Other holders of this name that are greeted; further ones hear by rumours alone."""


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
        self._jumped_s = 0.0
        self._greetings: set[tuple[bytes, int]] = set()  # other holders of this name, and the generation told to them

    @property
    def has_left(self) -> bool:
        """True after `leave`."""
        return self.update.standing is Standing.LEFT

    def is_to_greet(self, claim: Update) -> bool:
        """Whether another holder of the name has not been told of this generation yet; true once for each."""
        greeting = (claim.instance_id, self.update.generation)
        is_news = greeting not in self._greetings and len(self._greetings) < GREETINGS_MAX
        if is_news:
            self._greetings.add(greeting)
        return is_news

    def leave(self) -> None:
        """Claim to have left."""
        self.update = replace(self.update, standing=Standing.LEFT)

    def hear(self, claim: Update, now_s: float, *, is_answer: bool = False) -> Reaction:
        """React to a claim about this node.  Repetitions and old claims change nothing.

        `is_answer`: the claimant itself has sent it, and has heard of this process.
        """
        if self.has_left:
            return Reaction.NOTHING
        if claim.generation < self.update.generation:
            return Reaction.CORRECT
        if claim.generation == self.update.generation:
            if not self._is_contest(claim):
                return self._refute(claim)
            if self.update.is_conflict:
                return self._share_name(claim)
        if now_s > self._jumped_s + PEACE_S:
            self._jump_count = 0
        if is_answer or self._jump_count >= JUMPS_MAX:
            self._enter_conflict(claim)
            return Reaction.CONFLICT
        return self._jump(claim.generation, now_s)

    def _is_contest(self, claim: Update) -> bool:
        """Peers that know of a conflict add it to whatever is claimed under that generation, by this process too."""
        is_foreign = bool(claim.instance_id) and claim.instance_id != self.update.instance_id
        return is_foreign or (claim.is_conflict and not self.update.is_conflict)

    def _jump(self, above: int, now_s: float) -> Reaction:
        self._jump_count, self._jumped_s = self._jump_count + 1, now_s
        self.update = replace(
            self.update, generation=above + 1, incarnation=0, standing=Standing.ALIVE, is_conflict=False
        )
        return Reaction.JUMPED

    def _share_name(self, claim: Update) -> Reaction:
        if claim.standing is not Standing.ALIVE:
            return self._refute(claim)
        if claim.incarnation > self.update.incarnation:  # the other holder refuted for both of us
            self.update = replace(self.update, incarnation=claim.incarnation)
        return Reaction.NOTHING

    def _enter_conflict(self, claim: Update) -> None:
        own = self.update
        newest = max(own.incarnation, claim.incarnation) if claim.generation == own.generation else claim.incarnation
        self.update = replace(own, generation=claim.generation, incarnation=newest + 1, is_conflict=True)

    def _refute(self, claim: Update) -> Reaction:
        own = self.update
        if claim.standing is Standing.ALIVE and claim.incarnation <= own.incarnation:
            return Reaction.NOTHING
        if claim.incarnation < own.incarnation:
            return Reaction.CORRECT
        self.update = replace(own, incarnation=claim.incarnation + 1)
        return Reaction.REFUTED

"""Which claims about members can be true: what is far ahead of all that is known comes from a wrong clock, or worse."""

from collections.abc import Iterable

from swarmsched.effects import Announce
from swarmsched.gossip.message import Update
from swarmsched.ids import is_node_name

GENERATION_LEAD_MAX = 86_400
INCARNATION_LEAD_MAX = 2**20
"""A claim further ahead of what this node knows is refused: nothing honest gets there."""

REFUSED_NAMES_MAX = 100
"""Refused members that are announced by name; the others are only counted."""


class Plausibility:
    """Judges claims.  `generation` is the own one, which was the time of the start."""

    def __init__(self, generation: int) -> None:
        self._generation_base = generation
        self._refused: dict[str, None] = {}  # names announced as refused

    def believe(self, updates: Iterable[Update]) -> None:
        """A node that knows nobody has nothing to judge by; its own clock may be the one that is wrong."""
        self._generation_base = max(self._generation_base, *(update.generation for update in updates))

    def problem_of(self, update: Update, known: Update | None, up_s: float, *, is_full: bool) -> str:
        """What cannot be about a claim of another member; empty: nothing.  `up_s`: since the start of this node."""
        base = known.incarnation if known is not None and known.generation == update.generation else 0
        if problem := self.problem_of_own(update, base, up_s):
            return problem
        if known is None and not is_node_name(update.node):
            return "name"
        return "number of members" if known is None and is_full else ""

    def problem_of_own(self, update: Update, incarnation: int, up_s: float) -> str:
        """The same of a claim of whose member this incarnation is known.  A day is for errors of clocks."""
        if update.generation > self._generation_base + up_s + GENERATION_LEAD_MAX:
            return "generation"
        return "incarnation" if update.incarnation > incarnation + INCARNATION_LEAD_MAX else ""

    def refuse(self, update: Update, problem: str) -> Announce | None:
        """What is announced of it, once of each name."""
        if update.node in self._refused or len(self._refused) >= REFUSED_NAMES_MAX:
            return None
        self._refused[update.node] = None
        text = (
            f"a claim about {update.node} is refused for its {problem} "
            f"(generation {update.generation}, incarnation {update.incarnation}); check the clocks of both nodes"
        )
        return Announce("member.refused", text, node=update.node, fields={"problem": problem})

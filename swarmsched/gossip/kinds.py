"""What jobs of one kind, those of a user by one name, have measured: a prior for the next of them.

Every agent remembers it of the cards that pass, so that nothing more travels; one that was not there begins without.
"""

from collections import OrderedDict

from msgspec.structs import replace

from swarmsched.card import NAME_LENGTH, JobCard
from swarmsched.estimate import Estimate

KINDS_LIMIT = 1_024


class Kinds:
    """Newest estimates by user and name, of at most `KINDS_LIMIT` kinds; whichever was heard of last stays."""

    def __init__(self) -> None:
        self._estimates: OrderedDict[tuple[str, str], Estimate] = OrderedDict()

    def note(self, card: JobCard) -> None:
        """A card has come; what it has from others of its kind is no news."""
        estimate = card.estimate
        if not card.name or estimate is None or estimate.is_prior or not estimate.points:
            return
        self._estimates[card.user, card.name] = estimate
        self._estimates.move_to_end((card.user, card.name))
        if len(self._estimates) > KINDS_LIMIT:
            self._estimates.popitem(last=False)

    def prior(self, user: str, name: str) -> Estimate | None:
        """Speed and noise; how long the next one takes is for it to say."""
        estimate = self._estimates.get((user[:NAME_LENGTH], name[:NAME_LENGTH])) if name else None
        return estimate and replace(estimate, remaining=0.0, remaining_error=0.0, done=0.0, is_prior=True)

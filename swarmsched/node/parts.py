"""The parts of which a node is made.  Tests and the simulator hand in others, to see that their faults are found."""

from collections.abc import Callable
from dataclasses import dataclass

from swarmsched.authority.contact import ContactLine
from swarmsched.authority.contact_book import ContactBook
from swarmsched.gossip.membership import Membership
from swarmsched.holder.leases import LeaseBook
from swarmsched.holders import Quorum, majority
from swarmsched.jobs.tombstones import TOMBSTONES_MAX
from swarmsched.ledger.ledger import Ledger
from swarmsched.negotiation.attempt import Attempt
from swarmsched.negotiation.checkpointing import CommitRule, is_of_present_attempt


@dataclass(frozen=True, slots=True)
class Parts:
    """Factories with the signatures of the classes that stand here, and a limit."""

    quorum: Quorum = majority
    make_membership: type[Membership] = Membership
    make_ledger: type[Ledger] = Ledger
    make_lease_book: Callable[[float], LeaseBook] = LeaseBook
    make_contact_line: type[ContactLine] = ContactLine
    make_contact_book: Callable[[float, Quorum], ContactBook] = ContactBook
    make_attempt: type[Attempt] = Attempt
    may_commit: CommitRule = is_of_present_attempt
    tombstones_max: int = TOMBSTONES_MAX


PRODUCTION = Parts()

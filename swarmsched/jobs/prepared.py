"""What a proposer remembers of its last round, so that a steady shepherd's next update needs no prepare."""

from dataclasses import dataclass

from swarmsched.holders import Configuration
from swarmsched.jobs.message import Ballot
from swarmsched.jobs.succession import may_follow
from swarmsched.jobs.update import UpdateRequested
from swarmsched.record import JobRecord


@dataclass(frozen=True, slots=True)
class Prepared:
    """A ballot that a quorum of `configuration` has promised us, and the decided record that was current then."""

    ballot: Ballot
    configuration: Configuration
    current: JobRecord | None

    def serves(self, request: UpdateRequested) -> bool:
        """True if the update can be proposed under this ballot.

        A change of shepherd needs votes, which only a prepare asks for; a forced update asks other holders.  What was
        decided already is proposed again like anything else: it may have been overtaken since.
        """
        if self.current == request.value:
            return True
        if request.takes_over or request.is_forced:
            return False
        if self.current is None:
            return request.expected is None and request.configuration == self.configuration
        is_expected = request.expected == self.current.stamp
        return is_expected and may_follow(request.value.configuration, self.configuration)

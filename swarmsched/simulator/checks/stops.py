"""Invariant "stops": the default policy ends no running job for another one that has no checkpoint and may not begin
again.

What a job may is read from the record that was decided last, and what its shepherd grants from its answers.
"""

from collections.abc import Sequence

from swarmsched.effects import Effect, SendPeer
from swarmsched.events import Event, PeerMessageReceived
from swarmsched.ledger.message import PreemptAnswer, PreemptRequest
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

INVARIANT = "stops"


class StopChecker(Checker):
    """Compares who is to make room with what its people have agreed to."""

    EFFECTS = (PreemptAnswer,)

    def __init__(self, decided: DecidedRecords) -> None:
        self._decided = decided
        self.granted_count = 0  # stops under the default policy

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Look at what a shepherd grants."""
        if not isinstance(event, PeerMessageReceived) or not isinstance(event.message, PreemptRequest):
            return
        asked = event.message
        answers = [effect.message for effect in effects if isinstance(effect, SendPeer)]
        if not any(isinstance(each, PreemptAnswer) and each.is_granted for each in answers):
            return
        record = self._decided.last(asked.job_id)
        is_by_default = asked.policy_id.split(":")[0] == "swarm"
        if record is None or record.shepherd != host.node_id or not is_by_default:
            return  # one that was succeeded has no say: owners refuse its orders
        self.granted_count += 1
        if not (record.spec.restartable or record.has_own_checkpoint):
            raise Violation(INVARIANT, f"{asked.job_id} makes room for {asked.taker}, and nobody may stop it")

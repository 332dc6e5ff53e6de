"""Invariant 3: an epoch has one shepherd, and only it commands.

Epochs in the register grow strictly when the shepherd changes.  Owners are commanded under an epoch only by the node
that a decided record names as its shepherd.
"""

from swarmsched.effects import Effect, SendPeer
from swarmsched.ids import JobId
from swarmsched.ledger.message import (
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    SignalRequest,
    StatusRequest,
    StopRequest,
    WorldRequest,
)
from swarmsched.record import JobRecord
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

COMMANDS = (HoldRequest, CommitRequest, LaunchRequest, SignalRequest, StatusRequest, StopRequest, WorldRequest)
"""A release is left out: whoever has the record of an ended job dismisses what is left of it."""


class AuthorityChecker(Checker):
    """Who won which epoch."""

    PERFORMED = COMMANDS

    def __init__(self, decided: DecidedRecords) -> None:
        self._decided = decided
        self._winners: dict[tuple[JobId, int], tuple[str, int]] = {}  # (job, epoch) -> (node, generation)
        decided.subscribe(self._decided_next)

    def performed(self, host: Host, effect: Effect) -> None:
        """A command leaves: its sender must have won the epoch that it names."""
        assert isinstance(effect, SendPeer)
        command = effect.message
        assert isinstance(command, COMMANDS)
        self._decided.settle(host)
        winner = self._winners.get((command.job_id, command.epoch))
        if winner is None or winner[0] != host.node_id:
            whose = "nobody has won" if winner is None else f"{winner[0]} has won"
            raise Violation(
                3,
                f"{host.node_id} sends a {type(command).__name__} for {command.job_id} "
                f"under epoch {command.epoch}, which {whose}",
            )

    def _decided_next(self, job_id: JobId, before: JobRecord | None, after: JobRecord) -> None:
        shepherd = (after.shepherd, after.shepherd_generation)
        winner = self._winners.setdefault((job_id, after.epoch), shepherd)
        if winner != shepherd:
            raise Violation(3, f"epoch {after.epoch} of {job_id} was won by {winner} and by {shepherd}")
        if before is not None and before.shepherd != after.shepherd and after.epoch <= before.epoch:
            raise Violation(
                3,
                f"the shepherd of {job_id} changed from {before.shepherd} to {after.shepherd} "
                f"while the epoch went from {before.epoch} to {after.epoch}",
            )

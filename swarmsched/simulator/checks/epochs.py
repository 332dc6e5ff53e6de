"""Invariant 2: the epoch that an owner has accepted for a job never falls, and a lower one changes nothing there.

An owner's epoch counts from the moment at which it was told to anybody, for it is durable then, and survives every
restart.  Only the loss of the disk, or forgetting a job without bookings, takes it back.
"""

from collections.abc import Sequence

from swarmsched.effects import (
    BindRendezvous,
    Effect,
    ExtendAttempt,
    Persist,
    SendPeer,
    SignalTask,
    StageTask,
    StartTask,
    StopTask,
)
from swarmsched.events import Event, PeerMessageReceived
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.booking import ROOM, BookingState
from swarmsched.ledger.message import (
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    OwnerAnswer,
    Refusal,
    ReleaseRequest,
    SignalRequest,
    StatusRequest,
    StopRequest,
    WorldRequest,
)
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.ledger_view import dropped_fences, ledger_of
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

COMMANDS = (
    HoldRequest,
    CommitRequest,
    LaunchRequest,
    ReleaseRequest,
    StopRequest,
    SignalRequest,
    WorldRequest,
    StatusRequest,
)
OWNER_ROOMS = (ROOM, "task")
OWNER_ACTS = (BindRendezvous, SignalTask, StopTask, ExtendAttempt)


class EpochChecker(Checker):
    """The fence of each owner, for each job."""

    EVENTS = COMMANDS
    EFFECTS = (ROOM,)
    PERFORMED = (OwnerAnswer,)

    def __init__(self) -> None:
        self._told: dict[NodeId, dict[JobId, int]] = {}
        self.refused_count = 0  # commands of an earlier epoch

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Compare a command with the epoch that was told before it came."""
        told = self._told.setdefault(host.node_id, {})
        command = event.message if isinstance(event, PeerMessageReceived) else None
        if isinstance(command, COMMANDS):
            epoch = told.get(command.job_id, 0)
            if command.epoch < epoch:
                self.refused_count += 1
                self._expect_nothing(host, command.job_id, command.command_id, epoch, effects)
            self._expect_no_fall(host, command.job_id, epoch)
        for job_id in dropped_fences(effects):
            if any(entry.job_id == job_id for entry in ledger_of(host).entries):
                raise Violation(2, f"{host.node_id} forgot the epoch of {job_id}, which has a booking there")
            told.pop(job_id, None)

    def performed(self, host: Host, effect: Effect) -> None:
        """An epoch is told."""
        assert isinstance(effect, SendPeer)
        answer = effect.message
        assert isinstance(answer, OwnerAnswer)
        told = self._told.setdefault(host.node_id, {})
        # An answer that had to wait may name an epoch that was succeeded, or a job that was forgotten meanwhile.
        if answer.epoch > told.get(answer.job_id, 0) and ledger_of(host).epoch_of(answer.job_id) >= answer.epoch:
            told[answer.job_id] = answer.epoch

    def agent_started(self, host: Host) -> None:
        """Whatever was told must have been on the disk."""
        for job_id, epoch in self._told.get(host.node_id, {}).items():
            self._expect_no_fall(host, job_id, epoch)

    def disk_wiped(self, host: Host) -> None:
        """A node whose disk was lost knows nothing any more."""
        self._told.pop(host.node_id, None)

    def looked(self, hosts: Sequence[Host]) -> None:
        """All fences of all machines, and each booking under its fence."""
        for host in hosts:
            if host.node is None:
                continue
            for job_id, epoch in self._told.get(host.node_id, {}).items():
                self._expect_no_fall(host, job_id, epoch)
            for entry in ledger_of(host).entries:
                if entry.epoch > ledger_of(host).epoch_of(entry.job_id) and entry.state is not BookingState.DRAINING:
                    raise Violation(2, f"{host.node_id} has a booking above its own fence: {entry}")

    def _expect_no_fall(self, host: Host, job_id: JobId, told: int) -> None:
        epoch = ledger_of(host).epoch_of(job_id)
        if epoch < told:
            raise Violation(2, f"the epoch of {job_id} at {host.node_id} fell from {told} to {epoch}")

    def _expect_nothing(
        self, host: Host, job_id: JobId, command_id: int, epoch: int, effects: Sequence[Effect]
    ) -> None:
        for effect in effects:
            if _changes(effect, job_id):
                raise Violation(
                    2, f"{host.node_id} has epoch {epoch} of {job_id}; a command with a lower one: {effect}"
                )
            if _is_yes(effect, job_id, command_id):
                raise Violation(2, f"{host.node_id} has epoch {epoch} of {job_id} and obeys a lower one: {effect}")


def _is_yes(effect: Effect, job_id: JobId, command_id: int) -> bool:
    answer = effect.message if isinstance(effect, SendPeer) else None
    if not isinstance(answer, OwnerAnswer) or answer.refusal is not Refusal.NONE:
        return False
    return (answer.job_id, answer.command_id) == (job_id, command_id)


def _changes(effect: Effect, job_id: JobId) -> bool:
    if isinstance(effect, Persist):
        return effect.room in OWNER_ROOMS and job_id in effect.key
    if isinstance(effect, StageTask | StartTask):
        return effect.order.job_id == job_id
    return isinstance(effect, OWNER_ACTS) and effect.job_id == job_id

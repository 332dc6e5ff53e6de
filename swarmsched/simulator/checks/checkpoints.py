"""Invariant 6: once a newer attempt is prepared, no older one commits a checkpoint as the latest.

Neither does an older checkpoint of one attempt take the place of a newer one, whichever machine wrote
the two: ranks of the model put the step into the name.

Only what the register has decided counts: whoever is told that a checkpoint is committed finds it in a decided record,
and an attempt resumes from the one that was decided when it was prepared.
"""

import math
from collections.abc import Sequence

from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CheckpointCommitted, CommitCheckpoint
from swarmsched.effects import Effect, ReplyToClient, SendPeer, StartTask
from swarmsched.events import ClientCommandReceived, Event, PeerMessageReceived
from swarmsched.ids import AttemptKey, JobId
from swarmsched.ledger.message import CheckpointAnswer, CheckpointRequest
from swarmsched.record import JobRecord, PlanState
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.decided import DecidedRecords, is_new_beginning
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

ASKED_MAX = 10_000  # requests remembered; the oldest are forgotten, and their answers not checked


class CheckpointChecker(Checker):
    """Which checkpoints were decided, and who was told so."""

    EVENTS = (CheckpointRequest, ClientCommandReceived)
    PERFORMED = (CheckpointAnswer, CheckpointCommitted, StartTask)

    def __init__(self, decided: DecidedRecords) -> None:
        self.committed_count = 0
        self._decided = decided
        self._newest: dict[JobId, int] = {}  # highest attempt that was prepared
        self._resumes: dict[AttemptKey, Checkpoint | None] = {}  # attempt -> what it must resume from
        self._known: dict[tuple[JobId, str, int], None] = {}  # (job, name, attempt) of decided checkpoints
        self._asked: dict[tuple[str, int], tuple[JobId, Checkpoint]] = {}  # (who asked, its number) -> what for
        self._wished: dict[tuple[JobId, int, str, str], int] = {}  # (job, attempt, machine, name) -> when, by count
        self._wish_count = 0
        decided.subscribe(self._decided_next)

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Remember what an answer will be about."""
        if isinstance(event, ClientCommandReceived) and isinstance(event.command, CommitCheckpoint):
            asked = (event.command.job_id, event.command.checkpoint)
            self._asked[f"rank on {host.node_id}", event.request_id] = asked
            self._wish_count += 1
            self._wished[_wish(*asked)] = self._wish_count
        elif isinstance(event, PeerMessageReceived) and isinstance(event.message, CheckpointRequest):
            request = event.message
            self._asked[request.owner, request.command_id] = (request.job_id, request.checkpoint)
        if len(self._asked) > ASKED_MAX:
            del self._asked[next(iter(self._asked))]

    def performed(self, host: Host, effect: Effect) -> None:
        """Somebody is told of a commit, or resumes."""
        self._decided.settle(host)
        if isinstance(effect, StartTask):
            self._starts(effect)
            return
        assert isinstance(effect, ReplyToClient | SendPeer)
        if isinstance(effect, ReplyToClient):
            self._told_committed(host, (f"rank on {host.node_id}", effect.request_id))
        elif isinstance(effect.message, CheckpointAnswer) and effect.message.is_committed:
            self._told_committed(host, (effect.recipient, effect.message.command_id))

    def _starts(self, effect: StartTask) -> None:
        order = effect.order
        expected, given = self._resumes.get(order.key.of_attempt), order.checkpoint
        if order.is_worker and given is not None and given.attempt == order.attempt:  # joins those that wrote it
            expected = given if (order.job_id, given.name, given.attempt) in self._known else expected
        if given != expected:
            raise Violation(
                6, f"{order.job_id}/{order.attempt} resumes from {order.checkpoint}; decided was {expected}"
            )

    def _told_committed(self, host: Host, request: tuple[str, int]) -> None:
        if request not in self._asked:
            return
        job_id, checkpoint = self._asked[request]
        if (job_id, checkpoint.name, checkpoint.attempt) not in self._known:
            raise Violation(
                6, f"{host.node_id} says that {checkpoint} of {job_id} is committed; no decided record has it"
            )

    def _decided_next(self, job_id: JobId, before: JobRecord | None, after: JobRecord) -> None:
        is_forced = is_new_beginning(before, after)
        if is_forced:  # an operator goes on with what is left, which may be older
            self._newest[job_id] = after.attempt
        newest = self._newest.get(job_id, 0)
        checkpoint = after.checkpoint
        if checkpoint is not None and (before is None or before.checkpoint != checkpoint):
            if checkpoint.attempt < newest and not is_forced:
                raise Violation(
                    6, f"{job_id}: attempt {checkpoint.attempt} commits {checkpoint.name}, {newest} is prepared already"
                )
            if before is not None and before.checkpoint is not None and not is_forced:
                self._compare(job_id, before.checkpoint, checkpoint)
            self._known[job_id, checkpoint.name, checkpoint.attempt] = None
            self.committed_count += 1
        is_prepared = after.plan_state in (PlanState.PREPARED, PlanState.LAUNCHED)
        if is_prepared and (is_forced or after.attempt > newest):  # what is left may be an attempt that nobody decided
            self._newest[job_id] = after.attempt
            self._resumes[AttemptKey(job_id, after.attempt)] = checkpoint

    def _compare(self, job_id: JobId, before: Checkpoint, after: Checkpoint) -> None:
        is_same_attempt = before.attempt == after.attempt
        is_same_writer = is_same_attempt and before.node == after.node
        first, second = self._wished.get(_wish(job_id, before), 0), self._wished.get(_wish(job_id, after), 0)
        if (is_same_writer and 0 < second < first) or (is_same_attempt and _step(after) < _step(before)):
            raise Violation(6, f"{job_id}: {after.name} of attempt {after.attempt} replaces the newer {before.name}")


def _wish(job_id: JobId, checkpoint: Checkpoint) -> tuple[JobId, int, str, str]:
    return (job_id, checkpoint.attempt, checkpoint.node, checkpoint.name)


def _step(checkpoint: Checkpoint) -> float:
    number = checkpoint.name.removeprefix("step-")
    return float(number) if number.isdecimal() else math.nan

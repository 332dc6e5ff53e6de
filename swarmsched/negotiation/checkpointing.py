"""Checkpoints on their way into the register: the owner's desk, where ranks' wishes wait, and the shepherd's rule.

A shared file system cannot check a fencing token, so a checkpoint counts as the latest only once its job's record
names it, and only the attempt that the record names may have that done.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.authority.message import sequences
from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CheckpointCommitted, CommitCheckpoint, Refused
from swarmsched.effects import Effect, ReplyToClient, SendPeer
from swarmsched.ids import AttemptKey, NodeId
from swarmsched.ledger.message import CheckpointAnswer, CheckpointRequest
from swarmsched.record import JobRecord

SEND_AGAIN_S = 1.0
GIVE_UP_S = 30.0
WISHES_MAX = 1_024

CommitRule = Callable[[JobRecord, int], str]
"""From a record and the attempt that asks: why it may not commit, or nothing."""


def is_of_present_attempt(record: JobRecord, attempt: int) -> str:
    """Ranks that are being stopped may still save what they have; those of an attempt that was given up may not."""
    if record.is_ended:
        return "the job has ended"
    if attempt != record.attempt:
        return f"attempt {attempt} was given up; the present one is {record.attempt}"
    if record.state is JobState.QUEUED:
        return f"attempt {attempt} was given up; the next one is not placed yet"
    return ""


def is_overtaken(present: Checkpoint | None, asked: Checkpoint) -> bool:
    """True when the same writer has committed a newer one: the older wish was long on its way."""
    if present is None or (present.attempt, present.node) != (asked.attempt, asked.node):
        return False
    return asked.sequence < present.sequence


@dataclass(slots=True)
class _Wish:
    request_id: int
    request: CheckpointRequest
    give_up_s: float
    again_s: float


class CheckpointDesk:
    """The owner's side: passes commits on to the shepherd until it answers.

    `generation` is that of this life of the agent: a late answer to an earlier one must match no wish of this.
    """

    def __init__(self, me: NodeId, generation: int) -> None:
        self._me = me
        self._ids: Iterator[int] = sequences(generation)
        self._wishes: dict[int, _Wish] = {}

    @property
    def next_deadline_s(self) -> float:
        """When to send again, or to give up."""
        if not self._wishes:
            return float("inf")
        return min([min(wish.again_s, wish.give_up_s) for wish in self._wishes.values()])

    def wish(self, request_id: int, command: CommitCheckpoint, shepherd: NodeId | None, now_s: float) -> list[Effect]:
        """`shepherd` is whom the task reports to; None when there is no such task here."""
        if shepherd is None:
            problem = f"no attempt {command.attempt} of {command.job_id} runs here"
            return [ReplyToClient(request_id, Refused("conflict", problem, "a newer attempt may run elsewhere"))]
        if len(self._wishes) >= WISHES_MAX:
            problem = f"{WISHES_MAX} checkpoints wait for their commit already"
            return [ReplyToClient(request_id, Refused("not_ready", problem, "commit less often"))]
        number = next(self._ids)
        checkpoint = replace(command.checkpoint, sequence=number)
        request = CheckpointRequest(command.job_id, command.attempt, number, self._me, checkpoint)
        superseded = self._give_up_older(command.of_attempt)
        self._wishes[number] = _Wish(request_id, request, now_s + GIVE_UP_S, now_s + SEND_AGAIN_S)
        return [*superseded, SendPeer(shepherd, request)]

    def _give_up_older(self, attempt: AttemptKey) -> list[Effect]:
        """Repeated beside a newer one, an older wish could only come too late."""
        effects: list[Effect] = []
        for number, wish in list(self._wishes.items()):
            if wish.request.of_attempt == attempt:
                del self._wishes[number]
                problem = "outcome unknown: a newer checkpoint came before the shepherd answered"
                effects.append(ReplyToClient(wish.request_id, Refused("unavailable", problem, "commit less often")))
        return effects

    def answered(self, answer: CheckpointAnswer) -> list[Effect]:
        """The shepherd has spoken."""
        wish = self._wishes.get(answer.command_id)
        if wish is None or answer.of_attempt != wish.request.of_attempt:
            return []
        del self._wishes[answer.command_id]
        if answer.is_committed:
            return [ReplyToClient(wish.request_id, CheckpointCommitted(wish.request.checkpoint, answer.epoch))]
        remedy = "end this process: it is not the job any more"
        return [ReplyToClient(wish.request_id, Refused("conflict", answer.detail, remedy))]

    def on_timer(self, shepherd_of: Callable[[AttemptKey], NodeId | None], now_s: float) -> list[Effect]:
        """Send again, to whoever shepherds by now, or give up."""
        effects: list[Effect] = []
        for command_id, wish in list(self._wishes.items()):
            shepherd = shepherd_of(wish.request.of_attempt)
            if now_s >= wish.give_up_s or shepherd is None:
                del self._wishes[command_id]
                problem = "no shepherd answered" if shepherd else "the task has ended"
                refusal = Refused("unavailable", f"outcome unknown: {problem}", "commit the next checkpoint")
                effects.append(ReplyToClient(wish.request_id, refusal))
            elif now_s >= wish.again_s:
                wish.again_s = now_s + SEND_AGAIN_S
                effects.append(SendPeer(shepherd, wish.request))
        return effects

    def validate(self) -> None:
        """One wish an attempt, under the number that it was sent with."""
        requests = [wish.request for wish in self._wishes.values()]
        assert [request.command_id for request in requests] == [*self._wishes]
        assert len({request.of_attempt for request in requests}) == len(requests) <= WISHES_MAX

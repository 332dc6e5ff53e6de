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
OVERTAKEN = "a newer checkpoint of this attempt is committed already"

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


def why_stale(record: JobRecord, request: CheckpointRequest) -> str:
    """Why a checkpoint of the present attempt must not take the place of the one that the record names, or nothing.

    Those of one attempt are ordered by the world in which they were named, then by their node's sequence.  A worker
    that leaves may have its last one named as long as nobody of a later world has; of one that is lost nothing counts.
    """
    asked, present, world = request.checkpoint, _present(record), record.world
    if world.version:
        is_leaving = request.part in [share.part for share in record.leaving] and request.part not in world.lost
        is_first_to_go_on = asked.world >= max(1, present.world if present is not None else 0)
        problem = _not_training(record, request)
        if problem and not (is_leaving and is_first_to_go_on):
            return problem
        if asked.world > world.version:
            return f"it names world {asked.world}; the newest one is {world.version}"
    return OVERTAKEN if present is not None and _is_behind(asked, present) else ""


def _is_behind(asked: Checkpoint, present: Checkpoint) -> bool:
    if asked.world and asked.world != present.world:
        return asked.world < present.world
    return asked.node == present.node and asked.sequence < present.sequence


def as_named(record: JobRecord, request: CheckpointRequest) -> Checkpoint:
    """What the record has of it: one whose world nobody knows must let in nothing older than the present one."""
    asked, present = request.checkpoint, _present(record)
    return asked if asked.world or present is None else replace(asked, world=present.world)


def is_named(record: JobRecord, request: CheckpointRequest) -> bool:
    """True when the record names this very one."""
    asked, present = request.checkpoint, _present(record)
    return present is not None and (present.node, present.sequence) == (asked.node, asked.sequence)


def _present(record: JobRecord) -> Checkpoint | None:
    """What the present attempt has committed last."""
    return record.checkpoint if record.has_own_checkpoint else None


def _not_training(record: JobRecord, request: CheckpointRequest) -> str:
    """Of an elastic attempt: whose checkpoint it is not any more, or not yet.  Older agents name no part."""
    part, owner, world = request.part, request.owner, record.world
    if not part:
        has_member = any(share.node == owner for share in record.members)
        return "" if has_member else f"no worker on {owner} trains any more"
    if part in world.members:
        return ""
    return f"worker {part} does not train yet" if part in world.joining else f"worker {part} trains no more"


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
        request = CheckpointRequest(command.job_id, command.attempt, number, self._me, checkpoint, command.part)
        superseded = self._give_up_older(request)
        self._wishes[number] = _Wish(request_id, request, now_s + GIVE_UP_S, now_s + SEND_AGAIN_S)
        return [*superseded, SendPeer(shepherd, request)]

    def _give_up_older(self, newer: CheckpointRequest) -> list[Effect]:
        """Repeated beside a newer one of the same ranks, an older wish could only come too late."""
        effects: list[Effect] = []
        for number, wish in list(self._wishes.items()):
            if _writer(wish.request) == _writer(newer):
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
        is_late = answer.detail == OVERTAKEN
        remedy = "commit the next one" if is_late else "end this process: it is not the job any more"
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
        """One wish of each writer, under the number that it was sent with."""
        requests = [wish.request for wish in self._wishes.values()]
        assert [request.command_id for request in requests] == [*self._wishes]
        assert len({_writer(request) for request in requests}) == len(requests) <= WISHES_MAX


def _writer(request: CheckpointRequest) -> tuple[AttemptKey, int]:
    return request.of_attempt, request.part

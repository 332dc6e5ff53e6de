"""Holds at the owner: what the ledger says, the port for rank 0, and the moment that lower holds get to give way."""

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from swarmsched.effects import BindRendezvous, Effect, Persist, ReleaseRendezvous, SendPeer
from swarmsched.events import RendezvousBound, RendezvousFailed
from swarmsched.fields import Value, cleaned
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.ledger.booking import LedgerEntry
from swarmsched.ledger.ledger import Ledger
from swarmsched.ledger.message import HoldRequest, OwnerAnswer, Refusal, ReleaseRequest, YieldRequest

YIELD_S = 0.02
OWN_COMMAND_ID = 2**32 - 1  # of a command that we give ourselves; shepherds count from 1


class PatientHold(Value):
    """A hold that does not fit yet: lower ones were asked to give way, and it waits for a moment."""

    request: HoldRequest
    until_s: float


class HoldDesk:
    """Answers to holds of one node, until they are committed, released or over."""

    def __init__(self, node_id: NodeId, ledger: Ledger, has_task: Callable[[TaskKey], bool]) -> None:
        self._node_id = node_id
        self._ledger = ledger
        self._has_task = has_task
        self._waiting: dict[TaskKey, tuple[NodeId, OwnerAnswer]] = {}  # yes, but the port is not bound yet
        self._patient: dict[TaskKey, PatientHold] = {}
        self._ports: dict[TaskKey, tuple[str, int]] = {}
        self.is_in_conflict = False  # two machines answer under our name: nothing new is begun here

    def note_conflict(self, *, is_there: bool) -> None:
        """Two machines answer under our name, or do no more."""
        self.is_in_conflict = is_there

    @property
    def next_deadline_s(self) -> float:
        """When one that waits for others to give way has waited long enough."""
        return min([each.until_s for each in self._patient.values()]) if self._patient else math.inf

    def hold(self, request: HoldRequest, now_s: float) -> list[Effect]:
        """Book, or say why not; answered later where a port must be bound or somebody is asked to give way."""
        key = request.key
        if self._is_copy(key, request):
            return []
        if self.is_in_conflict and self._ledger.entry(key) is None:
            return [SendPeer(request.shepherd, self._name_is_shared(request))]
        patient = self._patient.get(key)
        if patient is not None:
            if request.epoch >= patient.request.epoch:
                self._patient[key] = replace(patient, request=request)
            return []
        answer, durable = self._ledger.hold(request, now_s)
        if answer.refusal is Refusal.DOES_NOT_FIT and (lower := self._ledger.in_the_way(request)):
            return [*durable, *self._ask_to_yield(request, lower, now_s)]
        return self._held_or_not(request, answer, durable)

    def _is_copy(self, key: TaskKey, request: HoldRequest) -> bool:
        """The very command whose answer is under way; another one, of a new shepherd say, wants its own."""
        asked: list[OwnerAnswer | HoldRequest] = [self._waiting[key][1]] if key in self._waiting else []
        asked += [self._patient[key].request] if key in self._patient else []
        return any((each.epoch, each.command_id) == (request.epoch, request.command_id) for each in asked)

    def _ask_to_yield(self, request: HoldRequest, lower: Sequence[LedgerEntry], now_s: float) -> list[Effect]:
        self._patient[request.key] = PatientHold(request, now_s + YIELD_S)
        return [
            SendPeer(NodeId(entry.shepherd), YieldRequest(entry.job_id, entry.attempt, self._node_id, request.job_id))
            for entry in lower
        ]

    def retry(self, now_s: float) -> list[Effect]:
        """Something came free, or time is over for those that wait for it."""
        effects: list[Effect] = []
        for key, patient in list(self._patient.items()):
            self._ledger.retract(patient.request)
            answer, durable = self._ledger.hold(patient.request, now_s)
            if answer.refusal is Refusal.DOES_NOT_FIT and now_s < patient.until_s:
                effects += durable
                continue
            del self._patient[key]
            effects += self._held_or_not(patient.request, answer, durable)
        return effects

    def _held_or_not(self, request: HoldRequest, answer: OwnerAnswer, durable: list[Persist]) -> list[Effect]:
        key = request.key
        effects: list[Effect] = [*durable, *self.drop_idle_ports(request.job_id)]  # a hold replaces earlier ones
        if answer.refusal is Refusal.NONE and request.wants_rendezvous and not self._has_task(key):
            if key not in self._ports:
                is_being_bound = key in self._waiting
                self._waiting[key] = (request.shepherd, answer)
                return effects if is_being_bound else [*effects, BindRendezvous.about(key)]
            answer = self._with_port(key, answer)
        return [*effects, SendPeer(request.shepherd, answer)]

    def _name_is_shared(self, request: HoldRequest) -> OwnerAnswer:
        return OwnerAnswer(
            request.job_id,
            self._ledger.epoch_of(request.job_id),
            request.attempt,
            request.command_id,
            self._node_id,
            Refusal.CONFLICT,
            self._ledger.report(),
            f"two machines are called {self._node_id}",
            part=request.part,
        )

    def bound(self, event: RendezvousBound) -> list[Effect]:
        """The port that an answer waited for."""
        key = event.key
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return [ReleaseRendezvous.about(key)]
        self._ports[key] = (event.host, event.port)
        shepherd, answer = waiting
        return [SendPeer(shepherd, self._with_port(key, answer))]

    def bind_failed(self, event: RendezvousFailed, now_s: float) -> list[Effect]:
        """No port: the yes becomes a no, and what it booked comes free."""
        waiting = self._waiting.pop(event.key, None)
        if waiting is None:
            return []
        shepherd, answer = waiting
        release = ReleaseRequest(event.job_id, answer.epoch, event.attempt, OWN_COMMAND_ID, shepherd, part=event.part)
        _, durable = self._ledger.release(release, now_s)
        refused = replace(answer, refusal=Refusal.NO_PORT, detail=cleaned(event.error), free=self._ledger.report())
        self._ledger.amend(refused)
        return [*durable, SendPeer(shepherd, refused)]

    def drop_idle_ports(self, job_id: JobId) -> list[Effect]:
        """Drop ports that were bound for holds of this job which are gone."""
        bound = dict.fromkeys((*self._ports, *self._waiting))
        idle = [key for key in bound if key[0] == job_id and not self._has_task(key) and not self._ledger.entry(key)]
        return [effect for key in idle for effect in self.drop_port(key)]

    def withdraw(self, key: TaskKey) -> list[Effect]:
        """The shepherd of a hold wants its port no more."""
        self._patient.pop(key, None)
        return self.drop_port(key)

    def launched(self, key: TaskKey) -> None:
        """Rank 0 takes the port over."""
        self._ports.pop(key, None)

    def drop_port(self, key: TaskKey) -> list[Effect]:
        """The hold is gone, or its task: whoever listens for it need not."""
        was_waiting = self._waiting.pop(key, None) is not None
        was_bound = self._ports.pop(key, None) is not None
        return [ReleaseRendezvous.about(key)] if was_waiting or was_bound else []

    def validate(self) -> None:
        """Whoever waits is booked or has yet to fit, and nobody waits twice."""
        assert not self._waiting.keys() & self._ports.keys(), "a port is bound, and its answer waits for it"
        assert not self._patient.keys() & self._waiting.keys()
        for key, (_, answer) in self._waiting.items():
            assert key == answer.key
            assert self._ledger.entry(key) is not None, "a yes waits for its port, and nothing is booked"
        for key, patient in self._patient.items():
            assert key == patient.request.key
        assert not any(self._has_task(key) for key in self._waiting), "a task is ordered before its hold was answered"

    def _with_port(self, key: TaskKey, answer: OwnerAnswer) -> OwnerAnswer:
        host, port = self._ports[key]
        return replace(answer, rendezvous_host=host, rendezvous_port=port)

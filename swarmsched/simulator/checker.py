"""Observers that hold a simulated swarm to the protocol's safety rules after every step.

They keep their own books from what they see and share no code with the machines that they check.
"""

from collections.abc import Sequence

from swarmsched.effects import Announce, Effect, Persist, SendPeer, StartTask
from swarmsched.events import Event
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.booking import BookingState
from swarmsched.ledger.message import OwnerAnswer
from swarmsched.record import JobRecord
from swarmsched.simulator.host import Host


class BookingChecker:
    """No GPU is booked for two attempts, none runs two tasks, and no node's epoch for a job ever falls."""

    def __init__(self) -> None:
        self.busiest_count = 0  # most GPUs of one node that were booked at once: a run that books none proves nothing
        self._epochs: dict[tuple[NodeId, JobId], int] = {}

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Read the ledger's bookings, if they may have changed, and count again."""
        del event
        assert host.node is not None
        if not _touches_ledger(effects):
            return
        seen: dict[str, tuple[JobId, int]] = {}
        for entry in host.node.ledger.entries:
            for uuid in entry.gpus:
                other = seen.setdefault(uuid, (entry.job_id, entry.attempt))
                assert other == (entry.job_id, entry.attempt), f"{uuid} is booked for {other} and {entry}"
            key = (host.node_id, entry.job_id)
            epoch = host.node.ledger.epoch_of(entry.job_id)
            assert epoch >= self._epochs.get(key, 0), f"epoch fell at {key} to {epoch}: {entry}"
        installed = {gpu.uuid for gpu in host.resources.gpus}
        assert set(seen) <= installed, f"{host.node_id} booked GPUs that it has not: {set(seen) - installed}"
        self.busiest_count = max(self.busiest_count, len(seen))

    def performed(self, host: Host, effect: Effect) -> None:
        """A task that starts must find its GPUs without processes of others; an epoch that was told is durable."""
        if isinstance(effect, SendPeer) and isinstance(effect.message, OwnerAnswer):
            key = (host.node_id, effect.message.job_id)
            self._epochs[key] = max(self._epochs.get(key, 0), effect.message.epoch)
        if isinstance(effect, StartTask):
            mine = {gpu.uuid for gpu in effect.gpus}
            for task in host.tasks.running:
                assert not mine & set(task.gpus), f"{effect.order.job_id} starts on GPUs of {task.order.job_id}"


class GangChecker:
    """All or nothing: no rank of an attempt starts before every owner of the gang has leased its part."""

    def __init__(self) -> None:
        self.started_count = 0  # tasks
        self.widest_gang = 0  # most nodes in one gang
        self._leased: dict[tuple[JobId, int], dict[NodeId, int]] = {}  # owner -> ranks

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Note who has leased; a lease that ended still counts as committed."""
        del event
        assert host.node is not None
        if not _touches_ledger(effects):
            return
        for entry in host.node.ledger.entries:
            if entry.state is BookingState.LEASED:
                self._leased.setdefault((entry.job_id, entry.attempt), {})[host.node_id] = entry.ranks

    def performed(self, host: Host, effect: Effect) -> None:
        """A start: compare the gang in the order with the leases seen."""
        if not isinstance(effect, StartTask):
            return
        order = effect.order
        leased = self._leased.get((order.job_id, order.attempt), {})
        wanted = {share.node: share.ranks for share in order.shares}
        assert leased == wanted, f"{order.job_id} starts on {host.node_id} with leases {leased} of {wanted}"
        assert len(effect.gpus) == order.local_ranks * order.spec.demand.gpus
        self.started_count += 1
        self.widest_gang = max(self.widest_gang, len(wanted))


class AttemptChecker:
    """What was said of a job's end stays true, and only a relaunch runs the job a second time."""

    def __init__(self) -> None:
        self.started: dict[JobId, set[int]] = {}  # attempts of which ranks were started
        self._ends: dict[JobId, JobRecord] = {}  # as announced, which is after they were durable
        self._relaunches: dict[JobId, int] = {}

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Compare with the records as they ended."""
        del event
        assert host.node is not None
        if not any(isinstance(effect, Persist) and effect.room == "register" for effect in effects):
            return
        for job_id, record in host.node.records().items():
            ended = self._ends.get(job_id, record)
            assert record == ended, f"{job_id} changed after its end: from {ended} to {record}"
            self._relaunches[job_id] = max(self._relaunches.get(job_id, 0), record.relaunches)

    def performed(self, host: Host, effect: Effect) -> None:
        """Another attempt may start ranks only if the record counts a relaunch for it."""
        if isinstance(effect, Announce) and effect.kind == "job.ended" and effect.job_id and host.node:
            record = host.node.record(effect.job_id)
            assert record is not None
            self._ends[effect.job_id] = record
        if not isinstance(effect, StartTask):
            return
        order = effect.order
        attempts = self.started.setdefault(order.job_id, set())
        attempts.add(order.attempt)
        allowed = 1 + self._relaunches.get(order.job_id, 0)
        assert len(attempts) <= allowed, f"{order.job_id} runs again without need: attempts {attempts}"


class InvariantChecker:
    """Every machine's own `validate`, after each `interval`-th step of the swarm (it costs more than the step)."""

    def __init__(self, interval: int = 100) -> None:
        self._interval = interval
        self._count = 0

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Validate the node that the step was on."""
        del event, effects
        assert host.node is not None
        self._count += 1
        if self._count % self._interval == 0:
            host.node.validate()

    def performed(self, host: Host, effect: Effect) -> None:
        """Nothing to see here."""


def _touches_ledger(effects: Sequence[Effect]) -> bool:
    return any(isinstance(effect, Persist) and effect.room == "ledger" for effect in effects)

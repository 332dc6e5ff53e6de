"""What a node tells all others: its own record, the cards of its jobs, and where its jobs are kept.

When each of these travels is the state plane's business; a job that lives for less than a second leaves no card.
"""

from collections.abc import Iterable

from swarmsched.api import EndReason
from swarmsched.effects import Effect
from swarmsched.events import ResourcesRead
from swarmsched.gossip.location import Location
from swarmsched.gossip.record import DRAIN_REASON_LENGTH, NodeFlag, NodeRecord, groups_of
from swarmsched.gossip.state import StatePlane
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.ledger import Ledger
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.shepherd import Clock, JobShepherd
from swarmsched.node.config import NodeConfig
from swarmsched.record import JobRecord
from swarmsched.resources import GpuHealth, NodeResources


class Publication:
    """Keeps the state plane's drafts up to date."""

    def __init__(self, me: NodeId, state: StatePlane, ledger: Ledger, placement: Placement, config: NodeConfig) -> None:
        self._me = me
        self._state = state
        self._ledger = ledger
        self._placement = placement
        self._config = config
        self._telemetry: ResourcesRead | None = None
        self.is_in_conflict = self.is_disk_stalled = False
        self._located: dict[JobId, tuple[int, bool, tuple[NodeId, ...]]] = {}  # epoch, end, holders, as last told

    def telemetry(self, reading: ResourcesRead) -> None:
        """Newest figures of this node."""
        self._telemetry = reading

    @property
    def resources(self) -> NodeResources:
        """Newest resources; nothing before the first reading."""
        return self._telemetry.resources if self._telemetry else NodeResources((), 0, 0)

    def tell_node(self, clock: Clock) -> list[Effect]:
        """This node's record, as it would be written now."""
        reading = self._telemetry
        if reading is None:
            return []
        return self._state.publish_node(self._node_record(reading), clock.now_s)

    def _node_record(self, reading: ResourcesRead) -> NodeRecord:
        resources, free = reading.resources, self._ledger.free
        health = [gpu.health for gpu in resources.gpus]
        return NodeRecord(
            node_id=self._me,
            groups=groups_of(resources, free),
            cpus_total=resources.cpu_count,
            cpus_free=min(free.cpus, resources.cpu_count),
            memory_total_bytes=resources.memory_bytes,
            memory_free_bytes=min(free.memory_bytes, resources.memory_bytes),
            gpu_utilisation_percent=round(100 * reading.gpu_utilisation_ratio),
            cpu_utilisation_percent=round(100 * reading.cpu_utilisation_ratio),
            gpu_memory_used_bytes=reading.gpu_memory_used_bytes,
            unhealthy_gpus=health.count(GpuHealth.UNHEALTHY),
            foreign_gpus=health.count(GpuHealth.FOREIGN),
            stale_gpus=health.count(GpuHealth.STALE),
            running_ranks=self._ledger.report().running_ranks,
            live_jobs=len(self._placement.jobs),
            flags=int(self._flags()),
            software_version=self._config.software_version[:24],
            ledger_version=self._ledger.version,
            zone=self._config.zone,
            store_id=self._config.store_id,
            drain_reason=self._ledger.drain_reason[:DRAIN_REASON_LENGTH],
        )

    def _flags(self) -> NodeFlag:
        flags = NodeFlag(0)
        if self.is_in_conflict:
            flags |= NodeFlag.CONFLICT
        if self.is_disk_stalled:
            flags |= NodeFlag.DISK_STALLED
        if self._config.is_witness:
            flags |= NodeFlag.WITNESS
        if self._ledger.is_draining:
            flags |= NodeFlag.DRAINING
        return flags

    def tell_job(self, job: JobShepherd, clock: Clock) -> list[Effect]:
        """A live job's card and, when it is new here, its location."""
        record = job.record
        card = self._placement.card(job, clock)
        return [*self._state.publish_card(card, clock.now_s), *self._locate(record, clock)]

    def tell_ended(self, record: JobRecord, clock: Clock) -> list[Effect]:
        """The card vanishes; the location stays and says that the job has ended."""
        has_completed = record.end_reason is EndReason.COMPLETED
        effects = self._state.withdraw_card(record.job_id, clock.now_s, has_completed=has_completed)
        effects += self._locate(record, clock)
        self._located.pop(record.job_id, None)
        return effects

    def withdraw(self, job_id: JobId, clock: Clock) -> list[Effect]:
        """The card vanishes; whoever brought the job to its end has said where its record was."""
        self._located.pop(job_id, None)
        return self._state.withdraw_card(job_id, clock.now_s)

    def tell_restored(self, records: Iterable[JobRecord], clock: Clock) -> list[Effect]:
        """Jobs that had ended in an earlier life: it may have died before others heard, who still queue behind them."""
        ended = sorted((record for record in records if record.is_ended), key=lambda record: record.ended_utc_s)
        return [effect for record in ended for effect in self.tell_ended(record, clock)]

    def _locate(self, record: JobRecord, clock: Clock) -> list[Effect]:
        told = (record.epoch, record.is_ended, record.configuration.nodes)
        if self._located.get(record.job_id) == told:
            return []
        self._located[record.job_id] = told
        location = Location(
            record.job_id,
            record.epoch,
            record.version,
            record.shepherd,
            record.configuration.nodes,
            record.state,
            record.ended_utc_s,
        )
        return self._state.set_location(location, clock.now_s)

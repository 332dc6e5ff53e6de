"""Plane B of one node: what it tells all others, and what it has heard of them.

It tells its own record, the cards of its jobs, and where its jobs are kept.  When each of these travels is the state
plane's business; a job that lives for less than a second leaves no card.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum, auto

from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.commands import Refused, SetSwarmSetting, SettingStored
from swarmsched.effects import Announce, Effect, ReplyToClient
from swarmsched.errors import ConfigError, FieldProblem, RemoteProtocolError
from swarmsched.events import DatagramReceived, DiskChanged, PeerMessageReceived, ResourcesRead, TimerFired
from swarmsched.facts import (
    Admitted,
    Awoke,
    CapacityChanged,
    EndKnown,
    GenerationRaised,
    JobChanged,
    JobClosed,
    NodeChanged,
    SettingChanged,
)
from swarmsched.gossip.exchange import STATE_MESSAGES
from swarmsched.gossip.history import HISTORY_ROOM
from swarmsched.gossip.kinds import KINDS_ROOM
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberChanged, MemberStatus
from swarmsched.gossip.record import (
    AVOIDED_REASON_LENGTH,
    DRAIN_REASON_LENGTH,
    NodeFlag,
    NodeRecord,
    groups_of,
)
from swarmsched.gossip.setting import SETTING_KEY, SETTING_ROOM
from swarmsched.gossip.state import MemberRef, StateConfig, StatePlane
from swarmsched.holder.machine import NodeEffect, Taker
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.ledger import Ledger
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.node.config import NodeConfig, Restored
from swarmsched.policies.registry import check_setting
from swarmsched.record import JobRecord
from swarmsched.resources import GpuHealth
from swarmsched.shards import AggregationRoom


class GossipTraffic(Enum):
    """Whose a datagram is."""

    MEMBERSHIP = auto()
    STATE = auto()


STATE_TRAFFIC: tuple[object, ...] = (GossipTraffic.STATE, *STATE_MESSAGES.values())


class Publication:
    """Keeps the state plane's drafts up to date."""

    def __init__(
        self,
        config: NodeConfig,
        state: StatePlane,
        cluster: Cluster,
        ledger: Ledger,
        placement: Placement,
        records: Mapping[JobId, JobRecord],
        room: Callable[[], AggregationRoom | None],
    ) -> None:
        """`records`: those that this node holds; `room`: for the shards of other nodes' jobs."""
        self._config, self._me = config, config.node_id
        self._state = state
        self._cluster = cluster
        self._ledger = ledger
        self._shepherds, self._policy = placement.shepherds, placement.policy
        self._records = records
        self._room = room
        self._telemetry: ResourcesRead | None = None
        self._is_in_conflict = False
        self._located: dict[JobId, tuple[int, bool, tuple[NodeId, ...]]] = {}  # epoch, end, holders, as last told
        self.takes: Mapping[object, Taker] = {
            **dict.fromkeys((*STATE_TRAFFIC, TimerFired), self._step),
            ResourcesRead: self._resources_read,
            DiskChanged: self._disk_changed,
            SetSwarmSetting: self._change_setting,
            SettingChanged: self._tell_setting,
            Awoke: self._awoke,
            MemberChanged: self._member_changed,
            GenerationRaised: self._generation_raised,
            **dict.fromkeys((NodeChanged, CapacityChanged), self._tell_node),
            JobChanged: self._tell_job,
            JobClosed: self._job_closed,
            EndKnown: lambda told, clock: self._tell_ended(told.record, clock),
        }

    @property
    def next_deadline_s(self) -> float:
        """When a round of gossip, or something that is told, is due."""
        return self._state.next_deadline_s

    def _step(self, event: DatagramReceived | PeerMessageReceived | TimerFired, clock: Clock) -> Iterable[NodeEffect]:
        return self._state.step(event, clock.now_s)

    def _resources_read(self, event: ResourcesRead, clock: Clock) -> Iterable[NodeEffect]:
        self._telemetry = event
        self._cluster.note_own(event.resources)
        return [NodeChanged()]

    def _disk_changed(self, event: DiskChanged, clock: Clock) -> Iterable[NodeEffect]:
        self._cluster.note_disk(is_stalled=not event.is_writing)
        return [NodeChanged()]

    def _member_changed(self, change: MemberChanged, clock: Clock) -> None:
        member = change.member
        if member.node_id == self._me:
            self._is_in_conflict = member.status is MemberStatus.CONFLICT
        elif member.status in (MemberStatus.ALIVE, MemberStatus.SUSPECT):
            self._state.put_peer(MemberRef(member.node_id, member.address, member.generation))
        else:
            self._state.drop_peer(member.node_id)
        self._cluster.member_changed(member, clock.now_s)

    def _generation_raised(self, told: GenerationRaised, clock: Clock) -> Iterable[NodeEffect]:
        self._state.set_generation(told.generation)
        return [NodeChanged()]

    def _change_setting(self, asked: Admitted, clock: Clock) -> Iterable[NodeEffect]:
        try:
            effects = self._state.propose_setting(asked.command.setting, clock.now_s)
        except ConfigError as error:
            problem = FieldProblem("/" + error.key.replace(".", "/"), error.problem, error.remedy)
            return [ReplyToClient(asked.request_id, Refused("invalid", str(error), error.remedy, (problem,)))]
        setting = self._state.setting
        return [*effects, ReplyToClient(asked.request_id, SettingStored(setting.policy_setting, setting.version))]

    def _tell_setting(self, told: SettingChanged, clock: Clock) -> Iterable[NodeEffect]:
        stored = self._state.setting
        given = ", ".join([f"{name}={value:g}" for name, value in sorted(stored.parameters.items())])
        policy = f"policy {stored.policy}{f' ({given})' if given else ''}, elasticity {stored.elasticity.value}"
        text = f"{policy}, version {stored.version}, set on {stored.node_id or 'no node'}"
        fields = {"policy": stored.policy, "elasticity": stored.elasticity.value, "version": stored.version}
        return [Announce("setting.changed", text, node=self._me, fields={**fields, **stored.parameters})]

    def _tell_node(self, told: NodeChanged | CapacityChanged, clock: Clock) -> Iterable[NodeEffect]:
        """This node's record, as it would be written now."""
        reading = self._telemetry
        return self._state.publish_node(self._node_record(reading), clock.now_s) if reading is not None else []

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
            live_jobs=len(self._shepherds.jobs),
            flags=self._flags(),
            software_version=self._config.software_version[:24],
            ledger_version=self._ledger.version,
            zone=self._config.zone,
            store_id=self._config.store_id,
            drain_reason=self._ledger.drain_reason[:DRAIN_REASON_LENGTH],
            avoided_reason=self._ledger.avoided_reason[:AVOIDED_REASON_LENGTH],
            labels=resources.labels,
            api_address=self._config.api_address,
            network_mbit_s=resources.network_mbit_s,
            aggregation=self._room(),
        )

    def _flags(self) -> int:
        flags = 0
        if self._is_in_conflict:
            flags |= NodeFlag.CONFLICT
        if self._cluster.is_disk_stalled:
            flags |= NodeFlag.DISK_STALLED
        if self._config.is_witness:
            flags |= NodeFlag.WITNESS
        if self._ledger.is_draining:
            flags |= NodeFlag.DRAINING
        if self._ledger.avoided_reason:
            flags |= NodeFlag.AVOIDED
        return flags

    def _tell_job(self, told: JobChanged, clock: Clock) -> Iterable[NodeEffect]:
        """A live job's card and, when it is new here, its location."""
        job = self._shepherds.jobs.get(told.job_id)
        if job is None:
            return []
        record, card = job.record, self._policy.card(job, clock)
        return [*self._state.publish_card(card, clock.now_s), *self._locate(record, clock)]

    def _job_closed(self, told: JobClosed, clock: Clock) -> Iterable[NodeEffect]:
        if not told.is_over:
            return self._tell_ended(told.record, clock)
        job_id = told.record.job_id  # whoever brought it to its end has said where its record was
        self._located.pop(job_id, None)
        return self._state.withdraw_card(job_id, clock.now_s)

    def _tell_ended(self, record: JobRecord, clock: Clock) -> list[Effect]:
        """The card vanishes; the location stays and says that the job has ended."""
        effects = self._state.withdraw_card(record.job_id, clock.now_s, record)
        effects += self._locate(record, clock)
        self._located.pop(record.job_id, None)
        return effects

    def _awoke(self, told: Awoke, clock: Clock) -> Iterable[NodeEffect]:
        """Jobs that had ended in an earlier life: it may have died before others heard, who still queue behind them."""
        records = (record for record in self._records.values() if record.is_ended)
        ended = sorted(records, key=lambda record: record.ended_utc_s)
        return [effect for record in ended for effect in self._tell_ended(record, clock)]

    def _locate(self, record: JobRecord, clock: Clock) -> list[Effect]:
        told = (record.epoch, record.is_ended, record.configuration.nodes)
        if self._located.get(record.job_id) == told:
            return []
        self._located[record.job_id] = told
        nodes = record.configuration.nodes
        location = Location(record.job_id, *record.stamp, record.shepherd, nodes, record.state, record.ended_utc_s)
        return self._state.set_location(location, clock.now_s)

    def validate(self) -> None:
        """What is told, and what has been heard."""
        self._state.validate()


def make_state_plane(config: NodeConfig, restored: Restored, rng: random.Random) -> StatePlane:
    """Plane B of this node, with the swarm-wide setting as it was stored; the default where that cannot be used.

    It may name a policy of a package that was removed: no node stays away for that.
    """
    plane = StatePlane(
        StateConfig(config.node_id, config.generation, config.packet_bytes, config.timings.round_s), rng, check_setting
    )
    stored = restored.room(SETTING_ROOM).get(SETTING_KEY)
    if stored is not None:
        with suppress(RemoteProtocolError):
            plane.restore_setting(stored)
    plane.restore_learned(restored.room(HISTORY_ROOM), restored.room(KINDS_ROOM))
    return plane

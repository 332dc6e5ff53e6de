"""What a node believes of the whole swarm, as the views that placement, policies and explanations take.

The own node stands in the view with its ledger's exact figures, all others with their gossiped records (repaired by
their owners' fresher answers).  A member that is not alive is shown and never chosen.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from swarmsched.api import JobSpec
from swarmsched.estimate import Estimate, Pool
from swarmsched.fields import Value
from swarmsched.gossip.location import Location
from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.gossip.membership import Membership
from swarmsched.gossip.record import NodeFlag, NodeRecord, NodeStatus, capacity_of, node_view
from swarmsched.gossip.state import StatePlane
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.ledger import Ledger
from swarmsched.models.kinds import GpuClasses
from swarmsched.policies.explain import impossible
from swarmsched.program import program_of
from swarmsched.resources import Demand, Free, NodeResources, Share, counted, most_frequent
from swarmsched.view import KINDS_LIMIT, EndedJob, JobView, KindView, NodeView

FORMER_LIFE_S = 15.0  # until a node that lost its database has others take up what it shepherded, or nobody can

NAME_LIMIT = 63
_BARRED = (NodeFlag.DRAINING, NodeFlag.CONFLICT, NodeFlag.WITNESS)
_UNAVAILABLE = (*_BARRED, NodeFlag.DISK_STALLED, NodeFlag.AVOIDED)


class Candidate(Value):
    """A live node that could hold or shepherd.  `zone` is its failure zone, if it told one."""

    holder: Holder
    zone: str = ""
    live_jobs: int = 0  # shepherded there
    total_gpus: int = 0
    is_witness: bool = False
    is_draining: bool = False  # about to be switched off, perhaps


class _Life(Value):
    """A member's present life: since when, as far as an earlier one was known, and the database that it had before."""

    generation: int
    began_s: float
    store_before: int


class Cluster:
    """Reads membership, state plane and ledger; keeps views until what they show has changed."""

    def __init__(
        self, me: NodeId, membership: Membership, state: StatePlane, ledger: Ledger, *, is_witness: bool = False
    ) -> None:
        self._me = me
        self._membership = membership
        self._state = state
        self._ledger = ledger
        self._is_witness = is_witness
        self._views: dict[NodeId, tuple[NodeRecord, bool, NodeView]] = {}
        self._lives: dict[NodeId, _Life] = {}
        self.own_resources = NodeResources((), 0, 0)
        self.is_disk_stalled = False  # of this node

    def note_own(self, resources: NodeResources) -> None:
        """Telemetry has read what this node has."""
        self.own_resources = resources

    def note_disk(self, *, is_stalled: bool) -> None:
        """This node's disk takes writes, or none."""
        self.is_disk_stalled = is_stalled

    @property
    def jobs(self) -> Mapping[JobId, JobView]:
        """Live jobs by their gossiped cards, wherever they are shepherded."""
        return self._state.jobs

    @property
    def locations(self) -> Mapping[JobId, Location]:
        """Where every known job of the last days is kept."""
        return self._state.locations

    @property
    def history(self) -> tuple[EndedJob, ...]:
        """Jobs that have ended anywhere, the oldest first."""
        return self._state.history

    @property
    def pool(self) -> Pool:
        """How some kinds of jobs scale."""
        return self._state.kinds.pool

    def prior(self, spec: JobSpec) -> Estimate | None:
        """What jobs like it have measured, as far as this node has heard of them."""
        return self._state.kinds.prior(spec.user, spec.name, program_of(spec.command, spec.tree, spec.workdir))

    def kind(self, user: str, name: str, gpu: str, program: str) -> KindView | None:
        """All that jobs of that kind have measured on GPUs of that class, as planners see it."""
        return self._state.kinds.view(user, name, gpu, program)

    def kinds(self, jobs: Iterable[JobView], nodes: Iterable[NodeView]) -> tuple[KindView, ...]:
        """Of those jobs that take several sizes, as far as anything is known of their kinds."""
        elastic = [job for job in jobs if job.card.elastic is not None]
        asked = GpuClasses(nodes).kinds(elastic) if elastic else ()
        return tuple([kind for each in asked if (kind := self.kind(*each)) is not None][:KINDS_LIMIT])

    def gpu_class(self, shares: Iterable[Share], demand: Demand) -> str:
        """Names of the GPUs that ranks have there, as far as this node knows the others'; empty if they have none."""
        nodes = {share.node for share in shares} if demand.gpus else set()
        found = {most_frequent(each.capacity.gpus, demand) for each in self.nodes() if each.node in nodes}
        return "+".join(sorted(found - {""}))[:NAME_LIMIT]

    def network_mbit_s(self, shares: Iterable[Share]) -> int:
        """Of the slowest of several nodes, over which ranks there train together; 0 where not all tell theirs."""
        nodes = {share.node for share in shares}
        told = [each.capacity.network_mbit_s for each in self.nodes() if each.node in nodes] if len(nodes) > 1 else []
        return min(told, default=0) if len(told) == len(nodes) else 0

    def take_job_news(self) -> Sequence[JobId]:
        """Jobs whose entry in `jobs` has come, changed or gone since this was last asked."""
        return self._state.take_job_news()

    def member_changed(self, member: MemberView, now_s: float) -> None:
        """A member changed: it may live again, with another database than before."""
        known = self._lives.get(member.node_id)
        if known is None or known.generation < member.generation:
            began_s = -math.inf if known is None else now_s
            self._lives[member.node_id] = _Life(member.generation, began_s, self._store(member.node_id, now_s))

    def can_act(self, job: JobView, now_s: float) -> bool:
        """True while another live node shepherds the job. The card of one that died stands in nobody's way, and
        neither does that of one that has lost its database since, once others have had the time to take the job up.
        """
        shepherd = job.card.shepherd
        if shepherd == self._me or not self._membership.is_alive(shepherd):
            return False
        life = self._lives.get(shepherd)
        if life is None or job.written_s >= life.began_s or now_s < life.began_s + FORMER_LIFE_S:
            return True
        return life.store_before in (0, self._store(shepherd, now_s))

    def nodes(self) -> list[NodeView]:
        """Every known node, this one first."""
        records = [record for record in self._state.current_records() if record.node_id != self._me]
        return [self._own_view(), *[self._foreign_view(record) for record in records]]

    def could_take(self, spec: JobSpec, without: Collection[NodeId], *, once_well: bool) -> bool:
        """True when the nodes that live, without some, could hold a job, once whatever runs there has ended.

        One that is avoided for a moment counts: it may be well again before another is free.  One whose disk takes no
        writes counts where `once_well`: nobody knows for how long it does not.
        """
        without_flags = _BARRED if once_well else (*_BARRED, NodeFlag.DISK_STALLED)
        others = {
            NodeId(record.node_id): capacity_of(record)
            for record in self._state.current_records()
            if self._membership.is_alive(record.node_id) and not any(record.has(each) for each in without_flags)
        }
        others.pop(self._me, None)
        if not self._is_barred and (once_well or not self.is_disk_stalled):
            others[self._me] = self._own_capacity
        return impossible(spec, {node: free for node, free in others.items() if node not in without}) is None

    def drained(self) -> set[NodeId]:
        """Nodes that take no new work on somebody's wish; for questions of membership alone, never iterated."""
        others = {record.node_id for record in self._state.current_records() if record.has(NodeFlag.DRAINING)}
        return others | ({self._me} if self._ledger.is_draining else set())

    def is_complete(self, now_s: float) -> bool:
        """True when every live member's record has arrived, so that totals mean something."""
        known = {status.record.node_id for status in self._state.node_records(now_s)}
        return all(node in known for node in self._membership.alive() if node != self._me)

    def candidates(self, now_s: float) -> list[Candidate]:
        """Other nodes that could hold a record or shepherd a job: alive, able to write, and their store is known."""
        return [
            Candidate(
                Holder(status.record.node_id, status.record.store_id),
                status.record.zone,
                status.record.live_jobs,
                status.record.total_gpus,
                status.record.has(NodeFlag.WITNESS),
                status.record.has(NodeFlag.DRAINING),
            )
            for status in self.others(now_s)
            if status.record.store_id and not status.record.has(NodeFlag.DISK_STALLED)
        ]

    def stalled(self, now_s: float) -> list[NodeId]:
        """Other nodes that are alive and say that their disk takes no writes."""
        return [each.record.node_id for each in self.others(now_s) if each.record.has(NodeFlag.DISK_STALLED)]

    def others(self, now_s: float) -> list[NodeStatus]:
        """Other nodes that are alive, by name."""
        alive = frozenset(self._membership.alive()) - {self._me}
        return [status for status in self._state.node_records(now_s) if status.record.node_id in alive]

    def capacities(self, now_s: float) -> dict[NodeId, Free]:
        """All that every node has that may ever run a job, whether or not it is up now."""
        records = (status.record for status in self._state.node_records(now_s))
        others = {NodeId(record.node_id): capacity_of(record) for record in records if not record.has(NodeFlag.WITNESS)}
        others.pop(self._me, None)
        return others if self._is_witness else {**others, self._me: self._own_capacity}

    def names(self, now_s: float) -> list[NodeId]:
        """All nodes of which there is a record, witnesses too: of one that is down for a day."""
        return [self._me, *[NodeId(status.record.node_id) for status in self._state.node_records(now_s)]]

    def _store(self, node: NodeId, now_s: float) -> int:
        record = self._state.node_record(node, now_s)
        return 0 if record is None else record.record.store_id

    @property
    def _own_capacity(self) -> Free:
        own = self.own_resources
        return Free(counted(own.gpus), own.cpu_count, own.memory_bytes, own.labels, own.network_mbit_s)

    @property
    def _is_barred(self) -> bool:
        """This node itself is to run nothing, until somebody changes that."""
        return self._is_witness or self._ledger.is_draining or self._is_in_conflict(self._me)

    def _own_view(self) -> NodeView:
        is_available = not (self._is_barred or self.is_disk_stalled or self._ledger.avoided_reason)
        total = len(self.own_resources.gpus)
        return NodeView(self._me, self._ledger.free, self._ledger.capacity, total, is_available)

    def _foreign_view(self, record: NodeRecord) -> NodeView:
        is_alive = self._membership.is_alive(record.node_id)
        known = self._views.get(record.node_id)
        if known is None or known[0] is not record or known[1] != is_alive:
            is_available = is_alive and not any(record.has(flag) for flag in _UNAVAILABLE)
            known = (record, is_alive, node_view(record, is_available=is_available))
            self._views[record.node_id] = known
        return known[2]

    def _is_in_conflict(self, node: NodeId) -> bool:
        member = self._membership.member(node)
        return member is not None and member.status is MemberStatus.CONFLICT

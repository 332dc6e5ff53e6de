"""Invariant 7: what a viewer knows of a member or of a node's record never falls, and is what its owner wrote.

Views are sampled, each viewer once in ten times as many of its steps as it knows members, for reading one costs about
as much as those steps' other checks together.
"""

from collections.abc import Sequence
from typing import ClassVar

from swarmsched.effects import Effect
from swarmsched.events import Event
from swarmsched.gossip.record import NodeRecord
from swarmsched.ids import NodeId
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host

Stamp = tuple[int, int]
SAMPLE_STEPS_MIN = 100
STEPS_PER_MEMBER = 10
RECORDS_KEPT = 128  # of each node, the newest


class _Viewer:
    """What one life of an agent knew at its last sample."""

    def __init__(self) -> None:
        self.members: dict[NodeId, Stamp] = {}  # (generation, incarnation)
        self.records: dict[NodeId, Stamp] = {}  # (generation, version)
        self.steps_left = SAMPLE_STEPS_MIN


class ViewChecker(Checker):
    """Samples the views of all running agents."""

    SEES_ALL_STEPS: ClassVar[bool] = True

    def __init__(self) -> None:
        self.sample_count = 0
        self._viewers: dict[NodeId, _Viewer] = {}
        self._generations: dict[NodeId, int] = {}  # highest that a machine ever spoke under
        self._shared: dict[NodeId, None] = {}  # names of two machines: nobody can tell who wrote what
        self._written: dict[NodeId, dict[tuple[Stamp, int], NodeRecord]] = {}  # by stamp and store, as first seen

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Count down to the next sample of this viewer."""
        viewer = self._viewers.get(host.node_id)
        if viewer is None:
            viewer = self._viewers[host.node_id] = _Viewer()
        assert host.node is not None
        if host.node.generation > self._generations.get(host.node_id, 0):
            self._generations[host.node_id] = host.node.generation  # it may be raised, and lowered by a restart
        viewer.steps_left -= 1
        if viewer.steps_left <= 0:
            self._sample(host, viewer)
            viewer.steps_left = max(SAMPLE_STEPS_MIN, STEPS_PER_MEMBER * len(viewer.members))

    def agent_started(self, host: Host) -> None:
        """A new life knows nobody yet."""
        self._viewers[host.node_id] = _Viewer()
        self._generations[host.node_id] = max(host.generation, self._generations.get(host.node_id, 0))

    def name_shared(self, node: NodeId) -> None:
        """Two machines speak under that name: what is known of it may not fall, but may be either's."""
        self._shared[node] = None

    def finished(self, hosts: Sequence[Host]) -> None:
        """Sample all once more."""
        for host in hosts:
            if host.node is not None:
                self._sample(host, self._viewers.setdefault(host.node_id, _Viewer()))

    def _sample(self, host: Host, viewer: _Viewer) -> None:
        node = host.node
        assert node is not None
        self.sample_count += 1
        members = {}
        for member in node.members(host.now_s):
            stamp = (member.generation, member.incarnation)
            before = viewer.members.get(member.node_id)
            if before is not None and stamp < before:
                raise Violation(7, f"{host.node_id} knew {member.node_id} as {before} and knows it as {stamp} now")
            self._expect_lived(host, member.node_id, member.generation)
            members[member.node_id] = stamp
        records = {}
        for status in node.node_records(host.now_s):
            record = status.record
            before = viewer.records.get(record.node_id)
            if before is not None and record.stamp < before:
                raise Violation(7, f"{host.node_id} had the record {record.stamp} of {record.node_id} after {before}")
            self._expect_lived(host, record.node_id, record.generation)
            if not status.is_repaired:
                self._expect_written(host, record)
            records[record.node_id] = record.stamp
        viewer.members, viewer.records = members, records

    def _expect_lived(self, host: Host, node: NodeId, generation: int) -> None:
        highest = self._generations.get(node)
        if node not in self._shared and highest is not None and generation > highest:
            raise Violation(7, f"{host.node_id} knows {node} under generation {generation}; it never had one so high")

    def _expect_written(self, host: Host, record: NodeRecord) -> None:
        """One stamp of one database stands for one value, wherever it is seen.

        A machine that has lost its disk may begin under a generation that it has used, until peers correct it.
        """
        if record.node_id in self._shared:
            return
        seen = self._written.setdefault(record.node_id, {})
        first = seen.setdefault((record.stamp, record.store_id), record)
        if first is not record and first != record:
            raise Violation(
                7, f"{host.node_id} has another record {record.stamp} of {record.node_id}: {record}, {first}"
            )
        if len(seen) > RECORDS_KEPT:
            del seen[min(seen)]

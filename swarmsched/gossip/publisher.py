"""When a node rewrites its own record: at once for what places jobs, with a deadband for what only informs."""

import math
from operator import attrgetter

from msgspec.structs import astuple, replace

from swarmsched.fields import Value
from swarmsched.gossip.record import NodeRecord
from swarmsched.shards import AggregationRoom

UTILISATION_BAND_PERCENT = 10
MEMORY_BAND_RATIO = 0.05
ROOM_BAND = 2
LOAD_INTERVAL_S = 10.0
INTERVAL_S = 1.0
INTERVAL_S_MAX = 8.0
RENEWAL_S = 30.0
RENEWAL_LARGE_S = 60.0
LARGE_SWARM = 3_000
VERSION_JUMP_LIMIT = 2**20


class RecordVersion(Value):
    """A new version to spread; `is_urgent` when free capacity changed and some peers should hear at once."""

    record: NodeRecord
    is_urgent: bool


class RecordPublisher:
    """Owns the versions of this node's record.  Invariant: they only grow, by one or above a claimed one."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._version = 0
        self._given: NodeRecord | None = None  # the draft as it came, to recognise it
        self._draft: NodeRecord | None = None
        self._published: NodeRecord | None = None
        self._published_s = 0.0
        self._load_s = 0.0  # when a load figure last made a version
        self.interval_s = INTERVAL_S  # at least this long between versions; grows when the byte cap is hit
        self.renewal_s = RENEWAL_S  # at most this long between versions
        self._deadline_s: float | None = None  # of the next version; None: to be worked out again

    @property
    def version(self) -> int:
        """The last version written."""
        return self._version

    def set_draft(self, draft: NodeRecord) -> None:
        """What the node would say now; identity and version are filled in at publication."""
        if draft == self._given:
            return
        self._given = draft
        self._deadline_s = None
        self._draft = replace(draft, generation=self._generation, version=0, flags=int(draft.flags))

    def set_generation(self, generation: int) -> None:
        """Write under another generation from now on, at once."""
        self._generation = generation
        self._given = self._published = self._deadline_s = None
        if self._draft is not None:
            self._draft = replace(self._draft, generation=generation)

    def outbid(self, version: int) -> None:
        """Somebody holds a version of ours that we did not write (a lost disk, or a forger): write above it."""
        if self._version < version < self._version + VERSION_JUMP_LIMIT:  # a larger leap no peer would follow
            self._version = version
            self._published_s -= RENEWAL_LARGE_S
            self._deadline_s = None

    def adapt(self, members: int, *, is_capped: bool) -> None:
        """Once a round: double the interval while the byte cap bites, shrink it again afterwards."""
        interval_s = min(INTERVAL_S_MAX, max(INTERVAL_S, self.interval_s * (2.0 if is_capped else 0.8)))
        renewal_s = RENEWAL_LARGE_S if members > LARGE_SWARM else RENEWAL_S
        if (interval_s, renewal_s) != (self.interval_s, self.renewal_s):
            self.interval_s, self.renewal_s = interval_s, renewal_s
            self._deadline_s = None

    @property
    def next_deadline_s(self) -> float:
        """When `due` has something to publish; infinite without a draft.  Asked after each step, so remembered."""
        if self._deadline_s is None:
            self._deadline_s = self._work_out_deadline_s()
        return self._deadline_s

    def _work_out_deadline_s(self) -> float:
        if self._draft is None:
            return math.inf
        if self._published is None:
            return 0.0
        renewal = self._published_s + self.renewal_s
        before, draft = self._published, self._draft
        if _facts(draft) != _facts(before):
            return min(renewal, self._published_s + self.interval_s)
        if _load_moved(before, draft):
            return min(renewal, max(self._load_s + LOAD_INTERVAL_S, self._published_s + self.interval_s))
        return renewal

    def due(self, now_s: float) -> RecordVersion | None:
        """The next version if it is time for one."""
        if self._draft is None or now_s < self.next_deadline_s:
            return None
        before = self._published
        if before is None or _load_moved(before, self._draft):
            self._load_s = now_s
        self._version += 1
        record = replace(self._draft, version=self._version)
        self._published, self._published_s = record, now_s
        self._deadline_s = None
        return RecordVersion(record, before is None or _capacity(record) != _capacity(before))


def _capacity(record: NodeRecord) -> object:
    return (record.groups, record.cpus_free, record.flags)


_BANDED = ("version", "gpu_utilisation_percent", "cpu_utilisation_percent", "gpu_memory_used_bytes", "aggregation")
_facts = attrgetter(*(each for each in NodeRecord.__struct_fields__ if each not in _BANDED))
"""What has no deadband."""


def _load_moved(before: NodeRecord, now: NodeRecord) -> bool:
    gpu = abs(now.gpu_utilisation_percent - before.gpu_utilisation_percent)
    cpu = abs(now.cpu_utilisation_percent - before.cpu_utilisation_percent)
    total = sum(group.count * group.memory_bytes for group in now.groups)
    memory = abs(now.gpu_memory_used_bytes - before.gpu_memory_used_bytes)
    if max(gpu, cpu) >= UTILISATION_BAND_PERCENT or (total > 0 and memory >= MEMORY_BAND_RATIO * total):
        return True
    return _room_moved(before.aggregation, now.aggregation)


def _room_moved(before: AggregationRoom | None, now: AggregationRoom | None) -> bool:
    """Who looks for room asks before it counts on any, so twice and half as much is news, and less is not."""
    if before is None or now is None:
        return before is not now
    pairs = zip(astuple(before), astuple(now), strict=True)
    return any(max(old, new) > ROOM_BAND * min(old, new) for old, new in pairs)

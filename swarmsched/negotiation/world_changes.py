"""What becomes of the record of an elastic job when its running gang changes, as `changes` has it for all others.

Each is decided while ranks train, and is nothing where the attempt runs no more, or all is so already.  Parts come in
by `Joined`, durable before any of them is committed, and leave by `PartsGone`, when no process of theirs is left; in
between `Regrouped` says who trains.
"""

from collections.abc import Collection

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.negotiation.changes import Fields, RecordChange, begun_rescaling, ended_rescaling, with_leftovers
from swarmsched.record import JobRecord, Leftover
from swarmsched.resources import Share
from swarmsched.world import World

LOST_KEPT = 64  # a worker that has not heard of one that was lost so long ago is no member any more


class Joined(RecordChange):
    """Every owner of new parts holds: they may be committed."""

    shares: tuple[Share, ...]
    ran_s: float

    def _fields(self, record: JobRecord) -> Fields | None:
        if record.state is not JobState.RUNNING:
            return None
        parts = tuple(share.part for share in self.shares)
        world = replace(record.world, joining=(*record.world.joining, *parts))
        return {
            "shares": (*record.shares, *self.shares),
            "world": world,
            "last_part": max(parts),
            **counted(record, self.ran_s),
        }


class JoinersGivenUp(RecordChange):
    """Parts that were to join come to nothing: what there may be of them is stopped."""

    parts: tuple[int, ...]

    def _fields(self, record: JobRecord) -> Fields | None:
        joining = _without(record.world.joining, self.parts)
        is_new = record.state is JobState.RUNNING and joining != record.world.joining
        return {"world": replace(record.world, joining=joining)} if is_new else None


class Regrouped(RecordChange):
    """Others train from now on: without those that leave or are gone, and with those that join.

    Of those on lost nodes something may be `left` there; they are no part of the gang any more.  `failed` is a version
    that came to nothing for its members: the next one may have the same.
    """

    joins: tuple[int, ...]
    leaves: tuple[int, ...]
    gone: tuple[int, ...]
    left: tuple[Leftover, ...]
    reason: str
    utc_s: float
    ran_s: float
    failed: int = 0

    def _fields(self, record: JobRecord) -> Fields | None:
        world, lost = record.world, [each.part for each in self.left]
        shares = tuple(share for share in record.shares if share.part not in lost)
        joins = [part for part in self.joins if part in world.joining]
        members = (*_without(world.members, (*self.leaves, *self.gone, *lost)), *joins)
        goes_on = members == world.members and self.failed != world.version
        is_same = goes_on and shares == record.shares
        if record.state is not JobState.RUNNING or not members or is_same:
            return None
        joining = _without(world.joining, (*joins, *lost))
        fields = {
            "shares": shares,
            "world": replace(world, joining=joining),
            "leftovers": with_leftovers(record, self.left),
            **counted(record, self.ran_s),
        }
        if goes_on:  # none of those that are lost has trained
            return fields
        gone = [part for part in (*self.gone, *lost) if part in world.members]
        lost_ever = (*world.lost, *gone)[-LOST_KEPT:]
        fields["world"] = World(world.version + 1, members, joining, lost_ever, world.has_trained)
        is_forced = bool(gone or self.failed)
        return fields | begun_rescaling(record, len(world.members), self.utc_s, self.reason, is_forced=is_forced)


class WorldTrains(RecordChange):
    """All members of a version have switched to it."""

    version: int
    pause_s: float

    def _fields(self, record: JobRecord) -> Fields | None:
        world = record.world
        if record.state is not JobState.RUNNING or world.version != self.version or is_settled(record):
            return None
        trained = {"world": replace(world, has_trained=True)}
        return trained | ended_rescaling(record, len(world.members), self.pause_s)


class PartsGone(RecordChange):
    """No process is left of parts that train no more."""

    parts: tuple[int, ...]
    ran_s: float

    def _fields(self, record: JobRecord) -> Fields | None:
        gone = [share for share in record.leaving if share.part in self.parts]
        if record.state is not JobState.RUNNING or not gone:
            return None
        shares = tuple(share for share in record.shares if share not in gone)
        return {"shares": shares, **counted(record, self.ran_s)}


def is_settled(record: JobRecord) -> bool:
    """All members of the present world are known to train in it."""
    is_open = bool(record.rescalings) and not record.rescalings[-1].ranks_after
    return record.world.has_trained and not is_open


def counted(record: JobRecord, ran_s: float) -> Fields:
    """Another number of parts serves from now on: the service until now is added up."""
    span_s = max(0.0, ran_s - record.counted_s)
    served_gpu_s = record.attained_gpu_s + record.serving_gpus * span_s
    return {"attained_gpu_s": served_gpu_s, "counted_s": record.counted_s + span_s}


def _without(parts: tuple[int, ...], others: Collection[int]) -> tuple[int, ...]:
    return tuple(part for part in parts if part not in others)

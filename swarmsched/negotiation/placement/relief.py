"""Workers of elastic jobs that had better train elsewhere: on drained nodes, on GPUs that have failed, or too slow.

Each goes while the others train, and another comes in its place where there is room.  What a machine is to be rid of
goes also without one, as long as the job keeps the least that it takes; a slow worker is worth more than none.  Where
whoever came for a slow one is slow as well, it is not the place: that one is spared for a while.
"""

from collections.abc import Collection

from swarmsched.ids import NodeId
from swarmsched.negotiation.gang import Gang
from swarmsched.negotiation.placement.wish import Wish
from swarmsched.policies.base import amount
from swarmsched.policies.placement import choose, tie_break
from swarmsched.policies.room import Room
from swarmsched.record import JobRecord
from swarmsched.resources import Share, ranks_by_node
from swarmsched.view import Allocation, JobView

STRAGGLER_RATIO = 1.2  # of the median step (EDL, section 6.2)
SPARED_S = 600.0  # that whoever came for a slow one is not called slow itself


def relief(
    record: JobRecord,
    gang: Gang,
    view: JobView,
    room: Room,
    drained: Collection[NodeId],
    spared: Collection[int] = (),
) -> Wish | None:
    """What is to be done for a job that trains and is not changing, nothing as a rule.

    `spared` are parts that came for slow ones.
    """
    for find in (_on_drained, _on_failed_gpus, _stragglers):
        leave, reason = find(record, gang, drained, spared)
        if not leave:
            continue
        kept = [share for share in record.members if share not in leave]
        avoid = {share.node for share in leave} if find is not _on_failed_gpus else set()
        found = _places(view, room, len(leave), avoid, home={share.node for share in kept})
        is_enough = len(kept) + sum(share.ranks for share in found) >= max(1, record.spec.ranks)
        if is_enough and (found or find is not _stragglers):
            target = Allocation(_joined((*kept, *found)), record.global_batch)
            spared_s = SPARED_S if find is _stragglers else 0.0
            return Wish(record.job_id, target, reason, tuple([share.part for share in leave]), spared_s)
    return None


Unwanted = tuple[list[Share], str]


def _on_drained(record: JobRecord, gang: Gang, drained: Collection[NodeId], spared: Collection[int]) -> Unwanted:
    leave = [share for share in record.members if share.node in drained]
    return leave, f"drained: {', '.join(ranks_by_node(leave))}"


def _on_failed_gpus(record: JobRecord, gang: Gang, drained: Collection[NodeId], spared: Collection[int]) -> Unwanted:
    leave = [share for share in record.members if share.place in gang.tasks and gang.tasks[share.place].is_ailing]
    return leave, f"failed GPU of {amount(len(leave), 'worker')} on {', '.join(ranks_by_node(leave))}"


def _stragglers(record: JobRecord, gang: Gang, drained: Collection[NodeId], spared: Collection[int]) -> Unwanted:
    """The slowest, by what each needs for its own part of a step; of two nobody can say which is the slow one."""
    busy_s = {share: gang.tasks[share.place].worker.busy_s for share in record.members if share.place in gang.tasks}
    if len(busy_s) < max(3, len(record.members)) or not all(busy_s.values()):
        return [], ""
    median_s = sorted(busy_s.values())[(len(busy_s) - 1) // 2]
    judged = [share for share in record.members if share.part not in spared]
    if not judged:
        return [], ""
    slowest = max(judged, key=lambda share: busy_s[share])
    ratio = busy_s[slowest] / median_s
    leave = [slowest] if ratio > STRAGGLER_RATIO else []
    return leave, f"worker {slowest.part} on {slowest.node} takes {ratio:.1f} times the median of a step"


def _places(
    view: JobView, room: Room, ranks: int, avoid: Collection[NodeId], home: Collection[NodeId]
) -> tuple[Share, ...]:
    """For as many as there is room for, on GPUs of the class of those that stay."""
    tie, classes = tie_break(view.job_id), room.classes(view.demand)
    alike = {classes[node] for node in home if node in classes} if not view.card.mixed_gpus else set()
    fits = {node: held for node, held in room.fits(view.demand).items() if not alike or classes.get(node) in alike}
    exclude = (*view.excluded, *avoid)
    for count in range(ranks, 0, -1):
        nodes = view.card.nodes
        wishes = {"nodes": nodes, "exclude": exclude, "home": home}
        found = choose(fits, room, view.demand, count, tie, is_mixed=view.card.mixed_gpus, **wishes)
        if found:
            return found
    return ()


def _joined(shares: Collection[Share]) -> tuple[Share, ...]:
    return tuple(Share(node, ranks) for node, ranks in ranks_by_node(shares).items())

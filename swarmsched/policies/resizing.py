"""Decisions, from the sizes that a policy has chosen. Who keeps its size keeps its hosts; the others get whole nodes
first, the largest job before the smaller, each where it is already before elsewhere."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from msgspec.structs import replace

from swarmsched.estimate import Estimate, Resizable
from swarmsched.ids import JobId, NodeId, handle
from swarmsched.models.goodput import Floats, Goodput, GoodputBook, Question
from swarmsched.policies.base import (
    GIVING,
    SubmitOrder,
    in_rank_order,
    inverse_priority,
    is_claim,
    is_waiting,
    joined,
    keep,
    taker_of,
    wait,
)
from swarmsched.policies.calm import has_just_changed
from swarmsched.policies.placement import is_there, place_in, start_or_claim, take_if_there
from swarmsched.policies.reason import held_by, shortage, start_reason
from swarmsched.policies.room import Room
from swarmsched.policies.sites import Sites
from swarmsched.resources import Share, nodes_of, of_first, of_others, world_size
from swarmsched.view import Allocation, Change, ClusterView, Decision, JobView, Plan

RANKS_MOST = 256
"""Ranks of one job that are looked at, unless it has more."""
AGAIN_S = 1.0
TABLE_RANKS_MOST = 4_096
"""Of a job whose least is more, times are a guess: nobody has as many GPUs."""
REBATCH_GAIN = 1.02
"""Of goodput: each report moves the best batch a little, and each change is a decision of the job's holders."""


@dataclass
class Sized:
    """A job, the fewest ranks with which it can train, and those that it gets; with `goodput` also the batch that is
    best for them."""

    job: JobView
    goodput: Goodput | None
    least: int
    held: int = field(init=False)  # ranks that it has
    per_rank: int = field(init=False)  # GPUs that a rank counts for
    slowdown: float = field(default=0.0, init=False)  # the part of its speed that a job beside it would cost it
    may_part: bool = field(default=False, init=False)  # it pays to move away from such a job
    gpu: str = field(default="", init=False)  # the class that it is to have; empty: any
    changes_class: bool = field(default=False, init=False)  # it runs on another one
    stays: bool = field(default=False, init=False)  # it is not to be changed for a gain
    reserved: int = field(default=0, init=False)  # ranks of those that it has which nobody else may be dealt
    ranks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.held = world_size(self.job.shares)
        self.per_rank = max(1, self.job.demand.gpus)

    @property
    def why(self) -> str:
        """What its policy says of its size."""
        return ""

    @property
    def why_waiting(self) -> str:
        """The same of one that gets nothing."""
        return self.why

    @property
    def is_kept(self) -> bool:
        """True when it keeps its size, and so its hosts."""
        return 0 < self.ranks == self.held and not self.changes_class

    def placed(self, sites: Sites, now: Room) -> Decision:
        """The job's decision, for nobody yet; booked in the room of the sites, where it has what it holds."""
        job, room = self.job, sites.room
        if self.is_kept and not (self.may_part and sites.is_crowded(job.job_id)):
            return self.rebatched()
        room.release(job.shares, job.demand)
        shares = self._hosts(sites)
        if not shares:
            sites.put(job.job_id, ())
            if self.held:
                return Decision(job.job_id, Change.STOP, self.why)
            return wait(job, (), joined(shortage(job, room), self.why_waiting))
        room.take(shares, job.demand)
        sites.put(job.job_id, shares)
        if shares == job.shares:
            return self.rebatched()
        ranks, nodes = world_size(shares), nodes_of(shares)
        target = Allocation(shares, self.goodput.batch(ranks, nodes) if self.goodput else 0)
        step_s = self.goodput.step_s(ranks, nodes) if self.goodput else 0.0
        fits = start_reason(job, shares)
        reason = self.why or fits
        if not self.held:
            begun = replace(start_or_claim(job, target, now, fits), step_s=step_s)
            return begun if is_claim(begun) else replace(begun, reason=reason)
        if ranks > self.held:
            return Decision(job.job_id, Change.GROW, reason, target, step_s=step_s)
        change = Change.MOVE if ranks == self.held else Change.SHRINK
        return Decision(job.job_id, change, reason, target, step_s=step_s)

    def rebatched(self) -> Decision:
        """The job keeps its hosts, perhaps with another batch."""
        job, batch = self.job, self._other_batch()
        if not batch:
            decision = keep(job, ())
            return replace(decision, reason=self.why) if job.card.elastic and self.why else decision
        reason = f"a batch of {batch} makes more progress than one of {elastic_of(job).global_batch}"
        return Decision(job.job_id, Change.REBATCH, reason, Allocation(job.shares, batch))

    def _other_batch(self) -> int:
        """With which it would make enough more progress where it is; 0 where there is none, or no choice."""
        elastic, goodput, nodes = elastic_of(self.job), self.goodput, nodes_of(self.job.shares)
        if goodput is None or elastic.batches.first >= elastic.batches.most:
            return 0
        batch, now = goodput.batch(self.held, nodes), elastic.global_batch
        return batch if batch != now and goodput.gain(self.held, nodes, now) >= REBATCH_GAIN else 0

    def _hosts(self, sites: Sites) -> tuple[Share, ...]:
        """Where as many of its ranks as possible go; on other GPUs where there is no place on those of its class."""
        found = self._hosts_on(sites, self.gpu)
        if found or not self.gpu or not self.ranks:
            return found
        if self.held and is_there(sites.room, self.job.shares, self.job.demand):
            return self.job.shares
        return () if self.held else self._hosts_on(sites, "")

    def _hosts_on(self, sites: Sites, gpu: str) -> tuple[Share, ...]:
        """The same on GPUs of one class; nobody is moved for no more than it has."""
        job = self.job
        if job.card.hides_constraints:  # its own shepherd alone knows where else it may go
            return job.shares if self.ranks and is_there(sites.room, job.shares, job.demand) else ()
        shared: tuple[Share, ...] = ()  # with as many ranks as possible, beside another job on several nodes
        for ranks in range(self.ranks, elastic_of(job).ranks_least - 1, -1):
            if shared and self.worth(ranks) <= self.worth(world_size(shared)) * (1.0 - 2.0 * self.slowdown):
                return shared
            is_same = ranks == self.held and not self.changes_class
            stays = is_same and is_there(sites.room, job.shares, job.demand)
            parts = self.may_part and sites.is_crowded(job.job_id)
            found = job.shares if stays and not parts else sites.choose(job, ranks, apart=self.slowdown > 0.0, gpu=gpu)
            if stays and not found:
                return job.shares
            if found:
                return found
            if self.slowdown and not shared:
                shared = sites.choose(job, ranks, gpu=gpu) or ()
        return shared

    def worth(self, ranks: int) -> float:
        """What so many ranks are worth to it."""
        return float(ranks)


def opened(
    view: ClusterView, may_change: Callable[[JobView, Room], bool]
) -> tuple[list[JobView], list[Decision], Room, int]:
    """The jobs whose GPUs are dealt anew, decisions on the others, the room without the former, and its GPUs.

    Jobs without GPUs have nothing that could be dealt: they start where they fit, before all others.
    """
    room = Room(view.nodes)
    jobs = [job for job in view.jobs if job.demand.gpus and may_change(job, room)]
    jobs.sort(key=lambda job: job.job_id)  # agents see them in different orders, and must decide ties alike
    without = [job for job in view.jobs if is_waiting(job) and not job.demand.gpus]
    decided = {job.job_id for job in (*jobs, *without)}
    kept = [keep(job, ()) for job in view.jobs if job.job_id not in decided]
    for job in _choosy_first(jobs):
        room.release(job.shares, job.demand)
    now = Room(view.nodes)
    kept += [_started(job, room, now) for _, job in in_rank_order(without, SubmitOrder({}), 0.0)]
    free = sum([node.free.gpu_count for node in view.nodes if node.is_available])
    free += sum([world_size(job.shares) * job.demand.gpus for job in jobs])
    # Whoever fits nowhere must not be dealt GPUs that others could use.
    nowhere = {job.job_id for job in jobs if not job.shares and not _fits_somewhere(job, room)}
    kept += [wait(job, (), shortage(job, room)) for job in jobs if job.job_id in nowhere]
    return [job for job in jobs if job.job_id not in nowhere], kept, room, free


def _choosy_first(jobs: Iterable[JobView]) -> list[JobView]:
    """In an order in which they may give back what they hold: of a node's devices those that suit some jobs alone are
    taken to be theirs, whichever order an agent lists jobs in."""
    return sorted(jobs, key=lambda job: (not any(job.demand.device), job.job_id))


def _started(job: JobView, room: Room, now: Room) -> Decision:
    """With the world size that it asked for, where that is free: nobody leaves for it."""
    shares = place_in(now, job)
    if not shares or not take_if_there(room, shares, job.demand):
        return wait(job, (), shortage(job, now))
    return start_or_claim(job, Allocation(shares), now, start_reason(job, shares))


def _fits_somewhere(job: JobView, room: Room) -> bool:
    return not job.card.hides_constraints and held_by(room, job) >= elastic_of(job).ranks_least


def deal_and_place(sized: Sequence[Sized], deal: Callable[[], None], room: Room, view: ClusterView) -> list[Decision]:
    """Decisions on all, of the sizes that `deal` gives them, each no fewer ranks than it has reserved.

    A job that runs is stopped only for one that waits, whose place is kept then.  Where none waits all that run keep
    the least with which they can train; where others would but grow, sizes are dealt once more, and they do too.
    """
    if not all(each.held for each in sized):
        deal()
        decisions = placed(sized, room.copy(), Room(view.nodes), view.jobs)
        if any(map(is_claim, decisions)) or not any(each.change is Change.STOP for each in decisions):
            return decisions
    for each in sized:
        each.reserved = max(each.reserved, min(each.held, each.least))
    deal()
    return placed(sized, room, Room(view.nodes), view.jobs)


def placed(sized: Sequence[Sized], room: Room, now: Room, jobs: Iterable[JobView] = ()) -> list[Decision]:
    """Decisions on all, in a room without them; `now` is the room as it is.  Nobody is stopped for nobody.

    One after another, each where those before it leave it a place: shepherds who follow them by themselves must not
    wait for one another.  So those that give something up come first, and of the others the largest.
    """
    ordered = sorted(sized, key=lambda one: (-one.ranks * one.per_rank, one.job.job_id))
    for each in ordered:
        room.take(each.job.shares, each.job.demand)
    sites, found = Sites(room, jobs), dict[JobId, Decision]()
    for each in sorted(ordered, key=_gives_nothing_up):
        if each.ranks or each.held:
            found[each.job.job_id] = each.placed(sites, now)
    for each in sorted(ordered, key=_in_turn):  # what others could not be given for want of a place
        job = each.job
        if not each.ranks and not each.held:
            each.ranks = elastic_of(job).ranks_least
            found[job.job_id] = each.placed(sites, now)
            each.ranks = found[job.job_id].target.ranks
        elif found[job.job_id].change is Change.STOP and take_if_there(room, job.shares, job.demand):
            each.ranks = each.held
            sites.put(job.job_id, job.shares)
            found[job.job_id] = each.rebatched()
    return named([found[each.job.job_id] for each in ordered])


def _in_turn(sized: Sized) -> tuple[int, float, JobId]:
    return (inverse_priority(sized.job), sized.job.card.submitted_utc_s, sized.job.job_id)


def named(decisions: Sequence[Decision]) -> list[Decision]:
    """Who gives something up does so for a job that is named: nobody follows it otherwise."""
    taker = taker_of(decisions)
    return [_for(each, taker) if each.change in GIVING else each for each in decisions]


def _for(decision: Decision, taker: str) -> Decision:
    nobody = "others gain more from its GPUs" if decision.change is Change.STOP else ""
    whom = f"makes room for {handle(JobId(taker))}" if taker else nobody
    return replace(decision, taker=taker, reason=joined(whom, decision.reason))


def _gives_nothing_up(sized: Sized) -> bool:
    return sized.ranks >= sized.held


def at_least(
    view: ClusterView, may_change: Callable[[JobView, Room], bool], least: Callable[[JobView], int]
) -> ClusterView:
    """The swarm if every job that may be changed had, of what it has, only `least`, on the first of its hosts."""
    room = Room(view.nodes)
    jobs = []
    for job in _choosy_first(view.jobs):
        ranks = elastic_of(job).ranks_least
        if not may_change(job, room):
            jobs.append(job)
            continue
        kept, given_up = _split(job.shares, least(job))
        room.release(given_up, job.demand)
        jobs.append(replace(job, card=replace(job.card, ranks=ranks, shares=kept)))
    return _left_in(room, view, jobs)


def _left_in(room: Room, view: ClusterView, jobs: Iterable[JobView]) -> ClusterView:
    """The swarm with those jobs, and what the room has free."""
    nodes = [replace(node, free=room.free(node.node)) if node.is_available else node for node in view.nodes]
    return replace(view, nodes=tuple(nodes), jobs=tuple(jobs))


def _split(shares: Sequence[Share], ranks: int) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
    """The first so many ranks, and the rest; other groups stay beside them, if anybody stays."""
    others = of_others(shares)
    first, rest = ([*others], []) if ranks else ([], [*others])
    for share in of_first(shares):
        taken = min(share.ranks, ranks)
        ranks -= taken
        first += [Share(share.node, taken)] if taken else []
        rest += [Share(share.node, share.ranks - taken)] if taken < share.ranks else []
    return tuple(first), tuple(rest)


def _made_way(
    jobs: Iterable[JobView],
    left: Mapping[JobId, tuple[Share, ...]],
    room: Room,
    place: tuple[Share, ...],
    taker: JobView,
    now_s: float,
    reason: str,
) -> list[Decision]:
    """Who is in the way of the place gives up what it needs there, the last started first; `left` is what each has to
    keep.  Booked in the room."""
    decisions: list[Decision] = []
    for each in sorted(jobs, key=lambda each: (each.running_s(now_s), each.job_id)):
        if is_there(room, place, taker.demand):
            break
        if left[each.job_id] == each.shares or not {share.node for share in place} & {one.node for one in each.shares}:
            continue
        room.release(each.shares, each.demand)
        stays = _giving_way(each, left[each.job_id], room, place, taker)
        room.take(stays, each.demand)
        batch = each.card.elastic.global_batch if each.card.elastic and stays else 0
        change = Change.SHRINK if stays else Change.STOP
        decisions.append(Decision(each.job_id, change, reason, Allocation(stays, batch), taker=taker.job_id))
    return decisions


def place_made(
    view: ClusterView,
    job: JobView,
    may_change: Callable[[JobView, Room], bool],
    now_s: float,
    *,
    is_overdue: bool,
    shrinks: bool,
) -> tuple[list[Decision], ClusterView]:
    """A place for a waiting job of which as many GPUs are free or may be taken, but not where it can use them. Who is
    in its way gives up what it needs there, the last started first; those of its priority only where it `is_overdue`,
    or down to the least that they take where it `shrinks` them, those of a higher one never. And the swarm after
    that, without those jobs. No decisions, and the swarm as it is, where there is no such place."""

    def kept(other: JobView) -> int:
        held, ahead = world_size(other.shares), inverse_priority(other) - inverse_priority(job)
        if ahead < 0 or not (ahead or is_overdue or shrinks):
            return held
        if not (ahead or is_overdue) and has_just_changed(other, now_s):
            return held
        return never_given_up(other) if ahead or is_overdue else min(held, elastic_of(other).ranks_least)

    bare = at_least(view, may_change, kept)
    waiting = next(each for each in bare.jobs if each.job_id == job.job_id)
    place = place_in(Room(bare.nodes), waiting)
    if place is None:
        return [], view
    room, left = Room(view.nodes), {each.job_id: each.shares for each in bare.jobs}
    decisions = [start_or_claim(job, Allocation(place), Room(view.nodes), start_reason(job, place))]
    reason = f"makes room for {handle(job.job_id)}, which {'has waited long and ' * is_overdue}fits nowhere else"
    decisions += _made_way(view.jobs, left, room, place, job, now_s, reason)
    room.take(place, job.demand)
    decided = {each.job_id for each in decisions}
    return decisions, _left_in(room, view, [each for each in view.jobs if each.job_id not in decided])


def _giving_way(
    job: JobView, least: tuple[Share, ...], room: Room, place: Sequence[Share], taker: JobView
) -> tuple[Share, ...]:
    """What it keeps: all but what the place needs, if that is enough for it; else what it has elsewhere, or no more
    than it must.  The room is without it."""
    nodes, elastic = {share.node for share in place}, elastic_of(job)
    there = sum([share.ranks for share in of_first(job.shares) if share.node in nodes])
    for ranks in range(there - 1, -1, -1):
        stays = _limited(job.shares, nodes, ranks)
        if world_size(stays) < elastic.ranks_least:
            break
        beside = room.copy()
        beside.take(stays, job.demand)
        if is_there(beside, place, taker.demand):
            return stays
    elsewhere = _limited(job.shares, nodes, 0)
    return elsewhere if world_size(elsewhere) >= elastic.ranks_least else least


def _limited(shares: Sequence[Share], nodes: Collection[NodeId], ranks: int) -> tuple[Share, ...]:
    """With the first so many of the ranks on those nodes, and all other groups."""
    stays = [*of_others(shares)]
    for share in of_first(shares):
        taken = min(share.ranks, ranks) if share.node in nodes else share.ranks
        ranks -= taken if share.node in nodes else 0
        stays += [Share(share.node, taken)] if taken else []
    return tuple(stays)


def never_given_up(job: JobView) -> int:
    """Ranks that a job that may be resized keeps in any case. One that changes while it trains needs no checkpoint,
    so that it cannot be stopped."""
    elastic = elastic_of(job)
    return min(world_size(job.shares), elastic.ranks_least) if elastic.is_live else 0


def elastic_of(job: JobView) -> Resizable:
    """World sizes that a job takes: the one that it asked for unless it says otherwise, and the one that it has."""
    elastic = job.card.elastic or Resizable(job.ranks, job.ranks)
    least = max(1, elastic.ranks_least)
    most = max(least, elastic.ranks_most, world_size(job.shares))
    if (least, most) == (elastic.ranks_least, elastic.ranks_most):
        return elastic
    return replace(elastic, ranks_least=least, ranks_most=most)


def dealt_to_one(job: JobView, room: Room, gpus: int) -> int:
    """GPUs that one job can have of so many that are dealt. They are no more than there are of one class, unless it
    mixes them or has more."""
    if job.card.mixed_gpus or room.is_of_one_class(job.demand):
        return gpus
    return min(gpus, max(held_by(room, job), world_size(job.shares)) * max(1, job.demand.gpus))


def ranks_looked_at(job: JobView, gpus: int) -> int:
    """With how many of so many GPUs a job is looked at."""
    elastic, held = elastic_of(job), world_size(job.shares)
    most = min(elastic.ranks_most, gpus // max(1, job.demand.gpus), max(RANKS_MOST, held))
    return max(elastic.ranks_least, held, most)


def gpu_of(job: JobView, room: Room) -> str:
    """The class of GPUs by whose limits a job's batches are dealt: that which it has, or the only one. It is empty
    where there are several, or nothing depends on it."""
    if job.card.elastic is None or not job.card.elastic.batches.by_gpu:
        return ""
    classes = room.classes(job.demand)
    names = {classes[share.node] for share in job.shares if share.node in classes} or {*classes.values()}
    return "+".join(sorted(names)) if job.shares or len(names) == 1 else ""


def question(job: JobView, estimate: Estimate | None, most: int, per_node: int, gpu: str) -> Question | None:
    """The question to a book, what a job makes of up to `most` ranks on GPUs of a class, `per_node` on a node. None
    where its speed, or the batches that can be dealt to them, are not known.

    What jobs of its kind have told may choose its size, never its batch, on which depends what it learns: whoever names
    a job of that kind could change it.
    """
    batches = elastic_of(job).batches.on(gpu)
    if estimate is None or not (estimate.speed or estimate.points) or not (batches.first and batches.local_most):
        return None
    if most > TABLE_RANKS_MOST:
        return None
    own = job.own or estimate
    if batches.first < batches.most and (own.is_prior or not own.noise or not (own.speed or own.points)):
        batch = elastic_of(job).global_batch or batches.first
        batches = replace(batches, first=batch, most=batch)
    return Question(estimate, batches, most, per_node, job.own if batches.first < batches.most else None)


def measured(
    job: JobView, estimate: Estimate | None, book: GoodputBook, most: int, per_node: int, gpu: str
) -> Goodput | None:
    """The answer."""
    asked = question(job, estimate, most, per_node, gpu)
    return book.goodputs([asked])[0] if asked else None


def reviewed(plan: Plan, book: GoodputBook) -> Plan:
    """The plan, which is soon to be made again where a guess stands for some of what was measured."""
    return replace(plan, review_s=min(plan.review_s or inf, AGAIN_S)) if book.is_behind else plan


def unmeasured(job: JobView, most: int) -> Floats:
    """Speed by world size where nobody has measured it: 1 at the size that it asked for, in proportion below, and as
    the root above. That is a guess that favours whoever has measured more. Nothing beyond what its first batch can be
    dealt to."""
    batches = elastic_of(job).batches
    dealt_to = batches.first // batches.local_least if batches.local_least else most
    speed = np.minimum(np.arange(most + 1), max(1, dealt_to)) / job.ranks
    return np.minimum(speed, np.sqrt(speed))

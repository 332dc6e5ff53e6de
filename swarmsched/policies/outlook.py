"""When jobs will start and end: the queue is played forward from a plan, by what is known of how long jobs still take.

A job that has told its steps ends by its speed; another one by the lengths of ended jobs like it and by its time limit
(`models.lengths`).  The queue is played three times, with lengths as expected, short and long: that makes the interval,
which holds if nobody else comes.  Jobs start in the order of the plan, where they fit; past one that does not fit
others go as far as the policy lets them.
"""

import heapq
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from math import hypot, inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

from swarmsched.api import JobState
from swarmsched.ids import JobId, handle
from swarmsched.models.deadlines import Rate, least_ranks
from swarmsched.models.kinds import informed
from swarmsched.models.lengths import gpus_asked, lengths_of
from swarmsched.policies.backfill import place_beyond
from swarmsched.policies.base import GIVING, amount, is_known, is_waiting, seconds_left
from swarmsched.policies.placement import place_in, take_if_there
from swarmsched.policies.room import Room
from swarmsched.resources import Share, world_size
from swarmsched.view import Change, ClusterView, JobView, Outlook, Plan, PolicySetting, Span

if TYPE_CHECKING:
    from swarmsched.models.goodput import GoodputBook

WAITING_MOST = 128
"""Jobs of the queue that are played: whoever has more ahead is told so."""
LIVE_MOST = 4_096
"""Jobs of which anything is told."""
ENDED_LEAST = 8
"""Ended jobs, before which a length is nobody's experience but a prior: nothing is told by it alone."""
LIKELY = 1.28
"""Standard deviations: four of five lie between."""
ERROR_LEAST = 0.05

Left = tuple[float, float, float]
"""Seconds as expected, if all goes fast, and if all is slow; infinite where nobody knows."""
UNKNOWN: Left = (inf, inf, inf)


class _Running(NamedTuple):
    job: JobView
    shares: tuple[Share, ...]
    left: Left


class _Waiting(NamedTuple):
    job: JobView
    left: Left


class Lefts:
    """How long the jobs of a view still take, and how fast those go that take several sizes."""

    def __init__(self, view: ClusterView, now_s: float) -> None:
        self._now_s = now_s
        self._lengths = lengths_of(view.history)
        self._has_history = len(view.history) >= ENDED_LEAST
        self._rates = _rates(view)

    def rate(self, job: JobView) -> Rate | None:
        """Progress a second by world size, of one that was measured on several."""
        return self._rates.get(job.job_id)

    def of(self, job: JobView, ranks: int) -> Left:
        """What is left of a job with so many ranks."""
        card, rate = job.card, self.rate(job)
        ran_s = job.running_s(self._now_s)
        rest_s = max(0.0, card.time_limit_s - ran_s) if card.time_limit_s else inf
        if is_known(job) and card.estimate is not None:
            speed = rate(ranks) if rate else 0.0
            left_s = card.estimate.remaining / speed if speed else seconds_left(job)
            error = LIKELY * max(ERROR_LEAST, hypot(card.estimate.remaining_error, card.estimate.speed_error))
            found = (left_s, left_s * max(0.0, 1.0 - error), left_s * (1.0 + error))
        elif (self._has_history or card.time_limit_s) and gpus_asked(card):
            told = self._lengths.left(card, job.attained_gpu_s(self._now_s), ran_s)
            scale = job.ranks / max(1, ranks)
            expected_s = min(max(told.expected_s, told.low_s), told.high_s)  # a mean may lie beyond nine of ten
            found = (expected_s * scale, told.low_s * scale, told.high_s * scale)
        else:
            return (rest_s, 0.0, rest_s) if isfinite(rest_s) else UNKNOWN
        expected_s, low_s, high_s = (min(each, rest_s) for each in found)
        return (expected_s, low_s, high_s)

    def alone_s(self, job: JobView, share_gpus: float, left: Left, ranks: int) -> float:
        """Seconds that the whole job would take on an equal share of the GPUs. One that needs more of them has its
        least for a part of the time. 0 where nobody knows."""
        per_rank, rate = max(1, job.demand.gpus), self.rate(job)
        had_s = job.attained_gpu_s(self._now_s) / per_rank  # rank-seconds
        if rate is not None and job.card.estimate is not None:
            held = max(1, world_size(job.shares) or job.ranks)
            done = job.card.estimate.done or had_s / held * rate(held)
            share = max(
                job.ranks, min(int(share_gpus / per_rank), job.card.elastic.ranks_most if job.card.elastic else 0)
            )
            alone_s = (done + job.card.estimate.remaining) / rate(share) if rate(share) else 0.0
        else:
            share = job.ranks
            alone_s = (had_s + left[0] * max(1, ranks)) / job.ranks
        return alone_s * max(1.0, share * per_rank / share_gpus) if isfinite(alone_s) else 0.0


def foresee(setting: PolicySetting, view: ClusterView, plan: Plan, now_s: float) -> tuple[Outlook, ...]:
    """What becomes of the jobs of a view, of which that is the plan, if nobody else comes."""
    view = informed(view)
    lefts, jobs = Lefts(view, now_s), {job.job_id: job for job in view.jobs[:LIVE_MOST]}
    room, running, waiting = _after(plan, view, jobs, lefts)
    lines = [_Line(setting.name, room, running, waiting[:WAITING_MOST], kind).played() for kind in range(len(UNKNOWN))]
    gpus, live = sum([node.total_gpus for node in view.nodes]), sum([job.demand.gpus > 0 for job in view.jobs])
    share_gpus = max(gpus, 1) / max(1, live)

    def told(job: JobView, left: Left, ranks: int, starts: Sequence[float], problem: str = "") -> Outlook:
        start = _span(starts) if is_waiting(job) or not job.shares else None
        end = _span([start_s + part for start_s, part in zip(starts, left, strict=True)])
        least = _least_ranks(job, view, lefts, left, ranks, starts[0])
        return Outlook(job.job_id, start, end, lefts.alone_s(job, share_gpus, left, ranks), problem, least)

    found = [told(each.job, each.left, world_size(each.shares), (0.0, 0.0, 0.0)) for each in running]
    for place, each in enumerate(waiting):
        starts = [line.get(each.job.job_id, inf) for line in lines]
        problem = "" if isfinite(starts[0]) else _unknown(each.job, place, room, running)
        found.append(told(each.job, each.left, each.job.ranks, starts, problem))
    return tuple(found)


def _rates(view: ClusterView) -> dict[JobId, Rate]:
    """Of the jobs that take several sizes and were measured."""
    jobs = [job for job in view.jobs if job.card.elastic and is_known(job)]
    if not jobs:
        return {}
    from swarmsched.policies.resizing import gpu_of, question, ranks_looked_at  # noqa: PLC0415  # it brings numpy

    gpus = sum([node.total_gpus for node in view.nodes])
    per_node = max((node.total_gpus for node in view.nodes), default=1) or 1
    book = _book()
    book.begin()
    told, room = [], Room(view.nodes)
    for job in jobs:
        most, of_node = ranks_looked_at(job, gpus), max(1, per_node // max(1, job.demand.gpus))
        asked = question(job, job.card.estimate, most, of_node, gpu_of(job, room))
        told += [(job, asked)] if asked else []
    answers = book.goodputs([each for _, each in told])
    found: dict[JobId, Rate] = {}
    for (job, _), answer in zip(told, answers, strict=True):
        if answer is not None:
            found[job.job_id] = partial(_rate, answer.rate.tolist())
    return found


def _rate(rates: Sequence[float], ranks: int) -> float:
    return rates[min(ranks, len(rates) - 1)]


@lru_cache(maxsize=1)
def _book() -> "GoodputBook":
    """Kept from plan to plan, as policies keep theirs."""
    from swarmsched.models.goodput import GoodputBook  # noqa: PLC0415  # it brings numpy

    return GoodputBook()


def _after(
    plan: Plan, view: ClusterView, jobs: Mapping[JobId, JobView], lefts: Lefts
) -> tuple[Room, list[_Running], list[_Waiting]]:
    """What is free, who runs and who waits once the plan has been followed."""
    room, shares = Room(view.nodes), {job_id: job.shares for job_id, job in jobs.items()}
    for each in plan.decisions:
        if each.change in GIVING or each.change is Change.GROW:
            room.release(shares.pop(each.job_id, ()), jobs[each.job_id].demand)
    for each in plan.decisions:
        if (
            each.target.shares
            and each.job_id in jobs
            and take_if_there(room, each.target.shares, jobs[each.job_id].demand)
        ):
            shares[each.job_id] = each.target.shares
    order = {each.job_id: place for place, each in enumerate(plan.decisions)}
    running, waiting = [], []
    for job_id, job in sorted(jobs.items(), key=lambda item: order.get(item[0], len(order))):
        held = shares.get(job_id, ())
        if held:
            left = (0.0, 0.0, 0.0) if job.state is JobState.STOPPING else lefts.of(job, world_size(held))
            running.append(_Running(job, held, left))
        elif is_waiting(job) or job.shares:
            waiting.append(_Waiting(job, lefts.of(job, job.ranks)))
    return room, running, waiting


class _Line:
    """The queue as it is played once: `kind` says which of the lengths is taken."""

    def __init__(
        self, policy: str, room: Room, running: Sequence[_Running], waiting: Sequence[_Waiting], kind: int
    ) -> None:
        self._room, self._waiting, self._kind = room.copy(), list(waiting), kind
        self._passes, self._reserves = policy != "fifo", policy == "backfill"
        self._now_s = 0.0
        self._ends = [(each.left[kind], place, each.job, each.shares) for place, each in enumerate(running)]
        self._count = len(self._ends)
        self._starts: dict[JobId, float] = {}
        heapq.heapify(self._ends)

    def played(self) -> dict[JobId, float]:
        """Seconds until each starts that does."""
        self._start()
        while self._waiting and self._ends and isfinite(self._ends[0][0]):
            self._now_s = self._ends[0][0]
            while self._ends and self._ends[0][0] <= self._now_s:
                _, _, job, shares = heapq.heappop(self._ends)
                self._room.release(shares, job.demand)
            self._start()
        return self._starts

    def _start(self) -> None:
        left: list[_Waiting] = []
        room, ranks = self._room, {}  # those that there is room for, by what each needs
        kept: tuple[float, Room] | None = None  # when the first that does not fit will, and what is left beside it then
        for each in self._waiting:
            demand, shares = each.job.demand, None
            if demand not in ranks:
                ranks[demand] = room.ranks(demand)
            if ranks[demand] < each.job.ranks or (left and not self._passes):
                pass
            elif kept is None or self._now_s + each.left[self._kind] <= kept[0] < inf:
                shares = place_in(room, each.job)
                room.take(shares or (), demand)
            else:
                shares = place_beyond(each.job, room, kept[1])
            if shares is None:
                kept = kept or (self._kept_for(each.job) if self._reserves else None)
                left.append(each)
                continue
            ranks = {}
            self._starts[each.job.job_id] = self._now_s
            self._count += 1
            heapq.heappush(self._ends, (self._now_s + each.left[self._kind], self._count, each.job, shares))
        self._waiting = left

    def _kept_for(self, job: JobView) -> tuple[float, Room] | None:
        """As `backfill` keeps a place for the first in line; none where its nodes are away."""
        room = self._room.copy()
        for end_s, _, other, shares in sorted(self._ends, key=lambda end: (end[0], end[2].job_id)):
            room.release(shares, other.demand)
            if (placed := place_in(room, job)) is not None:
                room.take(placed, job.demand)
                return end_s, room
        return None


def _span(times: Sequence[float]) -> Span | None:
    """None where nobody knows when."""
    expected_s, low_s, high_s = times
    if not isfinite(expected_s):
        return None
    most_s = max(expected_s, high_s)
    return Span(expected_s, min(expected_s, low_s), most_s if isfinite(most_s) else None)


def _unknown(job: JobView, place: int, room: Room, running: Sequence[_Running]) -> str:
    """Why nobody knows when it starts."""
    if place >= WAITING_MOST:
        return f"{amount(place, 'job')} wait before it"
    if place_in(room.emptied(), job) is None:
        return "the nodes that could hold it are not available"
    open_ended = [other.job.job_id for other in running if not isfinite(other.left[0])]
    whose = f"how long {handle(open_ended[0])} runs" if open_ended else "how long those run that are before it"
    return f"nobody can tell {whose}: no time limit, no declared steps, and too few jobs have ended here"


def _least_ranks(job: JobView, view: ClusterView, lefts: Lefts, left: Left, ranks: int, start_s: float) -> int:
    """The fewest ranks with which it ends by its deadline, if it has those from its start on."""
    deadline_utc_s, rate, elastic = job.card.deadline_utc_s, lefts.rate(job), job.card.elastic
    if not deadline_utc_s or not view.utc_s or not isfinite(left[0]):
        return 0
    within_s = deadline_utc_s - view.utc_s - start_s
    if rate is None or elastic is None or job.card.estimate is None:
        return job.ranks if left[0] * ranks / job.ranks <= within_s else 0
    return least_ranks(job.card.estimate.remaining, rate, (elastic.ranks_least, elastic.ranks_most), within_s)

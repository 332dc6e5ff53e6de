"""The default policy: whoever has least left goes first, by a mild weight, and each GPU goes where it gains most.

At each look the plan maximises

    sum over jobs of  rank ** a  *  rate(k) / rate(fair share)  *  h / (h + pause)

`rate(k)` is a job's goodput on k ranks with its best batch (Pollux, OSDI 2021), told in units of what it would make of
an equal share of the GPUs, so that a job that can use but one of them is not outweighed by one that can use all.
`rank` counts the jobs from the one with most left: finishing a job relieves all that wait behind it.  Weights that
grow with a power of the rank are optimal for jobs of equal, known, sublinear speed-up (Berg, Vesilo, Harchol-Balter,
heSRPT, 2020).  That none starves, whoever has waited `PATIENCE` times as long as it still takes counts the more the
longer it waits; and where those that nobody can stop leave it no place, nobody starts who would delay it, as under
`backfill`, by what jobs are expected to take.  The last factor is what a change is worth after its pause: `h` is how
long it is likely to last, the `horizon_s`, the rest of a job that runs, or the time for which it has kept what it has,
whichever is shortest; a job that keeps its GPUs pays nothing.

The sum is maximised by `dealing`, for jobs of higher priority before others; no job is stopped for it but for one that
waits.  Running jobs of unknown length are taken to have as much left as they have had, as heavy tails go (Tiresias).

While a job waits of which nothing is known there is nothing to weigh it by: then `backfill` says who starts, on the
ground that each job that takes several sizes needs its least alone, and only what is beyond that is dealt by gain.
Where no job takes several sizes, `backfill` plans in its place (`registry.policy_for`).
"""

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np
from msgspec import DecodeError
from msgspec.msgpack import decode, encode
from msgspec.structs import replace

from swarmsched.card import RankKey
from swarmsched.ids import JobId
from swarmsched.models.goodput import Floats, Goodput, GoodputBook
from swarmsched.models.interference import Interference
from swarmsched.policies.backfill import Backfill
from swarmsched.policies.base import inverse_priority, is_known, is_waiting, joined, milliseconds, seconds_left
from swarmsched.policies.dealing import LEAST_GAIN, Bidder, deal
from swarmsched.policies.resizing import (
    Sized,
    at_least,
    deal_and_place,
    elastic_of,
    never_given_up,
    opened,
    place_made,
    question,
    ranks_looked_at,
    reviewed,
    shrunk,
    unmeasured,
)
from swarmsched.policies.room import may_resize
from swarmsched.view import Change, ClusterView, Decision, JobView, Plan

LEAST_LEFT_S = 1.0
PATIENCE = 8.0
"""A job that has waited for so many times as long as it still takes counts more than by its rank: as Tiresias promotes
those (PROMOTEKNOB)."""
LEAST_PAUSE_S = 1e-3
PLACES_TRIED = 8  # in a plan
LEAST_TOLD = 0.005  # of a gain in speed, to people
ADMISSION: Mapping[str, float] = {"assumed_limit_s": 0.0, "reserves": 1.0}
"""As `backfill` has it by default."""


@dataclass
class Candidate(Sized):
    """A job that may get more, less or other GPUs; `rate` and `value` by world size."""

    rate: Floats
    usual: float  # its rate on an equal share
    left_s: float  # there
    ranks_per_node: int
    patience: float  # how much of it is used up by waiting; 0 of whoever runs
    value: Floats = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reserved = never_given_up(self.job)

    def worth(self, ranks: int) -> float:
        """By its weight, and after its pause."""
        return float(self.value[ranks])

    @property
    def precedence(self) -> tuple[float, bool, float, JobId]:
        """Who has less left comes first; of equal ones who runs, and then who was submitted first."""
        return (self.left_s, not self.held, self.job.card.submitted_utc_s, self.job.job_id)

    @property
    def why(self) -> str:
        """What more ranks bring, and how long it lasts: who has less left counts more."""
        return joined(self._gain or self._next, self._left)

    @property
    def why_waiting(self) -> str:
        """Of what there is, others make more."""
        return joined("others gain more from what there is", self._left)

    @property
    def _left(self) -> str:
        return f"{self.left_s:.0f} s left on an equal share" if is_known(self.job) else ""

    @property
    def _gain(self) -> str:
        """Of those that it gets."""
        if not 0 < self.held < self.ranks or not self.rate[self.held]:
            return ""
        return f"{self.ranks} ranks make it {self._faster(self.held, self.ranks):.0%} faster, {self._source}"

    @property
    def _next(self) -> str:
        """Of one more, which it does not get."""
        more, elastic = self.ranks + 1, elastic_of(self.job)
        if not self.ranks or not self.rate[self.ranks] or elastic.ranks_least == elastic.ranks_most:
            return ""
        if more >= len(self.rate):
            return "it takes no more" if self.ranks == elastic.ranks_most else "there are no more GPUs for it"
        gain = self._faster(self.ranks, more)
        if gain < LEAST_TOLD:
            return "more would not help it"
        return f"one more rank would make it {gain:.0%} faster, {self._source}"

    @property
    def _source(self) -> str:
        estimate = self.job.card.estimate
        is_measured = estimate is not None and estimate.points
        if self.goodput and estimate is not None:
            is_guess = len({each.ranks for each in estimate.points}) == 1
            return "which is a guess: one size was measured so far" if is_guess else "by its model"
        return "as far as one can guess" + (" before its model is made, which comes soon" if is_measured else "")

    def _faster(self, ranks: int, more: int) -> float:
        return float(self.rate[more] / self.rate[ranks]) - 1.0


class Swarm:
    """See above."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._exponent = parameters["rank_exponent"]
        self._horizon_s = parameters["horizon_s"]
        self._pause_s = parameters["pause_s"]
        self._book = GoodputBook()
        self._interference = Interference()
        self._admission = Backfill(ADMISSION)

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Who starts, if nothing is known of some that wait; then sizes; then hosts, the largest job first."""
        self._book.begin()
        self._interference = _interference(view)
        plan = replace(self._plan(view, now_s), memory=encode(self._interference))
        return reviewed(plan, self._book)

    def _plan(self, view: ClusterView, now_s: float) -> Plan:
        if not any(is_waiting(job) and not is_known(job) for job in view.jobs):
            held_back = self._held_back(view, now_s)
            return Plan((*self._dealt(_without(view, held_back), now_s), *held_back.values()))
        admitted = self._admission.plan(at_least(view), now_s).decisions
        waiting = {each.job_id: each for each in admitted if each.change is Change.WAIT}
        others = _without(view, waiting)
        decisions = self._dealt(others, now_s, is_admitted=True, moves=False)
        started = {each.job_id for each in admitted if each.change is Change.START}
        if any(each.job_id in started and not each.target.shares for each in decisions):
            decisions = shrunk(others, admitted, now_s)  # what keeps its hosts leaves them no place
        return Plan((*decisions, *waiting.values()))

    def _held_back(self, view: ClusterView, now_s: float) -> dict[JobId, Decision]:
        """Who waits, that those be served first who have waited for too long: none may start that would delay them,
        were all else given up that can be."""
        found = [job for job in view.jobs if self._may_be_impatient(job, now_s)]
        gpus = sum([node.total_gpus for node in view.nodes])
        known = self._known(found, gpus, view, now_s) if found else []
        first = {each.job.job_id: each.patience for each in known if each.patience > 1.0}
        if not first:
            return {}
        left_s = {job.job_id: seconds_left(job) for job in view.jobs}
        admitted = InTurn(first, left_s, now_s).plan(at_least(view, never_given_up), now_s)
        return {each.job_id: each for each in admitted.decisions if each.change is Change.WAIT}

    def _may_be_impatient(self, job: JobView, now_s: float) -> bool:
        """False, at a glance, of most."""
        most_s = job.queued_s(now_s) / PATIENCE - self._pause(job)
        return most_s > 0.0 and job.demand.gpus > 0 and seconds_left(job) < most_s

    def _dealt(
        self, view: ClusterView, now_s: float, *, is_admitted: bool = False, moves: bool = True
    ) -> list[Decision]:
        """All GPUs that may be decided on by gain, those of higher priority first; `is_admitted`: each has its least.

        Whoever keeps its size keeps its hosts, unless one of higher priority, or one that has waited for too long, has
        no other place; one at a look, and none without `moves`.
        """
        jobs, kept, room, free = opened(view, may_resize)
        candidates = self._candidates(jobs, free, view, now_s)
        deal_sizes = partial(_deal_sizes, candidates, free, is_admitted=is_admitted)
        decisions = [*kept, *deal_and_place(candidates, deal_sizes, room, view)]
        for each in _placeless(candidates, decisions)[:PLACES_TRIED] if moves else ():
            made, others = place_made(view, each.job, now_s, is_overdue=each.patience > 1.0)
            if made:
                return [*made, *self._dealt(others, now_s, moves=False)]
        return decisions

    def _candidates(self, jobs: Sequence[JobView], gpus: int, view: ClusterView, now_s: float) -> list[Candidate]:
        """The jobs with what they are worth at each size."""
        found = self._known(jobs, gpus, view, now_s)
        value = self._value(found, now_s)
        order = sorted(range(len(found)), key=lambda row: found[row].precedence, reverse=True)
        weights = np.empty((len(found), 1))
        for rank, row in enumerate(order, start=1):
            weights[row] = rank**self._exponent * max(1.0, found[row].patience)
        value *= weights
        first = (value > 0.0).argmax(axis=1).tolist() if found else ()
        for row, each in enumerate(found):
            each.value = value[row, : len(each.rate)]
            each.least = max(each.least, first[row])
        return found

    def _known(self, jobs: Sequence[JobView], gpus: int, view: ClusterView, now_s: float) -> list[Candidate]:
        """The jobs with what is known of them."""
        share = max(1, gpus // max(1, len(jobs)))
        per_node = max((node.total_gpus for node in view.nodes), default=1) or 1
        most = [ranks_looked_at(job, gpus) for job in jobs]
        asked = [
            question(job, job.card.estimate, ranks, max(1, per_node // max(1, job.demand.gpus)))
            for job, ranks in zip(jobs, most, strict=True)
        ]
        answers = iter(self._book.goodputs([each for each in asked if each]))
        return [
            self._candidate(job, share, ranks, next(answers) if each else None, now_s, per_node)
            for job, ranks, each in zip(jobs, most, asked, strict=True)
        ]

    def _candidate(
        self, job: JobView, share_gpus: int, most: int, goodput: Goodput | None, now_s: float, per_node: int
    ) -> Candidate:
        """Its rates, and what is left of it."""
        per_rank, elastic = max(1, job.demand.gpus), elastic_of(job)
        rate = goodput.rate if goodput else unmeasured(job, most)
        if elastic.ranks_least > 1:
            rate = np.where(np.arange(most + 1) < elastic.ranks_least, 0.0, rate)
        share = min(max(share_gpus // per_rank, elastic.ranks_least), most)
        usual = float(rate[share] or rate.max() or 1.0)
        left_s = max(LEAST_LEFT_S, _left_s(job, goodput, usual, share * per_rank, now_s))
        patience = job.queued_s(now_s) / (left_s + self._pause(job)) / PATIENCE
        found = Candidate(
            job, goodput, elastic.ranks_least, rate, usual, left_s, max(1, per_node // per_rank), patience
        )
        found.slowdown = self._interference.part
        lasts_s = min(self._horizon_s, job.running_s(now_s), left_s)
        found.may_part = found.slowdown * (lasts_s + self._pause(job)) > self._pause(job)
        return found

    def _value(self, candidates: Sequence[Candidate], now_s: float) -> Floats:
        """Of each job and world size, but for the weight: speed after a pause, which is paid from the time it lasts.

        That is taken to be no longer than the job has kept its present GPUs, and to them there is no pause.  One that
        waits pays for its start whenever that comes, so what is left of it says nothing against it.
        """
        rate = np.zeros((len(candidates), max([len(each.rate) for each in candidates], default=0)))
        for row, each in enumerate(candidates):
            rate[row, : len(each.rate)] = each.rate
        kept_s = [each.job.running_s(now_s) if each.held else inf for each in candidates]
        left_s = [each.left_s if each.held and is_known(each.job) else inf for each in candidates]
        speed = rate / _column([each.usual for each in candidates])
        lasts_s = np.minimum(
            np.minimum(self._horizon_s, _column(kept_s)), _column(left_s) / np.maximum(speed, LEAST_GAIN)
        )
        value = speed * lasts_s / (lasts_s + _column([self._pause(each.job) for each in candidates]))
        ranks = np.arange(value.shape[1])
        whole = _column([each.ranks_per_node for each in candidates])
        value *= np.where((ranks > whole) & (ranks % whole > 0), 1.0 - self._interference.part, 1.0)
        for row, each in enumerate(candidates):
            if 0 < each.held < len(each.rate):
                there = each.goodput.on(each.held, len(each.job.shares)) if each.goodput else each.rate[each.held]
                value[row, each.held] = max(value[row, each.held], there / each.usual)
        return value

    def _pause(self, job: JobView) -> float:
        """Seconds that a change of its GPUs costs it: as measured, or as assumed."""
        return job.card.pause_s or max(self._pause_s, LEAST_PAUSE_S)


class InTurn(Backfill):
    """The `first` of each priority before others, by how often each has waited for its time (highest response ratio
    next, Brinch Hansen 1971); and of the others who has least left.  Each ends when it is expected to."""

    def __init__(self, first: Mapping[JobId, float], left_s: Mapping[JobId, float], now_s: float) -> None:
        super().__init__(ADMISSION)
        self._first, self._left_s, self._now_s = first, left_s, now_s

    def rank_key(self, job: JobView, now_s: float) -> RankKey:
        """Smaller runs earlier."""
        times = self._first.get(job.job_id)
        place = (1, milliseconds(self._left_s[job.job_id])) if times is None else (0, milliseconds(1.0 / times))
        return (inverse_priority(job), *place, milliseconds(job.card.submitted_utc_s))

    def _limit_s(self, job: JobView) -> float:
        left_s, limit_s = self._left_s[job.job_id], job.card.time_limit_s or inf
        return min(job.running_s(self._now_s) + left_s, limit_s) if left_s else limit_s


def _deal_sizes(candidates: Sequence[Candidate], gpus: int, *, is_admitted: bool) -> None:
    """Those of higher priority first; where all are admitted each has the least that it takes."""
    left = gpus - sum([each.reserved * each.per_rank for each in candidates])
    for of_priority in _by_priority(candidates, is_admitted=is_admitted):
        bidders = [Bidder(each.value, each.per_rank) for each in of_priority]
        least = [elastic_of(each.job).ranks_least if is_admitted else each.reserved for each in of_priority]
        left += sum([each.reserved * each.per_rank for each in of_priority])
        for each, ranks in zip(of_priority, deal(bidders, left, least), strict=True):
            each.ranks = ranks
            left -= ranks * each.per_rank


def _placeless(candidates: Sequence[Candidate], decisions: Sequence[Decision]) -> list[Candidate]:
    """Who was dealt enough and has no place, though others may have to make it one: the first of them first."""
    without = {each.job_id for each in decisions if each.change is Change.WAIT and not each.target.shares}
    lowest = max([inverse_priority(each.job) for each in candidates if each.held], default=-1)
    due = [
        each
        for each in candidates
        if each.ranks and each.job.job_id in without and (each.patience > 1.0 or inverse_priority(each.job) < lowest)
    ]
    return sorted(due, key=lambda each: (inverse_priority(each.job), *each.precedence))


def _interference(view: ClusterView) -> Interference:
    """What is known of it with this look; what another version of this policy remembered is forgotten."""
    with suppress(DecodeError):
        return (decode(view.memory, type=Interference) if view.memory else Interference()).seen(view.jobs)
    return Interference().seen(view.jobs)


def _without(view: ClusterView, jobs: Container[JobId]) -> ClusterView:
    return replace(view, jobs=tuple([job for job in view.jobs if job.job_id not in jobs]))


def _left_s(job: JobView, goodput: Goodput | None, usual: float, share_gpus: int, now_s: float) -> float:
    """Seconds that it would still take on an equal share; as long as it has taken where nobody knows."""
    if goodput and job.card.estimate and job.card.estimate.remaining:
        return job.card.estimate.remaining / usual
    return seconds_left(job) / usual or job.attained_gpu_s(now_s) / share_gpus


def _column(numbers: Sequence[float]) -> Floats:
    return np.array(numbers, float)[:, None]


def _by_priority(candidates: Sequence[Candidate], *, is_admitted: bool) -> list[list[Candidate]]:
    """Groups that are dealt GPUs one after the other; one where all must have their least."""
    if is_admitted:
        return [list(candidates)]
    groups: dict[int, list[Candidate]] = {}
    for each in candidates:
        groups.setdefault(inverse_priority(each.job), []).append(each)
    return [groups[rank] for rank in sorted(groups)]

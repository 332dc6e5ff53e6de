"""The default policy: who is likely to end soonest for its GPU-time goes first, and each GPU goes where it gains most.

At each look the plan maximises

    sum over jobs of  rank ** a  *  rate(k) / rate(fair share)  *  h / (h + pause)

`rate(k)` is a job's goodput on k ranks with its best batch (Pollux, OSDI 2021), told in units of what it would make of
an equal share of the GPUs, so that a job that can use but one of them is not outweighed by one that can use all; one
that takes a single size makes of its GPUs as many shares as they are, so that among such jobs the order alone counts,
and one where they are less than a share: else one of a minute on one GPU would wait behind the pause of one on all.
`rank` counts the jobs from the one with most left, known (on an equal share) or by its index (`turns`): finishing a job
relieves all that wait behind it.  Weights that grow with a power of the rank are optimal for jobs of equal, known,
sublinear speed-up (Berg, Vesilo, Harchol-Balter, heSRPT, 2020).  Whoever has waited for too long counts the more the
longer it waits, and nobody starts who would delay it too much (`Turns.held_back`); whoever runs, and is to take more
than `rho_most` times as long as alone on an equal share, counts up to twice.  The last factor is what a change is worth
after its pause: `h` is how long it is likely to last, the `horizon_s` (some pauses), the rest of a job that runs, or
the time for which it has kept what it has, whichever is shortest; a job that keeps its GPUs pays nothing.  Who has just
changed, or has had enough of it, is left as it is (`calm`).

The sum is maximised by `dealing`, for jobs of higher priority before others; no job is stopped for it but for one that
waits.  Where no job takes several sizes, `turns.Rigid` plans in its place, by the order alone (`registry.policy_for`).
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

from swarmsched.ids import JobId
from swarmsched.models.deadlines import least_ranks
from swarmsched.models.goodput import Floats, Goodput, GoodputBook
from swarmsched.models.interference import Interference
from swarmsched.models.lengths import LEAST_S
from swarmsched.policies import calm
from swarmsched.policies.base import inverse_priority, is_known, joined, seconds_left
from swarmsched.policies.classes import assign, deal_each, limited_speeds, mean_speed, parts, pools, questions
from swarmsched.policies.dealing import LEAST_GAIN, Bidder, deal
from swarmsched.policies.resizing import (
    Sized,
    at_least,
    deal_and_place,
    elastic_of,
    gpu_of,
    never_given_up,
    opened,
    place_made,
    ranks_looked_at,
    reviewed,
    unmeasured,
)
from swarmsched.policies.room import Room
from swarmsched.policies.sites import ANY_GPU
from swarmsched.policies.turns import DRAINS, Turn, Turns
from swarmsched.resources import nodes_of
from swarmsched.view import Change, ClusterView, Decision, JobView, Plan

PLACES_TRIED = 8  # in a plan
KEPT = 1.05
"""What a job has counts so much more: what is known of speeds is no better, and each report tells a little else."""
PAUSES = (5.0, 20.0)
"""A change is expected to last for so many of its job's pauses at least, and at most: with fewer no job whose restart
is expensive would ever change, and with more each report would move those that change in a second."""
LEAST_TOLD = 0.005  # of a gain in speed, to people


@dataclass
class Contender(Sized):
    """A job that may get more, less or other GPUs; `rate` and `value` by world size."""

    rate: Floats
    usual: float  # its rate on an equal share
    left_s: float  # there
    ranks_per_node: int
    turn: Turn
    value: Floats = field(init=False)
    whole: float = field(default=1.0, init=False)  # over its usual rate what it counts by: see above, of a single size
    unfairness: float = field(default=0.0, init=False)
    after_pause: float = field(default=1.0, init=False)  # the part of a gain that is left of it after a change
    limited: Mapping[str, Floats] = field(default_factory=dict, init=False)  # see `limited_speeds`
    by_gpu: Mapping[str, Goodput | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reserved = never_given_up(self.job)

    def worth(self, ranks: int) -> float:
        """By its weight, and after its pause."""
        return float(self.value[ranks]) if ranks < len(self.value) else 0.0

    def stay(self, *, is_firm: bool) -> None:
        """The job gets no more than it has, and where `is_firm` no less."""
        self.stays, self.may_part = True, False
        self.value[self.held + 1 :] = np.minimum(self.value[self.held + 1 :], self.value[self.held])
        self.reserved = self.held if is_firm else self.reserved

    def keep(self) -> None:
        """Give up nothing that the job has."""
        self.may_part, self.reserved = False, self.held

    @property
    def patience(self) -> float:
        """How much more it counts for having waited, or for what it is to take."""
        return max(self.turn.patience, min(DRAINS, self.unfairness))

    def rho(self, age_s: float) -> float:
        """Finish-time fairness of one that goes on with what it has; 0 where nobody knows."""
        estimate, rate = self.job.card.estimate, self.rate[self.held] if self.held < len(self.rate) else 0.0
        if not (age_s and rate and estimate and is_known(self.job)):
            return 0.0
        alone_s = self.left_s * (1.0 + estimate.done / estimate.remaining) + self.turn.pause_s
        return float((age_s + self.left_s * self.usual / rate) / alone_s)

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
        return f"{self.left_s:.0f} s left on an equal share" if is_known(self.job) else self.turn.why

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
        self._parameters = parameters
        self._book = GoodputBook()
        self._interference = Interference()
        self._gpu_parts: Mapping[str, float] = {}

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Who is kept waiting; then sizes; then hosts, the largest job first."""
        self._book.begin()
        self._interference, self._gpu_parts = _interference(view), parts(view.nodes)
        turns = Turns(view, now_s, self._parameters)
        kept = never_given_up
        held_back = turns.held_back(lambda: at_least(view, turns.may_change, kept))
        decisions = (*self._dealt(_without(view, held_back), turns, now_s), *held_back.values())
        memory = encode(self._interference)
        return reviewed(Plan(decisions, memory, review_s=turns.review_s), self._book)

    def _dealt(
        self, view: ClusterView, turns: Turns, now_s: float, *, moves: bool = True, newcomers: Sequence[JobView] = ()
    ) -> list[Decision]:
        """All GPUs that may be decided on by gain, those of higher priority first.

        Where that leaves `newcomers` without a place, those that have just changed make them one, if that costs them
        little (`calm.yields_to`).  Whoever keeps its size keeps its hosts, unless one of higher priority, one that has
        waited for too long or one of which nothing is known has no other place; one at a look, and none without
        `moves`.
        """
        jobs, kept, room, free = opened(view, turns.may_change)
        there = [] if room.is_of_one_class(ANY_GPU) or any(_must_mix(job, room) for job in jobs) else pools(room)
        classes = [[pool.gpu for pool in there] or [gpu_of(job, room)] for job in jobs]
        candidates = self._candidates(jobs, classes, free, view, turns, now_s)
        _calm(candidates, newcomers, turns, now_s, view.utc_s)
        deal_sizes = partial(_deal_sizes, candidates, free, view.utc_s)
        if len(there) > 1 and candidates:
            assign(candidates, there, room)
            deal_sizes = partial(deal_each, candidates, there, partial(_deal_sizes, utc_s=view.utc_s))
        decisions = [*kept, *deal_and_place(candidates, deal_sizes, room, view)]
        if not newcomers and (late := _left_out(candidates, decisions, turns, now_s)):
            return self._dealt(view, turns, now_s, moves=moves, newcomers=late)
        for each in _placeless(candidates, decisions)[:PLACES_TRIED] if moves else ():
            due = {"is_overdue": each.turn.is_overdue, "shrinks": not is_known(each.job)}
            made, others = place_made(view, each.job, turns.may_change, now_s, **due)
            if made:
                return [*made, *self._dealt(others, turns, now_s, moves=False)]
        return decisions

    def _candidates(
        self,
        jobs: Sequence[JobView],
        classes: Sequence[Sequence[str]],
        gpus: int,
        view: ClusterView,
        turns: Turns,
        now_s: float,
    ) -> list[Contender]:
        """The jobs, and of each the classes on which it may run, with what they are worth at each size."""
        found = self._known(jobs, classes, gpus, view, turns, now_s)
        value = self._value(found, turns, now_s)
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

    def _known(
        self,
        jobs: Sequence[JobView],
        classes: Sequence[Sequence[str]],
        gpus: int,
        view: ClusterView,
        turns: Turns,
        now_s: float,
    ) -> list[Contender]:
        """The jobs with what is known of them."""
        share = max(1, gpus // max(1, len(jobs)))
        per_node = max((node.total_gpus for node in view.nodes), default=1) or 1
        most = [turns.most_at_start(job, ranks_looked_at(job, gpus), gpus) for job in jobs]
        asked = [
            questions(job, ranks, max(1, per_node // max(1, job.demand.gpus)), names)
            for job, ranks, names in zip(jobs, most, classes, strict=True)
        ]
        answers = iter(self._book.goodputs([each for by_gpu in asked for each in by_gpu.values()]))
        told = [{gpu: next(answers) for gpu in by_gpu} for by_gpu in asked]
        return [
            self._candidate(job, share, ranks, by_gpu, turns, now_s, per_node)
            for job, ranks, by_gpu in zip(jobs, most, told, strict=True)
        ]

    def _candidate(
        self,
        job: JobView,
        share_gpus: int,
        most: int,
        by_gpu: Mapping[str, Goodput | None],
        turns: Turns,
        now_s: float,
        per_node: int,
    ) -> Contender:
        """Its rates, and what is left of it, by the first class of several whose limits differ."""
        goodput = next(iter(by_gpu.values()), None)
        per_rank, elastic = max(1, job.demand.gpus), elastic_of(job)
        rate = goodput.rate if goodput else unmeasured(job, most)
        if elastic.ranks_least > 1:
            rate = np.where(np.arange(most + 1) < elastic.ranks_least, 0.0, rate)
        wanted = share_gpus / per_rank
        share = min(max(int(wanted), elastic.ranks_least), most)
        usual = float(rate[share] or rate.max() or 1.0)
        is_in_parts = elastic.ranks_least == elastic.ranks_most or wanted < elastic.ranks_least
        parts_of_share = wanted / share if is_in_parts else 1.0  # as if it could be had in parts
        usual *= parts_of_share
        limited = limited_speeds(by_gpu)
        usual *= mean_speed(job, self._gpu_parts, {gpu: float(speed[share]) or 1.0 for gpu, speed in limited.items()})
        turn = turns.of(job)
        left_s = max(LEAST_S, _left_s(job, goodput, usual) or turn.service_gpu_s / share_gpus)
        ranks_per_node = max(1, per_node // per_rank)
        found = Contender(job, goodput, elastic.ranks_least, rate, usual, left_s, ranks_per_node, turn)
        found.unfairness = turns.unfairness(found.rho(turns.age_s(job))) if found.held else turn.unfairness
        found.whole = max(1.0, parts_of_share)
        found.slowdown = self._interference.part
        found.by_gpu, found.limited = by_gpu, limited
        lasts_s = min(self._lasts_s(turn.pause_s), job.kept_s(now_s), left_s)
        found.may_part = bool(job.card.elastic) and found.slowdown * (lasts_s + turn.pause_s) > turn.pause_s
        found.after_pause = lasts_s / (lasts_s + turn.pause_s) if lasts_s else 0.0
        return found

    def _lasts_s(self, pause_s: float) -> float:
        """How long a change is likely to last: several pauses."""
        return min(max(self._horizon_s, PAUSES[0] * pause_s), PAUSES[1] * pause_s)

    def _value(self, candidates: Sequence[Contender], turns: Turns, now_s: float) -> Floats:
        """Of each job and world size, but for the weight: speed after a pause, which is paid from the time it lasts.

        That is taken to be no longer than the job has kept its present GPUs, and to them there is no pause.  One that
        waits pays for its start whenever that comes, so what is left of it says nothing against it; nor does the pause
        against one of which nothing is known, which has to begin for others to learn from it.
        """
        rate = np.zeros((len(candidates), max([len(each.rate) for each in candidates], default=0)))
        for row, each in enumerate(candidates):
            rate[row, : len(each.rate)] = each.rate
        kept_s = [each.job.kept_s(now_s) if each.held else inf for each in candidates]
        left_s = [each.left_s if each.held and is_known(each.job) else inf for each in candidates]
        usual = [each.usual / each.whole for each in candidates]
        speed = rate / _column(usual)
        horizons_s = [self._lasts_s(turns.pause_s(each.job)) for each in candidates]
        lasts_s = np.minimum(
            np.minimum(_column(horizons_s), _column(kept_s)), _column(left_s) / np.maximum(speed, LEAST_GAIN)
        )
        pauses_s = [turns.pause_s(each.job) if each.held or is_known(each.job) else 0.0 for each in candidates]
        value = speed * lasts_s / (lasts_s + _column(pauses_s))
        ranks = np.arange(value.shape[1])
        whole = _column([each.ranks_per_node for each in candidates])
        value *= np.where((ranks > whole) & (ranks % whole > 0), 1.0 - self._interference.part, 1.0)
        for row, each in enumerate(candidates):
            if 0 < each.held < len(each.rate):
                there = each.goodput.on(each.held, nodes_of(each.job.shares)) if each.goodput else each.rate[each.held]
                lost = 0.0 if each.job.card.elastic else each.job.lost_s(now_s) / self._horizon_s
                value[row, each.held] = max(value[row, each.held], there / usual[row]) * (1.0 + lost) * KEPT
        return value


def _left_out(
    candidates: Sequence[Contender], decisions: Sequence[Decision], turns: Turns, now_s: float
) -> list[JobView]:
    """Who has come since others changed, and has no place although these could make it one at little cost."""
    without = {each.job_id for each in decisions if each.change is Change.WAIT and not each.target.shares}
    late = [each.job for each in candidates if each.job.job_id in without]
    just = [
        each.job
        for each in candidates
        if late and calm.has_just_changed(each.job, now_s) and each.held > never_given_up(each.job)
    ]
    return [job for job in late if any(calm.yields_to(each, job, turns.pause_s(each), now_s) for each in just)]


def _calm(
    candidates: Sequence[Contender], newcomers: Sequence[JobView], turns: Turns, now_s: float, utc_s: float
) -> None:
    """Running jobs that are left as they are for now."""
    waiting = [inverse_priority(each.job) for each in candidates if not each.held]
    for each in candidates:
        job, is_silent = each.job, each.goodput is None
        if not each.held:
            continue
        is_wanted = bool(waiting) and (min(waiting) < inverse_priority(job))
        pause_s, has_just_changed = turns.pause_s(job), calm.has_just_changed(job, now_s)
        if not waiting and calm.may_grow(job, pause_s, now_s, utc_s, is_silent=is_silent):
            each.keep()
        elif has_just_changed and not is_wanted:
            each.stay(is_firm=not any(calm.yields_to(job, newcomer, pause_s, now_s) for newcomer in newcomers))
        elif calm.stays(job, pause_s, now_s, utc_s, is_silent=is_silent) or (is_silent and waiting):
            each.stay(is_firm=not waiting)


def _keep_deadlines(candidates: Sequence[Contender], gpus: int, utc_s: float) -> None:
    """Whose least size is not enough for its deadline, or presses, has the fewest ranks that are: its minimum
    satisfactory share (ElasticFlow, ASPLOS 2023); those with the earliest first, as far as there are GPUs."""
    due = [each for each in candidates if each.job.card.deadline_utc_s and each.goodput and utc_s]
    left = gpus - sum([each.reserved * each.per_rank for each in candidates]) if due else 0
    for each in sorted(due, key=lambda each: (each.job.card.deadline_utc_s, each.job.job_id)):
        estimate, pause_s = each.job.card.estimate, 0.0 if each.held else each.turn.pause_s
        within_s = each.job.card.deadline_utc_s - utc_s - pause_s
        sizes = (max(1, each.least), len(each.rate) - 1)
        rate = each.rate.tolist().__getitem__
        ranks = least_ranks(estimate.remaining if estimate else 0.0, rate, sizes, within_s)
        more = (ranks - each.reserved) * each.per_rank
        is_needed = ranks > sizes[0] or each.turn.is_pressed
        if is_needed and 0 < more <= left:
            each.reserved, left = ranks, left - more


def _deal_sizes(candidates: Sequence[Contender], gpus: int, utc_s: float) -> None:
    """Those of higher priority first, beside the least of each."""
    _keep_deadlines(candidates, gpus, utc_s)
    left = gpus - sum([each.reserved * each.per_rank for each in candidates])
    for of_priority in _by_priority(candidates):
        bidders = [Bidder(each.value, each.per_rank) for each in of_priority]
        least = [each.reserved for each in of_priority]
        left += sum([each.reserved * each.per_rank for each in of_priority])
        for each, ranks in zip(of_priority, deal(bidders, left, least), strict=True):
            each.ranks = ranks
            left -= ranks * each.per_rank


def _must_mix(job: JobView, room: Room) -> bool:
    """True of a job that needs GPUs of several classes, and takes them."""
    return job.card.mixed_gpus and room.ranks_alike(job.demand) < elastic_of(job).ranks_least


def _placeless(candidates: Sequence[Contender], decisions: Sequence[Decision]) -> list[Contender]:
    """Who was dealt enough and has no place, though others may have to make it one: the first of them first."""
    without = {each.job_id for each in decisions if each.change is Change.WAIT and not each.target.shares}
    lowest = max([inverse_priority(each.job) for each in candidates if each.held], default=-1)
    due = [
        each
        for each in candidates
        if each.ranks
        and each.job.job_id in without
        and (each.turn.is_overdue or not is_known(each.job) or inverse_priority(each.job) < lowest)
    ]
    return sorted(due, key=lambda each: (inverse_priority(each.job), *each.precedence))


def _interference(view: ClusterView) -> Interference:
    """What is known of it with this look; what another version of this policy remembered is forgotten."""
    with suppress(DecodeError):
        return (decode(view.memory, type=Interference) if view.memory else Interference()).seen(view.jobs)
    return Interference().seen(view.jobs)


def _without(view: ClusterView, jobs: Container[JobId]) -> ClusterView:
    return replace(view, jobs=tuple([job for job in view.jobs if job.job_id not in jobs]))


def _left_s(job: JobView, goodput: Goodput | None, usual: float) -> float:
    """Seconds that it would still take on an equal share; 0 where nobody knows."""
    if goodput and job.card.estimate and job.card.estimate.remaining:
        return job.card.estimate.remaining / usual
    return seconds_left(job) / usual


def _column(numbers: Sequence[float]) -> Floats:
    return np.array(numbers, float)[:, None]


def _by_priority(candidates: Sequence[Contender]) -> list[list[Contender]]:
    """Groups that are dealt GPUs one after the other."""
    groups: dict[int, list[Contender]] = {}
    for each in candidates:
        groups.setdefault(inverse_priority(each.job), []).append(each)
    return [groups[rank] for rank in sorted(groups)]

"""The one order in which jobs have their turn, who waits for the sake of others, and who may be stopped.

A job stands by the GPU-time that one end costs: its GPUs, times the seconds that it has left where that is known, and
otherwise its index by the lengths of ended jobs (`models.lengths`), which comes to the same where a length is certain.
So whoever is likely to end soon on few GPUs goes first, known or not, and of those that nobody knows
who has had least (Tiresias, NSDI 2019, whose classes are steps of this order).

A running job is stopped for one before it if it loses nothing that its people have not agreed to: it goes on from a
checkpoint of its attempt, or may be begun again.  What the stop costs it counts for it, and what is left is halved.

Nobody is passed for ever.  Whoever has waited `patience` times as long as it is expected to take goes before
all that have not, by how often it has waited for that (highest response ratio next, Brinch Hansen 1971).  If it does
not fit, others start only where by expectation they do not delay it, as under `backfill`, as long as no more GPU-time
stays idle for it than it takes itself.  Once it has waited twice as long, whatever that costs, others start only
beside the oldest jobs that it waits for: those become fewer with each that ends.

Whoever is to take more than `rho_most` times as long, from its submission on, as it would alone on an equal share of
the GPUs comes next, and has others wait for it as long as that is cheap: that is foretold, and they have waited.

Whoever has to start soon to end by its deadline, as expected, counts as one that has waited so long, and runs on
undisturbed; once it cannot end in time any more it counts as if it had none.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import JobCard, RankKey
from swarmsched.ids import JobId
from swarmsched.models.deadlines import urgency
from swarmsched.models.lengths import LEAST_S, STEP, gpus_asked, lengths_of
from swarmsched.policies.backfill import Backfill, Held, Reservation
from swarmsched.policies.base import amount, inverse_priority, is_waiting, milliseconds, seconds_left
from swarmsched.policies.calm import JUST_S, has_just_changed
from swarmsched.policies.ranked import dealt, may_move
from swarmsched.policies.room import Room, may_resize
from swarmsched.resources import gpus_of
from swarmsched.view import Change, ClusterView, Decision, JobView, Plan

HYSTERESIS = 1.5
"""Whoever is stopped for another has so many times as much left: what is known of lengths is no better."""
PAUSES_BETWEEN = 5.0
"""No job is stopped before it has run for so many times as long as a stop costs it."""
LEAST_PAUSE_S = 1e-3
DRAINS = 2.0
"""Once it has waited so many times as long as that, GPUs stay idle for it whatever it costs."""
SERVED = 2
"""Where those stand of whom nobody has waited for too long: by their service."""
REVIEW_S = 60.0
ADMISSION: Mapping[str, float] = {"assumed_limit_s": 0.0, "reserves": 1.0}
"""As `backfill` has it by default."""


@dataclass(slots=True)
class Turn:
    """A job's place in the order: seconds on the GPUs that it asked for, as one end costs and as expected."""

    job: JobView
    gpus: int
    left_s: float
    expected_s: float
    is_known: bool
    pause_s: float
    waited: float  # times as long as it is expected to take, and its pause
    patience: float  # how much of it is used up by that, or by its deadline; above 1: all
    rho: float  # its finish-time fairness, if it starts now; 0: not known, or it runs
    unfairness: float  # that over the bound on it
    is_pressed: bool = False  # by its deadline

    @property
    def service_gpu_s(self) -> float:
        """By which it stands in the order."""
        return self.gpus * self.left_s

    @property
    def is_overdue(self) -> bool:
        """True where the job has waited for too long, or is to take too long."""
        return self.place[0] < SERVED

    @property
    def place(self) -> tuple[int, float]:
        """In the order, among jobs of its priority: what is foretold comes after what has happened."""
        if self.patience > 1.0:
            return (0, 1.0 / self.patience)
        return (1, 1.0 / self.unfairness) if self.unfairness > 1.0 else (SERVED, self.service_gpu_s)

    @property
    def why(self) -> str:
        """For people."""
        if self.is_pressed:
            return f"has to run now to end by its deadline, {self.expected_s:.0f} s left"
        if self.is_overdue and self.patience <= 1.0:
            return f"is to take {self.rho:.1f} times as long as alone on an equal share of the GPUs"
        if self.is_overdue:
            return f"has waited {self.waited:.0f} times as long as it takes"
        told = f"{self.expected_s:.0f} s left" if self.is_known else f"{self.expected_s:.0f} s left as jobs like it go"
        return f"{told} on {amount(self.gpus, 'GPU')}" if self.gpus else ""


class Turns:
    """Of all jobs of a view."""

    def __init__(self, view: ClusterView, now_s: float, parameters: Mapping[str, float]) -> None:
        self._rho_most, self._patience = parameters["rho_most"], parameters["patience"]
        self._lengths = lengths_of(view.history)
        self._now_s = now_s
        self._pause_s = max(parameters["pause_s"], LEAST_PAUSE_S)
        self._found: dict[JobId, Turn] = {}
        self._jobs, self._utc_s = view.jobs, view.utc_s
        cards = [job.card for job in view.jobs if job.demand.gpus]
        self._live = len(cards)
        self._share_gpus = max(1, sum([node.total_gpus for node in view.nodes])) / max(1, self._live)
        self._submitted = sorted([each.submitted_utc_s for each in (*cards, *[one.card for one in view.history])])
        ran = [*[job.card for job in view.jobs if job.shares], *[one.card for one in view.history]]
        self._changeable = {alike(card) for card in ran if card.elastic and not card.elastic.is_live}

    def of(self, job: JobView) -> Turn:
        """A job's turn."""
        found = self._found.get(job.job_id)
        if found is None:
            found = self._found[job.job_id] = self._turn(job)
        return found

    def pause_s(self, job: JobView) -> float:
        """Seconds that a change of its GPUs costs it: as measured, or as assumed."""
        return job.card.pause_s or self._pause_s

    def stop_s(self, job: JobView) -> float:
        """Seconds that a stop costs it: the pause, and what it has done since its last checkpoint."""
        return self.pause_s(job) + job.lost_s(self._now_s)

    def _turn(self, job: JobView) -> Turn:
        now_s, pause_s = self._now_s, self.pause_s(job)
        known_s = seconds_left(job)
        if known_s:
            left_s = expected_s = max(LEAST_S, known_s)
        else:
            told = self._lengths.left(job.card, job.attained_gpu_s(now_s), job.running_s(now_s))
            left_s, expected_s = told.index_s, told.expected_s
        waited = job.queued_s(now_s) / (expected_s + pause_s)
        pressed = self._urgency(job, expected_s + pause_s)
        known, rho = (left_s, expected_s, bool(known_s), pause_s), self._rho(job, expected_s + pause_s)
        patience = max(waited / self._patience, pressed)
        return Turn(job, gpus_asked(job.card), *known, waited, patience, rho, self.unfairness(rho), pressed > 1.0)

    def unfairness(self, rho: float) -> float:
        """Of a job that is to come to so much: above 1 it is too much."""
        return rho / self._rho_most if self._rho_most else 0.0

    def age_s(self, job: JobView) -> float:
        """Seconds since its submission; 0 where nobody knows the time of day."""
        return max(0.0, self._utc_s - job.card.submitted_utc_s) if self._utc_s else 0.0

    def _rho(self, job: JobView, takes_s: float) -> float:
        """Finish-time fairness (Themis, NSDI 2020) of one that waits and starts now: the time from its submission to
        its end, over that alone on an equal share of the GPUs."""
        gpus, age_s = gpus_asked(job.card), self.age_s(job)
        if not (gpus and age_s and is_waiting(job)):
            return 0.0
        alone_s = (job.attained_gpu_s(self._now_s) / gpus + takes_s) * max(1.0, gpus / self._share_gpus)
        return (age_s + takes_s) / alone_s

    def _urgency(self, job: JobView, takes_s: float) -> float:
        """By its deadline, for which room is sought as long before as it takes."""
        deadline_utc_s = job.card.deadline_utc_s
        return urgency(deadline_utc_s - self._utc_s, takes_s, takes_s) if deadline_utc_s and self._utc_s else 0.0

    def may_be_stopped(self, job: JobView) -> bool:
        """True of a job that runs, loses by a stop nothing that its people have not agreed to, and has run for long."""
        is_free = job.state is JobState.RUNNING and job.can_be_stopped
        return is_free and job.running_s(self._now_s) >= PAUSES_BETWEEN * self.pause_s(job)

    def key(self, job: JobView) -> tuple[int, int, float, float, JobId]:
        """The first to run first; who runs gives way to those with clearly less left alone."""
        turn = self.of(job)
        standing, first = turn.place
        if job.shares:
            first = max(0.0, first - self.stop_s(job) * turn.gpus) / HYSTERESIS
        return (inverse_priority(job), standing, first, job.card.submitted_utc_s, job.job_id)

    def may_change(self, job: JobView, room: Room) -> bool:
        """Whether all that a job has is to be decided on: it waits, or lets its size be changed, or may be stopped."""
        return may_resize(job, room) or (self.may_be_stopped(job) and may_move(job, room))

    def most_at_start(self, job: JobView, most: int, gpus: int) -> int:
        """Ranks with which a job may start. One that may have to keep them has a fair share of the GPUs, among all
        that are there, or come while it runs."""
        elastic = job.card.elastic
        if elastic is None or job.shares or elastic.is_live or alike(job.card) in self._changeable:
            return most
        expected_s = self.of(job).expected_s
        crowd = bisect_left(self._submitted, self._submitted[-1] - expected_s)
        share = gpus // max(self._live, len(self._submitted) - crowd) // max(1, job.demand.gpus)
        return min(most, max(elastic.ranks_least, share))

    def held_back(self, bare: Callable[[], ClusterView]) -> dict[JobId, Decision]:
        """Who waits, that those be served first who have waited for too long; `bare` is the swarm without what may be
        stopped."""
        waiting = [self.of(job) for job in self._jobs if is_waiting(job) and job.demand.gpus]
        if not any(each.is_overdue for each in waiting):
            return {}
        line = InTurn(self, self._now_s)
        decisions = line.plan(bare(), self._now_s).decisions
        return {
            each.job_id: each if each.job_id == line.drained_for else replace(each, rank_key=())
            for each in decisions
            if each.change is Change.WAIT
        }

    def _pressed_in_s(self, turn: Turn) -> float:
        """When its deadline begins to press."""
        wait_s = turn.job.card.deadline_utc_s - self._utc_s - 2.0 * (turn.expected_s + turn.pause_s)
        return wait_s if wait_s > 0.0 and self._utc_s else inf

    @property
    def review_s(self) -> float:
        """In how many seconds time alone may change the order; 0: it does not."""
        waiting = [turn for job in self._jobs if is_waiting(job) and (turn := self.of(job)).gpus]
        if not waiting:
            return 0.0
        next_s = [self._overdue_in_s(turn) for turn in waiting]
        next_s += [
            max(REVIEW_S, STEP * job.running_s(self._now_s)) for job in self._jobs if job.can_be_stopped and job.shares
        ]
        next_s += [JUST_S + 1.0 - job.kept_s(self._now_s) for job in self._jobs if has_just_changed(job, self._now_s)]
        next_s += [self._pressed_in_s(turn) for turn in waiting if turn.job.card.deadline_utc_s]
        next_s += [self._unfair_in_s(turn) for turn in waiting if 0.0 < turn.unfairness < 1.0]
        soonest_s = min(next_s)
        return max(1.0, soonest_s) if soonest_s < inf else 0.0

    def _unfair_in_s(self, turn: Turn) -> float:
        """When it will be to come to more than the bound."""
        return (self.age_s(turn.job) + turn.expected_s + turn.pause_s) * (1.0 / turn.unfairness - 1.0)

    def _overdue_in_s(self, turn: Turn) -> float:
        """When it has waited for too long, or for twice that."""
        at_s = self._patience * (turn.expected_s + turn.pause_s)
        queued_s = turn.job.queued_s(self._now_s)
        return next((times * at_s - queued_s for times in (1.0, 2.0) if times * at_s > queued_s), inf)


class InTurn(Backfill):
    """Backfill in the order of turns, each until it is expected to end."""

    def __init__(self, turns: Turns, now_s: float) -> None:
        super().__init__(ADMISSION)
        self._turns, self._now_s = turns, now_s
        self.drained_for = ""  # the job for which GPUs stay idle whatever that costs

    def rank_key(self, job: JobView, now_s: float) -> RankKey:
        """Smaller runs earlier."""
        turn = self._turns.of(job)
        standing, first = turn.place
        return (inverse_priority(job), standing, milliseconds(first), milliseconds(job.card.submitted_utc_s))

    def _limit_s(self, job: JobView) -> float:
        limit_s = job.card.time_limit_s or inf
        return min(job.running_s(self._now_s) + self._turns.of(job).expected_s, limit_s)

    def _reserve(self, head: JobView, ends: Sequence[tuple[float, Held]], room: Room) -> Reservation | None:
        """For one that has waited for too long alone, and at first only where that is cheap."""
        turn = self._turns.of(head)
        if not turn.is_overdue:
            return None
        if turn.patience <= DRAINS:
            found = super()._reserve(head, ends, room)
            is_cheap = found and self._idle_gpu_s(turn, found, ends, room) <= turn.gpus * (
                turn.expected_s + turn.pause_s
            )
            return found if is_cheap else None
        self.drained_for = head.job_id
        oldest = sorted([held for _, held in ends], key=lambda held: (-held[0].running_s(self._now_s), held[0].job_id))
        return super()._reserve(head, [(inf, held) for held in oldest], room)

    def _idle_gpu_s(self, turn: Turn, found: Reservation, ends: Sequence[tuple[float, Held]], room: Room) -> float:
        """GPU-time that comes free before the rest of its place does."""
        free = min(turn.gpus, room.free_gpus(turn.job.demand))
        idle_gpu_s, left = free * found.shadow_s, turn.gpus - free
        for end_s, (job, shares) in ends:
            gpus = min(left, gpus_of(shares, job.demand))
            idle_gpu_s, left = idle_gpu_s + gpus * max(0.0, found.shadow_s - end_s), left - gpus
            if not left:
                break
        return idle_gpu_s


class RigidPlanner:
    """Plans for jobs of one size, down the order; as `swarm` does where some take several."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._parameters = parameters

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """GPUs are dealt down the order, beside those that cannot be stopped."""
        turns = Turns(view, now_s, self._parameters)
        held_back = turns.held_back(lambda: without_stoppable(view, turns))
        ranking = sorted([job for job in view.jobs if job.job_id not in held_back], key=turns.key)
        told = [(job, turns.of(job).why) for job in ranking]
        others = replace(view, jobs=tuple(ranking))
        decisions = dealt(others, told, turns.may_be_stopped)
        return Plan((*decisions, *held_back.values()), view.memory, review_s=turns.review_s)


def alike(card: JobCard) -> tuple[str, str]:
    """Jobs that are likely to behave alike."""
    return (card.user, card.name or card.program)


def without_stoppable(view: ClusterView, turns: Turns) -> ClusterView:
    """The swarm if all were stopped that may be."""
    room = Room(view.nodes)
    jobs = []
    for job in sorted(view.jobs, key=lambda job: job.job_id):
        if is_waiting(job) or not (turns.may_be_stopped(job) and may_move(job, room)):
            jobs.append(job)
        else:
            room.release(job.shares, job.demand)
    nodes = [replace(node, free=room.free(node.node)) if node.is_available else node for node in view.nodes]
    return replace(view, nodes=tuple(nodes), jobs=tuple(jobs))

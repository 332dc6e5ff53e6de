"""All jobs that one agent shepherds, and the decision which of them may try to be placed now.

Two ways lead to a try.  The cheap local path walks the queue in rank order and starts jobs as long as everything
ahead of them fits as well: under any policy that is right, and it needs no planning.  A job behind one that does not
fit may start only when the policy's plan says so (backfill, attained service); the plan comes from the planner
process and is advice, checked against the present room before it is followed.

Shepherds on other agents see nearly the same queue.  They spread by a start delay that grows with the number of
foreign jobs ahead, counted from the last release of capacity (protocol notes, section 5).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from swarmsched.api import JobState
from swarmsched.deadlines import Deadlines
from swarmsched.effects import ComputePlan
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import PreemptRequest
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd import PRODUCTION, Clock, JobShepherd, ShepherdParts
from swarmsched.policies.placement import choose, place_in, tie_break
from swarmsched.policies.registry import make_policy
from swarmsched.policies.release import busy_devices
from swarmsched.policies.room import Room
from swarmsched.record import JobRecord
from swarmsched.resources import Share
from swarmsched.view import Action, ClusterView, JobView, NodeView, Plan, Policy, PolicySetting

START_DELAY_S = 0.05
START_DELAY_PER_RANK_S = 0.005
START_DELAY_S_MAX = 2.0
PLAN_INTERVAL_S = 1.0
PLAN_INTERVAL_PER_PLAN_TIME = 20.0
PLAN_REFRESH_S = 10.0
PLAN_AGE_S_MAX = 5.0
FEW_JOBS, REST_PER_JOB_S = 64, 50e-6
"""A look at the queue costs some 8 us for each job: with many of them the next one waits, so that most time is left."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the agent believes of everybody else at one moment."""

    nodes: Sequence[NodeView]
    foreign_jobs: Sequence[JobView]
    foreign_queued_count: int  # from node records: includes jobs too young to have a card


NOBODY = Surroundings((), (), 0)


class Flock:
    """The shepherds of one agent."""

    def __init__(self, me: NodeId, rng: random.Random, parts: ShepherdParts = PRODUCTION) -> None:
        self._me = me
        self._parts = parts
        self._rng = rng
        self._jobs: dict[JobId, JobShepherd] = {}
        self._stirred: dict[JobId, None] = {}  # jobs whose deadline may have changed
        self._deadlines: Deadlines[JobId] = Deadlines()
        self._update_ids = count(1)
        self._setting = PolicySetting()
        self._policy: Policy = make_policy(self._setting)
        self._plan: Plan | None = None
        self._plan_seen_s = 0.0
        self._plan_versions = count(1)
        self._plan_pending: int | None = None
        self._next_plan_s = 0.0
        self._has_news = True  # since the last plan was asked for
        self._evaluate_s = float("inf")
        self._rest_until_s = float("-inf")

    @property
    def jobs(self) -> Mapping[JobId, JobShepherd]:
        """Live jobs by id."""
        return self._jobs

    @property
    def policy(self) -> Policy:
        """The policy in force here."""
        return self._policy

    @property
    def update_ids(self) -> Iterator[int]:
        """Register update ids, unique within this agent's life."""
        return self._update_ids

    @property
    def waiting_count(self) -> int:
        """Queued jobs of this agent."""
        return sum(job.is_queued for job in self._jobs.values())

    @property
    def has_waiting(self) -> bool:
        """True when `evaluate` needs to know what is around."""
        return any(job.is_waiting for job in self._jobs.values())

    @property
    def next_deadline_s(self) -> float:
        """Earliest of the jobs' own timers and the next look at the queue."""
        self._note_deadlines()
        return min(self.evaluation_due_s, self._deadlines.next_s)

    def due(self, now_s: float) -> list[JobShepherd]:
        """Jobs whose own timers have something to do."""
        self._note_deadlines()
        return [self._jobs[job_id] for job_id in self._deadlines.due(now_s)]

    def _note_deadlines(self) -> None:
        for job_id in self._stirred:
            if (job := self._jobs.get(job_id)) is not None:
                self._deadlines.put(job_id, job.next_deadline_s)
        self._stirred.clear()

    def _stir(self, job_id: JobId) -> None:
        self._stirred[job_id] = None

    def set_policy(self, setting: PolicySetting, now_s: float) -> None:
        """Use another policy from now on; the caller has checked the setting."""
        if setting == self._setting:
            return
        self._setting, self._policy, self._plan = setting, make_policy(setting), None
        self.look_soon(now_s)

    def add(self, record: JobRecord) -> JobShepherd:
        """Shepherd this job."""
        shepherd = JobShepherd(record, self._me, self._rng, self._update_ids, self._parts, self._stir)
        self._jobs[record.job_id] = shepherd
        self._stir(record.job_id)
        return shepherd

    def let_go(self, job_id: JobId) -> None:
        """Stop acting for a job: it has ended, or another shepherd has it."""
        self._jobs.pop(job_id, None)
        self._deadlines.drop(job_id)

    @property
    def placing(self) -> list[JobId]:
        """Jobs whose placement is under way."""
        return [job_id for job_id, job in self._jobs.items() if job.is_placing]

    @property
    def evaluation_due_s(self) -> float:
        """When the queue wants to be looked at."""
        return max(self._evaluate_s, self._rest_until_s)

    def look_soon(self, now_s: float) -> None:
        """Something about the queue changed: look at the next opportunity."""
        self._has_news = True
        self._evaluate_s = min(self._evaluate_s, now_s)

    def capacity_released(self, around: Surroundings, clock: Clock) -> None:
        """Resources came free somewhere: look after a delay that spreads competing shepherds."""
        self._has_news = True
        self._evaluate_s = min(self._evaluate_s, clock.now_s + self._start_delay_s(around, clock))

    def _start_delay_s(self, around: Surroundings, clock: Clock) -> float:
        queued = [job for job in around.foreign_jobs if job.state is JobState.QUEUED]
        if not around.foreign_queued_count and not queued:
            return 0.0
        views = self.views(clock.now_s, clock.utc_s)
        mine = [self._policy.rank_key(view) for view in views if view.state is JobState.QUEUED]
        if not mine:
            return START_DELAY_S
        first = min(mine)
        ahead = sum(self._policy.rank_key(job) < first for job in queued)
        return min(START_DELAY_S_MAX, START_DELAY_S + ahead * START_DELAY_PER_RANK_S)

    def plan_computed(self, plan: Plan, clock: Clock) -> None:
        """Take the planner's advice; an answer to an older question is ignored."""
        if plan.version != self._plan_pending:
            return
        self._plan_pending = None
        self._next_plan_s = clock.now_s + max(PLAN_INTERVAL_S, PLAN_INTERVAL_PER_PLAN_TIME * plan.elapsed_s)
        if plan.policy_id != self._policy.policy_id:
            return
        self._plan, self._plan_seen_s = plan, clock.now_s
        for entry in plan.entries:
            job = self._jobs.get(entry.job_id)
            if job is not None and entry.action is Action.WAIT:
                job.explain(entry.reason)
        self._evaluate_s = min(self._evaluate_s, clock.now_s)

    def plan_failed(self, version: int, now_s: float) -> None:
        """No advice this time; asked again after the usual interval."""
        if version == self._plan_pending:
            self._plan_pending = None
            self._next_plan_s = now_s + PLAN_INTERVAL_S

    def evaluate(self, around: Surroundings, clock: Clock) -> list[ShepherdEffect]:
        """Start what may start, and ask for a plan when something has to wait."""
        self._evaluate_s = float("inf")
        self._rest_until_s = clock.now_s + REST_PER_JOB_S * max(0, len(self._jobs) - FEW_JOBS)
        mine = {job.job_id: job for job in self._jobs.values() if job.is_waiting}
        if not mine:
            return []
        room = self._room(around)
        if not any(room.fits(demand) for demand in {job.record.spec.demand for job in mine.values()}):
            self._remember_backoffs(mine, clock.now_s)
            claims = (
                self._claim_places(self._queue(around, clock), around, clock)
                if self._has_to_claim(mine, clock.now_s)
                else []
            )
            return [*claims, *self._ask_for_plan(around, clock)]  # a full swarm: the queue need not be put in order
        queue = self._queue(around, clock)
        effects, left = self._start_prefix(queue, room, mine, clock)
        if left:
            effects += self._follow_plan(left, room, mine, clock)
        effects += self._claim_places(queue, around, clock)
        self._remember_backoffs(mine, clock.now_s)
        still = [view for view in left if view.job_id in mine and mine[view.job_id].is_waiting]
        return [*effects, *self._ask_for_plan(around, clock)] if still else effects

    def _room(self, around: Surroundings) -> Room:
        """Free resources less what our own unanswered holds will take."""
        room = Room(around.nodes)
        known = set(room.nodes)
        for job in self._jobs.values():
            for share in job.unanswered_holds:
                if share.node in known:
                    demand = job.record.spec.demand
                    ranks = min(share.ranks, room.fits(demand).get(share.node, 0))
                    room.take([replace(share, ranks=ranks)], demand)
        return room

    def _queue(self, around: Surroundings, clock: Clock) -> list[JobView]:
        """All queued jobs that are known here, first in rank first; ours that are being placed stand no more."""
        ours = [
            view
            for view in self.views(clock.now_s, clock.utc_s)
            if view.state is JobState.QUEUED and not self._jobs[view.job_id].is_placing
        ]
        foreign = [job for job in around.foreign_jobs if job.state is JobState.QUEUED and job.job_id not in self._jobs]
        keyed = [(self._policy.rank_key(job), job.job_id, job) for job in (*ours, *foreign)]
        keyed.sort(key=lambda item: item[:2])
        return [job for _, _, job in keyed]

    def _start_prefix(
        self, queue: Sequence[JobView], room: Room, mine: Mapping[JobId, JobShepherd], clock: Clock
    ) -> tuple[list[ShepherdEffect], Sequence[JobView]]:
        """Start ours from the head as long as all ahead fit too.  Returns effects and the rest of the queue."""
        effects: list[ShepherdEffect] = []
        for index, view in enumerate(queue):
            shares = self._place(view, room, is_mine=view.job_id in mine)
            if shares is None:
                return effects, queue[index:]
            room.take(shares, view.demand)
            if view.job_id in mine and mine[view.job_id].may_try_after_s <= clock.now_s:
                effects += mine[view.job_id].place(shares, self._ranking(view), clock)
        return effects, ()

    def _follow_plan(
        self, left: Sequence[JobView], room: Room, mine: Mapping[JobId, JobShepherd], clock: Clock
    ) -> list[ShepherdEffect]:
        """Jobs that the plan lets pass others; each line of a plan is used once, and only while it is fresh."""
        if self._plan is None or clock.now_s - self._plan_seen_s > PLAN_AGE_S_MAX:
            return []
        effects: list[ShepherdEffect] = []
        views = {view.job_id: view for view in left}
        unused = []
        for entry in self._plan.entries:
            job, view = mine.get(entry.job_id), views.get(entry.job_id)
            if entry.action is not Action.START or job is None or view is None:
                continue
            shares = self._place(view, room, is_mine=True) if job.may_try_after_s <= clock.now_s else None
            if shares is None:
                unused.append(entry)
                continue
            room.take(shares, view.demand)
            effects += job.place(shares, self._ranking(view), clock)
        self._plan = replace(self._plan, entries=tuple(unused))
        return effects

    def _has_to_claim(self, mine: Mapping[JobId, JobShepherd], now_s: float) -> bool:
        is_told = self._plan is not None and any(entry.victims for entry in self._plan.entries)
        return is_told or any(job.is_starving(now_s) and not job.is_claiming for job in mine.values())

    def _claim_places(self, queue: Sequence[JobView], around: Surroundings, clock: Clock) -> list[ShepherdEffect]:
        """Where a job of ours needs victims by the plan, or is the first in line and has waited for long."""
        effects = self._follow_preemptions(around, clock)
        first = queue[0] if queue else None
        job = self._jobs.get(first.job_id) if first is not None else None
        if first is None or job is None or not job.is_starving(clock.now_s) or job.is_claiming:
            return effects
        place = self._place_when_empty(first, around)
        if place is None:
            return effects
        running = [view for view in self._all_views(around, clock) if view.shares]
        starts_s = expected_start_s(place, running)
        return [*effects, *job.claim(place, {}, self._ranking(first), starts_s, clock)]

    def _follow_preemptions(self, around: Surroundings, clock: Clock) -> list[ShepherdEffect]:
        if self._plan is None or clock.now_s - self._plan_seen_s > PLAN_AGE_S_MAX:
            return []
        effects: list[ShepherdEffect] = []
        views = {view.job_id: view for view in self._all_views(around, clock)}
        for entry in self._plan.entries:
            job = self._jobs.get(entry.job_id)
            if not entry.victims or job is None or not job.is_waiting or job.is_claiming:
                continue
            shepherds = {victim: NodeId(views[victim].shepherd) for victim in entry.victims if victim in views}
            if len(shepherds) == len(entry.victims):
                effects += job.claim(entry.shares, shepherds, self._ranking(views[entry.job_id]), 0.0, clock)
        return effects

    def _all_views(self, around: Surroundings, clock: Clock) -> list[JobView]:
        foreign = [job for job in around.foreign_jobs if job.job_id not in self._jobs]
        return [*self.views(clock.now_s, clock.utc_s), *foreign]

    def _place_when_empty(self, view: JobView, around: Surroundings) -> tuple[Share, ...] | None:
        """Where it would fit if nothing ran, on what is free already as far as possible."""
        room = Room(around.nodes)
        for node, devices in busy_devices(around.nodes, room).items():
            room.give(node, devices, view.ranks * view.demand.cpus, view.ranks * view.demand.memory_bytes)
        return place_in(room, view)

    def refuses_to_make_room(self, request: PreemptRequest, clock: Clock) -> str:
        """Why a job of ours need not stop for another, by the policy and our own fresh figures."""
        job = self._jobs[request.job_id]
        if request.policy_id != self._policy.policy_id:
            return f"the policy here is {self._policy.policy_id}, not {request.policy_id}"
        return self._policy.refuses_to_make_room(job_view(job, clock.now_s, clock.utc_s), request.rank_key)

    def _place(self, view: JobView, room: Room, *, is_mine: bool) -> tuple[Share, ...] | None:
        if not is_mine:
            return place_in(room, view)
        tie = tie_break(view.job_id, self._rng)
        return choose(
            room.fits(view.demand), room, view.demand, view.ranks, tie, nodes=view.nodes, exclude=view.exclude
        )

    def _remember_backoffs(self, mine: Mapping[JobId, JobShepherd], now_s: float) -> None:
        waits = [job.may_try_after_s for job in mine.values() if job.is_waiting and job.may_try_after_s > now_s]
        self._evaluate_s = min([self._evaluate_s, *waits])

    def _ask_for_plan(self, around: Surroundings, clock: Clock) -> list[ShepherdEffect]:
        """At most once in max(1 s, 20 x the last plan's time), and without news only when the last is old."""
        is_fresh = self._plan is not None and clock.now_s < self._plan_seen_s + PLAN_REFRESH_S
        refresh_s = (self._plan_seen_s if is_fresh else clock.now_s) + PLAN_REFRESH_S
        self._evaluate_s = min(self._evaluate_s, refresh_s)
        if self._plan_pending is not None or (is_fresh and not self._has_news):
            return []
        if clock.now_s < self._next_plan_s:
            self._evaluate_s = min(self._evaluate_s, self._next_plan_s)
            return []
        version = next(self._plan_versions)
        self._plan_pending, self._has_news = version, False
        self._next_plan_s = clock.now_s + PLAN_INTERVAL_S
        return [ComputePlan(self._setting, self.cluster_view(around, clock, version))]

    def cluster_view(self, around: Surroundings, clock: Clock, version: int = 0) -> ClusterView:
        """Everything a policy may see."""
        return ClusterView(version, tuple(around.nodes), tuple(self._all_views(around, clock)))

    def views(self, now_s: float, utc_s: float) -> list[JobView]:
        """Our own live jobs as a policy sees them."""
        return [job_view(job, now_s, utc_s) for job in self._jobs.values() if not job.record.is_ended]

    def _ranking(self, view: JobView) -> Ranking:
        return Ranking(self._policy.policy_id, self._policy.rank_key(view))


def expected_start_s(place: Sequence[Share], running: Sequence[JobView]) -> float:
    """When, by their time limits, all that runs on those nodes has ended, in seconds from now; 0: nobody can say."""
    nodes = {share.node for share in place}
    there = [view for view in running if nodes & {share.node for share in view.shares}]
    if any(not view.time_limit_s for view in there):
        return 0.0
    return max((max(0.0, view.time_limit_s - view.running_s) for view in there), default=0.0)


def job_view(job: JobShepherd, now_s: float, utc_s: float) -> JobView:
    """A shepherded job as a policy sees it, with attained service up to this moment."""
    record = job.record
    spec = record.spec
    running_s = max(0.0, now_s - job.running_since_s)
    avoided = tuple(node for node, until_s in sorted(job.avoided.items()) if until_s > now_s)
    return JobView(
        job_id=record.job_id,
        state=record.state,
        ranks=spec.ranks,
        demand=spec.demand,
        submitted_utc_s=record.submitted_utc_s,
        priority=spec.priority,
        user=spec.user,
        queue=spec.queue,
        attained_gpu_s=record.attained_gpu_s + spec.total_gpus * running_s,
        queued_s=max(0.0, now_s - job.queued_since_s) if record.state is JobState.QUEUED else 0.0,
        running_s=running_s,
        time_limit_s=spec.time_limit_s,
        shares=record.shares,
        nodes=spec.nodes,
        exclude=(*spec.exclude, *avoided),
        first_started_utc_s=record.first_started_utc_s,
        shepherd=record.shepherd,
        preemptions=record.preemptions,
    )

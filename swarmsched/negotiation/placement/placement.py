"""All jobs that one agent shepherds, and the decision which of them may try to be placed now.

Two ways lead to a try.  Under a policy that declares an order, jobs start without a plan as long as everything ahead of
them fits as well.  Whatever else a policy wants, it says in its plan: a set of decisions from the planner's process,
each followed as told, or, where its preconditions no longer hold, not at all.

Shepherds on other agents see nearly the same queue.  They spread by a start delay that grows with the number of jobs
ahead, counted from the last release of capacity; whoever an owner invites need not wait for others (`invitation`).
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Protocol

from msgspec.structs import replace

from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.card import JobCard, RankKey, card_of
from swarmsched.commands import MigrateJob, Refused
from swarmsched.deadlines import Deadlines
from swarmsched.effects import Announce, ReplyToClient
from swarmsched.estimate import Estimate
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import PreemptRequest, TaskEstimate
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.pacing import BACKOFF_S_MAX
from swarmsched.negotiation.placement.foretold import Foretold
from swarmsched.negotiation.placement.invitation import Inviter
from swarmsched.negotiation.placement.own_view import OwnViews
from swarmsched.negotiation.placement.planning import Planning
from swarmsched.negotiation.placement.precondition import (
    RESCALES,
    cannot_change,
    cannot_rescale,
    cannot_start,
    expected_start_s,
)
from swarmsched.negotiation.placement.queue import Queue
from swarmsched.negotiation.placement.relief import relief
from swarmsched.negotiation.placement.resizing import (
    UNSTEADY,
    Misfits,
    cannot_pause,
    cannot_scale,
    nearest_size,
    no_place,
    place_elsewhere,
    size,
)
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.regrouping import holds_off
from swarmsched.negotiation.shepherd import Clock, JobShepherd
from swarmsched.negotiation.shepherd_state import PRODUCTION, ShepherdParts
from swarmsched.negotiation.window import Window
from swarmsched.policies.placement import place_in, take_if_there
from swarmsched.policies.registry import kind_of, make_order, policy_id
from swarmsched.policies.room import Room
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Free, Share
from swarmsched.view import (
    HISTORY_LIMIT,
    Allocation,
    Change,
    ClusterView,
    Decision,
    Elasticity,
    EndedJob,
    JobView,
    KindView,
    NodeView,
    Plan,
    PolicySetting,
)

START_DELAY_S = 0.05
START_DELAY_PER_RANK_S = 0.005
START_DELAY_S_MAX = 2.0
INVITED_S = 0.5
BETWEEN_PLACES_S = 0.1
"""A plan waits while a job of ours that takes several sizes is between two places: it would see it without any."""
FEW_JOBS, REST_PER_JOB_S = 64, 50e-6
"""A look at the queue costs some 8 us for each job: with many of them the next one waits, so that most time is left."""
RELIEF_S = 5.0  # between looks at the workers of jobs that change while they train
WALK_MAX = 400
"""Jobs that one look places or reserves for; those behind them have their turn when these are gone."""
CONTENDERS_MIN = 16
"""So many of the first that fit may hope to be started by a plan, and as many more as devices are free."""


class Cluster(Protocol):
    """What the agent believes of everybody else (`node.cluster.Cluster`)."""

    @property
    def jobs(self) -> Mapping[JobId, JobView]:
        """Live jobs by their gossiped cards."""

    def prior(self, user: str, name: str) -> Estimate | None:
        """What jobs of that kind have measured."""

    def gpu_class(self, shares: Iterable[Share], demand: Demand) -> str:
        """Names of the GPUs that ranks have there."""

    def kinds(self, jobs: Iterable[JobView], nodes: Iterable[NodeView]) -> tuple[KindView, ...]:
        """All that is known of the kinds of those that take several sizes."""

    def take_job_news(self) -> Sequence[JobId]:
        """Jobs whose entry in `jobs` has come, changed or gone since this was last asked."""

    def can_act(self, job: JobView, now_s: float) -> bool:
        """True while another live node shepherds it."""

    def nodes(self) -> list[NodeView]:
        """Every known node."""

    def drained(self) -> set[NodeId]:
        """Those of them that take no new work on somebody's wish."""


class Placement:
    """The shepherds of one agent."""

    def __init__(self, me: NodeId, cluster: Cluster, rng: random.Random, parts: ShepherdParts = PRODUCTION) -> None:
        self._me = me
        self._cluster = cluster
        self._parts = parts
        self._rng = rng
        self.jobs: dict[JobId, JobShepherd] = {}  # those that have not ended
        self._elastic: dict[JobId, None] = {}  # those of them that take several sizes
        self._live: dict[JobId, None] = {}  # those that change while they train
        self._misfits = Misfits()  # those of them that are to have another one
        self.window: Window[JobId] = Window()  # of attempts that wait for their owners and holders
        self._own = OwnViews()
        self._stirred: dict[JobId, None] = {}  # jobs whose deadline may have changed
        self._moved: dict[JobId, None] = {}  # jobs of ours that may stand elsewhere in the queue, or nowhere
        self._deadlines: Deadlines[JobId] = Deadlines()
        self.update_ids: Iterator[int] = count(1)  # of register updates, unique within this agent's life
        self.setting = PolicySetting()  # the policy in force here
        self.policy_id = policy_id(self.setting)  # in canonical form
        self._order = make_order(self.setting)
        self._queue = Queue(self._order)
        self._planning = Planning()
        self._inviter = Inviter(me)
        self._history: deque[EndedJob] = deque(maxlen=HISTORY_LIMIT)
        self._said: dict[JobId, str] = {}  # of wishes of a plan that are not carried out, as last announced
        self._fault = ""  # of the policy, as last announced
        self._foretold = Foretold()
        self._look_s = self._backoff_s = float("inf")
        self._rest_until_s = float("-inf")
        self._invited_until_s = float("-inf")

    @property
    def told(self) -> Mapping[JobId, Decision]:
        """What the last plan said of each live job, and its advice where it had any."""
        told, advice = self._planning.told, self._planning.advice
        return {**told, **{each.job_id: each for each in advice}} if advice else told

    @property
    def waits_for_room(self) -> bool:
        """Whether jobs of this agent are queued, or run and are to have more."""
        return bool(self._misfits.jobs) or any(job.decided.state is JobState.QUEUED for job in self.jobs.values())

    @property
    def next_deadline_s(self) -> float:
        """Earliest of the jobs' own timers, the next look at the queue and the next invitations."""
        self._note_deadlines()
        return min(self.look_due_s, self._inviter.next_deadline_s, self._deadlines.next_s)

    def due(self, now_s: float) -> list[JobShepherd]:
        """Jobs whose own timers have something to do."""
        self._note_deadlines()
        return [self.jobs[job_id] for job_id in self._deadlines.due(now_s)]

    def _note_deadlines(self) -> None:
        for job_id in self._stirred:
            if (job := self.jobs.get(job_id)) is not None:
                self._deadlines.put(job_id, job.next_deadline_s)
        self._stirred.clear()

    def _stir(self, job_id: JobId) -> None:
        self._stirred[job_id] = self._moved[job_id] = None

    def set_policy(self, setting: PolicySetting, now_s: float) -> None:
        """Use another policy from now on; the caller has checked the setting."""
        if setting == self.setting:
            return
        self.setting, self.policy_id, self._order = setting, policy_id(setting), make_order(setting)
        self._planning.forget()
        self._queue.use(self._order, now_s)
        self.look_soon(now_s)

    def add(self, record: JobRecord) -> JobShepherd:
        """Shepherd this job."""
        shepherd = JobShepherd(record, self._me, self._rng, self.update_ids, self._parts, self._stir, self.window)
        told = self._cluster.jobs.get(record.job_id)
        shepherd.estimate = told.card.estimate if told is not None else None  # as its last shepherd knew it
        if shepherd.estimate is None and record.spec.is_resizable:
            shepherd.estimate = self._cluster.prior(record.spec.user, record.spec.name)
        self.jobs[record.job_id] = shepherd
        self.decided(shepherd)
        self._stir(record.job_id)
        return shepherd

    def decided(self, job: JobShepherd) -> bool:
        """The record of a job of ours is another one; true if it is to have another size than it has."""
        record = job.decided
        if record.spec.is_resizable:
            self._elastic[record.job_id] = None
        else:
            self._elastic.pop(record.job_id, None)
        if record.spec.elastic:
            self._live[record.job_id] = None
        return self._misfits.note(record)

    def estimated(self, job: JobShepherd, sender: NodeId, told: TaskEstimate, clock: Clock) -> Sequence[ShepherdEffect]:
        """The ranks of a job of ours have reported: plans may change."""
        before, record = job.estimate, job.record
        gpu = self._cluster.gpu_class(record.shares, record.spec.demand)
        effects = job.estimated(sender, replace(told, estimate=replace(told.estimate, gpu=gpu)), clock)
        if job.estimate != before:
            self.look_soon(clock.now_s)
        return [*effects, *self._foretold.check(job.job_id, told.estimate)]

    def let_go(self, job_id: JobId) -> None:
        """Stop acting for a job: it has ended, or another shepherd has it."""
        job = self.jobs.pop(job_id, None)
        self._elastic.pop(job_id, None)
        self._live.pop(job_id, None)
        self._misfits.forget(job_id)
        self._own.drop(job_id)
        self._said.pop(job_id, None)
        self._foretold.forget(job_id)
        self._deadlines.drop(job_id)
        self.window.forget(job_id)
        self._moved[job_id] = None
        if job is not None and job.decided.is_ended:
            record = job.record
            card = replace(card_of(record), attained_gpu_s=record.attained_gpu_s)
            has_completed = record.end_reason is EndReason.COMPLETED
            self._history.append(EndedJob(card, has_completed, record.ended_utc_s))

    def step_down(self, job: JobShepherd, why: str) -> list[ShepherdEffect]:
        """Stop acting for a live job, and say so: another shepherd has it, or none can act."""
        self.let_go(job.job_id)
        return [*job.farewell(), Announce("job.stepped_down", why, job.job_id, self._me)]

    @property
    def placing(self) -> list[JobId]:
        """Jobs whose placement is under way."""
        return [job_id for job_id, job in self.jobs.items() if job.attempt is not None]

    # When to look.

    @property
    def look_due_s(self) -> float:
        """When the queue wants to be looked at."""
        return max(self._look_s, self._rest_until_s)

    def look_soon(self, now_s: float) -> None:
        """Something about the queue changed: look at the next opportunity."""
        self._planning.has_news = True
        self._look_s = min(self._look_s, now_s)

    def capacity_released(self, clock: Clock) -> None:
        """Resources came free somewhere: look after a delay that spreads competing shepherds."""
        self._catch_up(clock)
        self._planning.has_news = True
        self._look_s = min(self._look_s, clock.now_s + self._start_delay_s())

    def _start_delay_s(self) -> float:
        ahead = [
            self._queue.count_before(job_id)
            for job_id, job in self.jobs.items()
            if job.decided.state is JobState.QUEUED
        ]
        if len(self._queue) <= len(ahead):
            return 0.0  # nobody else waits
        first = min(ahead, default=0)
        return min(START_DELAY_S_MAX, START_DELAY_S + first * START_DELAY_PER_RANK_S)

    def invited(self, now_s: float) -> None:
        """An owner has something free, and jobs here are first in line for it as far as it knows."""
        if any(job.is_waiting for job in self.jobs.values()):
            self._invited_until_s = now_s + INVITED_S
            self.look_soon(now_s)

    def has_freed(self, now_s: float) -> None:
        """Something of this very node came free."""
        self._inviter.freed(now_s)

    def others_wait(self, now_s: float) -> None:
        """Cards have changed while something is free here."""
        self._inviter.queued(now_s)

    def make_room_for_others(self, clock: Clock) -> bool:
        """Cards have changed while jobs of ours could have another size: true if somebody has come to wait for it."""
        has_grown = self._catch_up(clock)
        if has_grown:
            self.look_soon(clock.now_s)
        return has_grown

    def invitations(self, free: Free, clock: Clock) -> list[NodeId]:
        """Shepherds to tell now of what is free here."""
        if clock.now_s < self._inviter.next_deadline_s:
            return []
        self._catch_up(clock)
        return self._inviter.due(self._queue, free, self._cluster.can_act, clock.now_s)

    # The queue, and views of jobs.

    def _catch_up(self, clock: Clock) -> bool:
        """Bring the queue up to date; true when somebody has come to wait."""
        has_grown = False
        for job_id in {**dict.fromkeys(self._cluster.take_job_news()), **self._moved}:
            shepherd = self.jobs.get(job_id)
            job = self._foreign(job_id) if shepherd is None else self.view_of(shepherd, clock)
            if job is not None and job.state is JobState.QUEUED:
                has_grown |= self._queue.put(job, clock.now_s)
            else:
                self._queue.drop(job_id)
        self._moved.clear()
        self._queue.refresh(clock.now_s)
        return has_grown

    def _foreign(self, job_id: JobId) -> JobView | None:
        job = self._cluster.jobs.get(job_id)
        return job if job is not None and job.card.shepherd != self._me else None

    def view_of(self, job: JobShepherd, clock: Clock) -> JobView:
        """A shepherded job as a policy sees it: the same object until something of it has changed."""
        return self._own.of(job, clock)

    def card(self, job: JobShepherd, clock: Clock) -> JobCard:
        """A shepherded job's card, as it is told to others now."""
        view, now_s = self.view_of(job, clock), clock.now_s
        return replace(
            view.card,
            attained_gpu_s=view.attained_gpu_s(now_s),
            queued_s=view.queued_s(now_s),
            running_s=view.running_s(now_s),
            rank_key=self._rank_key(view, now_s),
            policy_id=self.policy_id,
        )

    def _rank_key(self, job: JobView, now_s: float) -> RankKey:
        if self._order is not None:
            return self._order.rank_key(job, now_s)
        decision = self._planning.told.get(job.job_id)
        return decision.rank_key if decision is not None else ()

    def _views(self, clock: Clock) -> list[JobView]:
        """All live jobs: ours as they are, others as told by shepherds that can act."""
        own = [self.view_of(job, clock) for job in self.jobs.values() if not job.decided.is_ended]
        return [
            *own,
            *[
                job
                for job_id, job in self._cluster.jobs.items()
                if job_id not in self.jobs and self._cluster.can_act(job, clock.now_s)
            ],
        ]

    def cluster_view(self, clock: Clock, version: int = 0) -> ClusterView:
        """Everything a policy may see."""
        nodes, jobs = tuple(self._cluster.nodes()), tuple(self._views(clock))
        kinds = self._cluster.kinds(jobs, nodes)
        return ClusterView(version, nodes, jobs, tuple(self._history), self._planning.memory, kinds)

    # Plans.

    def plan_computed(self, plan: Plan, clock: Clock) -> list[Announce]:
        """Take the planner's advice; an answer to an older question is ignored."""
        if not self._planning.computed(plan, clock.now_s):
            return []
        for job_id, job in self.jobs.items():
            decision = self._planning.told.get(job_id)
            if decision is not None and decision.change is Change.WAIT:
                job.explain(decision.reason)
        self._look_s = min(self._look_s, clock.now_s)
        is_news, self._fault = plan.fault not in ("", self._fault), plan.fault
        text = f"{plan.fault}; backfill plans in its place"
        return [Announce("plan.fell_back", text, node=self._me)] if is_news else []

    def plan_failed(self, version: int, now_s: float) -> None:
        """No advice this time."""
        self._planning.failed(version, now_s)

    def refuses_to_make_room(self, request: PreemptRequest, clock: Clock) -> str:
        """Why a job of ours need not stop for another, by the policy and our own fresh figures."""
        job = self.jobs[request.job_id]
        if request.policy_id != self.policy_id:
            return f"the policy here is {self.policy_id}, not {request.policy_id}"
        if self._order is not None and not kind_of(self.setting).spares_rigid:
            return self._order.refuses_to_make_room(self.view_of(job, clock), request.rank_key, clock.now_s)
        decision = self._planning.told.get(request.job_id)
        is_told = decision is not None and decision.change is Change.STOP and decision.taker == request.taker
        return "" if is_told else "no plan here gives its place to that job"

    # A look at the queue.

    def look(self, clock: Clock) -> list[ShepherdEffect]:
        """Start what may start, and ask for a plan where its answer could concern a job here."""
        self._look_s = float("inf")
        if clock.now_s >= self._backoff_s:
            self._planning.has_news = True  # what was out of the question for a job may be the place for it now
        self._rest_until_s = clock.now_s + REST_PER_JOB_S * max(0, len(self.jobs) - FEW_JOBS)
        mine = {job_id: job for job_id, job in self.jobs.items() if job.is_waiting}
        is_idle_planner = self.may_change_jobs
        if not mine and not is_idle_planner and not self._misfits.jobs and not self._live:
            return []
        self._catch_up(clock)
        nodes = self._cluster.nodes()
        room = self._room(nodes)
        effects = self._go_on(room, mine, clock)
        mine = {job_id: job for job_id, job in mine.items() if job.attempt is None}
        if any(room.fits(demand) for demand in dict.fromkeys(job.decided.spec.demand for job in mine.values())):
            effects += self._start_unplanned(room, mine, clock)
            effects += self._follow_starts(room, mine, clock)
        effects += self._claim_places(mine, nodes, clock)
        effects += self._fit(room, clock)
        effects += self._relieve(room, clock)
        effects += self._follow_changes(room, clock)
        waiting = {job_id: job for job_id, job in mine.items() if job.is_waiting}
        self._remember_backoffs(waiting, clock.now_s)
        if any(self.jobs[job_id].is_between_places for job_id in self._elastic):
            self._look_s = min(self._look_s, clock.now_s + BETWEEN_PLACES_S)
        elif waiting or is_idle_planner:
            is_needed = is_idle_planner or self._may_be_moved(room, waiting, clock.now_s)
            asked, again_s = self._planning.ask(
                self.setting,
                lambda version: self.cluster_view(clock, version),
                is_needed=is_needed,
                now_s=clock.now_s,
            )
            effects += asked
            self._look_s = min(self._look_s, again_s)
        return effects

    @property
    def may_change_jobs(self) -> bool:
        """Whether a plan could change a job of ours although none waits."""
        kind = kind_of(self.setting)
        if kind.spares_rigid and self.setting.elasticity is Elasticity.OFF:
            return False
        return kind.plans_when_idle and bool(self._elastic if kind.spares_rigid else self.jobs)

    def _room(self, nodes: Sequence[NodeView]) -> Room:
        """Free resources less what our own unanswered holds will take."""
        room = Room(nodes)
        for job in self.jobs.values():
            demand = job.decided.spec.demand
            for share in job.unanswered_holds:
                ranks = min(share.ranks, room.fits(demand).get(share.node, 0))
                if ranks:
                    room.take([replace(share, ranks=ranks)], demand)
        return room

    def _start_unplanned(self, room: Room, mine: Mapping[JobId, JobShepherd], clock: Clock) -> list[ShepherdEffect]:
        """Start ours from the head of the queue as long as all ahead fit too."""
        effects: list[ShepherdEffect] = []
        is_invited = clock.now_s < self._invited_until_s
        left, walked = len(mine), 0
        sizes_are_chosen = kind_of(self.setting).resizes and self.setting.elasticity is not Elasticity.OFF
        for job in self._queue if self._order is not None else ():
            shepherd = mine.get(job.job_id)
            if shepherd is None and not self._stands(job, clock.now_s):
                continue
            walked += 1
            if sizes_are_chosen and job.card.elastic is not None:
                break  # with which size it starts, and what that leaves to those behind it, a plan says
            if not left or walked > WALK_MAX or self.window.is_full(clock.now_s):
                break
            if shepherd is not None:
                left, job = left - 1, self.view_of(shepherd, clock)  # it may avoid other nodes by now
            shares = place_in(room, job, self._rng if shepherd is not None else None)
            pause_s = shepherd.pacing.may_try_after_s - clock.now_s if shepherd is not None else 0.0
            if shares is None and pause_s <= 0.0:
                break
            if shares is None or pause_s > BACKOFF_S_MAX or (shepherd is None and is_invited):
                continue  # it has had its chance, or has none for long
            room.take(shares, job.demand)
            if shepherd is not None and pause_s <= 0.0:
                effects += shepherd.place(shares, self._ranking(job, clock.now_s), clock)
        return effects

    def _stands(self, job: JobView, now_s: float) -> bool:
        """True for a job of another shepherd that can act and of which we know where it may go."""
        is_foreign = job.job_id not in self.jobs and self._cluster.can_act(job, now_s)
        return is_foreign and not job.card.hides_constraints

    def _may_be_moved(self, room: Room, waiting: Mapping[JobId, JobShepherd], now_s: float) -> bool:
        """Whether a plan could start a job of ours, or stop others for it: where one is first, or fits and is near."""
        if self._order is None:
            return True
        contenders, is_first = 0, True
        limit = CONTENDERS_MIN + 2 * sum(node.free.gpu_count for node in self._cluster.nodes() if node.is_available)
        for job in self._queue:
            shepherd = waiting.get(job.job_id)
            if shepherd is None and not self._stands(job, now_s):
                continue
            does_fit = room.ranks(job.demand) >= job.ranks
            if shepherd is not None and (is_first or (does_fit and shepherd.pacing.may_try_after_s <= now_s)):
                return True
            is_first = False
            contenders += does_fit
            if contenders > limit:
                break
        return False

    def _follow_starts(self, room: Room, mine: Mapping[JobId, JobShepherd], clock: Clock) -> list[ShepherdEffect]:
        """Jobs that the plan starts, where it says; each decision is used once, and only while it holds."""
        effects: list[ShepherdEffect] = []
        unused = []
        for decision in self._planning.fresh(clock.now_s):
            job = mine.get(decision.job_id)
            is_start = decision.change is Change.START and job is not None
            if job is None or not is_start:
                unused.append(decision)
                continue
            if not job.is_waiting:
                continue
            if job.pacing.may_try_after_s > clock.now_s or self.window.is_full(clock.now_s):
                unused.append(decision)
                continue
            view = self.view_of(job, clock)
            problem = cannot_start(decision, view, room)
            if problem:
                job.explain(f"{decision.reason}; {problem}")
                self._planning.has_news = True
                continue
            room.take(decision.target.shares, view.demand)
            target = decision.target
            self._foretold.note(decision)
            effects += job.place(target.shares, self._ranking(view, clock.now_s), clock, target.global_batch)
        self._planning.open = unused
        return effects

    def _follow_changes(self, room: Room, clock: Clock) -> list[ShepherdEffect]:
        """What the plan wants of running jobs of ours: done where it can be, otherwise said once.

        Another size or place is a pause for the job: two plans must agree on it.
        """
        effects: list[ShepherdEffect] = []
        for decision in list(self._planning.fresh(clock.now_s)):
            job = self.jobs.get(decision.job_id)
            if job is None or job.is_writing:
                continue
            is_running = job.decided.state is JobState.RUNNING
            is_late = is_running and not job.is_steady
            if decision.change in RESCALES and (is_late or not self._planning.is_confirmed(decision)):
                self._planning.has_news = True
                continue
            problem = self._problem_of(decision, job, room, clock)
            if problem:
                effects += self._say(decision, "plan.ignored", f"{decision.change.value} ignored: {problem}")
            elif decision.change in RESCALES:
                self._planning.open.remove(decision)
                self._foretold.note(decision)
                ranking = self._ranking(self.view_of(job, clock), clock.now_s)
                effects += job.rescale(decision.target, decision.reason, ranking, clock)
            elif decision.change is Change.REBATCH:
                self._planning.open.remove(decision)
                effects += job.rebatch(decision.target.global_batch, decision.reason, clock)
        for decision in self._planning.advice:
            if decision.job_id in self.jobs:
                size = f" to {decision.target.ranks} ranks" if decision.target.ranks else ""
                wish = f"would {decision.change.value}{size} with elasticity=on"
                effects += self._say(decision, "plan.advised", wish, decision.reason)
        return effects

    # What people want of jobs that are there.

    def scale(self, request_id: int, job: JobShepherd, spec: JobSpec, clock: Clock) -> list[ShepherdEffect]:
        """Have a job of ours take other sizes from now on."""
        refusal = cannot_scale(job.record, spec)
        if refusal is not None:
            return [ReplyToClient(request_id, refusal)]
        return job.scale(request_id, spec, clock)

    def migrate(self, request_id: int, job: JobShepherd, wish: MigrateJob, clock: Clock) -> list[ShepherdEffect]:
        """Have a job of ours go on with its size on other hosts, now or not at all."""
        refusal = cannot_pause(job.record) or (None if job.is_steady else UNSTEADY)
        view = self.view_of(job, clock)
        room = self._room(self._cluster.nodes())
        ranks = size(job.decided)
        place = None if refusal else place_elsewhere(room, view, ranks, wish.nodes, wish.avoid)
        if refusal is None and place is None:
            refusal = Refused("conflict", no_place(job.decided, wish), "name other nodes, or ask again later")
        elif refusal is None and place == view.shares:
            return job.tell(request_id, clock)
        if refusal is not None:
            return [ReplyToClient(request_id, refusal)]
        target = Allocation(place or (), job.decided.global_batch)
        moved = job.rescale(target, "somebody wants it elsewhere", self._ranking(view, clock.now_s), clock)
        return [*moved, *job.tell(request_id, clock)]

    def _fit(self, room: Room, clock: Clock) -> list[ShepherdEffect]:
        """Jobs that are to have another size than they have get one, if there is a place for it."""
        effects: list[ShepherdEffect] = []
        for job_id in list(self._misfits.jobs):
            job = self.jobs[job_id]
            if cannot_pause(job.record) is not None or not job.is_steady:
                continue
            view, ranks = self.view_of(job, clock), nearest_size(job.decided)
            place = place_elsewhere(room, view, ranks)
            if place is not None and not holds_off(job, Allocation(place), clock.now_s):
                room.release(view.shares, view.demand)
                room.take(place, view.demand)
                reason = f"it is to have {job.decided.spec.size_range} ranks"
                target = Allocation(place, job.decided.global_batch)
                effects += job.rescale(target, reason, self._ranking(view, clock.now_s), clock)
        return effects

    def _relieve(self, room: Room, clock: Clock) -> list[ShepherdEffect]:
        """Workers that had better train elsewhere go there."""
        effects: list[ShepherdEffect] = []
        if self._live:
            self._look_s = min(self._look_s, clock.now_s + RELIEF_S)
        drained = self._cluster.drained() if self._live else ()
        for job in [self.jobs[job_id] for job_id in self._live]:
            view = self.view_of(job, clock)
            found = relief(job.decided, job.gang, view, room, drained) if job.is_steady else None
            if found is not None and not holds_off(job, found.target, clock.now_s, found.leave):
                ranking = self._ranking(view, clock.now_s)
                effects += job.rescale(found.target, found.reason, ranking, clock, found.leave)
        return effects

    def _problem_of(self, decision: Decision, job: JobShepherd, room: Room, clock: Clock) -> str:
        if decision.change not in (*RESCALES, Change.REBATCH):
            return cannot_change(decision)
        if holds_off(job, decision.target, clock.now_s):
            return "those that joined it last, or members of it, have just failed"
        is_there = decision.taker in self.jobs or decision.taker in self._cluster.jobs
        return cannot_rescale(decision, self.view_of(job, clock), room, is_taker_there=is_there)

    def _say(self, decision: Decision, kind: str, text: str, reason: str = "") -> list[ShepherdEffect]:
        """Once, until there is something else to say of that job; that its reason has changed is no news."""
        if self._said.get(decision.job_id) == text:
            return []
        self._said[decision.job_id] = text
        text = f"{text}: {reason}" if reason else text
        return [Announce(kind, text, decision.job_id, self._me, {"change": decision.change.value})]

    def _go_on(self, room: Room, mine: Mapping[JobId, JobShepherd], clock: Clock) -> list[ShepherdEffect]:
        """Jobs that were ended to run elsewhere, or with another size, begin there."""
        effects: list[ShepherdEffect] = []
        for job in mine.values():
            place = job.take_next_place()
            if place.shares and take_if_there(room, place.shares, job.decided.spec.demand):
                ranking = self._ranking(self.view_of(job, clock), clock.now_s)
                effects += job.place(place.shares, ranking, clock, place.global_batch)
        return effects

    # Places kept for jobs that do not fit.

    def _claim_places(
        self, mine: Mapping[JobId, JobShepherd], nodes: Sequence[NodeView], clock: Clock
    ) -> list[ShepherdEffect]:
        """Where a job of ours needs victims by the plan, or is the first in line and has waited for long.

        Without an order nobody is first but in plans: a place kept from the job that they start would keep both out.
        """
        effects = self._follow_stops(mine, clock)
        if self._order is None or not any(
            job.is_starving(clock.now_s) and not job.claim.is_open for job in mine.values()
        ):
            return effects
        first = next((job for job in self._queue if job.job_id in mine or self._stands(job, clock.now_s)), None)
        job = mine.get(first.job_id) if first is not None else None
        if first is None or job is None or not job.is_starving(clock.now_s) or job.claim.is_open:
            return effects
        place = place_in(Room(nodes).emptied(), first)
        if place is None:
            return effects
        starts_s = expected_start_s(place, [view for view in self._views(clock) if view.shares], clock.now_s)
        return [*effects, *job.claim_place(place, {}, self._ranking(first, clock.now_s), starts_s, clock)]

    def _follow_stops(self, mine: Mapping[JobId, JobShepherd], clock: Clock) -> list[ShepherdEffect]:
        """Where the plan keeps a place for a job of ours, and others make room for it."""
        fresh = self._planning.fresh(clock.now_s)
        victims: dict[str, list[JobId]] = {}
        for decision in fresh:
            if decision.change is Change.STOP:
                victims.setdefault(decision.taker, []).append(decision.job_id)
        effects: list[ShepherdEffect] = []
        for decision in fresh if victims else ():
            job = mine.get(decision.job_id)
            wanted = victims.get(decision.job_id, [])
            is_claim = decision.change is Change.WAIT and bool(decision.target.shares and wanted)
            if not is_claim or job is None or job.claim.is_open or not job.is_waiting:
                continue
            shepherds = {victim: shepherd for victim in wanted if (shepherd := self._shepherd_of(victim)) is not None}
            if len(shepherds) == len(wanted):
                ranking = self._ranking(self.view_of(job, clock), clock.now_s)
                effects += job.claim_place(decision.target.shares, shepherds, ranking, 0.0, clock)
        return effects

    def _shepherd_of(self, job_id: JobId) -> NodeId | None:
        if job_id in self.jobs:
            return self._me
        job = self._foreign(job_id)
        return job.card.shepherd if job is not None else None

    def _remember_backoffs(self, waiting: Mapping[JobId, JobShepherd], now_s: float) -> None:
        untils_s = (
            until_s
            for job in waiting.values()
            for until_s in (job.pacing.may_try_after_s, *job.pacing.avoided.values())
        )
        waits = [until_s for until_s in untils_s if until_s > now_s]
        if self.window.is_full(now_s):
            waits = [self.window.opens_s]
        self._backoff_s = min(waits, default=float("inf"))
        self._look_s = min(self._look_s, self._backoff_s)

    def _ranking(self, view: JobView, now_s: float) -> Ranking:
        return Ranking(self.policy_id, self._rank_key(view, now_s))

    def validate(self) -> None:
        """Re-derive what is kept of the queue and of our jobs."""
        self._queue.validate()
        assert self._own.jobs <= self.jobs.keys()
        assert self._elastic.keys() == {job_id for job_id, job in self.jobs.items() if job.decided.spec.is_resizable}
        for job_id, job in self.jobs.items():
            assert job_id == job.job_id
            job.validate()

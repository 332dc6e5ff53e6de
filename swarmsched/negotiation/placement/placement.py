"""When one agent looks at the queue, and what it then does for the jobs that it shepherds.

The queue is looked at because something has happened to it: capacity came free, a job of ours waits, is steady or has
gone (`Shepherds.take_news`), a plan has come, or a time is over; never because somebody spoke.  Five then have wishes
for jobs of ours, each in its turn, and one carries them out (`wish`).  Under a policy that declares an order, jobs
start without a plan as long as everything ahead of them fits as well.  Whatever else a policy wants, it says in its
plan: a set of decisions from the planner's process, each followed as told, or, where that can be no more, not at all.

Shepherds on other agents see nearly the same queue.  They spread by a start delay that grows with the number of jobs
ahead, counted from the last release of capacity; whoever an owner invites need not wait for others (`invitation`).
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.commands import MigrateJob, Refused
from swarmsched.effects import Announce, ReplyToClient
from swarmsched.estimate import tells_more
from swarmsched.events import PeerMessageReceived
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import TaskEstimate
from swarmsched.negotiation.placement.asked import fitting, no_place, place_elsewhere
from swarmsched.negotiation.placement.head_of_line import HeadOfLine
from swarmsched.negotiation.placement.invitation import Inviter
from swarmsched.negotiation.placement.plan_follower import PlanFollower
from swarmsched.negotiation.placement.planning import PLAN_INTERVAL_S, Planning
from swarmsched.negotiation.placement.policy_in_force import PolicyInForce
from swarmsched.negotiation.placement.relief import relief
from swarmsched.negotiation.placement.shepherds import Shepherds
from swarmsched.negotiation.placement.wish import Carrier, Outcome, Wish, cannot_change
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.negotiation.shepherd_state import PRODUCTION, ShepherdParts
from swarmsched.negotiation.told import AnswerWished, NextPlaceTried, SteppedDown
from swarmsched.policies.placement import is_there
from swarmsched.policies.registry import kind_of
from swarmsched.policies.room import Room
from swarmsched.resources import Free, world_size
from swarmsched.view import Allocation, Elasticity, Plan, PolicySetting

START_DELAY_S = 0.05
START_DELAY_PER_RANK_S = 0.005
START_DELAY_S_MAX = 2.0
INVITED_S = 0.5
BETWEEN_PLACES_S = 0.1
"""A plan waits while a job of ours that takes several sizes is between two places: it would see it without any."""
FEW_JOBS, REST_PER_JOB_S = 64, 50e-6
"""A look at the queue costs some 8 us for each job: with many of them the next one waits, so that most time is left."""
RELIEF_S = 5.0  # between looks at the workers of jobs that change while they train


class Placement:
    """What one agent does for its jobs, and when."""

    def __init__(self, me: NodeId, cluster: Cluster, rng: random.Random, parts: ShepherdParts = PRODUCTION) -> None:
        self._me = me
        self._cluster = cluster
        self._planning = Planning()
        self.shepherds = Shepherds(me, cluster, rng, parts)
        self.policy = PolicyInForce(me, cluster, self.shepherds, self._planning)
        self._carrier = Carrier(self.shepherds, self.policy)
        self.plans = PlanFollower(me, self.shepherds, self.policy, self._planning, self._carrier)
        self.inviter = Inviter(me)
        self._line = HeadOfLine(cluster, self.shepherds, self.policy, rng)
        self._look_s = self._backoff_s = float("inf")
        self._rest_until_s = float("-inf")
        self._invited_until_s = float("-inf")

    @property
    def next_deadline_s(self) -> float:
        """Earliest of the jobs' own timers, the next look at the queue and the next invitations."""
        return min(self.look_due_s, self.inviter.next_deadline_s, self.shepherds.next_deadline_s)

    def set_policy(self, setting: PolicySetting, now_s: float) -> None:
        """Use another policy from now on; the caller has checked the setting."""
        if setting == self.policy.setting:
            return
        self.policy.use(setting, now_s)
        self.look_soon(now_s)

    def estimated(self, job: JobShepherd, sender: NodeId, told: TaskEstimate, clock: Clock) -> Sequence[ShepherdEffect]:
        """The ranks of a job of ours have reported: plans may change, if it told more than that it goes on."""
        before, record = job.estimate, job.record
        there = {
            "gpu": self._cluster.gpu_class(record.training, record.spec.demand),
            "network_mbit_s": self._cluster.network_mbit_s(record.training),
        }
        known = replace(told, estimate=replace(told.estimate, **there))
        effects = job.step(PeerMessageReceived(sender, known), clock)
        if tells_more(before, job.estimate):
            self.look_soon(clock.now_s)
        return [*effects, *self.plans.foretold.check(job.job_id, told.estimate)]

    def let_go(self, job_id: JobId) -> None:
        """Stop acting for a job: it has ended, or another shepherd has it."""
        self.shepherds.let_go(job_id)
        self.plans.forget(job_id)

    def step_down(self, job: JobShepherd, why: str, clock: Clock) -> list[ShepherdEffect]:
        """Stop acting for a live job, and say so: another shepherd has it, or none can act."""
        self.let_go(job.job_id)
        return [*job.step(SteppedDown(), clock), Announce("job.stepped_down", why, job.job_id, self._me)]

    # When to look.

    @property
    def look_due_s(self) -> float:
        """When the queue wants to be looked at."""
        return max(self._look_s, self._rest_until_s)

    def look_soon(self, now_s: float) -> None:
        """Something about the queue changed: look at the next opportunity."""
        self._planning.note_news()
        self._look_s = min(self._look_s, now_s)

    def capacity_released(self, clock: Clock) -> None:
        """Resources came free somewhere: look after a delay that spreads competing shepherds."""
        self.policy.catch_up(clock)
        self._planning.note_news()
        self._look_s = min(self._look_s, clock.now_s + self._start_delay_s())

    def _start_delay_s(self) -> float:
        ahead = [
            self.policy.queue.count_before(job_id)
            for job_id, job in self.shepherds.jobs.items()
            if job.decided.state is JobState.QUEUED
        ]
        if len(self.policy.queue) <= len(ahead):
            return 0.0  # nobody else waits
        first = min(ahead, default=0)
        return min(START_DELAY_S_MAX, START_DELAY_S + first * START_DELAY_PER_RANK_S)

    def invited(self, now_s: float) -> None:
        """An owner has something free, and jobs here are first in line for it as far as it knows."""
        if any(job.is_waiting for job in self.shepherds.jobs.values()):
            self._invited_until_s = now_s + INVITED_S
            self.look_soon(now_s)

    def make_room_for_others(self, clock: Clock) -> bool:
        """Cards have changed while jobs of ours could have another size: true if somebody has come to wait for it."""
        has_grown = self.policy.catch_up(clock)
        if has_grown:
            self.look_soon(clock.now_s)
        return has_grown

    def invitations(self, free: Free, clock: Clock) -> list[NodeId]:
        """Shepherds to tell now of what is free here."""
        if clock.now_s < self.inviter.next_deadline_s:
            return []
        self.policy.catch_up(clock)
        return self.inviter.due(self.policy.queue, free, self._cluster.can_act, clock.now_s)

    # Plans.

    def plan_computed(self, plan: Plan, clock: Clock) -> list[Announce]:
        """Take the planner's advice; an answer to an older question is ignored."""
        if not self._planning.computed(plan, clock.now_s):
            return []
        self._look_s = min(self._look_s, clock.now_s)
        return self.plans.explain(plan)

    def plan_failed(self, version: int, now_s: float) -> None:
        """No advice this time."""
        self._planning.failed(version, now_s)
        self._look_s = min(self._look_s, now_s + PLAN_INTERVAL_S)

    # A look at the queue.

    def look(self, clock: Clock) -> list[ShepherdEffect]:
        """Start what may start, and ask for a plan where its answer could concern a job here."""
        self._look_s = float("inf")
        if clock.now_s >= self._backoff_s:
            self._planning.note_news()  # what was out of the question for a job may be the place for it now
        self._rest_until_s = clock.now_s + REST_PER_JOB_S * max(0, len(self.shepherds.jobs) - FEW_JOBS)
        mine = {job_id: job for job_id, job in self.shepherds.jobs.items() if job.is_waiting}
        if not mine and not self.may_change_jobs and not self.shepherds.misfits and not self.shepherds.live:
            return []
        self.policy.catch_up(clock)
        is_idle_planner = self.may_change_jobs and bool(self.shepherds.elastic or len(self.policy.queue))
        nodes = self._cluster.nodes()
        room = self.shepherds.room(nodes)
        effects = self._carry_out(self._kept_places(mine, clock), room, clock)
        mine = {job_id: job for job_id, job in mine.items() if job.attempt is None}
        if any(room.fits(demand) for demand in dict.fromkeys(job.decided.spec.demand for job in mine.values())):
            is_invited = clock.now_s < self._invited_until_s
            effects += self._carry_out(self._line.starts(room, mine, clock, is_invited=is_invited), room, clock)
            effects += self.plans.follow_starts(room, mine, clock)
        effects += self.plans.give_up_places(mine, clock)
        effects += self.plans.follow_stops(mine, clock)
        effects += self._line.claim_place(mine, nodes, clock)
        effects += self._carry_out(self._asked(room, clock), room, clock)
        effects += self._relieve(room, clock)
        if self.shepherds.live:
            self._look_s = min(self._look_s, clock.now_s + RELIEF_S)
        effects += self.plans.follow_changes(room, clock)
        waiting = {job_id: job for job_id, job in mine.items() if job.is_waiting}
        self._remember_backoffs(waiting, clock.now_s)
        if any(self.shepherds.jobs[job_id].is_between_places for job_id in self.shepherds.elastic):
            self._look_s = min(self._look_s, clock.now_s + BETWEEN_PLACES_S)
        elif waiting or is_idle_planner:
            is_needed = is_idle_planner or self._line.may_be_moved(room, waiting, clock.now_s)
            asked, again_s = self._planning.ask(
                self.policy.setting,
                lambda version: self.policy.cluster_view(clock, version),
                [
                    job_id
                    for job_id, job in waiting.items()
                    if job.claim.is_open and is_there(room, job.claim.place, job.decided.spec.needs)
                ],
                is_needed=is_needed,
                now_s=clock.now_s,
            )
            effects += asked
            self._look_s = min(self._look_s, again_s)
        return effects

    def _carry_out(self, wishes: Iterable[Wish], room: Room, clock: Clock) -> list[ShepherdEffect]:
        """One after another, each with the room that those before it have left."""
        return [effect for wish in wishes for effect in self._carrier.carry_out(wish, room, clock).effects]

    def _kept_places(self, mine: Mapping[JobId, JobShepherd], clock: Clock) -> Iterator[Wish]:
        """Jobs that were ended to run elsewhere, or with another size, begin there."""
        for job_id, job in mine.items():
            if (place := job.next_place).shares:
                job.step(NextPlaceTried(), clock)
                yield Wish(job_id, place)

    def _asked(self, room: Room, clock: Clock) -> Iterator[Wish]:
        """Jobs that people gave another size than they have get one."""
        for job in [self.shepherds.jobs[job_id] for job_id in self.shepherds.misfits]:
            view = self.shepherds.view_of(job, clock)
            wish = fitting(job.decided, view, room) if cannot_change(job) is None else None
            if wish is not None:
                yield wish

    def _relieve(self, room: Room, clock: Clock) -> list[ShepherdEffect]:
        """Workers that had better train elsewhere go there."""
        effects: list[ShepherdEffect] = []
        drained = self._cluster.drained() if self.shepherds.live else ()
        for job in [self.shepherds.jobs[job_id] for job_id in self.shepherds.live]:
            view, spared = self.shepherds.view_of(job, clock), job.regrouping.spared(clock.now_s)
            wish = relief(job.decided, job.gang, view, room, drained, spared) if job.is_steady else None
            if wish is not None:
                effects += self._carrier.carry_out(wish, room, clock).effects
        return effects

    def migrate(self, request_id: int, job: JobShepherd, wish: MigrateJob, clock: Clock) -> list[ShepherdEffect]:
        """Have a job of ours go on with its size on other hosts, now or not at all."""
        refusal, record, view = cannot_change(job), job.decided, self.shepherds.view_of(job, clock)
        room = self.shepherds.room(self._cluster.nodes())
        place = None if refusal else place_elsewhere(room, view, world_size(record.training), wish.nodes, wish.avoid)
        outcome = Outcome()
        if place is not None and place != view.shares:
            target = Allocation(place, record.global_batch)
            outcome = self._carrier.carry_out(Wish(job.job_id, target, "somebody wants it elsewhere"), room, clock)
        if refusal is None and (place is None or outcome.problem):
            why = outcome.problem or no_place(record, wish)
            refusal = Refused("conflict", why, "name other nodes, or ask again later")
        if refusal is not None:
            return [ReplyToClient(request_id, refusal)]
        return [*outcome.effects, *job.step(AnswerWished(request_id), clock)]

    @property
    def may_change_jobs(self) -> bool:
        """Whether a plan could change a job of ours although none waits here."""
        kind = kind_of(self.policy.setting)
        if not kind.spares_rigid:
            return kind.plans_when_idle and bool(self.shepherds.jobs)
        sizes = self.shepherds.elastic if self.policy.setting.elasticity is not Elasticity.OFF else ()
        return bool(sizes or self.shepherds.stoppable)

    def _remember_backoffs(self, waiting: Mapping[JobId, JobShepherd], now_s: float) -> None:
        untils_s = (
            until_s
            for job in waiting.values()
            for until_s in (job.pacing.may_try_after_s, *job.pacing.avoided.values())
        )
        waits = [until_s for until_s in untils_s if until_s > now_s]
        if self.shepherds.window.is_full(now_s):
            waits = [self.shepherds.window.opens_s]
        self._backoff_s = min(waits, default=float("inf"))
        self._look_s = min(self._look_s, self._backoff_s)

    def validate(self) -> None:
        """Re-derive what is kept of the queue and of our jobs."""
        self.shepherds.validate()
        self.policy.queue.validate()
        self.plans.validate()

"""Replay on the exact view: one loop over arrivals, ends, ticks and reviews asks the policy, as a planner would.

No nodes, no gossip: what a policy is worth when everybody knows everything.  With a tick the policy is asked at its
multiples alone, as central schedulers are; without one at each arrival, end, failure and return of a node, when its
plan asked for it, and, while jobs that it may resize train and report, as often as agents ask at least.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import STATES, JobCard, tombstone
from swarmsched.errors import ConfigError
from swarmsched.estimate import Estimate, coarse, merged
from swarmsched.gossip.kinds import Kinds
from swarmsched.ids import JobId, NodeId
from swarmsched.models.kinds import GpuClasses
from swarmsched.negotiation.placement.planning import PLAN_REFRESH_S
from swarmsched.policies.base import amount
from swarmsched.policies.checked import is_wish
from swarmsched.replay.cluster import GPU, Fleet
from swarmsched.replay.job import ReplayJob, interfere
from swarmsched.replay.knowledge import Knowledge, with_work
from swarmsched.replay.results import RunLog
from swarmsched.replay.table import SECONDS_MOST
from swarmsched.resources import Share
from swarmsched.view import Change, ClusterView, Decision, EndedJob, JobView, Plan

HISTORY = 256
Planner = Callable[[ClusterView, float], Plan]
PLANS_MOST = 2_000_000
"""Enough for three years with a plan a minute."""
IDLE_PLANS = 100
"""After so many in which no job that runs would ever end, nothing will come of more."""
EPOCH_UTC_S = 1.0
"""Replays begin here: a card takes a submission at 0 for one that never was."""


@dataclass(frozen=True)
class Ticks:
    """Rules of a replay: seconds between plans (0: at each event), seconds that a change of hosts costs, when to give
    up. `interference` is the part of their speed that distributed jobs lose which share a node."""

    tick_s: float = 0.0
    pause_s: float = 30.0
    limit_s: float = SECONDS_MOST
    plans_most: int = PLANS_MOST
    interference: float = 0.0


def told_limit(limit_s: float) -> str:
    """Why a job has not ended that may have gone on."""
    return f"had not ended after {limit_s:,.0f} s, when the replay gave up"


class PerfectReplay:
    """One workload under one policy."""

    def __init__(
        self,
        jobs: Sequence[ReplayJob],
        cluster: Fleet,
        plan: Planner,
        knowledge: Knowledge,
        pacing: Ticks,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`plan` is what a planner process runs; `clock` gives seconds: how long it takes is told in the results."""
        self._to_come = sorted(jobs, key=lambda job: (job.submitted_s, job.job_id), reverse=True)
        self._live: list[ReplayJob] = []
        self._cluster = cluster
        self._plan = plan
        self._knowledge = knowledge
        self._pacing = pacing
        self._clock = clock
        self._history: list[EndedJob] = []
        self._told: dict[JobId, Estimate] = {}  # by the job itself
        self._kinds = Kinds()
        self._memory = b""
        self._review_s = inf
        self._now_s = 0.0
        self._idle_plans = 0
        self.observer = RunLog(cluster, len(jobs), min([job.submitted_s for job in jobs], default=0.0))

    def run(self) -> RunLog:
        """Until all jobs have ended, or nothing will ever happen again."""
        for _ in self.steps():
            continue
        return self.observer

    def steps(self) -> Iterator[float]:
        """The same by moments, in seconds: for those who want to look, or to stop."""
        gave_up = ""
        while self._live or self._to_come:
            decide_s = self._next_s()
            at_s = min(decide_s, self._cluster.next_event_s)
            gave_up = self._gives_up(at_s)
            if at_s == inf or gave_up:
                break
            self._advance(at_s)
            self._lose_nodes()
            yield at_s
            if at_s < decide_s and self._pacing.tick_s:
                continue
            self._review_s = inf
            if self._live:
                self._decide()
            if self._is_stuck():
                break
        left = sorted([*self._live, *self._to_come], key=lambda job: (job.submitted_s, job.job_id))
        self.observer.stopped(left, gave_up)

    def _gives_up(self, at_s: float) -> str:
        """Why the replay does not go on to then; empty while it does."""
        if self._pacing.limit_s < at_s < inf:
            return told_limit(self._pacing.limit_s)
        if len(self.observer.plan_s) >= self._pacing.plans_most:
            plans = f"{self._pacing.plans_most:,} plans, at {self._now_s:,.0f} s"
            return f"had not ended after {plans}, when the replay gave up"
        return ""

    def _is_stuck(self) -> bool:
        """Nothing will happen, and nothing runs that would end: these jobs never will.

        A policy that is asked again, or moves what stands, is given some more plans while there is room for a job.
        """
        if self._to_come or self._cluster.next_event_s < inf or any(job.ends_in_s() < inf for job in self._live):
            self._idle_plans = 0
            return False
        self._idle_plans += 1
        is_asked_again = self._pacing.tick_s or self._review_s < inf or any(job.shares for job in self._live)
        has_room = any(job.least <= self._cluster.usable for job in self._live)
        return not (is_asked_again and has_room) or self._idle_plans > IDLE_PLANS

    def _next_s(self) -> float:
        arrival_s = self._to_come[-1].submitted_s if self._to_come else inf
        tick_s = self._pacing.tick_s
        if tick_s:
            # An empty cluster is not asked; the first tick after the next arrival is.
            return (self._now_s // tick_s + 1.0) * tick_s if self._live else ceil(arrival_s / tick_s) * tick_s
        ends_s = min((self._now_s + job.ends_in_s() for job in self._live), default=inf)
        return max(self._now_s, min(arrival_s, ends_s, self._review_s))

    def _advance(self, to_s: float) -> None:
        for job in self._live:
            job.advance(self._now_s, to_s)
        self.observer.passed(self._live, to_s - self._now_s)
        self._now_s = to_s
        for job in self._live:
            if job.ended_s is not None:
                self._end(job)
        del self._history[:-HISTORY]
        self._live = [job for job in self._live if job.ended_s is None]
        interfere(self._live, self._pacing.interference, self._cluster)
        while self._to_come and self._to_come[-1].submitted_s <= to_s:
            self._live.append(self._to_come.pop())

    def _end(self, job: ReplayJob) -> None:
        card = self._card(job)
        if told := self._told.pop(job.job_id, None):
            card = replace(card, estimate=replace(told, done=self._knowledge.counted(job)))
            self._kinds.note(tombstone(card, has_completed=not job.has_failed))
        self._history.append(EndedJob(self._believed(job, card), not job.has_failed, job.ended_s or self._now_s))
        self.observer.ended(job)

    def _lose_nodes(self) -> None:
        """Jobs on nodes that have failed lose all of their hosts."""
        if self._cluster.next_event_s <= self._now_s:
            failed = self._cluster.pass_to(self._now_s)
            hit = [job for job in self._live if any(share.node in failed for share in job.shares)]
            self.observer.nodes_failed(len(failed), [job.lose_hosts(self._now_s) for job in hit])
            interfere(self._live, self._pacing.interference, self._cluster)
            self.observer.decided(self._live, self._now_s)

    def _decide(self) -> None:
        self._report()
        view = self._view()
        began_s = self._clock()
        plan = self._plan(view, self._now_s + EPOCH_UTC_S)
        self.observer.planned(self._clock() - began_s)
        if plan.fault:
            self.observer.policy_failed(plan.fault)
        self._memory = plan.memory
        self._follow(plan)
        self._review_s = self._now_s + min(plan.review_s or inf, self._news_in_s)
        self.observer.decided(self._live, self._now_s)

    @property
    def _news_in_s(self) -> float:
        """When a plan may come out differently by what jobs have reported alone; without a tick."""
        is_reporting = any(job.elastic and job.shares for job in self._live)
        return PLAN_REFRESH_S if is_reporting else inf

    def _follow(self, plan: Plan) -> None:
        """All at once, in the plan's order: what does not fit beside the rest keeps its place, or has none.

        Nobody takes time to leave here: a place that is kept for a job is its own at once.
        """
        by_id = {job.job_id: job for job in self._live}
        wanted = [(by_id[each.job_id], each) for each in plan.decisions if each.job_id in by_id and is_wish(each)]
        moving = {job.job_id for job, _ in wanted}
        for decision in plan.decisions:
            if decision.job_id in by_id:
                by_id[decision.job_id].told = decision.reason
        held = [job.shares for job in self._live if job.job_id not in moving and job.shares]
        for job, decision in wanted:
            before, shares = job.shares, self._granted(job, decision, held)
            check_stop(job, shares, plan.policy_id, self._now_s)
            held.append(shares)
            job.physics = job.physics.on(self._cluster.classes(shares))
            pause_s = self._pacing.pause_s if job.costs_s is None else job.costs_s
            job.allocate(shares, decision.target.global_batch, self._now_s, pause_s)
            if shares and set(shares) != set(before) and job.is_guessed:
                self.observer.guessed()
        interfere(self._live, self._pacing.interference, self._cluster)

    def _granted(self, job: ReplayJob, decision: Decision, held: Sequence[tuple[Share, ...]]) -> tuple[Share, ...]:
        if decision.change is Change.STOP:
            return ()
        is_taken = is_allowed(job, decision.target.ranks)
        if is_taken and not self._cluster.overbooked([*held, decision.target.shares]):
            return decision.target.shares
        self.observer.refused()
        why = "do not fit beside what others have" if is_taken else "it does not take"
        job.told = f"was planned {amount(decision.target.ranks, 'rank')}, which {why}"
        return () if self._cluster.overbooked([*held, job.shares]) else job.shares

    def _view(self) -> ClusterView:
        held = [job.shares for job in self._live]
        cards = [self._card(job) for job in self._live]
        jobs = [
            JobView(self._believed(*each), self._now_s + EPOCH_UTC_S) for each in zip(self._live, cards, strict=True)
        ]
        nodes = self._cluster.views(held)
        asked = GpuClasses(nodes).kinds(jobs)
        kinds = tuple([kind for each in asked if (kind := self._kinds.view(*each)) is not None])
        utc_s, pool = self._now_s + EPOCH_UTC_S, self._kinds.pool
        return ClusterView(0, nodes, tuple(jobs), tuple(self._history), self._memory, kinds, utc_s, pool)

    def _report(self) -> None:
        """Jobs that train tell it, as their shepherds and all agents would hear it."""
        for job in self._live:
            told = self._knowledge.reported(job) if job.shares and not job.pause_s else None
            if told is not None:
                told = replace(coarse(told), gpu="+".join(sorted(self._cluster.classes(job.shares))))
                self._told[job.job_id] = merged(self._told.get(job.job_id), told)
                self._kinds.note(self._card(job))

    def _believed(self, job: ReplayJob, card: JobCard) -> JobCard:
        believed = with_work(self._knowledge.believed(job, card.estimate), job.work)
        return card if believed is card.estimate else replace(card, estimate=believed)

    def _card(self, job: ReplayJob) -> JobCard:
        state, since_s = job.state, self._now_s - job.changed_s
        return JobCard(
            job_id=job.job_id,
            epoch=1,
            counter=1,
            shepherd=NodeId("replay"),
            state_index=STATES.index(state),
            phase_index=0,
            ranks=job.gpus,
            demand=GPU,
            submitted_utc_s=job.submitted_s + EPOCH_UTC_S,
            name=job.kind if job.terms.kind_by == "name" else "",
            user=job.user,
            priority=job.terms.priority,
            time_limit_s=job.terms.time_limit_s,
            attained_gpu_s=job.attained_gpu_s,
            attained_rate=job.ranks,
            queued_s=since_s if state is JobState.QUEUED else 0.0,
            running_s=since_s if state is JobState.RUNNING else 0.0,
            shares=job.shares,
            first_started_utc_s=0.0 if job.first_started_s is None else job.first_started_s + EPOCH_UTC_S,
            preemptions=min(job.preemptions, 255),
            elastic=job.offered,
            estimate=with_work(self._told.get(job.job_id), job.work),
            pause_s=job.told_pause_s,
            restartable=job.terms.restartable,
            has_checkpoint=job.has_checkpoint,
            deadline_utc_s=job.terms.deadline_s and job.terms.deadline_s + EPOCH_UTC_S,
            program=job.kind if job.terms.kind_by == "program" else "",
            mixed_gpus=self._cluster.mixes(job.least),
            kept_s=0 if job.resized_s is None else max(1, round(self._now_s - job.resized_s)),
            paused_s=round(job.paused_s),
        )


def check_stop(job: ReplayJob, shares: Sequence[Share], policy_id: str, now_s: float) -> None:
    """ConfigError where a policy takes GPUs of a running job that nobody may stop."""
    if job.shares and set(shares) != set(job.shares) and not job.may_be_stopped:
        problem = f"{policy_id} stopped job {job.label!r} at {now_s:,.0f} s, which cannot be stopped"
        raise ConfigError("policy", problem, "one that lets such jobs run, or --as restartable")


def is_allowed(job: ReplayJob, ranks: int) -> bool:
    """True for a world size that the job takes."""
    if job.elastic is None:
        return ranks == job.gpus
    return job.elastic.ranks_least <= ranks <= job.elastic.ranks_most

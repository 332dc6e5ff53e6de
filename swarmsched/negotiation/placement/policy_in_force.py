"""The policy in force at one agent: its order, if it declares one, and the jobs of the whole swarm as it sees them."""

from math import ceil

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import JobCard, RankKey
from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.ids import JobId, NodeId
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.pacing import BACKOFF_S_MAX
from swarmsched.negotiation.placement.planning import Planning
from swarmsched.negotiation.placement.queue import Queue
from swarmsched.negotiation.placement.shepherds import Shepherds
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.policies.registry import make_order, policy_id
from swarmsched.specification import NODES_LIMIT
from swarmsched.view import Change, ClusterView, JobView, PolicySetting


class PolicyInForce:
    """How jobs are ranked here: the swarm's queue as this agent knows it, ranks, and what plans are made from."""

    def __init__(self, me: NodeId, cluster: Cluster, shepherds: Shepherds, planning: Planning) -> None:
        self._me = me
        self._cluster = cluster
        self._shepherds = shepherds
        self._planning = planning
        self.setting = PolicySetting()
        self.policy_id = policy_id(self.setting)  # in canonical form
        self.order = make_order(self.setting)
        self.queue = Queue(self.order)

    def use(self, setting: PolicySetting, now_s: float) -> None:
        """Another one from now on; the caller has checked the setting."""
        self.setting, self.policy_id, self.order = setting, policy_id(setting), make_order(setting)
        self._planning.forget()
        self.queue.use(self.order, now_s)

    # The queue.

    def catch_up(self, clock: Clock) -> bool:
        """Bring the queue up to date; true when somebody has come to wait."""
        has_grown = False
        for job_id in dict.fromkeys((*self._cluster.take_job_news(), *self._shepherds.take_moved())):
            shepherd = self._shepherds.jobs.get(job_id)
            job = self._foreign(job_id) if shepherd is None else self._shepherds.view_of(shepherd, clock)
            if job is not None and job.state is JobState.QUEUED:
                has_grown |= self.queue.put(job, clock.now_s)
            else:
                self.queue.drop(job_id)
        self.queue.refresh(clock.now_s)
        return has_grown

    def _foreign(self, job_id: JobId) -> JobView | None:
        job = self._cluster.jobs.get(job_id)
        return job if job is not None and job.card.shepherd != self._me else None

    def shepherd_of(self, job_id: JobId) -> NodeId | None:
        """Who acts for a job; None where that is not known here."""
        if job_id in self._shepherds.jobs:
            return self._me
        job = self._foreign(job_id)
        return job.card.shepherd if job is not None else None

    def has_place(self, job_id: JobId) -> bool:
        """True for a job that holds something, as far as is known here."""
        shepherd, job = self._shepherds.jobs.get(job_id), self._foreign(job_id)
        return bool(shepherd.decided.shares) if shepherd is not None else job is not None and bool(job.shares)

    def stands(self, job: JobView, now_s: float) -> bool:
        """True for a job of another shepherd that can act and would, and of which we know where it may go."""
        is_foreign = job.job_id not in self._shepherds.jobs and self._cluster.can_act(job, now_s)
        return is_foreign and not job.card.hides_constraints and not job.rests_s(now_s)

    def is_known(self, job_id: JobId) -> bool:
        """True for a live job, ours or another's."""
        return job_id in self._shepherds.jobs or job_id in self._cluster.jobs

    @property
    def has_stoppable(self) -> bool:
        """True while jobs run that a plan may stop for others."""
        return bool(self._shepherds.stoppable) or any(
            job.shares and job.can_be_stopped for job in self._cluster.jobs.values()
        )

    def is_drained_for(self, job_id: JobId) -> bool:
        """True for a job for which by the last plan GPUs stay idle until it fits."""
        decision = self._planning.told.get(job_id)
        return decision is not None and decision.change is Change.WAIT and bool(decision.rank_key)

    # Ranks.

    def rank_key(self, job: JobView, now_s: float) -> RankKey:
        """By the declared order, else by the last plan; empty where that knows nothing of the job."""
        if self.order is not None:
            return self.order.rank_key(job, now_s)
        decision = self._planning.told.get(job.job_id)
        return decision.rank_key if decision is not None else ()

    def ranking(self, view: JobView, now_s: float) -> Ranking:
        """A job's rank, with the policy that it is by: what owners and other shepherds are told of it."""
        return Ranking(self.policy_id, self.rank_key(view, now_s))

    def card(self, job: JobShepherd, clock: Clock) -> JobCard:
        """A shepherded job's card, as it is told to others now.

        Where it is not placed for long is to be known: others would let it go first on a node where it does not go.
        """
        view, now_s = self._shepherds.view_of(job, clock), clock.now_s
        lasting = [*job.barred, *job.pacing.avoided_at(now_s + BACKOFF_S_MAX)] if view.avoided else ()
        return replace(
            view.card,
            exclude=tuple(dict.fromkeys([*view.card.exclude, *lasting]))[:NODES_LIMIT]
            if lasting
            else view.card.exclude,
            attained_gpu_s=view.attained_gpu_s(now_s),
            queued_s=view.queued_s(now_s),
            running_s=view.running_s(now_s),
            rests_s=ceil(view.rests_s(now_s)),
            rank_key=self.rank_key(view, now_s),
            policy_id=self.policy_id,
        )

    # What its plans are made from.

    def views(self, clock: Clock) -> list[JobView]:
        """All live jobs: ours as they are, others as told by shepherds that can act."""
        ours = self._shepherds.jobs
        own = [self._shepherds.view_of(job, clock) for job in ours.values() if not job.decided.is_ended]
        return [
            *own,
            *[
                job
                for job_id, job in self._cluster.jobs.items()
                if job_id not in ours and self._cluster.can_act(job, clock.now_s)
            ],
        ]

    def cluster_view(self, clock: Clock, version: int = 0) -> ClusterView:
        """Everything a policy may see."""
        nodes, jobs = tuple(self._cluster.nodes()), tuple(self.views(clock))
        kinds = self._cluster.kinds(jobs, nodes)
        history, memory = self._cluster.history, self._planning.memory
        pool = self._cluster.pool if any(job.card.elastic for job in jobs) else ()
        return ClusterView(version, nodes, jobs, history, memory, kinds, clock.utc_s, pool)

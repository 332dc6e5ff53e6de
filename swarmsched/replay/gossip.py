"""Replay through the whole protocol: a real node on each server, in virtual time, knows what it has heard.

Jobs are submitted as users do it; nodes gossip, plan, hold, commit and start them.  Their ranks are this replay's: they
train as measured, report every few seconds with noise, commit a checkpoint once they train, and end when they are done.
What a change costs is what the protocol takes, and the pause at each start.

Planners know what cards tell, and of jobs of one kind what all of their cards have told: each node keeps that itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from math import inf

from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CommitCheckpoint, Refused, SetSwarmSetting, SettingStored
from swarmsched.effects import Announce, Effect, SendPeer
from swarmsched.errors import ConfigError
from swarmsched.estimate import Estimate, coarse
from swarmsched.events import TaskEstimated
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import OwnerAnswer, Refusal
from swarmsched.node.config import Timings
from swarmsched.node.node import Node
from swarmsched.policies.registry import plan_anyway
from swarmsched.replay.cluster import GPU, Fleet
from swarmsched.replay.job import ReplayJob, interfere
from swarmsched.replay.knowledge import Knowledge, with_work
from swarmsched.replay.perfect import Ticks, check_stop, told_limit
from swarmsched.replay.results import RunLog
from swarmsched.resources import NodeResources, Share
from swarmsched.simulator.clients import UserJob, Users
from swarmsched.simulator.host import Host
from swarmsched.simulator.loop import Spins
from swarmsched.simulator.network import NetworkFaults
from swarmsched.simulator.swarm import SimulatedSwarm
from swarmsched.simulator.tasks import FOR_EVER_S, RankPlan, RunningTask, TaskChange
from swarmsched.task import TaskFailure, TaskOrder
from swarmsched.view import ClusterView, JobView, Plan, PolicySetting

REPORT_S = 5.0
"""Between two reports of a job that trains: as often as agents tell them on."""
START_S = 10.0
"""In which the swarm finds itself, before the replay begins."""
STEP_S = 60.0
STUCK_S = 1_800.0
PATIENCE_S = 60.0
"""Users whose job nobody has accepted by then submit it anew: too many of those who were to keep it may be down."""
MAX_RESTARTS = 1_000
GRACE_S = 5.0


@dataclass(eq=False)
class ReplayGang:
    """A job that the swarm knows, and its present tasks by host."""

    job: ReplayJob
    attempt: int = 0
    tasks: dict[NodeId, RunningTask] = field(default_factory=dict)
    has_trained: bool = False  # in this attempt
    has_saved: bool = False  # in this attempt
    last_shares: tuple[Share, ...] = ()
    changed_s: float = 0.0  # when its GPUs became others
    turn: int = 0  # grows with each change: what was planned for an earlier one is void

    @property
    def is_whole(self) -> bool:
        """All of its ranks live and none stands still."""
        running = [task for task in self.tasks.values() if not (task.is_over or task.is_frozen)]
        return bool(running) and sum(task.order.local_ranks for task in running) == running[0].order.world_size

    @property
    def is_lost(self) -> bool:
        """A part of it went with its machine."""
        return any(task.failure is TaskFailure.LOST for task in self.tasks.values())

    @property
    def holds(self) -> set[tuple[NodeId, int]]:
        """Nodes, by the names of the replay, with the ranks on each."""
        return {(share.node, share.ranks) for share in self.job.shares}

    @property
    def first(self) -> RunningTask:
        """The task that has rank 0."""
        return next(task for task in self.tasks.values() if not task.order.node_rank)


class GossipReplay:
    """One workload under one policy."""

    def __init__(
        self,
        jobs: Sequence[ReplayJob],
        cluster: Fleet,
        setting: PolicySetting,
        knowledge: Knowledge,
        pacing: Ticks,
        seed: int = 0,
        faults: NetworkFaults | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        timings: Timings = Timings(),  # noqa: B008  # frozen
    ) -> None:
        """`clock` gives seconds: plans take as long as it says."""
        self._jobs, self._cluster, self._setting = jobs, cluster, setting
        self._knowledge, self._pacing, self._clock = knowledge, pacing, clock
        self._swarm = SimulatedSwarm(
            len(cluster.gpus),
            0,
            seed,
            faults,
            behaviour=self._ranks_of,
            observers=[self],
            make_node=lambda config, restored, rng: Node(replaced(config, timings=timings), restored, rng),
            gpu_counts=_counts(cluster),
        )
        self._loop = self._swarm.loop
        self._names = dict(zip(self._swarm.hosts, cluster.gpus, strict=True))
        self._hosts = dict(zip(cluster.gpus, self._swarm.hosts.values(), strict=True))
        for name in {*cluster.models, *cluster.cores, *cluster.mbit_s}:
            self._hosts[name].has(_as_told(self._hosts[name].resources, cluster, name))
        for host in self._swarm.hosts.values():
            host.make_plan = self._planned
        self._gangs: dict[JobId, ReplayGang] = {}
        self._open: dict[str, ReplayJob] = {}  # not ended, by the name under which they were submitted
        self._ids: dict[str, JobId] = {}  # of those that have run, by the same
        self._advanced_s = self._begin_s = self._busy_s = 0.0
        self._commits = 0
        self.observer = RunLog(cluster, len(jobs), min([job.submitted_s for job in jobs], default=0.0))
        self._start()
        self._clients = Users(self._swarm)

    def run(self) -> RunLog:
        """Until all jobs have ended, or the time is over."""
        for _ in self.steps():
            continue
        return self.observer

    def steps(self) -> Iterator[float]:
        """The same by minutes of virtual time, in seconds."""
        gave_up = ""
        while len(self.observer.finished) < len(self._jobs) and self._now_s < self._pacing.limit_s:
            try:
                self._loop.run_for(STEP_S)
            except Spins as error:
                gave_up = f"had not ended when the replay gave up, at {self._now_s:,.0f} s: {error}"
                break
            yield self._now_s
            if self._is_stuck:
                break
        left = [job for job in self._jobs if job.ended_s is None]
        if self._now_s >= self._pacing.limit_s:
            gave_up = told_limit(self._pacing.limit_s)
        self.observer.stopped(left, gave_up)

    @property
    def _is_stuck(self) -> bool:
        """For long nothing has run that would end, and nothing will come: these jobs never end."""
        is_over = len(self._open) + len(self.observer.finished) == len(self._jobs)
        is_idle = self._cluster.next_event_s == inf and not any(job.ends_in_s() < inf for job in self._open.values())
        return is_over and is_idle and self._now_s > self._busy_s + STUCK_S

    def _start(self) -> None:
        """The nodes find one another and take the policy; then the replay's time begins."""
        self._swarm.start()
        self._swarm.run_for(START_S)
        stored = self._swarm.ask(next(iter(self._swarm.hosts)), SetSwarmSetting(self._setting))
        if not isinstance(stored, SettingStored):
            raise ConfigError("policy", f"was not taken: {stored}", "see the reason")
        self._swarm.run_for(START_S)
        self._begin_s = self._loop.now_s
        for number, job in enumerate(self._jobs):
            self._loop.post_at(self._begin_s + job.submitted_s, self._submit, number, job)
        for event in self._cluster.events:
            self._loop.post_at(self._begin_s + event.time_s, self._churn, event.time_s)

    @property
    def _now_s(self) -> float:
        return self._loop.now_s - self._begin_s

    @property
    def _utc_s(self) -> float:
        return next(iter(self._swarm.hosts.values())).clock.utc_s

    # Users, machines and ranks.

    def _submit(self, number: int, job: ReplayJob) -> None:
        self._advance()
        self._open[str(number)] = job
        elastic = job.elastic
        spec = JobSpec(
            (f"replay-{number}" if job.terms.kind_by == "none" else job.kind or "replay", str(number)),
            name=job.kind if job.terms.kind_by == "name" else "",
            user=job.user,
            demand=GPU,
            ranks=elastic.ranks_least if elastic else job.gpus,
            grace_s=GRACE_S,
            max_restarts=0 if job.terms.failure else MAX_RESTARTS,
            restartable=job.terms.restartable,
            priority=job.terms.priority,
            # The replay ends an attempt at its limit, and no shepherd is to be there before it.
            time_limit_s=job.terms.time_limit_s and job.terms.time_limit_s + GRACE_S,
            deadline_utc_s=job.terms.deadline_s and max(0.0, job.terms.deadline_s - self._now_s + self._utc_s),
            mixed_gpus=self._cluster.mixes(job.least),
            work=job.work,
        )
        if elastic:
            spec = replace(spec, ranks_most=elastic.ranks_most, batches=elastic.batches)
        self._ask_to_accept(number, spec)

    def _ask_to_accept(self, number: int, spec: JobSpec) -> None:
        """By any server, or whichever is there first; without a deadline that has passed meanwhile."""
        if spec.deadline_utc_s <= self._utc_s:
            spec = replace(spec, deadline_utc_s=0.0)
        there = [host.node_id for host in self._swarm.up or self._swarm.hosts.values()]
        submission = UserJob(spec, self._swarm.rng.choice(there))
        self._clients.submit(number, submission)
        self._loop.post_later(PATIENCE_S, self._insist, number, submission)

    def _insist(self, number: int, submission: UserJob) -> None:
        was_late = submission.refusal is not None and 0.0 < submission.spec.deadline_utc_s <= self._utc_s
        if submission.is_settled and not was_late:
            return
        if submission.ticket is None:  # nobody was there to give one: it is asked for all the time
            self._loop.post_later(PATIENCE_S, self._insist, number, submission)
            return
        submission.refuse(submission.refusal or Refused("unavailable", "too few holders answered"))
        self._ask_to_accept(number, submission.spec)

    def _churn(self, at_s: float) -> None:
        """Machines lose power, or have it again: all of one moment at once, which the clock here may round down."""
        were_down = set(self._cluster.down)
        failed = self._cluster.pass_to(at_s)
        if failed:
            self.observer.nodes_failed(len(failed), [])
            for each in failed:
                self._hosts[each].cut_power()
        for each in sorted((were_down | failed) - self._cluster.down):
            self._hosts[each].bring_up()
        self._decided()

    def _ranks_of(self, order: TaskOrder, rank: int) -> RankPlan:
        """They run until this replay ends them; those of a job that is done have nothing to do."""
        del rank
        return RankPlan(FOR_EVER_S if self._job_of(order) else 0.0)

    def _job_of(self, order: TaskOrder) -> ReplayJob | None:
        """None where it is done, or has run under the id of another submission: one is as good as the other."""
        name = order.spec.command[1]
        return self._open.get(name) if self._ids.setdefault(name, order.job_id) == order.job_id else None

    def task_changed(self, host: Host, task: RunningTask, change: TaskChange) -> None:
        """Training begins when all ranks of a gang live, and stands when one does not."""
        job = self._job_of(task.order)
        if job is None:
            return
        gang = self._gangs.setdefault(task.order.job_id, ReplayGang(job))
        if change is TaskChange.STARTED and task.order.attempt > gang.attempt:
            gang.attempt, gang.tasks = task.order.attempt, {}
            gang.has_trained = gang.has_saved = False
        if task.order.attempt == gang.attempt:
            gang.tasks[host.node_id] = task
            self._settle(gang)

    def _settle(self, gang: ReplayGang) -> None:
        """Let the job train as its ranks are now."""
        self._advance()
        job, before = gang.job, gang.holds
        if job.ended_s is not None:
            return
        gang.turn += 1
        if job.shares and not gang.is_whole:
            if gang.is_lost:
                self.observer.lost_hosts(job.lose_hosts(self._now_s))
            else:
                job.leave(self._now_s)
        elif gang.is_whole:
            self._train(gang)
        if gang.holds != before:
            gang.changed_s = self._now_s
        self._decided()

    def _train(self, gang: ReplayGang) -> None:
        job, first = gang.job, gang.first
        shares = tuple(Share(self._names[share.node], share.ranks) for share in first.order.shares)
        costs_s = self._pacing.pause_s if job.costs_s is None else job.costs_s
        pause_s = 0.0 if gang.has_trained else costs_s
        job.physics = job.physics.on(self._cluster.classes(shares))
        is_move = bool(gang.last_shares) and set(gang.last_shares) != set(shares)
        if is_move and sum(share.ranks for share in shares) == sum(s.ranks for s in gang.last_shares):
            job.note_migration()
        job.allocate(shares, first.global_batch, self._now_s, pause_s)
        if job.is_guessed:
            self.observer.guessed()
        gang.has_trained, gang.last_shares = True, shares
        self._await_end(gang)
        self._loop.post_later(job.pause_s, self._report, gang, gang.turn)

    def _await_end(self, gang: ReplayGang) -> None:
        if (ends_s := gang.job.ends_in_s()) < inf:
            self._loop.post_later(ends_s, self._end, gang, gang.turn)

    def _end(self, gang: ReplayGang, turn: int) -> None:
        if turn == gang.turn:
            self._advance()

    def _report(self, gang: ReplayGang, turn: int) -> None:
        """Rank 0 tells how it trains; the first time it has saved a checkpoint too, so that it may be moved."""
        job = gang.job
        if turn != gang.turn or job.ended_s is not None:
            return
        self._advance()
        task = gang.first
        host = self._swarm.hosts[task.order.node]
        if job.terms.commits and not gang.has_saved:
            gang.has_saved = True
            self._commit(host, task)
        told = self._knowledge.reported(job)
        # The answer says with which batch to go on, whether or not anything was told.
        host.post(TaskEstimated(*task.key.of_attempt, coarse(told or Estimate()), task.global_batch))
        self._loop.post_later(REPORT_S, self._report, gang, turn)

    def _commit(self, host: Host, task: RunningTask) -> None:
        self._commits += 1
        name = f"step-{self._commits}"
        checkpoint = Checkpoint(name, task.order.attempt, task.order.node, host.clock.utc_s)
        host.command(-FIRST_COMMIT - self._commits, CommitCheckpoint(task.order.job_id, task.order.attempt, checkpoint))

    # Time.

    def _advance(self) -> None:
        """All jobs have trained until now."""
        now_s, before_s = self._now_s, self._advanced_s
        if now_s <= before_s:
            return
        for job in self._open.values():
            job.advance(before_s, now_s)
        self.observer.passed(list(self._open.values()), now_s - before_s)
        self._advanced_s = now_s
        for gang in list(self._gangs.values()):
            if gang.job.ended_s is not None:
                self._ended(gang)

    def _ended(self, gang: ReplayGang) -> None:
        job = gang.job
        del self._open[gang.first.order.spec.command[1]]
        del self._gangs[gang.first.order.job_id]
        self.observer.ended(job)
        self._decided()
        for node, task in gang.tasks.items():
            self._swarm.hosts[node].tasks.finish(task, int(job.has_failed))

    def _decided(self) -> None:
        self._busy_s = self._now_s
        changed = interfere(list(self._open.values()), self._pacing.interference, self._cluster)
        for gang in [gang for gang in self._gangs.values() if gang.job in changed]:
            self._await_end(gang)
        self.observer.decided(list(self._open.values()), self._now_s)

    # Planners, and what is counted.

    def _planned(self, setting: PolicySetting, view: ClusterView, now_s: float) -> Plan:
        """As a planner process would."""
        began_s = self._clock()
        plan = plan_anyway(setting, replace(view, jobs=tuple([self._informed(job) for job in view.jobs])), now_s)
        took_s = self._clock() - began_s
        self.observer.planned(took_s)
        if plan.fault:
            self.observer.policy_failed(plan.fault)
        return replace(plan, elapsed_s=took_s)

    def _informed(self, view: JobView) -> JobView:
        gang = self._gangs.get(view.job_id)
        job = gang.job if gang else self._waiting(view.job_id)
        if job is None:
            return view
        if gang is not None:
            is_true = {(self._names[share.node], share.ranks) for share in view.shares} == gang.holds
            self.observer.seen(0.0 if is_true else self._now_s - gang.changed_s)
        known = with_work(self._knowledge.believed(job, view.card.estimate), job.work)
        return view if known is view.card.estimate else replace(view, card=replace(view.card, estimate=known))

    def _waiting(self, job_id: JobId) -> ReplayJob | None:
        """One that never ran."""
        submissions = self._clients.submissions.items()
        found = (number for number, each in submissions if each.job_id == job_id)
        return self._open.get(str(next(found, "")))

    def stepped(self, host: Host, event: object, effects: Sequence[Effect]) -> None:
        """Nothing to see here."""

    def performed(self, host: Host, effect: Effect) -> None:
        """Counts holds that were refused, and jobs that made room; ConfigError where nobody may stop one of these."""
        if type(effect) is SendPeer:
            message = effect.message
            if type(message) is OwnerAnswer and message.refusal in (Refusal.DOES_NOT_FIT, Refusal.CLAIMED):
                self.observer.refused()
        elif type(effect) is Announce and effect.kind == "job.preempted" and effect.job_id in self._gangs:
            job = self._gangs[effect.job_id].job
            job.preemptions += 1
            check_stop(job, (), self._setting.name, self._now_s)


FIRST_COMMIT = 10**9
"""Far from the numbers of clients and of a machine's own commands."""


def _counts(cluster: Fleet) -> Mapping[NodeId, int]:
    return {NodeId(f"n{index:03}"): gpus for index, gpus in enumerate(cluster.gpus.values())}


def _as_told(has: NodeResources, cluster: Fleet, name: NodeId) -> NodeResources:
    gpus = tuple([replace(gpu, model=cluster.models.get(name) or gpu.model) for gpu in has.gpus])
    cores = cluster.cores.get(name, has.cpu_count)
    return replace(has, gpus=gpus, cpu_count=cores, network_mbit_s=cluster.mbit_s.get(name, 0))

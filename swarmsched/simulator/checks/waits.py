"""Invariant "waits": once a job for all GPUs has waited for twice its bound, no plan of the default policy starts
another one first.

The bound is `patience` times as long as the job takes, which is no longer than its time limit.  Others that may have
waited as often for their length, or are of a higher priority, do not count; while one of those waits GPUs are kept for
it alone.
"""

from collections.abc import Sequence

from swarmsched.effects import ComputePlan, Effect
from swarmsched.events import Event, PlanComputed
from swarmsched.ids import NodeId
from swarmsched.models.lengths import LEAST_S
from swarmsched.policies.placement import place_in
from swarmsched.policies.registry import kind_of
from swarmsched.policies.room import Room
from swarmsched.policies.turns import DRAINS
from swarmsched.resources import world_size
from swarmsched.simulator.checks.checker import Checker
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.host import Host
from swarmsched.view import Change, JobView, Plan

INVARIANT = "waits"
SLACK = 1.1
"""A plan is made some moments after its view."""


class WaitChecker(Checker):
    """Compares a plan with the view that it is made of."""

    EVENTS = (PlanComputed,)
    EFFECTS = (ComputePlan,)

    def __init__(self) -> None:
        self._asked: dict[NodeId, tuple[ComputePlan, float]] = {}
        self.waited_count = 0  # plans for which it mattered

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Look at what a planner was asked, and what it answers."""
        if isinstance(event, PlanComputed):
            asked, now_s = self._asked.get(host.node_id, (None, 0.0))
            if asked and asked.view.version == event.plan.version and asked.setting.name == "swarm":
                self._check(asked, event.plan, now_s)
        for effect in effects:
            if isinstance(effect, ComputePlan):
                self._asked[host.node_id] = (effect, host.clock.now_s)

    def _check(self, asked: ComputePlan, plan: Plan, now_s: float) -> None:
        given = {each.name: each.default for each in kind_of(asked.setting).parameters} | dict(asked.setting.parameters)
        patience, pause_s = given["patience"], given["pause_s"]

        def waited(job: JobView, takes_s: float) -> float:
            return job.queued_s(now_s) / (takes_s + max(pause_s, job.card.pause_s)) / patience

        def surely_waited(job: JobView) -> float:
            return waited(job, max(LEAST_S, job.card.time_limit_s))

        nodes, gpus = asked.view.nodes, sum([node.capacity.gpu_count for node in asked.view.nodes])
        held = sum([world_size(job.shares) * job.demand.gpus for job in asked.view.jobs])
        if not all(node.is_available for node in nodes) or held + sum([node.free.gpu_count for node in nodes]) != gpus:
            return  # nobody knows whether all of them will ever be free
        due = [
            job
            for job in asked.view.jobs
            if job.card.time_limit_s
            and not job.card.elastic
            and job.card.ranks * job.demand.gpus == gpus > 0
            and surely_waited(job) > SLACK * DRAINS
            and place_in(Room(nodes).emptied(), job) is not None
        ]
        if not due:
            return
        self.waited_count += 1
        first = max(due, key=lambda job: (job.card.priority, surely_waited(job)))
        if any(not job.shares and job.card.priority > first.card.priority for job in asked.view.jobs):
            return
        before, jobs = surely_waited(first), {job.job_id: job for job in asked.view.jobs}
        for each in plan.decisions:
            job = jobs.get(each.job_id)
            if each.change is not Change.START or job is None or not job.demand.gpus or job in due:
                continue
            if job.card.priority <= first.card.priority and SLACK * waited(job, LEAST_S) < before:
                problem = f"a plan starts {job.job_id}, and {first.job_id} has waited for {first.queued_s(now_s):.0f} s"
                raise Violation(INVARIANT, problem)

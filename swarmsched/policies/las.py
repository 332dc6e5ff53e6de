"""Least attained service in two dimensions, GPUs x time (Tiresias, Gu et al., NSDI 2019, section 3.2).

Jobs sit in K classes by the GPU-seconds that they have had; lower classes run first, and within one those that ran
before precede those that never did, each by time.  A waiting job moves back to the first class once it has waited
`promote_knob` times as long as it ran (the paper's STARVELIMIT).  Since a policy has no memory the promotion lasts
while the job waits, and its counters are not reset as they are in the paper.

A waiting job may take the place of running ones of a higher class (or a lower priority), never of its own: within a
class the paper runs jobs to the end of their quantum too.  Beyond the paper a job is protected for a while after each
start, and from being stopped ever again; an operator's priority overrides the latter.  Both are parameters.
"""

from collections.abc import Mapping
from dataclasses import replace

from swarmsched.api import JobState
from swarmsched.ids import handle
from swarmsched.policies.base import (
    ParameterSpec,
    ahead_sentence,
    in_rank_order,
    inverse_priority,
    is_waiting,
    joined,
    keep,
    milliseconds,
)
from swarmsched.policies.placement import place_in
from swarmsched.policies.preemption import choose_victims
from swarmsched.policies.reason import shortage, start_reason
from swarmsched.policies.room import Room
from swarmsched.view import Action, ClusterView, JobView, Plan, PlanEntry, RankKey

NEVER_STARTED_MS = 2**52
"""Sorts jobs that never ran behind those that did; fits the 53 bits of a key's number."""

THRESHOLDS = ("threshold1_gpu_s", "threshold2_gpu_s", "threshold3_gpu_s")

PARAMETERS = (
    ParameterSpec(THRESHOLDS[0], "GPU-seconds after which a job leaves the first class", 3_250.0, 1.0, 1e12),
    ParameterSpec(THRESHOLDS[1], "GPU-seconds after which a job leaves the second class; 0: no third", 0.0, 0.0, 1e12),
    ParameterSpec(THRESHOLDS[2], "GPU-seconds after which a job leaves the third class; 0: no fourth", 0.0, 0.0, 1e12),
    ParameterSpec(
        "promote_knob",
        "a job that waited this many times as long as it ran is in the first class; 0: off",
        8.0,
        0.0,
        1_000.0,
    ),
    ParameterSpec("preempts", "1: jobs of lower classes take the place of running ones; 0: they wait", 1.0, 0.0, 1.0),
    ParameterSpec("minimum_run_s", "seconds after its start in which no job is preempted", 600.0, 0.0, 1e9),
    ParameterSpec("preemptions_max", "how often one job is preempted, except by a higher priority", 3.0, 0.0, 1e6),
)


class LeastAttainedService:
    """Tiresias' order without knowledge of durations; jobs that do not fit are passed by smaller ones."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._thresholds = sorted(parameters[name] for name in THRESHOLDS if parameters[name] > 0)
        self._promote_knob = parameters["promote_knob"]
        self._preempts = parameters["preempts"] > 0
        self._minimum_run_s = parameters["minimum_run_s"]
        self._preemptions_max = parameters["preemptions_max"]
        limits = ",".join(f"{threshold:g}" for threshold in self._thresholds)
        self._policy_id = f"las:{limits}:{self._promote_knob:g}"
        if self._preempts:
            self._policy_id += f":{self._minimum_run_s:g}:{self._preemptions_max:g}"

    @property
    def policy_id(self) -> str:
        """Name, thresholds and knob."""
        return self._policy_id

    def rank_key(self, job: JobView) -> RankKey:
        """Priority, class, first start, submit time (times in milliseconds)."""
        started = milliseconds(job.first_started_utc_s) if job.first_started_utc_s else NEVER_STARTED_MS
        return (inverse_priority(job), self.service_class(job), started, milliseconds(job.submitted_utc_s))

    def service_class(self, job: JobView) -> int:
        """0 for the class that runs first; grows with attained service, back to 0 when starving."""
        if is_waiting(job) and self._is_starving(job):
            return 0
        return sum(job.attained_gpu_s >= threshold for threshold in self._thresholds)

    def refuses_to_make_room(self, victim: JobView, taker_key: RankKey) -> str:
        """Only higher classes and lower priorities do, after their protected time, and not for ever."""
        if not self._preempts:
            return "preemption is switched off"
        if taker_key[:2] >= self.rank_key(victim)[:2]:
            return "it is in no higher class than the other"
        if victim.running_s < self._minimum_run_s:
            return f"it has run for {victim.running_s:.0f} s of the {self._minimum_run_s:.0f} s that it is protected"
        has_priority = taker_key[0] < inverse_priority(victim)
        if victim.preemptions >= self._preemptions_max and not has_priority:
            return f"it was preempted {victim.preemptions} times already"
        return ""

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """One pass through the classes: whatever fits starts; the first that does not may take the place of others."""
        room = Room(view.nodes)
        ahead: list[JobView] = []
        entries = []
        for key, job in in_rank_order(view.jobs, self.rank_key):
            if not is_waiting(job):
                entries.append(keep(job, key))
                continue
            entry = self._entry(job, key, room, ahead)
            if entry.action is Action.WAIT and len(ahead) == 1:
                entry = self._with_victims(entry, job, room, view)
            entries.append(entry)
        return Plan(view.version, self.policy_id, tuple(entries))

    def _with_victims(self, entry: PlanEntry, taker: JobView, room: Room, view: ClusterView) -> PlanEntry:
        """For one job a plan: whoever waits behind it gets its turn when this one has its place."""
        candidates = [
            job
            for _, job in reversed(in_rank_order(view.jobs, self.rank_key))
            if job.state is JobState.RUNNING and not self.refuses_to_make_room(job, entry.rank_key)
        ]
        found = choose_victims(taker, room, view.nodes, candidates) if candidates else None
        if found is None:
            return entry
        shares, victims = found
        names = ", ".join(handle(job.job_id) for job in victims)
        reason = joined(entry.reason, f"{names} will make room")
        return replace(entry, reason=reason, shares=shares, victims=tuple(job.job_id for job in victims))

    def _entry(self, job: JobView, key: RankKey, room: Room, ahead: list[JobView]) -> PlanEntry:
        shares = place_in(room, job)
        service = f"class {key[1] + 1} of {len(self._thresholds) + 1} with {job.attained_gpu_s:.0f} GPU-seconds"
        if shares is None:
            reason = joined(shortage(job, room), service, ahead_sentence(ahead))
            ahead.append(job)
            return PlanEntry(job.job_id, Action.WAIT, key, reason)
        room.take(shares, job.demand)
        return PlanEntry(job.job_id, Action.START, key, joined(start_reason(job, shares), service), shares)

    def _is_starving(self, job: JobView) -> bool:
        gpus = job.ranks * job.demand.gpus
        if not self._promote_knob or not gpus or not job.attained_gpu_s:
            return False
        ran_s = job.attained_gpu_s / gpus
        return job.queued_s >= self._promote_knob * ran_s

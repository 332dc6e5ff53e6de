"""Least attained service in two dimensions, GPUs x time (Tiresias, Gu et al., NSDI 2019, section 3.2), order only.

Jobs sit in K classes by the GPU-seconds that they have had; lower classes run first, and within one those that ran
before precede those that never did, each by time.  A waiting job moves back to the first class once it has waited
`promote_knob` times as long as it ran (the paper's STARVELIMIT).  Since a policy has no memory the promotion lasts
while the job waits, and its counters are not reset as they are in the paper.

Running jobs are never stopped in favour of others here; preemption comes later, and with it the paper's full gain.
"""

from collections.abc import Mapping

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
)


class LeastAttainedService:
    """Tiresias' order without knowledge of durations; jobs that do not fit are passed by smaller ones."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._thresholds = sorted(parameters[name] for name in THRESHOLDS if parameters[name] > 0)
        self._promote_knob = parameters["promote_knob"]
        limits = ",".join(f"{threshold:g}" for threshold in self._thresholds)
        self._policy_id = f"las:{limits}:{self._promote_knob:g}"

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

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """One pass through the classes: whatever fits starts, what does not is passed by."""
        room = Room(view.nodes)
        ahead: list[JobView] = []
        entries = []
        for key, job in in_rank_order(view.jobs, self.rank_key):
            entries.append(self._entry(job, key, room, ahead) if is_waiting(job) else keep(job, key))
        return Plan(view.version, self.policy_id, tuple(entries))

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

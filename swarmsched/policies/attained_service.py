"""The order of least attained service: which class a job is in, and who may take whose place (Tiresias, NSDI 2019).

Apart from the plans of `las`, since agents rank jobs themselves; the theory stands there.
"""

from collections.abc import Mapping

from swarmsched.card import RankKey
from swarmsched.policies.base import inverse_priority, is_waiting, milliseconds
from swarmsched.view import JobView

NEVER_STARTED_MS = 2**52
"""Sorts jobs that never ran behind those that did; fits the 53 bits of a key's number."""

THRESHOLDS = ("threshold1_gpu_s", "threshold2_gpu_s", "threshold3_gpu_s")


class AttainedServiceOrder:
    """Priority, then class of attained service; a waiting job may come back to the first class."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self.thresholds = sorted(parameters[name] for name in THRESHOLDS if parameters[name] > 0)
        self._promote_knob = parameters["promote_knob"]
        self._preempts = parameters["preempts"] > 0
        self._minimum_run_s = parameters["minimum_run_s"]
        self._preemptions_max = parameters["preemptions_max"]

    @property
    def is_timeless(self) -> bool:
        """Jobs change their class by running, and come back by waiting."""
        return False

    def rank_key(self, job: JobView, now_s: float) -> RankKey:
        """Priority, class, first start, submit time (times in milliseconds)."""
        first_utc_s = job.card.first_started_utc_s
        started = milliseconds(first_utc_s) if first_utc_s else NEVER_STARTED_MS
        return (inverse_priority(job), self.service_class(job, now_s), started, milliseconds(job.card.submitted_utc_s))

    def service_class(self, job: JobView, now_s: float) -> int:
        """0 for the class that runs first; grows with attained service, back to 0 when starving."""
        if is_waiting(job) and self._is_starving(job, now_s):
            return 0
        attained_gpu_s = job.attained_gpu_s(now_s)
        return sum([attained_gpu_s >= threshold for threshold in self.thresholds])

    def refuses_to_make_room(self, victim: JobView, taker_key: RankKey, now_s: float) -> str:
        """Only higher classes and lower priorities do, after their protected time, and not for ever."""
        if not self._preempts:
            return "preemption is switched off"
        if taker_key[:2] >= self.rank_key(victim, now_s)[:2]:
            return "it is in no higher class than the other"
        running_s = victim.running_s(now_s)
        if running_s < self._minimum_run_s:
            return f"it has run for {running_s:.0f} s of the {self._minimum_run_s:.0f} s that it is protected"
        has_priority = taker_key[0] < inverse_priority(victim)
        if victim.card.preemptions >= self._preemptions_max and not has_priority:
            return f"it was preempted {victim.card.preemptions} times already"
        return ""

    def _is_starving(self, job: JobView, now_s: float) -> bool:
        gpus = job.ranks * job.demand.gpus
        attained_gpu_s = job.attained_gpu_s(now_s)
        if not self._promote_knob or not gpus or not attained_gpu_s:
            return False
        return job.queued_s(now_s) >= self._promote_knob * attained_gpu_s / gpus

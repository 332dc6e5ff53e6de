"""When a plan is asked for, and what the last one told.

Planning costs a process some time and the swarm the same as often as it has agents, so it is asked for where its answer
could concern a job here: at most once a second, and in twenty times the last plan's time, up to ten seconds: one plan
that was slow must not keep GPUs idle for minutes.
"""

from collections.abc import Callable, Collection

from swarmsched.effects import ComputePlan
from swarmsched.ids import JobId
from swarmsched.view import ClusterView, Decision, Plan, PolicySetting

PLAN_INTERVAL_S = 1.0
PLAN_INTERVAL_PER_PLAN_TIME = 20.0
PLAN_INTERVAL_S_MAX = 10.0
PLAN_REFRESH_S = 20.0
PLAN_AGE_S_MAX = 5.0


class Planning:
    """One agent's dialogue with its planner."""

    def __init__(self) -> None:
        self.told: dict[JobId, Decision] = {}  # the last plan's word on each live job
        self._told_before: dict[JobId, Decision] = {}  # that of the plan before it
        self.open: list[Decision] = []  # of the last plan, in its order: not taken yet, nor out of date
        self.advice: tuple[Decision, ...] = ()  # of the last plan, on running jobs: for people
        self.memory = b""  # of the policy in force
        self._cleared: Collection[JobId] = ()  # told once
        self._asked_cleared: Collection[JobId] = ()
        self._version = 0
        self._is_pending = False
        self._seen_s = float("-inf")
        self._next_s = float("-inf")
        self._review_s = float("inf")  # when time alone changes the last plan
        self.has_news = True  # since a plan was last asked for

    def note_news(self) -> None:
        """The last plan rests on what is no more."""
        self.has_news = True

    def take_cleared(self) -> Collection[JobId]:
        """Jobs of which the last plan knew that all that is kept for them is free; told once."""
        cleared, self._cleared = self._cleared, ()
        return cleared

    def forget(self) -> None:
        """Another policy is in force: what the former one told counts no more."""
        self.told, self._told_before, self.open, self.advice, self.memory = {}, {}, [], (), b""
        self._cleared = ()
        self._seen_s, self._review_s = float("-inf"), float("inf")
        self._version += 1  # an answer under way is of the former policy
        self._is_pending, self.has_news = False, True

    def computed(self, plan: Plan, now_s: float) -> bool:
        """Take the planner's advice; false for an answer to an older question."""
        if plan.version != self._version or not self._is_pending:
            return False
        self._is_pending = False
        pause_s = min(PLAN_INTERVAL_PER_PLAN_TIME * plan.elapsed_s, PLAN_INTERVAL_S_MAX)
        self._next_s = now_s + max(PLAN_INTERVAL_S, pause_s)
        self._told_before, self.told = self.told, {decision.job_id: decision for decision in plan.decisions}
        self.open, self.memory, self._seen_s = list(plan.decisions), plan.memory, now_s
        self._review_s = now_s + plan.review_s if plan.review_s else float("inf")
        self.advice, self._cleared = plan.advice, self._asked_cleared
        return True

    def failed(self, version: int, now_s: float) -> None:
        """No advice this time; asked again after the usual interval."""
        if version == self._version and self._is_pending:
            self._is_pending, self.has_news = False, True
            self._next_s = now_s + PLAN_INTERVAL_S

    def fresh(self, now_s: float) -> list[Decision]:
        """What may still be followed."""
        if now_s > self._seen_s + PLAN_AGE_S_MAX:
            self.open = []
        return self.open

    def is_confirmed(self, decision: Decision) -> bool:
        """Whether the plan before the last one wanted the same of that job.

        One plan alone may rest on a moment in which another job was between two places, or its news under way.
        """
        before = self._told_before.get(decision.job_id)
        return before is not None and before.change is decision.change

    def ask(
        self,
        setting: PolicySetting,
        view: Callable[[int], ClusterView],
        cleared: Collection[JobId],
        *,
        is_needed: bool,
        now_s: float,
    ) -> tuple[list[ComputePlan], float]:
        """The question, if it is time for one, and when to look again.

        `cleared`: jobs for which all that is kept is free.  `is_needed`: the answer could move a job here.  Otherwise a
        plan only renews the reasons that people see.
        """
        is_due = is_needed and (self.has_news or now_s >= self._review_s)
        if self._is_pending or not (is_due or now_s >= self._seen_s + PLAN_REFRESH_S):
            later_s = max(now_s, self._seen_s) + PLAN_REFRESH_S
            return [], min(later_s, self._review_s) if is_needed and self._review_s > now_s else later_s
        if now_s < self._next_s:
            return [], self._next_s
        self._version += 1
        self._is_pending, self.has_news, self._asked_cleared = True, False, cleared
        self._next_s = now_s + PLAN_INTERVAL_S
        return [ComputePlan(setting, view(self._version))], now_s + PLAN_REFRESH_S

"""What plans want of jobs of ours: done as told where it still can be, and otherwise not at all."""

from collections.abc import Mapping

from swarmsched.api import JobState
from swarmsched.clock import Clock
from swarmsched.effects import Announce
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import PreemptRequest
from swarmsched.negotiation.placement.foretold import Foretold
from swarmsched.negotiation.placement.planning import Planning
from swarmsched.negotiation.placement.policy_in_force import PolicyInForce
from swarmsched.negotiation.placement.shepherds import Shepherds
from swarmsched.negotiation.placement.wish import Carrier, Obstacle, Outcome, Wish
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.negotiation.told import ClaimUnwanted, ClaimWished, VictimsLeft
from swarmsched.policies.base import GIVING, amount, is_claim
from swarmsched.policies.registry import kind_of
from swarmsched.policies.room import Room
from swarmsched.view import Change, Decision, JobView, Plan

RESCALES = (Change.GROW, Change.SHRINK, Change.MOVE)


class PlanFollower:
    """Carries out one agent's plans."""

    def __init__(
        self, me: NodeId, shepherds: Shepherds, policy: PolicyInForce, planning: Planning, carrier: Carrier
    ) -> None:
        self._me = me
        self._shepherds = shepherds
        self._policy = policy
        self._planning = planning
        self._carrier = carrier
        self._said: dict[JobId, str] = {}  # of wishes of a plan that are not carried out, as last announced
        self._fault = ""  # of the policy, as last announced
        self.foretold = Foretold()

    @property
    def told(self) -> Mapping[JobId, Decision]:
        """What the last plan said of each live job, and its advice where it had any."""
        told, advice = self._planning.told, self._planning.advice
        return {**told, **{each.job_id: each for each in advice}} if advice else told

    def explain(self, plan: Plan) -> list[Announce]:
        """Tell jobs why they wait by a plan that has just come, and people once that the policy failed."""
        for job_id, job in self._shepherds.jobs.items():
            decision = self._planning.told.get(job_id)
            if decision is not None and decision.change is Change.WAIT:
                job.explain(decision.reason)
        is_news, self._fault = plan.fault not in ("", self._fault), plan.fault
        text = f"{plan.fault}; backfill plans in its place"
        return [Announce("plan.fell_back", text, node=self._me)] if is_news else []

    def forget(self, job_id: JobId) -> None:
        """The job is not shepherded here any more."""
        self._said.pop(job_id, None)
        self.foretold.forget(job_id)

    def follow_starts(self, room: Room, mine: Mapping[JobId, JobShepherd], clock: Clock) -> list[ShepherdEffect]:
        """Jobs that the plan starts, where it says; each decision is used once, and only while it holds."""
        effects: list[ShepherdEffect] = []
        for decision in self._fresh(clock, Change.START):
            job = mine.get(decision.job_id)
            if job is None or job.pacing.may_try_after_s > clock.now_s or self._shepherds.window.is_full(clock.now_s):
                continue
            outcome = self._follow(decision, room, clock)
            effects += outcome.effects
            if outcome.obstacle in (Obstacle.JOB, Obstacle.PLACE):
                job.explain(f"{decision.reason}; {outcome.problem}")
                self._planning.note_news()
            if outcome.problem:
                self._planning.open.remove(decision)
        return effects

    def _fresh(self, clock: Clock, *kinds: Change) -> list[Decision]:
        return [each for each in self._planning.fresh(clock.now_s) if each.change in kinds]

    def _follow(self, decision: Decision, room: Room, clock: Clock) -> Outcome:
        """As told, and once."""
        outcome = self._carrier.carry_out(Wish(decision.job_id, decision.target, decision.reason), room, clock)
        if outcome.obstacle is Obstacle.NONE:
            self._planning.open.remove(decision)
            self.foretold.note(decision)
        return outcome

    def give_up_places(self, mine: Mapping[JobId, JobShepherd], clock: Clock) -> list[ShepherdEffect]:
        """Places that are kept, and free by now, for jobs that the last plan does not start although it knew that.

        Others come first by the policy, which need them, or nobody could use them: the job, which would wait for its
        turn, and those that its claim refuses would wait for one another.
        """
        effects: list[ShepherdEffect] = []
        for job_id in self._planning.take_cleared():
            job, told = mine.get(job_id), self._planning.told.get(job_id)
            if job is not None and (told is None or told.change is not Change.START):
                why = told.reason if told is not None else "it rests"
                told_why = f"its place is free, and the plan does not start it: {why}"
                effects += job.step(ClaimUnwanted(told_why), clock)
        for job in mine.values():
            victims = job.claim.victims
            if victims and not any(self._policy.has_place(victim) for victim in victims):
                effects += job.step(VictimsLeft(), clock)
        return effects

    def follow_changes(self, room: Room, clock: Clock) -> list[ShepherdEffect]:
        """What the plan wants of running jobs of ours: done where it can be, otherwise said once.

        Another size or place is a pause for the job: two plans must agree on it.
        """
        effects: list[ShepherdEffect] = []
        has_others_leave = any(each.change in GIVING for each in self._planning.told.values())
        for decision in self._fresh(clock, *RESCALES, Change.REBATCH, Change.STOP):
            job = self._shepherds.jobs.get(decision.job_id)
            if job is None:
                continue
            if decision.change in RESCALES and not self._planning.is_confirmed(decision):
                self._planning.note_news()
                continue
            problem = self._problem_of(decision, self._shepherds.view_of(job, clock))
            if not problem and decision.change is not Change.STOP:
                outcome = self._follow(decision, room, clock)
                effects += outcome.effects
                if outcome.obstacle is Obstacle.TIME:
                    self._planning.note_news()
                if outcome.obstacle is Obstacle.JOB or (outcome.obstacle is Obstacle.PLACE and not has_others_leave):
                    problem = outcome.problem  # else its place may be theirs still; who does not leave says why
            if problem:
                effects += self._say(decision, "plan.ignored", f"{decision.change.value} ignored: {problem}")
        for decision in self._planning.advice:
            if decision.job_id in self._shepherds.jobs:
                size = f" to {amount(decision.target.ranks, 'rank')}" if decision.target.ranks else ""
                wish = f"would {decision.change.value}{size} with elasticity=on"
                effects += self._say(decision, "plan.advised", wish, decision.reason)
        return effects

    def _problem_of(self, decision: Decision, job: JobView) -> str:
        """Why no plan may do that, whatever the job could take."""
        if decision.change is Change.STOP:
            return "" if decision.taker else "jobs make room for a named job only"
        if job.state is not JobState.RUNNING:
            return f"it is {job.state.value}"
        if job.card.elastic is None:
            return "it has not said which sizes it takes, or its present attempt has no checkpoint"
        if decision.change is Change.REBATCH and decision.target.shares != job.shares:
            return "its hosts are other ones than in the plan"
        if decision.change in GIVING and not self._policy.is_known(JobId(decision.taker)):
            return "GPUs are given up to a named job only"
        return ""

    def _say(self, decision: Decision, kind: str, text: str, reason: str = "") -> list[ShepherdEffect]:
        """Once, until there is something else to say of that job; that its reason has changed is no news."""
        if self._said.get(decision.job_id) == text:
            return []
        self._said[decision.job_id] = text
        text = f"{text}: {reason}" if reason else text
        return [Announce(kind, text, decision.job_id, self._me, {"change": decision.change.value})]

    def follow_stops(self, mine: Mapping[JobId, JobShepherd], clock: Clock) -> list[ShepherdEffect]:
        """Where the plan keeps a place for a job of ours, and others make room for it; a plan says so once.

        A victim's shepherd that has yet to hear of this job says no, and does until the next plan.
        """
        fresh = list(self._planning.fresh(clock.now_s))
        victims: dict[str, list[JobId]] = {}
        for decision in fresh:
            if decision.change is Change.STOP:
                victims.setdefault(decision.taker, []).append(decision.job_id)
        effects: list[ShepherdEffect] = []
        for decision in fresh if victims else ():
            job = mine.get(decision.job_id)
            wanted = victims.get(decision.job_id, [])
            is_due = bool(wanted) and is_claim(decision)
            if not is_due or job is None or job.claim.is_open or not job.is_waiting:
                continue
            acting = {victim: self._policy.shepherd_of(victim) for victim in wanted}
            shepherds = {victim: shepherd for victim, shepherd in acting.items() if shepherd is not None}
            if len(shepherds) == len(wanted):
                ranking = self._policy.ranking(self._shepherds.view_of(job, clock), clock.now_s)
                self._planning.open.remove(decision)
                self._planning.note_news()
                effects += job.step(ClaimWished(decision.target.shares, shepherds, ranking, 0.0), clock)
        return effects

    def refuses_to_make_room(self, request: PreemptRequest, clock: Clock) -> str:
        """Why a job of ours need not stop for another, by the policy and our own fresh figures."""
        job = self._shepherds.jobs[request.job_id]
        if request.policy_id != self._policy.policy_id:
            return f"the policy here is {self._policy.policy_id}, not {request.policy_id}"
        view, spares = self._shepherds.view_of(job, clock), kind_of(self._policy.setting).spares_rigid
        if self._policy.order is not None and not spares:
            return self._policy.order.refuses_to_make_room(view, request.rank_key, clock.now_s)
        if spares and not view.can_be_stopped:
            return "it has no checkpoint since it started, and its people have not said that it may begin again"
        decision = self._planning.told.get(request.job_id)
        is_told = decision is not None and decision.change is Change.STOP and decision.taker == request.taker
        return "" if is_told else "no plan here gives its place to that job"

    def validate(self) -> None:
        """Nothing is kept of jobs that are not ours."""
        assert self._said.keys() <= self._shepherds.jobs.keys()
        assert self.foretold.jobs <= self._shepherds.jobs.keys()

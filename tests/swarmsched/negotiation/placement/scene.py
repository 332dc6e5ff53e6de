"""All shepherds of one agent for tests of placement; owners, the planner and all others are played by the test."""

import random
from typing import Any

from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState
from swarmsched.card import card_of
from swarmsched.checkpoint import Checkpoint
from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.effects import ComputePlan, SendPeer
from swarmsched.estimate import BatchRange
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import HoldRequest
from swarmsched.negotiation.placement.placement import Placement
from swarmsched.negotiation.told import FirstWritten, TakenUp
from swarmsched.resources import Demand, Share
from swarmsched.view import Allocation, Change, Decision, EndedJob, JobView, Plan, PolicySetting
from tests.swarmsched.building import make_node, make_record

ME, A, B = NodeId("boss"), NodeId("a"), NodeId("b")
UTC = 1_700_000_000.0


def job_id(letter):
    return JobId("01hzzzzzzzabcdefghjkmnpqr" + letter)


def start(letter, *places, batch=0):
    target = Allocation(tuple(Share(name, ranks) for name, ranks in places), batch)
    return Decision(job_id(letter), Change.START, "fits", target)


def node(name, gpus, total=0, is_available=True):
    return make_node(name, gpus, total or gpus, is_available=is_available)


def record_of(letter, ranks, utc_s, shepherd=ME):
    spec = JobSpec(("true",), ranks=ranks, demand=Demand(gpus=1))
    return make_record(shepherd, job_id=job_id(letter), spec=spec, submitted_utc_s=utc_s, shepherd_generation=7)


def foreign(letter, ranks, utc_s, number=0, **changes):
    card = card_of(record_of(letter, ranks, utc_s, shepherd=B))
    return JobView(replace(card, job_id=job_id(letter)[:20] + f"{number:05}" + letter, **changes))


class Others(Cluster):
    """What the test lets everybody else be."""

    jobs: Any = None

    def __init__(self, nodes, jobs):
        self.there, self.jobs, self.news, self.dead = list(nodes), {}, [], set()
        self.priors, self.drained_nodes = {}, set()
        self.show(*jobs)

    def show(self, *jobs):
        self.news += [*self.jobs, *(job.job_id for job in jobs)]
        self.jobs = {job.job_id: job for job in jobs}

    history: tuple[EndedJob, ...] = ()
    pool = ()

    def prior(self, spec):
        return self.priors.get((spec.user, spec.name))

    def gpu_class(self, shares, demand):
        return ""

    def kinds(self, jobs, nodes):
        return ()

    def take_job_news(self):
        news, self.news = self.news, []
        return news

    def can_act(self, job, now_s):
        return job.card.shepherd not in self.dead

    def nodes(self):
        return self.there

    def drained(self):
        return self.drained_nodes

    def could_take(self, spec, without, *, once_well):
        return any(node.node not in without for node in self.there)


class Scene:
    """One agent's jobs; the test is owners, planner and all others."""

    def __init__(self, nodes=(), foreign_jobs=(), policy="fifo"):
        self.cluster = Others(nodes, foreign_jobs)
        self.placement = Placement(ME, self.cluster, random.Random(1))
        self.placement.set_policy(PolicySetting(policy), 0.0)
        self.now_s = 10.0
        self.plans, self.holds = [], []

    @property
    def clock(self):
        return Clock(self.now_s, UTC + self.now_s)

    def submit(self, letter, ranks, utc_s):
        self.placement.shepherds.add(record_of(letter, ranks, utc_s)).step(FirstWritten(), self.clock)
        self.placement.look_soon(self.now_s)

    def look(self):
        """Evaluate; the letters of the jobs that asked for holds."""
        effects = self.placement.look(self.clock)
        self.plans += [effect for effect in effects if isinstance(effect, ComputePlan)]
        holds = [e.message for e in effects if isinstance(e, SendPeer) and isinstance(e.message, HoldRequest)]
        self.holds += holds
        return [letter for letter in "abcdefg" if any(hold.job_id == job_id(letter) for hold in holds)]

    def answer_plan(self, *decisions, elapsed_s=0.01, memory=b"", advice=(), review_s=0.0):
        version = self.plans[-1].view.version
        policy_id = self.placement.policy.policy_id
        plan = Plan(tuple(decisions), memory, version, policy_id, elapsed_s, review_s, advice)
        self.placement.plan_computed(plan, self.clock)


def running_elastic(scene, *, saved=True):
    """A job of 2 to 6 ranks, and batches of 64 to 256, that runs on two GPUs of `a`; its present attempt has a
    checkpoint, or none."""
    record = record_of("a", 2, UTC)
    checkpoint = Checkpoint("step-1", attempt=1 if saved else 0, node=A)
    running = {"state": JobState.RUNNING, "attempt": 1, "shares": (Share(A, 2),), "started_utc_s": UTC + 1}
    spec = replace(record.spec, ranks_most=6, batches=BatchRange(64, 256, 1, 64))
    job = scene.placement.shepherds.add(replace(record, spec=spec, checkpoint=checkpoint, **running))
    job.step(TakenUp(()), scene.clock)
    scene.submit("b", 9, UTC + 1)  # so that somebody waits, and plans are asked for
    scene.look()
    return job


def change(kind, *shares, taker="", batch=0):
    target = Allocation(tuple(Share(*share) for share in shares), batch)
    return Decision(job_id("a"), kind, "pays", target, taker=taker)


def planned_past(*, ranks=1):
    """The plan starts job b, with one rank, past job a, which is first in line and fits nowhere."""
    scene = Scene([node(A, 2)], policy="backfill")
    scene.submit("a", 3, UTC)
    scene.submit("b", ranks, UTC + 1)
    scene.look()
    scene.answer_plan(start("b", (A, 1)))
    return scene

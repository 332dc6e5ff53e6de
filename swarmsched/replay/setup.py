"""From the rows of a trace to a replay: which jobs may change, what is known of them, and on which servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf

from swarmsched.errors import ConfigError
from swarmsched.estimate import BatchRange, Elastic
from swarmsched.gossip.membership_config import PROBE_PERIOD_MAX_S
from swarmsched.ids import JobId
from swarmsched.node.config import Timings
from swarmsched.policies.registry import check_setting, compute_plan, kind_of
from swarmsched.replay.cluster import Cluster
from swarmsched.replay.gossip import GossipReplay
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import Knowledge, NothingKnown, PerfectKnowledge
from swarmsched.replay.learning import LearnedKnowledge
from swarmsched.replay.perfect import Pacing, PerfectReplay
from swarmsched.replay.physics import Physics, ProfiledPhysics, RigidPhysics
from swarmsched.replay.profiles import Profile
from swarmsched.replay.rates import Rates, rated
from swarmsched.replay.workload import TraceJob
from swarmsched.simulator.network import NetworkFaults
from swarmsched.view import PolicySetting

KNOWLEDGE = {
    "perfect": "profiles and lengths as they are: isolates the policy",
    "declared": "models learned from noisy reports, users say how long they train",
    "learned": "models learned from noisy reports, lengths from other jobs of the same kind",
    "nothing": "no reports at all",
}


VIEWS = ("perfect", "gossip")
MEMBERSHIPS = {"swim": Timings(), "ideal": Timings(probe_period_s=PROBE_PERIOD_MAX_S)}
"""With `ideal` members find one another and are never probed again: where no machine fails, a third of all steps."""
CHECKPOINT_S = 600.0
"""Seconds of training between the checkpoints of a job: what came after the last of them is lost with a node."""


@dataclass(frozen=True)
class Replay:
    """All that decides how a replay goes, beside the trace and its profiles.

    `asks_least`: jobs that take several sizes ask for the least, as with `--gpus MIN:MAX`, not for what the trace says.
    """

    policy: PolicySetting
    cluster: Cluster = field(default_factory=lambda: Cluster.even(16, 4))
    knowledge: str = "perfect"
    pacing: Pacing = field(default_factory=Pacing)
    seed: int = 0
    gpus_most: Mapping[str, int] = field(default_factory=dict)  # by model
    checkpoint_s: float = CHECKPOINT_S
    view: str = "perfect"
    faults: NetworkFaults = field(default_factory=NetworkFaults)
    asks_least: bool = False
    membership: str = "swim"


Measured = Mapping[str, Profile | Mapping[int, Rates]]
"""By model: a profile, or speeds by batch."""


def prepared(
    trace: Sequence[TraceJob],
    profiles: Measured,
    settings: Replay,
    clock: Callable[[], float] = lambda: 0.0,
) -> PerfectReplay | GossipReplay:
    """Ready to run; ConfigError names the job that has neither a profile nor a duration, or what else is wrong."""
    check_setting(settings.policy)
    cluster = replace(settings.cluster, down=set())  # of this replay alone
    for profile in profiles.values():
        if isinstance(profile, Profile):
            _check_classes(profile.name, profile.classes, cluster)
    jobs = [_job(number, job, profiles, settings, cluster) for number, job in enumerate(trace)]
    knowledge = _knowledge(settings, cluster)
    match settings.view:
        case "perfect":
            plan = partial(compute_plan, settings.policy)
            return PerfectReplay(jobs, cluster, plan, knowledge, settings.pacing, clock)
        case "gossip":
            how = (settings.pacing, settings.seed, settings.faults, clock, _timings(settings))
            return GossipReplay(jobs, cluster, settings.policy, knowledge, *how)
        case other:
            raise ConfigError("view", f"{other!r} is not known", f"one of {', '.join(VIEWS)}")


def timings(settings: Replay) -> Mapping[str, float]:
    """Periods of the protocol that this replay goes by, in seconds; none on the exact view."""
    return asdict(_timings(settings)) if settings.view == "gossip" else {}


def _timings(settings: Replay) -> Timings:
    found = MEMBERSHIPS.get(settings.membership)
    if found is None:
        raise ConfigError("membership", f"{settings.membership!r} is not known", f"one of {', '.join(MEMBERSHIPS)}")
    if settings.cluster.events and settings.membership != "swim":
        raise ConfigError("membership", "nobody would see that nodes fail", "leave it out, or --churn")
    return found


def _check_classes(name: str, classes: frozenset[str], cluster: Cluster) -> None:
    """ConfigError where a node's class of GPUs, or that none is told, leaves the speed of a job open."""
    measured = ", ".join(sorted(classes))
    if classes == {""}:
        return
    if not cluster.models and len(classes) > 1:
        remedy = f"name a model of each node ({measured}) in --cluster, or keep the rows of one"
        raise ConfigError("throughput, gpu", f"has several classes for model {name!r}", remedy)
    for node, model in cluster.models.items():
        if model not in classes:
            problem = f"{model!r} was not measured with model {name!r}"
            raise ConfigError(f"cluster, node {node}, gpu_model", problem, f"one of {measured}")


def _knowledge(settings: Replay, cluster: Cluster) -> Knowledge:
    match settings.knowledge:
        case "perfect":
            return PerfectKnowledge(cluster.largest, cluster.total, cluster.usual_class)
        case "declared" | "learned":
            return LearnedKnowledge(settings.seed, declares=settings.knowledge == "declared")
        case "nothing":
            return NothingKnown()
        case other:
            raise ConfigError("knows", f"{other!r} is not known", f"one of {', '.join(KNOWLEDGE)}")


def _job(
    number: int,
    job: TraceJob,
    profiles: Measured,
    settings: Replay,
    cluster: Cluster,
) -> ReplayJob:
    profile, gpus = profiles.get(job.model), cluster.total
    saves_s = settings.checkpoint_s if settings.cluster.events else inf
    kind, named = kind_of(settings.policy), (_id(number), job.job_id, job.kind, job.submitted_s)
    physics: Physics
    if isinstance(profile, Mapping) and job.steps:
        return _rated_job(named, job, profile, settings, cluster)
    if not isinstance(profile, Profile):
        if not job.duration_s:
            known = ", ".join(profiles) or "none"
            raise ConfigError(
                f"job {job.job_id}",
                f"has no duration and no profile of model {job.model!r}",
                f"profiles there: {known}",
            )
        physics = RigidPhysics(job.gpus, job.duration_s)
        return ReplayJob(*named, job.gpus, physics, user=job.user, checkpoint_s=saves_s)
    limits = profile.limits
    batches = BatchRange(limits.initial_batch, limits.batch_max, limits.local_batch_min, limits.local_batch_max)
    limit = min(gpus, settings.gpus_most.get(job.model, gpus))
    physics = ProfiledPhysics(profile, batches, max(1, min(limit, limits.batch_max // limits.local_batch_min)))
    largest = job.batch if job.batch and not kind.rebatches else limits.batch_max
    most = max(1, min(limit, largest // limits.local_batch_min))
    return ReplayJob(
        *named,
        (1 if settings.asks_least else min(job.gpus, most)) if kind.resizes else job.gpus,
        physics,
        Elastic(1, most, batches) if kind.resizes else None,
        user=job.user,
        batch=0 if kind.rebatches else job.batch,
        checkpoint_s=saves_s,
    )


def _rated_job(
    named: tuple[JobId, str, str, float],
    job: TraceJob,
    by_batch: Mapping[int, Rates],
    settings: Replay,
    cluster: Cluster,
) -> ReplayJob:
    """Of a table of speeds: it keeps its batch, and where that is a global one it takes any number of GPUs."""
    physics = rated(job, by_batch, cluster.largest)
    _check_classes(job.model, physics.rates.classes, cluster)
    most = min(physics.most, cluster.total, settings.gpus_most.get(job.model, physics.most))
    is_elastic = kind_of(settings.policy).resizes and physics.least < most
    return ReplayJob(
        *named,
        physics.least if is_elastic and settings.asks_least else min(job.gpus, most) if is_elastic else job.gpus,
        physics,
        Elastic(physics.least, most, physics.batches) if is_elastic else None,
        user=job.user,
        checkpoint_s=settings.checkpoint_s if settings.cluster.events else inf,
    )


def _id(number: int) -> JobId:
    """Of the job's place in the trace: ids must not tell its name."""
    return JobId(f"{number:026d}")

"""From the rows of a trace to a replay: which jobs may change, what is known of them, and on which servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmsched.errors import ConfigError
from swarmsched.estimate import BatchRange, Elastic
from swarmsched.ids import JobId
from swarmsched.policies.registry import kind_of, make_policy
from swarmsched.replay.cluster import Cluster
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import Knowledge, NothingKnown, PerfectKnowledge
from swarmsched.replay.learning import LearnedKnowledge
from swarmsched.replay.perfect import Pacing, PerfectReplay
from swarmsched.replay.physics import Physics, ProfiledPhysics, RigidPhysics
from swarmsched.replay.profiles import Profile
from swarmsched.replay.workload import TraceJob
from swarmsched.view import PolicySetting

KNOWLEDGE = {
    "perfect": "profiles and lengths as they are: isolates the policy",
    "declared": "models learned from noisy reports, users say how long they train",
    "learned": "models learned from noisy reports, lengths from finished jobs of the same kind",
    "nothing": "no reports at all",
}


@dataclass(frozen=True)
class Replay:
    """All that decides how a replay goes, beside the trace and its profiles."""

    policy: PolicySetting
    nodes: int = 16
    gpus_per_node: int = 4
    knowledge: str = "perfect"
    pacing: Pacing = field(default_factory=Pacing)
    seed: int = 0
    gpus_most: Mapping[str, int] = field(default_factory=dict)  # by model


def prepared(
    trace: Sequence[TraceJob],
    profiles: Mapping[str, Profile],
    settings: Replay,
    clock: Callable[[], float] = lambda: 0.0,
) -> PerfectReplay:
    """Ready to run; ConfigError names the job that has neither a profile nor a duration, or what else is wrong."""
    cluster = Cluster.even(settings.nodes, settings.gpus_per_node)
    jobs = [_job(number, job, profiles, settings, cluster.total) for number, job in enumerate(trace)]
    knowledge = _knowledge(settings, cluster)
    return PerfectReplay(jobs, cluster, make_policy(settings.policy), knowledge, settings.pacing, clock)


def _knowledge(settings: Replay, cluster: Cluster) -> Knowledge:
    match settings.knowledge:
        case "perfect":
            return PerfectKnowledge(settings.gpus_per_node, cluster.total)
        case "declared" | "learned":
            return LearnedKnowledge(settings.seed, declares=settings.knowledge == "declared")
        case "nothing":
            return NothingKnown()
        case other:
            raise ConfigError("knows", f"{other!r} is not known", f"one of {', '.join(KNOWLEDGE)}")


def _job(number: int, job: TraceJob, profiles: Mapping[str, Profile], settings: Replay, gpus: int) -> ReplayJob:
    profile = profiles.get(job.model)
    kind = kind_of(settings.policy)
    physics: Physics
    if profile is None:
        if not job.duration_s:
            known = ", ".join(profiles) or "none"
            raise ConfigError(
                f"job {job.job_id}",
                f"has no duration and no profile of model {job.model!r}",
                f"profiles there: {known}",
            )
        physics = RigidPhysics(job.gpus, job.duration_s)
        return ReplayJob(_id(number), job.job_id, job.kind, job.submitted_s, job.gpus, physics, user=job.user)
    limits = profile.limits
    batches = BatchRange(limits.initial_batch, limits.batch_max, limits.local_batch_min, limits.local_batch_max)
    physics = ProfiledPhysics(profile, batches)
    largest = job.batch if job.batch and not kind.rebatches else limits.batch_max
    most = max(1, min(gpus, settings.gpus_most.get(job.model, gpus), largest // limits.local_batch_min))
    elastic = Elastic(1, most, batches) if kind.resizes else None
    batch = 0 if kind.rebatches else job.batch
    return ReplayJob(
        _id(number), job.job_id, job.kind, job.submitted_s, job.gpus, physics, elastic, job.user, batch=batch
    )


def _id(number: int) -> JobId:
    """Of the job's place in the trace: ids must not tell its name."""
    return JobId(f"{number:026d}")

"""From the rows of a trace to a replay: which jobs may change, what is known of them, and on which servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil, inf

from msgspec.structs import replace as replaced

from swarmsched.api import nearest
from swarmsched.errors import ConfigError
from swarmsched.estimate import BatchRange, GpuBatch, Resizable
from swarmsched.gossip.membership_config import PROBE_PERIOD_MAX_S
from swarmsched.gossip.setting import SwarmSetting
from swarmsched.gossip.state import ROUND_S
from swarmsched.ids import JobId
from swarmsched.node.config import Timings
from swarmsched.policies.registry import check_setting, kind_of, plan_anyway
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.gossip import GossipReplay
from swarmsched.replay.job import ReplayJob, Terms
from swarmsched.replay.knowledge import Knowledge, NothingKnown, PerfectKnowledge
from swarmsched.replay.learning import LearnedKnowledge
from swarmsched.replay.perfect import PerfectReplay, Ticks
from swarmsched.replay.physics import Physics, ProfiledPhysics, RigidPhysics
from swarmsched.replay.profiles import BatchLimits, Profile, ScaledModel
from swarmsched.replay.rates import Rates, rated
from swarmsched.replay.workload import DURATIONS, SIZES, STEPS, TraceJob
from swarmsched.simulator.network import NetworkFaults
from swarmsched.view import PolicySetting

KNOWLEDGE = {
    "perfect": "profiles and lengths as they are: isolates the policy",
    "declared": "models learned from noisy reports, users say how long they train",
    "learned": "models learned from noisy reports, lengths from other jobs of the same kind",
    "nothing": "no reports at all",
}


@dataclass(frozen=True)
class Manner:
    """How users submit the jobs of a workload, and what their scripts do."""

    told: str  # to people
    knows: str  # unless something else is asked for
    terms: Terms
    has_range: bool = False
    is_live: bool = False


_SILENT = Terms("program", commits=False)
_REPORTS = Terms("program", begins_saved=False, tells_pause=True)
MANNERS = {
    "rigid": Manner("-g N alone: no reports, no checkpoints, no name; never stopped", "nothing", _SILENT),
    "restartable": Manner(
        "the same with --restartable; it may be stopped, and goes on where it was after the pause",
        "nothing",
        replace(_SILENT, restartable=True),
    ),
    "installed": Manner(
        "-g MIN:MAX --batch N:MAX where a job takes several, reports, and a checkpoint once it trains",
        "learned",
        _REPORTS,
        has_range=True,
    ),
    "elastic": Manner(
        "the same with --elastic: a change while it trains costs 1 s, a start the whole pause",
        "learned",
        _REPORTS,
        has_range=True,
        is_live=True,
    ),
}
"""Each under the default settings of a swarm.  A job of which nothing is said is of the kind of its program."""
KINDS = ("name", "program", "none")
"""What tells planners that jobs are of one kind."""
VIEWS = ("perfect", "gossip")
MEMBERSHIPS = {"swim": Timings(), "ideal": Timings(probe_period_s=PROBE_PERIOD_MAX_S)}
"""With `ideal` members find one another and are never probed again: where no machine fails, a third of all steps."""
GOSSIP_LIMIT_S = 1e7
"""Some four months: of each second all messages are lived through."""
DURATION_LEAST_S = 1e-3
CHECKPOINT_S = 600.0
"""Seconds of training between the checkpoints of a job: what came after the last of them is lost with a node."""


@dataclass(frozen=True)
class Replay:
    """All that decides how a replay goes, beside the trace and its profiles.

    `asks_least`: jobs that take several sizes ask for the least, as with `--gpus MIN:MAX`, not for what the trace says.
    """

    policy: PolicySetting
    cluster: Fleet = field(default_factory=lambda: Fleet.even(16, 4))
    knowledge: str = "perfect"
    pacing: Ticks = field(default_factory=Ticks)
    seed: int = 0
    gpus_most: Mapping[str, int] = field(default_factory=dict)  # by model
    checkpoint_s: float = CHECKPOINT_S
    view: str = "perfect"
    faults: NetworkFaults = field(default_factory=NetworkFaults)
    asks_least: bool = False
    membership: str = "swim"
    round_s: float = ROUND_S  # of the state plane
    manner: str = ""  # of submission; empty: whatever suits the policy, and any job may be stopped without a loss
    kind_by: str = ""  # empty: as the manner has it, and without one the name
    restart_costs: Mapping[str, float] = field(default_factory=dict)  # seconds by model, in place of the pause
    tells_costs: bool = False  # cards say what a change costs, once a job has started
    gpu_speeds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by model and class; "": any model
    gpu_batches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # local ones at most, by model and class
    keeps_batch: bool = False  # jobs name no range of batches
    lies: float = 0.0  # standard deviation of the logarithm of the factor by which each job counts its steps wrong
    is_split_alone: bool = False  # above its first batch one GPU takes two micro-steps

    @property
    def terms(self) -> Terms:
        """Of each job, where its row says nothing else."""
        terms = MANNERS[self.manner].terms if self.manner else Terms()
        tells_pause = terms.tells_pause or self.tells_costs
        return replace(terms, kind_by=self.kind_by or terms.kind_by, tells_pause=tells_pause)

    @property
    def setting(self) -> PolicySetting:
        """The policy, going as far as a swarm lets it by default where the manner is that of its users."""
        elasticity = SwarmSetting().elasticity if self.manner else self.policy.elasticity
        return replaced(self.policy, elasticity=elasticity)


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
    _check_words(settings)
    pacing = _pacing(settings)
    cluster = replace(settings.cluster, down=set())  # of this replay alone
    profiles = {name: _on_classes(name, each, cluster, settings.gpu_speeds) for name, each in profiles.items()}
    for profile in profiles.values():
        if isinstance(profile, Profile):
            _check_classes(profile.name, profile.classes, cluster)
    jobs = [_job(number, job, profiles, settings, cluster) for number, job in enumerate(trace)]
    for row, job in zip(trace, jobs, strict=True):
        _check_length(row.place, job.submitted_s, job.physics.alone_s(cluster), pacing)
    knowledge = _knowledge(settings, cluster)
    match settings.view:
        case "perfect":
            plan = partial(plan_anyway, settings.setting)
            return PerfectReplay(jobs, cluster, plan, knowledge, pacing, clock)
        case "gossip":
            how = (pacing, settings.seed, settings.faults, clock, _timings(settings))
            return GossipReplay(jobs, cluster, settings.setting, knowledge, *how)
    raise AssertionError(settings.view)


def _check_words(settings: Replay) -> None:
    """ConfigError where one is none of those that there are."""
    wanted = (("view", settings.view, VIEWS), ("as", settings.manner, ("", *MANNERS)))
    for name, word, known in (*wanted, ("kinds", settings.kind_by, ("", *KINDS))):
        if word not in known:
            raise ConfigError(
                name, f"{word!r} is not known{nearest(word, known)}", f"one of {', '.join(known).lstrip(', ')}"
            )
    if settings.view == "gossip" and settings.manner == "elastic":
        raise ConfigError(
            "as", "'elastic' has no model of workers that change while they train with --view gossip", "--view perfect"
        )


def timings(settings: Replay) -> Mapping[str, float]:
    """Periods of the protocol that this replay goes by, in seconds; none on the exact view."""
    return asdict(_timings(settings)) if settings.view == "gossip" else {}


def _timings(settings: Replay) -> Timings:
    found = MEMBERSHIPS.get(settings.membership)
    if found is None:
        raise ConfigError("membership", f"{settings.membership!r} is not known", f"one of {', '.join(MEMBERSHIPS)}")
    if settings.cluster.events and settings.membership != "swim":
        raise ConfigError(
            "membership",
            f"with {settings.membership!r} nobody would see that nodes fail",
            "take swim, or leave out --churn",
        )
    return replace(found, round_s=settings.round_s)


def _on_classes(
    name: str, model: Profile | Mapping[int, Rates], cluster: Fleet, speeds: Mapping[str, Mapping[str, float]]
) -> Profile | Mapping[int, Rates]:
    """A model that was measured on one class of GPUs, on those of the cluster as well, by the table of speeds."""
    known = {**speeds.get("", {}), **speeds.get(name, {})}
    wanted = {each for each in cluster.models.values() if each in known}
    if isinstance(model, Profile):
        is_measured = len(model.classes) > 1 or wanted <= model.classes
        there = {**dict.fromkeys(model.classes - {""}, 1.0), **{gpu: known[gpu] for gpu in wanted - model.classes}}
        return model if is_measured else ScaledModel.of(model, there)
    return {batch: rates.on({gpu: known[gpu] for gpu in wanted}) for batch, rates in model.items()}


def _check_classes(name: str, classes: frozenset[str], cluster: Fleet) -> None:
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
            remedy = f"one of {measured}, or --gpu-speeds that have it"
            raise ConfigError(f"cluster, node {node}, gpu_model", problem, remedy)


def _pacing(settings: Replay) -> Ticks:
    limit_s = min(settings.pacing.limit_s, GOSSIP_LIMIT_S if settings.view == "gossip" else inf)
    return replace(settings.pacing, limit_s=limit_s)


def _check_length(place: str, submitted_s: float, alone_s: float, pacing: Ticks) -> None:
    """ConfigError where a job that could run cannot have ended before the replay gives up."""
    if alone_s == inf:
        return
    if submitted_s + alone_s > pacing.limit_s:
        problem = f"ends at {submitted_s + alone_s:,.0f} s at best, and the replay gives up at {pacing.limit_s:,.0f} s"
        raise ConfigError(place, problem, "count times from the first submission, in seconds, or --select other jobs")
    if pacing.tick_s and alone_s / pacing.tick_s > pacing.plans_most:
        least_s = ceil(alone_s / pacing.plans_most)
        problem = (
            f"a plan each {pacing.tick_s:g} s makes more than {pacing.plans_most:,} of them in the time of {place}"
        )
        raise ConfigError("tick_s", problem, f"{least_s} or more, or 0: plans when something happens")


def _knowledge(settings: Replay, cluster: Fleet) -> Knowledge:
    match settings.knowledge:
        case "perfect":
            return PerfectKnowledge(cluster.largest, cluster.total, cluster.usual_class)
        case "declared" | "learned":
            return LearnedKnowledge(settings.seed, declares=settings.knowledge == "declared", lies=settings.lies)
        case "nothing":
            return NothingKnown()
        case other:
            raise ConfigError("knows", f"{other!r} is not known", f"one of {', '.join(KNOWLEDGE)}")


def _job(
    number: int,
    job: TraceJob,
    profiles: Measured,
    settings: Replay,
    cluster: Fleet,
) -> ReplayJob:
    profile, gpus = profiles.get(job.model), cluster.total
    manner, kind = MANNERS.get(settings.manner), kind_of(settings.policy)
    named = (_id(number), job.job_id, job.kind, job.submitted_s)
    physics: Physics
    if isinstance(profile, Mapping) and job.steps:
        return _rated_job(named, job, profile, settings, cluster)
    if not isinstance(profile, Profile):
        if job.duration_s < DURATION_LEAST_S:
            raise _without_length(job, profiles)
        _check_rigid(job)
        return _submitted(named, job, RigidPhysics(job.gpus, job.duration_s), settings)
    limits = profile.limits
    least = min(limits.initial_batch, *profile.statistics)
    if job.batch and not least <= job.batch <= limits.batch_max:
        problem = f"{job.batch} is no batch of model {job.model!r}"
        raise ConfigError(f"{job.place}, batch_size", problem, f"from {least} to {limits.batch_max}, or empty")
    by_gpu = _gpu_batches(job.model, limits, settings, cluster)
    local = (limits.local_batch_min, limits.local_batch_max)
    batches = BatchRange(limits.initial_batch, limits.batch_max, *local, by_gpu)
    limit = min(gpus, settings.gpus_most.get(job.model, gpus))
    widest = max(1, min(limit, limits.batch_max // limits.local_batch_min, job.gpus_most or limit))
    physics = ProfiledPhysics(profile, batches, widest, is_split_alone=settings.is_split_alone)
    rebatches = (kind.rebatches if manner is None else manner.has_range) and not settings.keeps_batch
    largest = limits.batch_max if rebatches or not job.batch else job.batch
    kept = job.batch or limits.initial_batch
    told = BatchRange(kept, kept, 1, kept) if settings.keeps_batch else batches  # as a card has it once it was measured
    elastic = _sizes(job, 1, max(1, min(widest, largest // limits.local_batch_min)), told)
    begins_on = limits.initial_batch // limits.local_batch_min
    if rebatches and job.gpus_least > begins_on:
        problem = f"the first batch of model {job.model!r}, {limits.initial_batch}, can be dealt to {begins_on} GPUs"
        remedy = f"a number from 1 to {begins_on}, or --keeps-batch"
        raise ConfigError(f"{job.place}, {SIZES[0]}", f"{job.gpus_least} is too many: {problem}", remedy)
    return _submitted(named, job, physics, settings, elastic, batch=0 if rebatches else job.batch)


def _gpu_batches(model: str, limits: BatchLimits, settings: Replay, cluster: Fleet) -> tuple[GpuBatch, ...]:
    """The largest local batches on those classes of the cluster that have a limit of their own."""
    there = {*cluster.models.values()}
    known = {gpu: most for gpu, most in settings.gpu_batches.get(model, {}).items() if gpu in there}
    for gpu, most in known.items():
        if most < limits.local_batch_min:
            problem = f"{most} of {gpu!r} is less than the {limits.local_batch_min} of min_local_bsz of model {model!r}"
            raise ConfigError("gpu_speeds, max_local_bsz", problem, "a larger one, or a --cluster without that class")
    return tuple([GpuBatch(gpu, most) for gpu, most in known.items()])


def _submitted(
    named: tuple[JobId, str, str, float],
    job: TraceJob,
    physics: Physics,
    settings: Replay,
    elastic: Resizable | None = None,
    batch: int = 0,
) -> ReplayJob:
    """As its user submits it: with the sizes of `elastic`, where the manner and the policy know of them."""
    manner, terms = MANNERS.get(settings.manner), _terms(settings, job)
    resizes = kind_of(settings.policy).resizes
    gpus, sizes = job.gpus, None
    if elastic and (manner.has_range if manner else resizes):
        asks_least = manner is not None or settings.asks_least
        gpus = elastic.ranks_least if asks_least else min(job.gpus, elastic.ranks_most)
        sizes = replaced(elastic, is_live=bool(manner and manner.is_live)) if resizes else None
    saves = terms.commits or terms.restartable
    return ReplayJob(
        *named,
        gpus,
        physics,
        sizes,
        user=job.user,
        batch=batch,
        checkpoint_s=settings.checkpoint_s if settings.cluster.events and saves else inf,
        terms=terms,
        costs_s=settings.restart_costs.get(job.model),
        work=job.work,
    )


def _terms(settings: Replay, job: TraceJob) -> Terms:
    """As all jobs have them, and what the row says."""
    terms, word = settings.terms, job.restartable
    return replace(
        terms,
        restartable=terms.restartable if word is None else word,
        commits=terms.commits and not (word is False and terms.begins_saved),
        priority=job.priority,
        time_limit_s=job.time_limit_s,
        deadline_s=job.deadline_s,
        failure=job.failure,
    )


def _sizes(job: TraceJob, least: int, most: int, batches: BatchRange) -> Resizable:
    """The sizes that a job takes: those of its row, as far as its model is measured and its batch can be dealt."""
    if job.gpus_least > most:
        problem = f"{job.gpus_least} is more than the {most} that there are, or that its batch can be dealt to"
        raise ConfigError(f"{job.place}, {SIZES[0]}", problem, f"a number from 1 to {most}")
    if job.gpus_most and job.gpus_most < least:
        problem = f"{job.gpus_most} is less than the {least} that its model was measured with"
        raise ConfigError(f"{job.place}, {SIZES[1]}", problem, f"a number from {least}")
    return Resizable(max(least, job.gpus_least), min(most, job.gpus_most or most), batches)


def _check_rigid(job: TraceJob) -> None:
    """ConfigError where a job of known run time is to take other sizes."""
    for column, gpus in zip(SIZES, (job.gpus_least, job.gpus_most), strict=True):
        if gpus not in (0, job.gpus):
            problem = f"{gpus} is not the {job.gpus} of num_gpus, and a run time says nothing of other sizes"
            raise ConfigError(f"{job.place}, {column}", problem, "a model with --profiles, or an empty cell")


def _without_length(job: TraceJob, profiles: Measured) -> ConfigError:
    """What a row lacks whose job nobody can tell the run time of."""
    remedy = f"seconds from {DURATION_LEAST_S:g}"
    if job.duration_s:
        return ConfigError(f"{job.place}, {DURATIONS[0]}", f"{job.duration_s:g} is too short", remedy)
    if job.model in profiles:
        problem = f"it has neither {STEPS[0]} for the speeds of model {job.model!r} nor a run time above 0"
        return ConfigError(f"{job.place}, {STEPS[0]}", problem, f"{STEPS[0]} from 1, or in {DURATIONS[0]} {remedy}")
    known = f"one of {', '.join(profiles)}" if profiles else "and --profiles that have it"
    unknown = f"there is no profile of model {job.model!r}" if job.model else "it names no model"
    problem = f"it has no run time above 0, and {unknown}"
    return ConfigError(f"{job.place}, {DURATIONS[0]}", problem, f"{remedy}, or a model: {known}")


def _rated_job(
    named: tuple[JobId, str, str, float],
    job: TraceJob,
    by_batch: Mapping[int, Rates],
    settings: Replay,
    cluster: Fleet,
) -> ReplayJob:
    """Of a table of speeds: it keeps its batch, and where that is a global one it takes any number of GPUs."""
    physics = rated(job, by_batch, cluster.largest)
    _check_classes(job.model, physics.rates.classes, cluster)
    most = min(physics.most, cluster.total, settings.gpus_most.get(job.model, physics.most))
    elastic = _sizes(job, physics.least, most, physics.batches) if physics.least < most else None
    return _submitted(named, job, physics, settings, elastic)


def _id(number: int) -> JobId:
    """Of the job's place in the trace, which its handle has as well: ids must not tell its name."""
    return JobId(f"{number:018d}{'0' * 8}")

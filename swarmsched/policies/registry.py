"""The policies by name, and the way from a swarm-wide setting to what carries it out.

Names, parameters and dotted paths: an agent knows every policy by this file, imports at most its order, and leaves the
policy itself to the planner's process.
"""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from msgspec import ValidationError, convert
from msgspec.structs import replace

from swarmsched.api import nearest
from swarmsched.errors import ConfigError
from swarmsched.fields import cleaned
from swarmsched.ids import JobId
from swarmsched.models.kinds import informed
from swarmsched.policies.attained_service import THRESHOLDS
from swarmsched.policies.base import ParameterSpec as Spec
from swarmsched.policies.base import PolicyKind
from swarmsched.policies.checked import BadPlan, checked
from swarmsched.view import Change, ClusterView, Decision, Elasticity, JobView, Order, Plan, Policy, PolicySetting

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "swarmsched.policies"
"""The group of entry points by which a package names its policies."""
ID_LENGTH_MAX = 63
FALLBACK = "backfill"
TRIALS_MOST = 64  # plans of parts of the jobs, to find whose cards a policy cannot read

_BACKFILL = (
    Spec("assumed_limit_s", "time limit assumed for jobs that name none; 0: they may run for ever", 0.0, 0.0, 1e9),
    Spec("reserves", "1: the first in line is not delayed; 0: whatever fits passes it", 1.0, 0.0, 1.0),
)
_LAS = (
    Spec(THRESHOLDS[0], "GPU-seconds after which a job leaves the first class", 3_250.0, 1.0, 1e12),
    Spec(THRESHOLDS[1], "GPU-seconds after which a job leaves the second class; 0: no third", 0.0, 0.0, 1e12),
    Spec(THRESHOLDS[2], "GPU-seconds after which a job leaves the third class; 0: no fourth", 0.0, 0.0, 1e12),
    Spec(
        "promote_knob", "first class again after waiting this many times as long as it ran; 0: off", 8.0, 0.0, 1_000.0
    ),
    Spec("preempts", "1: jobs of lower classes take the place of running ones; 0: they wait", 1.0, 0.0, 1.0),
    Spec("minimum_run_s", "seconds after its start in which no job is preempted", 600.0, 0.0, 1e9),
    Spec("preemptions_max", "how often one job is preempted, except by a higher priority", 3.0, 0.0, 1e6),
)
_TIRESIAS = (
    *_LAS[:4],
    Spec("quantum_gpu_s", "GPU-seconds of a class, without an end of classes; 0: the thresholds", 0.0, 0.0, 1e12),
)
_PRIOR = (
    Spec("prior_jobs", "ended jobs below which a prior stands in for those that are missing", 64.0, 0.0, 256.0),
    Spec("prior_median_gpu_s", "median of the prior's GPU-seconds", 2_227.0, 1.0, 1e12),
    Spec("prior_deviation", "standard deviation of their logarithm", 1.67, 0.0, 10.0),
)
"""By the quartiles 860, 2,227 and 8,215 of the samples that were published with Tiresias."""
_SWARM = (
    Spec("rank_exponent", "how much more a job counts that has less left than others; 0: not at all", 0.35, 0.0, 2.0),
    Spec("horizon_s", "seconds that a change of GPUs is expected to last", 200.0, 1.0, 1e6),
    Spec("pause_s", "seconds in which a job does not train when its GPUs change", 30.0, 0.0, 1e5),
    Spec("patience", "a job that has waited so many times as long as it is to take goes first", 16.0, 0.1, 1e6),
    Spec(
        "rho_most",
        "a job that is to take more than so many times as long as alone on an equal share goes first; 0: it does not",
        2.0,
        0.0,
        1e6,
    ),
)
"""The patience is twice that of Tiresias' promotion, since it counts from the length of a job, not from what it has had
of it."""
_ELASTIC_BATCH = (
    Spec("exact", "1: the dynamic program; 0: bundles, in less time", 0.0, 0.0, 1.0),
    Spec("rebatches", "1: the batch is chosen too; 0: it stays as it is", 1.0, 0.0, 1.0),
    Spec("gpus_max", "most GPUs for one job; 0: as many as it takes", 0.0, 0.0, 65_535.0),
    Spec(
        "trusts_range",
        "1: an allowed batch of unmeasured noise is worth its size; 0: no more than the first",
        1.0,
        0.0,
        1.0,
    ),
)
_ROOM = "swarmsched.policies."
_SUBMIT_ORDER = f"{_ROOM}base:SubmitOrder"
_YIELDING_ORDER = f"{_ROOM}base:YieldingOrder"
_BY_SERVICE = f"{_ROOM}attained_service:AttainedServiceOrder"

POLICIES: dict[str, PolicyKind] = {
    kind.name: kind
    for kind in (
        PolicyKind("fifo", "strict order of priority and submit time", (), f"{_ROOM}fifo:Fifo", _SUBMIT_ORDER),
        PolicyKind(
            "backfill",
            "fifo, with gaps filled where the first in line is not delayed",
            _BACKFILL,
            f"{_ROOM}backfill:Backfill",
            _SUBMIT_ORDER,
        ),
        PolicyKind(
            "las",
            "least attained GPU-time first, stopping running jobs for it (Tiresias)",
            _LAS,
            f"{_ROOM}las:LeastAttainedService",
            _BY_SERVICE,
        ),
        PolicyKind(
            "tiresias",
            "classes of attained GPU-time with promotion and preemption at once (Tiresias)",
            _TIRESIAS,
            f"{_ROOM}tiresias:Tiresias",
            plans_when_idle=True,
        ),
        PolicyKind(
            "gittins",
            "classes of attained GPU-time, the largest Gittins index first, learned from ended jobs (Tiresias)",
            (*_TIRESIAS, *_PRIOR),
            f"{_ROOM}gittins:Gittins",
            plans_when_idle=True,
        ),
        PolicyKind(
            "drf",
            "users with the least dominant share of GPUs, cores or memory first (dominant resource fairness)",
            (),
            f"{_ROOM}drf:DominantResourceFairness",
        ),
        PolicyKind(
            "optimus",
            "each GPU to the job whose remaining time it shortens most (Optimus)",
            (Spec("damping", "weight of gains whose estimate is uncertain", 0.95, 0.0, 1.0),),
            f"{_ROOM}optimus:Optimus",
            plans_when_idle=True,
            resizes=True,
        ),
        PolicyKind(
            "dike",
            "fifo, each job on the hosts where its model would train fastest, by what it and they are (Dike)",
            (Spec("network_gbit_s", "network of each node, in Gbit a second", 10.0, 0.1, 10_000.0),),
            f"{_ROOM}dike:Dike",
            resizes=True,
        ),
        PolicyKind(
            "elastic-tiresias",
            "tiresias, and running jobs grow into free GPUs and shrink while many wait (EDL)",
            (
                *_TIRESIAS,
                Spec("waiting_max", "jobs that may wait before running ones shrink to their least", 10.0, 0.0, 1e6),
            ),
            f"{_ROOM}elastic_tiresias:ElasticTiresias",
            plans_when_idle=True,
            resizes=True,
        ),
        PolicyKind(
            "elastic-batch",
            "GPUs and batches where the sum of speed-ups is largest, first come, first served (IBM)",
            _ELASTIC_BATCH,
            f"{_ROOM}elastic_batch:ElasticBatch",
            plans_when_idle=True,
            resizes=True,
            rebatches=True,
        ),
        PolicyKind("srtf", "shortest remaining time first, preemptive", (), f"{_ROOM}srtf:ShortestRemaining"),
        PolicyKind(
            "srsf", "shortest remaining time x GPUs first, preemptive", (), f"{_ROOM}srtf:ShortestRemainingService"
        ),
        PolicyKind(
            "swarm",
            "each GPU where it gains most by fitted models, jobs with least left first",
            _SWARM,
            f"{_ROOM}swarm:Swarm",
            _YIELDING_ORDER,
            plans_when_idle=True,
            resizes=True,
            rebatches=True,
            spares_rigid=True,
        ),
    )
}


_RIGID = PolicyKind("swarm", "where no job takes several sizes", _SWARM, f"{_ROOM}turns:RigidPlanner")


def add_installed(entries: "Iterable[EntryPoint]") -> list[str]:
    """Make the policies of installed packages known in this process; tell what is wrong with those that are left out.

    Each is an entry point of the group `ENTRY_POINTS`, `my-own = my_package:KIND`.  Only that module is imported: the
    class, and all that it needs, is first imported where a plan is made.
    """
    problems = []
    for entry in entries:
        try:
            add(entry.load(), imports_class=False)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # somebody else's code; the agent goes on without it
            problems.append(cleaned(f"policy {entry.name} ({entry.value}): {type(error).__name__}: {error}"))
    return problems


def add(kind: object, *, imports_class: bool = True) -> PolicyKind:
    """Make a policy of somebody's own known in this process; ConfigError where what describes it cannot be used."""
    remedy = 'KIND = PolicyKind("a-name", "what it is for", (), "module:Class")'
    if not isinstance(kind, PolicyKind):
        raise ConfigError("KIND", "does not say what the file holds", remedy)
    try:
        convert(asdict(kind), PolicyKind)
        _complete(kind, {spec.name: spec.default for spec in kind.parameters})
    except (ValidationError, ConfigError) as error:
        raise ConfigError("KIND", str(error), remedy) from error
    if not 0 < len(kind.name) <= ID_LENGTH_MAX or not kind.name.isprintable() or {",", " ", ":"} & {*kind.name}:
        raise ConfigError(
            "KIND.name", f"{kind.name[:ID_LENGTH_MAX]!r} is no name", "letters, digits and -, as in my-own"
        )
    if POLICIES.get(kind.name, kind) is not kind:
        raise ConfigError("KIND.name", f"there is a policy {kind.name!r} already", "give KIND another name")
    if imports_class:
        _check_class("KIND.policy", kind.policy, "plan")
    if kind.order:
        _check_class("KIND.order", kind.order, "rank_key")
    POLICIES[kind.name] = kind
    return kind


def _check_class(key: str, path: str, method: str) -> None:
    try:
        found = _class_at(path)
    except (Exception, SystemExit) as error:
        problem = f"{path!r} leads nowhere: {type(error).__name__}: {error}"
        raise ConfigError(key, problem, "module:Class, as it could be imported") from error
    if not (isinstance(found, type) and hasattr(found, method)):
        raise ConfigError(
            key, f"{path!r} is no class with a method {method!r}", "module:Class, as it could be imported"
        )


def compute_plan(setting: PolicySetting, view: ClusterView, now_s: float) -> Plan:
    """Run the policy that a setting names, imported here: for planner processes and simulators, never for agents.

    Jobs that rest are in nobody's way: no policy sees them.  ConfigError with field, value and nearest match if there
    is no such policy.
    """
    if any(job.rests_s(now_s) for job in view.jobs):
        view = replace(view, jobs=tuple([job for job in view.jobs if not job.rests_s(now_s)]))
    view = informed(view)
    policy = policy_for(setting, view)
    plan = policy.plan(_as_far_as(setting.elasticity, view), now_s)
    decisions = plan.decisions
    advice: tuple[Decision, ...] = ()
    running = {job.job_id for job in view.jobs if _is_only_advised(job)}
    if running and setting.elasticity is Elasticity.ADVISE:
        wished = {each.job_id: each for each in policy.plan(view, now_s).decisions if each.job_id in running}
        kept = {job_id: each for job_id, each in wished.items() if each.change is Change.KEEP}
        advice = tuple([each for job_id, each in wished.items() if job_id not in kept])
        decisions = tuple([kept.get(each.job_id, each) for each in decisions])  # they say why it has its size
    return replace(plan, decisions=decisions, version=view.version, policy_id=policy_id(setting), advice=advice)


def plan_anyway(setting: PolicySetting, view: ClusterView, now_s: float) -> Plan:
    """As `compute_plan`; where the policy or its import raises, or its plan is a bad one, `backfill` plans.

    Then `Plan.fault` says why, and what the policy remembered stays as it was.  If some jobs' cards make it raise, they
    are planned as jobs of one size of which nothing is known, and `Plan.oddity` names one.
    """
    try:
        return checked(compute_plan(setting, view, now_s), view)
    except BadPlan as error:
        problem = str(error)
    except (Exception, SystemExit) as error:
        if setting.name not in POLICIES:
            raise
        problem = f"raised {type(error).__name__}: {error}"
    odd = _odd_ones(setting, view, now_s)
    if odd:
        plain = replace(view, jobs=tuple([_plain(job) if job.job_id in odd else job for job in view.jobs]))
        with suppress(Exception, SystemExit):
            plan = checked(compute_plan(setting, plain, now_s), plain)
            return replace(plan, oddity=cleaned(f"{setting.name} {problem}, for the card of {', '.join(sorted(odd))}"))
    plan = compute_plan(PolicySetting(FALLBACK, {}, Elasticity.OFF), view, now_s)
    fault = cleaned(f"{setting.name} {problem}")
    return replace(plan, memory=view.memory, policy_id=policy_id(setting), fault=fault)


def _odd_ones(setting: PolicySetting, view: ClusterView, now_s: float) -> set[JobId]:
    """Jobs each of whose cards alone makes the policy raise; none where it is not the cards, or too many are."""
    groups = [[job for job in view.jobs if job.card.elastic or job.card.estimate]]
    found: set[JobId] = set()
    for _ in range(TRIALS_MOST):
        if not groups:
            return found
        group = groups.pop()
        part = replace(view, jobs=tuple(group))
        try:
            checked(compute_plan(setting, part, now_s), part)
        except (Exception, SystemExit):  # noqa: BLE001  # whatever it raises, for one card it is that card's
            middle = len(group) // 2
            if middle:
                groups += [group[:middle], group[middle:]]
            else:
                found |= {job.job_id for job in group}
    return set()


def _plain(job: JobView) -> JobView:
    return replace(job, card=replace(job.card, elastic=None, estimate=None))


def _as_far_as(elasticity: Elasticity, view: ClusterView) -> ClusterView:
    """The view in which only those jobs are elastic whose size may be decided on, and which no running job may be
    stopped in but for those whose people have said so."""
    if elasticity is Elasticity.ON:
        return view
    return replace(view, jobs=tuple([_fixed(job, is_off=elasticity is Elasticity.OFF) for job in view.jobs]))


def _fixed(job: JobView, *, is_off: bool) -> JobView:
    card = job.card
    elastic = None if is_off or _is_only_advised(job) else card.elastic
    if elastic is card.elastic and not card.has_checkpoint:
        return job
    return replace(job, card=replace(card, elastic=elastic, has_checkpoint=False))


def _is_only_advised(job: JobView) -> bool:
    """A running job that would be ended for another size; whoever changes while it trains loses nothing."""
    return job.card.elastic is not None and bool(job.shares) and not job.card.elastic.is_live


def policy_for(setting: PolicySetting, view: ClusterView) -> Policy:
    """The policy that a setting names; asked for first it is imported, which takes a while.  ConfigError as above.

    Where no job takes several sizes, one that spares rigid jobs has no sizes to choose: then the order alone decides,
    and needs no numpy.
    """
    kind = kind_of(setting)
    parameters = _complete(kind, setting.parameters)
    if kind.spares_rigid and not any(job.card.elastic for job in view.jobs):
        kind = _RIGID
    return _policy(kind, tuple(parameters.items()))


@lru_cache(maxsize=8)
def _policy(kind: PolicyKind, parameters: tuple[tuple[str, float], ...]) -> Policy:
    """Kept from plan to plan: a policy is pure, but what it has computed from an estimate serves again."""
    return cast("Policy", _class_at(kind.policy)(dict(parameters)))


def make_order(setting: PolicySetting) -> Order | None:
    """The order by which agents start jobs without a plan, if the policy has one; ConfigError as above."""
    kind = kind_of(setting)
    return cast("Order", _class_at(kind.order)(_complete(kind, setting.parameters))) if kind.order else None


def policy_id(setting: PolicySetting) -> str:
    """Name, and parameters where they are not the defaults: `las:100`; keys of different ids are never compared."""
    kind = kind_of(setting)
    given = _complete(kind, setting.parameters)
    values = [f"{given[spec.name]:g}" for spec in kind.parameters]
    defaults = [f"{spec.default:g}" for spec in kind.parameters]
    while values and values[-1] == defaults[len(values) - 1]:
        values.pop()
    text = ":".join((kind.name, *values))
    if len(text) <= ID_LENGTH_MAX:
        return text
    return f"{kind.name}:{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def check_setting(setting: PolicySetting) -> None:
    """Raise ConfigError unless there is such a policy and its parameters are within their bounds."""
    _complete(kind_of(setting), setting.parameters)


def kind_of(setting: PolicySetting) -> PolicyKind:
    """What is known of the policy that a setting names; ConfigError with field, value and nearest match."""
    kind = POLICIES.get(setting.name)
    if kind is None:
        known = list(POLICIES)
        raise ConfigError(
            "policy",
            f"there is no policy {setting.name!r}{nearest(setting.name, known)}",
            f"known policies: {', '.join(known)}",
        )
    return kind


def _class_at(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)


def _complete(kind: PolicyKind, given: Mapping[str, float]) -> dict[str, float]:
    """Given parameters over the defaults, each within its bounds."""
    specs = {spec.name: spec for spec in kind.parameters}
    for name, value in given.items():
        if name not in specs:
            known = ", ".join(specs) or "none"
            raise ConfigError(
                f"parameters.{name}",
                f"{kind.name} has no parameter {name!r}{nearest(name, list(specs))}",
                f"parameters of {kind.name}: {known}",
            )
        _check(kind, specs[name], value)
    return {name: float(given.get(name, spec.default)) for name, spec in specs.items()}


def _check(kind: PolicyKind, spec: Spec, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not spec.low <= value <= spec.high:  # type: ignore[operator]  # is_number says so
        raise ConfigError(
            f"parameters.{spec.name}",
            f"{value!r} is out of range for {kind.name}: {spec.meaning}",
            f"a number from {spec.low:g} to {spec.high:g}; default {spec.default:g}",
        )

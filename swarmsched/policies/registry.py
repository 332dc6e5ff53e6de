"""The policies by name, and the way from a swarm-wide setting to a policy."""

from collections.abc import Mapping

from swarmsched.api import nearest
from swarmsched.errors import ConfigError
from swarmsched.policies import backfill, las
from swarmsched.policies.backfill import Backfill
from swarmsched.policies.base import ParameterSpec, PolicyKind
from swarmsched.policies.fifo import Fifo
from swarmsched.policies.las import LeastAttainedService
from swarmsched.view import Policy, PolicySetting

POLICIES: Mapping[str, PolicyKind] = {
    kind.name: kind
    for kind in (
        PolicyKind("fifo", "strict order of priority and submit time", (), lambda parameters: Fifo()),
        PolicyKind(
            "backfill", "fifo, with gaps filled where the first in line is not delayed", backfill.PARAMETERS, Backfill
        ),
        PolicyKind(
            "las",
            "least attained GPU-time first, stopping running jobs for it (Tiresias)",
            las.PARAMETERS,
            LeastAttainedService,
        ),
    )
}


def make_policy(setting: PolicySetting) -> Policy:
    """The policy that a setting names; ConfigError with field, value and nearest match if there is none."""
    kind = POLICIES.get(setting.name)
    if kind is None:
        known = list(POLICIES)
        raise ConfigError(
            "policy",
            f"there is no policy {setting.name!r}{nearest(setting.name, known)}",
            f"known policies: {', '.join(known)}",
        )
    return kind.build(_complete(kind, setting.parameters))


def check_setting(setting: PolicySetting) -> None:
    """Raise ConfigError unless `make_policy` accepts the setting."""
    make_policy(setting)


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


def _check(kind: PolicyKind, spec: ParameterSpec, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not spec.low <= value <= spec.high:  # type: ignore[operator]  # is_number says so
        raise ConfigError(
            f"parameters.{spec.name}",
            f"{value!r} is out of range for {kind.name}: {spec.meaning}",
            f"a number from {spec.low:g} to {spec.high:g}; default {spec.default:g}",
        )

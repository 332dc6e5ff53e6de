"""Profiles from the three tables of measurements that a folder holds: speeds, statistics of the gradient, limits."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from swarmsched.errors import ConfigError
from swarmsched.replay.profiles import BatchLimits, EpochStatistics, Measured, Profile
from swarmsched.replay.table import Row, rows

THROUGHPUT = ("model", "placement", "num_nodes", "num_gpus", "local_bsz", "step_time_s", "sync_time_s")
VALIDATION = ("model", "batch_size", "epoch", "progress", "grad_sqr", "grad_var")
MODELS = ("model", "init_batch_size", "max_batch_size", "min_local_bsz", "max_local_bsz", "epochs")
SUFFIXES = ("throughput.csv", "validation.csv", "models.csv")
"""What the names of the three end in."""
STEP_LEAST_S = 1e-9
GRADIENT_LEAST, GRADIENT_MOST = 1e-30, 1e30


class TableSource(NamedTuple):
    """A table by the name of its file."""

    name: str
    lines: Iterable[str]


Statistics = Mapping[int, Sequence[EpochStatistics]]
"""By batch size, one for each epoch."""


def folder_profiles(folder: str, names: Collection[str], read: Callable[[str], Iterable[str]]) -> dict[str, Profile]:
    """The profiles of a folder whose files have these names; `read` gives the lines of one.  ConfigError as below."""
    found = []
    for suffix in SUFFIXES:
        # Tables that belong together begin alike: other measurements may lie beside them.
        beginnings = [name.removesuffix(suffix) for name in sorted(names) if name.endswith(suffix)]
        beginnings = [each for each in beginnings if f"{each}{SUFFIXES[-1]}" in names]
        if len(beginnings) != 1:
            problem = f"has {len(beginnings)} files *{suffix} that have a *{SUFFIXES[-1]} beside them"
            raise ConfigError(f"profiles {folder}", problem, "one *throughput.csv, *validation.csv and *models.csv")
        name = f"{beginnings[0]}{suffix}"
        found.append(TableSource(f"{folder.rstrip('/')}/{name}", read(name)))
    return profiles(*found)


def profiles(throughput: TableSource, validation: TableSource, models: TableSource) -> dict[str, Profile]:
    """Profiles by model; ConfigError names file, row, column and value of what cannot be used."""
    measured: dict[str, list[Measured]] = {}
    for row in rows(*throughput, THROUGHPUT):
        measured.setdefault(row.name("model"), []).append(_measured(row))
    statistics = _statistics(rows(*validation, VALIDATION))
    found: dict[str, Profile] = {}
    for row in rows(*models, MODELS):
        name, limits = row.name("model"), _limits(row)
        if name in found:
            raise row.error("model", f"{name!r} is there twice", "one row for each model")
        if name not in measured:
            remedy = f"measure it, or leave it out of {models.name}"
            raise ConfigError(throughput.name, f"has no row of model {name!r}", remedy)
        _check_statistics(validation.name, name, limits, statistics.get(name, {}))
        found[name] = Profile(name, limits, measured[name], statistics[name])
    return found


def _measured(row: Row) -> Measured:
    nodes, gpus, batch = (row.count(column, least=1) for column in ("num_nodes", "num_gpus", "local_bsz"))
    step_s, sync_s = row.seconds("step_time_s", STEP_LEAST_S), row.seconds("sync_time_s")
    if nodes > gpus:
        raise row.error("num_nodes", f"{nodes} are more than the {gpus} GPUs on them", f"a number from 1 to {gpus}")
    if sync_s > step_s:
        problem = f"{row['sync_time_s']!r} is longer than the step of {row['step_time_s']!r}, of which it is a part"
        raise row.error("sync_time_s", problem, "a part of step_time_s, both in seconds")
    return Measured(_shape(row, nodes, gpus), nodes, gpus, batch, step_s, sync_s, row.text("gpu"))


def _shape(row: Row, nodes: int, gpus: int) -> tuple[int, ...]:
    digits = row.text("placement")
    if digits and not (digits.isascii() and digits.isdecimal()):
        raise row.error("placement", f"{digits[:60]!r} cannot be used", "GPUs on each node, one digit a node, or empty")
    shape = tuple([int(digit) for digit in digits])
    if digits and (sum(shape), len([each for each in shape if each])) != (gpus, nodes):
        problem = f"{digits[:60]!r} are {sum(shape)} GPUs on {len(shape)} nodes"
        raise row.error("placement", problem, f"{gpus} on {nodes}, as num_gpus and num_nodes say, or empty")
    return shape


def _statistics(table: Iterable[Row]) -> dict[str, dict[int, list[EpochStatistics]]]:
    """By model and batch size; the epochs of each must follow one another, and lead on."""
    found: dict[str, dict[int, list[EpochStatistics]]] = {}
    for row in table:
        batch, epoch = row.count("batch_size", least=1), row.count("epoch", least=1)
        before = found.setdefault(row.name("model"), {}).setdefault(batch, [])
        if epoch != len(before) + 1:
            problem = f"{epoch} follows {len(before)} rows of model {row['model']!r} with batch_size {batch}"
            raise row.error("epoch", problem, f"epoch {len(before) + 1}: all from 1 on, in their order, each once")
        progress = row.amount("progress")
        if progress <= (before[-1].progress if before else 0.0):
            problem = f"{row['progress']!r} is no more than before that epoch"
            raise row.error("progress", problem, "steps of the first batch since the beginning of training")
        sqr, var = (row.amount(column, most=GRADIENT_MOST) for column in ("grad_sqr", "grad_var"))
        if sqr + var < GRADIENT_LEAST:
            problem = f"{row['grad_var']!r} beside a grad_sqr of {row['grad_sqr']}"
            raise row.error("grad_var", problem, f"one of the two from {GRADIENT_LEAST:g}")
        before.append(EpochStatistics(progress, sqr, var))
    return found


def _limits(row: Row) -> BatchLimits:
    limits = BatchLimits(*[row.count(column, least=1) for column in MODELS[1:]])
    if limits.batch_max < limits.initial_batch:
        problem = f"{limits.batch_max} is less than init_batch_size {limits.initial_batch}"
        raise row.error("max_batch_size", problem, f"a whole number from {limits.initial_batch}")
    if limits.local_batch_max < limits.local_batch_min:
        problem = f"{limits.local_batch_max} is less than min_local_bsz {limits.local_batch_min}"
        raise row.error("max_local_bsz", problem, f"a whole number from {limits.local_batch_min}")
    if limits.local_batch_min > limits.initial_batch:
        problem = f"{limits.local_batch_min} is more than init_batch_size {limits.initial_batch}"
        raise row.error("min_local_bsz", problem, f"a whole number from 1 to {limits.initial_batch}")
    return limits


def _check_statistics(file: str, model: str, limits: BatchLimits, by_batch: Statistics) -> None:
    if limits.initial_batch not in by_batch or len(by_batch) < 2:
        remedy = f"epochs at the first batch size {limits.initial_batch} and at one more"
        raise ConfigError(file, f"has too little of model {model!r}", remedy)
    for batch, epochs in by_batch.items():
        if len(epochs) < limits.epochs:
            problem = f"{model} at batch {batch} has {len(epochs)} epochs"
            raise ConfigError(file, problem, f"one row for each of {limits.epochs}")

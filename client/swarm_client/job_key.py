"""What can be said about a job: the keys of job files and of `[job]` tables, each with its option and its reader.

A plain key comes from the table of a job's fields.  What stands here sets several fields at once, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from swarm_client.options import Option
from swarm_client.quantity import deadline, duration, number, size, whole
from swarmsched.specification import (
    BATCH_LIMIT,
    FIELDS,
    GROUP_KEYS,
    OUTER_ALONE,
    RANKS_LIMIT,
    WORK_EXAMPLE,
    SpecField,
    outer_terms,
)

LOCAL_BATCH_EXAMPLE = "8:64,a100=128,t4=16"


def _gres(text: str) -> dict[str, object]:
    """Keys of a job for Slurm's `gpu:4` or `gpu:h200:4`."""
    from swarm_client.slurm import gres  # only who comes from there needs it

    return gres(text)


def _name(text: str) -> str:
    if text.startswith("@") or "/" in text:
        raise ValueError("must not begin with '@' or hold a '/', which say other things where jobs are named")
    if text.startswith("-") or text in (".", "..") or text != text.strip():
        raise ValueError(
            "must not be '.' or '..', nor begin with '-', nor begin or end with a blank: nobody can type it"
        )
    return text


def _gpus(text: str) -> int | str:
    """A number, or MIN:MAX as it is."""
    if ":" not in text:
        return whole(0, RANKS_LIMIT)(text)
    kind, _, count = text.partition(":")
    if kind[:1].isalpha():
        raise ValueError(f"must be N or MIN:MAX; a type is given apart, as in -g {count or 1} --gpu-type {kind}")
    return _range(text, RANKS_LIMIT, ("MIN", "MAX"), "2:8")


def gpu_range(text: str) -> tuple[int, int]:
    """The least and the most of N or MIN:MAX; `ValueError` with what is wrong."""
    least, _, most = str(_gpus(text)).partition(":")
    if least == "0":
        raise ValueError("must be at least 1")
    return int(least), int(most or least)


def _batch(text: str) -> str:
    """N, or N:MAX, as it is."""
    return _range(text, BATCH_LIMIT, ("N", "MAX"), "128:4096")


def _local_batch(text: str) -> str:
    """MAX, or MIN:MAX, and other limits by parts of GPUs' models, as it is."""
    plain, *others = [part.strip() for part in text.split(",")]
    if "=" in plain:
        raise ValueError(f"begins with {plain!r}; begin with the limit on all other GPUs, as in {LOCAL_BATCH_EXAMPLE}")
    _range(plain, BATCH_LIMIT, ("MIN", "MAX") if ":" in plain else ("MAX",), "8:32")
    named = set[str]()
    for part in others:
        gpu, equals, most = (piece.strip() for piece in part.partition("="))
        if not gpu or not equals:
            raise ValueError(f"{part!r} must be GPU=MAX, as in {LOCAL_BATCH_EXAMPLE}")
        if gpu.lower() in named:
            raise ValueError(f"{gpu} is named twice; name each part of a model once")
        named.add(gpu.lower())
        try:
            whole(1, BATCH_LIMIT)(most)
        except ValueError as error:
            raise ValueError(f"MAX {most!r} of {gpu} {error}, as in {LOCAL_BATCH_EXAMPLE}") from None
    return text


def local_limits(text: str) -> tuple[str, dict[str, int]]:
    """What was read above: the range, and the limits by part of a GPU's model."""
    plain, *others = text.split(",")
    limits = [part.split("=") for part in others]
    return plain.strip(), {gpu.strip(): int(most) for gpu, most in limits}


def _range(text: str, most: int, ends: tuple[str, ...], example: str) -> str:
    """One number or two in order, as they are; `ends` are their names for who gave another."""
    parts = text.split(":", 1)
    for end, part in zip(ends, parts, strict=False):
        try:
            whole(1, most)(part)
        except ValueError as error:
            of = f"{end} {part!r} " if len(parts) > 1 else ""
            raise ValueError(f"{of}{error}{f', as in {example}' if of else ''}") from None
    if int(parts[0]) > int(parts[-1]):
        raise ValueError(f"{ends[0]} {parts[0]} is larger than {ends[1]} {parts[1]}; write {parts[1]}:{parts[0]}")
    return text


def _work(text: str) -> dict[str, float]:
    """NAME=NUMBER, comma separated; bytes may have a unit."""
    figures: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name in figures:
            raise ValueError(f"{name} is given twice")
        try:
            figures[name] = size(value) if name.endswith("_bytes") else number(value)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ValueError(f"{part!r} must be NAME=NUMBER, as in {WORK_EXAMPLE}") from None
    return figures


def _outer(text: str) -> str:
    """As it is, once it can be read."""
    outer_terms(text)
    return text


_WAYS: dict[str, tuple[Callable[[str], object] | None, tuple[type, ...]]] = {
    "bytes": (size, (str, int)),
    "seconds": (duration, (str, int, float)),
    "moment": (deadline, (str,)),
    "variables": (None, (dict,)),
    **dict.fromkeys(("nodes", "labels"), (None, (list, str))),
    "work": (_work, (str, dict)),
    "outer": (_outer, (str,)),
}
"""By the kind of a field: what reads it, and the types that a file may have; of all others text is taken as it is."""


def _options(row: SpecField) -> list[Option]:
    """The options of a field."""
    if row.kind == "flag":
        off = [Option(f"--no-{row.option[2:]}", row.off, key=row.by, value=False)] if row.off else []
        return [Option(row.option, row.text), *off]
    read, kinds = _WAYS.get(row.kind, (_name if row.key == "name" else None, (str,)))
    if row.kind == "whole":
        read, kinds = whole(row.low, row.high), (int,)
    alone = OUTER_ALONE if row.kind == "outer" else ""
    repeats, choices = row.kind in ("variables", "nodes", "labels"), row.choices if row.kind == "choice" else ()
    return [
        Option(row.option, row.text, row.metavar, read=read, kinds=kinds, repeats=repeats, choices=choices, alone=alone)
    ]


# fmt: off
OWN = (
    Option("-g --gpus", "GPUs in all: N ranks with one GPU each; MIN:MAX: as many as pay", "N", read=_gpus,
           kinds=(str, int)),
    Option("--env-file", "read variables from a file of K=V lines", "FILE", kinds=(str,)),
    Option("--include", "ship this as well, although git ignores it: data/, '*.pt' (repeatable)", "PATTERN",
           repeats=True, kinds=(list, str)),
    Option("--batch", "global batch to begin with, and the largest that the swarm may choose", "N:MAX", read=_batch,
           kinds=(str, int)),
    Option("--local-batch",
           "samples of one rank at once (default 1:MAX of --batch), and another MAX by part of a GPU's model",
           "MIN:MAX[,GPU=MAX]", read=_local_batch, kinds=(str, int)),
    Option("--sync", "ship the working directory", key="sync"),
    Option("--no-sync", "use the same path on the nodes", key="sync", value=False),
)
# fmt: on
"""Options that set several fields at once, or none."""
_HELP_ORDER = (
    "gpus name time deadline env env_file workdir venv requirements include ranks gpus_per_rank cpus mem gpu_type "
    "gpu_mem priority queue node exclude require grace max_restarts on_isolation batch local_batch work "
    "sync per_node elastic outer restartable mixed_gpus slurm_env"
)
"""What is asked for most goes first, what is not named here last."""
_ASKED = sorted(
    (*OWN, *(option for row in FIELDS if row.option for option in _options(row))),
    key=lambda option: f" {_HELP_ORDER} {option.key} ".index(f" {option.key} "),
)
BY_NAME = {option.key: option for option in _ASKED if option.kinds}
FLAGS = ("sync", *(row.by for row in FIELDS if row.kind == "flag"))
FILE_ONLY = ("command", *FLAGS)
NAMES = (*BY_NAME, *FILE_ONLY)
GROUP_NAMES = ("name", "gpus", *(row.by or row.key for row in FIELDS if row.key in GROUP_KEYS))
"""Keys of each `[[group]]` of a job file."""
FIRST_GROUP_NAMES = ("elastic", "batch", "local_batch", "work", "outer")
"""Those that the first group may have beside: it alone may be of several sizes."""

LATER = {
    "ntasks": "--ranks N starts N processes; with GPUs -g N does",
    "nodes": "--per-node starts one process on each node; --node NAMES chooses nodes",
    "partition": "leave it out: all nodes are one; --node, --exclude and --gpu-type choose among them",
    "image": "",
    "array": "",
    "after": "",
    "after_ok": "",
    "after_any": "",
    "restart": "--restartable lets it be stopped and begun again; --max-restarts N counts lost nodes",
    "dependency": "",
}

OPTIONS: tuple[Option, ...] = (
    *_ASKED,
    Option("-f --file", "job file, TOML or YAML", "FILE", once=True),
    Option("--dry-run", "check the request and say what would happen"),
    Option("-y --yes", "do not ask", hidden=True),
    Option("--gres", "as in Slurm: gpu:N or gpu:TYPE:N", "gpu:N", read=_gres, hidden=True, once=True),
    Option(
        "-i --interactive --tty", "jobs are not interactive: they have neither terminal nor standard input", later=True
    ),
    *(Option(f"--{name.replace('_', '-')}", text, "X", later=True) for name, text in LATER.items()),
    Option("-N", LATER["nodes"], "X", later=True),
)


def check_value(name: str, value: object) -> object:
    """The value of a key as found in a file; raise `ValueError` with what would be accepted."""
    if name in FLAGS:
        return _flag(value)
    if name == "command":
        return _command(value)
    key = BY_NAME[name]
    if name == "env":
        return _environment(value)
    if key.repeats:
        return _names(value)
    if name == "work" and isinstance(value, Mapping):
        return _work(",".join(f"{figure}={number}" for figure, number in value.items()))
    if isinstance(value, bool) or not isinstance(value, key.kinds):
        raise ValueError(f"must be {_spoken(key.kinds)}, not {value!r}")
    if isinstance(value, float) and not 0 <= value < math.inf:
        raise ValueError(f"{value:g} must be a finite number that is not negative")
    text = str(value)
    if key.choices and text not in key.choices:
        raise ValueError(f"must be one of {', '.join(key.choices)}")
    if key.read is None:
        return text
    return value if isinstance(value, float) else key.read(text)


def option_of(place: str) -> str:
    """What sets the place of a specification that an agent found fault with: `--node`, `--env SEED`.

    A place in a list is told by its value; what no option sets is named as it is.
    """
    name, _, inner = place.partition("/")
    key = next((row.by for row in FIELDS if row.key == name), "")
    if not key:
        return place.replace("/", ".")
    if key == "group":  # the table of a job file, counted from 1
        number, _, field = inner.partition("/")
        return f"[[group]] {int(number) + 2} {field}".rstrip() if number.isdecimal() else "[[group]]"
    option = f"--{key.replace('_', '-')}"
    return option if not inner or inner.isdecimal() else f"{option} {inner}"


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


def _command(value: object) -> list[str]:
    if isinstance(value, str) and value.strip():
        import shlex  # only job files need it

        return shlex.split(value)
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return list(value)
    raise ValueError('must be a list of words such as ["python", "train.py"], or one line of text')


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(v, str | int | float) for v in value.values()):
        raise ValueError("must be a table of names and values")
    return {str(name): str(text).lower() if isinstance(text, bool) else str(text) for name, text in value.items()}


def _names(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return list(value)
    raise ValueError("must be a list of names")


def _spoken(kinds: tuple[type, ...]) -> str:
    words = {str: "text", int: "a whole number", float: "a number", dict: "a table", list: "a list"}
    return " or ".join(words[kind] for kind in kinds)

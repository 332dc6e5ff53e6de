"""What can be said about a job: the keys of job files and of `[job]` tables, each with its option and its reader."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from swarm_client.options import Option
from swarm_client.quantity import deadline, duration, number, size, whole

GPUS_MOST = 4_096
BATCH_MOST = 2**31
LOCAL_BATCH_EXAMPLE = "8:64,a100=128,t4=16"
WORK_EXAMPLE = "local_batch=32,sample_flops=8.2e9,parameter_bytes=97M"


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
        return whole(0, GPUS_MOST)(text)
    kind, _, count = text.partition(":")
    if kind[:1].isalpha():
        raise ValueError(f"must be N or MIN:MAX; a type is given apart, as in -g {count or 1} --gpu-type {kind}")
    return _range(text, GPUS_MOST, ("MIN", "MAX"), "2:8")


def gpu_range(text: str) -> tuple[int, int]:
    """The least and the most of N or MIN:MAX; `ValueError` with what is wrong."""
    least, _, most = str(_gpus(text)).partition(":")
    if least == "0":
        raise ValueError("must be at least 1")
    return int(least), int(most or least)


def _batch(text: str) -> str:
    """N, or N:MAX, as it is."""
    return _range(text, BATCH_MOST, ("N", "MAX"), "128:4096")


def _local_batch(text: str) -> str:
    """MAX, or MIN:MAX, and other limits by parts of GPUs' models, as it is."""
    plain, *others = [part.strip() for part in text.split(",")]
    if "=" in plain:
        raise ValueError(f"begins with {plain!r}; begin with the limit on all other GPUs, as in {LOCAL_BATCH_EXAMPLE}")
    _range(plain, BATCH_MOST, ("MIN", "MAX") if ":" in plain else ("MAX",), "8:32")
    named = set[str]()
    for part in others:
        gpu, equals, most = (piece.strip() for piece in part.partition("="))
        if not gpu or not equals:
            raise ValueError(f"{part!r} must be GPU=MAX, as in {LOCAL_BATCH_EXAMPLE}")
        if gpu.lower() in named:
            raise ValueError(f"{gpu} is named twice; name each part of a model once")
        named.add(gpu.lower())
        try:
            whole(1, BATCH_MOST)(most)
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


class JobKey(Option):
    """One key, and the option that sets it; `kinds` are the types that a file may use instead of text."""

    __slots__ = ("kinds",)

    def __init__(
        self,
        name: str,
        names: str,
        metavar: str,
        summary: str,
        read: Callable[[str], object] | None = None,
        *,
        kinds: tuple[type, ...] = (str,),
        repeats: bool = False,
        choices: tuple[str, ...] = (),
    ) -> None:
        super().__init__(names, summary, metavar, key=name, read=read, repeats=repeats, choices=choices)
        self.kinds = kinds


_NUMBER = (int,)

KEYS: tuple[JobKey, ...] = (
    JobKey(
        "gpus",
        "-g --gpus",
        "N",
        "GPUs in all: N ranks with one GPU each; MIN:MAX: as many as pay",
        _gpus,
        kinds=(str, int),
    ),
    JobKey("name", "-n -J --name --job-name", "NAME", "a name to find the job by", _name),
    JobKey(
        "time",
        "-t --time",
        "TIME",
        "limit of the job, from its start: 30s, 10m, 2h or HH:MM:SS; a bare number is seconds",
        duration,
        kinds=(str, int, float),
    ),
    JobKey(
        "deadline",
        "--deadline",
        "TIME",
        "when it should have ended: 2h from now, 17:30 or 2026-01-31T17:30+01:00; it is not stopped then",
        deadline,
    ),
    JobKey("env", "-e --env", "K=V", "set a variable; K alone copies yours (repeatable)", repeats=True, kinds=(dict,)),
    JobKey("env_file", "--env-file", "FILE", "read variables from a file of K=V lines"),
    JobKey("workdir", "-w --workdir", "PATH", "folder to run in (default: here)"),
    JobKey("venv", "--venv", "PATH", "Python environment on the nodes to run in"),
    JobKey(
        "requirements",
        "--requirements",
        "FILE",
        "build a Python environment from this requirements.txt or pyproject.toml",
    ),
    JobKey(
        "include",
        "--include",
        "PATTERN",
        "ship this as well, although git ignores it: data/, '*.pt' (repeatable)",
        repeats=True,
        kinds=(list, str),
    ),
    JobKey("ranks", "--ranks", "N", "processes to start, for CPU jobs or other shapes", whole(1, 4_096), kinds=_NUMBER),
    JobKey("gpus_per_rank", "--gpus-per-rank", "N", "GPUs of each rank (default 1)", whole(0, 64), kinds=_NUMBER),
    JobKey("cpus", "-c --cpus", "N", "cores for each rank", whole(0, 4_096), kinds=_NUMBER),
    JobKey("mem", "--mem", "SIZE", "memory for each rank, for example 16G", size, kinds=(str, int)),
    JobKey("gpu_type", "--gpu-type", "TEXT", "part of the model's name, for example H200"),
    JobKey("gpu_mem", "--gpu-mem", "SIZE", "least memory of each GPU", size, kinds=(str, int)),
    JobKey("priority", "-p --priority", "N", "larger goes first (-1000 to 1000)", whole(-1_000, 1_000), kinds=_NUMBER),
    JobKey("queue", "--queue", "NAME", "queue to wait in"),
    JobKey(
        "node",
        "--node",
        "NAMES",
        "run on these nodes only, comma separated (repeatable)",
        repeats=True,
        kinds=(list, str),
    ),
    JobKey("exclude", "--exclude", "NAMES", "never run on these nodes (repeatable)", repeats=True, kinds=(list, str)),
    JobKey(
        "grace", "--grace", "TIME", "time between SIGTERM and SIGKILL (default 30s)", duration, kinds=(str, int, float)
    ),
    JobKey(
        "max_restarts",
        "--max-restarts",
        "N",
        "times to run it again after a node was lost (default 5)",
        whole(0, 1_000),
        kinds=_NUMBER,
    ),
    JobKey(
        "on_isolation",
        "--on-isolation",
        "POLICY",
        "when a node is cut off: pause its ranks (default), or continue",
        choices=("pause", "continue"),
    ),
    JobKey(
        "batch",
        "--batch",
        "N:MAX",
        "global batch to begin with, and the largest that the swarm may choose",
        _batch,
        kinds=(str, int),
    ),
    JobKey(
        "local_batch",
        "--local-batch",
        "MIN:MAX[,GPU=MAX]",
        "samples of one rank at once (default 1:MAX of --batch), and another MAX by part of a GPU's model",
        _local_batch,
        kinds=(str, int),
    ),
    JobKey(
        "work",
        "--work",
        "FIGURES",
        f"what the model computes and moves, for the policy dike: {WORK_EXAMPLE}",
        _work,
        kinds=(str, dict),
    ),
)

BY_NAME = {key.key: key for key in KEYS}
FLAGS = ("sync", "per_node", "elastic", "slurm_env", "restartable", "mixed_gpus")
FILE_ONLY = ("command", *FLAGS)
NAMES = (*BY_NAME, *FILE_ONLY)

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
    *KEYS,
    Option("--sync", "ship the working directory", key="sync"),
    Option("--no-sync", "use the same path on the nodes", key="sync", value=False),
    Option("--per-node", "one process for each node, which is given all its GPUs (torchrun)", key="per_node"),
    Option("--elastic", "the script imports swarm_elastic: ranks come and go while it trains", key="elastic"),
    Option(
        "--restartable", "may be stopped for other jobs, and begun again even without a checkpoint", key="restartable"
    ),
    Option(
        "--no-restartable",
        "is never stopped without a checkpoint, whatever the default",
        key="restartable",
        value=False,
    ),
    Option("--mixed-gpus", "its ranks may be on GPUs of several models at once", key="mixed_gpus"),
    Option("--slurm-env", "set SLURM_PROCID, SLURM_NTASKS and others, for scripts written for Slurm", key="slurm_env"),
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

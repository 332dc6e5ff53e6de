"""The table of a job's specification: one row for each field, from which every door to it is made.

From the rows come the reader of JSON and its problems, the JSON Schema, the options of `swarm run` and `submit` with
their completion, the keys of job files and of `SWARM_RUN_*` variables, and docs/reference/specification.md.  A plain
field is a row here and a line in `api.JobSpec`.  The module imports nothing: a client reads it at each submission.
"""

from __future__ import annotations

PRIORITY_LIMIT = 1_000
RANKS_LIMIT = 4_096
BATCH_LIMIT = 2**31
WORDS_LIMIT = 4_096
VARIABLES_LIMIT = 1_024
ENVIRONMENT_BYTES_LIMIT = 32_768  # of a job's variables, which travel in its record
NODES_LIMIT = 512
SOURCES_LIMIT = 16
LABELS_LIMIT = 8
GROUPS_LIMIT = 7  # beside the first
GPU_BATCHES_MOST = 8
QUEUES = ("default",)
OUTER_STEPS_LIMIT = 1_000_000
OUTER_AUTO_LEAST = 8
OUTER_WIRES = ("int8", "float32")
OUTER_EXAMPLE = "every=64,overlap=0,quorum=half,wire=int8"
OUTER_ALONE = "on"
WORK_EXAMPLE = "local_batch=32,sample_flops=8.2e9,parameter_bytes=97M"
BY_GPU = "local_batch_most_by_gpu"


class SpecField:
    """One field of a job's specification.

    `key` names it in the API; `place` is its attribute of `JobSpec`.  `kind` chooses its reader, schema and option;
    `low` and `high` bound a number, `high` alone the length of a text or list.  `option` holds the spellings of its
    option, the first long one is its key in job files; `off` is the sentence of a flag's `--no-` form.  A field without
    an option may be set `by` another key, such as `gpus`.  A job with one that is `binding` would become another job at
    an agent of before `since`, which drops it.
    """

    __slots__ = (
        "binding",
        "by",
        "choices",
        "high",
        "key",
        "kind",
        "low",
        "metavar",
        "off",
        "option",
        "place",
        "since",
        "text",
    )

    def __init__(
        self,
        key: str,
        kind: str,
        option: str,
        metavar: str,
        text: str,
        *,
        place: str = "",
        low: int = 0,
        high: int = 0,
        choices: tuple[str, ...] = (),
        off: str = "",
        by: str = "",
        since: str = "0.1.0",
        binding: bool = False,
    ) -> None:
        self.key, self.kind, self.option, self.metavar, self.text = key, kind, option, metavar, text
        self.place, self.low, self.high, self.choices, self.off = place or key, low, high, choices, off
        long = next((word for word in option.split() if word.startswith("--")), "")
        self.by = by or long[2:].replace("-", "_")
        self.since, self.binding = since, binding


# fmt: off
FIELDS = (
    SpecField("command", "words", "", "", "program and its arguments", high=WORDS_LIMIT),
    SpecField("name", "text", "-n -J --name --job-name", "NAME", "a name to find the job by", high=63),
    SpecField("user", "text", "", "", "who submits it", high=63),
    SpecField("queue", "queue", "--queue", "NAME", "queue to wait in", choices=QUEUES),
    SpecField("priority", "whole", "-p --priority", "N", "larger goes first (-1000 to 1000)",
              low=-PRIORITY_LIMIT, high=PRIORITY_LIMIT),
    SpecField("ranks", "whole", "--ranks", "N", "processes to start, for CPU jobs or other shapes",
              low=1, high=RANKS_LIMIT),
    SpecField("ranks_most", "whole", "", "", "the largest world size; 0: always `ranks`", by="gpus", high=RANKS_LIMIT),
    SpecField("global_batch", "whole", "", "", "global batch to begin with; 0: the swarm chooses none",
              place="batches.first", by="batch", high=BATCH_LIMIT),
    SpecField("global_batch_most", "whole", "", "", "the largest that the swarm may choose",
              place="batches.most", by="batch", high=BATCH_LIMIT),
    SpecField("local_batch_least", "whole", "", "", "samples of one rank at once, at least",
              place="batches.local_least", by="local_batch", high=BATCH_LIMIT),
    SpecField("local_batch_most", "whole", "", "", "samples of one rank at once, at most",
              place="batches.local_most", by="local_batch", high=BATCH_LIMIT),
    SpecField(BY_GPU, "gpu_limits", "", "", "another most, by part of a GPU's model", place="batches.by_gpu",
              by="local_batch", high=GPU_BATCHES_MOST, since="0.2.0"),
    SpecField("work", "work", "--work", "FIGURES",
              f"what the model computes and moves, by which hosts are chosen: {WORK_EXAMPLE}"),
    SpecField("gpus_per_rank", "whole", "--gpus-per-rank", "N", "GPUs of each rank (default 1)",
              place="demand.gpus", high=64),
    SpecField("cpus_per_rank", "whole", "-c --cpus", "N", "cores for each rank", place="demand.cpus", high=4_096),
    SpecField("memory_bytes_per_rank", "bytes", "--mem", "SIZE", "memory for each rank, for example 16G",
              place="demand.memory_bytes", high=2**50),
    SpecField("gpu_type", "text", "--gpu-type", "TEXT", "part of the model's name, for example H200",
              place="demand.gpu_type", high=63),
    SpecField("gpu_memory_bytes", "bytes", "--gpu-mem", "SIZE", "least memory of each GPU",
              place="demand.gpu_memory_bytes", high=2**50),
    SpecField("per_node", "flag", "--per-node", "",
              "one process for each node, which is given all its GPUs (torchrun)"),
    SpecField("env", "variables", "-e --env", "K=V", "set a variable; K alone copies yours (repeatable)",
              high=VARIABLES_LIMIT),
    SpecField("workdir", "path", "-w --workdir", "PATH", "folder to run in (default: here)", high=1_024),
    SpecField("tree", "digest", "", "", "the shipped working directory", high=64),
    SpecField("requirements", "digest", "--requirements", "FILE",
              "build a Python environment from this requirements.txt or pyproject.toml", high=64),
    SpecField("venv", "text", "--venv", "PATH", "Python environment on the nodes to run in", high=1_024),
    SpecField("time_limit_seconds", "seconds", "-t --time", "TIME",
              "limit of the job, from its start: 30s, 10m, 2h or HH:MM:SS; a bare number is seconds",
              place="time_limit_s", high=10 * 365 * 86_400),
    SpecField("grace_seconds", "seconds", "--grace", "TIME", "time between SIGTERM and SIGKILL (default 30s)",
              place="grace_s", high=86_400),
    SpecField("nodes", "nodes", "--node", "NAMES", "run on these nodes only, comma separated (repeatable)",
              high=NODES_LIMIT),
    SpecField("exclude", "nodes", "--exclude", "NAMES", "never run on these nodes (repeatable)", high=NODES_LIMIT),
    SpecField("require", "labels", "--require", "LABELS",
              "run on nodes that have these labels only: nvlink, engine=docker (repeatable)",
              place="demand.labels", high=LABELS_LIMIT, since="0.2.0", binding=True),
    SpecField("on_isolation", "choice", "--on-isolation", "POLICY",
              "when a node is cut off: pause its ranks (default), or continue", choices=("pause", "continue")),
    SpecField("blob_sources", "nodes", "", "", "agents that hold `tree` and `requirements`", high=SOURCES_LIMIT),
    SpecField("umask", "whole", "", "", "mask of the modes of files that its ranks make", high=0o777),
    SpecField("tree_bytes", "bytes", "", "", "size of the shipped tree, for display", place="held_bytes", high=2**50),
    SpecField("max_restarts", "whole", "--max-restarts", "N", "times to run it again after a node was lost (default 5)",
              high=1_000),
    SpecField("elastic", "flag", "--elastic", "",
              "the script imports swarm_elastic: ranks come and go while it trains"),
    SpecField("slurm_env", "flag", "--slurm-env", "",
              "set SLURM_PROCID, SLURM_NTASKS and others, for scripts written for Slurm", since="0.2.0"),
    SpecField("restartable", "flag", "--restartable", "",
              "may be stopped for other jobs, and begun again even without a checkpoint",
              off="is never stopped without a checkpoint, whatever the default", since="0.2.0"),
    SpecField("deadline_utc_seconds", "moment", "--deadline", "TIME",
              "when it should have ended: 2h from now, 17:30 or 2026-01-31T17:30+01:00; it is not stopped then",
              place="deadline_utc_s", high=10**10, since="0.2.0"),
    SpecField("mixed_gpus", "flag", "--mixed-gpus", "",
              "let ranks be on GPUs of several models at once", since="0.2.0"),
    SpecField("group", "name", "", "", "name of the group that command, ranks and what each needs describe",
              by="group", high=32, since="0.2.0", binding=True),
    SpecField("groups", "groups", "", "", "groups of ranks beside the first, each with its own command", by="group",
              high=GROUPS_LIMIT, since="0.2.0", binding=True),
    SpecField("outer", "outer", "--outer", "[HOW]",
              f"ranks train apart, and the script's swarm_elastic.Outer merges them as said here: {OUTER_EXAMPLE}",
              high=200, since="0.2.0"),
)
# fmt: on
"""In the order of the API's documents."""

GROUP_KEYS = ("command", "ranks", "gpus_per_rank", "cpus_per_rank", "memory_bytes_per_rank", "gpu_type",
              "gpu_memory_bytes", "require", "per_node", "env")  # fmt: skip
"""Fields that each group beside the first has of its own, with its name."""


def outer_terms(text: str) -> dict[str, int | str]:
    """How ranks train apart, by name; `on` leaves all of it to the script.  Raises ValueError with what is wrong."""
    found: dict[str, int | str] = {}
    for part in () if text == OUTER_ALONE else text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _OUTER:
            raise ValueError(f"{part!r} must be NAME=VALUE, where NAME is {', '.join(_OUTER)}, as in {OUTER_EXAMPLE}")
        if name in found:
            raise ValueError(f"{name} is given twice; give it once")
        low, high, words = _OUTER[name]
        if value in words:
            found[name] = value
        elif value.isascii() and value.isdecimal() and low <= int(value[:10]) <= high:
            found[name] = int(value)
        else:
            remedies = [f"a whole number from {low} to {high}"] * bool(high) + list(words)
            raise ValueError(f"{name} is {value!r}; it must be {' or '.join(remedies)}")
    every, overlap = found.get("every", OUTER_STEPS_LIMIT), found.get("overlap", 0)
    most = OUTER_AUTO_LEAST if isinstance(every, str) else every
    if isinstance(overlap, int) and overlap > most:
        raise ValueError(f"overlap is {overlap}; it must be at most {most} where every is {every}")
    return found


_OUTER: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "every": (1, OUTER_STEPS_LIMIT, ("auto",)),
    "overlap": (0, OUTER_STEPS_LIMIT, ()),
    "quorum": (1, RANKS_LIMIT, ("half",)),
    "wire": (0, 0, OUTER_WIRES),
}
"""What may be said of training apart: the least and the most of its number, and the words that it may be."""

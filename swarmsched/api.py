"""Types of the HTTP API that agent and client share: the job specification and its validation, states, reasons.

A specification is checked in one place, here: the client calls `JobSpec.from_json` before it submits, the agent
calls it again on what arrives.  All problems of a request are reported together, each with a JSON pointer, the value
and a remedy.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any, ClassVar

from msgspec import Meta, field
from msgspec.structs import replace

from swarmsched.errors import FieldProblem, JobRejected, ProtocolError
from swarmsched.estimate import BatchRange, GpuBatch, StepCost
from swarmsched.fields import (
    I32,
    U16,
    U32,
    U53,
    Digest,
    LongText,
    Name,
    NodeName,
    Seconds,
    Text,
    Value,
    is_text,
)
from swarmsched.ids import NodeId, is_node_name
from swarmsched.resources import LABEL_FORM, Demand, GroupNeed, is_label, with_beside
from swarmsched.specification import (
    BATCH_LIMIT,
    BY_GPU,
    ENVIRONMENT_BYTES_LIMIT,
    FIELDS,
    GROUP_KEYS,
    GROUPS_LIMIT,
    NODES_LIMIT,
    OUTER_ALONE,
    OUTER_EXAMPLE,
    RANKS_LIMIT,
    SOURCES_LIMIT,
    VARIABLES_LIMIT,
    WORDS_LIMIT,
    SpecField,
    outer_terms,
)
from swarmsched.world import WORKERS_MAX

API_VERSION = "v1"
DEFAULT_QUEUE = "default"
DEFAULT_GRACE_S = 30.0
DEFAULT_MAX_RESTARTS = 5
MODEL_LIMIT = 63  # letters of a part of a GPU's model
_GROUP_NAME = re.compile(r"[a-z][a-z0-9_-]*")
WORK_NEEDED = ("local_batch", "sample_flops", "parameter_bytes")
WORK_COUNTS = ("local_batch", "optimizer_slots")
WORK_LIMITS = dict.fromkeys(StepCost.__struct_fields__, 10**18) | {"local_batch": BATCH_LIMIT, "optimizer_slots": 255}
COMMAND_BYTES_LIMIT = 32_768
PROBLEMS_LIMIT = 20  # reported of one request; looking for near words takes its time
KEY_SHOWN = 80
NODE_CLOSENESS = 0.7  # of names of nodes, which are alike among themselves
VARIABLE_NAME_LIMIT = 256

Environment = Annotated[
    Mapping[Annotated[str, Meta(max_length=VARIABLE_NAME_LIMIT)], LongText], Meta(max_length=VARIABLES_LIMIT)
]


class JobState(Enum):
    """Where a job is in its life; `starting` carries a phase as well."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class StartPhase(Enum):
    """What a starting job is doing."""

    NONE = ""
    PLACE = "place"
    SYNC = "sync"
    ENVIRONMENT = "environment"
    LAUNCH = "launch"


class EndReason(Enum):
    """Why a job ended."""

    NONE = ""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    NODE_LOST = "node_lost"
    OOM = "oom"
    PREEMPTED = "preempted"
    RESCALED = "rescaled"


END_REASONS = tuple(each.value for each in EndReason if each not in (EndReason.NONE, EndReason.RESCALED))
"""What is told of ended jobs; one whose ranks were ended for another size waits to run again."""
COMING_BACK = (EndReason.PREEMPTED, EndReason.RESCALED)
"""A gang that is stopped for these is queued again."""


class Isolation(Enum):
    """What ranks do when their node loses contact with the job's holders."""

    PAUSE = "pause"
    CONTINUE = "continue"


class RankGroup(Value):
    """Ranks of a job with a command and a demand of their own, beside those of its first group.

    The job ends with its first group: ranks of others that still run are told to stop then.
    """

    name: Name
    command: Annotated[tuple[LongText, ...], Meta(max_length=WORDS_LIMIT)]
    ranks: U16 = 1
    demand: Demand = field(default_factory=Demand)
    per_node: bool = False
    env: Environment = field(default_factory=dict)  # all of it: those of the first group are not set here


class JobSpec(Value):
    """What a user asked for; once accepted nothing of it changes but the world sizes, which people may (`ScaleJob`).

    `ranks` processes are started, each with `demand`.  With `per_node`, one process per node is started instead and
    given all GPUs that the job holds there (for scripts that start their own workers).  With `ranks_most` the world
    size may be any from `ranks` up to it, and another one at each attempt; with `elastic` also within an attempt.
    `tree` is the digest of a shipped working directory (see the blob store), `requirements` that of a requirements
    file; `workdir` is a path on the nodes, used when nothing is shipped, or a sub-folder of the tree.
    """

    command: Annotated[tuple[LongText, ...], Meta(max_length=WORDS_LIMIT)]
    name: Name = ""
    user: Name = ""
    queue: Name = DEFAULT_QUEUE
    priority: I32 = 0
    ranks: U16 = 1
    demand: Demand = field(default_factory=Demand)
    per_node: bool = False
    env: Environment = field(default_factory=dict)
    workdir: Text = ""
    tree: Digest = ""
    requirements: Digest = ""
    venv: Text = ""
    time_limit_s: Seconds = 0.0  # 0: none
    grace_s: Seconds = DEFAULT_GRACE_S
    nodes: Annotated[tuple[NodeName, ...], Meta(max_length=NODES_LIMIT)] = ()
    exclude: Annotated[tuple[NodeName, ...], Meta(max_length=NODES_LIMIT)] = ()
    on_isolation: Isolation = Isolation.PAUSE
    # Agents that hold tree and requirements.
    blob_sources: Annotated[tuple[NodeName, ...], Meta(max_length=SOURCES_LIMIT)] = ()
    umask: U32 = 0o022
    held_bytes: U53 = 0  # bytes of the shipped tree, for display
    max_restarts: U16 = DEFAULT_MAX_RESTARTS  # how often it is run again after a node was lost
    ranks_most: U16 = 0  # 0: its world size is `ranks`, always
    batches: BatchRange = BatchRange()  # frozen; which global batches its script lets the swarm choose
    work: StepCost | None = None  # what its model computes and moves in a step, for policies that choose hosts by it
    elastic: bool = False  # its script imports swarm_elastic: ranks join and leave while it trains
    slurm_env: bool = False  # its ranks find what Slurm would tell them, by Slurm's names
    restartable: bool = False  # it may be stopped and begun again, though it has committed no checkpoint
    deadline_utc_s: Seconds = 0.0  # by when it is to have ended, seconds since 1970; 0: none
    mixed_gpus: bool = False  # its ranks may be on GPUs of several models at once
    group: Name = ""  # the name of its first group, which all the fields above describe
    groups: Annotated[tuple[RankGroup, ...], Meta(max_length=GROUPS_LIMIT)] = ()  # beside it, all of a fixed size
    outer: Text = ""  # how ranks of its first group train apart, by `specification.outer_terms`; empty: nobody said

    @property
    def is_resizable(self) -> bool:
        """True for a job that takes several world sizes, or several batches."""
        return self.ranks_most > self.ranks or self.batches.most > self.batches.first

    @property
    def size_range(self) -> str:
        """The world sizes that it takes, for people."""
        return f"{self.ranks} to {self.ranks_most}" if self.ranks_most > self.ranks else str(self.ranks)

    @property
    def total_gpus(self) -> int:
        """GPUs of the whole gang, the smallest that it takes."""
        return self.ranks * self.demand.gpus + sum([each.ranks * each.demand.gpus for each in self.groups])

    @property
    def needs(self) -> Demand:
        """What each rank needs, and what other groups need beside the first."""
        return with_beside(self.demand, tuple([GroupNeed(each.ranks, each.demand) for each in self.groups]))

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of all groups, by their numbers; none of a job that has but one."""
        return (self.group, *[each.name for each in self.groups]) if self.groups else ()

    def first_number(self, group: int) -> int:
        """The number of a group's first rank among all ranks of an attempt: those of the first group come last.

        The others have a fixed size, so that a rank of theirs has the same number in every attempt.
        """
        return sum([each.ranks for each in (self.groups[: group - 1] if group else self.groups)])

    def in_group(self, number: int) -> tuple[str, int]:
        """The name of the group of a rank, by its number among all, and its number in that group."""
        for group, each in enumerate(self.groups, 1):
            index = number - self.first_number(group)
            if 0 <= index < each.ranks:
                return each.name, index
        return self.group, number - self.first_number(0)

    def rank_name(self, number: int) -> str:
        """What people call a rank by its number among all: `3`, or `server.0` where there are groups."""
        name, index = self.in_group(number)
        return f"{name}.{index}" if self.groups else str(number)

    def of_group(self, group: int) -> "JobSpec":
        """The specification as ranks of one group have it, as if there were no others; 0 is the first group."""
        if not group:
            return replace(self, groups=()) if self.groups else self
        own = self.groups[group - 1]
        return replace(
            self,
            command=own.command,
            ranks=own.ranks,
            ranks_most=0,
            demand=own.demand,
            per_node=own.per_node,
            env=own.env,
            elastic=False,
            batches=BatchRange(),
            work=None,
            group=own.name,
            groups=(),
            outer="",
        )

    @classmethod
    def from_json(cls, document: object) -> "JobSpec":
        """Check a request's `spec` object; raise `JobRejected` with the problems found (20 at most), nothing else.

        What this takes can be encoded and decoded again: it ends with doing both.
        """
        return _admitted(_SpecReader(document).read())

    def to_json(self) -> dict[str, Any]:
        """The document that `from_json` reads back to an equal specification."""
        return {row.key: _SHOWN.get(row.kind, _same)(at(self)) for row, at in _PLACES}


def _same(value: Any) -> Any:
    return value


def _variable_name(group: str) -> str:
    """Groups that have it in common would have one another's variables (`SWARM_GROUP_EVAL_1_HOST`)."""
    return group.replace("-", "_")


def _group_to_json(group: RankGroup) -> dict[str, Any]:
    shown = {row.key: _SHOWN.get(row.kind, _same)(at(group)) for row, at in _PLACES if row.key in GROUP_KEYS}
    return {"name": group.name, **shown}


_PLACES = tuple([(row, attrgetter(row.place)) for row in FIELDS])
_SHOWN: dict[str, Callable[[Any], Any]] = {
    "words": list,
    "nodes": list,
    "labels": list,
    "variables": dict,
    "choice": lambda word: getattr(word, "value", word),
    "gpu_limits": lambda limits: {each.gpu: each.most for each in limits},
    "work": lambda work: work and {name: getattr(work, name) for name in WORK_LIMITS},
    "groups": lambda groups: [_group_to_json(each) for each in groups],
}
"""JSON of a field's value, where it is not the value itself."""


def told(spec: JobSpec) -> dict[str, Any]:
    """The document without what is so by default: agents of an earlier release refuse keys that came after it."""
    default = JobSpec(command=()).to_json()
    return {key: value for key, value in spec.to_json().items() if value != default[key]}


def near_word(word: str, choices: Sequence[str], closeness: float = 0.6) -> str:
    """The choice that was probably meant, else an empty string."""
    import difflib  # noqa: PLC0415  # for errors alone: it takes room in each agent

    return next(iter(difflib.get_close_matches(word[:KEY_SHOWN], choices, n=1, cutoff=closeness)), "")


def nearest(word: str, choices: Sequence[str], closeness: float = 0.6) -> str:
    """`; did you mean X?` for a close match, else an empty string."""
    close = near_word(word, choices, closeness)
    return f"; did you mean {close!r}?" if close else ""


class _Wrong(Exception):
    """A value that a field cannot have: its place, the problem and a remedy."""


class _SpecReader:
    """Reads one specification by the table of its fields, and gathers problems instead of stopping at the first."""

    def __init__(self, document: object) -> None:
        self._document: Mapping[str, Any] = document if isinstance(document, Mapping) else {}
        self._problems: list[FieldProblem] = []
        self._known: Mapping[str, Any] = {}
        if not isinstance(document, Mapping):
            self._complain("", f"must be an object, not {type(document).__name__}", "send a JSON object")

    def read(self) -> JobSpec:
        default = JobSpec(command=())
        known = self._known = default.to_json()
        for key in self._document:
            if key not in known:
                self._complain(
                    str(key), f"unknown key{nearest(str(key), list(known))}", "remove it or correct the spelling"
                )
        read: dict[str, Any] = {"demand": {}, "batches": {}}
        for row, at in _PLACES:
            part, _, name = row.place.rpartition(".")
            try:
                value = self._READERS[row.kind](self, row, self._document.get(row.key, known[row.key]))
            except _Wrong as wrong:
                self._complain(*wrong.args)
                value = at(default)
            (read[part] if part else read)[name] = type(at(default))(value) if row.kind == "choice" else value
        batches = self._batches(read["ranks"], read["ranks_most"], **read["batches"])
        self._refuse_contradictions(read)
        if self._problems:
            raise JobRejected(self._problems)
        demand = Demand(**read["demand"], refused_gpus=batches.refused_gpus)
        return JobSpec(**{**read, "batches": batches, "demand": demand})

    def _complain(self, key: str, problem: str, remedy: str) -> None:
        self._problems.append(FieldProblem(f"/{key[:KEY_SHOWN]}" if key else "", problem, remedy))
        if len(self._problems) == PROBLEMS_LIMIT:
            raise JobRejected(self._problems)

    def _words(self, row: SpecField, value: object) -> tuple[str, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise _Wrong(row.key, "must be a list of at least one word", 'for example ["python", "train.py"]')
        if len(value) > row.high:
            raise _Wrong(row.key, f"has {len(value)} words, more than {row.high}", "put it in a script")
        words = []
        for index, word in enumerate(value):
            if not _is_usable(word) or (index == 0 and not word):
                self._complain(f"{row.key}/{index}", f"{_say(word)} is not a usable word", USABLE)
            else:
                words.append(word)
        if sum(len(word.encode()) for word in words) > COMMAND_BYTES_LIMIT:
            self._complain(row.key, f"is longer than {COMMAND_BYTES_LIMIT} bytes", "put it in a script and run that")
        return tuple(words)

    def _text(self, row: SpecField, value: object) -> str:
        if not isinstance(value, str):
            raise _Wrong(row.key, f"must be text, not {_say(value)}", "put it in quotes")
        if len(value) > row.high or any(ord(c) < 32 or ord(c) == 127 for c in value):
            problem = f"{_say(value)} is too long or has control characters"
            raise _Wrong(row.key, problem, f"at most {row.high} characters")
        if not is_text(value):
            raise _Wrong(row.key, f"{_say(value)} is not UTF-8", "use text in UTF-8")
        return value

    def _path(self, row: SpecField, value: object) -> str:
        text = self._text(row, value)
        if ".." in (text or "").split("/"):
            raise _Wrong(row.key, f"{_say(value)} climbs out of its folder", "use a path without '..'")
        return text

    def _outer(self, row: SpecField, value: object) -> str:
        text = self._text(row, value)
        try:
            if text:
                outer_terms(text)
        except ValueError as error:
            raise _Wrong(
                row.key, f"{_say(value)}: {error}", f"send {OUTER_ALONE}, or such as {OUTER_EXAMPLE}"
            ) from None
        return text

    def _queue(self, row: SpecField, value: object) -> str:
        if value in row.choices:
            return str(value)
        hint = nearest(value, row.choices) if isinstance(value, str) else ""
        raise _Wrong(row.key, f"there is no queue {_say(value)}{hint}", f"known queues: {', '.join(row.choices)}")

    def _choice(self, row: SpecField, value: object) -> str:
        if value in row.choices:
            return str(value)
        raise _Wrong(row.key, f"{_say(value)} is not a {row.metavar.lower()}", " or ".join(row.choices))

    def _whole(self, row: SpecField, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and row.low <= value <= row.high:
            return value
        problem = "is out of range" if type(value) is int else "is no whole number"
        raise _Wrong(row.key, f"{_say(value)} {problem}", f"a whole number from {row.low} to {row.high}")

    def _seconds(self, row: SpecField, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and row.low <= value <= row.high:
            return float(value)
        problem = "is out of range" if type(value) in (int, float) else "is no number"
        remedy = f"a number of seconds from {row.low:g} to {row.high:g}"
        raise _Wrong(row.key, f"{_say(value)} {problem}", remedy)

    def _flag(self, row: SpecField, value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise _Wrong(row.key, f"{_say(value)} is not true or false", "use true or false")

    def _variables(self, row: SpecField, value: object) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise _Wrong(row.key, "must be an object of names and values", 'for example {"SEED": "1"}')
        if len(value) > row.high:
            raise _Wrong(row.key, f"has {len(value)} variables, more than {row.high}", "put them in a file")
        result: dict[str, str] = {}
        for name, text in value.items():
            if not _is_usable(name) or not name or "=" in name or len(name) > VARIABLE_NAME_LIMIT:
                remedy = f"use letters, digits and '_', at most {VARIABLE_NAME_LIMIT}"
                self._complain(row.key, f"{_say(name)} cannot name a variable", remedy)
            elif not _is_usable(text):
                self._complain(f"{row.key}/{_escaped(name)}", f"{_say(text)} is not a usable value", USABLE)
            else:
                result[name] = text
        if sum(len(n.encode()) + len(v.encode()) + 2 for n, v in result.items()) > ENVIRONMENT_BYTES_LIMIT:
            problem = f"is larger than {ENVIRONMENT_BYTES_LIMIT} bytes"
            self._complain(row.key, problem, "ship a file of them, and read it there")
        return result

    def _digest(self, row: SpecField, value: object) -> str:
        is_hex = isinstance(value, str) and len(value) == row.high and set(value) <= set("0123456789abcdef")
        if value == "" or is_hex:
            return str(value)
        remedy = f"{row.high} lower-case hexadecimal digits"
        raise _Wrong(row.key, f"{_say(value)} is not a SHA-256 digest", remedy)

    def _nodes(self, row: SpecField, value: object) -> tuple[NodeId, ...]:
        names = _listed(row, value, "node names", 'for example ["gpu1", "gpu2"]', "names {} nodes")
        for index, name in enumerate(names):
            place = f"{row.key}/{index}"
            if not isinstance(name, str) or not is_node_name(name):
                raise _Wrong(place, f"{_say(name)} is not a node name", "letters, digits, '-', '_' and '.'")
            if name in names[:index]:
                raise _Wrong(place, f"{name} is named twice", "name each node once")
        return tuple(NodeId(name) for name in names)

    def _labels(self, row: SpecField, value: object) -> tuple[str, ...]:
        labels = _listed(row, value, "labels", 'for example ["nvlink", "engine=docker"]', "has {} labels")
        for index, label in enumerate(labels):
            if not isinstance(label, str) or not is_label(label):
                raise _Wrong(f"{row.key}/{index}", f"{_say(label)} is not a label", LABEL_FORM)
        return tuple(dict.fromkeys(labels))

    def _gpu_limits(self, row: SpecField, value: object) -> tuple[GpuBatch, ...]:
        """Limits of local batches by parts of the names of GPUs' models, which need not be there yet."""
        if not isinstance(value, Mapping):
            raise _Wrong(row.key, f"must be an object, not {_say(value)}", 'for example {"a100": 128, "t4": 16}')
        if len(value) > row.high:
            problem = f"names {len(value)} models, more than {row.high}"
            raise _Wrong(row.key, problem, "name parts that they share")
        limits = []
        for name, most in value.items():
            if not _is_usable(name) or not name.isprintable() or not 0 < len(name.strip()) <= len(name) <= MODEL_LIMIT:
                self._complain(row.key, f"{_say(name)} is no part of a model's name", 'such as "a100"')
            elif not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= BATCH_LIMIT:
                remedy = f"a whole number from 1 to {BATCH_LIMIT}"
                self._complain(f"{row.key}/{_escaped(name)}", f"{_say(most)} is no number of samples", remedy)
            else:
                limits.append(GpuBatch(name, most))
        return tuple(limits)

    def _work(self, row: SpecField, value: object) -> StepCost | None:
        """Bytes and operations of a model; without `moved_bytes` all its parameters are moved in a step."""
        if value is None:
            return None
        if not isinstance(value, Mapping):
            remedy = f"name {', '.join(WORK_NEEDED)} at least"
            raise _Wrong(row.key, f"must be an object, not {_say(value)}", remedy)
        known = len(self._problems)
        for name in (*[each for each in WORK_NEEDED if each not in value], *value):
            if problem := _figure_problem(name, value.get(name)):
                remedy = "count it (swarm_elastic.model_work.describe)" if name in WORK_LIMITS else "remove it"
                self._complain(f"{row.key}/{_escaped(str(name))}", problem, remedy)
        if len(self._problems) > known:
            return None
        figures: dict[str, Any] = {name: float(number) for name, number in value.items()}
        figures["moved_bytes"] = figures.get("moved_bytes") or figures["parameter_bytes"]
        counts = {name: int(figures.get(name, 0)) for name in WORK_COUNTS}
        return StepCost(**{**figures, **counts})

    def _name(self, row: SpecField, value: object) -> str:
        """A name of a group, which variables and the labels of ranks are made of."""
        if value == "" or (isinstance(value, str) and len(value) <= row.high and _GROUP_NAME.fullmatch(value)):
            return str(value)
        remedy = f"at most {row.high} small letters, digits, '-' and '_', the first a letter"
        raise _Wrong(row.key, f"{_say(value)} is not a name of a group", remedy)

    def _groups(self, row: SpecField, value: object) -> tuple[RankGroup, ...]:
        """Each is read as a job that has nothing but what a group may have."""
        found, names = list[RankGroup](), {_variable_name(str(self._document.get("group", "")))}
        for index, document in enumerate(_listed(row, value, "groups", 'such as {"name": "server", ...}', "has {}")):
            place = f"{row.key}/{index}"
            group = self._group(row, place, document)
            if group is not None and _variable_name(group.name) in names:
                self._complain(f"{place}/name", f"{_say(group.name)} names another group too", "name each group once")
            elif group is not None:
                names.add(_variable_name(group.name))
                found.append(group)
        return tuple(found)

    def _group(self, row: SpecField, place: str, document: object) -> RankGroup | None:
        if not isinstance(document, Mapping):
            raise _Wrong(place, f"must be an object, not {_say(document)}", "name its name and its command")
        keys = ("name", *GROUP_KEYS)
        for key in [key for key in document if key not in keys]:
            what = "is the job's, not a group's" if key in self._known else "unknown key"
            self._complain(f"{place}/{key}", f"{what}{nearest(str(key), keys)}", "move or remove it")
        own = {key: document[key] for key in GROUP_KEYS if key in document}
        reader = _SpecReader({**own, "group": document.get("name")})
        try:
            spec = reader.read()
        except JobRejected as rejected:
            for each in rejected.problems:
                pointer = "/name" if each.pointer == "/group" else each.pointer
                self._complain(f"{place}{pointer}", each.problem, each.remedy)
            return None
        if not spec.group:
            self._complain(f"{place}/name", "is missing", "name the group, such as server")
            return None
        return RankGroup(spec.group, spec.command, spec.ranks, spec.demand, spec.per_node, spec.env)

    _READERS: ClassVar[dict[str, Callable[["_SpecReader", SpecField, Any], Any]]] = {
        "words": _words,
        "text": _text,
        "path": _path,
        "queue": _queue,
        "choice": _choice,
        "whole": _whole,
        "bytes": _whole,
        "seconds": _seconds,
        "moment": _seconds,
        "flag": _flag,
        "variables": _variables,
        "digest": _digest,
        "nodes": _nodes,
        "labels": _labels,
        "gpu_limits": _gpu_limits,
        "work": _work,
        "name": _name,
        "groups": _groups,
        "outer": _outer,
    }
    """By the kind of a field."""

    def _batches(
        self, ranks: int, ranks_most: int, *, first: int, most: int, local_least: int, local_most: int,
        by_gpu: tuple[GpuBatch, ...],
    ) -> BatchRange:  # fmt: skip
        """Without a first one nothing is said of batches; of the others those that are left out bind nothing."""
        others = (("most", most), ("local_least", local_least), ("local_most", local_most), ("by_gpu", by_gpu))
        if not first:
            for name in [name for name, value in others if value][:1]:
                key = next(row.key for row in FIELDS if row.place == f"batches.{name}")
                self._complain(key, "says nothing without a global_batch", "name a global_batch, or leave this out")
            return BatchRange()
        if by_gpu and not local_most:
            self._complain(
                "local_batch_most", f"is missing beside {BY_GPU}", "the limit on GPUs that are not named there"
            )
        batches = BatchRange(first, most or first, local_least or 1, local_most or most or first, by_gpu)
        for key, problem, remedy in _batch_problems(batches, ranks, ranks_most):
            self._complain(key, problem, remedy)
        return batches

    def _refuse_contradictions(self, read: Mapping[str, Any]) -> None:
        """What was asked counts, also where it is out of range."""
        asked, most = self._document, read["ranks_most"]
        least = asked.get("ranks", 1)
        if most and isinstance(least, int) and most < least:
            self._complain("ranks_most", f"{most} is less than the {least} of ranks", "the larger of the two, or 0")
        if read["elastic"] and asked.get("per_node"):
            remedy = "leave one of the two out: each rank of such a job is a worker of its own"
            self._complain("elastic", "cannot be had with per_node", remedy)
        largest = asked.get("ranks_most") or least
        if read["elastic"] and isinstance(largest, int) and largest > WORKERS_MAX:
            self._complain(
                "elastic", f"{largest} ranks are more than {WORKERS_MAX}", "take fewer, or leave elastic out"
            )
        if read["slurm_env"] and asked.get("elastic"):
            self._complain("slurm_env", "cannot be had with elastic", "leave one of the two out: ranks change there")
        variables = [text for each in read["groups"] for pair in each.env.items() for text in pair]
        if variables and sum([len(text.encode()) + 1 for text in variables]) > ENVIRONMENT_BYTES_LIMIT:
            problem = f"have more than {ENVIRONMENT_BYTES_LIMIT} bytes of variables together"
            self._complain("groups", problem, "ship a file of them, and read it there")
        if read["groups"] and not read["group"]:
            self._complain("group", "is missing", "name the first group, such as worker, where there are others")
        others, ranks = sum([each.ranks for each in read["groups"]]), max(read["ranks"], read["ranks_most"])
        if others + ranks > RANKS_LIMIT:
            self._complain(
                "groups", f"have {others + ranks} ranks together", f"at most {RANKS_LIMIT}, all groups together"
            )


def _batch_problems(batches: BatchRange, ranks: int, ranks_most: int) -> Iterator[tuple[str, str, str]]:
    """Key, problem and remedy of bounds that contradict one another, and of batches that ranks cannot be dealt."""
    first, most, least = batches.first, batches.most, batches.local_least
    if most < first:
        yield "global_batch_most", f"{most} is less than the {first} of global_batch", f"at least {first}, or 0"
    if batches.local_most < least:
        problem = f"{batches.local_most} is less than the {least} of local_batch_least"
        yield "local_batch_most", problem, f"at least {least}, or another local_batch_least"
    share = f"{least} for each of" if least == 1 else f"{least} (local_batch_least) for each of"
    if ranks * least > first:
        problem = f"{first} to begin with is less than {share} {ranks} ranks"
        yield "global_batch", problem, f"at least {ranks * least}, or fewer ranks"
    elif ranks_most * least > most >= first:
        problem = f"{ranks_most} ranks are too many for a global batch of {most}, with {share} them"
        yield "ranks_most", problem, f"at most {most // least}, or a larger global_batch_most"


def _figure_problem(name: object, number: object) -> str:
    """Why that is no figure of a model; empty for one that is."""
    if name not in WORK_LIMITS:
        return f"is none of {', '.join(WORK_LIMITS)}{nearest(str(name), list(WORK_LIMITS))}"
    if number is None:
        return "is missing"
    low, high = int(name in WORK_NEEDED), WORK_LIMITS[str(name)]
    if not isinstance(number, int | float) or isinstance(number, bool) or not low <= number <= high:
        return f"{_say(number)} is no number from {low} to {high:g}"
    return f"{_say(number)} is no whole number" if name in WORK_COUNTS and number != int(number) else ""


USABLE = "use text in UTF-8 without NUL characters"


def _is_usable(value: object) -> bool:
    """Text that a program can be given."""
    return isinstance(value, str) and "\0" not in value and is_text(value)


def _listed(row: SpecField, value: object, what: str, example: str, told: str) -> Sequence[Any]:
    """A list of no more than the field takes; `told` says how many there are."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _Wrong(row.key, f"must be a list of {what}", example)
    if len(value) > row.high:
        raise _Wrong(row.key, f"{told.format(len(value))}, more than {row.high}", f"at most {row.high}")
    return value


def _say(value: object) -> str:
    """A short picture of a value from outside, which may be of any size."""
    return repr(value[:40] if isinstance(value, str) else value)[:80]


def _escaped(name: str) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _admitted(spec: JobSpec) -> JobSpec:
    """The codec has the last word, so that nothing is accepted here that holders, owners or a restart would refuse."""
    from swarmsched.wire.codec import encode_value  # noqa: PLC0415  # who needs the enumerations alone needs no codec

    try:
        encode_value(JobSpec, spec)
    except ProtocolError as error:
        remedy = "change or leave out the field that is named"
        raise JobRejected([FieldProblem("", f"cannot be encoded: {error}", remedy)]) from error
    return spec

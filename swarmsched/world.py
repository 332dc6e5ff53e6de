"""The world of an elastic attempt: which of its parts train together, by versions that only grow.

A part of an elastic gang is one rank, its *worker*.  The record says of each version who is in it; workers are told of
it under the addresses that they have given themselves, and switch at a step boundary of their own
(docs/explanation/elasticity.md).
"""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from swarmsched.fields import U16, U32, Part, Seconds, Text, Value

WORKERS_MAX = 512
VERSION_MOST = 2**32 - 1
ADDRESS_LENGTH = 255
Parts = Annotated[tuple[Part, ...], Meta(max_length=WORKERS_MAX)]


class World(Value):
    """As the record has it.  A share that is in none of these has left, or is to.

    `members` train, in rank order; `joining` are started beside them to be members of a later version; `lost` are
    former members that are known to be gone: nobody waits for them.
    """

    version: U32 = 0  # 0: there is none yet
    members: Parts = ()
    joining: Parts = ()
    lost: Parts = ()
    has_trained: bool = False  # all members of some version have told that they train in it


class WorldMember(Value):
    """One worker, and where the others find it."""

    part: Part
    address: Annotated[str, Meta(max_length=ADDRESS_LENGTH)]


class WorldPlan(Value):
    """One version, as workers are told of it.  `may_start`: nobody has trained yet, so they may begin anew."""

    version: U32
    epoch: U32
    members: Annotated[tuple[WorldMember, ...], Meta(min_length=1, max_length=WORKERS_MAX)]
    lost: Parts = ()
    may_start: bool = False
    nodes: U16 = 1  # that the members are on


class WorkerState(Enum):
    """What a worker says of itself."""

    UNKNOWN = ""  # it has not asked for a world yet
    READY = "ready"
    TRAINING = "training"
    LEFT = "left"
    REFUSED = "refused"  # by itself: it cannot train in the world that names it


class Worker(Value):
    """How the worker of one part stands, by its last word."""

    state: WorkerState = WorkerState.UNKNOWN
    address: Annotated[str, Meta(max_length=ADDRESS_LENGTH)] = ""
    heard: U32 = 0  # the newest version that it has heard of
    trains: U32 = 0  # that in which it trains; 0: none yet
    pause_s: Seconds = 0.0  # that its last switch has cost it
    busy_s: Seconds = 0.0  # that its own part of a step takes, of late and roughly; 0: not known
    problem: Text = ""
    is_silent: bool = False  # by its agent: it does not even ask for plans any more, so all of the process stands still
    has_timed_out: bool = False  # it has waited for others for as long as its script allows
    failed: U32 = 0  # the newest version that came to nothing for it: not built, not switched to, or lost since

"""Facts: what the machines of one node tell one another within a step; none of them leaves the node."""

from typing import Any

from swarmsched.fields import Value
from swarmsched.ids import JobId
from swarmsched.record import JobRecord


class Awoke(Value):
    """Resources are read and tasks of an earlier life were found: this node takes its jobs up again."""


class Admitted(Value):
    """A client's command that may be carried out; answered by exactly one `ReplyToClient`."""

    request_id: int
    command: Any  # one of `Command`


class GenerationRaised(Value):
    """Peers knew a newer life of this node: what is told under the old generation would lose against that."""

    generation: int


class SettingChanged(Value):
    """Another swarm-wide setting is in force."""


class NodeChanged(Value):
    """What this node would tell of itself is something else."""


class CapacityChanged(Value):
    """So is its ledger: something came free, was taken, or may not be taken any more."""


class JobChanged(Value):
    """Others should hear how a job that this node shepherds is now."""

    job_id: JobId


class JobClosed(Value):
    """A job that this node shepherded has come to its end.  `is_over`: it had long ago, and no record of it is kept."""

    record: JobRecord
    is_over: bool = False


class EndKnown(Value):
    """The end of a job is decided, and perhaps nobody else can tell of it."""

    record: JobRecord


class LookedAfterJobs(Value):
    """Whatever was due of the jobs that are held or shepherded here is done."""


Fact = (
    Awoke
    | Admitted
    | GenerationRaised
    | SettingChanged
    | NodeChanged
    | CapacityChanged
    | JobChanged
    | JobClosed
    | EndKnown
    | LookedAfterJobs
)

"""What a client may ask of a node, and what the node answers.

The agent's HTTP layer turns requests into commands and replies into JSON.  A command about a job must be given to
the node that shepherds it; the HTTP layer finds that node and proxies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmsched.api import JobSpec
from swarmsched.checkpoint import Checkpoint
from swarmsched.errors import FieldProblem
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord


@dataclass(frozen=True, slots=True)
class CreateTicket:
    """Ask for a job id and holders; no side effect.  Reply: `TicketIssued`."""


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Create the job of a ticket, once, whoever is asked how often.  Reply: `JobAccepted` or a refusal."""

    job_id: JobId
    holders: tuple[Holder, ...]
    spec: JobSpec
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Stop a job.  `grace_s` None: the job's own.  Reply: `JobAccepted` with the record, or a refusal."""

    job_id: JobId
    grace_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SignalJob:
    """Send a signal to all ranks.  Reply as for `CancelJob`; refused unless the job runs."""

    job_id: JobId
    signal: int


@dataclass(frozen=True, slots=True)
class SetSwarmSetting:
    """Change the swarm-wide policy.  Reply: `SettingStored` or a refusal that names field and remedy."""

    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForgetMember:
    """Stop dialling a member that is gone for good.  Refused while it is alive."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """A rank of a task on this node says that its checkpoint is complete.  Reply: `CheckpointCommitted`, or a refusal
    (conflict when a newer attempt runs or the job is over)."""

    job_id: JobId
    attempt: int
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class RecoverJob:
    """Go on without the job's lost holders: an operator's decision.  Refused while a majority of them answers.

    Reply: `JobAccepted` with the forced record."""

    job_id: JobId


Command = (
    CreateTicket | SubmitJob | CancelJob | SignalJob | SetSwarmSetting | ForgetMember | CommitCheckpoint | RecoverJob
)


@dataclass(frozen=True, slots=True)
class TicketIssued:
    """A fresh id and the nodes that would hold the job."""

    job_id: JobId
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """The register knows it; the next attempt resumes from it."""

    checkpoint: Checkpoint
    epoch: int


@dataclass(frozen=True, slots=True)
class JobAccepted:
    """The job's record; `was_known` when the ticket had been used already."""

    record: JobRecord
    was_known: bool = False


@dataclass(frozen=True, slots=True)
class SettingStored:
    """The setting now in force and its version."""

    policy: str
    parameters: Mapping[str, float]
    version: int


@dataclass(frozen=True, slots=True)
class Done:
    """It happened."""


@dataclass(frozen=True, slots=True)
class Refused:
    """It did not happen.  `code` maps to an HTTP status: not_found 404, over 410 (past its retention), conflict
    409, impossible 422, invalid 422, not_ready 503, unavailable 503 (outcome unknown, repeat with the same ticket)."""

    code: str
    problem: str
    remedy: str = ""
    fields: tuple[FieldProblem, ...] = ()


Reply = TicketIssued | JobAccepted | CheckpointCommitted | SettingStored | Done | Refused

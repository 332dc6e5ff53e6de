"""What a client may ask of a node, and what the node answers.

The agent's HTTP layer turns requests into commands and replies into JSON.  A command about a job must be given to
the node that shepherds it; the HTTP layer finds that node and proxies.
"""

from swarmsched.api import JobSpec
from swarmsched.checkpoint import Checkpoint
from swarmsched.errors import FieldProblem
from swarmsched.fields import Part, Value
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.task import OfAttempt
from swarmsched.view import PolicySetting


class CreateTicket(Value):
    """Ask for a job id and holders; no side effect.  Reply: `TicketIssued`."""


class SubmitJob(Value):
    """Create the job of a ticket, once, whoever is asked how often.  Reply: `JobAccepted` or a refusal."""

    job_id: JobId
    holders: tuple[Holder, ...]
    spec: JobSpec
    is_dry_run: bool = False


class CancelJob(Value):
    """Stop a job.  `grace_s` None: the job's own.  Reply: `JobAccepted` with the record, or a refusal."""

    job_id: JobId
    grace_s: float | None = None
    reason: str = ""


class SignalJob(Value):
    """Send a signal to all ranks.  Reply as for `CancelJob`; refused unless the job runs."""

    job_id: JobId
    signal: int


class ScaleJob(Value):
    """Let a job have from `ranks` to `ranks_most` ranks from now on, or just `ranks` where that is 0.  Reply as for
    `CancelJob`; refused while its ranks run outside of that and have committed no checkpoint."""

    job_id: JobId
    ranks: int
    ranks_most: int = 0


class MigrateJob(Value):
    """Have a running job go on elsewhere: on `nodes`, if any are named, and not on those to `avoid`.  Reply as for
    `CancelJob`; refused where there is no room, or no checkpoint to go on from."""

    job_id: JobId
    nodes: tuple[NodeId, ...] = ()
    avoid: tuple[NodeId, ...] = ()


class SetSwarmSetting(Value):
    """Change the swarm-wide policy.  Reply: `SettingStored` or a refusal that names field and remedy."""

    setting: PolicySetting


class ForgetMember(Value):
    """Stop dialling a member that is gone for good.  Refused while it is alive."""

    node: NodeId


class DrainNode(Value):
    """Take no new work on this node from now on, or again; what runs here runs on.  Durable.  Reply: `Done`, or a
    refusal of a witness."""

    is_draining: bool
    reason: str = ""


class CommitCheckpoint(OfAttempt):
    """A rank of a task on this node says that its checkpoint is complete.  Reply: `CheckpointCommitted`, or a refusal
    (conflict when a newer attempt runs, its part trains no more, or the job is over)."""

    checkpoint: Checkpoint
    part: Part = 0


class RecoverJob(Value):
    """Go on without the job's lost holders: an operator's decision.  Refused while a majority of them answers.

    Reply: `JobAccepted` with the forced record."""

    job_id: JobId


OF_JOBS = (CancelJob, SignalJob, ScaleJob, MigrateJob)
"""What a client may want of a job that is there."""

Command = (
    CreateTicket
    | SubmitJob
    | CancelJob
    | SignalJob
    | ScaleJob
    | MigrateJob
    | SetSwarmSetting
    | ForgetMember
    | DrainNode
    | CommitCheckpoint
    | RecoverJob
)


class TicketIssued(Value):
    """A fresh id and the nodes that would hold the job."""

    job_id: JobId
    holders: tuple[Holder, ...]


class CheckpointCommitted(Value):
    """The register knows it; the next attempt resumes from it."""

    checkpoint: Checkpoint
    epoch: int


class JobAccepted(Value):
    """The job's record; `was_known` when the ticket had been used already."""

    record: JobRecord
    was_known: bool = False


class SettingStored(Value):
    """The setting now in force and its version."""

    setting: PolicySetting
    version: int


class Done(Value):
    """What a client asked for happened."""


class Refused(Value):
    """What a client asked for did not happen. `code` maps to an HTTP status: not_found 404, over 410 (past its
    retention), conflict 409, impossible 422, invalid 422, not_ready 503, unavailable 503 (outcome unknown, repeat
    with the same ticket)."""

    code: str
    problem: str
    remedy: str = ""
    fields: tuple[FieldProblem, ...] = ()


Reply = TicketIssued | JobAccepted | CheckpointCommitted | SettingStored | Done | Refused

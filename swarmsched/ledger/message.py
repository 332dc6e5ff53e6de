"""Plane D messages: hold, commit, launch, release, stop, signal, and the owner's task reports.

Every command carries (job, epoch, attempt, command id) and is idempotent: the answer to a repeated id is the stored
answer.  A shepherd draws command ids from its own counter, unique within (job, epoch).
"""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from swarmsched.checkpoint import Checkpoint
from swarmsched.estimate import Estimate
from swarmsched.fields import U16, U32, U53, Amount, Host, Job, Name, NodeName, Part, Port, Seconds, Text, Value
from swarmsched.ids import Place, TaskKey
from swarmsched.resources import Demand, FreeReport
from swarmsched.task import OfAttempt, OfPart, OfTask, TaskFailure, TaskOrder, TaskStatus
from swarmsched.world import WorldPlan

HOLD_TTL_S = 5.0
CLAIM_TTL_S = 60.0

SentRankKey = Annotated[tuple[U53, ...], Meta(max_length=4)]


class Refusal(Enum):
    """Why an owner said no."""

    NONE = ""
    STALE_EPOCH = "stale_epoch"
    RELEASED_ATTEMPT = "released_attempt"  # this or a later attempt was released before
    DOES_NOT_FIT = "does_not_fit"
    EXPIRED = "expired"  # commit without a live hold
    NOT_COMMITTED = "not_committed"  # launch, stop or signal without a lease
    DRAINING = "draining"  # this node takes no new work, or stops what is left of this attempt
    NO_PORT = "no_port"  # no rendezvous port could be bound
    CONFLICT = "conflict"  # this name is held by two machines
    CLAIMED = "claimed"  # what is free is kept for a job that ranks higher
    UNKNOWN = "unknown"  # nothing is known of such a task


class ShepherdCommand(OfPart):
    """What every command of a shepherd begins with; a repeated `command_id` gets the stored answer."""

    job_id: Job
    epoch: U32
    attempt: U32
    command_id: U32
    shepherd: NodeName

    @property
    def key(self) -> TaskKey:
        """Of the task, or of the booking for it, that it is about."""
        return TaskKey(self.job_id, self.attempt, self.part)


class HoldRequest(ShepherdCommand):
    """Book `ranks` ranks of `demand` until `ttl_s` after receipt."""

    ranks: U16
    demand: Demand
    policy_id: Name
    rank_key: SentRankKey
    wants_rendezvous: bool  # rank 0 will live here: answer with host and bound port
    ttl_s: Seconds = HOLD_TTL_S
    lasts_s: Seconds = 0.0  # its time limit: it may pass a claim that it does not delay; 0: none


class ClaimRequest(ShepherdCommand):
    """Keep `ranks` ranks of `demand` for this job, of what is free and of what comes free, until `ttl_s` after receipt.

    Holds of jobs that rank lower are refused what is left over by less, unless they end within `starts_within_s`
    (0: not known).  Claims book nothing and are not durable; a claim of no ranks gives up the earlier one.  One that
    `must_be_free` is refused unless the ranks fit now, beside all other claims: for a job that runs, what it has here
    itself is free.
    """

    ranks: U16
    demand: Demand
    policy_id: Name
    rank_key: SentRankKey
    submitted_utc_s: Amount  # orders claims of different policies
    starts_within_s: Seconds
    ttl_s: Seconds = CLAIM_TTL_S
    must_be_free: bool = False


class CommitRequest(ShepherdCommand):
    """Turn the hold into a lease and stage the task; ranks do not run before `LaunchRequest`."""

    order: TaskOrder


class LaunchRequest(ShepherdCommand):
    """All owners committed and staged: start the ranks."""


class ReleaseRequest(ShepherdCommand, kw_only=True):
    """Give up hold or lease of this attempt and refuse it (and older ones) from now on; ranks, if any, are stopped."""

    fault: TaskFailure = TaskFailure.NONE  # by which it failed to start here, and others have shown that it can be


class StopRequest(ShepherdCommand):
    """Stop the ranks with grace; the lease ends when no process is left."""

    grace_s: Seconds


class SignalRequest(ShepherdCommand):
    """Send a signal to the ranks."""

    signal: U16


class WorldRequest(ShepherdCommand):
    """Tell the worker of an elastic part of this world.  Repeated until its reports say that it has heard of it."""

    plan: WorldPlan


class StatusRequest(ShepherdCommand):
    """A shepherd (new, or returned) asks what is known of its attempt, and takes over reports."""


OwnerCommand = (
    HoldRequest
    | ClaimRequest
    | CommitRequest
    | LaunchRequest
    | ReleaseRequest
    | StopRequest
    | SignalRequest
    | WorldRequest
    | StatusRequest
)


class OwnerAnswer(Value):
    """The owner's answer to one command.  `refusal` NONE means yes; `epoch` is the highest the owner accepted.

    `origin` says from where it answers (`ids.origin_of`); 0: it does not say.
    """

    job_id: Job
    epoch: U32
    attempt: U32
    command_id: U32
    owner: NodeName
    refusal: Refusal
    free: FreeReport
    detail: Text = ""
    rendezvous_host: Host = ""
    rendezvous_port: Port = 0
    is_staged: bool = False  # commit: nothing has to be staged, launch may follow at once
    origin: U53 = 0
    part: Part = 0
    released_attempt: U32 = 0  # with RELEASED_ATTEMPT: up to this one, and this part of it, holds are refused
    released_part: Part = 0

    @property
    def key(self) -> TaskKey:
        """As in the command."""
        return TaskKey(self.job_id, self.attempt, self.part)

    @property
    def place(self) -> Place:
        """Of the part that the command was about."""
        return Place(self.owner, self.part)


class Opening(Value):
    """Owner to a shepherd whose jobs are first in line: this is free here now.  A hint; nothing is kept for it."""

    free: FreeReport


class TaskReport(Value):
    """Owner to shepherd: the task changed.  Repeated every 2 s until `TaskReportReceived` with that revision."""

    status: TaskStatus
    free: FreeReport
    origin: U53 = 0  # as in an answer


class TaskEstimate(OfAttempt):
    """Owner to shepherd: what the ranks report of their training.  Told with each change; one that is lost is made up
    for by the next."""

    estimate: Estimate
    global_batch: U32 = 0  # with which they train; 0: they have not told


class TaskBatch(OfAttempt):
    """Shepherd to the owner of rank 0, in answer to an estimate: the ranks are to train with another batch."""

    global_batch: U32


class PreemptRequest(Value):
    """Shepherd of the taker to that of a running victim: would it make room, and, once `is_decided`, do so."""

    job_id: Job  # the victim
    command_id: U32
    taker: Job
    shepherd: NodeName  # of the taker
    policy_id: Name
    rank_key: SentRankKey  # of the taker
    is_decided: bool = False


class PreemptAnswer(Value):
    """The victim's shepherd: yes, or why not.  A yes to a question binds nobody."""

    job_id: Job
    command_id: U32
    taker: Job
    is_granted: bool
    detail: Text = ""


class YieldRequest(OfAttempt):
    """Owner to the shepherd of a hold: one that ranks higher wants this; give way if PREPARED is not written."""

    owner: NodeName
    wanted_by: Job


class CheckpointRequest(OfAttempt):
    """Owner to shepherd: ranks of this attempt have completed a checkpoint.  Repeated until answered."""

    command_id: U53  # unique over all lives of the owner's agent
    owner: NodeName
    checkpoint: Checkpoint
    part: Part = 0  # whose ranks; older agents do not say


class CheckpointAnswer(OfAttempt):
    """Shepherd to owner: committed under `epoch`, or why not."""

    command_id: U53
    epoch: U32
    is_committed: bool
    detail: Text = ""


class TaskReportReceived(OfTask):
    """Shepherd to owner: that revision is known; for an EXITED task it is in the register, forget it."""

    revision: U32
    generation: U53 = 0

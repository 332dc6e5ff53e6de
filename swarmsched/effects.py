"""Effects: what the core asks its driver to do.

The driver performs the effects of a step in order.  A `Persist` is a barrier: whatever comes after it, in this step
or a later one, is performed only once it is on disk, with the exception of `SendDatagram`, which carries hints only.
Fsyncs of one loop turn may share one commit.
"""

import math
from collections.abc import Mapping
from typing import Any

from msgspec import field

from swarmsched.fields import Value
from swarmsched.ids import Address, JobId, NodeId
from swarmsched.resources import Gpu
from swarmsched.shards import AggregatorPlace, RangeKey, ShardOrder
from swarmsched.task import OfAttempt, OfTask, TaskOrder
from swarmsched.view import ClusterView, PolicySetting
from swarmsched.world import WorldPlan


class SendDatagram(Value):
    """Send one gossip packet (plain; the transport seals it)."""

    destination: Address
    payload: bytes


class SendPeer(Value):
    """Send a message over the peer channel; `recipient` may be this node itself (the driver loops it back)."""

    recipient: NodeId
    message: object


class Persist(Value):
    """Write (or, with `value` None, delete) one durable entry.  Rooms: meta, register, over, ledger, setting, task,
    history, kinds.
    """

    room: str
    key: str
    value: bytes | None


class ComputePlan(Value):
    """Run the named policy in the planner process and hand back `PlanComputed` or `PlanFailed`."""

    setting: PolicySetting
    view: ClusterView


class ReplyToClient(Value):
    """Answer a `ClientCommandReceived`; `reply` is one of the reply types in `swarmsched.commands`."""

    request_id: int
    reply: object


class BindRendezvous(OfTask):
    """Bind and listen on a free port of the configured range; answer `RendezvousBound` or `RendezvousFailed`."""


class ReleaseRendezvous(OfTask):
    """Close the port of that task, if it is still bound."""


class StageTask(Value):
    """Bring files and environment, probe rank 0's port; report phases, then `TaskStaged` or `TaskStageFailed`."""

    order: TaskOrder


class StartTask(Value):
    """Start the shim and its ranks on these GPUs; report `TaskStarted`, `RankExited`, `TaskExited`.

    They may run until `until_s` on the driver's monotonic clock, unless `ExtendAttempt` follows.
    """

    order: TaskOrder
    gpus: tuple[Gpu, ...]
    until_s: float = math.inf


class SignalTask(OfTask):
    """Send a signal to every rank."""

    signal: int


class SetBatch(OfAttempt):
    """Tell the ranks with which global batch to go on."""

    global_batch: int


class PublishWorld(OfTask):
    """Tell the worker of an elastic part of a world; harmless where it, or a newer one, was told."""

    plan: WorldPlan


class StopTask(OfTask):
    """SIGTERM, wait `grace_s`, then SIGKILL to all descendants; staging is abandoned too.

    Ends in `TaskExited`, at once if nothing runs.  Repeating it is harmless; a shorter grace shortens the wait.
    """

    grace_s: float


class ExtendAttempt(OfAttempt):
    """The ranks of an attempt here may run until `until_s` on the driver's monotonic clock (infinite: without limit).

    A later one replaces an earlier one.  When the time has come and no extension has, the ranks are frozen; a later
    extension lets them go on.  Must take effect although the agent dies: the shim keeps the time.
    """

    until_s: float


class ForgetTask(OfTask):
    """The result is safe elsewhere: drop the shim's control files (logs stay under their own retention)."""


class HostShard(Value):
    """Have the aggregator of this node hold a shard by this order, which takes the place of an earlier one."""

    order: ShardOrder


class DropShard(Value):
    """Have the aggregator forget a shard."""

    range: RangeKey


class ShardPlaced(OfTask):
    """Tell the rank that has asked where its range that begins at `start` is hosted; or, with a code, why nowhere."""

    start: int
    place: AggregatorPlace
    code: str = ""
    problem: str = ""
    remedy: str = ""


class Announce(Value):
    """An event for the cluster log, the agent's log and the metrics; `kind` is dotted, e.g. job.started."""

    kind: str
    text: str
    job_id: JobId | None = None
    node: NodeId | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


TaskEffect = (
    BindRendezvous
    | ReleaseRendezvous
    | StageTask
    | StartTask
    | SignalTask
    | SetBatch
    | PublishWorld
    | StopTask
    | ExtendAttempt
    | ForgetTask
)
"""What whoever runs tasks is asked for."""

AggregationEffect = HostShard | DropShard | ShardPlaced
"""What whoever runs the aggregator is asked for."""

Effect = SendDatagram | SendPeer | Persist | ComputePlan | ReplyToClient | TaskEffect | AggregationEffect | Announce

"""Jobs, holders and nodes for tests: whatever a test does not name is plain."""

import random
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from swarmsched.api import JobSpec
from swarmsched.errors import LocalProtocolError
from swarmsched.events import PeerMessageReceived
from swarmsched.holders import Holder
from swarmsched.ids import JobId, NodeId, make_job_id
from swarmsched.ledger.message import OwnerAnswer, OwnerCommand, Refusal
from swarmsched.record import JobRecord
from swarmsched.resources import Free, FreeReport, Gpu, GpuCount, NodeResources
from swarmsched.view import NodeView
from swarmsched.wire.codec import encode_value

NOTHING_FREE = FreeReport(1, 1, 0, 0, 0)
JOB = JobId("01hzzzzzzzabcdefghjkmnpqrs")


def job_id(number: int) -> JobId:
    """Another for each number; a larger one was made later."""
    return make_job_id(1_700_000_000.0 + number, random.Random(number))


def holders_of(*names: str | Holder) -> tuple[Holder, ...]:
    """These nodes; those that are named, with store 1."""
    return tuple(each if isinstance(each, Holder) else Holder(NodeId(each), 1) for each in names)


def make_record(shepherd: str, holders: Iterable[str | Holder] | None = None, **changes: Any) -> JobRecord:
    """`JOB` as it was submitted, with changes; held by its shepherd unless told by whom.

    Raises AssertionError when a change is nothing that a record may hold.
    """
    held = holders_of(*((shepherd,) if holders is None else holders))
    record = replace(JobRecord(JOB, JobSpec(("true",)), 0.0, 1, 1, NodeId(shepherd), 1, held), **changes)
    try:
        encode_value(JobRecord, record)
    except LocalProtocolError as error:  # which a test may expect of what it tests
        raise AssertionError("nothing that a record may hold") from error
    return record


def word(message: object, sender: str = "somebody") -> PeerMessageReceived:
    """A message as a node hears it; who sent it rarely matters."""
    return PeerMessageReceived(NodeId(sender), message)


def answer_to(request: OwnerCommand, owner: str, refusal: Refusal = Refusal.NONE, **more: Any) -> OwnerAnswer:
    """What an owner says to a shepherd, whose epoch it knows."""
    numbers = request.epoch, request.attempt, request.command_id
    return OwnerAnswer(request.job_id, *numbers, NodeId(owner), refusal, NOTHING_FREE, **{"part": request.part, **more})


def make_resources(gpus: int, cpus: int = 8, memory_bytes: int = 2**36) -> NodeResources:
    """GPUs of one model, with UUIDs `GPU-0` and so on."""
    devices = tuple(Gpu(f"GPU-{index}", index, "H100", 2**36) for index in range(gpus))
    return NodeResources(devices, cpus, memory_bytes)


def make_node(name: str, free: int, total: int = 4, model: str = "A100", cpus: int = 32, **changes: Any) -> NodeView:
    """A node with so many GPUs of one model."""
    now, most = (Free((GpuCount(model, 2**34, count),) if count else (), cpus, 2**38) for count in (free, total))
    return NodeView(NodeId(name), now, most, total, **changes)

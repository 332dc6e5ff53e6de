"""What a running job would give back, as far as a planner can tell: which devices it has is not gossiped."""

from collections.abc import Sequence

from swarmsched.ids import NodeId
from swarmsched.policies.room import Room, without
from swarmsched.resources import Gpu, Share, suits
from swarmsched.view import JobView, NodeView

Busy = dict[NodeId, tuple[Gpu, ...]]
"""Offered devices of the available nodes that are taken."""


def busy_devices(nodes: Sequence[NodeView], room: Room) -> Busy:
    """Offered devices of the available nodes that are not free in the room."""
    return {node.node: without(node.devices, room.free(node.node).gpus) for node in nodes if node.is_available}


def release(job: JobView, share: Share, room: Room, busy: Busy) -> None:
    """Give back to the room what a share holds: the first busy devices that suit it."""
    held = busy.get(share.node)
    if held is None:
        return
    wanted = share.ranks * job.demand.gpus
    gpus = tuple(gpu for gpu in held if suits(gpu, job.demand))[:wanted]
    busy[share.node] = without(held, gpus)
    room.give(share.node, gpus, share.ranks * job.demand.cpus, share.ranks * job.demand.memory_bytes)

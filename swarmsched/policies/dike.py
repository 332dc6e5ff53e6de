"""Dike: in order of submission, each job on the hosts where its model would train fastest (Electronics 8(3):327, 2019).

By what the card tells of its model and its steps, the class of GPUs and the cores that are free beside them.  The
number of workers is its owner's, or, where the card allows several, the least that is nearly as fast as the best.  Once
it runs a job stays as it is.  Jobs here reduce among themselves, or train apart: no servers are placed.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from swarmsched.card import RankKey
from swarmsched.errors import ConfigError
from swarmsched.ids import NodeId
from swarmsched.models.hosts import Offer, check, measured_work
from swarmsched.policies.base import joined, start
from swarmsched.policies.fifo import Fifo
from swarmsched.policies.hosting import Choice, choose, laid_out, offer
from swarmsched.policies.placement import permitted, with_other_groups
from swarmsched.policies.reason import start_reason
from swarmsched.policies.resizing import RANKS_MOST, elastic_of
from swarmsched.policies.room import Room
from swarmsched.resources import Demand
from swarmsched.view import Decision, JobView

BITS = 8
GIGA = 1e9


class Dike(Fifo):
    """The head of the line blocks all behind it, as in `fifo`, which also places whatever is not known well enough."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._network_bytes_per_s = parameters["network_gbit_s"] * GIGA / BITS

    def _decide(self, job: JobView, key: RankKey, room: Room, ahead: list[JobView]) -> Decision:
        if ahead:
            return super()._decide(job, key, room, ahead)
        found = self._chosen(job, room)
        shares = None if isinstance(found, str) else with_other_groups(room, job, lambda: laid_out(found))
        if isinstance(found, str) or shares is None:
            decision = super()._decide(job, key, room, ahead)
            why = found if isinstance(found, str) else "its other groups have no room beside"
            return replace(decision, reason=joined(decision.reason, f"as fifo would: {why}"))
        room.take(shares, job.demand)
        told = f"{found.samples_per_s:.3g} samples/s by its model and the hosts"
        return start(job, key, shares, joined(start_reason(job, shares), told))

    def _chosen(self, job: JobView, room: Room) -> Choice | str:
        """Or why there is none."""
        estimate = job.card.estimate
        if estimate is None or estimate.work is None:
            return "its card does not tell what its model needs"
        if not job.demand.gpus or job.card.hides_constraints:
            return "it asks for no GPU" if not job.demand.gpus else "its card hides where it may go"
        allowed = permitted(room.fits(job.demand), job.card.nodes, job.excluded)
        groups = [allowed] if job.card.mixed_gpus else room.apart(allowed, job.demand).values()
        elastic, found = elastic_of(job), list[Choice]()
        for group in groups:
            hosts = [_host(room, node, ranks, job.demand, self._network_bytes_per_s) for node, ranks in group.items()]
            if not all(host.flops_per_s for host in hosts):
                return "of a class of GPUs here no peak is known"
            try:
                check(estimate.work)
                work = measured_work(estimate, job.demand.gpus) or estimate.work
                best = choose(work, hosts, range(elastic.ranks_least, min(elastic.ranks_most, RANKS_MOST) + 1))
            except ConfigError as error:
                return f"{error}"
            found += [best] if best else []
        return max(found, key=lambda one: one.samples_per_s, default="no free hosts hold its model and input")


def _host(room: Room, node: NodeId, ranks: int, demand: Demand, network_bytes_per_s: float) -> Offer:
    """Of a node that tells no speed of its network, that of the parameter."""
    found = offer(room, node, ranks, demand)
    is_told = bool(room.capacity(node).network_mbit_s)
    return found if is_told else found._replace(network_bytes_per_s=network_bytes_per_s)

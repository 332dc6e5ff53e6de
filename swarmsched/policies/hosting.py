"""Dike's choice for one job: how many workers and servers, and on which hosts, by the predicted speed.

So many workers to a host, on the hosts where these would compute fastest; servers on hosts without GPUs, on those of
the workers, or on both.  All such layouts are tried, as there are few of them; the fastest are improved by one task at
a time, and the cheapest of those that are nearly as fast as the best is taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import inf
from typing import NamedTuple

from swarmsched.errors import ConfigError
from swarmsched.estimate import StepCost
from swarmsched.ids import NodeId
from swarmsched.models.hosts import (
    MBIT,
    NETWORK_BYTES_PER_S,
    Layout,
    Offer,
    Tasks,
    check,
    fits,
    local_s,
    measured_work,
    peak_flops,
    throughput,
)
from swarmsched.policies.room import Room
from swarmsched.resources import Demand, Share, suits
from swarmsched.view import JobView

NEARLY = 0.02
"""Of the speed: what fewer workers, servers or hosts may cost.  Stopping at the first small gain, as a knee rule does,
would end where the second host costs more than it brings."""
SERVERS_MOST = 16
BEGINNINGS = 12
"""Layouts that are improved: of the fastest numbers of workers and servers."""
IMPROVED_HOSTS = 8
"""Beyond so many one task more or less changes little."""
GAIN_LEAST = 1.001
CPUS_MOST = 4_096
HOSTS_EVEN = 8
"""On up to so many hosts workers are dealt evenly."""
WORTH = 1.03
"""Times as fast as on the fewest nodes: for less a job is not spread, nor given hosts that suit others better."""


class Choice(NamedTuple):
    """A layout and its predicted samples a second."""

    layout: Layout
    samples_per_s: float

    @property
    def workers(self) -> int:
        """On all hosts."""
        return sum([tasks.workers for _, tasks in self.layout])

    @property
    def servers(self) -> int:
        """On all hosts; 0: the workers reduce in a ring."""
        return sum([tasks.servers for _, tasks in self.layout])

    @property
    def where(self) -> str:
        """Where its servers, or the shards of ranks that train apart, are."""
        beside = {tasks.workers > 0 for _, tasks in self.layout if tasks.servers}
        names = {(): "nowhere", (True,): "own nodes", (False,): "CPU nodes", (False, True): "both"}
        return names[tuple(sorted(beside))]


def choose(
    work: StepCost, hosts: Sequence[Offer], sizes: range, *, has_servers: bool = False, is_synchronous: bool = True
) -> Choice | None:
    """The best layout with so many workers, or None where none fits; ConfigError where `work` or a host cannot be."""
    check(work)
    for host in hosts:
        if host.workers < 0 or host.cpus < 0 or not host.network_bytes_per_s > 0.0 or not host.flops_per_s >= 0.0:
            raise ConfigError(f"host {host.node}", f"{host} cannot be", "counts of 0 or more, and a network")
    rate = partial(throughput, work, is_synchronous=is_synchronous)
    hosts = sorted(hosts, key=lambda host: host.node)
    orders = _orders(work, hosts, max(sizes, default=0))
    rated: list[Choice] = []
    for workers in [each for each in sizes if each > 0]:
        for each in _dealt(orders, workers):
            layouts = _with_servers(hosts, each) if has_servers else (_in_ring(each),)
            rated += [Choice(layout, rate(layout)) for layout in layouts]
    rated.sort(key=_speed)
    beginnings = list({(each.workers, each.servers): each for each in rated}.values())
    rated += [_improved(each, hosts, sizes, rate) for each in sorted(beginnings, key=_speed)[-BEGINNINGS:]]
    fastest = max([each.samples_per_s for each in rated], default=0.0)
    if not fastest:
        return None
    enough = [each for each in rated if each.samples_per_s >= (1.0 - NEARLY) * fastest]
    return min(enough, key=lambda one: (one.workers, one.servers, len(one.layout), -one.samples_per_s))


def _speed(choice: Choice) -> float:
    return choice.samples_per_s


def _orders(work: StepCost, hosts: Sequence[Offer], size: int) -> list[list[tuple[Offer, int]]]:
    """Hosts with at most so many workers each, the fastest first, for each such number and each least network."""
    able = [host for host in hosts if host.workers and host.flops_per_s]
    parts = {-(-size // count) for count in range(1, min(size, HOSTS_EVEN) + 1)}
    orders = []
    for most in sorted({host.workers for host in able} | parts | {1}) if able else ():
        given = [(host, _room(work, host, most)) for host in able]
        keyed = sorted([(local_s(work, host, Tasks(n, 0)), -n, host.node, host, n) for host, n in given if n])
        full = [each for each in keyed if each[4] == most]  # of the others one may come first that holds fewer
        for some, least in product((keyed, full), sorted({host.network_bytes_per_s for host in able})):
            orders += [[(host, count) for *_, host, count in some if host.network_bytes_per_s >= least]]
    return orders


def _room(work: StepCost, host: Offer, most: int) -> int:
    counts = range(min(most, host.workers), 0, -1)
    return next((count for count in counts if fits(work, host, Tasks(count, 0), 0)), 0)


def _dealt(orders: Sequence[Sequence[tuple[Offer, int]]], workers: int) -> Iterator[dict[Offer, int]]:
    """Even shares on the first hosts of each order that hold so many."""
    for order in orders:
        held = 0
        for count, (_, room) in enumerate(order, start=1):
            held += room
            if held >= workers:
                yield _even([host for host, _ in order[:count]], [room for _, room in order[:count]], workers)
                break


def _in_ring(workers: Mapping[Offer, int]) -> Layout:
    return [(host, Tasks(count, 0)) for host, count in workers.items()]


def _with_servers(hosts: Sequence[Offer], workers: Mapping[Offer, int]) -> Iterator[Layout]:
    for count in range(1, min(SERVERS_MOST, max(sum(workers.values()), len(hosts))) + 1):
        for places in _places(hosts, list(workers)):
            servers = _even(places, [count] * len(places), count)
            both = dict.fromkeys([*workers, *servers])
            yield [(host, Tasks(workers.get(host, 0), servers.get(host, 0))) for host in both]


def _improved(choice: Choice, hosts: Sequence[Offer], sizes: range, rate: Callable[[Layout], float]) -> Choice:
    """One task added, taken away or moved at a time, while that makes it faster."""
    while len(choice.layout) <= IMPROVED_HOSTS:
        found = [Choice(layout, rate(layout)) for layout in _neighbours(choice, hosts, sizes)]
        best = max(found, key=_speed, default=choice)
        if best.samples_per_s <= choice.samples_per_s * GAIN_LEAST:
            break
        choice = best
    return choice


def _neighbours(choice: Choice, hosts: Sequence[Offer], sizes: range) -> Iterator[Layout]:
    tasks = dict(choice.layout)
    others = {host._replace(node=NodeId("")): host for host in reversed(hosts) if host not in tasks}  # one of each kind
    workers, servers = choice.workers, choice.servers
    for role in (0, 1) if servers else (0,):
        sources = [None, *[host for host, each in tasks.items() if each[role]]]
        for source, target in product(sources, [None, *tasks, *others.values()]):
            change = (target is not None) - (source is not None)
            is_size = workers + change in sizes if role == 0 else 0 < servers + change <= SERVERS_MOST
            if source != target and is_size:
                moved = dict(tasks)
                for host, by in ((source, -1), (target, 1)):
                    if host is not None:
                        now = moved.get(host, Tasks(0, 0))
                        moved[host] = Tasks(now.workers + by * (role == 0), now.servers + by * (role == 1))
                yield [(host, each) for host, each in moved.items() if any(each)]


def _places(hosts: Sequence[Offer], with_workers: Sequence[Offer]) -> Iterator[Sequence[Offer]]:
    """Hosts for servers: without GPUs, one or more of them; with workers; both; and only where most workers are."""
    plain = sorted(
        [host for host in hosts if not host.workers or not host.flops_per_s],
        key=lambda one: (-one.network_bytes_per_s, -one.memory_bytes, -one.cpus, one.node),
    )
    for count in range(1, min(len(plain), SERVERS_MOST) + 1):
        yield plain[:count]
    yield with_workers
    yield with_workers[:1]
    if plain:
        yield [*with_workers, *plain]


def _even(hosts: Sequence[Offer], rooms: Sequence[int], count: int) -> dict[Offer, int]:
    """Dealt in turn while there is room; those with none are left out."""
    dealt = dict.fromkeys(hosts, 0)
    while count:
        before = count
        for host, room in zip(hosts, rooms, strict=True):
            if count and dealt[host] < room:
                dealt[host] += 1
                count -= 1
        if before == count:
            break
    return {host: number for host, number in dealt.items() if number}


def suited(
    room: Room,
    job: JobView,
    ranks: int,
    allowed: Mapping[NodeId, int],
    found: tuple[Share, ...],
    tie: Callable[[Sequence[NodeId], int], list[NodeId]],
) -> tuple[Share, ...]:
    """`found`, or other hosts that hold as many ranks, where by its model and theirs a job trains clearly faster.

    A job whose card does not tell its model stays where it was placed without, and so does one that may be on GPUs of
    which no peak is known.  `tie` orders nodes that are alike.
    """
    work = work_of(job)
    if work is None:
        return found
    by_name = {node: offer(room, node, count, job.demand) for node, count in allowed.items()}
    if not all(host.flops_per_s for host in by_name.values()):
        return found
    now = throughput(work, [(by_name[share.node], Tasks(share.ranks, 0)) for share in found])
    hosts = [by_name[node] for node in allowed]
    least_s = min([local_s(work, host, Tasks(1, 0)) for host in hosts])  # no layout is faster than its ranks alone
    if ranks * work.local_batch <= WORTH * now * least_s:
        return found
    best = max(
        [
            each
            for group in _groups(room, job, ranks, hosts, tie)
            if (each := choose(work, group, range(ranks, ranks + 1)))
        ],
        key=_speed,
        default=None,
    )
    if best is None or best.samples_per_s < WORTH * now:
        return found
    return laid_out(best)


def work_of(job: JobView) -> StepCost | None:
    """What a step of the job computes and moves, as far as its card tells and one can compute with it."""
    estimate = job.card.estimate
    if estimate is None or estimate.work is None or not job.demand.gpus or job.card.hides_constraints:
        return None
    try:
        check(estimate.work)
    except ConfigError:
        return None
    return measured_work(estimate, job.demand.gpus)


def predicted(room: Room, job: JobView, shares: Sequence[Share]) -> float:
    """Samples a second of the job there, by its model and what the hosts have free; 0 where they are not known."""
    work = work_of(job)
    if work is None or not room.has(shares):
        return 0.0
    first = [share for share in shares if not share.group]
    return throughput(work, [(offer(room, one.node, one.ranks, job.demand), Tasks(one.ranks, 0)) for one in first])


def laid_out(found: Choice) -> tuple[Share, ...]:
    """The workers of a choice, the largest share first."""
    layout = sorted(found.layout, key=lambda one: (-one[1].workers, one[0].node))
    return tuple([Share(host.node, tasks.workers) for host, tasks in layout if tasks.workers])


def offer(room: Room, node: NodeId, ranks: int, demand: Demand) -> Offer:
    """What a node could give to so many ranks: its slowest suitable GPUs count, as its owner chooses among them.

    What a node does not tell of itself it has enough of.
    """
    free, whole = room.free(node), room.capacity(node)
    kinds = [each for each in free.gpus if suits(each, demand)] or [*whole.gpus]
    peak = min([peak_flops(each.model) for each in kinds], default=0.0)
    memory_bytes = demand.gpus * min([each.memory_bytes for each in kinds], default=0) or inf
    network = whole.network_mbit_s * MBIT or NETWORK_BYTES_PER_S
    cpus, host_bytes = free.cpus if whole.cpus else CPUS_MOST, free.memory_bytes if whole.memory_bytes else inf
    return Offer(node, ranks, cpus, host_bytes, demand.gpus * peak, memory_bytes, network)


def _groups(
    room: Room,
    job: JobView,
    ranks: int,
    hosts: Sequence[Offer],
    tie: Callable[[Sequence[NodeId], int], list[NodeId]],
) -> Iterator[list[Offer]]:
    """Hosts whose GPUs the job may have at once; of those that are alike no more than it could use."""
    fits_there = {host.node: host.workers for host in hosts}
    of_class = [fits_there] if job.card.mixed_gpus else room.apart(fits_there, job.demand).values()
    home = {share.node for share in job.shares}
    by_node = {host.node: host for host in hosts}
    for group in of_class:
        alike: dict[Offer, list[Offer]] = {}
        for node in sorted(tie([*group], len(group)), key=lambda each: each not in home):
            alike.setdefault(by_node[node]._replace(node=NodeId("")), []).append(by_node[node])
        yield [host for there in alike.values() for host in there[:ranks]]

"""Hosts chosen over arrays: those that `placement.choose` chooses, whatever was booked before."""

import random

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import STATES, JobCard
from swarmsched.ids import NodeId
from swarmsched.policies.placement import choose, tie_break
from swarmsched.policies.room import Room
from swarmsched.policies.sites import Sites
from swarmsched.resources import Demand, Free, GpuCount, Share
from swarmsched.view import JobView, NodeView
from tests.swarmsched.building import job_id, make_node

A100, V100 = ("NVIDIA A100-SXM4-80GB", 80 * 2**30), ("Tesla V100", 16 * 2**30)
DEMANDS = (
    Demand(gpus=1),
    Demand(gpus=2, cpus=3),
    Demand(gpus=1, gpu_type="A100"),
    Demand(gpus=1, cpus=1, gpu_memory_bytes=2**35),
    Demand(cpus=2),
)


def node(rng: random.Random, name: str) -> NodeView:
    most = [rng.choice((0, 2, 4, 4, 8)), rng.choice((0, 0, 0, 4))]
    kinds = [GpuCount(*kind, count) for kind, count in zip((A100, V100), most, strict=True) if count]
    rng.shuffle(kinds)
    left = [replace(kind, count=rng.choice((kind.count, rng.randrange(1, kind.count + 1)))) for kind in kinds]
    free = [kind for kind in left if rng.random() < 0.9]
    capacity = Free(tuple(kinds), 16, 2**40)
    now = Free(tuple(free), rng.choice((16, 16, rng.randrange(17))), 2**40)
    return NodeView(NodeId(name), now, capacity, sum(most), is_available=rng.random() < 0.95)


def gang(rng: random.Random, number: int, names: list[NodeId]) -> JobView:
    shares = [
        Share(name, rng.randrange(1, 4)) for name in rng.sample(names, min(rng.choice((0, 0, 1, 2, 3)), len(names)))
    ]
    few = rng.random() < 0.2
    card = JobCard(
        job_id(number),
        1,
        1,
        NodeId("boss"),
        STATES.index(JobState.RUNNING if shares else JobState.QUEUED),
        0,
        1,
        rng.choice(DEMANDS),
        0.0,
        shares=tuple(shares),
        nodes=tuple(rng.sample([*names, NodeId("gone")], min(6, len(names)))) if few else (),
        exclude=tuple(rng.sample([*names, NodeId("gone")], 2)) if rng.random() < 0.2 else (),
    )
    return JobView(card)


def test_hosts_are_those_that_are_chosen_one_node_at_a_time() -> None:
    rng, several, nowhere = random.Random(1), 0, 0
    for _ in range(60):
        names = [NodeId(f"n{number}") for number in rng.sample(range(1_000), rng.choice((1, 3, 16, 60)))]
        room = Room([node(rng, name) for name in names])
        sites = Sites(room)
        for number in range(40):
            one = gang(rng, number, names)
            room.release(one.shares, one.demand)
            ranks = rng.choice((0, 1, 1, 2, 3, 4, 7, 16, 40))
            expected = choose(
                room.fits(one.demand),
                room,
                one.demand,
                ranks,
                tie_break(one.job_id),
                nodes=one.card.nodes,
                exclude=one.excluded,
                home={share.node for share in one.shares},
            )
            assert sites.choose(one, ranks) == expected
            several += len(expected or ()) > 1
            nowhere += expected is None
            if expected and rng.random() < 0.7:
                room.take(expected, one.demand)
    assert several > 200
    assert nowhere > 300


def test_jobs_on_several_nodes_are_kept_apart_where_that_is_asked() -> None:
    names = [NodeId(f"n{number}") for number in range(4)]
    room = Room([make_node(name, 4) for name in names])
    running = replace(gang(random.Random(2), 1, names).card, shares=(Share(names[0], 4), Share(names[1], 2)))
    running = replace(running, nodes=(), exclude=(), demand=Demand(gpus=1))
    room.take(running.shares, running.demand)
    sites, other = Sites(room, [JobView(running)]), JobView(replace(running, job_id=job_id(2), shares=()))
    assert {share.node for share in sites.choose(other, 6, apart=True) or ()} == {names[2], names[3]}
    assert sites.choose(other, 9, apart=True) is None
    assert len(sites.choose(other, 9) or ()) == 3
    assert sites.choose(other, 2, apart=True) == (Share(names[1], 2),), "on one node it uses no network"
    sites.put(other.job_id, (Share(names[1], 2), Share(names[2], 2)))
    assert sites.is_crowded(running.job_id)
    sites.put(other.job_id, ())
    assert not sites.is_crowded(running.job_id)

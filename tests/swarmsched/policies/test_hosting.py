"""Dike's choice against the best of all layouts: hosts, workers and servers for models that never ran."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, groupby, product
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.errors import ConfigError
from swarmsched.estimate import StepCost
from swarmsched.ids import NodeId
from swarmsched.models.hosts import (
    PEAKS,
    SERVER_CORES,
    Offer,
    Tasks,
    Tensor,
    moved,
    peak_flops,
    server_cores,
    throughput,
)
from swarmsched.policies.hosting import choose

MB, GB = 1e6, 1e9
WORKERS_MOST = SERVERS_MOST = 6


def images(flops: float, parameters: float, largest: float, activations: float) -> StepCost:
    """JPEG files with SGD and momentum, 32 to a worker."""
    return StepCost(32, flops, parameters, parameters, largest, activations, 1, 110e3, 0.008)


MODELS = {
    "resnet-50": images(24.6e9, 102 * MB, 9.4 * MB, 90 * MB),
    "resnet-101": images(47e9, 178 * MB, 9.4 * MB, 130 * MB),
    "inception-v3": images(34e9, 95 * MB, 8.2 * MB, 100 * MB),
    "vgg-16": images(93e9, 527 * MB, 392 * MB, 110 * MB),
    "tiny": StepCost(128, 5e6, 1 * MB, 1 * MB, 0.5 * MB, 0.1 * MB, 2, 1e3, 1e-5),
}
"""Floating-point operations, parameters and largest tensors of the published networks, at 32 bits."""
PLAIN = [Offer(NodeId(f"c{at}"), 0, 16, 64 * GB) for at in range(3)]
GAMER = [Offer(NodeId(f"g{at}"), 2, 8, 48 * GB, PEAKS["1080 TI"], 11 * GB) for at in range(3)]
LARGE = [
    Offer(NodeId("v0"), 2, 6, 48 * GB, PEAKS["V100"], 16 * GB),
    Offer(NodeId("v1"), 1, 12, 48 * GB, PEAKS["V100"], 16 * GB),
]
CLUSTERS = {"one class": [*PLAIN, *GAMER], "two classes": [*PLAIN[:2], *GAMER[:2], *LARGE]}


def at_speed(hosts: Sequence[Offer], gbit_s: float) -> list[Offer]:
    return [host._replace(network_bytes_per_s=gbit_s * GB / 8) for host in hosts]


def every_layout(hosts: Sequence[Offer]) -> Iterator[list[tuple[Offer, Tasks]]]:
    """Up to six workers and servers on every multiset of hosts; alike hosts are exchangeable."""
    kinds = [list(group) for _, group in groupby(hosts, key=lambda host: host._replace(node=NodeId("")))]
    by_kind = []
    for group in kinds:
        states = [
            Tasks(workers, servers)
            for workers in range(group[0].workers + 1)
            for servers in range(SERVERS_MOST + 1)
            if workers + SERVER_CORES * servers <= group[0].cpus
        ]
        by_kind.append(
            [
                chosen
                for chosen in combinations_with_replacement(states, len(group))
                if sum(each.servers for each in chosen) <= SERVERS_MOST
                and sum(each.workers for each in chosen) <= WORKERS_MOST
            ]
        )
    for chosen in product(*by_kind):
        tasks = [each for one in chosen for each in one]
        if (
            sum(each.workers for each in tasks) <= WORKERS_MOST
            and 0 < sum(each.servers for each in tasks) <= SERVERS_MOST
        ):
            flat = [host for group in kinds for host in group]
            yield [(host, each) for host, each in zip(flat, tasks, strict=True) if any(each)]


def off(work: StepCost, hosts: Sequence[Offer], rng: random.Random, deviation: float) -> tuple[StepCost, list[Offer]]:
    """The same where nothing is quite as the model has it: of the job, and of each kind of host."""

    def factor() -> float:
        return rng.lognormvariate(0.0, deviation)

    by_kind = {host._replace(node=NodeId("")): (factor(), factor()) for host in hosts}
    moved_more, parts = factor(), {"sample_flops": work.sample_flops * factor()}
    parts |= {"moved_bytes": work.moved_bytes * moved_more, "largest_bytes": work.largest_bytes * moved_more}
    truth = []
    for host in hosts:
        speed, network = by_kind[host._replace(node=NodeId(""))]
        network_bytes_per_s = host.network_bytes_per_s * network
        truth.append(host._replace(flops_per_s=host.flops_per_s * speed, network_bytes_per_s=network_bytes_per_s))
    return replace(work, decode_core_s=work.decode_core_s * factor(), **parts), truth


def share_of_best(
    work: StepCost, hosts: Sequence[Offer], is_synchronous: bool, rng: random.Random, deviation: float
) -> float:
    """Speed of the choice over that of the best layout of all."""
    choice = choose(work, hosts, range(1, WORKERS_MOST + 1), has_servers=True, is_synchronous=is_synchronous)
    work, truth = off(work, hosts, rng, deviation)
    there = {host.node: host for host in truth}
    chosen = [(there[host.node], tasks) for host, tasks in choice.layout]
    best = max(throughput(work, layout, is_synchronous) for layout in every_layout(truth))
    return throughput(work, chosen, is_synchronous) / best


def every_case() -> Iterator[Any]:
    """Of the many layouts of two classes of hosts, each network and each speed once; the rest at night."""
    for cluster, (at, model), gbit_s in product(CLUSTERS, enumerate(MODELS), (1.0, 10.0)):
        is_for_the_night = cluster == "two classes" and gbit_s != (1.0, 10.0)[at % 2]
        marks = [pytest.mark.acceptance] if is_for_the_night else []
        yield pytest.param(model, cluster, gbit_s, marks=marks)


@pytest.mark.parametrize(("model", "cluster", "gbit_s"), [*every_case()])
def test_the_choice_is_within_a_twentieth_of_the_best_of_all_layouts(model: str, cluster: str, gbit_s: float) -> None:
    hosts, rng = at_speed(CLUSTERS[cluster], gbit_s), random.Random(1)
    for is_synchronous in (True, False):
        assert share_of_best(MODELS[model], hosts, is_synchronous, rng, 0.0) >= 0.95


def test_where_all_is_a_fifth_off_the_choice_is_still_near_to_the_best() -> None:
    rng, shares = random.Random(3), []
    for work, gbit_s in product(MODELS.values(), (1.0, 10.0)):
        hosts = at_speed(CLUSTERS["one class"], gbit_s)
        shares += [share_of_best(work, hosts, True, rng, 0.2) for _ in range(4)]
    assert median(shares) >= 0.95
    assert min(shares) > 0.6


def test_workers_go_where_cores_feed_them_and_servers_beside_them_where_the_network_is_slow() -> None:
    """Two fast GPUs with six cores between them starve on images; one with twelve does not."""
    choice = choose(MODELS["resnet-50"], at_speed(CLUSTERS["two classes"], 1.0), range(1, 2), has_servers=True)
    assert [(host.node, *tasks) for host, tasks in choice.layout] == [("v1", 1, 1)]


@pytest.mark.parametrize("model", ["resnet-50", "vgg-16"])
def test_where_ranks_train_apart_the_choice_of_learners_and_shards_is_within_a_twentieth_of_the_best(model) -> None:
    """At 100 Mbit/s, with a round in 64 steps."""
    hosts, rng = at_speed(CLUSTERS["one class"], 0.1), random.Random(1)
    assert share_of_best(MODELS[model].apart(64), hosts, True, rng, 0.0) >= 0.95


def test_learners_go_across_a_slow_link_where_they_meet_seldom_and_not_where_they_meet_in_each_step() -> None:
    hosts, work = at_speed(CLUSTERS["one class"], 0.1), MODELS["resnet-50"]
    ring = choose(work, hosts, range(1, 7))
    seldom = choose(work.apart(64), hosts, range(1, 7), has_servers=True)
    often = choose(work.apart(1, is_quantised=False), hosts, range(1, 7), has_servers=True)
    assert len({host.node for host, tasks in ring.layout if tasks.workers}) == 1
    assert len({host.node for host, tasks in seldom.layout if tasks.workers}) == 3
    assert len({host.node for host, tasks in often.layout if tasks.workers}) == 1
    assert seldom.samples_per_s > 2.0 * ring.samples_per_s


def test_shards_are_beside_learners_unless_there_is_no_memory_for_them() -> None:
    """A learner whose node has a share of the shards moves that much less."""
    hosts, work = at_speed(CLUSTERS["one class"], 0.1), MODELS["vgg-16"].apart(16)
    assert choose(work, hosts, range(6, 7), has_servers=True).where == "own nodes"
    full = [host if not host.workers else host._replace(memory_bytes=host.workers * 1.2 * GB) for host in hosts]
    assert choose(work, full, range(6, 7), has_servers=True).where == "CPU nodes"


def test_fast_gpus_that_cannot_hold_the_model_are_passed_over() -> None:
    small = [host._replace(gpu_memory_bytes=2 * GB, cpus=16) for host in LARGE]
    for has_servers in (False, True):
        choice = choose(MODELS["vgg-16"], [*small, *GAMER], range(2, 3), has_servers=has_servers)
        assert {host.node[0] for host, tasks in choice.layout if tasks.workers} == {"g"}


def test_a_tensor_that_is_placed_whole_makes_further_servers_useless() -> None:
    whole = MODELS["vgg-16"]
    hosts = [host._replace(network_bytes_per_s=1.25e9) for host in CLUSTERS["one class"]]
    workers = [(host, Tasks(1, 0)) for host in hosts[3:]]
    layouts = [[*workers, *[(host, Tasks(0, 1)) for host in hosts[:count]]] for count in (1, 3)]
    one, three = (throughput(whole, layout) for layout in layouts)
    assert three < 1.4 * one
    one, three = (throughput(replace(whole, largest_bytes=0.0), layout) for layout in layouts)
    assert three > 1.6 * one


def test_of_embeddings_only_the_rows_of_a_batch_move() -> None:
    tensors = [Tensor(100 * MB), Tensor(4 * GB, row_bytes=1e3)]
    assert moved(tensors, rows=64) == (100 * MB + 64e3, 100 * MB)
    assert moved(tensors, rows=10**9) == (4 * GB + 100 * MB, 4 * GB)
    with pytest.raises(ConfigError, match="tensors"):
        moved([], 1)


def test_the_longest_name_tells_the_class_of_a_gpu() -> None:
    names = ["NVIDIA A100-SXM4-80GB", "NVIDIA A10", "NVIDIA L40S", "Tesla T4", "NVIDIA GeForce GTX 1080 Ti", "gpu"]
    assert [peak_flops(name) for name in names] == [PEAKS[one] for one in ("A100", "A10", "L40S", "T4", "1080 TI")] + [
        0.0
    ]


def test_a_name_within_another_is_no_class() -> None:
    names = ["RTX A1000", "T400", "Quadro P400", "Quadro P4000", "RTX A4000", "NVIDIA H1000"]
    assert [peak_flops(name) for name in names] == [0.0] * len(names)


amounts = st.floats(1.0, 1e15)
works = st.builds(
    StepCost, st.integers(1, 10_000), amounts, amounts, amounts, st.floats(0.0, 1e15), st.floats(0.0, 1e9),
    st.integers(0, 3), st.floats(0.0, 1e9), st.floats(0.0, 10.0),
)  # fmt: skip
some_hosts = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 32), st.floats(0.0, 1e12), st.sampled_from([0.0, 1e13, 1e14])),
    max_size=5,
).map(lambda found: [Offer(NodeId(f"n{at}"), *each) for at, each in enumerate(found)])


@settings(max_examples=60, deadline=None)
@given(works, some_hosts, st.integers(0, 4), st.integers(0, 6), st.booleans(), st.booleans())
def test_never_more_than_there_is_and_the_same_whatever_the_order_of_hosts(
    work: StepCost, hosts: list[Offer], least: int, most: int, has_servers: bool, is_synchronous: bool
) -> None:
    sizes = range(least, most + 1)
    choice = choose(work, hosts, sizes, has_servers=has_servers, is_synchronous=is_synchronous)
    again = choose(work, hosts[::-1], sizes, has_servers=has_servers, is_synchronous=is_synchronous)
    assert choice == again
    if choice is None:
        return
    assert choice.workers in sizes
    assert bool(choice.servers) == has_servers
    for host, tasks in choice.layout:
        assert 0 <= tasks.workers <= host.workers
        assert tasks.workers + server_cores(work) * tasks.servers <= host.cpus
        assert tasks.servers >= 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"local_batch": 0}, "work.local_batch"),
        ({"sample_flops": float("nan")}, "work.sample_flops"),
        ({"moved_bytes": -1.0}, "work.moved_bytes"),
        ({"decode_core_s": float("inf")}, "work.decode_core_s"),
    ],
)
def test_what_no_model_has_is_named(change: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose(replace(MODELS["tiny"], **change), PLAIN, range(1, 2))
    assert raised.value.key == named
    with pytest.raises(ConfigError, match="host c0"):
        choose(MODELS["tiny"], [PLAIN[0]._replace(network_bytes_per_s=0.0)], range(1, 2))

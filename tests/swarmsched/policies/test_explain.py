"""Explanations: needs, free, verdicts per node, who is ahead, and requests that can never be met."""

from typing import Any

import pytest
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState, RankGroup
from swarmsched.card import card_of
from swarmsched.checkpoint import Checkpoint
from swarmsched.estimate import Estimate
from swarmsched.ids import NodeId, handle
from swarmsched.policies.explain import explain, impossible, speed_question
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Free, GpuCount, Share
from swarmsched.view import (
    Allocation,
    Change,
    ClusterView,
    Decision,
    Elasticity,
    JobView,
    NodeView,
    PolicySetting,
)
from swarmsched.world import World
from tests.swarmsched.building import job_id, make_node, make_record

FIFO = PolicySetting("fifo")
SAVED = Checkpoint("c", 1, NodeId("n2"), 1.0)
GROWN = Decision(job_id(5), Change.GROW, "it gains", Allocation((Share(NodeId("n2"), 2),)))


def node(name: str, free: int, model: str = "A100", *, is_available: bool = True) -> NodeView:
    return make_node(name, free, 2, model, cpus=8, is_available=is_available)


def record(ranks: int, demand: Demand, state: JobState = JobState.QUEUED, **changes: Any) -> JobRecord:
    spec = JobSpec(("true",), ranks=ranks, demand=demand, exclude=(NodeId("bad"),))
    return make_record("n1", job_id=job_id(5), spec=spec, submitted_utc_s=1_700_000_005.0, state=state, **changes)


def view_of(record: JobRecord, *ahead: JobView) -> ClusterView:
    nodes = (node("n1", 0), node("n2", 1), node("old", 2, "T4"), node("ill", 2, is_available=False), node("bad", 2))
    return ClusterView(1, nodes, (JobView(card_of(record)), *ahead))


def test_a_waiting_job_learns_what_fails_on_which_node() -> None:
    waiting = record(3, Demand(gpus=1, gpu_type="A100"))
    ahead = replace(record(4, Demand(gpus=2)), job_id=job_id(1), submitted_utc_s=1_700_000_001.0)
    first = JobView(card_of(ahead))
    report = explain(waiting, view_of(waiting, first), FIFO, 0.0, node_notes={NodeId("ill"): "suspect"})
    assert {verdict.node: verdict.reason for verdict in report.nodes} == {
        "n1": "0 of 2 GPUs free",
        "n2": "room for 1 of 3 ranks; 1 of 2 GPUs free",
        "old": "GPU type T4 does not match 'A100'",
        "ill": "suspect",
        "bad": "excluded by the job",
    }
    assert report.needs == "3 GPUs of type A100"
    assert report.free == "3 GPUs (1 of the kind asked for) on 3 of 4 allowed nodes available"
    assert (report.position, report.ahead_count, report.ahead[0].gpus) == (2, 1, 8)
    assert handle(first.job_id) in report.reason
    assert report.ahead[0].to_json()["handle"] == handle(first.job_id)


def test_a_node_that_holds_some_ranks_and_lacks_nothing_for_one_says_how_many() -> None:
    waiting = record(20, Demand(cpus=1))
    reasons = {verdict.node: verdict.reason for verdict in explain(waiting, view_of(waiting), FIFO, 0.0).nodes}
    assert reasons[NodeId("n1")] == "room for 8 of 20 ranks"


def test_the_sentences_read_as_a_person_would_say_it() -> None:
    waiting = record(3, Demand(gpus=1))
    apart = explain(waiting, view_of(waiting), FIFO, 0.0).reason
    assert apart.endswith(
        "room for only 2 of 3 ranks on the nodes that the job allows on GPUs of one model "
        "(--mixed-gpus lets it have several)"
    )
    waiting = replace(waiting, spec=replace(waiting.spec, mixed_gpus=True))
    lines = explain(waiting, view_of(waiting), FIFO, 0.0, node_notes={NodeId("ill"): "suspect"}).sentences()
    name = handle(waiting.job_id)
    assert lines == (
        f"{name} is queued: may start now, fits on old (2), n2 (1).",
        "It needs 3 GPUs.",
        "Free: 3 GPUs on 3 of 4 allowed nodes available.",
        "  old: room for 2 of 3 ranks; 2 of 2 GPUs free",
        "  n2: room for 1 of 3 ranks; 1 of 2 GPUs free",
        "  bad: excluded by the job",
        "  ill: suspect",
        "  n1: 0 of 2 GPUs free",
    )


def test_a_running_job_learns_why_it_has_these_gpus() -> None:
    shares = (Share(NodeId("n1"), 2), Share(NodeId("n2"), 1))
    running = record(3, Demand(gpus=1), JobState.RUNNING, shares=shares)
    report = explain(running, view_of(running), FIFO, 0.0)
    assert report.reason == "it asked for 3 GPUs; placed on the fewest nodes that had room: n1 (2), n2 (1)"
    assert report.position == 0
    assert report.sentences()[0].startswith(f"{handle(running.job_id)} is running: it asked for 3 GPUs")


def test_a_job_that_the_view_does_not_hold_yet_is_explained_too() -> None:
    waiting = record(1, Demand(gpus=1))
    view = ClusterView(1, (), ())
    report = explain(waiting, view, FIFO, 0.0)
    assert report.reason == "its card has not reached this node yet"
    assert report.free == "0 GPUs on 0 of 0 allowed nodes available"


def test_free_is_what_is_free_on_the_nodes_that_the_job_allows() -> None:
    def free(**limits: Any) -> str:
        waiting = record(1, Demand(gpus=1))
        waiting = replace(waiting, spec=replace(waiting.spec, **{"exclude": (), **limits}))
        return explain(waiting, view_of(waiting), FIFO, 0.0).free

    assert free() == "5 GPUs on 4 of 5 nodes available"
    assert free(nodes=(NodeId("n2"), NodeId("ill"))) == "1 GPU on 1 of 2 allowed nodes available"
    assert free(exclude=(NodeId("old"), NodeId("bad"))) == "1 GPU on 2 of 3 allowed nodes available"


CAPACITIES = {NodeId(name): Free((GpuCount("A100", 2**34, 4),), 16, 2**36) for name in ("a", "b")}


def test_more_gpus_than_the_swarm_ever_had_is_impossible() -> None:
    assert impossible(JobSpec(("x",), ranks=8, demand=Demand(gpus=1)), CAPACITIES) is None
    others = {**CAPACITIES, NodeId("c"): Free((GpuCount("T4", 2**34, 4),), 16, 2**36)}
    spec = JobSpec(("x",), ranks=9, demand=Demand(gpus=1))
    assert impossible(replace(spec, mixed_gpus=True), others) is None
    assert str(impossible(spec, others)).endswith(
        "room for 8 of 9 ranks on GPUs of one model, A100; --mixed-gpus lets it have GPUs of several at once"
    )
    error = impossible(spec, CAPACITIES)
    assert str(error) == (
        "asked for 9 GPUs; the swarm has 8 GPUs, at most 4 on one node (2 nodes), room for 8 of 9 ranks"
    )


def test_impossible_looks_at_each_resource_and_at_the_nodes_allowed() -> None:
    def verdict(ranks: int, demand: Demand, *nodes: str) -> str:
        spec = JobSpec(("x",), ranks=ranks, demand=demand, nodes=tuple(NodeId(each) for each in nodes))
        return str(impossible(spec, CAPACITIES))

    assert "at most 4 on one node" in verdict(1, Demand(gpus=5))
    assert "0 GPUs of that kind" in verdict(1, Demand(gpus=1, gpu_type="H100"))
    assert "at most 16 CPUs on one node" in verdict(1, Demand(cpus=17))
    assert "at most 64 GiB of memory on one node" in verdict(1, Demand(memory_bytes=2**37))
    assert "1 node that the job allows" in verdict(5, Demand(gpus=1), "a")
    assert "the swarm has 0 nodes that the job allows (nodes zz, exclude none)" in verdict(1, Demand(gpus=1), "zz")
    assert "0 GPUs of that kind (there are " in verdict(1, Demand(gpus=1, gpu_type="typo"))
    assert "asked for 1 GPU other than a100; the swarm has 0 GPUs of that kind (there are " in verdict(
        1, Demand(gpus=1, refused_gpus=("a100",))
    )
    assert verdict(1, Demand(gpus=1, refused_gpus=("t4",))) == "None"
    assert verdict(1, Demand(), "a") == "None"
    assert "0 nodes with nvlink (labels that are known: none)" in verdict(1, Demand(labels=("nvlink",)))


def test_a_node_without_a_label_says_so_and_a_need_names_it() -> None:
    waiting = record(1, Demand(gpus=1, labels=("nvlink",)))
    view = view_of(waiting)
    labelled = replace(view.nodes[1], free=replace(view.nodes[1].free, labels=("nvlink",)))
    report = explain(waiting, replace(view, nodes=(view.nodes[0], labelled)), FIFO, 0.0)
    assert {verdict.node: verdict.reason for verdict in report.nodes} == {
        "n1": "has no label nvlink; 0 of 2 GPUs free",
        "n2": "fits",
    }
    assert report.needs == "1 GPU on nodes with nvlink"


@pytest.mark.parametrize(
    ("policy", "elasticity", "decision", "told"),
    [
        ("backfill", Elasticity.ON, None, "backfill gives jobs the least that they take"),
        ("swarm", Elasticity.OFF, None, "elasticity=off gives jobs the least that they take"),
        ("swarm", Elasticity.ON, None, "the next plan tells why"),
        ("swarm", Elasticity.ON, Decision(job_id(5), Change.KEEP, "more would not help it"), "more would not help it"),
        ("swarm", Elasticity.ON, GROWN, "is to grow to 2 ranks: it gains"),
        ("swarm", Elasticity.ADVISE, GROWN, "would grow to 2 ranks with elasticity=on: it gains"),
    ],
)
def test_of_a_job_that_takes_several_sizes_it_is_told_why_it_has_this_one(
    policy: str, elasticity: Elasticity, decision: Decision | None, told: str
) -> None:
    running = record(1, Demand(gpus=1), JobState.RUNNING, shares=(Share(NodeId("n2"), 1),), attempt=2)
    running = replace(
        running, spec=replace(running.spec, ranks_most=4), checkpoint=Checkpoint("c", 2, NodeId("n2"), 1.0)
    )
    setting = PolicySetting(policy, {}, elasticity)
    report = explain(running, view_of(running), setting, 0.0, told={running.job_id: decision} if decision else None)
    assert report.reason == f"takes 1 to 4 ranks and has 1; {told}; on n2 (1)"
    assert report.needs == "1 GPU, or up to 4 ranks"


@pytest.mark.parametrize(
    "checkpoint", [None, Checkpoint("c", 1, NodeId("n2"), 1.0)], ids=["none", "of another attempt"]
)
def test_before_its_first_checkpoint_a_job_is_told_that_it_keeps_its_size(checkpoint: Checkpoint | None) -> None:
    running = record(1, Demand(gpus=1), JobState.RUNNING, shares=(Share(NodeId("n2"), 1),), attempt=2)
    running = replace(running, spec=replace(running.spec, ranks_most=4), checkpoint=checkpoint)
    keeps = Decision(running.job_id, Change.KEEP, "running on n2")
    told = explain(running, view_of(running), PolicySetting("swarm"), 0.0, told={running.job_id: keeps}).reason
    assert "it stays so until this attempt has committed a checkpoint" in told


def elastic(workers: dict[int, str], world: World) -> JobRecord:
    running = record(2, Demand(gpus=1), JobState.RUNNING, attempt=1, world=world)
    shares = tuple(Share(NodeId(node), 1, part=part) for part, node in workers.items())
    return replace(running, spec=replace(running.spec, ranks_most=100, elastic=True), shares=shares)


def test_an_elastic_job_that_keeps_its_size_waits_for_no_checkpoint() -> None:
    running = elastic({2: "n1", 4: "n2", 5: "n1", 6: "n2"}, World(3, (2, 4, 5), (6,)))
    keeps = Decision(running.job_id, Change.KEEP, "more would not help it")
    told = explain(running, view_of(running), PolicySetting("swarm"), 0.0, told={running.job_id: keeps}).reason
    assert told == "takes 2 to 100 ranks and has 3; more would not help it; on n1 (2), n2 (1)"


def test_the_model_of_an_elastic_job_is_asked_about_those_that_train() -> None:
    running = elastic({2: "n1", 4: "n2", 5: "n1", 6: "n9"}, World(3, (2, 4, 5), (6,)))
    question = speed_question(running, Estimate(), view_of(running).nodes, None)
    assert (question.held, question.held_nodes) == (3, 2)


def test_the_model_is_asked_of_the_sizes_for_which_there_are_gpus() -> None:
    running = record(2, Demand(gpus=1), JobState.RUNNING, shares=(Share(NodeId("n1"), 1), Share(NodeId("n2"), 2)))
    running = replace(running, spec=replace(running.spec, ranks_most=100))
    question = speed_question(running, Estimate(), view_of(running).nodes, None)
    assert (question.ranks_least, question.ranks_most, question.ranks_per_node) == (2, 10, 2)
    assert (question.held, question.held_nodes) == (3, 2)


def test_a_job_that_fits_is_told_why_it_is_held_back_behind_others_and_not_that_it_may_start() -> None:
    waiting = record(1, Demand(gpus=1))
    held_back = Decision(waiting.job_id, Change.WAIT, "would delay the head of the line")
    gang = replace(record(8, Demand(gpus=1)), job_id=job_id(1), submitted_utc_s=1_700_000_001.0)
    setting, told = PolicySetting("backfill"), {waiting.job_id: held_back}
    behind = explain(waiting, view_of(waiting, JobView(card_of(gang))), setting, 0.0, told=told)
    assert behind.reason == "would delay the head of the line"
    first = explain(waiting, view_of(waiting), setting, 0.0, told=told)
    assert first.reason.startswith("may start now"), "whoever it was held back for is gone"


def test_a_job_that_waits_for_data_learns_where_cores_are_idle_that_could_load_it() -> None:
    there = record(1, Demand(gpus=1), JobState.RUNNING, shares=(Share(NodeId("n2"), 1),))
    nodes = (make_node("n2", 1, 2, "A100", 3), make_node("c1", 0, 0, "A100", 16), make_node("c2", 0, 0, "A100", 0))

    def why(waits: float, groups: tuple[RankGroup, ...] = (), nodes: tuple[NodeView, ...] = nodes) -> str:
        spec = replace(there.spec, group="worker" if groups else "", groups=groups)
        of_job = replace(there, spec=spec)
        view = ClusterView(1, nodes, (JobView(card_of(of_job, estimate=Estimate(data_wait=waits))),))
        return explain(of_job, view, FIFO, 0.0).reason

    assert "waits for data" not in why(0.1)
    told = "it waits for data 40% of its time: a group of input ranks could load it, on idle cores of c1 (16), n2 (3)"
    assert why(0.4).endswith(told)
    assert "more ranks in its group input could" in why(0.4, (RankGroup("input", ("serve",)),))
    assert why(0.4, nodes=nodes[2:]).endswith("40% of its time, and no node has idle cores to load it")

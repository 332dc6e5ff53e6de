"""A job whose ranks are of several groups: read, placed together or not at all, started, ended, and named."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarmsched.api import EndReason, JobSpec, JobState, RankGroup
from swarmsched.card import CARD_BYTES_LIMIT, card_of, decode_card, encode_card
from swarmsched.errors import JobRejected
from swarmsched.ids import NodeId
from swarmsched.ledger.message import ClaimRequest, CommitRequest, HoldRequest, LaunchRequest, Refusal, StopRequest
from swarmsched.negotiation.attempt import Ranking
from swarmsched.negotiation.told import ClaimWished, StartWished
from swarmsched.policies.explain import impossible
from swarmsched.policies.placement import is_there, place_in
from swarmsched.policies.registry import POLICIES, compute_plan
from swarmsched.policies.room import Room
from swarmsched.resources import Demand, GroupNeed, Share, gpus_of, merged, needs_beside, of_others, world_size
from swarmsched.task import RankExit, TaskFailure, TaskStage
from swarmsched.view import Change, ClusterView, JobView, PolicySetting
from swarmsched.wire.codec import decode_value, encode_value
from tests.swarmsched.building import make_node, make_record
from tests.swarmsched.negotiation.scene import ME, Scene
from tests.swarmsched.policies.test_policies import NOW_S, waiting

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
GPU = Demand(gpus=1)
SERVER = RankGroup("server", ("serve",), ranks=2, demand=Demand(cpus=1), env={"OWN": "1"})
INPUT = RankGroup("input", ("feed",), ranks=1)
SPEC: dict[str, Any] = {"group": "worker", "groups": (SERVER, INPUT)}
PLACE = (Share(A, 2), Share(B, 1), Share(B, 2, part=1, group=1), Share(A, 1, part=2, group=2))


def document(**changes):
    asked = {"command": ["train"], "group": "worker", "groups": [{"name": "server", "command": ["serve"]}]}
    return {**asked, **changes}


def problems(**changes):
    with pytest.raises(JobRejected) as rejected:
        JobSpec.from_json(document(**changes))
    return {each.pointer: each.problem for each in rejected.value.problems}


# What may be asked.


def test_a_specification_with_groups_reads_back_to_itself_in_both_forms():
    spec = JobSpec.from_json(
        document(
            ranks=2,
            ranks_most=4,
            gpus_per_rank=1,
            elastic=True,
            groups=[
                {"name": "server", "command": ["serve", "-p"], "ranks": 3, "cpus_per_rank": 2, "env": {"A": "1"}},
                {
                    "name": "eval-1",
                    "command": ["evaluate"],
                    "gpus_per_rank": 1,
                    "require": ["nvlink"],
                    "per_node": True,
                },
            ],
        )
    )
    assert JobSpec.from_json(spec.to_json()) == spec
    assert decode_value(JobSpec, encode_value(JobSpec, spec)) == spec
    assert spec.group_names == ("worker", "server", "eval-1")
    assert spec.groups[1].demand == Demand(gpus=1, labels=("nvlink",))
    assert spec.total_gpus == 3


def test_what_is_wrong_with_a_group_is_told_at_its_place_and_all_at_once():
    found = problems(
        groups=[
            {"name": "server", "command": []},
            {"name": "Server!", "command": ["x"], "elastic": True, "cpus_per_rank": -1},
            {"command": ["x"], "rank": 1},
            {"name": "worker", "command": ["x"]},
            7,
        ]
    )
    assert {*found} == {
        "/groups/0/command",
        "/groups/1/elastic",
        "/groups/1/name",
        "/groups/1/cpus_per_rank",
        "/groups/2/rank",
        "/groups/2/name",
        "/groups/3/name",
        "/groups/4",
    }
    assert "is the job's" in found["/groups/1/elastic"]
    assert "did you mean 'ranks'" in found["/groups/2/rank"]


def test_groups_need_names_and_stay_within_the_bounds_of_a_job():
    assert {*problems(group="")} == {"/group"}
    alike = [{"name": "eval-1", "command": ["x"]}, {"name": "eval_1", "command": ["x"]}]
    assert {*problems(groups=alike)} == {"/groups/1/name"}, "their variables would be one another's"
    assert {*problems(groups=[{"name": f"g{n}", "command": ["x"]} for n in range(8)])} == {"/groups"}
    assert {*problems(ranks=4_000, groups=[{"name": "server", "command": ["x"], "ranks": 97}])} == {"/groups"}
    big = [{"name": f"g{n}", "command": ["x"], "env": {"V": "x" * 9_000}} for n in range(4)]
    assert {*problems(groups=big)} == {"/groups"}


def test_ranks_of_a_group_have_the_same_number_in_every_attempt_whatever_size_the_first_group_has():
    spec = JobSpec(("t",), ranks=2, ranks_most=9, **SPEC)
    assert [spec.first_number(group) for group in range(3)] == [3, 0, 2]
    assert [spec.rank_name(number) for number in range(6)] == [
        "server.0",
        "server.1",
        "input.0",
        "worker.0",
        "worker.1",
        "worker.2",
    ]
    assert JobSpec(("t",)).rank_name(4) == "4"


def test_a_group_is_as_a_job_of_its_own_and_takes_nothing_over_that_is_the_first_ones():
    spec = JobSpec(("t",), ranks=2, ranks_most=4, elastic=True, env={"B": "2"}, grace_s=7.0, **SPEC)
    server = spec.of_group(1)
    assert (server.command, server.ranks, server.demand, server.env) == (("serve",), 2, Demand(cpus=1), {"OWN": "1"})
    assert (server.elastic, server.ranks_most, server.grace_s, server.group) == (False, 0, 7.0, "server")
    assert spec.of_group(0).elastic
    plain = JobSpec(("t",))
    assert plain.of_group(0) is plain


def test_a_card_tells_what_all_groups_need_and_hides_nothing_silently():
    record = make_record("boss", spec=JobSpec(("t",), demand=GPU, ranks=3, **SPEC), shares=PLACE)
    card, body = encode_card(card_of(record))
    assert decode_card(body) == card
    assert needs_beside(JobView(card).demand) == (GroupNeed(2, Demand(cpus=1)), GroupNeed(1, Demand()))
    assert card.shares == PLACE
    assert (world_size(card.shares), gpus_of(card.shares, JobView(card).demand)) == (3, 3)
    labels = tuple(f"{n}-{'x' * 20}" for n in range(8))
    many = tuple(RankGroup(f"g{n}", ("x",), demand=Demand(labels=labels)) for n in range(7))
    card, body = encode_card(card_of(make_record("boss", spec=JobSpec(("t",), group="w", groups=many))))
    assert card.hides_constraints
    assert len(body) <= CARD_BYTES_LIMIT


# Where they go.


def of_groups(number, ranks, *needs, **changes):
    return waiting(number, ranks, GPU, groups=tuple(GroupNeed(*each) for each in needs), **changes)


def plan_of(policy, nodes, *jobs, **parameters):
    view = ClusterView(7, tuple(nodes), tuple(jobs))
    return {each.job_id: each for each in compute_plan(PolicySetting(policy, parameters), view, NOW_S).decisions}


@pytest.mark.parametrize("policy", POLICIES)
def test_all_groups_are_placed_together_or_none_whatever_the_policy(policy):
    nodes = [make_node("a", 2), make_node("b", 2)]
    fits, too_large = of_groups(1, 2, (1, GPU)), of_groups(2, 2, (3, GPU))
    begun = plan_of(policy, nodes, fits)[fits.job_id]
    assert begun.change is Change.START
    assert (world_size(begun.target.shares), gpus_of(begun.target.shares, fits.demand)) == (2, 3)
    assert [(share.ranks, share.part) for share in of_others(begun.target.shares)] == [(1, 1)]
    assert is_there(Room(nodes), begun.target.shares, fits.demand)
    waits = plan_of(policy, nodes, too_large)[too_large.job_id]
    assert (waits.change, waits.target.shares) == (Change.WAIT, ())
    assert "3 GPUs" in waits.reason


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_group_takes_is_nobody_elses(policy):
    nodes = [make_node("a", 4)]
    jobs = [of_groups(1, 1, (2, GPU), restartable=True), waiting(2, 2, restartable=True)]
    decided = plan_of(policy, nodes, *jobs)
    begun = [each for each in decided.values() if each.change is Change.START]
    taken = sum(gpus_of(each.target.shares, jobs[0 if each.job_id == jobs[0].job_id else 1].demand) for each in begun)
    assert len(begun) == 1
    assert taken <= 4


def test_the_first_group_leaves_the_only_place_that_suits_another():
    labelled = make_node("a", 2)
    labelled = replace(
        labelled,
        free=replace(labelled.free, labels=("db",)),
        capacity=replace(labelled.capacity, labels=("db",)),
    )
    nodes = [labelled, make_node("b", 2)]
    for number in range(20):  # whichever of the two equal nodes the hash would choose
        found = place_in(Room(nodes), of_groups(number, 2, (1, Demand(gpus=1, labels=("db",)))))
        assert found is not None
        assert [share.node for share in of_others(found)] == [A]


def test_groups_may_share_a_node_and_stay_where_they_are_when_the_first_one_grows():
    room = Room([make_node("a", 4), make_node("b", 4)])
    alone = place_in(room, of_groups(1, 2, (1, GPU), (1, Demand(cpus=8))))
    assert alone is not None
    assert len({share.node for share in alone}) == 1
    assert [share.part for share in alone] == [0, 1, 2]
    there = replace(of_groups(1, 3, (1, GPU)), card=replace(of_groups(1, 3, (1, GPU)).card, shares=alone[:2]))
    grown = place_in(room, there)
    assert grown is not None
    assert of_others(grown) == of_others(alone[:2])


@given(
    free=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    needs=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=4),
)
def test_a_place_fits_and_books_exactly_what_all_groups_need(free, needs):
    nodes = [make_node(f"n{index}", count, cpus=16) for index, count in enumerate(free)]
    (ranks, gpus, cpus), *others = needs
    job = waiting(1, ranks, Demand(gpus, cpus), groups=tuple(GroupNeed(n, Demand(g, c)) for n, g, c in others))
    room, whole = Room(nodes), sum(n * g for n, g, _ in needs)
    found = place_in(room, job)
    assert [room.free(node.node) for node in nodes] == [node.free for node in nodes]
    assume(found is not None)
    assert found is not None
    assert is_there(room, found, job.demand)
    assert merged(found) == found
    room.take(found, job.demand)
    assert sum(room.free(node.node).gpu_count for node in nodes) == sum(free) - whole
    assert all(room.free(node.node).cpus >= 0 for node in nodes)
    room.release(found, job.demand)
    assert [room.free(node.node).gpu_count for node in nodes] == free


def test_what_no_swarm_of_this_size_could_hold_together_is_refused_by_group():
    capacities = {node.node: node.capacity for node in (make_node("a", 2, 2), make_node("b", 2, 2))}
    spec = JobSpec(("t",), demand=GPU, ranks=2, group="worker", groups=(RankGroup("server", ("s",), 2, GPU),))
    assert impossible(spec, capacities) is None
    together = replace(spec, ranks=3)
    assert "5 GPUs in 2 groups at once" in str(impossible(together, capacities))
    wrong = replace(spec, groups=(RankGroup("server", ("s",), 1, Demand(gpus=1, gpu_type="none")),))
    assert "group server" in str(impossible(wrong, capacities))


# How they run and end.


class Gang(Scene):
    """A job with three groups on two nodes."""

    def __init__(self, **spec):
        super().__init__(**(SPEC | spec))

    def hold(self):
        self.do(self.shepherd.step(StartWished(PLACE, Ranking("fifo", (1,))), self.clock))
        return self.take(HoldRequest)

    def launch(self):
        self.answer(self.hold()[:1], rendezvous_host="10.0.0.1", rendezvous_port=1)
        for share, request in zip(PLACE[1:], self.holds[1:], strict=True):
            self.answer([request], rendezvous_host=f"host-{share.part}", rendezvous_port=10 + share.part)
        self.commits = self.take(CommitRequest)
        self.answer(self.commits, is_staged=True)
        self.launches = self.take(LaunchRequest)
        self.answer(self.launches)

    def take(self, kind):
        found = super().take(kind)
        if kind is HoldRequest:
            self.holds = found
        return found

    def run(self):
        self.launch()
        for revision, share in enumerate(PLACE, 5):
            self.report(share.node, TaskStage.STARTED, revision, part=share.part)

    def end(self, share, code=0, revision=20, **more):
        first = {0: 3, 1: 0, 2: 2}[share.group] + (2 if share == PLACE[1] else 0)
        exits = [RankExit(first + each, code) for each in range(share.ranks)]
        self.report(share.node, TaskStage.EXITED, revision, exits, part=share.part, **more)


def test_every_group_is_held_with_its_own_demand_and_ordered_as_a_job_of_its_own():
    gang = Gang()
    gang.launch()
    asked = {
        (node, request.part): (request.ranks, request.demand, request.wants_rendezvous) for node, request in gang.holds
    }
    assert asked == {
        (A, 0): (2, GPU, True),
        (B, 0): (1, GPU, False),
        (B, 1): (2, Demand(cpus=1), True),
        (A, 2): (1, Demand(), True),
    }
    orders = {(node, commit.part): commit.order for node, commit in gang.commits}
    assert {key: order.spec.command for key, order in orders.items()} == {
        (A, 0): ("python", "t.py"),
        (B, 0): ("python", "t.py"),
        (B, 1): ("serve",),
        (A, 2): ("feed",),
    }
    assert [orders[key].first_rank for key in ((A, 0), (B, 0), (B, 1), (A, 2))] == [3, 5, 0, 2]
    assert [orders[key].rank_in_group for key in ((A, 0), (B, 0), (B, 1), (A, 2))] == [0, 2, 0, 0]
    assert (orders[B, 0].world_size, orders[B, 1].world_size) == (3, 2)
    assert (orders[B, 0].rendezvous_port, orders[B, 1].rendezvous_port, orders[A, 2].rendezvous_port) == (1, 11, 12)
    assert [(each.name, each.ranks, each.nodes) for each in orders[A, 2].groups] == [
        ("worker", 3, (A, B)),
        ("server", 2, (B,)),
        ("input", 1, (A,)),
    ]
    assert len(gang.launches) == 4
    assert len({order.secret for order in orders.values()}) == 1
    assert len(orders[A, 0].secret) == 32
    again = Gang()
    again.launch()
    assert again.commits[0][1].order.secret == gang.record.secret, "by its generator alone"


def test_nothing_of_any_group_starts_where_one_of_them_is_refused():
    gang = Gang()
    holds = gang.hold()
    gang.answer(holds[:3])
    gang.answer(holds[3:], Refusal.DOES_NOT_FIT)
    assert gang.record.state is JobState.QUEUED
    assert not gang.take(CommitRequest)


def test_the_job_ends_with_its_first_group_and_others_are_told_to_stop_and_count_no_more():
    gang = Gang()
    gang.run()
    assert gang.record.state is JobState.RUNNING
    gang.end(PLACE[0])
    assert gang.record.state is JobState.RUNNING
    gang.end(PLACE[1])
    stopped = {(node, stop.part) for node, stop in gang.take(StopRequest)}
    assert stopped == {(B, 1), (A, 2)}
    assert gang.record.state is JobState.STOPPING
    assert "group worker has ended" in gang.record.reason
    gang.end(PLACE[2], 9)
    gang.end(PLACE[3], 0)
    assert (gang.record.end_reason, gang.record.exit_code) == (EndReason.COMPLETED, 0)


def test_whoever_takes_over_meanwhile_ends_it_alike():
    gang = Gang()
    gang.run()
    gang.end(PLACE[0])
    gang.end(PLACE[1])
    gang.succeed()
    for number, share in enumerate(PLACE):
        gang.end(share, 9 if share.group else 0, revision=40 + number)
    assert (gang.record.end_reason, gang.record.exit_code) == (EndReason.COMPLETED, 0)


def test_a_group_that_ends_well_before_the_first_one_ends_nothing():
    gang = Gang()
    gang.run()
    gang.end(PLACE[3])
    assert gang.record.state is JobState.RUNNING
    assert not gang.take(StopRequest)


def test_a_rank_of_any_group_that_fails_ends_all_and_is_called_by_its_name():
    gang = Gang(grace_s=1.0)
    gang.run()
    gang.end(PLACE[2], 5)
    assert {(node, stop.part) for node, stop in gang.take(StopRequest)} == {(A, 0), (B, 0), (A, 2)}
    for share in (PLACE[0], PLACE[1], PLACE[3]):
        gang.report(share.node, TaskStage.EXITED, 30, [RankExit(9, 0, 15)], part=share.part)
    assert (gang.record.end_reason, gang.record.exit_code) == (EndReason.FAILED, 5)
    assert gang.record.detail == "rank server.0 on b exited with 5"


def test_a_lost_node_of_any_group_ends_the_attempt():
    gang = Gang()
    gang.run()
    gang.lose(B)
    assert gang.record.state is JobState.QUEUED
    assert {(each.node, each.part) for each in gang.record.leftovers} == {(A, 0), (B, 0), (B, 1), (A, 2)}


def test_a_task_that_cannot_start_is_laid_to_its_group_as_to_any_other():
    gang = Gang()
    gang.launch()
    gang.report(B, TaskStage.EXITED, 6, (), TaskFailure.NOT_FOUND, "there is no serve", part=1)
    for share in (PLACE[0], PLACE[1], PLACE[3]):
        gang.report(share.node, TaskStage.EXITED, 30, [RankExit(9, 0, 15)], part=share.part)
    assert (gang.record.end_reason, gang.record.exit_code) == (EndReason.FAILED, 127)


def test_a_claim_keeps_on_each_node_what_all_groups_need_there():
    gang = Gang()
    gang.do(gang.shepherd.step(ClaimWished(PLACE, {}, Ranking("fifo", (1,)), 0.0), gang.clock))
    kept = {node: (claim.ranks, claim.demand) for node, claim in gang.take(ClaimRequest)}
    assert kept == {A: (2, GPU), B: (1, Demand(gpus=1, cpus=2))}


# Beside workers that come and go.


class Elastic(Gang):
    """The same, where the first group changes while it trains."""

    def __init__(self, **spec):
        super().__init__(ranks=2, ranks_most=4, elastic=True, **spec)

    def hold(self):
        place = (Share(A, 1), Share(B, 1), *PLACE[2:])
        self.do(self.shepherd.step(StartWished(place, Ranking("fifo", (1,))), self.clock))
        return self.take(HoldRequest)

    def run(self):
        self.answer(self.hold(), rendezvous_host="h", rendezvous_port=9)
        self.answer(self.take(CommitRequest), is_staged=True)
        self.answer(self.take(LaunchRequest))
        for revision, share in enumerate(self.record.shares, 5):
            self.report(share.node, TaskStage.STARTED, revision, part=share.part)


def test_workers_have_numbers_above_those_of_other_groups_and_are_the_world_alone():
    gang = Elastic()
    gang.run()
    record = gang.record
    assert [(share.part, share.group) for share in record.shares] == [(4, 0), (5, 0), (1, 1), (2, 2)]
    assert record.world.members == (4, 5)
    assert record.last_part == 5
    assert [share.part for share in record.training] == [4, 5]
    assert not record.leaving
    assert record.serving_gpus == 2


def test_a_server_of_elastic_workers_that_fails_ends_the_attempt_and_is_blamed():
    gang = Elastic()
    gang.run()
    gang.report(B, TaskStage.EXITED, 30, [RankExit(0, 3), RankExit(1, 0, 15)], part=1)
    assert {stop.part for _, stop in gang.take(StopRequest)} == {4, 5, 2}
    for node, part in ((A, 4), (B, 5), (A, 2)):
        gang.report(node, TaskStage.EXITED, 31, [RankExit(part - 1, 0, 15)], part=part)
    assert (gang.record.end_reason, gang.record.detail) == (EndReason.FAILED, "rank server.0 on b exited with 3")


def test_a_server_of_elastic_workers_that_is_killed_costs_the_attempt_as_all_workers_would_and_not_the_job():
    gang = Elastic()
    gang.run()
    gang.report(B, TaskStage.EXITED, 30, [RankExit(0, 0, 9), RankExit(1, 0, 9)], part=1)
    for node, part in ((A, 4), (B, 5), (A, 2)):
        gang.report(node, TaskStage.EXITED, 31, [RankExit(part - 1, 0, 15)], part=part)
    assert gang.record.state is JobState.QUEUED
    assert "group server on b was killed by signal 9" in gang.record.reason


def test_elastic_workers_that_come_to_their_end_end_the_job():
    gang = Elastic()
    gang.run()
    for node, part in ((A, 4), (B, 5)):
        gang.report(node, TaskStage.EXITED, 31, [RankExit(part - 1, 0)], part=part)
    assert {stop.part for _, stop in gang.take(StopRequest)} == {1, 2}
    gang.report(B, TaskStage.EXITED, 32, [RankExit(0, 0, 15)], part=1)
    gang.report(A, TaskStage.EXITED, 32, [RankExit(2, 1)], part=2)
    assert gang.record.end_reason is EndReason.COMPLETED


def test_a_gang_whose_node_of_another_group_is_lost_begins_anew():
    gang = Elastic()
    gang.run()
    gang.lose(B)
    assert gang.record.state is JobState.QUEUED
    assert gang.shepherd.me == ME

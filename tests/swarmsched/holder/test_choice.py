"""Who holds a job, and when that should change."""

import random

import pytest
from msgspec.structs import replace

from swarmsched.cluster import Candidate
from swarmsched.holder.choice import (
    REPLACE_AFTER_S,
    choose_holders,
    excess_jobs,
    next_holders,
    successor,
)
from swarmsched.holders import Holder
from swarmsched.ids import NodeId
from swarmsched.resources import Share
from tests.swarmsched.building import make_record

ME = NodeId("a")


def holder(name, store=1):
    return Holder(NodeId(name), store)


def candidate(name, zone="", jobs=0, store=1, is_witness=False):
    return Candidate(holder(name, store), zone, jobs, 2, is_witness)


def record(*names):
    return make_record(ME, names)


def following(held, live, gone=None, now_s=1_000.0):
    return next_holders(record(*held), ME, [candidate(name) for name in live], gone or {}, random.Random(1), now_s)


def test_three_of_many_are_chosen_and_the_asked_node_is_one_of_them():
    chosen = choose_holders([candidate("a")], [candidate(name) for name in "abcdef"], random.Random(1), 2)
    assert len({holder("a"), *chosen}) == 3


def test_as_many_as_there_are_are_chosen_in_a_small_swarm():
    assert choose_holders([candidate("a")], [], random.Random(1)) == ()
    assert choose_holders([candidate("a")], [candidate("b")], random.Random(1)) == (holder("b"),)


def test_holders_stand_in_different_zones_where_that_is_possible():
    live = [candidate("a", "x"), *(candidate(name, "x") for name in "bcd"), candidate("e", "y"), candidate("f", "z")]
    for seed in range(20):
        chosen = choose_holders([candidate("a", "x")], live, random.Random(seed), 2)
        assert set(chosen) == {holder("e"), holder("f")}


def test_the_successor_of_a_lost_holder_stands_in_another_zone_than_those_that_stay():
    near = [candidate(name, zone) for name, zone in zip("abcdefgh", "xyxyxyxy", strict=True)]
    live = [*near, candidate("i", "z")]
    gone = {NodeId("l"): 0.0}
    for seed in range(20):
        chosen = next_holders(record("a", "b", "l"), ME, live, gone, random.Random(seed), 1_000.0)
        assert chosen == (holder("a"), holder("b"), holder("i"))


def test_a_node_that_drains_holds_what_is_new_only_where_there_are_no_others():
    draining = [replace(candidate(name, "z"), is_draining=True) for name in "bc"]
    for seed in range(20):
        rng = random.Random(seed)
        others = [candidate("d", "x"), candidate("e", "x")]
        chosen = choose_holders([candidate("a", "x")], [*draining, *others], rng, 2)
        assert set(chosen) == {holder("d"), holder("e")}
        assert len(choose_holders([candidate("a", "x")], draining, rng, 2)) == 2


def test_nothing_changes_while_three_holders_live():
    assert following("abc", "abcdef") is None


def test_a_holder_that_is_away_for_long_is_replaced():
    assert following("abc", "abd", {NodeId("c"): 1_000.0 - REPLACE_AFTER_S}) == (holder("a"), holder("b"), holder("d"))


def test_a_holder_that_is_away_for_a_moment_stays():
    assert following("abc", "abd", {NodeId("c"): 999.0}) is None


def test_a_lost_holder_stays_when_nobody_could_replace_it():
    assert following("abc", "ab", {NodeId("c"): 0.0}) is None


def test_a_job_of_a_small_swarm_gets_more_holders_when_there_are_more():
    assert following("a", "ab") == (holder("a"), holder("b"))
    assert len(following("ab", "abc")) == 3


def test_a_holder_with_another_store_is_another_holder():
    live = [candidate("a"), candidate("b"), candidate("c", store=2)]
    chosen = next_holders(record(*"abc"), ME, live, {}, random.Random(1), 1_000.0)
    assert chosen == (holder("a"), holder("b"), holder("c", store=2))


def test_a_node_hands_over_what_it_has_above_the_mean_once_that_is_far_too_much():
    others = [candidate(name, jobs=1) for name in "bcd"]
    assert excess_jobs(6, others, ME) == 0
    assert excess_jobs(41, others, ME) == 30


def test_a_node_without_company_keeps_its_jobs():
    assert excess_jobs(1_000, [], ME) == 0
    assert excess_jobs(1_000, [candidate("b", is_witness=True)], ME) == 0


def test_the_successor_is_the_holder_with_the_fewest_jobs_and_never_a_witness():
    live = [candidate("b", jobs=5), candidate("c", jobs=2), candidate("d"), candidate("e", is_witness=True)]
    assert successor(record(*"abc"), ME, live) == "c"
    assert successor(record(*"ae"), ME, live) is None


def test_holders_on_nodes_of_a_settled_gang_are_relieved_where_others_can_hold():
    job = replace(record(*"abc"), shares=(Share(NodeId("a"), 1), Share(NodeId("b"), 1)))

    def chosen(live, *, is_settled):
        candidates = [candidate(name) for name in live]
        return next_holders(job, ME, candidates, {}, random.Random(1), 1_000.0, is_settled=is_settled)

    assert chosen("abcd", is_settled=False) is None
    assert chosen("abc", is_settled=True) is None
    assert set(chosen("abcd", is_settled=True)) == {holder("a"), holder("c"), holder("d")}


@pytest.mark.parametrize("live", ["abd", "abde", "abdef"])
def test_relieving_a_node_of_a_settled_gang_never_leaves_the_job_with_fewer_holders(live):
    """One holder is lost while another one runs ranks: whoever is free takes the place of the lost one first."""
    job = replace(record(*"abc"), shares=(Share(NodeId("b"), 1), Share(NodeId("e"), 1)))
    lost = {NodeId("c"): 1_000.0 - REPLACE_AFTER_S}
    candidates = [candidate(name) for name in live]
    chosen = next_holders(job, ME, candidates, lost, random.Random(1), 1_000.0, is_settled=True) or ()
    assert len(chosen) == 3
    assert {holder("a"), holder("d")} < set(chosen)


@pytest.mark.parametrize("seed", range(300))
def test_no_change_leaves_a_job_with_fewer_live_holders_than_it_could_have(seed):
    rng = random.Random(seed)
    names = "abcdefg"[: rng.randint(2, 7)]
    held = ["a", *rng.sample(names[1:], min(2, len(names) - 1))]
    down = {name for name in names[1:] if rng.random() < 0.3}
    gang = tuple(Share(NodeId(name), 1) for name in names if rng.random() < 0.4)
    job = replace(record(*held), shares=gang)
    live = [candidate(name, store=1 + (name != "a" and rng.random() < 0.2)) for name in names if name not in down]
    gone = {NodeId(name): rng.choice([0.0, 999.0]) for name in down}
    chosen = next_holders(job, ME, live, gone, rng, 1_000.0, is_settled=rng.random() < 0.5)
    alive = {each.holder for each in live}
    before = [each for each in job.holders if each in alive]
    if chosen is None or not job.configuration.is_quorum(before):
        return  # without a majority nothing can be decided
    nodes = {each.node for each in chosen}
    assert len(nodes) == len(chosen) >= min(3, len(held))
    assert len(alive.intersection(chosen)) >= len(before)
    assert ME in nodes


def test_at_most_one_of_a_jobs_holders_is_a_witness():
    witnesses = [candidate(name, is_witness=True) for name in "xyz"]
    for seed in range(20):
        rng = random.Random(seed)
        assert len(choose_holders([candidate("a")], witnesses, rng, 2)) == 1
        first = choose_holders([candidate("a")], [*witnesses, candidate("b")], rng, 2)
        assert holder("b") in first
        assert len(first) == 2
        others = [candidate("a"), *witnesses[1:]]
        assert choose_holders([witnesses[0]], others, rng, 2, has_witness=True) == (holder("a"),)


def test_a_second_witness_gives_way_to_a_node_that_can_act():
    live = [candidate("a"), candidate("x", is_witness=True), candidate("y", is_witness=True), candidate("b")]
    assert next_holders(record(*"axy"), ME, live, {}, random.Random(1), 0.0) == (holder("a"), holder("x"), holder("b"))
    assert next_holders(record(*"axy"), ME, live[:3], {}, random.Random(1), 0.0) is None


def test_a_settled_gangs_nodes_are_not_relieved_by_two_witnesses():
    job = replace(record(*"abc"), shares=(Share(NodeId("b"), 1), Share(NodeId("c"), 1)))
    live = [candidate(name) for name in "abc"] + [candidate(name, is_witness=True) for name in "xy"]
    chosen = next_holders(job, ME, live, {}, random.Random(1), 1_000.0, is_settled=True) or ()
    assert len(chosen) == 3
    assert len({holder("x"), holder("y")} & set(chosen)) == 1

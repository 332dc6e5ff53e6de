"""Wishes, whoever has them: each takes its room from the next one, and what stands against it is said."""

import pytest

from swarmsched.effects import Announce
from swarmsched.negotiation.placement.wish import Obstacle, Wish
from swarmsched.resources import Demand, Share
from swarmsched.view import Allocation
from tests.swarmsched.negotiation.placement.scene import UTC, A, B, Scene, job_id, node, running_elastic

GPU = Demand(gpus=1)


def wish(letter, *places, batch=0):
    return Wish(job_id(letter), Allocation(tuple(Share(name, ranks) for name, ranks in places), batch), "wanted")


@pytest.fixture
def scene():
    """Two jobs wait; all four GPUs are free."""
    scene = Scene([node(A, 2), node(B, 2)], policy="swarm")
    for letter, ranks in (("b", 2), ("c", 2)):
        scene.submit(letter, ranks, UTC)
    return scene


def carried_out(scene, room, each):
    return scene.placement._carrier.carry_out(each, room, scene.clock)


def test_of_two_wishes_for_one_place_the_second_has_none_left(scene):
    room = scene.placement.shepherds.room(scene.cluster.nodes())
    assert carried_out(scene, room, wish("b", (A, 2))).obstacle is Obstacle.NONE
    second = carried_out(scene, room, wish("c", (A, 1), (B, 1)))
    assert (second.obstacle, second.problem, [*second.effects]) == (Obstacle.PLACE, "the place on a is taken", [])
    assert carried_out(scene, room, wish("c", (B, 2))).obstacle is Obstacle.NONE


def test_a_job_that_is_being_placed_takes_no_other_wish(scene):
    room = scene.placement.shepherds.room(scene.cluster.nodes())
    carried_out(scene, room, wish("b", (A, 2)))
    assert carried_out(scene, room, wish("b", (B, 2))).obstacle is Obstacle.TIME


def test_what_a_running_job_gives_up_is_nobodys_before_it_has_left():
    scene = Scene([node(A, 0, 2), node(B, 0, 2)], policy="swarm")
    running_elastic(scene)
    room = scene.placement.shepherds.room(scene.cluster.nodes())
    outcome = carried_out(scene, room, wish("a", (A, 1)))
    assert outcome.obstacle is Obstacle.JOB, "it takes two at least"
    room.release((Share(B, 2),), GPU)
    assert carried_out(scene, room, wish("a", (B, 2))).obstacle is Obstacle.NONE
    assert room.fits(GPU).get(A, 0) == room.fits(GPU).get(B, 0) == 0


def test_another_batch_alone_is_no_other_place(scene):
    scene = Scene([node(A, 0, 2)], policy="swarm")
    running_elastic(scene)
    room = scene.placement.shepherds.room(scene.cluster.nodes())
    outcome = carried_out(scene, room, wish("a", (A, 2), batch=128))
    assert [each.kind for each in outcome.effects if isinstance(each, Announce)] == ["job.rebatched"]
    assert carried_out(scene, room, wish("a", (A, 2), batch=32)).obstacle is not Obstacle.NONE


def test_a_look_is_wanted_once_something_can_be_done_that_could_not_and_not_because_of_news(scene):
    shepherds = scene.placement.shepherds
    news, has_openings = shepherds.take_news()
    assert ({job.job_id for job in news}, has_openings) == ({job_id("b"), job_id("c")}, True)
    assert shepherds.take_news() == ([], False)
    shepherds.stir(job_id("b"))
    assert ([job.job_id for job in shepherds.take_news()[0]], shepherds.take_news()[1]) == ([job_id("b")], False)
    room = shepherds.room(scene.cluster.nodes())
    carried_out(scene, room, wish("b", (A, 2)))
    assert shepherds.take_news()[1] is False, "it is being placed"
    shepherds.jobs[job_id("b")].end_attempt()
    shepherds.stir(job_id("b"))
    assert shepherds.take_news()[1] is True, "it waits again"
    shepherds.stir(job_id("f"))
    assert shepherds.take_news() == ([], False), "it is not ours"
    scene.placement.let_go(job_id("c"))
    assert shepherds.take_news() == ([], True), "others behind it may have their turn"

"""A seed's story is the same everywhere, and a plan survives being printed."""

import json
import random
import subprocess
import sys

import pytest

from swarmsched.ids import NodeId
from swarmsched.simulator.ambush import PLACING_S
from swarmsched.simulator.fault import FAULT_CLASSES, Fault
from swarmsched.simulator.fault_draw import DRAWS
from swarmsched.simulator.host import Host
from swarmsched.simulator.injector import APPLY
from swarmsched.simulator.seeds import SeedOptions, run_seed
from swarmsched.simulator.story import SIZES, Story, StoryOptions, StoryPlan, draw_plan, draw_size, run_story
from swarmsched.simulator.workload import BLOCKER_S, Work

ONE_SEED = """
from swarmsched.simulator.story import StoryOptions, draw_plan, run_story
result = run_story(draw_plan({seed}, StoryOptions(nodes=3)))
print(result.events, result.digest, result.virtual_s, sorted(result.sometimes.items()))
"""


def history(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-c", ONE_SEED.format(seed=seed)]
    done = subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("seed", [4, 11])
def test_a_seed_has_one_history_in_every_process_whatever_strings_hash_to(seed):
    first, second = history(seed, "1"), history(seed, "4711")
    assert first == second
    assert int(first.split()[0]) > 100


def test_another_seed_has_another_history():
    digests = {run_story(draw_plan(seed, StoryOptions(nodes=1))).digest for seed in range(3)}
    assert len(digests) == 3


def test_a_plan_that_was_printed_is_the_plan_that_was_drawn():
    for seed in range(30):
        plan = draw_plan(seed, StoryOptions())
        assert StoryPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_every_class_of_faults_can_be_drawn_and_applied():
    assert list(DRAWS) == list(FAULT_CLASSES) == list(APPLY)


def test_only_the_chosen_classes_are_drawn_and_each_of_them_is():
    for seed in range(20):
        faults = draw_plan(seed, StoryOptions(nodes=5, fault_classes=("crash", "clog"))).faults
        assert {fault.kind for fault in faults} == {"crash", "clog"}


def test_some_faults_strike_where_a_job_has_just_been_submitted():
    struck = 0
    for seed in range(60):
        plan = draw_plan(seed, StoryOptions(nodes=5, fault_classes=("crash",)))
        submits = [work for work in plan.work if work.kind == "submit"]
        struck += sum(
            fault.parameters["node"] == work.parameters["node"] and 0.0 < fault.at_s - work.at_s <= PLACING_S[1]
            for fault in plan.faults
            for work in submits
        )
    assert struck >= 10


def test_each_scene_is_drawn_in_some_small_swarms_and_in_no_large_one():
    small = [draw_plan(seed, StoryOptions(nodes=3)).work for seed in range(60)]
    large = [draw_plan(seed, StoryOptions(nodes=30)).work for seed in range(20)]
    for name, scene in SCENES.items():
        assert 2 <= sum(any(scene(each) for each in work) for work in small) <= 40, name
        assert not any(scene(each) for work in large for each in work), name


SCENES = {
    "starvation": lambda work: (
        work.parameters.get("duration_s", 0.0) >= BLOCKER_S[0] and work.parameters["does"] == "sleep"
    ),
    "preemption": lambda work: "minimum_run_s" in work.parameters.get("parameters", {}),
}


def test_whole_classes_are_absent_from_some_runs_and_present_in_others():
    drawn = [{fault.kind for fault in draw_plan(seed, StoryOptions(nodes=5)).faults} for seed in range(60)]
    for kind in FAULT_CLASSES:
        count = sum(kind in kinds for kinds in drawn)
        assert 5 <= count <= 45, kind


def test_sizes_are_drawn_as_often_as_they_should():
    rng = random.Random(1)
    sizes = [draw_size(rng) for _ in range(5_000)]
    for size, percent in SIZES:
        assert 0.7 * percent < 100.0 * sizes.count(size) / len(sizes) < 1.3 * percent


def test_all_faults_are_over_when_the_swarm_is_healed():
    for seed in range(60):
        plan = draw_plan(seed, StoryOptions())
        ends = [fault.at_s + fault.parameters.get("duration_s", 0.0) for fault in plan.faults]
        assert max(ends, default=0.0) <= plan.heal_s + 0.01


def test_a_disk_that_fills_up_twice_at_once_is_full_until_the_later_end():
    """A commit that waits for the first end goes on waiting: a checker that asks must hear so."""
    story = Story(StoryPlan(1, 1, 1, 9.0, (), ()))
    story.swarm.start(0.0)
    spans = ((1.0, 6.0), (2.0, 0.5))
    story.injector.schedule([Fault(at_s, "full-disk", {"node": "n000", "duration_s": for_s}) for at_s, for_s in spans])
    story.swarm.run_for(5.0)
    assert story.swarm.hosts[NodeId("n000")].storage.is_full(story.swarm.loop.now_s)
    story.swarm.run_for(3.0)
    assert not story.swarm.hosts[NodeId("n000")].storage.is_full(story.swarm.loop.now_s)


@pytest.mark.parametrize("reader", [Fault, Work])
def test_a_plan_with_an_unknown_class_is_refused(reader):
    with pytest.raises(ValueError, match="'meteorite' is not one of"):
        reader.from_json({"at_s": 1.0, "class": "meteorite", "work": "meteorite"})


def test_a_story_that_spins_at_one_moment_is_reported_with_its_seed(monkeypatch):
    def ask_at_once(host: Host, life: int) -> None:
        host.loop.post_later(0.0, host._read_telemetry, life)

    monkeypatch.setattr(Host, "_read_telemetry", ask_at_once)
    result = run_seed(3, SeedOptions(StoryOptions(nodes=1), shrinks=False))
    assert result.violation is not None
    assert (result.violation["seed"], result.violation["invariant"]) == (3, "spins")
    assert "21,000 callbacks within a virtual second; the next is " in result.violation["message"]


def test_an_agent_that_cannot_read_its_resources_yet_is_not_due_all_the_time(monkeypatch):
    monkeypatch.setattr(Host, "_read_telemetry", lambda host, life: None)
    story = Story(draw_plan(3, StoryOptions(nodes=1)))
    story.swarm.start(0.02)
    story.swarm.run_for(5.0)
    (host,) = story.swarm.up
    assert host.step_count < 100

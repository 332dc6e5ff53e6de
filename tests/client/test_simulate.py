"""`swarm simulate faults`: what it prints, how it exits, and that processes change nothing."""

import json
import shlex

import pytest

from swarm_client.cli import main
from swarmsched.node.node import Node
from swarmsched.simulator.breaks import BREAKS
from swarmsched.simulator.fault import FAULT_CLASSES
from swarmsched.simulator.story import StoryOptions, draw_plan


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["simulate", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def found(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    code, out, _ = simulate(capsys, "faults", *words, "-o", "json")
    document = json.loads(out)
    assert code == (1 if document["violations"] else 0)
    return document


def test_the_document_has_its_keys_and_a_seed_gives_the_same_events_again(capsys):
    first = found(capsys, "--seed", "3", "--nodes", "1")
    again = found(capsys, "--seed", "3", "--nodes", "1")
    assert first["seeds"] == 1
    assert first["events"] == again["events"] > 50
    assert first["events_per_s"] > 0
    assert first["violations"] == []
    assert set(first["sometimes"]) == set(again["sometimes"])


@pytest.mark.parametrize(
    "words", [("--gpus-most", "bert=1"), ("--policy", "fifo"), ("--tick-s", "5"), ("--asks-least",)]
)
def test_options_of_replays_are_refused(capsys, words):
    code, out, error = simulate(capsys, "faults", "--seed", "3", *words)
    assert (code, out) == (2, "")
    assert f"{words[0]} cannot go with simulate faults" in error
    assert "it is for swarm simulate replay" in error


def test_the_number_of_processes_changes_nothing_but_the_speed(capsys):
    one = found(capsys, "--seeds", "4", "--nodes", "1", "--jobs", "1")
    two = found(capsys, "--seeds", "4", "--nodes", "1", "--jobs", "2")
    del one["events_per_s"], two["events_per_s"]
    assert one == two


def test_a_violation_is_told_with_its_faults_and_replays_from_what_was_printed(capsys, tmp_path):
    broken = ("--break", "quorum-of-one", "--nodes", "3", "--seeds", "30", "--stop-at-first", "--jobs", "1")
    document = found(capsys, *broken)
    (violation,) = document["violations"]
    assert document["seeds"] <= 30
    assert set(violation) >= {
        "seed",
        "commit",
        "break",
        "invariant",
        "time_s",
        "message",
        "faults",
        "work",
        "recent",
        "trails",
    }
    assert violation["break"] == document["break"] == "quorum-of-one"
    assert violation["recent"]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(violation))
    (again,) = found(capsys, "--plan", str(plan), "--no-shrink")["violations"]
    assert again == violation
    code, out, _ = simulate(capsys, "faults", "--plan", str(plan), "--no-shrink")
    assert code == 1
    assert f"seed {violation['seed']}, commit" in out
    assert violation["message"] in out
    assert f"\n  again: swarm simulate faults --plan {plan} --no-shrink\n" in out


def test_the_command_that_a_violation_is_told_with_finds_it_and_only_it_again(capsys):
    classes = "crash, power-cut,partition"
    options = ("--nodes", "3", "--fault-classes", classes, "--break", "quorum-of-one")
    code, first, _ = simulate(
        capsys, "faults", *options, "--seed", "1", "--seeds", "30", "--stop-at-first", "--jobs", "1"
    )
    assert code == 1
    title, again, *story = first.splitlines()
    seed = title.partition(",")[0].removeprefix("seed ")
    assert " with quorum-of-one broken: invariant " in title
    command = shlex.split(again.removeprefix("  again: "))
    assert command == ["swarm", "simulate", "faults", "--seed", seed, *options]
    code, second, _ = simulate(capsys, *command[2:])
    assert code == 1
    assert second.splitlines()[: story.index("") + 2] == [title, again, *story[: story.index("")]]
    assert "seeds: 1, " in second


def test_a_plan_keeps_its_break_unless_another_is_named(capsys, tmp_path):
    options = ("--break", "quorum-of-one", "--nodes", "3", "--seeds", "30", "--stop-at-first", "--jobs", "1")
    (violation,) = found(capsys, *options)["violations"]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(violation))
    other = found(capsys, "--plan", str(plan), "--break", "no-hash-check")
    assert (other["break"], other["violations"]) == ("no-hash-check", [])
    plan.write_text(json.dumps({**violation, "break": ""}))
    assert found(capsys, "--plan", str(plan))["violations"] == []
    del violation["break"]  # as older versions printed it
    plan.write_text(json.dumps(violation))
    assert found(capsys, "--plan", str(plan))["break"] == ""


@pytest.mark.parametrize("words", [("-q",), ("-o", "name"), ("-q", "-o", "json")])
def test_names_are_the_seeds_that_failed_and_nothing_if_none_did(capsys, words):
    options = ("--nodes", "3", "--seeds", "2", "--jobs", "1")
    seeds = [each["seed"] for each in found(capsys, *options, "--break", "quorum-of-one", "--no-shrink")["violations"]]
    assert seeds
    code, out, _ = simulate(capsys, "faults", *options, "--break", "quorum-of-one", "--no-shrink", *words)
    assert (code, out) == (1, "".join(f"{seed}\n" for seed in seeds))
    assert simulate(capsys, "faults", "--seed", "3", "--nodes", "1", *words) == (0, "", "")


def test_a_template_is_filled_whatever_else_is_asked_for(capsys):
    code, out, _ = simulate(capsys, "faults", "--seed", "3", "--nodes", "1", "-q", "--format", "{{seeds}} {{break}}.")
    assert (code, out) == (0, "1 .\n")


@pytest.mark.parametrize(
    ("broken", "problem"),
    [("quorum-of-two", "break 'quorum-of-two' is no rule that can be broken"), (["x"], "break is \"['x']\"")],
)
def test_a_plan_with_a_break_that_is_not_known_is_refused(capsys, tmp_path, broken, problem):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**draw_plan(3, StoryOptions(nodes=1)).to_json(), "break": broken}))
    code, out, error = simulate(capsys, "faults", "--plan", str(file))
    assert (code, out) == (2, "")
    assert f"--plan '{file}': {problem}" in error.splitlines()[0]
    assert "one of quorum-of-one" in error.splitlines()[1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seed", "3"], "--seed"),
        (["--seeds=3", "--seed=3"], "--seed, --seeds"),
        (["--nodes", "3"], "--nodes"),
        (["--fault-classes", "all"], "--fault-classes"),
    ],
)
def test_a_plan_goes_with_no_option_that_it_would_ignore(capsys, words, named):
    code, out, error = simulate(capsys, "faults", "--plan", "plan.json", *words)
    assert (code, out) == (2, "")
    assert f"--plan 'plan.json' cannot go with {named}: the plan has its own" in error.splitlines()[0]
    assert f"leave out {named}, or --plan" in error.splitlines()[1]


def test_breaks_and_classes_are_listed(capsys):
    code, out, _ = simulate(capsys, "--list-breaks")
    assert code == 0
    assert all(name in out for name in (*BREAKS, *FAULT_CLASSES))


@pytest.mark.parametrize(
    ("words", "problem", "remedy"),
    [
        (["--break", "quorum-of-two"], "--break: 'quorum-of-two' is no rule that can be broken", "quorum-of-one"),
        (["--fault-classes", "crahs"], "'crahs' is no class of faults; did you mean crash?", "or all"),
        (["--break", ""], "--break '' names no rule", "leave --break out, or name one of quorum-of-one, "),
        (["--break="], "--break '' names no rule", "--list-breaks explains them"),
        (["--fault-classes", ""], "--fault-classes '' names no class of faults", "leave --fault-classes out, or give"),
        (["--fault-classes", " ,"], "--fault-classes ' ,' names no class of faults", "or all"),
        (["--plan", ""], "--plan '' cannot be read: FileNotFoundError", "`violations`"),
        (["--nodes", "0"], "--nodes '0' is no size of a swarm", "--nodes takes 1 to 1000"),
        (["--seeds", "few"], "--seeds 'few': must be a whole number", "--seeds is"),
        (["--seed", "-1"], "--seed '-1': must be a whole number", "--seed is"),
        (["--plan", "/nowhere"], "--plan '/nowhere' cannot be read: FileNotFoundError", "`violations`"),
    ],
)
def test_arguments_that_make_no_sense_are_named_with_a_remedy(capsys, words, problem, remedy):
    code, out, error = simulate(capsys, "faults", *words)
    assert (code, out) == (2, "")
    assert problem in error.splitlines()[0]
    assert remedy in error.splitlines()[1]


def test_plan_that_lacks_something_is_named_with_the_place_and_what_is_missing(capsys, tmp_path):
    plan = draw_plan(3, StoryOptions(nodes=3, fault_classes=("crash",))).to_json()
    index = next(index for index, each in enumerate(plan["work"]) if each["work"] == "submit")
    del plan["work"][index]["priority"]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    code, out, error = simulate(capsys, "faults", "--plan", str(file))
    assert (code, out) == (2, "")
    assert f"--plan '{file}': work[{index}].priority is missing" in error.splitlines()[0]
    assert "'submit' needs priority: a whole number" in error.splitlines()[1]
    file.write_text("{")
    code, _, error = simulate(capsys, "faults", "--plan", str(file))
    assert (code, "cannot be read: JSONDecodeError" in error) == (2, True)


def test_only_known_simulations_are_run(capsys):
    code, _, error = simulate(capsys, "fault")
    assert code == 2
    assert "did you mean faults?" in error


def test_a_loop_without_an_end_within_a_step_is_told_with_its_seed_and_place(capsys, monkeypatch):
    step, count = Node.step, 0

    def spins_once(self, event, now_s):
        nonlocal count
        count += 1
        while count == 500:
            pass
        return step(self, event, now_s)

    monkeypatch.setattr(Node, "step", spins_once)
    monkeypatch.setattr("swarm_client.simulate.STEP_CPU_S", 0.2)
    (violation,) = found(capsys, "--seed", "3", "--nodes", "1", "--no-shrink")["violations"]
    assert (violation["seed"], violation["invariant"]) == (3, "no handler raises")
    assert "no step came to an end in 0.2 s, in " in violation["message"]
    assert "spins_once" in violation["message"]

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from math import inf
from pathlib import Path

import pytest
from msgspec.msgpack import encode
from msgspec.structs import replace

from swarm_agent.planner import Planner
from swarm_agent.task.shim import now
from swarmsched.api import JobState
from swarmsched.card import STATES, JobCard
from swarmsched.effects import ComputePlan
from swarmsched.estimate import Estimate, SpeedPoint, SpeedQuestion
from swarmsched.events import Event, PlanComputed, PlanFailed
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import Demand, Free, GpuCount, Share
from swarmsched.view import Change, ClusterView, EndedJob, JobView, NodeView, PolicySetting
from tests.agent.testing import wait_until

JOB = JobId("01" + "0" * 24)
HAS = Free((GpuCount("Simulated", 2**30, 1),), 4, 2**30)
NODE = NodeView(NodeId("n"), HAS, HAS, 1)


def request(version: int, policy: str = "fifo") -> ComputePlan:
    return ComputePlan(PolicySetting(policy), ClusterView(version, (NODE,), (job(0),)))


def job(number: int) -> JobView:
    job_id = JobId(f"01{number:024}")
    return JobView(JobCard(job_id, 1, 1, NodeId("n"), STATES.index(JobState.QUEUED), 0, 1, Demand(gpus=1), 1.0))


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., tuple[Planner, list[Event]]]]:
    planners: list[Planner] = []

    def start(**limits: float) -> tuple[Planner, list[Event]]:
        events: list[Event] = []
        planners.append(Planner(events.append, **limits))
        planners[-1]._look_s = inf  # no look ahead but where it is what is tested
        return planners[-1], events

    yield start
    for planner in planners:
        await planner.stop()


def child_pid(planner: Planner) -> int | None:
    return planner._child.pid if planner._child else None


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_real_policy_plans_in_a_child_that_is_kept(make: Callable[..., tuple[Planner, list[Event]]]) -> None:
    planner, events = make()
    planner.submit(request(7))
    await wait_until(lambda: events)
    first = child_pid(planner)
    planner.submit(request(8))
    await wait_until(lambda: len(events) == 2)

    assert child_pid(planner) == first
    for version, event in zip((7, 8), events, strict=True):
        assert isinstance(event, PlanComputed)
        assert event.plan.version == version
        assert [(each.job_id, each.change) for each in event.plan.decisions] == [(JOB, Change.START)]
        assert 0 < event.plan.elapsed_s < 60


SOMEBODYS_POLICIES = """
import time
from swarmsched.view import Plan
from swarmsched.policies.base import PolicyKind
from swarmsched.policies import registry

class Counting:
    def __init__(self, parameters): pass
    def plan(self, view, now_s):
        return Plan((), view.memory + bytes([len(view.history)]))

class Raising(Counting):
    def plan(self, view, now_s):
        raise ZeroDivisionError("nobody waits")

class Unbuilt(Counting):
    def __init__(self, parameters): raise KeyError("parameters")

class Nonsense(Counting):
    def plan(self, view, now_s): return Plan(None)

class Busy(Counting):
    def plan(self, view, now_s):
        end_s = time.process_time() + 0.8
        while time.process_time() < end_s:
            pass
        return Plan(())

for name in ("Counting", "Raising", "Unbuilt", "Nonsense", "Busy"):
    registry.POLICIES[name.lower()] = PolicyKind(name.lower(), "x", (), f"somebodys:{name}")
for name in ("gone", "misspelt", "leaving"):
    registry.POLICIES[name] = PolicyKind(name, "x", (), f"somebodys_{name}:Policy")
"""
BROKEN = {
    "gone": "import no_such_package",
    "misspelt": "class Policy(:",
    "leaving": "raise SystemExit(3)",
}
"""Modules of policies that end while they are imported."""


@pytest.fixture
def somebodys_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that are found by their dotted path."""
    (tmp_path / "somebodys.py").write_text(SOMEBODYS_POLICIES)
    (tmp_path / "sitecustomize.py").write_text("import somebodys\n")
    for name, text in BROKEN.items():
        (tmp_path / f"somebodys_{name}.py").write_text(f"{text}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("somebodys_policies")
async def test_a_plan_hands_its_memory_and_the_history_through(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    ended = EndedJob(job(9).card, has_completed=True, ended_utc_s=5.0)
    planner.submit(ComputePlan(PolicySetting("counting"), ClusterView(1, (), (), (ended,), b"then")))
    await wait_until(lambda: events)
    assert isinstance(events[0], PlanComputed), events
    assert events[0].plan.memory == b"then\x01"


@pytest.mark.usefixtures("somebodys_policies")
async def test_where_a_policy_raises_backfill_plans_in_its_place_and_that_is_counted(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    seen = []
    planner.tell_plans(lambda policy, result, elapsed_s: seen.append((policy, result)))
    planner.submit(request(3, policy="raising"))
    await wait_until(lambda: events)
    assert isinstance(events[0], PlanComputed), events
    plan = events[0].plan
    assert (plan.version, plan.policy_id) == (3, "raising")
    assert plan.fault == "raising raised ZeroDivisionError: nobody waits"
    assert [(each.job_id, each.change) for each in plan.decisions] == [(JOB, Change.START)]
    assert seen == [("raising", "fell_back")]


@pytest.mark.usefixtures("somebodys_policies")
@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("gone", "raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("misspelt", "raised SyntaxError: "),
        ("leaving", "raised SystemExit: 3"),
        ("unbuilt", "raised KeyError: 'parameters'"),
        ("nonsense", "made no plan that can be read: Plan: decisions: "),
    ],
)
async def test_a_policy_that_cannot_be_imported_or_made_or_plans_nonsense_is_as_one_that_raises(
    make: Callable[..., tuple[Planner, list[Event]]], policy: str, fault: str
) -> None:
    planner, events = make()
    seen = []
    planner.tell_plans(lambda policy, result, elapsed_s: seen.append((policy, result)))
    planner.submit(request(3, policy))
    await wait_until(lambda: len(events) == 1)
    pid = child_pid(planner)
    planner.submit(request(4, policy))
    await wait_until(lambda: len(events) == 2)

    assert child_pid(planner) == pid
    for event in events:
        assert isinstance(event, PlanComputed), event
        assert event.plan.fault.startswith(f"{policy} {fault}")
        assert [(each.job_id, each.change) for each in event.plan.decisions] == [(JOB, Change.START)]
    assert seen == [(policy, "fell_back")] * 2


async def test_a_policy_that_is_not_there_is_a_failed_plan_and_the_child_goes_on(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    planner.submit(request(1, policy="no-such-policy"))
    await wait_until(lambda: events)
    planner.submit(request(2))
    await wait_until(lambda: len(events) == 2)

    assert isinstance(events[0], PlanFailed)
    assert "no-such-policy" in events[0].error
    assert isinstance(events[1], PlanComputed)


async def test_speeds_are_fitted_in_the_same_child_between_plans(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    question = SpeedQuestion(Estimate(points=(SpeedPoint(1, 1, 64, 0.4),)), 1, 2, 2)
    planner.submit(request(1))
    first, second = await asyncio.gather(planner.tabulate(question, 60.0), planner.tabulate(question, 60.0))
    planner.submit(request(2))
    await wait_until(lambda: len(events) == 2)

    assert first == second
    assert first is not None
    assert [(row.ranks, row.is_measured) for row in first.rows] == [(1, True), (2, False)]
    assert all(isinstance(event, PlanComputed) for event in events)


async def test_who_asks_for_speeds_does_not_wait_for_a_stuck_child(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    planner.submit(request(1))
    await wait_until(lambda: events)
    stuck = child_pid(planner)
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)
    question = SpeedQuestion(Estimate(points=(SpeedPoint(1, 1, 64, 0.4),)), 1, 2, 2)
    assert await planner.tabulate(question, 0.1) is None
    os.kill(stuck, signal.SIGCONT)
    planner.submit(request(2))
    await wait_until(lambda: len(events) == 2)
    assert isinstance(events[1], PlanComputed)


async def test_a_request_that_waits_is_superseded_by_a_newer_one(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    planner.submit(request(1))
    planner.submit(request(2))
    planner.submit(request(3))
    await wait_until(lambda: any(isinstance(event, PlanComputed) for event in events))

    versions = {event.version for event in events if isinstance(event, PlanFailed)}
    assert versions == {1, 2}
    assert [event.plan.version for event in events if isinstance(event, PlanComputed)] == [3]


async def test_a_plan_that_takes_too_long_costs_the_child_its_life(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    planner.submit(request(1))
    await wait_until(lambda: events)
    stuck = child_pid(planner)
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)
    planner._deadline_s = 0.2
    planner.submit(request(2))
    await wait_until(lambda: len(events) == 2)

    assert isinstance(events[1], PlanFailed)
    assert "longer than" in events[1].error
    await wait_until(lambda: not is_running(stuck))
    planner._deadline_s = 10
    planner.submit(request(3))
    await wait_until(lambda: len(events) == 3)
    assert isinstance(events[2], PlanComputed)


@pytest.mark.usefixtures("somebodys_policies")
@pytest.mark.parametrize(("has_turns", "outcome"), [(True, PlanFailed), (False, PlanComputed)])
async def test_a_plan_may_take_longer_where_the_machine_has_no_time_for_it(
    make: Callable[..., tuple[Planner, list[Event]]], monkeypatch: pytest.MonkeyPatch, has_turns: bool, outcome: type
) -> None:
    planner, events = make()
    planner.submit(request(1))  # its start is not what is measured
    await wait_until(lambda: events)
    planner._deadline_s = 0.25
    if not has_turns:  # it waits for its turn and computes next to nothing
        monkeypatch.setattr(planner, "_cpu_s", lambda: 0.0)
        monkeypatch.setattr("swarm_agent.planner.BUSY_RATIO", 400.0)
    planner.submit(request(2, policy="busy"))
    await wait_until(lambda: len(events) == 2)
    assert isinstance(events[1], outcome)


async def test_a_child_that_died_is_replaced(make: Callable[..., tuple[Planner, list[Event]]]) -> None:
    planner, events = make()
    planner.submit(request(1))
    await wait_until(lambda: events)
    pid = child_pid(planner)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: planner._child is not None and planner._child.returncode is not None)
    planner.submit(request(2))
    await wait_until(lambda: len(events) == 2)

    assert isinstance(events[1], PlanComputed)


async def test_an_idle_child_is_ended(make: Callable[..., tuple[Planner, list[Event]]]) -> None:
    planner, events = make(idle_s=0.1)
    planner.submit(request(1))
    await wait_until(lambda: events)
    pid = child_pid(planner)

    await wait_until(lambda: child_pid(planner) is None and (pid is None or not is_running(pid)))


@pytest.mark.parametrize("cut", [None, -1, 3])
def test_a_child_whose_agent_was_killed_ends_without_a_word(cut: int | None) -> None:
    """Whole requests, and parts of one, whose answers nobody reads."""
    frame = encode(((request(1).setting, request(1).view, 0.0), None))
    reading, writing = os.pipe()
    os.close(reading)
    asked = (len(frame).to_bytes(4, "big") + frame)[:cut]
    child = [sys.executable, "-m", "swarm_agent.planner"]
    ended = subprocess.run(child, input=asked, stdout=writing, stderr=subprocess.PIPE, timeout=30, check=False)
    os.close(writing)
    assert ended.stderr == b""


def full(version: int) -> ComputePlan:
    """One GPU, on which a job with a limit runs, and one that waits for it."""
    taken = NodeView(NODE.node, Free((), 4, 2**30), HAS, 1)
    running = replace(
        job(1).card, state_index=STATES.index(JobState.RUNNING), shares=(Share(NODE.node, 1),), time_limit_s=100.0
    )
    view = ClusterView(version, (taken,), (JobView(running, now()), job(0)))
    return ComputePlan(PolicySetting("fifo"), view)


async def test_after_a_plan_it_looks_ahead_if_somebody_waits_but_not_again_and_again(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    planner._look_s = 0.0
    planner.submit(full(1))
    await wait_until(lambda: planner.foreseen.outlooks)
    start = planner.foreseen.outlooks[JOB].start
    assert start is not None
    assert 0.0 < start.expected_s <= 100.0
    assert planner.promises.kept(JOB, planner.foreseen.seen_s + start.expected_s) == (
        pytest.approx(0.0, abs=1e-6),
        "within",
    )
    first = planner.foreseen
    planner.submit(full(2))
    await wait_until(lambda: len(events) == 2)
    assert planner.foreseen is first


async def test_it_can_be_asked_what_became_of_jobs_that_are_not_there_yet(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    asked = full(1)
    planner.submit(asked)
    await wait_until(lambda: events)
    more = replace(asked.view, jobs=(*asked.view.jobs, job(2)))
    foreseen = await planner.foresee(asked.setting, more, timeout_s=20.0)
    assert foreseen is not None
    later = foreseen.outlooks[job(2).job_id]
    assert later.start is None
    assert later.problem.startswith("nobody can tell how long those run that are before it: no time limit")
    assert len(events) == 1
    planner._look_s = 0.0
    planner._wake()
    await wait_until(lambda: planner.foreseen.outlooks)
    assert job(2).job_id not in planner.foreseen.outlooks, "it may never be"


async def test_a_look_ahead_that_raises_costs_nothing_but_itself(
    make: Callable[..., tuple[Planner, list[Event]]],
) -> None:
    planner, events = make()
    planner._look_s = 0.0
    odd = replace(job(0).card, nodes=(NodeId("gone"),), ranks=0)
    planner.submit(ComputePlan(PolicySetting("fifo"), ClusterView(1, (), (JobView(odd),))))
    await wait_until(lambda: events)
    planner.submit(full(2))
    await wait_until(lambda: len(events) == 2)
    assert isinstance(events[1], PlanComputed)

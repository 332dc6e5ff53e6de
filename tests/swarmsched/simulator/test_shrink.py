from swarmsched.simulator.fault import Fault
from swarmsched.simulator.shrink import Shrinker, items_of
from swarmsched.simulator.story import StoryFailure, StoryPlan, StoryResult
from swarmsched.simulator.workload import Work

FAULTS = tuple(Fault(float(n), "crash", {"node": f"n{n:03}", "duration_s": 1.0}) for n in range(20))
WORK = tuple(Work(n + 0.5, "cancel", {"job": n}) for n in range(20))
PLAN = StoryPlan(seed=7, nodes=3, gpus_per_node=2, heal_s=30.0, faults=FAULTS, work=WORK)


class Machine:
    """A story that fails when all of `needed` are in the plan; otherwise in another way, or not at all."""

    def __init__(self, *needed: Fault | Work, else_fails_as: str = "") -> None:
        self.needed, self.else_fails_as = needed, else_fails_as
        self.run_count = 0

    def __call__(self, plan: StoryPlan) -> StoryResult:
        self.run_count += 1
        items = items_of(plan)
        invariant = "5" if all(item in items for item in self.needed) else self.else_fails_as
        failure = StoryFailure(invariant, 17.2, "broken") if invariant else None
        return StoryResult(plan, events=100, virtual_s=17.2, digest=0, failure=failure)


def shrink(machine: Machine, runs: int = 500, events: int = 1_000_000) -> list[Fault | Work]:
    result = Shrinker(machine, runs, events).shrink(machine(PLAN))
    assert result.failure is not None
    assert result.failure.invariant == "5"
    return items_of(result.plan)


def test_only_what_the_failure_needs_is_left():
    assert shrink(Machine(FAULTS[3], WORK[12])) == [FAULTS[3], WORK[12]]
    assert shrink(Machine(FAULTS[16])) == [FAULTS[16]]


def test_another_invariant_is_another_failure():
    assert shrink(Machine(FAULTS[3], WORK[12], else_fails_as="9")) == [FAULTS[3], WORK[12]]


def test_what_came_after_the_failure_goes_in_one_run():
    machine = Machine(*FAULTS[:18], *WORK[:17])
    assert shrink(machine, runs=1) == items_of(PLAN)[:35]
    assert machine.run_count == 2


def test_without_budget_the_plan_stays_and_still_fails():
    machine = Machine(FAULTS[3])
    assert len(shrink(machine, runs=0, events=0)) <= 40
    assert machine.run_count <= 2

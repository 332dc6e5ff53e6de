"""One seed's story: a swarm, its faults and its work, first under fire and then healed.

The first phase is about safety: checkers watch every step while things go wrong.  The second is about liveness: all
faults are off, machines are up again unless they are lost for ever, and everything must come to order in the time that
the protocol allows.  Nothing here reads a clock or starts a process: a plan and its options give one result.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

from swarmsched.effects import Effect
from swarmsched.events import Event
from swarmsched.ids import JobId, NodeId
from swarmsched.negotiation.shepherd import told_trail
from swarmsched.node.config import RETAINED_JOBS
from swarmsched.simulator.ambush import draw_ambushes
from swarmsched.simulator.breaks import find_break
from swarmsched.simulator.chance import stream
from swarmsched.simulator.checks.healing import Healing
from swarmsched.simulator.checks.liveness import all_rules
from swarmsched.simulator.checks.sometimes import Sometimes
from swarmsched.simulator.checks.suite import all_checkers
from swarmsched.simulator.clients import Users
from swarmsched.simulator.clock import HostClock
from swarmsched.simulator.fault import Fault
from swarmsched.simulator.fault_draw import draw_faults
from swarmsched.simulator.host import Host
from swarmsched.simulator.injector import Injector
from swarmsched.simulator.lives import LifeChecker
from swarmsched.simulator.loop import EventLoop, Spins
from swarmsched.simulator.observer import InvariantViolated
from swarmsched.simulator.plan_check import check_plan
from swarmsched.simulator.swarm import SimulatedSwarm
from swarmsched.simulator.workload import (
    SCENES_NODES_MAX,
    Work,
    behave,
    draw_policy,
    draw_work,
    made_crowded,
    made_elastic,
)

SIZES = ((1, 20), (2, 20), (3, 25), (5, 25), (30, 8), (200, 2))  # nodes, weight
BEGIN_S = 2.0  # of faults and work
FAULTS_S = {1: (20.0, 60.0), 2: (20.0, 70.0), 3: (30.0, 90.0), 5: (30.0, 90.0), 30: (20.0, 35.0), 200: (5.0, 8.0)}
STARVING_RATIO = 0.1  # of the small swarms: a gang waits until its place is kept for it
STARVING_FAULTS_S = (60.0, 90.0)
PATIENCE_S, PATIENCE_LARGE_S = 25.0, 8.0  # of users after healing; then they cancel what has not ended
LARGE = 20  # nodes
HURRY_S = 3.0  # no rank runs longer after healing: jobs that nobody cancels must come to their ends by themselves
CANCELLED_S = 35.0  # until all of that has ended; some shepherd must be found and asked first
LOOK_S, LOOK_NODES = 0.25, 20  # a look at all views of more nodes costs as much as their events: it is taken less often
START_SPREAD_S = 0.02  # between the starts of two agents, on average
ORIGIN_MAX_S = 1e6  # what a machine's monotonic clock may show at the beginning
RECENT_MAX = 400  # lines of the last happenings that are kept
FORGETFUL_RATIO, FORGETFUL_JOBS = 0.2, 3  # of the small swarms: how many ended jobs each node keeps there
LONG_RATIO, LONG_FAULTS_S = 0.01, (300.0, 4_000.0)  # of the small swarms: memories and fences run out
MIXED_RATIO, WITNESS = 0.25, -1
WITNESS_RATIO = 0.3  # of those with more than two machines: one of them holds records and runs nothing
ELASTIC_RATIO = 0.1  # of the small swarms: jobs take several sizes, and a policy changes them
CROWDED_RATIO, CROWDED_GPUS = 0.15, 4  # of the swarms with so few GPUs: small jobs keep a large one waiting
CALLBACKS_MOST, CALLBACKS_OF_NODE = 20_000, 1_000
"""In a virtual second: 130 of one node and 11,500 of 200 were the most in 60 stories."""
MODULUS = 2**61 - 1


@dataclass(frozen=True, slots=True)
class StoryOptions:
    """What is the same for all seeds of a run."""

    nodes: int | None = None  # None: drawn
    fault_classes: tuple[str, ...] | None = None  # None: drawn
    break_name: str = ""


@dataclass(frozen=True, slots=True)
class StoryPlan:
    """All that happens from outside, drawn before the run."""

    seed: int
    nodes: int
    gpus_per_node: int
    heal_s: float
    faults: tuple[Fault, ...]
    work: tuple[Work, ...]
    retained_jobs: int = RETAINED_JOBS
    machines: tuple[int, ...] = ()  # GPUs of each, or `WITNESS`; empty: all have as many

    def to_json(self) -> dict[str, Any]:
        """An object of plain values."""
        return {
            "seed": self.seed,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "heal_s": self.heal_s,
            "faults": [fault.to_json() for fault in self.faults],
            "work": [work.to_json() for work in self.work],
            "retained_jobs": self.retained_jobs,
            "machines": list(self.machines),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote; `ConfigError` names what is wrong in it."""
        check_plan(document)
        return cls(
            seed=int(document["seed"]),
            nodes=int(document["nodes"]),
            gpus_per_node=int(document["gpus_per_node"]),
            heal_s=float(document["heal_s"]),
            faults=tuple(Fault.from_json(each) for each in document["faults"]),
            work=tuple(Work.from_json(each) for each in document["work"]),
            retained_jobs=int(document.get("retained_jobs", RETAINED_JOBS)),
            machines=tuple(int(each) for each in document.get("machines", ())),
        )


@dataclass(frozen=True, slots=True)
class StoryFailure:
    """A broken invariant, and what led to it."""

    invariant: str
    time_s: float  # virtual
    message: str
    recent: tuple[str, ...] = ()  # the last happenings, of the objects concerned as far as that can be told
    trails: tuple[str, ...] = ()  # what shepherds of those jobs were told last, and what they wished then


@dataclass(frozen=True, slots=True)
class StoryResult:
    """How a story went.  `digest` differs when anything in its history does."""

    plan: StoryPlan
    events: int  # steps of nodes
    virtual_s: float
    digest: int
    failure: StoryFailure | None = None
    sometimes: Mapping[str, int] = field(default_factory=dict)


def draw_plan(seed: int, options: StoryOptions) -> StoryPlan:
    """The plan of a seed."""
    rng = stream(seed, "plan")
    drawn = draw_size(rng)
    count = options.nodes or drawn
    nodes = [NodeId(f"n{index:03}") for index in range(count)]
    gpus_per_node = rng.choice([1, 2, 2, 4])
    heal_s = BEGIN_S + rng.uniform(*_faults_s(count))
    starves = count <= SCENES_NODES_MAX and rng.random() < STARVING_RATIO
    if starves:
        heal_s = BEGIN_S + rng.uniform(*STARVING_FAULTS_S)
    lasts = not starves and count <= SCENES_NODES_MAX and stream(seed, "long").random() < LONG_RATIO
    if lasts:
        least_s, most_s = LONG_FAULTS_S
        heal_s = BEGIN_S + least_s * (most_s / least_s) ** rng.random()
    faults = draw_faults(stream(seed, "faults"), nodes, BEGIN_S, heal_s, options.fault_classes)
    machines = draw_machines(stream(seed, "machines"), count, gpus_per_node)
    gpus = [max(0, each) for each in machines] or [gpus_per_node] * count
    work = draw_work(
        stream(seed, "work"), nodes, gpus, BEGIN_S, heal_s, starves=starves, lasts_s=heal_s - BEGIN_S if lasts else 0.0
    )
    if count <= SCENES_NODES_MAX and stream(seed, "elastic").random() < ELASTIC_RATIO:
        work = made_elastic(stream(seed, "elastic sizes"), work, nodes, BEGIN_S)
    else:
        work = [draw_policy(stream(seed, "policy"), nodes, BEGIN_S), *work]
    if sum(gpus) <= CROWDED_GPUS and stream(seed, "crowd").random() < CROWDED_RATIO:
        work = made_crowded(stream(seed, "crowd of jobs"), work, nodes, sum(gpus), BEGIN_S)
    if faults:
        faults += draw_ambushes(stream(seed, "ambushes"), work, nodes, heal_s, options.fault_classes)
    faults.sort(key=lambda fault: fault.at_s)
    is_forgetful = count <= SCENES_NODES_MAX and stream(seed, "retention").random() < FORGETFUL_RATIO
    retained_jobs = FORGETFUL_JOBS if is_forgetful else RETAINED_JOBS
    return StoryPlan(seed, count, gpus_per_node, heal_s, tuple(faults), tuple(work), retained_jobs, tuple(machines))


def draw_machines(rng: random.Random, node_count: int, gpus_per_node: int) -> list[int]:
    """GPUs of each machine where they differ, some without any; `WITNESS` for one that runs nothing.  Else empty."""
    if node_count > SCENES_NODES_MAX or rng.random() >= MIXED_RATIO:
        return []
    machines = [rng.choice([0, gpus_per_node, gpus_per_node, 2 * gpus_per_node]) for _ in range(node_count)]
    machines[0] = gpus_per_node
    if node_count > 2 and rng.random() < WITNESS_RATIO:
        machines[-1] = WITNESS
    return rng.sample(machines, node_count)


def draw_size(rng: random.Random) -> int:
    """How many nodes a swarm has, if nobody says."""
    return rng.choices([size for size, _ in SIZES], [weight for _, weight in SIZES])[0]


def _faults_s(node_count: int) -> tuple[float, float]:
    """Shorter for larger swarms, where a second holds more events."""
    return next((limits for size, limits in FAULTS_S.items() if node_count <= size), FAULTS_S[200])


class Historian:
    """An observer that keeps a digest of everything, and the last happenings in words."""

    def __init__(self) -> None:
        self.digest = 0
        self._recent: deque[tuple[float, Host, object]] = deque(maxlen=RECENT_MAX)

    def stepped(self, host: Host, event: Event, effects: Sequence[Effect]) -> None:
        """Mix in when it was and how much came of it."""
        now_s = host.loop.now_s
        self.digest = hash((self.digest, now_s, host.step_count, len(effects))) % MODULUS
        self._recent.append((now_s, host, event))

    def performed(self, host: Host, effect: Effect) -> None:
        """Remember it."""
        self._recent.append((host.loop.now_s, host, effect))

    def told(self, words: Sequence[str]) -> tuple[str, ...]:
        """What is remembered of the objects that these words name; everything if they name none."""
        lines = [f"{now_s:.6f} {host.node_id} {thing!r}" for now_s, host, thing in self._recent]
        chosen = [line for line in lines if any(word in line for word in words)]
        return tuple((chosen or lines)[-40:])


class Story:
    """A swarm that lives through a plan."""

    def __init__(self, plan: StoryPlan, break_name: str = "") -> None:
        broken = find_break(break_name)
        self.plan = plan
        self.suite = all_checkers()
        self.historian = Historian()
        shapes = {NodeId(f"n{index:03}"): gpus for index, gpus in enumerate(plan.machines)}
        self.swarm = SimulatedSwarm(
            plan.nodes,
            plan.gpus_per_node,
            plan.seed,
            behaviour=behave,
            observers=[self.historian, self.suite, LifeChecker()],
            make_parts=broken.make_parts,
            make_disk=broken.make_disk,
            make_clock=_some_clock,
            retained_jobs=plan.retained_jobs,
            witnesses=[name for name, gpus in shapes.items() if gpus == WITNESS],
            gpu_counts=shapes,
            callbacks_most=CALLBACKS_MOST + CALLBACKS_OF_NODE * plan.nodes,
            gives_room=True,
        )
        self.clients = Users(self.swarm)
        self.injector = Injector(self.swarm)

    def run(self) -> StoryResult:
        """To the end, or to the first broken invariant."""
        failure = None
        try:
            self._live()
        except InvariantViolated as violation:
            failure = self._failed(violation.invariant, str(violation))
        except Spins as error:
            failure = self._failed("spins", str(error))
        return StoryResult(
            self.plan,
            self.events,
            self.swarm.loop.now_s,
            self.historian.digest,
            failure,
            dict(self.suite.get(Sometimes).counts),
        )

    @property
    def events(self) -> int:
        """Steps of all nodes so far."""
        return sum(host.step_count for host in self.swarm.machines)

    def _live(self) -> None:
        self.injector.schedule(self.plan.faults)
        self.clients.schedule(self.plan.work)
        self.swarm.start(START_SPREAD_S * self.plan.nodes)
        self.swarm.run_for(self.plan.heal_s - self.swarm.loop.now_s)
        self.injector.heal()
        for host in self.swarm.hosts.values():
            host.tasks.hurry(HURRY_S)
        self.swarm.loop.post_later(self._patience_s, self.clients.close)
        self._come_to_order()
        self.suite.finish()

    @property
    def _patience_s(self) -> float:
        return PATIENCE_S if self.plan.nodes < LARGE else PATIENCE_LARGE_S

    def _come_to_order(self) -> None:
        """Until all has come true that must, and nobody wants anything more."""
        bound_s = self._patience_s + CANCELLED_S
        healing = Healing(self.swarm, self.suite, all_rules(self.plan.nodes, bound_s, self.clients.ends))
        period_s = LOOK_S * max(1.0, self.plan.nodes / LOOK_NODES)
        end_s = self.swarm.loop.now_s + 2.0 * bound_s
        while not (healing.is_done and self.clients.is_idle) and self.swarm.loop.now_s < end_s:
            self.swarm.run_for(period_s)
            healing.look()

    def _failed(self, invariant: str, message: str) -> StoryFailure:
        names = [job_id for job_id in self._job_ids() if job_id in message]
        nodes = [host.node for host in self.swarm.machines if host.node is not None]
        known = [(node, name, node.trail(name)) for node in nodes for name in names]
        trails = [
            line
            for node, name, trail in known
            if trail
            for line in (f"{name} at {node.node_id}:", *(f"  {each}" for each in told_trail(trail)))
        ]
        return StoryFailure(invariant, self.swarm.loop.now_s, message, self.historian.told(names), tuple(trails))

    def _job_ids(self) -> list[JobId]:
        return [each.job_id for each in self.clients.submissions.values() if each.job_id is not None]


def _some_clock(loop: EventLoop, rng: random.Random) -> HostClock:
    """Every machine was switched on at another time."""
    return HostClock(loop, origin_s=rng.uniform(0.0, ORIGIN_MAX_S))


Watch = Callable[[Story], AbstractContextManager[object]]


def run_story(plan: StoryPlan, break_name: str = "", watch: Watch = nullcontext) -> StoryResult:
    """Live through one plan; `watch` is entered meanwhile, by whoever has clocks to see that it goes on."""
    with find_break(break_name).in_force():
        story = Story(plan, break_name)
        with watch(story):
            return story.run()

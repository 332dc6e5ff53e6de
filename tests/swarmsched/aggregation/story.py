"""A shard, its successors and its learners through drawn deaths, broken connections, repeats and plans.

Each step of training is one coordinate that falls by one, so `shown - now` tells which steps a learner has not given
away yet, and what is counted twice, or lost, is seen in a vector.  Runs with any class that does what
`swarm_elastic._shown.Shown` does, on numpy arrays.
"""

from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np

from swarmsched.aggregation.blocks import Blocks, Floats
from swarmsched.aggregation.rule import MergeRule
from swarmsched.aggregation.shard import (
    FRESH,
    AggregationPlan,
    AskWeights,
    ContributionCame,
    LearnerCame,
    LearnerGone,
    Object,
    Objection,
    PlanHeard,
    PlanNumber,
    Publish,
    SendWeights,
    Shard,
    ShardEvent,
    ShardVersion,
    TimePassed,
    TurnAway,
    WeightsCame,
    Welcome,
)

SIZE = 400
MEAN = MergeRule(rate=1.0, momentum=0.0, is_quantised=False)
LAYOUT = "layout"


class Holding(Protocol):
    """A learner's side of one shard."""

    version: ShardVersion
    weights: Floats
    is_waiting: bool

    def contribution(self, now: Floats) -> Blocks: ...
    def move(
        self, base: ShardVersion, version: ShardVersion, change: Blocks, counted: Mapping[str, int]
    ) -> Floats | None: ...
    def replace(self, version: ShardVersion, weights: Floats, counted: Mapping[str, int]) -> Floats: ...
    def give_up(self, base: ShardVersion) -> None: ...
    def rename(self, version: ShardVersion) -> None: ...


class Given(NamedTuple):
    """Content of a contribution."""

    base: ShardVersion
    steps: frozenset[int]


class Learner:
    """One, with its connection.  `to_shard` and `to_me` are what is under way on it, in order."""

    def __init__(self, name: str, holding: Holding) -> None:
        self.name, self.holding = name, holding
        self.now = holding.weights.copy()
        self.steps: set[int] = set()
        self.plan: AggregationPlan | None = None
        self.is_connected = self.is_greeted = False
        self.is_alive = True
        self.leaves = False
        self.to_shard: deque[ShardEvent] = deque()
        self.to_me: deque[tuple[Any, ...]] = deque()
        self.counted: Mapping[str, int] = {}
        self.asked = Given(ShardVersion(), frozenset())

    @property
    def pending(self) -> set[int]:
        """The steps in `shown - now`."""
        return {int(each) for each in np.flatnonzero(np.abs(self.holding.weights - self.now) > 0.5)}


class Story:
    """`make` makes a learner's side from its name and weights.  Raises AssertionError for what must not be."""

    def __init__(self, seed: int, make: Callable[[str, Floats], Holding], learners: int = 3) -> None:
        self.chance, self.make = Random(seed), make
        self.now_s = 0.0
        self.origin = 0
        self.next_step = 0
        self.learners: dict[str, Learner] = {}
        self.included: dict[ShardVersion, set[int]] = {}
        self.truth: dict[ShardVersion, Floats] = {}
        self.accepted: dict[str, Given] = {}
        self.lost: set[int] = set()
        self.closed = 0
        for _ in range(learners):
            self.come()
        self.plan = AggregationPlan(PlanNumber(1, 1), tuple(self.learners))
        self.begin_shard()

    # What happens.

    def come(self) -> None:
        name = f"l{len(self.learners)}"
        start = np.array([self.chance.uniform(-1, 1) for _ in range(4)] + [0.0] * (SIZE - 4), np.float32)
        self.learners[name] = Learner(name, self.make(name, start))

    def begin_shard(self) -> None:
        """The first, or a successor of one that died."""
        self.origin += 1
        self.shard = Shard(SIZE, MEAN, LAYOUT, self.plan, self.origin)
        self.accepted.clear()
        for learner in self.learners.values():
            self.break_connection(learner)

    def change_plan(self) -> None:
        alive = tuple(each.name for each in self.learners.values() if each.is_alive and not each.leaves)
        number = self.plan.number
        if self.chance.random() < 0.2:
            number = PlanNumber(number.epoch + 1, 0)
        self.plan = AggregationPlan(PlanNumber(number.epoch, number.number + 1), alive, self.chance.choice([0, 0, 1]))
        self.tell(PlanHeard(self.plan))

    def part(self, learner: Learner) -> None:
        """It leaves by a plan, or dies."""
        if not learner.leaves and self.chance.random() < 0.5:
            learner.leaves = True
        else:
            learner.is_alive = False
            self.tell(LearnerGone(learner.name))
            self.break_connection(learner)
        self.change_plan()

    def break_connection(self, learner: Learner) -> None:
        learner.is_connected = learner.is_greeted = False
        learner.to_shard.clear()
        learner.to_me.clear()

    def connect(self, learner: Learner) -> None:
        learner.plan = self.plan
        if learner.is_connected:
            self.tell(LearnerGone(learner.name))
        self.break_connection(learner)
        learner.is_connected = True
        learner.to_shard.append(
            LearnerCame(learner.name, self.plan.number, LAYOUT, learner.holding.version, learner.leaves)
        )

    def train(self, learner: Learner) -> None:
        if self.next_step < SIZE - 4 and learner.holding.version.number > FRESH:
            at = 4 + self.next_step
            self.next_step += 1
            learner.now[at] -= 1.0
            learner.steps.add(at)

    def contribute(self, learner: Learner) -> None:
        if not learner.is_greeted or learner.holding.is_waiting:
            return
        steps = frozenset(learner.pending)
        blocks = learner.holding.contribution(learner.now)
        assert learner.plan is not None
        base = ShardVersion(*learner.holding.version)
        event = ContributionCame(learner.name, learner.plan.number, base, 1 + len(steps), 1 + len(steps), blocks)
        learner.to_shard.append(event)

    def deliver(self, learner: Learner) -> None:
        """One message, in one of both directions."""
        if learner.to_shard and (not learner.to_me or self.chance.random() < 0.5):
            event = learner.to_shard.popleft()
            if isinstance(event, LearnerCame):
                self.accepted.pop(learner.name, None)
            if isinstance(event, ContributionCame):
                blocks = event.change.piece(0, SIZE)
                assert set(np.unique(np.round(blocks[4:], 3))) <= {0.0, 1.0}
                given = Given(event.base, frozenset(int(each) for each in np.flatnonzero(blocks > 0.5)))
                self.accepted[learner.name] = given
            self.tell(event)
            if learner.name in self.shard.waiting and self.chance.random() < 0.2:
                self.tell(event)  # a repeat
        elif learner.to_me:
            self.hear(learner, *learner.to_me.popleft())

    def tell(self, event: ShardEvent) -> None:
        before = self.shard.weights is None
        effects = self.shard.step(event, self.now_s)
        self.shard.validate()
        if before and self.shard.weights is not None:
            assert isinstance(event, WeightsCame)
            self.truth[self.shard.version] = self.shard.weights.copy()
            self.included[self.shard.version] = set(self.included.get(event.version, ()))
        for effect in effects:
            match effect:
                case Publish():
                    self.publish(effect)
                case Object(learner, objection, base):
                    if objection is not Objection.COUNTED and self.accepted.get(learner, (None,))[0] == base:
                        self.accepted.pop(learner)
                    self.send(learner, effect)
                case SendWeights(learner):
                    version, weights = self.shard.version, self.shard.weights.copy()
                    self.send(learner, "weights", version, weights, self.shard.counted)
                case Welcome(learner, _) | AskWeights(learner) | TurnAway(learner, _):
                    self.send(learner, effect)

    def send(self, learner: str, *message: Any) -> None:
        one = self.learners[learner]
        if one.is_connected:
            one.to_me.append(message)

    def publish(self, effect: Publish) -> None:
        """Nothing that is in the base may be in the change once more; what is in it is what was given."""
        self.closed += 1
        steps: set[int] = set()
        for learner, base in effect.counted.items():
            given = self.accepted.pop(learner)
            assert given.base.number == base
            assert not steps & given.steps
            steps |= given.steps
        assert not steps & self.included[effect.base], "counted twice"
        in_plan = sum(learner in self.plan.learners for learner in effect.counted)
        assert in_plan >= self.plan.needed, "closed without a quorum of its own plan"
        change = effect.change.piece(0, SIZE)
        assert {int(each) for each in np.flatnonzero(change < -1e-3)} - {0, 1, 2, 3} == steps
        self.included[effect.version] = self.included[effect.base] | steps
        self.truth[effect.version] = self.truth[effect.base] + change
        assert self.truth[effect.version].tobytes() == self.shard.weights.tobytes()
        for learner in self.plan.learners:
            self.send(learner, effect)

    def hear(self, learner: Learner, message: Any, *rest: Any) -> None:
        holding = learner.holding
        match message:
            case "weights":
                self.replace(learner, *rest)
            case Welcome(_, version):
                holding.rename(version)
                learner.is_greeted = True
            case AskWeights():
                copy = holding.weights.copy()
                learner.to_shard.append(
                    WeightsCame(learner.name, ShardVersion(*holding.version), copy, learner.counted)
                )
            case Publish(base, version, change, counted):
                moved = holding.move(base, version, change, counted)
                if moved is None:
                    self.connect(learner)
                else:
                    learner.now += moved
                    learner.counted = {**learner.counted, **counted}
            case TurnAway():
                learner.is_greeted = False
            case Object(_, objection, base):
                if objection is not Objection.COUNTED:
                    holding.give_up(base)
                if objection in (Objection.OLD_PLAN, Objection.UNHEARD_PLAN, Objection.STRANGER):
                    learner.is_greeted = False
        self.check(learner)

    def replace(self, learner: Learner, version: ShardVersion, weights: Floats, counted: Mapping[str, int]) -> None:
        had = learner.steps - learner.pending - self.lost
        learner.now += learner.holding.replace(version, weights, counted)
        learner.counted, learner.is_greeted = dict(counted), True
        gone = had - learner.pending - self.included[version]
        self.lost |= gone  # of two rounds that nobody else has seen, the older one

    def check(self, learner: Learner) -> None:
        """It holds the truth of its version, and what it has not given away is all that is not in there."""
        version = ShardVersion(*learner.holding.version)
        if version.number == FRESH:
            return
        assert np.array_equal(learner.holding.weights, self.truth[version])
        assert learner.pending == learner.steps - self.included[version] - self.lost
        difference = learner.holding.weights - learner.now
        assert np.abs(difference - np.round(difference)).max() < 1e-3

    # The whole.

    def go(self, turns: int) -> None:
        """So many things happen."""
        for _ in range(turns):
            self.now_s += self.chance.expovariate(2.0)
            alive = [each for each in self.learners.values() if each.is_alive]
            learner = self.chance.choice(alive)
            what = self.chance.random()
            if what < 0.25:
                self.train(learner)
            elif what < 0.40:
                self.contribute(learner)
            elif what < 0.86:
                self.deliver(learner)
            elif what < 0.93:
                if not learner.is_greeted or self.chance.random() < 0.1:
                    self.connect(learner)
            elif what < 0.96:
                self.now_s = max(self.now_s, min(self.shard.next_deadline_s, self.now_s + 30))
                self.tell(TimePassed())
            elif what < 0.975:
                self.change_plan()
            elif what < 0.985:
                self.change_plan()
                self.begin_shard()
            elif what < 0.99 and sum(not each.leaves for each in alive) > 2:
                self.part(learner)
            elif len(self.learners) < 6:
                self.come()
                self.change_plan()

    def settle(self) -> None:
        """Without another disturbance all that was trained is counted, and all hold the same."""
        for each in self.learners.values():
            if each.leaves and each.is_alive:
                each.is_alive = False
                self.tell(LearnerGone(each.name))
                self.break_connection(each)
        self.change_plan()
        alive = [each for each in self.learners.values() if each.is_alive]
        for _ in range(12):
            for learner in alive:
                if not learner.is_greeted:
                    self.connect(learner)
            for _ in range(6):
                for learner in alive:
                    for _ in range(8):
                        self.deliver(learner)
                self.now_s += 60.0
                self.tell(TimePassed())
            for learner in alive:
                self.contribute(learner)
        self.now_s += 60.0
        self.tell(TimePassed())
        while busy := [each for each in alive if each.to_shard or each.to_me]:
            self.deliver(busy[0])
        versions = {each.holding.version for each in alive}
        assert len(versions) == 1, versions
        steps = set().union(*(each.steps for each in alive))
        assert steps - self.lost <= self.included[ShardVersion(*versions.pop())]

"""A shard: the outer weights of a range of one job's parameters, and the rounds that move them.

A *learner* trains by itself and from time to time contributes `shown - now`: by how much its weights have moved away
from the outer weights that it was shown.  A *round* gathers contributions to one version of the shard.  It closes when
more than half of the plan's learners have contributed, and a short grace for the others is over; their mean by samples
is merged by the rule, and the change is published as the next version.

Why nothing is copied in step.  The change is quantised first, and then added to the shard's own copy, with what
quantising lost kept for the next round.  So every learner holds, bit for bit, the truth of each version that it was
shown, and any of them can give it to the shard's successor.

Why nothing is counted twice.  A contribution is known by (learner, number of its base version); a version says of each
learner which base was counted last (`counted`), and that goes wherever the version goes.  A repeat before the round
closes replaces; after it the contribution is refused as counted, be it by a successor that got the version from a
learner.  What was not counted stays with its learner, as the next `shown - now` contains it.

Why a plan decides.  Shepherds number their plans.  A shard obeys the newest plan with the highest epoch that it has
heard of, and takes contributions under that one alone, so no two groups of learners are ever merged by one shard.
Contributions that were taken in before a newer plan came stay: they were complete.  The quorum is the newer plan's.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf, isfinite
from statistics import median, median_low
from typing import NamedTuple, assert_never

import numpy as np

from swarmsched.aggregation.blocks import Blocks, Floats, block_count, empty, pieces
from swarmsched.aggregation.rule import MergeRule
from swarmsched.aggregation.tempo import Tempo

LATE_WEIGHT = 0.5
NORM_RATIO = 100.0
NORM_LEAST = 0.1  # of that of the weights: what is smaller does no harm, and the first steps of training are tiny
NORMS_REMEMBERED = 33
LATENESS_REMEMBERED = 16
GRACE_RATIO = 0.1  # of the time from the version's beginning to the quorum
GRACE_LEAST = 0.1  # of the same share: those that come at once never come in one moment
ADOPT_WAIT_S = 1.0  # for claims of the others, once a majority has told which version it has
ASK_S = 10.0  # for weights, of the learner that has the highest version; as long again for each 100 MB
ASK_BYTES_PER_S = 1e7
LEARNERS_MAX = 1_024
FRESH = -1


class Objection(Enum):
    """Why a contribution or a learner is refused."""

    OLD_PLAN = "it names a plan that is over"
    UNHEARD_PLAN = "it names a plan that this shard has not heard of yet"
    STRANGER = "the plan does not name this learner"
    OTHER_LAYOUT = "the learner's model, or its rule, is not that of the shard"
    NO_WEIGHTS = "the shard has no weights yet"
    MALFORMED = "its lengths are not those of the shard"
    NOT_FINITE = "it has values that are not finite"
    TOO_LARGE = "it is more than a hundred times as large as usual"
    TOO_MANY_SAMPLES = "it claims more samples than its steps can have had"
    TOO_OLD = "its base is older than one version, or of a line that ended"
    COUNTED = "it was counted before"


class PlanNumber(NamedTuple):
    """Orders plans: the newest of the highest epoch counts."""

    epoch: int
    number: int


class Origin(NamedTuple):
    """Orders the lives of a range's shards: the first plan of each, and when that began on its node."""

    epoch: int = 0
    plan: int = 0
    life: int = 0


class ShardVersion(NamedTuple):
    """The name of one content: versions count up, and the life of a shard that made it is its origin."""

    number: int = FRESH
    origin: Origin = Origin()

    @property
    def rank(self) -> tuple[Origin, int]:
        """A line that began later has superseded what others hold of an earlier one, however far that went."""
        return self.origin, self.number


@dataclass(frozen=True, slots=True)
class AggregationPlan:
    """Who learns.  `quorum` 0: more than half of them.  `batch_most`: samples of a learner's step, 0: not known."""

    number: PlanNumber
    learners: tuple[str, ...]
    quorum: int = 0
    batch_most: int = 0

    @property
    def needed(self) -> int:
        """How many learners make a quorum; at least one, and never more than there are."""
        return max(1, min(self.quorum or len(self.learners) // 2 + 1, len(self.learners)))


class PlanHeard(NamedTuple):
    """The agent told of a plan."""

    plan: AggregationPlan


class LearnerCame(NamedTuple):
    """A learner said which version it holds.  One that `leaves` knows the plan, which does not name it any more."""

    learner: str
    plan: PlanNumber
    layout: str
    version: ShardVersion
    leaves: bool = False


class LearnerGone(NamedTuple):
    """A learner's connection ended."""

    learner: str


class WeightsCame(NamedTuple):
    """A learner answered with the weights that it was shown, what was counted in them, and the tempo of then.

    The shard takes over the weights: nobody else may change them, or hold them for long.
    """

    learner: str
    version: ShardVersion
    weights: Floats
    counted: Mapping[str, int]
    every: int = 0


class ContributionCame(NamedTuple):
    """A learner's `shown - now`, complete; `cost` is what its last round took, in steps, below 0: not known."""

    learner: str
    plan: PlanNumber
    base: ShardVersion
    steps: int
    samples: int
    change: Blocks
    cost: float = -1.0


class TimePassed(NamedTuple):
    """A deadline may be over."""


ShardEvent = PlanHeard | LearnerCame | LearnerGone | WeightsCame | ContributionCame | TimePassed


class Publish(NamedTuple):
    """Send all learners the change from `base` to `version`, and the learners counted in it by their bases."""

    base: ShardVersion
    version: ShardVersion
    change: Blocks
    counted: Mapping[str, int]


class SendWeights(NamedTuple):
    """Send a learner the present version in full."""

    learner: str


class Welcome(NamedTuple):
    """Tell a learner that it holds the present version, which has this name from now on."""

    learner: str
    version: ShardVersion


class AskWeights(NamedTuple):
    """Ask a learner for the weights that it was shown."""

    learner: str


class TurnAway(NamedTuple):
    """Tell a learner that it is refused; what became of its contributions is not said."""

    learner: str
    objection: Objection


class Object(NamedTuple):
    """Tell a learner that its contribution to that base is refused."""

    learner: str
    objection: Objection
    base: ShardVersion
    detail: str


ShardEffect = Publish | SendWeights | Welcome | AskWeights | TurnAway | Object


@dataclass(slots=True)
class _Round:
    """Contributions to the present version.  `quorum_s` is None until there are enough."""

    opened_s: float
    contributions: dict[str, ContributionCame] = field(default_factory=dict)
    quorum_s: float | None = None


class Shard:
    """One range of one attempt of a job.

    `layout` names the model; `life` is larger than that of any former shard.  `every` are the steps between rounds to
    begin with, of a shard that decides for all how many there are; 0 for all others.
    """

    def __init__(
        self, size: int, rule: MergeRule, layout: str, plan: AggregationPlan, life: int, every: int = 0
    ) -> None:
        self._size, self._rule, self._layout = size, rule, layout
        self._plan, self._origin = plan, Origin(*plan.number, life)
        self._version = ShardVersion()
        self._previous = ShardVersion()  # whose contributions come late
        self._weights: Floats | None = None  # None: not adopted yet
        self._momentum = np.zeros(size, np.float32) if rule.momentum and rule.keeps_weights else None
        self._residual = np.zeros(size, np.float32) if rule.is_quantised else None
        self._counted: dict[str, int] = {}  # the newest base of each learner that is in the weights
        self._round = _Round(-inf)
        self._last_quorum_s: float | None = None
        self._lateness: deque[float] = deque(maxlen=LATENESS_REMEMBERED)
        self._norms: deque[float] = deque(maxlen=NORMS_REMEMBERED)
        self._claims: dict[str, ShardVersion] = {}  # until weights are adopted: who holds what
        self._claimed_s: float | None = None  # since when a majority has told
        self._asked, self._asked_s = "", inf  # for weights, until when
        self._leaving: set[str] = set()  # may give their last contribution, and count in no quorum
        self._passed: set[str] = set()  # those of the claims that were asked and have not answered in time
        if not rule.keeps_weights:
            self._weights, self._version = np.zeros(0, np.float32), ShardVersion(0, self._origin)
        self._tempo = Tempo(every) if every else None
        self.refused: dict[Objection, int] = {}

    @property
    def every(self) -> int:
        """Steps between the present version's round and the next; 0: it does not say."""
        return self._tempo.every if self._tempo else 0

    @property
    def plan(self) -> AggregationPlan:
        """The one that is obeyed."""
        return self._plan

    @property
    def version(self) -> ShardVersion:
        """The present one."""
        return self._version

    @property
    def weights(self) -> Floats | None:
        """Of the present version, not to be changed; None until there are any."""
        return self._weights

    @property
    def counted(self) -> Mapping[str, int]:
        """The newest base of each learner that is in the weights."""
        return dict(self._counted)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The learners whose contributions wait for the round to close."""
        return tuple(sorted(self._round.contributions))

    def step(self, event: ShardEvent, now_s: float) -> list[ShardEffect]:
        """Take in what has happened; what is to be done follows, in order."""
        match event:
            case PlanHeard(plan):
                self._hear(plan)
                effects = []
            case LearnerCame():
                effects = self._greet(event)
            case LearnerGone(learner):
                self._forget(learner)
                effects = []
            case WeightsCame():
                effects = self._adopt(event, now_s)
            case ContributionCame():
                effects = self._take(event, now_s)
            case TimePassed():
                effects = []
            case _:
                assert_never(event)
        return effects + self._due(now_s)

    @property
    def next_deadline_s(self) -> float:
        """When to tell that time has passed; inf: never."""
        if self._weights is None:
            if self._asked:
                return self._asked_s
            return inf if self._claimed_s is None else self._claimed_s + ADOPT_WAIT_S
        return self._closes_s()

    # Plans and learners.

    def _hear(self, plan: AggregationPlan) -> None:
        """An older plan has come late, or again."""
        if plan.number <= self._plan.number:
            return
        self._plan = plan
        self._leaving.clear()
        self._claims = {learner: claim for learner, claim in self._claims.items() if learner in plan.learners}
        self._claimed_s = None
        if self._asked not in plan.learners:
            self._asked = ""
        self._round.quorum_s = None  # that of the former plan says nothing

    def _greet(self, hello: LearnerCame) -> list[ShardEffect]:
        """One that comes anew sends again what was not counted, so nothing of it may wait here meanwhile."""
        self._round.contributions.pop(hello.learner, None)
        if hello.leaves and hello.plan == self._plan.number and len(self._leaving) < LEARNERS_MAX:
            self._leaving.add(hello.learner)
        objection = self._objection_to(hello.learner, hello.plan)
        if objection is None and hello.layout != self._layout:
            objection = Objection.OTHER_LAYOUT
        if objection is not None:
            return [self._turn_away(hello.learner, objection)]
        if self._weights is None:
            self._claims[hello.learner] = hello.version
            if self._asked == hello.learner:  # on its former connection
                self._asked = ""
            return []
        return [self._give(hello.learner, is_held=hello.version == self._version)]

    def _give(self, learner: str, *, is_held: bool) -> ShardEffect:
        return Welcome(learner, self._version) if is_held else SendWeights(learner)

    def _forget(self, learner: str) -> None:
        """Its contribution is complete and stays."""
        self._claims.pop(learner, None)
        if self._asked == learner:
            self._asked = ""

    def _objection_to(self, learner: str, number: PlanNumber) -> Objection | None:
        if number > self._plan.number:
            return Objection.UNHEARD_PLAN
        if number < self._plan.number:
            return Objection.OLD_PLAN
        is_known = learner in self._plan.learners or learner in self._leaving
        return None if is_known else Objection.STRANGER

    def _turn_away(self, learner: str, objection: Objection) -> TurnAway:
        self.refused[objection] = self.refused.get(objection, 0) + 1
        return TurnAway(learner, objection)

    # The first weights of this life.

    def _ask(self, now_s: float) -> list[ShardEffect]:
        """The highest version that a majority knows of, of the first in the plan's order that holds it."""
        if self._asked and now_s >= self._asked_s:
            self._passed.add(self._asked)
            self._asked = ""
        count = len(self._plan.learners)
        claims = [self._claims[learner] for learner in self._plan.learners if learner in self._claims]
        knowing = sum(claim.number > FRESH for claim in claims)  # who has joined says nothing of others
        has_majority = knowing > count // 2 or len(claims) == count  # whatever quorum a round needs
        if self._asked or not has_majority:
            self._claimed_s = self._claimed_s if has_majority else None
            return []
        self._claimed_s = now_s if self._claimed_s is None else self._claimed_s
        if len(claims) < count and now_s < self._claimed_s + ADOPT_WAIT_S:
            return []
        if self._passed >= self._claims.keys():
            self._passed.clear()
        order = [*self._plan.learners, *sorted(self._leaving)]
        holders = [each for each in order if each in self._claims and each not in self._passed]
        self._asked = max(holders, key=lambda learner: self._claims[learner].rank)  # the first of several
        self._asked_s = now_s + ASK_S + 4 * self._size / ASK_BYTES_PER_S
        return [AskWeights(self._asked)]

    def _adopt(self, answer: WeightsCame, now_s: float) -> list[ShardEffect]:
        """Whoever answers first, be it later than it was waited for."""
        if self._weights is not None or self._claims.get(answer.learner) != answer.version:
            return []
        self._asked = ""
        if len(answer.weights) != self._size or not np.isfinite(answer.weights).all():
            self._claims.pop(answer.learner, None)
            malformed = len(answer.weights) != self._size
            objection = Objection.MALFORMED if malformed else Objection.NOT_FINITE
            return [self._turn_away(answer.learner, objection)]
        self._weights = answer.weights
        # Under a name of this life, so that no line which this one has left behind is taken up by a later one.  The
        # weights that scripts have made need not be alike, and have no name yet.
        self._version = ShardVersion(max(0, answer.version.number), self._origin)
        self._counted = {learner: base for learner, base in answer.counted.items() if base < self._version.number}
        self._tempo = Tempo(answer.every or self.every) if self._tempo else None
        self._round = _Round(now_s)
        claims, self._claims = self._claims, {}
        known = answer.version.number > FRESH
        return [self._give(each, is_held=known and claim == answer.version) for each, claim in claims.items()]

    # Rounds.

    def _take(self, event: ContributionCame, now_s: float) -> list[ShardEffect]:
        """A repeat replaces what the learner had in this round.  Of one that is refused nothing waits here."""
        had = self._round.contributions.pop(event.learner, None)
        found = self._objection_to_contribution(event)
        if found is not None:
            self.refused[found[0]] = self.refused.get(found[0], 0) + 1
            return [Object(event.learner, found[0], event.base, found[1])]
        if had is None:
            self._time(event, now_s)
        self._round.contributions[event.learner] = event
        return []

    def _objection_to_contribution(self, event: ContributionCame) -> tuple[Objection, str] | None:
        objection = self._objection_to(event.learner, event.plan)
        if objection is None and self._weights is None:
            objection = Objection.NO_WEIGHTS
        if objection is None and event.base.number <= self._counted.get(event.learner, FRESH):
            objection = Objection.COUNTED
        if objection is None and not self._is_recent(event.base):
            objection = Objection.TOO_OLD
        if objection is not None:
            return objection, f"the shard is at version {self._version.number}, the contribution of {event.base.number}"
        return self._objection_to_content(event)

    def _is_recent(self, base: ShardVersion) -> bool:
        """Contributions to the version before count, but gradients of another step are of no use."""
        return base == self._version or (base == self._previous and base.number >= 0 and self._rule.keeps_weights)

    def _objection_to_content(self, event: ContributionCame) -> tuple[Objection, str] | None:
        change, most = event.change, event.steps * self._plan.batch_most
        lengths = (self._size, block_count(self._size) if self._rule.is_quantised else 0)
        found = (len(change.values), 0 if change.scales is None else len(change.scales))
        if found != lengths or event.samples < 0 or event.steps < 0:
            return (
                Objection.MALFORMED,
                f"{found[0]} values and {found[1]} scales where {lengths[0]} and {lengths[1]} are",
            )
        if self._plan.batch_most and event.samples > most:
            return Objection.TOO_MANY_SAMPLES, f"{event.samples} samples in {event.steps} steps; {most} are the most"
        norm = change.norm() if _is_plausible(change) else inf
        if not isfinite(norm):
            return Objection.NOT_FINITE, ""
        largest = NORM_RATIO * median_low(self._norms) if self._norms else 0.0
        self._norms.append(norm)  # a refused one as well: what is large again and again has become usual
        if norm <= largest:
            return None
        assert self._weights is not None
        own = Blocks(self._weights).norm()
        largest = max(largest, own * (NORM_LEAST if largest else NORM_RATIO))
        if norm <= largest or not largest:
            return None
        return Objection.TOO_LARGE, f"its norm is {norm:g}, and {largest:g} the most"

    def _time(self, event: ContributionCame, now_s: float) -> None:
        """By how much it has come later than its round's quorum."""
        quorum_s = self._round.quorum_s if event.base == self._version else self._last_quorum_s
        if quorum_s is not None:
            self._lateness.append(now_s - quorum_s)

    def _due(self, now_s: float) -> list[ShardEffect]:
        if self._weights is None:
            return self._ask(now_s)
        present = sum(learner in self._round.contributions for learner in self._plan.learners)
        if present < self._plan.needed:
            self._round.quorum_s = None
            return []
        if self._round.quorum_s is None:
            self._round.quorum_s = now_s
        is_complete = present == len(self._plan.learners)
        return [self._close(now_s)] if is_complete or now_s >= self._closes_s() else []

    def _closes_s(self) -> float:
        """Quorum and grace; there is none where the others are usually later than can be waited for."""
        if self._round.quorum_s is None:
            return inf
        limit_s = GRACE_RATIO * (self._round.quorum_s - self._round.opened_s)
        usual_s = median(self._lateness) if self._lateness else limit_s / 2
        return self._round.quorum_s + (
            min(limit_s, max(2 * usual_s, GRACE_LEAST * limit_s)) if usual_s <= limit_s else 0.0
        )

    def _close(self, now_s: float) -> Publish:
        """Merge piece by piece, contributions in the order of names: whoever came first changes no bit."""
        taken = [self._round.contributions[learner] for learner in sorted(self._round.contributions)]
        counts = [each.samples * (1.0 if each.base == self._version else LATE_WEIGHT) for each in taken]
        total = sum(counts)
        shares = [np.float32(count / total) if total else np.float32(0) for count in counts]
        change = empty(self._size, is_quantised=self._rule.is_quantised)
        for start, stop in pieces(self._size):
            mean = np.zeros(stop - start, np.float32)
            for share, each in zip(shares, taken, strict=True):
                mean += each.change.piece(start, stop) * share
            self._move(change, start, stop, mean)
        base, self._previous = self._version, self._version
        self._version = ShardVersion(base.number + 1, self._origin)
        counted = {each.learner: each.base.number for each in taken}
        self._counted = _bounded(self._counted | counted, self._plan)
        self._last_quorum_s, self._round = self._round.quorum_s, _Round(now_s)
        if self._tempo:
            self._tempo.merged([each.cost for each in taken])
        return Publish(base, self._version, change, counted)

    def _move(self, change: Blocks, start: int, stop: int, mean: Floats) -> None:
        """Quantise the step of one piece, and add to the weights what all will have been shown."""
        assert self._weights is not None
        momentum = None if self._momentum is None else self._momentum[start:stop]
        wanted = self._rule.step(mean, momentum)
        if self._residual is not None:
            wanted = wanted + self._residual[start:stop]
        change.put(start, wanted)
        shown = change.piece(start, stop)
        if self._residual is not None:
            self._residual[start:stop] = wanted - shown
        if self._rule.keeps_weights:
            self._weights[start:stop] += shown

    def lose_momentum(self) -> None:
        """Begin the momentum anew, as a successor does that got the weights from a learner."""
        if self._momentum is not None:
            self._momentum[:] = 0.0
        if self._residual is not None:
            self._residual[:] = 0.0

    def validate(self) -> None:
        """Raise AssertionError when the shard contradicts itself."""
        assert (self._weights is None) == (self._version.number < 0)
        assert not self._round.contributions or self._weights is not None
        for learner, each in self._round.contributions.items():
            assert learner == each.learner
            assert each.plan <= self._plan.number
            assert each.base.number > self._counted.get(learner, FRESH)
            assert self._is_recent(each.base)
        assert all(base < self._version.number for base in self._counted.values())
        assert len(self._norms) <= NORMS_REMEMBERED
        assert not self._asked or self._asked in self._claims


def _is_plausible(change: Blocks) -> bool:
    """Its scales are finite, not negative, and stay finite when they are multiplied; floats are seen by the norm."""
    scales = change.scales
    return scales is None or bool(((scales >= 0) & (scales < np.finfo(np.float32).max / 128)).all())


def _bounded(counted: dict[str, int], plan: AggregationPlan) -> dict[str, int]:
    """Those that left are forgotten first, the longest away before the others: what they bring is too old anyway."""
    gone = sorted((each for each in counted if each not in plan.learners), key=lambda each: counted[each])
    for each in gone[: max(0, len(counted) - LEARNERS_MAX)]:
        del counted[each]
    return counted

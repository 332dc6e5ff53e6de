"""One shard: which contributions count, when a round closes, what is published, and what is refused by which name."""

import numpy as np
import pytest

from swarmsched.aggregation.blocks import BLOCK, PIECE, Blocks, block_count
from swarmsched.aggregation.rule import AVERAGE, OUTER, REDUCE, MergeRule
from swarmsched.aggregation.shard import (
    ADOPT_WAIT_S,
    ASK_S,
    AggregationPlan,
    AskWeights,
    ContributionCame,
    LearnerCame,
    LearnerGone,
    Object,
    Objection,
    Origin,
    PlanHeard,
    PlanNumber,
    Publish,
    SendWeights,
    Shard,
    ShardVersion,
    TimePassed,
    TurnAway,
    WeightsCame,
    Welcome,
)
from swarmsched.aggregation.tempo import ROUNDS
from swarmsched.errors import ConfigError

SIZE = 3 * BLOCK + 5
FIRST = PlanNumber(1, 1)
NAMES = ("a", "b", "c", "d")
MEAN = MergeRule(rate=1.0, momentum=0.0, is_quantised=False)


class Job:
    """A shard under test, with a clock that tests set, whose learners hold `start`."""

    def __init__(self, rule: MergeRule = MEAN, names: tuple[str, ...] = NAMES, quorum: int = 0, **plan) -> None:
        self.names, self.now_s = names, 0.0
        self.shard = Shard(SIZE, rule, "layout", AggregationPlan(FIRST, names, quorum, **plan), life=1)
        self.start = np.linspace(-1, 1, SIZE).astype(np.float32)

    def tell(self, event):
        effects = self.shard.step(event, self.now_s)
        self.shard.validate()
        return effects

    def begin(self):
        for name in self.names:
            self.tell(LearnerCame(name, FIRST, "layout", ShardVersion()))
        self.tell(WeightsCame(self.names[0], ShardVersion(), self.start.copy(), {}))
        return self

    def contribute(self, name, value=1.0, base=None, plan=FIRST, samples=8, steps=1, **change):
        vector = np.full(SIZE, value, np.float32)
        blocks = Blocks(vector) if not self.shard._rule.is_quantised else Blocks.quantised(vector)
        blocks = change.get("change", blocks)
        return self.tell(ContributionCame(name, plan, base or self.shard.version, steps, samples, blocks))

    def close(self, *names, value=1.0):
        """A round of these, and what is published of it."""
        effects = [effect for name in names for effect in self.contribute(name, value)]
        if not effects:
            self.now_s = self.shard.next_deadline_s
            effects = self.tell(TimePassed())
        (published,) = effects
        assert isinstance(published, Publish)
        return published


def objections(effects):
    return [effect.objection for effect in effects if isinstance(effect, Object | TurnAway)]


# Rounds.


def test_a_round_closes_at_once_when_all_have_contributed_and_the_mean_is_weighted_by_samples():
    job = Job().begin()
    job.now_s = 10.0
    for name in "abc":
        assert job.contribute(name, value=1.0, samples=10) == []
    (published,) = job.contribute("d", value=5.0, samples=30)
    assert published.base.number == 0
    assert published.version == ShardVersion(1, Origin(*FIRST, 1))
    assert published.counted == dict.fromkeys(NAMES, 0)
    assert np.allclose(published.change.piece(0, SIZE), -(3 * 10 * 1.0 + 30 * 5.0) / 60)
    assert np.allclose(job.shard.weights, job.start - 3.0)


def test_a_quorum_is_waited_for_and_then_a_short_grace_for_the_others():
    job = Job().begin()
    job.now_s = 100.0
    for name in "ab":
        job.contribute(name)
        assert job.shard.next_deadline_s == float("inf")
    job.contribute("c")
    assert 100.0 < job.shard.next_deadline_s <= 110.0
    job.now_s = job.shard.next_deadline_s - 0.01
    assert job.tell(TimePassed()) == []
    job.now_s += 0.01
    (published,) = job.tell(TimePassed())
    assert set(published.counted) == set("abc")


def test_the_grace_is_twice_the_usual_lateness_and_none_where_that_is_hopeless():
    job = Job().begin()
    for late_s in (2.0, 2.0, 2.0):
        job.now_s += 100.0
        for name in "abc":
            job.contribute(name)
        job.now_s += late_s
        job.contribute("d")
    job.now_s += 100.0
    for name in "abc":
        job.contribute(name)
    assert job.shard.next_deadline_s - job.now_s == pytest.approx(4.0)
    job.now_s = job.shard.next_deadline_s
    job.tell(TimePassed())
    for _ in range(20):
        base = job.shard.version
        job.now_s += 100.0
        for name in "abc":
            job.contribute(name)
        job.now_s = max(job.now_s, min(job.now_s + 20, job.shard.next_deadline_s))
        job.tell(TimePassed())
        job.now_s += 90.0
        job.contribute("d", base=base)
    job.now_s += 10.0
    assert len(job.close("a", "b").counted) == 3, "d is late by most of a round, and is not waited for"


def test_one_that_is_late_by_one_version_counts_half_and_one_that_is_older_is_told():
    job = Job().begin()
    old = job.shard.version
    job.close("a", "b", "c")
    assert job.contribute("d", value=4.0, base=old, samples=8) == []
    published = job.close("a", "b", value=1.0)
    assert published.counted == {"a": 1, "b": 1, "d": 0}
    assert np.allclose(published.change.piece(0, SIZE), -(8 * 1 + 8 * 1 + 4 * 4.0) / 20)
    (effect,) = job.contribute("c", base=old)
    assert effect.objection is Objection.COUNTED
    job.close("a", "b", "c")
    assert objections(job.contribute("d", base=ShardVersion(1, old.origin))) == [Objection.TOO_OLD]


def test_a_repeat_replaces_what_waits_and_is_refused_once_it_was_counted():
    job = Job().begin()
    base = job.shard.version
    for value in (9.0, 9.0, 1.0):
        job.contribute("a", value)
    assert job.shard.waiting == ("a",)
    published = job.close("b", "c")
    assert np.allclose(published.change.piece(0, SIZE), -1.0)
    assert objections(job.contribute("a", base=base)) == [Objection.COUNTED]


def test_what_comes_in_another_order_makes_the_same_bits():
    shards = []
    for order in (NAMES, NAMES[::-1], ("c", "a", "d", "b")):
        job = Job(OUTER).begin()
        for number in range(3):
            job.now_s += 10.0
            for name in order:
                job.contribute(name, value=0.1 * (1 + NAMES.index(name)) + number, samples=3 + NAMES.index(name))
        shards.append(job.shard.weights.tobytes())
    assert len(set(shards)) == 1


@pytest.mark.parametrize("rule", [OUTER, MergeRule(0.7, 0.9, is_nesterov=False), MergeRule(0.5, 0.0)])
def test_weights_and_what_quantising_has_kept_are_those_of_torchs_sgd(rule):
    """A reference in float64, of the contributions as they were sent: nothing is added twice, and nothing left out."""
    job = Job(rule, names=("a", "b")).begin()
    weights, momentum = job.start.astype(np.float64), np.zeros(SIZE)
    shown = job.start.copy()
    chance = np.random.default_rng(1)
    for _ in range(6):
        sent = [Blocks.quantised(chance.standard_normal(SIZE).astype(np.float32)) for _ in "ab"]
        job.contribute("a", change=sent[0], samples=1)
        (published,) = job.contribute("b", change=sent[1], samples=3)
        gradient = sent[0].piece(0, SIZE) * 0.25 + sent[1].piece(0, SIZE).astype(np.float64) * 0.75
        momentum = rule.momentum * momentum + gradient
        step = gradient + rule.momentum * momentum if rule.is_nesterov else momentum
        weights -= rule.rate * step
        shown += published.change.piece(0, SIZE)
    assert np.array_equal(shown, job.shard.weights), "what was shown is the truth, bit for bit"
    assert np.abs(job.shard.weights + job.shard._residual - weights).max() < 1e-4
    assert np.abs(job.shard._residual).max() <= published.change.scales.max() * 0.51


def test_pieces_are_merged_as_one_vector_is():
    size = PIECE + 3 * BLOCK + 1
    shard = Shard(size, OUTER, "x", AggregationPlan(FIRST, ("a",)), life=1)
    start = np.zeros(size, np.float32)
    shard.step(LearnerCame("a", FIRST, "x", ShardVersion()), 0.0)
    shard.step(WeightsCame("a", ShardVersion(), start, {}), 0.0)
    vector = np.linspace(-3, 3, size).astype(np.float32)
    event = ContributionCame("a", FIRST, shard.version, 1, 1, Blocks.quantised(vector))
    (published,) = shard.step(event, 1.0)
    assert np.abs(published.change.piece(PIECE, size) + 1.9 * 0.7 * vector[PIECE:]).max() < 0.05
    assert np.array_equal(published.change.piece(0, size)[:PIECE], published.change.piece(0, PIECE))


def test_gradients_are_summed_without_weights_and_late_ones_are_of_no_use():
    job = Job(MergeRule(1.0, 0.0, keeps_weights=False, is_quantised=False), names=("a", "b"))
    assert job.tell(LearnerCame("a", FIRST, "layout", ShardVersion())) == [SendWeights("a")]
    assert job.shard.weights.size == 0
    base = job.shard.version
    published = job.close("a", "b", value=2.0)
    assert np.allclose(published.change.piece(0, SIZE), 2.0)
    assert job.close("a", "b", value=3.0).version.number == 2
    assert objections(job.contribute("a", base=base)) == [Objection.COUNTED]
    alone = Job(REDUCE, names=("a", "b", "c"))
    base = alone.shard.version
    alone.close("a", "b")
    assert objections(alone.contribute("c", base=base)) == [Objection.TOO_OLD]


def test_a_round_without_a_sample_moves_nothing():
    job = Job().begin()
    job.now_s = 10.0
    for name in "abc":
        job.contribute(name, value=7.0, samples=0)
    (published,) = job.contribute("d", value=7.0, samples=0)
    assert not published.change.piece(0, SIZE).any()
    assert np.array_equal(job.shard.weights, job.start)


# Plans.


def test_an_older_plan_is_not_obeyed_and_contributions_under_another_are_refused():
    job = Job().begin()
    newer = AggregationPlan(PlanNumber(2, 1), ("a", "b"))
    job.tell(PlanHeard(newer))
    job.tell(PlanHeard(AggregationPlan(PlanNumber(1, 9), NAMES)))
    assert job.shard.plan == newer
    assert objections(job.contribute("a", plan=FIRST)) == [Objection.OLD_PLAN]
    assert objections(job.contribute("a", plan=PlanNumber(2, 2))) == [Objection.UNHEARD_PLAN]
    assert objections(job.contribute("c", plan=newer.number)) == [Objection.STRANGER]
    assert job.shard.waiting == ()
    assert job.contribute("a", plan=newer.number) == []


def test_one_that_leaves_gives_its_last_change_and_counts_in_no_quorum():
    job = Job().begin()
    newer = AggregationPlan(PlanNumber(1, 2), ("a", "b"))
    job.tell(PlanHeard(newer))
    held = job.shard.version
    assert objections(job.tell(LearnerCame("c", newer.number, "layout", held))) == [Objection.STRANGER]
    assert job.tell(LearnerCame("c", newer.number, "layout", held, True)) == [Welcome("c", held)]
    assert objections(job.tell(LearnerCame("d", FIRST, "layout", held, True))) == [Objection.OLD_PLAN]
    assert job.contribute("c", plan=newer.number) == []
    assert job.contribute("a", plan=newer.number) == []
    (published,) = job.contribute("b", plan=newer.number)
    assert sorted(published.counted) == ["a", "b", "c"]
    job.tell(PlanHeard(AggregationPlan(PlanNumber(1, 3), ("a", "b"))))
    assert objections(job.contribute("c", plan=PlanNumber(1, 3))) == [Objection.STRANGER]


def test_the_quorum_is_that_of_the_present_plan():
    """Two of four are too few; of the three of the next plan they are enough, and of the five after that again not."""
    job = Job().begin()
    job.now_s = 10.0
    for name in "ab":
        job.contribute(name)
    assert job.shard.next_deadline_s == float("inf")
    job.tell(PlanHeard(AggregationPlan(PlanNumber(1, 2), ("a", "b", "c"))))
    assert job.shard.next_deadline_s < 20.0
    job.tell(PlanHeard(AggregationPlan(PlanNumber(1, 3), ("a", "b", "c", "d", "e"))))
    assert job.shard.next_deadline_s == float("inf")
    job.tell(PlanHeard(AggregationPlan(PlanNumber(1, 4), ("b", "c", "d"))))
    assert job.shard.next_deadline_s == float("inf"), "who is not in the plan makes no quorum"
    job.now_s = 20.0
    assert job.contribute("c", plan=PlanNumber(1, 4)) == []
    (published,) = job.contribute("d", plan=PlanNumber(1, 4))
    assert set(published.counted) == set("abcd"), "what was complete before the plan came is not thrown away"


def test_of_a_learner_that_comes_anew_nothing_waits():
    job = Job().begin()
    job.contribute("a")
    assert job.tell(LearnerGone("a")) == []
    assert job.shard.waiting == ("a",), "it was complete"
    assert job.tell(LearnerCame("a", FIRST, "layout", job.shard.version)) == [Welcome("a", job.shard.version)]
    assert job.shard.waiting == ()


def test_a_learner_that_holds_another_version_gets_the_weights():
    job = Job().begin()
    old = job.shard.version
    job.close("a", "b", "c")
    assert job.tell(LearnerCame("d", FIRST, "layout", old)) == [SendWeights("d")]
    far = ShardVersion(9, Origin(*FIRST, 0))
    assert job.tell(LearnerCame("d", FIRST, "layout", far)) == [SendWeights("d")]


# Successors.


def successor(job: Job, number: int = 2, names: tuple[str, ...] = NAMES) -> Job:
    """Of a job's shard that has died, under the next plan."""
    after = Job(job.shard._rule, names)
    after.shard = Shard(SIZE, job.shard._rule, "layout", AggregationPlan(PlanNumber(1, number), names), life=2)
    return after


def test_a_successor_takes_the_highest_version_and_counts_nothing_of_it_again():
    job = Job().begin()
    base, before = job.shard.version, job.shard.weights.copy()
    job.close("a", "b", "c")
    seen, weights, counted = job.shard.version, job.shard.weights.copy(), job.shard.counted
    after, plan = successor(job), PlanNumber(1, 2)
    after.now_s = 5.0
    for name, version in (("a", base), ("b", base), ("c", seen)):
        assert after.tell(LearnerCame(name, plan, "layout", version)) == []
    assert after.shard.next_deadline_s == 5.0 + ADOPT_WAIT_S
    after.now_s += ADOPT_WAIT_S
    assert after.tell(TimePassed()) == [AskWeights("c")]
    assert after.tell(WeightsCame("b", seen, before, {})) == [], "it has never said that it holds that"
    effects = after.tell(WeightsCame("c", seen, weights, counted))
    present = ShardVersion(1, Origin(*plan, 2))
    assert effects == [SendWeights("a"), SendWeights("b"), Welcome("c", present)]
    assert after.shard.weights is not None
    assert np.array_equal(after.shard.weights, weights)
    assert objections(after.contribute("a", base=base, plan=plan)) == [Objection.COUNTED]
    assert objections(after.contribute("d", base=base, plan=plan)) == [Objection.TOO_OLD]
    assert after.contribute("d", plan=plan) == []


def test_a_line_that_began_later_supersedes_one_that_went_further():
    after, plan = successor(Job(names=("a", "b"))), PlanNumber(1, 2)
    far, later = ShardVersion(9, Origin(*FIRST, 1)), ShardVersion(3, Origin(1, 1, 7))
    for name, version in zip(NAMES, (far, later, far, far), strict=True):
        effects = after.tell(LearnerCame(name, plan, "layout", version))
    assert effects == [AskWeights("b")]


def test_who_has_joined_is_no_witness_of_what_the_others_hold():
    after, plan = successor(Job()), PlanNumber(1, 2)
    for name in "abc":
        after.tell(LearnerCame(name, plan, "layout", ShardVersion(4) if name == "a" else ShardVersion()))
    after.now_s = 60.0
    assert after.tell(TimePassed()) == []
    assert after.tell(LearnerCame("d", plan, "layout", ShardVersion())) == [AskWeights("a")], "now all have told"


def test_one_that_does_not_answer_is_passed_over_and_may_answer_late():
    after, plan = successor(Job(), names=("a", "b")), PlanNumber(1, 2)
    held = ShardVersion(4, Origin(*FIRST, 1))
    after.tell(LearnerCame("a", plan, "layout", held))
    assert after.tell(LearnerCame("b", plan, "layout", held)) == [AskWeights("a")]
    after.now_s = after.shard.next_deadline_s
    assert after.now_s > ASK_S
    assert after.tell(TimePassed()) == [AskWeights("b")]
    effects = after.tell(WeightsCame("a", held, after.start, {"b": 3}))
    assert effects == [Welcome(name, after.shard.version) for name in "ab"]
    assert after.shard.counted == {"b": 3}


# What is refused.


def changed(**parts):
    vector = np.linspace(-1, 1, SIZE).astype(np.float32)
    whole = Blocks.quantised(vector)
    return Blocks(parts.get("values", whole.values), parts.get("scales", whole.scales))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 3e38])
def test_scales_that_are_no_numbers_are_refused(scale):
    job = Job(OUTER).begin()
    scales = np.ones(block_count(SIZE), np.float32)
    scales[2] = scale
    assert objections(job.contribute("a", change=changed(scales=scales))) == [Objection.NOT_FINITE]
    vector = np.ones(SIZE, np.float32)
    vector[-1] = scale if scale not in (-1.0, 3e38) else np.nan
    plain = Job().begin()
    assert objections(plain.contribute("a", change=Blocks(vector))) == [Objection.NOT_FINITE]
    assert job.shard.refused == {Objection.NOT_FINITE: 1}


@pytest.mark.parametrize(
    "change",
    [
        changed(values=np.zeros(SIZE - 1, np.int8)),
        changed(values=np.zeros(SIZE + BLOCK, np.int8)),
        changed(scales=np.ones(block_count(SIZE) - 1, np.float32)),
        Blocks(np.ones(SIZE, np.float32)),
    ],
)
def test_other_lengths_are_refused(change):
    assert objections(Job(OUTER).begin().contribute("a", change=change)) == [Objection.MALFORMED]


def test_what_is_a_hundred_times_as_large_as_usual_is_refused_and_told():
    job = Job().begin()
    for _ in range(3):
        job.close("a", "b", "c", value=0.5)
    (effect,) = job.contribute("d", value=51.0)
    assert effect.objection is Objection.TOO_LARGE
    assert "its norm is" in effect.detail
    assert job.contribute("d", value=49.0) == []


def test_the_first_ones_may_not_dwarf_the_weights_and_tiny_ones_are_no_measure():
    """Of a schedule that begins at a rate of nearly 0 the first contributions say nothing about those to come."""
    assert objections(Job().begin().contribute("a", value=100.0)) == [Objection.TOO_LARGE]
    job = Job().begin()
    for _ in range(3):
        job.close("a", "b", "c", value=1e-7)
    assert job.contribute("d", value=0.05) == []


def test_what_is_large_again_and_again_becomes_usual():
    job = Job().begin()
    for _ in range(10):
        job.close("a", "b", "c", value=1e-3)
    found = [bool(objections(job.contribute("a", value=50.0))) for _ in range(60)]
    assert found[0]
    assert not found[-1]


def test_a_learner_that_diverges_beside_one_that_does_not_stays_out():
    job = Job(names=("a", "b"), quorum=1).begin()
    for _ in range(30):
        job.now_s += 10.0
        job.contribute("a", value=0.1)
        assert objections(job.contribute("b", value=1e6)) == [Objection.TOO_LARGE]
        job.now_s = max(job.now_s, job.shard.next_deadline_s)
        job.tell(TimePassed())


def test_more_samples_than_the_steps_can_have_had_are_refused():
    job = Job(batch_most=32).begin()
    assert objections(job.contribute("a", samples=129, steps=4)) == [Objection.TOO_MANY_SAMPLES]
    assert job.contribute("a", samples=128, steps=4) == []
    assert objections(job.contribute("b", samples=-1)) == [Objection.MALFORMED]


def test_of_a_refused_repeat_nothing_waits_as_its_learner_takes_it_for_refused():
    job = Job(batch_most=32).begin()
    job.contribute("a")
    assert objections(job.contribute("a", samples=1_000)) == [Objection.TOO_MANY_SAMPLES]
    assert job.shard.waiting == ()


@pytest.mark.parametrize(
    ("hello", "objection"),
    [
        (LearnerCame("a", FIRST, "other", ShardVersion()), Objection.OTHER_LAYOUT),
        (LearnerCame("z", FIRST, "layout", ShardVersion()), Objection.STRANGER),
        (LearnerCame("a", PlanNumber(0, 9), "layout", ShardVersion()), Objection.OLD_PLAN),
        (LearnerCame("a", PlanNumber(1, 2), "layout", ShardVersion()), Objection.UNHEARD_PLAN),
    ],
)
def test_who_does_not_belong_here_is_turned_away_by_name(hello, objection):
    assert Job().begin().tell(hello) == [TurnAway(hello.learner, objection)]


def test_weights_that_are_no_numbers_or_of_another_size_are_not_adopted():
    for weights in (np.full(SIZE, np.nan, np.float32), np.zeros(3, np.float32)):
        job = Job(names=("a", "b"))
        job.tell(LearnerCame("a", FIRST, "layout", ShardVersion()))
        job.tell(LearnerCame("b", FIRST, "layout", ShardVersion()))
        effects = job.tell(WeightsCame("a", ShardVersion(), weights, {}))
        assert isinstance(effects[0], TurnAway)
        assert job.shard.weights is None
        assert effects[1:] == []
        job.tell(LearnerCame("a", FIRST, "layout", ShardVersion()))
        assert job.shard.next_deadline_s < float("inf")


def test_contributions_before_there_are_weights_are_refused():
    assert objections(Job().contribute("a", base=ShardVersion(3))) == [Objection.NO_WEIGHTS]


@pytest.mark.parametrize(("rate", "momentum"), [(0.0, 0.9), (float("nan"), 0.9), (3.0, 0.0), (0.7, 1.0), (0.7, -0.1)])
def test_a_rule_that_cannot_be_is_refused(rate, momentum):
    with pytest.raises(ConfigError):
        MergeRule(rate, momentum)


def test_the_average_of_weights_is_the_plain_mean():
    job = Job(AVERAGE, names=("a", "b")).begin()
    published = job.close("a", "b", value=0.5)
    assert np.allclose(published.change.piece(0, SIZE), -0.5, atol=1e-3)


def test_a_shard_that_decides_the_tempo_hands_it_on_with_its_weights():
    """Its successor goes on with that of the version it adopts; a shard that does not decide says 0."""

    def shard(every):
        return Shard(4, MEAN, "layout", AggregationPlan(FIRST, ("a",)), 1, every)

    def begun(every, told):
        found = shard(every)
        found.step(LearnerCame("a", FIRST, "layout", ShardVersion(3)), 0.0)
        found.step(WeightsCame("a", ShardVersion(3), np.zeros(4, np.float32), {}, told), 0.0)
        return found

    first = begun(64, 0)
    assert first.every == 64
    for _ in range(ROUNDS):
        event = ContributionCame("a", FIRST, first.version, 1, 8, Blocks(np.ones(4, np.float32)), 30.0)
        assert first.step(event, 0.0)
    assert first.every == 128
    assert begun(64, 128).every == 128
    assert begun(0, 128).every == 0


def test_one_that_was_asked_for_weights_and_comes_anew_is_asked_again():
    """What was asked on its former connection never came there; its end is not always told."""
    job = Job(names=("a", "b"))
    known = ShardVersion(3, Origin(1, 1, 0))
    hello = LearnerCame("a", FIRST, "layout", known)
    job.tell(hello)
    assert job.tell(LearnerCame("b", FIRST, "layout", known)) == [AskWeights("a")]
    assert job.tell(hello) == [AskWeights("a")]

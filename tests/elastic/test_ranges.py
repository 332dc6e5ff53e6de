"""The tables of the data pipeline: exactly once whatever happens to the members, and the same on all ranks."""

import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_elastic._ranges import LIMIT, WORDS, OnDemand, Permutation, RanksDiffer, Reproducible, share

MODES = ("reproducible", "on_demand", "unknown_length")


def table(mode: str, length: int, batch: int, epochs: int, ahead: int = 2) -> Reproducible | OnDemand:
    if mode == "reproducible":
        return Reproducible(length=length, batch=batch, epochs=epochs, seed=7)
    known = length if mode == "on_demand" else None
    return OnDemand(length=known, batch=batch, epochs=epochs, seed=7, ahead=ahead)


class Job:
    """All ranks of a job, each with its table, and a count of what the parameters have been trained on."""

    def __init__(self, mode: str, length: int, batch: int, epochs: int, world: int, ahead: int = 2) -> None:
        self.make: Callable[[], Reproducible | OnDemand] = lambda: table(mode, length, batch, epochs, ahead)
        self.length, self.epochs = length, epochs
        self.names = (f"w{number}" for number in itertools.count())
        self.tables = {next(self.names): self.make() for _ in range(world)}
        self.used: Counter[tuple[int, int]] = Counter()
        self.steps: list[list[tuple[int, int]]] = []
        self._begin()

    def _begin(self) -> None:
        for name, each in self.tables.items():
            each.begin(list(self.tables), name)
        self.check_equal()

    def check_equal(self) -> None:
        first, *others = [(each.state(), each.words()[-1]) for each in self.tables.values()]
        assert all(other == first for other in others)

    @property
    def is_done(self) -> bool:
        return next(iter(self.tables.values())).is_done

    def slots(self) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """What all ranks say of the step to come, and what they train on, in rank order."""
        slots, samples = [], []
        for each in self.tables.values():
            [cut] = each.upcoming(1)
            if isinstance(each, OnDemand) and any(position >= self.length for position in cut.positions):
                each.met_end(cut.epoch, self.length)
                [cut] = each.upcoming(1)
            slot = each.words()
            assert len(slot) == WORDS
            assert all(0 <= word < LIMIT for word in slot)
            assert slot[0] == len(cut.positions)
            slots.append(slot)
            samples += [(cut.epoch, position) for position in cut.positions]
        return slots, samples

    def count(self, samples: list[tuple[int, int]]) -> None:
        self.used.update(samples)
        self.steps.append(samples)

    def step(self) -> None:
        slots, samples = self.slots()
        for each in self.tables.values():
            each.agreed(slots)
        self.count(samples)
        self.check_equal()

    def die(self, dead: set[int], finished: set[int]) -> None:
        """Ranks die in a step, which some of the others finish; those give their table to the rest."""
        slots, samples = self.slots()
        names = list(self.tables)
        ahead = [rank for rank in finished if rank not in dead and rank < len(names)]
        for rank in ahead:
            self.tables[names[rank]].agreed(slots)
        self.tables = {name: each for rank, (name, each) in enumerate(self.tables.items()) if rank not in dead}
        if ahead:
            self.count(samples)
            state = json.dumps(self.tables[names[ahead[0]]].state())
            for each in self.tables.values():
                each.load(json.loads(state))
        self._begin()

    def change(self, leaving: set[int], joining: int) -> None:
        state = json.dumps(next(iter(self.tables.values())).state())
        self.tables = {name: each for rank, (name, each) in enumerate(self.tables.items()) if rank not in leaving}
        for _ in range(joining):
            newcomer = self.make()
            newcomer.load(json.loads(state))
            self.tables[next(self.names)] = newcomer
        self._begin()

    def tear(self, reached: set[int], joining: int) -> None:
        """Some ranks go over to a membership with newcomers that comes to nothing; then all begin the next one."""
        members = list(self.tables)[1:] + [next(self.names) for _ in range(joining)]
        for rank, (name, each) in enumerate(self.tables.items()):
            if rank in reached and name in members:
                each.begin(members, name)
        self.change(set(), 0)

    def resize(self, batch: int) -> None:
        for each in self.tables.values():
            each.resize(batch)
        self.check_equal()

    def saved(self) -> tuple[str, Counter[tuple[int, int]]]:
        return json.dumps(next(iter(self.tables.values())).state()), copy.copy(self.used)

    def restore(self, checkpoint: tuple[str, Counter[tuple[int, int]]], world: int) -> None:
        """Begin again from a checkpoint, with other workers."""
        state, self.used = checkpoint[0], copy.copy(checkpoint[1])
        self.tables = {next(self.names): self.make() for _ in range(world)}
        for each in self.tables.values():
            each.load(json.loads(state))
        self._begin()

    def finish(self) -> None:
        """Each step uses a sample; of unknown length, one more in each epoch may only find the end."""
        for _ in range(self.epochs * (self.length + 2)):
            if self.is_done:
                break
            self.step()
        assert self.is_done
        assert self.used == Counter({(e, p): 1 for e in range(self.epochs) for p in range(self.length)})


KINDS = ("steps", "steps", "die", "change", "tear", "resize", "save", "restore", "ask")
sizes = st.one_of(st.sampled_from([1, 2, 3]), st.integers(1, 90))


@st.composite
def happenings(draw: st.DrawFn, world: int, kinds: Sequence[str] = KINDS) -> list[tuple]:
    """Steps, and what interrupts them; one member at least survives."""
    events: list[tuple] = []
    for _ in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(kinds))
        ranks = st.sets(st.integers(0, world - 1), max_size=world - 1)
        if kind == "steps":
            events.append((kind, draw(st.integers(1, 4))))
        elif kind == "die":
            dead = draw(ranks)
            events.append((kind, dead, draw(ranks)))
            world -= len(dead)
        elif kind == "change":
            leaving, joining = draw(ranks), draw(st.integers(0, 3))
            events.append((kind, leaving, joining))
            world += joining - len(leaving)
        elif kind == "tear":
            events.append((kind, draw(ranks), draw(st.integers(1, 3))))
        elif kind == "resize":
            events.append((kind, draw(st.integers(1, 20))))
        elif kind == "save":
            events.append((kind,))
        elif kind == "restore":
            world = draw(st.integers(1, 5))
            events.append((kind, world))
        else:
            events.append((kind, draw(st.integers(0, world - 1)), draw(st.integers(1, 9))))
    return events


def play(job: Job, events: list[tuple]) -> None:
    checkpoint = job.saved()
    for kind, *given_ in events:
        if kind == "steps":
            for _ in range(given_[0]):
                if not job.is_done:
                    job.step()
        elif kind == "save":
            checkpoint = job.saved()
        elif kind == "restore":
            job.restore(checkpoint, *given_)
        elif kind == "ask":
            asking = list(job.tables.values())[given_[0]]
            if isinstance(asking, OnDemand):
                asking.ask(given_[1])
        elif kind != "die" or not job.is_done:
            getattr(job, kind)(*given_)


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_sample_is_used_once_in_each_epoch_whatever_happens(mode: str, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    job = Job(mode, data.draw(sizes), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 3)), world)
    play(job, data.draw(happenings(world)))
    job.finish()


@settings(deadline=None, max_examples=60)
@given(length=sizes, batch=st.integers(1, 20), world=st.integers(1, 6), data=st.data())
def test_the_samples_of_a_reproducible_step_do_not_depend_on_the_world(length, batch, world, data) -> None:
    """Nor on what happened to the members: in rank order they are those of one rank alone."""
    alone, changed = (Job("reproducible", length, batch, 2, size) for size in (1, world))
    play(changed, data.draw(happenings(world, ("steps", "die", "change", "tear"))))
    alone.finish()
    changed.finish()
    assert changed.steps == alone.steps


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 31, 32, 33])
def test_few_samples_for_many_ranks(mode: str, length: int) -> None:
    job = Job(mode, length, batch=8, epochs=3, world=5)
    job.finish()


@pytest.mark.parametrize("mode", ["reproducible", "on_demand"])
def test_no_samples_is_no_steps(mode: str) -> None:
    assert Job(mode, 0, batch=8, epochs=3, world=2).is_done


def test_of_unknown_length_zero_each_epoch_is_one_empty_step() -> None:
    job = Job("unknown_length", 0, batch=8, epochs=3, world=2)
    job.finish()
    assert job.steps == [[], [], []]


@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_thousand_samples_through_twenty_changes_and_five_deaths(mode: str) -> None:
    """Five epochs; each sample once in each."""
    draw = random.Random(3)
    job = Job(mode, 100_000, batch=1_000, epochs=5, world=4)
    at = sorted(draw.sample(range(480), 25))
    deaths = set(draw.sample(at, 5))
    changes = 0
    for step in range(480):
        ranks = range(len(job.tables))
        if step in deaths:
            dead = set(draw.sample(ranks, draw.randint(1, max(1, len(ranks) - 1)) if len(ranks) > 1 else 0))
            assert dead
            job.die(dead, finished=set(draw.sample(ranks, len(ranks) // 2)))
        elif step in at:
            job.change(set(draw.sample(ranks, draw.randrange(len(ranks)))), joining=draw.randint(2, 4))
            changes += 1
        job.step()
    assert (changes, len(deaths)) == (20, 5)
    assert len(json.dumps(next(iter(job.tables.values())).state())) < 4_096
    job.finish()


def test_ranges_of_the_dead_are_handed_out_before_fresh_ones() -> None:
    job = Job("on_demand", 1_000, batch=4, epochs=1, world=2, ahead=0)
    job.step()
    lost = job.tables["w1"].upcoming(1)[0].positions
    job.die({1}, finished=set())
    assert set(lost) <= set(job.tables["w0"].upcoming(1)[0].positions)


def test_a_rank_holds_the_samples_of_its_next_steps() -> None:
    """What it is told that it will use is what it uses, so that it can be loaded ahead; also into the next epoch."""
    for mode in ("reproducible", "on_demand"):
        job = Job(mode, 48, batch=8, epochs=2, world=2)
        told: dict[str, list] = {}
        for _ in range(12):
            for name, each in job.tables.items():
                cuts = each.upcoming(3)
                assert told.get(name, cuts[:2]) == cuts[:2]
                told[name] = cuts[1:]
            job.step()
        assert job.is_done


def test_ranks_run_dry_together() -> None:
    """The rest of an epoch is dealt evenly, so that full batches are followed by one that is not, and no more."""
    for length in (100, 103, 119):
        job = Job("on_demand", length, batch=12, epochs=2, world=4)
        job.finish()
        sizes = [len(samples) for samples in job.steps]
        full, rest = divmod(length, 12)
        assert sizes == ([12] * full + [rest] * (rest > 0)) * 2


def test_a_short_epoch_is_dealt_evenly() -> None:
    """Although each rank alone wants nearly all of it."""
    job = Job("on_demand", 24, batch=24, epochs=1, world=4)
    job.finish()
    assert len(job.steps) == 1


def test_a_rank_that_asks_for_less_is_handed_less() -> None:
    job = Job("on_demand", 240, batch=8, epochs=1, world=2)
    slow = job.tables["w1"]
    assert isinstance(slow, OnDemand)
    slow.ask(1)
    job.step()
    job.step()
    assert [len(each.upcoming(1)[0].positions) for each in job.tables.values()] == [4, 1]
    assert sum(len(cut.positions) for cut in slow.upcoming(9)) == 3
    job.finish()


def test_a_smaller_batch_in_mid_epoch_leaves_nothing_behind_with_a_rank_that_has_no_share() -> None:
    job = Job("on_demand", 60, batch=16, epochs=1, world=4)
    job.step()
    job.resize(2)
    job.finish()


def test_the_next_epoch_waits_for_ranges_that_come_back_late() -> None:
    """Everybody holds samples of the next epoch already when a rank dies with the last of this one."""
    job = Job("on_demand", 20, batch=4, epochs=2, world=2, ahead=3)
    for _ in range(4):
        job.step()
    job.die({0}, finished=set())
    job.finish()
    assert [epoch for samples in job.steps for epoch, _ in samples] == [0] * 20 + [1] * 20


def test_what_a_rank_gives_back_is_taken_by_ranks_that_hold_enough_of_the_next_epoch() -> None:
    """A fast rank has used up its part of the end of an epoch, when the other stops asking."""
    job = Job("on_demand", 32, batch=4, epochs=2, world=2, ahead=3)
    fast, stopping = job.tables.values()
    assert isinstance(fast, OnDemand)
    assert isinstance(stopping, OnDemand)
    for _ in range(4):
        job.step()
    fast.ask(8)
    job.step()
    fast.ask(2)
    job.step()
    assert [[cut.epoch for cut in each.upcoming(2)] for each in (fast, stopping)] == [[0, 1], [0, 0]]
    assert not fast.upcoming(1)[0].positions
    stopping.ask(0)
    job.finish()


def test_nothing_is_handed_out_beyond_the_last_epoch() -> None:
    for mode in ("reproducible", "on_demand"):
        job = Job(mode, 10, batch=4, epochs=1, world=1)
        job.step()
        assert [len(cut.positions) for cut in job.tables["w0"].upcoming(9)] == [4, 2]


def test_a_membership_that_came_to_nothing_on_some_ranks_leaves_no_trace() -> None:
    """Two ranks have dealt samples to a newcomer already, one has not heard of it."""
    job = Job("on_demand", 100, batch=12, epochs=1, world=3)
    job.step()
    for name in ("w0", "w2"):
        job.tables[name].begin(["w2", "w0", "new"], name)
    job.tables["w1"].begin(["w0", "w1", "w2"], "w1")
    words = [each.words()[-1] for each in job.tables.values()]
    assert words[0] == words[2] != words[1]
    job.change({2}, 1)
    job.finish()


def test_tables_that_differ_are_an_error_on_all_ranks_and_change_nothing() -> None:
    """One rank has a longer dataset."""
    tables = [table("reproducible", length, 8, 1) for length in (100, 101)]
    for rank, each in enumerate(tables):
        each.begin(["a", "b"], "ab"[rank])
    slots = [each.words() for each in tables]
    for rank, each in enumerate(tables):
        before = each.state()
        with pytest.raises(RanksDiffer, match=rf"data of ranks \[{1 - rank}\]"):
            each.agreed(slots)
        assert each.state() == before


def test_a_rank_that_used_more_than_its_slice_is_an_error() -> None:
    job = Job("reproducible", 100, batch=10, epochs=1, world=2)
    slots, _ = job.slots()
    slots[1][0] += 1
    with pytest.raises(RanksDiffer, match="rank 1 used 6 samples of 10, not 5"):
        job.tables["w0"].agreed(slots)


def test_a_dataset_that_ends_earlier_on_one_rank_is_an_error() -> None:
    tables = [table("unknown_length", 0, 8, 1) for _ in range(2)]
    for rank, each in enumerate(tables):
        each.begin(["a", "b"], "ab"[rank])
        assert isinstance(each, OnDemand)
    tables[0].met_end(0, 2)
    with pytest.raises(RanksDiffer, match="rank 1 used 4 samples and holds 0"):
        tables[0].agreed([each.words() for each in tables])


@pytest.mark.parametrize("end", [0, 5, LIMIT - 2, LIMIT - 1, LIMIT, LIMIT * 3 + 17])
def test_any_length_fits_into_a_slot(end: int) -> None:
    each = OnDemand(length=None, batch=2, epochs=1, seed=None)
    each.load(each.state() | {"fresh": [end, 0]})
    each.begin(["a"], "a")
    each.met_end(0, end)
    each.agreed([each.words()])
    assert each.is_done


@settings(deadline=None, max_examples=100)
@given(length=st.integers(1, 3_000), seed=st.integers(0, 1 << 40), epoch=st.integers(0, 9))
def test_a_permutation_hits_each_index_once(length: int, seed: int, epoch: int) -> None:
    order = Permutation(length, seed, epoch)
    assert sorted(order[position] for position in range(length)) == list(range(length))


def test_each_place_of_a_permutation_is_equally_likely_to_hold_each_index() -> None:
    """Chi-squared of 10 by 10 counts over 2,000 seeds; 81 degrees of freedom, of which 160 is far out."""
    counts = Counter((at, Permutation(10, seed, 0)[at]) for seed in range(2_000) for at in range(10))
    assert sum((counts[at, index] - 200) ** 2 / 200 for at in range(10) for index in range(10)) < 160


def test_neighbours_of_an_order_are_not_neighbours_of_the_next() -> None:
    """Nor is it near the order of another seed: about one place in n is the same by chance."""
    orders = [[Permutation(5_000, seed, epoch)[p] for p in range(5_000)] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for one, other in itertools.combinations(orders, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 12
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(orders[0])) < 16


def test_an_order_of_ten_billion_needs_no_list() -> None:
    order = Permutation(10**10, 1, 2)
    found = {order[position] for position in range(10**10 - 500, 10**10)}
    assert len(found) == 500
    assert max(found) < 10**10
    assert max(found) - min(found) > 9 * 10**9


@pytest.mark.parametrize(("world", "batch"), [(1, 7), (3, 7), (5, 3), (7, 7)])
def test_shares_add_up_and_differ_by_one_at_most(world: int, batch: int) -> None:
    shares = [share(batch, world, rank) for rank in range(world)]
    assert sum(shares) == batch
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "global_batch is 0; it must be from 1"),
        ({"batch": LIMIT}, f"to {LIMIT - 1}"),
        ({"length": -1}, "length is -1; it must be 0 or more"),
        ({"epochs": -2}, "epochs is -2"),
    ],
)
def test_bad_settings_are_named(change: dict, message: str) -> None:
    for kind in (Reproducible, OnDemand):
        with pytest.raises(ValueError, match=message):
            kind(**{"length": 10, "batch": 2, "epochs": 1, "seed": 0} | change)


def test_a_state_of_other_data_is_refused_with_the_setting_that_differs() -> None:
    state = table("reproducible", 10, 2, 1).state()
    with pytest.raises(ValueError, match="length of the data is 11, and was 10"):
        table("reproducible", 11, 2, 1).load(state)
    with pytest.raises(ValueError, match="mode of the data is 'on_demand', and was 'reproducible'"):
        table("on_demand", 10, 2, 1).load(state)


def test_members_that_cannot_be_are_refused() -> None:
    each = table("reproducible", 10, 2, 1)
    with pytest.raises(ValueError, match="worker 'c' is none of the members"):
        each.begin(["a", "b"], "c")
    with pytest.raises(ValueError, match="each must be there once"):
        each.begin(["a", "a"], "a")

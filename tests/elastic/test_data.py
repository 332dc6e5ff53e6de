"""Batches of real torch datasets, for several ranks that a script plays in one process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.job import Template
from tests.elastic.testing import TRAIN, Script, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic-data")]

Told = Callable[[str], dict]

RANKS = """
import random
from collections import Counter
import torch
from swarm_elastic._data import Batches, DatasetError

class Squares(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length, self.loaded = length, Counter()
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        assert 0 <= index < self.length
        self.loaded[index] += 1
        return torch.tensor(float(index)), index ** 2

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, length):
        self.length, self.opened = length, 0
    def __iter__(self):
        self.opened += 1
        return ((torch.tensor(float(index)), index ** 2) for index in range(self.length))

class Ranks:
    def __init__(self, make, world, **options):
        self.make, self.options, self.expected = make, {"global_batch": 8, "epochs": 2, **options}, {}
        self.names = (f"w{number}" for number in range(1_000))
        self.batches = {}
        self.used, self.steps, self.passes = Counter(), [], []
        self.join(world)
    def join(self, count):
        state = json.dumps(next(iter(self.batches.values())).state()) if self.batches else None
        for name in [next(self.names) for _ in range(count)]:
            told = self.expected[name] = []
            expect = lambda count, *, is_last, told=told: told.append((count, is_last))
            self.batches[name] = Batches(self.make(), expect=expect, **self.options)
            if state:
                self.batches[name].load(json.loads(state))
        self.begin()
    def begin(self):
        for name, each in self.batches.items():
            each.begin(list(self.batches), name)
    def leave(self, names):
        for name in names:
            self.batches.pop(name).close()
        self.begin()
    def train(self):
        # What each rank trains on in this step: its real samples, in rank order.
        samples, passes = [], []
        for name, each in self.batches.items():
            is_last, sizes = False, []
            while not is_last:
                x, y = next(each)
                count, is_last = self.expected[name][-1]
                assert count == each.count
                assert x.shape == y.shape and torch.equal(x.long() ** 2, y)
                samples += [(each.epoch, index) for index in x[:count].long().tolist()]
                sizes.append(count)
            passes.append(sizes)
        return samples, passes
    def step(self):
        samples, passes = self.train()
        words = [each.words() for each in self.batches.values()]
        for each in self.batches.values():
            each.agreed(words)
        self.used.update(samples)
        self.steps.append(samples)
        self.passes.append(passes)
    def fail(self, dead):
        self.train()
        [each.words() for each in self.batches.values()]
        self.leave(dead)
    @property
    def is_done(self):
        return next(iter(self.batches.values())).is_over
    def finish(self):
        while not self.is_done:
            self.step()
        for each in self.batches.values():
            assert next(each, "end") == "end"
        return self.used
def once(length, epochs=2):
    return Counter({(epoch, index): 1 for epoch in range(epochs) for index in range(length)})
def raised(what, *arguments, **options):
    try:
        what(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
KINDS = {
    "reproducible": lambda n, world, **options: Ranks(lambda: Squares(n), world, **options),
    "on_demand": lambda n, world, **options: Ranks(lambda: Squares(n), world, mode="on_demand", **options),
    "iterable": lambda n, world, **options: Ranks(lambda: Stream(n), world, **options),
}
"""


@pytest.fixture
def told(template: Template, tmp_path: Path) -> Told:
    """What a script has found out."""

    def finish(text: str) -> dict:
        code, out, err = template.finish(tmp_path, f"{RANKS}\n{text}\nprint(json.dumps(found))")
        assert code == 0, err
        return json.loads(out)

    return finish


def test_each_sample_is_trained_on_once_in_each_epoch_through_changes_and_deaths(told: Told) -> None:
    """Of each kind of dataset, with odd lengths, in micro-batches and without."""
    text = """
found = {}
for kind, make in KINDS.items():
    for seed in range(12):
        draw = random.Random(seed)
        n = draw.choice([1, 3, 50, 131])
        ranks = make(n, draw.randint(1, 4), micro_batch=draw.choice([0, 3]), prefetch=draw.randint(0, 3), threads=2)
        for _ in range(draw.randint(0, 8)):
            names = list(ranks.batches)
            for _ in range(draw.randint(0, 4)):
                if not ranks.is_done:
                    ranks.step()
            event = draw.choice(["join", "leave", "fail", "resize"])
            if event == "join":
                ranks.join(draw.randint(1, 2))
            elif event == "resize":
                batch = draw.randint(1, 12)
                [each.resize(batch) for each in ranks.batches.values()]
            elif event == "leave" or not ranks.is_done:
                getattr(ranks, event)(draw.sample(names, draw.randrange(len(names))))
        found[f"{kind} {seed}"] = ranks.finish() == once(n)
"""
    found = told(text)
    assert len(found) == 36
    assert [name for name, is_once in found.items() if not is_once] == []


def test_the_order_is_shuffled_anew_in_each_epoch_and_does_not_depend_on_the_world(told: Told) -> None:
    text = """
orders = []
for world, seed in ((1, 0), (3, 0), (1, 1)):
    ranks = KINDS["reproducible"](40, world, seed=seed)
    ranks.finish()
    orders.append(ranks.steps)
plain = KINDS["reproducible"](20, 2, shuffle=False, epochs=1)
plain.finish()
first, second = [[index for step in orders[0] for epoch, index in step if epoch == each] for each in (0, 1)]
found = {"same": orders[0] == orders[1], "seeds": orders[0] == orders[2], "epochs": first == second,
         "sorted": first == sorted(first), "plain": [index for step in plain.steps for _, index in step]}
"""
    found = told(text)
    assert found == {"same": True, "seeds": False, "epochs": False, "sorted": False, "plain": list(range(20))}


def test_what_a_rank_trains_on_in_a_step(told: Told) -> None:
    """Passes are of micro_batch at most and even; a rank without samples repeats a batch that counts for nothing."""
    text = """
big = KINDS["reproducible"](44, 2, global_batch=22, micro_batch=4, epochs=1)
big.finish()
small = {kind: KINDS[kind](2, 3, epochs=1) for kind in ("reproducible", "on_demand", "iterable")}
[each.finish() for each in small.values()]
found = {"big": big.passes, **{kind: each.passes for kind, each in small.items()}}
found["told"] = big.expected["w0"][:3]
idle = KINDS["iterable"](1, 2, epochs=1)
next(idle.batches["w0"])
x, y = next(idle.batches["w1"])
found["idle"] = [x.tolist(), idle.batches["w1"].count]
"""
    found = told(text)
    assert found.pop("big") == [[[4, 4, 3], [4, 4, 3]]] * 2
    assert found.pop("told") == [[4, False], [4, False], [3, True]]
    assert found.pop("idle") == [[0.0, 0.0], 0]
    # The length of a stream is not known when it is dealt out: the first rank has all of it.
    assert found == {"reproducible": [[[1], [1], [0]]], "on_demand": [[[1], [1], [0]]], "iterable": [[[2], [0], [0]]]}


def test_what_is_loaded_ahead_is_not_loaded_again(told: Told) -> None:
    """Not by a step that is done again, nor for a newcomer, by ranks that hold ranges; a stream is opened once."""
    text = """
made = []
def make():
    made.append(Squares(64))
    return made[-1]
demand = Ranks(make, 2, mode="on_demand", epochs=1)
demand.step()
demand.fail([])
demand.step()
demand.join(1)
demand.finish()
same = Squares(64)
fixed = Ranks(lambda: same, 2, epochs=1)
fixed.step()
fixed.fail([])
fixed.finish()
streams = []
def open_stream():
    streams.append(Stream(64))
    return streams[-1]
flow = Ranks(open_stream, 2, epochs=1)
flow.step()
flow.fail([])
flow.step()
flow.finish()
found = {"demand": max(max(each.loaded.values()) for each in made), "fixed": max(same.loaded.values()),
         "streams": [each.opened for each in streams]}
"""
    assert told(text) == {"demand": 1, "fixed": 1, "streams": [1, 1]}


def test_samples_come_before_they_are_asked_for(told: Told) -> None:
    """The dataset is let go on only while the script does not ask: it waits for the samples of two steps to come."""
    text = """
import threading
seen, both = [], threading.Event()
class Watched(Squares):
    def __getitem__(self, index):
        seen.append(index)
        if len(seen) == 12:
            both.set()
        return super().__getitem__(index)
ranks = Ranks(lambda: Watched(40), 1, global_batch=4, prefetch=2, shuffle=False)
next(ranks.batches["w0"])
found = {"came": both.wait(60), "seen": sorted(seen)}
"""
    assert told(text) == {"came": True, "seen": list(range(12))}


def test_helper_processes_load_samples_and_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    """They are no children of this process's memory: they hold none of its sockets."""
    text = """
import signal, socket
class Where(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return index, os.getpid(), [os.readlink(file) for file in files if os.path.lexists(file)]

class Broken(Where):
    def __getitem__(self, index):
        raise KeyError(f"no file {index}")

if __name__ == "__main__":
    loop = Batches(Where(), global_batch=8, epochs=1, expect=lambda *_, **__: None, processes=2, collate_fn=list)
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        link = os.readlink(f"/proc/self/fd/{mine.fileno()}")
        loop.begin(["a"], "a")
        batch = next(loop)
    broken = Batches(Broken(), global_batch=8, epochs=1, expect=lambda *_, **__: None, processes=1, shuffle=False)
    broken.begin(["a"], "a")
    print(json.dumps({"indices": sorted(each[0] for each in batch),
                      "is_leaked": any(link in each[2] for each in batch),
                      "is_here": os.getpid() in {pid for _, pid, _ in batch},
                      "error": raised(next, broken)}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = Script(tmp_path, RANKS + text, str(TRAIN), OMP_NUM_THREADS="1")
    found = json.loads(script.line())
    # Its output ends when the last process that could write to it has ended.
    assert script.finish()[0] == -9
    error = "DatasetError: dataset[0] failed: KeyError: 'no file 0'"
    assert found == {"indices": list(range(8)), "is_leaked": False, "is_here": False, "error": error}


def test_errors_name_the_sample_and_mistakes_the_setting(told: Told) -> None:
    text = """
class Broken(Squares):
    def __getitem__(self, index):
        return super().__getitem__(index) if index != 5 else {}["colour"]
class Together(Squares):
    def __getitems__(self, indices):
        raise OSError("disk")
class Ragged(Squares):
    def __getitem__(self, index):
        return torch.zeros(index)
class Cut(Stream):
    def __iter__(self):
        yield torch.tensor(1.0), 1
        raise OSError("connection lost")
def one(dataset, **options):
    batches = Batches(dataset, expect=lambda *_, **__: None, **{"global_batch": 8, "epochs": 1, **options})
    batches.begin(["a"], "a")
    return batches
import time
from swarm_elastic import _data
class Slow(Squares):
    def __getitem__(self, index):
        time.sleep(0.02)
        return super().__getitem__(index)
def waits():
    # Of a dataset that is slow, and of one that has all by the time at which it is asked.
    found = []
    for dataset in (Slow(8), Squares(8)):
        batches = one(dataset, threads=1, prefetch=0)
        early = batches.waits()
        batches._looked_s -= _data.WAITS_OVER_S - 0.05
        next(batches)
        time.sleep(0.05)
        found.append([early, batches.waits(), batches.waits()])
    return found
def train_twice():
    batches = one(Squares(8), global_batch=2)
    next(batches)
    next(batches)
found = {
    "map": raised(next, one(Broken(8), threads=1)),
    "together": raised(next, one(Together(3), shuffle=False)),
    "collate": [raised(next, one(Ragged(3), shuffle=False)).partition(": R")[0]],
    "stream": raised(next, one(Cut(8))),
    "empty": raised(next, one(Stream(0))),
    "no_index": raised(one, Stream(8), mode="reproducible"),
    "shuffled": raised(one, Stream(8), shuffle=True),
    "iterator": raised(one, iter([1])),
    "mode": raised(one, Squares(8), mode="any"),
    "threads": raised(one, Squares(8), threads=0),
    "batch": raised(one, Squares(8), global_batch=0),
    "step": raised(train_twice),
    "words": raised(one(Squares(8)).words),
    "nothing": raised(one, Squares(0)),
    "waits": waits(),
}
"""
    no_dataset = "is no dataset: it needs an index and a length, or to begin anew each time it is iterated"
    no_index = "ValueError: Stream has no index: it can be neither reproducible nor shuffled here; shuffle it itself"
    found = told(text)
    assert found == {
        "map": "DatasetError: dataset[5] failed: KeyError: 'colour'",
        "together": "DatasetError: dataset[0, 1, 2] failed: OSError: disk",
        "collate": ["DatasetError: samples 0, 1, 2 make no batch"],
        "stream": "DatasetError: sample 1 of epoch 0 failed: OSError: connection lost",
        "empty": "DatasetError: the dataset yields no samples: there is nothing to train on",
        "no_index": no_index,
        "shuffled": no_index,
        "iterator": f"TypeError: list_iterator {no_dataset}",
        "mode": "ValueError: mode is 'any'; it must be one of reproducible, on_demand",
        "threads": "ValueError: threads is 0; it must be 1 or more",
        "batch": "ValueError: global_batch is 0; it must be from 1 to 16777215",
        "step": "RuntimeError: the batch before this one was not followed by training.step(loss)",
        "words": "RuntimeError: training.step(loss) came before the last batch of the step was taken",
        "nothing": "DatasetError: the dataset yields no samples: there is nothing to train on",
        "waits": found["waits"],
    }
    (early, slow, again), (_, quick, _) = found["waits"]
    assert (early, again) == (None, None), "too soon to tell"
    assert 0.15 / 5.3 < slow < 0.2
    assert quick < 0.1 * slow


def test_each_call_goes_on_behind_the_epochs_of_the_one_before(tmp_path: Path, told: Told) -> None:
    """In another order, or over another dataset; a worker that comes later runs through those that are behind."""
    text = """
import swarm_elastic
def make():
    model = torch.nn.Linear(1, 1)
    return model, swarm_elastic.Elastic(model, torch.optim.SGD(model.parameters(), lr=1e-3), global_batch=8)
def train(most=1_000, **options):
    seen = []
    for x, y in training.batches(Squares(options.pop("length", 20)), **options):
        training.step(model(x[:, None]).mean().backward())
        seen.append([training.epoch, *x.int().tolist()])
        if len(seen) == most:
            break
    return seen
model, training = make()
first, second = train(), train()
longer = train(length=30, epochs=2, mode="on_demand")
training.full_state_dict()
broken = train(most=1)
early = raised(train)
torch.save(training.full_state_dict(), "SAVED")
os.environ["SWARM_RESUME_FROM"] = "SAVED"
model, training = make()
again = [train(), train(), train(length=30, epochs=2, mode="on_demand"), train()]
calls = [sum((each[1:] for each in call), []) for call in (first, second, longer, broken + again[3])]
found = {
    "same": first == second, "epochs": [first[0][0], second[0][0], longer[0][0], longer[-1][0], again[3][0][0]],
    "used": [[len(call), sorted(call) == sorted([*range(length)] * times)]
        for call, length, times in zip(calls, (20, 20, 30, 20), (1, 1, 2, 1))],
    "early": early, "past": again[:3], "steps": training.step_number,
}
"""
    found = told(text.replace("SAVED", str(tmp_path / "saved")))
    assert found.pop("early") == (
        "RuntimeError: batches() was called while epoch 4 of the batches before is not used up: go on with those to "
        "their end, or keep one iterator of all epochs; for data to evaluate on, take a DataLoader"
    )
    assert found == {
        "same": False,
        "epochs": [0, 1, 2, 4, 4],
        "used": [[20, True], [20, True], [60, True], [20, True]],
        "past": [[], [], []],
        "steps": 3 + 3 + 8 + 3,
    }


def test_batches_of_any_structure_go_to_the_device(told: Told) -> None:
    """The meta device stands for one: a tensor there has no data."""
    text = """
from typing import NamedTuple
class Pair(NamedTuple):
    a: object
    b: object
class Kept(dict):
    @property
    def x(self):
        return self["x"]
def collate(samples):
    return Kept(x=torch.zeros(2), pair=Pair(torch.zeros(1), "text"), many=[torch.zeros(1), (torch.zeros(1), 3)])
batches = Batches(Squares(4), global_batch=4, epochs=1, expect=lambda *_, **__: None, collate_fn=collate,
                  device=torch.device("meta"))
batches.begin(["a"], "a")
batch = next(batches)
found = {"x": batch.x.device.type, "pair": [batch["pair"].a.device.type, batch["pair"].b],
         "many": [batch["many"][0].device.type, batch["many"][1][0].device.type, batch["many"][1][1]]}
"""
    assert told(text) == {"x": "meta", "pair": ["meta", "text"], "many": ["meta", "meta", 3]}


@pytest.mark.parametrize(("lengths", "shorter"), [((9, 9), False), ((20, 9), True)])
def test_a_stream_that_is_longer_on_one_rank_is_told_of(
    template: Template, tmp_path: Path, lengths: tuple[int, int], shorter: bool
) -> None:
    text = f"""
lengths = iter({lengths})
ranks = Ranks(lambda: Stream(next(lengths)), 2, epochs=2)
print(ranks.finish() == once(9), flush=True)
"""
    code, out, err = template.finish(tmp_path, RANKS + text)
    warning = "has 9 samples on another rank and more on this one, and the rest is left out: have the dataset yield"
    assert (code, out, [f"epoch {epoch} {warning}" in err for epoch in (0, 1)]) == (0, "True\n", [shorter] * 2), err


MAIN = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.ones(4)
class Local(Data):
    def __init__(self):
        self.made = lambda: 1
def main(dataset):
    print("runs", flush=True)
    model = torch.nn.Linear(4, 2)
    training = swarm_elastic.Elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), global_batch=4)
    for x in training.batches(dataset, processes=1):
        training.step(model(x).mean().backward())
    print(training.step_number)
"""
GUARDED = "if __name__ == '__main__':\n    "
PUT = "put what the script does behind `if __name__ == '__main__':`"


@pytest.mark.parametrize(
    ("text", "out", "told"),
    [
        (GUARDED + "main(Data())", ["runs", "1"], []),
        (GUARDED + "main(Local())", ["runs"], ["DatasetError: batches(processes=1) gets the dataset", "use threads"]),
        ("main(Data())", ["runs"] * 2, ["RuntimeError: Elastic is made in", "DatasetError: a process of", PUT]),
    ],
)
def test_processes_load_samples_and_never_train(tmp_path: Path, text: str, out: list[str], told: list[str]) -> None:
    alone = {"SWARM_TASK_SOCKET": "", "OMP_NUM_THREADS": "1"}
    code, found, err = Script(tmp_path, MAIN + text, str(TRAIN), **alone).finish()
    assert (code, found.split(), [each in err for each in told]) == (int(bool(told)), out, [True] * len(told)), err

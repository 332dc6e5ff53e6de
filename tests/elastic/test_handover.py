"""What a checkpoint and a newcomer's document may hold of the numbers and objects of scripts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.job import Template
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic-handover")]

Told = Callable[[str], list[str]]

MAKE = """
import io
import numpy
import torch
from swarm_elastic._handover import plain
def make(parts=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + numpy.cos(numpy.pi * step / 100))),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, numpy.arange(2, 4)),
    ]
    schedule = torch.optim.lr_scheduler.ChainedScheduler(schedules, optimizer)
    training = swarm_elastic.Elastic(model, optimizer, global_batch=4, scheduler=schedule, parts=parts)
    return model, optimizer, training
def train(parts=None):
    model, optimizer, training = make(parts)
    for x, in training.batches(torch.utils.data.TensorDataset(torch.ones(12, 4))):
        training.step(model(x).mean().backward())
    return optimizer, training
class Part:
    def __init__(self, value):
        self.value = value
    def state_dict(self):
        return {"kept": [1, self.value]}
    def load_state_dict(self, state):
        self.value = state["kept"][1]
def saved_and_loaded(document):
    stream = io.BytesIO()
    torch.save(document, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)
"""


@pytest.fixture
def told(template: Template, tmp_path: Path) -> Told:
    """What a script has printed."""

    def finish(text: str) -> list[str]:
        alone = {"SWARM_TASK_SOCKET": "", "SWARM_CHECKPOINT_DIR": str(tmp_path)}
        code, out, err = template.finish(tmp_path, MAKE + text, **alone)
        assert code == 0, err
        return out.splitlines()

    return finish


def test_a_job_whose_schedule_makes_numbers_of_numpy_goes_on_from_its_checkpoint(told: Told) -> None:
    text = """
optimizer, training = train()
rate = optimizer.param_groups[0]["lr"]
print(isinstance(rate, numpy.float64))
training.checkpoint("all")
os.environ["SWARM_RESUME_FROM"] = os.path.join(os.environ["SWARM_CHECKPOINT_DIR"], "all")
_, optimizer, training = make()
print(training.step_number, optimizer.param_groups[0]["lr"] == rate)
"""
    assert told(text) == ["True", "3 True"]


def test_so_does_a_newcomer(told: Told) -> None:
    text = """
optimizer, training = train()
training.global_batch = numpy.int64(4)
small, _ = training._state.document()
found = saved_and_loaded({**small, "progress": training.state_dict()})
print(found["optimizer"]["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"], found["progress"]["global_batch"])
print(found["parts"]["scheduler"]["_schedulers"][1]["milestones"])
"""
    assert told(text) == ["True 4", "Counter({2: 1, 3: 1})"]


def test_only_numbers_are_made_into_those_of_python(told: Told) -> None:
    text = """
state, tensor, ones = torch.nn.BatchNorm1d(2).state_dict(), torch.tensor(2.0), numpy.ones(1)
found = plain({numpy.int64(1): (numpy.float32(0.5), [numpy.bool_(True)]), "0-d": numpy.array(3)})
print(found, [type(each).__name__ for each in (*found, found[1][0], found[1][1][0], found["0-d"])])
same = plain([tensor, ones, state])
print(same[0] is tensor, same[1] is ones, same[2]._metadata == state._metadata, list(same[2]) == list(state))
"""
    assert told(text) == [
        "{1: (0.5, [True]), '0-d': 3} ['int', 'str', 'float', 'bool', 'int']",
        "True True True True",
    ]


def test_what_the_passes_of_a_step_have_moved_is_put_back_before_it_is_done_again(told: Told) -> None:
    text = """
from swarm_elastic._handover import TrainingState
class Counts(torch.nn.Module):
    passes = []
    def forward(self, x):
        self.passes = [*self.passes, 1]
        return x
    def get_extra_state(self):
        return {"passes": self.passes}
    def set_extra_state(self, state):
        self.passes = state["passes"]
model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(), Counts())
state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), {})
def run():
    return model(torch.ones(3, 4)).tolist()
run()
state.begin_step()
first = run()
kept = state.keep()  # as where the sum of a step is lost
for _ in range(2):
    kept.restore()
    state.undo_step()
    print(model[0].num_batches_tracked.item(), len(model[2].passes), run() == first)
"""
    assert told(text) == ["1 1 True", "1 1 True"]


def test_the_first_checkpoint_names_what_nobody_could_read_again_and_is_not_written(told: Told) -> None:
    text = """
for value in (Part(1), numpy.ones(3), lambda: 1, numpy.float64(1)):
    _, training = train({"mine": Part(value)})
    try:
        training.checkpoint("all")
    except TypeError as error:
        print(error)
    print(os.path.exists(os.path.join(os.environ["SWARM_CHECKPOINT_DIR"], "all")))
"""
    remedy = "have state_dict() give numbers, text, tensors, and lists and dicts of them"
    problem = f"could be read neither from a checkpoint nor by a newcomer; {remedy}"
    kinds = ("__main__.Part", "numpy.ndarray", "builtins.function")
    refused = [line for kind in kinds for line in (f"mine['kept'][1], a {kind}, {problem}", "False")]
    assert told(text) == [*refused, "True"]


def test_trainings_of_one_process_keep_their_own_global_batch(told: Told) -> None:
    text = """
def steps(batch):
    model = torch.nn.Linear(4, 2)
    training = swarm_elastic.Elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), global_batch=batch)
    for x, in training.batches(torch.utils.data.TensorDataset(torch.ones(12, 4))):
        training.step(model(x).mean().backward())
    return training.step_number
print(steps(6), steps(2))
"""
    assert told(text) == ["2 6"]


def test_a_checkpoint_may_be_named_by_its_path_and_a_bad_name_is_refused_on_all_ranks(told: Told) -> None:
    text = """
import pathlib
folder = os.environ["SWARM_CHECKPOINT_DIR"]
_, training = train()
training.checkpoint(os.path.join(folder, "a"))
training.checkpoint(pathlib.Path("b"))
print([name in os.listdir(folder) for name in "ab"])
type(training).is_first = False
for name in ("", "c/d", ".c", "c\\n", "/tmp/c", "c" * 201, None):
    try:
        training.checkpoint(name)
    except (TypeError, ValueError) as error:
        print(str(error).partition(";")[0])
os.environ["SWARM_CHECKPOINT_DIR"] = ""
print(training.checkpoint("/tmp/c"))
"""
    shown = ["''", "'c/d'", "'.c'", r"'c\n'", "'/tmp/c'", "'" + "c" * 59 + "..."]
    assert told(text) == [
        "[True, True]",
        *[f"the name of a checkpoint is {name}" for name in shown],
        "the name of a checkpoint must be text, not NoneType",
        "False",
    ]


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_and_does_not_end_training(told: Told) -> None:
    text = """
import resource
_, training = train()
folder = os.environ["SWARM_CHECKPOINT_DIR"]
before = sorted(os.listdir(folder))
os.environ["SWARM_CHECKPOINT_DIR"] = "/nowhere"
print(training.checkpoint("a"), swarm_elastic.last_result.problem.partition(": ")[0])
os.environ["SWARM_CHECKPOINT_DIR"] = folder
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
try:
    training.checkpoint("a", wait=True)
except swarm_elastic.CheckpointRefused as refused:
    print(refused.error, refused.problem.partition(": ")[2], sorted(os.listdir(folder)) == before)
"""
    assert told(text) == [
        "False /nowhere/a could not be written",
        "unwritten [Errno 27] File too large True",
    ]


def test_a_checkpoint_that_is_damaged_or_of_another_training_is_refused(told: Told) -> None:
    text = """
_, training = train()
training.checkpoint("all")
path = os.path.join(os.environ["SWARM_CHECKPOINT_DIR"], "all")
os.environ["SWARM_RESUME_FROM"] = path
def other(width=4, kind=torch.optim.SGD, **options):
    model = torch.nn.Linear(width, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    options = {name: make(optimizer) for name, make in options.items()}
    try:
        swarm_elastic.Elastic(model, optimizer, global_batch=4, **options)
    except ValueError as error:
        print(str(error).partition("all, ")[2].partition(";")[0])
other(width=5)
other(kind=torch.optim.Adam)
other()
other(scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer))
other(parts=lambda optimizer: {"x": optimizer})
whole = open(path, "rb").read()
for data in (whole[:600], b"hello", b""):
    open(path, "wb").write(data)
    other()
torch.save({"format": "swarm_elastic 1", "model": 3}, path)
other()
"""
    other = "is of another training:"
    lines = told(text)
    damaged = "is damaged, or was not written by Elastic.checkpoint: "
    assert lines[:5] == [
        f"{other} weight is torch.float32 (2, 4) in it, and torch.float32 (2, 5) in the script",
        f"{other} optimizer is SGD of [2] parameters in it, and Adam of [2] parameters in the script",
        f"{other} scheduler is ChainedScheduler in it, and not there in the script",
        f"{other} scheduler is ChainedScheduler in it, and ConstantLR in the script",
        f"{other} parts['x'] is not there in it, and there in the script",
    ]
    assert [line.startswith(damaged) for line in lines[5:]] == [True, True, True, False]

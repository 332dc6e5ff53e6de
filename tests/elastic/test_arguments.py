"""What scripts give: what cannot be meant is refused where it comes in, by its name, its value and a remedy."""

import json
from pathlib import Path

import pytest

from swarm_elastic._arguments import number, whole
from tests.elastic.job import Template
from tests.elastic.testing import TRAIN, Script, ScriptedAgent, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic-arguments")]

SCRIPT = """
import numpy
import torch
from torch.optim import SGD, Adam, LBFGS, lr_scheduler
from swarm_elastic import DistributedDataParallel, Elastic
from swarm_elastic._buckets import Gradients
data = torch.utils.data.TensorDataset(torch.ones(12, 4))
def by_environment(size):
    os.environ["WORLD_SIZE"] = size
    try:
        make()
    finally:
        del os.environ["WORLD_SIZE"]
def parts_of(optimizer=SGD):
    model = torch.nn.Linear(4, 2)
    return model, optimizer(model.parameters(), lr=0.1)
def make(optimizer=SGD, schedule=None, kind=Elastic, **options):
    model, optimizer = parts_of(optimizer)
    if schedule:
        options["scheduler"] = schedule(optimizer)
    return kind(model, optimizer, **{"global_batch": 4, **options})
def batches(dataset=data, **options):
    return make().batches(dataset, **options)
def other_parameters():
    return Elastic(parts_of()[0], parts_of()[1], global_batch=4)
def other_optimizer(*_):
    return lr_scheduler.ConstantLR(parts_of()[1])
def expect(samples):
    make().expect(samples)
def step(loss):
    training = make()
    training._parameters[0].sum().backward()
    training.step(loss)
def backward():
    model, optimizer = parts_of()
    training = Elastic(model, optimizer, global_batch=4)
    model(torch.ones(4, 4)).mean().backward()
    return training, optimizer
class Two:
    rank, size = 0, 2
def sparse():
    layers = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True))
    gradients = Gradients(dict(layers.named_parameters()))
    gradients.attach(Two())
    layers(torch.tensor([1])).sum().backward()
def update_beside():
    backward()[1].step()
def update_again():
    training, optimizer = backward()
    training.step()
    optimizer.step()
found = {}
for call in json.loads(sys.stdin.read()):
    try:
        found[call] = type(eval(call)).__name__
    except Exception as error:
        found[call] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
REFUSED = {
    **{
        f"make(global_batch={value})": f"TypeError: global_batch is {value}; it must be a whole number, an int"
        for value in ("None", "'4'", "4.5", "True")
    },
    "make(global_batch=1 << 25)": "ValueError: global_batch is 33554432; it must be from 1 to 16777215",
    "make(micro_batch=-1)": "ValueError: micro_batch is -1; it must be 0 or more",
    "make(start_step=None)": "TypeError: start_step is None; it must be a whole number, an int",
    "make(clip_norm=0)": "ValueError: clip_norm is 0; it must be above 0, or left out",
    "make(clip_norm=float('nan'))": "ValueError: clip_norm is nan; it must be above 0, or left out",
    "make(clip_norm='1')": "TypeError: clip_norm must be a number, not str",
    "make(timeout_s=5)": "ValueError: timeout_s is 5; it must be 60 seconds or more, or math.inf for no limit",
    "make(timeout_s=float('nan'))": "ValueError: timeout_s is nan; it must be a number of seconds",
    "make(timeout_s='1h')": "TypeError: timeout_s must be a number, not str",
    "make(lr_rule=[])": "ValueError: lr_rule must be one of fixed, linear, sqrt, not []",
    "make(parts=3)": "TypeError: parts is 3; it must be a dict of objects by name",
    "make(parts={'scaler': make()})": "ValueError: parts has the name 'scaler'; it must be text, and none of "
    "scheduler, scaler, noise",
    "make(parts={'x': 1})": "TypeError: parts['x'] is of type int, which has no state_dict(); give what has both",
    "make(scaler=3)": "TypeError: scaler is of type int, which has no step(); give a torch.amp.GradScaler",
    "Elastic(*reversed(parts_of()), global_batch=4)": "TypeError: model is of type SGD, which has no "
    "named_parameters(); give a torch.nn.Module",
    "make(LBFGS)": "ValueError: optimizer is of type LBFGS, whose step() needs closure; take one whose step needs "
    "no closure",
    "make(schedule=lr_scheduler.ReduceLROnPlateau)": "ValueError: scheduler is of type ReduceLROnPlateau, whose "
    "step() needs metrics; call its step by yourself, with the same on all ranks, and name it in parts",
    "make(schedule=other_optimizer)": "ValueError: scheduler is of another optimizer; make it of the one that is given",
    "other_parameters()": "ValueError: optimizer has a parameter of shape (2, 4) that is none of the model's; put all "
    "that is trained into one module, and make the optimizer of that",
    "batches(torch.utils.data.DataLoader(data))": "TypeError: dataset is of type DataLoader, whose batches would count "
    "as samples; give its dataset, a collate_fn, threads or processes to batches(), and the batch size to global_batch",
    **{
        f"batches({name}={value})": f"TypeError: {name} is {value}; it must be a whole number, an int"
        for name, value in {"seed": "None", "epochs": "1.5", "threads": "'2'", "processes": "True"}.items()
    },
    "batches(epochs=-1)": "ValueError: epochs is -1; it must be 0 or more",
    "batches(shuffle='no')": "TypeError: shuffle is 'no'; it must be True, False or left out",
    "batches(collate_fn=3)": "TypeError: collate_fn is 3; it must be a function of a list, or left out",
    "expect(1 << 24)": "ValueError: samples is 16777216; it must be from 0 to 16777215",
    "expect(-1)": "ValueError: samples is -1; it must be from 0 to 16777215",
    "expect(None)": "TypeError: samples is None; it must be a whole number, an int",
    "make().step()": "RuntimeError: step() came without a backward pass; call it behind loss.backward(), or expect(0) "
    "before it",
    "update_beside()": "RuntimeError: optimizer.step() came with gradients that are not summed over all ranks; leave "
    "it out, as training.step(loss) updates the weights",
    "sparse()": "TypeError: the gradient of 0.weight is sparse and cannot be summed; use sparse=False in its layer",
    "by_environment('two')": "ValueError: WORLD_SIZE is 'two'; set it to the number of ranks, as torchrun does, or not "
    "at all",
    "swarm_elastic.checkpoint('a', wait=True, timeout_s='1')": "TypeError: timeout_s must be a number, not str",
    "swarm_elastic.flush(float('nan'))": "ValueError: timeout_s is nan; it must be a number of seconds",
    "step('0.5')": "TypeError: loss must be a number, not str",
    "step(torch.ones(3))": "TypeError: loss must be a number, not Tensor of shape (3,); give its mean or sum",
}
TAKEN = {
    "make(global_batch=numpy.int64(4), clip_norm=numpy.float32(1)).global_batch": "int",
    "make(Adam, schedule=lr_scheduler.ConstantLR)": "Elastic",
    "make(schedule=lr_scheduler.ReduceLROnPlateau, kind=DistributedDataParallel)": "DistributedDataParallel",
    "batches(epochs=numpy.int64(0), seed=-1, shuffle=False)": "Batches",
    "expect(numpy.int64(4))": "NoneType",
    "step(numpy.float64(0.5))": "NoneType",
    "swarm_elastic.flush(10**400)": "bool",
    "update_again()": "NoneType",  # without gradients it changes nothing
    "step(torch.ones(1, requires_grad=True))": "NoneType",
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    script = Script(tmp_path_factory.mktemp("arguments"), SCRIPT, str(TRAIN), SWARM_TASK_SOCKET="", OMP_NUM_THREADS="1")
    out, err = script.process.communicate(json.dumps([*REFUSED, *TAKEN]), timeout=60)
    assert script.process.returncode == 0, err
    outcome: dict[str, str] = json.loads(out)
    return outcome


@pytest.mark.parametrize("call", [*REFUSED, *TAKEN])
def test_an_argument_is_taken_or_refused_where_it_comes_in(outcome: dict[str, str], call: str) -> None:
    assert outcome[call] == {**REFUSED, **TAKEN}[call]


def test_numbers_may_be_of_any_size() -> None:
    huge = 10**5000
    assert [number("loss", each) for each in (huge, -huge, 7, 2.5)] == [float("inf"), -float("inf"), 7, 2.5]
    with pytest.raises(ValueError, match="samples is a int; it must be from 0 to 9"):
        whole("samples", huge, 0, 9)


def test_no_number_ends_the_thread_that_reports(tmp_path: Path) -> None:
    text = """
class Index:
    def __index__(self):
        return 4
print(swarm_elastic.global_batch(Index()), flush=True)
swarm_elastic.report(loss=10**5000)
sys.stdin.readline()
from swarm_elastic._reports import _reporter
_reporter().put({"loss": Index()})
while _reporter()._queue:
    time.sleep(0.01)
swarm_elastic.report(loss=1)
"""
    with ScriptedAgent(tmp_path / "s", lambda _: {"ok": True, "ignored": []}) as agent:
        script = Script(tmp_path, text)
        assert agent.requests.get(timeout=60)["loss"] == float("inf")
        script.go_on()
        code, out, err = script.finish()
        assert (code, out, agent.requests.get_nowait()["loss"]) == (0, "4\n", 1), err
    assert "not reported: TypeError" in err


def test_a_global_batch_beyond_what_a_step_may_have_is_cut_and_told_of_once(tmp_path: Path) -> None:
    text = """
from swarm_elastic._reports import batch_up_to
print([batch_up_to(100, 8) for _ in range(3)])
"""
    code, out, err = Script(tmp_path, text, SWARM_GLOBAL_BATCH="1000").finish()
    assert (code, out) == (0, "[100, 100, 100]\n")
    assert err.count("the swarm chose a global batch of 1000; 100 is trained with: submit with --batch up to that") == 1


def test_passes_have_no_more_samples_than_fit_into_the_memory_of_the_gpus_of_the_rank(
    template: Template, tmp_path: Path
) -> None:
    text = """
import torch, swarm_elastic
from swarm_elastic._ddp import BackwardElastic
def most(kind, **options):
    model = torch.nn.Linear(2, 1)
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), global_batch=32, **options).micro_batch
print([most(swarm_elastic.Elastic, micro_batch=each) for each in (0, 4, 16)], most(BackwardElastic))
"""
    for most, told in (("8", "[8, 4, 8] 0\n"), ("", "[0, 4, 16] 0\n")):
        folder = tmp_path / f"at most {most}"
        folder.mkdir()
        assert template.finish(folder, text, SWARM_LOCAL_BATCH_MOST=most)[:2] == (0, told)

"""Replicas that part: who differs is named with what, and nobody trains on in silence; what may differ is let be."""

import json
from collections.abc import Callable

import pytest

from tests.elastic.job import Job, Template, elastic_job, until
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic-replicas")]

SCRIPT = """
import json, os, time
from pathlib import Path
import torch
import swarm_elastic
from swarm_elastic import _elastic

_elastic.COMPARED_STEPS = 5
does, worker = os.environ["DOES"], os.environ.get("SWARM_WORKER")
class Mean:
    value = 0.0
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
)
model.register_buffer("given", torch.ones(3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
mean, average = Mean(), torch.optim.swa_utils.AveragedModel(model[1])
x = torch.randn(72, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
parts = {"mean": mean, "average": average}
training = swarm_elastic.Elastic(model, optimizer, global_batch=12, parts=parts, clip_norm=1.0)
first = True
for inputs, targets in training.batches(data, epochs=int(os.environ.get("EPOCHS", "8"))):
    if does == "newcomer" and worker == "b" and first:
        optimizer.param_groups[0]["lr"] = 0.5
    first = False
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    training.step(loss)
    average.update_parameters(model[1])
    if does == "average" and worker == "b" and training.step_number == 12:
        average.module.bias.data[0] += 1.0
    mean.value = loss.item() if does == "part" else training.loss
    at = training.step_number
    if worker == "b" and at == 12:
        with torch.no_grad():
            if does == "rate":
                optimizer.param_groups[0]["lr"] *= 0.5
            elif does == "weight":
                model[3].weight[0, 2] += 1e-3
            elif does == "rounding":
                model[3].weight.mul_(1 + 3e-7)
            elif does == "moments":
                optimizer.state[model[0].bias]["exp_avg"].zero_()
            elif does == "buffer":
                model.given[1] = 2.0
    print(json.dumps({"step": at, "version": training.version}), flush=True)
    while at == 8 and not Path("go").exists():
        time.sleep(0.01)
    time.sleep(float(os.environ.get("PAUSE_S", "0.005")))
print(json.dumps({"end": training.step_number}), flush=True)
"""


@pytest.fixture
def make_job(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Callable:
    return lambda **env: elastic_job(tmp_path_factory.mktemp("job"), template, SCRIPT, **env)


PARTED = {
    "rate": "parted before step 13: worker b differs from worker a in parameter group 0 (lr 0.005, not 0.01)",
    "weight": "parted before step 16: worker b differs from worker a in weight 3.weight",
    "moments": "parted before step 16: worker b differs from worker a in weight 0.bias, optimizer state of 0.bias",
    "average": "parted before step 16: worker b differs from worker a in parts['average']",
    "buffer": "parted before step 16: worker b differs from worker a in buffer given",
}


@pytest.mark.parametrize("does", PARTED)
def test_of_three_the_one_that_differs_ends_and_the_others_go_on(does: str, make_job: Callable) -> None:
    with make_job(DOES=does) as job:
        (job.folder / "go").touch()
        job.start("a", "b", "c")
        job.publish("a", "b", "c")
        assert job["b"].ended() == 1
        assert f"RanksDiffer: replicas have {PARTED[does]}" in job["b"].err.read_text()
        assert (job.standings["b"].state, PARTED[does] in job.standings["b"].problem) == ("refused", True)
        until(lambda: PARTED[does] in job.standings["a"].problem, job.problems)
        job.publish("a", "c", lost=("b",))
        assert [job[name].ended() for name in "ac"] == [0, 0]
        assert job["a"].lines[-1] == {"end": 48}


@pytest.mark.parametrize("does", ["rate", "part"])
def test_of_two_nobody_knows_who_is_right_and_both_end(does: str, make_job: Callable) -> None:
    with make_job(DOES=does) as job:
        (job.folder / "go").touch()
        job.start("a", "b")
        job.publish("a", "b")
        assert [job[name].ended() for name in "ab"] == [1, 1]
        for name in "ab":
            what = PARTED["rate"] if does == "rate" else "worker b differs from worker a in parts['mean']"
            assert what in job[name].err.read_text()
            assert "for epoch in training.epochs(n)" in job[name].err.read_text()


def test_what_parts_in_the_last_step_is_found_at_the_end(make_job: Callable) -> None:
    with make_job(DOES="weight", EPOCHS="2") as job:
        (job.folder / "go").touch()
        job.start("a", "b")
        job.publish("a", "b")
        assert [job[name].ended() for name in "ab"] == [1, 1]
        assert "parted before step 13: worker b differs from worker a in weight" in job["a"].err.read_text()


def test_a_newcomer_that_differs_in_its_first_step_is_the_one_that_is_wrong(make_job: Callable) -> None:
    """Of two; the other one goes on."""
    with make_job(DOES="newcomer") as job:
        job.start("a")
        job.publish("a")
        until(lambda: job["a"].step == 8, job.problems)
        job.start("b")
        job.publish("a", "b")
        (job.folder / "go").touch()
        assert job["b"].ended() == 1
        told = "worker b differs from worker a in parameter group 0 (lr 0.5, not 0.01)"
        assert told in job["b"].err.read_text()
        until(lambda: told in job.standings["a"].problem, job.problems)
        job.publish("a", lost=("b",))
        assert job["a"].ended() == 0
        assert job["a"].lines[-1] == {"end": 48}


@pytest.mark.parametrize("does", ["nothing", "rounding"])
def test_what_is_of_a_rank_and_what_differs_by_rounding_is_let_be(does: str, make_job: Callable) -> None:
    """Running means of batch norm, also in an average of the model; sums on other hardware."""
    with make_job(DOES=does) as job:
        (job.folder / "go").touch()
        job.start("a", "b")
        job.publish("a", "b")
        assert [job[name].ended() for name in "ab"] == [0, 0], job.problems()
        assert ("differs by rounding between ranks" in job["a"].err.read_text()) == (does == "rounding")


def ended(job: Job) -> list[int]:
    return [job[name].ended() for name in job.workers]


PER_EPOCH = """
import json, os, time
from pathlib import Path
import torch
import swarm_elastic
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
data = [(torch.randn(4), torch.randn(1)) for _ in range(64)]
form, does = os.environ["FORM"], os.environ.get("DOES", "")
parts = {"schedule": schedule} if form != "bare" else {}
training = swarm_elastic.Elastic(model, optimizer, global_batch=8, parts=parts)
for epoch in range(6) if form == "range" else training.epochs(6):
    for x, y in training.batches(data):
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        training.step(loss)
        while epoch == 3 and training._seat.group.size + training._seat.offer()[0] < 2 and not Path("go").exists():
            time.sleep(0.01)
    if does == "weights":
        with torch.no_grad():
            model.weight.clamp_(-0.3, 0.3)
    schedule.step()
    held = {"rate": optimizer.param_groups[0]["lr"], "weights": model.weight.tolist()}
    print(json.dumps({"epoch": epoch, **held}), flush=True)
"""


@pytest.mark.parametrize("form", ["range", "epochs", "bare", "weights"])
def test_what_a_script_does_once_an_epoch_is_right_in_a_newcomer_or_refused(
    form: str, tmp_path_factory: pytest.TempPathFactory, template: Template
) -> None:
    """In `range` it does it for epochs that are over, too, which is undone or, of weights, refused.

    In `bare` its schedule is handed to nobody.
    """
    env = {"FORM": "range", "DOES": "weights"} if form == "weights" else {"FORM": form}
    with elastic_job(tmp_path_factory.mktemp("job"), template, PER_EPOCH, **env) as job:
        job.start("a")
        job.publish("a")
        until(lambda: any(line["epoch"] == 2 for line in job["a"].lines), job.problems)
        job.start("b")
        job.publish("a", "b")
        if form == "weights":
            assert job["b"].ended() == 1
            (job.folder / "go").touch()
            assert (
                "RuntimeError: the script has changed weight weight on its way to the present"
                in job["b"].err.read_text()
            )
            job.publish("a", lost=("b",))
            assert job["a"].ended() == 0
        elif form == "bare":
            assert ended(job) == [1, 1]
            told = "worker b differs from worker a in parameter group 0 (lr "
            assert told in job["a"].err.read_text(), job.problems()
        else:
            assert ended(job) == [0, 0], job.problems()
            assert job["a"].lines[-1] == job["b"].lines[-1]
            assert job["a"].lines[-1]["rate"] == pytest.approx(0.1 * 0.5**3)
            first = job["b"].lines[0]["epoch"]
            assert first == (0 if form == "range" else 3), json.dumps(job["b"].lines)

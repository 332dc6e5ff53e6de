"""Loops of other libraries whose workers join, leave and die: real processes, and the agent's own socket."""

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.elastic.job import Job, Template, elastic_job, until
from tests.elastic.test_outer_changes import Crowd
from tests.elastic.testing import INTEGRATIONS, needs

pytestmark = [*needs(INTEGRATIONS), pytest.mark.xdist_group("elastic-trainers")]

SCRIPT = Path(__file__).with_name("trainers.py").read_text()
SAMPLES, EPOCHS, STEPS, SAVED = 480, 6, 180, 50
ALONE = {"SWARM_TASK_SOCKET": "", "SWARM_WORKER": ""}


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    template = Template(INTEGRATIONS, "transformers.trainer, accelerate, lightning.pytorch")
    yield template
    template.close()


def lines(job: Job, kind: str) -> list[dict]:
    return [line for worker in job.workers.values() for line in worker.lines if kind in line]


def used(job: Job) -> Counter[tuple[int, int]]:
    """Epoch and index of all that the weights were trained on: of each round by the plan that did it last."""
    version_of: dict[int, int] = {}
    for line in lines(job, "done"):
        version_of[line["round"]] = max(line["version"], version_of.get(line["round"], 0))
    offered = [line for line in lines(job, "offered") if version_of.get(line["round"]) == line["version"]]
    return Counter((line["epoch"], index) for line in offered for index in line["offered"])


def told(job: Job, what: str) -> dict[int, set[float]]:
    """What all workers said of each step."""
    found: dict[int, set[float]] = {}
    for line in lines(job, "done"):
        found.setdefault(line["step"], set()).add(line[what])
    return found


@pytest.fixture(params=["hugging_face", "lightning", "accelerate"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def job_of(kind: str, folder: Path, template: Template, **env: str) -> AbstractContextManager[Job]:
    own = {"KIND": kind, "HOME": str(folder), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return elastic_job(folder, template, SCRIPT, **own, **env)


def check(job: Job, ends: int, lost: int = 0) -> None:
    """All is as if one process had trained: samples, steps, rates, and the same loss on all ranks."""
    assert [line["end"] for line in lines(job, "end")] == [STEPS] * ends, job.problems()
    assert used(job) == Counter({(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)})
    loss, rate = told(job, "loss"), told(job, "rate")
    assert sorted(loss) == list(range(1, STEPS + 1))
    assert {step: found for step, found in loss.items() if len(found) > 1} == {}
    wrong = {step for step, found in rate.items() if any(each != pytest.approx(0.05 * 0.995**step) for each in found)}
    assert wrong <= {lost}
    assert max(loss[STEPS]) < max(loss[1]) / 10


def test_a_loop_of_another_library_trains_on_whatever_its_members_do(
    kind: str, tmp_path: Path, template: Template
) -> None:
    with job_of(kind, tmp_path, template) as job:
        job.start("a", "b", "c", "d")
        job.switch("a")
        job.switch("a", "b")
        job["b"].signal(signal.SIGKILL)
        job.switch("a", "c", lost=("b",))
        job.switch("c", "d")
        (job.folder / "fast").touch()
        codes = {name: job[name].ended() for name in job.workers}
        assert codes == {"a": 0, "b": -signal.SIGKILL, "c": 0, "d": 0}
        check(job, 2)


def test_a_rank_is_given_the_step_that_it_has_lost_and_the_others_have_done(
    kind: str, tmp_path: Path, template: Template
) -> None:
    """Its library has updated, scheduled and counted nothing twice, and goes on as if it had done the step."""
    lost = 20
    with job_of(kind, tmp_path, template) as job:
        job.start("a", "b")
        job.start("c", LOSES=str(lost))
        job.publish("a", "b", "c")
        until(lambda: "lost a member" in job.standings["c"].problem, job.problems)
        (job.folder / "fast").touch()
        job.publish("a", "b", "c")
        assert [job[name].ended() for name in job.workers] == [0, 0, 0]
        check(job, 3, lost)  # until the library asks for the next batch its schedule has gone a step too far
        done = [line["step"] for line in job["c"].lines if "done" in line]
        assert set(range(1, STEPS + 1)).difference(done) == ({lost} if kind == "accelerate" else set())


APART = """
import json, os, time
import torch
import swarm_elastic

EPOCHS, BATCH = 3, 8
worker = int(os.environ["SWARM_WORKER"])
torch.manual_seed(worker)
points = [{"x": torch.randn(4), "labels": torch.ones(1) * index % 3} for index in range(160)]

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        time.sleep(0.01)
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}

def hugging_face(model, optimizer, loader):
    from transformers import PrinterCallback, Trainer, TrainingArguments
    arguments = TrainingArguments("out", num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, report_to=[],
                                  save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no")
    trainer = Trainer(model, arguments, train_dataset=points, optimizers=(optimizer, None))
    trainer.remove_callback(PrinterCallback)
    with swarm_elastic.Outer(model, optimizer, every=5) as outer:
        trainer.train()
    return outer

def lightning(model, optimizer, loader):
    import lightning.pytorch as pl
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = model
        def training_step(self, batch, _):
            return self.line(**batch)["loss"]
        def configure_optimizers(self):
            return optimizer
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    with swarm_elastic.Outer(model, optimizer, every=5) as outer:
        trainer.fit(Module(), loader)
    return outer

def accelerate(model, optimizer, loader):
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    prepared, stepped, batches = accelerator.prepare(model, optimizer, loader)
    with swarm_elastic.Outer(model, optimizer, every=5) as outer:
        for _ in range(EPOCHS):
            for batch in batches:
                loss = prepared(**batch)["loss"]
                accelerator.backward(loss)
                stepped.step()
                stepped.zero_grad()
    return outer

model = Line()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
outer = globals()[os.environ["KIND"]](model, optimizer, torch.utils.data.DataLoader(points, batch_size=BATCH))
told = {"steps": outer.step_number, "rounds": outer.status["shards"][0]["rounds"]}
print(json.dumps({"end": model.layer.weight.flatten().tolist(), **told}), flush=True)
"""


def test_a_loop_of_another_library_trains_apart_with_one_line_more(
    kind: str, tmp_path: Path, template: Template
) -> None:
    crowd = Crowd(
        tmp_path, template, script=APART, KIND=kind, HOME=str(tmp_path), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""
    )
    with contextlib.closing(crowd):
        crowd.start("1", "2")
        crowd.publish("1", "2")
        assert [crowd.workers[name].ended() for name in "12"] == [0, 0], crowd.problems()
        first, second = (crowd.workers[name].lines[-1] for name in "12")
    assert first["end"] == second["end"]
    assert first["steps"] == second["steps"] == 60
    assert first["rounds"] > 3


def test_by_the_environment_of_torchrun_the_library_makes_no_group_of_its_own(
    kind: str, tmp_path: Path, template: Template
) -> None:
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(Job.free_port()), "WORLD_SIZE": "2"}
    with job_of(kind, tmp_path, template, **ALONE, **world) as job:
        (job.folder / "fast").touch()
        job.start("a", RANK="0", LOCAL_RANK="0")
        job.start("b", RANK="1", LOCAL_RANK="1")
        assert (job["a"].ended(), job["b"].ended()) == (0, 0)
        check(job, 2)


def test_a_whole_job_goes_on_from_its_checkpoint(kind: str, tmp_path: Path, template: Template) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    with job_of(kind, tmp_path, template, **ALONE, SWARM_CHECKPOINT_DIR=str(saved)) as job:
        (job.folder / "fast").touch()
        job.start("a")
        assert job["a"].ended() == 0
        check(job, 1)
        job.start("b", SWARM_RESUME_FROM=str(saved / f"step-{SAVED}.pt"))
        assert job["b"].ended() == 0
        first, second = ([line for line in job[name].lines if "done" in line] for name in ("a", "b"))
        assert [line["step"] for line in second] == list(range(SAVED + 1, STEPS + 1))
        assert second == first[SAVED:]

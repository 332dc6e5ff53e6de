"""The callbacks for Hugging Face's and Lightning's trainers, in these trainers, against a scripted agent."""

from pathlib import Path

from tests.elastic.testing import INTEGRATIONS, Script, ScriptedAgent, needs

TAKEN = {"v": 1, "type": "report", "ok": True, "ignored": []}

pytestmark = needs(INTEGRATIONS)

HUGGING_FACE = """
import os
import torch
from transformers import Trainer, TrainingArguments
from swarm_elastic.huggingface import ReportCallback

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x, labels):
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}

data = [{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])} for n in range(32)]
arguments = TrainingArguments(
    os.environ["HOME"] + "/out", num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    logging_steps=2, learning_rate=1e-4, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
)
Trainer(model=Line(), args=arguments, train_dataset=data, callbacks=[ReportCallback]).train()
"""

LIGHTNING = """
import torch
import lightning.pytorch as pl
from swarm_elastic.lightning import ReportCallback

class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        x, y = batch
        return ((self.layer(x) - y) ** 2).mean() * 0.0 + 3.0
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

x = torch.arange(32.0).reshape(-1, 1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=4)
trainer = pl.Trainer(
    max_epochs=2, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[ReportCallback()],
)
trainer.fit(Line(), data)
"""


def reported(folder: Path, text: str) -> dict:
    """The newest of each figure that the agent was told by the end of training."""
    with ScriptedAgent(folder / "s", lambda _: TAKEN) as agent:
        script = Script(
            folder, text, python=str(INTEGRATIONS), HOME=str(folder), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""
        )
        code, _, err = script.finish()
        assert code == 0, err
        assert "not reported" not in err
        told: dict = {}
        while not agent.requests.empty():
            told |= agent.requests.get_nowait()
    return told


def test_the_trainer_of_hugging_face_reports(tmp_path: Path) -> None:
    """32 samples, batches of 4, two for each step, two epochs: eight steps."""
    told = reported(tmp_path, HUGGING_FACE)
    loss = told.pop("loss")
    assert {name: told[name] for name in ("step", "samples", "epoch", "total_steps", "rank", "parameter_bytes")} == {
        "step": 8,
        "samples": 64,
        "epoch": 2.0,
        "total_steps": 8,
        "rank": 0,
        "parameter_bytes": 8,
    }
    assert loss > 0


def test_the_trainer_of_lightning_reports(tmp_path: Path) -> None:
    """The same; the loss is what `training_step` returned, not its part of the accumulated batches."""
    told = reported(tmp_path, LIGHTNING)
    assert {name: told[name] for name in ("step", "samples", "epoch", "total_steps", "loss", "parameter_bytes")} == {
        "step": 8,
        "samples": 64,
        "epoch": 2.0,
        "total_steps": 8,
        "loss": 3.0,
        "parameter_bytes": 8,
    }

"""The scripts of the elastic jobs of other libraries; KIND says which, the log what was done."""

import json
import os
import time
from pathlib import Path

import torch

from swarm_elastic import _buckets
from swarm_elastic._group import GroupLost

SAMPLES, BATCH, PASSES, EPOCHS = 480, 8, 2, 6
SAVED = 50  # the step of the checkpoint
FAST = Path("fast")
"""Is there when the job needs not wait for changes of its members any more."""
CHECKPOINTS = os.environ.get("SWARM_CHECKPOINT_DIR", "")


def tell(**line):
    print(json.dumps(line), flush=True)


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.sin(torch.arange(4) * index)
        return {"index": index, "x": x, "y": x.sum(0, keepdim=True)}


class Log:
    """Which samples were given when, and how steps ended."""

    def __init__(self):
        self.training, self.last = None, {}

    def offered(self, index):
        at = {"epoch": self.training.epoch, "version": self.training.version, "round": self.training.rounds}
        self.last = {"version": at["version"], "round": at["round"]}
        tell(offered=index.tolist(), **at)

    def done(self, optimizer, step):
        rate = optimizer.param_groups[0]["lr"]
        tell(done=True, step=step, loss=self.training.loss, rate=rate, **self.last)
        is_late = self.training.epoch > EPOCHS // 2
        time.sleep(0 if FAST.exists() else 0.5 if is_late else 0.02)


log = Log()


def finish(self, *arguments, act=_buckets.Gradients.finish):
    """At one step this rank does not hear of a sum that all others have."""
    table = act(self, *arguments)
    if log.training and log.training.step_number + 1 == int(os.environ.get("LOSES", "0")):
        raise GroupLost("a test")
    return table


_buckets.Gradients.finish = finish


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, index, x, y):
        log.offered(index)
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), y)}


def rates(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)


def hugging_face():
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from swarm_elastic.huggingface import elastic

    class Told(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer, **_):
            log.done(optimizer, state.global_step)

        def on_train_begin(self, *_, **__):
            log.training = trainer.training

    elastic_trainer, model = elastic(Trainer), Line()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    arguments = TrainingArguments(
        "out", num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=PASSES,
        report_to=[], save_strategy="steps" if CHECKPOINTS else "no", save_steps=SAVED, save_total_limit=1,
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = elastic_trainer(
        model, arguments, train_dataset=Points(), callbacks=[Told], optimizers=(optimizer, rates(optimizer))
    )
    trainer.remove_callback(PrinterCallback)  # it writes on stdout
    trainer.train()
    return trainer.state.global_step


def lightning():
    import lightning.pytorch as pl

    from swarm_elastic.lightning import ElasticStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = Line()

        def on_train_start(self):
            log.training = strategy.training

        def training_step(self, batch, _):
            return self.line(**batch)["loss"]

        def on_train_batch_end(self, *_):
            log.done(self.optimizers(), self.global_step)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            return [optimizer], [{"scheduler": rates(optimizer), "interval": "step"}]

    saving = [pl.callbacks.ModelCheckpoint("out", every_n_train_steps=SAVED)] if CHECKPOINTS else []
    strategy = ElasticStrategy()
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accumulate_grad_batches=PASSES, gradient_clip_val=1.0, accelerator="cpu", logger=False,
        enable_checkpointing=bool(saving), enable_progress_bar=False, enable_model_summary=False, callbacks=saving,
        strategy=strategy,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Points(), batch_size=BATCH, shuffle=True))
    return trainer.global_step


def accelerate():
    from swarm_elastic.accelerate import ElasticAccelerator

    accelerator = ElasticAccelerator(cpu=True, gradient_accumulation_steps=PASSES)
    model = Line()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(Points(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, rates(optimizer))
    log.training = accelerator.training
    for _ in range(accelerator.training.epoch, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                log.done(optimizer, accelerator.training.step_number + 1)
                if CHECKPOINTS and accelerator.training.step_number + 1 == SAVED:
                    accelerator.training.checkpoint(f"step-{SAVED}.pt")
    accelerator.end_training()
    return accelerator.training.step_number


tell(end=globals()[os.environ["KIND"]](), step=-1)

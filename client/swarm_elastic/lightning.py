"""The Trainer of Lightning.  One whose workers may join, leave and die while it trains:

from swarm_elastic.lightning import ElasticStrategy
trainer = Trainer(max_epochs=10, strategy=ElasticStrategy())

One that only reports:

from swarm_elastic.lightning import ReportCallback
trainer = Trainer(max_epochs=10, callbacks=[ReportCallback()])
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities import rank_zero_only
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback
    from pytorch_lightning.strategies import SingleDeviceStrategy
    from pytorch_lightning.utilities import rank_zero_only
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

from swarm_elastic import report
from swarm_elastic._elastic import Elastic
from swarm_elastic._membership import hide_world
from swarm_elastic._reports import INTERVAL_S, model_figures
from swarm_elastic._steps import Steps


class ReportCallback(Callback):  # type: ignore[misc]  # Lightning is not there when this is checked
    """Steps and epochs after each optimizer step, the loss of `training_step` once a second: to read it is to wait."""

    def __init__(self) -> None:
        self._total_steps: int | None = None
        self._step = -1
        self._loss_s = -math.inf

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find out where training will end; None where it does not say.  By the size of the model hosts are chosen."""
        if trainer.is_global_zero:
            report(**model_figures(pl_module.parameters()))
        try:
            total = trainer.estimated_stepping_batches
        except MisconfigurationException:  # accumulation changes from epoch to epoch
            total = math.inf
        self._total_steps = int(total) if 0 < total < math.inf else None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Nothing between two optimizer steps, and on other ranks than the first."""
        if not trainer.is_global_zero or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        accumulated = trainer.accumulate_grad_batches
        size = getattr(trainer.train_dataloader, "batch_size", None)
        report(
            step=self._step,
            samples=self._step * size * accumulated * trainer.world_size if size else None,
            epoch=trainer.current_epoch + (batch_idx + 1) / trainer.num_training_batches,
            loss=self._loss(outputs, accumulated),
            total_steps=self._total_steps,
        )

    def _loss(self, outputs: Any, accumulated: int) -> float | None:
        """None in between, and for a step that returns none; Lightning has divided it by the accumulated batches."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is None or time.monotonic() - self._loss_s < INTERVAL_S:
            return None
        self._loss_s = time.monotonic()
        return float(loss) * accumulated


class ElasticStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Each worker trains on one device, and all of them together as the Trainer would in one process.

    `training` is the job, once it trains; `seed` is that of the order of the samples.
    """

    strategy_name = "elastic"
    training: Elastic

    def __init__(self, device: Any = None, *, seed: int = 0, **options: Any) -> None:
        hide_world()
        super().__init__(device or ("cuda:0" if torch.cuda.is_available() else "cpu"), **options)
        self._steps: Steps | None = None
        self._seed = seed
        self._others: tuple[Any, ...] = ()  # arguments of `training_step` behind the batch

    @property
    def is_global_zero(self) -> bool:
        """True on the first rank, which may change."""
        return not hasattr(self, "training") or self.training.is_first

    # Joining, when both the loader and the optimizer are there; which is first depends on what the module asks for.

    def process_dataloader(self, dataloader: Any) -> Any:
        """Put the steps of the job in the place of the loader to train on."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if not hasattr(dataloader, "batch_sampler") or not hasattr(dataloader.dataset, "__len__"):
            raise ValueError("train_dataloader must be one DataLoader of a dataset with a length in an elastic job")
        self._steps = Steps(dataloader, trainer.accumulate_grad_batches, self._seed)
        trainer.accumulate_grad_batches = 1  # a step is one batch to the trainer, in as many passes as it takes
        self._join(trainer)
        return self._steps

    def setup(self, trainer: Any) -> None:
        """As for one device."""
        super().setup(trainer)
        self._join(trainer)

    def _join(self, trainer: Any) -> None:
        if self._steps is None or not self.optimizers:
            return
        if len(self.optimizers) > 1 or not self.lightning_module.automatic_optimization:
            raise ValueError("an elastic job takes one optimizer and automatic_optimization")
        schedulers = [each.scheduler for each in self.lr_scheduler_configs]
        scaler, state = getattr(self.precision_plugin, "scaler", None), _TrainerState(trainer)
        self.training = self._steps.join(
            self.lightning_module, self.optimizers[0], schedulers, scaler=scaler, trainer=state
        )
        if trainer.fit_loop.done:  # the others have done all of it, and wait
            self._steps.finish()

    # Training.

    def on_train_start(self) -> None:
        """The others may be far into training."""
        self.training.report(total_steps=self.lightning_module.trainer.estimated_stepping_batches)
        self._follow()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Members may have changed."""
        self._follow()

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """As for one device; it may be called again in the same step."""
        self._others = arguments[1:]
        return super().training_step(*arguments, **options)

    def backward(self, closure_loss: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        """All passes of a step that are left, until it is done."""

        def one_pass(batch: Any) -> Any:
            module = self.lightning_module
            batch = module.on_before_batch_transfer(self.precision_plugin.convert_input(batch), 0)
            output = self.training_step(self.batch_to_device(batch), *self._others)
            loss = output["loss"] if isinstance(output, Mapping) else output
            return backward(loss, optimizer, *arguments, **options)

        backward = super().backward
        loss = backward(closure_loss, optimizer, *arguments, **options)
        if self._steps is not None:
            self._steps.complete(loss, one_pass)
        return loss

    def _follow(self) -> None:
        self.global_rank = rank_zero_only.rank = self.training.rank

    def on_train_end(self) -> None:
        """Nobody may go while others need what it holds."""
        if self._steps is not None:
            self._steps.finish()

    # Saving.

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """As for one device, on the first rank; beside it, a file from which the whole job goes on."""
        if self.is_global_zero:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        trainer = self.lightning_module.trainer
        if self._steps is not None and trainer.training:
            self._steps.count_step()
            self.training.checkpoint(f"step-{trainer.global_step}.pt")

    def remove_checkpoint(self, filepath: Any) -> None:
        """As for one device, on the first rank."""
        if self.is_global_zero:
            super().remove_checkpoint(filepath)


class _TrainerState:
    """What newcomers get of a trainer's own state: how far its loops are, and what callbacks decide by."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        callbacks = {each.state_key: each.state_dict() for each in self._trainer.callbacks}
        return {"loops": self._trainer.fit_loop.state_dict(), "callbacks": callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state["loops"])
        for each in self._trainer.callbacks:
            if state["callbacks"].get(each.state_key):
                each.load_state_dict(state["callbacks"][each.state_key])

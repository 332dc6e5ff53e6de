"""Reports of the Trainer of Lightning:

from swarm_elastic.lightning import ReportCallback
trainer = Trainer(max_epochs=10, callbacks=[ReportCallback()])
"""

from __future__ import annotations

import math
import time
from typing import Any

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

from swarm_elastic import report
from swarm_elastic._reports import INTERVAL_S


class ReportCallback(Callback):  # type: ignore[misc]  # Lightning is not there when this is checked
    """Steps and epochs after each optimizer step, the loss of `training_step` once a second: to read it is to wait."""

    def __init__(self) -> None:
        self._total_steps: int | None = None
        self._step = -1
        self._loss_s = -math.inf

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find out where training will end; None where it does not say."""
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

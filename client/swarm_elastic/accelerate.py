"""A loop by Hugging Face accelerate whose workers may join, leave and die while it trains:

from swarm_elastic.accelerate import ElasticAccelerator

accelerator = ElasticAccelerator()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(accelerator.training.epoch, epochs):
    ...
accelerator.end_training()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from swarm_elastic._elastic import Elastic
from swarm_elastic._membership import hide_world
from swarm_elastic._steps import Steps


class ElasticAccelerator(Accelerator):  # type: ignore[misc]  # accelerate is not there when this is checked
    """An Accelerator for one device.  `prepare` takes model, optimizer, the loader to train on and its schedulers at
    once, and waits for a place in the job; other loaders behind the first one stay as they are.

    `seed` is that of the order of the samples.
    """

    _steps: Steps | None = None

    def __init__(self, *arguments: Any, seed: int = 0, **options: Any) -> None:
        hide_world()
        super().__init__(*arguments, **options)
        self._passes: int = self.gradient_accumulation_steps  # type: ignore[has-type]
        self.gradient_accumulation_steps = 1  # Elastic weighs passes by their samples
        self._seed = seed

    @property
    def training(self) -> Elastic:
        """The job, once all is prepared."""
        if self._steps is None:
            raise RuntimeError("give prepare the model, the optimizer and the loader first, in one call")
        return self._steps.training

    @property
    def is_main_process(self) -> bool:
        """True on the first rank, which may change."""
        return self._steps.training.is_first if self._steps else super().is_main_process

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True also where a step was lost with a rank; its samples come again."""
        return bool(self._steps and self._steps.is_skipped) or super().optimizer_step_was_skipped

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """As accelerate's; with an optimizer among the objects it joins the job."""
        prepared = super().prepare(*objects, **options)
        models, optimizers, loaders, schedulers = (
            [place for place, each in enumerate(objects) if isinstance(each, kind)]
            for kind in (torch.nn.Module, torch.optim.Optimizer, DataLoader, LRScheduler)
        )
        if not optimizers:
            return prepared
        if self._steps is not None or len(optimizers) > 1 or len(models) != 1 or not loaders:
            raise ValueError("prepare takes one model, one optimizer and a loader in one call in an elastic job")
        steps = _Passes(objects[loaders[0]], self._passes, self._seed)
        steps.join(objects[models[0]], objects[optimizers[0]], [objects[at] for at in schedulers], scaler=self.scaler)
        self._steps = steps
        return tuple(steps if at == loaders[0] else each for at, each in enumerate(prepared))

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """A step has as many passes as this rank's part of it needs."""
        if self._steps is not None:
            self.sync_gradients = self._steps.is_last
        yield

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """As accelerate's; behind the last pass of a step the gradients are those of all ranks."""
        super().backward(loss, **options)
        if self._steps is not None:
            self._steps.add(loss)

    def end_training(self) -> None:
        """Behind the loop, on all ranks: nobody may go while others need what it holds."""
        if self._steps is not None:
            self._steps.finish()
        super().end_training()


class _Passes(Steps):
    """For a loop that does all passes of a step by itself."""

    def __len__(self) -> int:
        """Batches of an epoch in one process."""
        return (len(self.dataset) + self.batch_size - 1) // self.batch_size

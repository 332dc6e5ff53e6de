"""The Trainer of Hugging Face transformers.  One whose workers may join, leave and die while it trains:

from swarm_elastic.huggingface import elastic
Trainer = elastic(Trainer)

One that only reports:

from swarm_elastic.huggingface import ReportCallback
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[ReportCallback])
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from swarm_elastic import report
from swarm_elastic._elastic import Elastic
from swarm_elastic._membership import hide_world
from swarm_elastic._reports import model_figures
from swarm_elastic._steps import Steps

_Trainer: Any = object  # it stands before a class of trainers, whichever that is


class ReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not there when this is checked
    """Steps after each step, the loss whenever the trainer logs it, and how large the model is."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """By its size hosts are chosen."""
        if state.is_world_process_zero and model is not None:
            report(**model_figures(model.parameters()))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count and total are the trainer's; samples those of full batches."""
        if state.is_world_process_zero:
            batch = state.train_batch_size * args.world_size * args.gradient_accumulation_steps
            samples = state.global_step * batch
            report(step=state.global_step, samples=samples, epoch=state.epoch, total_steps=state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Logs of an evaluation have no `loss`."""
        if state.is_world_process_zero and logs and "loss" in logs:
            report(loss=logs["loss"])


def elastic(trainer: Any) -> Any:
    """The same class of trainer for an elastic job; call it before TrainingArguments are made.

    Each worker trains on one device, and all of them together as the arguments say for one process.
    """
    hide_world()
    return type(f"Elastic{trainer.__name__}", (_Elasticity, trainer), {})


class _Elasticity(_Trainer):  # type: ignore[misc]
    """What an elastic Trainer does in another way; `training` is the job, once it trains."""

    training: Elastic

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **options: Any) -> None:
        self._passes = 1
        if args is not None:
            if args.world_size > 1:
                raise ValueError(
                    f"world_size of the arguments is {args.world_size}; call elastic(Trainer) before they are made"
                )
            self._passes, args = args.gradient_accumulation_steps, copy.copy(args)
            args.gradient_accumulation_steps = 1  # a step is one batch to the trainer, in as many passes as it takes
        super().__init__(model, args, *more, **options)
        self.add_callback(_Following(self))

    def get_train_dataloader(self) -> Any:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._steps = Steps(super().get_train_dataloader(), self._passes, seed)
        return self._steps

    def train(self, resume_from_checkpoint: Any = None, *more: Any, **options: Any) -> Any:
        """As the trainer's.  Where the job left off says the swarm."""
        if resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint is {resume_from_checkpoint!r}; an elastic job goes on from SWARM_RESUME_FROM "
                "by itself: leave it out"
            )
        return super().train(resume_from_checkpoint, *more, **options)

    def create_scheduler(self, *arguments: Any, **options: Any) -> Any:
        """With it all is there that a newcomer needs a state for."""
        scheduler = super().create_scheduler(*arguments, **options)
        if self.is_in_train:
            scaler = getattr(self.accelerator, "scaler", None)
            self.training = self._steps.join(
                self.model, self.optimizer, [scheduler], scaler=scaler, trainer=_TrainerState(self)
            )
            self.state.global_step, self._steps.end = self.training.step_number, self.state.max_steps
        return scheduler

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """All passes of a step, until it is done; returns the loss over all ranks."""

        def one_pass(batch: Any) -> Any:
            _, items = self.get_batch_samples(iter([batch]), 1, self.args.device)
            return training_step(model, batch, items)

        training_step = super().training_step
        loss = training_step(model, inputs, num_items_in_batch)
        self._steps.complete(loss, one_pass)
        return loss.new_tensor(self.training.loss)

    def is_world_process_zero(self) -> bool:
        """True on the first rank."""
        return self.training.is_first if hasattr(self, "training") else super().is_world_process_zero()

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """As the trainer's, on the first rank."""
        if self.is_world_process_zero():
            super().save_model(*arguments, **options)


class _Following(TrainerCallback):  # type: ignore[misc]
    """Keeps the trainer's own state to that of the job; comes behind the callbacks that decide what to do."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The others may be far into training."""
        self._trainer.training.report(total_steps=state.max_steps)
        self._follow(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer has counted a step."""
        self._follow(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Here it may save as well."""
        self._follow(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Beside its own files, whole jobs go on from this."""
        self._trainer._steps.count_step()  # noqa: SLF001  # its other half
        self._trainer.training.checkpoint(f"step-{state.global_step}.pt")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nobody may go while others need what it holds."""
        self._trainer._steps.finish()  # noqa: SLF001

    def _follow(self, state: Any, control: Any) -> None:
        is_first = self._trainer.training.is_first
        if has_length(self._trainer._steps):  # noqa: SLF001
            state.epoch = state.global_step / len(self._trainer._steps)  # noqa: SLF001
        state.is_world_process_zero = is_first
        control.should_save = control.should_save and is_first


class _TrainerState:
    """What newcomers get of a trainer's own state: what it decides by."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        best = None if state.best_metric is None else float(state.best_metric)
        callbacks = {name: each.state()["attributes"] for name, each in self._callbacks().items()}
        return {"best_metric": best, "best_global_step": state.best_global_step, "callbacks": callbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trainer.state.best_metric = state["best_metric"]
        self._trainer.state.best_global_step = state["best_global_step"]
        for name, each in self._callbacks().items():
            vars(each).update(state["callbacks"].get(name, {}))

    def _callbacks(self) -> dict[str, Any]:
        own = self._trainer.callback_handler.callbacks
        return {type(each).__name__: each for each in own if isinstance(each, ExportableState)}

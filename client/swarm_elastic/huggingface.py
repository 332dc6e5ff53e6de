"""Reports of the Trainer of Hugging Face transformers:

from swarm_elastic.huggingface import ReportCallback
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[ReportCallback])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from swarm_elastic import report


class ReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not there when this is checked
    """Steps after each step, the loss whenever the trainer logs it."""

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

"""For scripts that are written around DistributedDataParallel: each backward pass ends with the sums of gradients.

The script clips, updates and schedules by itself.  When it comes to its next batch or forward pass, the step is
settled: counted, and followed by a change of members if all can.  A step that was lost with a rank must leave no trace:
the optimizer's `step` does nothing then, and what the script has done to rates and schedule is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch

from swarm_elastic._elastic import Elastic
from swarm_elastic._ranges import RanksDiffer


class DistributedDataParallel(torch.nn.Module):  # type: ignore[misc]  # torch is not there when this is checked
    """The module, whose gradients are the mean over the samples of all ranks when `backward` returns.

    Made after the optimizer, which has the parameters of `module`.  `elastic` tells of the members, deals out batches
    and writes checkpoints, as docs/reference/elastic.md has it; its `step` is not called.
    """

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, global_batch: int, **options: Any
    ) -> None:
        """Join the job; the options are `scheduler`, `scaler`, `lr_rule`, `start_step` and `timeout_s` of `Elastic`.

        The script calls `step` of both as it did; they are named here to be handed to newcomers.
        """
        super().__init__()
        self.module = module
        self.elastic = BackwardElastic(module, optimizer, global_batch=global_batch, **options)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the module does, in a step of its own."""
        if torch.is_grad_enabled():
            self.elastic.begin_pass()
        return self.module(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes in here only add to the gradients; the first one behind it sums them."""
        with self.elastic.no_sync():
            yield


class BackwardElastic(Elastic):
    """An `Elastic` whose steps are made of the script's own calls."""

    _is_stepping = False

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        for name in ("clip_norm", "micro_batch", "scheduler_per"):
            if options.get(name):
                raise ValueError(
                    f"{name} is for Elastic.step; clip between backward and step, and pass under no_sync()"
                )
        self._is_queued = False  # whether the end of this backward pass will be heard of
        self._is_stepped = False  # whether the script has made its update, or its scaler has refused to
        super().__init__(model, optimizer, **options)
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._undo.append(parameter.register_post_accumulate_grad_hook(self._on_gradient).remove)
        if self._scaler is not None:
            self._watch(self._scaler)

    def count_step(self) -> None:
        """See `Elastic`; called by the next forward pass, batch, checkpoint and the end."""
        if self._is_summed and not self._is_stepped:
            raise RuntimeError(
                "optimizer.step() was not called with the gradients that backward has summed; call it before the next "
                "batch, and use no_sync() for passes that only add up"
            )
        self._is_stepped = False
        super().count_step()

    def begin_pass(self) -> None:
        """A forward pass; one between backward and the update is none of the next step."""
        self._is_queued = False  # by a backward pass that raised
        if self._is_stepped or self._is_between:
            self.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `DistributedDataParallel`."""
        self.settle()
        is_last = self._is_last
        self._set_last(is_last=False)
        self._begin_pass(is_last=False)
        try:
            yield
        finally:
            self._set_last(is_last=is_last)
            self._begin_pass(is_last=is_last)

    def _optimize(self) -> None:
        """Of a sum that this rank's script has no part in, since it has ended."""
        problem = f"this rank has ended its training at step {self.step_number}, and others train on"
        raise RanksDiffer(f"{problem}: end their loops at the same step")

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self._is_last and not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_end)  # noqa: SLF001  # as torch's own does

    def _on_end(self) -> None:
        """All gradients of this backward pass are there."""
        self._is_queued = False
        self._sum_once()

    def _sum_once(self) -> None:
        if self._is_summed:
            raise RuntimeError("backward came twice in one step; use no_sync() for all passes but the last")
        self._add_loss(float("nan"))  # this object is not told it
        self._reduce(self._said())
        if self._problem:
            self._keep()
            for parameter in self._parameters:  # for those who look at them before they update; nothing comes of it
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let its `step` do nothing where the sum was lost."""
        act: Callable[..., Any] = optimizer.step

        @wraps(getattr(act, "__func__", act))  # with the marks that a schedule has made
        def step(_: Any, *arguments: Any, **named: Any) -> Any:
            if not self._is_summed:
                self._sum_once()  # a backward pass that reached no parameter of this rank
            self._is_stepped = True
            return None if self._problem else act(*arguments, **named)

        optimizer.step = MethodType(step, optimizer)  # a method, as schedules expect
        self._undo.append(partial(setattr, optimizer, "step", act))

    def _watch(self, scaler: Any) -> None:
        """A scaler makes no update where gradients are not finite."""
        act: Callable[..., Any] = scaler.step

        def step(_: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
            result = act(optimizer, *arguments, **named)
            self._is_stepped = self._is_stepped or (self._is_summed and optimizer is self._optimizer)
            return result

        scaler.step = MethodType(step, scaler)
        self._undo.append(partial(setattr, scaler, "step", act))

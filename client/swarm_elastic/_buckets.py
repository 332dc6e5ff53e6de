"""Gradients of a step in flat buckets, summed over all ranks while the backward pass still computes the earlier layers.

Each rank's gradient is of the mean over its own samples, so it enters the sum with the weight of its count: `scale` is
samples over the nominal global batch.  What `finish` leaves in the parameters is the mean over all samples of all
ranks, however unevenly they are spread.  A step in micro-batches is summed here and reduced with the last of them.
Behind the words stands for each parameter how many ranks have used it: what none has used is left without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from swarm_elastic import _words
from swarm_elastic._group import Alone, Group, GroupLost, PendingOperation
from swarm_elastic._handover import is_dense
from swarm_elastic._words import Words

BUCKET_BYTES = 25 << 20


class Bucket:
    """Parameters of one type whose gradients travel together; the last one has words of all kinds at its end."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype, device: torch.device) -> None:
        self.parameters = parameters
        self.length = sum(parameter.numel() for parameter in parameters)
        self.dtype, self.device = dtype, device
        self.flat = torch.empty(0)
        self.views: list[torch.Tensor] = []
        self.begin()

    def allocate(self, tail: int) -> None:
        """Make the buffer, with room for so many words behind the gradients."""
        self.flat = torch.zeros(self.length + tail, dtype=self.dtype, device=self.device)
        offsets, self.views = 0, []
        for parameter in self.parameters:
            self.views.append(_shaped(self.flat[offsets : offsets + parameter.numel()], parameter))
            offsets += parameter.numel()

    def begin(self) -> None:
        """A new step."""
        self.is_filled = [False] * len(self.parameters)
        self.is_used = [False] * len(self.parameters)  # whether a sample of this rank has given it a gradient
        self.awaited = len(self.parameters)

    def fill(self, index: int, scale: float) -> None:
        """Take over a parameter's gradient, or zeros where it has none."""
        gradient, view = self.parameters[index].grad, self.views[index]
        if gradient is None or not scale:  # of a rank without samples even what is not finite counts for nothing
            view.zero_()
        else:
            torch.mul(gradient, scale, out=view)
        self.parameters[index].grad = view
        self.is_used[index] = gradient is not None and bool(scale)
        self.awaited -= 0 if self.is_filled[index] else 1
        self.is_filled[index] = True

    @property
    def gradients(self) -> torch.Tensor:
        """The buffer without the words."""
        return self.flat[: self.length]

    @property
    def squared_norm(self) -> torch.Tensor:
        """Of the gradients."""
        return self.gradients.float().square().sum()


class Gradients:
    """All gradients of a model.  Call `attach` for each group, then for each step `begin` and `finish`."""

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        bucket_bytes: int = BUCKET_BYTES,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_first` is called by the first gradient of a step that nothing has begun, and begins it."""
        self._on_first, self._is_begun = on_first, True
        self._parameters = [parameter for parameter in named.values() if parameter.requires_grad]
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._buckets = _dealt(self._parameters, bucket_bytes)
        self._where = {
            id(parameter): (bucket, index)
            for bucket in self._buckets
            for index, parameter in enumerate(bucket.parameters)
        }
        self._group: Group = Alone()
        self._slot = _words.SLOT_WORDS
        self._works: list[PendingOperation] = []
        self._launched = 0
        self._scale, self._is_last, self._is_measured = 1.0, True, False
        self._norms: list[torch.Tensor] = []
        self._problem = ""  # why the group is lost
        self.hooks = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in self._parameters]

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has a gradient here."""
        return all(each.grad is None for each in self._parameters)

    @property
    def shape(self) -> list[Any]:
        """How the gradients are laid out; equal on all ranks, or they cannot be summed."""
        return [(bucket.length, str(bucket.dtype)) for bucket in self._buckets]

    def attach(self, group: Group, slot: int = _words.SLOT_WORDS) -> None:
        """Sum over this group from now on, each of whose ranks has so many words."""
        self.clear()
        self._group, self._slot = group, slot
        if group.size > 1:
            *others, last = self._buckets
            for bucket in others:
                if self._problem or not bucket.views:
                    bucket.allocate(0)  # a sum that was given up may still write into the former one
            last.allocate(_words.table_words(group.size, slot) + len(self._parameters))
        self._problem = ""

    def begin(self, scale: float, *, is_last: bool, is_measured: bool = False) -> None:
        """Before a backward pass, of a step's last micro-batch or of an earlier one; `is_measured`: with its norm."""
        self._scale, self._is_last, self._is_measured = scale, is_last, is_measured
        self._is_begun = True

    def rescale(self, factor: float) -> None:
        """Between two micro-batches: weigh what was summed so far anew."""
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def finish(self, words: Words, weight: float) -> list[Words]:
        """Sum the step's gradients and words; returns the words of all ranks.

        `weight` is what its norm must be divided by to be that of this rank's own gradient: its part of the nominal
        global batch, times what a scaler has multiplied the loss by.  Raises `GroupLost`: the step did not happen.
        """
        if self._group.size == 1:
            return [words._replace(norm=0.0)]
        while self._launched < len(self._buckets) - 1:
            self._launch()
        last = self._buckets[-1]
        self._complete(last)
        norm = float(torch.stack(self._norms).sum()) / weight**2 if self._norms and weight else 0.0
        words_length = _words.table_words(self._group.size, self._slot)
        table, used = last.flat[last.length :].split([words_length, len(self._parameters)])
        _words.write(table, self._group.rank, self._group.size, words._replace(norm=norm))
        used.copy_(torch.tensor([float(each) for bucket in self._buckets for each in bucket.is_used]))
        self._start(last)
        problem = self._wait()
        if problem:
            self.clear()
            raise GroupLost(problem)
        self._leave_out(used.tolist())
        return _words.read(table, self._group.size)

    def weigh(self, factor: float) -> None:
        """After `finish`: multiply all gradients, where fewer samples came than the nominal global batch."""
        if self._group.size == 1:
            self.rescale(factor * self._scale)  # which no bucket has done
        elif factor != 1.0:
            for bucket in self._buckets:
                bucket.gradients.mul_(factor)

    def squared_norm(self) -> float:
        """Of the gradient of all ranks, after `finish`."""
        return float(torch.stack([bucket.squared_norm for bucket in self._buckets]).sum())

    def clear(self) -> None:
        """The next step begins with none."""
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.begin()
        self._works, self._launched, self._norms = [], 0, []
        self._is_begun = False

    # In the backward pass.

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._is_begun:
            gradient, self._is_begun = parameter.grad, True
            self._on_first()
            parameter.grad = gradient
        if self._group.size == 1 or not self._is_last:
            return
        bucket, index = self._where[id(parameter)]
        if bucket.is_filled[index]:
            raise RuntimeError(
                "a gradient came twice in one step; call step() after each backward pass, give Elastic a micro_batch, "
                "and use checkpoint(..., use_reentrant=False)"
            )
        self._fill(bucket, index)
        # In the same order on all ranks, whatever the order of their layers; the last one waits for the words.
        while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].awaited:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        self._complete(bucket)
        self._start(bucket)

    def _complete(self, bucket: Bucket) -> None:
        """Take over what no backward pass has reached; then measure."""
        for index, is_filled in enumerate(bucket.is_filled):
            if not is_filled:
                self._fill(bucket, index)
        if self._is_measured and bucket.length:
            with torch.no_grad():
                self._norms.append(bucket.squared_norm)

    def _fill(self, bucket: Bucket, index: int) -> None:
        parameter = bucket.parameters[index]
        if parameter.grad is not None and parameter.grad.is_sparse:
            name = self._names[id(parameter)]
            raise TypeError(f"the gradient of {name} is sparse and cannot be summed; use sparse=False in its layer")
        with torch.no_grad():
            bucket.fill(index, self._scale)

    def _leave_out(self, used: Sequence[float]) -> None:
        """No gradient, as on one rank alone, for parameters that no rank has used: an optimizer must pass them over."""
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        for index, ranks in enumerate(used):
            if not ranks:
                parameters[index].grad = None

    def _start(self, bucket: Bucket) -> None:
        """Begin its sum; that the group is lost is told by `finish`, not amid a user's backward pass."""
        if not self._problem:
            try:
                self._works.append(self._group.all_reduce(bucket.flat))
            except GroupLost as lost:
                self._problem = str(lost)

    def _wait(self) -> str:
        """What went wrong."""
        works, self._works = self._works, []
        for work in works:
            if not self._problem:
                try:
                    work.wait()
                except GroupLost as lost:
                    self._problem = str(lost)
        return self._problem


def _dealt(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Buckets in the order in which gradients come, last layers first; the last is float32, for the words."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.nn.Parameter]]] = {}
    for parameter in reversed(parameters):
        lists = kinds.setdefault((parameter.dtype, parameter.device), [[]])
        size = sum(each.numel() for each in lists[-1]) * parameter.element_size()
        if lists[-1] and size + parameter.numel() * parameter.element_size() > bucket_bytes:
            lists.append([])
        lists[-1].append(parameter)
    buckets = [Bucket(each, *kind) for kind, lists in kinds.items() for each in lists]
    exact = [bucket for bucket in buckets if bucket.dtype == torch.float32]
    device = parameters[0].device if parameters else torch.device("cpu")
    last = exact[-1] if exact else Bucket([], torch.float32, device)
    return [bucket for bucket in buckets if bucket is not last] + [last]


def _shaped(flat: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A view with the parameter's own strides, so that optimizers go through both in the same order."""
    return flat.as_strided(parameter.shape, parameter.stride()) if is_dense(parameter) else flat.view(parameter.shape)

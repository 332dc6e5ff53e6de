"""The training loop of another library in an elastic job: what stands for its DataLoader, and the sums.

The library believes that it trains alone.  When it asks for a batch it gets this rank's part of the step that comes
next; after its backward pass the gradients become those of all ranks; then it clips, updates, schedules, counts,
evaluates and saves as it always does, as it does on all other ranks.  When it asks for the next batch members change.

The job does what the library would do in one process: a step has the samples of as many batches as it would accumulate,
and a pass has one batch at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from swarm_elastic._elastic import Elastic
from swarm_elastic._handover import Kept

THREADS = 4  # that load samples, at least
ENDLESS = 1 << 30  # epochs; the library knows when it has done all of its own
Stateful = Any  # has state_dict() and load_state_dict()


class Steps:
    """In the place of `loader`, of which `passes` batches make a step; iterate over it for each epoch.

    Call `join` when model and optimizer are ready; then `complete`, or `add` until it is true, after the backward pass
    of each batch.
    """

    training: Elastic  # once this worker has joined
    end = -1  # how many steps there are in all, where the library would do one more than there are

    def __init__(self, loader: Any, passes: int = 1, seed: int = 0) -> None:
        self.dataset, self.batch_size = loader.dataset, _batch_size(loader)
        self._global_batch = self.batch_size * passes
        options = {"shuffle": _is_shuffled(loader), "seed": seed, "collate_fn": loader.collate_fn}
        self._options = {**options, "threads": max(THREADS, loader.num_workers)}
        self._after: Kept | None = None  # rates, where no update follows

    def __len__(self) -> int:
        """Steps of an epoch.  TypeError where the dataset has no length."""
        return (len(self.dataset) + self._global_batch - 1) // self._global_batch

    def __iter__(self) -> Iterator[Any]:
        self.settle()
        epoch = self.training.epoch
        while self.training.epoch == epoch and self.training.step_number != self.end:
            self.settle()
            yield next(self._batches)
            self.count_step()

    @property
    def is_last(self) -> bool:
        """Whether the batch that was given last is the last of its step."""
        return self._batches.is_last

    @property
    def is_skipped(self) -> bool:
        """Whether the step was lost: the library goes through the motions of an update, and its samples come again."""
        return self._after is not None

    def join(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Stateful],
        *,
        scaler: Any = None,
        trainer: Stateful = None,
    ) -> Elastic:
        """Wait for a place in the job and for its state; `trainer` holds what newcomers need of the library's own."""
        if scaler is not None:
            raise ValueError("precision fp16 has a GradScaler, which cannot go without an update; use bf16")
        self._optimizer, self._schedulers = optimizer, _All(schedulers)
        own = _BeforeTraining(trainer)
        self.training = Elastic(
            model,
            optimizer,
            global_batch=self._global_batch,
            micro_batch=self.batch_size,
            parts={"schedulers": self._schedulers, "trainer": own},
        )
        own.is_over = True
        self._batches = self.training.batches(self.dataset, epochs=ENDLESS, **self._options)
        return self.training

    def complete(self, loss: Any, one_pass: Callable[[Any], Any]) -> None:
        """Do what is left of a step after its first pass, which had this loss; what is lost of it is done again."""
        while not self.add(loss):
            loss = one_pass(next(self._batches))

    def add(self, loss: Any) -> bool:
        """Sum after the last pass of a step.  True when the step is done: an update follows, or others gave theirs."""
        step, self._after = self.training.step_number, None
        if self.training.sum(loss):
            return True
        if self.is_last:
            self._after = Kept(self._optimizer, [self._schedulers])
        return self.training.step_number > step

    def settle(self) -> None:
        """Begin the next step."""
        self.count_step()
        self.training.settle()

    def count_step(self) -> None:
        """Behind a step.  Without gradients an optimizer has changed nothing, and schedules are put back."""
        after, self._after = self._after, None
        if after is not None:
            after.restore()
        self.training.count_step()

    def finish(self) -> None:
        """Training is over; wait for the others."""
        self.settle()
        self.training.finish()


class _All:
    """Some schedulers as one."""

    def __init__(self, each: Sequence[Stateful]) -> None:
        self._each = each

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self._each)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, each in enumerate(self._each):
            each.load_state_dict(state[str(number)])


class _BeforeTraining:
    """A library's own state, loaded before it trains only: from then on it counts by itself."""

    is_of_rank = True

    def __init__(self, part: Stateful) -> None:
        self._part, self.is_over = part, False

    def state_dict(self) -> dict[str, Any]:
        return self._part.state_dict() if self._part is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._part is not None and not self.is_over:
            self._part.load_state_dict(state)


def _batch_size(loader: Any) -> int:
    cut = loader.batch_sampler
    size = cut.batch_size if type(cut) is BatchSampler else loader.batch_size
    if size is None:
        raise ValueError(f"batch_sampler is a {type(cut).__name__}; give the DataLoader a batch_size instead")
    return int(size)


def _is_shuffled(loader: Any) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    is_random = isinstance(sampler, RandomSampler)
    if not isinstance(sampler, (RandomSampler, SequentialSampler)) or len(sampler) != len(loader.dataset):
        raise ValueError(
            f"sampler is a {type(sampler).__name__}; an elastic job deals out all samples, shuffled or not"
        )
    return is_random

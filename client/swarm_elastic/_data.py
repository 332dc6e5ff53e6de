"""Batches of a dataset for one rank of a job whose members change: the table of `_ranges` says which, this loads them.

Samples of the next steps are loaded ahead.  After a change of members what was loaded and is still this rank's is
kept; the rest is thrown away.  Helper processes are never forked from this one: a fork would hold this rank's
connections open after its death, and the others would not notice it.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset, default_collate

from swarm_elastic._arguments import check_loader, shown, whole
from swarm_elastic._commits import warn
from swarm_elastic._ranges import Cut, OnDemand, Permutation, RangeTable, Reproducible, is_between, share

WAITS_OVER_S = 5.0  # so long is looked at to tell for which part of the time data are waited for
SEED_LEAST, SEED_MOST = -(1 << 63), (1 << 64) - 1  # as torch has it
MODES = ("reproducible", "on_demand")
GUARD = "put what the script does behind `if __name__ == '__main__':`, as each of these processes imports it"
NAMED_MAX = 8  # indices in an error
NO_SAMPLES = "the dataset yields no samples: there is nothing to train on"

Collate = Callable[[list[Any]], Any]


class DatasetError(RuntimeError):
    """A sample could not be loaded; the cause is the dataset's own error."""


class SampleSource(Protocol):
    """Where samples come from.  A piece is a cut of one pass at most."""

    met: dict[int, int]  # lengths of epochs that turned out while loading

    def want(self, pieces: Sequence[Cut]) -> None:
        """Load these, in this order, and forget all others."""

    def find_end(self, pieces: Sequence[Cut]) -> tuple[int, int] | None:
        """Wait for these; epoch and length, if the data end before the last of them."""

    def check_end(self, epoch: int, length: int) -> None:
        """All ranks take this for the length of an epoch: warn where there is more of it here."""

    def get(self, piece: Cut) -> Any:
        """Wait for a piece that is wanted; a batch on the CPU."""

    def spare(self) -> Any:
        """Make a batch for a rank that has none: it counts for nothing."""

    def close(self) -> None:
        """Load nothing more."""


class Batches:
    """This rank's batches, step by step.  Whoever sums the gradients tells it by `words` and `agreed` how steps went.

    Map-style datasets are dealt out by default so that a step's samples do not depend on how many ranks there are;
    with `mode="on_demand"`, the only one for iterable datasets, each rank goes on with the ranges that it has, and
    nothing that it has loaded is thrown away when others come or go.  An iterable dataset is read as a whole by each
    rank, which takes its own samples; it must yield the same ones on all ranks each time that it is opened, and
    `set_epoch` is called before, where it has one.

    A batch of `count` 0 is a repetition, for a rank that has no sample in this step: train on it as on others, so that
    all ranks do the same; its gradient counts for nothing.  Before each batch `expect(count, is_last=...)` is called;
    `is_last` is false for the batches of a step before the last one, where a rank's part exceeds `micro_batch`.

    The epochs are those from `first_epoch` on, and no other order is like theirs; the job may have some behind it.

    `threads` load samples, or `processes` of them, started afresh, with a copy of the dataset each.  `finish` is called
    when all is used up, `end` when the script hears of it, and `settle` whenever it asks for a batch.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        epochs: int,
        expect: Callable[..., None],
        finish: Callable[[], None] | None = None,
        settle: Callable[[], None] | None = None,
        end: Callable[[], None] | None = None,
        first_epoch: int = 0,
        mode: str | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        collate_fn: Collate | None = None,
        micro_batch: int = 0,
        prefetch: int = 2,
        threads: int = 4,
        processes: int = 0,
        device: torch.device | None = None,
    ) -> None:
        check_loader(dataset)
        is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        mode = mode or ("on_demand" if is_stream else "reproducible")
        if shuffle is not None and not isinstance(shuffle, bool):
            raise TypeError(f"shuffle is {shown(shuffle)}; it must be True, False or left out")
        is_shuffled = not is_stream if shuffle is None else shuffle
        _check(dataset, is_stream, mode, is_shuffled)
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"collate_fn is {shown(collate_fn)}; it must be a function of a list, or left out")
        epochs, seed = whole("epochs", epochs, 0), whole("seed", seed, SEED_LEAST, SEED_MOST)
        threads, processes = whole("threads", threads, 1), whole("processes", processes, 0)
        micro_batch, prefetch = whole("micro_batch", micro_batch, 0), whole("prefetch", prefetch, 0)
        length, order = None if is_stream else len(dataset), seed if is_shuffled else None
        if length == 0:
            raise DatasetError(NO_SAMPLES)
        where: dict[str, Any] = {"batch": global_batch, "first_epoch": first_epoch, "epochs": epochs, "seed": order}
        self._table: RangeTable
        if mode == "reproducible":
            assert length is not None
            self._table = Reproducible(length=length, **where)
        else:
            self._table = OnDemand(length=length, ahead=prefetch, **where)
        self._length = length
        self._first_epoch, self._end_epoch = first_epoch, first_epoch + epochs
        self._later: Mapping[str, Any] | None = None  # where the job is, if that is behind these epochs
        collate = collate_fn or default_collate
        is_pinned = device is not None and device.type == "cuda"
        self._source: SampleSource = (
            _Stream(dataset, _Collator(collate, is_pinned))
            if is_stream
            else _Map(dataset, _Collator(collate, is_pinned), order, threads, processes)
        )
        self.count = 0  # samples of the batch that was given out last
        self.is_last = False  # whether that one is the last of its step
        self._expect, self._finish, self._settle, self._end = expect, finish, settle, end
        self.passed = 0  # epochs that the job has behind it, with all that the script does after them
        self._micro_batch, self._prefetch, self._device = micro_batch, prefetch, device
        self._rest: deque[Cut] = deque()  # of this step
        self._last: Any = None
        self._is_taken = self._is_told = False  # all batches of this step by the script; by the others
        self._waited_s, self._looked_s = 0.0, time.monotonic()

    def waits(self) -> float | None:
        """The part of its time for which the script has waited for batches of late; None until more is to be told."""
        passed_s = time.monotonic() - self._looked_s
        if passed_s < WAITS_OVER_S:
            return None
        waited_s, self._waited_s, self._looked_s = self._waited_s, 0.0, time.monotonic()
        return round(min(1.0, waited_s / passed_s), 3)

    def has_passed(self, epochs: int) -> None:
        """The job has so many epochs behind it, with all that the script does after them."""
        self.passed = epochs

    # The script.

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._settle is not None:
            self._settle()
        if self._rest:
            return self._give(self._rest.popleft())
        if self.is_over:
            if self._finish is not None and not self.is_past:
                self._finish()
            self.close()
            if self._end is not None:
                self._end()
            raise StopIteration
        if self._is_taken and not self._is_told:
            raise RuntimeError("the batch before this one was not followed by training.step(loss)")
        self._is_taken = self._is_told = False
        self._rest.extend(self._find_pieces())
        return self._give(self._rest.popleft() if self._rest else None)

    def _find_pieces(self) -> list[Cut]:
        """The passes of the step to come, all of which exist."""
        begun_s = time.monotonic()
        while True:
            now = self._load_ahead()
            end = self._source.find_end(now)
            if end is None:
                self._waited_s += time.monotonic() - begun_s
                return now
            self._met_end(*end)

    def _load_ahead(self) -> list[Cut]:
        steps = [_pieces(cut, self._micro_batch) for cut in self._table.upcoming(self._prefetch + 1)]
        self._source.want([piece for step in steps for piece in step])
        return steps[0]

    def _give(self, piece: Cut | None) -> Any:
        begun_s = time.monotonic()
        if piece is not None:
            self._last = _on_device(self._source.get(piece), self._device)
        elif self._last is None:
            self._last = _on_device(self._source.spare(), self._device)
        self._waited_s += time.monotonic() - begun_s
        self.count = len(piece.positions) if piece else 0
        self.is_last = self._is_taken = not self._rest
        self._expect(self.count, is_last=self.is_last)
        return self._last

    def steps_of_epoch(self, batch: int) -> int:
        """How many an epoch has; 0 where that is not known."""
        return -(-(self._length or 0) // batch)

    @property
    def is_over(self) -> bool:
        """Whether no step is left of these epochs."""
        return self._later is not None or self._table.is_done

    @property
    def is_past(self) -> bool:
        """Whether the others are not at the end of these epochs, but have gone on."""
        if self._later is None:
            return False
        is_at_end = self._later["epoch"] == self._end_epoch and is_between(self._later)
        return self._end_epoch <= self.passed or not is_at_end

    # The one who sums.

    @property
    def epoch(self) -> int:
        """The epoch of the step to come, from 0."""
        return self._later["epoch"] if self._later is not None else self._table.epoch

    @property
    def progress(self) -> float:
        """Epochs done, with a fraction where the length is known."""
        return float(self._later["epoch"]) if self._later is not None else self._table.progress

    def begin(self, members: Sequence[str], me: str) -> None:
        """Go on with these members, in rank order; a step that was not agreed on comes again."""
        self._table.begin(members, me)
        self._start_anew()

    def resize(self, batch: int) -> None:
        """Go on with this global batch; to be called on all ranks between the same two steps."""
        self._table.resize(batch)
        self._start_anew()

    def words(self) -> list[int]:
        """What this rank says of the step whose batches the script has taken."""
        if not self._is_taken:
            raise RuntimeError("training.step(loss) came before the last batch of the step was taken")
        for epoch, length in list(self._source.met.items()):
            self._met_end(epoch, length)
        self._is_told = True
        return self._table.words()

    def agreed(self, words: Sequence[Sequence[int]]) -> None:
        """Count the step as done, by the words of all ranks in rank order."""
        known = self._found
        self._table.agreed(words)
        if self._found is not None and self._found != known:
            self._source.check_end(*self._found)
        self._start_anew()

    def state(self) -> dict[str, Any]:
        """Where the job is in its data, for JSON."""
        return self._table.state() if self._later is None else dict(self._later)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there; `begin` must follow.  ValueError where the data were others."""
        epoch = state["epoch"]
        if epoch < self._first_epoch:
            raise RuntimeError(
                f"batches() was called while epoch {epoch} of the batches before is not used up: go on with those to "
                "their end, or keep one iterator of all epochs; for data to evaluate on, take a DataLoader"
            )
        if epoch >= self._end_epoch:
            self._later = state
        elif epoch > self._first_epoch or not is_between(state):  # else nothing of these was used, nor of their length
            self._table.load(state)

    def close(self) -> None:
        """Stop loading."""
        self._source.close()

    def _start_anew(self) -> None:
        self._rest.clear()
        self._is_taken = self._is_told = False
        if not self.is_over:
            self._load_ahead()

    @property
    def _found(self) -> tuple[int, int] | None:
        return self._table.found if isinstance(self._table, OnDemand) else None

    def _met_end(self, epoch: int, length: int) -> None:
        if isinstance(self._table, OnDemand):
            self._table.met_end(epoch, length)


class _Collator:
    """Makes batches of samples, where they can be copied to a GPU while it computes if they will go there."""

    def __init__(self, collate: Collate, is_pinned: bool) -> None:
        self._collate, self._is_pinned = collate, is_pinned

    def __call__(self, samples: list[Any], names: Sequence[int]) -> Any:
        try:
            batch = self._collate(samples)
        except Exception as error:
            raise DatasetError(f"samples {_listed(names)} make no batch: {_told(error)}") from error
        return _mapped(batch, torch.Tensor.pin_memory) if self._is_pinned else batch


class _Map:
    """A dataset with an index.  Samples are loaded in parts of a batch, and are kept as long as they are wanted."""

    def __init__(self, dataset: Any, collate: _Collator, seed: int | None, threads: int, processes: int) -> None:
        self.met: dict[int, int] = {}
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._workers = processes or threads
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="swarm_elastic data")
        self._processes = (
            ProcessPoolExecutor(
                processes, multiprocessing.get_context("forkserver"), initializer=_serve, initargs=(dataset,)
            )
            if processes
            else None
        )
        self._samples: dict[tuple[int, int], tuple[Future[list[Any]], int]] = {}  # by epoch and position
        self._batches: dict[Cut, Future[Any]] = {}

    def want(self, pieces: Sequence[Cut]) -> None:
        """See `SampleSource`.  A pool takes up tasks in order, so no task waits for one that is behind it."""
        keys = {(piece.epoch, position) for piece in pieces for position in piece.positions}
        dropped = [self._samples.pop(key) for key in list(self._samples) if key not in keys]
        kept = {id(future) for future, _ in self._samples.values()}
        for future, _ in dropped:
            if id(future) not in kept:
                future.cancel()
        wanted = set(pieces)
        for piece in [piece for piece in self._batches if piece not in wanted]:
            self._batches.pop(piece).cancel()
        for piece in pieces:
            if piece not in self._batches:
                self._start(piece)

    def find_end(self, pieces: Sequence[Cut]) -> tuple[int, int] | None:
        """See `SampleSource`; its length is known."""
        return None

    def check_end(self, epoch: int, length: int) -> None:
        """See `SampleSource`; its length is known."""

    def get(self, piece: Cut) -> Any:
        """See `SampleSource`."""
        return self._batches[piece].result()

    def spare(self) -> Any:
        """See `SampleSource`.  Two samples, since some layers take no batch of one."""
        return self._pool.submit(lambda: self._collate(self._fetch([0]) * 2, [0])).result()

    def close(self) -> None:
        """See `SampleSource`."""
        self.want([])
        self._pool.shutdown(wait=False)
        if self._processes is not None:
            self._processes.shutdown(wait=False)

    def _start(self, piece: Cut) -> None:
        length = len(self._dataset)
        order = range(length) if self._seed is None else Permutation(length, self._seed, piece.epoch)
        indices = [order[position] for position in piece.positions]
        keys = [(piece.epoch, position) for position in piece.positions]
        missing = [place for place, key in enumerate(keys) if key not in self._samples]
        parts = 1 if hasattr(self._dataset, "__getitems__") else self._workers
        size = max(1, -(-len(missing) // parts))
        for at in range(0, len(missing), size):
            part = missing[at : at + size]
            future = self._pool.submit(self._fetch, [indices[place] for place in part])
            self._samples.update({keys[place]: (future, each) for each, place in enumerate(part)})
        self._batches[piece] = self._pool.submit(self._join, [self._samples[key] for key in keys], indices)

    def _join(self, samples: list[tuple[Future[list[Any]], int]], indices: list[int]) -> Any:
        return self._collate([future.result()[place] for future, place in samples], indices)

    def _fetch(self, indices: list[int]) -> list[Any]:
        if self._processes is None:
            return _fetch(self._dataset, indices)
        named = f"batches(processes={self._workers})"
        try:
            return self._processes.submit(_fetch_there, indices).result()
        except DatasetError:
            raise
        except (BrokenExecutor, EOFError, OSError) as error:
            problem = f"a process of {named} ended, of which its own lines may tell more: {_told(error)}"
            raise DatasetError(f"{problem}; {GUARD}, and see that memory suffices") from None
        except Exception as error:
            problem = f"{named} gets the dataset, and gives its samples, as pickle does, which failed: {_told(error)}"
            raise DatasetError(f"{problem}; have both be picklable, or use threads") from error


def _fetch(dataset: Any, indices: list[int]) -> list[Any]:
    names: Sequence[int] = indices
    try:
        if hasattr(dataset, "__getitems__"):
            return list(dataset.__getitems__(indices))
        samples = []
        for index in indices:
            names = [index]
            samples.append(dataset[index])
    except Exception as error:
        raise DatasetError(f"dataset[{_listed(names)}] failed: {_told(error)}") from error
    return samples


def refuse_import() -> None:
    """Raises RuntimeError in a process that multiprocessing has started, and that imports the script to be ready."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # by which it refuses more of them itself
        raise RuntimeError(f"Elastic is made in a process that loads samples, or helps in another way; {GUARD}")


_served: dict[str, Any] = {}  # in a helper process: its copy of the dataset


def _serve(dataset: Any) -> None:
    _served["dataset"] = dataset
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _fetch_there(indices: list[int]) -> list[Any]:
    return _fetch(_served["dataset"], indices)


class _Stream:
    """A dataset that can only be iterated over.  One thread reads it, and keeps what is wanted of what it passes."""

    def __init__(self, dataset: Iterable[Any], collate: _Collator) -> None:
        self.met: dict[int, int] = {}
        self._dataset, self._collate = dataset, collate
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="swarm_elastic data")
        self._batches: dict[Cut, Future[Any]] = {}
        self._wanted: frozenset[tuple[int, int]] = frozenset()
        # Of the thread alone.
        self._read: dict[tuple[int, int], Any] = {}
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._at = 0

    def want(self, pieces: Sequence[Cut]) -> None:
        """See `SampleSource`."""
        self._wanted = frozenset((piece.epoch, position) for piece in pieces for position in piece.positions)
        wanted = set(pieces)
        for piece in [piece for piece in self._batches if piece not in wanted]:
            self._batches.pop(piece).cancel()
        for piece in pieces:
            if piece not in self._batches:
                self._batches[piece] = self._pool.submit(self._load, piece)

    def find_end(self, pieces: Sequence[Cut]) -> tuple[int, int] | None:
        """See `SampleSource`."""
        for piece in pieces:
            self._batches[piece].result()
            end = self.met.get(piece.epoch)
            if end is not None and any(position >= end for position in piece.positions):
                return piece.epoch, end
        return None

    def check_end(self, epoch: int, length: int) -> None:
        """See `SampleSource`.  Before anything of the next epoch is read: this one is open where it was left."""
        self._pool.submit(self._check_end, epoch, length)

    def get(self, piece: Cut) -> Any:
        """See `SampleSource`."""
        return self._batches[piece].result()

    def spare(self) -> Any:
        """See `SampleSource`."""
        return self._pool.submit(self._load_first).result()

    def close(self) -> None:
        """See `SampleSource`."""
        self.want([])
        self._pool.shutdown(wait=False)

    # In the thread.

    def _load(self, piece: Cut) -> Any:
        """A batch, or None if the data end before the last of it."""
        keys = [(piece.epoch, position) for position in piece.positions]
        wanted = self._wanted.union(keys)
        self._read = {key: sample for key, sample in self._read.items() if key in wanted}
        for key in keys:
            if key not in self._read:
                self._read_to(*key, wanted)
        if any(key not in self._read for key in keys):
            return None
        return self._collate([self._read[key] for key in keys], piece.positions)

    def _read_to(self, epoch: int, position: int, wanted: frozenset[tuple[int, int]]) -> None:
        iterator = self._iterator
        if iterator is None or epoch != self._epoch or position < self._at:
            iterator = self._open(epoch)
        while self._at <= position:
            try:
                sample = next(iterator)
            except StopIteration:
                self.met[epoch] = self._at
                return
            except Exception as error:
                self._iterator = None  # what follows of it is no end of the data
                raise DatasetError(f"sample {self._at} of epoch {epoch} failed: {_told(error)}") from error
            if (epoch, self._at) in wanted:
                self._read[epoch, self._at] = sample
            self._at += 1

    def _check_end(self, epoch: int, length: int) -> None:
        if epoch == self._epoch and self._iterator is not None and epoch not in self.met:
            self._read_to(epoch, max(length, self._at), frozenset())
        if self.met.get(epoch, self._at if epoch == self._epoch else 0) > length:
            warn(
                f"epoch {epoch} has {length} samples on another rank and more on this one, and the rest is left out: "
                "have the dataset yield the same on all ranks"
            )

    def _open(self, epoch: int) -> Iterator[Any]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self._epoch, self._at = epoch, 0
        self._iterator = iter(self._dataset)
        return self._iterator

    def _load_first(self) -> Any:
        """Two of the first sample, since some layers take no batch of one."""
        for sample in self._open(self._epoch):
            self._at += 1
            return self._collate([sample, sample], [0])
        raise DatasetError(NO_SAMPLES)


def _check(dataset: Any, is_stream: bool, mode: str, is_shuffled: bool) -> None:
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
    kind = type(dataset).__name__
    if not is_stream and not hasattr(dataset, "__len__"):
        raise TypeError(f"{kind} has an index and no length; give it __len__, or make it an IterableDataset")
    if is_stream and (not hasattr(dataset, "__iter__") or isinstance(dataset, Iterator)):
        raise TypeError(
            f"{kind} is no dataset: it needs an index and a length, or to begin anew each time it is iterated"
        )
    if is_stream and (mode == "reproducible" or is_shuffled):
        raise ValueError(f"{kind} has no index: it can be neither reproducible nor shuffled here; shuffle it itself")


def _pieces(cut: Cut, micro_batch: int) -> list[Cut]:
    """One step's passes, of sizes that differ by one at most."""
    count, pieces = len(cut.positions), []
    passes = -(-count // (micro_batch or max(1, count)))
    at = 0
    for each in range(passes):
        size = share(count, passes, each)
        pieces.append(Cut(cut.epoch, cut.positions[at : at + size]))
        at += size
    return pieces


def _on_device(batch: Any, device: torch.device | None) -> Any:
    return batch if device is None else _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)  # of its own kind: batches of tokens have attributes
        changed.update({key: _mapped(each, change) for key, each in value.items()})
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(each, change) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(each, change) for each in value)
    return value


def _listed(indices: Sequence[int]) -> str:
    more = ", ..." if len(indices) > NAMED_MAX else ""
    return ", ".join(str(index) for index in indices[:NAMED_MAX]) + more


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""The one object of an elastic training: sums gradients over the present members and lets them change between steps."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from swarm_elastic import _commits, _membership, _reports
from swarm_elastic._arguments import bound, check_objects, number, one_of, seconds, whole
from swarm_elastic._buckets import Gradients
from swarm_elastic._builder import CandidatePlan
from swarm_elastic._commits import warn
from swarm_elastic._course import Arrival, Course
from swarm_elastic._data import Batches, refuse_import
from swarm_elastic._group import GroupLost
from swarm_elastic._handover import Kept, TrainingState, plain, set_random_states
from swarm_elastic._noise import EVERY_STEPS, NoiseScale
from swarm_elastic._ranges import RanksDiffer
from swarm_elastic._rate import exponent, horizon, scale_rates
from swarm_elastic._replicas import EVERY_STEPS as COMPARED_STEPS
from swarm_elastic._replicas import Twin
from swarm_elastic._seat import MembersLost, Seat
from swarm_elastic._words import FORMER_SLOT_WORDS, SAMPLES_MAX, SLOT_WORDS, Words

FORMAT = "swarm_elastic 1"
LOAD = "load it in the script and give start_step"
SAME = "start the same script, or submit the job anew"
PARTED = (
    "step schedules, averages and all that is named in parts alike on all ranks, by training.loss where by a loss, and "
    "begin epochs with `for epoch in training.epochs(n)`"
)
PER = ("step", "epoch")
TIMEOUT_S = 1_800.0  # that of torch's own process groups but for NCCL, which has 600
TIMEOUT_LEAST_S = 60.0  # longer than until those that wait say so

_of_models: WeakKeyDictionary[torch.nn.Module, list[Callable[[], object]]] = WeakKeyDictionary()
"""What undoes the hooks of the training that each is in, for the next one of this process."""


class Elastic:
    """A training that workers may join and leave while it runs.

    Make it last, when model, optimizer and data are ready: a worker that joins waits here for its place and its state.
    All workers must make the same model and optimizer.  `global_batch` samples, of all ranks together, make a step;
    of more than `micro_batch` on one rank gradients are summed in several passes.
    """

    _is_stepping = True  # optimizer, schedule and scaler by itself

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        global_batch: int,
        micro_batch: int = 0,
        scheduler: Any = None,
        scheduler_per: str | None = None,
        scaler: Any = None,
        clip_norm: float | None = None,
        lr_rule: str = "fixed",
        start_step: int = -1,
        parts: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Join the job; returns when this worker is a member that has the present weights.

        `scheduler` is stepped after the optimizer, or with `scheduler_per="epoch"` after each epoch; `scaler` is a
        GradScaler whose scaled loss the script gives to backward; `clip_norm` bounds the norm of the whole gradient;
        `lr_rule` says what another global batch does to learning rates (fixed, linear, sqrt); `start_step` tells that
        the script has loaded a checkpoint by itself; `parts` are more objects with `state_dict` and `load_state_dict`,
        by name, that newcomers and checkpoints get: they are the same on all ranks.  Ranks that keep at least as many
        others waiting in `step` for longer than `timeout_s` are replaced; inf: none.
        """
        refuse_import()
        check_objects(model, optimizer, scheduler, scaler, parts, are_stepped=self._is_stepping)
        self._optimizer, self._scheduler, self._scaler = optimizer, scheduler, scaler
        self._parameters = list(model.parameters())
        self._clip_norm = bound("clip_norm", clip_norm)
        self._exponent, self._lr_rule = exponent(lr_rule), lr_rule
        self._scheduler_per = one_of("scheduler_per", scheduler_per, PER)
        limit_s = seconds("timeout_s", timeout_s, TIMEOUT_LEAST_S)
        self.global_batch = whole("global_batch", global_batch, 1, SAMPLES_MAX)
        limits = [whole("micro_batch", micro_batch, 0), _reports.local_batch_most() if self._is_stepping else 0]
        self.micro_batch = min([each for each in limits if each], default=0)
        self.step_number = self.samples = 0
        self.rounds = 0  # sums that succeeded, with or without samples in them
        self._finished = 0  # the round after which all members had come to the end of their steps
        self.loss = float("nan")  # of the last step, the mean over all ranks
        self._passes: list[int] = []  # samples of each pass of this step so far
        self._is_share = self._is_last = True  # whether they are but assumed; whether the last has begun
        self._table: list[Words] = []  # what all said in a sum that is not concluded
        self._total = 0  # samples in it
        self._problem = ""  # why it was lost
        self._candidate: CandidatePlan | None = None  # which plan this rank could switch to when it began, or will
        self._is_between = False  # whether a step is counted, and the next one not begun
        self._kept: Kept | None = None  # when a sum was lost
        self._saved: tuple[str, int] | None = None  # the last checkpoint and a digest of it, until the next step begins
        self._is_compared, self._is_first_round = False, True  # whether replicas are in this step
        self._is_measured = False  # whether this step's gradients are, for the noise scale
        self._loss_sum = 0.0
        self._model_figures = _reports.model_figures(model.parameters())
        self._data: Batches | None = None
        self._course = Course()
        self._given: Arrival | None = None  # of the state that was given, until the script has come to the present step
        self._data_state: Mapping[str, Any] | None = None
        self._is_rounded = self._is_doubted = False  # whether that was told
        self._is_readable = False  # whether a checkpoint of this was found to be
        self._noise = NoiseScale(self.global_batch)
        self._gradients = Gradients(dict(model.named_parameters()), on_first=self.settle)
        self._undo: list[Callable[[], object]] = [each.remove for each in self._gradients.hooks]
        named = {"scheduler": scheduler, "scaler": scaler, "noise": self._noise, **(parts or {})}
        self._state = TrainingState(model, optimizer, {name: part for name, part in named.items() if part is not None})
        self._replica = Twin(optimizer, self._state.compared, self._state.moved_by_passes)
        start, may_start = self._find_start(whole("start_step", start_step, -1))
        layout, former = (
            self._state.layout((self._gradients.shape, words, lr_rule)) for words in (SLOT_WORDS, FORMER_SLOT_WORDS)
        )
        self._seat = Seat(_membership.find(self.device), self._state, (layout, former), self, self._on_change, limit_s)
        self._began_s = 0.0  # this step
        self._met_s = 0.0  # the end of the last wait for others: what this worker does since then is its own part
        for undo in _of_models.pop(model, ()):
            undo()
        _of_models[model] = self._undo
        self._guard(optimizer)
        self._seat.join(start, may_start=may_start)

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Against a script that updates with gradients which are this rank's alone."""
        with suppress(AttributeError):  # of what stands around another library's
            self._undo.append(optimizer.register_step_pre_hook(self._before_update).remove)

    def _before_update(self, *_: Any) -> None:
        if not self._is_summed and not self._gradients.is_empty:
            raise RuntimeError(
                "optimizer.step() came with gradients that are not summed over all ranks; leave it out, as "
                "training.step(loss) updates the weights"
            )

    # What a script asks.

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._state.device

    @property
    def rank(self) -> int:
        """Of this worker, in the present membership."""
        return self._present.group.rank

    @property
    def world_size(self) -> int:
        """How many workers train."""
        return self._present.group.size

    @property
    def is_first(self) -> bool:
        """True on the rank that writes checkpoints and reports."""
        return self._seat.group.rank == 0

    @property
    def version(self) -> int:
        """Of the membership."""
        return self._present.version

    @property
    def workers(self) -> tuple[str, ...]:
        """The members in rank order."""
        return self._present.workers

    @property
    def _present(self) -> Seat:
        """For a script that deals out samples by itself a step begins when it asks who trains."""
        if self._data is None and self._is_between:
            self.settle()
        return self._seat

    @property
    def epoch(self) -> int:
        """Of the data, from 0."""
        return self._data.epoch if self._data else 0

    @property
    def grad_noise(self) -> float | None:
        """As docs/reference/reports.md has it; None before it was measured, which takes two ranks."""
        return self._noise.value

    # Data.

    def batches(self, dataset: Any, *, epochs: int = 1, **options: Any) -> Batches:
        """This rank's batches until the epochs are over, instead of a DataLoader's; see `Batches` for the options.

        Each call goes on behind the epochs of the one before it.  In a worker that joins, or goes on from a checkpoint,
        those that the job has behind it are over at once.
        """
        own: dict[str, Any] = {
            "expect": self.expect,
            "finish": self.finish,
            "settle": self.settle,
            "end": self._course.end_call,
        }
        own |= {"micro_batch": self.micro_batch, "device": self.device}
        options = {"first_epoch": self._course.begin_call(whole("epochs", epochs, 0)), **own, **options}
        data = Batches(dataset, global_batch=self.global_batch, epochs=epochs, **options)
        state = self._data.state() if self._data else self._data_state
        data.has_passed(self._course.passed)
        if state:
            data.load(state)
        if not data.is_past:
            self._arrive()
        self._doubt_scheduler(data)
        data.begin(self._seat.workers, self._seat.worker)
        self._data = data
        return data

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs from the present one on, for a loop around `batches`: `for epoch in epochs(6)`.

        What its body does behind its batches is done once for each epoch by all that train then.  A worker that joins
        begins with the epoch that the others are in, and so does a job that goes on from a checkpoint.
        """
        return self._course.bodies(whole("epochs", count, 0), self._arrive, self._confirm)

    def _arrive(self) -> None:
        """The script has come to where the others are: what it did to their state on its way is undone."""
        given, self._given = self._given, None
        if given is not None:
            given.restore()

    def _doubt_scheduler(self, data: Batches) -> None:
        """Warn of a schedule that counts epochs and will be stepped with each update."""
        steps = data.steps_of_epoch(self.global_batch)
        is_asked = self._is_stepping and self._scheduler_per is None and self.is_first
        limit, what = horizon(self._scheduler) if is_asked else (0, "")
        if steps and 0 < limit < steps and not self._is_doubted:
            self._is_doubted = True
            warn(
                f"{what} is stepped after each update, of which an epoch has {steps}; give scheduler_per='epoch' if it "
                "counts epochs, else scheduler_per='step'"
            )

    # A step.

    def expect(self, samples: int, *, is_last: bool = True) -> None:
        """Say before a backward pass of how many samples its loss is the mean; `is_last` of the passes of this step.

        For scripts that deal out samples by themselves.  Where it is not called an even share of the global batch is
        taken for granted, in one pass.
        """
        if self._is_between:
            self.settle()
        if self._is_share:
            self._passes, self._is_share = [], False
        samples = whole("samples", samples, 0, SAMPLES_MAX - sum(self._passes))
        if self._passes and samples:
            self._gradients.rescale(self._passes[-1] / samples)
        self._passes.append(samples)
        self._set_last(is_last=is_last)
        self._is_measured = is_last and self.rounds % EVERY_STEPS == 0
        self._begin_pass(is_last=is_last)

    def _set_last(self, *, is_last: bool) -> None:
        """Whether the last pass of this step has begun."""
        self._is_last = is_last

    def _add_loss(self, loss_sum: float) -> None:
        """Over the samples of a pass; NaN where nobody has told it."""
        self._loss_sum += loss_sum

    def _keep(self) -> None:
        """A sum was lost: what the script changes until the next batch is undone."""
        self._kept = self._state.keep()

    def _begin_pass(self, *, is_last: bool) -> None:
        scale = self._passes[-1] / self.global_batch
        self._gradients.begin(scale, is_last=is_last, is_measured=is_last and self._is_measured)

    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Sum the gradients of all ranks, update the weights and count the step.

        `loss` is this rank's, for reports.  False when nothing was updated: more passes of this step follow, or it was
        lost with a rank and its samples come again.  Members change when the next step begins, in `settle`: so all
        that the script does until then belongs to this one.
        """
        if not self._sum_passes(loss):
            if self._problem and self._data is None:
                self.settle()
            elif self._problem:
                self._keep()
            return False
        self._optimize()
        self.count_step()
        return True

    def sum(self, loss: torch.Tensor | float | None = None) -> bool:
        """The first half of `step`: the caller updates the weights by itself if this is true, then calls `settle`."""
        is_summed = self._sum_passes(loss)
        if self._problem:
            self.settle()
        return is_summed

    def _sum_passes(self, loss: torch.Tensor | float | None) -> bool:
        """After the last pass of a step; true where an update is to follow."""
        if self._passes[-1]:
            value = float("nan") if loss is None else loss.detach() if isinstance(loss, torch.Tensor) else loss
            self._add_loss(number("loss", value) * self._passes[-1])
        if not self._is_last:
            return False
        if self._passes[-1] and self._gradients.is_empty:
            raise RuntimeError(
                "step() came without a backward pass; call it behind loss.backward(), or expect(0) before it"
            )
        self._reduce(self._said())
        if self._table and not self._total:
            self.count_step()
        return self._total > 0

    def settle(self) -> None:
        """Begin the next step, as members of another plan if all can; nothing where it has begun.

        The next batch does it, or `expect`; where a script deals out samples by itself it is called before it asks who
        trains.  Raises `Left` when a newer plan goes on without this worker.
        """
        self.count_step()
        self._begin_next()

    def _begin_next(self) -> None:
        self._confirm()
        if self._is_between:
            candidate, self._candidate, self._is_between = self._candidate, None, False
            if candidate is None or not self._seat.switch(candidate):
                self._begin_step()

    def count_step(self) -> None:
        """Count what was summed and updated; or go over to another plan, if it was lost."""
        self._count_up()

    def _count_up(self) -> None:
        if self._problem:
            self._recover()
        elif self._table:
            table, self._table = self._table, []
            self._seat.has_trained()
            self._count(table)
            if not _is_agreed(table):
                self._candidate = None
            self._is_between = True

    def _recover(self) -> None:
        """Nothing is left of a step that was lost, but where others have done it and give their state."""
        problem, self._problem, self._candidate = self._problem, "", None
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.restore()
        since, rounds = self._state.undo_step(), self.rounds
        self._seat.recover(problem)
        if self.rounds > rounds:
            set_random_states(since)
            self._state.begin_step()

    @property
    def _is_summed(self) -> bool:
        return bool(self._table or self._problem)

    def _said(self) -> Words:
        """What this rank has to say of a step."""
        samples = sum(self._passes)
        data = self._data.words() if self._data else ()
        return Words(samples=samples, loss=self._loss_sum / max(1, samples), data=data)

    def finish(self) -> None:
        """Wait after the last step until all members have done theirs: nobody may go while others need what it holds.

        Done by itself at the end of `batches`; scripts that deal out samples by themselves call it behind their loop.
        """
        self.settle()
        while self._finished != self.rounds:
            self._is_measured = False
            self._gradients.begin(0.0, is_last=True)
            try:
                table = self._sum(Words(done=1))
            except MembersLost as error:
                print(f"swarm_elastic: all steps are done, but maybe not by others: {error}", file=sys.stderr)
                return
            if table and all(each.done for each in table) and not _is_agreed(table):
                self._finished = self.rounds
                self._seat.meet()

    def _sum(self, said: Words) -> list[Words]:
        """One round: sum, update, and switch if all can.  What all said; nothing, when it was lost with a rank."""
        self._reduce(said)
        if self._total:
            self._optimize()
        table = self._table
        self._count_up()
        self._begin_next()
        return table

    def _reduce(self, said: Words) -> None:
        """Sum gradients and words, and leave the mean over all samples in the parameters for an update."""
        if said.samples and self._met_s:
            self._seat.was_busy(time.monotonic() - self._met_s)
        self._given = self._saved = None
        ready, self._candidate = self._seat.offer()
        wanted = _reports.batch_up_to(SAMPLES_MAX, self.global_batch) if self.is_first else 0
        rates, state = self._digests(is_end=bool(said.done))
        words = said._replace(ready=ready, batch=wanted, rates=rates, state=state)
        try:
            with self._seat.operating():
                self._table = self._gradients.finish(words, words.samples / self.global_batch * self._loss_scale())
                self._problem = self._compare(self._table)
                self._met_s = time.monotonic()
        except GroupLost as lost:
            self._problem = str(lost)
        if self._problem:
            self._table = []
            return
        self._total = sum(each.samples for each in self._table)
        if self._total:
            self._gradients.weigh(self.global_batch / self._total)
            self.loss = sum(each.loss * each.samples for each in self._table if each.samples) / self._total
        if any(each.norm for each in self._table):
            self._noise.measure(self._table, self._gradients.squared_norm() / self._loss_scale() ** 2)

    def _digests(self, *, is_end: bool) -> tuple[int, int]:
        """What is told of this replica: of its rates, and now and then of all of it."""
        if self._seat.group.size == 1 or self._seat.is_former:
            return 0, 0
        return self._replica.rates(), self._replica.state() if self._is_compared or is_end else 0

    def _compare(self, table: list[Words]) -> str:
        """Whether all ranks hold the same; why the step does not count where others are to go.

        Raises `RanksDiffer` where this rank is wrong, or nobody knows who is.
        """
        words = [{each.rates for each in table} - {0}, {each.state for each in table} - {0}]
        if len(words[0]) < 2 and len(words[1]) < 2:
            if words[1]:
                self._replica.prove(is_equal=True)
            return ""
        found = self._replica.compare(self._seat.group.gather, self._seat.workers)
        if found is None or not found.culprits:
            self._replica.prove(is_equal=True)
            if found and self.is_first and not self._is_rounded:
                self._is_rounded = True
                warn(f"{found.problem} between ranks, as on other hardware or with other numbers of threads")
            return ""
        problem = f"replicas have parted before step {self.step_number + 1}: {found.problem}"
        if self._seat.group.rank not in found.culprits:
            return problem
        self._seat.part(problem, is_refused=len(found.culprits) < len(table))
        raise RanksDiffer(f"{problem}; {PARTED}")

    def _optimize(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        if self._scaler is not None:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            self._optimizer.step()
        if self._scheduler is not None and self._scheduler_per != "epoch":
            self._scheduler.step()

    def _count(self, table: list[Words]) -> None:
        """What all ranks said together, and what follows of it."""
        total, self._total = self._total, 0
        if total:
            self.step_number += 1
            self.samples += total
        self._gradients.clear()
        self.rounds += 1
        self._is_first_round = False
        begun = self.epoch
        self._count_data(table)
        if self._scheduler_per == "epoch" and self._scheduler is not None:
            for _ in range(begun, self.epoch):
                self._scheduler.step()
        if not self.is_first:
            _reports.follow_batch(table[0].batch)
        if table[0].batch != self.global_batch:
            self._change_batch(table[0].batch)
        if self.is_first and total:
            epoch = self._data.progress if self._data else None
            figures = {"loss": None if isnan(self.loss) else self.loss, "grad_noise": self.grad_noise, "epoch": epoch}
            waits = self._data.waits() if self._data else None
            told = figures | self._model_figures
            _reports.report(step=self.step_number, samples=self.samples, data_wait=waits, **told)

    def _count_data(self, table: list[Words]) -> None:
        ended = [rank for rank, each in enumerate(table) if each.done]
        if self._data is None or len(ended) == len(table):
            return
        if ended:
            problem = f"ranks {ended} have ended their training before step {self.step_number}, and others train on"
            raise RanksDiffer(f"{problem}: end the loop over the batches at the same step on all ranks")
        self._data.agreed([each.data for each in table])

    def _loss_scale(self) -> float:
        """By what the scaler has multiplied the gradients, where their norms are measured."""
        return float(self._scaler.get_scale()) if self._scaler is not None and self._is_measured else 1.0

    def _change_batch(self, batch: int) -> None:
        factor = (batch / self.global_batch) ** self._exponent
        unknown = scale_rates(self._optimizer, self._scheduler, factor) if self._exponent else []
        if self.is_first:
            told = f"global batch {self.global_batch} -> {batch} after step {self.step_number}"
            doubt = f", until the next step of {', '.join(unknown)}" if unknown else ""
            print(f"swarm_elastic: {told}: learning rates x {factor:g} ({self._lr_rule}){doubt}", file=sys.stderr)
        if self.is_first and unknown:
            problem = f"lr_rule {self._lr_rule!r} leaves what {', '.join(unknown)} may keep of rates beside base_lrs"
            warn(f"{problem}; scale that in the script when global_batch changes, or use schedules of torch")
        self.global_batch = batch
        if self._data:
            self._data.resize(batch)

    def _begin_step(self) -> None:
        """With an even share of the global batch, until something else is said."""
        now_s = time.monotonic()
        if self._began_s:
            took_s = now_s - self._began_s
            self._seat.took(took_s)
        self._began_s = now_s
        self._is_compared = self._is_first_round or self.rounds % COMPARED_STEPS == 0
        group = self._seat.group
        self._state.begin_step()
        self._replica.begin(is_checked=self._is_compared and group.size > 1)
        share = self.global_batch // group.size + (group.rank < self.global_batch % group.size)
        self._loss_sum, self._passes, self._is_share = 0.0, [], False
        self.expect(share)
        self._is_share = True

    def _on_change(self) -> None:
        """Another membership."""
        self._gradients.attach(self._seat.group, FORMER_SLOT_WORDS if self._seat.is_former else SLOT_WORDS)
        if self.is_first:
            _reports.report_as_first()
        if self._data:
            self._data.begin(self._seat.workers, self._seat.worker)
        self._began_s, self._is_first_round = 0.0, True
        self._begin_step()
        self._met_s = self._began_s

    # State.

    def checkpoint(self, name: str | os.PathLike[str], *, wait: bool = False) -> bool:
        """Write everything into SWARM_CHECKPOINT_DIR as `name` and commit it, on the first rank; false on the others.

        A job that is started again goes on from there by itself.  One that cannot be written is as one that is refused.
        What the script changes between this and the next step belongs to it: then it is written again.
        """
        folder = os.environ.get("SWARM_CHECKPOINT_DIR", "")
        name = _commits.name_in(folder, name)
        self.count_step()
        if not folder or self._given is not None:  # on its way to the present epoch
            return False
        self._course.saved()
        if not self._is_readable:  # on all ranks: each would fail in its turn when it has become the first
            self._state.check()
            self._is_readable = True
        if not self.is_first:
            return False
        problem = _written(self.full_state_dict(), Path(folder) / name)
        state = _commits.state()
        if problem:
            return state.give_up(name, wait, problem)
        if self._is_between or self._data is not None:  # else the next step has begun already
            self._saved = name, self._replica.saved()
        return state.commit(name, wait, _commits.WAIT_S)

    def _confirm(self) -> None:
        """Where a step begins: a checkpoint of the one before holds all that the script did in it."""
        saved, self._saved = self._saved, None
        if saved is None or saved[1] == self._replica.saved():
            return
        warn(
            f"checkpoint {saved[0]!r} is written again, as the script changed what it holds in the same step; call "
            "checkpoint() last, behind schedules and averages"
        )
        folder = os.environ.get("SWARM_CHECKPOINT_DIR", "")
        problem = _written(self.full_state_dict(), Path(folder) / saved[0])
        state = _commits.state()
        if problem:
            state.give_up(saved[0], False, problem)
        else:
            state.commit(saved[0], False, _commits.WAIT_S)

    def report(self, **figures: _reports.Number) -> bool:
        """As `swarm_elastic.report`, on the first rank; step, samples, loss and noise are told without it."""
        return self.is_first and _reports.report(**figures)

    def state_dict(self) -> dict[str, Any]:
        """How far training has come, without weights and optimizer."""
        state = {
            "rounds": self.rounds,
            "finished": self._finished,
            "step": self.step_number,
            "samples": self.samples,
            "loss": self.loss,
            "global_batch": self.global_batch,
            "data": self._data.state() if self._data else self._data_state,
            "goes_on": self._seat.has_trained_once or self._given is not None,
            **self._course.state(),
        }
        found: dict[str, Any] = plain(state)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, as others who train do."""
        self._load(state)
        _reports.follow_batch(self.global_batch)
        if not self._seat.is_trained:
            self._given = Arrival(self._state) if state.get("goes_on", self.rounds > 0) else None
            self._replica.prove(is_equal=self._given is None)

    def _load(self, state: Mapping[str, Any]) -> None:
        self.rounds, self._finished = state["rounds"], state["finished"]
        self.step_number, self.samples, self.loss = state["step"], state["samples"], state["loss"]
        self.global_batch, self._data_state = state["global_batch"], state["data"]
        self._course.load(state)
        if self._data and self._data_state:
            self._data.load(self._data_state)

    def full_state_dict(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        return {"format": FORMAT, **self._state.full(), "progress": self.state_dict()}

    def _find_start(self, start_step: int) -> tuple[int, bool]:
        """The round from which this worker could begin, and whether it may where a plan is not the first."""
        path = os.environ.get("SWARM_RESUME_FROM", "")
        if start_step >= 0:
            self.rounds = self.step_number = start_step
        elif path:
            self._resume(path)
        return self.rounds, bool(path) or start_step >= 0

    def _resume(self, path: str) -> None:
        named = f"SWARM_RESUME_FROM, {path},"
        if not Path(path).is_file():
            raise ValueError(f"{named} is no file that Elastic.checkpoint has written; {LOAD}")
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001  # whatever torch, pickle and zip files raise
            told = str(error).partition("\n")[0]
            problem = f"{named} is damaged, or was not written by Elastic.checkpoint: {type(error).__name__}: {told}"
            raise ValueError(f"{problem}; {LOAD}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"{named} was not written by Elastic.checkpoint; {LOAD}")
        difference = self._state.difference(found)
        if difference:
            raise ValueError(f"{named} is of another training: {difference}; {SAME}")
        try:
            self._state.load_full(found)
            self._load(found["progress"])
            self._given = Arrival(self._state)
        except Exception as error:
            raise ValueError(f"{named} does not fit: {type(error).__name__}: {error}; {SAME}") from error


def _is_agreed(table: list[Words]) -> bool:
    """Whether all ranks can switch to the same plan."""
    return table[0].ready > 0 and all(each.ready == table[0].ready for each in table)


def _written(state: Mapping[str, Any], path: Path) -> str:
    """Write a file that is there as a whole or not at all; returns what went wrong."""
    beside = path.with_name(f".{os.getpid()}.part")
    try:
        with beside.open("wb") as stream:
            torch.save(state, stream)
        beside.replace(path)
    except (OSError, RuntimeError) as error:  # behind an OSError in a write torch raises a RuntimeError of its own
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        return f"{path} could not be written: {cause}"
    finally:
        with suppress(OSError):
            beside.unlink()
    return ""

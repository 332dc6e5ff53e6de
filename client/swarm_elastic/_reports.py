"""Telling the agent how training goes, without making training wait.

A caller only puts figures into a queue.  One thread sends the newest of each once a second at most, on a connection
for each; while no agent answers, older figures give way to newer ones.
"""

from __future__ import annotations

import _thread
import atexit
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import Any, SupportsFloat

from swarm_elastic._arguments import number, whole
from swarm_elastic._commits import AWAY_S, VERSION, warn

INTERVAL_S = 1.0
QUEUE_MAX = 1_024  # beyond it the oldest are dropped
ANSWER_BYTES_MAX = 1 << 16
BATCH_MAX = (1 << 32) - 1  # as agents have it
EXIT_WAIT_S = 1.0
COUNTS = ("step", "samples", "epoch")
GOALS = (
    "total_steps",
    "total_epochs",
    "target_loss",
    "parameter_bytes",
    "moved_bytes",
    "largest_bytes",
)  # told anew each time: an agent that was restarted does not know them

Number = SupportsFloat


def report(
    *,
    step: Number | None = None,
    samples: Number | None = None,
    epoch: Number | None = None,
    loss: Number | None = None,
    global_batch: Number | None = None,
    grad_noise: Number | None = None,
    data_wait: Number | None = None,
    total_steps: Number | None = None,
    total_epochs: Number | None = None,
    target_loss: Number | None = None,
    parameter_bytes: Number | None = None,
    moved_bytes: Number | None = None,
    largest_bytes: Number | None = None,
    sample_flops: Number | None = None,
    decode_core_s: Number | None = None,
) -> bool:
    """Tell how far training has come; call it as often as you like, on one rank or on all.

    `step`, `samples` (of all ranks together) and `epoch` (2.5 is the middle of the third) count from the beginning of
    training, also after a restart from a checkpoint.  `global_batch` is the samples of one step of all ranks together,
    which a script that asks for it (`global_batch`) need not tell.  `grad_noise` is variance over squared norm of the
    gradient of the first batch size, `data_wait` the part of its time (0 to 1) for which training waits for data, and
    `target_loss` the loss that ends it, if one does.  `parameter_bytes` and the figures behind it say what the model
    computes and moves in a step, by which hosts are chosen (docs/reference/reports.md).  Returns at once; False
    outside of a swarm, where nothing happens.  TypeError for what is no number.  A tensor on a GPU is waited for: give
    `loss.item()` where you have it anyway.
    """
    given = {
        "step": step,
        "samples": samples,
        "epoch": epoch,
        "loss": loss,
        "global_batch": global_batch,
        "grad_noise": grad_noise,
        "data_wait": data_wait,
        "total_steps": total_steps,
        "total_epochs": total_epochs,
        "target_loss": target_loss,
        "parameter_bytes": parameter_bytes,
        "moved_bytes": moved_bytes,
        "largest_bytes": largest_bytes,
        "sample_flops": sample_flops,
        "decode_core_s": decode_core_s,
    }
    return report_figures({name: number(name, value) for name, value in given.items() if value is not None})


def report_figures(figures: dict[str, float]) -> bool:
    """The same of any figures that agents know."""
    return _reporter().put(figures)


def model_figures(parameters: Iterable[Any]) -> dict[str, float]:
    """What `report` may tell of a model with these parameters."""
    sizes = [each.numel() * each.element_size() for each in parameters if each.requires_grad]
    return {"parameter_bytes": sum(sizes), "largest_bytes": max(sizes, default=0)}


def global_batch(default: int) -> int:
    """The global batch to train with: the swarm's choice where the job declared a range (`--batch`), else `default`.

    Ask on one rank, between two steps, and broadcast the answer: ranks hear of a change at different moments.  What was
    answered last is told with each report of this process.
    """
    return _reporter().ask_batch(whole("default", default, 1, BATCH_MAX))


def batch_up_to(most: int, default: int) -> int:
    """The same for a training whose steps have so many samples at most."""
    return _reporter().ask_batch(default, most)


def local_batch_most() -> int:
    """Samples that this process may take at once on the GPUs that it has (`--local-batch`); 0: as many as it likes."""
    most = os.environ.get("SWARM_LOCAL_BATCH_MOST", "")
    return int(most) if most.isdecimal() else 0


def follow_batch(batch: int) -> None:
    """The job trains with this global batch, as its first rank was told: what this process was told is older."""
    if _reporter().told_batch:  # else nobody chooses one, and another training of this process keeps its own
        _reporter().told_batch = batch


def report_as_first() -> None:
    """This process has become the job's first rank, whatever it was called at the start."""
    _reporter().rank = 0


class Reporter:
    """One process's reports to its agent."""

    def __init__(self) -> None:
        self._path, self._token = os.environ.get("SWARM_TASK_SOCKET", ""), os.environ.get("SWARM_TASK_TOKEN", "")
        rank = os.environ.get("RANK") or os.environ.get("SWARM_RANK") or "0"
        self.rank = int(rank) if rank.isdecimal() else 0
        self._queue: deque[tuple[float, dict[str, float]]] = deque(maxlen=QUEUE_MAX)
        self._has_thread = False
        self._ending, self._done = threading.Event(), threading.Event()
        self._pid = os.getpid()
        self._goals: dict[str, float] = {}
        self._warned: set[str] = set()
        first = os.environ.get("SWARM_GLOBAL_BATCH", "")
        self.told_batch = int(first) if first.isdecimal() else 0  # by the agent, here or to another rank
        self._batch = 0  # with which the script trains, if it has asked

    def put(self, figures: dict[str, float]) -> bool:
        """Have the figures sent."""
        if not self._path:
            return False
        self._queue.append((time.monotonic(), figures))
        if not self._has_thread:
            self._has_thread = True
            _thread.start_new_thread(self._run, ())
            atexit.register(self._flush_at_exit)
        return True

    def ask_batch(self, default: int, most: int = BATCH_MAX) -> int:
        """See `global_batch`."""
        batch = self.told_batch or default
        if batch > most and str(batch) not in self._warned:
            self._warned.add(str(batch))
            warn(f"the swarm chose a global batch of {batch}; {most} is trained with: submit with --batch up to that")
        self._batch = min(batch, most)
        return self._batch

    def _flush_at_exit(self) -> None:
        if os.getpid() == self._pid:
            self._ending.set()
            self._done.wait(EXIT_WAIT_S)

    # In the thread.

    def _run(self) -> None:
        figures: dict[str, float] = {}  # not told yet
        at_s, is_last = 0.0, False
        while not is_last:
            is_last = self._ending.is_set()
            while self._queue:
                moment_s, newer = self._queue.popleft()
                figures.update(newer)
                at_s = moment_s if at_s == 0.0 or any(name in newer for name in COUNTS) else at_s
            try:
                if figures and self._send(figures, at_s):
                    figures, at_s = {}, 0.0
            except Exception as error:  # noqa: BLE001  # without this thread nothing would be reported, and nobody told why
                figures, at_s = {}, 0.0
                warn(f"not reported: {type(error).__name__}: {error}")
            if not is_last:
                self._ending.wait(INTERVAL_S)
        self._done.set()

    def _send(self, figures: dict[str, float], at_s: float) -> bool:
        """False when no agent answered."""
        self._goals.update({name: figures[name] for name in GOALS if name in figures})
        request = {"v": VERSION, "type": "report", "token": self._token, "rank": self.rank, "time": at_s}
        batch = {"global_batch": self._batch} if self._batch else {}
        line = json.dumps({**request, **self._goals, **batch, **figures}).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(AWAY_S)
                connection.connect(self._path)
                connection.sendall(line)
                with connection.makefile("rb") as stream:
                    data = stream.readline(ANSWER_BYTES_MAX)
        except OSError:
            return False
        try:
            answer = json.loads(data)
        except ValueError:
            return False  # it hung up
        if isinstance(answer, dict):
            self._tell(answer)
        return True

    def _tell(self, answer: dict[str, object]) -> None:
        """With which batch to go on; and what was left out, once for each figure."""
        batch = answer.get("global_batch")
        if isinstance(batch, int) and batch > 0:
            self.told_batch = batch
        ignored = answer.get("ignored")
        problems = ignored if isinstance(ignored, list) else []
        if answer.get("ok") is not True:
            problems = [{"field": answer.get("error"), "problem": answer.get("problem")}]
        for each in problems:
            name, problem = (str(each.get(key)) for key in ("field", "problem")) if isinstance(each, dict) else ("", "")
            if name not in self._warned:
                self._warned.add(name)
                warn(f"not reported: {problem}")


@cache
def _reporter() -> Reporter:
    """This process's; a forked child begins anew, since threads do not survive a fork."""
    return Reporter()


os.register_at_fork(after_in_child=_reporter.cache_clear)

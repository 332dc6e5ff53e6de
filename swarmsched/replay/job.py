"""One job of a replay: where it is, how far it has come, what it has had."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import LIVE_PAUSE_S
from swarmsched.estimate import Elastic
from swarmsched.ids import JobId
from swarmsched.replay.physics import Physics
from swarmsched.replay.profiles import Shape
from swarmsched.resources import Share

SLACK = 1e-9
"""Relative distance to the end of an epoch that counts as there: sums of floating-point numbers fall short."""


@dataclass(frozen=True)
class Terms:
    """What its user and its script say of a job, beside its size: what its card tells, and when it may be stopped."""

    kind_by: str = "name"  # what jobs of one kind are told by: name, program, or none
    restartable: bool = False
    commits: bool = True  # checkpoints
    begins_saved: bool = (
        True  # from the first moment of an attempt, as published simulators have it; else once it trains
    )
    tells_pause: bool = False  # what a change has cost it


@dataclass(eq=False)
class ReplayJob:
    """Advances by `advance` and changes by `allocate`; times in seconds since the replay began."""

    job_id: JobId
    label: str  # its name in the trace, for results alone
    kind: str  # what jobs of one sort share, hashed
    submitted_s: float
    gpus: int  # asked for
    physics: Physics
    elastic: Elastic | None = None
    user: str = ""
    shares: tuple[Share, ...] = ()
    batch: int = 0
    progress: float = 0.0
    pause_s: float = 0.0  # still to wait before it trains
    paid_s: float = 0.0  # what its newest start has cost
    checkpoint_s: float = inf  # seconds of training between checkpoints
    saved: float = 0.0  # progress of the newest checkpoint
    unsaved_s: float = 0.0  # seconds of training since then
    attained_gpu_s: float = 0.0
    changed_s: float = 0.0  # when it was submitted, or its GPUs became others
    first_started_s: float | None = None
    ended_s: float | None = None
    rescales: int = 0
    migrations: int = 0
    preemptions: int = 0
    told: str = ""  # of it by the last plan
    terms: Terms = Terms()

    @property
    def ranks(self) -> int:
        """GPUs that it has."""
        return sum([share.ranks for share in self.shares])

    @property
    def least(self) -> int:
        """GPUs without which it does not start."""
        return self.elastic.ranks_least if self.elastic else self.gpus

    @property
    def shape(self) -> Shape:
        """GPUs on each of its nodes, by name of the node."""
        return tuple([share.ranks for share in sorted(self.shares, key=lambda one: one.node)])

    @property
    def state(self) -> JobState:
        """As its card would say."""
        if self.ended_s is not None:
            return JobState.ENDED
        return JobState.RUNNING if self.shares else JobState.QUEUED

    @property
    def has_checkpoint(self) -> bool:
        """Its present attempt has committed one."""
        return bool(self.shares) and self.terms.commits and (self.terms.begins_saved or not self.pause_s)

    @property
    def may_be_stopped(self) -> bool:
        """No plan may take the GPUs of a running job of which this is not true."""
        return self.terms.commits or self.terms.restartable

    @property
    def offered(self) -> Elastic | None:
        """The sizes that may be chosen now: of a running job once it would lose nothing, as its card would tell."""
        elastic = self.elastic
        is_free = elastic and (not self.shares or elastic.is_live or self.has_checkpoint)
        return replace(elastic, global_batch=self.batch) if elastic and is_free else None

    @property
    def told_pause_s(self) -> float:
        """What its card tells that a change costs; 0: nothing."""
        if self.elastic and self.elastic.is_live:
            return LIVE_PAUSE_S
        return self.paid_s if self.terms.tells_pause else 0.0

    def allocate(self, shares: Sequence[Share], batch: int, now_s: float, pause_s: float) -> None:
        """From now on it has these; a change of hosts costs a pause, one of the batch nothing.

        A change while it trains is over after `LIVE_PAUSE_S`, where the job takes one: its start costs the whole pause.
        """
        before = self.shares
        self.batch = batch or self.batch
        if set(before) == set(shares):
            return
        self._save()  # the pause pays for it
        self.shares, self.changed_s = tuple(shares), now_s
        if not shares:
            self.preemptions += 1
            return
        is_switch = before and self.elastic is not None and self.elastic.is_live
        self.pause_s = max(self.pause_s, min(pause_s, LIVE_PAUSE_S)) if is_switch else pause_s
        self.paid_s = pause_s
        if self.first_started_s is None:
            self.first_started_s = now_s
        else:
            self.rescales += 1
            self.migrations += bool(before) and sum([share.ranks for share in before]) == self.ranks

    def leave(self, now_s: float) -> None:
        """Its ranks were stopped in order: it waits, and has lost nothing."""
        self._save()
        self.shares, self.pause_s, self.changed_s = (), 0.0, now_s

    def lose_hosts(self, now_s: float) -> float:
        """A node of it has failed: it waits again, at its newest checkpoint; tells the GPU-seconds of training lost."""
        lost_gpu_s = self.ranks * self.unsaved_s
        self.shares, self.pause_s = (), 0.0
        self.progress, self.unsaved_s = self.saved, 0.0
        self.changed_s = now_s
        return lost_gpu_s

    def advance(self, now_s: float, to_s: float) -> None:
        """Train until then, or to the end: then `ended_s` says when."""
        if not self.shares:
            return
        ranks, shape = self.ranks, self.shape
        left_s = to_s - now_s
        while self.ended_s is None:
            taken_s = self._to_next(shape, to_s - left_s, left_s)
            self.attained_gpu_s += ranks * taken_s
            left_s -= taken_s
            if self.progress >= self.physics.total * (1.0 - SLACK):
                self.ended_s = to_s - left_s
            elif left_s <= 0.0:
                return

    def ends_in_s(self) -> float:
        """Seconds until its end if nothing changes; infinite while it does not run."""
        if not self.shares:
            return inf
        shape, progress, total_s = self.shape, self.progress, self.pause_s
        while progress < self.physics.total * (1.0 - SLACK):
            pace = self.physics.pace(shape, self.batch, progress)
            if not pace.rate:
                return inf
            total_s += (pace.until - progress) / pace.rate
            progress = pace.until * (1.0 + SLACK)
        return total_s

    def _to_next(self, shape: Shape, now_s: float, left_s: float) -> float:
        """Go on to the next change of pace or checkpoint, or for `left_s`; tells the seconds that this took.

        What takes less than the clock can show is over at once: nobody could be woken for its end.
        """
        if self.pause_s:
            taken_s = min(self.pause_s, left_s)
            self.pause_s = 0.0 if now_s + self.pause_s == now_s else self.pause_s - taken_s
            return taken_s
        pace = self.physics.pace(shape, self.batch, self.progress)
        taken_s = min(left_s, self.checkpoint_s - self.unsaved_s)
        is_over = pace.rate > 0.0 and now_s + (pace.until - self.progress) / pace.rate == now_s
        if pace.rate * taken_s < pace.until - self.progress and not is_over:
            self.progress += pace.rate * taken_s
        else:
            taken_s = 0.0 if is_over else (pace.until - self.progress) / pace.rate
            self.progress = pace.until * (1.0 + SLACK)
        self.unsaved_s += taken_s
        if self.unsaved_s >= self.checkpoint_s:
            self._save()
        return taken_s

    def _save(self) -> None:
        self.saved, self.unsaved_s = self.progress, 0.0

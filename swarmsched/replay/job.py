"""One job of a replay: where it is, how far it has come, what it has had."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import floor, inf

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import LIVE_PAUSE_S
from swarmsched.estimate import Resizable, StepCost
from swarmsched.ids import JobId, NodeId
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.physics import Physics, ProfiledPhysics, RigidPhysics, TruePace
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
    priority: int = 0
    time_limit_s: float = 0.0  # of an attempt; 0: none
    deadline_s: float = 0.0  # on the replay's clock; 0: none
    failure: float = 0.0  # part of its work after which it fails; 0: it does not


@dataclass(eq=False)
class ReplayJob:
    """Advances by `advance` and changes by `allocate`; times in seconds since the replay began."""

    job_id: JobId
    label: str  # its name in the trace, for results alone
    kind: str  # what jobs of one sort share, hashed
    submitted_s: float
    gpus: int  # asked for
    physics: Physics
    elastic: Resizable | None = None
    user: str = ""
    shares: tuple[Share, ...] = ()
    batch: int = 0
    progress: float = 0.0
    pause_s: float = 0.0  # still to wait before it trains
    paid_s: float = 0.0  # what its newest start has cost
    paused_s: float = 0.0  # what changes of its hosts while it ran have cost it
    resized_s: float | None = None  # when the last of them was
    checkpoint_s: float = inf  # seconds of training between checkpoints
    saved: float = 0.0  # progress of the newest checkpoint
    unsaved_s: float = 0.0  # seconds of training since then
    ran_s: float = 0.0  # its present attempt
    attained_gpu_s: float = 0.0
    changed_s: float = 0.0  # when it was submitted, or its present attempt began
    first_started_s: float | None = None
    ended_s: float | None = None
    rescales: int = 0
    migrations: int = 0
    preemptions: int = 0
    told: str = ""  # of it by the last plan
    terms: Terms = Terms()
    has_failed: bool = False  # or came to its time limit
    slowed: float = 1.0  # the part of its speed that its hosts and its neighbours leave it
    costs_s: float | None = None  # a change of its hosts; None: as of any job
    work: StepCost | None = None  # of a step, where its row tells that: then hosts that differ make it faster or slower

    def __post_init__(self) -> None:
        self.changed_s = max(self.changed_s, self.submitted_s)

    @property
    def ranks(self) -> int:
        """GPUs that it has."""
        return sum([share.ranks for share in self.shares])

    @property
    def least(self) -> int:
        """GPUs without which it does not start."""
        return self.elastic.ranks_least if self.elastic else self.gpus

    @property
    def is_guessed(self) -> bool:
        """Nobody has measured it on as many GPUs as it has."""
        return isinstance(self.physics, ProfiledPhysics) and not self.physics.knows(self.shape, self.batch)

    def share_s(self, cluster: Fleet, gpus: float) -> float:
        """Seconds that it would take alone on an equal share of so many GPUs, of each class its part of them.

        One that needs more of them has these for a part of the time; for one that takes several sizes it is the best
        possible time.
        """
        parts = cluster.class_parts.items()
        speed = sum([part / each_s for model, part in parts if (each_s := self._on_s(cluster, model, gpus))])
        return (self.terms.failure or 1.0) / speed if speed else inf

    def _on_s(self, cluster: Fleet, model: str, gpus: float) -> float:
        def whole_s(count: int) -> float:
            there = cluster.part(model, count)
            if self.elastic or there.total < count:
                return self.physics.alone_s(there) if there.total >= self.least else inf
            pace = partial(self.physics.on([model]).pace, tuple(there.gpus.values()), self.batch)
            return _seconds(pace, 0.0, self.physics.total)

        most = self.elastic.ranks_most if self.elastic else self.gpus
        if gpus <= self.least:
            return whole_s(self.least) * self.least / gpus
        below = min(floor(gpus), most)
        part = min(gpus, most) - below
        rate = (1.0 - part) / whole_s(below) + (part / whole_s(below + 1) if part else 0.0)
        return 1.0 / rate if rate else inf

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
        """True once the present attempt has committed a checkpoint."""
        return bool(self.shares) and self.terms.commits and (self.terms.begins_saved or not self.pause_s)

    @property
    def may_be_stopped(self) -> bool:
        """No plan may take the GPUs of a running job of which this is not true."""
        return self.terms.commits or self.terms.restartable

    @property
    def offered(self) -> Resizable | None:
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
        is_switch = bool(before and shares and self.elastic and self.elastic.is_live)
        self.shares = tuple(shares)
        if not is_switch:
            self.changed_s, self.ran_s = now_s, 0.0
        if not shares:
            self.preemptions += 1
            return
        self.pause_s = max(self.pause_s, min(pause_s, LIVE_PAUSE_S)) if is_switch else pause_s
        self.paid_s = pause_s
        if before:
            self.paused_s, self.resized_s = self.paused_s + (LIVE_PAUSE_S if is_switch else pause_s), now_s
        if self.first_started_s is None:
            self.first_started_s = now_s
        else:
            self.rescales += 1
            self.migrations += bool(before) and sum([share.ranks for share in before]) == self.ranks

    def note_migration(self) -> None:
        """The job goes on with its size on other hosts."""
        self.migrations += 1

    def leave(self, now_s: float) -> None:
        """The ranks were stopped in order: the job waits, and has lost nothing."""
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
            self.ran_s += taken_s
            left_s -= taken_s
            if self._is_done(self.progress):
                self.ended_s, self.has_failed = to_s - left_s, bool(self.terms.failure)
            elif self._limit_in_s <= SLACK * self.ran_s:
                self.ended_s, self.has_failed = to_s - left_s, True
            elif left_s <= 0.0:
                return

    def ends_in_s(self) -> float:
        """Seconds until its end if nothing changes; infinite while it does not run."""
        if not self.shares:
            return inf
        ends_s = self.pause_s + _seconds(partial(self._pace, self.shape), self.progress, self._last)
        return min(ends_s, self._limit_in_s)

    @property
    def _limit_in_s(self) -> float:
        """Seconds for which its attempt may still run."""
        return max(0.0, self.terms.time_limit_s - self.ran_s) if self.terms.time_limit_s else inf

    @property
    def _last(self) -> float:
        """Its progress when it ends."""
        return self.physics.total * (self.terms.failure or 1.0)

    def _is_done(self, progress: float) -> bool:
        return progress >= self._last * (1.0 - SLACK)

    def _pace(self, shape: Shape, progress: float) -> TruePace:
        rate, until = self.physics.pace(shape, self.batch, progress)
        return TruePace(rate * self.slowed, min(until, self._last))

    def _to_next(self, shape: Shape, now_s: float, left_s: float) -> float:
        """Go on to the next change of pace, checkpoint or limit, or for `left_s`; tells the seconds that this took.

        What takes less than the clock can show is over at once: nobody could be woken for its end.
        """
        left_s = min(left_s, self._limit_in_s)
        if self.pause_s:
            taken_s = min(self.pause_s, left_s)
            self.pause_s = 0.0 if now_s + self.pause_s == now_s else self.pause_s - taken_s
            return taken_s
        pace = self._pace(shape, self.progress)
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


def _seconds(pace: Callable[[float], TruePace], begin: float, end: float) -> float:
    """From one progress to another; infinite where there comes none."""
    progress, total_s = begin, 0.0
    while progress < end * (1.0 - SLACK):
        rate, until = pace(progress)
        if not rate:
            return inf
        total_s += (until - progress) / rate
        progress = until * (1.0 + SLACK)
    return total_s


def interfere(jobs: Collection[ReplayJob], part: float, cluster: Fleet) -> list[ReplayJob]:
    """Slow down distributed jobs that share a node by this part of their speed, however many they are. So does the
    published simulator of Pollux.  A job that tells its work is as fast as its hosts let it be.  Returns those whose
    speed has changed by it."""
    spread = {job.job_id: {share.node for share in job.shares} for job in jobs if len(job.shares) > 1}
    counts = Counter([node for nodes in spread.values() for node in nodes])
    booked: Counter[NodeId] = Counter()
    for job in jobs:
        for share in job.shares:
            booked[share.node] += share.ranks
    changed = []
    for job in jobs:
        is_crowded = any(counts[node] > 1 for node in spread.get(job.job_id, ()))
        slowed = 1.0 - part if is_crowded else 1.0
        if job.work is not None and job.shares:
            is_rigid = isinstance(job.physics, RigidPhysics)  # else its times are those of the GPUs that it has
            slowed *= cluster.speed_ratio(job.work, job.shares, booked, on_usual=is_rigid)
        if slowed != job.slowed:
            job.slowed = slowed
            changed.append(job)
    return changed

"""The shepherds of one agent: for which jobs it acts, what is kept of each beside its shepherd, whose timer is due."""

import random
from collections.abc import Iterator, Sequence
from itertools import count

from swarmsched.api import JobState
from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.deadlines import Deadlines
from swarmsched.ids import JobId, NodeId
from swarmsched.models.hosts import model_alone
from swarmsched.negotiation.placement.own_view import OwnViews
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.negotiation.shepherd_state import Openings, ShepherdParts
from swarmsched.negotiation.window import Window
from swarmsched.policies.room import Room
from swarmsched.record import JobRecord
from swarmsched.resources import Share
from swarmsched.view import JobView, NodeView

CLOSED = (False,) * 4


class Shepherds:
    """One for each job of this agent that has not ended."""

    def __init__(self, me: NodeId, cluster: Cluster, rng: random.Random, parts: ShepherdParts) -> None:
        self._me = me
        self._cluster = cluster
        self._parts = parts
        self._rng = rng
        self.jobs: dict[JobId, JobShepherd] = {}
        self.elastic: dict[JobId, None] = {}  # those of them that take several sizes
        self.live: dict[JobId, None] = {}  # those that change while they train
        self.stoppable: dict[JobId, None] = {}  # those that may be ended for others
        self.misfits: dict[JobId, None] = {}  # those that are to have another size than they have
        self._without_files: tuple[JobId, ...] = ()  # that nobody has who can be reached; of jobs of others as well
        self._files_told_s = float("-inf")
        self.window: Window[JobId] = Window()  # of attempts that wait for their owners and holders
        self.update_ids: Iterator[int] = count(1)  # of register updates, unique within this agent's life
        self._views = OwnViews()
        self._stirred: dict[JobId, None] = {}  # jobs whose deadline may have changed
        self._moved: dict[JobId, None] = {}  # jobs of ours that may stand elsewhere in the queue, or nowhere
        self.touched: dict[JobId, None] = {}  # jobs to which something has happened, those that are gone too
        self._known: dict[JobId, tuple[JobRecord, Openings]] = {}  # as they were after that
        self._deadlines: Deadlines[JobId] = Deadlines()

    def add(self, record: JobRecord) -> JobShepherd:
        """Shepherd this job."""
        told = self._cluster.jobs.get(record.job_id)
        estimate = told.card.estimate if told is not None else None  # as its last shepherd knew it
        if estimate is None:
            # Of one whose size is fixed nothing but its hosts is chosen by what others of its kind have measured.
            prior, spec = self._cluster.prior(record.spec), record.spec
            estimate = prior if spec.is_resizable else model_alone(prior, spec.demand.gpus)
        ours = (self._me, self._rng, self.update_ids, self._parts, self.stir, self.window, self._cluster.could_take)
        shepherd = JobShepherd(record, *ours, estimate)
        if record.job_id in self._without_files:
            shepherd.pacing.files_looked(self._files_told_s, is_away=True)
        self.jobs[record.job_id] = shepherd
        self._sort(shepherd)
        self.stir(record.job_id)
        return shepherd

    def files_away(self, job_ids: Sequence[JobId], now_s: float) -> list[tuple[JobId, bool]]:
        """The files of these jobs alone cannot be had: jobs of ours that are to hear whether theirs are among them."""
        back = [job_id for job_id in self._without_files if job_id not in job_ids]
        self._without_files, self._files_told_s = tuple(job_ids), now_s
        return [(job_id, job_id in job_ids) for job_id in (*job_ids, *back) if job_id in self.jobs]

    def _sort(self, job: JobShepherd) -> bool:
        """Note of which sorts a job is by its record; true if it has come to be of one."""
        record = job.decided
        is_stoppable = record.spec.restartable or record.has_own_checkpoint
        sorts = ((self.elastic, record.spec.is_resizable), (self.live, record.spec.elastic))
        is_new = False
        for those, is_one in (*sorts, (self.stoppable, is_stoppable), (self.misfits, record.is_misfit)):
            is_new |= is_one and job.job_id not in those
            if is_one:
                those[job.job_id] = None
            else:
                those.pop(job.job_id, None)
        return is_new

    def let_go(self, job_id: JobId) -> None:
        """Stop acting for a job: it has ended, or another shepherd has it."""
        self.jobs.pop(job_id, None)
        for those in (self.elastic, self.live, self.stoppable, self.misfits, self._known):
            those.pop(job_id, None)
        self._views.drop(job_id)
        self._deadlines.drop(job_id)
        self.window.forget(job_id)
        self._moved[job_id] = self.touched[job_id] = None

    # Their timers, and news of them.

    def take_news(self) -> tuple[Sequence[JobShepherd], bool]:
        """Jobs to which something has happened since this was last asked, and whether a look at the queue may find
        something to do. That is so when one has come to wait, to be steady, to be placed no more, to have its place
        kept or to be of another sort, or has gone."""
        news = [self.jobs[job_id] for job_id in self.touched if job_id in self.jobs]
        has_openings = len(news) < len(self.touched)
        self.touched.clear()
        for job in news:
            record, openings = self._known.get(job.job_id, (None, CLOSED))
            if record is not job.decided:
                has_openings |= self._sort(job)
            now = job.openings
            has_openings |= any(opens and not opened for opens, opened in zip(now, openings, strict=True))
            self._known[job.job_id] = (job.decided, now)
        return news, has_openings

    def stir(self, job_id: JobId) -> None:
        """Something has happened to a job: its deadline, its place in the queue and what others know of it may be
        old. Nothing for one that is not ours."""
        if job_id in self.jobs:
            self._stirred[job_id] = self._moved[job_id] = self.touched[job_id] = None

    @property
    def next_deadline_s(self) -> float:
        """Earliest of the jobs' own timers."""
        self._note_deadlines()
        return self._deadlines.next_s

    def due(self, now_s: float) -> list[JobShepherd]:
        """Jobs whose own timers have something to do."""
        self._note_deadlines()
        return [self.jobs[job_id] for job_id in self._deadlines.due(now_s)]

    def _note_deadlines(self) -> None:
        for job_id in self._stirred:
            if (job := self.jobs.get(job_id)) is not None:
                self._deadlines.put(job_id, job.next_deadline_s)
        self._stirred.clear()

    def take_moved(self) -> Sequence[JobId]:
        """Jobs of ours that may stand elsewhere in the queue, or nowhere, since this was last asked."""
        moved, self._moved = tuple(self._moved), {}
        return moved

    # What they have, and what they wait for.

    @property
    def waits_for_room(self) -> bool:
        """Whether jobs of this agent are queued, or run and are to have more."""
        return bool(self.misfits) or any(job.decided.state is JobState.QUEUED for job in self.jobs.values())

    def view_of(self, job: JobShepherd, clock: Clock) -> JobView:
        """A shepherded job as a policy sees it: the same object until something of it has changed."""
        return self._views.of(job, clock)

    def room(self, nodes: Sequence[NodeView]) -> Room:
        """Free resources less what our own unanswered holds will take."""
        room = Room(nodes)
        for job in self.jobs.values():
            for share in job.unanswered_holds:
                demand = job.decided.spec.of_group(share.group).demand
                ranks = min(share.ranks, room.fits(demand).get(share.node, 0))
                if ranks:
                    room.take([Share(share.node, ranks)], demand)
        return room

    def validate(self) -> None:
        """Re-derive what is kept of our jobs."""
        assert self._views.jobs <= self.jobs.keys()
        assert self.elastic.keys() == {job_id for job_id, job in self.jobs.items() if job.decided.spec.is_resizable}
        assert self.stoppable.keys() <= self.jobs.keys()
        for job_id, job in self.jobs.items():
            assert job_id == job.job_id
            job.validate()

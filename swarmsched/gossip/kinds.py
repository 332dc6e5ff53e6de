"""What jobs of one kind, those of a user by one name, have measured: planners know them all by it, and the next one
begins with it.

Every agent keeps it of the cards that pass, so that nothing more travels; one that was not there begins without.

User and name are whatever a client has said, and reports are whatever a job says.  So no job takes away what others
have told: a time that is at odds with those that are known counts once another job says the same, room is made by
whoever has told the most, and of lengths the middle one counts.  A batch is never a matter of kinds
(`policies.resizing.question`).
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from statistics import median_low

from swarmsched.api import JobState
from swarmsched.card import NAME_LENGTH, JobCard
from swarmsched.estimate import (
    MERGED_POINTS,
    Configuration,
    Estimate,
    SpeedPoint,
    are_at_odds,
    configuration,
    is_news,
)
from swarmsched.ids import JobId
from swarmsched.view import KINDS_LIMIT, KindView
from swarmsched.wire.codec import encode_value

POINTS_MOST = 256
"""Of one kind: on 16 nodes of four GPUs a hundred are measured in a day.

None is left out for being near another: two batches tell what a step takes beside its samples, and one does not.
"""
LENGTHS_MOST = 32
DOUBTS_MOST = 4
WITNESSES = 3
"""Whose lengths have a middle."""
NORMAL = 1.4826
"""Standard deviations by the middle one of the absolute ones."""

_Place = tuple[str, Configuration]


@dataclass(slots=True)
class _Known:
    """A point, if one counts; the job that has told of it first, and what is at odds with what counts."""

    point: SpeedPoint | None
    witness: JobId
    doubts: OrderedDict[JobId, SpeedPoint] = field(default_factory=OrderedDict)

    def doubt(self, job_id: JobId, point: SpeedPoint) -> set[JobId]:
        """Take in a doubt; who else has said the same before."""
        same = {each for each, said in self.doubts.items() if each != job_id and not are_at_odds(said, point)}
        self.doubts[job_id] = point
        if len(self.doubts) > DOUBTS_MOST:
            self.doubts.popitem(last=False)
        return same


class _Kind:
    """One of them; whatever was heard of longest ago goes first."""

    def __init__(self) -> None:
        self._points: OrderedDict[_Place, _Known] = OrderedDict()  # by class of GPUs as well
        self._lengths: OrderedDict[JobId, float] = OrderedDict()
        self._done: OrderedDict[JobId, float] = OrderedDict()  # how far each has come
        self._speed: dict[str, bytes] = {}  # by class of GPUs

    def note(self, job_id: JobId, estimate: Estimate) -> None:
        """What one of them tells; of its points the last is the newest."""
        _put(self._done, job_id, estimate.done)
        for point in estimate.points:
            is_newest = point is estimate.points[-1]
            self._note_point(job_id, (estimate.gpu, configuration(point)), point, is_newest=is_newest)

    def completed(self, job_id: JobId, length: float) -> None:
        """One of them has come to its end."""
        _put(self._lengths, job_id, length)

    @property
    def prior(self) -> Estimate:
        """Times on the GPUs that were heard of last, the newest of them."""
        gpu = self._newest_gpu
        return Estimate(points=tuple(self._on(gpu)[-MERGED_POINTS:]), is_partial=True, is_prior=True, gpu=gpu)

    def view(self, user: str, name: str, gpu: str) -> KindView:
        """As planners see it: speed on GPUs of that class, or of the one that was heard of last if on none of that.

        Until one has completed, whoever has come second furthest is taken to have as much left as it has done, as heavy
        tails go (Tiresias, NSDI 2019), and the others to be as long: of two the first, so that none tells alone.
        """
        lengths = list(self._lengths.values())
        length = _middle(lengths) if lengths else 2.0 * max(sorted(self._done.values())[-2:][:1], default=0.0)
        deviation = NORMAL * _middle([abs(each - length) for each in lengths]) if lengths else 0.0
        error = deviation / length if length and len(lengths) > 1 else 1.0
        return KindView(user, name, self._packed(gpu), length, error if length else 0.0, gpu)

    @property
    def _newest_gpu(self) -> str:
        return next((gpu for (gpu, _), known in reversed(self._points.items()) if known.point), "")

    def _on(self, gpu: str) -> list[SpeedPoint]:
        return [known.point for (there, _), known in self._points.items() if there == gpu and known.point]

    def _packed(self, gpu: str) -> bytes:
        if gpu in self._speed or not self._points:
            return self._speed.get(gpu, b"")
        points = self._on(gpu)
        if not points:
            return self._packed(self._newest_gpu) if gpu != self._newest_gpu else b""
        self._speed[gpu] = encode_value(Estimate, Estimate(points=tuple(sorted(points, key=configuration))))
        return self._speed[gpu]

    def _note_point(self, job_id: JobId, place: _Place, point: SpeedPoint, *, is_newest: bool) -> None:
        known = self._points.get(place)
        if known is None:
            known = self._points[place] = _Known(None, job_id)
            self._make_room()
            if not self._is_odd(job_id, place[0], point):
                known.point = point
                self._speed.pop(place[0], None)
                return
        self._points.move_to_end(place)
        if known.point and known.witness == job_id:
            if is_newest and is_news(known.point, point) and not self._is_odd(job_id, place[0], point):
                known.point = point
                self._speed.pop(place[0], None)
        elif (known.point is None or are_at_odds(known.point, point)) and (same := known.doubt(job_id, point)):
            self._begin_anew({job_id, *same})
            self._points[place] = _Known(point, job_id)

    def _is_odd(self, job_id: JobId, gpu: str, point: SpeedPoint) -> bool:
        """Whether it is at odds with what others have told of other sizes."""
        others = [known for (there, _), known in self._points.items() if there == gpu and known.witness != job_id]
        return any(known.point and are_at_odds(point, known.point) for known in others)

    def _begin_anew(self, jobs: set[JobId]) -> None:
        """It is another training by the same name, whose are these."""
        for table in (self._lengths, self._done):
            for job_id in table.keys() - jobs:
                del table[job_id]
        self._points = OrderedDict((place, known) for place, known in self._points.items() if known.witness in jobs)
        self._speed.clear()

    def _make_room(self) -> None:
        """Whoever has told the most gives up what it has told longest ago."""
        if len(self._points) > POINTS_MOST:
            ((talker, _),) = Counter(known.witness for known in self._points.values()).most_common(1)
            oldest = next(place for place, known in self._points.items() if known.witness == talker)
            del self._points[oldest]
            self._speed.pop(oldest[0], None)


class Kinds:
    """By user and name, at most `KINDS_LIMIT`; whichever was heard of last stays."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, str], _Kind] = OrderedDict()

    def note(self, card: JobCard) -> None:
        """A card has come; what it has from others of its kind is no news."""
        estimate, key = card.estimate, (card.user, card.name)
        if not card.name or estimate is None or estimate.is_prior:
            return
        if card.state is JobState.ENDED:
            kind = self._kinds.get(key)
            if kind is not None and estimate.done:
                kind.completed(card.job_id, estimate.done)
        elif estimate.points:
            kind = self._kinds.setdefault(key, _Kind())
            self._kinds.move_to_end(key)
            kind.note(card.job_id, estimate)
            if len(self._kinds) > KINDS_LIMIT:
                self._kinds.popitem(last=False)

    def prior(self, user: str, name: str) -> Estimate | None:
        """What the card of a new job begins with: speed; how long it takes is for it to say."""
        kind = self._of(user, name)
        return kind.prior if kind is not None else None

    def view(self, user: str, name: str, gpu: str = "") -> KindView | None:
        """As planners see it, of jobs on GPUs of that class."""
        kind = self._of(user, name)
        return kind.view(user[:NAME_LENGTH], name[:NAME_LENGTH], gpu) if kind is not None else None

    def _of(self, user: str, name: str) -> _Kind | None:
        return self._kinds.get((user[:NAME_LENGTH], name[:NAME_LENGTH])) if name else None


def _put(table: OrderedDict[JobId, float], job_id: JobId, value: float) -> None:
    table[job_id] = value
    table.move_to_end(job_id)
    if len(table) > LENGTHS_MOST:
        table.popitem(last=False)


def _middle(values: list[float]) -> float:
    """That of the first while too few tell for one to be the middle."""
    return median_low(values) if len(values) >= WITNESSES else values[0]

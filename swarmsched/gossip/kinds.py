"""What jobs of one kind, those of a user by one name, have measured: planners know them all by it, and the next one
begins with it.

Every agent keeps it of the cards that pass, so that nothing more travels; one that was not there begins without.
"""

from collections import OrderedDict
from math import fsum, log2, sqrt

from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import NAME_LENGTH, JobCard
from swarmsched.estimate import (
    MERGED_POINTS,
    Configuration,
    Estimate,
    NoiseSample,
    NoiseTable,
    SpeedPoint,
    configuration,
    contradicts,
    is_news,
    is_other_noise,
    step_times,
)
from swarmsched.ids import JobId
from swarmsched.view import KINDS_LIMIT, KindView
from swarmsched.wire.codec import encode_value

POINTS_MOST = 256
"""Of one kind: on 16 nodes of four GPUs a hundred are measured in a day.

None is left out for being near another: two batches tell what a step takes beside its samples, and one does not.
"""
SAMPLES_MOST = 64
LENGTHS_MOST = 32


class _Kind:
    """One of them; whatever was heard of longest ago goes first."""

    def __init__(self) -> None:
        self.latest = Estimate()  # of one job's own reports
        self._points: OrderedDict[tuple[str, Configuration], SpeedPoint] = OrderedDict()  # by class of GPUs as well
        self._samples: OrderedDict[tuple[int, int], NoiseSample] = OrderedDict()
        self._lengths: OrderedDict[JobId, float] = OrderedDict()
        self._furthest = 0.0  # that any of them has come
        self._speed: dict[str, bytes] = {}  # by class of GPUs
        self._noise = b""

    def is_belied_by(self, estimate: Estimate) -> bool:
        """Whether its newest step takes another time than it took others: it is another training by the same name."""
        known = self._points.get((estimate.gpu, configuration(estimate.points[-1])))
        return known is not None and contradicts(step_times([known]), estimate.points[-1])

    def note(self, estimate: Estimate) -> None:
        """What one of them tells; of its points the last is the newest."""
        self.latest = estimate
        self._furthest = max(self._furthest, estimate.done)
        for point in estimate.points:
            self._note_point(estimate.gpu, point, is_newest=point is estimate.points[-1])
        if estimate.noise:
            last = estimate.noise[-1]
            self._note_noise(NoiseSample(estimate.done, last.batch, last.noise))

    def completed(self, job_id: JobId, length: float) -> None:
        """One of them has come to its end."""
        self._lengths[job_id] = length
        if len(self._lengths) > LENGTHS_MOST:
            self._lengths.popitem(last=False)

    def view(self, user: str, name: str, gpu: str) -> KindView:
        """As planners see it: speed on GPUs of that class, or of the one that was heard of last if on none of that.

        Until one has completed, whoever has come furthest is taken to have as much left as it has done, as heavy tails
        go (Tiresias, NSDI 2019), and the others to be as long.
        """
        if not self._noise and self._samples:
            self._noise = encode_value(NoiseTable, NoiseTable(tuple(self._samples.values())))
        lengths = list(self._lengths.values())
        length = fsum(lengths) / len(lengths) if lengths else 2.0 * self._furthest
        deviation = sqrt(fsum((each - length) ** 2 for each in lengths) / max(1, len(lengths)))
        error = deviation / length if len(lengths) > 1 else 1.0
        return KindView(user, name, self._packed(gpu), self._noise, length, error if length else 0.0, gpu)

    def _packed(self, gpu: str) -> bytes:
        if gpu in self._speed or not self._points:
            return self._speed.get(gpu, b"")
        points = [point for (there, _), point in self._points.items() if there == gpu]
        if not points:
            return self._packed(next(reversed(self._points))[0])
        self._speed[gpu] = encode_value(Estimate, Estimate(points=tuple(sorted(points, key=configuration))))
        return self._speed[gpu]

    def _note_point(self, gpu: str, point: SpeedPoint, *, is_newest: bool) -> None:
        key = (gpu, configuration(point))
        known = self._points.setdefault(key, point)
        if known is point or (is_newest and is_news(known, point)):
            self._points[key] = point
            self._speed.pop(gpu, None)
        self._points.move_to_end(key)
        if len(self._points) > POINTS_MOST:
            (old, _), _ = self._points.popitem(last=False)
            self._speed.pop(old, None)

    def _note_noise(self, sample: NoiseSample) -> None:
        key = (int(log2(1.0 + sample.done)), sample.batch.bit_length())
        known = self._samples.get(key)
        if known is None or is_other_noise(known.noise, sample.noise):
            self._samples[key], self._noise = sample, b""
        self._samples.move_to_end(key)
        if len(self._samples) > SAMPLES_MOST:
            self._samples.popitem(last=False)


class Kinds:
    """By user and name, at most `KINDS_LIMIT`; whichever was heard of last stays."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, str], _Kind] = OrderedDict()

    def note(self, card: JobCard) -> None:
        """A card has come; what it has from others of its kind is no news."""
        estimate = card.estimate
        if not card.name or estimate is None or estimate.is_prior:
            return
        if card.state is JobState.ENDED:
            kind = self._kinds.get((card.user, card.name))
            if kind is not None and estimate.done:
                kind.completed(card.job_id, estimate.done)
        elif estimate.points:
            self._note((card.user, card.name), estimate)

    def _note(self, key: tuple[str, str], estimate: Estimate) -> None:
        kind = self._kinds.pop(key, None)
        if kind is None or kind.is_belied_by(estimate):
            kind = _Kind()
        self._kinds[key] = kind
        kind.note(estimate)
        if len(self._kinds) > KINDS_LIMIT:
            self._kinds.popitem(last=False)

    def prior(self, user: str, name: str) -> Estimate | None:
        """What the card of a new job begins with: speed and noise; how long it takes is for it to say."""
        kind = self._of(user, name)
        if kind is None:
            return None
        points = kind.latest.points[-MERGED_POINTS:]
        return replace(kind.latest, points=points, remaining=0.0, remaining_error=0.0, done=0.0, is_prior=True)

    def view(self, user: str, name: str, gpu: str = "") -> KindView | None:
        """As planners see it, of jobs on GPUs of that class."""
        kind = self._of(user, name)
        return kind.view(user[:NAME_LENGTH], name[:NAME_LENGTH], gpu) if kind is not None else None

    def _of(self, user: str, name: str) -> _Kind | None:
        return self._kinds.get((user[:NAME_LENGTH], name[:NAME_LENGTH])) if name else None

"""What jobs of one kind have measured: planners know them all by it, and the next one begins with it.

A job is of several kinds of its user's, the narrowest first: its name, where it has one, its program with its words and
its shipped folder, that program from any folder, and with any words (`program.levels`).  What a narrow kind has not
measured a wider one tells, as long as the two agree.  A kind whose jobs differ (its programs are several, or its table
had to begin anew twice within a few jobs) tells nothing: so does one name for everything.

Every agent keeps it of the cards that pass, so that nothing more travels.

User and name are whatever a client has said, and reports are whatever a job says.  So no job takes away what others
have told: a time that is at odds with those that are known counts once another job says the same, room is made by
whoever has told the most, and of lengths the middle one counts.  A batch is never a matter of kinds
(`policies.resizing.question`).
"""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median_low
from typing import Annotated, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.card import NAME_LENGTH, JobCard
from swarmsched.errors import RemoteProtocolError
from swarmsched.estimate import (
    MERGED_POINTS,
    POOL_MOST,
    Configuration,
    Estimate,
    Pool,
    SpeedPoint,
    are_at_odds,
    configuration,
    contradicts,
    is_news,
    step_times,
)
from swarmsched.fields import U53, Amount, Job, Name, Value
from swarmsched.ids import JobId
from swarmsched.program import levels
from swarmsched.view import KINDS_LIMIT, KindView
from swarmsched.wire.codec import decode_value, encode_value

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
KINDS_KEPT = 4 * KINDS_LIMIT
"""A job is of at most so many kinds for each one that a view can tell of."""
RESTLESS_JOBS = 16
"""A table that began anew twice within so many jobs is of several trainings, not of one that was changed."""
COMPARED_POINTS = 8
SIZES_LEAST = 2
"""Of one job that tells how it scales."""

KINDS_ROOM = "kinds"
SAVED_MOST = 64
"""Kinds that are written at once."""

T = TypeVar("T")

_Name = Annotated[str, Meta(max_length=NAME_LENGTH)]
_Place = tuple[str, Configuration]
_Key = tuple[str, bool, str]
"""User, whether it is a name, and the name or program."""


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


_Length = tuple[Job, Amount]


class _StoredPoint(Value):
    """A time of a step, on which class of GPUs, and which job has told it."""

    gpu: Name
    witness: Job
    point: SpeedPoint


class _StoredKind(Value):
    """What is on disk of a kind."""

    user: _Name
    is_name: bool
    text: _Name
    points: Annotated[tuple[_StoredPoint, ...], Meta(max_length=POINTS_MOST)] = ()
    lengths: Annotated[tuple[_Length, ...], Meta(max_length=LENGTHS_MOST)] = ()
    done: Annotated[tuple[_Length, ...], Meta(max_length=LENGTHS_MOST)] = ()
    scripts: Annotated[tuple[tuple[Job, _Name], ...], Meta(max_length=LENGTHS_MOST)] = ()
    told_by: U53 = 0
    anew_at: Annotated[tuple[U53, ...], Meta(max_length=2)] = ()
    works: Annotated[tuple[tuple[Job, Estimate], ...], Meta(max_length=LENGTHS_MOST)] = ()


class _Kind:
    """One of them; whatever was heard of longest ago goes first."""

    def __init__(self) -> None:
        self._points: OrderedDict[_Place, _Known] = OrderedDict()  # by class of GPUs as well
        self._lengths: OrderedDict[JobId, float] = OrderedDict()
        self._done: OrderedDict[JobId, float] = OrderedDict()  # how far each has come
        self._scripts: OrderedDict[JobId, str] = OrderedDict()  # of the jobs of a name
        self._works: OrderedDict[JobId, Estimate] = OrderedDict()  # what each has told of its model, and no more
        self._told_by = 0  # jobs so far
        self._anew_at: deque[int] = deque(maxlen=2)  # after how many of them the table began anew
        self.version = 0  # of the points

    def note(self, job_id: JobId, estimate: Estimate, script: str = "") -> None:
        """What one of them tells; of its points the last is the newest."""
        self._told_by += job_id not in self._done
        _put(self._done, job_id, estimate.done)
        if script:
            _put(self._scripts, job_id, script)
        if estimate.work:
            told = Estimate(work=estimate.work, data_wait=estimate.data_wait, network_mbit_s=estimate.network_mbit_s)
            _put(self._works, job_id, told)
        for point in estimate.points:
            is_newest = point is estimate.points[-1]
            self._note_point(job_id, (estimate.gpu, configuration(point)), point, is_newest=is_newest)

    def completed(self, job_id: JobId, length: float) -> None:
        """One of them has come to its end."""
        _put(self._lengths, job_id, length)

    def stored(self, key: _Key) -> _StoredKind:
        """As it is kept on disk."""
        known = [(gpu, each) for (gpu, _), each in self._points.items() if each.point]
        points = [_StoredPoint(gpu, each.witness, each.point) for gpu, each in known if each.point]
        lengths, done = (tuple(each.items()) for each in (self._lengths, self._done))
        told = (tuple(self._scripts.items()), self._told_by, tuple(self._anew_at))
        return _StoredKind(*key, tuple(points), lengths, done, *told, works=tuple(self._works.items()))

    def restore(self, stored: _StoredKind) -> None:
        """What an earlier life has kept."""
        for each in stored.points:
            self._points[each.gpu, configuration(each.point)] = _Known(each.point, each.witness)
        self._lengths.update(stored.lengths)
        self._done.update(stored.done)
        self._scripts.update(stored.scripts)
        self._works.update(stored.works)
        self._told_by = stored.told_by
        self._anew_at.extend(stored.anew_at)

    @property
    def is_mixed(self) -> bool:
        """True when its jobs are not of one training, so that it says nothing of the next one."""
        is_restless = len(self._anew_at) == 2 and self._told_by - self._anew_at[0] <= RESTLESS_JOBS
        return is_restless or len(set(self._scripts.values())) > 1

    @property
    def gpu(self) -> str:
        """On which it was measured last."""
        return next((gpu for (gpu, _), known in reversed(self._points.items()) if known.point), "")

    @property
    def model(self) -> Estimate:
        """What its jobs have told of their model: the middle one by what moves in a step, so that none tells alone."""
        told = sorted(self._works.items(), key=lambda each: (each[1].work and each[1].work.moved_bytes, each[0]))
        return told[(len(told) - 1) // 2][1] if told else Estimate()

    def on(self, gpu: str) -> list[SpeedPoint]:
        """What was measured on that class of GPUs, the newest last."""
        return [known.point for (there, _), known in self._points.items() if there == gpu and known.point]

    @property
    def lengths(self) -> list[float]:
        """Of those that have completed."""
        return list(self._lengths.values())

    @property
    def come(self) -> list[float]:
        """How far each of the others has come, ascending."""
        return sorted(self._done.values())

    def _note_point(self, job_id: JobId, place: _Place, point: SpeedPoint, *, is_newest: bool) -> None:
        known = self._points.get(place)
        if known is None:
            known = self._points[place] = _Known(None, job_id)
            self._make_room()
            if not self._is_odd(job_id, place[0], point):
                known.point = point
                self.version += 1
                return
        self._points.move_to_end(place)
        if known.point and known.witness == job_id:
            if is_newest and is_news(known.point, point) and not self._is_odd(job_id, place[0], point):
                known.point = point
                self.version += 1
        elif (known.point is None or are_at_odds(known.point, point)) and (same := known.doubt(job_id, point)):
            self._begin_anew({job_id, *same})
            self._points[place] = _Known(point, job_id)

    def _is_odd(self, job_id: JobId, gpu: str, point: SpeedPoint) -> bool:
        """Whether it is at odds with what others have told of other sizes."""
        others = [known for (there, _), known in self._points.items() if there == gpu and known.witness != job_id]
        return any(known.point and are_at_odds(point, known.point) for known in others)

    def _begin_anew(self, jobs: set[JobId]) -> None:
        """It is another training by the same name, whose are these."""
        for table in (self._lengths, self._done, self._works):
            for job_id in table.keys() - jobs:
                del table[job_id]
        self._points = OrderedDict((place, known) for place, known in self._points.items() if known.witness in jobs)
        self._anew_at.append(self._told_by)
        self.version += 1

    def _make_room(self) -> None:
        """Whoever has told the most gives up what it has told longest ago."""
        if len(self._points) > POINTS_MOST:
            ((talker, _),) = Counter(known.witness for known in self._points.values()).most_common(1)
            oldest = next(place for place, known in self._points.items() if known.witness == talker)
            del self._points[oldest]
            self.version += 1


class Kinds:
    """At most `KINDS_KEPT`; whichever was heard of last stays, and whoever has the most gives up one of his own."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[_Key, _Kind] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._pool: OrderedDict[_Key, bytes] = OrderedDict()
        self._changed: dict[_Key, None] = {}  # of which the disk does not know
        self._packed: dict[tuple[tuple[_Key, ...], str], tuple[tuple[int, ...], bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def note(self, card: JobCard) -> None:
        """A card has come; what it has from others of its kind is no news."""
        estimate, keys = card.estimate, _keys(card.user, card.name, card.program)
        if estimate is None or estimate.is_prior:
            return
        if card.state is JobState.ENDED:
            for key in keys if estimate.done else ():
                if key in self._kinds:
                    self._kinds[key].completed(card.job_id, estimate.done)
                    self._changed[key] = None
        elif estimate.points:
            self._note_scaling(keys[0] if keys else (card.user, False, card.job_id), estimate)
            script = keys[-1][2] if card.program else ""
            for key in keys:
                kind = self._of(key)
                version = kind.version
                kind.note(card.job_id, estimate, script if key[1] else "")
                if kind.version != version:
                    self._changed[key] = None

    @property
    def pool(self) -> Pool:
        """What the jobs of some kinds have measured in several sizes, the last one of each kind."""
        return tuple(self._pool.values())

    def prior(self, user: str, name: str, program: str = "") -> Estimate | None:
        """Estimate that the card of a new job begins with: times on the GPUs that were heard of last, the newest of
        them. How long it takes is for the job to say."""
        for _, kind in self._sound(_keys(user, name, program)):
            points = tuple(kind.on(kind.gpu)[-MERGED_POINTS:])
            return replace(kind.model, points=points, is_partial=True, is_prior=True, gpu=kind.gpu)
        return None

    def view(self, user: str, name: str, gpu: str = "", program: str = "") -> KindView | None:
        """As planners see it, of jobs on GPUs of that class; or of the one that was heard of last if on none of that.

        Until one has completed, whoever has come second furthest is taken to have as much left as it has done, as heavy
        tails go (Tiresias, NSDI 2019), and the others to be as long: of two the first, so that none tells alone.
        """
        sound = list(self._sound(_keys(user, name, program)))
        if not sound:
            return None
        packed, agreeing = self._speed(sound, gpu)
        lengths = next((each.lengths for each in agreeing if each.lengths), [])
        length = _middle(lengths) if lengths else 2.0 * max([_second(each.come) for each in agreeing])
        deviation = NORMAL * _middle([abs(each - length) for each in lengths]) if lengths else 0.0
        error = deviation / length if length and len(lengths) > 1 else 1.0
        told = (user[:NAME_LENGTH], name[:NAME_LENGTH], packed, length, error if length else 0.0, gpu)
        return KindView(*told, program[:NAME_LENGTH])

    def _note_scaling(self, key: _Key, estimate: Estimate) -> None:
        """How one of that kind scales; who has no kind tells it too."""
        if len({(each.ranks, each.nodes) for each in estimate.points}) < SIZES_LEAST:
            return
        self._pool[key] = encode_value(Estimate, Estimate(points=estimate.points[-MERGED_POINTS:]))
        self._pool.move_to_end(key)
        if len(self._pool) > POOL_MOST:
            counts = Counter([user for user, _, _ in self._pool])
            most = max(counts.values())
            del self._pool[next(each for each in self._pool if counts[each[0]] == most)]

    @property
    def has_changes(self) -> bool:
        """True when `take_changes` has something."""
        return bool(self._changed)

    def take_changes(self) -> list[tuple[str, bytes | None]]:
        """Some kinds that have learned something since this was last asked, or None for those that are gone."""
        taken = list(self._changed)[:SAVED_MOST]
        for key in taken:
            del self._changed[key]
        return [(_disk_key(key), self._body(key)) for key in taken]

    def restore(self, stored: Mapping[str, bytes]) -> None:
        """What an earlier life has kept; what nobody can read of it is left out."""
        for body in stored.values():
            with suppress(RemoteProtocolError):
                told = decode_value(_StoredKind, body)
                self._of((told.user, told.is_name, told.text)).restore(told)
        self._changed.clear()

    def _body(self, key: _Key) -> bytes | None:
        kind = self._kinds.get(key)
        return encode_value(_StoredKind, kind.stored(key)) if kind is not None else None

    def _sound(self, keys: Sequence[_Key]) -> Iterable[tuple[_Key, _Kind]]:
        """Those kinds of a job that say something, the narrowest first."""
        found = [(key, kind) for key in keys if (kind := self._kinds.get(key)) is not None]
        return [(key, kind) for key, kind in found if not kind.is_mixed]

    def _speed(self, sound: Sequence[tuple[_Key, _Kind]], gpu: str) -> tuple[bytes, list[_Kind]]:
        """The table of the narrowest kind with what wider ones have measured beside it, up to one that is at odds with
        it; and those that are not."""
        if not any(kind.on(gpu) for _, kind in sound):
            gpu = sound[0][1].gpu
        asked, versions = (tuple([key for key, _ in sound]), gpu), tuple([kind.version for _, kind in sound])
        known = self._packed.get(asked)
        if known is None or known[0] != versions:
            points: dict[Configuration, SpeedPoint] = {}
            count = 0
            for _, kind in sound:
                more = kind.on(gpu)
                if points and _differ(list(points.values()), more):
                    break
                points = {**{configuration(each): each for each in more}, **points}
                count += 1
            told = tuple(sorted(points.values(), key=configuration))[:POINTS_MOST]
            known = (versions, encode_value(Estimate, Estimate(points=told, gpu=gpu)) if told else b"", count)
            self._packed[asked] = known
            if len(self._packed) > KINDS_KEPT:
                del self._packed[next(iter(self._packed))]
        return known[1], [kind for _, kind in sound[: known[2]]]

    def _of(self, key: _Key) -> _Kind:
        """The kind with that key, perhaps a new one."""
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= KINDS_KEPT:
                most = max(self._users.values())
                oldest = next(each for each in self._kinds if self._users[each[0]] == most)
                self._users[oldest[0]] -= 1
                del self._kinds[oldest]
                self._changed[oldest] = None
            kind = self._kinds[key] = _Kind()
            self._users[key[0]] += 1
        self._kinds.move_to_end(key)
        return kind


def _disk_key(key: _Key) -> str:
    return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


def _keys(user: str, name: str, program: str) -> tuple[_Key, ...]:
    """Of what kinds such a job is, the narrowest first."""
    user, name = user[:NAME_LENGTH], name[:NAME_LENGTH]
    by_program = [(user, False, each) for each in levels(program)]
    return ((user, True, name), *by_program) if name else tuple(by_program)


def _differ(points: Sequence[SpeedPoint], others: Sequence[SpeedPoint]) -> bool:
    """Whether one training can hardly have taken both times."""
    known = step_times(others)
    if any(contradicts(known, each) for each in points):
        return True
    return any(are_at_odds(each, other) for each in points[-COMPARED_POINTS:] for other in others)


def _second(values: Sequence[float]) -> float:
    """The second largest of an ascending list, or the only one."""
    return max(values[-2:][:1], default=0.0)


def _put(table: OrderedDict[JobId, T], job_id: JobId, value: T) -> None:
    table[job_id] = value
    table.move_to_end(job_id)
    if len(table) > LENGTHS_MOST:
        table.popitem(last=False)


def _middle(values: list[float]) -> float:
    """That of the first while too few tell for one to be the middle."""
    return median_low(values) if len(values) >= WITNESSES else values[0]

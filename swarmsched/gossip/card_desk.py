"""When a shepherd's cards are written: never for short jobs, at once for news, seldom for what only time changed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from swarmsched.api import EndReason, JobState
from swarmsched.card import JobCard, is_only_order_changed, is_same_news, must_be_known_at_once, tombstone
from swarmsched.deadlines import Deadlines
from swarmsched.ids import JobId
from swarmsched.record import JobRecord
from swarmsched.view import JobView

QUEUED_DELAY_S = 1.0
RUNNING_DELAY_S = 10.0
INTERVAL_S = 1.0
URGENT_INTERVAL_S = 0.1
ORDER_INTERVAL_S = 5.0
RENEWAL_S = 60.0
SHORT_S = 1.0
SHORT_INTERVAL_S = 1.0
COUNTER_LIMIT = 2**31
"""Claims beyond this are no honest shepherd's; following them would run out of numbers."""

_WAITING = (JobState.QUEUED, JobState.STARTING)


@dataclass(slots=True)
class _Draft:
    """One job's card: the latest that we were given, and the last that we published, if any."""

    latest: JobCard
    eligible_s: float
    given_s: float
    published: JobCard | None = None
    published_s: float = 0.0
    counter: int = 0


class CardDesk:
    """Cards of the jobs that this node shepherds.  Invariant: (epoch, counter) of a job only grows."""

    def __init__(self) -> None:
        self._drafts: dict[JobId, _Draft] = {}
        self._deadlines: Deadlines[JobId] = Deadlines()  # of publications
        self._far_back_s = -math.inf  # when those that are too far back are asked next, all together
        self._short_s = -math.inf  # from when on the end of a job may be told of which nobody has heard

    def __len__(self) -> int:
        return len(self._drafts)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._drafts

    def set_card(self, card: JobCard, now_s: float) -> None:
        """What the shepherd would say of a job now."""
        draft = self._drafts.get(card.job_id)
        if draft is None:
            self._schedule(self._drafts.setdefault(card.job_id, _Draft(card, now_s + _delay_s(card), now_s)))
            return
        if draft.published is None and (card.state in _WAITING) != (draft.latest.state in _WAITING):
            draft.eligible_s = now_s + _delay_s(card)
        if card.epoch > draft.latest.epoch:
            draft.counter = 0
        draft.latest, draft.given_s = card, now_s
        self._schedule(draft)

    def withdraw(self, job_id: JobId, record: JobRecord | None, now_s: float) -> JobCard | None:
        """Forget a closed job, with its record if that has ended; returns the last version to spread.

        None if no other node ever heard of it; but how short jobs are is to be known too, so one each second is told.
        """
        draft = self._drafts.pop(job_id, None)
        self._deadlines.drop(job_id)
        if draft is None:
            return None
        if draft.published is None:
            if now_s < self._short_s or record is None or not _tells_a_length(record):
                return None
            self._short_s = now_s + SHORT_INTERVAL_S
        last = replace(draft.latest, counter=draft.counter + 1)
        if record is None or not record.is_ended:
            return tombstone(last)
        times = {"attained_gpu_s": record.attained_gpu_s, "first_started_utc_s": record.first_started_utc_s}
        has_completed = record.end_reason is EndReason.COMPLETED
        return tombstone(replace(last, **times), has_completed=has_completed, ended_utc_s=int(record.ended_utc_s))

    def outbid(self, job_id: JobId, epoch: int, counter: int) -> None:
        """A version of our own card that we do not remember (we restarted): write above it."""
        draft = self._drafts.get(job_id)
        if draft is not None and epoch == draft.latest.epoch and draft.counter < counter < COUNTER_LIMIT:
            draft.counter = counter
            draft.published_s -= RENEWAL_S
            self._schedule(draft)

    def due(self, now_s: float, is_too_far_back: Callable[[JobCard], bool]) -> list[JobCard]:
        """Cards to publish now, with their new counters and brought forward to now.

        Queued jobs `is_too_far_back` in the order are first published when they have moved up; asked again within 5 s.
        """
        result: list[JobCard] = []
        for draft in [self._drafts[job_id] for job_id in self._deadlines.due(now_s)]:
            if draft.published is None and is_too_far_back(draft.latest):
                if now_s >= self._far_back_s:
                    self._far_back_s = now_s + ORDER_INTERVAL_S
                draft.eligible_s = self._far_back_s
            else:
                draft.counter += 1
                waited_s = now_s - draft.given_s
                card = replace(_brought_forward(draft.latest, waited_s), counter=draft.counter)
                draft.published, draft.published_s = draft.latest, now_s
                result.append(card)
            self._schedule(draft)
        return result

    @property
    def next_deadline_s(self) -> float:
        """When `due` has something; infinite without cards."""
        return self._deadlines.next_s

    def _schedule(self, draft: _Draft) -> None:
        self._deadlines.put(draft.latest.job_id, _deadline_s(draft))


def _tells_a_length(record: JobRecord) -> bool:
    return bool(record.first_started_utc_s) and record.ended_utc_s - record.first_started_utc_s >= SHORT_S


def _delay_s(card: JobCard) -> float:
    return QUEUED_DELAY_S if card.state in _WAITING else RUNNING_DELAY_S


def _deadline_s(draft: _Draft) -> float:
    if draft.published is None:
        return draft.eligible_s
    if is_same_news(draft.published, draft.latest):
        return draft.published_s + RENEWAL_S
    if must_be_known_at_once(draft.published, draft.latest):
        return draft.published_s + URGENT_INTERVAL_S
    interval_s = ORDER_INTERVAL_S if is_only_order_changed(draft.published, draft.latest) else INTERVAL_S
    return draft.published_s + interval_s


def _brought_forward(card: JobCard, waited_s: float) -> JobCard:
    job = JobView(card)
    return replace(
        card,
        attained_gpu_s=job.attained_gpu_s(waited_s),
        queued_s=job.queued_s(waited_s),
        running_s=job.running_s(waited_s),
        rests_s=math.ceil(job.rests_s(waited_s)),
        kept_s=round(job.kept_s(waited_s)) if card.kept_s else 0,
    )

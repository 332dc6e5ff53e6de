"""Job cards: what every planner must know of a live job, written by its acting shepherd.

Key is the job, version is (epoch, counter): a lower epoch loses whatever its counter.  Attained service travels as a
value and a rate and is extrapolated by the card's age, so that time alone makes no new version.  Ages are durations;
a monotonic clock means nothing to another machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Annotated

from swarmsched.api import JobState, StartPhase
from swarmsched.errors import RemoteProtocolError
from swarmsched.fields import I32, U8, U16, U32, U53, Amount, Job, MaxLength, Name, NodeName, Seconds
from swarmsched.ids import JobId
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, Share
from swarmsched.view import JobView, RankKey
from swarmsched.wire.codec import decode_value, encode_value

CARD_BYTES_LIMIT = 256
NAME_LENGTH = 32
REASON_LENGTH = 48
SHARES_LIMIT = 16
CONSTRAINTS_LIMIT = 4

_STATES = tuple(JobState)
_PHASES = tuple(StartPhase)


@dataclass(frozen=True, slots=True)
class JobCard:
    """One live job.  Times on the wire are seconds since 1970 (submit, first start: order only) or durations.

    `more_nodes` and `more_ranks` count the shares that did not fit.  `nodes` and `exclude` are the job's own
    constraints, cut to four names each.
    """

    job_id: Job
    epoch: U32
    counter: U32
    shepherd: NodeName
    state_index: U8
    phase_index: U8
    ranks: U16
    demand: Demand
    submitted_utc_s: Amount
    name: Annotated[str, MaxLength(NAME_LENGTH)] = ""
    user: Annotated[str, MaxLength(NAME_LENGTH)] = ""
    queue: Annotated[str, MaxLength(NAME_LENGTH)] = ""
    priority: I32 = 0
    attained_gpu_s: Amount = 0.0
    attained_rate: U32 = 0  # GPU-seconds a second: the GPUs it has
    time_limit_s: Seconds = 0.0
    queued_s: Seconds = 0.0  # when the card was written
    running_s: Seconds = 0.0  # when the card was written
    shares: Annotated[tuple[Share, ...], MaxLength(SHARES_LIMIT)] = ()
    more_nodes: U16 = 0
    more_ranks: U16 = 0
    rank_key: Annotated[tuple[U53, ...], MaxLength(4)] = ()
    policy_id: Name = ""
    reason: Annotated[str, MaxLength(REASON_LENGTH)] = ""
    first_started_utc_s: Amount = 0.0
    nodes: Annotated[tuple[NodeName, ...], MaxLength(CONSTRAINTS_LIMIT)] = ()
    exclude: Annotated[tuple[NodeName, ...], MaxLength(CONSTRAINTS_LIMIT)] = ()
    attempt: U32 = 0
    preemptions: U8 = 0

    @property
    def stamp(self) -> tuple[int, int]:
        """(epoch, counter): larger is newer."""
        return (self.epoch, self.counter)

    @property
    def state(self) -> JobState:
        """Life-cycle state."""
        return _STATES[self.state_index]

    @property
    def phase(self) -> StartPhase:
        """What a starting job is doing."""
        return _PHASES[self.phase_index]

    def attained_at(self, age_s: float) -> float:
        """GPU-seconds by now, for a card of this age."""
        return self.attained_gpu_s + self.attained_rate * age_s

    def check(self) -> None:
        """Raise RemoteProtocolError for values that no honest shepherd writes."""
        if self.state_index >= len(_STATES) or self.phase_index >= len(_PHASES):
            raise RemoteProtocolError("unknown state or phase", kind="JobCard")


@dataclass(frozen=True, slots=True)
class CardStatus:
    """A card as this node knows it; `age_s` since its shepherd wrote it."""

    card: JobCard
    age_s: float


def card_of(
    record: JobRecord,
    *,
    queued_s: float = 0.0,
    running_s: float = 0.0,
    rank_key: RankKey = (),
    policy_id: str = "",
    reason: str = "",
) -> JobCard:
    """The card of a job by its record; the counter is filled in when it is published.

    `attained_gpu_s` includes the running attempt up to now.
    """
    spec, is_running = record.spec, record.state is JobState.RUNNING
    gpus = spec.total_gpus if is_running else 0
    return JobCard(
        job_id=record.job_id,
        epoch=record.epoch,
        counter=0,
        shepherd=record.shepherd,
        state_index=_STATES.index(record.state),
        phase_index=_PHASES.index(record.phase),
        ranks=spec.ranks,
        demand=spec.demand,
        submitted_utc_s=record.submitted_utc_s,
        name=spec.name[:NAME_LENGTH],
        user=spec.user[:NAME_LENGTH],
        queue=spec.queue[:NAME_LENGTH],
        priority=spec.priority,
        attained_gpu_s=record.attained_gpu_s + gpus * running_s,
        attained_rate=gpus,
        time_limit_s=spec.time_limit_s,
        queued_s=queued_s,
        running_s=running_s,
        shares=record.shares[:SHARES_LIMIT],
        more_nodes=len(record.shares[SHARES_LIMIT:]),
        more_ranks=sum(share.ranks for share in record.shares[SHARES_LIMIT:]),
        rank_key=rank_key,
        policy_id=policy_id,
        reason=(reason or record.reason)[:REASON_LENGTH],
        first_started_utc_s=record.first_started_utc_s,
        nodes=spec.nodes[:CONSTRAINTS_LIMIT],
        exclude=spec.exclude[:CONSTRAINTS_LIMIT],
        attempt=record.attempt,
        preemptions=min(record.preemptions, 255),
    )


def tombstone(card: JobCard) -> JobCard:
    """The last version of a card: its job is closed."""
    ended = _STATES.index(JobState.ENDED)
    return replace(
        card,
        state_index=ended,
        phase_index=0,
        shares=(),
        more_nodes=0,
        more_ranks=0,
        reason="",
        rank_key=(),
        nodes=(),
        exclude=(),
        attained_rate=0,
    )


_SHORTER: tuple[Callable[[JobCard], JobCard], ...] = (
    lambda card: replace(card, reason=""),
    lambda card: replace(card, exclude=()),
    lambda card: replace(card, name=card.name[:16], user=card.user[:16]),
    lambda card: replace(card, nodes=()),
    lambda card: replace(card, demand=replace(card.demand, gpu_type=card.demand.gpu_type[:16])),
    lambda card: replace(card, name=card.name[:8], user=card.user[:8], queue=card.queue[:8], policy_id=""),
    lambda card: _with_shares(card, 1),
    lambda card: _with_shares(card, 0),
    lambda card: replace(card, name="", user="", queue=""),
)
"""What a card that is too large gives up, in this order, after its shares beyond the first two."""


def encode_card(card: JobCard) -> tuple[JobCard, bytes]:
    """The card cut to its hard limit, and its bytes."""
    body = encode_value(JobCard, card)
    while len(body) > CARD_BYTES_LIMIT and len(card.shares) > 2:
        card = _with_shares(card, len(card.shares) - 1)
        body = encode_value(JobCard, card)
    for shorten in _SHORTER:
        if len(body) <= CARD_BYTES_LIMIT:
            break
        card = shorten(card)
        body = encode_value(JobCard, card)
    return card, body


def _with_shares(card: JobCard, count: int) -> JobCard:
    """The card with its first shares; the others are only counted."""
    left = card.shares[count:]
    return replace(
        card,
        shares=card.shares[:count],
        more_nodes=card.more_nodes + len(left),
        more_ranks=card.more_ranks + sum(share.ranks for share in left),
    )


def decode_card(body: bytes) -> JobCard:
    """A well-formed card, whose values are still to be checked; RemoteProtocolError for anything else."""
    if len(body) > CARD_BYTES_LIMIT:
        raise RemoteProtocolError(f"{len(body)} bytes, more than {CARD_BYTES_LIMIT}", kind="JobCard")
    return decode_value(JobCard, body)


def job_view(status: CardStatus) -> JobView:
    """The planner's picture of a job shepherded elsewhere, brought forward by the card's age."""
    card, age_s = status.card, status.age_s
    is_running = card.state is JobState.RUNNING
    return JobView(
        job_id=JobId(card.job_id),
        state=card.state,
        ranks=card.ranks,
        demand=card.demand,
        submitted_utc_s=card.submitted_utc_s,
        priority=card.priority,
        user=card.user,
        queue=card.queue,
        attained_gpu_s=card.attained_at(age_s),
        queued_s=card.queued_s + (age_s if card.state is JobState.QUEUED else 0.0),
        running_s=card.running_s + (age_s if is_running else 0.0),
        time_limit_s=card.time_limit_s,
        shares=card.shares,
        nodes=card.nodes,
        exclude=card.exclude,
        first_started_utc_s=card.first_started_utc_s,
        shepherd=card.shepherd,
        preemptions=card.preemptions,
    )


def is_same_news(old: JobCard, new: JobCard) -> bool:
    """True when only time has passed between two cards."""
    return bool(_timeless(old) == _timeless(new))


def is_only_order_changed(old: JobCard, new: JobCard) -> bool:
    """True when nothing but the place in the order and its reason differ, which may wait longer."""
    return bool(_orderless(old) == _orderless(new))


_TIMED = ("counter", "attained_gpu_s", "queued_s", "running_s")
_timeless = attrgetter(*(each.name for each in fields(JobCard) if each.name not in _TIMED))
_orderless = attrgetter(*(each.name for each in fields(JobCard) if each.name not in (*_TIMED, "rank_key", "reason")))

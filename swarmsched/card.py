"""Job cards: what every planner must know of a live job, written by its acting shepherd.  The one description of a job
that travels; what policies see of it is the card with its age (`view.JobView`).

Key is the job, version is (epoch, counter): a lower epoch loses whatever its counter.  Attained service travels as a
value and a rate and is extrapolated by the card's age, so that time alone makes no new version.  Ages are durations;
a monotonic clock means nothing to another machine.

A card is never cut silently: what a planner would take for the whole truth is either complete or marked.
"""

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from swarmsched.api import JobSpec, JobState, StartPhase
from swarmsched.errors import RemoteProtocolError
from swarmsched.estimate import Estimate, Resizable, StepCost, batches_of, is_computable
from swarmsched.fields import I32, SECONDS_MOST, U8, U16, U32, U53, Amount, Job, Name, NodeName, Seconds, Value
from swarmsched.program import PROGRAM_LENGTH, program_of
from swarmsched.record import JobRecord
from swarmsched.resources import Demand, GroupNeed, Shares, merged, needs_beside
from swarmsched.specification import GROUPS_LIMIT, outer_terms
from swarmsched.wire.codec import decode_value, encode_value

CARD_BYTES_LIMIT = 1_024
NAME_LENGTH = 32
REASON_LENGTH = 96
LIVE_PAUSE_S = 1.0  # of an elastic job that has not been changed yet

STATES = tuple(JobState)
PHASES = tuple(StartPhase)

RankKey = tuple[int, ...]
"""At most four integers; smaller runs earlier.  The job id breaks ties after it."""


class JobCard(Value):
    """One live job.  Times on the wire are seconds since 1970 (submit, first start: order only) or durations."""

    job_id: Job
    epoch: U32
    counter: U32
    shepherd: NodeName
    state_index: U8
    phase_index: U8
    ranks: U16
    demand: Demand
    submitted_utc_s: Amount
    name: Annotated[str, Meta(max_length=NAME_LENGTH)] = ""
    user: Annotated[str, Meta(max_length=NAME_LENGTH)] = ""
    queue: Annotated[str, Meta(max_length=NAME_LENGTH)] = ""
    priority: I32 = 0
    attained_gpu_s: Amount = 0.0  # when the card was written
    attained_rate: U32 = 0  # GPU-seconds a second: the GPUs that serve it
    time_limit_s: Seconds = 0.0  # 0: none
    queued_s: Seconds = 0.0  # when the card was written
    running_s: Seconds = 0.0  # when the card was written
    shares: Shares = ()
    hidden_nodes: U16 = 0
    hidden_ranks: U16 = 0  # those on nodes that did not fit into the card: `shares` are not all that it holds
    rank_key: Annotated[tuple[U53, ...], Meta(max_length=4)] = ()
    policy_id: Name = ""
    reason: Annotated[str, Meta(max_length=REASON_LENGTH)] = ""
    first_started_utc_s: Amount = 0.0  # 0: never ran
    nodes: Annotated[tuple[NodeName, ...], Meta(max_length=512)] = ()  # only these, if any
    exclude: Annotated[tuple[NodeName, ...], Meta(max_length=512)] = ()
    attempt: U32 = 0
    preemptions: U8 = 0  # how often it made room for others
    hides_constraints: bool = False  # `nodes` and `exclude` did not fit: others cannot tell where it may go
    elastic: Resizable | None = None  # None: its world size stays as it is now
    estimate: Estimate | None = None  # None: nothing is known of how it trains
    pause_s: Seconds = 0.0  # of its training that a change of its size costs; 0: not measured
    restartable: bool = False  # it may be stopped and begun again, whatever that loses
    has_checkpoint: bool = False  # its present attempt has committed one: stopped, it goes on from there
    deadline_utc_s: Seconds = 0.0  # by when it is to have ended, seconds since 1970; 0: none
    program: Annotated[str, Meta(max_length=PROGRAM_LENGTH)] = (
        ""  # what it runs (`program.levels`): kind of who has no name
    )
    has_completed: bool = False  # of one that has ended
    ended_utc_s: U53 = 0  # whole seconds since 1970; 0: it has not ended, or nobody has told when
    mixed_gpus: bool = False  # its ranks may be on GPUs of several models at once
    rests_s: U16 = 0  # when the card was written: so long it is not started, since its gang broke again and again
    kept_s: U53 = 0  # whole seconds since its size or hosts last changed, when the card was written; 0: they have not
    paused_s: U53 = 0  # whole seconds of its training that such changes have cost it, but for forced ones
    groups: Annotated[tuple[GroupNeed, ...], Meta(max_length=GROUPS_LIMIT)] = ()  # beside the first, by their numbers

    @property
    def stamp(self) -> tuple[int, int]:
        """(epoch, counter): larger is newer."""
        return (self.epoch, self.counter)

    @property
    def state(self) -> JobState:
        """Life-cycle state."""
        return STATES[self.state_index]

    @property
    def phase(self) -> StartPhase:
        """What a starting job is doing."""
        return PHASES[self.phase_index]


def card_of(
    record: JobRecord,
    *,
    queued_s: float = 0.0,
    running_s: float = 0.0,
    rests_s: int = 0,
    utc_s: float = 0.0,
    rank_key: RankKey = (),
    policy_id: str = "",
    estimate: Estimate | None = None,
) -> JobCard:
    """The card of a job by its record, complete; the counter is filled in when it is published.

    `attained_gpu_s` includes the running attempt up to now.
    """
    spec = record.spec
    gpus = record.serving_gpus if record.state is JobState.RUNNING else 0
    return JobCard(
        job_id=record.job_id,
        epoch=record.epoch,
        counter=0,
        shepherd=record.shepherd,
        state_index=STATES.index(record.state),
        phase_index=PHASES.index(record.phase),
        ranks=spec.ranks,
        demand=spec.demand,
        submitted_utc_s=record.submitted_utc_s,
        name=spec.name[:NAME_LENGTH],
        user=spec.user[:NAME_LENGTH],
        queue=spec.queue[:NAME_LENGTH],
        priority=spec.priority,
        attained_gpu_s=record.attained_gpu_s + gpus * max(0.0, running_s - record.counted_s),
        attained_rate=gpus,
        time_limit_s=spec.time_limit_s,
        queued_s=queued_s,
        running_s=running_s,
        shares=merged(record.shares),
        rank_key=rank_key,
        policy_id=policy_id,
        reason=record.reason[:REASON_LENGTH],
        first_started_utc_s=record.first_started_utc_s,
        nodes=spec.nodes,
        exclude=spec.exclude,
        attempt=record.attempt,
        preemptions=min(record.preemptions, 255),
        elastic=_elastic(record, estimate),
        estimate=_with_work(spec, estimate),
        pause_s=_pause_s(record, estimate),
        restartable=spec.restartable,
        has_checkpoint=record.has_own_checkpoint,
        deadline_utc_s=spec.deadline_utc_s,
        mixed_gpus=spec.mixed_gpus,
        rests_s=rests_s,
        program=program_of(spec.command, spec.tree, spec.workdir),
        kept_s=_kept_s(record, utc_s),
        paused_s=round(min(record.paused_s, SECONDS_MOST)),
        groups=needs_beside(spec.needs),
    )


def _with_work(spec: JobSpec, estimate: Estimate | None) -> Estimate | None:
    """What its owner says of the model counts more than what is reported, but for how ranks that train apart do it."""
    work = spec.work
    if work is None:
        return estimate
    if spec.outer and estimate is not None and estimate.work is not None:
        work = replace(work, moved_bytes=estimate.work.moved_bytes, largest_bytes=0.0)
    elif spec.outer:
        work = _apart(work, spec.outer)
    return replace(estimate or Estimate(is_prior=True), work=work)


def _apart(work: StepCost, outer: str) -> StepCost:
    """As it is where only the script says how often ranks meet, or where what another agent says is not known here."""
    with suppress(ValueError):
        terms = outer_terms(outer)
        if isinstance(every := terms.get("every"), int):
            return work.apart(every, is_quantised=terms.get("wire") != "float32")
    return work


def _pause_s(record: JobRecord, estimate: Estimate | None) -> float:
    """Who is ended and begins again stands still until its ranks run, and then until they train."""
    if record.spec.elastic:
        return record.pause_s or LIVE_PAUSE_S
    warmup_s = estimate.warmup_s if estimate is not None else 0.0
    return record.pause_s + warmup_s if warmup_s else 0.0


def _kept_s(record: JobRecord, utc_s: float) -> int:
    """By wall clocks, which may be set back meanwhile."""
    changed_utc_s = record.changed_utc_s
    return round(min(max(1.0, utc_s - changed_utc_s), SECONDS_MOST)) if changed_utc_s and utc_s else 0


def _elastic(record: JobRecord, estimate: Estimate | None) -> Resizable | None:
    """Of a job that waits, or that would lose little: it changes while it trains, or its attempt has a checkpoint."""
    spec = record.spec
    loses_nothing = record.has_own_checkpoint or record.state is JobState.QUEUED or spec.elastic
    if not spec.is_resizable or not loses_nothing:
        return None
    batches = spec.batches if spec.batches.first else batches_of(estimate)
    batch = record.global_batch or batches.first
    return Resizable(spec.ranks, max(spec.ranks, spec.ranks_most), batches, batch, spec.elastic)


def tombstone(card: JobCard, *, has_completed: bool = False, ended_utc_s: int = 0) -> JobCard:
    """The last version of a card: its job is closed; of one that has completed it tells how long that was."""
    done = card.estimate.done if card.estimate is not None and has_completed else 0.0
    gone = replace(
        card,
        estimate=Estimate(done=done) if done else None,
        state_index=STATES.index(JobState.ENDED),
        phase_index=0,
        shares=(),
        reason="",
        rank_key=(),
        attained_rate=0,
    )
    gone = replace(gone, has_completed=has_completed, ended_utc_s=ended_utc_s)
    return replace(gone, nodes=(), exclude=(), hidden_nodes=0, hidden_ranks=0)


def _without_constraints(card: JobCard) -> JobCard:
    demands = (card.demand, *[each.demand for each in card.groups])
    is_bound = any(each.refused_gpus or each.labels for each in demands)
    return replace(
        card,
        nodes=(),
        exclude=(),
        demand=replace(card.demand, refused_gpus=(), labels=()),
        groups=tuple([replace(one, demand=replace(one.demand, refused_gpus=(), labels=())) for one in card.groups]),
        hides_constraints=bool(card.nodes or card.exclude or is_bound),
    )


_SHORTER: tuple[Callable[[JobCard], JobCard], ...] = (
    lambda card: replace(card, reason=""),
    lambda card: replace(card, program=""),
    lambda card: replace(card, estimate=card.estimate and replace(card.estimate, points=())),
    lambda card: replace(card, name=card.name[:8], user=card.user[:8], queue=card.queue[:8]),
    lambda card: replace(card, elastic=card.elastic and replace(card.elastic, batches=card.elastic.batches.on(""))),
    _without_constraints,
)
"""What a card that is too large gives up, in this order, before any of its shares."""


def encode_card(card: JobCard) -> tuple[JobCard, bytes]:
    """The card cut to its hard limit, and its bytes."""
    body = encode_value(JobCard, card)
    for shorten in _SHORTER:
        if len(body) > CARD_BYTES_LIMIT:
            card = shorten(card)
            body = encode_value(JobCard, card)
    while len(body) > CARD_BYTES_LIMIT and card.shares:
        kept = card.shares[: len(card.shares) // 2]
        left = card.shares[len(kept) :]
        hidden_ranks = card.hidden_ranks + sum(share.ranks for share in left)
        card = replace(card, shares=kept, hidden_nodes=card.hidden_nodes + len(left), hidden_ranks=hidden_ranks)
        body = encode_value(JobCard, card)
    return card, body


def decode_card(body: bytes) -> JobCard:
    """A well-formed card, without an estimate with which nobody can compute; RemoteProtocolError for anything else."""
    if len(body) > CARD_BYTES_LIMIT:
        raise RemoteProtocolError(f"{len(body)} bytes, more than {CARD_BYTES_LIMIT}", kind="JobCard")
    card = decode_value(JobCard, body)
    if card.state_index >= len(STATES) or card.phase_index >= len(PHASES):
        raise RemoteProtocolError("unknown state or phase", kind="JobCard")
    is_sound = card.estimate is None or is_computable(card.estimate)
    return card if is_sound else replace(card, estimate=None)


def is_same_news(old: JobCard, new: JobCard) -> bool:
    """True when only time has passed between two cards."""
    return bool(_timeless(old) == _timeless(new))


def is_only_order_changed(old: JobCard, new: JobCard) -> bool:
    """True when nothing but the place in the order and its reason differ, which may wait longer."""
    return bool(_orderless(old) == _orderless(new))


def must_be_known_at_once(old: JobCard, new: JobCard) -> bool:
    """True when nobody need wait behind the job any more, or when others' plans for it are out of date. They would
    find its GPUs taken, could not tell by whom, and have their jobs make room once more."""
    has_left_queue = old.state is JobState.QUEUED and new.state is not JobState.QUEUED
    is_resized = old.elastic is not None and (old.state_index, old.shares) != (new.state_index, new.shares)
    return has_left_queue or is_resized


_TIMED = ("counter", "attained_gpu_s", "queued_s", "running_s", "rests_s", "kept_s")
_timeless = attrgetter(*(name for name in JobCard.__struct_fields__ if name not in _TIMED))
_orderless = attrgetter(*(name for name in JobCard.__struct_fields__ if name not in (*_TIMED, "rank_key", "reason")))

"""All entries that a state plane keeps, and what it answers about them: digests, differences, pages.

Knows nothing of peers, budgets and time limits of sending.  Each parcel is judged alone: a poisoned one costs its
owner's entry and nothing else.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from swarmsched.api import JobState
from swarmsched.card import CARD_BYTES_LIMIT, JobCard, RankKey, decode_card
from swarmsched.errors import RemoteProtocolError, SwarmError
from swarmsched.gossip.exchange import (
    ID_LENGTH,
    FullStateAnswer,
    LocationRange,
    Parcel,
    ParcelKind,
    Stamp,
    StateDelta,
    StateDigest,
    pack_buckets,
    pack_listing,
    short_id,
    unpack_buckets,
    unpack_listing,
)
from swarmsched.gossip.history import History
from swarmsched.gossip.kinds import Kinds
from swarmsched.gossip.location import KEY_LENGTH, Location, LocationStore, decode_location, key_of
from swarmsched.gossip.record import RECORD_BYTES_LIMIT, NodeRecord, decode_record
from swarmsched.gossip.replica import Entry, Replica, Verdict, fair_order
from swarmsched.gossip.setting import CheckSetting, SettingRegister, SwarmSetting, decode_setting, encode_setting
from swarmsched.ids import JobId, NodeId
from swarmsched.view import JobView

NODES_LIMIT = 20_000
CARDS_LIMIT = 20_000
NODE_KEEP_S = 86_400.0
CARD_KEEP_S = 180.0
LISTED_CARDS = 40
LISTED_LOCATIONS = 16
RANGES_LIMIT = 8
QUEUED_CARDS_PER_GPU = 4
QUEUED_CARDS_MIN = 64
LOCATION_STAGE = 2
HISTORY_STAGE = 3
LOCATION_BYTES_TYPICAL = 60
PARCEL_OVERHEAD_BYTES = 8
AGE_DS_MAX = 2**32 - 1

T = TypeVar("T")
Owned = TypeVar("Owned", NodeRecord, JobCard)

RECORD_FAULTS = (SwarmError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Whatever handling a record may raise is that record's fault: it is dropped and counted, the rest goes on."""


@dataclass(slots=True)
class DueParcels:
    """What a digest or a list of wants calls for, before budgets: parcels by class in the order of sending."""

    nodes: list[Parcel] = field(default_factory=list)
    cards: list[Parcel] = field(default_factory=list)
    locations: list[Parcel] = field(default_factory=list)
    want_nodes: list[tuple[bytes, Stamp]] = field(default_factory=list)
    want_cards: list[tuple[bytes, Stamp]] = field(default_factory=list)
    want_locations: list[tuple[bytes, Stamp]] = field(default_factory=list)
    wants_setting: bool = False
    ranges: list[LocationRange] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to say."""
        wants = self.want_nodes or self.want_cards or self.want_locations or self.wants_setting or self.ranges
        return not (self.nodes or self.cards or self.locations or wants)


class Library:
    """Node records, cards, locations and the setting as known here."""

    def __init__(self, node_id: NodeId, check_setting: CheckSetting, rng: random.Random) -> None:
        self._node_id = node_id
        self._rng = rng
        self.claims: list[Stamp] = []  # stamps of records under our own name that others hold
        self.nodes: Replica[NodeRecord] = Replica(NODES_LIMIT, NODE_KEEP_S)
        self.cards: Replica[JobCard] = Replica(CARDS_LIMIT, CARD_KEEP_S)
        self.kinds = Kinds()
        self.history = History()
        self.jobs: dict[JobId, JobView] = {}  # of the cards of live jobs: made once for each version
        self.job_news: dict[JobId, None] = {}  # jobs whose entry in `jobs` has changed since somebody took note
        self.locations = LocationStore()
        self.setting = SettingRegister(node_id, check_setting)
        self.round_number = 0
        self.generation_limit = 0  # records of a higher generation are refused
        self.opening_count = 0  # node records with more to give than the one before, and jobs that wait no longer
        self.counters: Counter[str] = Counter()

    def take_job_news(self) -> Sequence[JobId]:
        """Jobs whose entry in `jobs` has come, changed or gone since this was last asked."""
        news, self.job_news = tuple(self.job_news), {}
        return news

    def refuse_above(self, generation: int) -> None:
        """Records of a higher generation are of a life that cannot have begun yet."""
        self.generation_limit = generation

    def begin_round(self) -> None:
        """Another round of gossip begins."""
        self.round_number += 1

    def take_in(self, parcel: Parcel, now_s: float) -> NodeRecord | JobCard | Location | SwarmSetting | None:
        """Adopt one parcel; the value if it was news."""
        try:
            return self._adopt(parcel, parcel.age_ds / 10, now_s)
        except RECORD_FAULTS:
            self.counters["poisoned"] += 1
            return None

    def _adopt(
        self, parcel: Parcel, age_s: float, now_s: float
    ) -> NodeRecord | JobCard | Location | SwarmSetting | None:
        match parcel.kind:
            case ParcelKind.NODE:
                record = decode_record(parcel.body)
                return record if self.offer_record(record, parcel.body, age_s, now_s) else None
            case ParcelKind.CARD:
                card = decode_card(parcel.body)
                return card if self.offer_card(card, parcel.body, age_s, now_s) else None
            case ParcelKind.LOCATION:
                location = decode_location(parcel.body)
                return location if self.offer_location(location, parcel.body, age_s, now_s) else None
            case ParcelKind.SETTING:
                setting = decode_setting(parcel.body)
                return setting if self.setting.offer(setting) else None
            case ParcelKind.ENDED:
                self.history.note(decode_card(parcel.body), parcel.body)
                return None
        self.counters["unknown_parcels"] += 1
        return None

    def offer_own_record(self, record: NodeRecord, body: bytes, now_s: float) -> None:
        """Keep what this node says of itself; its owner's versions only grow."""
        record.check()
        assert self._offer(self.nodes, record.node_id, record.node_id, record, body, 0.0, now_s) is Verdict.ADOPTED

    def offer_record(self, record: NodeRecord, body: bytes, age_s: float, now_s: float) -> bool:
        """Adopt a node record if it is newer, sane and not of the future."""
        if record.node_id == self._node_id:
            self.claims.append(record.stamp)
            return False
        if not self._is_sane(record):
            return False
        if record.generation > self.generation_limit:
            return self._refuse("refused_generations", self.nodes, record.node_id, record.stamp)
        before = self.nodes.get(record.node_id)
        verdict = self._offer(self.nodes, record.node_id, record.node_id, record, body, age_s, now_s)
        if verdict is Verdict.ADOPTED:
            self.opening_count += before is None or has_more(record, before.value)
        return self._judge(verdict, self.nodes, record.node_id, record.stamp)

    def offer_card(self, card: JobCard, body: bytes, age_s: float, now_s: float) -> bool:
        """Adopt a card if it is newer and its job is not known to have ended."""
        location = self.locations.get(card.job_id)
        if location is not None and location.ended_utc_s and card.state is not JobState.ENDED:
            return False
        verdict = self._offer(self.cards, card.job_id, card.shepherd, card, body, age_s, now_s)
        if verdict is Verdict.ADOPTED:
            self.kinds.note(card)
            self.history.note(card, body)
            self._show_job(card.job_id)
        return self._judge(verdict, self.cards, card.job_id, card.stamp)

    def _offer(
        self, replica: Replica[Owned], key: str, origin: str, value: Owned, body: bytes, age_s: float, now_s: float
    ) -> Verdict:
        number = self.round_number
        return replica.offer(key, origin, value.stamp, value, body, age_s=age_s, now_s=now_s, round_number=number)

    def expire_cards(self, now_s: float) -> None:
        """Drop cards that nobody renews."""
        for job_id in self.cards.expire(now_s):
            self._show_job(JobId(job_id))

    def _show_job(self, job_id: JobId) -> None:
        entry, before = self.cards.get(job_id), self.jobs.get(job_id)
        if entry is None or entry.value.state is JobState.ENDED:
            if self.jobs.pop(job_id, None) is None:
                return
            self.opening_count += 1
        else:
            self.jobs[job_id] = view = JobView(entry.value, entry.born_s)
            waited = before is not None and before.state is JobState.QUEUED
            self.opening_count += waited and view.state is not JobState.QUEUED
        self.job_news[job_id] = None

    def offer_location(self, location: Location, body: bytes, age_s: float, now_s: float) -> bool:
        """Adopt a location entry if it is newer; the end of a job buries its card."""
        kept = self.locations.offer(location, body, age_s=age_s, now_s=now_s, round_number=self.round_number)
        card = self.cards.get(location.job_id) if kept and location.ended_utc_s else None
        if card is not None and card.stamp[0] <= location.epoch and card.value.state is not JobState.ENDED:
            self.cards.bury(location.job_id)
            self._show_job(location.job_id)
        return kept

    def _is_sane(self, record: NodeRecord) -> bool:
        try:
            record.check()
        except RemoteProtocolError:
            self.counters["poisoned"] += 1
            self.nodes.quarantine(short_id(record.node_id), record.stamp)
            return False
        return True

    def _judge(self, verdict: Verdict, replica: Replica[T], key: str, stamp: Stamp) -> bool:
        if verdict is Verdict.REFUSED:
            return self._refuse("refused_records", replica, key, stamp)
        return verdict is Verdict.ADOPTED

    def _refuse(self, counter: str, replica: Replica[T], key: str, stamp: Stamp) -> bool:
        """Count it, and do not ask for this version again."""
        self.counters[counter] += 1
        replica.quarantine(short_id(key), stamp)
        return False

    def digest(self, since_round: int, *, is_full: bool) -> StateDigest:
        """Ids and stamps of what changed in the window, or of everything."""
        nodes: Iterable[Entry[NodeRecord]] = self.nodes if is_full else self.nodes.changed_since(since_round)
        cards: Iterable[Entry[JobCard]] = (
            self.cards if is_full else self.cards.changed_since(since_round)[:LISTED_CARDS]
        )
        recent = self.locations.recent(since_round, LISTED_LOCATIONS)
        return StateDigest(
            self.setting.current.version,
            self.setting.current.node_id,
            pack_listing((entry.identity, entry.stamp) for entry in nodes),
            pack_listing((entry.identity, entry.stamp) for entry in cards),
            pack_listing((key, self.locations.stamp(key) or (0, 0)) for key in recent),
            pack_buckets(self.locations.bucket_hashes) if is_full else b"",
            is_full,
            self.history.digest if is_full else 0,
        )

    def answer_digest(self, digest: StateDigest, since_round: int, now_s: float) -> DueParcels:
        """What we have that is newer, and what we want; RemoteProtocolError for a malformed digest."""
        answer = DueParcels()
        theirs = (digest.setting_version, digest.setting_node)
        if self.setting.current.stamp > theirs:
            answer.nodes.append(self.setting_parcel())
        answer.wants_setting = theirs > self.setting.current.stamp
        nodes = unpack_listing(digest.nodes, ID_LENGTH)
        cards = unpack_listing(digest.cards, ID_LENGTH)
        locations = unpack_listing(digest.locations, KEY_LENGTH)
        answer.nodes += _parcels(ParcelKind.NODE, _newer(self.nodes, nodes, since_round, is_full=digest.is_full), now_s)
        answer.cards += _parcels(ParcelKind.CARD, _newer(self.cards, cards, since_round, is_full=digest.is_full), now_s)
        answer.want_nodes = _wanted(self.nodes, nodes)
        answer.want_cards = _wanted(self.cards, cards)
        self._compare_locations(answer, locations, since_round, now_s)
        if digest.is_full:
            self._list_buckets(answer, unpack_buckets(digest.buckets))
        return answer

    def answer_delta(self, delta: StateDelta, now_s: float) -> DueParcels:
        """What the sender of a delta asked for, and what its location ranges show to be missing on either side."""
        answer = DueParcels()
        if delta.wants_setting:
            answer.nodes.append(self.setting_parcel())
        answer.nodes += _parcels(ParcelKind.NODE, _asked(self.nodes, delta.want_nodes), now_s)
        answer.cards += _parcels(ParcelKind.CARD, _asked(self.cards, delta.want_cards), now_s)
        for key, stamp in unpack_listing(delta.want_locations, KEY_LENGTH).items():
            self._add_if_newer(answer, key, stamp, now_s)
        for span in delta.ranges:
            self._compare_range(answer, span, now_s)
        return answer

    def _compare_locations(
        self, answer: DueParcels, theirs: dict[bytes, Stamp], since_round: int, now_s: float
    ) -> None:
        for key, stamp in theirs.items():
            known = self.locations.stamp(key) or (0, 0)
            if stamp > known:
                answer.want_locations.append((key, known))
            elif stamp < known:
                answer.locations.append(self._location_parcel(key, now_s))
        for key in self.locations.recent(since_round, LISTED_LOCATIONS):
            if key not in theirs:
                answer.locations.append(self._location_parcel(key, now_s))

    def _list_buckets(self, answer: DueParcels, theirs: dict[int, int]) -> None:
        """List the newest buckets whose hashes differ, for the other side to compare."""
        ours = self.locations.bucket_hashes
        differing = sorted((n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)), reverse=True)
        for number in differing[:RANGES_LIMIT]:
            low, high, stamps = self.locations.listing(number, self._rng)
            answer.ranges.append(LocationRange(low, high, pack_listing(stamps.items())))

    def _compare_range(self, answer: DueParcels, span: LocationRange, now_s: float) -> None:
        if len(span.low) != KEY_LENGTH or len(span.high) != KEY_LENGTH:
            raise RemoteProtocolError("range without keys", kind="LocationRange")
        theirs = unpack_listing(span.listing, KEY_LENGTH)
        for key, stamp in theirs.items():
            known = self.locations.stamp(key) or (0, 0)
            if stamp > known:
                answer.want_locations.append((key, known))
        for key in self.locations.keys_between(span.low, span.high):
            self._add_if_newer(answer, key, theirs.get(key, (0, 0)), now_s)

    def _add_if_newer(self, answer: DueParcels, key: bytes, stamp: Stamp, now_s: float) -> None:
        known = self.locations.stamp(key)
        if known is not None and known > stamp:
            answer.locations.append(self._location_parcel(key, now_s))

    def page(self, stage: int, after: bytes, budget_bytes: int, now_s: float) -> FullStateAnswer:
        """One page of everything, within the budget or one entry over it."""
        if stage >= LOCATION_STAGE:
            return self._location_page(after, max(1, budget_bytes // LOCATION_BYTES_TYPICAL), now_s)
        parcels = [self.setting_parcel()] if stage == 0 and not after and self.setting.current.version else []
        if stage == 0:
            page, cursor = _page_of(ParcelKind.NODE, self.nodes, after, budget_bytes, now_s)
        else:
            page, cursor = _page_of(ParcelKind.CARD, self.cards, after, budget_bytes, now_s)
        return FullStateAnswer((*parcels, *page), stage if cursor else stage + 1, cursor, is_last=False)

    def _location_page(self, after: bytes, limit: int, now_s: float) -> FullStateAnswer:
        keys = self.locations.page(after, limit)
        parcels = tuple(self._location_parcel(key, now_s) for key in keys)
        return FullStateAnswer(parcels, LOCATION_STAGE, keys[-1] if keys else after, is_last=len(keys) < limit)

    def history_page(self, budget_bytes: int) -> FullStateAnswer:
        """Ended jobs, all that the budget takes."""
        bodies = self.history.bodies(budget_bytes, PARCEL_OVERHEAD_BYTES, self._rng)
        parcels = tuple([Parcel(ParcelKind.ENDED, 0, body) for body in bodies])
        return FullStateAnswer(parcels, HISTORY_STAGE, b"", is_last=False)

    def location_parcel(self, job_id: JobId, now_s: float) -> Parcel | None:
        """The entry of a job for a push; None if it had to make room since."""
        key = key_of(job_id)
        return None if self.locations.stamp(key) is None else self._location_parcel(key, now_s)

    def card_parcel(self, job_id: JobId, now_s: float) -> Parcel | None:
        """A known job's card for a push; None if it is gone since."""
        entry = self.cards.get(job_id)
        return None if entry is None else _parcel(ParcelKind.CARD, entry, now_s)

    def record_parcel(self, node_id: NodeId, now_s: float) -> Parcel:
        """A known node's record for a push."""
        entry = self.nodes.get(node_id)
        assert entry is not None
        return _parcel(ParcelKind.NODE, entry, now_s)

    def last_queued_key(self) -> tuple[RankKey, str] | None:
        """(rank key, job) of the last queued card that is still worth spreading; None while all are.

        That is 4 cards for each GPU of the swarm, and 64 at least.
        """
        gpus = sum(entry.value.total_gpus for entry in self.nodes)
        limit = max(QUEUED_CARDS_MIN, QUEUED_CARDS_PER_GPU * gpus)
        if len(self.jobs) < limit:
            return None
        queued = [job.card for job in self.jobs.values() if job.state is JobState.QUEUED]
        return sorted([(card.rank_key, card.job_id) for card in queued])[limit - 1] if len(queued) >= limit else None

    def validate(self) -> None:
        """Re-derive every cross-reference."""
        self.nodes.validate()
        self.cards.validate()
        self.locations.validate()
        self.history.validate()
        for entry in self.nodes:
            assert decode_record(entry.body) == entry.value
            assert entry.value.stamp == entry.stamp
            assert len(entry.body) <= RECORD_BYTES_LIMIT
        live = [JobView(each.value, each.born_s) for each in self.cards if each.value.state is not JobState.ENDED]
        assert self.jobs == {job.job_id: job for job in live}
        for card in self.cards:
            assert decode_card(card.body) == card.value
            assert len(card.body) <= CARD_BYTES_LIMIT

    def setting_parcel(self) -> Parcel:
        """The setting as it travels."""
        return Parcel(ParcelKind.SETTING, 0, encode_setting(self.setting.current))

    def _location_parcel(self, key: bytes, now_s: float) -> Parcel:
        body = self.locations.body(key)
        assert body is not None
        return Parcel(ParcelKind.LOCATION, _tenths(self.locations.age_s(key, now_s)), body)


def _newer(replica: Replica[T], theirs: dict[bytes, Stamp], since_round: int, *, is_full: bool) -> list[Entry[T]]:
    """Entries that beat the listed ones, and those that should have been listed and are not."""
    known = [entry for entry in (replica.by_id(identity) for identity in theirs) if entry is not None]
    newer = [entry for entry in known if entry.stamp > theirs[entry.identity]]
    candidates = reversed(list(replica)) if is_full else replica.changed_since(since_round)
    newer += [entry for entry in candidates if entry.identity not in theirs]
    newer.sort(key=lambda entry: -entry.changed_round)
    return fair_order(newer)


def _wanted(replica: Replica[T], theirs: dict[bytes, Stamp]) -> list[tuple[bytes, Stamp]]:
    wants = ((identity, replica.wants(identity, stamp)) for identity, stamp in theirs.items())
    return [(identity, known) for identity, known in wants if known is not None]


def has_more(now: NodeRecord, before: NodeRecord) -> bool:
    """Whether a node has more to give than before, or takes other work."""
    return (
        now.free_gpus > before.free_gpus
        or now.cpus_free > before.cpus_free
        or now.memory_free_bytes > before.memory_free_bytes
        or now.flags != before.flags
    )


def _asked(replica: Replica[T], listing: bytes) -> list[Entry[T]]:
    asked = unpack_listing(listing, ID_LENGTH)
    entries = (replica.by_id(identity) for identity in asked)
    return fair_order(entry for entry in entries if entry is not None and entry.stamp > asked[entry.identity])


def _page_of(
    kind: int, replica: Replica[T], after: bytes, budget_bytes: int, now_s: float
) -> tuple[list[Parcel], bytes]:
    """Entries after a key, in key order, and the key to go on from; empty when these were the last."""
    parcels: list[Parcel] = []
    left = budget_bytes
    last = b""
    for entry in sorted(replica, key=lambda entry: entry.key):
        if entry.key.encode() <= after:
            continue
        if left <= 0:
            return parcels, last
        parcels.append(_parcel(kind, entry, now_s))
        left -= len(entry.body) + PARCEL_OVERHEAD_BYTES
        last = entry.key.encode()
    return parcels, b""


def _parcels(kind: int, entries: Sequence[Entry[T]], now_s: float) -> list[Parcel]:
    return [_parcel(kind, entry, now_s) for entry in entries]


def _parcel(kind: int, entry: Entry[T], now_s: float) -> Parcel:
    return Parcel(kind, _tenths(now_s - entry.born_s), entry.body)


def _tenths(age_s: float) -> int:
    return max(0, min(AGE_DS_MAX, round(age_s * 10)))

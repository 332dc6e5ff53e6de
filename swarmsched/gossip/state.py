"""Plane B: the gossiped state of nodes, jobs and settings.

Four kinds of owned entries: node records, job cards, job locations and the swarm-wide setting.  Each has one writer
and a version; the larger version wins, so entries may arrive late, twice or in any order.  Once a second a node
exchanges digests of its recent changes with one random live peer; free capacity and locations are also pushed to
three at once; every minute one full digest runs over the peer channel as a safety net; a joining node fetches
everything page by page.  What is known here is a hint: owners and registers decide.

Who is alive is told by `put_peer` and `drop_peer`; how that is found out is none of this plane's business.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swarmsched.api import JobState
from swarmsched.card import JobCard, encode_card, must_be_known_at_once
from swarmsched.effects import Announce, Effect, Persist, SendPeer
from swarmsched.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from swarmsched.events import DatagramReceived, PeerMessageReceived, TimerFired
from swarmsched.facts import SettingChanged
from swarmsched.fields import Value, cleaned
from swarmsched.gossip.card_desk import CardDesk
from swarmsched.gossip.courier import Courier, Route
from swarmsched.gossip.exchange import (
    DATAGRAM_CODEC,
    STATE_KINDS,
    FullStateAnswer,
    FullStateRequest,
    Parcel,
    StateDelta,
    StateDigest,
)
from swarmsched.gossip.history import HISTORY_ROOM
from swarmsched.gossip.kinds import KINDS_ROOM, Kinds
from swarmsched.gossip.library import HISTORY_STAGE, PARCEL_OVERHEAD_BYTES, Library, has_more
from swarmsched.gossip.location import Location, encode_location
from swarmsched.gossip.publisher import RecordPublisher
from swarmsched.gossip.record import NodeRecord, NodeStatus, encode_record, repaired
from swarmsched.gossip.setting import (
    SETTING_KEY,
    SETTING_ROOM,
    CheckSetting,
    SwarmSetting,
    decode_setting,
    encode_setting,
)
from swarmsched.ids import Address, JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.resources import FreeReport
from swarmsched.view import EndedJob, JobView, PolicySetting

ROUND_S = 1.0
ROUND_MIN_S, ROUND_MAX_S = 0.1, 60.0
FULL_EXCHANGE_S = 60.0
WINDOW_ROUNDS = 8
WINDOW_ROUNDS_LARGE = 14
LARGE_SWARM = 1_000
PUSH_PEERS = 3
PUSH_DELAY_S = 0.2
OUTBOX_LIMIT = 256
JOB_NEWS_KEPT = 1_000
REPEATS_PER_ROUND = 3
PAGE_BYTES_MIN = 1_024
EXPIRY_INTERVAL_S = 30.0
JOIN_RETRY_S = 3.0
SAVE_DELAY_S = 2.0
KINDS_SAVE_DELAY_S = 300.0
DAY_S = 86_400


class MemberRef(Value):
    """A live peer as the state plane needs it; `generation` 0 if not known."""

    node_id: NodeId
    address: Address
    generation: int = 0


class StateConfig(Value):
    """Whose state plane it is; `packet_bytes`: most payload of one datagram."""

    node_id: NodeId
    generation: int
    packet_bytes: int = 1_200
    round_s: float = ROUND_S

    def __post_init__(self) -> None:
        if not ROUND_MIN_S <= self.round_s <= ROUND_MAX_S:
            accepted = f"{ROUND_MIN_S:g} to {ROUND_MAX_S:g} seconds"
            raise ConfigError("round_s", f"{self.round_s} is out of range", accepted)


StateEvent = DatagramReceived | PeerMessageReceived | TimerFired
StateEffect = Effect | SettingChanged


@dataclass(slots=True)
class _Repair:
    """An owner's answer, and what it makes of the gossiped record."""

    report: FreeReport
    at_s: float
    base: NodeRecord | None = None
    result: NodeRecord | None = None


class StatePlane:
    """One node's part of the state plane.  The constructor only stores; nothing is sent before the first peers."""

    def __init__(self, config: StateConfig, rng: random.Random, check_setting: CheckSetting) -> None:
        self._config = config
        self._generation = config.generation
        self._rng = rng
        self._library = Library(config.node_id, check_setting, rng)
        self._publisher = RecordPublisher(config.generation)
        self._desk = CardDesk()
        self._refused_cards: set[JobId] = set()  # jobs shepherded here of which that was announced
        self._peers_by_id: dict[NodeId, MemberRef] = {}
        self._peers_in_order: tuple[MemberRef, ...] | None = ()  # cache, made when asked for
        self._highest_generation = config.generation  # of any live member
        self._courier = Courier(config.packet_bytes, self._library.counters)
        self._started_s: float | None = None  # monotonic time of the first event
        self._round_at_s = 0.0  # deadlines on our clock
        self._full_at_s = 0.0
        self._join_at_s = 0.0
        self._expire_at_s = 0.0
        self._flush_at_s = math.inf
        self._repeats = 0  # how often a cut answer may still be followed up in this round
        self._members = 0  # that the byte cap was last set for
        self._outbox: dict[tuple[str, str], None] = {}  # what is to be pushed: (kind, key), oldest first
        self._repairs: dict[NodeId, _Repair] = {}  # owners' answers newer than their records
        self._join_cursor: tuple[int, bytes] = (0, b"")
        self._save_at_s = self._save_kinds_at_s = math.inf
        self.opening_count = 0  # how often gossip told of more free capacity, or of a job that waits no longer
        self.is_synchronised = False  # a full state was fetched, or there was nobody to fetch it from

    def step(self, event: StateEvent, now_s: float) -> Sequence[StateEffect]:
        """Take one event; datagrams of other planes are not for this one and do nothing."""
        self._begin(now_s)
        match event:
            case DatagramReceived(source, payload):
                return self._on_datagram(source, payload, now_s)
            case PeerMessageReceived(sender, message):
                return self._on_peer_message(sender, message, now_s)
            case TimerFired():
                return self._on_timer(now_s)

    @property
    def next_deadline_s(self) -> float:
        """When `TimerFired` is wanted; infinite for a node alone that says nothing."""
        own = min(self._publisher.next_deadline_s, self._desk.next_deadline_s, self._save_at_s, self._save_kinds_at_s)
        if not self._peers_by_id:
            return own
        join = math.inf if self.is_synchronised else self._join_at_s
        return min(own, self._round_at_s, self._full_at_s, self._flush_at_s, join)

    def set_generation(self, generation: int) -> None:
        """Membership has raised this node's generation: records of the old one would lose against those of others."""
        self._generation = generation
        self._publisher.set_generation(generation)

    def put_peer(self, peer: MemberRef) -> None:
        """Another member that is live, or lives in another way than before."""
        self._peers_by_id[peer.node_id] = peer
        self._peers_in_order = None
        self._highest_generation = max(self._highest_generation, peer.generation)

    def drop_peer(self, node_id: NodeId) -> None:
        """A member that is no longer live; one that was not known is none of our business."""
        if self._peers_by_id.pop(node_id, None) is not None:
            self._peers_in_order = None

    def publish_node(self, draft: NodeRecord, now_s: float) -> list[Effect]:
        """What this node would say of itself now; generation and version are filled in when it is due."""
        self._begin(now_s)
        self._publisher.set_draft(draft)
        return self._publish_due(now_s)

    def publish_card(self, card: JobCard, now_s: float) -> list[Effect]:
        """The card of a job shepherded here, at each change; it is published when it is due, short jobs never."""
        self._begin(now_s)
        self._desk.set_card(card, now_s)
        return self._publish_due(now_s)

    def withdraw_card(self, job_id: JobId, now_s: float, record: JobRecord | None = None) -> list[Effect]:
        """The job is closed, or shepherded elsewhere from now on (then its new shepherd's epoch wins anyway)."""
        self._begin(now_s)
        last = self._desk.withdraw(job_id, record, now_s)
        effects = self._put_card(last, now_s) if last is not None else []
        self._refused_cards.discard(job_id)
        return effects

    def set_location(self, location: Location, now_s: float) -> list[Effect]:
        """Where a job's record is, at each change of holders, shepherd or state; spread within 0.2 s."""
        self._begin(now_s)
        if self._library.offer_location(location, encode_location(location), 0.0, now_s):
            self._push("location", location.job_id, now_s + PUSH_DELAY_S)
        return []

    def propose_setting(self, setting: PolicySetting, now_s: float) -> list[StateEffect]:
        """Change the swarm-wide setting; SwarmError if it cannot be used, and then nothing has changed."""
        self._begin(now_s)
        adopted = self._library.setting.propose(setting)
        self._push("setting", "", now_s)
        stored = Persist(SETTING_ROOM, SETTING_KEY, encode_setting(adopted))
        return [stored, SettingChanged(), *self._flush_due(now_s)]

    def restore_setting(self, stored: bytes) -> None:
        """The setting as it was persisted; RemoteProtocolError if it is unusable, and then the default stays."""
        self._library.setting.offer(decode_setting(stored))

    def restore_learned(self, history: Mapping[str, bytes], kinds: Mapping[str, bytes]) -> None:
        """What an earlier life has learned; what nobody can read of it is no loss that keeps a node away."""
        self._library.history.restore(history)
        self._library.kinds.restore(kinds)

    def repair(self, node_id: NodeId, report: FreeReport, now_s: float) -> None:
        """An owner's fresh figures: they stand until a gossiped record of the same or a later ledger version comes."""
        known, before = self._repairs.get(node_id), self.node_record(node_id, now_s)
        if known is None or (known.report.generation, known.report.version) <= (report.generation, report.version):
            self._repairs[node_id] = _Repair(report, now_s)
            after = self.node_record(node_id, now_s)
            self.opening_count += before is not None and after is not None and has_more(after.record, before.record)

    def node_records(self, now_s: float) -> tuple[NodeStatus, ...]:
        """All known node records, by name, with owners' later answers worked in."""
        entries = sorted(self._library.nodes, key=lambda entry: entry.key)
        return tuple(self._status(entry.value, now_s - entry.born_s, now_s) for entry in entries)

    def current_records(self) -> Iterator[NodeRecord]:
        """The same records without their ages, in no order that means anything: the same object until it changes."""
        for entry in self._library.nodes:
            yield self._status(entry.value, 0.0, 0.0).record if entry.key in self._repairs else entry.value

    def node_record(self, node_id: NodeId, now_s: float) -> NodeStatus | None:
        """One node's record, or None."""
        entry = self._library.nodes.get(node_id)
        return None if entry is None else self._status(entry.value, now_s - entry.born_s, now_s)

    @property
    def jobs(self) -> Mapping[JobId, JobView]:
        """Live jobs by their cards, own published ones included; each view is kept until its card changes."""
        return self._library.jobs

    @property
    def has_job_news(self) -> bool:
        """True when `take_job_news` has something."""
        return bool(self._library.job_news)

    @property
    def job_news_is_long(self) -> bool:
        """True when it has come to more jobs than there are: a node to which jobs mean nothing takes none otherwise."""
        return len(self._library.job_news) > len(self._library.jobs) + JOB_NEWS_KEPT

    @property
    def kinds(self) -> Kinds:
        """Read only: what jobs of one kind have measured, as far as this node has heard of them."""
        return self._library.kinds

    @property
    def history(self) -> tuple[EndedJob, ...]:
        """Jobs that have ended anywhere, the oldest first."""
        return self._library.history.ended

    def take_job_news(self) -> Sequence[JobId]:
        """Jobs whose entry in `jobs` has come, changed or gone since this was last asked."""
        return self._library.take_job_news()

    @property
    def locations(self) -> Mapping[JobId, Location]:
        """Every known job of the last seven days; entries are decoded when they are read."""
        return self._library.locations

    @property
    def setting(self) -> SwarmSetting:
        """The swarm-wide setting in force."""
        return self._library.setting.current

    @property
    def counters(self) -> Mapping[str, int]:
        """Totals since the start and present sizes, for metrics."""
        sizes = {
            "node_records": len(self._library.nodes),
            "cards": len(self._library.cards),
            "locations": len(self._library.locations),
            "ended_jobs": len(self._library.history),
            "kinds": len(self._library.kinds),
            "quarantined": self._library.nodes.quarantined + self._library.cards.quarantined,
        }
        return {**self._library.counters, **sizes}

    def validate(self) -> None:
        """Re-derive every invariant from scratch; tests and the simulator call it."""
        self._library.validate()
        assert len(self._outbox) <= OUTBOX_LIMIT
        own = self._library.nodes.get(self._config.node_id)
        assert own is None or own.stamp <= (self._generation, self._publisher.version)

    def _begin(self, now_s: float) -> None:
        """Settle what depends on time before an event is handled."""
        if self._started_s is None:
            self._started_s = now_s
        if self._members != len(self._peers_by_id) + 1:
            self._members = len(self._peers_by_id) + 1
            self._courier.set_members(self._members, now_s)
        uptime_s = int(now_s - self._started_s)
        self._settle_claims()
        if self._library.history.has_changes and self._save_at_s == math.inf:
            self._save_at_s = now_s + SAVE_DELAY_S
        if self._library.kinds.has_changes and self._save_kinds_at_s == math.inf:
            self._save_kinds_at_s = now_s + KINDS_SAVE_DELAY_S
        self._library.refuse_above(max(self._generation + uptime_s, self._highest_generation) + DAY_S)

    @property
    def _peers(self) -> tuple[MemberRef, ...]:
        if self._peers_in_order is None:
            self._peers_in_order = tuple(self._peers_by_id.values())
        return self._peers_in_order

    def _settle_claims(self) -> None:
        """Records under our name that we did not write: outbid versions."""
        for generation, version in self._library.claims:
            if generation == self._generation:
                self._publisher.outbid(version)
        self._library.claims.clear()

    @property
    def _window_start(self) -> int:
        rounds = WINDOW_ROUNDS if self._members <= LARGE_SWARM else WINDOW_ROUNDS_LARGE
        return self._library.round_number - rounds

    def _on_timer(self, now_s: float) -> list[Effect]:
        """Whatever is due; a timer that fires early or twice finds nothing due."""
        effects = [*self._save_due(now_s), *self._publish_due(now_s)]
        if now_s >= self._expire_at_s:
            self._expire_at_s = now_s + EXPIRY_INTERVAL_S
            self._expire(now_s)
        if not self._peers:
            return effects
        if not self.is_synchronised and now_s >= self._join_at_s:
            effects += self._ask_page(now_s)
        if now_s >= self._round_at_s:
            effects += self._run_round(now_s)
        if now_s >= self._full_at_s:
            effects += self._run_full_exchange(now_s)
        return effects + self._flush_due(now_s)

    def _save_due(self, now_s: float) -> list[Effect]:
        """What was learned; the last moments of it may be lost with the power, and of the history others tell them."""
        effects: list[Effect] = []
        if now_s >= self._save_at_s:
            self._save_at_s = math.inf
            effects += [Persist(HISTORY_ROOM, job_id, body) for job_id, body in self._library.history.take_changes()]
        if now_s >= self._save_kinds_at_s:
            self._save_kinds_at_s = math.inf
            effects += [Persist(KINDS_ROOM, key, body) for key, body in self._library.kinds.take_changes()]
        return effects

    def _run_round(self, now_s: float) -> list[Effect]:
        """One digest to one random peer; jitter keeps swarms that started together from marching in step."""
        self._round_at_s = now_s + self._config.round_s * self._rng.uniform(0.9, 1.1)
        self._library.begin_round()
        self._repeats = REPEATS_PER_ROUND
        self._publisher.adapt(self._members, is_capped=self._courier.take_capped())
        peer = self._rng.choice(self._peers)
        return self._send_digest(peer.address, peer.node_id, now_s)

    def _run_full_exchange(self, now_s: float) -> list[Effect]:
        is_first = self._full_at_s == 0.0
        self._full_at_s = now_s + FULL_EXCHANGE_S * self._rng.uniform(0.8, 1.2)
        if is_first:
            return []  # the join fetches everything just now
        peer = self._rng.choice(self._peers)
        digest = self._library.digest(self._window_start, is_full=True)
        return self._courier.send_digest(digest, peer.address, peer.node_id, now_s)

    def _send_digest(self, address: Address, node_id: NodeId | None, now_s: float) -> list[Effect]:
        digest = self._library.digest(self._window_start, is_full=False)
        return self._courier.send_digest(digest, address, node_id, now_s)

    def _ask_page(self, now_s: float) -> list[Effect]:
        """The next page of the full state, from any live peer; repeated until the last page has come."""
        self._join_at_s = now_s + JOIN_RETRY_S
        stage, after = self._join_cursor
        peer = self._rng.choice(self._peers)
        return [SendPeer(peer.node_id, FullStateRequest(stage, after, self._library.history.digest))]

    def _expire(self, now_s: float) -> None:
        """By our own clock; live members' records are spared, their owners renew them."""
        live = [self._config.node_id, *self._peers_by_id]
        gone = self._library.nodes.expire(now_s, live)
        for node_id in gone:
            self._repairs.pop(NodeId(node_id), None)
        self._library.expire_cards(now_s)
        self._library.locations.expire(now_s)
        self._library.counters["expired"] += len(gone)

    def _on_datagram(self, source: Address, payload: bytes, now_s: float) -> Sequence[StateEffect]:
        """Merging is idempotent: a doubled or late message finds its entries known and answers nothing new."""
        if not payload or payload[0] not in STATE_KINDS:
            return []
        try:
            message = DATAGRAM_CODEC.decode(payload)
            return self._on_message(message, source, now_s)
        except RemoteProtocolError:
            self._library.counters["malformed_messages"] += 1
            return []

    def _on_peer_message(self, sender: NodeId, message: object, now_s: float) -> Sequence[StateEffect]:
        try:
            return self._on_message(message, sender, now_s)
        except RemoteProtocolError:
            self._library.counters["malformed_messages"] += 1
            return []

    def _on_message(self, message: object, route: Route, now_s: float) -> Sequence[StateEffect]:
        match message:
            case StateDigest():
                answer = self._library.answer_digest(message, self._window_start, now_s)
                effects = self._courier.send_answer(answer, route, now_s)
                return [*effects, *self._tell_history(message.history, route, now_s)]
            case StateDelta():
                return self._on_delta(message, route, now_s)
            case FullStateRequest(stage, after, history) if isinstance(route, str):
                effects = self._on_page_request(route, stage, after, now_s)
                return [*effects, *(() if stage or after else self._tell_history(history, route, now_s))]
            case FullStateAnswer():
                return self._on_page(message, now_s)
        return []

    def _on_delta(self, delta: StateDelta, route: Route, now_s: float) -> list[StateEffect]:
        effects = self._take_in(delta.parcels, now_s)
        answer = self._library.answer_delta(delta, now_s)
        effects += self._courier.send_answer(answer, route, now_s)
        if delta.is_cut and delta.parcels and self._repeats > 0:
            self._repeats -= 1
            effects += self._ask_again(route, now_s)
        return effects

    def _ask_again(self, route: Route, now_s: float) -> list[Effect]:
        """A cut answer may be followed up at once, a few times a round."""
        if not isinstance(route, str):
            return self._send_digest(route, None, now_s)
        peer = self._peers_by_id.get(route)
        if peer is None:
            return []
        return self._courier.send_digest(
            self._library.digest(self._window_start, is_full=True), peer.address, route, now_s
        )

    def _on_page_request(self, sender: NodeId, stage: int, after: bytes, now_s: float) -> list[Effect]:
        """An empty page tells the joining node to come back when the cap allows more."""
        budget = self._courier.stream_budget(now_s)
        if budget < PAGE_BYTES_MIN:
            return [SendPeer(sender, FullStateAnswer((), stage, after, is_last=False))]
        page = self._library.page(stage, after, budget - PAGE_BYTES_MIN // 2, now_s)
        size = sum(len(parcel.body) + PARCEL_OVERHEAD_BYTES for parcel in page.parcels)
        return self._courier.send_message(sender, page, size, now_s)

    def _tell_history(self, theirs: int, route: Route, now_s: float) -> list[Effect]:
        """Jobs that have ended, as a page beside the others, to one who has heard of other ones; 0: of an agent that
        keeps none."""
        if theirs in (0, self._library.history.digest) or not isinstance(route, str):
            return []
        page = self._library.history_page(self._courier.stream_budget(now_s) - PAGE_BYTES_MIN)
        size = sum(len(parcel.body) + PARCEL_OVERHEAD_BYTES for parcel in page.parcels)
        return self._courier.send_message(route, page, size, now_s) if page.parcels else []

    def _on_page(self, page: FullStateAnswer, now_s: float) -> list[StateEffect]:
        """A page that comes twice, or after the last one, is merged like any other and asks for nothing."""
        effects = self._take_in(page.parcels, now_s)
        cursor = (page.stage, page.after)
        if self.is_synchronised or cursor < self._join_cursor or page.stage == HISTORY_STAGE:
            return effects
        if page.is_last:
            self.is_synchronised = True
        elif cursor == self._join_cursor:
            self._join_at_s = now_s + 1.0
        else:
            self._join_cursor = cursor
            self._join_at_s = now_s
        return effects

    def _take_in(self, parcels: Sequence[Parcel], now_s: float) -> list[StateEffect]:
        effects: list[StateEffect] = []
        opening_count = self._library.opening_count
        for parcel in parcels:
            news = self._library.take_in(parcel, now_s)
            if isinstance(news, SwarmSetting):
                effects += [Persist(SETTING_ROOM, SETTING_KEY, encode_setting(news)), SettingChanged()]
            elif isinstance(news, JobCard) and news.job_id in self._desk:
                self._desk.outbid(news.job_id, news.epoch, news.counter)
        self.opening_count += self._library.opening_count - opening_count
        refusal = self._library.setting.take_refusal()
        if refusal:
            effects.append(Announce("setting.refused", refusal, node=self._config.node_id))
        return effects

    def _publish_due(self, now_s: float) -> list[Effect]:
        if now_s >= self._publisher.next_deadline_s:
            publication = self._publisher.due(now_s)
            if publication is not None:
                self._library.offer_own_record(publication.record, encode_record(publication.record), now_s)
                if publication.is_urgent:
                    self._push("node", self._config.node_id, now_s)
        told = self._publish_cards(now_s) if now_s >= self._desk.next_deadline_s else []
        return [*told, *self._flush_due(now_s)]

    def _publish_cards(self, now_s: float) -> list[Effect]:
        last = self._library.last_queued_key()

        def is_too_far_back(card: JobCard) -> bool:
            return last is not None and card.state is JobState.QUEUED and (card.rank_key, card.job_id) > last

        effects: list[Effect] = []
        for card in self._desk.due(now_s, is_too_far_back):
            known = self._library.jobs.get(card.job_id)
            effects += self._put_card(card, now_s)
            is_out = self._library.jobs.get(card.job_id) is not known
            if is_out and known is not None and must_be_known_at_once(known.card, card):
                self._push("card", card.job_id, now_s + PUSH_DELAY_S)
        return effects

    def _put_card(self, card: JobCard, now_s: float) -> list[Effect]:
        try:
            shortened, body = encode_card(card)
        except LocalProtocolError as error:
            return self._refuse_card(card.job_id, error)
        if not self._library.offer_card(shortened, body, 0.0, now_s):
            known = self._library.cards.get(card.job_id)
            if known is not None:
                self._desk.outbid(card.job_id, *known.stamp)
        return []

    def _refuse_card(self, job_id: JobId, error: LocalProtocolError) -> list[Effect]:
        """Others keep its last version, until they expire it.  Told once of a job: what made one of its cards unfit is
        mostly in the next one too."""
        self._library.counters["cards_refused"] += 1
        if job_id in self._refused_cards:
            return []
        self._refused_cards.add(job_id)
        text = f"its card cannot be written and was left out: {cleaned(str(error))}"
        return [Announce("job.card_refused", text, job_id, self._config.node_id)]

    def _push(self, kind: str, key: str, at_s: float) -> None:
        """Send an entry to three random peers at that time; at the limit the oldest waiting one is left to rounds."""
        self._outbox.pop((kind, key), None)
        self._outbox[kind, key] = None
        if len(self._outbox) > OUTBOX_LIMIT:
            self._outbox.pop(next(iter(self._outbox)))
            self._library.counters["pushes_dropped"] += 1
        self._flush_at_s = min(self._flush_at_s, at_s)

    def _flush_due(self, now_s: float) -> list[Effect]:
        if now_s < self._flush_at_s:
            return []
        self._flush_at_s = math.inf
        waiting, self._outbox = self._outbox, {}
        if not self._peers:
            return []
        parcels = [parcel for kind, key in waiting if (parcel := self._parcel_of(kind, key, now_s)) is not None]
        peers = self._rng.sample(self._peers, min(PUSH_PEERS, len(self._peers)))
        return self._courier.push(parcels, [peer.address for peer in peers], now_s)

    def _parcel_of(self, kind: str, key: str, now_s: float) -> Parcel | None:
        if kind == "node":
            return self._library.record_parcel(NodeId(key), now_s)
        if kind == "card":
            return self._library.card_parcel(JobId(key), now_s)
        if kind == "location":
            return self._library.location_parcel(JobId(key), now_s)
        return self._library.setting_parcel()

    def _status(self, record: NodeRecord, age_s: float, now_s: float) -> NodeStatus:
        repair = self._repairs.get(record.node_id)
        if repair is None:
            return NodeStatus(record, age_s)
        if record.ledger_stamp >= (repair.report.generation, repair.report.version):
            del self._repairs[record.node_id]
            return NodeStatus(record, age_s)
        if repair.base is not record:
            repair.base, repair.result = record, repaired(record, repair.report)
        assert repair.result is not None
        return NodeStatus(repair.result, now_s - repair.at_s, is_repaired=True)

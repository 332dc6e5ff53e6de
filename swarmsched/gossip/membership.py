"""Plane A: SWIM with the Lifeguard extensions, generations, a hash check and dialling of the dead.

Das, Gupta and Motivala, "SWIM", 2002; Dadgar, Phillips and Currey, "Lifeguard", 2018.  What this adds to them:

- Claims about a member are ordered by (generation, incarnation, standing) and the largest wins, so every node ends
  with the same table whatever the order of arrival.  A restart raises the generation and needs no refutation.
- Every 5 s one member is sent the hash of the table; if it differs the tables are exchanged.  Lost rumours end there.
- Every 5 s one dead member or absent seed is greeted, so that a split heals by itself.
- A verdict "failed" that comes in a list is only an accusation to those who see the member alive: after a split both
  sides bring such verdicts about healthy members.
- A packet that the kernel refuses to send is a failed direct probe of its destination.

Late, doubled, reordered and lost messages are normal: claims are idempotent by their order, answers are matched by
sequence number, and timers are deadlines compared on waking.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from swarmsched.effects import Announce, Persist, SendPeer
from swarmsched.errors import ConfigError, RemoteProtocolError
from swarmsched.events import (
    DatagramReceived,
    DatagramSendFailed,
    LoopLagged,
    PeerMessageReceived,
    PeerSendFailed,
    TimerFired,
)
from swarmsched.facts import GenerationRaised
from swarmsched.gossip.dissemination import Dissemination, MembershipEffect
from swarmsched.gossip.health import LAG_THRESHOLD_S, LocalHealth
from swarmsched.gossip.identity import GENERATION_KEY, GENERATION_ROOM, Identity, Reaction
from swarmsched.gossip.member import Member, MemberChanged, MemberStatus, MemberView, fingerprint, status_of
from swarmsched.gossip.membership_config import MembershipConfig
from swarmsched.gossip.message import (
    MEMBERSHIP_CODEC,
    Ack,
    Gossip,
    Hello,
    MemberList,
    Ping,
    PingRequest,
    RelayAnswer,
    Standing,
    StreamPing,
    StreamPong,
    Update,
)
from swarmsched.gossip.prober import Prober
from swarmsched.gossip.roster import Roster
from swarmsched.gossip.suspicion import Suspicion
from swarmsched.ids import Address, NodeId, is_node_name
from swarmsched.wire.sealing import WIRE_MINOR_HIGHEST, WIRE_MINOR_LOWEST

MembershipEvent = DatagramReceived | DatagramSendFailed | TimerFired | LoopLagged | PeerMessageReceived | PeerSendFailed

HASH_INTERVAL = 5.0  # probe periods between two comparisons of the membership hash; repairs what rumours missed
DIAL_INTERVAL_S = 5.0  # between two attempts to reach a dead member or an absent seed: bounds how long a split lasts
LONELY_DIAL_INTERVAL_S = 1.0  # the same while no other member is known at all
SLOW_DIAL_AFTER_S, SLOW_DIAL_EVERY = 3_600.0, 12  # one dead for longer is dialled at every so many attempts only
KEEP_DEAD_S = 86_400.0  # then a failed or departed member is forgotten

GENERATION_LEAD_MAX = 86_400
INCARNATION_LEAD_MAX = 2**20
"""A claim further ahead of what this node knows is refused: nothing honest gets there."""

SUSPICION_SHIFT_LAG_S = 1.0
"""After standing still for longer, a node gives everybody it suspects that much time again."""

LEAVE_PEERS = 8
LONELY_DIALS_MAX = 8
DIALLED_MAX = 1_000

GREETINGS_MAX = 100
"""Other holders of this name that are greeted; further ones hear by rumours alone."""

REFUSED_NAMES_MAX = 100
"""Refused members that are announced by name; the others are only counted."""


class Membership:
    """One node's view of who is there.  `next_deadline_s` says when `step(TimerFired(), now_s)` is due."""

    def __init__(self, config: MembershipConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._identity = Identity(_first_claim(config))
        self._self_since_s = 0.0
        # One generator each, so that one more draw in one of them does not change the others.
        self._roster = Roster(random.Random(rng.getrandbits(64)))
        self._outbox = Dissemination(config, self._identity, self._roster, random.Random(rng.getrandbits(64)))
        self._health = LocalHealth()
        self._prober = Prober(config, self._roster, self._health, self._outbox, random.Random(rng.getrandbits(64)))
        self._suspicions: dict[NodeId, Suspicion] = {}  # exactly the members that stand as SUSPECT
        self._started_s: float | None = None  # None until the first step
        self._generation_base = config.generation
        self._absent_seeds = tuple(seed for seed in config.seeds if seed != config.address)
        self._next_probe_s = self._next_hash_s = self._next_dial_s = math.inf
        self._next_deadline_s = 0.0
        self._dial_count = 0
        self._dialled: dict[Address, int] = {}  # the last dial of each address by its number, the oldest first
        self._refused: dict[str, None] = {}  # names announced as refused
        self._greetings: set[tuple[bytes, int]] = set()  # other holders of this name, and the generation told to them
        self._counters: Counter[str] = Counter()
        self._now_s = 0.0

    # Reading

    @property
    def next_deadline_s(self) -> float:
        """When to call `step(TimerFired(), now_s)`; infinity if never."""
        return self._next_deadline_s

    @property
    def generation(self) -> int:
        """This node's generation; grows if a peer knew a newer one."""
        return self._identity.update.generation

    @property
    def incarnation(self) -> int:
        """This node's incarnation within the generation."""
        return self._identity.update.incarnation

    @property
    def membership_hash(self) -> int:
        """64 bits over (id, generation, incarnation, standing, conflict) of all members, this node included."""
        return self._roster.hash ^ fingerprint(self._identity.update)

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts since the start, for metrics."""
        return self._counters

    def members(self, now_s: float) -> tuple[MemberView, ...]:
        """All members by name, this node and the dead included."""
        views = [self._self_view(now_s), *(member.view(now_s) for member in self._roster)]
        return tuple(sorted(views, key=lambda view: view.node_id))

    def member(self, node_id: NodeId, now_s: float | None = None) -> MemberView | None:
        """One member, or None.  Without `now_s` ages are those of the last step."""
        at_s = self._now_s if now_s is None else now_s
        if node_id == self._config.node_id:
            return self._self_view(at_s)
        member = self._roster.get(node_id)
        return None if member is None else member.view(at_s)

    def address_of(self, node_id: NodeId) -> Address | None:
        """Where a member lives; cheap."""
        if node_id == self._config.node_id:
            return self._config.address
        member = self._roster.get(node_id)
        return None if member is None else member.update.address

    def alive(self) -> list[NodeId]:
        """Names that may get new work, sorted: alive, neither suspect nor in conflict; this node included."""
        names = [member.update.node for member in self._roster if member.status is MemberStatus.ALIVE]
        if status_of(self._identity.update) is MemberStatus.ALIVE:
            names.append(self._config.node_id)
        return sorted(names)

    def is_alive(self, node_id: NodeId) -> bool:
        """True for one of `alive`; cheap."""
        if node_id == self._config.node_id:
            return status_of(self._identity.update) is MemberStatus.ALIVE
        member = self._roster.get(node_id)
        return member is not None and member.status is MemberStatus.ALIVE

    def validate(self) -> None:
        """Re-derive every invariant; AssertionError if one is broken."""
        self._roster.validate()
        self._prober.validate()
        assert self._roster.get(self._config.node_id) is None
        suspects = {member.update.node for member in self._roster if member.update.standing is Standing.SUSPECT}
        assert suspects == set(self._suspicions)
        assert self._outbox.is_drained

    # Commands

    def step(self, event: MembershipEvent, now_s: float) -> list[MembershipEffect]:
        """React to one event; malformed or implausible messages are counted and change nothing."""
        self._now_s = now_s
        if self._started_s is None:
            self._start()
        elif now_s - self._next_deadline_s > LAG_THRESHOLD_S:
            self._on_lag(now_s - self._next_deadline_s)
        match event:
            case DatagramReceived(source, payload):
                self._on_datagram(source, payload)
            case TimerFired():
                pass
            case PeerMessageReceived(sender, message):
                self._on_peer_message(sender, message)
            case DatagramSendFailed(destination, _):
                self._on_send_error(destination)
            case LoopLagged(lag_s):
                self._health.lagged(lag_s, now_s)
            case PeerSendFailed():
                self._counters["peer_send_failed"] += 1  # the probe's own deadline draws the conclusion
        return self._finish()

    def leave(self, now_s: float) -> list[MembershipEffect]:
        """Tell others that this node goes on purpose; keep stepping for a second or two to spread it."""
        self._now_s = now_s
        if not self._identity.has_left:
            previous = status_of(self._identity.update)
            self._identity.leave()
            self._self_changed(previous)
            claim = self._identity.update
            for peer in self._roster.sample(LEAVE_PEERS):
                self._outbox.send_to(peer, Gossip((claim,)))
        return self._finish()

    def forget(self, node_id: NodeId, now_s: float) -> list[MembershipEffect]:
        """An operator gives a dead member up: nobody dials it any more.  It may return as it likes.

        ConfigError if it is unknown or still live; nothing changed then.
        """
        self._now_s = now_s
        member = self._roster.get(node_id)
        if member is None:
            raise ConfigError("node", f"{node_id} is not a member", "see `swarm nodes` for the names")
        if member.is_live:
            raise ConfigError("node", f"{node_id} is {member.status.value}", "stop its agent first")
        if member.update.standing is not Standing.LEFT:
            self._adopt(replace(member.update, standing=Standing.LEFT))
        return self._finish()

    # Time

    def _start(self) -> None:
        now_s = self._now_s
        self._started_s = self._self_since_s = now_s
        self._next_probe_s = now_s + self._rng.random() * self._config.probe_period_s
        self._next_hash_s = now_s + self._rng.random() * self._config.probe_period_s
        self._next_dial_s = now_s

    def _finish(self) -> list[MembershipEffect]:
        if self._started_s is None:
            self._start()
        self._run_timers()
        # Never in the past: what was waiting for a member to appear is due now, and is not a lag.
        self._next_deadline_s = max(self._now_s, self._earliest_deadline_s())
        return self._outbox.drain()

    def _earliest_deadline_s(self) -> float:
        deadline_s = self._prober.earliest_deadline_s()
        if len(self._roster):
            deadline_s = min(deadline_s, self._next_probe_s, self._next_hash_s)
            if self._outbox.rumours:
                deadline_s = min(deadline_s, self._outbox.next_rumour_s)
        if self._absent_seeds or self._roster.dead:
            deadline_s = min(deadline_s, self._next_dial_s)
        for suspicion in self._suspicions.values():
            deadline_s = min(deadline_s, suspicion.deadline_s)
        return deadline_s

    def _run_timers(self) -> None:
        now_s = self._now_s
        self._outbox.spread(now_s)
        if now_s < self._next_deadline_s:
            return
        self._health.pass_time(now_s)
        for node in self._prober.advance(now_s, self._suspicions.keys()):
            self._on_silence(node)
        for node in [node for node, suspicion in self._suspicions.items() if suspicion.deadline_s <= now_s]:
            self._fail(node)
        self._run_periods()
        self._outbox.spread(now_s)

    def _run_periods(self) -> None:
        """Periodic work is never caught up: after a pause the next round is one period away."""
        now_s = self._now_s
        if now_s >= self._next_dial_s:
            interval_s = DIAL_INTERVAL_S if len(self._roster) else LONELY_DIAL_INTERVAL_S
            self._next_dial_s = now_s + interval_s
            self._expire_dead()
            self._dial()
        if now_s >= self._next_probe_s:
            self._next_probe_s = now_s + self._config.probe_period_s * self._health.multiplier
            self._counters["probe_periods"] += 1
            self._prober.probe_next(now_s)
        if now_s >= self._next_hash_s:
            self._next_hash_s = now_s + HASH_INTERVAL * self._config.probe_period_s
            for peer in self._roster.sample(1):
                self._outbox.send_to(peer, self._hello(wants_answer=False))

    def _on_lag(self, lag_s: float) -> None:
        """This node stood still (stopped, swapped out, busy): answers may lie unread, so nobody is judged for it."""
        self._counters["lags"] += 1
        self._health.lagged(lag_s, self._now_s)
        if lag_s < SUSPICION_SHIFT_LAG_S:
            return
        self._prober.postpone(lag_s)
        for suspicion in self._suspicions.values():
            suspicion.postpone(lag_s)

    # Messages in

    def _on_datagram(self, source: Address, payload: bytes) -> None:
        try:
            message = MEMBERSHIP_CODEC.decode(payload)
        except RemoteProtocolError:
            self._counters["malformed"] += 1
            return
        match message:
            case Ping():
                self._on_ping(message, source)
            case Ack():
                self._on_ack(message, source)
            case Gossip(updates):
                self._hear(updates)
            case PingRequest():
                self._hear(message.updates)
                if not self._prober.relay(message, source, self._now_s):
                    self._counters["relays_refused"] += 1
            case RelayAnswer():
                self._hear(message.updates)
                self._prober.relayed(message)
            case Hello():
                self._on_hello(message, source)
            case MemberList(sender, updates, wants_answer):
                self._on_member_list(sender, updates, wants_answer=wants_answer)
        if self._outbox.send_corrections(source, self._now_s):
            self._counters["corrections"] += 1

    def _on_peer_message(self, sender: NodeId, message: object) -> None:
        match message:
            case StreamPing(sequence, target) if target == self._config.node_id:
                own = self._identity.update
                self._outbox.emit(SendPeer(sender, StreamPong(sequence, own.node, own.generation, own.incarnation)))
            case StreamPong(sequence, node):
                self._prober.acknowledged_by_stream(sequence, node)
            case MemberList(node, updates, wants_answer):
                self._on_member_list(node, updates, wants_answer=wants_answer)

    def _on_ping(self, ping: Ping, source: Address) -> None:
        if ping.updates:
            self._hear(ping.updates)
        own = self._identity.update
        if ping.target != own.node or own.standing is Standing.LEFT:
            return
        rumours = self._outbox.take_rumours()
        answer = Ack(ping.sequence, own.node, own.generation, own.incarnation, own.instance_id, rumours)
        self._outbox.send(source, answer)
        sender = self._roster.get(ping.sender)
        if sender is None:
            if ping.sender != own.node:
                self._outbox.send(source, self._hello(wants_answer=True))
        elif sender.update.standing is not Standing.ALIVE:
            self._outbox.correct(ping.sender)  # it may not know what is said of it

    def _on_ack(self, ack: Ack, source: Address) -> None:
        if ack.updates:
            self._hear(ack.updates)
        self._prober.acknowledged(ack.sequence, ack.sender)
        self._compare_identity(ack, source)

    def _compare_identity(self, ack: Ack, source: Address) -> None:
        """Whoever answers learns what is held against its name, be it stale, accused or taken by another."""
        member = self._roster.get(ack.sender)
        if member is None:
            return
        known = member.update
        if ack.generation > known.generation:
            self._outbox.send(source, self._hello(wants_answer=True))
        elif (
            ack.generation < known.generation
            or (ack.instance_id != known.instance_id and not known.is_conflict)
            or (known.standing is not Standing.ALIVE and ack.incarnation <= known.incarnation)
        ):
            self._outbox.correct(ack.sender)

    def _on_hello(self, hello: Hello, source: Address) -> None:
        if hello.sender.instance_id == self._config.instance_id:
            # A configured seed is this node itself under another address.
            self._absent_seeds = tuple(seed for seed in self._absent_seeds if seed != source)
            return
        has_heard_of_us = any(update.instance_id == self._config.instance_id for update in hello.updates)
        self._hear((hello.sender, *hello.updates), answer=hello.sender if has_heard_of_us else None)
        if hello.sender.node == self._config.node_id:
            self._outbox.correct(self._config.node_id)
        elif hello.membership_hash != self.membership_hash:
            self._send_list(hello.sender.node, source, wants_answer=True)
        elif hello.wants_answer:
            self._outbox.send(source, self._hello(wants_answer=False))

    def _on_member_list(self, sender: NodeId, updates: Sequence[Update], *, wants_answer: bool) -> None:
        self._hear(updates, is_list=True)
        self._counters["lists_received"] += 1
        if wants_answer and (address := self.address_of(sender)) is not None and sender != self._config.node_id:
            self._send_list(sender, address, wants_answer=False)

    def _send_list(self, node: NodeId, address: Address, *, wants_answer: bool) -> None:
        if not self._outbox.send_list(node, address, wants_answer=wants_answer, now_s=self._now_s):
            self._counters["lists_refused"] += 1

    def _on_send_error(self, destination: Address) -> None:
        self._counters["send_errors"] += 1
        self._health.probe_missed()
        member = self._roster.at(destination)
        if member is not None and member.is_live:
            self._prober.send_failed(member.update.node, self._now_s, self._suspicions.keys())

    def _on_silence(self, node: NodeId) -> None:
        """A probe was answered in no way.  A node that is itself slow only asks; it does not accuse."""
        self._counters["probes_failed"] += 1
        member = self._roster.get(node)
        if member is None or not member.is_live:
            return
        if self._health.may_accuse:
            self._accuse(member.update, self._config.node_id)
        else:
            self._counters["accusations_withheld"] += 1

    # Claims

    def _hear(self, updates: Sequence[Update], *, is_list: bool = False, answer: Update | None = None) -> None:
        if not updates:
            return
        if not len(self._roster):
            # A node that knows nobody has nothing to judge by; its own clock may be the one that is wrong.
            self._generation_base = max(self._generation_base, *(update.generation for update in updates))
        for update in updates:
            if update.node == self._config.node_id:
                self._hear_of_self(update, is_answer=update is answer)
            else:
                self._hear_of(update, is_list=is_list)

    def _hear_of(self, update: Update, *, is_list: bool) -> None:
        member = self._roster.get(update.node)
        if member is None:
            if self._is_plausible(update, None) and not self._is_bygone(update):
                self._adopt(update)  # an accusation of an unknown member stays as a tombstone
            return
        known = member.update
        if _says_the_same(update, known):
            return
        if update.key <= known.key:
            self._hear_old(update, known)
        elif self._is_plausible(update, known):
            is_secondhand = is_list and update.standing is Standing.FAILED
            if is_secondhand and member.is_live and update.generation == known.generation:
                self._accuse_secondhand(update, known)
            else:
                self._adopt(update)

    def _hear_old(self, update: Update, known: Update) -> None:
        """Idempotent: an old claim can only add an accuser, join a conflict, or show that its speaker lags."""
        if update.generation == known.generation and update.is_conflict and not known.is_conflict:
            self._adopt(replace(known, is_conflict=True))
        elif update.key == known.key and known.standing is Standing.SUSPECT:
            self._confirm(update)
        elif update.key == known.key and _is_news_of_conflict(update, known):
            self._hear_of_namesake(update, known)
        elif update.standing is Standing.ALIVE and (
            update.generation < known.generation
            or known.standing >= Standing.FAILED
            or (update.generation == known.generation and _is_news_of_conflict(update, known))
        ):
            self._outbox.correct(update.node)

    def _hear_of_namesake(self, update: Update, known: Update) -> None:
        """Two lives of one member have made the same claim, as after a lost disk: whoever made it hears of the other.

        One of them wins wherever they meet: two that correct one another of it would never come to an end.
        """
        if update.standing is not Standing.ALIVE:
            return
        if update.instance_id > known.instance_id:
            self._adopt(update)
            self._outbox.send(update.address, Gossip((known,)))
        else:
            self._outbox.correct(update.node)

    def _hear_of_self(self, update: Update, *, is_answer: bool) -> None:
        if update.generation > self._generation_limit():
            self._refuse(update, "generation")
            return
        if update.incarnation > INCARNATION_LEAD_MAX + self.incarnation:
            self._refuse(update, "incarnation")
            return
        previous = status_of(self._identity.update)
        match self._identity.hear(update, self._now_s, is_answer=is_answer):
            case Reaction.CORRECT:
                self._outbox.correct(update.node)
                self._greet_rival(update)
            case Reaction.REFUTED:
                self._counters["refutations"] += 1
                self._health.probe_missed()
                self._self_changed(previous)
            case Reaction.JUMPED:
                self._counters["generation_jumps"] += 1
                self._persist_generation()
                self._self_changed(previous)
                self._outbox.emit(GenerationRaised(self.generation))
                self._greet_rival(update)
            case Reaction.CONFLICT:
                self._persist_generation()
                self._self_changed(previous)
                self._greet_rival(update)
            case Reaction.NOTHING:
                pass

    def _greet_rival(self, claim: Update) -> None:
        """Another holder of the name hears of it at once, if it lives, and says so: rumours need seconds to it.

        The greeting repeats the claim: whoever finds itself in it knows that the greeter is no ghost of the past.
        """
        greeting = (claim.instance_id, self.generation)
        is_news = greeting not in self._greetings and len(self._greetings) < GREETINGS_MAX
        if claim.address != self._config.address and is_news:
            self._greetings.add(greeting)
            hello = Hello(self._identity.update, self.membership_hash, wants_answer=False, updates=(claim,))
            self._outbox.send(claim.address, hello)

    def _self_changed(self, previous: MemberStatus) -> None:
        own = self._identity.update
        self._outbox.put_rumour(own, self._now_s)
        self._outbox.correct(own.node)  # whoever told us hears it first
        if status_of(own) is not previous:
            self._self_since_s = self._now_s
            self._outbox.emit(MemberChanged(self._self_view(self._now_s), previous))

    def _persist_generation(self) -> None:
        self._outbox.emit(Persist(GENERATION_ROOM, GENERATION_KEY, b"%d" % self.generation))

    def _adopt(self, update: Update) -> None:
        """`update` is what is known of its member from now on; spread it."""
        member = self._roster.get(update.node)
        previous = None if member is None else member.update
        if previous is not None and previous.generation == update.generation:
            if update.standing is not Standing.ALIVE:
                update = _with_identity_of(update, previous)  # an accuser may have an old address
            elif previous.is_conflict:
                update = replace(update, is_conflict=True)
        previous_status = None if member is None else member.status
        member = self._roster.put(update, self._now_s)
        self._outbox.put_rumour(update, self._now_s)
        self._track_suspicion(update)
        if not member.is_live:
            self._prober.drop(update.node)
        elif previous is None or previous.standing >= Standing.FAILED:
            self._prober.add(update.node)
        if member.status is not previous_status or previous is None or previous.generation != update.generation:
            self._counters[f"became_{member.status.value}"] += 1
            self._outbox.emit(MemberChanged(member.view(self._now_s), previous_status))

    def _track_suspicion(self, update: Update) -> None:
        """A refutation, a verdict or a newer accusation replaces the suspicion before it."""
        self._suspicions.pop(update.node, None)
        if update.standing is Standing.SUSPECT:
            self._suspicions[update.node] = Suspicion(update.accuser, len(self._roster.live) + 1, self._now_s)

    def _confirm(self, update: Update) -> None:
        suspicion = self._suspicions[update.node]
        if suspicion.confirm(update.accuser):
            self._outbox.put_rumour(update, self._now_s)  # others count this accuser too

    def _accuse(self, claim: Update, accuser: str) -> None:
        """Start a suspicion, or add this accuser to one that runs."""
        accusation = replace(claim, standing=Standing.SUSPECT, accuser=accuser)
        member = self._roster.get(claim.node)
        if member is not None and member.update.key == accusation.key:
            self._confirm(accusation)
        else:
            self._adopt(accusation)

    def _accuse_secondhand(self, update: Update, known: Update) -> None:
        """A list brings a verdict about a member that is live here: it hears of it at once and can refute.

        The accusation names no accuser, so that many such lists after a split do not confirm one another.
        """
        self._accuse(replace(known, incarnation=update.incarnation), "")
        member = self._roster.get(update.node)
        if member is not None and known.standing is Standing.ALIVE:
            self._outbox.send_to(update.node, Gossip((member.update,)))

    def _fail(self, node: NodeId) -> None:
        member = self._roster.get(node)
        assert member is not None
        self._adopt(replace(member.update, standing=Standing.FAILED, accuser=self._config.node_id))

    def _is_plausible(self, update: Update, known: Update | None) -> bool:
        base = known.incarnation if known is not None and known.generation == update.generation else 0
        if update.generation > self._generation_limit():
            problem = "generation"
        elif update.incarnation > base + INCARNATION_LEAD_MAX:
            problem = "incarnation"
        elif known is None and not is_node_name(update.node):
            problem = "name"
        elif known is None and self._roster.is_full:
            problem = "number of members"
        else:
            return True
        self._refuse(update, problem)
        return False

    def _generation_limit(self) -> float:
        """Own generation, which was the time of the start, moved on to now; and a day of clock error."""
        return self._generation_base + (self._now_s - (self._started_s or 0.0)) + GENERATION_LEAD_MAX

    def _refuse(self, update: Update, problem: str) -> None:
        self._counters["refused_claims"] += 1
        if update.node in self._refused or len(self._refused) >= REFUSED_NAMES_MAX:
            return
        self._refused[update.node] = None
        text = (
            f"a claim about {update.node} is refused for its {problem} "
            f"(generation {update.generation}, incarnation {update.incarnation}); check the clocks of both nodes"
        )
        self._outbox.emit(Announce("member.refused", text, node=update.node, fields={"problem": problem}))

    def _is_bygone(self, update: Update) -> bool:
        is_dead = update.standing >= Standing.FAILED
        return is_dead and update.age_s >= KEEP_DEAD_S

    # Dialling

    def _dial(self) -> None:
        """Greet one dead member or absent seed; all seeds (at most 8) while this node knows nobody."""
        if self._identity.has_left:
            return
        self._dial_count += 1
        seeds = [seed for seed in self._absent_seeds if not self._is_present(seed)]
        if not len(self._roster):
            for seed in self._rng.sample(seeds, min(len(seeds), LONELY_DIALS_MAX)):
                self._outbox.send(seed, self._hello(wants_answer=True))
            return
        candidates = seeds + [where for name in self._roster.dead if (where := self._dialled_address(name))]
        if candidates:
            self._outbox.send(self._longest_not_dialled(candidates), self._hello(wants_answer=True))

    def _longest_not_dialled(self, candidates: Sequence[Address]) -> Address:
        """Each has its turn: one that is lost for good must not keep two that live from finding one another."""
        chosen = min(candidates, key=lambda where: (self._dialled.get(where, 0), self._rng.random()))
        self._dialled.pop(chosen, None)
        self._dialled[chosen] = self._dial_count
        if len(self._dialled) > DIALLED_MAX:
            del self._dialled[next(iter(self._dialled))]
        return chosen

    def _is_present(self, seed: Address) -> bool:
        member = self._roster.at(seed)
        return member is not None and member.is_live

    def _dialled_address(self, node: NodeId) -> Address | None:
        member = self._roster.get(node)
        if member is None or member.update.standing is not Standing.FAILED:
            return None
        is_old = self._now_s - member.changed_s > SLOW_DIAL_AFTER_S
        if is_old and self._dial_count % SLOW_DIAL_EVERY:
            return None
        return member.update.address

    def _expire_dead(self) -> None:
        for node in [*self._roster.dead]:
            member = self._roster.get(node)
            if member is not None and self._now_s - member.changed_s >= KEEP_DEAD_S:
                self._roster.remove(node)
                self._outbox.rumours.drop(node)

    def _hello(self, *, wants_answer: bool) -> Hello:
        return Hello(self._identity.update, self.membership_hash, wants_answer, self._outbox.take_rumours())

    def _self_view(self, now_s: float) -> MemberView:
        return Member(self._identity.update, self._self_since_s).view(now_s)


def _first_claim(config: MembershipConfig) -> Update:
    return Update(
        node=config.node_id,
        host=config.address[0],
        port=config.address[1],
        generation=config.generation,
        incarnation=0,
        standing=Standing.ALIVE,
        instance_id=config.instance_id,
        software_version=config.software_version[:32],
        lowest_minor=WIRE_MINOR_LOWEST,
        highest_minor=WIRE_MINOR_HIGHEST,
    )


def _says_the_same(update: Update, known: Update) -> bool:
    """True for a claim of life that is known as it is: most of what is heard."""
    return (
        update.incarnation == known.incarnation
        and update.generation == known.generation
        and update.standing is Standing.ALIVE
        and known.standing is Standing.ALIVE
        and update.instance_id == known.instance_id
        and update.is_conflict == known.is_conflict
    )


def _is_news_of_conflict(update: Update, known: Update) -> bool:
    """Of two holders of a name each may be known to somebody; who knows of the conflict need not hear of the other."""
    return update.instance_id != known.instance_id and not (update.is_conflict and known.is_conflict)


def _with_identity_of(update: Update, known: Update) -> Update:
    return replace(
        known,
        incarnation=update.incarnation,
        standing=update.standing,
        accuser=update.accuser,
        age_s=update.age_s,
        is_conflict=known.is_conflict or update.is_conflict,
    )

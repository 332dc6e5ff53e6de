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

from swarmsched.effects import Persist, SendPeer
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
from swarmsched.gossip.dialler import Dialler
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
from swarmsched.gossip.plausibility import Plausibility
from swarmsched.gossip.prober import Prober
from swarmsched.gossip.roster import Roster
from swarmsched.gossip.suspicion import SuspicionTable
from swarmsched.ids import Address, NodeId
from swarmsched.wire.sealing import WIRE_MINOR_HIGHEST, WIRE_MINOR_LOWEST

MembershipEvent = DatagramReceived | DatagramSendFailed | TimerFired | LoopLagged | PeerMessageReceived | PeerSendFailed

HASH_INTERVAL = 5.0  # probe periods between two comparisons of the membership hash; repairs what rumours missed
KEEP_DEAD_S = 86_400.0  # then a failed or departed member is forgotten

SUSPICION_SHIFT_LAG_S = 1.0
"""After standing still for longer, a node gives everybody it suspects that much time again."""

LEAVE_PEERS = 8


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
        self._suspicions = SuspicionTable()  # of exactly the members that stand as SUSPECT
        self._started_s: float | None = None  # None until the first step
        self._plausibility = Plausibility(config.generation)
        self._dialler = Dialler([seed for seed in config.seeds if seed != config.address], self._roster, rng)
        self._next_probe_s = self._next_hash_s = self._next_dial_s = math.inf
        self._next_deadline_s = 0.0
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
        assert suspects == self._suspicions.accused
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
            for peer in self._roster.sample(LEAVE_PEERS):
                self._outbox.send_to(peer, Gossip((self._identity.update,)))
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
        if self._dialler.has_work:
            deadline_s = min(deadline_s, self._next_dial_s)
        return min(deadline_s, self._suspicions.earliest_deadline_s)

    def _run_timers(self) -> None:
        now_s = self._now_s
        self._outbox.spread(now_s)
        if now_s < self._next_deadline_s:
            return
        self._health.pass_time(now_s)
        for node in self._prober.advance(now_s, self._suspicions.accused):
            self._on_silence(node)
        for node in self._suspicions.due(now_s):
            self._fail(node)
        self._run_periods()
        self._outbox.spread(now_s)

    def _run_periods(self) -> None:
        """Periodic work is never caught up: after a pause the next round is one period away."""
        now_s = self._now_s
        if now_s >= self._next_dial_s:
            self._next_dial_s = now_s + self._dialler.interval_s
            self._expire_dead()
            if not self._identity.has_left:
                for address in self._dialler.next_to_greet(now_s):
                    self._outbox.send(address, self._hello(wants_answer=True))
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
        self._suspicions.postpone(lag_s)

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
        if ack.generation > member.update.generation:
            self._outbox.send(source, self._hello(wants_answer=True))
        elif _is_held_against(ack, member.update):
            self._outbox.correct(ack.sender)

    def _on_hello(self, hello: Hello, source: Address) -> None:
        if hello.sender.instance_id == self._config.instance_id:
            self._dialler.drop_seed(source)
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
            self._prober.send_failed(member.update.node, self._now_s, self._suspicions.accused)

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
            self._plausibility.believe(updates)
        for update in updates:
            if update.node == self._config.node_id:
                self._hear_of_self(update, is_answer=update is answer)
            else:
                self._hear_of(update, is_list=is_list)

    def _hear_of(self, update: Update, *, is_list: bool) -> None:
        member = self._roster.get(update.node)
        if member is None:
            if self._is_plausible(update, None) and not _is_bygone(update):
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
        if problem := self._plausibility.problem_of_own(update, self.incarnation, self._up_s):
            self._refuse(update, problem)
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
        if claim.address != self._config.address and self._identity.is_to_greet(claim):
            greeting = Hello(self._identity.update, self.membership_hash, wants_answer=False, updates=(claim,))
            self._outbox.send(claim.address, greeting)

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
        self._suspicions.track(update, len(self._roster.live) + 1, self._now_s)
        if not member.is_live:
            self._prober.drop(update.node)
        elif previous is None or previous.standing >= Standing.FAILED:
            self._prober.add(update.node)
        if member.status is not previous_status or previous is None or previous.generation != update.generation:
            self._counters[f"became_{member.status.value}"] += 1
            self._outbox.emit(MemberChanged(member.view(self._now_s), previous_status))

    def _confirm(self, update: Update) -> None:
        if self._suspicions.confirm(update):
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
        problem = self._plausibility.problem_of(update, known, self._up_s, is_full=self._roster.is_full)
        if problem:
            self._refuse(update, problem)
        return not problem

    @property
    def _up_s(self) -> float:
        return self._now_s - (self._started_s or 0.0)

    def _refuse(self, update: Update, problem: str) -> None:
        self._counters["refused_claims"] += 1
        if announced := self._plausibility.refuse(update, problem):
            self._outbox.emit(announced)

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


def _is_bygone(update: Update) -> bool:
    return update.standing >= Standing.FAILED and update.age_s >= KEEP_DEAD_S


def _is_held_against(ack: Ack, known: Update) -> bool:
    """Whether what is known of the member is more than who answers knows of itself."""
    return (
        ack.generation < known.generation
        or (ack.instance_id != known.instance_id and not known.is_conflict)
        or (known.standing is not Standing.ALIVE and ack.incarnation <= known.incarnation)
    )


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

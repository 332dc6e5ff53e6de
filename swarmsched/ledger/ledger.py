"""The owner's ledger: who has which GPUs, cores and memory of this node (protocol, plane D).

The ledger keeps books and fences; it starts and stops nothing.  Its owner is the only writer, so a GPU cannot be
booked twice.  What safety rests on:

* A booking is of a task (job, attempt, part) and is held, leased or draining.  A hold is never withdrawn before its
  deadline except by its own shepherd: by a release, or by a hold for a later attempt, which says that the earlier one
  is over.
* Per job, the highest accepted epoch and the highest released (attempt, part) are durable; a lower epoch is refused
  whatever it asks, and holds up to that one are refused, so a release that overtakes its hold still wins.
* A command that comes twice gets the stored verdict (with the present free state), unless it is a yes to a booking
  that has gone since; and each command is harmless when repeated after a restart, when stored verdicts are gone.

Every changing method returns its answer together with the writes that must be on disk before the answer leaves.
"""

import math
from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from swarmsched.effects import Persist
from swarmsched.fields import PART_MOST
from swarmsched.ids import JobId, NodeId, TaskKey
from swarmsched.ledger.booking import (
    DRAINING_KEY,
    ROOM,
    SCHEMA_KEY,
    SCHEMA_VERSION,
    Booking,
    BookingState,
    Fence,
    LedgerEntry,
    StoredFence,
    booking_entry,
    fence_entry,
    read_entries,
)
from swarmsched.ledger.claims import Claims
from swarmsched.ledger.message import (
    ClaimRequest,
    CommitRequest,
    HoldRequest,
    LaunchRequest,
    OwnerAnswer,
    OwnerCommand,
    Refusal,
    ReleaseRequest,
    SignalRequest,
    StatusRequest,
    StopRequest,
    WorldRequest,
)
from swarmsched.resources import (
    Demand,
    Free,
    FreeReport,
    Gpu,
    GpuHealth,
    NodeResources,
    counted,
    fits,
    missing_labels,
    suits,
)
from swarmsched.task import TaskOrder

CheckedCommand = LaunchRequest | StopRequest | SignalRequest | WorldRequest | StatusRequest
FENCE_KEPT_S = 3600.0
FENCES_MAX = 100_000
STORED_ANSWERS_MAX = 64  # per job; a shepherd has at most a few commands under way for each part at one owner
BOOKINGS_MAX = 4_096  # jobs without demands would otherwise fit without end


class Ledger:
    """Books of one node; see the module text for the rules.  Times are seconds on the owner's monotonic clock."""

    def __init__(self, node_id: NodeId, generation: int, origin: int = 0) -> None:
        self._node_id = node_id
        self._generation = generation
        self._origin = origin
        self._resources = NodeResources((), 0, 0)  # the latest telemetry
        self._bookings: dict[TaskKey, Booking] = {}
        self._deadlines: dict[TaskKey, float] = {}  # exactly the held bookings
        self._gpu_bookings: dict[str, TaskKey] = {}  # uuid of every booked GPU, offered or not
        self._fences: dict[JobId, Fence] = {}  # every job with a booking has one
        self._claims = Claims()
        self._requests: dict[TaskKey, HoldRequest] = {}  # of held bookings, as far as this life has seen them
        self._idle: dict[JobId, None] = {}  # jobs with a fence and no booking, longest idle first
        self._drain_reason: str | None = None  # why this node takes no new work; None while it does
        self._avoided_reason = ""  # why it takes none for a while; empty while it does
        self._is_schema_stored = False
        self._is_waking = False  # from `restore` to the first `offer`: nothing expires
        self._free = Free()  # derived from resources and bookings by `_refresh`
        self._running_ranks = 0  # ranks of leased and draining bookings, likewise
        self._version = 1  # grows whenever the two above change

    # --- start and telemetry

    def restore(self, entries: Mapping[str, bytes], now_s: float) -> None:
        """Read back the room's durable entries; restored holds get their full time again.

        That time runs from the first `offer` after this: a node that is starting answers nobody, so until then no
        hold may run out.  Raises `StorageError` (see `read_entries`); the ledger is unchanged then.
        """
        stored = read_entries(entries)
        self._is_schema_stored = SCHEMA_KEY in entries
        self._is_waking = True
        self._drain_reason = stored.drain_reason
        for job_id, fence in stored.fences.items():
            released = (fence.released_attempt, fence.released_part)
            self._fences[job_id] = Fence(fence.epoch, released, idle_since_s=now_s)
            self._idle[job_id] = None
        for booking in stored.bookings:
            self._fence_of(booking.job_id, booking.epoch)
            self._put(booking, now_s)
        self._refresh()

    def offer(self, resources: NodeResources, now_s: float) -> None:
        """Take over fresh telemetry.  A booked GPU stays booked whatever its health; others are offered only if OK."""
        self._resources = resources
        if self._is_waking:
            self._is_waking = False
            self._restart_clocks(now_s)
        self._refresh()

    @property
    def is_waking(self) -> bool:
        """True from a restart until telemetry has told for the first time what is installed here."""
        return self._is_waking

    def set_generation(self, generation: int) -> None:
        """Report under another generation from now on: peers knew a newer one of this name than its disk did."""
        self._generation = generation

    def set_avoided(self, reason: str) -> None:
        """Offer nothing to new holds for a while, or again where there is no reason any more.  Not durable."""
        if reason != self._avoided_reason:
            self._avoided_reason = reason
            self._version += 1
            self._refresh()

    def set_draining(self, reason: str | None) -> list[Persist]:
        """Offer nothing to new holds, for a reason (or offer again: None); durable.  Bookings and their commits are
        not touched."""
        if reason == self._drain_reason:
            return []
        self._drain_reason = reason
        self._version += 1  # a node without anything free has something to tell all the same
        self._refresh()
        return self._writes(Persist(ROOM, DRAINING_KEY, None if reason is None else reason.encode()))

    # --- commands

    def repeated(self, command: OwnerCommand) -> OwnerAnswer | None:
        """The stored answer of a command seen before, with the present free state; None for a new one.

        The caller of a `SignalRequest` (or anything else that must not happen twice) asks this first.
        """
        fence = self._fences.get(command.job_id)
        if fence is None or command.epoch < fence.epoch:
            return None
        answer = fence.answers.get((command.epoch, command.attempt, command.command_id))
        if answer is None:
            return None
        is_overtaken = (
            isinstance(command, HoldRequest | CommitRequest)
            and answer.refusal is Refusal.NONE
            and command.key not in self._bookings
        )
        if is_overtaken:
            # A copy that comes after release, end or expiry: a yes would make its owner bind ports and stage files
            # for a booking that is gone.
            refusal, detail = self._judge_missing(command, Refusal.EXPIRED)
            answer = replace(answer, refusal=refusal, detail=detail)
        return replace(answer, free=self.report())

    def amend(self, answer: OwnerAnswer) -> None:
        """Replace the stored answer of that command (its rendezvous port became known, say)."""
        fence = self._fences.get(answer.job_id)
        if fence is not None:
            self._store_answer(fence, answer)

    def hold(self, request: HoldRequest, now_s: float) -> tuple[OwnerAnswer, list[Persist]]:
        """Book resources until `ttl_s` after now, or say why not.  Repeating it under a new id renews the deadline."""
        early = self._early_answer(request)
        if early is not None:
            return early, []
        known = self._bookings.get(request.key)
        if known is not None and known.state is not BookingState.DRAINING:
            return self._hold_again(known, request, now_s)
        refusal, detail = self._judge_hold(request, now_s)
        if refusal is not Refusal.NONE:
            return self._refuse(request, refusal, detail)
        booking = self._new_booking(request)
        durable = booking.persisted()  # encoded before anything is changed
        writes = self._raise_fence(request.job_id, request.epoch, (max(request.attempt, 1) - 1, PART_MOST))
        writes += self._drop_earlier_holds(request, now_s)
        self._claims.drop(request, now_s)
        self._put(booking, now_s)
        self._requests[booking.key] = request
        self._refresh()
        return self._accept(request, [*writes, durable])

    def in_the_way(self, request: HoldRequest) -> tuple[LedgerEntry, ...]:
        """Undecided holds that rank lower and without which this one would fit; nothing if it would not even then."""
        lower = [key for key, held in self._requests.items() if key in self._deadlines and _ranks_above(request, held)]
        if not lower or not fits(self._free_without(lower), request.demand, request.ranks):
            return ()
        return tuple(self._entry(self._bookings[key]) for key in lower)

    def retract(self, request: HoldRequest) -> None:
        """A refusal of the request was not told yet: judge it anew when it is asked again."""
        fence = self._fences.get(request.job_id)
        if fence is not None:
            fence.answers.pop((fence.epoch, request.attempt, request.command_id), None)

    def claim(self, request: ClaimRequest, now_s: float) -> tuple[OwnerAnswer, list[Persist]]:
        """Keep what is free, and what comes free, from jobs that rank lower; books nothing and is not durable."""
        fence = self._fences.get(request.job_id)
        if fence is not None and request.epoch < fence.epoch:
            detail = f"epoch {request.epoch} was succeeded by {fence.epoch}"
            return self._answer(request, Refusal.STALE_EPOCH, detail, fence.epoch), []
        refusal, detail = self._judge_claim(request, now_s)
        if refusal is Refusal.NONE and not self._claims.put(request, now_s):
            refusal, detail = Refusal.CLAIMED, "too many claims stand here"
        return self._answer(request, refusal, detail, request.epoch), []

    def drop_claims(self, is_over: Callable[[ClaimRequest], bool]) -> None:
        """Keep nothing for those any more."""
        self._claims.drop_if(is_over)

    def commit(self, request: CommitRequest, now_s: float) -> tuple[OwnerAnswer, list[Persist]]:
        """Turn a live hold into a lease.  A higher epoch with the same attempt takes the booking over."""
        early = self._early_answer(request)
        if early is not None:
            return early, []
        booking = self._bookings.get(request.key)
        if booking is None or booking.state is BookingState.DRAINING:
            return self._refuse(request, *self._judge_missing(request, Refusal.EXPIRED))
        if self._deadlines.get(booking.key, math.inf) <= now_s and not self._is_waking:
            return self._refuse(request, Refusal.EXPIRED, "the hold's time is over")
        writes = self._raise_fence(request.job_id, request.epoch)
        leased = replace(booking, epoch=request.epoch, shepherd=request.shepherd, state=BookingState.LEASED)
        return self._accept(request, [*writes, *self._change(booking, leased, now_s)])

    def release(self, request: ReleaseRequest, now_s: float) -> tuple[OwnerAnswer, list[Persist]]:
        """Give up this attempt and refuse it from now on.

        A hold is free at once; a lease drains until `end` is called, because its processes may still be there.
        """
        early = self._early_answer(request)
        if early is not None:
            return early, []
        writes = self._raise_fence(request.job_id, request.epoch, request.key[1:])
        booking = self._bookings.get(request.key)
        if booking is not None and booking.state is BookingState.HELD:
            writes += self._remove(booking, now_s)
        elif booking is not None:
            draining = replace(booking, epoch=request.epoch, shepherd=request.shepherd, state=BookingState.DRAINING)
            writes += self._change(booking, draining, now_s)
        self._mark_idle(request.job_id, now_s)
        return self._accept(request, writes)

    def check(self, command: CheckedCommand, now_s: float) -> tuple[OwnerAnswer, list[Persist]]:
        """Fence check of a command that concerns a task: stale epoch, unknown attempt, or (unless `StatusRequest`)
        not committed.  A higher epoch takes the booking over."""
        early = self._early_answer(command)
        if early is not None:
            return early, []
        booking = self._bookings.get(command.key)
        if booking is None:
            return self._refuse(command, *self._judge_missing(command, Refusal.UNKNOWN))
        writes = self._raise_fence(command.job_id, command.epoch)
        if (booking.epoch, booking.shepherd) != (command.epoch, command.shepherd):
            taken = replace(booking, epoch=command.epoch, shepherd=command.shepherd)
            writes += self._change(booking, taken, now_s)
        refusal = _state_refusal(command, booking.state)
        if refusal is not Refusal.NONE:
            answer, more = self._refuse(command, refusal, f"this attempt is {booking.state.value}")
            return answer, [*writes, *more]
        return self._accept(command, writes)

    # --- ends

    def end(self, key: TaskKey, now_s: float) -> tuple[bool, list[Persist]]:
        """No process of the task is left: its lease ends and may not be held again.

        False when there was no lease (also for a mere hold, which only its shepherd or its deadline ends).
        """
        booking = self._bookings.get(key)
        if booking is None or booking.state is BookingState.HELD:
            return False, []
        writes = self._raise_fence(key.job_id, booking.epoch, key[1:])
        return True, self._writes(*writes, *self._remove(booking, now_s))

    def drain(self, order: TaskOrder, gpus: Collection[str], now_s: float) -> list[Persist]:
        """A task runs here of which the books know nothing: what it uses is free once it has ended, and not before."""
        key = order.key
        writes = self._raise_fence(order.job_id, order.epoch, key[1:])
        ranks, demand = order.local_ranks, order.spec.demand
        booking = self._bookings.get(key) or Booking(
            job_id=order.job_id,
            epoch=order.epoch,
            attempt=order.attempt,
            shepherd=self._node_id,
            state=BookingState.DRAINING,
            ranks=ranks,
            gpus=tuple(uuid for uuid in gpus if uuid not in self._gpu_bookings),
            cpus=ranks * demand.cpus,
            memory_bytes=ranks * demand.memory_bytes,
            ttl_s=0.0,
            part=order.part,
        )
        booking = replace(booking, state=BookingState.DRAINING)
        self._put(booking, now_s)
        self._refresh()
        return self._writes(*writes, booking.persisted())

    def forget(self, job_id: JobId, now_s: float) -> tuple[bool, list[Persist]]:
        """The job is closed: free its holds and let its fence go after an hour.  False while it still has a lease."""
        mine = [booking for booking in self._bookings.values() if booking.job_id == job_id]
        held = [booking for booking in mine if booking.state is BookingState.HELD]
        writes = [write for booking in held for write in self._remove(booking, now_s)]
        return len(held) == len(mine), self._writes(*writes)

    def expire(self, now_s: float) -> tuple[list[Booking], list[Persist]]:
        """Free the holds whose deadline has come, and drop fences that have been idle for an hour."""
        self._claims.expire(now_s)
        if self._is_waking:
            return [], []
        due = sorted(key for key, deadline_s in self._deadlines.items() if deadline_s <= now_s)
        expired = [self._bookings[key] for key in due]
        writes = [write for booking in expired for write in self._remove(booking, now_s)]
        writes += self._drop_idle_fences(now_s)
        return expired, self._writes(*writes)

    # --- what the outside reads

    @property
    def next_deadline_s(self) -> float:
        """When `expire` has a hold to free or a claim to drop; infinite without any."""
        claims_s = self._claims.next_deadline_s
        return claims_s if self._is_waking or not self._deadlines else min(claims_s, *self._deadlines.values())

    @property
    def origin(self) -> int:
        """From where this owner answers (`ids.origin_of`)."""
        return self._origin

    @property
    def version(self) -> int:
        """Grows whenever free resources or running ranks change."""
        return self._version

    @property
    def is_draining(self) -> bool:
        """True while nothing is offered to new holds."""
        return self._drain_reason is not None

    @property
    def drain_reason(self) -> str:
        """Why, in the words of whoever asked for it; empty while this node takes work."""
        return self._drain_reason or ""

    @property
    def avoided_reason(self) -> str:
        """Why nothing is offered for a while; empty when nothing speaks against it."""
        return self._avoided_reason

    @property
    def claims(self) -> tuple[JobId, ...]:
        """Jobs for which something is kept here."""
        return self._claims.jobs

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Every booking, by the key of its task."""
        return tuple(self._entry(self._bookings[key]) for key in sorted(self._bookings))

    def entry(self, key: TaskKey) -> LedgerEntry | None:
        """The booking of one task."""
        booking = self._bookings.get(key)
        return None if booking is None else self._entry(booking)

    def gpus_of(self, key: TaskKey) -> tuple[Gpu, ...]:
        """The devices of a booking as telemetry last saw them (one that vanished is left out), by index."""
        booking = self._bookings.get(key)
        booked = frozenset(booking.gpus) if booking is not None else frozenset()
        return tuple(gpu for gpu in self._resources.gpus if gpu.uuid in booked)

    def is_ailing(self, key: TaskKey) -> bool:
        """True when a device of a booking has failed, or is not there any more."""
        booking, gpus = self._bookings.get(key), self.gpus_of(key)
        if booking is None or self._is_waking:
            return False
        return len(gpus) < len(booking.gpus) or any(gpu.health is GpuHealth.UNHEALTHY for gpu in gpus)

    def epoch_of(self, job_id: JobId) -> int:
        """The highest epoch accepted for a job; 0 when nothing is known."""
        fence = self._fences.get(job_id)
        return 0 if fence is None else fence.epoch

    @property
    def free(self) -> Free:
        """What a new hold could get."""
        return self._free

    @property
    def capacity(self) -> Free:
        """All that is offered, booked or not."""
        if self.is_draining:
            return Free()
        offered, node = counted(self._free_devices(())), self._resources
        return Free(offered, node.cpu_count, node.memory_bytes, node.labels, node.network_mbit_s)

    def report(self) -> FreeReport:
        """The free state as it travels in every answer."""
        return FreeReport(
            generation=self._generation,
            version=self._version,
            gpus=self._free.gpu_count,
            cpus=self._free.cpus,
            memory_bytes=self._free.memory_bytes,
            running_ranks=self._running_ranks,
        )

    def validate(self) -> None:
        """Derive every cross-reference anew; raises AssertionError on a difference.  For tests and the simulator."""
        booked = [(uuid, key) for key, each in self._bookings.items() for uuid in each.gpus]
        assert len(dict(booked)) == len(booked), "a GPU is booked twice"
        assert dict(booked) == self._gpu_bookings
        held = {key for key, each in self._bookings.items() if each.state is BookingState.HELD}
        assert held == set(self._deadlines)
        for key, booking in self._bookings.items():
            assert key == booking.key
            assert self._fences[booking.job_id].epoch >= booking.epoch
        busy = {booking.job_id for booking in self._bookings.values()}
        assert set(self._idle) == set(self._fences) - busy
        assert all((fence.idle_since_s is not None) == (job in self._idle) for job, fence in self._fences.items())
        assert all(len(fence.answers) <= STORED_ANSWERS_MAX for fence in self._fences.values())
        assert self._free == self._compute_free()

    # --- verdicts

    def _early_answer(self, command: OwnerCommand) -> OwnerAnswer | None:
        """Stale epochs first: a stored yes of an earlier epoch is worth nothing any more."""
        fence = self._fences.get(command.job_id)
        if fence is not None and command.epoch < fence.epoch:
            detail = f"epoch {command.epoch} was succeeded by {fence.epoch}"
            return self._answer(command, Refusal.STALE_EPOCH, detail, fence.epoch)
        return self.repeated(command)

    def _judge_hold(self, request: HoldRequest, now_s: float) -> tuple[Refusal, str]:
        fence = self._fences.get(request.job_id)
        if fence is not None and request.key[1:] <= fence.released:
            return Refusal.RELEASED_ATTEMPT, f"attempt {fence.released[0]} was released"
        if request.key in self._bookings:
            return Refusal.RELEASED_ATTEMPT, "this attempt is being wound up"
        if self.is_draining:
            return Refusal.DRAINING, f"draining: {self.drain_reason}" if self.drain_reason else "draining"
        if self._avoided_reason:
            return Refusal.DRAINING, self._avoided_reason
        if len(self._bookings) >= BOOKINGS_MAX:
            return Refusal.DOES_NOT_FIT, f"this node has {BOOKINGS_MAX} bookings, the most it keeps"
        free = self._free_for(request)
        if not fits(free, request.demand, request.ranks):
            return Refusal.DOES_NOT_FIT, _shortage(free, request.demand, request.ranks)
        if not fits(self._claims.left_for(request, free, now_s), request.demand, request.ranks):
            return Refusal.CLAIMED, f"what is free is kept for {', '.join(self._claims.jobs)}"
        return Refusal.NONE, ""

    def _judge_claim(self, request: ClaimRequest, now_s: float) -> tuple[Refusal, str]:
        if not request.must_be_free or not request.ranks:
            return Refusal.NONE, ""
        own = [key for key in self._bookings if key[0] == request.job_id]
        free = self._claims.left_for(request, self._free_without(own), now_s)
        if fits(free, request.demand, request.ranks):
            return Refusal.NONE, ""
        return Refusal.DOES_NOT_FIT, _shortage(free, request.demand, request.ranks)

    def _judge_missing(self, command: OwnerCommand, otherwise: Refusal) -> tuple[Refusal, str]:
        fence = self._fences.get(command.job_id)
        if fence is not None and command.key[1:] <= fence.released:
            return Refusal.RELEASED_ATTEMPT, f"attempt {fence.released[0]} was released"
        return otherwise, "nothing is booked for this attempt"

    def _hold_again(self, known: Booking, request: HoldRequest, now_s: float) -> tuple[OwnerAnswer, list[Persist]]:
        demand = request.demand
        wanted = (request.ranks * demand.gpus, request.ranks * demand.cpus, request.ranks * demand.memory_bytes)
        if (len(known.gpus), known.cpus, known.memory_bytes) != wanted or known.ranks != request.ranks:
            return self._refuse(request, Refusal.DOES_NOT_FIT, "this attempt has a booking of another size")
        writes = self._raise_fence(request.job_id, request.epoch)
        renewed = replace(known, epoch=request.epoch, shepherd=request.shepherd)
        if known.state is BookingState.HELD:
            renewed = replace(renewed, ttl_s=request.ttl_s)
            self._deadlines[known.key] = now_s + request.ttl_s
        if renewed != known:
            writes += self._change(known, renewed, now_s)
        return self._accept(request, writes)

    def _accept(self, command: OwnerCommand, writes: list[Persist]) -> tuple[OwnerAnswer, list[Persist]]:
        fence = self._fences[command.job_id]
        answer = self._answer(command, Refusal.NONE, "", fence.epoch)
        self._store_answer(fence, answer)
        return answer, self._writes(*writes)

    def _refuse(self, command: OwnerCommand, refusal: Refusal, detail: str) -> tuple[OwnerAnswer, list[Persist]]:
        """Refused holds of unknown jobs leave no trace here: there is nothing yet that a fence would protect."""
        fence = self._fences.get(command.job_id)
        if fence is None:
            return self._answer(command, refusal, detail, 0), []
        writes = self._raise_fence(command.job_id, command.epoch)
        answer = self._answer(command, refusal, detail, fence.epoch)
        self._store_answer(fence, answer)
        return answer, self._writes(*writes)

    def _answer(self, command: OwnerCommand, refusal: Refusal, detail: str, epoch: int) -> OwnerAnswer:
        fence = self._fences.get(command.job_id)
        released = fence.released if fence is not None and refusal is Refusal.RELEASED_ATTEMPT else (0, 0)
        return OwnerAnswer(
            job_id=command.job_id,
            epoch=epoch,
            attempt=command.attempt,
            command_id=command.command_id,
            owner=self._node_id,
            refusal=refusal,
            free=self.report(),
            detail=detail[:1_024],  # names all claims that stand in the way
            origin=self._origin,
            part=command.part,
            released_attempt=released[0],
            released_part=released[1],
        )

    # --- bookings

    def _new_booking(self, request: HoldRequest) -> Booking:
        earlier, wanted = self._earlier_holds(request), request.ranks * request.demand.gpus
        taken = {uuid for uuid, key in self._gpu_bookings.items() if key not in earlier}
        picked = [gpu for gpu in self._free_devices(taken) if suits(gpu, request.demand)][:wanted]
        assert len(picked) == wanted, "the caller has checked that it fits"
        return Booking(
            job_id=request.job_id,
            epoch=request.epoch,
            attempt=request.attempt,
            shepherd=request.shepherd,
            state=BookingState.HELD,
            ranks=request.ranks,
            gpus=tuple(gpu.uuid for gpu in picked),
            cpus=request.ranks * request.demand.cpus,
            memory_bytes=request.ranks * request.demand.memory_bytes,
            ttl_s=request.ttl_s,
            part=request.part,
        )

    def _put(self, booking: Booking, now_s: float) -> None:
        if booking.state is not BookingState.HELD:
            self._deadlines.pop(booking.key, None)
        elif booking.key not in self._deadlines:
            self._deadlines[booking.key] = now_s + booking.ttl_s
        self._bookings[booking.key] = booking
        self._gpu_bookings.update(dict.fromkeys(booking.gpus, booking.key))
        self._fences[booking.job_id].idle_since_s = None
        self._idle.pop(booking.job_id, None)

    def _change(self, before: Booking, after: Booking, now_s: float) -> list[Persist]:
        if before == after:
            return []
        durable = after.persisted()
        self._put(after, now_s)
        self._refresh()
        return [durable]

    def _remove(self, booking: Booking, now_s: float) -> list[Persist]:
        del self._bookings[booking.key]
        self._requests.pop(booking.key, None)
        self._deadlines.pop(booking.key, None)
        for uuid in booking.gpus:
            del self._gpu_bookings[uuid]
        self._mark_idle(booking.job_id, now_s)
        self._refresh()
        return [Persist(ROOM, booking_entry(booking.key), None)]

    def _drop_earlier_holds(self, request: HoldRequest, now_s: float) -> list[Persist]:
        earlier = [self._bookings[key] for key in self._earlier_holds(request)]
        return [write for booking in earlier for write in self._remove(booking, now_s)]

    def _earlier_holds(self, request: HoldRequest) -> list[TaskKey]:
        """Holds of attempts that this request shows to be over."""
        return [key for key in self._deadlines if key[0] == request.job_id and key[1] < request.attempt]

    def _entry(self, booking: Booking) -> LedgerEntry:
        return LedgerEntry(
            job_id=booking.job_id,
            epoch=booking.epoch,
            attempt=booking.attempt,
            shepherd=booking.shepherd,
            state=booking.state,
            ranks=booking.ranks,
            gpus=booking.gpus,
            cpus=booking.cpus,
            memory_bytes=booking.memory_bytes,
            deadline_s=self._deadlines.get(booking.key, math.inf),
            part=booking.part,
        )

    # --- fences

    def _fence_of(self, job_id: JobId, epoch: int) -> Fence:
        fence = self._fences.get(job_id)
        if fence is None:
            fence = self._fences[job_id] = Fence(epoch)
        fence.epoch = max(fence.epoch, epoch)
        return fence

    def _raise_fence(self, job_id: JobId, epoch: int, released: tuple[int, int] = (0, 0)) -> list[Persist]:
        fence = self._fences.get(job_id) or Fence(0)
        raised = (max(fence.epoch, epoch), max(fence.released, released))
        if job_id in self._fences and (fence.epoch, fence.released) == raised:
            return []
        durable = StoredFence(raised[0], *raised[1]).persisted(job_id)
        fence.epoch, fence.released = raised
        self._fences[job_id] = fence
        return [durable]

    def _mark_idle(self, job_id: JobId, now_s: float) -> None:
        fence = self._fences[job_id]
        if fence.idle_since_s is None and not any(key[0] == job_id for key in self._bookings):
            fence.idle_since_s = now_s
            self._idle[job_id] = None

    def _drop_idle_fences(self, now_s: float) -> list[Persist]:
        """Past `FENCES_MAX` the longest idle go early: their jobs' commands are the least likely to be under way."""
        dropped: list[JobId] = []
        for job_id in self._idle:
            idle_s = now_s - (self._fences[job_id].idle_since_s or 0.0)
            if idle_s <= FENCE_KEPT_S and len(self._fences) - len(dropped) <= FENCES_MAX:
                break
            dropped.append(job_id)
        for job_id in dropped:
            del self._idle[job_id], self._fences[job_id]
        return [Persist(ROOM, fence_entry(job_id), None) for job_id in dropped]

    def _store_answer(self, fence: Fence, answer: OwnerAnswer) -> None:
        key = (answer.epoch, answer.attempt, answer.command_id)
        fence.answers.pop(key, None)
        fence.answers[key] = answer
        while len(fence.answers) > STORED_ANSWERS_MAX:
            del fence.answers[next(iter(fence.answers))]

    # --- derived state

    def _refresh(self) -> None:
        free = self._compute_free()
        running_ranks = sum(each.ranks for each in self._bookings.values() if each.state is not BookingState.HELD)
        if (free, running_ranks) != (self._free, self._running_ranks):
            self._free, self._running_ranks = free, running_ranks
            self._version += 1

    def _restart_clocks(self, now_s: float) -> None:
        self._deadlines = {key: now_s + self._bookings[key].ttl_s for key in self._deadlines}
        for job_id in self._idle:
            self._fences[job_id].idle_since_s = now_s

    def _free_for(self, request: HoldRequest) -> Free:
        """Attempts that the request shows to be over take nothing from it."""
        earlier = self._earlier_holds(request)
        return self._free_without(earlier) if earlier else self._free

    def _compute_free(self) -> Free:
        return self._free_without(())

    def _free_without(self, gone: Collection[TaskKey]) -> Free:
        """What would be free were those bookings not there."""
        if self.is_draining or self._avoided_reason:
            return Free()
        booked = [booking for key, booking in self._bookings.items() if key not in gone]
        taken = self._gpu_bookings if not gone else {u: key for u, key in self._gpu_bookings.items() if key not in gone}
        cpus = self._resources.cpu_count - sum(booking.cpus for booking in booked)
        memory_bytes = self._resources.memory_bytes - sum(booking.memory_bytes for booking in booked)
        return Free(counted(self._free_devices(taken)), max(0, cpus), max(0, memory_bytes), self._resources.labels)

    def _free_devices(self, taken: Collection[str]) -> list[Gpu]:
        """Offered devices that nobody has taken, in index order."""
        offered = [gpu for gpu in self._resources.gpus if gpu.health is GpuHealth.OK and gpu.uuid not in taken]
        return sorted(offered, key=lambda gpu: gpu.index)

    def _writes(self, *writes: Persist) -> list[Persist]:
        """Put the schema version before the first write of a new store."""
        if not writes or self._is_schema_stored:
            return list(writes)
        self._is_schema_stored = True
        return [Persist(ROOM, SCHEMA_KEY, SCHEMA_VERSION), *writes]


def _ranks_above(request: HoldRequest, held: HoldRequest) -> bool:
    """Keys of different policies are never compared; then the first to come holds."""
    is_comparable = request.policy_id == held.policy_id and bool(request.rank_key)
    is_other = request.job_id != held.job_id
    return is_other and is_comparable and (request.rank_key, request.job_id) < (held.rank_key, held.job_id)


def _state_refusal(command: CheckedCommand, state: BookingState) -> Refusal:
    """A draining attempt may still be stopped, signalled and asked after, but never launched."""
    if isinstance(command, StatusRequest) or state is BookingState.LEASED:
        return Refusal.NONE
    if state is BookingState.HELD:
        return Refusal.NOT_COMMITTED
    return Refusal.RELEASED_ATTEMPT if isinstance(command, LaunchRequest) else Refusal.NONE


def _shortage(free: Free, demand: Demand, ranks: int) -> str:
    """A sentence for people; the free state itself travels in the answer."""
    parts = [f"the label {each}, which is not here" for each in missing_labels(free.labels, demand)]
    if demand.gpus:
        kind = f" {demand.gpu_type}" if demand.gpu_type else ""
        parts.append(f"{ranks * demand.gpus}{kind} GPUs of {free.gpu_count} free")
    if demand.cpus:
        parts.append(f"{ranks * demand.cpus} cores of {free.cpus} free")
    if demand.memory_bytes:
        parts.append(f"{ranks * demand.memory_bytes} bytes of memory of {free.memory_bytes} free")
    return f"asked for {', '.join(parts)}"

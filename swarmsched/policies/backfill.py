"""EASY backfill (Lifka, "The ANL/IBM SP Scheduling System", JSSPP 1995). Later jobs may pass a blocked head of the
line as long as they do not delay it.

The head, the first job that does not fit, gets a reservation at the *shadow time*: when, by the time limits of the
running jobs, enough is free for it.  A later job starts now only if it ends before the shadow time by its own limit,
or takes what is left beyond the reservation.  Where a running job that the head waits for has no limit there is no
shadow time, and only what lies beyond the reservation is given away: a head is never starved for want of estimates.
What no known job accounts for (its card is cut, or has not come yet) is held until further notice: it comes free, and
nobody knows when.  A head that could not run even on an empty swarm (its nodes are down) reserves nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmsched.policies.base import (
    SubmitOrder,
    ahead_sentence,
    in_rank_order,
    is_waiting,
    joined,
    keep,
    start,
    wait,
)
from swarmsched.policies.placement import is_there, place_among, place_in
from swarmsched.policies.reason import fits_now, shortage, start_reason
from swarmsched.policies.room import Room
from swarmsched.resources import Share, needs_beside
from swarmsched.view import ClusterView, JobView, Plan

Held = tuple[JobView, tuple[Share, ...]]
"""A job and what it holds."""


@dataclass(slots=True)
class Reservation:
    """What the head of the line is promised.  `spare` is the room at `shadow_s` after the head has started."""

    head: JobView
    shadow_s: float  # from now; infinite when nobody knows
    spare: Room


class Backfill(SubmitOrder):
    """FIFO order; jobs behind a blocked head start where they cannot delay it."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._assumed_limit_s = parameters["assumed_limit_s"]
        self._reserves = parameters["reserves"] > 0

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Start in order until one does not fit, reserve for it, then fill the gaps."""
        room = Room(view.nodes)
        started: list[Held] = []
        ahead: list[JobView] = []
        reservation: Reservation | None = None
        emptied: Room | None = None
        decisions = []
        for key, job in in_rank_order(view.jobs, self, now_s):
            if not is_waiting(job):
                decisions.append(keep(job, key))
                continue
            shares = self._place(job, room, reservation)
            if shares is not None:
                decisions.append(start(job, key, shares, _start(job, shares, reservation)))
                started.append((job, shares))
                continue
            if reservation is None and self._reserves:
                emptied = emptied or room.emptied()
                if place_in(emptied, job) is not None:
                    reservation = self._reserve(job, self._ends(view, started, now_s), room)
            decisions.append(wait(job, key, _wait(job, room, reservation, ahead)))
            ahead.append(job)
        return Plan(tuple(decisions))

    def _limit_s(self, job: JobView) -> float:
        return job.card.time_limit_s or self._assumed_limit_s or math.inf

    def _place(self, job: JobView, room: Room, reservation: Reservation | None) -> tuple[Share, ...] | None:
        """Shares that fit now and respect the reservation, booked in both rooms; or None."""
        if reservation is None or self._limit_s(job) <= reservation.shadow_s < math.inf:
            shares = place_in(room, job)
            if shares is not None:
                room.take(shares, job.demand)
            return shares
        return place_beyond(job, room, reservation.spare)

    def _reserve(self, head: JobView, ends: Sequence[tuple[float, Held]], room: Room) -> Reservation | None:
        """Release running jobs in the order of their ends, at last what nobody accounts for, until the head fits."""
        spare = room.copy()
        for end_s, (job, shares) in ends:
            spare.release(shares, job.demand)
            if (placed := place_in(spare, head)) is not None:
                spare.take(placed, head.demand)
                return Reservation(head, end_s, spare)
        spare = room.emptied()
        if (placed := place_in(spare, head)) is None:
            return None
        spare.take(placed, head.demand)
        return Reservation(head, math.inf, spare)

    def _ends(self, view: ClusterView, started: Sequence[Held], now_s: float) -> list[tuple[float, Held]]:
        """(seconds from now, who ends then), soonest first."""
        ends: list[tuple[float, Held]] = [(self._limit_s(job), (job, shares)) for job, shares in started]
        ends += [
            (max(0.0, self._limit_s(job) - job.running_s(now_s)), (job, job.shares)) for job in view.jobs if job.shares
        ]
        ends.sort(key=lambda end: (end[0], end[1][0].job_id))
        return ends


def place_beyond(job: JobView, room: Room, spare: Room) -> tuple[Share, ...] | None:
    """Shares that fit now and still fit beside the head at the shadow time."""
    if min(room.ranks(job.demand), spare.ranks(job.demand)) < job.ranks or job.card.hides_constraints:
        return None
    if needs_beside(job.demand):
        placed = place_in(room, job)
        return placed if placed and _is_taken_in_both(placed, job, room, spare) else None
    fewer, more = sorted((room.fits(job.demand), spare.fits(job.demand)), key=len)
    fits = {node: min(held, more[node]) for node, held in fewer.items() if node in more}
    shares = place_among(fits, room, job)
    return shares if shares and _is_taken_in_both(shares, job, room, spare) else None


def _is_taken_in_both(shares: Sequence[Share], job: JobView, room: Room, spare: Room) -> bool:
    picks = room.picks(shares, job.demand)
    if not spare.has_like(picks) or not is_there(spare, shares, job.demand):
        return False
    room.take_like(shares, job.demand, picks)
    spare.take_like(shares, job.demand, picks)
    return True


def _start(job: JobView, shares: tuple[Share, ...], reservation: Reservation | None) -> str:
    passing = "passes the head of the line without delaying it" if reservation else ""
    return joined(start_reason(job, shares), passing)


def _wait(job: JobView, room: Room, reservation: Reservation | None, ahead: Sequence[JobView]) -> str:
    promise = ""
    if reservation is None:
        promise = "has to wait for nodes or GPUs that are not available now"
    elif reservation.head is job:
        known = math.isfinite(reservation.shadow_s)
        promise = (
            f"next in line, expected within {reservation.shadow_s:.0f} s"
            if known
            else "next in line, when the running jobs end"
        )
    elif fits_now(job, room):
        promise = "would delay the head of the line"
    return joined(shortage(job, room), promise, ahead_sentence(ahead))

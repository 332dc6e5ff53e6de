"""EASY backfill (Lifka, "The ANL/IBM SP Scheduling System", JSSPP 1995): later jobs may pass a blocked head of the line
as long as they do not delay it.

The head, the first job that does not fit, gets a reservation at the *shadow time*: when, by the time limits of the
running jobs, enough is free for it.  A later job starts now only if it ends before the shadow time by its own limit,
or takes what is left beyond the reservation.  Where a running job that the head waits for has no limit there is no
shadow time, and only what lies beyond the reservation is given away: a head is never starved for want of estimates.
A head that could not run even on an empty swarm (its nodes are down) reserves nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmsched.policies.base import (
    ParameterSpec,
    ahead_sentence,
    in_rank_order,
    is_waiting,
    joined,
    keep,
    submit_rank_key,
)
from swarmsched.policies.placement import choose, place_in, tie_break
from swarmsched.policies.reason import fits_now, shortage, start_reason
from swarmsched.policies.release import busy_devices, release
from swarmsched.policies.room import Room
from swarmsched.resources import Share
from swarmsched.view import Action, ClusterView, JobView, Plan, PlanEntry, RankKey

PARAMETERS = (
    ParameterSpec(
        "assumed_limit_s", "time limit assumed for jobs that name none; 0: they may run for ever", 0.0, 0.0, 1e9
    ),
)


_Held = tuple[JobView, tuple[Share, ...]]
"""A job and what it holds."""


@dataclass(slots=True)
class _Reservation:
    """What the head of the line is promised.  `spare` is the room at `shadow_s` after the head has started."""

    head: JobView
    shadow_s: float  # from now
    spare: Room


class Backfill:
    """FIFO order; jobs behind a blocked head start where they cannot delay it."""

    def __init__(self, parameters: Mapping[str, float]) -> None:
        self._assumed_limit_s = parameters["assumed_limit_s"]

    @property
    def policy_id(self) -> str:
        """Name and assumed limit."""
        return f"backfill:{self._assumed_limit_s:g}"

    def rank_key(self, job: JobView) -> RankKey:
        """Priority, then submit time in milliseconds."""
        return submit_rank_key(job)

    def refuses_to_make_room(self, victim: JobView, taker_key: RankKey) -> str:
        """Running jobs are never stopped for others."""
        return "the policy backfill does not preempt"

    def plan(self, view: ClusterView, now_s: float) -> Plan:
        """Start in order until one does not fit, reserve for it, then fill the gaps."""
        room = Room(view.nodes)
        started: list[_Held] = []
        ahead: list[JobView] = []
        reservation: _Reservation | None = None
        emptied: Room | None = None
        entries = []
        for key, job in in_rank_order(view.jobs, self.rank_key):
            if not is_waiting(job):
                entries.append(keep(job, key))
                continue
            shares = self._place(job, room, reservation)
            if shares is not None:
                entries.append(PlanEntry(job.job_id, Action.START, key, _start(job, shares, reservation), shares))
                started.append((job, shares))
                continue
            if reservation is None:
                emptied = emptied or self._emptied(view, room, started)
                if place_in(emptied, job) is not None:
                    reservation = self._reserve(job, view, room, started)
            entries.append(PlanEntry(job.job_id, Action.WAIT, key, _wait(job, room, reservation, ahead)))
            ahead.append(job)
        return Plan(view.version, self.policy_id, tuple(entries))

    def _limit_s(self, job: JobView) -> float:
        return job.time_limit_s or self._assumed_limit_s or math.inf

    def _place(self, job: JobView, room: Room, reservation: _Reservation | None) -> tuple[Share, ...] | None:
        """Shares that fit now and respect the reservation, booked in both rooms; or None."""
        if reservation is None or self._limit_s(job) <= reservation.shadow_s < math.inf:
            shares = place_in(room, job)
            if shares is not None:
                room.take(shares, job.demand)
            return shares
        return _place_beyond(job, room, reservation.spare)

    def _reserve(self, head: JobView, view: ClusterView, room: Room, started: Sequence[_Held]) -> _Reservation | None:
        """Release running jobs in the order of their ends until the head fits; None if it never does."""
        spare = room.copy()
        busy = busy_devices(view.nodes, room)
        for end_s, (job, shares) in self._ends(view, started):
            for share in shares:
                release(job, share, spare, busy)
            placed = place_in(spare, head)
            if placed is not None:
                spare.take(placed, head.demand)
                return _Reservation(head, end_s, spare)
        return None

    def _emptied(self, view: ClusterView, room: Room, started: Sequence[_Held]) -> Room:
        """The room when all running jobs have ended; the same at any point of one plan."""
        empty = room.copy()
        busy = busy_devices(view.nodes, room)
        for _, (job, shares) in self._ends(view, started):
            for share in shares:
                release(job, share, empty, busy)
        return empty

    def _ends(self, view: ClusterView, started: Sequence[_Held]) -> list[tuple[float, _Held]]:
        """(seconds from now, who ends then), soonest first."""
        ends: list[tuple[float, _Held]] = [(self._limit_s(job), (job, shares)) for job, shares in started]
        ends += [(max(0.0, self._limit_s(job) - job.running_s), (job, job.shares)) for job in view.jobs if job.shares]
        ends.sort(key=lambda end: (end[0], end[1][0].job_id))
        return ends


def _place_beyond(job: JobView, room: Room, spare: Room) -> tuple[Share, ...] | None:
    """Shares that fit now and still fit beside the head at the shadow time."""
    if room.ranks(job.demand) < job.ranks or spare.ranks(job.demand) < job.ranks:
        return None
    later = spare.fits(job.demand)
    fits = {node: min(held, later.get(node, 0)) for node, held in room.fits(job.demand).items()}
    shares = choose(fits, room, job.demand, job.ranks, tie_break(job.job_id), nodes=job.nodes, exclude=job.exclude)
    if shares is None:
        return None
    picks = room.picks(shares, job.demand)
    if not spare.has_like(picks):
        return None
    room.take_like(shares, job.demand, picks)
    spare.take_like(shares, job.demand, picks)
    return shares


def _start(job: JobView, shares: tuple[Share, ...], reservation: _Reservation | None) -> str:
    passing = "passes the head of the line without delaying it" if reservation else ""
    return joined(start_reason(job, shares), passing)


def _wait(job: JobView, room: Room, reservation: _Reservation | None, ahead: Sequence[JobView]) -> str:
    promise = ""
    if reservation is None:
        promise = "cannot run even when all running jobs have ended"
    elif reservation.head is job:
        known = math.isfinite(reservation.shadow_s)
        promise = f"reserved in {reservation.shadow_s:.0f} s at the latest" if known else "reserved, end unknown"
    elif fits_now(job, room):
        promise = "would delay the head of the line"
    return joined(shortage(job, room), promise, ahead_sentence(ahead))

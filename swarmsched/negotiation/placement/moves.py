"""Other sizes and hosts for jobs of ours that no plan decides: as people ask, and for workers that had better leave."""

from collections.abc import Mapping

from swarmsched.api import JobSpec
from swarmsched.clock import Clock
from swarmsched.cluster import Cluster
from swarmsched.commands import MigrateJob, Refused
from swarmsched.effects import ReplyToClient
from swarmsched.ids import JobId
from swarmsched.negotiation.placement.policy_in_force import PolicyInForce
from swarmsched.negotiation.placement.relief import SPARED_S, relief
from swarmsched.negotiation.placement.resizing import (
    UNSTEADY,
    cannot_pause,
    cannot_scale,
    nearest_size,
    no_place,
    place_elsewhere,
    size,
)
from swarmsched.negotiation.placement.shepherds import Shepherds
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.regrouping import holds_off
from swarmsched.negotiation.shepherd import JobShepherd
from swarmsched.policies.placement import take_if_there
from swarmsched.policies.room import Room
from swarmsched.view import Allocation


class Moves:
    """What one agent does about the sizes and hosts of its jobs by itself or on somebody's wish."""

    def __init__(self, cluster: Cluster, shepherds: Shepherds, policy: PolicyInForce) -> None:
        self._cluster = cluster
        self._shepherds = shepherds
        self._policy = policy

    def scale(self, request_id: int, job: JobShepherd, spec: JobSpec, clock: Clock) -> list[ShepherdEffect]:
        """Have a job of ours take other sizes from now on."""
        refusal = cannot_scale(job.record, spec)
        if refusal is not None:
            return [ReplyToClient(request_id, refusal)]
        return job.scale(request_id, spec, clock)

    def migrate(self, request_id: int, job: JobShepherd, wish: MigrateJob, clock: Clock) -> list[ShepherdEffect]:
        """Have a job of ours go on with its size on other hosts, now or not at all."""
        refusal = cannot_pause(job.record) or (None if job.is_steady else UNSTEADY)
        view = self._shepherds.view_of(job, clock)
        room = self._shepherds.room(self._cluster.nodes())
        ranks = size(job.decided)
        place = None if refusal else place_elsewhere(room, view, ranks, wish.nodes, wish.avoid)
        if refusal is None and place is None:
            refusal = Refused("conflict", no_place(job.decided, wish), "name other nodes, or ask again later")
        elif refusal is None and place == view.shares:
            return job.tell(request_id, clock)
        if refusal is not None:
            return [ReplyToClient(request_id, refusal)]
        target = Allocation(place or (), job.decided.global_batch)
        moved = job.rescale(target, "somebody wants it elsewhere", self._policy.ranking(view, clock.now_s), clock)
        return [*moved, *job.tell(request_id, clock)]

    def go_on(self, room: Room, mine: Mapping[JobId, JobShepherd], clock: Clock) -> list[ShepherdEffect]:
        """Jobs that were ended to run elsewhere, or with another size, begin there."""
        effects: list[ShepherdEffect] = []
        for job in mine.values():
            place = job.take_next_place()
            if place.shares and take_if_there(room, place.shares, job.decided.spec.demand):
                ranking = self._policy.ranking(self._shepherds.view_of(job, clock), clock.now_s)
                effects += job.place(place.shares, ranking, clock, place.global_batch)
        return effects

    def fit(self, room: Room, clock: Clock) -> list[ShepherdEffect]:
        """Jobs that are to have another size than they have get one, if there is a place for it."""
        effects: list[ShepherdEffect] = []
        for job_id in list(self._shepherds.misfits):
            job = self._shepherds.jobs[job_id]
            if cannot_pause(job.record) is not None or not job.is_steady:
                continue
            view, ranks = self._shepherds.view_of(job, clock), nearest_size(job.decided)
            place = place_elsewhere(room, view, ranks)
            if place is not None and not holds_off(job, Allocation(place), clock.now_s):
                room.release(view.shares, view.demand)
                room.take(place, view.demand)
                reason = f"asked for by hand: {job.decided.spec.size_range} ranks"
                target = Allocation(place, job.decided.global_batch)
                effects += job.rescale(target, reason, self._policy.ranking(view, clock.now_s), clock)
        return effects

    def relieve(self, room: Room, clock: Clock) -> list[ShepherdEffect]:
        """Workers that had better train elsewhere go there."""
        effects: list[ShepherdEffect] = []
        drained = self._cluster.drained() if self._shepherds.live else ()
        for job in [self._shepherds.jobs[job_id] for job_id in self._shepherds.live]:
            view = self._shepherds.view_of(job, clock)
            spared = [part for part, until_s in job.regrouping.spared_s.items() if clock.now_s < until_s]
            found = relief(job.decided, job.gang, view, room, drained, spared) if job.is_steady else None
            if found is not None and not holds_off(job, found.target, clock.now_s, found.leave):
                ranking = self._policy.ranking(view, clock.now_s)
                effects += job.rescale(found.target, found.reason, ranking, clock, found.leave)
                if found.is_for_speed and job.attempt is not None:
                    until_s = clock.now_s + SPARED_S
                    job.regrouping.spared_s |= {share.part: until_s for share in job.attempt.shares}
        return effects

"""The change of a running gang without a stop, as rows of the table of phases: what is due of an elastic job's world.

New parts are held, named by the record, committed, staged and launched as those of an attempt are, while the others
train.  Once their workers are ready the record names the next world; workers are told of it, again until they say that
they have heard, and switch by themselves.  Whoever is not in it leaves by itself, and is stopped if it does not.  A
death is the same change without newcomers, and a lost connection between members that live the same change without
anybody.  Where no member would be kept the new ones come first, and once they train the old ones leave: somebody must
give them the state of the training.

All of it follows from the record and from what workers have told, but for two wishes, who is to leave and why: a
shepherd that takes over leaves them to the next plan.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence

from swarmsched.api import EndReason
from swarmsched.fields import cleaned
from swarmsched.ids import NodeId
from swarmsched.ledger.message import ReleaseRequest, StopRequest, WorldRequest
from swarmsched.negotiation.attempt import AttemptPhase
from swarmsched.negotiation.changes import RecordChange, StopWished, left_by
from swarmsched.negotiation.formation import Formation, look_at
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd_state import ShepherdState
from swarmsched.negotiation.told import ChangeWished
from swarmsched.negotiation.world_changes import (
    JoinersGivenUp,
    PartsGone,
    Regrouped,
    WorldTrains,
    is_settled,
)
from swarmsched.policies.base import amount
from swarmsched.record import JobRecord
from swarmsched.resources import Share, of_first, of_others, ranks_by_node
from swarmsched.view import Allocation
from swarmsched.world import WorkerState

SOURCE_FILE = re.compile(r"\[/\S+\] ")  # where in gloo it was, for which a record has no room
AS_BEGUN = "begun by its shepherd before"


def as_parts(shares: Sequence[Share], first: int = 1) -> tuple[Share, ...]:
    """One rank each, numbered from `first` on; those of other groups as they are."""
    nodes = [node for node, ranks in ranks_by_node(of_first(shares)).items() for _ in range(ranks)]
    return (*[Share(node, 1, part=part) for part, node in enumerate(nodes, first)], *of_others(shares))


# Wishes.


def change(job: ShepherdState, wish: ChangeWished) -> list[ShepherdEffect]:
    """Have the job train on these hosts: others join it, or leave it, or both, those of `leave` in any case."""
    record, target, unwanted = job.decided, wish.target, wish.leave
    leave = [share.part for share in record.members if share.part in unwanted]
    new = _newcomers(record, target, unwanted)
    too_many = _staying(record, unwanted) - ranks_by_node(of_first(target.shares))
    for share in reversed(record.members):  # those that came last, so that the first rank stays
        if too_many[share.node] and share.part not in unwanted:
            too_many[share.node] -= 1
            leave.append(share.part)
    if not leave and not new:
        return []
    job.regrouping.wish(leave, wish.reason)
    before, after = len(record.members), target.ranks
    text = f"from {before} to {after} ranks while it trains; {wish.reason}"
    effects: list[ShepherdEffect] = [job.announce("job.rescaled", text, ranks_before=before, ranks_after=after)]
    if not new:
        return effects
    attempt, released_part = job.pacing.released
    count = sum(share.ranks for share in new)
    first = job.regrouping.number(count, record, released_part if attempt == record.attempt else 0)
    parts = as_parts(new, first)
    if wish.spared_s:
        job.regrouping.spare([share.part for share in parts], job.now_s + wish.spared_s)
    return [*effects, *job.join(parts, wish.ranking).begin(job.now_s)]


def holds_off(job: ShepherdState, target: Allocation, now_s: float, unwanted: Collection[int] = ()) -> bool:
    """Whether that would have others join it so soon after some have failed."""
    pacing = job.pacing
    return now_s < max(pacing.may_try_after_s, pacing.may_join_after_s) and bool(
        _newcomers(job.decided, target, unwanted)
    )


def _newcomers(record: JobRecord, target: Allocation, unwanted: Collection[int]) -> list[Share]:
    missing = ranks_by_node(of_first(target.shares)) - _staying(record, unwanted)
    return [Share(node, ranks) for node, ranks in missing.items()]


def _staying(record: JobRecord, unwanted: Collection[int]) -> Counter[NodeId]:
    return ranks_by_node(share for share in record.members if share.part not in unwanted)


def lost_node(job: ShepherdState, node: NodeId) -> list[ShepherdEffect]:
    """Go on without what it has there of the gang; that is settled as what an attempt leaves is."""
    lost = job.shares_on(node)
    if job.attempt is not None and any(job.attempt.has(share.place) for share in lost):
        job.attempt.fail(node, f"{node} was lost")
    left = left_by(lost, job.decided.attempt)
    return [*job.write(Regrouped((), (), (), left, f"{node} was lost", job.utc_s, job.ran_s))]


# What follows from a decided record.


def world_changed(job: ShepherdState, before: JobRecord) -> list[ShepherdEffect]:
    """Others belong to the gang, or train."""
    record, attempt = job.decided, job.attempt
    if (before.shares, before.world) == (record.shares, record.world):
        return _news(job, before)
    effects: list[ShepherdEffect] = [*job.gang.has(record, job.now_s)]
    job.note_end()
    kept = {*(share.place for share in record.shares), *(each.place for each in record.leftovers)}
    gone = [share.place for share in before.shares if share.place not in kept]
    effects += [job.commands.to(place, ReleaseRequest, record, record.attempt) for place in gone]
    joining, came_to_nothing = set(record.world.joining), set(before.world.joining)
    came_to_nothing -= {*joining, *record.world.members}
    parts = {share.part for share in attempt.shares} if attempt is not None else set()
    effects += job.commit()
    if parts & set(before.world.joining) and not parts & joining:
        job.drop_attempt()
    if came_to_nothing:
        job.regrouping.forget_wishes()
    _note_failures(job, before, came_to_nothing)
    job.regrouping.keep_wishes_of(record.world.members)
    return [*effects, *_news(job, before)]


def _note_failures(job: ShepherdState, before: JobRecord, came_to_nothing: Collection[int]) -> None:
    """Whatever broke them may break those that follow, there most of all."""
    record = job.decided
    lost = set(record.world.lost) - set(before.world.lost)
    is_again = before.world.version < record.world.version and before.world.members == record.world.members
    if came_to_nothing or lost or is_again:
        job.pacing.set_back(job.now_s)
    formation = look_at(record, job.gang.tasks)
    for share in formation.leaving:
        worker = formation.workers[share.part]
        if worker.state is WorkerState.REFUSED and share.part in {*lost, *came_to_nothing}:
            job.regrouping.refusals.note(share, worker.problem, record, job.now_s)
        if share.part in came_to_nothing or (share.part in lost and not worker.trains):
            job.pacing.avoid(share.node, job.now_s)


def _news(job: ShepherdState, before: JobRecord) -> list[ShepherdEffect]:
    record = job.decided
    version, count = record.world.version, len(record.world.members)
    ranks = amount(count, "rank")
    if version > before.world.version:
        text = f"goes on with {ranks} as world {version}: {record.rescalings[-1].reason}"
        return [job.announce("job.regrouped", text, ranks_before=len(before.world.members), ranks_after=count)]
    if is_settled(record) and not is_settled(before) and record.rescalings != before.rescalings:
        pause_s = record.rescalings[-1].pause_s
        text = f"{ranks} of world {version} train, after {pause_s:.3f} s"
        return [job.announce("job.resumed", text, pause_s=pause_s)]
    return []


# What is told to owners.


def follow_workers(job: ShepherdState, formation: Formation) -> list[ShepherdEffect]:
    """Tell all workers of the world, stop those who should have left by themselves, and look again once in a while."""
    record, now_s, regrouping = job.decided, job.now_s, job.regrouping
    regrouping.look_again(formation, now_s)
    plan = regrouping.plan(record, formation)
    told = regrouping.uninformed(plan, formation, now_s) if plan is not None else []
    stopped, grace_s = regrouping.overdue(record.world.lost, formation, now_s), record.spec.grace_s
    return [
        *(job.commands.to(share.place, WorldRequest, record, record.attempt, plan) for share in told),
        *(job.commands.to(share.place, StopRequest, record, record.attempt, grace_s) for share in stopped),
    ]


# Changes of the record.


def refused(job: ShepherdState, formation: Formation) -> RecordChange | None:
    """Each newcomer parts from the others: the script is at fault, and no other newcomer would do better."""
    verdict = job.regrouping.refusals.verdict
    return StopWished(EndReason.FAILED, cleaned(verdict), job.utc_s) if verdict else None


def joiners_given_up(job: ShepherdState, formation: Formation) -> RecordChange | None:
    """New parts that have ended, or failed, or are not ready for too long."""
    has_failed = job.attempt is not None and job.attempt.phase is AttemptPhase.FAILED
    is_late = job.attempt is None and bool(formation.joining) and job.regrouping.is_late(job.now_s)
    parts = []
    for share in formation.joining:
        state = formation.workers[share.part].state
        is_hopeless = state is WorkerState.REFUSED or share.part in formation.exited
        if has_failed or is_hopeless or (is_late and state is not WorkerState.READY):
            parts.append(share.part)
    return JoinersGivenUp(tuple(parts)) if parts else None


def regrouped(job: ShepherdState, formation: Formation) -> RecordChange | None:
    """Others are to train: newcomers are ready, or members are gone, wished away, or have lost one another."""
    record, wished, gone = job.decided, job.regrouping, formation.gone
    has_parted = not gone and _may_try_again(job, formation)
    gone = _untrained(record, formation) if has_parted else gone
    left = [share.part for share in formation.members if share.part not in gone and share.part not in formation.exited]
    trained = not record.world.has_trained or any(formation.trains(part) for part in left)
    if job.gang.is_stopping or not left or (gone and not trained):
        return None
    ready = [each.part for each in formation.joining if formation.workers[each.part].state is WorkerState.READY]
    is_held_up = len(ready) < len(formation.joining) or job.attempt is not None
    joins = () if is_held_up else tuple(ready)
    leaves = [] if is_held_up else [part for part in left if part in wished.leave]
    kept = [part for part in left if part not in leaves]
    if not kept or (record.world.has_trained and not any(formation.trains(part) for part in kept)):
        leaves = []
    if not (joins or leaves or gone or has_parted):
        return None
    told = _complaints(formation) if has_parted else _obituary(gone, formation)
    reason = wished.reason or AS_BEGUN if joins or leaves else told
    version = record.world.version if has_parted else 0
    return Regrouped(joins, tuple(leaves), gone, (), reason, job.utc_s, job.ran_s, version)


def _may_try_again(job: ShepherdState, formation: Formation) -> bool:
    """All members have told so for a moment, or some for long, and not too soon after the last time."""
    if not formation.parted:
        return False
    retry_s = job.regrouping.retry_s(are_all=formation.are_all_parted)
    return job.now_s >= max(retry_s, job.pacing.may_join_after_s)


def _untrained(record: JobRecord, formation: Formation) -> tuple[int, ...]:
    """Newcomers that a world of others who have trained could not take in: it is tried without them."""
    untrained = tuple(share.part for share in formation.members if not formation.trains(share.part))
    return untrained if record.world.has_trained and len(untrained) < len(formation.members) else ()


def _complaints(formation: Formation) -> str:
    problems = (formation.workers[part].problem for part in formation.parted)
    told = SOURCE_FILE.sub("", next(filter(None, problems), "a connection ended"))
    return f"its workers lost one another: {told}"


def _obituary(gone: Collection[int], formation: Formation) -> str:
    told = []
    for share in formation.members:
        task = formation.tasks.get(share.part)
        if share.part in gone and task is not None:
            how = [f"signal {each.signal}" if each.signal else f"code {each.exit_code}" for each in task.exits]
            still = "stands still" if task.worker.is_silent else "does not come to its step, for which others wait"
            ended = f"ended: {', '.join(how) or task.detail}" if share.part in formation.exited else still
            told.append(f"worker {share.part} on {share.node} {ended}")
    return "; ".join(told)


def trains(job: ShepherdState, formation: Formation) -> RecordChange | None:
    """All members have switched."""
    if formation.is_settled:
        return None
    version = job.decided.world.version
    workers = [formation.workers[each.part] for each in formation.members if each.part not in formation.exited]
    if not workers or any(each.trains < version for each in workers):
        return None
    return WorldTrains(version, max(each.pause_s for each in workers))


def parts_gone(job: ShepherdState, formation: Formation) -> RecordChange | None:
    """No process is left of some that train no more."""
    parts = tuple(share.part for share in formation.leaving if share.part in formation.exited)
    return PartsGone(parts, job.ran_s) if parts else None


CHANGES = (refused, joiners_given_up, regrouped, trains, parts_gone)
"""What becomes of the record of a gang whose workers stand so, in this order."""

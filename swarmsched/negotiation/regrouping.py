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
from collections.abc import Collection, Mapping, Sequence

from swarmsched.api import EndReason
from swarmsched.fields import cleaned
from swarmsched.ids import NodeId
from swarmsched.ledger.message import ReleaseRequest, StopRequest, WorldRequest
from swarmsched.negotiation.attempt import Attempt, AttemptPhase, Ranking
from swarmsched.negotiation.changes import RecordChange, StopWished, left_by
from swarmsched.negotiation.gang import is_clean, may_have_trained
from swarmsched.negotiation.record_writer import ShepherdEffect
from swarmsched.negotiation.shepherd_state import ShepherdState
from swarmsched.negotiation.world_changes import (
    Joined,
    JoinersGivenUp,
    PartsGone,
    Regrouped,
    WorldTrains,
    is_settled,
)
from swarmsched.policies.base import amount
from swarmsched.record import JobRecord
from swarmsched.resources import Share, ranks_by_node
from swarmsched.task import TaskStage, TaskStatus
from swarmsched.view import Allocation
from swarmsched.world import Worker, WorkerState, WorldMember, WorldPlan

AGAIN_S = 1.0  # between looks, and between repeats of a world that was not heard, while a change is under way
STOP_AGAIN_S = 2.0
LEAVE_S = 5.0  # from the switch of all others until a worker that has not left by itself is stopped
STUCK_S = 300.0  # the same where others have not switched
JOIN_S = 600.0  # from the launch of new workers until those that are not ready are given up
PARTED_S = 2.0  # that all members have told of a world that came to nothing, until they try the next one
PARTED_SOME_S = 30.0  # the same where some have: who computes has not met it yet, and a death is told by then
SOURCE_FILE = re.compile(r"\[/\S+\] ")  # where in gloo it was, for which a record has no room
AS_BEGUN = "begun by its shepherd before"


def as_parts(shares: Sequence[Share], first: int = 1) -> tuple[Share, ...]:
    """One rank each, numbered from `first` on."""
    nodes = [node for node, ranks in ranks_by_node(shares).items() for _ in range(ranks)]
    return tuple(Share(node, 1, part=part) for part, node in enumerate(nodes, first))


# Wishes.


def begin(
    job: ShepherdState, target: Allocation, reason: str, ranking: Ranking, unwanted: Collection[int] = ()
) -> list[ShepherdEffect]:
    """Have the job train on these hosts: others join it, or leave it, or both, the `unwanted` in any case."""
    record, regrouping = job.decided, job.regrouping
    leave = [share.part for share in record.members if share.part in unwanted]
    new = _newcomers(record, target, unwanted)
    too_many = _staying(record, unwanted) - ranks_by_node(target.shares)
    for share in reversed(record.members):  # those that came last, so that the first rank stays
        if too_many[share.node] and share.part not in unwanted:
            too_many[share.node] -= 1
            leave.append(share.part)
    if not leave and not new:
        return []
    regrouping.leave, regrouping.reason = dict.fromkeys(leave), reason
    before, after = len(record.members), target.ranks
    text = f"from {before} to {after} ranks while it trains; {reason}"
    effects: list[ShepherdEffect] = [job.announce("job.rescaled", text, ranks_before=before, ranks_after=after)]
    return [*effects, *_hold(job, new, ranking)] if new else effects


def holds_off(job: ShepherdState, target: Allocation, now_s: float, unwanted: Collection[int] = ()) -> bool:
    """Whether that would have others join it so soon after some have failed."""
    pacing = job.pacing
    return now_s < max(pacing.may_try_after_s, pacing.may_join_after_s) and bool(
        _newcomers(job.decided, target, unwanted)
    )


def _newcomers(record: JobRecord, target: Allocation, unwanted: Collection[int]) -> list[Share]:
    missing = ranks_by_node(target.shares) - _staying(record, unwanted)
    return [Share(node, ranks) for node, ranks in missing.items()]


def _staying(record: JobRecord, unwanted: Collection[int]) -> Counter[NodeId]:
    return ranks_by_node(share for share in record.members if share.part not in unwanted)


def _hold(job: ShepherdState, new: Sequence[Share], ranking: Ranking) -> list[ShepherdEffect]:
    record = job.decided
    attempt, released = job.pacing.released
    first = max(record.last_part, job.regrouping.last_part, released if attempt == record.attempt else 0) + 1
    job.regrouping.last_part = first + sum(share.ranks for share in new) - 1
    job.attempt = _attempt(job, as_parts(new, first), ranking)
    return [*job.attempt.begin(job.now_s)]


def _attempt(job: ShepherdState, shares: tuple[Share, ...], ranking: Ranking) -> Attempt:
    record = job.decided
    return job.parts.make_attempt(record, record.attempt, shares, ranking, job.commands.ids)


def lost_node(job: ShepherdState, node: NodeId) -> list[ShepherdEffect]:
    """Go on without what it has there of the gang; that is settled as what an attempt leaves is."""
    lost = job.shares_on(node)
    if job.attempt is not None and any(job.attempt.has(share.place) for share in lost):
        job.attempt.fail(node, f"{node} was lost")
    left = left_by(lost, job.decided.attempt)
    change = Regrouped((), (), (), left, f"{node} was lost", job.utc_s, job.ran_s)
    return [*job.write(change)]


def taken_up(job: ShepherdState) -> list[ShepherdEffect]:
    """Of those that were to join nobody knows how far they came: the commits ask."""
    record = job.decided
    if not record.joining:
        return []
    job.attempt = _attempt(job, record.joining, Ranking("", ()))
    return [*job.attempt.prepared(record, job.now_s)]


# What follows from a decided record.


def world_changed(job: ShepherdState, before: JobRecord) -> list[ShepherdEffect]:
    """Others belong to the gang, or train."""
    record, attempt = job.decided, job.attempt
    if (before.shares, before.world) == (record.shares, record.world):
        return _news(job, before)
    effects: list[ShepherdEffect] = [*job.gang.has(record.shares)]
    job.note_end()
    kept = {*(share.place for share in record.shares), *(each.place for each in record.leftovers)}
    gone = [share.place for share in before.shares if share.place not in kept]
    effects += [job.commands.to(place, ReleaseRequest, record, record.attempt) for place in gone]
    joining, came_to_nothing = set(record.world.joining), set(before.world.joining)
    came_to_nothing -= {*joining, *record.world.members}
    parts = {share.part for share in attempt.shares} if attempt is not None else set()
    if attempt is not None and attempt.phase is AttemptPhase.HELD and parts <= joining:
        effects += attempt.prepared(record, job.now_s)
    elif parts & set(before.world.joining) and not parts & joining:
        job.attempt = None
    if came_to_nothing:
        job.regrouping.leave = {}
    _note_failures(job, before, came_to_nothing)
    job.regrouping.leave = {part: None for part in job.regrouping.leave if part in record.world.members}
    return [*effects, *_news(job, before)]


def _note_failures(job: ShepherdState, before: JobRecord, came_to_nothing: Collection[int]) -> None:
    """Whatever broke them may break those that follow, there most of all."""
    record = job.decided
    lost = set(record.world.lost) - set(before.world.lost)
    is_again = before.world.version < record.world.version and before.world.members == record.world.members
    if came_to_nothing or lost or is_again:
        job.pacing.set_back(job.now_s)
    for share in record.leaving:
        worker = _worker(job, share)
        if worker.state is WorkerState.REFUSED and share.part in {*lost, *came_to_nothing}:
            job.regrouping.refusals.note(share, worker.problem, record, job.now_s)
        if share.part in came_to_nothing or (share.part in lost and not _has_trained(job, share)):
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


def follow_joining(job: ShepherdState) -> list[ShepherdEffect]:
    """Once new parts are launched, or before the record has named them come to nothing."""
    attempt = job.attempt
    if attempt is None:
        return []
    if attempt.phase is AttemptPhase.LAUNCHED:
        job.attempt, job.regrouping.join_until_s = None, job.now_s + JOIN_S
        job.pacing.succeeded()
        return []
    is_named = {share.part for share in attempt.shares} <= set(job.decided.world.joining)
    if attempt.phase is not AttemptPhase.FAILED or is_named or job.is_writing:
        return []
    job.attempt, job.regrouping.leave = None, {}
    job.pacing.failed(attempt.refusal, attempt.refusing_node, job.now_s, was_alone=len(attempt.shares) == 1)
    return [*attempt.abandon(), job.announce("negotiation.round", attempt.problem, result="aborted")]


def publish(job: ShepherdState) -> list[ShepherdEffect]:
    """Tell all workers of the world, until they say that they have heard; who leaves is told as well."""
    record, told = job.decided, job.regrouping.told
    plan = _plan(job)
    if plan is None:
        return []
    effects: list[ShepherdEffect] = []
    for share in (*record.members, *record.leaving):
        worker = _worker(job, share)
        version, at_s = told.get(share.part, (0, 0.0))
        is_repeat = version == plan.version and job.now_s < at_s + AGAIN_S
        if not worker.address or worker.heard >= plan.version or job.gang.has_exited(share.place) or is_repeat:
            continue
        told[share.part] = (plan.version, job.now_s)
        effects.append(job.commands.to(share.place, WorldRequest, record, record.attempt, plan))
    return effects


def _plan(job: ShepherdState) -> WorldPlan | None:
    """Once all members have said where they are."""
    record, addresses = job.decided, job.regrouping.addresses
    world, members = record.world, record.members
    for share in members:
        if address := _worker(job, share).address:
            addresses[share.part] = address
    if not members or any(share.part not in addresses for share in members):
        return None
    told = tuple(WorldMember(share.part, addresses[share.part]) for share in members)
    nodes = len(ranks_by_node(members))
    return WorldPlan(world.version, record.epoch, told, world.lost, not world.has_trained, nodes)


def stop_leaving(job: ShepherdState) -> list[ShepherdEffect]:
    """Those that have not left by themselves, never trained, or stand still."""
    record, regrouping = job.decided, job.regrouping
    effects: list[ShepherdEffect] = []
    for share in record.leaving:
        since_s = regrouping.leaving_since_s.setdefault(share.part, job.now_s)
        patience_s = LEAVE_S if is_settled(record) else STUCK_S
        may_leave = _worker(job, share).trains and share.part not in record.world.lost
        due_s = since_s + patience_s if may_leave else since_s
        due_s = max(due_s, regrouping.stopped_s.get(share.part, 0.0) + STOP_AGAIN_S)
        if job.now_s >= due_s and not job.gang.has_exited(share.place):
            regrouping.stopped_s[share.part] = job.now_s
            stop = job.commands.to(share.place, StopRequest, record, record.attempt, record.spec.grace_s)
            effects.append(stop)
    return effects


def look_again(job: ShepherdState) -> list[ShepherdEffect]:
    """While a change is under way it is looked at once in a while, whatever happens."""
    record, regrouping = job.decided, job.regrouping
    is_unheard = any(_worker(job, share).heard < record.world.version for share in record.members)
    parted, _ = _parted(job)
    regrouping.parted_s = min(regrouping.parted_s, job.now_s) if parted else float("inf")
    is_changing = record.joining or record.leaving or regrouping.leave or is_unheard or parted
    if not is_changing:
        regrouping.again_s = float("inf")
    elif job.now_s >= regrouping.again_s or regrouping.again_s == float("inf"):
        regrouping.again_s = job.now_s + AGAIN_S
    return []


# Changes of the record.


def refused(job: ShepherdState) -> RecordChange | None:
    """Each newcomer parts from the others: the script is at fault, and no other newcomer would do better."""
    verdict = job.regrouping.refusals.verdict
    return StopWished(EndReason.FAILED, cleaned(verdict), job.utc_s) if verdict else None


def joined(job: ShepherdState) -> RecordChange | None:
    """All owners of new parts hold."""
    attempt = job.attempt
    if attempt is None or attempt.phase is not AttemptPhase.HELD:
        return None
    return Joined(attempt.shares, job.ran_s)


def joiners_given_up(job: ShepherdState) -> RecordChange | None:
    """New parts that have ended, or failed, or are not ready for too long."""
    parts = tuple(share.part for share in job.decided.joining if _is_hopeless(job, share))
    return JoinersGivenUp(parts) if parts else None


def _is_hopeless(job: ShepherdState, share: Share) -> bool:
    attempt = job.attempt
    has_failed = attempt is not None and attempt.phase is AttemptPhase.FAILED
    state = _worker(job, share).state
    is_late = attempt is None and job.now_s >= job.regrouping.join_until_s and state is not WorkerState.READY
    return has_failed or is_late or state is WorkerState.REFUSED or job.gang.has_exited(share.place)


def regrouped(job: ShepherdState) -> RecordChange | None:
    """Others are to train: newcomers are ready, or members are gone, wished away, or have lost one another."""
    record, wished = job.decided, job.regrouping
    gone = _gone(job)
    has_parted = not gone and _may_try_again(job)
    gone = _untrained(job) if has_parted else gone
    left = [share for share in record.members if share.part not in gone and not job.gang.has_exited(share.place)]
    if job.gang.is_stopping or not left or (gone and not _has_heir(job, left)):
        return None
    joining = record.joining
    joins = [share.part for share in joining if _worker(job, share).state is WorkerState.READY]
    is_held_up = len(joins) < len(joining) or job.attempt is not None
    leaves = [] if is_held_up else [share.part for share in left if share.part in wished.leave]
    kept = [share for share in left if share.part not in leaves]
    if not kept or (record.world.has_trained and not any(_has_trained(job, share) for share in kept)):
        leaves = []
    joins = [] if is_held_up else joins
    if not (joins or leaves or gone or has_parted):
        return None
    told = _complaints(job) if has_parted else _obituary(job, gone)
    reason = wished.reason or AS_BEGUN if joins or leaves else told
    version = record.world.version if has_parted else 0
    return Regrouped(tuple(joins), tuple(leaves), gone, (), reason, job.utc_s, job.ran_s, version)


def _has_heir(job: ShepherdState, left: Sequence[Share]) -> bool:
    """Somebody is known to have the state of the training: whoever takes over has not heard of all yet."""
    return not job.decided.world.has_trained or any(_has_trained(job, share) for share in left)


def _has_trained(job: ShepherdState, share: Share) -> bool:
    return _worker(job, share).trains > 0


def _gone(job: ShepherdState) -> tuple[int, ...]:
    """Members that failed, and those that others miss: that ended as if all were done, stand still, or hang.

    Whoever waits for one that stands still tells so only after a while.  It is not given up for members without state.
    """
    world = job.decided.world
    tasks = [(share.part, task) for share in job.decided.members if (task := _task(job, share)) is not None]
    over = [part for part, task in tasks if task.stage is TaskStage.EXITED]
    live = {part: task for part, task in tasks if part not in over and not task.is_frozen}
    stuck = {part for part, task in live.items() if task.worker.is_silent} | _hanging(live)
    others = [task for part, task in tasks if part not in over and part not in stuck]
    if any(task.worker.problem for task in others):
        goes_on = not world.has_trained or any(task.worker.trains for task in others)
        return (*over, *(sorted(stuck) if goes_on else ()))
    return tuple(part for part, task in tasks if part in over and not is_clean(task))


def _hanging(live: Mapping[int, TaskStatus]) -> set[int]:
    """Members that at least as many others have waited for until that timed out: they run, and do not wait themselves.

    One whose agent has started again has not told yet how it stands.
    """
    waiting = [part for part, task in live.items() if task.worker.problem and not task.worker.is_silent]
    if not any(live[part].worker.has_timed_out for part in waiting):
        return set()
    idle = {
        part
        for part, task in live.items()
        if not task.worker.problem and task.worker.state in (WorkerState.READY, WorkerState.TRAINING)
    }
    return idle if len(idle) <= len(waiting) else set()


def is_over(job: ShepherdState) -> bool:
    """Whether the training has come to its end, and none is left but newcomers: nobody could take them in any more.

    Those that are members already say first that they wait for the others, who may not have been heard of yet.
    """
    tasks = [_task(job, share) for share in job.decided.members]
    left = [task for task in tasks if task is None or task.stage is not TaskStage.EXITED]
    clean = [task for task in tasks if task is not None and is_clean(task)]
    if not left:
        return bool(clean)
    has_trained = job.decided.world.has_trained or any(task.worker.trains for task in clean)
    is_waited = any(task is not None and task.worker.problem for task in left)
    return bool(clean) and has_trained and is_waited and not any(map(may_have_trained, left))


def _parted(job: ShepherdState) -> tuple[list[Share], bool]:
    """Members for which the present world came to nothing, though all live, and whether that is so of all of them.

    None where somebody is frozen or stands still, or is not heard of yet: whatever becomes of that comes first.
    """
    record = job.decided
    members = [share for share in record.members if not job.gang.has_exited(share.place)]
    tasks = [_task(job, share) for share in members]
    if any(task is None or task.is_frozen or task.worker.is_silent for task in tasks):
        return [], False
    parted = [share for share in members if _worker(job, share).failed >= record.world.version]
    return parted, len(parted) == len(members)


def _may_try_again(job: ShepherdState) -> bool:
    """All members have told so for a moment, or some for long, and not too soon after the last time."""
    parted, are_all = _parted(job)
    due_s = job.regrouping.parted_s + (PARTED_S if are_all else PARTED_SOME_S)
    return bool(parted) and job.now_s >= max(due_s, job.pacing.may_join_after_s)


def _untrained(job: ShepherdState) -> tuple[int, ...]:
    """Newcomers that a world of others who have trained could not take in: it is tried without them."""
    world, members = job.decided.world, job.decided.members
    if not (world.has_trained and any(_has_trained(job, share) for share in members)):
        return ()
    return tuple(share.part for share in members if not _has_trained(job, share))


def _complaints(job: ShepherdState) -> str:
    parted, _ = _parted(job)
    problems = (_worker(job, share).problem for share in parted)
    told = SOURCE_FILE.sub("", next(filter(None, problems), "a connection ended"))
    return f"its workers lost one another: {told}"


def _obituary(job: ShepherdState, gone: Sequence[int]) -> str:
    told = []
    for share in job.decided.members:
        task = _task(job, share)
        if share.part in gone and task is not None:
            how = [f"signal {each.signal}" if each.signal else f"code {each.exit_code}" for each in task.exits]
            still = "stands still" if task.worker.is_silent else "does not come to its step, for which others wait"
            ended = f"ended: {', '.join(how) or task.detail}" if task.stage is TaskStage.EXITED else still
            told.append(f"worker {share.part} on {share.node} {ended}")
    return "; ".join(told)


def trains(job: ShepherdState) -> RecordChange | None:
    """All members have switched."""
    record = job.decided
    workers = [_worker(job, share) for share in record.members if not job.gang.has_exited(share.place)]
    if is_settled(record) or not workers or any(each.trains < record.world.version for each in workers):
        return None
    return WorldTrains(record.world.version, max(each.pause_s for each in workers))


def parts_gone(job: ShepherdState) -> RecordChange | None:
    """No process is left of some that train no more."""
    parts = tuple(share.part for share in job.decided.leaving if job.gang.has_exited(share.place))
    return PartsGone(parts, job.ran_s) if parts else None


COMMANDS = (follow_joining, publish, stop_leaving, look_again)
CHANGES = (refused, joiners_given_up, joined, regrouped, trains, parts_gone)
"""What is due of a job that runs, in this order."""


def _task(job: ShepherdState, share: Share) -> TaskStatus | None:
    return job.gang.tasks.get(share.place)


def _worker(job: ShepherdState, share: Share) -> Worker:
    task = _task(job, share)
    return task.worker if task is not None else Worker()

"""`Node.validate` sees what is wrong with each machine that coordinates: a state is broken, and it says so."""

import pytest
from msgspec import structs

from swarmsched.api import EndReason, JobState
from swarmsched.holder.election import Candidacy
from swarmsched.holder.read_repair import AT_ONCE_MAX
from swarmsched.holders import Configuration
from swarmsched.ids import JobId, NodeId, Place
from swarmsched.jobs.update import ReadRequested, UpdateRequested
from swarmsched.ledger.message import HoldRequest, PreemptRequest
from swarmsched.negotiation.attempt import Attempt, Ranking
from swarmsched.negotiation.checkpointing import _Wish
from swarmsched.negotiation.gang import GangEnd
from swarmsched.negotiation.hold_desk import PatientHold
from swarmsched.node.clients import _Creation
from swarmsched.resources import Demand, Share
from tests.swarmsched.simulator.testing import Watched

ONE = NodeId("n000")
NOBODY = JobId("01hzzzzzzzabcdefghjkmnpqrs")


@pytest.fixture
def node():
    """A node that shepherds a job that runs, one that waits, and one that has ended."""
    watched = Watched(1, 1, 1)
    jobs = [watched.submit(1, "sleep", seconds, node=ONE) for seconds in ("1", "50", "50")]
    states = [JobState.ENDED, JobState.RUNNING, JobState.QUEUED]
    assert watched.swarm.run_until(lambda: [watched.state(job) for job in jobs] == states, 30.0)
    found = watched.swarm.hosts[ONE].node
    found.validate()
    return found


def job_in(node, state):
    return next(job for job in node._placement.shepherds.jobs.values() if job.record.state is state)


def asks_a_stranger(node):
    job = job_in(node, JobState.QUEUED)
    shares, ranking = (Share(ONE, 1),), Ranking("fifo", (1,))
    job.attempt = Attempt(job.record, 1, shares, ranking, job.commands.ids)
    job.attempt.begin(0.0)
    job.attempt.validate()
    job.attempt._pending[Place(NodeId("stranger"))] = job.attempt._pending[Place(ONE)]


def asks_victims_too_early(node):
    job = job_in(node, JobState.QUEUED)
    job.claim.make(job.record, (Share(ONE, 1),), {NOBODY: ONE}, Ranking("las", (1,)), 1.0, 0.0)
    job.claim.validate()
    job.claim._questions[NOBODY] = PreemptRequest(NOBODY, 1, job.job_id, ONE, "las", (1,), is_decided=False)


def keeps_a_place_that_nobody_wants(node):
    job_in(node, JobState.QUEUED).claim._shares = (Share(ONE, 1),)


def writes_from_an_old_record(node):
    job = job_in(node, JobState.QUEUED)
    record = job.decided
    job.writer.in_flight = UpdateRequested(1, record.job_id, record.configuration, (0, 0), record)


def awaits_a_change_that_is_not_coming(node):
    job_in(node, JobState.QUEUED).writer.wished_count += 1


def keeps_a_gang_that_is_over(node):
    job_in(node, JobState.QUEUED).gang.end = GangEnd(1.0, 0.0, EndReason.NONE)


def has_run_since_never(node):
    job_in(node, JobState.RUNNING).gang.running_since_s = float("inf")


def waits_for_a_port_without_a_booking(node):
    request = HoldRequest(NOBODY, 1, 1, 1, ONE, 1, Demand(), "fifo", (1,), wants_rendezvous=True)
    answer, _ = node._resources.ledger.hold(structs.replace(request, demand=Demand(gpus=9)), 0.0)
    node._resources.owner._desk._waiting[NOBODY, 1] = (ONE, answer)


def waits_under_another_name(node):
    request = HoldRequest(NOBODY, 1, 1, 1, ONE, 1, Demand(), "fifo", (1,), wants_rendezvous=True)
    node._resources.owner._desk._patient[NOBODY, 2] = PatientHold(request, 1.0)


def hears_of_a_report_to_come(node):
    (task,) = (each for each in node._resources.owner._tasks.values() if each.started_s < float("inf"))
    task.acknowledged = task.status.revision + 1


def asks_no_holder(node):
    node._resources.owner._line._lines.clear()


def watches_no_task(node):
    node._resources.owner._line._tasks.clear()


def stands_twice(node):
    candidacies = node._holding._election._candidacies
    candidacies |= {job: Candidacy((1, 1), 0.0, update_id=7) for job in (NOBODY, JobId(NOBODY[::-1]))}


def answers_under_another_number(node):
    node._records._asked[7] = ReadRequested(8, NOBODY, Configuration())


def is_gone_itself(node):
    node._holding._presence._gone[ONE] = (0.0, node.members(0.0)[0].status)


def asks_for_too_many_records(node):
    node._holding._read_repair._asked |= set(range(AT_ONCE_MAX + 1))


def commits_under_another_number(node):
    job = job_in(node, JobState.RUNNING)
    request = type("Request", (), {"command_id": 2, "job_id": job.job_id, "attempt": 1})()
    node._resources.checkpoints._wishes[1] = _Wish(1, request, 1.0, 1.0)


def recovers_for_nobody(node):
    node._holding._recovery._under_way[NOBODY] = []


def remembers_an_end_without_a_record(node):
    node._holding._retention._is_decided[NOBODY] = True


def has_an_untold_end_of_a_live_job(node):
    node._holding._retention._untold.accepted(job_in(node, JobState.RUNNING).job_id, 0.0)


def answers_a_client_twice(node):
    record = job_in(node, JobState.QUEUED).record
    node._clients._creations[record.job_id] = _Creation(record, [1, 1])


def has_untold_news(node):
    node._placement.shepherds.touched[NOBODY] = None


def sleeps_too_long(node):
    node._due_s[node._holding] = float("inf")


@pytest.mark.parametrize(
    "spoil",
    [
        asks_a_stranger,
        asks_victims_too_early,
        keeps_a_place_that_nobody_wants,
        writes_from_an_old_record,
        awaits_a_change_that_is_not_coming,
        keeps_a_gang_that_is_over,
        has_run_since_never,
        waits_for_a_port_without_a_booking,
        waits_under_another_name,
        hears_of_a_report_to_come,
        asks_no_holder,
        watches_no_task,
        stands_twice,
        answers_under_another_number,
        is_gone_itself,
        asks_for_too_many_records,
        commits_under_another_number,
        recovers_for_nobody,
        remembers_an_end_without_a_record,
        has_an_untold_end_of_a_live_job,
        answers_a_client_twice,
        has_untold_news,
        sleeps_too_long,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_a_machine_with_a_broken_state_does_not_pass(node, spoil):
    spoil(node)
    with pytest.raises(AssertionError):
        node.validate()

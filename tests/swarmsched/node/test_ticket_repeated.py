"""A user repeats a ticket at another holder while the first one is alive but slow: one job, one shepherd, one run."""

import pytest

from swarmsched.api import EndReason, JobSpec
from swarmsched.commands import CreateTicket, JobAccepted, Refused, SubmitJob
from swarmsched.resources import Demand
from tests.swarmsched.simulator.testing import Watched

ANSWER_S = 15.0


@pytest.fixture
def watched():
    return Watched(5, 2, 11)


def ticket_of(watched):
    """What is submitted with it, and the machines of its first two holders; ranks may run on any but the first."""
    ticket = watched.swarm.ask(watched.nodes[0], CreateTicket())
    first, second, _ = (watched.swarm.hosts[holder.node] for holder in ticket.holders)
    nodes = tuple(node for node in watched.nodes if node != first.node_id)
    spec = JobSpec(("sleep", "3"), ranks=2, demand=Demand(gpus=1), nodes=nodes)
    return SubmitJob(ticket.job_id, ticket.holders, spec), first, second


def repeat_until_accepted(watched, host, submit):
    """As the client library does: again with the same ticket while the outcome is unknown."""
    for _ in range(6):
        try:
            reply = watched.swarm.ask(host.node_id, submit, ANSWER_S)
        except TimeoutError:
            continue
        if isinstance(reply, JobAccepted):
            return reply
        assert isinstance(reply, Refused)
        assert reply.code in ("unavailable", "not_ready"), reply
    raise AssertionError(f"{host.node_id} never accepted {submit.job_id}")


def assert_one_job(watched, job_id):
    """It ran once, is over everywhere, and who woke up as its shepherd has soon heard of its successor."""
    watched.swarm.run_for(0.1)
    acting = [host for host in watched.swarm.up if host.node.is_shepherd(job_id)]
    assert len(acting) <= 1, [host.node_id for host in acting]
    watched.finish([job_id], 90.0)
    watched.swarm.run_for(5.0)
    records = [host.node.record(job_id) for host in watched.swarm.up]
    known = {(record.stamp, record.end_reason) for record in records if record is not None}
    assert len(known) == 1, known
    assert {reason for _, reason in known} == {EndReason.COMPLETED}
    record = watched.swarm.record(job_id)
    assert sum(host.tasks.start_count for host in watched.swarm.hosts.values()) == len(record.shares)
    assert record.restarts <= 1  # an attempt that was decided and never begun counts: its successor cannot know
    watched.assert_settled()
    watched.checks.finish()


@pytest.mark.parametrize("stops_for_s", [1.0, 5.0, 14.0, 30.0])
@pytest.mark.parametrize("stops_after_s", [0.0, 0.001, 0.002, 0.004, 0.01, 0.03])
def test_first_holder_stands_still_in_the_middle_of_its_submit(watched, stops_after_s, stops_for_s):
    submit, first, second = ticket_of(watched)
    watched.swarm.begin(first.node_id, submit)
    watched.swarm.run_for(stops_after_s)
    first.pause()
    watched.swarm.loop.call_later(stops_for_s, first.go_on)
    accepted = repeat_until_accepted(watched, second, submit)
    assert accepted.record.job_id == submit.job_id
    assert repeat_until_accepted(watched, first, submit).record.job_id == submit.job_id
    assert_one_job(watched, submit.job_id)

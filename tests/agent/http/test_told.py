"""An agent that has told of a job never tells an older state of it, whichever holders are left to be asked."""

import pytest

from swarm_agent.http.exchange import answer
from swarm_agent.http.told import Told, stamp_header, stamp_of
from swarmsched import ids
from swarmsched.api import JobState
from swarmsched.ids import NodeId
from tests.agent.http.testing import a_card, a_record, job_id

JOB = job_id(1, random_part="abcd")
HOLDERS = ("n2", "n3", "n9")


def a_lag(n2, n3):
    """n2 shepherds a running job at version 22, n3 holds version 21, at which it was about to start."""
    record = a_record(JOB, "n2", holders=HOLDERS, nodes=(("n2", 1),), epoch=5, version=22, state=JobState.RUNNING)
    n2.agent.put(record)
    n3.agent.put(record.updated(version=21, state=JobState.STARTING))
    return record


def lose(swarm, name):
    swarm.down.add(name)
    swarm.statuses[NodeId(name)] = "failed"


def stamp(document):
    return (document["epoch"], document["version"])


@pytest.mark.parametrize("reference", [JOB, ids.handle(JOB)])
async def test_what_was_told_is_told_again_when_only_an_older_record_can_be_had(swarm, n1, n2, n3, reference):
    a_lag(n2, n3)
    before = await n1.get(f"/v1/jobs/{reference}")
    lose(swarm, "n2")
    after = await n1.get(f"/v1/jobs/{reference}")
    assert (stamp(before), stamp(after)) == ((5, 22), (5, 22))
    assert (after["state"], after["source"], after["as_of"]) == ("running", "record", before["as_of"])
    assert after["staleness_seconds"] > before["staleness_seconds"]


async def test_of_an_old_state_nothing_is_said_that_depends_on_this_moment(swarm, n1, n2, n3):
    a_lag(n2, n3)
    await n1.get(f"/v1/jobs/{JOB}")
    lose(swarm, "n2")
    document = await n1.get(f"/v1/jobs/{JOB}")
    assert (document["has_majority"], document["survives_deaths"]) == (False, None)
    assert [share["is_paused"] for share in document["nodes"]] == [None]


async def test_a_holder_that_knows_more_is_asked_before_anything_is_told_again(swarm, n1, n2, n3):
    record = a_lag(n2, n3)
    n1.agent.known_cards = [a_card(record)]
    await n1.get(f"/v1/jobs/{JOB}")
    n2.agent.put(record.updated(version=20))
    n3.agent.put(record.updated(version=23))
    document = await n1.get(f"/v1/jobs/{JOB}")
    assert (stamp(document), document["staleness_seconds"]) == ((5, 23), 0.0)


async def test_the_own_held_copy_may_be_too_old_as_well(swarm, n1, n2, n3):
    record = a_lag(n2, n3)
    await n1.get(f"/v1/jobs/{JOB}")
    n1.agent.put(record.updated(version=21))
    lose(swarm, "n2")
    lose(swarm, "n3")
    assert stamp(await n1.get(f"/v1/jobs/{JOB}")) == (5, 22)


async def test_an_agent_that_has_told_nothing_tells_what_it_can_have(swarm, n1, n2, n3):
    a_lag(n2, n3)
    await n1.get(f"/v1/jobs/{JOB}")
    lose(swarm, "n2")
    assert stamp(await n3.get(f"/v1/jobs/{JOB}")) == (5, 21)


async def test_a_new_epoch_is_newer_whatever_its_version(swarm, n1, n2, n3):
    a_lag(n2, n3)
    await n1.get(f"/v1/jobs/{JOB}")
    lose(swarm, "n2")
    n3.agent.change(JOB, shepherd=NodeId("n3"), epoch=6, version=3)
    assert stamp(await n1.get(f"/v1/jobs/{JOB}")) == (6, 3)


async def test_of_what_was_told_in_part_a_part_is_told_again_only_if_the_whole_is_there(swarm, n1, n2, n3):
    record = a_lag(n2, n3)
    await n1.get(f"/v1/jobs/{JOB}")
    await n1.get(f"/v1/jobs/{JOB}?fields=state")
    n2.agent.put(record.updated(version=20, state=JobState.QUEUED))
    assert await n1.get(f"/v1/jobs/{JOB}?fields=state") == {"id": JOB, "state": "running"}
    n2.agent.put(record.updated(version=24, state=JobState.STOPPING))
    assert await n1.get(f"/v1/jobs/{JOB}?fields=state") == {"id": JOB, "state": "stopping"}
    n2.agent.put(record)
    problem = await n1.get(f"/v1/jobs/{JOB}?fields=state", 503)
    assert problem["code"] == "shepherd_unreachable"
    assert "knows an old state: n1 has told of epoch 5, version 24 of it" in problem["detail"]


async def test_a_wait_that_is_not_met_does_not_go_back_either(swarm, n1, n2, n3):
    a_lag(n2, n3)
    await n1.get(f"/v1/jobs/{JOB}")
    lose(swarm, "n2")
    waited = await n1.get(f"/v1/jobs/{JOB}/wait?timeout=0")
    assert (waited["met"], stamp(waited["job"])) == (False, (5, 22))


def whole(epoch, version):
    document = {"epoch": epoch, "version": version, "staleness_seconds": 0.0}
    return answer(document, headers=stamp_header((epoch, version)))


def test_only_the_jobs_that_were_asked_for_last_are_remembered():
    told, jobs = Told(jobs_limit=2), [job_id(number) for number in (1, 2, 3)]
    for job in (jobs[0], jobs[1], jobs[0], jobs[2]):
        told.keep(job, whole(1, 2), is_whole=True)
    assert [told.stamp(job) for job in jobs] == [(1, 2), (0, 0), (1, 2)]
    assert [told.is_older(job, whole(1, 1)) for job in jobs] == [True, False, True]


@pytest.mark.parametrize("text", ["", "5", "5.", ".5", "a.b", "5.-1", "5.2.1"])
def test_a_stamp_that_makes_no_sense_is_none(text):
    assert stamp_of(answer({}, headers={"X-Swarm-Stamp": text})) is None

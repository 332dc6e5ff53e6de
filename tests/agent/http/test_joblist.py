"""Lists of jobs over the whole swarm."""

import pytest

from swarmsched.api import EndReason, JobSpec, JobState
from tests.agent.http.testing import SUBMITTED_UTC_S, a_card, a_record, a_task, job_id


def put(desk, number, **changes):
    spec = JobSpec(command=("true",), name=changes.pop("name", ""), user=changes.pop("user", ""))
    submitted = SUBMITTED_UTC_S + number
    return desk.agent.put(
        a_record(job_id(number), desk.agent.config.name, spec=spec, submitted_utc_s=submitted, **changes)
    )


def ids_of(document):
    return [each["id"] for each in document["items"]]


async def test_live_jobs_of_all_agents_newest_first(n1, n2, n3):
    for number, desk in enumerate((n1, n2, n3, n1)):
        put(desk, number)
    put(n2, 9, state=JobState.ENDED)
    for desk in (n1, n2, n3):
        document = await desk.get("/v1/jobs")
        assert ids_of(document) == [job_id(number) for number in (3, 2, 1, 0)]
        assert (document["total"], document["next_cursor"], document["silent_nodes"]) == (4, None, [])
    assert ids_of(await n1.get("/v1/jobs?all=1"))[0] == job_id(9)


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ("user=ann", [2, 0]),
        ("name=b", [1]),
        ("state=running", [1]),
        ("state=ended,running", [3, 1]),
        ("state=failed", [3]),
        ("state=queued,timeout", [2, 0]),
        ("user=eve", []),
    ],
)
async def test_filters(n1, n2, query, numbers):
    put(n1, 0, user="ann")
    put(n2, 1, user="bob", name="b", state=JobState.RUNNING)
    put(n2, 2, user="ann")
    put(n1, 3, user="bob", state=JobState.ENDED, end_reason=EndReason.FAILED)
    assert ids_of(await n1.get(f"/v1/jobs?{query}")) == [job_id(number) for number in numbers]


async def test_pages_give_every_job_once_at_whichever_agent(n1, n2, n3):
    for number in range(23):
        put((n1, n2, n3)[number % 3], number)
    found, cursor, desks = [], "", [n1, n2, n3]
    while cursor is not None:
        desks.append(desks.pop(0))
        document = await desks[0].get(f"/v1/jobs?limit=5&cursor={cursor}")
        assert (len(document["items"]) <= 5, document["total"]) == (True, 23)
        found += ids_of(document)
        cursor = document["next_cursor"]
    assert found == [job_id(number) for number in reversed(range(23))]


async def test_a_job_that_several_agents_know_is_counted_once_on_every_page(n1, n2, n3):
    for number in range(9):
        for desk in (n1, n2, n3):
            put(desk, number, state=JobState.ENDED)
    cursor, totals = "", []
    while cursor is not None:
        document = await n2.get(f"/v1/jobs?all=1&limit=4&cursor={cursor}")
        totals.append(document["total"])
        cursor = document["next_cursor"]
    assert totals == [9, 9, 9]


async def test_fields_trim_items(n1, n2):
    put(n2, 1, name="x")
    document = await n1.get("/v1/jobs?fields=name,state")
    assert document["items"] == [{"id": job_id(1), "name": "x", "state": "queued"}]


async def test_jobs_of_a_silent_agent_are_shown_from_gossip(n1, n3, swarm):
    record = put(n3, 1, state=JobState.RUNNING)
    n1.agent.known_cards = [a_card(record, age_s=3.0)]
    assert (await n1.get("/v1/jobs"))["items"][0]["source"] == "record"
    swarm.down.add("n3")
    document = await n1.get("/v1/jobs")
    assert document["silent_nodes"] == ["n3"]
    assert [(each["source"], each["staleness_seconds"]) for each in document["items"]] == [("card", 3.0)]
    assert document["staleness_seconds"] == 3.0


async def test_a_card_of_a_job_that_its_shepherd_has_ended_is_not_shown(n1, n3):
    record = put(n3, 1, state=JobState.ENDED)
    n1.agent.known_cards = [a_card(record)]
    assert ids_of(await n1.get("/v1/jobs")) == []


async def test_of_two_copies_the_newer_is_shown(n1, n2):
    old = put(n1, 1, state=JobState.ENDED, version=3)
    n2.agent.put(a_record(old.job_id, "n2", submitted_utc_s=old.submitted_utc_s, epoch=2, version=4))
    (job,) = (await n1.get("/v1/jobs?all=1"))["items"]
    assert (job["epoch"], job["state"]) == (2, "queued")


async def test_queues_and_status_count_live_jobs(n1, n2):
    put(n1, 1, state=JobState.RUNNING)
    put(n2, 2)
    put(n2, 3, state=JobState.ENDED)
    (queue,) = (await n2.get("/v1/queues"))["items"]
    assert queue["jobs"] == {"queued": 1, "starting": 0, "running": 1, "stopping": 0}
    status = await n1.get("/v1/status")
    assert (status["jobs"]["running"], status["members"]["alive"], status["gpus"]["total"]) == (1, 3, 6)
    assert (status["gpus"]["leased"], status["gpus"]["draining"]) == (3, 0)


async def test_gpus_of_a_node_that_drains_are_not_said_to_be_leased(n1):
    n1.agent.draining.add("n2")
    gpus = (await n1.get("/v1/status"))["gpus"]
    assert (gpus["total"], gpus["free"], gpus["leased"], gpus["draining"]) == (6, 3, 2, 1)


async def test_each_node_tells_in_lists_too_whether_its_ranks_are_frozen(n1, n2, n3, swarm):
    nodes = (("n1", 1), ("n2", 1), ("n3", 1))
    record = put(n1, 1, state=JobState.RUNNING, nodes=nodes)
    n1.agent.known_tasks = [a_task(record.job_id, record.attempt), a_task(record.job_id, record.attempt + 1)]
    n2.agent.known_tasks = [a_task(record.job_id, record.attempt, is_frozen=True)]
    swarm.down.add("n3")
    for desk, query in ((n1, ""), (n2, ""), (n2, "?fields=nodes")):
        (job,) = (await desk.get(f"/v1/jobs{query}"))["items"]
        assert [each["is_paused"] for each in job["nodes"]] == [False, True, None]
    assert "nodes" not in (await n2.get("/v1/jobs?fields=state"))["items"][0]

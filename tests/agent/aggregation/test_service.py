"""The agent's side of its aggregator, with the real child: it is there while something is hosted, and comes back."""

import asyncio
import os
import signal

import pytest

from swarm_agent.aggregation import service
from swarm_agent.task.tasksocket import Declined
from swarmsched.events import AggregationRead
from swarmsched.ids import JobId, TaskKey
from tests.agent.aggregation.alone import AloneAggregation

KEY = TaskKey(JobId("00000000000000000000000001"), 3)
OTHER = TaskKey(JobId("00000000000000000000000002"), 1)
WAIT_S = 20.0
RULE = {"rate": 1.0, "momentum": 0.0, "is_quantised": True}
REQUEST = {"start": 0, "size": 5_000, "layout": "abc", "rule": RULE, "learners": ["0", "1"], "quorum": 0}
REQUEST |= {"key": "k", "known": ""}


@pytest.fixture
async def aggregation():
    made = AloneAggregation("127.0.0.1", lambda key: key.attempt != 9, available_bytes=lambda: 1 << 30)
    made.start()
    yield made
    await made.stop()


async def until(is_so):
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.02)


async def test_a_child_is_there_while_ranges_are_hosted(aggregation):
    first = await aggregation.handle(KEY, dict(REQUEST))
    second = await aggregation.handle(OTHER, dict(REQUEST))
    assert first == second
    assert first["address"].startswith("127.0.0.1:")
    assert len(first["fingerprint"]) == 64
    await until(lambda: len(aggregation.told.get("shards", ())) == 2)
    aggregation.forget(KEY)
    await until(lambda: [each["job"] for each in aggregation.told["shards"]] == [OTHER.job_id])
    aggregation.forget(OTHER)
    await until(lambda: aggregation._running is None)
    assert aggregation.starts == 1
    assert await aggregation.handle(KEY, dict(REQUEST)) != first, "another process, with a certificate of its own"


async def test_one_that_is_killed_is_started_anew_and_ranks_hear_where(aggregation):
    first = await aggregation.handle(KEY, dict(REQUEST))
    asking = asyncio.create_task(aggregation.handle(KEY, {**REQUEST, "known": first["address"]}))
    await asyncio.sleep(0.1)
    assert not asking.done()
    os.kill(aggregation._child.pid, signal.SIGKILL)
    second = await asyncio.wait_for(asking, WAIT_S)
    assert second["address"] != first["address"]
    await until(lambda: aggregation.told.get("shards"))
    assert aggregation.told["shards"][0]["plan"] == [3, 1]


async def test_what_is_asked_again_is_told_again_without_another_shard(aggregation, monkeypatch):
    first = await aggregation.handle(KEY, dict(REQUEST))
    monkeypatch.setattr(service, "ANSWER_S", 0.1)
    again = await aggregation.handle(KEY, {**REQUEST, "known": first["address"]})
    assert again == first
    await until(lambda: len(aggregation.told.get("shards", ())) == 1)


@pytest.mark.parametrize(
    ("changed", "code", "named"),
    [
        ({"size": 0}, "bad_outer", "size 0"),
        ({"size": True}, "bad_outer", "size True"),
        ({"start": -1}, "bad_outer", "start -1"),
        ({"learners": []}, "bad_outer", "learners"),
        ({"learners": ["a", 3]}, "bad_outer", "learners"),
        ({"layout": ""}, "bad_outer", "layout ''"),
        ({"rule": []}, "bad_outer", "rule"),
        ({"rule": {**RULE, "rate": "x"}}, "bad_outer", "rate 'x'"),
        ({"rule": {**RULE, "momentum": 1.0}}, "bad_outer", "momentum 1.0"),
        ({"key": None}, "bad_outer", "key None"),
        ({"quorum": 1 << 40}, "bad_outer", "quorum"),
        ({"plan": [3]}, "bad_outer", "plan a list"),
        ({"plan": [3, -1]}, "bad_outer", "plan[1] -1"),
        ({"size": 1 << 30}, "no_room", "size 1073741824 is not hosted here: it takes"),
    ],
)
async def test_what_cannot_be_hosted_is_refused_by_name_and_starts_nothing(aggregation, changed, code, named):
    with pytest.raises(Declined) as refused:
        await aggregation.handle(KEY, {**REQUEST, **changed})
    assert refused.value.code == code
    assert named in refused.value.problem
    assert refused.value.remedy
    assert aggregation.starts == 0
    assert aggregation._running is None


async def test_a_task_that_is_over_and_a_range_of_another_rank_are_refused(aggregation):
    with pytest.raises(Declined, match="this task is over"):
        await aggregation.handle(TaskKey(KEY.job_id, 9), dict(REQUEST))
    await aggregation.handle(KEY, dict(REQUEST))
    with pytest.raises(Declined, match="another rank of this job"):
        await aggregation.handle(TaskKey(KEY.job_id, KEY.attempt, 2), dict(REQUEST))


async def test_a_newer_plan_goes_to_the_same_shard_whichever_rank_of_the_node_asks(aggregation):
    """The range goes from one part of a gang that changes to another; the former one has no say in it any more."""
    one, other = (TaskKey(KEY.job_id, KEY.attempt, part) for part in (1, 2))
    first = await aggregation.handle(one, {**REQUEST, "plan": [3, 1]})
    assert await aggregation.handle(other, {**REQUEST, "plan": [3, 2], "learners": ["1", "2"]}) == first
    await until(lambda: [each["plan"] for each in aggregation.told.get("shards", ())] == [[3, 2]])
    with pytest.raises(Declined, match="another rank of this job"):
        await aggregation.handle(one, {**REQUEST, "plan": [3, 1]})
    with pytest.raises(Declined, match=r"hosted under \[3, 2\]"):
        await aggregation.handle(other, {**REQUEST, "plan": [3, 1]})
    aggregation.forget(one)
    assert len(aggregation.desk.lender.shards) == 1
    assert await aggregation.handle(other, {**REQUEST, "plan": [3, 2], "drop": True}) == {"ok": True}
    await until(lambda: not aggregation.desk.lender.shards)
    await until(lambda: aggregation._running is None)


async def test_one_that_does_not_start_is_told_of(monkeypatch):
    monkeypatch.setattr(service, "ANSWER_S", 0.3)
    broken = AloneAggregation("127.0.0.1", lambda key: True, argv=("/bin/false",))
    broken.start()
    with pytest.raises(Declined, match="no aggregator has answered"):
        await broken.handle(KEY, dict(REQUEST))
    await broken.stop()


async def test_what_the_child_has_of_the_memory_may_be_given_again(aggregation):
    """Its 25 MB are missing in what is available, and are no less for shards."""
    told = []

    def post(event):
        told.append(event)
        aggregation._take(event)

    aggregation._post = post
    await aggregation.handle(KEY, dict(REQUEST))
    aggregation._tell_core()
    assert isinstance(told[-1], AggregationRead)
    assert (1 << 30) + (10 << 20) < told[-1].memory_bytes < (1 << 30) + (200 << 20)
    assert service.resident_bytes(0) == 0

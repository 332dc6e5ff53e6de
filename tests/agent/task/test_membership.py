"""Workers of an elastic job at their agent: what is kept of them, when they are answered, and what is refused."""

import asyncio
import json
import math
import random
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from swarm_agent.task import membership as module
from swarm_agent.task.account import Account
from swarm_agent.task.membership import WORKERS_MAX, TaskMemberships
from swarm_agent.task.tasksocket import PER_SECOND_MOST, Declined, SocketFolder, TaskSockets
from swarmsched.ids import TaskKey, make_job_id
from swarmsched.wire.codec import encode_value
from swarmsched.world import Worker
from tests.agent.supervision.testing import make_order

KEY = TaskKey(make_job_id(0.0, random.Random(1)), 1)
OTHER = (make_job_id(0.0, random.Random(2)), 1)
WHO = {"worker": "a", "address": "10.0.0.1:4711", "version": 0, "step": -1, "layout": "ab12", "state": "ready"}
FURTHER = ("trains", "failed", "problem", "pause_s", "busy_s", "has_timed_out", "nonsense")
PLAN = {"version": 1, "epoch": 3, "members": [{"worker": "a", "address": "10.0.0.1:4711"}]}


@pytest.fixture
def desk() -> TaskMemberships:
    return TaskMemberships(lambda key: make_order("true") if key == KEY else None, now=lambda: 5.0)


async def asking(desk: TaskMemberships, **request) -> asyncio.Task:
    """A request that is known by now."""
    task = asyncio.create_task(desk.handle(KEY, WHO | request))
    await asyncio.sleep(0)
    return task


async def test_a_worker_is_answered_as_soon_as_there_is_a_plan_that_it_does_not_know(desk) -> None:
    waiting = await asking(desk)
    assert not waiting.done()
    desk.publish(KEY, PLAN)
    assert await waiting == {"ok": True, "plan": PLAN}
    assert await desk.handle(KEY, WHO) == {"ok": True, "plan": PLAN}
    informed = await asking(desk, version=1)
    assert not informed.done()
    newer = PLAN | {"version": 2}
    desk.publish(KEY, newer)
    assert await informed == {"ok": True, "plan": newer}


async def test_without_a_plan_it_is_told_so_after_a_while(desk, monkeypatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    assert await desk.handle(KEY, WHO) == {"ok": True, "plan": None}


async def test_the_last_word_of_each_worker_is_kept(desk) -> None:
    first = await asking(desk)
    second = await asking(desk, worker="b", state="training", trains=4, failed=4, step=17, problem="p" * 1_000)
    assert set(desk.members(KEY)) == {"a", "b"}
    told = desk.members(KEY)["b"]
    assert (told.state, told.trains, told.step, len(told.problem), told.heard_s) == ("training", 4, 17, 500, 5.0)
    assert (told.failed, desk.members(KEY)["a"].failed) == (4, 0), "of a script that an earlier version started"
    assert await desk.handle(KEY, WHO | {"state": "left", "step": 9}) == {"ok": True, "plan": None}
    assert (desk.members(KEY)["a"].state, desk.members(KEY)["a"].step) == ("left", 9)
    assert desk.members(OTHER) == {}
    desk.publish(KEY, PLAN)
    await asyncio.gather(first, second)


async def test_a_worker_that_asks_anew_has_its_older_request_answered(desk) -> None:
    """Otherwise each word of a worker would hold a connection until its time is over."""
    older = await asking(desk)
    newer = await asking(desk, step=3)
    assert await older == {"ok": True, "plan": None}
    assert not newer.done()
    desk.forget(KEY)
    assert await newer == {"ok": True, "plan": None}
    assert desk.members(KEY) == {}


async def test_of_a_worker_that_asks_no_more_it_is_told_that_it_stands_still(monkeypatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    monkeypatch.setattr(module, "SILENT_S", 0.05)
    told = []
    desk = TaskMemberships(lambda key: make_order("true"), lambda key, standing: told.append(standing.is_silent))
    worker = {"worker": str(KEY.part), "state": "training"}
    for _ in range(10):
        await desk.handle(KEY, WHO | worker)
    assert told == [False]
    await asyncio.sleep(0.2)
    assert told == [False, True]
    assert desk.members(KEY)[str(KEY.part)].is_silent
    await desk.handle(KEY, WHO | worker)
    assert told == [False, True, False], "it goes on"
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    older, newer = await asking(desk, **worker), await asking(desk, **worker)
    await older
    await asyncio.sleep(0.1)
    assert told == [False, True, False], "the newer one waits for its answer"
    await newer
    await desk.handle(KEY, WHO | worker | {"state": "left"})
    await asyncio.sleep(0.2)
    assert told == [False, True, False, False], "nobody waits for one that leaves"


async def test_a_worker_that_stood_still_before_its_agent_started_again_is_told_of_too(monkeypatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    monkeypatch.setattr(module, "SILENT_S", 0.05)
    told = []
    desk = TaskMemberships(lambda key: make_order("true"), lambda key, standing: told.append((key, standing.is_silent)))
    asks = TaskKey(KEY.job_id, KEY.attempt, 2)
    desk.expect(KEY)
    desk.expect(asks)
    await desk.handle(asks, WHO | {"worker": "2", "state": "left"})
    await asyncio.sleep(0.2)
    assert told == [(asks, False), (KEY, True)]


async def test_of_a_task_that_is_over_nothing_is_told(monkeypatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    monkeypatch.setattr(module, "SILENT_S", 0.01)
    told = []
    desk = TaskMemberships(lambda key: make_order("true"), lambda key, standing: told.append(standing))
    await desk.handle(KEY, WHO | {"worker": str(KEY.part)})
    desk.forget(KEY)
    await asyncio.sleep(0.1)
    assert [standing.is_silent for standing in told] == [False]


async def test_one_can_wait_for_workers(desk) -> None:
    waiting = asyncio.create_task(desk.wait(KEY, lambda known: "a" in known and known["a"].step == 2))
    first = await asking(desk, step=1)
    assert not waiting.done()
    second = await asking(desk, step=2)
    await waiting
    desk.forget(KEY)
    await asyncio.gather(first, second)


async def test_versions_of_plans_only_grow(desk) -> None:
    desk.publish(KEY, PLAN | {"version": 2})
    desk.publish(KEY, PLAN | {"version": 2})
    for late in (PLAN, PLAN | {"version": 2, "epoch": 9}):
        desk.publish(KEY, late)
    assert (await desk.handle(KEY, WHO))["plan"] == PLAN | {"version": 2}


BAD = [
    ("worker", "", "worker ''"),
    ("worker", "a b", "worker 'a b'"),
    ("worker", None, "worker None"),
    ("address", "10.0.0.1", "address '10.0.0.1'"),
    ("version", -1, "version -1"),
    ("version", True, "version True"),
    ("version", 2**32, "version 4294967296"),
    ("trains", 2**53, "trains 9007199254740992"),
    ("step", "3", "step '3'"),
    ("step", 10**400, "step a number of many digits"),
    ("trains", 1.5, "trains 1.5"),
    ("layout", "XYZ", "layout 'XYZ'"),
    ("state", "asleep", "state 'asleep'"),
    ("problem", [1], "problem a list"),
    ("has_timed_out", 1, "has_timed_out 1"),
    ("failed", -1, "failed -1"),
    ("secret", "no@hex", "secret 'no@hex'"),
]


async def test_the_secret_of_a_store_goes_with_its_address_and_stands_beside_it_in_plans(desk) -> None:
    """So that workers of the first version find the address where it was."""
    waiting = await asking(desk, secret="ab01")
    address = desk.members(KEY)["a"].address
    assert address == "ab01@10.0.0.1:4711"
    assert module.member("a", address) == {"worker": "a", "address": "10.0.0.1:4711", "secret": "ab01"}
    assert module.member("a", "[::1]:80") == {"worker": "a", "address": "[::1]:80"}
    waiting.cancel()


@pytest.mark.parametrize(("name", "value", "problem"), BAD, ids=[problem for _, _, problem in BAD])
async def test_what_cannot_be_is_refused_by_name_and_changes_nothing(desk, name, value, problem) -> None:
    with pytest.raises(Declined) as refusal:
        await desk.handle(KEY, WHO | {name: value})
    assert (refusal.value.code, refusal.value.problem) == ("bad_member", f"{problem} cannot be")
    assert refusal.value.remedy
    assert desk.members(KEY) == {}


async def test_a_task_that_is_over_and_one_worker_too_many_are_refused(desk) -> None:
    with pytest.raises(Declined, match="this task is over"):
        await desk.handle(OTHER, WHO)
    for number in range(WORKERS_MAX):
        await desk.handle(KEY, WHO | {"worker": f"w{number}", "state": "left"})
    with pytest.raises(Declined, match="64 workers already"):
        await desk.handle(KEY, WHO | {"state": "left"})
    assert len(desk.members(KEY)) == WORKERS_MAX


async def test_what_was_taken_fits_into_what_other_agents_are_told() -> None:
    """Drawn from a seed, with the ends of every range: another agent must be able to read each word of a worker."""
    told: list[Worker] = []
    desk = TaskMemberships(lambda key: make_order("true"), lambda key, worker: told.append(worker), count(0.0).__next__)
    rng = random.Random(13)
    values: list[object] = [
        None,
        True,
        -1,
        0,
        1,
        2**32 - 1,
        2**32,
        2**53,
        10**30,
        0.5,
        1e6,
        1e7,
        -0.0,
        math.nan,
        math.inf,
        "",
        "a",
    ]
    values += ["h:1", "h" * 249 + ":65535", "\0\n\ud800\U0001f600" * 500, "ab" * 32, "left", "refused", "1", [], {}]
    taken = 0
    for _ in range(5_000):
        request = WHO | {"worker": str(KEY.part), "state": "left"}
        request |= {name: rng.choice(values) for name in rng.sample([*request, *FURTHER], rng.randrange(1, 4))}
        with suppress(Declined):
            await asyncio.wait_for(desk.handle(KEY, request), 0.0001)
            taken += 1
    assert taken > 100
    assert len(told) > 100
    for worker in told:
        encode_value(Worker, worker)


async def test_a_word_that_no_message_carries_is_refused_and_changes_nothing(desk, monkeypatch) -> None:
    monkeypatch.setattr(module, "VERSION_MOST", 2**60)
    with pytest.raises(Declined, match="other agents cannot be told of it: Worker: trains"):
        await desk.handle(KEY, WHO | {"trains": 2**40})
    assert desk.members(KEY) == {}


async def test_a_worker_that_asks_all_the_time_leaves_nothing_and_is_told_of_once_a_second() -> None:
    """One timer at most, whatever it says of itself; what others hear in the end is its last word."""
    told: list[Worker] = []
    clock = [0.0]
    desk = TaskMemberships(lambda key: make_order("true"), lambda key, worker: told.append(worker), lambda: clock[0])
    who = WHO | {"worker": str(KEY.part), "state": "left", "problem": "\U0001f600" * 500}
    loop = asyncio.get_running_loop()

    def timers() -> int:
        return len([each for each in vars(loop)["_scheduled"] if not each.cancelled()])

    before = timers()
    for number in range(2_000):
        clock[0] += 0.01
        await desk.handle(KEY, who | {"pause_s": number, "state": "left"})
        if number % 5 == 0:
            waiting = await asking(desk, **(who | {"state": "training"}))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    assert len(told) <= 20 + module.NEWS_AT_ONCE
    assert timers() <= before + 2
    clock[0] += 2.0
    await desk.handle(KEY, who | {"pause_s": 7.0, "state": "left"})
    assert told[-1].pause_s == 7.0
    desk.forget(KEY)
    assert timers() <= before


async def test_the_last_word_of_a_worker_is_told_even_if_it_says_no_more(monkeypatch) -> None:
    monkeypatch.setattr(module, "NEWS_PER_S", 50.0)
    told: list[float] = []
    desk = TaskMemberships(lambda key: make_order("true"), lambda key, worker: told.append(worker.pause_s))
    for number in range(2 * module.NEWS_AT_ONCE):
        await desk.handle(KEY, WHO | {"worker": str(KEY.part), "state": "left", "pause_s": number})
    assert told[-1] < 2 * module.NEWS_AT_ONCE - 1
    async with asyncio.timeout(5):
        while told[-1] < 2 * module.NEWS_AT_ONCE - 1:
            await asyncio.sleep(0.01)


async def test_requests_without_a_pause_are_refused(desk, monkeypatch) -> None:
    monkeypatch.setattr(module, "PENALTY_S", 0.0)
    for _ in range(PER_SECOND_MOST):
        await desk.handle(KEY, WHO | {"state": "left"})
    with pytest.raises(Declined, match="more than 100 requests in a second"):
        await desk.handle(KEY, WHO | {"state": "left"})


async def test_plans_come_through_the_task_socket(desk, tmp_path: Path) -> None:
    folder = SocketFolder(tmp_path)
    folder.path = tmp_path / "s"
    sockets = TaskSockets(folder)
    sockets.on_request("member", desk.handle)
    sockets.start()
    sockets.open(KEY, "secret", Account("me", "/", "/bin/sh"))
    reader, writer = await asyncio.open_unix_connection(sockets.path(KEY))
    writer.write(json.dumps({"v": 1, "type": "member", "token": "secret"} | WHO).encode() + b"\n")
    await desk.wait(KEY, lambda known: "a" in known)
    desk.publish(KEY, PLAN)
    assert json.loads(await reader.readline()) == {"v": 1, "type": "member", "ok": True, "plan": PLAN}
    writer.close()
    sockets.stop()

import asyncio

from swarm_agent.eventlog import EventLog
from swarmsched.effects import Announce
from tests.agent.testing import wait_until


def announce(number: int) -> Announce:
    return Announce("test.happened", f"number {number}")


def test_only_the_newest_events_are_kept_and_sequences_go_on() -> None:
    log = EventLog(limit=3)
    for number in range(5):
        log.append(announce(number), 100.0 + number)

    assert [event.sequence for event in log.since()] == [3, 4, 5]
    assert [event.text for event in log.since(4)] == ["number 4"]


async def test_followers_get_old_events_then_new_ones_each_once() -> None:
    log = EventLog()
    log.append(announce(0), 0.0)
    seen: list[list[int]] = [[], []]

    async def follow(index: int) -> None:
        async for event in log.follow():
            seen[index].append(event.sequence)

    followers = [asyncio.ensure_future(follow(index)) for index in range(2)]
    await wait_until(lambda: seen == [[1], [1]])
    log.append(announce(1), 1.0)
    log.append(announce(2), 2.0)
    await wait_until(lambda: seen == [[1, 2, 3], [1, 2, 3]])
    for follower in followers:
        follower.cancel()
    await asyncio.gather(*followers, return_exceptions=True)


async def test_a_follower_that_gives_up_does_not_disturb_the_others() -> None:
    log = EventLog()
    first, second = log.follow(), log.follow()
    waiting = [asyncio.ensure_future(anext(each)) for each in (first, second)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    log.append(announce(0), 0.0)

    assert (await waiting[1]).sequence == 1

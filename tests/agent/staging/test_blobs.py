"""Blobs by content: verified when stored, removed by use, fetched from peers."""

import asyncio
import errno
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm_agent.staging import blobs as blobs_module
from swarm_agent.staging import fetch
from swarm_agent.staging.blobs import EVICTIONS_AT_ONCE, IMPORT_BYTES, BlobError, BlobStore, NotStored
from swarm_agent.staging.fetch import BATCH, BlobFetcher, NotReached
from swarmsched.errors import AgentUnreachable, RemoteProtocolError, SwarmError
from swarmsched.ids import NodeId
from tests.agent.supervision.testing import LoneAgent, Network

N1, N2, N3 = NodeId("n1"), NodeId("n2"), NodeId("n3")


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def content(blobs: BlobStore, digest: str) -> bytes:
    return b"".join([piece async for piece in blobs.read(digest)])


def loaded(folder: Path, *limit_bytes: int) -> BlobStore:
    blobs = BlobStore(folder, *limit_bytes)
    blobs.load()
    return blobs


async def test_a_blob_is_found_again_by_another_life(tmp_path: Path) -> None:
    digest = digest_of(b"hello world")
    blobs = BlobStore(tmp_path)
    assert blobs.missing([digest, digest]) == (digest,)
    assert await blobs.put(digest, pieces(b"hello ", b"world")) == 11
    assert blobs.missing([digest]) == ()
    assert await content(BlobStore(tmp_path), digest) == b"hello world"


async def test_content_with_another_digest_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    with pytest.raises(BlobError, match="has another digest"):
        await blobs.put(digest_of(b"right"), pieces(b"wrong"))
    assert blobs.held_bytes == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63, "/" + "0" * 63])
async def test_a_name_that_is_no_digest_is_refused(tmp_path: Path, digest: str) -> None:
    blobs = BlobStore(tmp_path)
    with pytest.raises(BlobError, match="no SHA-256"):
        await blobs.put(digest, pieces(b""))
    assert blobs.path(digest) is None


async def test_a_stream_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"part"
        raise ConnectionResetError

    with pytest.raises(BlobError):
        await BlobStore(tmp_path).put(digest_of(b"whole"), broken())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("step", ["write", "finish"])
async def test_who_gives_up_while_a_thread_writes_leaves_all_or_nothing(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, writes = b"x" * 2 * IMPORT_BYTES, threading.Event()
    done = getattr(blobs_module._Draft, step)

    def slow(*arguments: object) -> None:
        writes.set()
        time.sleep(0.2)
        done(*arguments)

    monkeypatch.setattr(blobs_module._Draft, step, slow)
    blobs = loaded(tmp_path)
    putting = asyncio.create_task(blobs.put(digest_of(data), pieces(data)))
    await asyncio.to_thread(writes.wait)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    kept = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert kept == ([digest_of(data)] if step == "finish" else [])
    assert blobs.held_bytes == len(data) * len(kept)


async def test_a_blob_above_the_limit_is_refused_while_it_arrives(tmp_path: Path) -> None:
    with pytest.raises(BlobError, match="larger than 10 bytes"):
        await BlobStore(tmp_path, limit_bytes=10).put(digest_of(b"x" * 11), pieces(b"x" * 11))


async def test_the_least_recently_used_unpinned_blob_goes_first(tmp_path: Path) -> None:
    blobs = loaded(tmp_path, 30)
    old, used, pinned = [await blobs.put_bytes(name * 10) for name in (b"a", b"b", b"c")]
    blobs.path(old)
    blobs.path(used)
    with blobs.pinned([pinned]):  # the least recently used one, but somebody is unpacking it
        newest = await blobs.put_bytes(b"d" * 10)
        assert blobs.missing([old, used, pinned, newest]) == (old,)
    await blobs.put_bytes(b"e" * 10)
    assert blobs.missing([used, pinned, newest]) == (pinned,)
    assert blobs.held_bytes == 30


async def test_what_is_held_is_counted_and_not_summed_again(tmp_path: Path) -> None:
    blobs = loaded(tmp_path)
    digests = [await blobs.put_bytes(b"%d" % number * 10) for number in range(5)]
    await blobs.put_all({digest_of(name): name for name in (b"x", b"yy")})
    assert blobs.held_bytes == loaded(tmp_path).held_bytes == 53
    blobs.discard(digests[0])
    blobs.discard(digests[0])
    assert blobs.held_bytes == loaded(tmp_path).held_bytes == 43

    class Unread(OrderedDict[str, int]):
        def __iter__(self):
            raise AssertionError("all blobs were looked at for one that came")

        values = items = keys = __iter__

    blobs._index = Unread((name, blobs.size_bytes(name) or 0) for name in digests[1:])
    assert await blobs.put_bytes(b"below the limit") in blobs._index


async def test_room_is_made_few_blobs_at_a_time(tmp_path: Path) -> None:
    blobs = loaded(tmp_path, 300)
    await blobs.put_all({digest_of(b"%3d" % number): b"%3d" % number for number in range(100)})
    await blobs.put_bytes(b"x" * 300)
    assert blobs.held_bytes == 300 + 3 * (100 - EVICTIONS_AT_ONCE)
    await blobs.put_bytes(b"y")
    assert blobs.held_bytes == 1


async def test_of_many_blobs_those_before_a_wrong_one_are_kept(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    with pytest.raises(BlobError, match="another digest"):
        await blobs.put_all({digest_of(b"a"): b"a", digest_of(b"b"): b"wrong", digest_of(b"c"): b"c"})
    assert blobs.missing(map(digest_of, (b"a", b"b", b"c"))) == (digest_of(b"b"), digest_of(b"c"))
    assert [path.name for path in tmp_path.glob("*/*") if path.is_file()] == [digest_of(b"a")]


async def test_drafts_of_an_earlier_life_are_removed_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / "1-0").write_bytes(b"half")
    blobs = BlobStore(tmp_path)

    async def half_then_whole() -> AsyncIterator[bytes]:
        yield b"x" * IMPORT_BYTES
        blobs.load()
        assert not (tmp_path / "incoming" / "1-0").exists()
        yield b"y"

    assert await blobs.put(digest_of(b"x" * IMPORT_BYTES + b"y"), half_then_whole()) == IMPORT_BYTES + 1
    assert blobs.held_bytes == IMPORT_BYTES + 1


async def test_a_store_is_used_while_what_it_keeps_is_still_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = BlobStore(tmp_path)
    oldest, old, damaged, unread = [await earlier.put_bytes(name * 10) for name in (b"a", b"b", b"c", b"d")]
    for age_s, digest in enumerate((unread, damaged, old, oldest)):
        os.utime(tmp_path / digest[:2] / digest, (age_s, age_s))
    blobs = BlobStore(tmp_path, limit_bytes=40)
    begins, goes_on, read = threading.Event(), threading.Event(), blobs_module._blobs_in

    def slowly(folder: Path) -> Iterator[tuple[float, str, int]]:
        found = [*read(folder)]
        begins.set()
        assert goes_on.wait(10.0)
        yield from found

    monkeypatch.setattr(blobs_module, "_blobs_in", slowly)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(blobs.load))
        await asyncio.to_thread(begins.wait, 10.0)
        assert blobs.missing([oldest, old, damaged, digest_of(b"nowhere")]) == (digest_of(b"nowhere"),)
        assert await content(blobs, oldest) == b"a" * 10
        blobs.discard(damaged)
        assert blobs.missing([damaged]) == (damaged,)
        newest = await blobs.put_bytes(b"e" * 10)
        goes_on.set()
    assert blobs.missing([oldest, old, damaged, unread, newest]) == (damaged,)
    assert blobs.held_bytes == 40
    await blobs.put_bytes(b"f" * 10)
    assert blobs.missing([oldest, old, unread, newest]) == (unread,)


async def test_a_store_that_is_closed_is_read_no_further(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    await blobs.put_bytes(b"data")
    later = BlobStore(tmp_path)
    later.close()
    later.load()
    assert later.held_bytes == 0


async def test_a_blob_deleted_by_hand_is_missing(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digest = await blobs.put_bytes(b"data")
    blobs.path(digest).unlink()
    assert blobs.path(digest) is None
    assert blobs.missing([digest]) == (digest,)


def cluster(tmp_path: Path, *nodes: NodeId) -> dict[NodeId, tuple[BlobStore, BlobFetcher]]:
    net, found = Network(), {}
    for node in nodes:
        agent = LoneAgent(node, tmp_path / node, net=net)
        fetcher = BlobFetcher(agent.blobs, agent, node)
        fetcher.serve()
        found[node] = (agent.blobs, fetcher)
    return found


async def test_missing_blobs_come_from_whoever_has_them(tmp_path: Path) -> None:
    nodes = cluster(tmp_path, N1, N2, N3)
    mine, fetcher = nodes[N1]
    first = await nodes[N2][0].put_bytes(b"first" * 100_000)  # several messages
    second = await nodes[N3][0].put_bytes(b"second")
    empty = await nodes[N3][0].put_bytes(b"")
    assert await fetcher.ensure([first, second, empty], [N1, N2, N3]) == 3
    assert await content(mine, first) == b"first" * 100_000
    assert mine.missing([first, second, empty]) == ()
    assert await fetcher.ensure([first, second], []) == 0


async def test_more_blobs_than_one_batch_are_fetched(tmp_path: Path) -> None:
    nodes = cluster(tmp_path, N1, N2)
    digests = [await nodes[N2][0].put_bytes(str(index).encode()) for index in range(2 * BATCH + 3)]
    await nodes[N1][1].ensure(digests, [N2])
    assert nodes[N1][0].missing(digests) == ()


async def test_failure_names_the_nodes_that_were_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "GIVEN_UP_S", 0.0)
    monkeypatch.setattr(fetch, "PAUSE_S", 0.001)
    _, fetcher = cluster(tmp_path, N1, N2)[N1]
    with pytest.raises(NotReached, match=r"n2: does not have it; n9: n9 does not answer"):
        await fetcher.ensure([digest_of(b"nowhere")], [N2, NodeId("n9")])
    with pytest.raises(BlobError, match="n2: does not have it") as raised:
        await fetcher.ensure([digest_of(b"nowhere")], [N2])
    assert not isinstance(raised.value, NotReached)
    with pytest.raises(BlobError, match="no node is known to hold it"):
        await fetcher.ensure([digest_of(b"nowhere")], [])


@pytest.mark.parametrize(
    "hiccup",
    [
        SwarmError("no answer in time"),
        AgentUnreachable(["n2"], "Connection reset by peer"),
        ConnectionResetError("broken"),
        RemoteProtocolError("an answer is neither ok nor error"),
        TimeoutError(),
    ],
)
async def test_whatever_keeps_the_only_source_from_answering_may_be_over_the_next_moment(
    tmp_path: Path, hiccup: Exception
) -> None:
    nodes = cluster(tmp_path, N1, N2)
    digests = [await nodes[N2][0].put_bytes(data) for data in (b"first", b"second")]
    source = nodes[N1][1]._peers._net.agents[N2]  # type: ignore[attr-defined]
    answer, left = source._handlers["blob"], 3

    async def stumble(sender: NodeId, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        nonlocal left
        left -= 1
        async for each in answer(sender, payload):
            if left >= 0:
                raise hiccup
            yield each

    source._handlers["blob"] = stumble
    assert await nodes[N1][1].ensure(digests, [N2]) == 2


async def test_a_source_that_does_not_answer_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    nodes = cluster(tmp_path, N1, N2)
    fetcher, digest = nodes[N1][1], await nodes[N2][0].put_bytes(b"data")
    waiting = asyncio.create_task(fetcher.ensure([digest_of(b"nowhere")], [NodeId("n9")]))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        assert await fetcher.ensure([digest], [N2]) == 1
    assert not waiting.done()
    waiting.cancel()


async def test_a_disk_that_does_not_take_blobs_is_not_the_sources_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(tmp_path, N1, N2)
    digests = [await nodes[N2][0].put_bytes(data) for data in (b"small", b"large" * 100_000)]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blobs_module._Draft, "finish", full)
    for digest in digests:
        with pytest.raises(NotStored, match="No space left on device") as raised:
            await nodes[N1][1].ensure([digest], [N2])
        assert raised.value.error.errno == errno.ENOSPC


@pytest.mark.parametrize(
    "answers",
    [
        [{"digest": "0" * 64, "data": b"", "is_last": True}],
        [{"digest": None}],
        [{"data": b"x"}],
        [{"digest": digest_of(b"good"), "data": b"evil", "is_last": True}],
        [{"digest": digest_of(b"good"), "data": "text", "is_last": True}],
        [{"digest": digest_of(b"good"), "data": b"go", "is_last": False}],
    ],
)
async def test_a_lying_peer_is_passed_over(tmp_path: Path, answers: list[dict[str, Any]]) -> None:
    net = Network()
    liar, honest, me = (LoneAgent(node, tmp_path / node, net=net) for node in (N2, N3, N1))

    async def lie(_: NodeId, __: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        for answer in answers:
            yield answer

    liar.on_stream("blob", lie)
    BlobFetcher(honest.blobs, honest, N3).serve()
    digest = await honest.blobs.put_bytes(b"good")
    assert await BlobFetcher(me.blobs, me, N1).ensure([digest], [N2, N3]) == 1
    assert await content(me.blobs, digest) == b"good"


async def test_what_came_before_a_stream_broke_is_kept(tmp_path: Path) -> None:
    net = Network()
    breaks, other, me = (LoneAgent(node, tmp_path / node, net=net) for node in (N2, N3, N1))

    async def half(_: NodeId, __: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"digest": digest_of(b"first"), "data": b"first", "is_last": True}
        raise ConnectionResetError("broken")

    breaks.on_stream("blob", half)
    BlobFetcher(other.blobs, other, N3).serve()
    second = await other.blobs.put_bytes(b"second")
    assert await BlobFetcher(me.blobs, me, N1).ensure([digest_of(b"first"), second], [N2, N3]) == 2
    assert await content(me.blobs, digest_of(b"first")) == b"first"


class Careful(LoneAgent):
    """An agent that notes whom it asks, and believes only some of the others alive."""

    def __init__(self, name: NodeId, folder: Path, net: Network, *alive: NodeId) -> None:
        super().__init__(name, folder, net=net)
        self.alive, self.asked = [*alive], list[NodeId]()

    def live_peers(self) -> list[NodeId]:
        return self.alive

    def query_stream(self, node_id: NodeId, kind: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(node_id)
        return super().query_stream(node_id, kind, payload)


async def test_members_that_are_alive_are_asked_first(tmp_path: Path) -> None:
    net = Network()
    me, dead, source = Careful(N1, tmp_path / "n1", net, N3), *(LoneAgent(n, tmp_path / n, net=net) for n in (N2, N3))
    for agent in (dead, source):
        BlobFetcher(agent.blobs, agent, agent.node_id).serve()
    digest = await source.blobs.put_bytes(b"data")
    assert await BlobFetcher(me.blobs, me, N1).ensure([digest], [N2, N3]) == 1
    assert me.asked == [N3]


async def test_silent_peer_is_passed_over_at_once_next_time_and_asked_again_when_nobody_else_has_it(
    tmp_path: Path,
) -> None:
    net, speaks = Network(), asyncio.Event()
    me, slow, source = (
        Careful(N1, tmp_path / "n1", net, N2, N3),
        *(LoneAgent(n, tmp_path / n, net=net) for n in (N2, N3)),
    )
    for agent in (slow, source):
        BlobFetcher(agent.blobs, agent, agent.node_id).serve()
    answer = slow._handlers["blob"]

    async def think(sender: NodeId, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        await speaks.wait()
        async for each in answer(sender, payload):
            yield each

    slow._handlers["blob"] = think
    fetcher = BlobFetcher(me.blobs, me, N1)
    for data, asked in ((b"first", [N2, N3]), (b"second", [N3])):
        me.asked.clear()
        await fetcher.ensure([await source.blobs.put_bytes(data)], [N2, N3])
        assert me.asked == asked
    me.asked.clear()
    only = fetcher.ensure([await slow.blobs.put_bytes(b"only there")], [N2, N3])
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        work = group.create_task(only)
        while len(me.asked) < 3:
            await asyncio.sleep(0)
        speaks.set()
    assert work.result() == 1
    assert me.asked == [N3, N2, N2]


@pytest.mark.parametrize("asked", [{}, {"digest": 3}, {"digests": ["../x"]}, {"digests": "x"}, {"digests": [None]}])
async def test_a_foolish_question_gets_no_file(tmp_path: Path, asked: dict[str, Any]) -> None:
    nodes = cluster(tmp_path, N1)
    agent = LoneAgent(N2, tmp_path / "n2", net=Network())
    BlobFetcher(nodes[N1][0], agent, N1).serve()
    answers = [answer async for answer in agent.query_stream(N2, "blob", asked)]
    assert all(answer.get("is_missing") for answer in answers)

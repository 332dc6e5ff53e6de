"""Files of live jobs on the nodes that hold their records: brought, pinned, and let go of."""

import asyncio
import errno
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from swarm_agent.staging import blobs as blobs_module
from swarm_agent.staging import held_files
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.staging.fetch import BlobFetcher
from swarm_agent.staging.held_files import HeldFiles
from swarmsched.api import JobSpec, JobState
from swarmsched.errors import AgentUnreachable
from swarmsched.events import FilesAway
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.tree import EntryKind, Tree, TreeEntry
from tests.agent.supervision.testing import LoneAgent, Network
from tests.swarmsched.building import make_record

NODES = ("n1", "n2", "n3")


class HoldingAgent(LoneAgent):
    """An agent that holds records; it can be killed, in the middle of an answer as well."""

    def __init__(self, name: str, folder: Path, net: Network, limit_bytes: int = 2**30) -> None:
        super().__init__(NodeId(name), folder, net=net)
        self.blobs = BlobStore(folder / "blobs", limit_bytes)
        self.blobs.directory.mkdir(parents=True, exist_ok=True)
        self.blobs.load()
        self.net = net
        self.records: dict[JobId, JobRecord] = {}
        self.told: list[FilesAway] = []
        self.fetcher = BlobFetcher(self.blobs, self, self.node_id)
        self.fetcher.serve()
        self.files = HeldFiles(self.blobs, self, self.node_id, lambda: self.records, self.fetcher, self.told.append)
        self.asked: list[tuple[NodeId, int]] = []
        self.dies_after = 2**30  # answers

    def kill(self) -> None:
        self.net.agents.pop(self.node_id, None)

    async def query_stream(self, node_id: NodeId, kind: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.asked.append((node_id, len(payload["digests"])))
        source = self.net.agents.get(node_id)
        async for answer in super().query_stream(node_id, kind, payload):
            assert isinstance(source, HoldingAgent)
            if source.dies_after <= 0:
                source.kill()
                raise AgentUnreachable(node_id, "it was killed")
            source.dies_after -= 1
            yield answer

    async def ship(self, files: dict[str, bytes]) -> str:
        entries = [
            TreeEntry(path, EntryKind.FILE, 0o644, len(data), await self.blobs.put_bytes(data))
            for path, data in files.items()
        ]
        return await self.blobs.put_bytes(Tree.of(entries).to_bytes())


@pytest.fixture
def swarm(tmp_path: Path) -> list[HoldingAgent]:
    net = Network()
    return [HoldingAgent(name, tmp_path / name, net) for name in NODES]


def make_job(tree: str = "", *, source: str = "n1", held_bytes: int = 0, requirements: str = "") -> JobRecord:
    shipped = {"tree": tree, "requirements": requirements, "blob_sources": (NodeId(source),), "held_bytes": held_bytes}
    return make_record("n2", NODES, spec=JobSpec(command=("true",), **shipped))  # type: ignore[arg-type]


def decide(record: JobRecord, *agents: HoldingAgent) -> JobRecord:
    for agent in agents:
        agent.records[record.job_id] = record
    return record


def try_again(agent: HoldingAgent) -> None:
    for parcel in agent.files._parcels.values():
        parcel.retry_s = 0.0


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_a_holder_has_the_files_of_a_live_job_once_the_agent_that_took_them_is_dead(
    swarm: list[HoldingAgent],
) -> None:
    n1, n2, n3 = swarm
    tree, text = await n1.ship({"a": b"a", "b/c": b"c"}), await n1.blobs.put_bytes(b"torch\n")
    job = decide(make_job(tree, requirements=text), *swarm)
    assert not n2.files.has(job.spec)
    await n2.files.look()
    assert n2.files.has(job.spec)
    assert n2.files.incomplete_count == 0
    n1.kill()
    await n3.files.look()  # it asks the other holder
    assert n3.files.has(job.spec)
    assert n3.blobs.missing([tree, text, digest_of(b"a"), digest_of(b"c")]) == ()


async def test_files_are_pinned_while_a_job_lives_and_stay_in_the_cache_behind_its_end(
    swarm: list[HoldingAgent],
) -> None:
    n1 = swarm[0]
    content = bytes(1_000)
    tree = await n1.ship({"a": content})
    job = decide(make_job(tree), n1)
    await n1.files.look()
    held_bytes = n1.files.held_bytes
    n1.blobs.limit_bytes = 500
    await n1.blobs.put_bytes(b"x" * 400)
    assert n1.blobs.missing([digest_of(content)]) == ()
    decide(job.updated(state=JobState.ENDED), n1)
    await n1.files.look()
    assert (held_bytes > 1_000, n1.files.held_bytes) == (True, 0)
    assert n1.blobs.missing([digest_of(content)]) == ()
    await n1.blobs.put_bytes(b"y" * 400)
    assert n1.blobs.missing([digest_of(content)]) != ()


async def test_a_tree_of_two_jobs_is_kept_until_both_have_ended(swarm: list[HoldingAgent]) -> None:
    n1, n2, _ = swarm
    shared, own = b"shared", b"own"
    first = decide(make_job(await n1.ship({"a": shared})), n2)
    second = replace(make_job(await n1.ship({"a": shared, "b": own})), job_id=JobId("f" * len(first.job_id)))
    decide(second, n2)
    await n2.files.look()
    decide(first.updated(state=JobState.ENDED), n2)
    await n2.files.look()
    assert n2.files.has(second.spec)
    n2.blobs.limit_bytes = 0
    await n2.blobs.put_all({digest_of(b""): b""})
    assert n2.blobs.missing([digest_of(shared), digest_of(own), second.spec.tree]) == ()
    assert n2.blobs.missing([first.spec.tree]) == (first.spec.tree,)


async def test_a_source_that_dies_in_the_middle_leaves_what_came_and_the_rest_comes_from_others(
    swarm: list[HoldingAgent],
) -> None:
    n1, n2, n3 = swarm
    files = {str(number): str(number).encode() * 100_000 for number in range(8)}
    tree = await n1.ship(files)
    job = decide(make_job(tree), n2, n3)
    await n3.files.look()
    n3.kill()
    n1.dies_after = 5  # the manifest, then some of the files
    await n2.files.look()
    came = [data for data in files.values() if not n2.blobs.missing([digest_of(data)])]
    assert 0 < len(came) < len(files)
    assert not n2.files.has(job.spec)
    assert n2.files.incomplete_count == 1
    n2.net.agents[n3.node_id] = n3
    try_again(n2)
    n2.asked.clear()
    await n2.files.look()
    assert n2.files.has(job.spec)
    assert {node for node, _ in n2.asked} == {"n3"}


async def test_a_dead_source_costs_the_files_of_other_jobs_no_time(swarm: list[HoldingAgent]) -> None:
    n1, n2, n3 = swarm
    lost = await n1.ship({"lost": b"lost"})
    n1.kill()
    kept = await n3.ship({"kept": b"kept"})
    gone = decide(make_job(lost), n2)
    there = decide(replace(make_job(kept, source="n3"), job_id=JobId("f" * len(gone.job_id))), n2)
    async with asyncio.timeout(2.0):
        await n2.files.look()
    assert (n2.files.has(gone.spec), n2.files.has(there.spec)) == (False, True)


async def test_the_smallest_comes_first_and_between_the_pieces_of_a_large_one(
    swarm: list[HoldingAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_files, "PIECE_BYTES", 1_000)
    n1, n2, _ = swarm
    large = decide(make_job(await n1.ship({str(number): bytes([number]) * 900 for number in range(6)})), n2)
    small = replace(make_job(await n1.ship({"s": b"s"})), job_id=JobId("f" * len(large.job_id)))
    looks = 0
    bring = n2.fetcher.__class__.ensure

    async def ensure(fetcher: BlobFetcher, digests: Any, sources: Any, **options: Any) -> int:
        nonlocal looks
        looks += 1
        if looks == 3:
            decide(small, n2)
        if looks == 6:
            assert n2.files.has(small.spec)
            assert not n2.files.has(large.spec)
        return await bring(fetcher, digests, sources, **options)

    monkeypatch.setattr(BlobFetcher, "ensure", ensure)
    await n2.files.look()
    assert n2.files.has(large.spec)
    assert looks > 6


async def test_what_a_task_of_this_node_brings_is_not_brought_twice(swarm: list[HoldingAgent]) -> None:
    n1, n2, _ = swarm
    tree = await n1.ship({"a": b"a"})
    job = decide(make_job(tree), n2)
    bringing = asyncio.create_task(n2.fetcher.ensure([tree], [NodeId("n1")]))
    while not n2.fetcher.is_bringing([tree]):
        await asyncio.sleep(0)
    await n2.files.look()
    await bringing
    assert n2.asked == [("n1", 1)]
    await n2.files.look()
    assert n2.files.has(job.spec)


async def test_a_disk_with_too_little_room_is_left_alone_and_room_is_used_when_it_comes(
    swarm: list[HoldingAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    n1, n2, _ = swarm
    tree = await n1.ship({"a": bytes(1_000)})
    job = decide(make_job(tree), n2)
    monkeypatch.setattr(held_files, "room_for_others", lambda folder: 999)
    await n2.files.look()
    assert not n2.files.has(job.spec)
    assert n2.blobs.held_bytes < 999, "nothing but the manifest"
    assert n2.files.held_bytes == 0
    monkeypatch.setattr(held_files, "room_for_others", lambda folder: 1_000)
    try_again(n2)
    await n2.files.look()
    assert n2.files.has(job.spec)


async def test_a_disk_that_refuses_in_the_middle_keeps_the_others_work_and_is_tried_later(
    swarm: list[HoldingAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    n1, n2, n3 = swarm
    job = decide(make_job(await n1.ship({"a": b"a"})), n2, n3)
    with monkeypatch.context() as patch:
        patch.setattr(blobs_module, "write_or_skip", refuse)
        await n2.files.look()
    assert (n2.files.has(job.spec), n2.files.incomplete_count) == (False, 1)
    await n3.files.look()
    await n2.files.look()
    assert (n2.files.has(job.spec), n3.files.has(job.spec)) == (False, True), "not before some seconds are over"
    try_again(n2)
    await n2.files.look()
    assert n2.files.has(job.spec)


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_room_is_made_by_what_nobody_has_used_for_long_and_by_nothing_else(
    swarm: list[HoldingAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    n1, n2, _ = swarm
    job = decide(make_job(await n1.ship({"a": bytes(1_000)})), n2)
    old = await n2.blobs.put_bytes(b"x" * 5_000)
    monkeypatch.setattr(held_files, "room_for_others", lambda folder: 5_500 - n2.blobs.held_bytes)
    await n2.files.look()
    assert (n2.files.has(job.spec), n2.blobs.missing([old])) == (False, ()), "it may be part of an upload"
    monkeypatch.setattr(blobs_module, "UNUSED_S", -60.0)
    try_again(n2)
    await n2.files.look()
    assert (n2.files.has(job.spec), n2.blobs.missing([old])) == (True, (old,))


async def test_no_more_than_half_of_the_cache_is_kept_for_live_jobs(tmp_path: Path) -> None:
    net = Network()
    n1, n2 = HoldingAgent("n1", tmp_path / "1", net), HoldingAgent("n2", tmp_path / "2", net, limit_bytes=4_000)
    small = decide(make_job(await n1.ship({"a": bytes(1_000)}), held_bytes=1_000), n2)
    large = replace(make_job(await n1.ship({"a": b"x" * 1_000}), held_bytes=1_001), job_id=JobId("f" * 26))
    decide(large, n2)
    await n2.files.look()
    assert (n2.files.has(small.spec), n2.files.has(large.spec)) == (True, False)
    assert n2.files.held_bytes <= 2_000


async def test_a_blob_that_somebody_has_removed_is_brought_again(
    swarm: list[HoldingAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_files, "VERIFY_INTERVAL_S", 0.0)
    n1, n2, _ = swarm
    job = decide(make_job(await n1.ship({"a": b"a"})), n2)
    await n2.files.look()
    path = n2.blobs.path(digest_of(b"a"))
    assert path is not None
    path.unlink()
    await n2.files.look()
    assert path.read_bytes() == b"a"
    assert n2.files.has(job.spec)


async def test_a_later_life_pins_what_the_first_has_brought(swarm: list[HoldingAgent], tmp_path: Path) -> None:
    n1, n2, _ = swarm
    job = decide(make_job(await n1.ship({"a": bytes(1_000)})), n2)
    await n2.files.look()
    n1.kill()
    again = HoldingAgent("n2", tmp_path / "n2", n2.net)
    decide(job, again)
    await again.files.look()
    again.blobs.limit_bytes = 10
    await again.blobs.put_bytes(b"x" * 9)
    assert again.files.has(job.spec)
    assert again.blobs.missing([digest_of(bytes(1_000))]) == ()


async def test_files_follow_the_records_in_the_background(swarm: list[HoldingAgent]) -> None:
    n1, n2, _ = swarm
    n2.files.start()
    job = decide(make_job(await n1.ship({"a": b"a"})), n2)
    async with asyncio.timeout(5.0):
        while not n2.files.has(job.spec):
            await asyncio.sleep(0.01)
    await n2.files.stop()


async def test_jobs_whose_files_nobody_has_are_named_to_the_core_until_a_source_is_back(
    swarm: list[HoldingAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    n1, n2, _ = swarm
    job = decide(make_job(await n1.ship({"a": b"a"})), n2)
    n1.kill()
    await n2.files.look()
    assert (n2.told, n2.files.is_away(job.job_id)) == ([], False), "one source may have been busy"
    try_again(n2)
    await n2.files.look()
    await n2.files.look()
    assert n2.told == [FilesAway((job.job_id,))]
    assert n2.files.is_away(job.job_id)
    monkeypatch.setattr(held_files, "TOLD_EVERY_S", 0.0)
    await n2.files.look()
    assert n2.told == [FilesAway((job.job_id,))] * 2
    n2.net.agents[n1.node_id] = n1
    await n2.files.look()  # it is asked at once
    assert n2.told[2:] == [FilesAway()]
    assert not n2.files.is_away(job.job_id)


async def test_files_for_which_this_node_has_no_room_may_be_elsewhere(
    swarm: list[HoldingAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    n1, n2, _ = swarm
    decide(make_job(await n1.ship({"a": b"a"})), n2)
    monkeypatch.setattr(held_files, "room_for_others", lambda folder: 0)
    for _ in range(3):
        await n2.files.look()
        try_again(n2)
    n1.kill()
    await n2.files.look()
    assert (n2.files.incomplete_count, n2.told) == (1, [])


async def test_a_swarm_of_one_is_told_nothing(tmp_path: Path) -> None:
    alone = HoldingAgent("n1", tmp_path, Network())
    decide(make_job(await alone.ship({"a": b"a"})), alone)
    for _ in range(3):
        await alone.files.look()
    assert alone.told == []


@pytest.mark.parametrize("content", [None, b"no tree"])
async def test_a_job_whose_files_are_nowhere_or_no_tree_is_started_and_fails(
    swarm: list[HoldingAgent], content: bytes | None
) -> None:
    n1, n2, _ = swarm
    decide(make_job(await n1.blobs.put_bytes(content) if content else digest_of(b"never shipped")), n2)
    for _ in range(3):
        await n2.files.look()
        try_again(n2)
    assert (n2.files.incomplete_count, n2.told) == (1, [])

"""Which copies stay."""

import json
from pathlib import Path

import pytest

from swarm_agent.checkpoints.kept import KeptCheckpoints
from swarm_agent.staging.blobs import BlobStore
from swarmsched.ids import JobId, NodeId
from swarmsched.tree import Tree, TreeEntry

JOB = JobId("00000000000000000000000001")
OTHER = JobId("00000000000000000000000002")
ME = NodeId("me")


class Store:
    """A blob store and a list on one folder; `again` is the next life."""

    def __init__(self, folder: Path, limit_bytes: int = 2**30) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.blobs = BlobStore(folder / "blobs", limit_bytes)
        self.blobs.load()
        self.kept = KeptCheckpoints(folder / "kept", self.blobs)
        self.kept.load()

    def again(self) -> "Store":
        return Store(self.folder, self.limit_bytes)

    async def add(self, content: bytes, job_id: JobId = JOB, writer: NodeId = ME, *, is_committed: bool = True) -> str:
        blob = await self.blobs.put_bytes(content)
        tree = Tree.of([TreeEntry("ck", size_bytes=len(content), sha256=blob)])
        digest = await self.blobs.put_bytes(tree.to_bytes())
        self.kept.add(job_id, digest, tree.blobs, writer)
        if is_committed:
            self.kept.committed(job_id, digest)
        return digest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


async def test_the_newest_two_stay_and_the_rest_leaves_the_disk(store: Store) -> None:
    digests = [await store.add(b"%d" % number * 1_000) for number in range(4)]
    assert store.kept.digests(JOB) == tuple(digests[2:])
    assert set(store.blobs.missing(digests)) == set(digests[:2])
    assert len(list((store.folder / "blobs").glob("??/*"))) == 4
    assert store.again().kept.digests(JOB) == tuple(digests[2:])


async def test_what_is_not_committed_yet_pushes_nothing_out(store: Store) -> None:
    first, second = await store.add(b"1"), await store.add(b"2")
    third = await store.add(b"3", is_committed=False)
    fourth = await store.add(b"4", is_committed=False)
    assert store.kept.digests(JOB) == (first, second, third, fourth)
    store.kept.committed(JOB, fourth)
    assert store.kept.digests(JOB) == (second, fourth)


async def test_the_same_content_again_becomes_the_newest(store: Store) -> None:
    first, second = await store.add(b"1"), await store.add(b"2")
    assert await store.add(b"1") == first
    assert store.kept.digests(JOB) == (second, first)
    await store.add(b"3")
    assert store.blobs.missing([first]) == ()


async def test_a_writer_drops_only_what_it_has_made_itself_and_the_newest_of_all_others_stay(store: Store) -> None:
    """The first rank of an elastic job moves: one that has been left behind does not know what the register names."""
    now = [await store.add(b"now %d" % number, writer=NodeId("b"), is_committed=False) for number in range(2)]
    before = await store.add(b"before", writer=NodeId("a"), is_committed=False)
    late = await store.add(b"late", writer=NodeId("a"), is_committed=False)
    store.kept.settle(JOB, NodeId("a"), {late})
    assert store.kept.digests(JOB) == (*now, late)
    assert store.blobs.missing([*now, before, late]) == (before,)
    again = store.again()
    more = [await again.add(b"more %d" % number, writer=NodeId("c"), is_committed=False) for number in range(4)]
    again.kept.settle(JOB, NodeId("a"), {late})
    assert again.kept.digests(JOB) == (late, *more)


async def test_lists_of_older_agents_name_no_writers(store: Store) -> None:
    digest = await store.add(b"old")
    (store.folder / "kept" / f"{JOB}.json").write_text(json.dumps([{"digest": digest, "committed": True}]))
    assert store.again().kept.digests(JOB) == (digest,)


async def test_content_that_another_job_keeps_stays(store: Store) -> None:
    mine = await store.add(b"shared")
    await store.add(b"shared", OTHER)
    store.kept.retain(JOB, ())
    assert store.kept.digests(JOB) == ()
    assert store.blobs.missing([mine]) == ()
    store.kept.retain(OTHER, ())
    assert store.blobs.missing([mine]) == (mine,)


async def test_kept_copies_are_not_pushed_out_by_other_files_in_this_life_or_the_next(tmp_path: Path) -> None:
    store = Store(tmp_path, limit_bytes=5_000)
    digest = await store.add(b"k" * 2_000)
    for life in (store, store.again()):
        for number in range(5):
            await life.blobs.put_bytes(b"%d" % number * 1_500)
        assert life.blobs.missing([digest]) == ()
        assert life.kept.digests(JOB) == (digest,)


async def test_copies_whose_blobs_are_gone_and_broken_lists_are_dropped(store: Store) -> None:
    digest = await store.add(b"lost")
    await store.add(b"fine", OTHER)
    store.blobs.discard(digest)
    (store.folder / "kept" / "stranger.json").write_text("[]")
    again = store.again()
    assert (again.kept.digests(JOB), len(again.kept.digests(OTHER))) == ((), 1)
    (store.folder / "kept" / f"{OTHER}.json").write_text('[{"digest": 3')
    assert store.again().kept.jobs() == []

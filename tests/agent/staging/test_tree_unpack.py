"""Unpacking: what arrives is what was sent, and nothing lands outside."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_agent.staging.blobs import BlobError, BlobStore
from swarm_agent.staging.tree import Unpacker
from swarmsched.tree import BadTree, EntryKind, Tree, TreeEntry


async def entry(blobs: BlobStore, path: str, data: bytes = b"x", mode: int = 0o644) -> TreeEntry:
    return TreeEntry(path, EntryKind.FILE, mode, len(data), await blobs.put_bytes(data))


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


async def test_files_links_and_folders_arrive_as_sent(blobs: BlobStore, tmp_path: Path) -> None:
    tree = Tree.of(
        [
            await entry(blobs, "a/b/train.py", b"print(1)\n"),
            await entry(blobs, "a/run.sh", b"#!/bin/sh\n", 0o755),
            await entry(blobs, "secret", b"s", 0o400),
            TreeEntry("a/link", EntryKind.LINK, target="b/train.py"),
            TreeEntry("empty", EntryKind.DIR),
        ]
    )
    target = tmp_path / "work"
    Unpacker(blobs).unpack(tree, target)
    assert (target / "a/b/train.py").read_bytes() == b"print(1)\n"
    assert (target / "a/link").read_bytes() == b"print(1)\n"
    assert (target / "a/run.sh").stat().st_mode & 0o7777 == 0o755
    assert (target / "secret").stat().st_mode & 0o7777 == 0o400
    assert list((target / "empty").iterdir()) == []


async def test_a_job_may_change_its_copy(blobs: BlobStore, tmp_path: Path) -> None:
    tree = Tree.of([await entry(blobs, "f", b"original")])
    Unpacker(blobs).unpack(tree, tmp_path / "one")
    (tmp_path / "one" / "f").write_bytes(b"changed!")
    Unpacker(blobs).unpack(tree, tmp_path / "two")
    assert (tmp_path / "two" / "f").read_bytes() == b"original"


@pytest.mark.parametrize(
    "entries",
    [
        [{"path": "../out", "kind": "dir"}],
        [{"path": "/etc/out", "kind": "dir"}],
        [{"path": "a/../../out", "kind": "dir"}],
        [{"path": "l", "kind": "link", "target": "/etc"}],
        [{"path": "l", "kind": "link", "target": "../.."}],
        [{"path": "l", "kind": "link", "target": "."}, {"path": "l/x", "kind": "dir"}],
        [{"path": "dev", "kind": "device"}],
        [{"path": "suid", "kind": "file", "mode": 0o4755, "size": 0, "sha256": "0" * 64}],
        [{"path": "d", "kind": "dir"}, {"path": "d", "kind": "dir"}],
    ],
)
def test_a_manifest_that_climbs_out_is_refused(entries: list[dict[str, object]]) -> None:
    document = {"entries": entries, "format": 1}
    with pytest.raises(BadTree):
        Tree.from_bytes(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize("path", ["link/evil", "../evil", "file/evil"])
async def test_the_kernel_refuses_what_an_unchecked_manifest_asks(blobs: BlobStore, tmp_path: Path, path: str) -> None:
    """A tree built around the checks, as if they had a hole."""
    outside = tmp_path / "outside"
    outside.mkdir()
    link = TreeEntry("link", EntryKind.LINK, target=str(outside))
    tree = Tree((link, await entry(blobs, "file"), await entry(blobs, path)))
    target = tmp_path / "deep" / "work"
    target.parent.mkdir()
    if path.startswith(".."):
        (target.parent / "evil").write_bytes(b"mine")  # created anew or not at all
    with pytest.raises(OSError):  # noqa: PT011  # the kernel's word: loop, not a directory, exists
        Unpacker(blobs).unpack(tree, target)
    assert list(outside.iterdir()) == []
    assert not target.exists()
    if path.startswith(".."):
        assert (target.parent / "evil").read_bytes() == b"mine"


async def test_a_blob_that_rotted_is_found_out_and_dropped(blobs: BlobStore, tmp_path: Path) -> None:
    whole = await entry(blobs, "f", b"whole")
    blobs.path(whole.sha256).write_bytes(b"r0tte")
    with pytest.raises(BlobError, match="damaged"):
        Unpacker(blobs).unpack(Tree.of([whole]), tmp_path / "work")
    assert not (tmp_path / "work").exists()
    assert blobs.missing([whole.sha256]) == (whole.sha256,)


async def test_a_manifest_that_lies_about_a_size_costs_its_own_job_and_not_the_blob(
    blobs: BlobStore, tmp_path: Path
) -> None:
    honest = await entry(blobs, "f", b"")
    with pytest.raises(BlobError, match="'f' has 0 bytes, not the 5 of the manifest"):
        Unpacker(blobs).unpack(Tree.of([replace(honest, size_bytes=5)]), tmp_path / "one")
    Unpacker(blobs).unpack(Tree.of([honest]), tmp_path / "two")
    assert (tmp_path / "two" / "f").read_bytes() == b""


async def test_missing_content_is_named_and_nothing_is_left(blobs: BlobStore, tmp_path: Path) -> None:
    tree = Tree.of([await entry(blobs, "a"), TreeEntry("b", EntryKind.FILE, 0o644, 3, "0" * 64)])
    with pytest.raises(BlobError, match="'b' is not on this node"):
        Unpacker(blobs).unpack(tree, tmp_path / "work")
    assert not (tmp_path / "work").exists()


async def test_an_existing_folder_is_not_written_into(blobs: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with pytest.raises(FileExistsError):
        Unpacker(blobs).unpack(Tree.of([await entry(blobs, "a")]), tmp_path / "work")
    assert (tmp_path / "work").is_dir()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
async def test_everything_belongs_to_the_job_user(blobs: BlobStore, tmp_path: Path) -> None:
    tree = Tree.of([await entry(blobs, "a/b"), TreeEntry("a/l", EntryKind.LINK, target="b")])
    Unpacker(blobs, 65534, 65534).unpack(tree, tmp_path / "work")
    assert {path.lstat().st_uid for path in (tmp_path / "work").rglob("*")} == {65534}

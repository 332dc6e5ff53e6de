"""Reading checkpoints out of folders that a job may change under our hands."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from swarm_agent import room
from swarm_agent.checkpoints import pack as pack_module
from swarm_agent.checkpoints.folders import name_problem
from swarm_agent.checkpoints.pack import manifest, pack, size_of
from swarm_agent.folder import remove_tree
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.staging.tree import Unpacker
from swarm_agent.task.tasksocket import Declined
from swarmsched.tree import EntryKind


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    store = BlobStore(tmp_path / "blobs")
    store.load()
    return store


def refused(folder: Path, blobs: BlobStore, name: str = "ck", uid: int = -1) -> Declined:
    with pytest.raises(Declined) as caught:
        pack(folder, name, blobs, uid)
    return caught.value


def test_a_file_and_a_folder_are_copied_whole(folder: Path, blobs: BlobStore) -> None:
    (folder / "ck" / "deep").mkdir(parents=True)
    (folder / "ck" / "empty").mkdir()
    (folder / "ck" / "a.pt").write_bytes(b"A" * 3_000_000)
    (folder / "ck" / "deep" / "b.pt").write_bytes(b"B")
    (folder / "ck" / "deep" / "b.pt").chmod(0o640)
    (folder / "ck" / "last").symlink_to("deep/b.pt")
    (folder / "other").write_text("is not part of it")

    tree = pack(folder, "ck", blobs)
    assert [(entry.path, entry.kind, entry.mode if entry.sha256 else 0) for entry in tree.entries] == [
        ("ck/a.pt", EntryKind.FILE, (folder / "ck" / "a.pt").stat().st_mode & 0o777),
        ("ck/deep/b.pt", EntryKind.FILE, 0o640),
        ("ck/empty", EntryKind.DIR, 0),
        ("ck/last", EntryKind.LINK, 0),
    ]
    assert blobs.missing(tree.blobs) == tuple(tree.blobs) != (), "not before they are admitted"
    blobs.admit(tree.blobs)
    assert blobs.missing(tree.blobs) == ()
    for digest in tree.blobs:
        assert hashlib.sha256(blobs.path(digest).read_bytes()).hexdigest() == digest

    (folder / "one.pt").write_bytes(b"weights")
    tree = pack(folder, "one.pt", blobs)
    assert [entry.path for entry in tree.entries] == ["one.pt"]
    assert manifest(folder, "one.pt").digest == tree.digest
    assert (size_of(folder, "one.pt"), size_of(folder, "ck")) == (7, 3_000_001 + len("deep/b.pt"))


def test_what_is_not_there_is_named_with_its_full_path(folder: Path, blobs: BlobStore) -> None:
    error = refused(folder, blobs)
    assert (error.code, error.problem) == ("not_found", f"{folder}/ck does not exist")
    with pytest.raises(Declined, match="not_found"):
        size_of(folder, "ck")


def test_links_that_lead_out_are_refused_and_never_read(folder: Path, blobs: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:x")
    (folder / "ck").mkdir()
    for target in (str(tmp_path / "secret"), "../../secret", "../other"):
        link = folder / "ck" / "link"
        link.symlink_to(target)
        assert refused(folder, blobs).code == "bad_checkpoint"
        link.unlink()
    (folder / "ck").rmdir()
    (folder / "ck").symlink_to(tmp_path)
    assert refused(folder, blobs).code == "bad_checkpoint"
    assert blobs.held_bytes == 0


def test_a_folder_that_is_a_link_itself_is_not_entered(folder: Path, blobs: BlobStore, tmp_path: Path) -> None:
    (folder / "ck").write_text("x")
    (tmp_path / "link").symlink_to(folder)
    assert refused(tmp_path / "link", blobs).code == "unreadable"


def test_pipes_are_refused_without_waiting_for_a_writer(folder: Path, blobs: BlobStore) -> None:
    (folder / "ck").mkdir()
    os.mkfifo(folder / "ck" / "pipe")
    assert "no file, folder or link" in refused(folder, blobs).problem


def test_files_of_other_accounts_are_refused_where_accounts_matter(folder: Path, blobs: BlobStore) -> None:
    (folder / "ck").write_text("x")
    assert "another account" in refused(folder, blobs, uid=os.getuid() + 1).problem
    pack(folder, "ck", blobs, os.getuid())


def test_a_file_that_is_written_meanwhile_is_refused(folder: Path, blobs: BlobStore) -> None:
    (folder / "ck").write_bytes(b"first half")
    read = blobs.import_file

    def read_and_write(source: int, may_go_on: Callable[[], bool]) -> tuple[str, int]:
        found = read(source, may_go_on)
        with (folder / "ck").open("ab") as file:
            file.write(b", second half")
        return found

    blobs.import_file = read_and_write
    assert (refused(folder, blobs).code, refused(folder, blobs).problem) == (
        "changed",
        "ck changed while it was copied",
    )


def test_a_file_that_grows_for_ever_is_read_no_further_than_it_was(folder: Path, blobs: BlobStore) -> None:
    (folder / "ck").write_bytes(b"x" * 3_000_000)

    def grow() -> bool:
        with (folder / "ck").open("ab") as file:
            file.write(b"y" * 2_000_000)
        return (folder / "ck").stat().st_size < 40_000_000

    with pytest.raises(Declined, match="changed while it was copied"):
        pack(folder, "ck", blobs, may_go_on=grow)


def test_holes_stay_holes_in_the_store_on_their_way_and_where_they_are_brought_back(
    folder: Path, blobs: BlobStore, tmp_path: Path
) -> None:
    with (folder / "ck").open("wb") as file:
        file.write(b"head")
        file.seek(50_000_000)
        file.write(b"tail")
        file.truncate(90_000_000)
    tree = pack(folder, "ck", blobs)
    blobs.admit(tree.blobs)
    (entry,) = tree.entries
    stored = blobs.path(entry.sha256)
    assert stored

    async def pieces() -> AsyncIterator[bytes]:
        with stored.open("rb") as file:
            while data := file.read(2**18):
                yield data

    peer = BlobStore(tmp_path / "peer")
    asyncio.run(peer.put(entry.sha256, pieces()))
    Unpacker(blobs).unpack(tree, tmp_path / "back")
    for path in (stored, peer.path(entry.sha256), tmp_path / "back" / "ck"):
        assert path
        found = path.stat()
        assert (found.st_size, found.st_blocks * 512 < 5_000_000) == (90_000_000, True)
    assert hashlib.sha256((tmp_path / "back" / "ck").read_bytes()).hexdigest() == entry.sha256


def test_of_a_checkpoint_that_is_refused_nothing_stays(
    folder: Path, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ck").mkdir()
    (folder / "ck" / "a").write_bytes(b"a" * 1_000)
    (folder / "ck" / "b").write_bytes(b"b" * 1_000)
    os.mkfifo(folder / "ck" / "z")
    refused(folder, blobs)
    (folder / "ck" / "z").unlink()
    with pytest.raises(Declined, match="more than 1500 bytes"):
        pack(folder, "ck", blobs, limit_bytes=1_500)
    with pytest.raises(Declined, match="nobody wants it"):
        pack(folder, "ck", blobs, may_go_on=lambda: False)
    monkeypatch.setattr(room, "RESERVE_BYTES", 2**60)
    with pytest.raises(Declined, match="do not fit") as refusal:
        pack(folder, "ck", blobs)
    assert refusal.value.code == "storage"
    assert [path for path in blobs.directory.rglob("*") if path.is_file()] == []


def test_folders_that_lie_too_deep_are_refused_before_there_are_thousands_of_them(
    folder: Path, blobs: BlobStore
) -> None:
    here = os.open(folder, os.O_RDONLY)
    for name in ["ck"] + ["a"] * 3_000:
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert (refused(folder, blobs).code, "64 deep" in refused(folder, blobs).problem) == ("bad_checkpoint", True)
    with pytest.raises(Declined, match="64 deep"):
        size_of(folder, "ck")
    remove_tree(folder)
    assert not folder.exists()


def test_limits_are_told_before_anything_is_copied(
    folder: Path, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ck").mkdir()
    for name in "abc":
        (folder / "ck" / name).write_bytes(b"x" * 100)
    monkeypatch.setattr(pack_module, "FILE_BYTES_LIMIT", 99)
    assert "more than 99 bytes" in refused(folder, blobs).problem
    monkeypatch.setattr(pack_module, "FILE_BYTES_LIMIT", 1_000)
    monkeypatch.setattr(pack_module, "TREE_BYTES_LIMIT", 250)
    assert "more than 250 bytes" in refused(folder, blobs).problem
    monkeypatch.setattr(pack_module, "TREE_BYTES_LIMIT", 1_000)
    monkeypatch.setattr(pack_module, "ENTRIES_LIMIT", 2)
    assert "checkpoint_dir_shared" in refused(folder, blobs).remedy


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "/etc/passwd",
        "..",
        ".",
        ".hidden",
        "a\0b",
        "a\nb",
        "x" * 201,
        "\u00e4" * 128,
        3,
        None,
        ["a"],
        "a\ud800",
        "caf\udce9",
    ],
)
def test_names_that_could_leave_the_folder_are_refused(name: object) -> None:
    assert name_problem(name)


@pytest.mark.parametrize("name", ["a", "step-100.pt", "epoch 3", "model..pt", "x" * 200, "\u00e4" * 127, "-rf"])
def test_other_names_are_fine(name: str) -> None:
    assert name_problem(name) == ""

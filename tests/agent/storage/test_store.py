import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_agent.storage.lock import DataDirectoryLock
from swarm_agent.storage.store import SCHEMA_VERSION, Store
from swarmsched.effects import Persist
from swarmsched.errors import StorageError
from swarmsched.gossip.identity import GENERATION_KEY, GENERATION_ROOM

KEY, NEXT_KEY, FOREIGN_KEY = (bytes([number]) * 32 for number in (1, 2, 3))


OPENED: list[Store] = []


def open_store(path: Path, label: str = "swarm", node: str = "a", keys: tuple[bytes, ...] = (KEY,)) -> Store:
    OPENED.append(Store.open(path, label=label, node=node, keys=keys))
    return OPENED[-1]


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    """Most tests leave them open, as a kill does; the interpreter complains of those since 3.13."""
    yield
    while OPENED:
        OPENED.pop().close()


def log_of(path: Path) -> Path:
    return path.with_name("agent.db-wal")


def killed(path: Path, into: Path) -> Path:
    """A copy of the files as they lie on disk while an agent uses them: what a kill -9 leaves."""
    into.mkdir()
    shutil.copy(path, into / path.name)
    shutil.copy(log_of(path), log_of(into / path.name))
    return into / path.name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


def test_what_was_committed_is_there_after_reopening(path: Path) -> None:
    store = open_store(path)
    store.commit([Persist("ledger", "g0", b"x"), Persist("register", "j", b"1"), Persist("register", "k", b"2")])
    store.commit([Persist("register", "j", b"3"), Persist("ledger", "g0", None), Persist("ledger", "never", None)])
    store.close()

    assert open_store(path).load() == {"register": {"j": b"3", "k": b"2"}}


def test_commits_are_synced_in_full(path: Path) -> None:
    store = open_store(path)

    assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_generation_grows_with_every_start_even_if_the_clock_goes_back(path: Path) -> None:
    generations = []
    for now_utc_s in (1_000.0, 2_000.0, 500.0, 500.0):
        store = open_store(path)
        generations.append(store.next_generation(now_utc_s))
        store.close()

    assert generations == [1_000, 2_000, 2_001, 2_002]


def test_generation_grows_above_the_one_that_an_earlier_life_rose_to(path: Path) -> None:
    store = open_store(path)
    store.next_generation(1_000.0)
    store.commit([Persist(GENERATION_ROOM, GENERATION_KEY, b"1500")])
    store.close()

    assert open_store(path).next_generation(1_001.0) == 1_501


def test_an_entry_of_the_generation_that_is_no_number_is_named_with_its_file(path: Path) -> None:
    store = open_store(path)
    store.commit([Persist(GENERATION_ROOM, GENERATION_KEY, b"1x")])

    with pytest.raises(StorageError, match=f"{path}: meta/generation: unreadable entry: b'1x'"):
        store.next_generation(1_000.0)


def test_a_full_disk_keeps_nothing_of_the_transaction_and_works_again_later(path: Path) -> None:
    store = open_store(path)
    store.commit([Persist("ledger", "before", b"1")])
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    group = [Persist("ledger", "small", b"1"), Persist("ledger", "large", b"x" * 100_000)]

    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.commit(group)
    assert store.load() == {"ledger": {"before": b"1"}}

    store._connection.execute("PRAGMA max_page_count = 1000000")
    store.commit(group)
    assert set(store.load()["ledger"]) == {"before", "small", "large"}


@pytest.mark.parametrize(
    "damage", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 8_000], ids=["text", "cut_short"]
)
def test_a_damaged_file_is_named_with_a_remedy_and_left_alone(path: Path, damage: bytes) -> None:
    path.write_bytes(damage)

    with pytest.raises(StorageError) as caught:
        open_store(path)

    assert str(path) in str(caught.value)
    assert "damaged" in str(caught.value)
    assert f"mv {path}" in caught.value.remedy
    assert path.read_bytes() == damage


def test_a_page_overwritten_in_the_middle_is_noticed_at_start(path: Path) -> None:
    store = open_store(path)
    store.commit([Persist("register", f"job{index}", os.urandom(400)) for index in range(200)])
    store.close()
    content = bytearray(path.read_bytes())
    content[3 * 4_096 : 5 * 4_096] = b"\x55" * 8_192
    path.write_bytes(content)

    with pytest.raises(StorageError, match="damaged"):
        open_store(path)


def test_a_database_of_another_program_is_refused_unchanged(path: Path) -> None:
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE bookmarks (url TEXT)")
    foreign.commit()
    foreign.close()
    before = path.read_bytes()

    with pytest.raises(StorageError, match="another program"):
        open_store(path)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(path: Path) -> None:
    store = open_store(path)
    store._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    store.close()
    before = path.read_bytes()

    with pytest.raises(StorageError, match=f"schema version {SCHEMA_VERSION + 1}") as caught:
        open_store(path)
    assert "newer agent" in caught.value.remedy
    assert path.read_bytes() == before


@pytest.mark.parametrize(("label", "node", "named"), [("other", "a", "swarm 'swarm'"), ("swarm", "b", "node 'a'")])
def test_the_file_of_another_swarm_or_node_is_refused(path: Path, label: str, node: str, named: str) -> None:
    open_store(path).close()

    with pytest.raises(StorageError, match=named):
        open_store(path, label, node)


def test_a_database_keeps_the_identity_that_it_was_made_with(path: Path) -> None:
    store = open_store(path)
    first = store.store_id
    store.close()
    again = open_store(path)

    assert 0 < first < 2**53
    assert again.store_id == first
    assert not again.is_log_lost


def test_two_databases_have_two_identities(path: Path, tmp_path: Path) -> None:
    assert open_store(path).store_id != open_store(tmp_path / "other.db").store_id


def test_the_identity_is_on_disk_before_anything_else_and_outlives_a_kill(path: Path, tmp_path: Path) -> None:
    store = open_store(path)
    left = killed(path, tmp_path / "killed")

    again = open_store(left)
    assert again.store_id == store.store_id
    assert not again.is_log_lost


def test_a_database_of_the_first_version_gets_an_identity_once(path: Path) -> None:
    store = open_store(path)
    store.commit([Persist("ledger", "g0", b"x")])
    store._connection.execute("DELETE FROM about WHERE key NOT IN ('cluster_label', 'node', 'generation')")
    store._connection.close()

    first = open_store(path)
    identity = first.store_id
    assert first.load() == {"ledger": {"g0": b"x"}}
    first.close()
    assert open_store(path).store_id == identity


def test_a_deleted_database_comes_back_with_another_identity(path: Path) -> None:
    store = open_store(path)
    before = store.store_id
    store.commit([Persist("register", "j", b"1")])
    store.close()
    path.unlink()

    again = open_store(path)
    assert again.store_id != before
    assert again.load() == {}


def test_a_log_left_behind_by_a_deleted_database_does_not_bring_it_back(path: Path, tmp_path: Path) -> None:
    store = open_store(path)
    store.commit([Persist("register", "j", b"1")])
    left = killed(path, tmp_path / "killed")
    left.unlink()

    again = open_store(left)
    assert again.store_id != store.store_id
    assert again.load() == {}


@pytest.mark.parametrize("size_bytes", [100, 5_000, 40_000])
def test_a_truncated_database_is_refused_and_left_alone(path: Path, size_bytes: int) -> None:
    store = open_store(path)
    store.commit([Persist("register", f"job{index}", os.urandom(400)) for index in range(200)])
    store.close()
    content = path.read_bytes()[:size_bytes]
    path.write_bytes(content)

    with pytest.raises(StorageError, match="damaged") as caught:
        open_store(path)
    assert "mv " in caught.value.remedy
    assert "backup" not in caught.value.remedy
    assert path.read_bytes() == content


@pytest.mark.parametrize("rest", [b"", b"S"])
def test_a_database_truncated_to_nothing_is_a_new_one(path: Path, rest: bytes) -> None:
    store = open_store(path)
    before = store.store_id
    store.close()
    path.write_bytes(rest)

    assert open_store(path).store_id != before


def test_a_database_whose_last_writes_are_missing_keeps_its_content_under_another_identity(
    path: Path, tmp_path: Path
) -> None:
    first = open_store(path)
    before = first.store_id
    first.commit([Persist("register", "j", b"1")])
    first.close()
    store = open_store(path)
    store.commit([Persist("register", "j", b"2")])
    left = killed(path, tmp_path / "killed")
    log_of(left).unlink()

    again = open_store(left)
    assert again.is_log_lost
    assert again.store_id != before
    assert again.load() == {"register": {"j": b"1"}}


def test_a_database_of_another_swarm_of_the_same_name_is_refused_with_its_log(path: Path, tmp_path: Path) -> None:
    store = open_store(path)
    store.commit([Persist("register", "j", b"1")])
    left = killed(path, tmp_path / "killed")
    before = [left.read_bytes(), log_of(left).read_bytes()]

    with pytest.raises(StorageError, match="belongs to another swarm") as caught:
        open_store(left, keys=(FOREIGN_KEY,))
    assert "cluster_key_file" in caught.value.remedy
    assert "keyring_files" in caught.value.remedy
    assert [left.read_bytes(), log_of(left).read_bytes()] == before
    assert open_store(left).store_id == store.store_id


def test_a_key_is_changed_step_by_step_and_not_in_one_leap(path: Path) -> None:
    for keys in ((KEY,), (KEY, NEXT_KEY), (NEXT_KEY, KEY), (NEXT_KEY,)):
        open_store(path, keys=keys).close()

    with pytest.raises(StorageError, match="its key differs"):
        open_store(path, keys=(KEY,))


def test_the_key_itself_is_not_in_the_file(path: Path) -> None:
    open_store(path).close()
    content = path.read_bytes()
    assert KEY not in content
    assert KEY.hex().encode() not in content


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be opened"):
        open_store(tmp_path / "absent" / "agent.db")


def test_a_second_agent_on_one_data_directory_is_told_the_first_ones_process(tmp_path: Path) -> None:
    script = "import sys, pathlib; from swarm_agent.storage.lock import DataDirectoryLock; "
    script += "DataDirectoryLock(pathlib.Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"process {holder.pid}"):
            DataDirectoryLock(tmp_path).acquire()
        holder.kill()

    DataDirectoryLock(tmp_path).acquire().release()


def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageError, match="cannot be used as data directory"):
        DataDirectoryLock(tmp_path / "file" / "data").acquire()


def test_no_other_account_can_open_or_lock_the_database(path: Path) -> None:
    before = os.umask(0o022)
    try:
        path.touch(0o644)
        store = open_store(path)
        store.commit([Persist("room", "key", b"value")])
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.glob("agent.db*")}
        store.close()
    finally:
        os.umask(before)
    assert modes == {"agent.db": 0o600, "agent.db-wal": 0o600, "agent.db-acknowledged": 0o600}


@pytest.mark.parametrize(("found", "left"), [(None, 0o711), (0o755, 0o711), (0o700, 0o700), (0o1777, 0o1777)])
def test_others_may_pass_through_the_data_directory_and_not_list_it(tmp_path: Path, found: int, left: int) -> None:
    folder = tmp_path / "data"
    if found is not None:
        folder.mkdir()
        folder.chmod(found)
    DataDirectoryLock(folder).acquire().release()
    assert stat.S_IMODE(folder.stat().st_mode) == left

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_agent.storage import SCHEMA_VERSION, DataDirectoryLock, Store
from swarmsched.effects import Persist
from swarmsched.errors import StorageError


def open_store(path: Path, label: str = "swarm", node: str = "a") -> Store:
    return Store.open(path, label=label, node=node)


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

    with pytest.raises(StorageError, match=f"schema version {SCHEMA_VERSION + 1}"):
        open_store(path)


@pytest.mark.parametrize(("label", "node", "named"), [("other", "a", "swarm 'swarm'"), ("swarm", "b", "node 'a'")])
def test_the_file_of_another_swarm_or_node_is_refused(path: Path, label: str, node: str, named: str) -> None:
    open_store(path).close()

    with pytest.raises(StorageError, match=named):
        open_store(path, label, node)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be opened"):
        open_store(tmp_path / "absent" / "agent.db")


def test_a_second_agent_on_one_data_directory_is_told_the_first_ones_process(tmp_path: Path) -> None:
    script = "import sys, pathlib; from swarm_agent.storage import DataDirectoryLock; "
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

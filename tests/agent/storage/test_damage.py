"""Whatever becomes of a file of the store, an older state never comes back under the same identity."""

import contextlib
import itertools
import os
import random
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_agent.storage.store import Store
from swarmsched.effects import Persist
from swarmsched.errors import StorageError

KEY = b"k" * 32
Truth = dict[tuple[str, str], bytes]


class Life:
    """A store that an agent uses, and what it has acknowledged."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        folder.mkdir()
        self.folder, self.rng = folder, rng
        self.store = open_in(folder)
        self.identity, self.truth = self.store.store_id, Truth()
        self.store.next_generation(5.0)

    def commit(self, count: int) -> None:
        """Some transactions of one to three entries."""
        rng = self.rng
        for _ in range(count):
            entries = []
            for _ in range(rng.randint(1, 3)):
                room, key = rng.choice(["register", "task", "ledger"]), f"job{rng.randrange(40)}"
                value = rng.randbytes(rng.randint(5, 600)) if rng.random() < 0.9 else None
                entries.append(Persist(room, key, value))
                self.truth |= {(room, key): value} if value is not None else {}
                if value is None:
                    self.truth.pop((room, key), None)
            self.store.commit(entries)

    def fold(self) -> None:
        """As SQLite does once the log has grown: all of it goes into the database, and the log begins anew."""
        self.store._connection.execute("PRAGMA wal_checkpoint(RESTART)")

    def killed(self, into: Path, *, leave: str = "") -> Path:
        """The files as a kill -9 leaves them, without those whose name ends so."""
        into.mkdir()
        for file in self.folder.iterdir():
            if not leave or not file.name.endswith(leave):
                shutil.copy(file, into / file.name)
        return into


def open_in(folder: Path) -> Store:
    return Store.open(folder / "agent.db", label="swarm", node="a", keys=(KEY,))


def is_as_acknowledged(folder: Path, life: Life) -> bool | None:
    """None where it does not start, or is another holder from now on; otherwise whether nothing was forgotten."""
    store = None
    try:
        store = open_in(folder)
        loaded = store.load()
    except StorageError as error:
        return None if error.remedy else False
    finally:
        if store is not None:
            store.close()
    found = {(room, key): value for room, values in loaded.items() for key, value in values.items()}
    return found == life.truth if store.store_id == life.identity else None


def damage(folder: Path, rng: random.Random, names: str = "agent.db*") -> str:
    file = rng.choice(sorted(each for each in folder.glob(names) if each.stat().st_size))
    content, kind = bytearray(file.read_bytes()), rng.choice(["flip", "flip", "flip", "cut", "zeros"])
    at = rng.randrange(len(content))
    if kind == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    else:
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    with file.open("r+b") as writable:  # in place, for whoever has it open
        writable.truncate(len(content))
        writable.write(content)
    return f"{kind} at {at} of {file.name}"


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: thousands of commits are synced."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    life = Life(tmp_path / "life", random.Random(3))
    life.commit(60)
    yield life
    life.store.close()


@pytest.mark.parametrize("leave", ["", "-acknowledged"])
def test_damage_after_a_kill_forgets_nothing_under_the_same_identity(life: Life, tmp_path: Path, leave: str) -> None:
    outcomes = []
    for trial in range(120):
        life.commit(life.rng.randint(0, 3))
        if trial % 9 == 0:
            life.fold()
        left = life.killed(tmp_path / "left", leave=leave)
        done = damage(left, life.rng)
        outcomes.append(is_as_acknowledged(left, life))
        assert outcomes[-1] is not False, f"{done}: older under the same identity"
        shutil.rmtree(left)
    assert {True, None} == set(outcomes)


def test_damage_of_a_store_that_was_closed_forgets_nothing_under_the_same_identity(life: Life, tmp_path: Path) -> None:
    life.store.close()
    outcomes = []
    for _ in range(80):
        left = life.killed(tmp_path / "left")
        done = damage(left, life.rng)
        outcomes.append(is_as_acknowledged(left, life))
        assert outcomes[-1] is not False, f"{done}: older under the same identity"
        shutil.rmtree(left)
    assert {True, None} == set(outcomes)


def test_damage_while_it_is_in_use_forgets_nothing_under_the_same_identity(tmp_path: Path) -> None:
    """What the store does after that may fail: then nothing of it was acknowledged."""
    outcomes = []
    for trial in range(60):
        rng = random.Random(trial)
        life = Life(tmp_path / "life", rng)
        life.commit(rng.randint(1, 60))
        if trial % 3 == 0:
            life.fold()
        done = damage(life.folder, rng)
        for step in range(6):
            before = dict(life.truth)
            try:
                life.commit(1)
                if step == 3:
                    life.fold()
            except Exception:  # noqa: BLE001  # as the driver: what did not return is not on disk
                life.truth = before
        left = life.killed(tmp_path / "left")
        outcomes.append(is_as_acknowledged(left, life))
        assert outcomes[-1] is not False, f"trial {trial}, {done}: older under the same identity"
        life.store.close()
        shutil.rmtree(left)
        shutil.rmtree(life.folder)
    assert {True, None} == set(outcomes)


def frames(log: Path) -> tuple[int, int]:
    """How many there are, and how many bytes each takes."""
    content = log.read_bytes()
    (page,) = struct.unpack(">I", content[8:12])
    return (len(content) - 32) // (24 + page), 24 + page


def test_a_log_that_ends_too_early_or_is_an_earlier_one_costs_the_identity(life: Life, tmp_path: Path) -> None:
    """All that is left of it is whole, so nothing but the count tells."""
    earlier = life.killed(tmp_path / "earlier")
    life.commit(3)
    log = life.folder / "agent.db-wal"
    count, size = frames(log)
    cuts = [log.read_bytes()[: 32 + size * kept] for kept in range(1, count, 20)]
    for content in [*cuts, (earlier / "agent.db-wal").read_bytes()]:
        left = life.killed(tmp_path / "left")
        (left / "agent.db-wal").write_bytes(content)
        assert is_as_acknowledged(left, life) is None, len(content)
        shutil.rmtree(left)
    left = life.killed(tmp_path / "left")
    shutil.copy(earlier / "agent.db-acknowledged", left)  # it was not synced: the power failed
    flipped = bytearray(log.read_bytes())
    flipped[32 + size * frames(earlier / "agent.db-wal")[0]] ^= 1
    (left / "agent.db-wal").write_bytes(flipped)
    assert is_as_acknowledged(left, life) is None, "whole transactions stand behind the first that is not"
    shutil.copy(life.folder / "agent.db-acknowledged", earlier)
    assert is_as_acknowledged(earlier, life) is None, "both files are earlier ones"


def test_a_transaction_that_a_kill_or_a_power_cut_tore_costs_no_identity(life: Life, tmp_path: Path) -> None:
    """Nobody was told of it."""
    at_rest = life.killed(tmp_path / "rest")
    acknowledged = dict(life.truth)
    life.store.commit([Persist("register", f"job{number}", bytes(4_000)) for number in range(5)])
    whole = (life.folder / "agent.db-wal").read_bytes()
    (count, size), (before, _) = frames(life.folder / "agent.db-wal"), frames(at_rest / "agent.db-wal")
    assert count > before + 2
    life.truth = acknowledged
    for lost, rest in itertools.product(range(before, count), (b"", bytes(size), os.urandom(size))):
        left = tmp_path / "left"
        shutil.copytree(at_rest, left)
        torn = (
            whole[: 32 + lost * size] + rest + whole[32 + lost * size + len(rest) : None if rest else 32 + lost * size]
        )
        (left / "agent.db-wal").write_bytes(torn)
        assert is_as_acknowledged(left, life) is True, (lost, len(rest))
        shutil.rmtree(left)


@pytest.mark.parametrize("key", ["is_open", "store_id", "swarm"])
def test_what_the_database_says_of_itself_is_not_believed_where_it_was_changed(life: Life, key: str) -> None:
    """A file that was closed would be asked for nothing that it may have lost."""
    life.store.close()
    with contextlib.closing(sqlite3.connect(life.folder / "agent.db")) as connection:
        connection.execute("UPDATE about SET value = '1' || substr(value, 2) || '0' WHERE key = ?", (key,))
        connection.commit()
    with pytest.raises(StorageError, match=r"what it says of itself|belongs to another swarm") as caught:
        open_in(life.folder)
    assert caught.value.remedy


def test_what_stands_in_the_place_of_the_count_is_named(tmp_path: Path) -> None:
    (tmp_path / "agent.db-acknowledged").mkdir()
    with pytest.raises(StorageError, match=r"cannot be used: .*agent\.db-acknowledged"):
        open_in(tmp_path)


def test_entries_that_an_agent_without_checksums_wrote_are_read_and_have_them_from_then_on(tmp_path: Path) -> None:
    """Of the first version, and of one that somebody has gone back to for a while."""
    path = tmp_path / "agent.db"
    store = open_in(tmp_path)
    store.next_generation(5.0)
    store.commit([Persist("register", "k", b"\x91\x05")])
    for table in ("DELETE FROM entries", "DROP TABLE checks"):
        execute = store._connection.execute
        execute(table)
        execute(
            "INSERT INTO entries VALUES ('register', 'j', ?) ON CONFLICT DO UPDATE SET value = ?", (b"\x91\x01",) * 2
        )
        execute("UPDATE about SET value = value + 1 WHERE key = 'generation'")
        execute("UPDATE about SET value = '0' WHERE key = 'is_open'")
        identity = store.store_id
        store._connection.close()
        store = open_in(tmp_path)
        assert (store.load(), store.store_id) == ({"register": {"j": b"\x91\x01"}}, identity)
        store.next_generation(5.0)
    store.commit([Persist("register", "j", b"\x91\x02")])
    store.close()
    content = path.read_bytes()
    assert content.count(b"registerj\x91") == 1
    path.write_bytes(content.replace(b"registerj\x91", b"registerk\x91"))
    again = open_in(tmp_path)
    with pytest.raises(StorageError, match="register/j: unreadable entry: it is not there any more") as caught:
        again.load()
    assert f"mv {path}" in caught.value.remedy
    again.close()
    path.write_bytes(content.replace(b"registerj\x91\x02", b"registerj\x91\x03"))
    again = open_in(tmp_path)
    with pytest.raises(StorageError, match="register/j: unreadable entry: its checksum does not match"):
        again.load()
    again.close()

"""The agent's database: SQLite in WAL mode with synchronous=FULL, so that a commit that returned is on disk.

It holds what safety rests on (generation, promises and accepted records, ledger, tasks) as opaque entries of rooms;
only the core knows what is in them.  A file that cannot be used as it is stays untouched: an operator decides.

A database has a random identity, made with it: whoever loses the one loses the other, and other nodes will not take
the new one for the holder that the old one was.  What must not happen is that an older state comes back under the
same identity: it would have forgotten promises.  A file whose write-ahead log is missing, cut or damaged gets a new
identity therefore; a backup of both, put back, cannot be told from the real one and must never be.  Each value has a
checksum of itself and its place, for SQLite looks at the structure of a file and not at what is in it; they are in a
table of their own, so that agents of 0.1.0, which know none, can go on with the file.
"""

import hashlib
import hmac
import os
import secrets
import sqlite3
import urllib.parse
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Self

from swarm_agent.storage.log import Acknowledged, LogFrames
from swarmsched.effects import Persist
from swarmsched.errors import StorageError
from swarmsched.gossip.identity import GENERATION_KEY, GENERATION_ROOM, next_generation

SCHEMA_VERSION = 1
APPLICATION_ID = 0x53574D31  # "SWM1": tells our files from other programs' databases
BUSY_TIMEOUT_S = 5.0
WAL_BYTES_KEPT = 16 * 2**20
DATABASE_FILE = "agent.db"
ACKNOWLEDGED_SUFFIX = "-acknowledged"
STORE_ID_BITS = 53
NO_KEYS: tuple[bytes, ...] = ()

_SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (room TEXT, key TEXT, value BLOB NOT NULL, PRIMARY KEY (room, key)) WITHOUT ROWID;
"""
_CHECKS = (
    "CREATE TABLE IF NOT EXISTS checks (room TEXT, key TEXT, value INTEGER, PRIMARY KEY (room, key)) WITHOUT ROWID"
)
_PUT = "INSERT INTO entries VALUES (?, ?, ?) ON CONFLICT (room, key) DO UPDATE SET value = excluded.value"
_DELETE = "DELETE FROM entries WHERE room = ? AND key = ?"
_PUT_CHECK = "INSERT INTO checks VALUES (?, ?, ?) ON CONFLICT (room, key) DO UPDATE SET value = excluded.value"
_DELETE_CHECK = "DELETE FROM checks WHERE room = ? AND key = ?"
_PUT_ABOUT = "INSERT INTO about VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


class Store:
    """An open database.  `commit` may be called from one other thread, as long as calls do not overlap."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path
        self._acknowledged = Acknowledged(path.with_name(path.name + ACKNOWLEDGED_SUFFIX))
        self._commits, self._own_id = 0, ""
        self.is_log_lost = False  # it came back without its last writes, and has a new identity

    @classmethod
    def open(cls, path: Path, *, label: str, node: str, keys: Sequence[bytes] = NO_KEYS) -> Self:
        """Open or make the database of this node of this swarm; its identity is on disk before this returns.

        The swarm is known by its label and by its keys, of which only keyed hashes are kept: one of `keys` must have
        been among those of the last start, so that a key can be changed.

        Raises `StorageError` for a file that is damaged, of another program, swarm or node, or of a newer schema;
        the file is left as it was.
        """
        had_log = path.with_name(f"{path.name}-wal").exists()
        with _complaints(path):
            if path.exists() and path.stat().st_size:
                _examine(path, label, node, keys)
            _make_private(path)
            store = cls(
                sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False), path
            )
            try:
                store._prepare(label, node)
                store._adopt(label, keys, is_log_lost=store._is_log_lost() if had_log else True)
            except BaseException:
                store._acknowledged.close()
                store._connection.close()
                raise
        return store

    def load(self) -> dict[str, dict[str, bytes]]:
        """All entries by room and key, as the core's `Restored` wants them."""
        rooms: dict[str, dict[str, bytes]] = {}
        try:
            checks = {(room, key): value for room, key, value in self._connection.execute("SELECT * FROM checks")}
            for room, key, value in self._connection.execute("SELECT room, key, value FROM entries ORDER BY room, key"):
                rooms.setdefault(room, {})[key] = value
                _compare(room, key, value, checks.pop((room, key), None))
            for room, key in checks:
                raise StorageError(f"{room}/{key}", "unreadable entry: it is not there any more", "")
        except sqlite3.DatabaseError as error:
            raise _damaged(self.path, str(error)) from error
        except StorageError as error:
            raise self.unusable(error) from error
        return rooms

    def unusable(self, error: StorageError) -> StorageError:
        """What the core says of an entry, as an operator needs it: with the file that it is in, and a remedy."""
        return StorageError(str(self.path), str(error), error.remedy or _aside(self.path))

    def commit(self, entries: Sequence[Persist]) -> None:
        """Write all entries in one transaction and return once it is on disk.

        Raises `sqlite3.Error` when the disk refuses; then nothing of the transaction was kept.
        """
        with self._transaction():
            for entry in entries:
                if entry.value is None:
                    self._connection.execute(_DELETE, (entry.room, entry.key))
                    self._connection.execute(_DELETE_CHECK, (entry.room, entry.key))
                else:
                    self._connection.execute(_PUT, (entry.room, entry.key, entry.value))
                    self._connection.execute(_PUT_CHECK, _check(entry.room, entry.key, entry.value))
            self._connection.execute(_PUT_ABOUT, ("commits", str(self._commits + 1)))
        self._commits += 1
        self._acknowledged.note(self._own_id, self._commits)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """On disk after the block, or nothing of it."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def next_generation(self, now_utc_s: float) -> int:
        """A number above all that earlier lives used, on disk before it is returned.

        Raises `StorageError` when an earlier life has left something that is no number.
        """
        begun = _about(self._connection).get("generation")
        where = (GENERATION_ROOM, GENERATION_KEY)
        risen = self._connection.execute("SELECT value FROM entries WHERE room = ? AND key = ?", where).fetchone()
        try:
            if risen:
                query = "SELECT value FROM checks WHERE room = ? AND key = ?"
                _compare(*where, risen[0], *(self._connection.execute(query, where).fetchone() or (None,)))
            generation = next_generation(int(begun or 0), risen[0] if risen else None, now_utc_s)
        except StorageError as error:
            raise self.unusable(error) from error
        with self._transaction():
            self._put_about(generation=str(generation), checked=str(generation))
        return generation

    @property
    def store_id(self) -> int:
        """The random identity of this database: 1 to 2^53 - 1."""
        return int(self._own_id)

    def close(self) -> None:
        """Close the file; no other call may follow.  All of the log is in the file then, and the log is removed."""
        with suppress(sqlite3.Error), self._transaction():  # a disk that takes nothing gives a new identity next time
            self._put_about(is_open="0")
        self._connection.close()
        self._acknowledged.close()

    def _prepare(self, label: str, node: str) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # so that the index of the log is in no file, which may be damaged
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
        (version,) = execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._create(label, node)

    def _create(self, label: str, node: str) -> None:
        """All or nothing, so that a power cut leaves an empty file rather than half a schema."""
        self._connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.strip().splitlines():
            self._connection.execute(statement)
        self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._connection.execute(_PUT_ABOUT, ("cluster_label", label))
        self._connection.execute(_PUT_ABOUT, ("node", node))
        self._connection.execute(_PUT_ABOUT, ("store_id", _new_store_id()))  # durable with the first byte of it
        self._connection.execute("COMMIT")

    def _is_log_lost(self) -> bool:
        """Whether what was acknowledged in an earlier life, which was not closed, is not all there."""
        about = _about(self._connection)
        if about.get("is_open") != "1":
            return False
        frames = LogFrames.read(self.path.with_name(f"{self.path.name}-wal"))
        _, valid, _ = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        acknowledged = self._acknowledged.read(about.get("store_id", ""))
        is_behind = acknowledged is not None and _count(self.path, about) < acknowledged
        return is_behind or frames.is_damaged(valid, may_be_torn=acknowledged is not None)

    def _adopt(self, label: str, keys: Sequence[bytes], *, is_log_lost: bool) -> None:
        """Note today's keys, and that the file is in use from now on; see that it has an identity it may keep."""
        about = _about(self._connection)
        self.is_log_lost = about.get("is_open") == "1" and is_log_lost
        salt = about.get("swarm_salt") or secrets.token_hex(8)
        marks = " ".join(_mark(key, label, salt) for key in keys) or about.get("swarm", "")
        # Files of the first version have no identity.
        is_new = "store_id" not in about or self.is_log_lost
        self._own_id = _new_store_id() if is_new else about["store_id"]
        self._commits = _count(self.path, about)
        with self._transaction():
            if not _is_checked(about):
                self._check_all()
            checked = about.get("generation", "")
            self._put_about(store_id=self._own_id, swarm_salt=salt, swarm=marks, is_open="1", checked=checked)
        self._connection.execute(
            "PRAGMA wal_checkpoint(TRUNCATE)"
        )  # the mark must be in the file itself, should its log be lost
        self._acknowledged.begin(self._own_id, self._commits)
        self.commit(())  # a log that is in use is never empty

    def _check_all(self) -> None:
        """Take entries as they are: an agent that knows no checksums has written some of them."""
        self._connection.execute(_CHECKS)
        self._connection.execute("DELETE FROM checks")
        rows = self._connection.execute("SELECT room, key, value FROM entries").fetchall()
        self._connection.executemany(_PUT_CHECK, [_check(*row) for row in rows])

    def _put_about(self, **changes: str) -> None:
        """With a checksum of the whole, but for the count of commits."""
        about = _about(self._connection) | changes
        self._connection.executemany(_PUT_ABOUT, [*changes.items(), ("check", _check_of(about))])


def _make_private(path: Path) -> None:
    """The agent's alone: jobs must neither read it nor hold its locks.  SQLite makes the log with the same mode."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for file in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
            with suppress(FileNotFoundError):
                file.chmod(0o600)
    except OSError as error:
        raise StorageError(str(path), f"cannot be opened: {error}", "check path, permissions and space") from error


def _examine(path: Path, label: str, node: str, keys: Sequence[bytes]) -> None:
    """Refuse what cannot be used.  Read only, so that not even the log is folded into a file that is refused."""
    address = f"file:{urllib.parse.quote(str(path))}?mode=ro"
    with closing(sqlite3.connect(address, timeout=BUSY_TIMEOUT_S, isolation_level=None, uri=True)) as connection:
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if tables and application_id != APPLICATION_ID:
            raise StorageError(str(path), "is a database of another program", "set another data_dir")
        if version > SCHEMA_VERSION:
            problem = f"has schema version {version}, this agent knows {SCHEMA_VERSION} at most"
            raise StorageError(str(path), problem, "start the newer agent that wrote it, or set another data_dir")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise _damaged(path, verdict)
        if version:
            about = _about(connection)
            _check_owner(path, about, label, node, keys)
            if _is_checked(about) and about.get("check") != _check_of(about):
                raise _damaged(path, "what it says of itself does not match its checksum")


def _check_owner(path: Path, about: Mapping[str, str], label: str, node: str, keys: Sequence[bytes]) -> None:
    for key, wanted, what in (("cluster_label", label, "swarm"), ("node", node, "node")):
        if about.get(key) != wanted:
            problem = f"belongs to {what} {about.get(key)!r}, this agent is of {what} {wanted!r}"
            setting = "name" if key == "node" else key
            remedy = f"correct {setting}, set another data_dir, or move the old one aside"
            raise StorageError(str(path), problem, remedy)
    known = about.get("swarm", "").split()
    if known and keys and not any(_mark(key, label, about.get("swarm_salt", "")) in known for key in keys):
        remedy = (
            "set cluster_key_file to the key of the swarm that it belongs to (or, if that swarm has changed its key "
            "meanwhile, name the former key in keyring_files once), set another data_dir, or move the old one aside"
        )
        raise StorageError(str(path), f"belongs to another swarm that is called {label!r} too: its key differs", remedy)


def _check_of(about: Mapping[str, str]) -> str:
    rows = sorted(row for row in about.items() if row[0] not in ("check", "commits"))
    return f"{zlib.crc32(repr(rows).encode()):08x}"


def _count(path: Path, about: Mapping[str, str]) -> int:
    try:
        return int(about.get("commits", "0"))
    except ValueError as error:
        raise _damaged(path, f"its count of commits is {about['commits'][:20]!r}") from error


def _is_checked(about: Mapping[str, str]) -> bool:
    """False where the last life, which has its generation in here, was of an agent that knows no checksums."""
    return about.get("checked") == about.get("generation", "")


def _check(room: str, key: str, value: bytes) -> tuple[str, str, int]:
    return room, key, zlib.crc32(f"{room}\0{key}\0".encode() + value)


def _compare(room: str, key: str, value: bytes, check: int | None) -> None:
    """Raises `StorageError`, without a remedy, for an entry that is not as it was written; None: nobody knows."""
    if check not in (None, _check(room, key, value)[2]):
        raise StorageError(f"{room}/{key}", "unreadable entry: its checksum does not match", "")


def _about(connection: sqlite3.Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT key, value FROM about"))


@contextmanager
def _complaints(path: Path) -> Iterator[None]:
    """SQLite's complaints as errors that name the file and say what to do."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "unable to open" in str(error):
            raise StorageError(str(path), f"cannot be opened: {error}", "check path, permissions and space") from error
        raise StorageError(str(path), f"cannot be used: {error}", "check permissions and free space") from error
    except sqlite3.DatabaseError as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise StorageError(str(path), f"cannot be used: {error}", "check permissions and free space") from error


def _damaged(path: Path, detail: str) -> StorageError:
    return StorageError(str(path), f"is damaged or not a database ({detail})", _aside(path))


def _aside(path: Path) -> str:
    # Never "restore a backup": votes that were given since would be forgotten under the same identity.
    return (
        f"move it aside with: mv {path} {path}.damaged (and {path.name}-wal beside it); the node then starts with an "
        "empty store, as a new holder, and the other holders of its jobs replace the old one"
    )


def _new_store_id() -> str:
    return str(1 + secrets.randbelow(2**STORE_ID_BITS - 1))


def _mark(key: bytes, label: str, salt: str) -> str:
    """What proves later that the same key was in use here, and tells nothing about it."""
    return hmac.new(key, f"swarmsched store {label} {salt}".encode(), hashlib.sha256).hexdigest()[:32]

"""The agent's database: SQLite in WAL mode with synchronous=FULL, so that a commit that returned is on disk.

It holds what safety rests on (generation, promises and accepted records, ledger, tasks) as opaque entries of rooms;
only the core knows what is in them.  A file that cannot be used as it is stays untouched: an operator decides.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from swarmsched.effects import Persist
from swarmsched.errors import StorageError

SCHEMA_VERSION = 1
APPLICATION_ID = 0x53574D31  # "SWM1": tells our files from other programs' databases
BUSY_TIMEOUT_S = 5.0
WAL_BYTES_KEPT = 16 * 2**20
DATABASE_FILE = "agent.db"

_SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (room TEXT, key TEXT, value BLOB NOT NULL, PRIMARY KEY (room, key)) WITHOUT ROWID;
"""
_PUT = "INSERT INTO entries VALUES (?, ?, ?) ON CONFLICT (room, key) DO UPDATE SET value = excluded.value"
_DELETE = "DELETE FROM entries WHERE room = ? AND key = ?"
_PUT_ABOUT = "INSERT INTO about VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


class Store:
    """An open database.  `commit` may be called from one other thread, as long as calls do not overlap."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    @classmethod
    def open(cls, path: Path, *, label: str, node: str) -> Self:
        """Open or make the database of this node of this swarm.

        Raises `StorageError` for a file that is damaged, of another program, swarm or node, or of a newer schema;
        the file is left as it was.
        """
        try:
            connection = sqlite3.connect(path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise StorageError(str(path), f"cannot be opened: {error}", "check path, permissions and space") from error
        store = cls(connection, path)
        try:
            store._check_kind()
            store._prepare(label, node)
            store._check_owner(label, node)
        except sqlite3.OperationalError as error:
            store.close()
            raise StorageError(str(path), f"cannot be used: {error}", "check permissions and free space") from error
        except sqlite3.DatabaseError as error:
            store.close()
            raise _damaged(path, str(error)) from error
        except StorageError:
            store.close()
            raise
        return store

    def load(self) -> dict[str, dict[str, bytes]]:
        """All entries by room and key, as the core's `Restored` wants them."""
        rooms: dict[str, dict[str, bytes]] = {}
        try:
            for room, key, value in self._connection.execute("SELECT room, key, value FROM entries ORDER BY room, key"):
                rooms.setdefault(room, {})[key] = value
        except sqlite3.DatabaseError as error:
            raise _damaged(self.path, str(error)) from error
        return rooms

    def commit(self, entries: Sequence[Persist]) -> None:
        """Write all entries in one transaction and return once it is on disk.

        Raises `sqlite3.Error` when the disk refuses; then nothing of the transaction was kept.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for entry in entries:
                if entry.value is None:
                    self._connection.execute(_DELETE, (entry.room, entry.key))
                else:
                    self._connection.execute(_PUT, (entry.room, entry.key, entry.value))
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def next_generation(self, now_utc_s: float) -> int:
        """A number above every earlier one, on disk before it is returned: max(stored + 1, seconds since 1970)."""
        row = self._connection.execute("SELECT value FROM about WHERE key = 'generation'").fetchone()
        generation = max(int(row[0]) + 1 if row else 0, int(now_utc_s))
        self._connection.execute(_PUT_ABOUT, ("generation", str(generation)))
        return generation

    def close(self) -> None:
        """Close the file; no other call may follow."""
        self._connection.close()

    def _check_kind(self) -> None:
        """Refuse foreign and newer files before anything, even the journal mode, is changed in them."""
        (application_id,) = self._connection.execute("PRAGMA application_id").fetchone()
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if tables and application_id != APPLICATION_ID:
            raise StorageError(str(self.path), "is a database of another program", "set another data_dir")
        if version > SCHEMA_VERSION:
            problem = f"has schema version {version}, this agent knows {SCHEMA_VERSION} at most"
            raise StorageError(str(self.path), problem, "start the newer agent that wrote it, or set another data_dir")

    def _prepare(self, label: str, node: str) -> None:
        execute = self._connection.execute
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
        (verdict,) = execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise _damaged(self.path, verdict)
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
        self._connection.execute("COMMIT")

    def _check_owner(self, label: str, node: str) -> None:
        about = dict(self._connection.execute("SELECT key, value FROM about"))
        for key, wanted, what in (("cluster_label", label, "swarm"), ("node", node, "node")):
            if about.get(key) != wanted:
                problem = f"belongs to {what} {about.get(key)!r}, this agent is of {what} {wanted!r}"
                setting = "name" if key == "node" else key
                remedy = f"correct {setting}, set another data_dir, or move the old one aside"
                raise StorageError(str(self.path), problem, remedy)


def _damaged(path: Path, detail: str) -> StorageError:
    remedy = (
        f"restore it from a backup, or move it aside with: mv {path} {path}.damaged (and {path.name}-wal beside it); "
        "the node then starts without its votes and bookings"
    )
    return StorageError(str(path), f"is damaged or not a database ({detail})", remedy)

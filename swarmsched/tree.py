"""The manifest of a shipped working directory: which files, links and empty folders, by content.

Client and agents share it.  The client builds one from a folder, its canonical bytes are stored as a blob like any
file, and `JobSpec.tree` is the SHA-256 of those bytes.  An agent that unpacks one has checked it here first: no path
leaves the folder, nothing is written through a link, and every count has a limit.

Why links are safe: an entry never lies below another entry that is a file or a link, so the folder that holds a link
is a real folder; a target may have '..' only at its beginning, so it climbs real folders only, never as far as above
the root; the rest of the target goes down, at worst through other links of which the same is true.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Self

from swarmsched.errors import SwarmError

FORMAT = 1
ENTRIES_LIMIT = 100_000
MANIFEST_BYTES_LIMIT = 32 * 2**20
FILE_BYTES_LIMIT = 16 * 2**30
TREE_BYTES_LIMIT = 64 * 2**30
PATH_BYTES_LIMIT = 1_024
SEGMENT_BYTES_LIMIT = 255
DEPTH_LIMIT = 64

_KEYS = {
    "file": {"path", "kind", "mode", "size", "sha256"},
    "link": {"path", "kind", "target"},
    "dir": {"path", "kind"},
}
_HEX = frozenset("0123456789abcdef")


class EntryKind(Enum):
    """What an entry is; devices, sockets and pipes cannot be expressed."""

    FILE = "file"
    LINK = "link"
    DIR = "dir"  # an empty folder; others follow from the paths of files


class BadTree(SwarmError):
    """A manifest that must not be unpacked; nothing was written."""

    code = "bad_tree"

    def __init__(self, problem: str, path: str = "") -> None:
        self.problem, self.path = problem, path
        super().__init__(f"{path!r}: {problem}" if path else problem)


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One file, link or empty folder.  `path` is relative with '/' between segments.

    For files: `mode` are permission bits (0 to 0o777), `size_bytes` and `sha256` of the content.  For links: `target`.
    """

    path: str
    kind: EntryKind = EntryKind.FILE
    mode: int = 0o644
    size_bytes: int = 0
    sha256: str = ""
    target: str = ""

    def to_json(self) -> dict[str, Any]:
        """The entry with the keys of its kind only."""
        if self.kind is EntryKind.FILE:
            return {
                "path": self.path,
                "kind": "file",
                "mode": self.mode,
                "size": self.size_bytes,
                "sha256": self.sha256,
            }
        if self.kind is EntryKind.LINK:
            return {"path": self.path, "kind": "link", "target": self.target}
        return {"path": self.path, "kind": "dir"}

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Check types and keys of one entry; paths against one another are checked by `Tree`."""
        if not isinstance(document, Mapping):
            raise BadTree("an entry must be an object")
        path, kind = document.get("path"), document.get("kind")
        if not isinstance(path, str):
            raise BadTree("an entry has no path")
        if not isinstance(kind, str) or kind not in _KEYS:
            raise BadTree(f"kind {kind!r} is not one of {', '.join(_KEYS)}", path)
        if set(document) != _KEYS[kind]:
            raise BadTree(f"a {kind} has the keys {', '.join(sorted(_KEYS[kind]))}", path)
        return cls(
            path=path,
            kind=EntryKind(kind),
            mode=_whole(document.get("mode", 0o644), "mode", path),
            size_bytes=_whole(document.get("size", 0), "size", path),
            sha256=_text(document.get("sha256", ""), "sha256", path),
            target=_text(document.get("target", ""), "target", path),
        )


@dataclass(frozen=True, slots=True)
class Tree:
    """A checked manifest.  Build it by `Tree.of` or `Tree.from_bytes`; entries are sorted by path."""

    entries: tuple[TreeEntry, ...]

    @classmethod
    def of(cls, entries: Iterable[TreeEntry]) -> Self:
        """Sort and check; raise `BadTree` for the first thing that is not allowed."""
        ordered = tuple(sorted(entries, key=lambda entry: entry.path))
        _check(ordered)
        return cls(ordered)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a manifest; only its canonical form is accepted, so one tree has one digest."""
        if len(data) > MANIFEST_BYTES_LIMIT:
            raise BadTree(f"the manifest has {len(data)} bytes, more than {MANIFEST_BYTES_LIMIT}")
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadTree(f"the manifest is not JSON: {error}") from error
        if not isinstance(document, Mapping) or set(document) != {"format", "entries"}:
            raise BadTree("the manifest must be an object with format and entries")
        if document["format"] != FORMAT:
            raise BadTree(f"manifest format {document['format']!r} is not {FORMAT}")
        if not isinstance(document["entries"], list):
            raise BadTree("entries must be a list")
        tree = cls.of(TreeEntry.from_json(entry) for entry in document["entries"])
        if tree.to_bytes() != data:
            raise BadTree("the manifest is not in canonical form (sorted, compact JSON)")
        return tree

    def to_bytes(self) -> bytes:
        """Canonical bytes: sorted entries, sorted keys, no white space, UTF-8."""
        document = {"entries": [entry.to_json() for entry in self.entries], "format": FORMAT}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical bytes, 64 hexadecimal digits: the value of `JobSpec.tree`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def files(self) -> tuple[TreeEntry, ...]:
        """Entries with content."""
        return tuple(entry for entry in self.entries if entry.kind is EntryKind.FILE)

    @property
    def blobs(self) -> dict[str, int]:
        """Digest -> size in bytes of each distinct content, in order of first path."""
        return {entry.sha256: entry.size_bytes for entry in self.files}

    @property
    def size_bytes(self) -> int:
        """Bytes of all files once unpacked."""
        return sum(entry.size_bytes for entry in self.files)


def _check(entries: tuple[TreeEntry, ...]) -> None:
    if len(entries) > ENTRIES_LIMIT:
        raise BadTree(f"{len(entries)} entries, more than {ENTRIES_LIMIT}")
    total_bytes = 0
    sizes: dict[str, int] = {}
    paths = {entry.path for entry in entries}
    if len(paths) != len(entries):
        twice = next(a.path for a, b in pairwise(entries) if a.path == b.path)
        raise BadTree("is listed twice", twice)
    folders: set[str] = set()  # known to be no entries; each is looked up once, however many paths share it
    for entry in entries:
        _check_path(entry.path)
        above = entry.path.rpartition("/")[0]
        while above and above not in folders:
            if above in paths:
                raise BadTree(f"lies below {above!r}, which is an entry of its own", entry.path)
            folders.add(above)
            above = above.rpartition("/")[0]
        if entry.kind is EntryKind.LINK:
            _check_target(entry)
        elif entry.kind is EntryKind.FILE:
            _check_file(entry)
            if sizes.setdefault(entry.sha256, entry.size_bytes) != entry.size_bytes:
                raise BadTree("has the digest of another file but not its size", entry.path)
            total_bytes += entry.size_bytes
    if total_bytes > TREE_BYTES_LIMIT:
        raise BadTree(f"{total_bytes} bytes in all, more than {TREE_BYTES_LIMIT}")


def _check_path(path: str) -> None:
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise BadTree("the name is not UTF-8", path) from None
    if not path or len(encoded) > PATH_BYTES_LIMIT:
        raise BadTree(f"a path has 1 to {PATH_BYTES_LIMIT} bytes", path[:80])
    if path.startswith("/"):
        raise BadTree("is absolute", path)
    if path.count("/") >= DEPTH_LIMIT:
        raise BadTree(f"lies {path.count('/')} folders deep, at most {DEPTH_LIMIT - 1} are allowed", path[:80])
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            raise BadTree("has an empty, '.' or '..' segment", path)
        if "\0" in segment or len(segment.encode()) > SEGMENT_BYTES_LIMIT:
            raise BadTree(f"a name has at most {SEGMENT_BYTES_LIMIT} bytes and no NUL", path)


def _check_file(entry: TreeEntry) -> None:
    if not 0 <= entry.mode <= 0o777:
        raise BadTree(f"mode {entry.mode:o} has more than permission bits", entry.path)
    if not 0 <= entry.size_bytes <= FILE_BYTES_LIMIT:
        raise BadTree(f"{entry.size_bytes} bytes, at most {FILE_BYTES_LIMIT} are allowed", entry.path)
    if len(entry.sha256) != 64 or not set(entry.sha256) <= _HEX:
        raise BadTree("has no SHA-256 digest", entry.path)


def _check_target(entry: TreeEntry) -> None:
    problem = target_problem(entry.path, entry.target)
    if problem:
        raise BadTree(problem, entry.path)


def target_problem(path: str, target: str) -> str:
    """Why the link `path` -> `target` may not be in a tree; an empty string when it may."""
    if not target or "\0" in target or len(target.encode(errors="replace")) > PATH_BYTES_LIMIT:
        return f"is a link to {target[:40]!r}, which is no usable target"
    if not _is_utf8(target):
        return "is a link whose target is not UTF-8"
    if target.startswith("/"):
        return f"is a link to the absolute path {target!r}"
    segments = [segment for segment in target.split("/") if segment not in ("", ".")]
    climbs = next((index for index, segment in enumerate(segments) if segment != ".."), len(segments))
    if ".." in segments[climbs:]:
        return f"is a link to {target!r}, which climbs after it has descended"
    if climbs > path.count("/"):
        return f"is a link to {target!r}, which leads out of the folder"
    return ""


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(value: object, key: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadTree(f"{key} must be a whole number, not {value!r}", path)
    return value


def _text(value: object, key: str, path: str) -> str:
    if not isinstance(value, str):
        raise BadTree(f"{key} must be text, not {value!r}", path)
    return value

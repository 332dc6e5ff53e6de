"""Finds the files of a working directory, and ships those that the swarm does not have yet.

What is a project, and so may be shipped without asking: a git work tree (what git would track or offer to track) and
a folder with a `swarm.toml`.  Any other folder only while it is small.  The root of the file system and home
directories are never shipped; neither are .git, .ssh, .aws, .env files and private keys, wherever they lie.
"""

# Importing pathlib costs a tenth of what `swarm run` may take.
# ruff: noqa: PTH110, PTH111, PTH112, PTH114, PTH115, PTH118, PTH123

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

from swarm_client.agents import Agents
from swarm_client.cache import read_cache, write_cache
from swarm_client.config import PROJECT_NAME, folder_with
from swarm_client.failure import SWARM_FAILED, Failure, UsageError
from swarm_client.http import SizedBody
from swarm_client.quantity import show_bytes, show_count
from swarmsched.tree import (
    ENTRIES_LIMIT,
    FILE_BYTES_LIMIT,
    TREE_BYTES_LIMIT,
    BadTree,
    EntryKind,
    Tree,
    TreeEntry,
    target_problem,
)

SMALL_FILES = 1_000
SMALL_BYTES = 20 * 2**20
DIGESTS_PER_REQUEST = 10_000
PACKED_BLOB_BYTES = 4 * 2**20  # larger files are sent alone, streamed
PACK_BYTES = 32 * 2**20
READ_BYTES = 2**20
RACY_S = 2.0  # a file changed this recently may change again without a new time stamp
UPLOAD_ANSWER_S = 120.0
PACKED_TYPE = "application/vnd.swarmsched.blobs"

SECRET_FOLDERS = (".git", ".hg", ".svn", ".ssh", ".aws", ".gnupg")
CACHE_FOLDERS = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules")
SECRET_FILES = ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", ".git-credentials", ".pypirc")
KEY_HEADER_BYTES = 8_192

Show = Callable[[float, str], None]
"""Told after each piece which part of all was sent, and how much that is in words."""

LARGEST_SHOWN = 3
LARGE_REMEDY = "leave some out by sync_exclude in swarm.toml, or use --no-sync with a folder that the nodes see as well"
REFUSAL_REMEDY = "use --no-sync (the same path on the nodes), or put a swarm.toml into the folder that is to be shipped"


class NeverShipped(UsageError):
    """A folder that must not leave this machine as a whole."""


class Patterns:
    """Patterns of paths below the shipped folder, as `.gitignore` has them, but that `*` takes a `/` as well.

    One without a `/` in it fits a name at any depth, any other the path from the shipped folder on; a folder that
    fits stands for all that lies in it.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._of_names: list[re.Pattern[str]] = []
        self._of_paths: list[re.Pattern[str]] = []
        for text in texts:
            wanted = text.rstrip("/")
            if "/" not in wanted:
                self._of_names.append(re.compile(fnmatch.translate(wanted)))
                continue
            wanted = wanted.removeprefix("./").removeprefix("/")
            each_depth = (wanted, wanted.removeprefix("**/").replace("/**/", "/"))
            self._of_paths += [re.compile(fnmatch.translate(each)) for each in dict.fromkeys(each_depth)]

    def fit(self, path: str) -> bool:
        """Whether a path, or a folder that it lies in, is meant."""
        if self._of_names and any(each.match(name) for name in path.split("/") for each in self._of_names):
            return True
        return bool(self._of_paths) and any(
            each.match(place) for place in (*_folders_of(path), path) for each in self._of_paths
        )


class Scan:
    """What was found: the manifest, where its files are, what was left out and why."""

    def __init__(self, root: str, tree: Tree, sources: dict[str, str], left_out: list[str]) -> None:
        self.root, self.tree, self.sources, self.left_out = root, tree, sources, left_out


def find_root(folder: str, home_folders: Sequence[str]) -> tuple[str, str]:
    """(root, kind) with kind "git", "project" or "plain": the nearest work tree or `swarm.toml` upward, else `folder`.

    Raises `NeverShipped` for the file system's root, a home directory, or a folder that holds one.
    """
    if not os.path.isdir(folder):
        raise UsageError(f"working directory {folder} does not exist here", "--no-sync uses a path of the nodes")
    work_tree, project = folder_with(folder, ".git"), folder_with(folder, PROJECT_NAME)
    root = max(work_tree, project, key=len) or folder  # both are `folder` or above it: the longer one is nearer
    kind = "git" if work_tree else "project" if project else "plain"
    real = os.path.realpath(root)
    for home in home_folders:
        real_home = os.path.realpath(home)
        if real_home == real or real_home.startswith(real.rstrip("/") + "/"):
            what = "the root of the file system" if real == "/" else "a home directory"
            raise NeverShipped(f"{root} is {what}, or holds one, and is never shipped", REFUSAL_REMEDY)
    return root, kind


def home_folders() -> list[str]:
    """The caller's home by HOME and by the password file, and root's."""
    import pwd  # needed for this only

    homes = ["/root", os.path.expanduser("~")]
    try:
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return homes  # an account without an entry
    return homes


def scan(root: str, kind: str, exclude: Sequence[str], cache_file: str, include: Sequence[str] = ()) -> Scan:
    """Read the folder.  Raises `UsageError` when it is too large or holds what cannot be shipped.

    `include` brings what git ignores, what `exclude` leaves out and what is a cache or an environment; never a secret.
    """
    left_out: list[str] = []
    wanted, unwanted = Patterns(include), Patterns(exclude)
    paths = _git_paths(root) if kind == "git" else None
    is_small_only = kind == "plain" or (kind == "git" and paths is None)
    if paths is None:
        paths = _walk(root, SMALL_FILES if is_small_only else ENTRIES_LIMIT, wanted)
    elif include:
        paths += ignored_files(root, wanted)
    kept = [
        path
        for path in sorted(set(paths))
        if not _is_secret(path, left_out) and (wanted.fit(path) or not unwanted.fit(path))
    ]
    infos = _infos(root, kept)
    _refuse_too_large(root, infos, is_small_only=is_small_only)
    hashes = _HashCache(cache_file)
    entries: list[TreeEntry] = []
    links: set[str] = set()
    for path, info in infos.items():
        entry = _entry(root, path, info, hashes, left_out)
        if entry is None or (links and not links.isdisjoint(_folders_of(path))):
            continue  # below a link: tracked by git when this was a folder yet, which counts as deleted
        if entry.kind is EntryKind.LINK:
            links.add(path)
        entries.append(entry)
    hashes.save()
    try:
        tree = Tree.of(entries)
    except BadTree as error:
        raise UsageError(f"{root} cannot be shipped: {error}", REFUSAL_REMEDY) from error
    sources = {entry.sha256: os.path.join(root, entry.path) for entry in tree.files}
    return Scan(root, tree, sources, left_out)


def _infos(root: str, paths: Sequence[str]) -> dict[str, os.stat_result]:
    infos = {}
    for path in paths:
        try:
            infos[path] = os.lstat(os.path.join(root, path))
        except (FileNotFoundError, NotADirectoryError):
            continue  # tracked by git and deleted in the work tree
    return infos


def _folders_of(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _refuse_too_large(root: str, infos: dict[str, os.stat_result], *, is_small_only: bool) -> None:
    """Before anything is read, which would take as long as it is large."""
    sizes = {path: info.st_size for path, info in infos.items() if stat.S_ISREG(info.st_mode)}
    if is_small_only and (len(infos) > SMALL_FILES or sum(sizes.values()) > SMALL_BYTES):
        raise _too_large(root)
    for path, size in sizes.items():
        if size > FILE_BYTES_LIMIT:
            problem = (
                f"{path} has {show_bytes(size)}; a file that is shipped has {show_bytes(FILE_BYTES_LIMIT)} at most"
            )
            raise UsageError(problem, LARGE_REMEDY)
    if len(infos) > ENTRIES_LIMIT or sum(sizes.values()) > TREE_BYTES_LIMIT:
        limits = f"at most {ENTRIES_LIMIT:,} and {show_bytes(TREE_BYTES_LIMIT)} are shipped"
        raise UsageError(f"{root} has {_weight(sizes, len(infos))}: {limits}", LARGE_REMEDY)


def _too_large(root: str) -> UsageError:
    """Tells how much there is, which takes a look at all of it, or at as much as could be shipped at most."""
    sizes: dict[str, int] = {}
    for path in _walk(root, ENTRIES_LIMIT, Patterns(()), is_cut=True):
        info = os.lstat(os.path.join(root, path))
        sizes[path] = info.st_size if stat.S_ISREG(info.st_mode) else 0
    limit = f"more than the {SMALL_FILES:,} files and {SMALL_BYTES // 2**20} MiB that are shipped without being asked"
    has = f"has {_weight(sizes, len(sizes))}, {limit}"
    return UsageError(f"{root} is neither a git work tree nor a project, and {has}", REFUSAL_REMEDY)


def _weight(sizes: dict[str, int], count: int) -> str:
    """`48,211 files with 3.4 GiB (outputs/ 3.1 GiB, data/ 200 MiB)`."""
    shares: dict[str, int] = {}
    for path, size in sizes.items():
        first, slash, _ = path.partition("/")
        shares[first + slash] = shares.get(first + slash, 0) + size
    largest = sorted(shares, key=shares.__getitem__, reverse=True)[:LARGEST_SHOWN]
    named = ", ".join(f"{name} {show_bytes(shares[name])}" for name in largest)
    more_than = "more than " * (count > ENTRIES_LIMIT)
    return f"{more_than}{count:,} files with {show_bytes(sum(sizes.values()))} ({named})"


def _git_paths(root: str) -> list[str] | None:
    """Tracked and untracked, not ignored; None where there is no git program."""
    listed = _run_git(root, ["ls-files", "-co", "--exclude-standard", "-z"])
    if listed is None:
        return None
    paths: list[str] = []
    for path in _split(listed):
        if _is_folder(root, path):  # a submodule or a repository inside
            full = os.path.join(root, path)
            inner = _git_paths(full) if os.path.exists(os.path.join(full, ".git")) else []
            paths += [f"{path}/{each}" for each in inner or []]
        else:
            paths.append(path)
    return paths


def _split(listed: bytes) -> list[str]:
    return [path for raw in listed.split(b"\0") if (path := os.fsdecode(raw).rstrip("/"))]


def _is_folder(root: str, path: str) -> bool:
    full = os.path.join(root, path)
    return os.path.isdir(full) and not os.path.islink(full)


def ignored(root: str) -> list[str]:
    """What git ignores in a work tree and in those inside it: files, and folders of which it ignores all."""
    listed = _run_git(root, ["ls-files", "-oi", "--directory", "--exclude-standard", "-z"])
    found = _split(listed or b"")
    for path in _split(_run_git(root, ["ls-files", "-co", "--exclude-standard", "-z"]) or b""):
        if _is_folder(root, path) and os.path.exists(os.path.join(root, path, ".git")):
            found += [f"{path}/{each}" for each in ignored(os.path.join(root, path))]
    return found


def ignored_files(root: str, wanted: Patterns) -> list[str]:
    """Ignored files that are wanted; a cache or an environment is looked into where it is meant itself."""
    found: list[str] = []
    for path in ignored(root):
        if not _is_folder(root, path):
            found.append(path)
        elif wanted.fit(path) or not _is_cache(root, path):
            found += [f"{path}/{each}" for each in _walk(os.path.join(root, path), ENTRIES_LIMIT, wanted, above=path)]
    return [path for path in found if wanted.fit(path)]


def _run_git(folder: str, words: Sequence[str]) -> bytes | None:
    """Standard output of git; by spawn and a pipe, since importing subprocess takes longer than git itself."""
    reading, writing = os.pipe()
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)]
    try:
        command = ["git", "-C", folder, "-c", "core.fsmonitor=false", *words]
        child = os.posix_spawnp("git", command, environment, file_actions=actions)
    except FileNotFoundError:
        os.close(reading)
        os.close(writing)
        return None
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise UsageError(
            f"git cannot list the files of {folder} (exit status {os.waitstatus_to_exitcode(status)})",
            f"see what `git -C {folder} status` says; {REFUSAL_REMEDY}",
        )
    return data


def _is_cache(root: str, path: str) -> bool:
    """A cache or a virtual environment, which no other machine can use."""
    return path.rpartition("/")[2] in CACHE_FOLDERS or os.path.exists(os.path.join(root, path, "pyvenv.cfg"))


def _walk(root: str, limit: int, wanted: Patterns, *, above: str = "", is_cut: bool = False) -> list[str]:
    """All files, links and empty folders below `root`, secrets aside, and caches that are not wanted.

    Behind the limit it raises, or ends where `is_cut`.  `above` is the path of `root` from the shipped folder on.
    """
    found: list[str] = []
    pending = [""]
    while pending and len(found) <= limit:
        folder = pending.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as listing:
                names = sorted(listing, key=lambda each: each.name)
        except PermissionError as error:
            problem = f"{os.path.join(root, folder)} cannot be read: {error.strerror}"
            raise UsageError(problem, "make it readable, or use --no-sync") from error
        if not names and folder:
            found.append(folder)
        for each in names:
            path = f"{folder}/{each.name}" if folder else each.name
            if not each.is_dir(follow_symlinks=False):
                found.append(path)
            elif each.name not in SECRET_FOLDERS:
                whole = f"{above}/{path}" if above else path
                if not _is_cache(root, path) or wanted.fit(whole):
                    pending.append(path)
    if len(found) > limit and not is_cut:
        raise (
            _too_large(root)
            if limit == SMALL_FILES
            else UsageError(f"{os.path.join(root, folder)} has more than {limit:,} files", LARGE_REMEDY)
        )
    return found


def _is_secret(path: str, left_out: list[str]) -> bool:
    segments = path.split("/")
    if any(segment in SECRET_FOLDERS for segment in segments):
        return True
    if any(segment.startswith(".env") for segment in segments) or segments[-1] in SECRET_FILES:
        left_out.append(f"{path} (may hold secrets)")
        return True
    return False


def _entry(root: str, path: str, info: os.stat_result, hashes: _HashCache, left_out: list[str]) -> TreeEntry | None:
    full = os.path.join(root, path)
    if stat.S_ISLNK(info.st_mode):
        return _link(path, os.readlink(full), left_out)
    if stat.S_ISDIR(info.st_mode):
        return TreeEntry(path, EntryKind.DIR)
    if not stat.S_ISREG(info.st_mode):
        left_out.append(f"{path} (not a file)")
        return None
    try:
        digest = hashes.digest(full, path, info)
    except OSError as error:
        raise UsageError(f"{full} cannot be read: {error.strerror}", "make it readable, or exclude it") from error
    if not digest:
        left_out.append(f"{path} (a private key)")
        return None
    return TreeEntry(path, EntryKind.FILE, 0o755 if info.st_mode & 0o100 else 0o644, info.st_size, digest)


def _link(path: str, target: str, left_out: list[str]) -> TreeEntry | None:
    problem = target_problem(path, target)
    if problem:
        left_out.append(f"{path} ({problem})")
        return None
    return TreeEntry(path, EntryKind.LINK, target=target)


class _HashCache:
    """Digests of files whose size, times and inode have not changed, so that an unchanged tree is only listed."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._now_ns = time.time_ns()
        self._old = read_cache(file)
        self._new: dict[str, list[object]] = {}

    def digest(self, full: str, path: str, info: os.stat_result) -> str:
        """SHA-256 of the content; empty for a private key."""
        mark: list[object] = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
        old = self._old.get(path)
        if isinstance(old, list) and len(old) == 5 and old[:4] == mark:
            self._new[path] = old
            return str(old[4])
        digest = _hash_file(full)
        if self._now_ns - max(info.st_mtime_ns, info.st_ctime_ns) > RACY_S * 1e9:
            self._new[path] = [*mark, digest]
        return digest

    def save(self) -> None:
        """Write the cache if it changed; a cache that cannot be written only costs time."""
        if self._new != self._old:
            write_cache(self._file, self._new)


def _hash_file(full: str) -> str:
    with open(full, "rb") as stream:
        first = stream.read(READ_BYTES)
        head = first[:KEY_HEADER_BYTES]
        if any(_is_key_header(line) for line in head.split(b"\n") if line.startswith(b"-----BEGIN ")):
            return ""
        digest = hashlib.sha256(first)
        while part := stream.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _is_key_header(line: bytes) -> bool:
    """A whole line, so that a program that mentions such a header is not taken for a key."""
    return line.rstrip().endswith(b"PRIVATE KEY-----") and line.count(b"-----") == 2


def cache_file(cache_home: str, kind: str, root: str) -> str:
    """Where something about one folder is kept: the digests of its files, what was left out when it was shipped."""
    return os.path.join(cache_home, "swarm", kind, f"{zlib.crc32(os.fsencode(root)):08x}.json")


def ship(
    agents: Agents, blobs: dict[str, bytes | str], sizes: dict[str, int], tell: Callable[[str], None], show: Show
) -> str:
    """Bring missing blobs to one agent and return its name.  `blobs`: digest -> content, or path of the file.

    Repeatable: a blob that arrived stays.  An agent that fails on the way is replaced by the next one.
    """
    for _ in range(len(agents.addresses)):
        address = agents.addresses[0]
        try:
            return _ship_to_first(agents, blobs, sizes, tell, show)
        except Failure as failure:
            if failure.exit_code != SWARM_FAILED or len(agents.addresses) == 1:
                raise
            agents.demote(address)
            last = failure
    raise last


def _ship_to_first(
    agents: Agents, blobs: dict[str, bytes | str], sizes: dict[str, int], tell: Callable[[str], None], show: Show
) -> str:
    missing, node = _missing(agents, list(blobs))
    if not missing:
        return node
    total = sum(sizes[digest] for digest in missing)
    if total > PACK_BYTES:
        tell(f"shipping {show_bytes(total)} in {show_count(len(missing), 'file')} to {node}")
    sent = 0

    def counted(parts: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal sent
        for part in parts:
            yield part
            sent += len(part)
            show(min(1.0, sent / (total or 1)), f"{show_bytes(sent)} of {show_bytes(total)}")

    small = [digest for digest in missing if sizes[digest] <= PACKED_BLOB_BYTES]
    for pack in _packs(small, sizes):
        body = SizedBody(sum(40 + sizes[digest] for digest in pack), counted(_packed(pack, blobs, sizes)))
        node = _upload(agents, "POST", "/v1/blobs", PACKED_TYPE, body)
    for digest in missing:
        if sizes[digest] > PACKED_BLOB_BYTES:
            body = SizedBody(sizes[digest], counted(_content(digest, blobs[digest], sizes[digest])))
            node = _upload(agents, "PUT", f"/v1/blobs/{digest}", "application/octet-stream", body)
    return node


def _missing(agents: Agents, digests: Sequence[str]) -> tuple[list[str], str]:
    missing: list[str] = []
    node = ""
    for start in range(0, len(digests), DIGESTS_PER_REQUEST):
        body = {"digests": list(digests[start : start + DIGESTS_PER_REQUEST])}
        answer = agents.call("cannot ship the working directory", "POST", "/v1/blobs/missing", body=body)
        if node and answer["node"] != node:
            raise Failure("another agent answered half-way", "try again", SWARM_FAILED)
        node = str(answer["node"])
        missing += [str(digest) for digest in answer["missing"]]
    return missing, node


def _packs(digests: Sequence[str], sizes: dict[str, int]) -> Iterator[list[str]]:
    pack: list[str] = []
    size = 0
    for digest in digests:
        if pack and size + sizes[digest] > PACK_BYTES:
            yield pack
            pack, size = [], 0
        pack.append(digest)
        size += sizes[digest] + 40
    if pack:
        yield pack


def _packed(pack: Sequence[str], blobs: dict[str, bytes | str], sizes: dict[str, int]) -> Iterator[bytes]:
    for digest in pack:
        frame = bytes.fromhex(digest) + sizes[digest].to_bytes(8, "big")
        yield frame + b"".join(_content(digest, blobs[digest], sizes[digest]))


def _content(digest: str, source: bytes | str, size: int) -> Iterator[bytes]:
    """The content in parts, of exactly `size` bytes; a file that changed meanwhile is an error."""
    if isinstance(source, bytes):
        yield source
        return
    seen = hashlib.sha256()
    left = size
    with open(source, "rb") as stream:
        while left and (part := stream.read(min(READ_BYTES, left))):
            left -= len(part)
            seen.update(part)
            if left == 0 and seen.hexdigest() != digest:
                break
            yield part
    if left or seen.hexdigest() != digest:
        raise Failure(f"{source} changed while it was shipped", "run the command again", SWARM_FAILED)


def _upload(agents: Agents, method: str, path: str, kind: str, body: SizedBody) -> str:
    headers = {"Content-Type": kind}
    document = agents.upload("cannot ship the working directory", method, path, headers, body, UPLOAD_ANSWER_S)
    return str(document["node"])

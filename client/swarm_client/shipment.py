"""What of a working directory went along with a job, what stayed behind, and which missing file that explains."""

# Importing pathlib costs a tenth of what `swarm run` may take.
# ruff: noqa: PTH112, PTH114, PTH117, PTH118

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from swarm_client.quantity import show_bytes, show_count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from swarm_client.tree import Scan

LOOKED_AT = 100_000  # files: as many as could be shipped
NAMED = 3  # of what stayed behind, and of files that a job missed
MODULE = re.compile(r"No module named ['\"]([\w.]+)['\"]")
MARK = re.compile(
    r"no such file|not found|cannot open|can't open|could not open|unable to open|does not exist|couldn't find"
    r"|no module named|errno ?=? ?2\b|ENOENT",
    re.IGNORECASE,
)
QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"")


class Shipment:
    """The folder of a job as it was shipped; without a scan nothing was, for the `reason` that is given."""

    def __init__(
        self,
        folder: str,
        root: str = "",
        kind: str = "",
        scan: Scan | None = None,
        *,
        exclude: Sequence[str] = (),
        reason: str = "",
    ) -> None:
        self._folder, self._root, self._kind, self._scan = folder, root, kind, scan
        self._exclude, self._reason = exclude, reason

    def summary(self) -> str:
        """`12 files, 1.2 MiB; not shipped: 3 that git ignores (data/, init.pt), 1.9 GiB`; looks at all of them."""
        if self._scan is None:
            return f"no files: {self._reason}"
        tree = self._scan.tree
        text = f"{show_count(len(tree.entries), 'file')}, {show_bytes(tree.size_bytes)}"
        kept = self._ignored()
        if not kept:
            return text
        count, size = _weigh(self._root, kept, {entry.path for entry in tree.entries})
        if not count:
            return text
        more = ", ..." if len(kept) > NAMED else ""
        known = f"{'more than ' * (count > LOOKED_AT)}{count}"
        return f"{text}; not shipped: {known} that git ignores ({', '.join(kept[:NAMED])}{more}), {show_bytes(size)}"

    def _ignored(self) -> list[str]:
        """What git ignores and was not shipped: files, and folders with a `/` behind them."""
        if self._kind != "git" or self._scan is None:
            return []
        from swarm_client.tree import ignored

        shipped = {entry.path for entry in self._scan.tree.entries}
        marked = [f"{path}{'/' * os.path.isdir(os.path.join(self._root, path))}" for path in ignored(self._root)]
        found: list[str] = []
        for path in sorted(set(marked) - shipped):
            if not (found and found[-1].endswith("/") and path.startswith(found[-1])):
                found.append(path)
        return found

    def missed(self, output: str, job_id: str) -> Iterator[str]:
        """Of files that the output of a failed job misses: why, where they lie here and were not shipped."""
        told = 0
        for word in dict.fromkeys(_missed_words(output, job_id)):
            sentence = self._explained(word)
            if sentence:
                yield sentence
                told += 1
            if told == NAMED:
                return

    def _explained(self, word: str) -> str:
        full = os.path.normpath(os.path.join(self._folder, word))
        if not os.path.lexists(full) or full in (self._folder, self._root):
            return ""
        if self._scan is None:
            return f"{word} is there on this machine, and was not shipped: {self._reason}"
        path = os.path.relpath(full, self._root)
        if path.startswith("../"):
            if os.path.isabs(word):
                return f"{word} is a path of this machine, and was not found on the node: give a path of the nodes"
            return f"{word} lies outside of {self._root}, which is the folder that is shipped: put it below that"
        entries = {entry.path for entry in self._scan.tree.entries}
        if path in entries or any(each.startswith(f"{path}/") for each in entries):
            if os.path.isabs(word):
                return f"{word} is a path of this machine; it was shipped as {path}: give it by that"
            return ""
        reason = next((each[len(path) + 1 :] for each in self._scan.left_out if each.startswith(f"{path} (")), "")
        if reason:
            return f"{word} was not shipped {reason}"
        kept = next((each for each in self._ignored() if path == each or f"{path}/".startswith(each)), "")
        if kept:
            shown = os.path.relpath(os.path.join(self._root, kept), self._folder) + "/" * kept.endswith("/")
            return f"{word} is ignored by git and was not shipped: --include {shown}, or keep it on the nodes"
        from swarm_client.tree import Patterns

        if Patterns(self._exclude).fit(path):
            return f"{word} is left out by sync_exclude and was not shipped: --include {word}, or keep it on the nodes"
        return f"{word} was not shipped: --include {word}, or keep it on the nodes"


def _weigh(root: str, kept: Sequence[str], shipped: set[str]) -> tuple[int, int]:
    """Number and bytes of the files that are not shipped, as far as a shipment could go."""
    count = size = 0
    pending = [path.rstrip("/") for path in kept]
    while pending and count <= LOOKED_AT:
        path = pending.pop()
        full = os.path.join(root, path)
        if os.path.isdir(full) and not os.path.islink(full):
            pending += [f"{path}/{name}" for name in os.listdir(full) if name != ".git"]  # noqa: PTH208  # names alone
        elif path not in shipped:
            count += 1
            size += os.lstat(full).st_size
    return count, size


def _missed_words(output: str, job_id: str) -> Iterator[str]:
    """What may be paths in lines that say that something was not found; those of the job's folder relative to it."""
    ours = re.compile(rf".*/jobs/{re.escape(job_id)}/[^/]+/work/")
    for line in output.splitlines():
        if not MARK.search(line):
            continue
        if module := MODULE.search(line):
            name = module[1].replace(".", "/")
            yield from (f"{name}.py", name, f"{name.partition('/')[0]}.py")
        quoted = [first or second for first, second in QUOTED.findall(line)]
        for word in (*quoted, *re.split(r"[\s,;]+|:(?=\s|$)", line)):
            word = ours.sub("", word.strip("'\"()[]:,"))
            if 1 < len(word) < 1_024 and "\0" not in word:
                yield word

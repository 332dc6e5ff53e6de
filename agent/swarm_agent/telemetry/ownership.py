"""Whose process computes on a GPU: ours, somebody else's, or one that has just ended.

A process is ours when it, or one of its ancestors in /proc, is among the ids that supervision reports for that GPU: a
job that computes on a GPU which it was not given is as foreign there as anybody else.  The driver
lists a process for a moment after its end, when /proc no longer tells whose child it was; such an entry is given
`GRACE_S` before it counts as foreign.  A living process that is not ours counts at once.
"""

import pwd
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm_agent.telemetry.reading import GpuProcess

GRACE_S = 3.0
ANCESTORS_LIMIT = 64
PROC = Path("/proc")


@dataclass(slots=True)
class _Seen:
    first_s: float  # when it was first listed without an entry in /proc
    last_s: float


class Ownership:
    """Sorts processes; remembers for a few seconds which ones were ours."""

    def __init__(self, own_gpus: Callable[[], Mapping[int, Collection[str]]], proc: Path = PROC) -> None:
        self._own_gpus = own_gpus
        self._proc = proc
        self._own: Mapping[int, Collection[str]] = {}
        self._own_until_s: dict[tuple[int, str], float] = {}
        self._gone: dict[int, _Seen] = {}

    def refresh(self, now_s: float) -> None:
        """Ask supervision once per round, before `classify`."""
        self._own = self._own_gpus()
        self._own_until_s = {key: until for key, until in self._own_until_s.items() if until > now_s}
        self._gone = {pid: seen for pid, seen in self._gone.items() if now_s - seen.last_s < GRACE_S}

    def classify(self, pid: int, gpu: str, memory_bytes: int | None, now_s: float) -> GpuProcess | None:
        """The process on this GPU as people should see it; None while an entry without a living one is in its grace."""
        if self._has_own_ancestor(pid, gpu):
            self._own_until_s[pid, gpu] = now_s + GRACE_S
            return GpuProcess(pid, memory_bytes, user_of(pid, self._proc), command_of(pid, self._proc), is_own=True)
        if (self._proc / str(pid)).exists():
            return GpuProcess(pid, memory_bytes, user_of(pid, self._proc), command_of(pid, self._proc), is_own=False)
        if (pid, gpu) in self._own_until_s:
            return None
        seen = self._gone.setdefault(pid, _Seen(now_s, now_s))
        seen.last_s = now_s
        if now_s - seen.first_s < GRACE_S:
            return None
        return GpuProcess(pid, memory_bytes, "", "", is_own=False)

    def _has_own_ancestor(self, pid: int, gpu: str) -> bool:
        current = pid
        for _ in range(ANCESTORS_LIMIT):
            if current in self._own:
                return gpu in self._own[current]
            current = parent_of(current, self._proc)
            if current <= 1:
                return False
        return False


def parent_of(pid: int, proc: Path = PROC) -> int:
    """Parent's id, 0 when the process is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
        return int(text.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0  # gone between two reads, which is an answer


def command_of(pid: int, proc: Path = PROC) -> str:
    """Short command name, empty when the process is gone."""
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def user_of(pid: int, proc: Path = PROC) -> str:
    """Account name (or number where it has none), empty when the process is gone."""
    try:
        uid = (proc / str(pid)).stat().st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

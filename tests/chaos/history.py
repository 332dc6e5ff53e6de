"""What must hold whatever was done to a swarm, checked on what the ranks and the API said."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

PROGRESS = {"queued": 0, "starting": 1, "running": 2, "stopping": 3, "ended": 4}


@dataclass(frozen=True, order=True)
class Beat:
    """One line of a rank's file."""

    at_s: float
    attempt: int
    epoch: int
    rank: int
    pid: int
    node: str
    word: str


def read_beats(folder: Path, job: str) -> list[Beat]:
    """All lines of all ranks of a job, in the order of time."""
    beats = []
    for path in folder.glob(f"{job}.*"):
        if path.suffix[1:].isdecimal():
            beats += read_file(path)
    return sorted(beats)


def read_file(path: Path) -> list[Beat]:
    """The lines of one rank in the order of the file; a line that is being written is left out."""
    beats = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            at_s, attempt, epoch, rank, pid, node, word = line.rstrip("\n").split(" ", 6)
            beats.append(Beat(float(at_s), int(attempt), int(epoch), int(rank), int(pid), node, word))
    return beats


def overlaps(beats: Sequence[Beat]) -> list[str]:
    """Everything that says that two attempts of one job were at work at once, or one rank twice."""
    found = []
    spans: dict[int, tuple[Beat, Beat]] = {}
    for beat in sorted(beats):
        first, _ = spans.get(beat.attempt, (beat, beat))
        spans[beat.attempt] = (first, beat)
    ordered = sorted(spans)
    for older, newer in pairwise(ordered):
        last, first = spans[older][1], spans[newer][0]
        if last.at_s >= first.at_s:
            found.append(f"attempt {older} wrote {last.at_s - first.at_s:.3f} s after {newer} began: {last}; {first}")
    lives: dict[tuple[int, int], int] = {}
    for beat in beats:
        if lives.setdefault((beat.attempt, beat.rank), beat.pid) != beat.pid:
            found.append(f"rank {beat.rank} of attempt {beat.attempt} ran twice: {beat}")
            lives[beat.attempt, beat.rank] = beat.pid
    return found


def order_faults(folder: Path, job: str) -> list[str]:
    """Lines of an older attempt behind those of a newer one in a rank's file, whatever their times say."""
    found = []
    for path in folder.glob(f"{job}.*"):
        if path.suffix[1:].isdecimal():
            beats = read_file(path)
            found += [
                f"{path.name}: {after} stands behind {before}"
                for before, after in pairwise(beats)
                if after.attempt < before.attempt
            ]
    return found


def gap_s(beats: Iterable[Beat]) -> float:
    """The longest silence of any rank between two of its lines."""
    last: dict[int, float] = {}
    longest = 0.0
    for beat in sorted(beats):
        longest = max(longest, beat.at_s - last.get(beat.rank, beat.at_s))
        last[beat.rank] = beat.at_s
    return longest


class JobHistory:
    """What the API said of one job, answer by answer; `faults` is what it must not have said.

    Answers of one agent may not go back in (epoch, version); an agent that is cut off may be behind the others.  Two
    answers of one (epoch, version) must agree, whoever gave them.  Only records are judged: a card is a rumour.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self.faults: list[str] = []
        self.newest: dict[str, Any] = {}
        self._last_of: dict[str, dict[str, Any]] = {}
        self._said: dict[tuple[int, int], dict[str, Any]] = {}

    def hear(self, agent: str, document: dict[str, Any]) -> None:
        """Judge one answer."""
        if document.get("source") != "record":
            return
        last = self._last_of.get(agent)
        if last is not None:
            self._compare(agent, last, document)
        self._last_of[agent] = document
        same = self._said.setdefault(stamp(document), document)
        for key in ("state", "attempt", "end_reason", "shell_exit_code"):
            if same[key] != document[key]:
                self._blame(agent, f"{key} was {same[key]!r} and is {document[key]!r} in one version", document)
        if not self.newest or stamp(document) > stamp(self.newest):
            if self.newest:
                self._judge_step(agent, self.newest, document)
            self.newest = document

    def _compare(self, agent: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        if stamp(after) < stamp(before):
            self._blame(agent, f"fell back from {stamp(before)}", after)

    def _judge_step(self, agent: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Forward, or back because an attempt was given up."""
        if before["state"] == "ended" and any(before[key] != after[key] for key in ("state", "shell_exit_code")):
            self._blame(agent, f"had ended with {before['shell_exit_code']}", after)
        if after["attempt"] < before["attempt"]:
            self._blame(agent, f"attempt falls from {before['attempt']}", after)
        was_at_work = before["state"] in ("running", "stopping")
        if was_at_work and PROGRESS[after["state"]] < PROGRESS["running"] and retries(after) <= retries(before):
            self._blame(agent, f"was {before['state']}, and nothing says why it is no more", after)

    def _blame(self, agent: str, what: str, document: dict[str, Any]) -> None:
        keys = ("state", "epoch", "version", "attempt", "end_reason", "shell_exit_code", "shepherd", "reason")
        said = {key: document.get(key) for key in keys}
        self.faults.append(f"{self.job} at {agent}: {what}; now {said}")


def stamp(document: dict[str, Any]) -> tuple[int, int]:
    """(epoch, version): larger is newer."""
    return (document["epoch"], document["version"])


def retries(document: dict[str, Any]) -> int:
    """How often an attempt of the job was given up."""
    return sum(document.get(key) or 0 for key in ("restarts", "relaunches", "preemptions"))

"""Many seeds of one commit of the core, in as many sittings and on as many machines as it takes: `make soak`.

SOAK_SEEDS=0:20000 says which seeds, SOAK_SHARD=1/4 that this machine takes the first quarter of the blocks,
SOAK_RECORD where to write (docs/research/soak.csv).  Each finished block is appended to the record with its commit; a
block that the record has is not run again, so a soak that was stopped goes on where it was, also where a later commit
has changed no more than what is around the core.  A tree with changes is refused: its results would belong to no
commit.  Exits with 1 if any block of this run found a violation, or if the record has all blocks, of all shards, and
some rare path was walked in none of them.
"""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_client.simulate import Report, report, run_seeds
from swarmsched.simulator.checks.sometimes import NAMES
from swarmsched.simulator.seeds import SeedOptions

BLOCK = 250  # seeds
CODE = ("swarmsched",)
COLUMNS = ("commit", "first", "last", "events", "cpu_s", "violations", "sometimes")


class UsageProblem(Exception):
    """A variable that cannot be used: what it is, and what it should be."""


@dataclass(frozen=True)
class Soak:
    """What is to be done here."""

    first: int
    end: int
    shard: int = 1
    shard_count: int = 1
    record: Path = Path("docs/research/soak.csv")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Soak":
        first, end = _pair(environment, "SOAK_SEEDS", "0:20000", ":")
        shard, count = _pair(environment, "SOAK_SHARD", "1/1", "/")
        if not 0 <= first < end:
            raise UsageProblem(f"SOAK_SEEDS={first}:{end} is empty; write first:end, as in 0:20000")
        if not 1 <= shard <= count:
            raise UsageProblem(f"SOAK_SHARD={shard}/{count} is no shard; write number/count, as in 1/4")
        return cls(first, end, shard, count, Path(environment.get("SOAK_RECORD", "docs/research/soak.csv")))

    def blocks(self) -> Iterator[range]:
        """Those of this shard."""
        for number, block in enumerate(self.all_blocks()):
            if number % self.shard_count == self.shard - 1:
                yield block

    def all_blocks(self) -> Iterator[range]:
        """Those of all shards."""
        for first in range(self.first, self.end, BLOCK):
            yield range(first, min(first + BLOCK, self.end))


def _pair(environment: Mapping[str, str], name: str, default: str, separator: str) -> tuple[int, int]:
    text = environment.get(name, default)
    left, _, right = text.partition(separator)
    if not (left.isdecimal() and right.isdecimal()):
        raise UsageProblem(f"{name}={text} cannot be read; write it as in {default}")
    return int(left), int(right)


def done_blocks(record: Path, commit: str) -> set[tuple[int, int]]:
    """(first, last) of each block of that commit in the record."""
    if not record.exists():
        return set()
    with record.open(newline="") as file:
        return {(int(row["first"]), int(row["last"])) for row in csv.DictReader(file) if row["commit"] == commit}


def never_walked(plan: Soak, commit: str) -> list[str]:
    """Rare paths that no seed of that commit has walked; none before the record has all blocks of all shards."""
    done = done_blocks(plan.record, commit)
    if any((block[0], block[-1]) not in done for block in plan.all_blocks()):
        return []
    with plan.record.open(newline="") as file:
        counts = [json.loads(row["sometimes"]) for row in csv.DictReader(file) if row["commit"] == commit]
    return [name for name in NAMES if not any(count.get(name, 0) for count in counts)]


def append(record: Path, commit: str, block: range, found: Report) -> None:
    """One line more, on disk before the next block begins."""
    is_new = not record.exists()
    violations = [f"{each['seed']}:{each['invariant']}" for each in found.tally.violations]
    sometimes = json.dumps(found.tally.sometimes, sort_keys=True)
    with record.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        events, cpu_s = found.tally.events, round(found.cpu_s)
        writer.writerow([commit, block[0], block[-1], events, cpu_s, " ".join(violations), sometimes])
        file.flush()
        os.fsync(file.fileno())


def soak(plan: Soak, commit: str, jobs: int) -> int:
    """Run what is missing; how many seeds failed."""
    done, failed = done_blocks(plan.record, commit), 0
    for block in plan.blocks():
        if (block[0], block[-1]) in done:
            continue
        started_s = time.monotonic()
        found = report(run_seeds(block, SeedOptions(), jobs))
        append(plan.record, commit, block, found)
        failed += len(found.tally.violations)
        took_s = time.monotonic() - started_s
        print(f"seeds {block[0]} to {block[-1]}: {found.tally.events} events in {took_s:.0f} s", flush=True)
        for violation in found.tally.violations:
            print(json.dumps(violation), flush=True)
    return failed


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def _changed_files(record: Path) -> str:
    """What git would show, apart from the record itself, which may lie in the tree or anywhere else."""
    root = Path(_git("rev-parse", "--show-toplevel"))
    excluded = [f":(exclude,top){record.resolve().relative_to(root)}"] if record.resolve().is_relative_to(root) else []
    return _git("status", "--porcelain", "--untracked-files=no", "--", str(root), *excluded)


def main(arguments: Sequence[str] = ()) -> int:
    """Run the soak that the environment describes."""
    del arguments
    try:
        plan = Soak.from_environment(os.environ)
    except UsageProblem as problem:
        print(f"soak: {problem}", file=sys.stderr)
        return 2
    if changed := _changed_files(plan.record):
        print(f"soak: commit these first, so that the record can name what was run:\n{changed}", file=sys.stderr)
        return 2
    commit = _git("log", "-1", "--format=%h", "--abbrev=12", "--", *(f":(top){folder}" for folder in CODE))
    failed = soak(plan, commit, os.cpu_count() or 1)
    missed = never_walked(plan, commit)
    for name in missed:
        print(f"soak: no seed of {commit} has walked this path: {name} ({NAMES[name]})", file=sys.stderr)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())

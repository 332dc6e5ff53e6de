"""Every table and picture of docs/research/results.md, run again from the recorded workloads: `make science`.

`cells.csv` says what is run.  SCIENCE_RESULTS names the folder of results (.science), SCIENCE_TRACES that of the
workloads (../shared/traces), SCIENCE_JOBS the number of processes (one for each core), SCIENCE_TABLES=published,rigid
the tables that are wanted, since the one of the price takes hours and the others minutes.  Each finished run is
appended to `runs.csv` there with the commit of the code; what the file has for this commit is not run again, so a run
that was stopped goes on where it was.  Code with changes is refused: its results would belong to no commit.

Where ../shared/traces is missing, or with SCIENCE_TRACES=generated, workloads are drawn in place of the recorded ones,
figures are over our own policy, and the tables go to the folder of results.

With QUICK=1 one workload of each is run, through gossip at the lowest load alone, and the tables go to the folder of
results instead of the page.
"""

import csv
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from swarm_client.plot import draw
from swarm_client.progress import ProgressBar
from swarmsched.models import ONE_THREAD
from swarmsched.policies.registry import policy_id
from tests.science import autops, dike
from tests.science.cells import Cell, Line, read_lines, run
from tests.science.drawn import CAPTION, YARDSTICK
from tests.science.drawn import draw as draw_workloads
from tests.science.page import BEST, Results, by_workload, elastic_batch, price, put, submitted, table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CODE = ("swarmsched", "tests/science")
KEY: tuple[str, ...] = (
    "policy",
    "parameters",
    "knows",
    "tick_s",
    "pause_s",
    "trace",
    "load",
    "workload",
    "cluster",
    "gpus_most",
)
KEY += ("view", "loss", "churn", "manner", "kinds", "interference", "costs", "told", "speeds", "lies", "keeps")
TOLD: tuple[str, ...] = ("jobs", "finished", "avg_jct_s", "median_jct_s", "p99_jct_s", "makespan_s", "avg_slowdown")
TOLD += ("gpu_utilisation_ratio", "rescales", "preemptions", "policy_errors", "refused_holds")
TOLD += ("view_age_p50_s", "view_age_p99_s", "restarts", "p99_slowdown", "rho_p50", "rho_p99", "rho_worst")
TOLD += ("rescales_per_job", "rescales_most", "reversed_decisions", "deadlines", "deadlines_met", "cpu_s")
PICTURE, PRICE, BATCH, PUBLISHED, OUTER = "picture", "price", "elastic-batch", "published", "outer"
AUTOPS = "autops"
DIKE = "dike"
BY_USERS = ("users", "recorded", "deadlines", "classes")
GENERATED = "generated"


class UsageProblem(Exception):
    """A variable that cannot be used: what it is, and what it should be."""


@dataclass(frozen=True)
class Science:
    """What is to be done here."""

    commit: str
    traces: Path
    results: Path
    jobs: int
    is_quick: bool = False
    lines: Path = HERE / "cells.csv"
    gaps_s: Sequence[float] = (480.0, 240.0, 120.0, 60.0)  # between the jobs of IBM's comparison
    page: Path = ROOT / "docs/research/results.md"
    tables: tuple[str, ...] = ()  # that are wanted; none: all
    is_drawn: bool = False  # the workloads are ours, not recorded ones
    trainer: Path = ROOT / ".venv-train/bin/python"
    hosts_table: Callable[..., str] = dike.table

    def wants(self, table: str) -> bool:
        """Whether it is to be made."""
        return not self.tables or table in self.tables

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], commit: str) -> "Science":
        jobs = environment.get("SCIENCE_JOBS") or str(os.cpu_count() or 1)
        if not jobs.isdecimal() or not 1 <= int(jobs) <= 1_024:
            raise UsageProblem(f"SCIENCE_JOBS={jobs} is no number of processes; write one from 1 to 1024")
        named = environment.get("SCIENCE_TRACES", "")
        traces = Path(named or ROOT.parent / "shared" / "traces")
        is_drawn = named == GENERATED or not (named or traces.is_dir())
        if not is_drawn and not (traces / "workloads").is_dir():
            remedy = f"name the folder of the traces, or write {GENERATED} to have some drawn"
            raise UsageProblem(f"SCIENCE_TRACES={traces} has no folder of workloads; {remedy}")
        results = Path(environment.get("SCIENCE_RESULTS") or ROOT / ".science")
        if is_drawn:
            results = results / GENERATED  # apart from those of recorded ones
            traces = results / "traces"
        tables = tuple(filter(None, environment.get("SCIENCE_TABLES", "").split(",")))
        known = {AUTOPS, BATCH, DIKE, OUTER, *(line.table for line in read_lines(cls.lines))}
        if unknown := sorted({*tables} - known):
            raise UsageProblem(f"SCIENCE_TABLES={unknown[0]} is no table; write some of {', '.join(sorted(known))}")
        is_quick = environment.get("QUICK", "") not in ("", "0")
        return cls(commit, traces, results, int(jobs), is_quick, tables=tables, is_drawn=is_drawn)

    @property
    def record(self) -> Path:
        """Where finished runs are."""
        return self.results / "runs.csv"

    def done(self) -> dict[tuple[str, ...], Mapping[str, Any]]:
        """Finished runs of this commit."""
        if not self.record.exists():
            return {}
        with self.record.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if list(table.fieldnames or ()) != ["commit", *KEY, *TOLD]:
                raise UsageProblem(f"{self.record} has other columns; move it away: it is of an earlier version")
            rows = [row for row in table if row["commit"] == self.commit]
        return {tuple(row[column] for column in KEY): row for row in rows}


def science(plan: Science) -> None:
    """Run what is missing, and write the tables and the picture."""
    lines = [line for line in read_lines(plan.lines) if plan.wants(line.table)]
    run_here = [line for line in lines if line.table != PICTURE and (line.is_quick or not plan.is_quick)]
    cells = {cell.key: cell for line in run_here for cell in line.cells(is_quick=plan.is_quick)}
    if plan.is_drawn:
        print(f"science: draws workloads into {plan.traces}: no recorded ones are there, or asked for", flush=True)
        draw_workloads(read_lines(plan.lines), plan.traces)
        yardsticks = [cell.under(YARDSTICK) for cell in cells.values() if not cell.line.reference.startswith(BEST)]
        cells |= {cell.key: cell for cell in yardsticks}
    done = plan.done()
    missing = [cell for key, cell in cells.items() if key not in done]
    missing.sort(key=lambda cell: (cell.line.view == "gossip", cell.line.load), reverse=True)  # the longest first
    plan.results.mkdir(parents=True, exist_ok=True)
    with ProgressBar("science") as progress:
        for cell, told in _told(plan, missing) if missing else ():
            _append(plan, cell, told)
            done[cell.key] = told
            count = sum(key in done for key in cells)
            progress.show(count / len(cells), f"{count} of {len(cells)} runs")
            if not sys.stderr.isatty():
                print(f"{count} of {len(cells)}: {' '.join(filter(None, cell.key))}: {told['avg_jct_s']} s", flush=True)
    _write(plan, lines, done)


def _told(plan: Science, missing: Sequence[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Results as they come, from processes of their own; whoever stops early ends them."""
    os.environ.update(ONE_THREAD)  # for the children: they import numpy anew
    with get_context("spawn").Pool(plan.jobs) as pool:
        yield from pool.imap_unordered(partial(run, plan.traces), missing)


def _append(plan: Science, cell: Cell, told: Mapping[str, Any]) -> None:
    """One line more, on disk before the next."""
    is_new = not plan.record.exists()
    with plan.record.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(["commit", *KEY, *TOLD])
        writer.writerow([plan.commit, *cell.key, *[told[column] for column in TOLD]])
        file.flush()
        os.fsync(file.fileno())


def _write(plan: Science, lines: Sequence[Line], done: Results) -> None:
    names = list(dict.fromkeys(line.table for line in lines if line.table != PICTURE))
    cpu_s = sum(float(row["cpu_s"]) for row in done.values())
    origin = (
        f"`make science`, commit {plan.commit}, {len(done)} runs, {cpu_s / 60:.0f} minutes of one core: {_machine()}."
    )
    page = plan.page.read_text(encoding="utf-8")
    caption = f"{CAPTION}\n\n" if plan.is_drawn else ""
    yardstick = YARDSTICK if plan.is_drawn else ""
    for name in names:
        of_table = [line for line in lines if line.table == name]
        how = (done, plan.traces, yardstick)
        if name == PRICE:
            told = price(of_table, done)
        else:
            write = submitted if name in BY_USERS else table
            told = write(of_table, *how, is_quick=plan.is_quick)
        page = put(page, name, f"{caption}{told}\n\nCommit {plan.commit}.")
        if name == PUBLISHED:
            page = put(page, "by workload", caption + by_workload(of_table, *how, is_quick=plan.is_quick))
    if plan.tables:
        origin += f" Of it are the tables {', '.join(plan.tables)}; the others are older."
    page = put(page, "origin", origin)
    if plan.wants(BATCH):
        page = put(page, BATCH, elastic_batch(plan.gaps_s[:1] if plan.is_quick else plan.gaps_s))
    if plan.wants(AUTOPS):
        page = put(page, AUTOPS, f"{autops.table()}\n\nCommit {plan.commit}.")
    if plan.wants(OUTER):
        page = put(page, OUTER, f"{_outer(plan)}\n\nCommit {plan.commit}.")
    if plan.wants(DIKE):
        page = _with_dike(plan, page)
    target = plan.results / plan.page.name if plan.is_quick or plan.is_drawn else plan.page
    target.write_text(page, encoding="utf-8")
    drawn = [cell for line in lines if line.table == PICTURE for cell in line.cells(is_quick=True)]
    if drawn:
        one = drawn[0]
        title = f"{one.line.trace}, load {one.line.load}, workload {one.workload}, {one.line.cluster} GPUs"
        runs = [(policy_id(cell.settings().policy), cell.observed(plan.traces)) for cell in drawn]
        draw(target.with_suffix(".png"), runs, f"{title} (commit {plan.commit})")
    print(f"written: {target}")


def _outer(plan: Science) -> str:
    """Trainings of real models, by the interpreter that has torch; runs of the same code are not done again."""
    call = [str(plan.trainer), "-m", "tests.science.outer", str(plan.results / "outer.csv")]
    variables = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    try:
        done = subprocess.run(
            call + ["quick"] * plan.is_quick, cwd=ROOT, env=variables, stdout=subprocess.PIPE, check=True
        )
    except FileNotFoundError:
        raise UsageProblem(f"{plan.trainer} has no torch; run make setup, or name other SCIENCE_TABLES") from None
    return done.stdout.decode().rstrip()


def _with_dike(plan: Science, page: str) -> str:
    """As it is where nothing can be measured, unless this table is wanted by its name."""
    try:
        told = plan.hosts_table(plan.results / "dike.csv", plan.trainer, is_quick=plan.is_quick)
    except dike.NotMeasurable as problem:
        if plan.tables:
            raise UsageProblem(f"table {DIKE}: {problem}; name other SCIENCE_TABLES") from None
        print(f"science: table {DIKE} stays as it is: {problem}")
        return page
    return put(page, DIKE, f"{told}\n\nCommit {plan.commit}.")


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> int:
    """Run what the environment describes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its processes would go on for hours
    try:
        if changed := _git("status", "--porcelain", "--untracked-files=no", "--", *CODE):
            raise UsageProblem(f"commit these first, so that the results can name what was run:\n{changed}")
        science(Science.from_environment(os.environ, _git("log", "-1", "--format=%h", "--abbrev=12", "--", *CODE)))
    except UsageProblem as problem:
        print(f"science: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("science: stopped; what was finished is kept, `make science` goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Workloads in place of the recorded ones, for those who have none: drawn, under the names that the lines have."""

from collections.abc import Iterable
from pathlib import Path

from swarmsched.replay.generate import JOBS, Wanted, jobs, profile_tables, table
from tests.science.cells import SELECTED_BY, Line

COUNT = 60
"""Jobs at load 1; at others as many as come in the same time."""
YARDSTICK = "tiresias"
"""What figures are over where nothing was published: plain, well known, and of no knowledge."""
CAPTION = (
    "Workloads drawn by `swarm simulate generate` in place of the recorded ones, which are not here;"
    f" each figure is over our own `{YARDSTICK}` on the same workload."
)


def draw(lines: Iterable[Line], folder: Path) -> Path:
    """A folder as that of the recorded workloads, with what these lines need."""
    by_trace: dict[str, dict[tuple[str, ...], Line]] = {}
    for line in lines:
        for cell in line.cells(is_quick=False):
            values = tuple(filter(None, (line.load, cell.workload)))
            known = by_trace.setdefault(line.trace, {})
            if values not in known or line.profiles:  # a trace that has profiles somewhere has models everywhere
                known[values] = line
    (folder / "workloads").mkdir(parents=True, exist_ok=True)
    for trace, wanted in by_trace.items():
        columns = (*SELECTED_BY.get(trace, ()), *JOBS)
        rows = [
            (*values, *row)
            for seed, (values, line) in enumerate(sorted(wanted.items()))
            for row in jobs(_wanted(line, seed))
        ]
        (folder / "workloads" / f"{trace}.csv").write_text(table(columns, rows), encoding="utf-8")
    for profiled in {line.profiles: line for line in lines if line.profiles}.values():
        (folder / profiled.profiles).mkdir(exist_ok=True)
        for name, text in profile_tables(_wanted(profiled, 0)).items():
            (folder / profiled.profiles / name).write_text(text, encoding="utf-8")
    return folder


def _wanted(line: Line, seed: int) -> Wanted:
    nodes, gpus = len(line.servers), max(each for each, _ in line.servers)
    load = float(line.load or 1.0)
    rigid = 0.0 if line.profiles else 1.0
    return Wanted(seed, round(COUNT * load), load, nodes, gpus, rigid=rigid, wishes=0.0)

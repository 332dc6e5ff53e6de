"""Workloads in place of the recorded ones, for those who have none: drawn, under the names that the lines have."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from swarmsched.replay.generate import JOBS, Wanted, files, jobs, table
from tests.science.cells import RESTART_COSTS, SELECTED_BY, SMALL_AND_HUGE, Line

PROFILED, RIGID = 60, 120
"""Jobs of a workload by load, with profiles and with run times alone: as many as come in the same time."""
RIGID_LOAD = 1.5
"""Of jobs with run times, whose lines name none: high enough that most of them wait."""
YARDSTICK = "tiresias"
"""What figures are over where nothing was published: plain, well known, and of no knowledge."""
CAPTION = (
    "Workloads drawn by `swarm simulate generate`, in place of the recorded ones, which are not here."
    f" Where a figure would be against a published result, it is against our own `{YARDSTICK}` on the same workload."
)


def draw(lines: Sequence[Line], folder: Path) -> Path:
    """A folder as that of the recorded workloads, with what these lines need."""
    profiled = [line for line in lines if line.profiles]
    chosen: dict[str, dict[tuple[str, ...], Line]] = {}
    for line in [*profiled, *lines]:  # a trace that has profiles somewhere has models everywhere
        if line.trace != SMALL_AND_HUGE:
            for cell in line.cells(is_quick=False):
                values = tuple(filter(None, (line.load, cell.workload)))
                chosen.setdefault(line.trace, {}).setdefault(values, line)
    (folder / "workloads").mkdir(parents=True, exist_ok=True)
    has_deadlines, seeds = {line.trace for line in lines if line.table == "deadlines"}, count()
    for trace, by_values in chosen.items():
        rows = [
            (*values, *row)
            for values, line in by_values.items()
            for row in jobs(_wanted(line, next(seeds), float(trace in has_deadlines)))
        ]
        text = table((*SELECTED_BY.get(trace, ()), *JOBS), rows)
        (folder / "workloads" / f"{trace}.csv").write_text(text, encoding="utf-8")
    servers = [line.servers for line in profiled]
    if servers:
        sizes = Wanted(nodes=max(map(len, servers)), gpus_per_node=max(gpus for each in servers for gpus, _ in each))
        for name, text in files(sizes).items():
            if name.startswith("profiles/") or name == RESTART_COSTS:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
    return folder


def _wanted(line: Line, seed: int, deadlines: float) -> Wanted:
    nodes, gpus = len(line.servers), max(each for each, _ in line.servers)
    load, rigid = float(line.load or RIGID_LOAD), float(not line.profiles)
    many = round((RIGID if rigid else PROFILED) * load)
    return Wanted(seed, many, load, nodes, gpus, rigid=rigid, deadlines=deadlines, wishes=0.0)

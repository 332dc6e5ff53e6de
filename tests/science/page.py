"""The tables of docs/research/results.md, between markers in the page."""

import re
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

from tests.science.cells import Cell, Line
from tests.swarmsched.replay.test_elastic_batch import compared

BEST = "best"
"""In place of a table of published results: the best of these policies in the same table, on the same workload."""
MEASURES = ("avg_jct_s", "p99_jct_s", "makespan_s")
Results = Mapping[tuple[str, ...], Mapping[str, Any]]


def table(lines: Sequence[Line], results: Results, traces: Path, yardstick: str, *, is_quick: bool) -> str:
    """Rows of policies, columns of loads or traces; each figure is a mean of ratios to what was published.

    `yardstick`: our own policy whose results take their place, where nothing was.
    """
    headings = list(dict.fromkeys(line.heading for line in lines))
    told = ["policy", "told", "tick, pause", "against", "finished", *headings]
    text = [f"| {' | '.join(told)} |", f"|{'---|' * len(told)}"]
    rows: dict[tuple[str, ...], dict[str, Line]] = {}
    for line in lines:
        rows.setdefault(_how(line, yardstick), {})[line.heading] = line
    for how, by_heading in rows.items():
        cells = {heading: line.cells(is_quick=is_quick) for heading, line in by_heading.items()}
        every = [results[cell.key] for group in cells.values() for cell in group]
        finished = f"{sum(int(one['finished']) for one in every)} of {sum(int(one['jobs']) for one in every)}"
        ratios = {heading: _ratios(group, results, traces, yardstick) for heading, group in cells.items()}
        figures = [_figures(ratios[heading]) if heading in ratios else "" for heading in headings]
        text.append(f"| {' | '.join([*how, finished, *figures])} |")
    return "\n".join(text)


def submitted(lines: Sequence[Line], results: Results, traces: Path, yardstick: str, *, is_quick: bool) -> str:
    """A row for each line, by what users submit: what it comes to, over what, how fair and how restless it is."""
    told = ["workload", "submitted", "told", "policy", "finished", "average", "over", "99th of slowdowns", "rho"]
    told += ["changes a job", "reversed"]
    has_deadlines = any(int(results[cell.key]["deadlines"]) for line in lines for cell in line.cells(is_quick=is_quick))
    told += ["deadlines met"] * has_deadlines
    text = [f"| {' | '.join(told)} |", f"|{'---|' * len(told)}"]
    for line in lines:
        cells = line.cells(is_quick=is_quick)
        every = [results[cell.key] for cell in cells]
        others = [_other(cell, lines, results, traces, yardstick) for cell in cells]
        ratios = [float(one["avg_jct_s"] or "nan") / other for one, other in zip(every, others, strict=True)]
        against = line.reference.partition(":")[2].replace(" ", ", ")
        against = against if not yardstick or line.reference.startswith(f"{BEST}:") else yardstick
        parameters = "".join(f", `{each}`" for each in line.parameters.split())
        row = [
            line.place,
            line.how,
            line.knows + (f", kinds by {line.kinds}" if line.kinds else ""),
            f"`{line.policy}`{parameters}",
            f"{_sum(every, 'finished')} of {_sum(every, 'jobs')}",
            f"{_mean(every, 'avg_jct_s'):,.0f} s",
            f"{against} {_spread(ratios)}",
            f"{_mean(every, 'p99_slowdown'):.1f}",
            ", ".join([f"{_mean(every, f'rho_{part}'):.2f}" for part in ("p50", "p99", "worst")]),
            f"{_mean(every, 'rescales_per_job'):.1f}, at most {max(int(one['rescales_most']) for one in every)}",
            f"{_mean(every, 'reversed_decisions'):.0f}",
            *[f"{_sum(every, 'deadlines_met')} of {due}" if (due := _sum(every, "deadlines")) else ""] * has_deadlines,
        ]
        text.append(f"| {' | '.join(row)} |")
    return "\n".join(text)


def _other(cell: Cell, lines: Sequence[Line], results: Results, traces: Path, yardstick: str) -> float:
    """The average that a cell's is over: a published one, or the best of other lines on the same workload."""
    name, _, policies = cell.line.reference.partition(":")
    if name != BEST:
        reference = results[cell.under(yardstick).key] if yardstick else cell.reference(traces)
        return float(reference["avg_jct_s"])
    rivals = [line for line in lines if line.policy in policies.split() and line.place == cell.line.place]
    alike = [line for line in rivals if line.manner == cell.line.manner] or rivals
    return min(float(results[Cell(line, cell.workload).key]["avg_jct_s"]) for line in alike)


def _mean(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    return mean(nan if row[column] in ("", None) else float(row[column]) for row in rows)


def _sum(rows: Sequence[Mapping[str, Any]], column: str) -> int:
    return sum(int(row[column]) for row in rows)


def by_workload(lines: Sequence[Line], results: Results, traces: Path, yardstick: str, *, is_quick: bool) -> str:
    """Each workload by itself, of policies that run against their own published results: the average over theirs."""
    own = [line for line in lines if line.reference.partition(":")[2] == line.policy]
    workloads = list(dict.fromkeys(cell.workload for line in own for cell in line.cells(is_quick=is_quick)))
    text = [f"| policy | load | {' | '.join(workloads)} |", f"|{'---|' * (2 + len(workloads))}"]
    for line in own:
        cells = line.cells(is_quick=is_quick)
        ratios = _ratios(cells, results, traces, yardstick)[MEASURES[0]]
        told = {cell.workload: _short(ratio) for cell, ratio in zip(cells, ratios, strict=True)}
        figures = [told.get(each, "") for each in workloads]
        text.append(f"| `{line.policy}` | {line.load} | {' | '.join(figures)} |")
    return "\n".join(text)


def price(lines: Sequence[Line], results: Results) -> str:
    """What it costs that nobody sees all: results through gossip over those of the same policy on the exact view."""
    told = ["load", "messages lost", "servers", "finished", "average", "99th", "makespan", "view age", "refused holds"]
    text = [f"| {' | '.join(told)} |", f"|{'---|' * len(told)}"]
    exact = {(line.load, line.churn): line for line in lines if line.view == "perfect"}
    for line in [line for line in lines if line.view == "gossip"]:
        pairs = [
            (results[one.key], results[other.key])
            for one, other in zip(line.cells(is_quick=False), _alike(exact[line.load, line.churn], line), strict=True)
            if one.key in results and other.key in results
        ]
        if pairs:
            servers = "fail and return" if line.churn else "stay"
            text.append(f"| {line.load} | {float(line.loss or 0.0):.0%} | {servers} | {' | '.join(_price(pairs))} |")
    return "\n".join(text)


def _alike(line: Line, other: Line) -> list[Cell]:
    return [Cell(line, workload) for workload in other.workloads.split()]


def _price(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    there = [one for one, _ in pairs]
    finished = f"{sum(int(one['finished']) for one in there)} of {sum(int(one['jobs']) for one in there)}"
    ratios = [[float(one[measure]) / float(other[measure]) for one, other in pairs] for measure in MEASURES]
    ages = [mean(float(one[key]) for one in there) for key in ("view_age_p50_s", "view_age_p99_s")]
    refused = mean(int(one["refused_holds"]) for one in there)
    return [
        finished,
        _spread(ratios[0]),
        *[_short(mean(each)) for each in ratios[1:]],
        f"{ages[0]:.1f} s, {ages[1]:.1f} s",
        f"{refused:.0f}",
    ]


def elastic_batch(gaps_s: Sequence[float]) -> str:
    """What choosing the batch is worth against the same optimiser with a fixed one, by the mean gap between jobs."""
    text = [
        "| mean gap | fixed batch without accumulation, so on 8 GPUs or more | with accumulation |",
        "|---|---|---|",
    ]
    for gap_s in gaps_s:
        worth = [compared(gap_s, accumulates=accumulates) for accumulates in (False, True)]
        figures = [f"{done:.2f} times the jobs, {faster:.2f} times as fast" for done, faster in worth]
        text.append(f"| {gap_s:g} s | {' | '.join(figures)} |")
    return "\n".join(text)


def put(page: str, name: str, text: str) -> str:
    """The page with the text between the markers of that name; ValueError where they are not there."""
    pattern = re.compile(rf"(<!-- science: {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no lines <!-- science: {name} --> and <!-- end of {name} -->")
    return pattern.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


def _how(line: Line, yardstick: str) -> tuple[str, ...]:
    parameters = "".join(f", `{each}`" for each in line.parameters.split())
    tick = f"{line.tick_s} s" if float(line.tick_s) else "events"
    against = yardstick or line.reference.partition(":")[2]
    return (f"`{line.policy}`{parameters}", line.knows, f"{tick}, {line.pause_s} s", against)


def _figures(ratios: Mapping[str, Sequence[float]]) -> str:
    """Means of the three ratios; of several, the least and the largest on the average."""
    return f"{_spread(ratios[MEASURES[0]])} {' '.join(_short(mean(ratios[each])) for each in MEASURES[1:])}"


def _ratios(cells: Sequence[Cell], results: Results, traces: Path, yardstick: str) -> dict[str, list[float]]:
    """By measure, one for each cell: what came out over what was published, or over what the yardstick made of it."""
    ratios: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for cell in cells:
        reference = results[cell.under(yardstick).key] if yardstick else cell.reference(traces)
        result = results[cell.key]
        for measure in MEASURES:
            ratios[measure].append(float(result[measure] or "nan") / float(reference[measure]))
    return ratios


def _spread(ratios: Sequence[float]) -> str:
    """Their mean, and of several the least and the largest."""
    return f"{_short(mean(ratios))}" + (f" ({_short(min(ratios))} to {_short(max(ratios))})" if len(ratios) > 1 else "")


def _short(ratio: float) -> str:
    return f"{ratio:.3f}".removeprefix("0")

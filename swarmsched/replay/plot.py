"""The picture of a replay: how long jobs took, how much of the GPUs was held, and by jobs of which size.

Policies stand side by side, in colours that people with any colour vision can tell apart (Okabe and Ito, 2008), and are
named where they are drawn.  Needs matplotlib, which is an extra.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from swarmsched.replay.results import SIZES, RunLog

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
SHADES = ("#DCE9F5", "#9CC4E0", "#4A90C4", "#08487F")
"""Light to dark with the size of jobs."""
LABEL_HEIGHT = 7.0
BINS = 240
HOUR_S = 3_600.0


def figure(runs: Sequence[tuple[str, RunLog]], title: str) -> Any:
    """A matplotlib Figure of all runs, each with its name; ValueError unless there is a run in which time passed."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra: only who draws needs it

    columns = 2 if len(runs) == 4 else min(3, len(runs))
    rows = -(-len(runs) // columns)
    runs = [(_plain(name), observer) for name, observer in runs if observer.elapsed_s]
    if not runs:
        raise ValueError("no time has passed in any of the runs")
    drawn: Any = Figure(figsize=(12.0, 4.6 + 2.9 * rows), layout="constrained")
    drawn.suptitle(_plain(title), fontsize=13, x=0.01, ha="left")
    above, below = drawn.subfigures(2, 1, height_ratios=[4.4, 2.9 * rows])
    times, use = above.subplots(1, 2)
    _completion_times(times, runs)
    _utilisation(use, runs)
    longest_h = max(observer.elapsed_s for _, observer in runs) / HOUR_S
    named = _size_names(runs)
    panels = below.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel, (name, observer) in zip(panels, runs, strict=False):
        _allocation(panel, name, observer, named)
        panel.set_xlim(0, longest_h)
    for panel in panels[len(runs) :]:
        panel.set_visible(False)
    below.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    for row in range(rows):
        panels[row * columns].set_ylabel("GPUs held")
    for axes in (times, use, *panels):
        axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _plain(text: str) -> str:
    """As it is: matplotlib takes what stands between two dollar signs for a formula."""
    return text.replace("$", r"\$")


def _look(number: int) -> dict[str, str]:
    return {"color": COLORS[number % len(COLORS)], "linestyle": STYLES[number % len(STYLES)]}


def _completion_times(axes: Any, runs: Sequence[tuple[str, RunLog]]) -> None:
    """The share of all jobs that took no longer, the jobs that have not finished among them."""
    for number, (name, observer) in enumerate(runs):
        times_h = np.sort(observer.times_s) / HOUR_S
        if len(times_h):
            shares = 100 * np.arange(1, len(times_h) + 1) / observer.jobs
            of = "" if len(times_h) == observer.jobs else f" of {len(times_h)} of {observer.jobs} jobs"
            told = f"{name}, mean {np.mean(times_h):.3g} h{of}"
            axes.step(times_h, shares, where="post", linewidth=1.8, label=told, **_look(number))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if axes.has_data():
        axes.legend(loc="lower right", fontsize=9, frameon=False)
    axes.set(xlabel="completion time (hours)", ylabel="jobs that took no longer (%)", ylim=(0, 102))
    axes.set_title("Completion times", loc="left", fontsize=11)
    axes.grid(alpha=0.25)


def _utilisation(axes: Any, runs: Sequence[tuple[str, RunLog]]) -> None:
    longest_s = max(observer.elapsed_s for _, observer in runs)
    ends = []
    for number, (_, observer) in enumerate(runs):
        middles_h, held, usable = _binned(observer, longest_s / BINS)
        share = 100 * held.sum(axis=1) / usable.clip(min=1e-9)
        axes.plot(middles_h, share, linewidth=1.5, **_look(number))
        axes.plot(middles_h[-1], share[-1], marker="o", markersize=5, clip_on=False, color=_look(number)["color"])
        ends.append((float(share[-1]), number))
    height = 100.0 + LABEL_HEIGHT
    for end, number in sorted(ends, reverse=True):
        height = min(end, height - LABEL_HEIGHT)
        axes.annotate(
            runs[number][0],
            (1.02, height),
            xycoords=("axes fraction", "data"),
            va="center",
            color=_look(number)["color"],
            fontsize=9,
            annotation_clip=False,
        )
    axes.set(xlabel="time (hours)", ylabel="GPUs held, of those that are up (%)")
    axes.set(ylim=(0, 102), xlim=(0, longest_s / HOUR_S))
    axes.set_title("Utilisation", loc="left", fontsize=11)
    axes.grid(alpha=0.25)


def _allocation(axes: Any, name: str, observer: RunLog, named: Sequence[str]) -> None:
    """GPUs by the size of the jobs that hold them, the small ones at the bottom, below a line of those that are up."""
    middles_h, held, usable = _binned(observer, observer.elapsed_s / BINS)
    axes.stackplot(middles_h, held.T, colors=SHADES, labels=named)
    axes.plot(middles_h, usable, color="black", linewidth=1, label="GPUs that are up")
    axes.set(xlabel="time (hours)", ylim=(0, None))
    axes.set_title(f"Allocation, {name}", loc="left", fontsize=11)


def _size_names(runs: Sequence[tuple[str, RunLog]]) -> list[str]:
    """For the legend, which leaves out what begins with an underscore: a size that no job has in any run."""
    ranges = [f"held by jobs of {low + 1} to {high}" for low, high in pairwise(SIZES)]
    names = [f"held by jobs of {SIZES[0]} GPU", *ranges, f"held by jobs of more than {SIZES[-1]}"]
    held = [sum(each.held[size] for _, run in runs for each in run.slices) for size in range(len(names))]
    return [name if count else f"_{name}" for name, count in zip(names, held, strict=True)]


def _binned(observer: RunLog, width_s: float) -> tuple[Any, Any, Any]:
    """Middles of bins in hours, and means over each bin: GPUs held by size of job (bins x sizes), GPUs up (bins)."""
    seconds = np.array([each.seconds for each in observer.slices])
    values = np.array([(*each.held, each.usable) for each in observer.slices], dtype=float)
    ends_s = np.concatenate(([0.0], np.cumsum(seconds)))
    sums = np.concatenate((np.zeros((1, values.shape[1])), np.cumsum(values * seconds[:, None], axis=0)))
    edges_s = np.append(np.arange(0.0, ends_s[-1], width_s), ends_s[-1])
    edges_s = edges_s[np.concatenate(([True], np.diff(edges_s) > 1e-6 * width_s))]
    at_edges = np.stack([np.interp(edges_s, ends_s, column) for column in sums.T], axis=1)
    means = np.diff(at_edges, axis=0) / np.diff(edges_s)[:, None]
    return (edges_s[:-1] + edges_s[1:]) / 2 / HOUR_S, means[:, :-1], means[:, -1]

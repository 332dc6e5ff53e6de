"""Speed of the simulator: steps of nodes per second of one core, all checkers on, over whole stories."""

import statistics
import time
from collections.abc import Sequence

from swarmsched.simulator.story import StoryOptions, StoryPlan, draw_plan, run_story

SEEDS = 12
RUNS = 3


def run() -> list[tuple[str, float, str]]:
    """(measure, median of several runs, unit)."""
    figures: list[tuple[str, float, str]] = []
    for nodes in (3, 5, 30):
        seeds = range(SEEDS if nodes < 30 else 2)
        plans = [draw_plan(seed, StoryOptions(nodes=nodes)) for seed in seeds]
        speed = statistics.median(_events_per_s(plans) for _ in range(RUNS))
        figures.append((f"simulator: events per second, {nodes} nodes (goal 30,000)", speed, "/s"))
    return figures


def _events_per_s(plans: Sequence[StoryPlan]) -> float:
    started_s, events = time.process_time(), 0
    for plan in plans:
        events += run_story(plan).events
    return events / (time.process_time() - started_s)

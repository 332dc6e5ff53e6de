"""serf on this machine beside our gossip, in the same run: who hears of what, how soon, at what cost.

Needs Debian's packages serf, iproute2 and nftables, and root.  Both systems live in one network namespace that nothing
leaves, and go through the same deaths and faults at the same moments; only joins and our own news, which load the
machine, take turns.  Our members are processes of `gossip_member`; whole agents are rows of their own.

Named, it runs in full, in a quarter of an hour; among all benchmarks it runs the short form: no faults, no 60 members.
"""

import asyncio
import math
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.agent_failures import AgentFigures, agent_figures
from tests.benchmarks.gossip_system import OurGossip
from tests.benchmarks.private_network import Faults, missing_packages, private_network
from tests.benchmarks.scenarios import (
    Split,
    comeback,
    detections,
    idle_cost,
    join,
    loss,
    pair_detection,
    settle,
    split,
    spread,
    stall,
)
from tests.benchmarks.serf_system import Serf

AGENTS = 10
AGENT_KILLS = 3
FAULT_SIZE = 30
LOSS_PERCENT = 25
STALLED = 3
NEWS_INTERVAL_S = 0.5
RENEWAL_INTERVAL_S = 0.25
NO = "-"


@dataclass(frozen=True, slots=True)
class Target:
    """Seconds: the most that the median and the longest of several times may be."""

    median_s: float = math.inf
    longest_s: float = math.inf

    def __str__(self) -> str:
        parts = [f"<= {self.median_s:g} s"] if math.isfinite(self.median_s) else []
        parts += [f"all <= {self.longest_s:g} s"] if math.isfinite(self.longest_s) else []
        return ", ".join(parts)

    def is_met(self, times_s: Sequence[float]) -> bool | None:
        """None where nothing is asked."""
        if math.isinf(self.median_s) and math.isinf(self.longest_s):
            return None
        return statistics.median(times_s) <= self.median_s and max(times_s) <= self.longest_s


JOIN_TARGETS = {30: Target(1.5, 6.0)}
CHANGE_TARGETS = {30: Target(0.8, 6.0), 60: Target(1.0, 6.0)}
RECORD_TARGETS = {30: Target(longest_s=5.0), 60: Target(longest_s=6.0)}
DETECTION_TARGETS = {10: Target(5.5), 30: Target(7.0), 60: Target(7.5)}
SUSPECT_TARGET = Target(3.0)
PAIR_TARGET = Target(5.5)
COMEBACK_TARGET = Target(1.5)
HEAL_TARGET = Target(15.0)
REFUSED_TARGET = Target(15.0)
LIVENESS_TARGET_BYTES_PER_S = 1_000
STATE_TARGET_BYTES_PER_S = 5_000
CPU_TARGET_MS_PER_S = 7
RESIDENT_TARGET_MB = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """How often everything is done; the sizes are numbers of members."""

    sizes: tuple[int, ...]
    our_joins: dict[int, int]
    serf_joins: int
    renewals: int
    news: int
    kills: int
    pairs: int
    has_faults: bool


FULL = Plan(
    sizes=(10, 30, 60),
    our_joins={10: 10, 30: 50, 60: 10},
    serf_joins=3,
    renewals=100,
    news=20,
    kills=7,
    pairs=3,
    has_faults=True,
)
SHORT = Plan(
    sizes=(10, 30),
    our_joins={10: 5, 30: 5},
    serf_joins=2,
    renewals=10,
    news=5,
    kills=3,
    pairs=1,
    has_faults=False,
)


def run() -> list[tuple[str, float, str]]:
    """Print the whole table; there is nothing left to return."""
    return _run(FULL)


def short() -> list[tuple[str, float, str]]:
    """As `run`, in two minutes."""
    return _run(SHORT)


def _run(plan: Plan) -> list[tuple[str, float, str]]:
    packages = ([] if shutil.which("serf") else ["serf"]) + missing_packages()
    if packages or os.geteuid():
        remedy = f"missing: apt-get install {' '.join(packages)}" if packages else "its network namespace needs root"
        print(f"serf: not measured: {remedy}")
        return []
    _row("measure", "serf", "ours", "target", None)
    with private_network((Serf.port, OurGossip.port)) as faults:
        if plan.has_faults:
            _tell_agents(agent_figures(AGENTS, AGENT_KILLS))
        asyncio.run(_compare(plan, faults))
    return []


def _row(measure: str, serf: str, ours: str, target: str, is_met: bool | None) -> None:
    met = {True: "yes", False: "NO", None: ""}[is_met]
    print(f"{measure:<58} {serf:>27} {ours:>28} {target:>22}  {met}", flush=True)


def _times_row(measure: str, serf_s: Sequence[float] | None, ours_s: Sequence[float], target: Target) -> None:
    _row(measure, NO if serf_s is None else _times(serf_s), _times(ours_s), str(target), target.is_met(ours_s))


def _tell_agents(figures: AgentFigures) -> None:
    measure = f"whole agents: kill -9 to failed at all {AGENTS - 1} others"
    _times_row(measure, None, figures.failed_s, DETECTION_TARGETS[AGENTS])
    _times_row("whole agents: kill -9 to suspect at a scheduler", None, figures.suspected_s, SUSPECT_TARGET)
    _times_row("whole agents: killed, started at once, has all records", None, figures.comeback_s, COMEBACK_TARGET)
    failed = figures.comebacks_failed
    _row("whole agents: called failed meanwhile", NO, str(failed), "0", failed == 0)
    size_mb = figures.resident_bytes / 1e6
    target = f"<= {RESIDENT_TARGET_MB} MB"
    _row("whole agents: resident memory", NO, f"{size_mb:.1f} MB", target, size_mb <= RESIDENT_TARGET_MB)


async def _compare(plan: Plan, faults: Faults) -> None:
    serf, ours = Serf(), OurGossip()
    try:
        await _tell_pairs(serf, ours, plan)
        for size in plan.sizes:
            await _tell_joins(serf, ours, size, plan)
            if size in CHANGE_TARGETS:
                await _tell_news(serf, ours, size, plan)
            await _tell_deaths(serf, ours, size, plan)
            if plan.has_faults and size == FAULT_SIZE:
                await _tell_comeback(serf, ours)
                await _tell_stall_and_loss(serf, ours, faults)
                await _tell_splits(serf, ours, faults)
        if plan.has_faults:
            await _tell_idle(serf, ours, faults)
        await _both_settle(serf, ours)
        await serf.confirm()
    finally:
        await serf.close()
        await ours.close()


async def _both_settle(serf: Serf, ours: OurGossip) -> None:
    await asyncio.gather(settle(serf), settle(ours))


async def _tell_pairs(serf: Serf, ours: OurGossip, plan: Plan) -> None:
    found = [await asyncio.gather(pair_detection(serf), pair_detection(ours)) for _ in range(plan.pairs)]
    _times_row("two members: kill -9 to failed", [one[0] for one in found], [one[1] for one in found], PAIR_TARGET)


async def _tell_joins(serf: Serf, ours: OurGossip, size: int, plan: Plan) -> None:
    ours_s = await join(ours, size, plan.our_joins[size])
    serf_s = await join(serf, size, plan.serf_joins)
    _times_row(f"warm join of {size}, all see all", serf_s, ours_s, JOIN_TARGETS.get(size, Target()))


async def _tell_news(serf: Serf, ours: OurGossip, size: int, plan: Plan) -> None:
    await _both_settle(serf, ours)
    ours.expect_changes()
    serf_s, records_s = await asyncio.gather(
        spread(serf, serf.change, plan.news, NEWS_INTERVAL_S), spread(ours, ours.change, plan.news, NEWS_INTERVAL_S)
    )
    renewals_s = await spread(ours, ours.renew, plan.renewals, RENEWAL_INTERVAL_S)
    _times_row(f"change to all {size}: user event / membership", serf_s, renewals_s, CHANGE_TARGETS[size])
    _times_row(f"change to all {size}: free GPUs in a record", None, records_s, RECORD_TARGETS[size])


async def _tell_deaths(serf: Serf, ours: OurGossip, size: int, plan: Plan) -> None:
    victims = [f"n{number}" for number in range(2, 2 + plan.kills)]
    await _both_settle(serf, ours)
    theirs, own = await asyncio.gather(detections(serf, victims), detections(ours, victims))
    measure = f"kill -9 to failed at all {size - 1} others"
    _times_row(measure, [one.failed_s for one in theirs], [one.failed_s for one in own], DETECTION_TARGETS[size])
    suspected_s = [time_s for one in own for time_s in one.suspected_s]
    _times_row(f"kill -9 to suspect at a scheduler, {size}", None, suspected_s, SUSPECT_TARGET)


async def _tell_comeback(serf: Serf, ours: OurGossip) -> None:
    theirs, own = [], []
    for name in ("n5", "n6", "n7"):
        await _both_settle(serf, ours)
        their, our = await asyncio.gather(comeback(serf, name), comeback(ours, name))
        theirs.append(their)
        own.append(our)
    measure = "killed and back at once under the same name"
    _times_row(measure, [one[0] for one in theirs], [one[0] for one in own], COMEBACK_TARGET)
    failed = sum(one[1] for one in own)
    _row("  called failed meanwhile", str(sum(one[1] for one in theirs)), str(failed), "0", failed == 0)


async def _tell_stall_and_loss(serf: Serf, ours: OurGossip, faults: Faults) -> None:
    victims = [f"n{FAULT_SIZE - number}" for number in range(STALLED)]
    await _both_settle(serf, ours)
    theirs, own = await asyncio.gather(stall(serf, victims), stall(ours, victims))
    _row(f"{STALLED} of {FAULT_SIZE} stalled for 20 s: healthy ones failed", str(theirs), str(own), "0", own == 0)
    await _both_settle(serf, ours)
    theirs, own = await loss((serf, ours), faults, LOSS_PERCENT)
    _row(f"{LOSS_PERCENT} % of UDP lost: failed verdicts", str(theirs), str(own), "0", own == 0)


async def _tell_splits(serf: Serf, ours: OurGossip, faults: Faults) -> None:
    await _both_settle(serf, ours)
    theirs, own = await split((serf, ours), faults, is_refused=True)
    measure, is_met = "split 15/15 by egress rules (EPERM): all noticed", REFUSED_TARGET.is_met([own.noticed_s])
    _row(measure, _noticed(theirs), _noticed(own), str(REFUSED_TARGET), is_met)
    await _both_settle(serf, ours)
    theirs, own = await split((serf, ours), faults, is_refused=False)
    _times_row("split 15/15 for 45 s: from heal to full view", [theirs.healed_s], [own.healed_s], HEAL_TARGET)
    _row("  all noticed, from the split", _noticed(theirs), _noticed(own), "", None)


async def _tell_idle(serf: Serf, ours: OurGossip, faults: Faults) -> None:
    await _both_settle(serf, ours)
    idle, before = f"idle among {len(ours.members)}:", await ours.bytes_sent()
    started_s = time.monotonic()
    theirs, own = await idle_cost((serf, ours), faults)
    member_s = len(ours.members) * (time.monotonic() - started_s)
    after = await ours.bytes_sent()
    liveness, state = (after[0] - before[0]) / member_s, (after[1] - before[1]) / member_s
    is_met = liveness <= LIVENESS_TARGET_BYTES_PER_S and state <= STATE_TARGET_BYTES_PER_S
    planes = f"<= {LIVENESS_TARGET_BYTES_PER_S}, {STATE_TARGET_BYTES_PER_S} B/s"
    _row(f"{idle} UDP sent", f"{theirs.udp_bytes_per_s:.0f} B/s", f"{own.udp_bytes_per_s:.0f} B/s", "", None)
    _row("  of that: liveness, state", NO, f"{liveness:.0f}, {state:.0f} B/s", planes, is_met)
    _row(f"{idle} UDP packets", f"{theirs.udp_packets_per_s:.1f} /s", f"{own.udp_packets_per_s:.1f} /s", "", None)
    cpu = f"{theirs.cpu_ms_per_s:.1f} ms/s", f"{own.cpu_ms_per_s:.1f} ms/s"
    _row(f"{idle} CPU", *cpu, f"<= {CPU_TARGET_MS_PER_S} ms/s", own.cpu_ms_per_s <= CPU_TARGET_MS_PER_S)
    _row(f"{idle} resident memory", f"{theirs.resident_bytes / 1e6:.1f} MB", "see whole agents", "", None)


def _time(time_s: float) -> str:
    return f"{time_s:.2f} s" if math.isfinite(time_s) else "never"


def _times(times_s: Sequence[float]) -> str:
    """Median, longest and number; `never` where the limit passed first."""
    if len(times_s) == 1:
        return _time(times_s[0])
    return f"{_time(statistics.median(times_s))} (max {_time(max(times_s))}, n {len(times_s)})"


def _noticed(found: Split) -> str:
    return _time(found.noticed_s) if math.isfinite(found.noticed_s) else f"{found.noticed} of {found.pairs}"

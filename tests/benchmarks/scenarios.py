"""What is done to a system, and what is measured then.  Times are seconds; infinity where it did not happen in time."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.benchmarks.loopback import cpu_s, resident_bytes
from tests.benchmarks.private_network import Faults
from tests.benchmarks.sightings import ALIVE, FAILED, SUSPECT, News, System

JOIN_LIMIT_S = 60.0
DETECTION_LIMIT_S = 40.0
COMEBACK_LIMIT_S = 30.0
SPREAD_LIMIT_S = 7.0  # a member is asked for news at longer intervals than this
HEAL_LIMIT_S = 120.0
SETTLE_LIMIT_S = 60.0
SETTLED_S = 3.0  # until rumours have died down
SPLIT_S = 45.0
STALL_S = 20.0
LOSS_S = 45.0
AFTERMATH_S = 12.0  # in which a wrong suspicion would become a verdict
IDLE_BEFORE_S = 20.0
IDLE_S = 40.0


async def join(system: System, count: int, runs: int) -> list[float]:
    """From the order to join until all see all; the last swarm stays."""
    times_s = []
    for _ in range(runs):
        await system.disband()
        told_s = await system.gather_all(count)
        is_whole = await system.until(system.sees_all, JOIN_LIMIT_S)
        times_s.append(system.since(told_s)[-1].time_s - told_s if is_whole else math.inf)
    return times_s


async def settle(system: System) -> None:
    """Wait until all see all and nothing happens; a swarm that does not come to it is made anew."""
    if not await system.until(system.sees_all, SETTLE_LIMIT_S):
        await join(system, len(system.members), 1)
    await asyncio.sleep(SETTLED_S)


async def spread(system: System, tell: Callable[[str], Awaitable[News]], runs: int, interval_s: float) -> list[float]:
    """Members have news one after another; from each until all others say so."""
    origins = [name for name in system.members if name != "n1"]  # which the others join through
    told = []
    for run in range(runs):
        told.append(await tell(origins[run % len(origins)]))
        await asyncio.sleep(interval_s)
    await asyncio.sleep(SPREAD_LIMIT_S)
    return [_reached_s(system, news) for news in told]


def _reached_s(system: System, news: News) -> float:
    heard_s: dict[str, float] = {}
    for sighting in system.since(news.time_s, news.subject, news.status):
        if sighting.observer != news.origin and sighting.time_s < news.time_s + SPREAD_LIMIT_S:
            heard_s.setdefault(sighting.observer, sighting.time_s - news.time_s)
    return max(heard_s.values()) if len(heard_s) == len(system.members) - 1 else math.inf


@dataclass(frozen=True, slots=True)
class Detection:
    """`failed_s`: until the last survivor says so.  `suspected_s`: until each survivor places nothing there."""

    failed_s: float
    suspected_s: tuple[float, ...]


async def detection(system: System, victim: str) -> Detection:
    """SIGKILL of one member; it is not started again."""
    killed_s = await system.kill(victim)
    survivors = system.members.values()
    is_known = await system.until(
        lambda: all(member.view.get(victim) == FAILED for member in survivors), DETECTION_LIMIT_S
    )
    failed_s = system.since(killed_s, victim, FAILED)[-1].time_s - killed_s if is_known else math.inf
    suspected_s: dict[str, float] = {}
    for sighting in system.since(killed_s, victim):
        if sighting.status in (SUSPECT, FAILED):
            suspected_s.setdefault(sighting.observer, sighting.time_s - killed_s)
    return Detection(failed_s, tuple(suspected_s.values()))


async def detections(system: System, victims: Sequence[str]) -> list[Detection]:
    """One after another; each is started again before the next."""
    found = []
    for victim in victims:
        found.append(await detection(system, victim))
        await system.restart(victim)
        await settle(system)
    return found


async def pair_detection(system: System) -> float:
    """Two members, one is killed."""
    await join(system, 2, 1)
    await settle(system)
    found = await detection(system, "n2")
    await system.restart("n2")
    return found.failed_s


async def comeback(system: System, name: str) -> tuple[float, int]:
    """Killed and started again at once: until all is as before; and how often it was called failed."""
    killed_s = await system.kill(name)
    await system.restart(name)
    is_back = await system.until(
        lambda: system.is_complete(name) and system.is_renewed(name, killed_s), COMEBACK_LIMIT_S
    )
    back_s = time.monotonic() - killed_s
    await asyncio.sleep(AFTERMATH_S)
    return back_s if is_back else math.inf, len(system.since(killed_s, name, FAILED))


async def stall(system: System, victims: Sequence[str]) -> int:
    """SIGSTOP for 20 s; how often a healthy member was called failed, by the stalled ones too."""
    stalled_s = time.monotonic()
    system.stall(victims)
    await asyncio.sleep(STALL_S)
    system.resume(victims)
    await asyncio.sleep(AFTERMATH_S)
    return sum(sighting.subject not in victims for sighting in system.since(stalled_s, status=FAILED))


async def loss(systems: Sequence[System], faults: Faults, percent: int) -> list[int]:
    """A share of all UDP packets is lost; how often anybody was called failed."""
    lost_s = time.monotonic()
    faults.lose(percent)
    await asyncio.sleep(LOSS_S)
    faults.heal()
    await asyncio.sleep(AFTERMATH_S)
    return [len(system.since(lost_s, status=FAILED)) for system in systems]


@dataclass(frozen=True, slots=True)
class Split:
    """`noticed_s`: until everybody had called everybody beyond the split failed; `noticed`: such pairs at its end."""

    noticed_s: float
    noticed: int
    pairs: int
    healed_s: float


async def split(systems: Sequence[System], faults: Faults, *, is_refused: bool) -> list[Split]:
    """The two halves are cut apart for 45 s, silently or by rules that refuse each send; then until all see all."""
    count = len(systems[0].members)
    one, other = range(1, count // 2 + 1), range(count // 2 + 1, count + 1)
    split_s = time.monotonic()
    (faults.forbid if is_refused else faults.split)(one, other)
    await asyncio.sleep(SPLIT_S)
    noticed = [_noticed(system, one, split_s) for system in systems]
    faults.heal()
    healed_s = await asyncio.gather(*(_healed_s(system) for system in systems))
    pairs = 2 * len(one) * len(other)
    return [Split(*seen, pairs, healed) for seen, healed in zip(noticed, healed_s, strict=True)]


def _noticed(system: System, one: range, split_s: float) -> tuple[float, int]:
    numbers = {name: member.number for name, member in system.members.items()}
    beyond = [
        (observer, subject)
        for observer in numbers
        for subject in numbers
        if (numbers[observer] in one) != (numbers[subject] in one)
    ]
    noticed = sum(system.members[observer].view.get(subject) == FAILED for observer, subject in beyond)
    if noticed < len(beyond):
        return math.inf, noticed
    return max(sighting.time_s for sighting in system.since(split_s, status=FAILED)) - split_s, noticed


async def _healed_s(system: System) -> float:
    healed_s = time.monotonic()
    is_whole = await system.until(system.sees_all, HEAL_LIMIT_S)
    last_s = max((sighting.time_s for sighting in system.since(healed_s, status=ALIVE)), default=healed_s)
    return last_s - healed_s if is_whole else math.inf


@dataclass(frozen=True, slots=True)
class IdleCost:
    """Of one member that does nothing, as a mean over all."""

    cpu_ms_per_s: float
    udp_bytes_per_s: float
    udp_packets_per_s: float
    resident_bytes: float


async def idle_cost(systems: Sequence[System], faults: Faults) -> list[IdleCost]:
    """After a while of rest; UDP payloads, counted by the kernel's packet filter."""
    await asyncio.sleep(IDLE_BEFORE_S)
    before = [_totals(system, faults) for system in systems]
    await asyncio.sleep(IDLE_S)
    costs = []
    for system, totals in zip(systems, before, strict=True):
        spent_s, packets, sent_bytes = (
            (after - earlier) / IDLE_S / len(system.members)
            for earlier, after in zip(totals, _totals(system, faults), strict=True)
        )
        size = sum(resident_bytes(member.pid) for member in system.members.values()) / len(system.members)
        costs.append(IdleCost(1_000 * spent_s, sent_bytes, packets, size))
    return costs


def _totals(system: System, faults: Faults) -> tuple[float, int, int]:
    return sum(cpu_s(member.pid) for member in system.members.values()), *faults.udp_sent(system.port)

"""What two systems of one comparison have in common: processes that tell whom they see, and what is asked of them.

Every process writes a line when its view changes.  Lines are stamped here as they arrive, for both systems alike, so
that nobody is polled and no poll blurs a time.
"""

import asyncio
import os
import signal
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from tests.benchmarks.private_network import host

ALIVE, SUSPECT, FAILED, HEARD = "alive", "suspect", "failed", "heard"
CHECK_S = 0.02


@dataclass(frozen=True, slots=True)
class Sighting:
    """One line of one process.  `status` HEARD: the label of a change is the subject."""

    time_s: float
    observer: str
    subject: str
    status: str


@dataclass(frozen=True, slots=True)
class News:
    """What every other member is to say, and since when it can."""

    time_s: float
    origin: str
    subject: str
    status: str


@dataclass
class Participant:
    """One process of a system, and whom it sees how."""

    name: str
    number: int
    pid: int
    lines: asyncio.StreamReader  # ends with the process
    orders: asyncio.StreamWriter | None = None
    view: dict[str, str] = field(default_factory=dict)
    reading: "asyncio.Task[None] | None" = None

    @property
    def host(self) -> str:
        """Its address."""
        return host(self.number)


class System(ABC):
    """Processes n1, n2...; all methods belong to the loop's thread."""

    title: str
    port: int  # of UDP and TCP, the same at every address

    def __init__(self) -> None:
        self.members: dict[str, Participant] = {}
        self.sightings: list[Sighting] = []
        self._news = asyncio.Event()

    @abstractmethod
    async def gather_all(self, count: int) -> float:
        """Warm start: processes n1 to n`count` are up and alone, then all are told of n1; returns when (monotonic)."""

    @abstractmethod
    async def disband(self) -> None:
        """End the swarm without farewell, so that `gather_all` can begin anew."""

    @abstractmethod
    async def restart(self, name: str) -> None:
        """Start a killed process under its old name; it knows the address of another."""

    @abstractmethod
    async def change(self, origin: str) -> News:
        """One member has news for all others: serf's user event, our node record."""

    @abstractmethod
    def read_line(self, observer: Participant, line: str) -> tuple[str, str] | None:
        """(subject, status), if a line tells any."""

    def listen(self, member: Participant) -> None:
        """Take down what this process writes until it ends."""
        member.reading = asyncio.create_task(self._read(member))

    async def _read(self, member: Participant) -> None:
        while line := await member.lines.readline():
            seen = self.read_line(member, line.decode(errors="replace"))
            if seen is None or seen[0] == member.name:
                continue
            self.sightings.append(Sighting(time.monotonic(), member.name, *seen))
            if seen[1] != HEARD:
                member.view[seen[0]] = seen[1]
            self._news.set()

    async def kill(self, name: str) -> float:
        """SIGKILL; returns when."""
        member = self.members.pop(name)
        killed_s = time.monotonic()
        os.kill(member.pid, signal.SIGKILL)
        assert member.reading is not None
        await member.reading
        if member.orders is not None:
            member.orders.close()
        return killed_s

    def stall(self, names: Sequence[str]) -> None:
        """SIGSTOP."""
        for name in names:
            os.kill(self.members[name].pid, signal.SIGSTOP)

    def resume(self, names: Sequence[str]) -> None:
        """SIGCONT."""
        for name in names:
            os.kill(self.members[name].pid, signal.SIGCONT)

    async def close(self) -> None:
        """Kill everything."""
        for name in list(self.members):
            await self.kill(name)

    async def until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for news that make the predicate true; false when it is not in time."""
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            self._news.clear()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except TimeoutError:
                continue
            await asyncio.sleep(CHECK_S)  # a burst of news is looked at once
        return True

    def sees_all(self) -> bool:
        """True when every member sees every other one alive."""
        return all(self.is_complete(name) for name in self.members)

    def is_complete(self, observer: str) -> bool:
        """True when this member sees every other one alive."""
        view = self.members[observer].view
        return all(view.get(name) == ALIVE for name in self.members if name != observer)

    def is_renewed(self, name: str, since_s: float) -> bool:
        """True when all others have taken in a restart from then on, as far as this system says so."""
        return True

    def since(self, start_s: float, subject: str = "", status: str = "") -> list[Sighting]:
        """Sightings from then on, of one subject or status if named, oldest first."""
        first = bisect_left(self.sightings, start_s, key=attrgetter("time_s"))
        return [
            sighting
            for sighting in self.sightings[first:]
            if (not subject or sighting.subject == subject) and (not status or sighting.status == status)
        ]

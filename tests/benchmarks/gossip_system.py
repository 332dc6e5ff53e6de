"""Our gossip as a system under test: processes of `gossip_member`, encrypted as agents are."""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from swarmsched.wire.sealing import KEY_BYTES
from tests.benchmarks import gossip_member
from tests.benchmarks.private_network import group, host
from tests.benchmarks.sightings import ALIVE, HEARD, News, Participant, System

ORDER_TIMEOUT_S = 60.0
ANSWER_BYTES_MAX = 16
STATUSES = ("alive", "suspect", "failed", "left", "conflict", "heard")


class OurGossip(System):
    """Members without HTTP API, jobs and supervision.  Processes stay up from one swarm to the next."""

    title = "ours"
    port = 7947

    def __init__(self) -> None:
        super().__init__()
        self._key = os.urandom(KEY_BYTES).hex()
        self._generation = int(time.time())
        self._changes = itertools.count(1)
        self._idle: dict[str, Participant] = {}  # processes without a life
        self._answers: dict[tuple[str, str], asyncio.Future[str]] = {}
        self._nursery, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptor = theirs.fileno()
            command = [sys.executable, "-m", gossip_member.__name__, str(descriptor)]
            self._forker = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])

    async def gather_all(self, count: int) -> float:
        """As `System` says; the first member begins first, as serf's does."""
        await asyncio.gather(*(self._process(number) for number in range(1, count + 1)))
        for number in range(1, count + 1):
            self.members[f"n{number}"] = self._idle.pop(f"n{number}")
        await self._begin("n1")
        told_s = time.monotonic()
        await asyncio.gather(*(self._begin(f"n{number}") for number in range(2, count + 1)))
        return told_s

    async def disband(self) -> None:
        """As `System` says."""
        leaving, self.members = self.members, {}
        await asyncio.gather(*(self._ask(member, "end", "ended") for member in leaving.values()))
        for member in leaving.values():
            member.view.clear()
        self._idle |= leaving

    async def restart(self, name: str) -> None:
        """As `System` says; a fork has its modules loaded, so an interpreter's start is not in it."""
        number = int(name[1:])
        await self._process(number)
        self.members[name] = self._idle.pop(name)
        await self._begin(name)

    async def change(self, origin: str) -> News:
        """Other free GPUs in the record of a node: the state plane."""
        change, told_s = next(self._changes), time.monotonic()
        self._order(self.members[origin], "change", change=change)
        return News(told_s, origin, f"{origin}-{change}", HEARD)

    async def renew(self, origin: str) -> News:
        """A new generation of a member: the liveness plane.  The process stays; it ends and begins at once."""
        member = self.members[origin]
        await self._ask(member, "end", "ended")
        member.view.clear()
        told_s = time.monotonic()
        await self._begin(origin)
        return News(told_s, origin, origin, ALIVE)

    def is_renewed(self, name: str, since_s: float) -> bool:
        """As `System` says: all others know the new generation."""
        return len({sighting.observer for sighting in self.since(since_s, name, ALIVE)}) == len(self.members) - 1

    def expect_changes(self) -> None:
        """Have the members say which records are new."""
        for member in self.members.values():
            self._order(member, "expect")

    async def bytes_sent(self) -> tuple[int, int]:
        """Sealed bytes of the liveness and the state plane that all members have sent in this life."""
        answers = await asyncio.gather(*(self._ask(member, "count", "counted") for member in self.members.values()))
        pairs = [tuple(map(int, answer.split(","))) for answer in answers]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

    async def close(self) -> None:
        """As `System` says, the idle processes included."""
        self.members |= self._idle
        self._idle.clear()
        await super().close()
        self._nursery.close()
        self._forker.wait()

    def read_line(self, observer: Participant, line: str) -> tuple[str, str] | None:
        """As `System` says; answers to orders are taken out."""
        status, _, subject = line.strip().partition(" ")
        if status in STATUSES:
            return subject, status
        waiting = self._answers.get((observer.name, status))
        if waiting is not None and not waiting.done():
            waiting.set_result(subject)
        return None

    async def _process(self, number: int) -> None:
        """An idle process of this number."""
        name = f"n{number}"
        if name in self._idle:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._nursery, [b"%d" % group(number)], [theirs.fileno()])
            pid = int(self._nursery.recv(ANSWER_BYTES_MAX))
        lines, orders = await asyncio.open_connection(sock=ours)
        member = self._idle[name] = Participant(name, number, pid, lines, orders)
        self.listen(member)

    async def _begin(self, name: str) -> None:
        """All know the first member; the first knows the second, as it does when it is started again."""
        self._generation += 1
        member = self.members[name]
        seed = host(1 if member.number > 1 else 2)
        await self._ask(
            member,
            "begin",
            "begun",
            name=name,
            host=member.host,
            port=self.port,
            key=self._key,
            generation=self._generation,
            seeds=[[seed, self.port]],
        )

    def _order(self, member: Participant, what: str, **details: Any) -> None:
        assert member.orders is not None
        member.orders.write(json.dumps({"do": what, **details}).encode() + b"\n")

    async def _ask(self, member: Participant, what: str, answer: str, **details: Any) -> str:
        waiting = self._answers[member.name, answer] = asyncio.get_running_loop().create_future()
        self._order(member, what, **details)
        return await asyncio.wait_for(waiting, ORDER_TIMEOUT_S)

"""serf (Debian's package) as a system under test: `serf agent -profile=lan`, read through its log and its RPC.

The log names each change of a member at the moment it is made; the events that the RPC streams are held back for one
to three seconds to be coalesced.  The RPC joins, sends user events, and confirms at the end what the log has told.
"""

import asyncio
import re
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack  # ships neither stubs nor py.typed

from tests.benchmarks.private_network import group, host
from tests.benchmarks.sightings import ALIVE, FAILED, HEARD, News, Participant, System

ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
RPC_PORT = 7373
RPC_VERSION = 1
RPC_TIMEOUT_S = 20.0
RETRY_S = 0.05
_MEMBER = re.compile(r"serf: EventMember(Join|Failed|Leave): (\S+) ")
_EVENT = re.compile(r"agent: Received event: user-event: (\S+)")
_STATUS = {"Join": ALIVE, "Failed": FAILED, "Leave": "left"}


class Serf(System):
    """Agents of serf, unencrypted and without a snapshot, as the package has them by default."""

    title = "serf"
    port = 7946

    def __init__(self) -> None:
        super().__init__()
        self._event_count = 0
        self._processes: dict[str, Process] = {}

    async def gather_all(self, count: int) -> float:
        """As `System` says; the agents are new each time, since old ones would remember their dead."""
        for number in range(1, count + 1):
            await self._start(number)
        await asyncio.gather(*(self._rpc(member, "stats") for member in self.members.values()))
        told_s = time.monotonic()
        others = [member for member in self.members.values() if member.number != 1]
        await asyncio.gather(*(self._join(member) for member in others))
        return told_s

    async def disband(self) -> None:
        """As `System` says."""
        await self.close()

    async def kill(self, name: str) -> float:
        """As `System` says."""
        killed_s = await super().kill(name)
        await self._processes.pop(name).wait()
        return killed_s

    async def restart(self, name: str) -> None:
        """As `System` says."""
        number = int(name[1:])
        await self._start(number, f"-join={host(1 if number > 1 else 2)}:{self.port}")

    async def change(self, origin: str) -> News:
        """A user event."""
        self._event_count += 1
        label, told_s = f"change-{self._event_count}", time.monotonic()
        await self._rpc(self.members[origin], "event", {"Name": label, "Payload": b"", "Coalesce": False})
        return News(told_s, origin, label, HEARD)

    def read_line(self, observer: Participant, line: str) -> tuple[str, str] | None:
        """As `System` says."""
        if found := _MEMBER.search(line):
            return found[2], _STATUS[found[1]]
        if found := _EVENT.search(line):
            return found[1], HEARD
        return None

    async def confirm(self) -> None:
        """Fail if the RPC of a member tells other members than its log did."""
        for member in self.members.values():
            told = (await self._rpc(member, "members"))[b"Members"]
            statuses = {item[b"Name"].decode(): item[b"Status"].decode() for item in told}
            del statuses[member.name]
            assert statuses == member.view, f"{member.name}: RPC says {statuses}, its log {member.view}"

    async def _start(self, number: int, *options: str) -> None:
        where = host(number)
        process = await asyncio.create_subprocess_exec(
            *ENDS_WITH_US, "serf", "agent", f"-node=n{number}", "-profile=lan", "-log-level=info",
            f"-bind={where}:{self.port}", f"-rpc-addr={where}:{RPC_PORT}", *options,
            stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, group=group(number),
        )  # fmt: skip
        assert process.stdout is not None
        member = self.members[f"n{number}"] = Participant(f"n{number}", number, process.pid, process.stdout)
        self._processes[member.name] = process
        self.listen(member)

    async def _join(self, member: Participant) -> None:
        await self._rpc(member, "join", {"Existing": [f"{host(1)}:{self.port}"], "Replay": False})

    async def _rpc(self, member: Participant, command: str, body: dict[str, Any] | None = None) -> Any:
        """The body of the answer; fails when serf refuses."""
        async with asyncio.timeout(RPC_TIMEOUT_S), _connected(member.host) as (reader, writer):
            unpacker = msgpack.Unpacker(raw=True)
            writer.write(_request("handshake", 0, {"Version": RPC_VERSION}) + _request(command, 1, body))
            _check(await _next(reader, unpacker), "handshake")
            _check(await _next(reader, unpacker), command)
            return await _next(reader, unpacker) if command in ("members", "join", "stats") else None


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to an agent that may not listen yet."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(address, RPC_PORT)
            break
        except ConnectionRefusedError:
            await asyncio.sleep(RETRY_S)
    try:
        yield reader, writer
    finally:
        writer.close()


def _request(command: str, number: int, body: dict[str, Any] | None) -> bytes:
    head = bytes(msgpack.packb({"Command": command, "Seq": number}, use_bin_type=False))
    return head if body is None else head + bytes(msgpack.packb(body, use_bin_type=False))


async def _next(reader: asyncio.StreamReader, unpacker: Any) -> Any:
    """The next object; serf sends heads and bodies one after another without lengths."""
    while True:
        for item in unpacker:
            return item
        data = await reader.read(2**16)
        assert data, "serf closed the connection"
        unpacker.feed(data)


def _check(head: Any, command: str) -> None:
    assert not head[b"Error"], f"serf refuses {command}: {head[b'Error'].decode()}"

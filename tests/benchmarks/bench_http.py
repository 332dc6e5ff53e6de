"""How many /v1/nodes an agent of a swarm of 30 answers a second on one core.

The agent process serves over real loopback sockets; the client is a second process with eight kept connections that
speaks bare HTTP, so that the figure is the server's.  The agent has no core: what is measured is guard, routing,
cache and writing.
"""

import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path

from aiohttp import web

from swarm_agent.http.server import build_api
from tests.agent.http.testing import TOKEN, SwarmInOneProcess

MEMBERS = 30
CONNECTIONS = 8
DURATION_S = 3.0
STEP_S = 0.02  # how often the core takes in something and so invalidates what is kept


def run() -> list[tuple[str, float, str]]:
    """(name, value, unit) of each figure."""
    return asyncio.run(_measure())


async def _measure() -> list[tuple[str, float, str]]:
    with tempfile.TemporaryDirectory() as folder:
        swarm = SwarmInOneProcess(Path(folder))
        for number in range(MEMBERS):
            swarm.add(f"n{number}")
        agent = swarm.agents[next(iter(swarm.agents))]
        for other in swarm.agents.values():
            other.on_query("gpus", _no_gpus)
        app = build_api(agent, agent, (TOKEN,), lambda _: (b"", "text/plain")).make_app()
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stepping = asyncio.create_task(_step(agent.stepped))
        figures = await _ask(runner.addresses[0][1])
        stepping.cancel()
        await runner.cleanup()
    return figures


async def _no_gpus(_: str, __: dict[str, object]) -> dict[str, object]:
    return {"gpus": []}


async def _step(stepped: "object") -> None:
    while True:
        stepped()  # type: ignore[operator]  # a bound method
        await asyncio.sleep(STEP_S)


async def _ask(port: int) -> list[tuple[str, float, str]]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_client, args=(port, sender))
    started_s = time.process_time()
    process.start()
    count, elapsed_s, size_bytes = await asyncio.to_thread(receiver.recv)
    busy_s = time.process_time() - started_s
    process.join()
    return [
        ("http /v1/nodes, 30 members, answers a second", count / elapsed_s, "1/s"),
        ("http /v1/nodes, server CPU of one answer", busy_s / count * 1e6, "us"),
        ("http /v1/nodes, size of one answer", size_bytes, "B"),
    ]


def _client(port: int, sender: "object") -> None:
    sender.send(asyncio.run(_load(port)))  # type: ignore[attr-defined]  # a Connection


async def _load(port: int) -> tuple[int, float, int]:
    end_s = time.monotonic() + DURATION_S
    started_s = time.monotonic()
    found = await asyncio.gather(*(_connection(port, end_s) for _ in range(CONNECTIONS)))
    return sum(count for count, _ in found), time.monotonic() - started_s, found[0][1]


async def _connection(port: int, end_s: float) -> tuple[int, int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = f"GET /v1/nodes HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    count = size_bytes = 0
    while time.monotonic() < end_s:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        size_bytes = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(size_bytes)
        count += 1
    writer.close()
    return count, size_bytes


if __name__ == "__main__":
    for name, value, unit in run():
        print(f"{name}: {value:.1f} {unit}")

"""Connections of which nobody knows yet whose they are: how many there may be, and for how long.

A connection counts as a stranger's until `vouch` says that a request on it showed the token or opened under the cluster
key.  A stranger has `PATIENCE_S` for everything (head, body, or nothing at all), and when there are too many of one
address, or at all, the oldest one goes: who has a token shows it within milliseconds and is not hit.
"""

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

PATIENCE_S = 30.0
STRANGERS_PER_ADDRESS = 64
STRANGERS_MAX = 1_024
LATE, CROWDED = "late", "crowded"
TURNED_AWAY = (LATE, CROWDED)
"""Why: it showed nothing in its time, or there were too many of its address or at all."""


@dataclass(frozen=True, slots=True)
class _Stranger:
    address: str
    transport: asyncio.Transport
    patience: asyncio.TimerHandle


@dataclass(slots=True)
class Arrivals:
    """The strangers of one server, the oldest first.  Everything belongs to the event loop's thread."""

    _strangers: "OrderedDict[object, _Stranger]" = field(default_factory=OrderedDict)
    _of_address: "dict[str, OrderedDict[object, None]]" = field(default_factory=dict)
    turned_away: Counter[str] = field(default_factory=Counter)

    def watch(self, server: web.Server) -> None:
        """Count the connections of this server from now on."""
        made, lost = server.connection_made, server.connection_lost

        def on_made(handler: Any, transport: asyncio.Transport) -> None:
            made(handler, transport)
            self._add(handler, transport)

        def on_lost(handler: Any, exc: BaseException | None = None) -> None:
            self.remove(handler)
            lost(handler, exc)

        # aiohttp tells its server of connections, and nobody else.
        server.connection_made, server.connection_lost = on_made, on_lost  # type: ignore[method-assign]

    def remove(self, protocol: object) -> None:
        """A connection is gone, or no stranger's any more."""
        stranger = self._strangers.pop(protocol, None)
        if stranger is None:
            return
        stranger.patience.cancel()
        neighbours = self._of_address[stranger.address]
        del neighbours[protocol]
        if not neighbours:
            del self._of_address[stranger.address]

    def _add(self, protocol: object, transport: asyncio.Transport) -> None:
        address = str((transport.get_extra_info("peername") or ("",))[0])
        patience = asyncio.get_running_loop().call_later(PATIENCE_S, partial(self._turn_away, protocol, LATE))
        self._strangers[protocol] = _Stranger(address, transport, patience)
        neighbours = self._of_address.setdefault(address, OrderedDict())
        neighbours[protocol] = None
        if len(neighbours) > STRANGERS_PER_ADDRESS:
            self._turn_away(next(iter(neighbours)), CROWDED)
        if len(self._strangers) > STRANGERS_MAX:
            self._turn_away(next(iter(self._strangers)), CROWDED)

    def _turn_away(self, protocol: object, why: str) -> None:
        stranger = self._strangers[protocol]
        self.remove(protocol)
        self.turned_away[why] += 1
        stranger.transport.abort()


ARRIVALS = web.AppKey("ARRIVALS", Arrivals)


def vouch(request: web.Request) -> None:
    """The connection of this request is not a stranger's."""
    if ARRIVALS in request.app:
        request.app[ARRIVALS].remove(request.protocol)

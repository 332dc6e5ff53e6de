"""The public HTTP API: routes, documents, streams, health, the status page, and the checks before any of them."""

from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from swarm_agent.agent import Agent

__all__ = ["build_app"]


def build_app(agent: "Agent") -> web.Application:
    """The application of a real agent; the caller adds the routes of the peer channel and serves it."""
    from swarm_agent.http.facts import Facts  # noqa: PLC0415  # as above
    from swarm_agent.http.server import build_api  # noqa: PLC0415  # the agent's module may import this package
    from swarm_agent.metrics import render  # noqa: PLC0415  # as above

    return build_api(agent, Facts(agent), agent.secrets.token, partial(render, agent))

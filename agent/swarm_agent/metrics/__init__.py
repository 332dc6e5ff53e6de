"""Metrics of one agent, in the Prometheus text format or in OpenMetrics.

Two kinds: what is counted while it happens (`observed`), and what is read from the agent's snapshots at the moment of
the scrape (`node`, `gpu`).  No job id, user, path or other unbounded value is ever a label.
"""

from swarm_agent.metrics.exposition import MetricsSource, render
from swarm_agent.metrics.observed import (
    observe_announce,
    observe_http,
    watch_core,
    watch_driver,
    watch_drops,
    watch_traffic,
)

__all__ = [
    "MetricsSource",
    "observe_announce",
    "observe_http",
    "render",
    "watch_core",
    "watch_driver",
    "watch_drops",
    "watch_traffic",
]

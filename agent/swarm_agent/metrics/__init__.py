"""Metrics of one agent, in the Prometheus text format or in OpenMetrics.

Two kinds: what is counted while it happens (`observed`), and what is read from the agent's snapshots at the moment of
the scrape (`node`, `gpu`).  No job id, user, path or other unbounded value is a label, but on the page of jobs.
"""

from swarm_agent.metrics.exposition import render
from swarm_agent.metrics.jobs import render_jobs
from swarm_agent.metrics.observed import OBSERVED

__all__ = ["OBSERVED", "render", "render_jobs"]

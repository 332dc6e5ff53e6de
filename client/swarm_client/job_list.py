"""Lists of jobs of any length: agents give them in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm_client.agents import Agents

PAGE_MOST = 1_000
"""Jobs that one answer may have."""


def list_jobs(agents: Agents, query: Mapping[str, str], limit: int | None = None) -> dict[str, Any]:
    """The jobs that match, newest first, as if an agent had given them at once; at most `limit`, or all."""
    items: list[Any] = []
    absent: dict[str, dict[str, None]] = {"silent_nodes": {}, "unasked_nodes": {}}
    cursor: dict[str, str] = {}
    while True:
        most = PAGE_MOST if limit is None else min(PAGE_MOST, limit - len(items))
        asked = {**query, "limit": str(most), **cursor}
        page = agents.call("cannot list jobs", "GET", "/v1/jobs", query=asked)
        items += page["items"]
        for key, names in absent.items():
            names |= dict.fromkeys(page.get(key) or ())
        if not page.get("next_cursor") or len(items) == limit:
            return {**page, "items": items, **{key: [*names] for key, names in absent.items()}}
        cursor = {"cursor": str(page["next_cursor"])}

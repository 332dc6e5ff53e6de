"""How people name jobs: id, unique prefix, handle, name, `@last`; and `JOB.3` for one rank of it.

Which job a prefix or name means is decided by the agents (they know the jobs); this only splits and quotes.
"""

from __future__ import annotations

from swarm_client.address import quote
from swarm_client.failure import UsageError


def job_path(reference: str, tail: str = "") -> str:
    """`/v1/jobs/JOB` with `tail` behind it."""
    if not reference or reference in (".", "..") or len(reference) > 200:
        raise UsageError(f"{reference!r} names no job", "give an id, its first characters, a name or @last")
    return f"/v1/jobs/{quote(reference)}{tail}"


def split_rank(reference: str) -> tuple[str, str]:
    """(job, rank) of `k3j9x0ab.3` or `k3j9x0ab.server.0`; the rank is empty when none is named.  Names with a dot and
    digits stay whole unless what precedes the dot looks like an id."""
    job, dot, rank = reference.rpartition(".")
    if "." in job and rank.isdigit():
        whole, _, group = job.partition(".")
        found, number = split_rank(f"{whole}.{rank}")
        return (found, f"{group}.{number}") if number and "." not in group else (reference, "")
    if dot and rank.isdigit() and (job == "@last" or (job.isalnum() and job == job.lower() and len(job) <= 26)):
        return job, rank
    return reference, ""

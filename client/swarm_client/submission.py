"""Submits a job once, whatever agents do meanwhile: working directory, ticket, and the same ticket again if need be."""

# Importing pathlib costs a tenth of what `swarm run` may take.
# ruff: noqa: PTH123

from __future__ import annotations

import os

from swarm_client.agents import SUBMIT_PATIENCE_S
from swarm_client.annotations import Any
from swarm_client.cache import read_cache, write_cache
from swarm_client.cli.session import Session
from swarm_client.config import cache_home
from swarm_client.failure import UsageError
from swarm_client.job_request import JobRequest, build, refuse_unreadable
from swarm_client.options import Arguments

REQUIREMENTS_BYTES_LIMIT = 2**20
LEFT_OUT_SHOWN = 5


def submit(session: Session, arguments: Arguments) -> dict[str, Any]:
    """The accepted job's document.  A lost answer is repeated with the same ticket at the next agent: one job."""
    request = build(arguments, session.config, session.folder)
    is_dry_run = bool(arguments["dry_run"])
    _stage(session, request, is_dry_run=is_dry_run)
    agents = session.agents
    ticket = agents.call("cannot submit the job", "POST", "/v1/tickets", body={})
    body = {
        "ticket": {key: ticket[key] for key in ("job_id", "holders", "stores") if key in ticket},
        "spec": request.spec,
        "dry_run": is_dry_run,
    }
    document = agents.call("cannot submit the job", "POST", "/v1/jobs", body=body, patience_s=SUBMIT_PATIENCE_S)
    assert isinstance(document, dict)
    return document


def _stage(session: Session, request: JobRequest, *, is_dry_run: bool) -> None:
    """Ship the working directory and the requirements file, and say so in the specification."""
    blobs: dict[str, bytes | str] = {}
    sizes: dict[str, int] = {}
    if request.sync is False:
        request.spec["workdir"] = request.folder
    else:
        _add_tree(session, request, blobs, sizes, lists_all=is_dry_run or session.is_verbose)
    refuse_unreadable(request.spec)
    if request.requirements:
        request.spec["requirements"] = _add(blobs, sizes, _read_requirements(request.requirements))
    if blobs and not is_dry_run:
        from swarm_client.progress import Progress
        from swarm_client.tree import ship

        with Progress("shipping", is_quiet=session.is_quiet) as progress:
            request.spec["blob_sources"] = [ship(session.agents, blobs, sizes, session.tell, progress.show)]


def _add_tree(
    session: Session, request: JobRequest, blobs: dict[str, bytes | str], sizes: dict[str, int], *, lists_all: bool
) -> None:
    from swarm_client import tree

    config = session.config
    try:
        root, kind = tree.find_root(request.folder, tree.home_folders())
    except tree.NeverShipped as refusal:
        if request.sync:
            raise  # asked for by --sync
        session.tell(f"{refusal.problem}: the job starts in an empty folder; {refusal.remedy}")
        return
    home = cache_home(config.environment)
    scan = tree.scan(root, kind, config.values["sync_exclude"], tree.cache_file(home, "digests", root))
    _tell_left_out(session, root, scan.left_out, tree.cache_file(home, "left_out", root), lists_all=lists_all)
    blobs |= scan.sources
    sizes |= scan.tree.blobs
    request.spec["tree"] = _add(blobs, sizes, scan.tree.to_bytes())
    request.spec["tree_bytes"] = scan.tree.size_bytes
    inside = os.path.relpath(os.path.realpath(request.folder), os.path.realpath(root))
    request.spec["workdir"] = "" if inside == "." else inside


def _tell_left_out(session: Session, root: str, left_out: list[str], told_file: str, *, lists_all: bool) -> None:
    """Name the files once and again when they are others: what is said at every run is read by nobody."""
    if session.is_quiet or not left_out or (not lists_all and read_cache(told_file).get(root) == left_out):
        return
    shown = left_out if lists_all else left_out[:LEFT_OUT_SHOWN]
    for path in shown:
        session.tell(f"not shipped: {path}")
    if len(left_out) > len(shown):
        session.tell(f"not shipped: {len(left_out) - len(shown)} more (-v lists all)")
    write_cache(told_file, {root: left_out})


def _add(blobs: dict[str, bytes | str], sizes: dict[str, int], content: bytes) -> str:
    import hashlib

    digest = hashlib.sha256(content).hexdigest()
    blobs[digest], sizes[digest] = content, len(content)
    return digest


def _read_requirements(file: str) -> bytes:
    try:
        with open(file, "rb") as stream:
            content = stream.read(REQUIREMENTS_BYTES_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"requirements file {file} cannot be read: {error.strerror}", "make it readable") from error
    if len(content) > REQUIREMENTS_BYTES_LIMIT:
        raise UsageError(f"requirements file {file} is larger than 1 MiB", "is it the right file?")
    return content

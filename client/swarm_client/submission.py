"""Submits a job once, whatever agents do meanwhile: working directory, ticket, and the same ticket again if need be."""

# Importing pathlib costs a tenth of what `swarm run` may take.
# ruff: noqa: PTH113, PTH118, PTH119, PTH123

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from swarm_client.agents import Agents
from swarm_client.cache import read_cache, write_cache
from swarm_client.config import cache_home
from swarm_client.conversation import SUBMISSION
from swarm_client.failure import AgentRefusal, UsageError
from swarm_client.job_request import JobRequest, build, refuse_unreadable
from swarm_client.options import Arguments
from swarm_client.quantity import show_count
from swarm_client.reading import read
from swarm_client.session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from swarm_client.shipment import Shipment
    from swarm_client.tree import Scan

REQUIREMENTS_BYTES_LIMIT = 2**20
NO_REQUIREMENTS = {
    "uv.lock": "write one: uv export --no-emit-project -o requirements.txt",
    "pylock.toml": "write one: uv pip compile pyproject.toml -o requirements.txt",
    "poetry.lock": "write one: poetry export -o requirements.txt",
    "pdm.lock": "write one: pdm export -o requirements.txt",
    "Pipfile": "write one: pipenv requirements > requirements.txt",
    "Pipfile.lock": "write one: pipenv requirements > requirements.txt",
    "pixi.toml": "environments of conda are not built here: make one on the nodes, and name it by --venv PATH",
    "pixi.lock": "environments of conda are not built here: make one on the nodes, and name it by --venv PATH",
    "environment.yml": "environments of conda are not built here: make one on the nodes, and name it by --venv PATH",
    "environment.yaml": "environments of conda are not built here: make one on the nodes, and name it by --venv PATH",
    "setup.py": "write its dependencies into a requirements.txt, one a line",
    "setup.cfg": "write its dependencies into a requirements.txt, one a line",
}
LEFT_OUT_SHOWN = 5


def submit(session: Session, arguments: Arguments) -> tuple[dict[str, Any], Shipment]:
    """The accepted job's document, and what was shipped for it.

    A lost answer is repeated with the same ticket at the next agent: one job.
    """
    _take_script(session, arguments)
    request = build(arguments, session.config, session.folder)
    _tell_of_launchers(session, request)
    is_dry_run = bool(arguments["dry_run"])
    shipment = _stage(session, request, is_dry_run=is_dry_run)
    agents = session.agents
    ticket = agents.call("cannot submit the job", "POST", "/v1/tickets", body={})
    body = {
        "ticket": {key: ticket[key] for key in ("job_id", "holders", "stores") if key in ticket},
        "spec": request.spec,
        "dry_run": is_dry_run,
    }
    document = _send(agents, body, str(ticket.get("handle") or ticket["job_id"]))
    assert isinstance(document, dict)
    if document.get("swarm_gpus") and not request.has_size and _runs_python(request.spec["command"]):
        count = show_count(document["swarm_gpus"], "GPU")
        session.tell(f"no GPU was asked for, and the swarm has {count}: -g N asks for N, -g 0 means none")
    if request.spec.get("deadline_utc_seconds") and not is_dry_run and "outlook" in document:
        from swarm_client.outlook import deadline_text
        from swarmsched.documents import JobDocument

        session.tell(f"deadline {deadline_text(read(document, JobDocument))}")
    return document, shipment


def _send(agents: Agents, body: Mapping[str, Any], handle: str) -> Any:
    """The ticket makes one job of however many tries: a swarm that is too busy now is asked again."""
    try:
        return agents.call("cannot submit the job", "POST", "/v1/jobs", body=body, terms=SUBMISSION)
    except AgentRefusal as refusal:
        if refusal.code == "unavailable":
            refusal.remedy = f"`swarm status {handle}` tells whether it was submitted all the same; if not, try again"
        raise


def _runs_python(command: Sequence[str]) -> bool:
    """A script, not one line: what is forgotten there is found out after hours."""
    first = os.path.basename(command[0])
    is_python = first.startswith("python") and ("-m" in command or any(word.endswith(".py") for word in command))
    return is_python or first.endswith(".py") or first in ("torchrun", "accelerate", "deepspeed")


def _take_script(session: Session, arguments: Arguments) -> None:
    """What a batch script asks for in its own lines; behind `--` it is a command like any other."""
    words = arguments.command
    if not arguments.positionals or arguments["file"] or words[0] != arguments.positionals[0]:
        return
    file = os.path.join(session.folder, words[0])
    if not os.path.isfile(file):
        return
    from swarm_client import slurm

    if slurm.is_batch_script(file):
        arguments.values["script"] = script = slurm.BatchScript(words[0], words[1:], session.folder)
        session.tell(script.told())


def _tell_of_launchers(session: Session, request: JobRequest) -> None:
    has_several = request.spec["ranks"] > 1 or request.spec.get("ranks_most")
    if session.is_quiet or not (has_several or any("srun" in w or w.endswith(".sh") for w in request.spec["command"])):
        return
    from swarm_client.slurm import launch_notes

    for note in launch_notes(request.spec, request.folder):
        session.tell(note)


def _stage(session: Session, request: JobRequest, *, is_dry_run: bool) -> Shipment:
    """Ship the working directory and the requirements file, and say so in the specification."""
    blobs: dict[str, bytes | str] = {}
    sizes: dict[str, int] = {}
    if request.sync is False:
        request.spec["workdir"] = request.folder
        from swarm_client.shipment import Shipment

        shipment = Shipment(request.folder, reason=f"with --no-sync the job runs in {request.folder} of the nodes")
    else:
        shipment = _add_tree(session, request, blobs, sizes, lists_all=is_dry_run or session.is_verbose)
    refuse_unreadable(request.spec)
    if request.requirements:
        request.spec["requirements"] = _add(blobs, sizes, _read_requirements(request.requirements))
    if blobs and not is_dry_run:
        from swarm_client.progress import ProgressBar
        from swarm_client.tree import ship

        with ProgressBar("shipping", is_quiet=session.is_quiet) as progress:
            request.spec["blob_sources"] = [ship(session.agents, blobs, sizes, session.tell, progress.show)]
    return shipment


def _add_tree(
    session: Session, request: JobRequest, blobs: dict[str, bytes | str], sizes: dict[str, int], *, lists_all: bool
) -> Shipment:
    from swarm_client import tree
    from swarm_client.shipment import Shipment

    config = session.config
    home = cache_home(config.environment)
    try:
        root, kind = tree.find_root(request.folder, tree.home_folders())
    except tree.NeverShipped as refusal:
        if request.sync or request.include:
            raise  # asked for by --sync
        problem = f"{refusal.problem}: the job starts in an empty folder; {refusal.remedy}"
        told_file = tree.cache_file(home, "empty", request.folder)
        _tell_empty(session, request, problem, told_file, is_new=lists_all)
        return Shipment(request.folder, reason=f"{refusal.problem}; {refusal.remedy}")
    asked = {text: _from_root(text, session.folder, root) for text in request.include}
    include, exclude = (*config.values["sync_include"], *asked.values()), config.values["sync_exclude"]
    scan = tree.scan(root, kind, exclude, tree.cache_file(home, "digests", root), include)
    _refuse_idle(asked, scan)
    for text in config.values["sync_include"] if lists_all else ():
        if not _brings(text, scan):
            session.tell(f"sync_include {text!r} brings nothing")
    _tell_left_out(session, root, scan.left_out, tree.cache_file(home, "left_out", root), lists_all=lists_all)
    blobs |= scan.sources
    sizes |= scan.tree.blobs
    request.spec["tree"] = _add(blobs, sizes, scan.tree.to_bytes())
    request.spec["tree_bytes"] = scan.tree.size_bytes
    inside = os.path.relpath(os.path.realpath(request.folder), os.path.realpath(root))
    request.spec["workdir"] = "" if inside == "." else inside
    return Shipment(request.folder, root, kind, scan, exclude=exclude)


def _from_root(text: str, here: str, root: str) -> str:
    """A pattern with a folder in it counts from where it was typed; in the shipped folder from its root."""
    if "/" not in text.rstrip("/") and text.rstrip("/") not in (".", ".."):
        return text
    path = os.path.relpath(os.path.join(here, text), root)
    if path.split("/")[0] == "..":
        remedy = "move it below that folder, or keep it on the nodes"
        raise UsageError(f"--include {text} lies outside of {root}, which is the folder that is shipped", remedy)
    return "*" if path == "." else f"/{path}"


def _refuse_idle(asked: Mapping[str, str], scan: Scan) -> None:
    """What was asked for by name and brings nothing would be missed when the job runs."""
    from swarm_client.tree import Patterns

    for text, pattern in asked.items():
        if _brings(pattern, scan):
            continue
        fitting = Patterns((pattern,))
        kept = next((told for told in scan.left_out if fitting.fit(told.partition(" (")[0])), "")
        why = f"{kept} is never shipped" if kept else f"no file below {scan.root} fits it, or it is never shipped"
        raise UsageError(f"--include {text} brings nothing: {why}", "correct the path, or leave it out")


def _brings(pattern: str, scan: Scan) -> bool:
    from swarm_client.tree import Patterns

    fitting = Patterns((pattern,))
    return any(fitting.fit(entry.path) for entry in scan.tree.entries)


def _tell_empty(session: Session, request: JobRequest, problem: str, told_file: str, *, is_new: bool) -> None:
    """Say that nothing is shipped where the command names something that lies here; otherwise once in a folder."""
    words = [word.rpartition("=")[2] for word in request.spec["command"]]
    is_missed = any(word and os.path.lexists(os.path.join(request.folder, word)) for word in words)
    if is_missed or is_new or read_cache(told_file).get(request.folder) != problem:
        session.tell(problem)
        if not session.is_quiet:
            write_cache(told_file, {request.folder: problem})


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
    name = os.path.basename(file)
    if name in NO_REQUIREMENTS:
        raise UsageError(f"{file} is no list of requirements", NO_REQUIREMENTS[name])
    return _of_project(file, content) if name == "pyproject.toml" else content


def _of_project(file: str, content: bytes) -> bytes:
    """The dependencies of a `pyproject.toml`, one a line; what an installer would have to work out is refused."""
    import tomllib

    try:
        document = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML: {error}", "correct it, or name a requirements.txt") from error
    project, tools = document.get("project", {}), document.get("tool", {})
    dependencies = project.get("dependencies")
    sources = tools.get("uv", {}).get("sources") or tools.get("uv", {}).get("index")
    if not isinstance(dependencies, list) or sources:
        has = "names sources or an index of uv's" if sources else "has no list of dependencies in [project]"
        how = "poetry.lock" if "poetry" in tools and not sources else "uv.lock"
        raise UsageError(f"{file} {has}", NO_REQUIREMENTS[how])
    return "".join(f"{each}\n" for each in dependencies).encode()

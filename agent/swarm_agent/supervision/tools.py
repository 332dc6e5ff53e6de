"""What every task finds without installing anything: the package `swarm_elastic`, and the `swarm` command.

The package is copied into a folder of its own, so that nothing else of the agent's environment gets onto the
PYTHONPATH of tasks.  The folder is named after its content: tasks that run on keep theirs when the agent is upgraded.
"""

import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from swarmsched.errors import ConfigError

PACKAGE = "swarm_elastic"
_COMMAND = """#!/bin/sh
exec {python} -I -c 'import sys; from swarm_client.cli import main; sys.exit(main())' "$@"
"""


@dataclass(frozen=True, slots=True)
class Tools:
    """Two folders for the environment of tasks: one for PYTHONPATH, one for PATH."""

    python_path: Path
    bin_path: Path


def install_tools(folder: Path) -> Tools:
    """Put the tools of this version below `folder`, unless they are there.

    Raises `ConfigError` when the package is not installed beside the agent, and OSError.
    """
    files = _package_files()
    command = _COMMAND.format(python=shlex.quote(sys.executable))
    digest = hashlib.sha256(command.encode())
    for name, content in sorted(files.items()):
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    place = folder / digest.hexdigest()[:12]
    if not place.exists():
        draft = folder / f"{place.name}.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        _write(draft, files, command)
        draft.rename(place)
    return Tools(place / "python", place / "bin")


def _package_files() -> dict[str, bytes]:
    """Sources of the package, by name.  It is looked up and not imported: it belongs to training scripts."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        remedy = "install the whole distribution: pip install swarmsched"
        raise ConfigError(PACKAGE, "is not installed beside the agent", remedy)
    folder = Path(spec.submodule_search_locations[0])
    sources = (path for path in folder.rglob("*") if path.suffix == ".py" or path.name == "py.typed")
    return {str(path.relative_to(folder)): path.read_bytes() for path in sources}


def _write(draft: Path, files: dict[str, bytes], command: str) -> None:
    """World-readable whatever the umask: tasks run as another account."""
    for name, content in files.items():
        path = draft / "python" / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)
    program = draft / "bin" / "swarm"
    program.parent.mkdir()
    program.write_text(command)
    program.chmod(0o755)
    for path in (draft, *draft.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)

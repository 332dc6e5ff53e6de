"""Folders that other accounts may pass through, although the agent's umask is 077, and folders that jobs leave."""

import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path


def make_folder(folder: Path, mode: int) -> None:
    """Create a folder and its missing parents with exactly this mode, whatever the umask; one that exists stays.

    Raises OSError.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, mode)
    with suppress(FileExistsError):
        folder.mkdir(0o700)
        folder.chmod(mode)


def is_folder(path: Path) -> bool:
    """True for a folder, false where there is none; OSError where the file system refuses to say.

    `Path.is_dir` takes a refusal for a no since Python 3.14.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def remove_tree(folder: Path) -> None:
    """Remove what a job has left, however deep; what cannot be removed stays.  For a worker thread."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)

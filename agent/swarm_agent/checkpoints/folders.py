"""Where checkpoints are: ROOT/<job id>/<attempt>/<name>, one folder per attempt.

An attempt that was superseded writes into its own folder and never into that of its successor.  No name such as
"latest" means anything here: which checkpoint counts is in the job's register.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from swarm_agent.folder import make_folder
from swarm_agent.task.account import Account
from swarmsched.checkpoint import NAME_LENGTH_MAX
from swarmsched.ids import JobId


@dataclass(frozen=True, slots=True)
class CheckpointFolders:
    """The folders of this node, or of all nodes where `is_shared`."""

    root: Path
    is_shared: bool = False

    def make(self, job_id: JobId, attempt: int, account: Account) -> Path:
        """The attempt's folder, created if need be, for the job's account alone.  Raises OSError."""
        folder = self.of(job_id, attempt)
        make_folder(folder.parent, 0o711)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # of an earlier life of the agent, or made by another node of the gang
            return folder
        if account.uid >= 0:
            os.chown(folder, account.uid, account.gid)
        return folder

    def of(self, job_id: JobId, attempt: int) -> Path:
        """The attempt's folder, which may not exist."""
        return self.root / job_id / str(attempt)


def name_problem(name: object) -> str:
    """Why this cannot be the name of a checkpoint; empty when it can."""
    if not isinstance(name, str):
        return "the name must be text"
    if not name:
        return "the name is empty"
    if "/" in name or "\0" in name or not name.isprintable():  # lone surrogates cannot be, either
        return f"the name {name[:80]!r} has a '/' or a character that cannot be printed"
    if len(name) > NAME_LENGTH_MAX or len(os.fsencode(name)) > 255:
        return f"the name has more than {NAME_LENGTH_MAX} characters, or more than 255 bytes"
    if name.startswith("."):
        return f"the name {name[:80]!r} begins with a dot"
    return ""

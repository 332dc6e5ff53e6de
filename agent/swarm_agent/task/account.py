"""The account that a task's processes run as."""

import os
import pwd
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from swarmsched.errors import ConfigError, SwarmError
from swarmsched.task import TaskOrder

FALLBACK_PATH = "/usr/local/bin:/usr/bin:/bin"


class NoAccount(SwarmError):
    """An order's task has no account to run as on this machine."""


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a job runs as.  `uid` -1: the agent's own user, nothing is switched.

    Accounts with the same ids are the same.  `is_personal`: nothing that another account has built is used for it.
    """

    name: str = field(compare=False)
    home: str = field(compare=False)
    shell: str = field(compare=False)
    uid: int = -1
    gid: int = -1
    groups: tuple[int, ...] = ()
    is_personal: bool = field(default=False, compare=False)


class JobAccounts:
    """The accounts of jobs: the one place that knows as whom a task runs.

    Each task is looked up once, and one that outlives the agent keeps the ids that it was launched with.
    """

    def __init__(self, job_user: str) -> None:
        """Raises `ConfigError` as `find_account` does."""
        self._shared = find_account(job_user)

    @property
    def may_switch(self) -> bool:
        """True where tasks may run as another account than the agent's."""
        return self._shared.uid >= 0

    def of(self, order: TaskOrder) -> Account:
        """The account of an order's task: that of the setting `job_user`, whoever submitted it.  Raises `NoAccount`."""
        return self._shared


def find_account(job_user: str) -> Account:
    """The account of `job_user` when the agent is root, otherwise the agent's own.

    Raises `ConfigError` for an unknown name, or for another account when the agent may not switch.
    """
    own = _own_account()
    if job_user in ("", own.name):
        return own
    try:
        entry = pwd.getpwnam(job_user)
    except KeyError as error:
        remedy = f"create it with: useradd --system --create-home {job_user}"
        raise ConfigError("job_user", f"there is no account {job_user!r} on this machine", remedy) from error
    if os.geteuid() != 0:
        problem = f"cannot start jobs as {job_user!r}: the agent does not run as root"
        raise ConfigError("job_user", problem, "start the agent as root, or remove job_user")
    groups = tuple(os.getgrouplist(job_user, entry.pw_gid))
    return Account(job_user, entry.pw_dir, entry.pw_shell, entry.pw_uid, entry.pw_gid, groups)


def may_reach(path: Path, account: Account) -> bool:
    """True when the account may enter the folder, or execute the program, and pass through all that is above it."""
    if not path.is_absolute():
        return False
    try:
        found = [part.stat() for part in (path, *path.parents)]
    except OSError:
        return False
    groups = {account.gid, *account.groups}
    return all(
        each.st_mode & (0o100 if each.st_uid == account.uid else 0o010 if each.st_gid in groups else 0o001)
        for each in found
    )


@lru_cache(maxsize=256)
def passable_path(path: str, account: Account) -> str:
    """The folders of a PATH that an account can enter: those below root's home lead nowhere and tell of it."""
    if account.uid < 0:
        return path
    return ":".join(folder for folder in path.split(":") if may_reach(Path(folder), account)) or FALLBACK_PATH


def _own_account() -> Account:
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:  # a container's user without an entry
        return Account(str(os.geteuid()), os.environ.get("HOME", "/"), "/bin/sh")
    return Account(entry.pw_name, entry.pw_dir, entry.pw_shell)

"""Secrets of the agent: where they come from, who may read their files, and what jobs could see.

A key and a token are 64 hexadecimal digits in a file that others cannot read; a token file may hold several, one a
line.  An agent that only this machine can reach makes its own when none is configured; an exposed one must be given
them (`swarm_agent.config` checks that).
"""

import os
import pwd
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from swarm_agent.config import AgentConfig
from swarm_agent.task.account import find_account
from swarmsched.errors import ConfigError

KEY_BYTES = 32
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")
_TOKEN = re.compile(r"[\x21-\x7e]{16,512}")
MODE_ALLOWED = 0o640
TOKENS_MOST = 4  # while one is being changed there are two


@dataclass(frozen=True, slots=True)
class Secrets:
    """`keyring`: the first key seals, all of them open.  Of `tokens` API clients send any one as bearer token."""

    keyring: tuple[bytes, ...] = field(repr=False)
    tokens: tuple[str, ...] = field(repr=False)
    token_file: Path


def generate_key() -> str:
    """A fresh random key or token: 256 bits as 64 hexadecimal digits."""
    return secrets.token_hex(KEY_BYTES)


def load_secrets(config: AgentConfig) -> Secrets:
    """Read key files and token; make those that are missing in `data_dir` when the agent is not exposed.

    Raises `ConfigError` for a file that is missing, unreadable, too open or malformed.
    """
    key_file = config.cluster_key_file or _made(config.data_dir / "cluster.key")
    token_file = config.token_file or _made(config.data_dir / "token")
    keys = [read_key(key_file, "cluster_key_file")]
    keys += [read_key(extra, "keyring_files") for extra in config.keyring_files]
    return Secrets(tuple(dict.fromkeys(keys)), read_tokens(token_file), token_file)


def check_secret_files(config: AgentConfig) -> None:
    """Raise `ConfigError` unless the key and token files that the configuration names can be used; makes none."""
    if config.cluster_key_file is not None:
        read_key(config.cluster_key_file, "cluster_key_file")
    for extra in config.keyring_files:
        read_key(extra, "keyring_files")
    if config.token_file is not None:
        read_tokens(config.token_file)


def read_key(file: Path, setting: str) -> bytes:
    """The 32 bytes of a key file."""
    text = _read_private(file, setting)
    if not _HEX_KEY.fullmatch(text):
        raise ConfigError(setting, f"{file} does not hold 64 hexadecimal digits", f"{_make_command(file)}")
    return bytes.fromhex(text)


def read_tokens(file: Path) -> tuple[str, ...]:
    """The bearer tokens of a token file, one a line: 16 to 512 visible characters each, and all of them accepted."""
    tokens = tuple(dict.fromkeys(line.strip() for line in _read_private(file, "token_file").splitlines()))
    for number, token in enumerate(tokens or ("",), 1):
        if not _TOKEN.fullmatch(token):
            where = f"line {number} of {file}" if len(tokens) > 1 else f"{file}"
            raise ConfigError("token_file", f"{where} does not hold 16 to 512 visible characters", _make_command(file))
    if len(tokens) > TOKENS_MOST:
        problem = f"{file} holds {len(tokens)} tokens, more than {TOKENS_MOST}"
        raise ConfigError("token_file", problem, "remove those that nobody uses any more")
    return tokens


def job_user_warning(config: AgentConfig) -> str:
    """A sentence when jobs can read the swarm's secrets, else empty text; a witness runs none."""
    if config.witness:
        return ""
    if os.geteuid() != 0:
        user = pwd.getpwuid(os.geteuid()).pw_name
        return f"jobs run as {user}, the agent's own user, and can read the swarm's key and token"
    if config.job_user == "root":
        return "jobs run as root and can read the swarm's key and token; set job_user to an account for jobs"
    return ""


def check_job_user(config: AgentConfig) -> None:
    """Raise `ConfigError` unless jobs can be started as `job_user`; for those of root it must say "root"."""
    if config.job_user:
        find_account(config.job_user)
    elif os.geteuid() == 0 and not config.witness:
        problem = "is not set, and this agent runs as root: jobs would run as root and read the swarm's secrets"
        remedy = 'set job_user to an account for jobs (useradd --system --create-home trainer), or to "root" in words'
        raise ConfigError("job_user", problem, remedy)


def _read_private(file: Path, setting: str) -> str:
    try:
        with file.open(encoding="ascii") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read(4_096).strip()
    except FileNotFoundError as error:
        raise ConfigError(setting, f"{file} does not exist", _make_command(file)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(setting, f"{file} cannot be read: {error}", "check its owner, mode and content") from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & ~MODE_ALLOWED:
        raise ConfigError(setting, f"{file} has mode {mode:04o}, others could read it", f"run: chmod 0600 {file}")
    if status.st_uid not in (0, os.geteuid()):
        owner = f"user id {status.st_uid}"
        raise ConfigError(setting, f"{file} belongs to {owner}, who could change it", f"run: chown root {file}")
    return text


def _made(file: Path) -> Path:
    """The file, made with a fresh secret unless it is there; for agents that only this machine can reach."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return file
    except OSError as error:
        raise ConfigError(
            "data_dir", f"{file} cannot be made: {error.strerror}", "check path and permissions"
        ) from error
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(generate_key() + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    return file


def _make_command(file: Path) -> str:
    return f"make one with: (umask 077; swarm-agent --generate-key > {file})"

"""Where settings come from: option, SWARM_* variable, project file, user file, system file, built-in; in that order.

Every value keeps its origin for `swarm config view --origin`.  Unknown keys are errors with file and line.  A project
file may not name hosts or tokens: a cloned repository could otherwise send somebody's token anywhere.
"""

# Importing pathlib costs a tenth of what `swarm ps` may take.
# ruff: noqa: PTH110, PTH111, PTH118, PTH120, PTH123

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from swarm_client.address import DEFAULT_PORT, Address, parse_address, spell
from swarm_client.failure import Failure, UsageError
from swarm_client.options import nearest
from swarm_client.quantity import duration

SYSTEM_FILE = "/etc/swarm/config.toml"
PROJECT_NAME = "swarm.toml"
DEFAULT_HOST = f"127.0.0.1:{DEFAULT_PORT}"
OUTPUTS = ("table", "wide", "json", "jsonl", "yaml", "name")
COLORS = ("auto", "always", "never")
CONTEXT_KEYS = ("hosts", "token_file")
TOKEN_BYTES_LIMIT = 4_096


def _several(value: object, problem: str) -> list[str]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(problem)
    return texts


def _hosts(value: object) -> list[str]:
    texts = _several(value, 'must be a list of addresses such as ["10.0.0.5:7433"]')
    return [text.strip() for text in texts if text.strip()]


def _patterns(value: object) -> list[str]:
    return _several(value, "must be a list of patterns")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {value!r}")
    return value


def _output(value: object) -> str:
    if value not in OUTPUTS and not str(value).startswith("custom-columns="):
        raise ValueError(f"must be one of {', '.join(OUTPUTS)} or custom-columns=...")
    return str(value)


def _color(value: object) -> str:
    if value not in COLORS:
        raise ValueError(f"must be one of {', '.join(COLORS)}")
    return str(value)


def _seconds(value: object) -> float:
    return duration(str(value))


SETTINGS: dict[str, tuple[Callable[[object], Any], Any, str]] = {
    "context": (_text, "", "which of [contexts] to use"),
    "hosts": (_hosts, [DEFAULT_HOST], "agents to ask, in order"),
    "token_file": (_text, "", "file with the swarm's token, mode 0600"),
    "output": (_output, "table", "format of what is printed"),
    "color": (_color, "auto", "auto, always or never"),
    "contact_timeout": (_seconds, 30.0, "how long a followed job may be out of reach before `run` gives up"),
    "sync_exclude": (_patterns, [], "patterns of paths that are not shipped"),
    "sync_include": (_patterns, [], "patterns of paths that are shipped although git ignores them"),
}
PROJECT_KEYS = ("context", "output", "sync_exclude", "sync_include")
VARIABLES = {f"SWARM_{key.upper()}": key for key in SETTINGS}
JOB_PREFIX = "SWARM_RUN_"


class Config:
    """Settings and job defaults with their origins, and the contexts of the user's file."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {key: default for key, (_, default, _) in SETTINGS.items()}
        self.origins: dict[str, str] = dict.fromkeys(SETTINGS, "built-in")
        self.job: dict[str, Any] = {}
        self.job_origins: dict[str, str] = {}
        self.contexts: dict[str, dict[str, Any]] = {}
        self.environment: Mapping[str, str] = {}

    @property
    def context(self) -> str:
        """Name of the current context, or an empty string."""
        return str(self.values["context"])

    @property
    def addresses(self) -> list[Address]:
        """Configured agents."""
        return [parse_address(text) for text in self.values["hosts"]]

    def read_token(self) -> str:
        """The bearer token: SWARM_TOKEN, else the token file, whose mode is checked; empty when there is none."""
        token = self.environment.get("SWARM_TOKEN", "").strip()
        file = str(self.values["token_file"])
        if token or not file:
            return check_token(token, "SWARM_TOKEN") if token else ""
        return read_token_file(os.path.expanduser(file))

    @property
    def memory_file(self) -> str:
        """Where the members of the current context's swarm are remembered."""
        return memory_file_of(self.environment, self.context, self.addresses)


def load(environment: Mapping[str, str], options: Mapping[str, Any], folder: str) -> Config:
    """Merge all sources.  `options` are settings from the command line, `folder` is where `swarm.toml` is sought."""
    config = Config()
    config.environment = environment
    for file in (SYSTEM_FILE, user_file(environment)):
        _merge_file(config, file, is_project=False)
    project = folder_with(folder, PROJECT_NAME)
    if project:
        _merge_file(config, os.path.join(project, PROJECT_NAME), is_project=True)
    chosen = options.get("context") or environment.get("SWARM_CONTEXT")
    _use_context(config, chosen)
    _merge_environment(config, environment)
    for key, value in options.items():
        if value is not None and key != "context":
            config.values[key], config.origins[key] = value, "option"
    return config


def _use_context(config: Config, chosen: str | None) -> None:
    if chosen:
        config.values["context"] = chosen
        config.origins["context"] = "option or SWARM_CONTEXT"
    name = config.context
    if not name:
        return
    if name not in config.contexts:
        raise UsageError(
            f"there is no context {name!r}{nearest(name, list(config.contexts))} (from {config.origins['context']})",
            f"known: {', '.join(config.contexts) or 'none'}; `swarm login HOST --name {name}` makes one",
        )
    for key, value in config.contexts[name].items():
        config.values[key], config.origins[key] = value, f"context {name}"


def _merge_environment(config: Config, environment: Mapping[str, str]) -> None:
    for variable, key in VARIABLES.items():
        if environment.get(variable) and key != "context":
            config.values[key] = _read(SETTINGS[key][0], environment[variable], variable)
            config.origins[key] = variable
    for variable, text in environment.items():
        if variable.startswith(JOB_PREFIX):
            _merge_job_variable(config, variable, text)


def _merge_job_variable(config: Config, variable: str, text: str) -> None:
    from swarm_client import job_key  # only when such a variable is set

    name = variable.removeprefix(JOB_PREFIX).lower()
    if name not in job_key.NAMES or name in ("env", "command"):
        near = nearest(name, [known for known in job_key.NAMES if known not in ("env", "command")])
        raise UsageError(f"variable {variable}: unknown setting{near}", "unset it or correct the spelling")
    value: object = text
    if name in job_key.FILE_ONLY:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    else:
        value = job_key.BY_NAME[name].convert(variable, text)
        value = [value] if job_key.BY_NAME[name].repeats else value
    config.job[name] = (
        _read(partial(job_key.check_value, name), value, variable) if name in job_key.FILE_ONLY else value
    )
    config.job_origins[name] = variable


def _merge_file(config: Config, file: str, *, is_project: bool) -> None:
    document, text = read_toml(file)
    for key, value in document.items():
        if key == "job":
            _merge_job_table(config, file, text, value)
        elif key == "contexts" and not is_project:
            _merge_contexts(config, file, text, value)
        elif key in SETTINGS and (not is_project or key in PROJECT_KEYS):
            config.values[key] = _read(SETTINGS[key][0], value, f"{file}:{line_of(text, key)}: {key}")
            config.origins[key] = file
        else:
            raise UsageError(*_unknown_key(file, text, key, is_project=is_project))


def _unknown_key(file: str, text: str, key: str, *, is_project: bool) -> tuple[str, str]:
    place = f"{file}:{line_of(text, key)}"
    if is_project and (key in SETTINGS or key == "contexts"):
        problem = f"{place}: {key} may not be set in a project file, which can come from anybody's repository"
        return problem, f"set it in the user file: swarm config set {key} ..."
    known = [*PROJECT_KEYS, "job"] if is_project else [*SETTINGS, "job", "contexts"]
    return f"{place}: unknown key {key!r}{nearest(key, known)}", f"known keys: {', '.join(known)}"


def _merge_job_table(config: Config, file: str, text: str, table: object) -> None:
    from swarm_client import job_key  # only when a file has such a table

    for name, value in job_table(file, text, table, section="job").items():
        if name == "command":
            place = f"{file}:{line_of(text, name, 'job')}"
            raise UsageError(f"{place}: command belongs into a job file", "put it in job.toml and use -f job.toml")
        if name == "env":
            value = {**config.job.get("env", {}), **value}
        config.job[name] = value
        config.job_origins[name] = file
    assert set(config.job) <= set(job_key.NAMES)


def job_table(file: str, text: str, table: object, section: str) -> dict[str, Any]:
    """Check a table of job keys; all of a job file, or `[job]` of a configuration."""
    from swarm_client import job_key  # only when there is a table

    if not isinstance(table, Mapping):
        raise UsageError(f"{file}:{line_of(text, section)}: job must be a table", "write [job] and keys below it")
    result: dict[str, Any] = {}
    for name, value in table.items():
        place = f"{file}:{line_of(text, str(name), section)}: {name}"
        if name in job_key.LATER:
            remedy = job_key.LATER[name] or "remove the line"
            raise UsageError(f"{place} is not available in this version", remedy)
        if name not in job_key.NAMES:
            near = nearest(str(name), job_key.NAMES)
            raise UsageError(f"{place}: unknown key{near}", f"known keys: {', '.join(job_key.NAMES)}")
        result[name] = _read(partial(job_key.check_value, name), value, place)
    return result


def _merge_contexts(config: Config, file: str, text: str, table: object) -> None:
    if not isinstance(table, Mapping) or not all(isinstance(context, Mapping) for context in table.values()):
        raise UsageError(f"{file}:{line_of(text, 'contexts')}: contexts must be tables", "write [contexts.NAME]")
    for name, context in table.items():
        section = f"contexts.{name}"
        read: dict[str, Any] = {}
        for key, value in context.items():
            place = f"{file}:{line_of(text, key, section)}: {key}"
            if key not in CONTEXT_KEYS:
                near = nearest(key, CONTEXT_KEYS)
                raise UsageError(f"{place}: unknown key{near}", f"known keys: {', '.join(CONTEXT_KEYS)}")
            read[key] = _read(SETTINGS[key][0], value, place)
        config.contexts[name] = read


def _read(reader: Callable[[object], Any], value: object, place: str) -> Any:
    try:
        return reader(value)
    except ValueError as error:
        raise UsageError(f"{place}: {error}", "correct the value") from None


def read_toml(file: str) -> tuple[dict[str, Any], str]:
    """The document and its text; empty when the file does not exist."""
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read()
    except FileNotFoundError:
        return {}, ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} cannot be read: {_cause(error)}", "check its permissions and encoding (UTF-8)"
        ) from error
    import tomllib  # only when there is a file: the import costs more than reading it

    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is not TOML: {error}", "text needs quotes, lists need brackets") from error


def _cause(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


def line_of(text: str, key: str, section: str = "") -> int:
    """Line where `key` is set in `section` (or where its table begins); 1 when it is written in an unusual way."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            current = stripped.strip("[] \t").replace('"', "")
            if current in (key, f"{section}.{key}") or (not section and current.startswith(f"{key}.")):
                return number
            continue
        name = stripped.replace(":", "=", 1).split("=")[0].strip().strip("\"'")
        if current == section and (name == key or name.startswith(f"{key}.")):
            return number
    return 1


def read_token_file(file: str) -> str:
    """The first token of a file that only its owner (and group) can read: an agent may accept several."""
    try:
        with open(file, encoding="utf-8") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            token = stream.read(TOKEN_BYTES_LIMIT).strip().partition("\n")[0].rstrip()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(
            f"token file {file} cannot be read: {_cause(error)}", "check token_file or SWARM_TOKEN_FILE", 4
        ) from error
    if mode & 0o027:
        raise Failure(f"token file {file} has mode {mode:04o}: others could read it", f"chmod 600 {file}", 4)
    return check_token(token, file)


def check_token(token: str, place: str) -> str:
    """Refuse what cannot be put into a header."""
    if not token or any(not 33 <= ord(character) <= 126 for character in token):
        raise Failure(f"{place} holds no usable token", "a token is one line of printable characters", 4)
    return token


def user_file(environment: Mapping[str, str]) -> str:
    """`$XDG_CONFIG_HOME/swarm/config.toml`."""
    return os.path.join(_home(environment, "XDG_CONFIG_HOME", ".config"), "swarm", "config.toml")


def state_home(environment: Mapping[str, str]) -> str:
    """`$XDG_STATE_HOME`."""
    return _home(environment, "XDG_STATE_HOME", ".local/state")


def memory_file_of(environment: Mapping[str, str], context: str, addresses: list[Address]) -> str:
    """Where the members of a swarm are remembered; other hosts under the same context name start afresh."""
    mark = zlib.crc32(",".join(sorted(spell(address) for address in addresses)).encode())
    return os.path.join(state_home(environment), "swarm", "members", f"{context or 'hosts'}-{mark:08x}.json")


def cache_home(environment: Mapping[str, str]) -> str:
    """`$XDG_CACHE_HOME`."""
    return _home(environment, "XDG_CACHE_HOME", ".cache")


def _home(environment: Mapping[str, str], variable: str, default: str) -> str:
    given = environment.get(variable, "")
    return given if given.startswith("/") else os.path.join(os.path.expanduser("~"), default)


def folder_with(folder: str, name: str) -> str:
    """The folder itself, or the one above it that is nearest, that has such an entry; empty where none has."""
    while not os.path.exists(os.path.join(folder, name)):
        parent = os.path.dirname(folder)
        if parent == folder:
            return ""
        folder = parent
    return folder

"""The agent's configuration: one flat set of keys, readable from a TOML file, the environment and options.

Precedence, high to low: option (`--data-dir X`), environment (`SWARM_AGENT_DATA_DIR`), file (`data_dir = "X"`),
built-in.  The file is `/etc/swarm/agent.toml` unless `--config` or `SWARM_AGENT_CONFIG` names another; only the
default file may be missing.  An unknown key is an error with its line and the nearest known one.
"""

# ruff: noqa: RUF009  # `_key` stands for `field`, which may be called in a default

import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from swarm_agent import setting
from swarmsched.api import nearest
from swarmsched.errors import ConfigError
from swarmsched.ids import Address, NodeId, address_text
from swarmsched.task import RENDEZVOUS_PORTS_PER_GPU

DEFAULT_FILE = Path("/etc/swarm/agent.toml")
DEFAULT_PORT = 7433
ENVIRONMENT_PREFIX = "SWARM_AGENT_"
CONFIG_VARIABLE = "SWARM_AGENT_CONFIG"
GPUS_LIMIT = 64
RENDEZVOUS_FIRST_PORT = 20_000
EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")

Reader = Callable[[object], object]
T = TypeVar("T")

DEFAULT_ENV_ALLOW = (
    "PATH",
    "HOME",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "USER",
    "LOGNAME",
    "SHELL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "NCCL_*",
    "GLOO_*",
    "TP_*",
    "UCX_*",
    "OMPI_*",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
"""Variables of the agent that a job inherits; a trailing '*' matches any ending."""

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104  # compared, not bound


@dataclass(frozen=True, slots=True)
class Key:
    """How a setting is read and what it is for."""

    read: Reader
    help_text: str


def _key(read: Callable[[object], T], default: T, help_text: str) -> T:
    return field(default=default, metadata={"key": Key(read, help_text)})


def _host_name() -> NodeId:
    return NodeId(socket.gethostname().split(".")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Everything an operator can set.  Checked on construction: `ConfigError` names key and remedy."""

    name: NodeId = field(
        default_factory=_host_name,
        metadata={"key": Key(setting.node_name, "this node's name, unique in the swarm (default: host name)")},
    )
    listen: Address = _key(setting.address, ("127.0.0.1", DEFAULT_PORT), "address for gossip (UDP) and HTTP (TCP)")
    advertise: Address | None = _key(setting.address, None, "address that other agents dial (default: listen)")
    people_listen: Address | None = _key(
        setting.address,
        None,
        "address of the HTTP API alone; listen is then for agents alone (default: both at listen)",
    )
    people_socket: Path | None = _key(
        setting.optional_path, None, "Unix socket for the HTTP API as well, open to every account here (default: none)"
    )
    seeds: tuple[Address, ...] = _key(setting.several(setting.address), (), "addresses of agents to join")
    cluster_label: str = _key(setting.node_name, "swarm", "name of the swarm; agents of another label are refused")
    cluster_key_file: Path | None = _key(setting.optional_path, None, "file with the swarm's key, mode 0600 or 0640")
    keyring_files: tuple[Path, ...] = _key(setting.several(setting.path), (), "further keys accepted from peers")
    token_file: Path | None = _key(
        setting.optional_path,
        None,
        "file with the API token, or several that are accepted, one a line; mode 0600 or 0640",
    )
    allowed_hosts: tuple[str, ...] = _key(setting.several(setting.host), (), "further Host names accepted by the API")
    witness: bool = _key(
        setting.flag, False, "hold records and vote only: run no jobs, act for none (the third beside two servers)"
    )
    zone: str = _key(setting.zone, "", "what this node may lose together with others: a rack, a room, a power line")
    labels: tuple[str, ...] = _key(
        setting.several(setting.label),
        (),
        "what jobs may require of this node (`swarm run --require`): nvlink, disk=nvme; engines are found",
    )
    data_dir: Path = _key(setting.path, Path("/var/lib/swarm"), "state that must survive: database, output, caches")
    job_user: str = _key(setting.text, "", "account that jobs run as; needs an agent that runs as root")
    env_allow: tuple[str, ...] = _key(
        setting.several(setting.text),
        DEFAULT_ENV_ALLOW,
        "variables of the agent's environment that jobs inherit; * stands for any ending",
    )
    limit_tasks: bool = _key(
        setting.flag, True, "hold jobs to the memory and GPUs that they booked, where systemd and the kernel can"
    )
    task_processes_max: int = _key(
        setting.whole(64, 2**22), 16_384, "processes and threads of a task, where tasks are limited"
    )
    warm_workers: int = _key(
        setting.whole(0, 64), 1, "processes with torch imported that wait to be workers of the elastic jobs here"
    )
    fabric_address: str = _key(setting.host, "", "address of rank 0 for training traffic (default: advertise)")
    network_mbit_s: int = _key(
        setting.whole(0, 10_000_000),
        0,
        "speed of the network of fabric_address, in Mbit a second (0: as its driver says)",
    )
    aggregation: bool = _key(
        setting.flag, True, "host shards of jobs whose ranks train apart, in memory, link and cores that are idle"
    )
    rendezvous_ports: tuple[int, int] | None = _key(
        setting.port_range, None, "FIRST-LAST, for rank 0 of jobs (default: beside the ephemeral ports)"
    )
    simulated_gpus: int = _key(setting.whole(0, GPUS_LIMIT), 0, "pretend to have this many GPUs; NVML is not asked")
    simulated_gpu_model: str = _key(setting.text, "Simulated-80G", "model name of simulated GPUs")
    simulated_gpu_memory_bytes: int = _key(setting.size(2**20, 2**50), 80 * 2**30, "memory of each simulated GPU")
    telemetry_period_s: float = _key(setting.seconds(0.1, 60), 1.0, "pause between readings of the GPUs")
    telemetry_deadline_s: float = _key(setting.seconds(0.5, 120), 5.0, "a reading older than this counts as stale")
    dcgm_metrics: bool = _key(
        setting.flag, False, "also publish GPU readings under the names of DCGM exporter (DCGM_FI_DEV_...)"
    )
    task_log_bytes_max: int = _key(
        setting.size(2**12, 2**40), 64 * 2**20, "output kept of each task; the middle is cut"
    )
    log_cache_bytes_max: int = _key(setting.size(2**20, 2**50), 8 * 2**30, "output kept of all tasks")
    log_retention_s: float = _key(setting.seconds(60, 10 * 365 * 86_400), 7 * 86_400.0, "how long output is kept")
    blob_cache_bytes_max: int = _key(setting.size(2**20, 2**50), 20 * 2**30, "shipped working directories kept")
    work_cache_bytes_max: int = _key(setting.size(2**20, 2**50), 20 * 2**30, "folders of finished tasks kept")
    work_retention_s: float = _key(
        setting.seconds(60, 10 * 365 * 86_400), 7 * 86_400.0, "how long folders and checkpoints of ended jobs are kept"
    )
    checkpoint_dir: Path | None = _key(
        setting.optional_path, None, "where jobs write their checkpoints (default: checkpoints in data_dir)"
    )
    checkpoint_dir_shared: bool = _key(
        setting.flag, False, "checkpoint_dir is the same on all nodes, so no checkpoint has to be copied"
    )
    checkpoint_bytes_max: int = _key(
        setting.size(2**20, 2**50), 200 * 2**30, "copies kept of the checkpoints of one job, where they are copied"
    )
    environment_cache_bytes_max: int = _key(setting.size(2**20, 2**50), 50 * 2**30, "built environments kept")
    packet_bytes_max: int = _key(setting.whole(512, 1_400), 1_200, "payload of a gossip packet")
    log_format: str = _key(setting.choice("text", "json"), "text", "text (key=value) or json, one event a line")
    log_level: str = _key(setting.choice("debug", "info", "warning", "error"), "info", "least level that is logged")

    def __post_init__(self) -> None:
        for name, key in _keys().items():
            value = getattr(self, name)
            if value not in (None, ""):
                _recheck(name, value, key.read)
        self._check_addresses()
        self._check_exposure()
        self._check_ports()
        if self.witness and self.simulated_gpus:
            raise ConfigError(
                "simulated_gpus", "does not go with witness: a witness offers no GPUs", "remove one of them"
            )
        if self.checkpoint_dir_shared and self.checkpoint_dir is None:
            remedy = "add checkpoint_dir with a path that all nodes share"
            raise ConfigError("checkpoint_dir_shared", "needs a checkpoint_dir", remedy)
        if self.telemetry_deadline_s <= self.telemetry_period_s:
            raise ConfigError("telemetry_deadline_s", "must be longer than telemetry_period_s", "use at least twice it")

    @property
    def advertised(self) -> Address:
        """What peers dial: host may still be a name."""
        return self.advertise or self.listen

    @property
    def people_advertised(self) -> Address | None:
        """Where people ask, if that is not where peers do; the host may still be a name."""
        if self.people_listen is None:
            return None
        host, port = self.people_listen
        return (self.advertised[0] if host in WILDCARDS else host, port)

    @property
    def fabric_host(self) -> str:
        """Where rank 0 of a job listens."""
        return self.fabric_address or self.advertised[0]

    @property
    def checkpoint_root(self) -> Path:
        """Where jobs write their checkpoints."""
        return self.checkpoint_dir or self.data_dir / "checkpoints"

    @property
    def rendezvous_range(self) -> tuple[int, int]:
        """First and last port for rank 0; chosen beside the kernel's ephemeral ports unless configured."""
        if self.rendezvous_ports is not None:
            return self.rendezvous_ports
        count = RENDEZVOUS_PORTS_PER_GPU * GPUS_LIMIT
        low, high = ephemeral_ports()
        for first in (RENDEZVOUS_FIRST_PORT, low - count, high + 1):
            if first >= 1_024 and first + count - 1 <= 65_535 and (first + count - 1 < low or first > high):
                return (first, first + count - 1)
        return (RENDEZVOUS_FIRST_PORT, RENDEZVOUS_FIRST_PORT + count - 1)

    def _check_addresses(self) -> None:
        host = self.advertised[0]
        if host in WILDCARDS:
            remedy = f'add for example advertise = "10.0.0.5:{self.listen[1]}"'
            raise ConfigError("advertise", f"is needed when listen is {host}: peers cannot dial that", remedy)
        if self.people_listen and _overlap(self.people_listen, self.listen):
            remedy = f"choose another port, or leave people_listen out: then both are served at port {self.listen[1]}"
            raise ConfigError("people_listen", "is the address of agents, which is listen", remedy)

    def _check_exposure(self) -> None:
        for door, address in (("listen", self.listen), ("people_listen", self.people_listen)):
            if address is None or is_loopback(address[0]):
                continue
            where = f"{address[0]} can be reached by other machines"
            for key, file in (("cluster_key_file", "cluster.key"), ("token_file", "token")):
                if getattr(self, key) is None and (door == "listen" or key == "token_file"):
                    make = f"(umask 077; swarm-agent --generate-key > /etc/swarm/{file})"
                    raise ConfigError(key, f"is needed because {where}", f"make one with: {make}, copy it to all nodes")

    def _check_ports(self) -> None:
        if self.rendezvous_ports is None:
            return
        first, last = self.rendezvous_ports
        low, high = ephemeral_ports()
        if first <= high and last >= low:
            problem = f"{first}-{last} overlaps the kernel's ephemeral ports {low}-{high}, which any program may take"
            raise ConfigError("rendezvous_ports", problem, f"choose ports below {low} or above {high}")
        if any(first <= address[1] <= last for address in (self.listen, self.people_listen or self.listen)):
            raise ConfigError("rendezvous_ports", f"{first}-{last} holds the agent's own port", "choose another range")


def _overlap(one: Address, other: Address) -> bool:
    return one[1] == other[1] and (one[0] == other[0] or not {one[0], other[0]}.isdisjoint(WILDCARDS))


def load_config(
    options: Mapping[str, str], environment: Mapping[str, str], file: Path | None = None
) -> tuple[AgentConfig, Path | None]:
    """Merge options, environment and file; also tell which file was read.

    Raises `ConfigError`; nothing is created or changed.
    """
    chosen = file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    source = chosen or DEFAULT_FILE
    values = _read_file(source) if chosen or source.exists() else {}
    values |= _read_environment(environment)
    values |= {key: _convert(f"--{key.replace('_', '-')}", key, value) for key, value in options.items()}
    return AgentConfig(**values), source if chosen or source.exists() else None


def settings_help() -> list[tuple[str, str]]:
    """(key, one sentence) of every setting, for `--help` and the documentation."""
    return [(name, key.help_text) for name, key in _keys().items()]


def flags() -> frozenset[str]:
    """Settings that are true or false: as an option they need no value."""
    return frozenset(name for name, key in _keys().items() if key.read is setting.flag)


@cache
def _keys() -> dict[str, Key]:
    return {each.name: each.metadata["key"] for each in fields(AgentConfig)}


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and localhost; a name other than that counts as exposed."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def ephemeral_ports() -> tuple[int, int]:
    """The kernel's range for outgoing connections, or Linux's default where it cannot be read."""
    try:
        low, high = EPHEMERAL_RANGE_FILE.read_text().split()
        return (int(low), int(high))
    except (OSError, ValueError):
        return (32_768, 60_999)


def _recheck(key: str, value: object, read: Reader) -> None:
    """Hold values given in Python to the rules of the readers: they must survive being written and read."""
    try:
        read(_as_written(value))
    except ValueError as error:
        raise ConfigError(key, str(error)) from error


def _as_written(value: object) -> object:
    match value:
        case (str(host), int(port)):
            return address_text((host, port))
        case (int(first), int(last)):
            return f"{first}-{last}"
        case tuple():
            return [_as_written(item) for item in value]
        case Path():
            return str(value)
        case _:
            return value


def _read_file(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(str(file), "there is no such file", "name an existing file with --config") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"cannot be read: {error}", "check the path and its permissions") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(file), f"is not TOML: {error}", "text needs quotes, lists need brackets") from error
    return {key: _convert(f"{file}:{_line(text, key)}: {key}", key, value) for key, value in document.items()}


def _line(text: str, key: str) -> int:
    """Line of a top-level key or table; 1 when it is written in a way this does not see."""
    written = re.compile(rf"""\s*(?:\[+\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if written.match(line)), 1)


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, value in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable != CONFIG_VARIABLE:
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[key] = _convert(variable, key, value)
    return values


def _convert(place: str, key: str, value: object) -> object:
    known = _keys()
    if key not in known:
        raise ConfigError(place, f"unknown key{nearest(key, list(known))}", "remove it or correct the spelling")
    try:
        return known[key].read(value)
    except ValueError as error:
        raise ConfigError(place, str(error)) from error

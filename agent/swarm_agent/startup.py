"""How an agent comes up and goes down: storage, generation, sockets, core, telemetry, tasks, HTTP, then gossip.

Nothing is sent before the generation is on disk, and gossip begins last, when everything that peers may ask for
answers.  Going down ends no job: the shims go on, and the next agent on this data directory finds them.
"""

import asyncio
import errno
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from ssl import SSLContext

from aiohttp import web

from swarm_agent import metrics
from swarm_agent.agent import Agent
from swarm_agent.config import AgentConfig
from swarm_agent.faults import Faults
from swarm_agent.http.app import Door
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.server import build_api
from swarm_agent.installed import entry_points_of, software_version
from swarm_agent.readiness import Check
from swarm_agent.security import Secrets, check_job_user, job_user_warning, load_secrets
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.staging.held_files import HeldFiles
from swarm_agent.storage.lock import DataDirectoryLock
from swarm_agent.storage.store import DATABASE_FILE, Store
from swarm_agent.supervision.logs import LogConfig, LogStore
from swarm_agent.supervision.runner import TaskRunner
from swarm_agent.task import shim
from swarm_agent.task.interfaces import interface_of
from swarm_agent.telemetry.source import Telemetry
from swarm_agent.transport.arrivals import ARRIVALS
from swarmsched.errors import ConfigError, StorageError
from swarmsched.events import TasksFound
from swarmsched.gossip.plausibility import GENERATION_LEAD_MAX
from swarmsched.gossip.setting import SETTING_ROOM
from swarmsched.ids import Address, address_text
from swarmsched.ledger.booking import BookingState, LedgerEntry
from swarmsched.node import Node, NodeConfig, Restored
from swarmsched.node.protocol import PEER_CODEC
from swarmsched.policies.registry import ENTRY_POINTS, add_installed
from swarmsched.resources import GpuHealth
from swarmsched.wire.sealing import INSTANCE_ID_BYTES, Keyring, Sealer

BACKLOG = 1_024
KEEP_ALIVE_S = 75.0  # above the client side's, see `swarm_agent.transport.peer`
DRAIN_S = 3.0  # for requests under way when the agent stops
UNANSWERED_STATES = ("starting", "stale", "failed")

log = logging.getLogger("swarm.agent")


@dataclass(frozen=True, slots=True)
class OpenDoor:
    """A listener, whom it serves, and the TLS that it speaks, if any."""

    listener: socket.socket
    door: Door
    tls: SSLContext | None = None


@asynccontextmanager
async def running_agent(config: AgentConfig, faults: Faults | None = None) -> AsyncIterator[Agent]:
    """An agent that serves until the block ends.  Leave it when `agent.driver.failed` is set, and start another one.

    `faults` are those of earlier lives of the core in this process.

    Raises `ConfigError` or `StorageError` before anything was sent; what was opened is closed again.
    """
    async with AsyncExitStack() as stack:
        check_job_user(config)
        for problem in add_installed(entry_points_of(ENTRY_POINTS)):
            log.warning("a policy that is installed cannot be used, and is left out: %s", problem)
        lock = DataDirectoryLock(config.data_dir).acquire()
        stack.callback(lock.release)
        secrets = load_secrets(config)
        store = Store.open(
            config.data_dir / DATABASE_FILE, label=config.cluster_label, node=config.name, keys=secrets.keyring
        )
        stack.callback(store.close)
        doors = await _bind_doors(config)
        if config.people_socket is not None:
            stack.callback(config.people_socket.unlink, missing_ok=True)
        for each in doors:
            stack.callback(each.listener.close)
        agent = await _build(config, secrets, store, faults or Faults())
        await _connect(agent, stack)
        await _serve(agent, doors, stack)
        agent.driver.start()
        stack.push_async_callback(_stop_driver, agent)
        _log_start(agent, is_log_lost=store.is_log_lost)
        yield agent
        log.info("agent stops; running tasks go on under their shims and are found again at the next start")


async def resolve(address: Address, key: str) -> Address:
    """The first IP address of a host name; `ConfigError` for one that does not resolve."""
    host, port = address
    if _is_ip_address(host):  # the resolver would start a thread to find out the same
        return address
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(key, f"{host!r} does not resolve: {error}", "use an IP address, or repair DNS") from error
    return (str(found[0][4][0]), port)


def _is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def _build(config: AgentConfig, secrets: Secrets, store: Store, faults: Faults) -> Agent:
    """The core with what earlier lives left it; its generation is durable before this returns."""
    address = await resolve(config.advertised, "advertise")
    instance_id = os.urandom(INSTANCE_ID_BYTES)
    seeds = tuple(seed for seed in await _resolve_seeds(config) if seed != address)
    node_config = NodeConfig.begin(
        config.name,
        address,
        store,
        instance_id=instance_id,
        now_s=shim.now(),
        utc_s=time.time(),
        seeds=seeds,
        software_version=software_version(),
        is_witness=config.witness,
        packet_bytes=config.packet_bytes_max,
        zone=config.zone,
        api_address=address_text(config.people_advertised) if config.people_advertised else "",
    )
    node = _restore(node_config, store)
    keyring = Keyring(secrets.keyring[0], secrets.keyring[1:])
    return Agent(
        config,
        secrets,
        node,
        store,
        address=address,
        udp_sealer=Sealer(keyring=keyring, label=config.cluster_label, instance_id=instance_id),
        body_sealer=Sealer(keyring=keyring, label=config.cluster_label, instance_id=instance_id, purpose="body"),
        codec=PEER_CODEC,
        faults=faults,
    )


def _restore(config: NodeConfig, store: Store) -> Node:
    """The core with what the database holds; `StorageError` names the file for an entry that cannot be used."""
    restored = Restored(store.load())
    try:
        node = Node(config, restored, random.Random(os.urandom(16)))
    except StorageError as error:
        raise store.unusable(error) from error
    if restored.room(SETTING_ROOM) and not node.setting.version:
        log.warning("the swarm-wide setting that was stored cannot be used here: is a package with its policy missing?")
    return node


async def _resolve_seeds(config: AgentConfig) -> list[Address]:
    """Seeds that resolve now; the others are named in the log and left out until the next start."""
    found = []
    for seed in config.seeds:
        try:
            found.append(await resolve(seed, "seeds"))
        except ConfigError as error:
            log.warning("seed left out: %s; %s", error, error.remedy)
    return found


async def _connect(agent: Agent, stack: AsyncExitStack) -> None:
    """Sockets, telemetry and tasks; what they post waits for the driver's start."""
    config = agent.config
    try:
        agent.udp.open()
    except OSError as error:
        raise _bind_error(config.listen, "UDP", error) from error
    stack.callback(agent.udp.close)
    agent.channel.open()
    stack.push_async_callback(agent.channel.close)
    stack.push_async_callback(agent.planner.stop)
    agent.logs = LogStore(
        LogConfig(
            directory=config.data_dir / "logs",
            limit_bytes=config.task_log_bytes_max,
            retention_s=config.log_retention_s,
            total_limit_bytes=config.log_cache_bytes_max,
        )
    )
    agent.blobs = BlobStore(config.data_dir / "blobs", config.blob_cache_bytes_max)
    loading = asyncio.create_task(_load_blobs(agent.blobs))
    stack.push_async_callback(_ended, loading)
    stack.callback(agent.blobs.close)
    fabric_address, _ = await resolve((config.fabric_host, config.listen[1]), "fabric_address")
    agent.tasks = TaskRunner(config, fabric_address, agent.post, agent)
    agent.files = HeldFiles(agent.blobs, agent, config.name, agent.node.records, agent.tasks.fetcher, agent.post)
    agent.telemetry = Telemetry(
        config,
        agent.post,
        config.name,
        interface=interface_of(fabric_address),
        own_gpus=agent.tasks.own_gpus,
        booked_gpus=lambda: _leased_gpus(agent.node.ledger.entries),
    )
    agent.post(TasksFound(await agent.tasks.start()))
    stack.push_async_callback(agent.tasks.stop)
    agent.files.start()
    stack.push_async_callback(agent.files.stop)
    await agent.telemetry.start()
    stack.push_async_callback(agent.telemetry.stop)
    _add_readiness(agent)


async def _load_blobs(blobs: BlobStore) -> None:
    """Beside everything else: what a cache holds must not keep a node away until its peers believe it dead."""
    try:
        await asyncio.to_thread(blobs.load)
    except OSError as error:
        log.error("shipped files that are kept cannot be listed, none of them is removed: %s", error)


async def _ended(task: asyncio.Task[None]) -> None:
    await task


def _leased_gpus(entries: Iterable[LedgerEntry]) -> set[str]:
    return {uuid for entry in entries if entry.state is BookingState.LEASED for uuid in entry.gpus}


async def _serve(agent: Agent, doors: Sequence[OpenDoor], stack: AsyncExitStack) -> None:
    observed = metrics.OBSERVED
    agent.on_announce(observed.observe_announce)
    observed.watch_driver(agent.driver)
    observed.watch_planner(agent.planner)
    api = build_api(agent, AgentFacts(agent), agent.secrets.tokens, partial(metrics.render, agent))
    for each in doors:
        app = api.make_app(each.door)
        if each.door is not Door.PEOPLE:
            agent.channel.add_routes(app)
            agent.rpc.add_routes(app)
        app[ARRIVALS] = agent.arrivals
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            auto_decompress=False,  # packed bodies are refused, and that takes reading them
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=DRAIN_S,
        )
        await runner.setup()
        assert runner.server is not None, "it is set up"
        agent.arrivals.watch(runner.server)
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, each.listener, backlog=BACKLOG, ssl_context=each.tls).start()


async def _stop_driver(agent: Agent) -> None:
    if not await agent.driver.stop():
        log.error("stopped with unwritten effects: the disk refused to the end; none of them was acknowledged")


async def _bind_doors(config: AgentConfig) -> list[OpenDoor]:
    """The sockets of the API and of peers; bound before anything is sent, so that a port in use costs nothing."""
    async with AsyncExitStack() as stack:
        found: list[OpenDoor] = []

        def opened(listener: socket.socket, door: Door) -> None:
            stack.callback(listener.close)
            found.append(OpenDoor(listener, door))

        is_apart = config.people_listen is not None
        opened(_bind(await resolve(config.listen, "listen"), "listen"), Door.PEERS if is_apart else Door.BOTH)
        if config.people_listen is not None:
            address = await resolve(config.people_listen, "people_listen")
            opened(_bind(address, "people_listen"), Door.PEOPLE)
        if config.people_socket is not None:
            opened(_bind_unix(config.people_socket), Door.PEOPLE)
        stack.pop_all()
    return found


def _bind(address: Address, setting: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _bind_error(address, "TCP", error, setting) from error
    sock.setblocking(False)
    return sock


def _bind_unix(path: Path) -> socket.socket:
    """A Unix socket that every account may connect to, in the place of one that an earlier life left."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            if not sock.connect_ex(str(path)):
                raise OSError(errno.EADDRINUSE, "another agent listens there")
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o666)
    except OSError as error:
        sock.close()
        remedy = "create its folder, or choose another path, of at most 107 bytes"
        raise ConfigError("people_socket", f"cannot use {path}: {error.strerror or error}", remedy) from error
    sock.setblocking(False)
    return sock


def _bind_error(address: Address, protocol: str, error: OSError, setting: str = "listen") -> ConfigError:
    place = f"{address[0]}:{address[1]} ({protocol})"
    remedy = f"see who has it with: ss -lnp 'sport = :{address[1]}', or set another {setting}"
    return ConfigError(setting, f"cannot use {place}: {error.strerror or error}", remedy)


def _add_readiness(agent: Agent) -> None:
    agent.readiness.add("membership", lambda: _membership(agent))
    agent.readiness.add("state", lambda: _state(agent))
    agent.readiness.add("gpus", lambda: _gpus(agent))
    agent.readiness.add("disk", lambda: _disk(agent))
    agent.readiness.add("work", lambda: Check("work", is_ok=True, detail=agent.work_sentence))


def _refused_for_its_clock(agent: Agent) -> Check | None:
    ahead_s = agent.node.generation - time.time()
    if ahead_s <= GENERATION_LEAD_MAX:
        return None
    days = f"{ahead_s / 86_400:.0f} days"
    remedy = (
        f"stop the agent, mv {agent.config.data_dir / DATABASE_FILE} aside (with its -wal) and start it again: "
        "the node comes back as a new holder"
    )
    detail = f"its database was begun with a clock {days} ahead of this one, so other members refuse this node"
    return Check("membership", is_ok=False, detail=detail, remedy=remedy)


def _membership(agent: Agent) -> Check:
    if refused := _refused_for_its_clock(agent):
        return refused
    others = [member for member in agent.node.members(agent.now_s()) if member.node_id != agent.config.name]
    alive = sum(member.status.value == "alive" for member in others)
    if alive:
        return Check("membership", is_ok=True, detail=f"other members alive: {alive}")
    if not agent.config.seeds:
        return Check("membership", is_ok=True, detail="alone; no seeds are configured")
    remedy = "check that an agent runs at a seed address, that UDP and TCP reach it, and that key and label agree"
    return Check("membership", is_ok=False, detail="no other member answers", remedy=remedy)


def _state(agent: Agent) -> Check:
    if agent.node.is_awake:
        return Check("state", is_ok=True, detail="loaded; resources and tasks of earlier lives are known")
    return Check("state", is_ok=False, detail="resources are not read yet", remedy="wait a second")


def _gpus(agent: Agent) -> Check:
    """One hung GPU is not offered and does not take the node with it; a node whose GPUs are all silent is not ready."""
    snapshot = agent.telemetry.snapshot
    is_answering = any(gpu.health is not GpuHealth.STALE for gpu in snapshot.gpus)
    is_ok = is_answering or snapshot.state.value not in UNANSWERED_STATES
    remedy = "" if is_ok else "try nvidia-smi on this machine; reload the driver if it hangs"
    return Check("gpus", is_ok=is_ok, detail=snapshot.sentence, remedy=remedy)


def _disk(agent: Agent) -> Check:
    complaint = agent.driver.barrier.complaint
    if not complaint:
        return Check("disk", is_ok=True, detail="writes")
    return Check("disk", is_ok=False, detail=complaint, remedy=f"free space below {agent.config.data_dir}")


def _log_start(agent: Agent, *, is_log_lost: bool) -> None:
    config = agent.config
    gpus = "simulated" if config.simulated_gpus else agent.telemetry.snapshot.sentence
    log.info(
        "agent started node=%s address=%s:%d generation=%d store=%014x swarm=%s gpus=%s",
        config.name, *agent.address, agent.node.generation, agent.store_id, config.cluster_label,
        f'"{config.simulated_gpus} {gpus}"' if config.simulated_gpus else f'"{gpus}"',
    )  # fmt: skip
    if is_log_lost:
        log.warning("the database came back without its last writes: it has a new identity and holds no job")
    if refused := _refused_for_its_clock(agent):
        log.warning("%s: %s", refused.detail, refused.remedy)
    if config.witness:
        log.info("this agent is a witness: it holds records and votes, and runs no jobs")
    elif complaint := agent.tasks.limits.complaint:
        log.info("what jobs ask for is booked and not enforced: %s", complaint)
    if config.token_file is None:
        log.info("API token made here: token_file=%s", agent.secrets.token_file)
    if warning := job_user_warning(config):
        log.warning("%s", warning)

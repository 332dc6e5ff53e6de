"""What agents cost a server that does nothing: memory, CPU and traffic, at swarms of 1, 10 and 30 real agents.

All agents share one machine here, so CPU time of the larger swarms includes what crowding costs; traffic does not
depend on it.
"""

import statistics
import subprocess
import time

from swarm_agent.telemetry.child import ARGV as SAMPLER
from tests.agent.testing import RunningAgent, start_agents, wait_until_sync
from tests.benchmarks.loopback import (
    Client,
    compiled_bytecode,
    cpu_s,
    metric,
    proportional_bytes,
    resident_bytes,
    sees_all,
    settled_agents,
)

JOBS_BEFORE = 100
IDLE_AGENTS = 10
IDLE_S = 40.0
SWARM_AGENTS = 30
SETTLE_S = 15.0
TRAFFIC_S = 30.0
CONVERGED_TIMEOUT_S = 120.0

Row = tuple[str, float, str]


def run() -> list[Row]:
    """(measure, value, unit); memory of one process, CPU and traffic as the median over the agents."""
    with compiled_bytecode():
        return [*_memory_rows(), *_sampler_rows(), *_idle_rows(), *_traffic_rows()]


def _memory_rows() -> list[Row]:
    with settled_agents(1) as (agent,):
        time.sleep(3)  # until the start has cleaned up after itself
        idle = resident_bytes(agent.process.pid)
        shim = _shim_bytes(agent)
        client = Client(agent)
        for _ in range(JOBS_BEFORE):
            client.call("GET", f"/v1/jobs/{client.submit('true')['id']}/wait?for=done")
        worked = resident_bytes(agent.process.pid)
        return [
            ("footprint: agent, idle (<= 60)", idle / 1e6, "MB"),
            ("footprint: agent, idle", idle / 2**20, "MiB"),
            ("footprint: agent, idle, shared pages in parts", proportional_bytes(agent.process.pid) / 1e6, "MB (Pss)"),
            (f"footprint: agent after {JOBS_BEFORE} jobs (<= 60)", worked / 1e6, "MB"),
            ("footprint: shim of a running task (<= 12)", shim / 1e6, "MB"),
        ]


def _shim_bytes(agent: RunningAgent) -> float:
    job = agent.submit("sleep", "60")
    wait_until_sync(lambda: agent.get(f"/v1/jobs/{job['id']}")["state"] == "running", 10, "the job runs")
    (facts,) = (agent.data_dir / "tasks").glob(f"{job['id']}.*/facts")
    size = resident_bytes(int(facts.read_bytes().split()[1]))
    agent.call("POST", f"/v1/jobs/{job['id']}/cancel", {})
    agent.ended(job)
    return size


def _sampler_rows() -> list[Row]:
    """The sampler as an agent starts it; on a machine without a driver it says so and leaves."""
    sizes = [size for _ in range(4) if (size := _sampler_bytes())]
    return [("footprint: sampler (<= 25)", sizes[-1] / 1e6, "MB")] if sizes else []  # the first one compiled


def _sampler_bytes() -> int:
    with subprocess.Popen(SAMPLER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        peak = 0
        while process.poll() is None and not peak:
            line = process.stdout.readline()
            peak = _peak_bytes(process.pid) if line else 0
        process.stdin.close()
    return peak


def _peak_bytes(pid: int) -> int:
    try:
        return resident_bytes(pid)
    except (OSError, AssertionError):
        return 0


def _idle_rows() -> list[Row]:
    with settled_agents(IDLE_AGENTS) as agents:
        time.sleep(SETTLE_S)
        shares = _cpu_percent(agents, IDLE_S)
    return [
        (f"footprint: CPU of an idle agent among {IDLE_AGENTS} (<= 0.5)", statistics.median(shares), "% of a core"),
        (f"footprint: CPU of the busiest of {IDLE_AGENTS} idle agents", max(shares), "% of a core"),
    ]


def _cpu_percent(agents: list[RunningAgent], duration_s: float) -> list[float]:
    before = [cpu_s(agent.process.pid) for agent in agents]
    started_s = time.monotonic()
    time.sleep(duration_s)
    elapsed_s = time.monotonic() - started_s
    after = [cpu_s(agent.process.pid) for agent in agents]
    return [100 * (late - early) / elapsed_s for early, late in zip(before, after, strict=True)]


def _traffic_rows() -> list[Row]:
    started_s = time.monotonic()
    with start_agents(SWARM_AGENTS, wait_live=False) as agents:
        for agent in agents:
            wait_until_sync(agent.is_live, CONVERGED_TIMEOUT_S, f"{agent.name} answers")
        live_s = time.monotonic() - started_s
        for agent in agents:
            wait_until_sync(lambda agent=agent: sees_all(agent, SWARM_AGENTS), CONVERGED_TIMEOUT_S, "all see all")
        converged_s = time.monotonic() - started_s
        time.sleep(SETTLE_S)
        liveness, state, peer = _traffic(agents)
    return [
        (f"footprint: {SWARM_AGENTS} agents started until all answer", live_s, "s"),
        (f"footprint: {SWARM_AGENTS} agents started until all see all", converged_s, "s"),
        (f"footprint: liveness plane sent by an agent of {SWARM_AGENTS} (<= 1)", liveness, "kB/s"),
        (f"footprint: state plane sent by an agent of {SWARM_AGENTS} (<= 5)", state, "kB/s"),
        (f"footprint: peer channel sent by an agent of {SWARM_AGENTS}", peer, "kB/s"),
    ]


def _traffic(agents: list[RunningAgent]) -> tuple[float, float, float]:
    """Kilobytes a second that an agent sends: median of each plane; mean over the peer channel, which few use."""
    before = [_sent(agent) for agent in agents]
    time.sleep(TRAFFIC_S)
    rates = [
        [(late - early) / (time_late - time_early) / 1_000 for early, late in zip(old, new, strict=True)]
        for (time_early, old), (time_late, new) in zip(before, map(_sent, agents), strict=True)
    ]
    liveness, state, peer = zip(*rates, strict=True)
    return statistics.median(liveness), statistics.median(state), statistics.mean(peer)


def _sent(agent: RunningAgent) -> tuple[float, list[float]]:
    planes = [
        metric(agent, "swarm_gossip_plane_bytes_total", plane=plane, direction="sent")
        for plane in ("liveness", "state")
    ]
    return time.monotonic(), [*planes, metric(agent, "swarm_peer_message_bytes_total", direction="sent")]

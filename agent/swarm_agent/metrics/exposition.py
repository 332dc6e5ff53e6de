"""The page: snapshots of the agent turned into families, and everything into bytes."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from swarm_agent.agent import Agent
from swarm_agent.attendance import attendance_by
from swarm_agent.installed import software_version
from swarm_agent.metrics.gpu import dcgm_families, gpu_families
from swarm_agent.metrics.observed import OBSERVED
from swarm_agent.staging.blobs import BlobStore
from swarm_agent.telemetry.reading import TelemetrySnapshot
from swarmsched.api import JobState
from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.gossip.record import NodeStatus
from swarmsched.record import JobRecord

DEATHS_TOLD = 3  # 0, 1, 2: what one, three and five holders survive

OPENMETRICS = "application/openmetrics-text"


def render(agent: Agent, accept: str = "") -> tuple[bytes, str]:
    """The page in the format that the Accept header asks for, and its content type."""
    return encoded(_families(agent, is_openmetrics=OPENMETRICS in accept), accept)


def encoded(families: Iterator[Metric], accept: str) -> tuple[bytes, str]:
    """A page of these families, and its content type."""
    encode, content_type = choose_encoder(accept)
    return encode(SimpleNamespace(collect=lambda: families)), content_type


def _families(agent: Agent, *, is_openmetrics: bool) -> Iterator[Metric]:
    yield from _node_families(agent)
    snapshot = agent.telemetry.snapshot
    yield from _host_families(snapshot)
    yield from _disk_families(agent.config.data_dir)
    yield from _store_families(agent)
    bookings = {uuid: entry.state.value for entry in agent.node.ledger.entries for uuid in entry.gpus}
    yield from gpu_families(snapshot, bookings)
    if agent.config.dcgm_metrics:
        yield from dcgm_families(snapshot, agent.config.name, is_openmetrics=is_openmetrics)
    yield from OBSERVED.families(agent, is_openmetrics=is_openmetrics)
    yield from OBSERVED.registry.collect()


def _node_families(agent: Agent) -> Iterator[Metric]:
    now_s = agent.now_s()
    build = GaugeMetricFamily("swarm_build_info", "Version of the agent.", labels=("version",))
    build.add_metric((software_version(),), 1)
    yield build
    yield GaugeMetricFamily(
        "swarm_node_up", "1 when the agent is ready to take work (/readyz).", value=float(agent.readiness.is_ready())
    )
    ready = GaugeMetricFamily("swarm_ready", "1 when that check of /readyz passes.", labels=("check",))
    for check in agent.readiness.checks():
        ready.add_metric((check.name,), float(check.is_ok))
    yield ready
    members = tuple(agent.node.members(now_s))
    statuses = Counter(member.status.value for member in members)
    yield _by_state(
        "swarm_members", "Members as this agent sees them.", [each.value for each in MemberStatus], statuses
    )
    records = agent.node.records()
    acting = [job for job_id, job in records.items() if agent.node.is_shepherd(job_id)]
    live = [job.state for job in acting]
    states = [each.value for each in JobState if each is not JobState.ENDED]
    text = "Live jobs that this agent shepherds; the sum over all agents counts each job once."
    yield _by_state("swarm_jobs", text, states, Counter(state.value for state in live))
    statuses_at_nodes = tuple(agent.node.node_records(now_s))
    yield from _survival_families(members, statuses_at_nodes, records.values(), acting)
    paused = sum(task.is_frozen for task in agent.node.tasks())
    text = "Tasks on this node that are frozen, because a majority of their job's holders is out of reach."
    yield GaugeMetricFamily("swarm_tasks_paused", text, value=paused)
    available = {member.node_id for member in members if member.is_available}
    ages = [each.age_s for each in statuses_at_nodes if each.record.node_id in available]
    text = "1 while this node drains: it takes no new work, as somebody told it."
    yield GaugeMetricFamily("swarm_node_draining", text, value=float(agent.node.ledger.is_draining))
    text = "1 while this node takes no new work: its disk is nearly full, or starts fail here by its own fault."
    yield GaugeMetricFamily("swarm_node_avoided", text, value=float(bool(agent.node.ledger.avoided_reason)))
    text = "Age of the oldest record of a living node that this agent plans with."
    yield GaugeMetricFamily("swarm_gossip_staleness_seconds", text, value=max(ages, default=0.0))
    text = "Ended jobs of the whole swarm that this agent remembers: what is learned of lengths."
    yield GaugeMetricFamily("swarm_history_jobs", text, value=agent.node.counters["ended_jobs"])
    text = "Kinds of jobs of which this agent knows what they have measured."
    yield GaugeMetricFamily("swarm_history_kinds", text, value=agent.node.counters["kinds"])


def _survival_families(
    members: Sequence[MemberView], nodes: Sequence[NodeStatus], held: Iterable[JobRecord], acting: Iterable[JobRecord]
) -> Iterator[Metric]:
    attendance = attendance_by(members, nodes)
    deaths = Counter(attendance.survives_deaths(job.configuration) for job in acting)
    text = "Live jobs that this agent shepherds, by how many deaths of holders they survive."
    family = GaugeMetricFamily("swarm_jobs_surviving", text, labels=("deaths",))
    for count in range(DEATHS_TOLD):
        family.add_metric((str(count),), deaths.get(count, 0))
    yield family
    kept = [job for job in held if not job.is_ended]
    yield GaugeMetricFamily("swarm_jobs_held", "Live jobs whose record this agent keeps.", value=len(kept))
    text = "Of those, jobs of which most holders are gone: nothing is decided about them until they return."
    lost = sum(not attendance.has_majority(job.configuration) for job in kept)
    yield GaugeMetricFamily("swarm_jobs_without_majority", text, value=lost)


def _host_families(snapshot: TelemetrySnapshot) -> Iterator[Metric]:
    host = snapshot.host
    for name, text, value in (
        ("swarm_host_cpus", "Cores that jobs and agent may use.", host.cpu_count),
        ("swarm_host_cpu_utilization_ratio", "Busy part of all cores.", host.cpu_utilisation_ratio),
        ("swarm_host_memory_size_bytes", "Memory that jobs and agent may use.", host.memory_total_bytes),
        ("swarm_host_memory_available_bytes", "Memory that could be given out.", host.memory_available_bytes),
    ):
        yield GaugeMetricFamily(name, text, value=value)


def _disk_families(data_dir: Path) -> Iterator[Metric]:
    """Of the data folder alone: it is a local one, while to ask for a checkpoint folder on a dead server would wait."""
    try:
        disk = os.statvfs(data_dir)
    except OSError:
        return  # a value that cannot be read is left out
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    yield GaugeMetricFamily("swarm_disk_free_bytes", "Space that is left where data_dir is.", value=free)
    yield GaugeMetricFamily("swarm_disk_size_bytes", "Size of the file system where data_dir is.", value=size)


def _store_families(agent: Agent) -> Iterator[Metric]:
    """As the stores know it themselves; left out until they know what earlier lives of the agent kept."""
    of_tasks = agent.tasks.upkeep.held_bytes
    for name, text, held_bytes in (
        ("swarm_work_store_bytes", "Working folders of finished tasks.", of_tasks["work"]),
        ("swarm_environment_store_bytes", "Environments that were built.", of_tasks["environment"]),
        ("swarm_checkpoint_store_bytes", "Copies of checkpoints, among the shipped files.", of_tasks["checkpoint"]),
        ("swarm_blob_store_bytes", "Shipped files that are kept.", _held_blob_bytes(agent.blobs)),
        (
            "swarm_held_files_bytes",
            "Shipped files of live jobs whose record this agent keeps.",
            agent.files.held_bytes,
        ),
        ("swarm_log_store_bytes", "Output of tasks that is kept.", agent.logs.held_bytes),
    ):
        if held_bytes is not None:
            yield GaugeMetricFamily(name, text, value=held_bytes)
    text = "Trees and requirements of live jobs whose record this agent keeps, as far as they are not whole here."
    yield GaugeMetricFamily("swarm_held_files_incomplete", text, value=agent.files.incomplete_count)
    config = agent.config
    limits = {
        "work": config.work_cache_bytes_max,
        "environment": config.environment_cache_bytes_max,
        "blob": config.blob_cache_bytes_max,
        "log": config.log_cache_bytes_max,
    }
    text = "What a store may keep before the oldest goes; whatever is in use stays beyond that."
    family = GaugeMetricFamily("swarm_store_limit_bytes", text, labels=("store",))
    for store, limit_bytes in limits.items():
        family.add_metric((store,), limit_bytes)
    yield family
    text = "Ranks that wait for a program which reads all of their output."
    yield GaugeMetricFamily("swarm_log_writers_waiting", text, value=agent.logs.waiting_writers)
    text = "Processes that have torch imported and wait to be workers of elastic jobs."
    yield GaugeMetricFamily("swarm_warm_workers", text, value=len(agent.tasks.warm))
    lender, broker = agent.node.lender, agent.node.broker
    text = "Ranges of outer weights that the aggregator of this node holds."
    yield GaugeMetricFamily("swarm_aggregation_shards", text, value=len(lender.shards))
    text = "Ranges that ranks of this node have asked for and other nodes hold."
    yield GaugeMetricFamily("swarm_aggregation_shards_away", text, value=broker.away_count)
    text = "Memory that is booked for the ranges that are held here."
    booked_bytes = sum(each.load.memory_bytes for each in lender.shards)
    yield GaugeMetricFamily("swarm_aggregation_booked_bytes", text, value=booked_bytes)
    text = "Leases of room for ranges here: granted, refused, expired, offered away as there are too many."
    leases = CounterMetricFamily("swarm_aggregation_leases", text, labels=("outcome",))
    for outcome, count in lender.counters.items():
        leases.add_metric((outcome,), count)
    yield leases
    text = "Ranges that ranks of this node have asked for: placed, refused, lost by their hosts, moved to others."
    ranges = CounterMetricFamily("swarm_aggregation_ranges", text, labels=("outcome",))
    for outcome, count in broker.counters.items():
        ranges.add_metric((outcome,), count)
    yield ranges
    text = "Starts of the aggregator of this node: more than one while ranges were held mean that it has died."
    yield CounterMetricFamily("swarm_aggregation_starts", text, value=agent.tasks.aggregation.starts)


def _held_blob_bytes(blobs: BlobStore) -> int | None:
    return blobs.held_bytes if blobs.is_loaded else None


def _by_state(name: str, text: str, states: Iterable[str], counts: Mapping[str, int]) -> Metric:
    """Every state has a series, since a sum over a missing one is a surprise."""
    family = GaugeMetricFamily(name, text, labels=("state",))
    for state in states:
        family.add_metric((state,), counts.get(state, 0))
    return family

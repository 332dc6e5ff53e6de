"""What is counted as it happens: requests, ends of jobs, waiting times, negotiation rounds, traffic.

The counts belong to the process, as Prometheus means them: they start at zero with it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric, UnknownMetricFamily

from swarm_agent.agent import Agent
from swarm_agent.driver import Driver
from swarm_agent.planner import Planner, Promises
from swarm_agent.task.shim import now
from swarm_agent.transport.arrivals import TURNED_AWAY
from swarm_agent.transport.drops import DROP_REASONS
from swarmsched.api import EndReason
from swarmsched.effects import Announce
from swarmsched.ids import JobId

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
ROUTES_LIMIT = 200  # distinct (method, route, code); further ones are counted under route "other"
WAIT_BUCKETS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600, 14_400, 86_400)
START_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
PLAN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
PROMISES = ("within", "earlier", "later")
DIRECTIONS_OF_ERROR = PROMISES[1:]  # of a start: predicted minus actual is above 0, or below
ERROR_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2)
HTTP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
END_REASONS = tuple(reason.value for reason in EndReason if reason is not EndReason.NONE)
PLAN_RESULTS = ("planned", "fell_back", "failed")
DIRECTIONS = ("received", "sent")
PLANES = ("liveness", "state")
COUNTED = {
    "job.taken_over": ("swarm_jobs_taken_over", "Jobs whose shepherd had died and that this agent acts for since."),
    "job.stepped_down": ("swarm_jobs_stepped_down", "Jobs that this agent stopped acting for: another one does."),
    "job.handed_over": ("swarm_jobs_handed_over", "Jobs that this agent gave to another, having more than its share."),
    "job.restarted": ("swarm_jobs_restarted", "Times that jobs were run again after a node with ranks was lost."),
    "job.start_failed": ("swarm_job_starts_failed", "Starts that failed by a node's fault and were tried again."),
    "node.avoided": ("swarm_node_avoidances", "Times that this node came to take no new work for a while."),
    "job.checkpointed": ("swarm_checkpoints_committed", "Checkpoints that became the one to resume from."),
    "holder.replaced": ("swarm_holders_replaced", "Holders of jobs that were exchanged."),
    "task.frozen": ("swarm_tasks_frozen", "Tasks frozen here: no word from a majority of the job's holders."),
    "task.thawed": ("swarm_tasks_thawed", "Frozen tasks that went on: their attempt was still the valid one."),
    "task.killed_over": (
        "swarm_tasks_killed_over",
        "Tasks killed here because a newer attempt, or the end, was known.",
    ),
}
CORE_COUNTS = {
    "register_conflicts": ("swarm_register_conflicts", "Updates of jobs that another agent's had overtaken."),
    "updates_refused": ("swarm_register_updates_refused", "Updates of jobs left out, since none could store them."),
    "cards_refused": ("swarm_cards_refused", "Versions of jobs' cards left out, since none could take them."),
}
FAULTS = {
    "steps": ("swarm_step_errors", "Times that the agent's core raised and started again from the disk: a bug."),
    "effects": ("swarm_effect_errors", "Effects of the core that could not be carried out and were left out: a bug."),
    "refused_events": ("swarm_step_events_refused", "Events left out because one like them had made the core raise."),
}
REGISTER_DROP_REASONS = ("nonsense", "no_room", "wrong_store")
Labels = TypeVar("Labels", bound=tuple[str, ...])


class Observed:
    """Counts since the start of the process."""

    def __init__(self) -> None:
        # Series that say when another series began double the page and serve nobody here.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library left it untyped
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

        wait = "Time from the submission of a job to its first start."
        self._queue_wait = histogram("swarm_queue_wait_seconds", wait, WAIT_BUCKETS_S)
        start = "Time from the moment a job was queued, first or again, until all its ranks ran."
        self._job_start = histogram("swarm_job_start_seconds", start, START_BUCKETS_S)
        pause = "Time from the decision on another size or place of a job until all its ranks ran again."
        self._pause = histogram("swarm_rescale_pause_seconds", pause, START_BUCKETS_S)
        http, route = "Time from an HTTP request to the end of its answer, streams excluded.", ("method", "route")
        self._http_duration = histogram("swarm_http_request_duration_seconds", http, HTTP_BUCKETS_S, route)
        lag = "Longest time, in each second, that an event waited for the agent or that a timer was late."
        self._loop_lag = histogram("swarm_loop_lag_seconds", lag, LAG_BUCKETS_S)
        commit = "Time that the disk took for a group of durable writes."
        self._commit = histogram("swarm_commit_seconds", commit, LAG_BUCKETS_S)
        plan = "Time that the planner's process took for a plan, by policy."
        self._plan = histogram("swarm_plan_seconds", plan, PLAN_BUCKETS_S, ("policy",))
        error = "Relative error of the time of a step that a model predicted where a job was then sent."
        self._model_error = histogram("swarm_model_error_ratio", error, ERROR_BUCKETS)
        ahead = "How much earlier or later than at first predicted a job started that had waited."
        self._start_error = histogram("swarm_start_prediction_error_seconds", ahead, WAIT_BUCKETS_S, ("direction",))
        for direction in DIRECTIONS_OF_ERROR:
            self._start_error.labels(direction)
        self._promised: Counter[str] = Counter(dict.fromkeys(PROMISES, 0))
        self._promises = Promises()
        self._plans: Counter[tuple[str, str]] = Counter()
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._ends: Counter[str] = Counter(dict.fromkeys(END_REASONS, 0))
        self._rounds: Counter[str] = Counter()
        self._events: Counter[str] = Counter()

    def observe_http(self, method: str, route: str, code: int, seconds: float) -> None:
        """One finished request.  `route` is the pattern (`/v1/jobs/{job}`), never the path that was asked for."""
        method = method if method in METHODS else "other"
        if (method, route, str(code)) not in self._http and len(self._http) >= ROUTES_LIMIT:
            route = "other"
        self._http[method, route, str(code)] += 1
        self._http_duration.labels(method, route).observe(seconds)

    def observe_announce(self, announce: Announce) -> None:
        """An event of the core, counted by its kind; those that are matched here say more."""
        fields = announce.fields
        self._events[announce.kind] += 1
        match announce.kind:
            case "job.started":
                self._queue_wait.observe(float(fields.get("queue_wait_s", 0.0)))
                self._job_start.observe(float(fields.get("start_s", 0.0)))
                if kept := self._promises.kept(JobId(announce.job_id or ""), now()):
                    self._start_error.labels(DIRECTIONS_OF_ERROR[kept[0] < 0]).observe(abs(kept[0]))
                    self._promised[kept[1]] += 1
            case "job.resumed":
                self._pause.observe(float(fields.get("pause_s", 0.0)))
            case "job.ended":
                reason = str(fields.get("end_reason", ""))
                self._ends[reason if reason in END_REASONS else "unknown"] += 1
            case "model.checked":
                self._model_error.observe(float(fields.get("error_ratio", 0.0)))
            case "job.placed":
                self._rounds["placed"] += 1
            case "negotiation.round":
                self._rounds[str(fields.get("result", "unknown"))[:32]] += 1

    def watch_driver(self, driver: Driver) -> None:
        """Hear of the loop's lag and of the times of commits."""
        driver.tell_lag(self._loop_lag.observe)
        driver.barrier.tell_commits(self._commit.observe)

    def watch_planner(self, planner: Planner) -> None:
        """Hear of plans and their times."""
        planner.tell_plans(self._observe_plan)
        self._promises = planner.promises

    def _observe_plan(self, policy: str, result: str, elapsed_s: float) -> None:
        for each in PLAN_RESULTS:  # a series that began with 1 would hide its first increase
            self._plans[policy, each] += each == result
        if result == "planned":
            self._plan.labels(policy).observe(elapsed_s)

    def families(self, agent: Agent, *, is_openmetrics: bool) -> Iterator[Metric]:
        """The counters that are kept here, or by the parts of the agent, rather than in the registry."""
        yield self._ended_jobs(is_openmetrics=is_openmetrics)
        rounds = "Rounds of holds by this agent's shepherds."
        yield _counter("swarm_negotiation_rounds", rounds, ("result",), _by_one(self._rounds))
        plans = "Plans by policy: planned, fell_back (it raised, and backfill planned in its place) or failed."
        yield _counter("swarm_plans", plans, ("policy", "result"), self._plans)
        promised = "Starts of jobs by the interval that was predicted first: within it, earlier or later."
        yield _counter("swarm_start_predictions", promised, ("result",), _by_one(self._promised))
        events = "Events that this agent wrote to the cluster log."
        yield _counter("swarm_events", events, ("kind",), _by_one(self._events))
        core, faults = agent.node.counters, agent.faults.counts
        for table, counts in ((COUNTED, self._events), (CORE_COUNTS, core), (FAULTS, faults)):
            for key, (name, text) in table.items():
                yield CounterMetricFamily(name, text, value=counts.get(key, 0))
        reports = "Reports of training that were taken, and what was odd or left out, by kind."
        yield _counter("swarm_reports", reports, ("result",), _by_one(agent.tasks.reports.counters))
        strangers = "Connections that were closed before they showed a token or the cluster key: late, or too many."
        away = {(why,): agent.arrivals.turned_away[why] for why in TURNED_AWAY}
        yield _counter("swarm_strangers_turned_away", strangers, ("reason",), away)
        yield _counter("swarm_http_requests", "Finished HTTP requests.", ("method", "route", "code"), self._http)
        yield from _traffic_families(agent.udp.counters, agent.channel.counters)
        channels = {"gossip": agent.udp.drops.counters, "peer": agent.channel.drops.counters}
        yield _counter(
            "swarm_messages_dropped",
            "Messages that were refused: foreign, altered, oversized, replayed, sealed with another key and the like.",
            ("channel", "reason"),
            {(channel, why): counts[why] for channel, counts in channels.items() for why in DROP_REASONS},
        )
        yield _counter(
            "swarm_register_messages_dropped",
            "Readable messages about jobs' records that got no answer: they contradict themselves (nonsense), mean a "
            "database that this node has lost (wrong_store), or found it full (no_room).",
            ("reason",),
            {(why,): agent.node.register_drops.get(why, 0) for why in REGISTER_DROP_REASONS},
        )

    def _ended_jobs(self, *, is_openmetrics: bool) -> Metric:
        """`swarm_jobs_total`.  In OpenMetrics its family would be `swarm_jobs`, the name of a gauge of ours."""
        text = "Jobs that ended under a shepherd on this agent."
        if is_openmetrics:
            return _filled(UnknownMetricFamily("swarm_jobs_total", text, labels=("end_reason",)), _by_one(self._ends))
        return _counter("swarm_jobs", text, ("end_reason",), _by_one(self._ends))


def _traffic_families(gossip: Counter[str], peer: Counter[str]) -> Iterator[Metric]:
    for name, port, counters in (
        ("swarm_gossip_message_bytes", "the gossip port (UDP)", gossip),
        ("swarm_peer_message_bytes", "the peer channel (TCP)", peer),
    ):
        values = {(way,): counters[f"{way}_bytes"] for way in DIRECTIONS}
        yield _counter(name, f"Payload bytes of messages through {port}.", ("direction",), values)
    yield _counter(
        "swarm_gossip_plane_bytes",
        "Sealed bytes of the gossip port by plane: liveness (membership) and state (records, cards, locations).",
        ("plane", "direction"),
        {(plane, way): gossip[f"{way}_bytes_{plane}"] for plane in PLANES for way in DIRECTIONS},
    )


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Labels, float]) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(family: CounterMetricFamily | UnknownMetricFamily, values: Mapping[Labels, float]) -> Metric:
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _by_one(counts: Mapping[str, int]) -> dict[tuple[str], int]:
    return {(name,): count for name, count in counts.items()}


OBSERVED = Observed()

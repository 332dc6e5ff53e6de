"""Every operation of the API."""

from swarm_agent.http import events, joblist, logs
from swarm_agent.http.blobs import PACK_TYPE, BlobUploads
from swarm_agent.http.events import Events
from swarm_agent.http.exchange import JSON_TYPE, NDJSON_TYPE, SSE_TYPE, Handler
from swarm_agent.http.health import EXCLUDE, VERBOSE, Health
from swarm_agent.http.idempotency import KEY
from swarm_agent.http.joblist import FIELDS, JobList
from swarm_agent.http.jobs import GOAL, TIMEOUT, USER, JobRoutes
from swarm_agent.http.logs import JobLogs
from swarm_agent.http.nodes import IF_MATCH, Nodes
from swarm_agent.http.principal import Right
from swarm_agent.http.routes import Reply, Route
from swarm_agent.http.stream import FOLLOW, LAST_EVENT, LOSSLESS
from swarm_agent.http.submit import SubmitRoutes
from swarm_agent.http.when import SINCE

FILTERS = (joblist.ALL, joblist.STATE, joblist.OWNER, joblist.NAME, joblist.LIMIT, joblist.CURSOR, FIELDS)
OUTPUT = (
    FOLLOW,
    SINCE,
    logs.CURSOR,
    LAST_EVENT,
    LOSSLESS,
    USER,
    logs.TAIL,
    logs.RANKS,
    logs.GROUPS,
    logs.STREAM,
    logs.ATTEMPT,
)
LOGGED = (FOLLOW, SINCE, events.CURSOR, LAST_EVENT, events.LIMIT, events.KIND, events.JOBS, events.NODES)
READINESS = (VERBOSE, EXCLUDE)

STREAMS = (NDJSON_TYPE, SSE_TYPE)
TEXT = Reply("", ("text/plain",))
READY = (TEXT, Reply("", TEXT.content_types, "not ready", status=503))
ACCEPTED = Reply("Job", text="it will be done", status=202)
CREATED = Reply("SubmittedJob", text="created", headers=("Location",), status=201)
KNOWN = Reply("SubmittedJob", text="known already, or a dry run")
BLOBS = (Reply("StoredBlob", status=201), Reply("StoredBlob", text="it was here"))
EVENTS = Reply("EventList", (JSON_TYPE, *STREAMS), "a list, or a stream with follow")
SETTING = Reply("Setting", headers=("ETag",))
METRICS = Reply("", ("text/plain", "application/openmetrics-text"))

ONE_JOB = ("unknown_job", "ambiguous_job", "job_over", "shepherd_unreachable")
CHANGE = (*ONE_JOB, "conflict", "unavailable")
REUSED = ("idempotency_key_reused", "idempotency_in_progress")
SUBMIT = ("impossible_request", "conflict", "job_over", *REUSED, "not_ready", "unavailable")
STORE = ("bad_blob", "storage_full")
OTHER_BLOB = (*STORE, "unknown_blob")
OTHER_TYPE = (*STORE, "unsupported_media_type")
DRAIN = ("unknown_node", "conflict", "not_ready", "unavailable")

JOB = "/v1/jobs/{job}"
NODE = "/v1/nodes/{node}"
BLOB = "/v1/blobs/{sha256}"

# One operation a line, as far as it fits.
# fmt: off


def job_routes(submission: SubmitRoutes, jobs: JobRoutes, job_list: JobList, output: JobLogs) -> tuple[Route, ...]:
    """Tickets and jobs."""
    return (
        Route("POST", "/v1/tickets", submission.create_ticket, "A job id and its holders; no side effect.",
              (Reply("Ticket"),), body="Empty", is_body_required=False, problems=("not_ready",),
              right=Right.USE, only_adds=True),
        Route("POST", "/v1/jobs", submission.submit_job, "Submit a job.",
              (CREATED, KNOWN), (KEY,), "Submission", problems=SUBMIT, right=Right.USE, only_adds=True),
        Route("GET", "/v1/jobs", job_list.list_jobs, "Jobs of the whole swarm, newest first.",
              (Reply("JobList"),), FILTERS),
        Route("GET", JOB, jobs.get_job, "One job.", (Reply("Job"),), (FIELDS, USER), problems=ONE_JOB),
        Route("DELETE", JOB, jobs.cancel_job, "Cancel a job.",
              (ACCEPTED,), (USER,), problems=CHANGE, given_id="deleteJob", right=Right.USE),
        Route("POST", f"{JOB}/cancel", jobs.cancel_job, "Cancel a job.",
              (ACCEPTED,), (USER,), "Cancel", is_body_required=False, problems=CHANGE, right=Right.USE),
        Route("POST", f"{JOB}/signal", jobs.signal_job, "Send a signal to all ranks.",
              (ACCEPTED,), (USER,), "Signal", problems=CHANGE, right=Right.USE),
        Route("POST", f"{JOB}/scale", jobs.scale_job, "Let a job have other numbers of ranks.",
              (ACCEPTED,), (USER,), "Scale", problems=(*CHANGE, "impossible_request"), right=Right.USE),
        Route("POST", f"{JOB}/migrate", jobs.migrate_job, "Move a running job to other nodes.",
              (ACCEPTED,), (USER,), "Migrate", problems=(*CHANGE, "unknown_node"), right=Right.USE),
        Route("POST", f"{JOB}/recover", jobs.recover_job, "Go on without lost holders; refused without need.",
              (ACCEPTED,), (USER,), "Recover", problems=(*CHANGE, "not_ready"), right=Right.OPERATE),
        Route("GET", f"{JOB}/why", jobs.why_job, "Why a job waits, or has what it has.",
              (Reply("Why"),), (USER,), problems=ONE_JOB),
        Route("GET", f"{JOB}/wait", jobs.wait_job, "Wait until a job runs or is done.",
              (Reply("Wait"),), (GOAL, TIMEOUT, USER), problems=ONE_JOB),
        Route("GET", f"{JOB}/left", jobs.left_job, "Folders of its attempts that are over.",
              (Reply("LeftList"),), (USER,), problems=ONE_JOB),
        Route("GET", f"{JOB}/logs", output.read_logs, "The output of all ranks.",
              (Reply("LogRecord", STREAMS, "a stream of records"),), OUTPUT, problems=(*ONE_JOB, "too_many_streams")),
    )


def swarm_routes(nodes: Nodes, log: Events) -> tuple[Route, ...]:
    """Nodes, members, events and the setting."""
    return (
        Route("GET", "/v1/nodes", nodes.list_nodes, "All members with what they have.", (Reply("NodeList"),)),
        Route("GET", NODE, nodes.get_node, "One node.", (Reply("Node"),), problems=("unknown_node",)),
        Route("PUT", f"{NODE}/drain", nodes.drain_node, "Have a node take no new work, or again.",
              (Reply("Drained"),), body="Drain", problems=DRAIN, right=Right.OPERATE),
        Route("GET", "/v1/gpus", nodes.list_gpus, "All GPUs of the nodes that answer.", (Reply("GpuList"),)),
        Route("GET", "/v1/queues", nodes.list_queues, "Queues and what is in them.", (Reply("QueueList"),)),
        Route("GET", "/v1/members", nodes.list_members, "Members as this agent sees them.", (Reply("MemberList"),)),
        Route("GET", "/v1/members/prometheus", nodes.list_targets, "Prometheus HTTP service discovery.",
              (Reply("Targets"),), right=Right.METRICS),
        Route("DELETE", "/v1/members/{node}", nodes.forget_member, "Stop dialling a lost member.",
              (Reply("Forgotten"),), problems=("unknown_node", "conflict"), right=Right.OPERATE),
        Route("GET", "/v1/events", log.list_events, "The merged log of all agents.",
              (EVENTS,), LOGGED, problems=("too_many_streams",)),
        Route("GET", "/v1/config", nodes.get_config, "The swarm-wide setting.", (SETTING,)),
        Route("PUT", "/v1/config", nodes.put_config, "Change the swarm-wide setting.",
              (SETTING,), (IF_MATCH,), "NewSetting", problems=("version_conflict", "not_ready"), right=Right.OPERATE),
        Route("GET", "/v1/status", nodes.get_status, "The swarm in a few numbers.", (Reply("Status"),)),
    )


def blob_routes(blobs: BlobUploads) -> tuple[Route, ...]:
    """Shipped files."""
    return (
        Route("POST", "/v1/blobs/missing", blobs.list_missing_blobs, "Which of these are not here.",
              (Reply("Missing"),), body="Digests", right=Right.USE, only_adds=True),
        Route("HEAD", BLOB, blobs.head_blob, "Is it here, and how large.",
              (Reply("", ("application/octet-stream",)),), problems=("unknown_blob",), reserved="missing"),
        Route("PUT", BLOB, blobs.put_blob, "Store one file.",
              BLOBS, stream_type="application/octet-stream", problems=OTHER_BLOB, reserved="missing",
              right=Right.USE, only_adds=True),
        Route("POST", "/v1/blobs", blobs.put_blobs, "Store many small files.",
              (Reply("StoredPack"),), stream_type=PACK_TYPE, problems=OTHER_TYPE, right=Right.USE, only_adds=True),
    )


def health_routes(health: Health, openapi: Handler, page: Handler) -> tuple[Route, ...]:
    """What monitors and browsers ask for."""
    return (
        Route("GET", "/livez", health.livez, "The process lives.", (TEXT,), right=None),
        Route("GET", "/readyz", health.readyz, "It may be given work.", READY, READINESS, right=None),
        Route("GET", "/healthz", health.readyz, "As readyz.",
              READY, READINESS, right=None, given_id="healthz"),
        Route("GET", "/v1/doctor", health.doctor, "What this agent finds wrong with itself.", (Reply("Doctor"),)),
        Route("GET", "/metrics", health.metrics, "Prometheus metrics.", (METRICS,), right=Right.METRICS),
        Route("GET", "/metrics/jobs", health.job_metrics, "What tasks of this node report.", (METRICS,),
              right=Right.METRICS),
        Route("GET", "/errors/{code}", health.explain_error, "What a kind of problem means.",
              (TEXT,), problems=("not_found",), right=None),
        Route("GET", "/openapi.json", openapi, "This document.", (Reply("Anything"),), right=None),
        Route("GET", "/", page, "The status page.", (Reply("", ("text/html",)),), right=None),
    )

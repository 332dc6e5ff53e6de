"""Every operation of the API."""

from swarm_agent.http.blobs import PACK_TYPE, BlobUploads
from swarm_agent.http.events import Events
from swarm_agent.http.exchange import NDJSON_TYPE, SSE_TYPE, Handler
from swarm_agent.http.health import Health
from swarm_agent.http.joblist import JobList
from swarm_agent.http.jobs import Jobs
from swarm_agent.http.logs import JobLogs
from swarm_agent.http.nodes import Nodes
from swarm_agent.http.routes import BodyKind, Parameter, Reply, Route
from swarm_agent.http.submit import Submission

USER = Parameter("user", "string", "Whose newest job @last means.")
FIELDS = Parameter("fields", "string", "Keys of each item, with commas; id is always there.")
CURSOR = Parameter("cursor", "string", "Go on behind this place.")
SINCE = Parameter("since", "string", "RFC 3339 time, or seconds ago.")
FOLLOW = Parameter("follow", "boolean", "Stream what is to come as well.")
LAST_EVENT = Parameter("Last-Event-ID", "string", "As cursor; sent by browsers that reconnect.", "header")
STREAMS = (NDJSON_TYPE, SSE_TYPE)
TEXT = ("text/plain",)
ONE_JOB = ("unknown_job", "ambiguous_job", "job_over", "shepherd_unreachable")
CHANGED = {202: Reply("Job", text="it will be done")}


def job_routes(submission: Submission, jobs: Jobs, job_list: JobList, logs: JobLogs) -> tuple[Route, ...]:
    """Tickets and jobs."""
    job = "/v1/jobs/{job}"
    return (
        Route(
            "POST",
            "/v1/tickets",
            submission.create_ticket,
            "createTicket",
            "A job id and its holders; no side effect.",
            "jobs",
            {200: Reply("Ticket")},
            body=BodyKind.JSON,
            body_schema="Empty",
            is_body_required=False,
            problems=("not_ready", "invalid"),
        ),
        Route(
            "POST",
            "/v1/jobs",
            submission.submit_job,
            "submitJob",
            "Submit a job.",
            "jobs",
            {
                201: Reply("SubmittedJob", text="created", headers=("Location",)),
                200: Reply("SubmittedJob", text="known already, or a dry run"),
            },
            (
                Parameter(
                    "Idempotency-Key", "string", "Makes a repetition at this agent harmless for 10 min.", "header"
                ),
            ),
            BodyKind.JSON,
            "Submission",
            problems=(
                "invalid",
                "impossible_request",
                "conflict",
                "job_over",
                "idempotency_key_reused",
                "idempotency_in_progress",
                "not_ready",
                "unavailable",
            ),
        ),
        Route(
            "GET",
            "/v1/jobs",
            job_list.list_jobs,
            "listJobs",
            "Jobs of the whole swarm, newest first.",
            "jobs",
            {200: Reply("JobList")},
            (
                Parameter("all", "boolean", "Ended jobs too."),
                Parameter("state", "string", "States, with commas."),
                Parameter("user", "string", "Only jobs of this user."),
                Parameter("name", "string", "Only jobs of this name."),
                Parameter("limit", "integer", "1 to 1,000; default 100."),
                CURSOR,
                FIELDS,
            ),
        ),
        Route(
            "GET",
            job,
            jobs.get_job,
            "getJob",
            "One job.",
            "jobs",
            {200: Reply("Job")},
            (FIELDS, USER),
            problems=ONE_JOB,
        ),
        Route(
            "DELETE",
            job,
            jobs.cancel_job,
            "deleteJob",
            "Cancel a job.",
            "jobs",
            CHANGED,
            (USER,),
            problems=(*ONE_JOB, "conflict", "unavailable"),
        ),
        Route(
            "POST",
            f"{job}/cancel",
            jobs.cancel_job,
            "cancelJob",
            "Cancel a job.",
            "jobs",
            CHANGED,
            (USER,),
            BodyKind.JSON,
            "Cancel",
            is_body_required=False,
            problems=(*ONE_JOB, "conflict", "invalid", "unavailable"),
        ),
        Route(
            "POST",
            f"{job}/signal",
            jobs.signal_job,
            "signalJob",
            "Send a signal to all ranks.",
            "jobs",
            CHANGED,
            (USER,),
            BodyKind.JSON,
            "Signal",
            problems=(*ONE_JOB, "conflict", "invalid", "unavailable"),
        ),
        Route(
            "POST",
            f"{job}/recover",
            jobs.recover_job,
            "recoverJob",
            "Go on without lost holders; refused without need.",
            "jobs",
            CHANGED,
            (USER,),
            BodyKind.JSON,
            "Recover",
            problems=(*ONE_JOB, "conflict", "invalid", "not_ready", "unavailable"),
        ),
        Route(
            "GET",
            f"{job}/why",
            jobs.why_job,
            "whyJob",
            "Why a job waits, or has what it has.",
            "jobs",
            {200: Reply("Why")},
            (USER,),
            problems=ONE_JOB,
        ),
        Route(
            "GET",
            f"{job}/wait",
            jobs.wait_job,
            "waitJob",
            "Wait until a job runs or is done.",
            "jobs",
            {200: Reply("Wait")},
            (
                Parameter("for", "string", "done or running."),
                Parameter("timeout", "number", "Seconds, at most 300; default 60."),
                USER,
            ),
            problems=ONE_JOB,
        ),
        Route(
            "GET",
            f"{job}/logs",
            logs.read_logs,
            "readLogs",
            "The output of all ranks.",
            "jobs",
            {200: Reply("LogRecord", STREAMS, "a stream of records")},
            (
                FOLLOW,
                SINCE,
                CURSOR,
                LAST_EVENT,
                USER,
                Parameter("tail", "integer", "Only the last lines of each rank."),
                Parameter("rank", "string", "Ranks, with commas."),
                Parameter("stream", "string", "stdout, stderr or system, with commas."),
                Parameter("attempt", "integer", "An earlier attempt; default the newest that has output."),
            ),
            problems=(*ONE_JOB, "too_many_streams"),
        ),
    )


def swarm_routes(nodes: Nodes, events: Events) -> tuple[Route, ...]:
    """Nodes, members, events and the setting."""
    return (
        Route(
            "GET",
            "/v1/nodes",
            nodes.list_nodes,
            "listNodes",
            "All members with what they have.",
            "nodes",
            {200: Reply("NodeList")},
        ),
        Route(
            "GET",
            "/v1/nodes/{node}",
            nodes.get_node,
            "getNode",
            "One node.",
            "nodes",
            {200: Reply("Node")},
            problems=("unknown_node",),
        ),
        Route(
            "PUT",
            "/v1/nodes/{node}/drain",
            nodes.drain_node,
            "drainNode",
            "Have a node take no new work, or again.",
            "nodes",
            {200: Reply("Drained")},
            body=BodyKind.JSON,
            body_schema="Drain",
            problems=("unknown_node", "conflict", "invalid", "not_ready", "unavailable"),
        ),
        Route(
            "GET",
            "/v1/gpus",
            nodes.list_gpus,
            "listGpus",
            "All GPUs of the nodes that answer.",
            "nodes",
            {200: Reply("GpuList")},
        ),
        Route(
            "GET",
            "/v1/queues",
            nodes.list_queues,
            "listQueues",
            "Queues and what is in them.",
            "jobs",
            {200: Reply("QueueList")},
        ),
        Route(
            "GET",
            "/v1/members",
            nodes.list_members,
            "listMembers",
            "Members as this agent sees them.",
            "nodes",
            {200: Reply("MemberList")},
        ),
        Route(
            "GET",
            "/v1/members/prometheus",
            nodes.list_targets,
            "listTargets",
            "Prometheus HTTP service discovery.",
            "nodes",
            {200: Reply("Targets")},
        ),
        Route(
            "DELETE",
            "/v1/members/{node}",
            nodes.forget_member,
            "forgetMember",
            "Stop dialling a lost member.",
            "nodes",
            {200: Reply("Forgotten")},
            problems=("unknown_node", "conflict"),
        ),
        Route(
            "GET",
            "/v1/events",
            events.list_events,
            "listEvents",
            "The merged log of all agents.",
            "nodes",
            {200: Reply("EventList", ("application/json", *STREAMS), "a list, or a stream with follow")},
            (
                FOLLOW,
                SINCE,
                CURSOR,
                LAST_EVENT,
                Parameter("limit", "integer", "0 to 1,000; default 100."),
                Parameter("kind", "string", "Kinds or their beginnings, with commas."),
                Parameter("job", "string", "Ids or handles, with commas."),
                Parameter("node", "string", "Nodes, with commas."),
            ),
            problems=("too_many_streams",),
        ),
        Route(
            "GET",
            "/v1/config",
            nodes.get_config,
            "getConfig",
            "The swarm-wide setting.",
            "nodes",
            {200: Reply("Setting", headers=("ETag",))},
        ),
        Route(
            "PUT",
            "/v1/config",
            nodes.put_config,
            "putConfig",
            "Change the swarm-wide setting.",
            "nodes",
            {200: Reply("Setting", headers=("ETag",))},
            (Parameter("If-Match", "string", "Only if the ETag is still this.", "header"),),
            BodyKind.JSON,
            "NewSetting",
            problems=("invalid", "version_conflict", "not_ready"),
        ),
        Route(
            "GET",
            "/v1/status",
            nodes.get_status,
            "getStatus",
            "The swarm in a few numbers.",
            "nodes",
            {200: Reply("Status")},
        ),
    )


def blob_routes(blobs: BlobUploads) -> tuple[Route, ...]:
    """Shipped files."""
    blob = "/v1/blobs/{sha256}"
    problems = ("bad_blob", "storage_full")
    return (
        Route(
            "POST",
            "/v1/blobs/missing",
            blobs.list_missing,
            "listMissingBlobs",
            "Which of these are not here.",
            "blobs",
            {200: Reply("Missing")},
            body=BodyKind.JSON,
            body_schema="Digests",
            problems=("invalid",),
        ),
        Route(
            "HEAD",
            blob,
            blobs.head_blob,
            "headBlob",
            "Is it here, and how large.",
            "blobs",
            {200: Reply("", ("application/octet-stream",))},
            problems=("unknown_blob",),
        ),
        Route(
            "PUT",
            blob,
            blobs.put_blob,
            "putBlob",
            "Store one file.",
            "blobs",
            {201: Reply("StoredBlob"), 200: Reply("StoredBlob", text="it was here")},
            body=BodyKind.STREAM,
            body_type="application/octet-stream",
            problems=(*problems, "unknown_blob"),
        ),
        Route(
            "POST",
            "/v1/blobs",
            blobs.put_pack,
            "putBlobs",
            "Store many small files.",
            "blobs",
            {200: Reply("StoredPack")},
            body=BodyKind.STREAM,
            body_type=PACK_TYPE,
            problems=(*problems, "unsupported_media_type"),
        ),
    )


def health_routes(health: Health, openapi: Handler, page: Handler) -> tuple[Route, ...]:
    """What monitors and browsers ask for."""
    verbose = (
        Parameter("verbose", "boolean", "One line for each check."),
        Parameter("exclude", "string", "Checks to leave out, with commas."),
    )
    ready = {200: Reply("", TEXT), 503: Reply("", TEXT, "not ready")}
    return (
        Route(
            "GET",
            "/livez",
            health.livez,
            "livez",
            "The process lives.",
            "health",
            {200: Reply("", TEXT)},
            is_public=True,
        ),
        Route(
            "GET", "/readyz", health.readyz, "readyz", "It may be given work.", "health", ready, verbose, is_public=True
        ),
        Route("GET", "/healthz", health.readyz, "healthz", "As readyz.", "health", ready, verbose, is_public=True),
        Route(
            "GET",
            "/v1/doctor",
            health.doctor,
            "doctor",
            "What this agent finds wrong with itself.",
            "health",
            {200: Reply("Doctor")},
        ),
        Route(
            "GET",
            "/metrics",
            health.metrics,
            "metrics",
            "Prometheus metrics.",
            "health",
            {200: Reply("", ("text/plain", "application/openmetrics-text"))},
        ),
        Route(
            "GET",
            "/errors/{code}",
            health.error_page,
            "explainError",
            "What a kind of problem means.",
            "health",
            {200: Reply("", TEXT)},
            problems=("not_found",),
            is_public=True,
        ),
        Route(
            "GET",
            "/openapi.json",
            openapi,
            "openapi",
            "This document.",
            "health",
            {200: Reply("Anything")},
            is_public=True,
        ),
        Route("GET", "/", page, "page", "The status page.", "health", {200: Reply("", ("text/html",))}, is_public=True),
    )

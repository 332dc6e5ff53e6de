"""Puts the parts of the API together for one agent."""

import time

from swarm_agent.http.app import Server
from swarm_agent.http.blobs import BlobUploads
from swarm_agent.http.events import Events
from swarm_agent.http.exchange import Call, HttpReply, encode
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.find import JobFinder
from swarm_agent.http.guard import Guard, known_hosts
from swarm_agent.http.health import Health, RenderMetrics
from swarm_agent.http.joblist import JobList
from swarm_agent.http.jobs import JobRoutes
from swarm_agent.http.log_places import LogFinder
from swarm_agent.http.log_source import LogSource
from swarm_agent.http.logs import JobLogs
from swarm_agent.http.nodes import Nodes
from swarm_agent.http.openapi import openapi_document
from swarm_agent.http.page import page
from swarm_agent.http.peers import Peers
from swarm_agent.http.port import AgentPort
from swarm_agent.http.routes import Route
from swarm_agent.http.submit import SubmitRoutes
from swarm_agent.http.table import blob_routes, health_routes, job_routes, swarm_routes
from swarm_agent.http.watch import JobChanges, JobWatch
from swarm_agent.installed import software_version
from swarmsched import ids


def build_api(agent: AgentPort, facts: AgentFacts, tokens: tuple[str, ...], render_metrics: RenderMetrics) -> Server:
    """The API of one agent, which makes an application for each door; registers with it what other agents may ask."""
    peers = Peers(agent, facts)
    finder, changes = JobFinder(facts, peers), JobChanges(facts)
    watch = JobWatch(facts, peers, finder, changes)
    jobs, job_list = JobRoutes(agent, facts, peers, finder, watch), JobList(facts, peers)
    source, nodes, events = LogSource(agent, peers), Nodes(agent, facts, peers, job_list), Events(agent, peers)
    log_finder = LogFinder(agent, peers)
    routes: tuple[Route, ...] = ()

    async def openapi(_: Call) -> HttpReply:
        return HttpReply(200, encode(openapi_document(routes, software_version())))

    routes = (
        *job_routes(SubmitRoutes(agent, facts, peers), jobs, job_list, JobLogs(jobs, watch, source, log_finder)),
        *swarm_routes(nodes, events),
        *blob_routes(BlobUploads(agent)),
        *health_routes(Health(agent, facts, render_metrics), openapi, page),
    )
    guard = Guard(tokens, known_hosts(agent.config))
    config = agent.config
    api_address = ids.address_text(config.people_advertised or config.advertised)
    server = Server(config.name, guard, routes, lambda told: agent.events.append(told, time.time()), api_address)
    for kind, handler in (
        ("find", jobs.on_find),
        ("tasks", jobs.on_tasks),
        ("left", jobs.on_left),
        ("jobs", job_list.on_jobs),
        ("kept_output", log_finder.on_kept),
        ("gpus", nodes.on_gpus),
        ("events", events.on_events),
    ):
        agent.on_query(kind, handler)
    for kind, stream in (("watch", watch.on_watch), ("logs", source.on_logs), ("events", events.on_follow)):
        agent.on_stream(kind, stream)
    peers.serve(server.dispatch)
    for callback in (changes.on_stepped, nodes.on_stepped):
        agent.on_stepped(callback)
    return server

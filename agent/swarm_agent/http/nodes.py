"""Members, nodes and GPUs, the swarm's status and its setting.

Lists of nodes are asked for often, so their bytes are kept: made anew only after the core has changed something, and
at most every 50 ms, at the latest after 250 ms because the ages in them go on.  Gossip counts GPUs and does not name
them; the owners are asked for the details, at most once a second while somebody looks.
"""

import asyncio
import time
from collections.abc import Callable

from msgspec.structs import asdict

from swarm_agent.http.exchange import Call, Document, HttpReply, answer, as_object, boolean, encode
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.joblist import JobList
from swarm_agent.http.jobs import short_text
from swarm_agent.http.outlook import fairness_document
from swarm_agent.http.parameter import header
from swarm_agent.http.peers import LIST_TIMEOUT_S, Absent, Peers
from swarm_agent.http.port import AgentPort, commanded
from swarm_agent.http.problem import Problem, invalid
from swarm_agent.http.views import (
    gpu_document,
    member_document,
    node_document,
    queue_documents,
    setting_document,
    status_document,
    task_document,
)
from swarm_agent.http.when import aged, rfc3339, utc_of
from swarmsched.api import API_VERSION, NODE_CLOSENESS, near_word
from swarmsched.commands import Done, DrainNode, ForgetMember, SetSwarmSetting, SettingStored
from swarmsched.documents import (
    DrainedDocument,
    ForgottenDocument,
    GpuListDocument,
    MemberDocument,
    MemberListDocument,
    NodeDetails,
    NodeDocument,
    NodeListDocument,
    QueueListDocument,
    SettingDocument,
    TargetDocument,
    TargetLabelsDocument,
)
from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.ids import JobId, NodeId
from swarmsched.policies.registry import POLICIES
from swarmsched.view import Elasticity, PolicySetting

FRESH_S = 0.05
AGED_S = 0.25
DETAILS_S = 1.0  # between two questions to the owners
DETAILS_LIMIT_S = 3.0  # older details are waited for instead of shown
MISSING_S = 0.25  # between two questions while a live node has told nothing yet
SETTING_KEYS = ("policy", "parameters", "elasticity", "restartable")
PARAMETER_MOST = 1e15  # none takes more; a whole number in JSON may have any length

IF_MATCH = header("If-Match", "Only if the ETag is still this.")


class BodyCache:
    """Bodies by name, remade on change and on age."""

    def __init__(self) -> None:
        self._bodies: dict[str, tuple[bytes, float, int]] = {}  # with the time and the version when it was made
        self._version = 0

    def on_stepped(self) -> None:
        """Something may have changed."""
        self._version += 1

    def forget(self) -> None:
        """Remake everything at the next request."""
        self._bodies.clear()

    def get(self, name: str, make: Callable[[], object]) -> bytes:
        """The body of `name`, at most 250 ms old, and 50 ms when something has changed."""
        now_s = time.monotonic()
        body, made_s, version = self._bodies.get(name, (b"", float("-inf"), self._version))
        if now_s - made_s < (AGED_S if version == self._version else FRESH_S):
            return body
        body = encode(make())
        self._bodies[name] = (body, now_s, self._version)
        return body


class GpuDetails:
    """The GPUs and tasks of all nodes as their owners tell them."""

    def __init__(self, facts: AgentFacts, peers: Peers, on_news: Callable[[], None]) -> None:
        self._facts, self._peers, self._on_news = facts, peers, on_news
        self._known: dict[NodeId, NodeDetails] = {}
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self.absent: Absent = {}

    async def refresh(self) -> None:
        """Ask again if it is time; wait only when what is known is too old to be shown."""
        age_s = time.monotonic() - self._asked_s
        is_missing = any(name not in self._known for name in self._peers.alive())
        if age_s < (MISSING_S if is_missing else DETAILS_S):
            return
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        if is_missing or age_s > DETAILS_LIMIT_S:
            await asyncio.shield(self._asking)

    def of(self, node: NodeId) -> NodeDetails | None:
        """What the node tells, or None while it has not told."""
        return self.own() if node == self._peers.own_name else self._known.get(node)

    def own(self) -> NodeDetails:
        """GPUs and tasks of this very node."""
        gpus, tasks = self._facts.gpus(), self._facts.tasks()
        return NodeDetails(gpus=list(map(gpu_document, gpus)), tasks=list(map(task_document, tasks)))

    async def on_gpus(self, _: NodeId, __: Document) -> Document:
        """Tell another agent."""
        return as_object(self.own())

    async def _ask(self) -> None:
        try:
            fan_out = await self._peers.ask_all("gpus", {}, LIST_TIMEOUT_S)
            # Of a node that did not answer nothing is shown: stale GPUs must not look idle.
            self._known = fan_out.read(NodeDetails)
            self.absent = fan_out.absent
            self._on_news()
        finally:
            self._asked_s, self._asking = time.monotonic(), None


class Nodes:
    """Handlers of /v1/nodes, /v1/gpus, /v1/members, /v1/queues, /v1/status and /v1/config."""

    def __init__(self, agent: AgentPort, facts: AgentFacts, peers: Peers, job_list: JobList) -> None:
        self._agent, self._facts, self._peers, self._job_list = agent, facts, peers, job_list
        self._cache = BodyCache()
        self._details = GpuDetails(facts, peers, self._cache.forget)
        self.on_stepped, self.on_gpus = self._cache.on_stepped, self._details.on_gpus

    async def list_nodes(self, _: Call) -> HttpReply:
        """GET /v1/nodes."""
        await self._details.refresh()
        return HttpReply(200, self._cache.get("nodes", self._node_list))

    async def get_node(self, call: Call) -> HttpReply:
        """GET /v1/nodes/NODE."""
        await self._details.refresh()
        name = self._facts.named(call.params["node"])
        found = next((each for each in self._node_documents() if each.name == name), None)
        if found is None:
            raise self._unknown_node(name)
        return answer({"api_version": API_VERSION, **asdict(found)})

    async def list_gpus(self, _: Call) -> HttpReply:
        """GET /v1/gpus: devices by name, of the nodes that answer."""
        await self._details.refresh()
        return HttpReply(200, self._cache.get("gpus", self._gpu_list))

    async def list_members(self, _: Call) -> HttpReply:
        """GET /v1/members."""
        return HttpReply(200, self._cache.get("members", self._member_list))

    async def list_targets(self, _: Call) -> HttpReply:
        """GET /v1/members/prometheus: every member that is not known to have left."""
        there = [each for each in self._members() if each.status != MemberStatus.LEFT.value]
        labels = [TargetLabelsDocument(swarm_node=each.name) for each in there]
        return answer([TargetDocument(targets=[of.address], labels=it) for of, it in zip(there, labels, strict=True)])

    async def forget_member(self, call: Call) -> HttpReply:
        """DELETE /v1/members/NODE."""
        name = self._facts.named(call.params["node"])
        if name not in {member.node_id for member in self._facts.members()}:
            raise self._unknown_node(name)
        await commanded(self._agent, ForgetMember(name), Done)
        return answer(ForgottenDocument(node=name))

    async def drain_node(self, call: Call) -> HttpReply:
        """PUT /v1/nodes/NODE/drain: told to that node, whichever agent is asked."""
        name, document = self._facts.named(call.params["node"]), call.json("draining", "reason")
        is_draining, reason = boolean("draining", document.get("draining")), short_text(document.get("reason", ""))
        reason = " ".join(reason.split())
        if self._facts.member(name) is None:
            raise self._unknown_node(name)
        if name != self._peers.own_name:
            return await self._drain_there(name, call)
        await commanded(self._agent, DrainNode(is_draining, reason), Done)
        return answer(DrainedDocument(node=name, is_draining=is_draining, drain_reason=reason if is_draining else ""))

    async def _drain_there(self, name: NodeId, call: Call) -> HttpReply:
        try:
            return await self._peers.forward(name, call)
        except Problem as problem:
            member = self._facts.member(name)
            if member is not None and self._peers.is_gone(name):
                raise _drain_of_gone(member) from None
            remedy = "try again; whether a node drains is shown by `swarm nodes`"
            raise Problem("unavailable", problem.detail, remedy) from None

    async def list_queues(self, _: Call) -> HttpReply:
        """GET /v1/queues."""
        found = await self._job_list.live()
        return answer(QueueListDocument(items=queue_documents(found.jobs), **found.absent))

    async def get_status(self, _: Call) -> HttpReply:
        """GET /v1/status."""
        found = await self._job_list.live()
        submitted = {JobId(job.id): utc_of(job.submitted_at) for job in found.jobs}
        foreseen = await self._agent.foresee(submitted) if submitted else None
        fairness = fairness_document(foreseen, submitted)
        told = {"fairness": fairness, "between_shepherds": found.unclaimed, **found.absent}
        return answer(status_document(self._agent.config.name, self._facts, found.jobs, told))

    async def get_config(self, _: Call) -> HttpReply:
        """GET /v1/config."""
        setting = self._setting()
        return answer(setting, headers={"ETag": _etag(setting)})

    async def put_config(self, call: Call) -> HttpReply:
        """PUT /v1/config; with If-Match only if nobody has changed it since."""
        document, expected = call.json(*SETTING_KEYS), call.headers.get("if-match", "")
        policy, parameters = _policy(document.get("policy")), _parameters(document.get("parameters", {}))
        current = self._setting()
        elasticity = _elasticity(document.get("elasticity", current.elasticity))
        is_restartable = boolean("restartable", document.get("restartable", current.restartable))
        if expected not in ("", "*") and _etag(current) not in [each.strip() for each in expected.split(",")]:
            detail = f"the setting is {current.policy} in version {current.version} now"
            raise Problem("version_conflict", detail, headers={"ETag": _etag(current)})
        setting = PolicySetting(policy, parameters, elasticity, is_restartable)
        reply = await commanded(self._agent, SetSwarmSetting(setting), SettingStored)
        stored = setting_document(reply.setting, reply.version)
        return answer(stored, headers={"ETag": _etag(stored)})

    def _setting(self) -> SettingDocument:
        return setting_document(*self._facts.setting())

    def _node_documents(self) -> list[NodeDocument]:
        known = {status.record.node_id: status for status in self._facts.nodes()}
        now_utc_s, placed = time.time(), self._placed()
        found = [node_document(member, known.get(member.node_id), now_utc_s) for member in self._facts.members()]
        for each in found:
            told = self._details.of(NodeId(each.name))
            if told is None:
                each.jobs = placed.get(each.name)
            else:
                each.gpus, each.tasks = told.gpus, told.tasks
                each.jobs = sorted({gpu.job_id for gpu in told.gpus if gpu.job_id})
        return found

    def _placed(self) -> dict[str, list[str]]:
        """The jobs of each node that says nothing itself, by their records and cards."""
        silent = {each.node_id for each in self._facts.members() if self._details.of(each.node_id) is None}
        if not silent:
            return {}
        shares = {job.job_id: job.card.shares for job in self._facts.cards()}
        shares |= {job_id: () if each.is_ended else each.shares for job_id, each in self._facts.records().items()}
        placed: dict[str, list[str]] = {}
        for job_id, parts in sorted(shares.items()):
            for node in silent.intersection(share.node for share in parts):
                placed.setdefault(node, []).append(job_id)
        return placed

    def _node_list(self) -> NodeListDocument:
        items = self._node_documents()
        age_s = max((each.staleness_seconds or 0.0 for each in items), default=0.0)
        return NodeListDocument(items=items, **aged(time.time(), age_s))

    def _gpu_list(self) -> GpuListDocument:
        told = [self._details.of(member.node_id) for member in self._facts.members()]
        gpus = [gpu for each in told if each for gpu in each.gpus]
        return GpuListDocument(items=gpus, **self._details.absent, **aged(time.time(), 0.0))

    def _member_list(self) -> MemberListDocument:
        return MemberListDocument(items=self._members(), **aged(time.time(), 0.0))

    def _members(self) -> list[MemberDocument]:
        return [member_document(each, self._facts.node(each.node_id)) for each in self._facts.members()]

    def _unknown_node(self, name: str) -> Problem:
        close = near_word(name, [member.node_id for member in self._facts.members()], NODE_CLOSENESS)
        extra = {"nearest": close} if close else {}
        return Problem("unknown_node", f"there is no node {name[:80]!r}", extra=extra)


def _drain_of_gone(member: MemberView) -> Problem:
    """Only the node itself can write down that it drains, and one that is down need not: it is given nothing."""
    how = "has been gone" if member.status is MemberStatus.LEFT else "has been down"
    remedy = "tell it when it is back"
    if member.status is MemberStatus.FAILED:
        remedy += f", or, if it is gone for good: swarm forget {member.node_id}"
    since = f"since {rfc3339(time.time() - member.since_s)} and cannot be told"
    detail = f"{member.node_id} {how} {since}; it takes no work, and its jobs run again elsewhere"
    return Problem("conflict", detail, remedy)


def _etag(setting: SettingDocument) -> str:
    return f'"{setting.version}-{setting.policy}"'


def _policy(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise invalid("/policy", f"{value!r} is not the name of a policy", f"one of {', '.join(POLICIES)}")
    return value


def _elasticity(value: object) -> Elasticity:
    try:
        return Elasticity(value)
    except ValueError:
        remedy = f"one of {', '.join(each.value for each in Elasticity)}"
        raise invalid("/elasticity", f"{value!r} says nothing", remedy) from None


def _parameters(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise invalid("/parameters", "must be an object of names and numbers", 'for example {"queues": 3}')
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise invalid(f"/parameters/{name}", f"{number!r} is not a number", "use a number")
        if abs(number) > PARAMETER_MOST:
            raise invalid(f"/parameters/{name}", "is out of range", f"a number up to {PARAMETER_MOST:g}")
    return {str(name): float(number) for name, number in value.items()}

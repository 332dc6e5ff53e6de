"""Whether a job's ranks are frozen, and what its workers wait for: what the tasks of its nodes tell, for one job and
for lists."""

from collections.abc import Mapping

from swarm_agent.http.exchange import Document, as_object
from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.views import task_document
from swarmsched.ids import JobId, NodeId

Pauses = Mapping[tuple[str, str, int], bool]
"""By node, job and attempt; nothing of those that did not say."""


def tasks_here(facts: AgentFacts, job_id: JobId | None = None) -> list[Document]:
    """The tasks of this node, or those of one job."""
    return [as_object(task_document(each)) for each in facts.tasks() if job_id in (None, each.job_id)]


def pauses(parts: Mapping[NodeId, Document]) -> Pauses:
    """What the `tasks` of nodes say; of several of one job on a node, whether any is paused."""
    found: dict[tuple[str, str, int], bool] = {}
    for node, part in parts.items():
        for task in part.get("tasks", []):
            key = (str(node), str(task["job_id"]), int(task["attempt"]))
            found[key] = found.get(key, False) or bool(task["is_paused"])
    return found


def with_pauses(job: Document, told: Pauses) -> None:
    """Say of each node of a job whether its ranks are frozen, null where it does not say."""
    for share in job.get("nodes") or ():
        share["is_paused"] = told.get((share["node"], job["id"], job.get("attempt", 0)))


def with_problems(job: Document, parts: Mapping[NodeId, Document]) -> None:
    """Say of each worker what its agent knows to be wrong with it, null where that does not say."""
    told = {
        (node, task["job_id"], task["attempt"], task.get("worker")): task.get("problem")
        for node, part in parts.items()
        for task in part.get("tasks", [])
    }
    for worker in (job.get("world") or {}).get("workers", ()):
        worker["problem"] = told.get((worker["node"], job["id"], job["attempt"], worker["worker"]))

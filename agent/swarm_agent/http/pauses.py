"""Whether a job's ranks are frozen, and what its workers wait for: what the tasks of its nodes tell, for one job and
for lists."""

from collections.abc import Iterable, Mapping

from swarm_agent.http.facts import AgentFacts
from swarm_agent.http.views import task_document
from swarmsched.documents import JobDocument, TaskDocument
from swarmsched.ids import JobId, NodeId

Pauses = Mapping[tuple[str, str, int], bool]
"""By node, job and attempt; nothing of those that did not say."""

TasksByNode = Mapping[NodeId, Iterable[TaskDocument]]


def tasks_here(facts: AgentFacts, job_id: JobId | None = None) -> list[TaskDocument]:
    """The tasks of this node, or those of one job."""
    return [task_document(each) for each in facts.tasks() if job_id in (None, each.job_id)]


def pauses(told: TasksByNode) -> Pauses:
    """What the tasks of nodes say; of several of one job on a node, whether any is paused."""
    found: dict[tuple[str, str, int], bool] = {}
    for node, tasks in told.items():
        for task in tasks:
            key = (node, task.job_id, task.attempt)
            found[key] = found.get(key, False) or task.is_paused
    return found


def with_pauses(job: JobDocument, told: Pauses) -> None:
    """Say of each node of a job whether its ranks are frozen, null where it does not say."""
    for share in job.nodes:
        share.is_paused = told.get((share.node, job.id, job.attempt))


def with_problems(job: JobDocument, told: TasksByNode) -> None:
    """Say of each worker what its agent knows to be wrong with it, null where that does not say."""
    problems = {
        (node, each.job_id, each.attempt, each.worker): each.problem for node, tasks in told.items() for each in tasks
    }
    for worker in job.world.workers if job.world else ():
        worker.problem = problems.get((NodeId(worker.node), job.id, job.attempt, worker.worker))

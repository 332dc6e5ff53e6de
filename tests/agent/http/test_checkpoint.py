"""A job's newest checkpoint in its document."""

from swarmsched.api import JobState
from swarmsched.checkpoint import Checkpoint
from swarmsched.ids import NodeId
from tests.agent.http.test_openapi import Checker
from tests.agent.http.testing import a_record

SAVED = Checkpoint("step-5", 2, NodeId("n1"), 1.7e9, 700, "d" * 64, (NodeId("n1"), NodeId("n3")))


async def test_the_newest_checkpoint_is_told_as_promised(n1):
    created = await n1.post("/v1/jobs", {"spec": {"command": ["true"]}}, status=201)
    assert created["checkpoint"] is None
    n1.agent.put(a_record(created["id"], "n1", nodes=(("n1", 1),), state=JobState.RUNNING, checkpoint=SAVED))
    checker = Checker(n1, await n1.get("/openapi.json"))
    await checker.check("GET", "/v1/jobs/{job}", path=f"/v1/jobs/{created['id']}")
    assert (await n1.get(f"/v1/jobs/{created['id']}"))["checkpoint"] == {
        "name": "step-5",
        "attempt": 2,
        "node": "n1",
        "committed_at": "2023-11-14T22:13:20.000Z",
        "size_bytes": 700,
        "copies": ["n1", "n3"],
    }

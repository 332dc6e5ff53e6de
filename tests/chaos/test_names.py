"""Hosts as Debian installs them: each calls itself 127.0.1.1, and ranks of two of them meet all the same."""

import pytest

from tests.agent.testing import wait_until_sync

pytestmark = [pytest.mark.root, pytest.mark.chaos, pytest.mark.torch]

MEET = """
import os, socket, torch, torch.distributed as dist
assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1", "this is not such a host"
dist.init_process_group()  # for processors that is gloo
ones = torch.ones(1)
dist.all_reduce(ones)
print("met", int(ones.item()), flush=True)
dist.destroy_process_group()  # without it, PyTorch's own threads abort one process in six as it exits (PyTorch 2.13)
"""


@pytest.mark.parametrize(
    "per_node", [False, pytest.param(True, marks=pytest.mark.acceptance)], ids=["ranks", "torchrun"]
)
def test_ranks_of_two_nodes_meet_although_each_host_calls_itself_loopback(build_swarm, train_venv, per_node):
    swarm = build_swarm(2, has_debians_hosts=True)
    script = swarm.folder / "meet.py"
    script.write_text(MEET)
    command = ["torchrun", str(script)] if per_node else ["python", str(script)]
    spec = {"command": command, "ranks": 2, "gpus_per_rank": 1, "venv": str(train_venv), "per_node": per_node}
    status, job = swarm["n1"].agent.call("POST", "/v1/jobs", {"spec": spec})
    assert status == 201, job
    swarm.note(job["id"])
    wait_until_sync(lambda: swarm.document(job["id"], "n1")["state"] == "ended", 90, "the job ends")
    done = swarm.document(job["id"], "n1")
    assert (done["end_reason"], len(done["nodes"])) == ("completed", 2), done
    checks = {each["name"]: each for each in swarm["n1"].agent.get("/v1/doctor")["items"]}
    assert checks["host_name"]["status"] == "warning"
    assert "is 127.0.1.1 in /etc/hosts" in checks["host_name"]["detail"]

"""Ranges of a job are hosted by another node where its own gives no room, and soon by none once it is over."""

import re

import pytest

from tests.agent.testing import start_agents, wait_until_sync
from tests.cluster.conftest import converge

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-aggregation")]

ASKS = """
import json, os, socket, time
def ask(known=""):
    told = {"v": 1, "type": "outer", "token": os.environ["SWARM_TASK_TOKEN"], "start": 0, "size": 5_000, "layout": "l"}
    told |= {"learners": ["0"], "quorum": 0, "key": "k", "known": known}
    told["rule"] = {"rate": 1.0, "momentum": 0.0, "is_quantised": True}
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["SWARM_TASK_SOCKET"])
        line.sendall(json.dumps(told).encode() + b"\\n")
        return json.loads(line.makefile().readline())
deadline_s = time.monotonic() + 30
while not (answer := ask()).get("ok") and time.monotonic() < deadline_s:
    time.sleep(0.2)  # the others' records come by and by
host, port = answer["address"].rsplit(":", 1)
socket.create_connection((host, int(port)), 5).close()
print("hosted", answer["fingerprint"], flush=True)
print("then", ask(answer["address"])["fingerprint"], flush=True)
time.sleep(600)
"""


def gauge(agent, name):
    return float(re.search(rf"^{name} (\S+)$", agent.page_of_metrics(), re.MULTILINE).group(1))


def ends_at_host(agent):
    return gauge(agent, "swarm_aggregation_shards") == 0


def test_another_node_hosts_what_the_own_one_has_no_room_for_until_the_job_is_over(shell):
    with start_agents(2, first={"aggregation": False}) as agents:
        first, second = agents
        converge(agents)
        job = first.submit("python3", "-c", ASKS, ranks=1, gpus_per_rank=1, nodes=["n1"])
        wait_until_sync(lambda: "hosted" in first.output(job), what="the range is hosted")
        assert gauge(first, "swarm_aggregation_shards") == 0
        assert gauge(first, "swarm_aggregation_shards_away") == 1
        assert gauge(second, "swarm_aggregation_shards") == 1
        assert gauge(second, "swarm_aggregation_booked_bytes") == 5_000 * 15
        _, out, _ = shell(agents, "nodes", "-o", "wide")
        rows = {line.split()[0]: line for line in out.splitlines()}
        assert "AGGREGATION" in rows["NAME"]
        assert re.search(r"cores, .*/s", rows["n2"])
        assert not re.search(r"cores, .*/s", rows["n1"])
        second.kill()
        second.restart()
        wait_until_sync(lambda: "then" in first.output(job), what="it is hosted by the same node's next agent")
        told = dict(line.split() for line in first.output(job).splitlines())
        assert told["hosted"] != told["then"]
        first.call("POST", f"/v1/jobs/{job['id']}/cancel", {"grace_seconds": 0.5})
        first.ended(job)
        wait_until_sync(lambda: ends_at_host(second), 5.0, "nothing is hosted for a job that is over")

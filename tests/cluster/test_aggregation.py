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


TRAINS = """
import pathlib, sys, time, torch, swarm_elastic
stop = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with swarm_elastic.Outer(model, optimizer, every=5) as outer:
    while not stop.exists():
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
        (stop.parent / f"rounds-{outer.learner}").write_text(str(outer.status["shards"][0]["rounds"]))
print(f"learner {outer.learner}: weight {model.weight[0, 0].item():.9f}", flush=True)
"""


@pytest.mark.acceptance
@pytest.mark.torch
def test_a_shard_of_a_job_that_trains_moves_when_its_host_drains_and_training_goes_on(shell, train_venv):
    (shell.folder / "train.py").write_text(TRAINS)
    (shell.folder / "swarm.toml").write_text("")
    told = shell.home
    words = ("run", "--ranks", "2", "--gpus-per-rank", "1", "--exclude", "n2,n3", "--venv", train_venv)

    def rounds():
        return min((int(each.read_text() or "0") for each in told.glob("rounds-*")), default=0)

    with start_agents(3, first={"aggregation": False}) as agents:
        converge(agents)
        with shell.start(agents, *words, "--", "python", "train.py", told / "stop") as run:
            try:
                wait_until_sync(lambda: rounds() > 3, what="rounds are merged")
                (host,) = (each for each in agents if gauge(each, "swarm_aggregation_shards"))
                (other,) = (each for each in agents[1:] if each is not host)
                assert shell(agents, "drain", host.name)[0] == 0
                wait_until_sync(
                    lambda: gauge(other, "swarm_aggregation_shards") == 1, what="another node has the shard"
                )
                wait_until_sync(lambda: ends_at_host(host), what="the former host has it no more")
                before = rounds()
                wait_until_sync(lambda: rounds() > before + 5, what="rounds go on")
            finally:
                (told / "stop").touch()
            out, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
        weights = re.findall(r"learner (\d): weight (\S+)", out)
        assert {learner for learner, _ in weights} == {"0", "1"}, out
        assert len({weight for _, weight in weights}) == 1

"""Training that reports, on real agents: whoever is asked tells how far it is, and nothing that is sent hurts."""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from swarmsched.gossip.card_desk import RUNNING_DELAY_S
from tests.agent.testing import start_agents, wait_until_sync
from tests.cluster.conftest import converge

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-reports")]

TRAIN = """
import sys, time
import swarm_elastic
for step in range(int(sys.argv[1]), 100_000):
    swarm_elastic.report(step=step, samples=step * 64, loss=1 / (step + 1), total_steps=100_000)
    time.sleep(0.01)
"""

# The last stage of a pipeline alone knows the loss; it also says that it is far behind, which does not count.
GANG = """
import os, time
import swarm_elastic
for step in range(100_000):
    if os.environ["RANK"] == "0":
        swarm_elastic.report(step=1_000 + step, total_steps=200_000)
    else:
        swarm_elastic.report(step=step, loss=2.5)
    time.sleep(0.01)
"""

# The first lines are what a script may get wrong, the last what it then does well.
HOSTILE = """
import json, os, socket
def send(*lines):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["SWARM_TASK_SOCKET"])
        connection.sendall(b"".join(lines))
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read().splitlines()
def report(**more):
    return json.dumps({"v": 1, "type": "report", "token": os.environ["SWARM_TASK_TOKEN"], **more}).encode() + b"\\n"
send(b"nonsense\\n")
send(report(step=float("nan")), report(step=-1), report(step="3"), report(step=10**300), report(rank=[]), report())
for line in send(report(step=7, loss=float("inf")), report(step=7), report(step=5), report(step=6, total_steps=12)):
    print(json.loads(line)["ok"], flush=True)
print({json.loads(line).get("error") for line in send(*[report(step=7)] * 250)} == {None, "too_many"}, flush=True)
import time; time.sleep(600)
"""

SHELL = """
swarm report step=5 total_steps=10 loss=0.5; echo "taken $?"
swarm report loss=nan step=6; echo "partly $?"
swarm report stpe=6; echo "misspelt $?"
sleep 600
"""


def start(agent, *command, **spec):
    return agent.submit(*command, **spec, grace_seconds=0.0)


def progress(agent, job):
    return agent.get(f"/v1/jobs/{job['id']}")["progress"]


def wait_for(agent, job, predicate, what):
    wait_until_sync(lambda: predicate(progress(agent, job) or {}), what=what)
    return progress(agent, job)


def cancel(agent, job):
    agent.call("POST", f"/v1/jobs/{job['id']}/cancel")
    agent.ended(job)


def test_training_on_one_node_is_followed_from_every_other_and_in_tables(swarm, shell):
    job = start(swarm[0], sys.executable, "-c", TRAIN, "0", nodes=["n2"], name="reporting")
    for agent in swarm:
        seen = wait_for(agent, job, lambda each: each.get("remaining_seconds_high"), "an interval is told")
        assert (seen["source"], seen["rank"], seen["total_steps"], seen["oddities"]) == ("steps", 0, 100_000, {})
        assert seen["ratio"] == seen["step"] / 100_000
        assert seen["remaining_seconds_low"] <= seen["remaining_seconds"] <= seen["remaining_seconds_high"]
        assert seen["step_seconds"] > 0.01
        assert seen["samples_per_second"] == pytest.approx(64 / seen["step_seconds"], rel=0.2)
    code, out, _ = shell(swarm[2:], "ps", "--name", "reporting", "--format", "{{progress.source}}")
    assert (code, out) == (0, "steps\n")
    out = shell(swarm[2:], "ps", "--name", "reporting")[1]
    assert out.splitlines()[0].split()[-3:-1] == ["PROGRESS", "ETA"]
    out = shell(swarm[:1], "status", job["id"])[1]
    assert ("by the declared steps" in out, " of 100000, loss " in out, " samples/s" in out) == (True, True, True)
    cancel(swarm[0], job)
    assert progress(swarm[0], job) is None


def test_ranks_of_two_nodes_are_told_as_one(swarm):
    job = start(swarm[0], sys.executable, "-c", GANG, ranks=2, gpus_per_rank=2, nodes=["n2", "n3"])
    for agent in swarm:
        seen = wait_for(agent, job, lambda each: each.get("loss") and each.get("total_steps"), "both have reported")
        assert (seen["rank"], seen["loss"], seen["total_steps"]) == (0, 2.5, 200_000)
        assert seen["step"] >= 1_000
    cancel(swarm[0], job)


def test_nothing_that_a_script_sends_hurts_and_all_of_it_is_named(swarm):
    job = start(swarm[0], sys.executable, "-c", HOSTILE, nodes=["n2"])
    wait_until_sync(lambda: len(swarm[0].output(job).splitlines()) == 5, what="all was sent")
    assert swarm[0].output(job).splitlines() == ["True"] * 5
    seen = progress(swarm[0], job)
    odd = seen["oddities"]
    assert (seen["step"], seen["total_steps"], seen["loss"]) == (7, 12, None)
    assert {kind: odd[kind] for kind in ("bad_type", "not_finite", "out_of_range", "backward")} == {
        "bad_type": 1,
        "not_finite": 2,
        "out_of_range": 3,
        "backward": 1,
    }
    assert (odd["frozen"] > 50, odd["too_many"] > 0) == (True, True)
    assert "more than 100 reports in a second" in seen["problem"]
    cancel(swarm[0], job)


def test_a_shell_script_reports_and_its_job_runs_on_whatever_it_says(swarm):
    job = start(swarm[0], "sh", "-c", SHELL, nodes=["n3"])
    wait_until_sync(lambda: "misspelt" in swarm[0].output(job), what="the script has reported")
    assert swarm[0].output(job).splitlines() == ["taken 0", "partly 1", "misspelt 2"]
    err = swarm[0].output(job, "stderr")
    assert "swarm: left out of the report: loss nan is not finite\n" in err
    assert "swarm: there is no figure 'stpe'; did you mean step?\n" in err
    seen = progress(swarm[1], job)
    assert (seen["step"], seen["ratio"], seen["loss"]) == (6, 0.6, 0.5)
    cancel(swarm[0], job)


def test_a_script_that_says_nothing_is_told_by_its_time_limit(swarm):
    job = start(swarm[0], "sleep", "600", time_limit_seconds=3_600.0)
    seen = wait_for(swarm[1], job, lambda each: each.get("ratio"), "the time limit tells")
    assert (seen["source"], seen["step"], seen["reported_at"]) == ("time_limit", None, None)
    assert 3_000 < seen["remaining_seconds"] < 3_600
    cancel(swarm[0], job)


def test_an_agent_that_was_restarted_hears_the_whole_story_again(fresh_swarm):
    """Reports are kept in memory alone; the next one tells the declared total as well.

    Where the restart takes so long that the job is run again meanwhile, it is the next attempt that tells.
    """
    asked, owner = fresh_swarm[0], fresh_swarm[1]
    job = start(asked, sys.executable, "-c", TRAIN, "500", nodes=["n2"])
    before = wait_for(asked, job, lambda each: each.get("ratio"), "it reports")
    owner.kill()
    owner.restart()
    again = wait_for(asked, job, lambda each: (each.get("step") or 0) > before["step"], "it reports again")
    assert again["total_steps"] == 100_000
    wait_for(asked, job, lambda each: each.get("source") == "steps", "its pace is known again")


@pytest.mark.acceptance
def test_what_one_job_reports_of_its_model_takes_the_next_of_its_kind_to_the_faster_gpus():
    """The fewest nodes with the least left over are the slow ones; nobody has said what the job computes."""
    slow, fast = ({"simulated_gpus": 2, "simulated_gpu_model": "Tesla T4"}, {"simulated_gpu_model": "NVIDIA A100"})
    trains = """
i=0
while [ $i -lt 400 ] && [ ! -e "$DONE" ]; do
  i=$((i + 1)); swarm report step=$i global_batch=64 parameter_bytes=1000000
done
"""
    with start_agents(2, gpus=3, settings=fast, first=slow) as agents, TemporaryDirectory() as folder:
        converge(agents)
        asked = {"ranks": 2, "gpus_per_rank": 1, "env": {"DONE": f"{folder}/done"}}
        first = agents[0].submit("sh", "-c", trains, name="a-model", **asked)

        def told():
            return str(agents[0].get(f"/v1/jobs/{first['id']}/why"))

        wait_until_sync(lambda: "samples/s there by its model" in told(), 30.0, "its steps are measured")
        (where,) = agents[0].get(f"/v1/jobs/{first['id']}")["nodes"]
        assert where["node"] == "n1"
        time.sleep(RUNNING_DELAY_S + 2.0)  # a job that is over by then is nobody's news
        Path(folder, "done").touch()
        assert agents[0].ended(first)["end_reason"] == "completed"
        second = agents[0].ended(agents[0].submit("true", name="a-model", **asked))
        assert [each["node"] for each in second["nodes"]] == ["n2"]
        other = agents[0].ended(agents[0].submit("true", name="another", **asked))
        assert [each["node"] for each in other["nodes"]] == ["n1"]

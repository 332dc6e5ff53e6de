"""Elastic jobs on real agents: they grow, shrink, move and lose workers and agents while they train."""

import json
import os
import re
import signal

import pytest

from tests.agent.testing import start_agents
from tests.cluster.conftest import converge
from tests.cluster.elastic_job import APART, STEPS, ElasticJob

pytestmark = [pytest.mark.cluster, pytest.mark.torch]


@pytest.fixture
def cold_swarm():
    """Three agents without processes that wait with torch imported: these cost more than the workers of a test."""
    with start_agents(3, settings={"warm_workers": 0}) as agents:
        converge(agents)
        yield agents


rarely = pytest.mark.acceptance  # others show the same, or most of it


def test_a_job_grows_and_shrinks_as_it_is_told_to_in_one_attempt(fresh_swarm, train_venv):
    job = ElasticJob(fresh_swarm, train_venv)
    job.trains_with(2)
    for ranks in (4, 1):
        fresh_swarm[1].call("POST", f"/v1/jobs/{job.id}/scale", {"ranks": ranks})
        job.trains_with(ranks)
    done = job.ended()
    assert (done["end_reason"], done["exit_code"], done["attempt"], done["restarts"]) == ("completed", 0, 1, 0)
    assert f"done {STEPS} loss" in job.output
    changes = [(each["ranks_before"], each["ranks_after"]) for each in done["rescalings"]]
    assert changes == [(2, 4), (4, 1)], json.dumps(done["rescalings"])
    pauses_s = [each["pause_seconds"] or 0.0 for each in done["rescalings"]]
    assert 0.0 < pauses_s[0] < 5.0
    assert pauses_s[1] < 5.0, "whoever is left alone has next to none"
    assert sum(agent.counted("swarm_rescale_pause_seconds_count") for agent in fresh_swarm) == 2


@rarely
def test_a_newcomer_beside_a_worker_starts_warm(fresh_swarm, train_venv):
    job = ElasticJob(fresh_swarm, train_venv, ranks=3, nodes=["n1", "n2"])
    job.trains_with(3)
    lone = next(node["node"] for node in job.now["nodes"] if node["ranks"] == 1)
    agent = next(agent for agent in fresh_swarm if agent.name == lone)
    job.until(lambda: agent.counted("swarm_warm_workers") == 1, f"a process waits on {lone}")
    fresh_swarm[2].call("POST", f"/v1/jobs/{job.id}/scale", {"ranks": 4})
    job.trains_with(4)
    assert agent.counted("swarm_warm_workers") == 0, "it was used"
    job.until(lambda: agent.counted("swarm_warm_workers") == 1, "the next one waits")
    done = job.ended()
    assert (done["end_reason"], done["attempt"], done["rescalings"][0]["ranks_after"]) == ("completed", 1, 4)


@rarely
def test_a_job_that_has_all_gpus_gives_some_to_the_next_in_line(fresh_swarm, train_venv):
    job = ElasticJob(fresh_swarm, train_venv, ranks=1, ranks_most=6)
    job.trains_with(6)
    other = fresh_swarm[2].submit("true", ranks=3, gpus_per_rank=1)
    assert fresh_swarm[2].ended(other)["end_reason"] == "completed"
    done = job.ended()
    assert (done["end_reason"], done["attempt"]) == ("completed", 1)
    assert [each["ranks_before"] for each in done["rescalings"]][:1] == [6]
    assert "makes room for" in done["rescalings"][0]["reason"]


def test_a_job_survives_a_killed_worker_and_the_agent_that_shepherds_it(cold_swarm, train_venv):
    job = ElasticJob(cold_swarm, train_venv, ranks=3)
    job.trains_with(3)
    os.kill(job.workers[1], signal.SIGKILL)
    # Not only has another one come for it: it trains, and may be the only one that is not on the shepherd's node.
    job.until(lambda: [each["ranks_after"] for each in job.now["rescalings"]] == [2, 3], "another one came for it")
    shepherd = next(agent for agent in cold_swarm if agent.name == job.now["shepherd"])
    shepherd.kill()
    job.until(lambda: job.now["shepherd"] != shepherd.name, "another agent shepherds it")
    done = job.ended()
    assert (done["end_reason"], done["attempt"], done["restarts"]) == ("completed", 1, 0)
    assert "worker 1 on" in done["rescalings"][0]["reason"]


def _end_alike(job):
    job.until(
        lambda: [each["rounds"] > 0 for each in job.now["progress"]["learners"] or ()] == [True, True], "all merge"
    )
    done = job.ended()
    assert (done["end_reason"], done["attempt"], done["restarts"]) == ("completed", 1, 0), json.dumps(done)
    ends = re.findall(r"done with (.*)", job.output)
    assert len(ends) == 2, job.output
    assert ends[0] == ends[1]


def test_learners_that_train_apart_come_and_leave_and_end_alike(fresh_swarm, train_venv):
    job = ElasticJob(fresh_swarm, train_venv, text=APART, outer="on")
    job.trains_with(2)
    for ranks in (3, 1, 2):
        fresh_swarm[1].call("POST", f"/v1/jobs/{job.id}/scale", {"ranks": ranks})
        job.trains_with(ranks)
    # The newcomer has the weights.
    job.until(lambda: job.now["rescalings"][-1]["pause_seconds"] is not None, "all train")
    _end_alike(job)


@rarely
def test_a_learner_that_dies_is_replaced_while_the_other_trains_apart(fresh_swarm, train_venv):
    job = ElasticJob(fresh_swarm, train_venv, text=APART, outer="on")
    job.trains_with(2)
    os.kill(job.workers[1], signal.SIGKILL)
    job.until(lambda: len(job.now.get("rescalings") or ()) == 2, "another one came for it")
    job.trains_with(2)
    _end_alike(job)


def _first_of_three_is_replaced(job, reason):
    job.until(lambda: 1 in job.now["world"]["lost"], "the others go on without it")
    changed = next(each["reason"] for each in job.now["rescalings"] if reason in each["reason"])
    job.until(lambda: 1 not in job.workers, "it was ended")
    job.trains_with(3)
    done = job.ended()
    assert (done["end_reason"], done["attempt"], done["restarts"]) == ("completed", 1, 0)
    assert "worker 1 on" in changed


@rarely
def test_a_worker_that_is_stopped_is_replaced_be_it_the_first(fresh_swarm, train_venv):
    job = ElasticJob(fresh_swarm, train_venv, epochs=100, ranks=3, grace_seconds=2.0)
    job.trains_with(3)
    first = job.workers[1]
    os.kill(first, signal.SIGSTOP)
    _first_of_three_is_replaced(job, "stands still")


@rarely
def test_a_worker_that_hangs_is_replaced_once_the_wait_of_the_others_has_timed_out(fresh_swarm, train_venv):
    job = ElasticJob(fresh_swarm, train_venv, epochs=100, ranks=3, grace_seconds=2.0, env={"HANGING_WORKER": "1"})
    job.trains_with(3)
    job.until(lambda: any(each["problem"] for each in job.now["world"]["workers"]), "it is told that others wait")
    _first_of_three_is_replaced(job, "does not come to its step")


@rarely
def test_a_drained_node_is_left_while_the_job_trains(cold_swarm, train_venv):
    job = ElasticJob(cold_swarm, train_venv, ranks=2)
    job.trains_with(2)
    home = {node["node"] for node in job.now["nodes"]}
    node = min(home)
    cold_swarm[0].call("PUT", f"/v1/nodes/{node}/drain", {"draining": True, "reason": "new disks"})
    job.until(lambda: node not in {each["node"] for each in job.now["nodes"]}, f"nothing of it is left on {node}")
    done = job.ended()
    assert (done["end_reason"], done["attempt"]) == ("completed", 1)
    assert done["rescalings"][0]["reason"] == f"drained: {node}"


@rarely
def test_a_worker_that_holds_the_others_up_is_replaced(cold_swarm, train_venv):
    job = ElasticJob(cold_swarm, train_venv, env={"SLOW_WORKER": "2"}, ranks=3)
    job.trains_with(3)
    job.until(lambda: 2 not in [each["worker"] for each in job.now["world"]["workers"]], "worker 2 has left")
    job.trains_with(3)
    done = job.ended()
    assert (done["end_reason"], done["attempt"]) == ("completed", 1)
    assert "worker 2 on" in done["rescalings"][0]["reason"]
    assert "times the median of a step" in done["rescalings"][0]["reason"]


def test_a_gpu_with_an_error_is_left_while_the_job_trains_and_given_to_nobody(nvml, train_venv):
    with start_agents(1, 0, {"warm_workers": 0}) as agents:
        converge(agents)
        job = ElasticJob(agents, train_venv)
        job.trains_with(2)
        (bad, *_) = [gpu["index"] for gpu in gpus_of(agents[0]) if gpu["job_id"] == job.id]
        nvml.xid(bad, 48)
        job.until(lambda: job.now["rescalings"] and job.now["rescalings"][0]["ranks_after"], "the job has left the GPU")
        job.until(lambda: not gpus_of(agents[0])[bad]["job_id"], "its worker has ended")
        other = agents[0].submit("true", gpus_per_rank=1)
        assert agents[0].ended(other)["end_reason"] == "completed"
        three = agents[0].submit("true", ranks=3, gpus_per_rank=1)
        four = agents[0].submit("true", ranks=4, gpus_per_rank=1)
        done = job.ended()
        assert (done["end_reason"], done["attempt"], done["restarts"]) == ("completed", 1, 0)
        assert "failed GPU of 1 worker" in done["rescalings"][0]["reason"]
        assert agents[0].ended(three)["end_reason"] == "completed"
        assert agents[0].get(f"/v1/jobs/{four['id']}")["state"] == "queued"
        gpu = gpus_of(agents[0])[bad]
        assert (gpu["health"], gpu["note"]) == ("unhealthy", "XID 48: double-bit ECC error")


def gpus_of(agent):
    return agent.get(f"/v1/nodes/{agent.name}")["gpus"]


@rarely
def test_elastic_workers_change_while_a_server_of_theirs_runs_on_and_ends_with_them(fresh_swarm, train_venv):
    server = "echo serves; trap 'exit 7' TERM; while :; do sleep 0.1; done"
    groups = [{"name": "server", "command": ["sh", "-c", server], "gpus_per_rank": 1}]
    job = ElasticJob(fresh_swarm, train_venv, ranks=2, group="worker", groups=groups)
    job.trains_with(2)
    where = job.now["groups"][1]["nodes"]
    for ranks in (4, 1, 3):
        fresh_swarm[1].call("POST", f"/v1/jobs/{job.id}/scale", {"ranks": ranks})
        job.trains_with(ranks)
        assert job.now["groups"][1]["nodes"] == where
        assert job.now["groups"][0]["world_size"] == ranks
    done = job.ended()
    assert (done["end_reason"], done["exit_code"], done["attempt"], done["restarts"]) == ("completed", 0, 1, 0)
    assert (done["rescalings"][0]["ranks_after"], done["rescalings"][-1]["ranks_after"]) == (4, 3)
    assert job.output.count("serves") == 1

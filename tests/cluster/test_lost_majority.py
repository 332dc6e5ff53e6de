"""What people are told of a job that has lost most of its holders, wherever they ask, and of one that they cancel."""

import time

import pytest

from tests.agent.testing import start_agents, wait_until_sync

pytestmark = [pytest.mark.cluster]


def statuses(agent):
    return {each["name"]: each["status"] for each in agent.get("/v1/members")["items"]}


def test_any_agent_tells_of_a_lost_majority_and_of_the_remedy(shell):
    with start_agents(5, gpus=1) as agents:
        wait_until_sync(lambda: all(list(statuses(each).values()).count("alive") == 5 for each in agents))
        job = agents[0].submit("sleep", "600", ranks=2, gpus_per_rank=1)
        path, handle = f"/v1/jobs/{job['id']}", job["handle"]
        wait_until_sync(lambda: agents[0].get(path)["state"] == "running")
        holders = agents[0].get(path)["holders"]
        lost, last = holders[:2], next(each for each in agents if each.name == holders[2])
        for each in agents:
            if each.name in lost:
                each.kill()
        living = [each for each in agents if each.name not in lost]
        strangers = [each for each in living if each is not last]
        wait_until_sync(lambda: all(statuses(each)[name] == "failed" for each in living for name in lost))
        for each in living:
            document = each.get(path)
            assert (document["source"], document["holders"]) == ("record", holders)
            assert (document["has_majority"], document["survives_deaths"]) == (False, 0)
        code, _, err = shell(strangers, "recover", handle)
        assert (code, f"job {handle} is kept by {lost[0]} (failed)" in err) == (2, True), err
        started_s = time.monotonic()
        code, _, err = shell([*strangers, *agents], "cancel", handle)
        assert time.monotonic() - started_s < 30.0  # 25 s and the start of the command on a busy machine
        assert (code, "no majority of the holders" in err, ", ".join(lost) in err) == (125, True, True), err
        assert f"swarm recover {handle} --force" in err
        assert shell(strangers, "recover", handle, "--force")[0] == 0
        assert shell(strangers, "cancel", handle, "--grace", "1s")[0] == 0
        assert strangers[0].ended(job)["end_reason"] == "cancelled"


def test_a_queued_job_was_cancelled_and_has_not_ended_before(shell):
    with start_agents(1, gpus=1) as (agent,):
        wait_until_sync(lambda: list(statuses(agent).values()) == ["alive"])
        runs = agent.submit("sleep", "600", ranks=1, gpus_per_rank=1)
        wait_until_sync(lambda: agent.get(f"/v1/jobs/{runs['id']}")["state"] == "running")
        waits = agent.submit("true", ranks=1, gpus_per_rank=1)
        assert shell([agent], "cancel", waits["handle"])[1:] == (f"{waits['handle']}\n", "")
        assert "had ended before (cancelled)" in shell([agent], "cancel", waits["handle"])[2]
        code, _, err = shell([agent], "recover", waits["handle"], "--force")
        assert (code, "there is nothing to recover\n  nothing needs to be done" in err) == (5, True), err

"""Jobs on a real swarm: three agent processes, real UDP and HTTP, real shims and processes."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.agent.testing import start_agents, wait_until_sync

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-jobs")]


def descendants(marker):
    """Pids of processes whose command line contains the marker."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if marker.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return [pid for pid in found if pid != os.getpid()]


def test_gang_that_fits_on_no_single_node_spans_nodes_and_finds_itself(swarm):
    job = swarm[0].submit("sh", "-c", "echo $RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT", ranks=4, gpus_per_rank=1)
    done = swarm[1].ended(job)
    assert (done["end_reason"], done["exit_code"]) == ("completed", 0)
    assert len({node["node"] for node in done["nodes"]}) >= 2
    lines = swarm[2].output(job).splitlines()
    assert sorted(line.split()[0] for line in lines) == ["0/4", "1/4", "2/4", "3/4"]
    assert len({line.split()[1] for line in lines}) == 1


def test_exit_code_is_that_of_the_first_failing_rank(swarm):
    script = 'if [ "$RANK" = 1 ]; then exit 7; else sleep 60; fi'
    job = swarm[1].submit("sh", "-c", script, ranks=3, gpus_per_rank=1)
    done = swarm[0].ended(job)
    assert (done["end_reason"], done["shell_exit_code"], done["failed_rank"]) == ("failed", 7, 1)


def test_a_job_runs_where_the_labels_are_that_it_requires_and_is_refused_where_there_are_none():
    with start_agents(1, settings={"labels": ["nvlink", "disk=nvme"]}) as (agent,):
        wait_until_sync(lambda: agent.get("/v1/nodes")["items"][0]["labels"])
        assert {"nvlink", "disk=nvme"} <= set(agent.get("/v1/nodes")["items"][0]["labels"])
        assert agent.ended(agent.submit("true", require=["nvlink", "disk"]))["exit_code"] == 0
        status, refused = agent.call("POST", "/v1/jobs", {"spec": {"command": ["true"], "require": ["disk=hdd"]}})
        assert (status, refused["code"]) == (422, "impossible_request")
        assert "0 nodes with disk=hdd (labels that are known: disk=nvme" in refused["detail"]


def test_groups_of_a_job_run_together_know_of_one_another_and_end_with_the_first(swarm):
    worker = "echo w$RANK of $SWARM_GROUPS meets $SWARM_GROUP_SERVER_HOST:$SWARM_GROUP_SERVER_PORT; sleep 1"
    server = "echo s$RANK/$WORLD_SIZE $OWN $MASTER_ADDR:$MASTER_PORT; trap 'echo bye; exit 9' TERM; sleep 60 & wait"
    groups = [{"name": "server", "command": ["sh", "-c", server], "ranks": 2, "env": {"OWN": "its"}}]
    asked = {"ranks": 3, "gpus_per_rank": 1, "group": "worker", "groups": groups}
    job = swarm[0].submit("sh", "-c", worker, **asked)
    done = swarm[1].ended(job)
    assert (done["end_reason"], done["exit_code"], done["detail"]) == ("completed", 0, "group worker has ended")
    assert [(each["name"], each["world_size"]) for each in done["groups"]] == [("worker", 3), ("server", 2)]
    path = f"/v1/jobs/{job['id']}/logs?stream=stdout"
    of_server = swarm[2].records(f"{path}&group=server")
    assert {(each["group"], each["rank"]) for each in of_server} == {("server", 0), ("server", 1)}
    words = [each["text"].split() for each in of_server]
    assert sorted(line[0] for line in words if line[0] != "bye") == ["s0/2", "s1/2"]
    assert ["bye"] in words
    meeting = next(line[2] for line in words if line[0] == "s0/2")
    of_workers = swarm[2].records(f"{path}&rank=0,1,worker.2")
    assert {each["rank"] for each in of_workers} == {0, 1, 2}
    assert {each["text"].split(" ", 1)[1] for each in of_workers} == {f"of worker,server meets {meeting}\n"}
    assert swarm[0].call("GET", f"{path}&group=none")[1]["detail"] == "group: the job has no group 'none'"


def test_a_rank_of_any_group_that_fails_ends_the_job_by_its_name_also_after_an_agents_restart():
    with start_agents(1) as (agent,):
        groups = [{"name": "server", "command": ["sh", "-c", "sleep 3; exit 6"]}]
        job = agent.submit("sleep", "60", group="worker", groups=groups)
        wait_until_sync(lambda: agent.get(f"/v1/jobs/{job['id']}")["state"] == "running")
        agent.kill()
        agent.restart()
        done = agent.ended(job)
    assert (done["shell_exit_code"], done["failed_group"], done["failed_rank"]) == (6, "server", 0)
    assert done["detail"] == f"rank server.0 on {agent.name} exited with 6"


def test_command_that_does_not_exist_gives_127(swarm):
    done = swarm[0].ended(swarm[0].submit("no-such-command-anywhere"))
    assert done["shell_exit_code"] == 127


def test_job_that_ignores_sigterm_is_killed_after_its_grace(swarm):
    job = swarm[0].submit("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    wait_until_sync(lambda: "ready" in swarm[0].output(job))
    status, _ = swarm[2].call("POST", f"/v1/jobs/{job['id']}/cancel", {"grace_seconds": 0.5})
    assert status == 202
    done = swarm[0].ended(job)
    assert (done["end_reason"], done["shell_exit_code"]) == ("cancelled", 137)


def test_daemons_that_a_job_forks_do_not_survive_it(swarm):
    marker = "314159.2653"
    script = f"(setsid sleep {marker} &) ; (setsid setsid sleep {marker} & ) ; echo forked"
    done = swarm[0].ended(swarm[0].submit("sh", "-c", script))
    assert done["exit_code"] == 0
    wait_until_sync(lambda: not descendants(f"sleep\0{marker}"))


def test_hundred_megabytes_of_output_are_kept_within_the_limit(swarm):
    script = "import sys\nfor i in range(100): sys.stdout.write('x' * 1048575 + '\\n')"
    job = swarm[0].submit(sys.executable, "-c", script)
    done = swarm[0].ended(job, 120)
    assert done["exit_code"] == 0
    logs = [agent.data_dir / "logs" for agent in swarm]
    kept = sum(path.stat().st_size for folder in logs for path in folder.rglob("*") if path.is_file())
    assert kept < 80 * 2**20


def test_output_without_a_newline_is_seen_while_the_job_runs(swarm):
    job = swarm[0].submit("sh", "-c", "printf waiting; sleep 30")
    wait_until_sync(lambda: swarm[1].output(job) == "waiting")
    swarm[0].call("DELETE", f"/v1/jobs/{job['id']}")
    assert swarm[0].ended(job)["end_reason"] == "cancelled"


def test_time_limit_ends_a_job_with_124(swarm):
    done = swarm[0].ended(swarm[0].submit("sleep", "30", time_limit_seconds=0.5))
    assert (done["end_reason"], done["shell_exit_code"]) == ("timeout", 124)


def test_signal_reaches_every_rank(swarm):
    # One rank's end terminates the others, which must not keep them from telling what they got.
    script = "trap '' TERM; trap 'echo got INT; exit 5' INT; echo ready; while :; do sleep 0.05; done"
    job = swarm[0].submit("bash", "-c", script, ranks=3, gpus_per_rank=1)
    wait_until_sync(lambda: swarm[1].output(job).count("ready") == 3)
    status, _ = swarm[1].call("POST", f"/v1/jobs/{job['id']}/signal", {"signal": int(signal.SIGINT)})
    assert status == 202
    assert swarm[0].ended(job)["shell_exit_code"] == 5
    assert swarm[2].output(job).count("got INT") == 3


def test_more_gpus_than_the_swarm_ever_had_is_refused_with_the_numbers(swarm):
    status, problem = swarm[0].call("POST", "/v1/jobs", {"spec": {"command": ["true"], "ranks": 7, "gpus_per_rank": 1}})
    assert status == 422
    assert "7 GPUs" in problem["detail"]
    assert "6 GPUs" in problem["detail"]


def test_more_gpus_than_are_free_waits_with_a_reason_and_runs_later(swarm):
    holder = swarm[0].submit("sleep", "60", ranks=5, gpus_per_rank=1)
    wait_until_sync(lambda: swarm[0].get(f"/v1/jobs/{holder['id']}")["state"] == "running")
    waiting = swarm[1].submit("true", ranks=3, gpus_per_rank=1)
    wait_until_sync(lambda: re.search(r"needs 3 GPUs", swarm[2].get(f"/v1/jobs/{waiting['id']}")["reason"]))
    # The shepherd hears of the other nodes' bookings by gossip, so its figure is right a moment later.
    wait_until_sync(lambda: swarm[2].get(f"/v1/jobs/{waiting['id']}/why")["free"]["gpus"] == 1, what="one GPU is free")
    swarm[0].call("DELETE", f"/v1/jobs/{holder['id']}")
    assert swarm[1].ended(waiting)["end_reason"] == "completed"


def test_same_ticket_at_another_agent_makes_one_job(swarm):
    _, ticket = swarm[0].call("POST", "/v1/tickets", {})
    body = {"ticket": {key: ticket[key] for key in ("job_id", "holders", "stores")}, "spec": {"command": ["true"]}}
    first, made = swarm[0].call("POST", "/v1/jobs", body)
    second, again = swarm[1].call("POST", "/v1/jobs", body)
    assert (first, second) == (201, 200)
    assert made["id"] == again["id"] == ticket["job_id"]
    jobs = [job for job in swarm[2].get("/v1/jobs?all=true")["items"] if job["id"] == made["id"]]
    assert len(jobs) == 1


def test_secrets_and_the_agents_own_environment_do_not_reach_a_job(swarm):
    job = swarm[0].submit("env")
    swarm[0].ended(job)
    text = swarm[0].output(job)
    assert "SWARM_JOB_ID=" in text
    assert swarm[0].token not in text
    assert "SWARM_TOKEN" not in text
    assert "KEY" not in text


def test_a_burst_of_short_jobs_all_completes(swarm):
    jobs = [swarm[index % 3].submit("true", ranks=1, gpus_per_rank=1) for index in range(60)]
    reasons = {swarm[0].ended(job, 120)["end_reason"] for job in jobs}
    assert reasons == {"completed"}


def test_an_input_group_loads_samples_for_the_ranks_that_train(swarm):
    serves = "import os, swarm_elastic; swarm_elastic.serve([(n, os.environ['SWARM_RANK']) for n in range(300)])"
    trains = """
import swarm_elastic, time
data = swarm_elastic.served(list(range(300)))
until_s = time.monotonic() + 30
while len({who for _, who in data.__getitems__(range(300))}) < 2 and time.monotonic() < until_s:
    data._looked_s = 0.0
    time.sleep(0.1)
print(sum(n for n, _ in data.__getitems__(range(300))), sorted({who for _, who in data.__getitems__(range(300))}))
"""
    groups = [{"name": "input", "command": [sys.executable, "-c", serves], "ranks": 2}]
    job = swarm[0].submit(sys.executable, "-c", trains, ranks=2, group="worker", groups=groups)
    done = swarm[1].ended(job)
    assert (done["end_reason"], done["exit_code"]) == ("completed", 0), swarm[0].output(job, "stderr")
    assert swarm[2].output(job).splitlines() == ["44850 ['0', '1']"] * 2


def test_a_script_that_does_not_train_apart_as_asked_is_told_so(swarm):
    """In its log, where `swarm run` shows it; one that fails has told something better."""
    jobs = {word: swarm[0].submit(word, outer="every=64") for word in ("true", "false")}
    said = {word: swarm[1].output(job, "system") for word, job in jobs.items() if swarm[0].ended(job)}
    assert said == {
        "true": "swarm: --outer did nothing: the script never entered swarm_elastic.Outer, so nothing was merged\n",
        "false": "",
    }

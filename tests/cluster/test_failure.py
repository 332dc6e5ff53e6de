"""What happens when agents die, stand still, come back, or are told nonsense."""

import os
import re
import signal
import subprocess
import sys

import pytest

from swarm_agent.security import generate_key
from tests.agent.testing import free_port, start_agents, wait_until_sync

pytestmark = [pytest.mark.cluster]


def are_alive(agent):
    return [each["status"] for each in agent.get("/v1/members")["items"]] == ["alive"] * 3


def member(agent, name):
    return next(each for each in agent.get("/v1/members")["items"] if each["name"] == name)


def test_killed_agent_finds_its_tasks_their_output_and_their_exit_code(fresh_swarm, tmp_path):
    """The whole gang runs on the agent that is killed, which is also the job's shepherd and holder."""
    agent = fresh_swarm[0]
    gate = tmp_path / "gate"
    script = f"echo before; while [ ! -e {gate} ]; do sleep 0.1; done; echo after; exit 9"
    job = agent.submit("sh", "-c", script, ranks=2, gpus_per_rank=1, nodes=["n1"])
    wait_until_sync(lambda: agent.output(job).count("before") == 2)
    agent.kill()
    agent.restart()
    gate.touch()
    done = agent.ended(job)
    assert (done["end_reason"], done["shell_exit_code"], done["attempt"]) == ("failed", 9, 1)
    assert agent.output(job).count("after") >= 1


def test_job_that_ends_while_its_agent_is_down_is_told_when_it_returns(fresh_swarm, tmp_path):
    agent = fresh_swarm[0]
    gate = tmp_path / "gate"
    job = agent.submit("sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.1; done; exit 3", nodes=["n1"])
    wait_until_sync(lambda: agent.get(f"/v1/jobs/{job['id']}")["state"] == "running")
    agent.kill()
    gate.touch()
    (facts,) = (agent.data_dir / "tasks").glob(f"{job['id']}.*/facts")
    wait_until_sync(lambda: b"\nexited " in facts.read_bytes(), what="the shim has told the end")
    agent.restart()
    assert agent.ended(job)["shell_exit_code"] == 3


def test_owner_that_is_restarted_reports_to_a_shepherd_elsewhere(fresh_swarm, tmp_path):
    shepherd, owner = fresh_swarm[0], fresh_swarm[1]
    gate = tmp_path / "gate"
    job = shepherd.submit("sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.1; done; echo done", nodes=["n2"])
    wait_until_sync(lambda: shepherd.get(f"/v1/jobs/{job['id']}")["state"] == "running")
    owner.kill()
    owner.restart()
    gate.touch()
    assert shepherd.ended(job)["end_reason"] == "completed"
    assert shepherd.output(job) == "done\n"


def test_jobs_run_on_while_an_idle_agent_is_killed(fresh_swarm):
    jobs = []
    for index in range(30):
        if index == 10:
            fresh_swarm[2].kill()
        jobs.append(fresh_swarm[index % 2].submit("true", ranks=1, gpus_per_rank=1, nodes=["n1", "n2"]))
    assert {fresh_swarm[0].ended(job)["end_reason"] for job in jobs} == {"completed"}
    wait_until_sync(lambda: member(fresh_swarm[0], "n3")["status"] == "failed")


def test_why_counts_no_gpu_of_a_dead_node_and_says_since_when_it_is_gone(fresh_swarm):
    first, _, third = fresh_swarm
    third.kill()
    job = first.submit("true", ranks=6, gpus_per_rank=1)
    wait_until_sync(lambda: member(first, "n3")["status"] == "failed")
    why = first.get(f"/v1/jobs/{job['id']}/why")
    assert why["free"] == {"gpus": 4, "total_gpus": 4, "nodes": 2}
    assert why["policy"] == "swarm"
    (gone,) = (each for each in why["nodes"] if each["node"] == "n3")
    assert re.fullmatch(r"failed, \d+ s ago", gone["obstacle"])


def test_agent_stopped_until_it_is_believed_dead_comes_back_and_its_job_runs_on(fresh_swarm, tmp_path):
    """The whole 30 s are in the acceptance tests."""
    sleeper = fresh_swarm[2]
    gate = tmp_path / "gate"
    job = sleeper.submit("sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.1; done; echo awake", nodes=["n3"])
    wait_until_sync(lambda: sleeper.get(f"/v1/jobs/{job['id']}")["state"] == "running")
    os.kill(sleeper.process.pid, signal.SIGSTOP)
    try:
        wait_until_sync(lambda: member(fresh_swarm[0], "n3")["status"] == "failed")
    finally:
        os.kill(sleeper.process.pid, signal.SIGCONT)
    wait_until_sync(lambda: all(are_alive(agent) for agent in fresh_swarm), what="all see all")
    gate.touch()
    assert sleeper.ended(job)["end_reason"] == "completed"


def run_agent(*options):
    command = [sys.executable, "-m", "swarm_agent", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def options_of(agent, **changes):
    values = {
        "--name": "other",
        "--listen": f"127.0.0.1:{free_port()}",
        "--seeds": "{}:{}".format(*agent.address),
        "--data-dir": str(agent.data_dir) + "-other",
        "--cluster-key-file": str(agent.config_file.parent.parent / "cluster.key"),
        "--token-file": str(agent.config_file.parent.parent / "token"),
        "--simulated-gpus": "2",
        **({"--job-user": "root"} if os.geteuid() == 0 else {}),
        **changes,
    }
    return [word for pair in values.items() for word in pair]


def test_port_in_use_is_named_with_its_remedy(fresh_swarm):
    agent = fresh_swarm[0]
    done = run_agent(*options_of(agent, **{"--listen": "{}:{}".format(*agent.address)}))
    assert done.returncode == 1
    assert str(agent.address[1]) in done.stderr
    assert "in use" in done.stderr


def test_second_agent_on_one_data_directory_is_refused(fresh_swarm):
    done = run_agent(*options_of(fresh_swarm[0], **{"--data-dir": str(fresh_swarm[0].data_dir)}))
    assert done.returncode == 1
    assert str(fresh_swarm[0].process.pid) in done.stderr


def test_corrupt_database_is_refused_and_left_as_it_is(fresh_swarm):
    agent = fresh_swarm[2]
    agent.stop()
    (database,) = [path for path in agent.data_dir.iterdir() if path.suffix in (".db", ".sqlite", ".sqlite3")]
    for path in agent.data_dir.glob(database.name + "-*"):
        path.unlink()
    database.write_bytes(b"not a database at all" * 1_000)
    done = run_agent("--config", str(agent.config_file))
    assert done.returncode == 1
    assert str(database) in done.stderr
    assert database.read_bytes().startswith(b"not a database")


def test_agent_with_another_key_stays_outside_and_harms_nobody(fresh_swarm, tmp_path):
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(generate_key())
    seeds = ["{}:{}".format(*fresh_swarm[0].address)]
    with start_agents(1, settings={"seeds": seeds, "cluster_key_file": str(key)}) as strangers:
        log = fresh_swarm[0].log_file
        wait_until_sync(lambda: "wrong cluster key" in log.read_text(), what="the stranger has been refused")
        assert [each["name"] for each in strangers[0].get("/v1/members")["items"]] == ["n1"]
        wait_until_sync(lambda: all(are_alive(agent) for agent in fresh_swarm), what="nobody is disturbed")


def test_two_agents_with_one_name_are_marked_and_get_no_new_work(fresh_swarm, tmp_path):
    """A cloned machine image: the running agent keeps its work, and the swarm says that there are two."""
    agent = fresh_swarm[0]
    gate = tmp_path / "gate"
    running = agent.submit("sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.1; done", nodes=["n3"])
    wait_until_sync(lambda: agent.get(f"/v1/jobs/{running['id']}")["state"] == "running")
    base = agent.config_file.parent.parent
    settings = {
        "name": "n3",
        "seeds": ["{}:{}".format(*agent.address)],
        "cluster_key_file": str(base / "cluster.key"),
        "token_file": str(base / "token"),
    }
    with start_agents(1, settings=settings):
        wait_until_sync(lambda: member(agent, "n3")["status"] == "conflict")
        waiting = agent.submit("true", nodes=["n3"])
        later = agent.submit("true", nodes=["n1"])
        assert agent.ended(later)["end_reason"] == "completed"
        assert agent.get(f"/v1/jobs/{waiting['id']}")["state"] == "queued", "what came later has had its turn"
        gate.touch()
        assert agent.ended(running)["end_reason"] == "completed"

"""Two real agents that run jobs and one that only votes: what `swarm-agent --witness` is for."""

import dataclasses

import pytest

from tests.agent.testing import start_agents, wait_until_sync

pytestmark = [pytest.mark.cluster]

WITNESS = "w1"


@pytest.fixture
def trio():
    """Two agents with two simulated GPUs each, and a witness, which all know one another's records."""
    with start_agents(2) as able:
        base = able[0].config_file.parent.parent
        settings = {
            "name": WITNESS,
            "witness": True,
            "seeds": ["{}:{}".format(*agent.address) for agent in able],
            "cluster_key_file": str(base / "cluster.key"),
            "token_file": str(base / "token"),
        }
        with start_agents(1, gpus=0, settings=settings) as (alone,):
            witness = dataclasses.replace(alone, name=WITNESS, token=able[0].token)
            agents = [*able, witness]
            wait_until_sync(lambda: all(knows_all(agent) for agent in agents), what="all know all records")
            yield agents


def knows_all(agent):
    """Everybody is alive and has told what it has."""
    alive = [each["status"] for each in agent.get("/v1/members")["items"]] == ["alive"] * 3
    told = [each["is_witness"] for each in agent.get("/v1/nodes")["items"]]
    return alive and sorted(told, key=str) == [False, False, True]


def document(agent, job):
    return agent.get(f"/v1/jobs/{job['id']}")


def dry_run(agent, ranks):
    """What this agent says to so many ranks of one core each; just after its start, it would accept too many."""
    spec = {"command": ["true"], "cpus_per_rank": 1, "ranks": ranks}
    return agent.call("POST", "/v1/jobs", {"spec": spec, "dry_run": True})


def test_a_witness_offers_nothing_and_is_counted_nowhere(trio):
    witness = trio[-1]
    for agent in trio:
        node = next(each for each in agent.get("/v1/nodes")["items"] if each["name"] == WITNESS)
        offered = [node[key] for key in ("free_gpus", "total_gpus", "free_cpus", "cpu_count", "memory_bytes")]
        assert offered == [0] * 5
    has = next(each for each in witness.get("/v1/nodes")["items"] if each["name"] == trio[0].name)
    for agent in trio:
        wait_until_sync(lambda agent=agent: dry_run(agent, 2 * has["cpu_count"] + 1)[0] == 422, what="refused")
        assert dry_run(agent, 2 * has["cpu_count"] + 1)[1]["code"] == "impossible_request"
        assert dry_run(agent, 2 * has["cpu_count"])[0] == 200
    found = {each["name"]: each for each in witness.get("/v1/doctor")["items"]}
    assert [found[name]["status"] for name in ("gpu_readings", "job_user", "holders")] == ["ok"] * 3
    log = witness.log_file.read_text()
    assert "this agent is a witness" in log
    assert "can read the swarm's key" not in log
    assert "no GPU readings" not in log


def test_jobs_of_a_dead_agent_go_on_at_the_other(trio, tmp_path):
    """Both nodes are full and two jobs wait; then one agent is killed, with no restart."""
    lost, left, witness = trio
    gate = tmp_path / "gate"
    command = ("sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.1; done; echo done")
    jobs = [trio[number % 3].submit(*command, ranks=1, gpus_per_rank=1) for number in range(6)]

    def count_running():
        return sum(document(left, job)["state"] == "running" for job in jobs)

    wait_until_sync(lambda: count_running() == 4, what="both nodes are full")
    before = [document(left, job) for job in jobs]
    assert all(len(job["holders"]) == 3 for job in before)
    assert WITNESS not in {job["shepherd"] for job in before}
    lost.kill()
    gate.touch()
    after = [left.ended(job) for job in jobs]
    assert {job["end_reason"] for job in after} == {"completed"}
    assert {job["shepherd"] for job in after if job["restarts"]} <= {left.name}
    assert WITNESS not in {job["shepherd"] for job in after}
    assert {share["node"] for job in after for share in job["nodes"]} <= {lost.name, left.name}
    later = witness.submit("echo", "later", ranks=2, gpus_per_rank=1)
    assert left.ended(later)["shepherd"] == left.name
    assert left.output(later) == "later\n" * 2
    assert witness.get(f"/v1/nodes/{WITNESS}")["tasks"] == []
    assert not [path for path in (witness.data_dir / "tasks").iterdir() if path.is_dir()], "no task was ever there"

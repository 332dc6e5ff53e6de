"""A clock that jumps, a disk that fills up, an agent that dies with the answer: real agents go on, and say so."""

import os
import re
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.agent.testing import start_agents, wait_until_sync
from tests.testbed.found import working

pytestmark = [pytest.mark.cluster]

FAKE_CLOCK = Path(__file__).resolve().parents[1] / "testbed" / "fake_clock.c"
DAY_S = 86_400


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """Agents started while this is set read a wall clock that the test moves; only theirs."""
    compiler = working("gcc", "cc")
    if compiler is None:
        pytest.skip("no C compiler for the clock that jumps (Debian package gcc)")
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    subprocess.run([compiler, "-O2", "-fPIC", "-shared", "-o", library, FAKE_CLOCK], check=True)
    offset.write_text("0")

    def move(seconds):
        draft = tmp_path / "draft"
        draft.write_text(str(seconds))
        draft.rename(offset)

    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("FAKE_CLOCK_FILE", str(offset))
        yield move, patch


def statuses(agent):
    return {each["name"]: each["status"] for each in agent.get("/v1/members")["items"]}


def is_healthy(agent):
    """A starved agent may be suspected for a moment, so this is waited for."""
    return statuses(agent) == dict.fromkeys(("n1", "n2", "n3"), "alive")


def generations(agent):
    return {each["name"]: each["generation"] for each in agent.get("/v1/members")["items"]}


def verdicts(agents):
    """By agent, whom it has ever declared to be gone.  From its log, which no clock that jumps puts into disorder."""
    found = re.compile(r"member\.changed: (\w+) is (failed|left|conflict)")
    return {agent.name: found.findall(agent.log_file.read_text()) for agent in agents}


def date_at(agent):
    return agent.get("/v1/members")["as_of"][:10]


def readiness(agent):
    """Status and text of /readyz?verbose."""
    try:
        with urllib.request.urlopen(f"{agent.url}/readyz?verbose", timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_wall_clock_that_jumps_days_either_way_disturbs_nobody(fresh_swarm, clock, tmp_path):
    """n3's wall clock goes five days forward and ten back under a running job; the others' clocks stay."""
    move, patch = clock
    jumper, other = fresh_swarm[2], fresh_swarm[0]
    jumper.stop()
    jumper.restart()
    patch.undo()
    agreed = lambda: {tuple(sorted(generations(agent).items())) for agent in fresh_swarm}  # noqa: E731
    is_back = lambda: all(is_healthy(agent) for agent in fresh_swarm) and len(agreed()) == 1  # noqa: E731
    wait_until_sync(is_back, what="n3 is back, as all know by its new generation")
    gate = tmp_path / "gate"
    script = f"echo begun; while [ ! -e {gate} ]; do sleep 0.1; done; echo ended"
    job = jumper.submit("sh", "-c", script, nodes=["n3"], time_limit_seconds=DAY_S / 2)
    wait_until_sync(lambda: "begun" in other.output(job))
    before = generations(other), verdicts(fresh_swarm)
    for offset_s in (5 * DAY_S, -5 * DAY_S):
        move(offset_s)
        wait_until_sync(lambda: date_at(jumper) != date_at(other), what="the clock of n3 has jumped")
        quick = jumper.submit("sh", "-c", "echo $SWARM_NODE", nodes=["n3"], time_limit_seconds=DAY_S / 2)
        assert other.ended(quick)["end_reason"] == "completed"
        assert other.output(quick) == "n3\n"
        elsewhere = jumper.submit("true", nodes=["n1"])
        assert jumper.ended(elsewhere)["end_reason"] == "completed"
        wait_until_sync(lambda: all(is_healthy(agent) for agent in fresh_swarm), what="nobody is suspected any more")
    gate.touch()
    done = other.ended(job)
    assert (done["end_reason"], done["attempt"]) == ("completed", 1)
    assert other.output(job) == "begun\nended\n"
    assert (generations(other), verdicts(fresh_swarm)) == before


def test_agent_restarted_with_its_clock_set_back_is_heard_again(fresh_swarm, clock):
    """Its generation must grow even though the clock says that it is earlier than at the start before."""
    move, patch = clock
    jumper, other = fresh_swarm[2], fresh_swarm[0]
    jumper.kill()
    move(-30 * DAY_S)
    jumper.restart()
    patch.undo()
    wait_until_sync(lambda: statuses(other).get("n3") == "alive", what="n3 is back")
    assert date_at(jumper) != date_at(other), "n3 was not started with its clock set back"
    job = other.submit("true", nodes=["n3"])
    assert other.ended(job)["end_reason"] == "completed"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 96 MiB: more than is kept back of a disk, so that jobs run there while nothing fills it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(filler):
    """Write until nothing more fits."""
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while stream.write(b"x" * 4_096):
            pass


@pytest.mark.root
def test_full_disk_makes_an_agent_unready_and_room_makes_it_ready_again(small_disk):
    with start_agents(1, settings={"data_dir": str(small_disk / "data")}) as (agent,):
        wait_until_sync(lambda: readiness(agent)[0] == 200, what="ready")
        before = agent.ended(agent.submit("true"))
        filler = small_disk / "filler"
        fill(filler)
        body = {"spec": {"command": ["true"], "name": "n" * 60}}
        wait_until_sync(lambda: agent.call("POST", "/v1/jobs", body)[0] == 503, what="refused")
        status, text = readiness(agent)
        assert status == 503
        assert "[-]disk" in text
        assert agent.is_live()
        filler.unlink()
        wait_until_sync(lambda: readiness(agent)[0] == 200, what="ready again")
        assert agent.ended(agent.submit("true"))["end_reason"] == "completed"
        assert agent.get(f"/v1/jobs/{before['id']}")["end_reason"] == "completed"


def test_agent_that_died_with_the_answer_is_replaced_by_the_tickets_other_holders(fresh_swarm):
    """The ticket names n1 first, which took the job; its record is with the others, and one of them goes on."""
    first, second = fresh_swarm[0], fresh_swarm[1]
    _, ticket = first.call("POST", "/v1/tickets", {})
    body = {
        "ticket": {key: ticket[key] for key in ("job_id", "holders", "stores")},
        "spec": {"command": ["sh", "-c", "sleep 2; echo once"], "nodes": ["n2"]},
    }
    status, job = first.call("POST", "/v1/jobs", body)
    assert status == 201
    first.kill()
    status, again = second.call("POST", "/v1/jobs", body)
    assert (status, again["id"]) == (200, job["id"])
    done = second.ended(job)
    assert done["end_reason"] == "completed"
    assert second.output(job) == "once\n"
    assert [each["id"] for each in second.get("/v1/jobs?all=true")["items"]].count(job["id"]) == 1


def test_ticket_is_good_although_the_agent_that_gave_it_died(fresh_swarm):
    first, second = fresh_swarm[0], fresh_swarm[1]
    _, ticket = first.call("POST", "/v1/tickets", {})
    body = {"ticket": {key: ticket[key] for key in ("job_id", "holders", "stores")}, "spec": {"command": ["true"]}}
    first.kill()
    assert second.call("POST", "/v1/jobs", body)[0] == 201
    assert second.call("POST", "/v1/jobs", body)[0] == 200
    assert second.ended({"id": ticket["job_id"]})["end_reason"] == "completed"

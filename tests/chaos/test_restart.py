"""Agents come back: all one after the other, at once under the same name, and after dying with an answer."""

import json
import shutil
import socket
import sqlite3
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from swarmsched.errors import AgentUnreachable
from tests.agent.testing import wait_until_sync
from tests.chaos.checker import Checker
from tests.chaos.view import BEAT, beat_command

pytestmark = [pytest.mark.root, pytest.mark.chaos]


def test_rolling_restart_under_load_loses_nothing_and_no_rank_notices(build_swarm):
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=4, gpus_per_rank=1)
        pids = {beat.pid for beat in swarm.wait_for_beats(job, 4)}
        for machine in swarm:
            machine.stop_agent()
            machine.start_agent()
            swarm.converge()
        assert {pid for machine in swarm for pid in machine.rank_pids()} >= pids
        swarm.end(job, 4)
        done = swarm.wait_ended(job)
        assert (done["shell_exit_code"], done["attempt"]) == (4, 1)
        checker.verify()


def test_machine_that_reboots_before_anybody_misses_it_loses_its_ranks_and_they_run_again(build_swarm):
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit("n1", ranks=2, gpus_per_rank=1, nodes=["n2", "n3"])
        swarm.wait_for_beats(job, 2)
        swarm["n2"].cut_power()
        swarm["n2"].power_on()
        swarm.wait_for_beats(job, 2, attempt=2, timeout_s=40)
        assert swarm.document(job)["restarts"] == 1
        swarm.end(job, 2)
        assert swarm.wait_ended(job)["shell_exit_code"] == 2
        swarm.converge()
        checker.verify()


def post_and_hang_up(agent, body):
    """Send a submission whole and leave without an answer."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: {agent.address[0]}:{agent.address[1]}\r\n"
        f"Authorization: Bearer {agent.token}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(agent.address, 5) as wire:
        wire.sendall(head.encode() + data)


def has_accepted(agent, job):
    """True when the agent's database has the job's record, not only a promise about it."""
    with tempfile.TemporaryDirectory() as folder:  # the agent lets nobody else read it
        for file in ("agent.db", "agent.db-wal"):
            shutil.copy(agent.data_dir / file, folder)
        return _has_accepted(Path(folder) / "agent.db", job)


def _has_accepted(path, job):
    connection = sqlite3.connect(path)
    query = "SELECT count(*) FROM entries WHERE room = 'register' AND key = ? AND instr(value, ?)"
    try:
        found = connection.execute(query, (job, BEAT.name.encode())).fetchone()[0]
    finally:
        connection.close()
    return found > 0


def retry(swarm, names, body):
    """Repeat a ticket at these agents in turn until one accepts it; the status."""
    answers = []

    def is_accepted():
        name = names[len(answers) % len(names)]
        try:
            status, document = swarm[name].agent.call("POST", "/v1/jobs", body, timeout_s=10)
        except AgentUnreachable as error:
            status, document = 0, str(error)
        answers.append((name, status, document))
        assert status in (0, 200, 201, 503, 504), document
        return status in (200, 201)

    wait_until_sync(is_accepted, 40, "the ticket is accepted elsewhere")
    return answers[-1][1]


def wait_for_majority(swarm, job):
    """Until two of three holders have the record: then it is decided, whatever happens to the third."""
    disks = [machine.agent for machine in swarm]
    wait_until_sync(lambda: sum(has_accepted(disk, job) for disk in disks) >= 2, 10, "two holders have the record")


def request_for(swarm, ticket, code):
    """What is posted with that ticket."""
    swarm.note(ticket["job_id"])
    return {"ticket": ticket, "spec": {"command": beat_command(swarm.beats_dir, 0.2, code), "nodes": ["n2"]}}


def told_of(swarm, job, *kinds):
    """The agents' log lines of these kinds about the job."""
    lines = [line for machine in swarm for line in machine.agent.log_file.read_text().splitlines()]
    return [line for line in lines if job in line and any(kind in line for kind in kinds)]


def assert_one_job(swarm, job, code):
    """It ended as it should, ran once, and everybody lists it once."""
    assert swarm.wait_ended(job)["shell_exit_code"] == code
    assert len({beat.pid for beat in swarm.beats(job)}) == 1
    for machine in swarm:
        listed = [each["id"] for each in machine.agent.get("/v1/jobs?all=true")["items"]]
        assert listed.count(job) == 1


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["at once", "when a majority has it on disk"])
@pytest.mark.parametrize("fate", ["dies", pytest.param("is cut off", marks=pytest.mark.acceptance)])
def test_agent_lost_with_its_answer_and_a_retry_elsewhere_make_one_job(build_swarm, fate, is_on_disk):
    swarm = build_swarm(4)
    with Checker(swarm, submits=False) as checker:
        for code in (1, 2, 3):
            ticket = swarm.ticket_held_by("n1", "n1")
            job = ticket["job_id"]
            body = request_for(swarm, ticket, code)
            post_and_hang_up(swarm["n1"].agent, body)
            if is_on_disk:
                wait_for_majority(swarm, job)
            if fate == "dies":
                swarm["n1"].kill_agent()
            else:
                swarm.isolate("n1")
            status = retry(swarm, ["n2", "n3", "n4"], body)
            assert status == 200 or not is_on_disk, "a majority had it, and yet it is new"
            if fate == "dies":
                swarm["n1"].start_agent()
            else:
                swarm.network.heal()
            swarm.converge()
            is_made = partial(told_of, swarm, job, "job.submitted", "job.taken_over")
            wait_until_sync(is_made, 30, "the job is made, by n1 or without it")
            status = retry(swarm, ["n1"], body)  # which may join its first request, that is under way there still
            assert status == 200 or (status == 201 and fate == "is cut off"), status
            assert_one_job(swarm, job, code)
        checker.verify()


def test_ticket_used_at_all_agents_at_once_makes_one_job_with_one_shepherd(build_swarm):
    swarm = build_swarm(4)
    with Checker(swarm, submits=False) as checker, ThreadPoolExecutor(4) as pool:
        for code in range(6):
            ticket = swarm.ticket("n1")
            body = request_for(swarm, ticket, code)
            agents = [machine.agent for machine in swarm]
            answers = list(
                pool.map(lambda agent, body=body: agent.call("POST", "/v1/jobs", body, timeout_s=30), agents)
            )
            assert {status for status, _ in answers} <= {200, 201, 503}, answers
            assert_one_job(swarm, ticket["job_id"], code)
        for job in swarm.submitted:
            assert len(told_of(swarm, job, "job.submitted")) == 1, "one agent takes it up"
        checker.verify()

"""Commands that go on while agents and shepherds die, and what an operator can do when too many have."""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress

import pytest

from swarm_client import SwarmClient, attached, conversation, submission
from swarm_client.cli import main
from swarm_client.conversation import Contact
from swarm_client.failure import NOT_FOUND, SWARM_FAILED, AgentRefusal, NoAgentAnswered
from swarm_client.follow import LostContact, may_pass, wait_for_contact
from swarm_client.http import Waiter
from swarm_client.sdk import SwarmRequestError
from tests.agent.testing import free_port
from tests.client.testing import (
    HANDLE,
    JOB_ID,
    FakeAgent,
    end,
    ended,
    job_document,
    log,
    problem,
    state,
    status_document,
)

WAIT = f"GET /v1/jobs/{HANDLE}/wait"
WAIT_BY_ID = f"GET /v1/jobs/{JOB_ID}/wait"
NOBODY_ACTS = (
    503,
    problem(503, "shepherd_unreachable", "no shepherd acts for it at this moment", retry_after_seconds=1),
)


def members(*agents):
    items = [{"name": each.name, "address": each.address, "status": "alive", "version": "0.1.0"} for each in agents]
    return {"api_version": "v1", "items": items, "next_cursor": None}


def test_an_attached_run_goes_on_at_an_agent_that_it_has_only_heard_of(swarm, agent):
    """One host is configured; its agent stops between two lines, and none is lost or doubled."""
    with FakeAgent("gpu2") as second:
        agent.answers["GET /v1/members"] = members(agent, second)
        cursors = []

        def dies(_):
            agent.answers["GET /v1/members"] = (503, problem(503, "not_ready", "it stops"))
            agent.stream = lambda _: iter(())
            return iter([state("running", "c0"), log("one\n", "c1"), log("two\n", "c2")])

        def rest(cursor):
            cursors.append(cursor)
            return iter([log("three\n", "c3"), end("c4", 5, "failed")])

        agent.stream, second.stream = dies, rest
        code, out, _ = swarm("run", "--no-sync", "--", "x")
        assert (code, out) == (5, "one\ntwo\nthree\n")
        assert cursors == ["c2"]


def test_a_run_that_says_while_it_is_restarted(swarm, agent, monkeypatch):
    monkeypatch.setattr(attached, "QUIET_START_S", 0.1)

    def stream(_):
        yield state("running", "1")
        threading.Event().wait(2.0)  # then the start is explained
        yield state("queued", "2", nodes=[], reason="restarting (1 of 5): gpu2 was lost", restarts=1)
        yield state("running", "3", attempt=2)
        yield end("4")

    agent.stream = stream
    code, _, err = swarm("run", "--no-sync", "--", "x")
    assert code == 0
    assert f"job {HANDLE} queued: restarting (1 of 5): gpu2 was lost" in err


def test_a_run_goes_on_when_an_agent_gave_up_looking_for_a_shepherd(swarm, agent):
    """The stream ends with a warning and without an end; the next one goes on behind it."""
    cursors = []

    def stream(cursor):
        cursors.append(cursor)
        if not cursor:
            return iter([state("running", "1"), {"type": "warning", "text": "nobody acts", "cursor": "2"}])
        return iter([end("3", 0)])

    agent.stream = stream
    assert swarm("run", "--no-sync", "--", "x") == (0, "", f"swarm: job {HANDLE}\nswarm: nobody acts\n")
    assert cursors == ["", "2"]


def test_a_wait_goes_on_at_another_agent_when_its_own_dies(swarm, agent, point_at):
    with FakeAgent("gpu2") as second:
        point_at(agent, second)
        agent.answers[WAIT] = {"met": False, "job": job_document()}

        def gone(body, query):
            return NOBODY_ACTS

        agent.answers[WAIT_BY_ID] = gone
        second.answers[WAIT_BY_ID] = {"met": True, "job": ended(7, "failed")}
        assert swarm("wait", HANDLE) == (7, "", f"swarm: job {HANDLE} failed (exit code 7)\n")


def test_a_wait_survives_the_time_in_which_nobody_acts_or_knows(swarm, agent, monkeypatch):
    answers = [
        {"met": True, "job": ended()},
        (404, problem(404, "unknown_job", "no such job")),
        NOBODY_ACTS,
    ]
    agent.answers[WAIT] = {"met": False, "job": job_document()}
    agent.answers[WAIT_BY_ID] = lambda body, query: answers.pop()
    assert swarm("wait", HANDLE) == (0, "", "")
    assert answers == []


def test_a_wait_gives_up_when_nobody_answers_for_too_long(swarm, agent, monkeypatch):
    monkeypatch.setenv("SWARM_CONTACT_TIMEOUT", "0.2s")
    agent.answers[WAIT] = {"met": False, "job": job_document()}
    agent.answers[WAIT_BY_ID] = NOBODY_ACTS
    code, out, err = swarm("wait", HANDLE)
    assert (code, out) == (125, "")
    assert "lost contact with job" in err
    assert "its outcome is unknown" in err


def test_a_wait_for_an_unknown_job_fails_at_once(swarm, agent):
    code, _, err = swarm("wait", "nosuch")
    assert code == 125
    assert "no such job" in err


def test_what_one_agent_says_is_told_when_the_others_are_silent(swarm, agent, point_at):
    refused = (503, problem(503, "unavailable", "gpu9 does not answer"))
    with FakeAgent("gpu2") as second:
        point_at(agent, second, f"127.0.0.1:{free_port()}")
        for each in (agent, second):
            each.answers["PUT /v1/nodes/gpu9/drain"] = refused
        code, _, err = swarm("drain", "gpu9")
    assert (code, err.splitlines()[0]) == (125, "swarm: cannot drain gpu9: gpu9 does not answer")


def test_a_wait_without_any_agent_fails_at_once(swarm, point_at):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        point_at(f"127.0.0.1:{sock.getsockname()[1]}")
        code, _, err = swarm("wait", HANDLE)
    assert code == 125
    assert "no agent answered" in err


@pytest.mark.parametrize(
    ("failure", "is_known", "passes"),
    [
        (AgentRefusal("x", "", SWARM_FAILED, status=503, code="not_ready"), False, True),
        (AgentRefusal("x", "", NOT_FOUND, status=404, code="unknown_job"), False, False),
        (AgentRefusal("x", "", NOT_FOUND, status=404, code="unknown_job"), True, True),
        (AgentRefusal("x", "", 4, status=401, code="unauthorised"), True, False),
        (NoAgentAnswered(["a:1"], "refused"), False, False),
        (NoAgentAnswered(["a:1"], "refused"), True, True),
    ],
)
def test_what_passes_by_itself(failure, is_known, passes):
    assert may_pass(failure, is_known=is_known) == passes


def test_contact_is_lost_only_after_its_time_without_any_answer():
    contact, waiter = Contact(0.12), Waiter()
    wait_for_contact(contact, waiter, "x", "refused")
    contact.found()
    wait_for_contact(contact, waiter, "x", "refused")

    def lose():
        for _ in range(100):
            wait_for_contact(contact, waiter, "x", "refused")

    with pytest.raises(LostContact, match="refused"):
        lose()


# --- cancel


def test_a_cancel_is_not_repeated_after_the_agent_has_waited_for_a_shepherd(swarm, agent):
    agent.answers[f"POST /v1/jobs/{HANDLE}/cancel"] = NOBODY_ACTS
    code, _, err = swarm("cancel", HANDLE)
    assert code == 125
    assert "no shepherd acts for it at this moment" in err
    assert len(agent.wait_for("POST", f"/v1/jobs/{HANDLE}/cancel")) == 1


def test_a_cancel_goes_to_the_next_agent_when_the_first_is_not_ready(swarm, agent, point_at):
    with FakeAgent("gpu2") as second:
        point_at(agent, second)
        agent.answers[f"POST /v1/jobs/{HANDLE}/cancel"] = (503, problem(503, "not_ready", "it starts"))
        assert swarm("stop", HANDLE)[:2] == (0, f"{HANDLE}\n")
        assert second.wait_for("POST", f"/v1/jobs/{HANDLE}/cancel")


def test_a_cancel_that_was_held_back_is_not_held_back_again_elsewhere(swarm, agent, point_at, monkeypatch):
    """Two agents wait in vain for a shepherd, a third is dead: one of the two is waited for, and its reason is told."""
    monkeypatch.setattr(conversation, "SHEPHERD_LIMIT_S", 4.0)
    monkeypatch.setattr(conversation, "SHEPHERD_WAIT_S", 3.0)
    with FakeAgent("gpu2") as second:
        point_at(agent, second, f"127.0.0.1:{free_port()}")
        for each in (agent, second):
            each.delay_s = 2.0
            each.answers[f"POST /v1/jobs/{HANDLE}/cancel"] = NOBODY_ACTS
        started_s = time.monotonic()
        code, _, err = swarm("cancel", HANDLE)
    assert time.monotonic() - started_s < 4.0
    assert (code, err.splitlines()[0]) == (125, f"swarm: cannot cancel {HANDLE}: {NOBODY_ACTS[1]['detail']}")


def unsure(agent, code):
    """The agent takes a signal, and does not say whether it arrived."""
    agent.answers[f"POST /v1/jobs/{HANDLE}/signal"] = (503, problem(503, code, "?", retry_after_seconds=0.01))


@pytest.mark.parametrize(("code", "sent"), [("unavailable", 1), ("not_ready", 8)])
async def test_a_signal_that_may_have_arrived_is_not_sent_again_by_either_client(agent, point_at, code, sent):
    with FakeAgent("gpu2") as second:
        point_at(agent, second)
        for each in (agent, second):
            unsure(each, code)
        assert await asyncio.to_thread(main, ["cancel", "--signal", "USR1", HANDLE]) == 125
        asked = [len([path for _, path, _ in each.requests if path.endswith("signal")]) for each in (agent, second)]
        async with SwarmClient() as swarm:
            with pytest.raises(SwarmRequestError):
                await swarm.signal(HANDLE, "USR1")
        again = [len([path for _, path, _ in each.requests if path.endswith("signal")]) for each in (agent, second)]
    assert sum(asked) == sent
    assert sum(again) == 2 * sent


@pytest.mark.parametrize(
    ("had_ended", "reason", "words"),
    [
        (False, "cancelled", ""),
        (True, "cancelled", f"swarm: job {HANDLE} had ended before (cancelled)\n"),
        (False, "completed", f"swarm: job {HANDLE} had ended before (completed)\n"),
    ],
)
def test_a_cancel_tells_whether_the_job_had_ended_before(swarm, agent, had_ended, reason, words):
    agent.answers[f"POST /v1/jobs/{HANDLE}/cancel"] = ended(0, reason, had_ended=had_ended)
    assert swarm("cancel", HANDLE) == (0, f"{HANDLE}\n", words)


def test_a_cancel_that_nobody_answers_ends_within_its_bound(swarm, agent, monkeypatch):
    monkeypatch.setattr(conversation, "SHEPHERD_LIMIT_S", 1.5)
    monkeypatch.setattr(conversation, "SHEPHERD_WAIT_S", 1.0)
    agent.delay_s = 5.0
    started_s = time.monotonic()
    code, _, err = swarm("cancel", HANDLE)
    assert time.monotonic() - started_s < 4.0
    assert code == 125
    assert "no answer" in err


# --- recover


def test_an_unknown_job_is_told_without_the_names_of_fields(swarm, agent):
    remedy = "`swarm ps -a` lists the jobs that are known."
    unknown = {**problem(404, "unknown_job", "there is no job 'x'"), "remedy": remedy, "silent_nodes": ["n1", "n2"]}
    agent.answers["POST /v1/jobs/x/recover"] = (404, unknown)
    assert swarm("recover", "x", "--force")[2] == (
        f"swarm: cannot recover x: there is no job 'x'\n  {remedy[:-1]}; "
        "n1, n2 did not answer, so their jobs are not known\n"
    )


LOST = {"has_majority": False, "survives_deaths": 0, "holders": ["gpu1", "gpu2", "gpu3"]}


def member(name, status):
    return {"name": name, "address": "10.0.0.1:7433", "status": status, "version": "0.1.0"}


def test_recover_without_force_explains_and_changes_nothing(swarm, agent):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(**LOST)
    items = [member("gpu1", "alive"), member("gpu2", "failed"), member("gpu3", "failed")]
    agent.answers["GET /v1/members"] = {"items": items}
    code, out, err = swarm("recover", HANDLE)
    assert (code, out) == (2, "")
    assert f"job {HANDLE} is kept by gpu1 (alive), gpu2 (failed), gpu3 (failed)" in err
    assert "as if gpu2, gpu3 had never held it" in err
    assert f"swarm recover {HANDLE} --force" in err
    assert not [each for each in agent.requests if each[0] == "POST"]


def test_recover_without_need_says_that_it_would_be_refused(swarm, agent):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document()
    code, _, err = swarm("recover", HANDLE)
    assert code == 2
    assert "--force would be refused" in err


def test_recover_of_a_job_that_waits_for_leftovers_says_what_is_vouched_for(swarm, agent):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(leftovers=[{"node": "gpu9", "attempt": 1}])
    code, _, err = swarm("recover", HANDLE)
    assert code == 2
    assert "its ranks on gpu9 may still run" in err
    assert "would be refused" not in err
    assert f"swarm recover {HANDLE} --force" in err


def test_recover_of_an_ended_job_is_a_conflict(swarm, agent):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = ended()
    code, _, err = swarm("recover", HANDLE)
    assert code == 5
    assert "nothing to recover" in err


def test_recover_by_force_sends_it_once_and_prints_the_job(swarm, agent):
    path = f"/v1/jobs/{HANDLE}/recover"
    agent.answers[f"POST {path}"] = (202, job_document(is_forced=True, holders=["gpu1"]))
    code, out, err = swarm("recover", HANDLE, "--force")
    assert (code, out) == (0, f"{HANDLE}\n")
    assert "kept by gpu1" in err
    assert agent.wait_for("POST", path) == [{"force": True}]
    assert json.loads(swarm("recover", HANDLE, "--force", "-o", "json")[1])["is_forced"]


def test_a_refused_recovery_is_a_conflict_with_its_reason(swarm, agent):
    refusal = problem(409, "conflict", "2 of 3 holders answer: gpu1, gpu2")
    agent.answers[f"POST /v1/jobs/{HANDLE}/recover"] = (409, refusal)
    code, out, err = swarm("recover", HANDLE, "--force")
    assert (code, out) == (5, "")
    assert "2 of 3 holders answer: gpu1, gpu2" in err


@pytest.mark.parametrize("words", [["recover"], ["recover", "a", "b"], ["recover", "a", "--froce"]])
def test_a_malformed_recovery_sends_nothing(swarm, agent, words):
    assert swarm(*words)[0] == 2
    assert agent.requests == []


# --- What is shown


def test_ps_shows_holders_and_how_many_of_their_deaths_a_job_survives(swarm, agent):
    forced = job_document(handle="aaaaaaaa", holders=["gpu1"], survives_deaths=0, is_forced=True, restarts=2)
    lost = job_document(handle="bbbbbbbb", **LOST)
    card = job_document(handle="cccccccc", holders=None, survives_deaths=None, has_majority=None, restarts=None)
    agent.answers["GET /v1/jobs"] = {"items": [forced, lost, card], "total": 3, "silent_nodes": []}
    wide = swarm("ps", "-o", "wide")[1]
    assert swarm("ps", "-l")[1] == wide
    heading, *rows = wide.splitlines()
    assert "HOLDERS" in heading
    at = heading.index("HOLDERS")
    assert [row[at : heading.index("SUBMITTED")].split() for row in rows] == [
        ["gpu1", "0", "(forced)", "2"],
        ["gpu1,gpu2,gpu3", "lost", "0"],
        ["-", "-", "0"],
    ]


def test_status_of_a_job_says_what_it_survives(swarm, agent):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document()
    for word in ("status", "inspect", "describe"):
        out = swarm(word, HANDLE)[1]
        assert "Shepherd:      gpu1 (kept by gpu1, gpu2, gpu3)\n" in out
        assert "Survives:      the death of any one holder\n" in out
        assert "Forced" not in out


def test_status_of_a_job_in_trouble_says_all_of_it(swarm, agent):
    spec = {"command": ["true"], "ranks": 2, "max_restarts": 5}
    nodes = [
        {"node": "gpu1", "ranks": 1, "first_rank": 0, "is_paused": True},
        {"node": "gpu2", "ranks": 2, "first_rank": 1, "is_paused": None},
    ]
    more = {"restarts": 2, "preemptions": 1, "leftovers": [{"node": "gpu9", "attempt": 2}], "is_forced": True}
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(
        **LOST, **more, spec=spec, nodes=nodes, attempt=3, leaving_holders=["gpu1", "gpu4"]
    )
    out = swarm("status", HANDLE)[1]
    assert "Nodes:         gpu1 (rank 0, paused), gpu2 (ranks 1-2)\n" in out
    assert "Attempt:       3, restarted 2 of 5 times after losing a node, preempted 1 time\n" in out
    assert "Left over:     ranks that may still run on gpu9 (attempt 2)" in out
    assert "Survives:      most of its holders are gone" in out
    assert "Holders:       changing; until it is done a majority of gpu1, gpu4 counts as well\n" in out
    assert "Forced:        an operator declared" in out


def test_status_of_a_job_known_from_gossip_alone(swarm, agent):
    nodes = [{"node": "gpu1", "ranks": None, "first_rank": None, "is_paused": None}]
    unknown = dict.fromkeys(("holders", "leaving_holders", "survives_deaths", "has_majority", "is_forced"))
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(
        **unknown, nodes=nodes, spec=None, restarts=None, preemptions=None, leftovers=None, source="card"
    )
    code, out, _ = swarm("status", HANDLE)
    assert code == 0
    assert "Nodes:         gpu1\n" in out
    assert "Survives" not in out


def test_status_of_an_old_state_says_how_old_it_is(swarm, agent):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(staleness_seconds=12.3, has_majority=False)
    out = swarm("status", HANDLE)[1]
    assert "Note:          as of 12s ago: whoever answers for the job at this moment knows an older state\n" in out


SURVIVAL = {
    "jobs": {"0": 1, "1": 4},
    "without_majority": 1,
    "unknown": 0,
    "weakest": [
        {"id": JOB_ID, "handle": HANDLE, "name": "digits", "survives_deaths": 0, "has_majority": False},
        {"id": JOB_ID, "handle": "aaaaaaaa", "name": "", "survives_deaths": 0, "has_majority": True},
    ],
}


def test_status_without_a_job_shows_the_swarm_and_its_weakest_jobs(swarm, agent):
    agent.answers["GET /v1/status"] = status_document(
        {"alive": 3, "suspect": 0, "failed": 1, "left": 0, "conflict": 0},
        {"total": 8, "free": 2, "leased": 4, "draining": 2},
        {"queued": 1, "starting": 0, "running": 5, "stopping": 0},
        policy={"name": "swarm", "parameters": {"pause_s": 5.0}, "elasticity": "on", "version": 2},
        survival=SURVIVAL,
        silent_nodes=["gpu4"],
    )
    assert swarm("status") == (
        0,
        (
            "Members:       3 alive, 1 failed\n"
            "GPUs:          2 free, 4 leased, 2 on draining nodes, 8 in all\n"
            "Jobs:          1 queued, 0 starting, 5 running, 0 stopping\n"
            "Policy:        swarm (pause_s=5), elasticity on\n"
            "Survival:      1 job survives no death of a holder\n"
            "Survival:      4 jobs survive the death of any one holder\n"
            "Survival:      1 job lost most holders: nothing is decided until they return (`swarm recover`)\n"
            "Weakest:       k3j9x0ab digits (lost), aaaaaaaa (0)\n"
            "Silent:        gpu4\n"
        ),
        "",
    )
    assert json.loads(swarm("status", "-o", "json")[1])["survival"] == SURVIVAL


def test_nodes_show_witnesses_and_paused_jobs(swarm, agent):
    paused = {"job_id": JOB_ID, "attempt": 1, "worker": None, "stage": "started", "is_paused": True, "problem": ""}
    known = {"address": "", "status": "alive", "generation": 1, "incarnation": 0, "version": "", "since_seconds": 1.0}
    items = [
        {**known, "name": "gpu1", "tasks": [paused], "is_witness": False},
        {**known, "name": "w1", "tasks": None, "is_witness": True},
    ]
    agent.answers["GET /v1/nodes"] = {"items": items}
    rows = swarm("nodes")[1].splitlines()
    assert rows[1].endswith(f"job {HANDLE} paused")
    assert rows[2].endswith("witness")


# --- Options of run


def test_restarts_and_isolation_reach_the_specification(swarm, agent, tmp_path):
    (tmp_path / "job.toml").write_text('command = ["true"]\nmax_restarts = 0\nsync = false\n')
    swarm("run", "-d", "--no-sync", "--max-restarts", "3", "--on-isolation", "pause", "--", "true")
    swarm("submit", str(tmp_path / "job.toml"))
    first, second = (body["spec"] for body in agent.wait_for("POST", "/v1/jobs", 2))
    assert (first["max_restarts"], first["on_isolation"]) == (3, "pause")
    assert second["max_restarts"] == 0
    from swarmsched.api import JobSpec

    assert JobSpec.from_json(first).max_restarts == 3


@pytest.mark.parametrize("value", ["-1", "1001", "many", "2.5", ""])
def test_restarts_that_are_no_number_are_refused(swarm, agent, value):
    code, _, err = swarm("run", "--no-sync", f"--max-restarts={value}", "--", "true")
    assert code == 2
    assert "--max-restarts" in err
    assert agent.requests == []


def test_a_job_is_submitted_with_one_ticket_however_often_the_swarm_is_too_busy(swarm, agent, monkeypatch):
    busy = (503, problem(503, "unavailable", "the outcome is unknown", retry_after_seconds=0.01))
    tries = []

    def submit(body, _):
        tries.append(body["ticket"])
        return busy if len(tries) < 9 else (201, job_document(state="queued"))

    agent.answers["POST /v1/jobs"] = submit
    assert swarm("submit", "--no-sync", "--", "x")[0] == 0
    assert len(tries) == 9
    assert all(each == tries[0] for each in tries)
    monkeypatch.setattr(submission, "SUBMISSION", conversation.SUBMISSION._replace(busy_limit_s=0.05))
    tries.clear()
    agent.answers["POST /v1/jobs"] = busy
    code, _, err = swarm("submit", "--no-sync", "--", "x")
    assert code == 125
    assert f"`swarm status {HANDLE}` tells whether it was submitted all the same" in err


def test_an_agent_that_hangs_up_twice_is_told_of_once(swarm, point_at):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        point_at(address)

        def hang_up():
            with suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        err = swarm("ps")[2]
        listening.shutdown(socket.SHUT_RDWR)
    first = err.splitlines()[0]
    assert first.count("the agent closed the connection") + first.count("reset") == 1, first


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ({}, "shipped, 1.0 MiB, tree abcabcabcabc"),  # an agent of an older version
        ({"files_on": ["gpu1", "gpu3"]}, "shipped, 1.0 MiB, tree abcabcabcabc, kept on gpu1, gpu3"),
        ({"files_on": []}, "shipped, 1.0 MiB, tree abcabcabcabc, kept on no agent beside the one that took them"),
    ],
)
def test_status_of_a_job_says_where_its_files_are(swarm, agent, kept, told):
    spec = {"command": ["true"], "tree": "abc" * 21 + "a", "tree_bytes": 2**20}
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(spec=spec, **kept)
    assert f"Files:         {told}\n" in swarm("status", HANDLE)[1].replace("\n               ", " ")

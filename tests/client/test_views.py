"""Commands that show things: whole outputs are compared."""

import io
import json
import os
import shlex
import subprocess
import sys
import time
from operator import itemgetter
from pathlib import Path

import pytest
import yaml

from swarm_agent.eventlog import KINDS
from swarm_agent.http.joblist import STATE_WORDS
from swarm_client import outlook
from swarm_client.cli import ALIASES, COMMANDS, COMMON, completion, doctor, load_command, main, nodes, ps
from swarm_client.follow import describe_state
from swarm_client.options import parse
from swarm_client.output import Column, Printer, state_style
from swarm_client.reading import read
from swarm_client.start_phase import WORDS
from swarmsched.api import StartPhase
from swarmsched.documents import JobDocument, NodeDocument
from tests.client.testing import (
    HANDLE,
    JOB_ID,
    TOKEN,
    end,
    ended,
    event,
    job_document,
    log,
    problem,
    state,
    status_document,
    why_document,
)

PROGRESS = {
    "attempt": 1, "ratio": 0.25, "remaining_seconds": 225.2, "remaining_seconds_low": 215.0, "source": "steps",
    "remaining_seconds_high": 235.9, "rank": 0, "step": 250, "total_steps": 1000, "epoch": 1.5, "total_epochs": None,
    "samples": 16_000, "loss": 0.31416, "grad_noise": None, "step_seconds": 0.3, "samples_per_second": 213.333,
    "reported_at": "2025-01-31T12:01:15.500Z", "oddities": {}, "problem": None,
}  # fmt: skip
BY_LIMIT = dict.fromkeys(PROGRESS) | {"attempt": 1, "source": "time_limit", "ratio": 0.5, "remaining_seconds": 75.0}


def listing(*items, **more):
    return {
        "api_version": "v1",
        "items": list(items),
        "next_cursor": None,
        "total": len(items),
        "silent_nodes": [],
        **more,
    }


def gpu(index, **changes):
    known = {"node": "gpu1", "index": index, "uuid": f"GPU-{index}", "model": "NVIDIA H200", "memory_bytes": 2**37}
    more = {"state": "free", "job_id": None, "health": "ok", "note": "", "is_simulated": False, "processes": []}
    figures = dict.fromkeys(("utilisation_ratio", "memory_used_bytes", "temperature_celsius", "power_watts"))
    return {**known, **more, **figures, **changes}


def node(name, **changes):
    document = {
        "name": name,
        "address": "10.0.0.1:7433",
        "status": "alive",
        "generation": 1,
        "incarnation": 0,
        "version": "0.1.0",
        "since_seconds": 12.0,
        "is_draining": False,
        "free_gpus": 1,
        "total_gpus": 2,
        "free_cpus": 8,
        "cpu_count": 16,
        "free_memory_bytes": 2**34,
        "memory_bytes": 2**35,
        "cpu_utilisation_ratio": 0.1,
        "gpu_utilisation_ratio": 0.5,
        "gpus": [gpu(0), gpu(1, health="foreign", state="foreign", note="python3 (4711) of alice")],
        "jobs": [JOB_ID],
        "staleness_seconds": 0.3,
    }
    return document | changes


def share(name, *, is_paused):
    return {"node": name, "ranks": 1, "first_rank": 0, "is_paused": is_paused}


def group(model, count):
    return {"model": model, "memory_bytes": 2**37, "total": count, "free": count}


OUTLOOK = {
    "starts_at": "2026-01-31T12:02:15.500Z",
    "starts_at_earliest": "2026-01-31T12:01:00Z",
    "starts_at_latest": "2026-01-31T12:05:00Z",
    "ends_at": "2026-01-31T13:02:15.500Z",
    "ends_at_earliest": "2026-01-31T12:50:00Z",
    "ends_at_latest": None,
    "deadline": None,
    "ranks_least": None,
    "rho": 1.25,
    "problem": "",
}
"""Of a job that waits, at 12:00:00.25."""


def test_ps_shows_a_plain_table_in_a_pipe(swarm, agent):
    queued = job_document(
        handle="aaaaaaaa", name="", state="queued", nodes=[], started_at=None, reason="8 GPUs", gpus=8
    )
    queued |= {"outlook": OUTLOOK, "as_of": "2026-01-31T12:00:00.250Z"}
    agent.answers["GET /v1/jobs"] = listing(queued, job_document(progress=PROGRESS))
    assert swarm("ps") == (
        0,
        (
            "ID        NAME    USER  STATE    GPUS  NODES      WAITED  START  ELAPSED  PROGRESS   ETA  REASON\n"
            "k3j9x0ab  digits  ada   running   4/4  gpu1,gpu2      1s      -     1:15       25%  3:45  -\n"
            "aaaaaaaa  -       ada   queued    0/8  -              1s  ~2:15        -         -     -  8 GPUs\n"
        ),
        "",
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"state": "queued", "nodes": []}, "waits to be planned"),
        ({"state": "queued", "nodes": [], "reason": "2 free", "has_majority": None}, "2 free"),
        (
            {"state": "queued", "nodes": [], "reason": "2 free", "has_majority": False},
            "no majority of its holders is there",
        ),
        ({"has_majority": False}, "no majority of its holders is there"),
        ({"nodes": [share("gpu1", is_paused=True)]}, "paused: no majority of its holders answers"),
        (
            {"nodes": [share("gpu1", is_paused=True), share("gpu2", is_paused=False)]},
            "paused on gpu1: no majority of its holders answers",
        ),
    ],
)
def test_ps_says_why_nothing_happens_to_a_job_that_its_shepherd_cannot_say(swarm, agent, changes, told):
    agent.answers["GET /v1/jobs"] = listing(job_document(**changes))
    assert swarm("ps")[1].splitlines()[1].endswith(f"  {told}")


def test_ps_asks_for_the_reasons_that_the_column_shows(swarm, agent):
    agent.answers["GET /v1/jobs"] = lambda _, query: listing() if query["state"] == "failed,oom" else {}
    assert swarm("ps", "--state", "failed,oom", "-q") == (0, "", "")


def test_ps_knows_the_states_and_reasons_that_the_api_does():
    assert (*ps.STATES, *ps.END_REASONS) == STATE_WORDS


def test_ps_names_the_nearest_of_a_misspelt_state_and_all_that_are_known(swarm):
    assert swarm("ps", "--state", "queued,runing") == (
        2,
        "",
        (
            "swarm: --state 'runing' is not known; did you mean running?\n"
            "  one or more of queued, starting, running, stopping, ended, "
            "completed, failed, cancelled, timeout, node_lost, oom, preempted\n"
        ),
    )
    assert swarm("ps", "--state", "xyz")[2].startswith("swarm: --state 'xyz' is not known\n")


@pytest.mark.parametrize(
    ("phase", "brief", "whole"),
    [
        (StartPhase.NONE, "starting", "starting"),
        (StartPhase.PLACE, "starting: reserving", "starting: reserving resources"),
        (StartPhase.SYNC, "starting: copying", "starting: copying files"),
        (StartPhase.ENVIRONMENT, "starting: building", "starting: building the environment"),
        (StartPhase.LAUNCH, "starting: launching", "starting: launching the ranks"),
    ],
)
def test_what_a_starting_job_does_is_said_in_words(swarm, agent, phase, brief, whole):
    job = job_document(state="starting", phase=phase.value)
    agent.answers["GET /v1/jobs"] = listing(job)
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job
    assert f" {brief} " in swarm("ps")[1].splitlines()[1]
    assert f"State:         {whole}" in swarm("status", HANDLE)[1].splitlines()
    assert describe_state(job) == whole
    assert json.loads(swarm("ps", "-o", "json")[1])["items"] == [job]


def test_a_phase_of_a_newer_agent_is_shown_as_it_is(swarm, agent):
    agent.answers["GET /v1/jobs"] = listing(job_document(state="starting", phase="warm-up"))
    assert " starting: warm-up " in swarm("ps")[1]


def test_every_phase_has_words():
    assert set(WORDS) == {phase.value for phase in StartPhase if phase is not StartPhase.NONE}


WAITS = job_document(state="queued", outlook=OUTLOOK, as_of="2026-01-31T12:00:00.250Z", spec={})
NO_OUTLOOK = dict.fromkeys(OUTLOOK) | {"problem": "2 jobs wait before it"}


@pytest.mark.parametrize(
    ("job", "told", "text"),
    [
        (WAITS, "~2:15", "2026-01-31T12:02:15Z, in 2:15 (59s to 4:59), if nobody else comes"),
        (WAITS | {"as_of": "2026-01-31T12:02:20Z"}, "~0s", "at any moment"),
        (WAITS | {"outlook": NO_OUTLOOK}, "?", "not known: 2 jobs wait before it"),
        (WAITS | {"outlook": None}, "?", "not known: nothing was planned in time"),
        (job_document(state="queued"), "?", "not known: nothing was planned in time"),
        (WAITS | {"state": "running"}, "-", None),
    ],
)
def test_when_a_job_starts_is_told_with_its_interval_or_why_nobody_knows(job, told, text):
    shown = read(job, JobDocument)
    assert outlook.shown_start(shown) == told
    assert text is None or outlook.start_text(shown) == text


NOON_UTC_S = 1_769_860_800.0


@pytest.mark.parametrize(
    ("outlook_keys", "ranks_most", "text"),
    [
        ({"deadline": "met"}, 0, "yes, from 2026-01-31T12:02:15Z on"),
        ({"deadline": "met", "starts_at": None}, 0, "yes"),
        (
            {"deadline": "likely", "starts_at": None, "ranks_least": 2},
            4,
            "yes as expected, though not if all goes slowly; it needs 2 ranks for that",
        ),
        ({"deadline": "late"}, 0, "no, it ends 2:15 later as expected"),
        ({"deadline": "unknown", "problem": "why"}, 0, "not known whether it ends by then, since why"),
        ({"deadline": "unknown"}, 0, "not known whether it ends by then, since how long it takes is not known"),
    ],
)
def test_whether_a_job_ends_by_its_deadline_is_said_in_words(outlook_keys, ranks_most, text):
    spec = {"deadline_utc_seconds": NOON_UTC_S + 3_600}
    job = WAITS | {"outlook": OUTLOOK | outlook_keys, "spec": spec, "ranks": 1, "ranks_most": ranks_most}
    told = outlook.deadline_text(read(job, JobDocument))
    assert told == f"2026-01-31T13:00:00Z: {text}"


def test_status_tells_what_is_to_come_how_fair_that_is_and_what_pauses_have_cost(swarm, agent):
    told = {"outlook": OUTLOOK, "as_of": "2026-01-31T12:00:00.250Z", "paused_seconds": 12.0, "paused_ratio": 0.0125}
    told["pause_budget_ratio"] = 0.05
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(state="queued", **told)
    out = swarm("status", HANDLE)[1]
    assert "Starts:        2026-01-31T12:02:15Z, in 2:15 (59s to 4:59), if nobody else comes\n" in out
    assert "Ends:          2026-01-31T13:02:15Z, in 1:02:15 (49:59 or more), if nobody else comes\n" in out
    assert "Fairness:      rho 1.25: " in out
    assert "Pauses:        12s in all for other sizes or hosts, 1.2% of its time (budget 5%)\n" in out


def test_a_submission_with_a_deadline_is_told_what_to_expect(swarm, agent):
    soon = {"deadline_utc_seconds": NOON_UTC_S + 3_600}
    agent.answers["POST /v1/jobs"] = job_document(outlook=OUTLOOK | {"deadline": "late"}, spec=soon, state="queued")
    err = swarm("submit", "--no-sync", "--deadline", "2h", "--", "x")[2]
    assert "swarm: deadline 2026-01-31T13:00:00Z: no, it ends 2:15 later as expected\n" in err


def test_an_empty_list_is_its_headings(swarm, agent):
    agent.answers["GET /v1/jobs"] = listing()
    assert swarm("queue") == (
        0,
        "ID  NAME  USER  STATE  GPUS  NODES  WAITED  START  ELAPSED  PROGRESS  ETA  REASON\n",
        "",
    )


def test_ps_filters_reach_the_agent_and_silent_nodes_are_named(swarm, agent):
    agent.answers["GET /v1/jobs"] = listing(silent_nodes=["gpu3"])
    code, _, err = swarm("ps", "-a", "--mine", "--state", "queued,running", "--limit", "5")
    assert (code, err) == (0, "swarm: gpu3 did not answer; its jobs are shown as last heard of\n")
    assert ("GET", "/v1/jobs", {"all": "1", "state": "queued,running", "limit": "5", "user": "ada"}) in agent.requests


def test_a_list_that_no_answer_can_hold_is_read_page_by_page(swarm, agent):
    """As far as the limit goes; who was silent at one page counts for all."""

    def page(_, query):
        first = int(query.get("cursor", "0"))
        end = min(2_500, first + int(query["limit"]))
        jobs = [job_document(handle=f"job{number}") for number in range(first, end)]
        cursor = str(end) if end < 2_500 else None
        return listing(*jobs, total=2_500, next_cursor=cursor, silent_nodes=["gpu3"] if first == 1_000 else [])

    agent.answers["GET /v1/jobs"] = page
    for limit, limits in ((2_499, ["1000", "1000", "499"]), (5_000, ["1000"] * 3)):
        agent.requests.clear()
        code, out, err = swarm("ps", "--limit", str(limit), "-o", "name")
        assert (code, out.split()) == (0, [f"job{number}" for number in range(min(limit, 2_500))])
        asked = [(query.get("cursor"), query["limit"]) for _, path, query in agent.requests if path == "/v1/jobs"]
        assert [each for _, each in dict.fromkeys(asked)] == limits  # a slow answer is asked for once more
        assert "gpu3 did not answer" in err
        assert ("1 more job is not shown; use --limit" in err) == (limit == 2_499)
    assert "2400 more jobs are not shown; use --limit" in swarm("ps")[2]


@pytest.mark.parametrize(
    ("words", "out"),
    [
        (["-q"], f"{HANDLE}\n"),
        (["-o", "name"], f"{HANDLE}\n"),
        (["--format", "{{.handle}} {{ nodes.0.node }}\\t{{signal}}"], f"{HANDLE} gpu1\t<none>\n"),
        (["-o", "custom-columns=WHO:user,gpus"], "WHO  gpus\nada  4\n"),
    ],
)
def test_other_formats(swarm, agent, words, out):
    agent.answers["GET /v1/jobs"] = listing(job_document())
    assert swarm("ps", *words)[:2] == (0, out)


def test_json_jsonl_and_yaml_hold_the_same(swarm, agent):
    agent.answers["GET /v1/jobs"] = listing(job_document())
    document = json.loads(swarm("ps", "-o", "json")[1])
    assert (document["api_version"], document["items"]) == ("v1", [job_document()])
    assert yaml.safe_load(swarm("ps", "-o", "yaml")[1]) == document
    assert json.loads(swarm("ps", "-o", "jsonl")[1]) == job_document()


def test_a_wrong_format_or_field_names_the_nearest(swarm, agent):
    agent.answers["GET /v1/jobs"] = listing(job_document())
    assert "did you mean json?" in swarm("ps", "-o", "jsom")[2]
    code, _, err = swarm("ps", "--format", "{{stat}}")
    assert (code, err.splitlines()[0]) == (2, "swarm: there is no field 'stat'; did you mean state?")


def test_control_characters_of_a_name_never_reach_the_terminal(swarm, agent):
    agent.answers["GET /v1/jobs"] = listing(job_document(name="a\x1b[31mb"))
    out = swarm("ps")[1]
    assert "\x1b" not in out
    assert "a?[31mb" in out


def test_nodes_say_whose_processes_hold_a_gpu(swarm, agent):
    agent.answers["GET /v1/nodes"] = listing(
        node("gpu1"), node("gpu2", status="suspect", total_gpus=None, gpus=None, jobs=None)
    )
    code, out, _ = swarm("nodes")
    assert code == 0
    lines = out.splitlines()
    assert lines[1].endswith("k3j9x0ab  2x NVIDIA H200  GPU 1 foreign: python3 (4711) of alice")
    assert lines[2].split()[:3] == ["gpu2", "suspect", "-"]


def test_a_node_is_shown_with_its_state_and_address_also_when_it_is_gone(swarm, agent):
    agent.answers["GET /v1/nodes/gpu2"] = node("gpu2", status="failed", gpus=None, since_seconds=75.0)
    code, out, _ = swarm("nodes", "gpu2")
    address = node("gpu2")["address"]
    assert (code, out) == (0, f"gpu2 at {address}: failed for 1:15\n")


def test_nodes_are_in_the_order_of_their_numbers(swarm, agent):
    agent.answers["GET /v1/nodes"] = listing(*(node(name) for name in ("gpu1", "gpu10", "gpu2", "a-3-x")))
    assert swarm("nodes", "-q") == (0, "a-3-x\ngpu1\ngpu2\ngpu10\n", "")


def progress_of(swarm, agent, progress):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(progress=progress)
    lines = [line.split(":", 1) for line in swarm("status", HANDLE)[1].splitlines() if ":" in line]
    told = {name: text.strip() for name, text in lines}
    return [told[name] for name in ("Progress", "Speed", "Starves", "Remaining", "Reported") if name in told]


def test_status_tells_how_far_a_job_is_how_fast_and_what_is_left(swarm, agent):
    assert progress_of(swarm, agent, PROGRESS) == [
        "25%, step 250 of 1000, epoch 1.5, loss 0.3142",
        "0.3 s a step, 213.3 samples/s",
        "3:45 (3:35 to 3:55), by the declared steps",
        "2025-01-31T12:01:15Z by rank 0",
    ]


def test_status_says_when_training_waits_for_data_much_of_its_time(swarm, agent):
    told = progress_of(swarm, agent, PROGRESS | {"data_wait": 0.452})
    assert told[2] == "45% of its time waits for data (an input group may load it; swarm why)"
    assert len(progress_of(swarm, agent, PROGRESS | {"data_wait": 0.1})) == 4


def test_status_tells_how_ranks_that_train_apart_stand(swarm, agent):
    learners = [
        {"rank": 0, "rounds": 9, "version": 9, "wait_ratio": 0.031},
        {"rank": 1, "rounds": 8, "version": 8, "wait_ratio": 0.2},
    ]
    shown = {"learners": learners}
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(progress=PROGRESS | shown)
    out = swarm("status", HANDLE)[1]
    assert "version 9; rank 1: 8 rounds, 1 version behind, waits 20%; rank 0: 9 rounds, waits 3%\n" in out
    many = [learners[0] | {"rank": rank} for rank in range(10)]
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(progress=PROGRESS | {"learners": many})
    assert "rank 7: 9 rounds, waits 3%; and 2 more\n" in swarm("status", HANDLE)[1]


def test_status_says_where_no_rank_trains_apart_though_it_was_asked_for(swarm, agent):
    document = job_document(state="running", progress=PROGRESS)
    document["spec"] = {**document["spec"], "outer": "on"}
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = document
    assert "no rank has entered swarm_elastic.Outer" in swarm("status", HANDLE)[1]


def test_status_says_what_of_the_reports_was_odd_without_steering_the_terminal(swarm, agent):
    odd = {"oddities": {"not_finite": 2, "backward": 1}, "problem": "loss nan is not finite\x1b[31m", "loss": None}
    said = progress_of(swarm, agent, PROGRESS | odd)[-1]
    assert said == "2025-01-31T12:01:15Z by rank 0 (1 backward, 2 not_finite; loss nan is not finite?[31m)"


def test_an_interval_whose_ends_read_the_same_is_left_out(swarm, agent):
    soon = PROGRESS | {"remaining_seconds": 6.2, "remaining_seconds_low": 6.0, "remaining_seconds_high": 6.9}
    assert progress_of(swarm, agent, soon)[2] == "6s, by the declared steps"


def test_a_curve_that_may_never_come_down_has_no_upper_end(swarm, agent):
    by_loss = PROGRESS | {"source": "loss", "remaining_seconds_high": None}
    assert progress_of(swarm, agent, by_loss)[2] == "3:45 (3:35 or more), by the curve of its loss"


def test_what_is_left_by_a_time_limit_is_shown_as_a_limit(swarm, agent):
    assert progress_of(swarm, agent, BY_LIMIT) == ["50%", "1:15 at most, by its time limit"]
    agent.answers["GET /v1/jobs"] = listing(job_document(progress=BY_LIMIT))
    assert swarm("ps")[1].splitlines()[1].split()[-3:] == ["50%", "<1:15", "-"]


def test_where_nothing_is_known_that_is_said_and_the_step_is_shown(swarm, agent):
    unknown = dict.fromkeys(PROGRESS) | {"attempt": 1, "source": "unknown"}
    (said,) = progress_of(swarm, agent, unknown)
    assert said == "unknown: no time limit, and no total_steps, total_epochs or target_loss was reported"
    (said,) = progress_of(swarm, agent, unknown | {"target_loss": 0.1})
    assert said == "unknown: whether the loss comes down to 0.1"
    (told, said) = progress_of(swarm, agent, unknown | {"step": 10, "total_steps": 100})
    assert (told, said) == ("step 10 of 100", "unknown until training is seen to advance")
    bad = {"oddities": {"out_of_range": 6}, "problem": "step -6 is out of range"}
    assert progress_of(swarm, agent, unknown | bad)[-1] == (
        "nothing that could be taken (6 out_of_range; step -6 is out of range)"
    )
    agent.answers["GET /v1/jobs"] = listing(job_document(progress=unknown | {"step": 12_345_678}))
    assert swarm("ps")[1].splitlines()[1].split()[-4:] == ["step", "12345678", "-", "-"]


def test_many_checkpoints_do_not_hide_what_happened_to_a_job(swarm, agent):
    kinds = ["job.placed", "job.restarted", *["job.checkpointed"] * 30]
    events = [event(f"t{number}", kind, "x") for number, kind in enumerate(kinds)]
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(attempt=2, restarts=1)
    agent.answers["GET /v1/events"] = listing(*events)
    code, out, _ = swarm("status", HANDLE)
    assert code == 0
    shown = [line.split()[2] for line in out[out.index("Events:") :].splitlines()[1:]]
    assert shown == ["job.placed", "job.restarted", "job.checkpointed"]
    assert "(the first attempt after 1.0s in the queue)" in out
    assert "restarted 1 time after losing a node" in out


def test_the_version_is_told_as_other_programs_do(swarm):
    assert swarm("--version") == swarm("version")


def test_a_full_disk_behind_the_output_is_no_internal_error(agent):
    environment = {**os.environ, "SWARM_HOSTS": agent.address, "SWARM_TOKEN": TOKEN}
    command = [sys.executable, "-c", "import sys; from swarm_client.cli import main; sys.exit(main())", "version"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    told = "swarm: the output cannot be written: No space left on device\n  make room where it goes\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_doctor_says_once_what_several_agents_say_alike():
    same = {"name": "token", "status": "warning", "detail": "none", "remedy": "make one"}
    items = [{"node": f"n{number}", **same} for number in range(5)]
    assert doctor._brief(items) == [{"node": "n0, n1, n2 and 2 more", **same}]


def test_why_says_what_is_needed_what_is_free_and_who_is_ahead(swarm, agent):
    ahead = {"job_id": "x", "id": "x", "handle": "bbbbbbbb", "name": "big", "user": "bob", "ranks": 1, "gpus": 1}
    agent.answers[f"GET /v1/jobs/{HANDLE}/why"] = why_document(
        summary="3 GPUs are missing",
        needs={"ranks": 4, "gpus_per_rank": 1, "gpus": 4},
        free={"gpus": 1, "total_gpus": 6, "nodes": 3},
        nodes=[
            {"node": "gpu1", "fits_ranks": 1, "obstacle": "1 of 2 GPUs free"},
            {"node": "gpu2", "fits_ranks": 0, "obstacle": "0 of 2 GPUs free"},
        ],
        ahead=[{**ahead, "reason": "submitted earlier"}],
        staleness_seconds=0.4,
    )
    assert swarm("why", HANDLE) == (
        0,
        (
            "Job k3j9x0ab is queued: 3 GPUs are missing\n"
            "It needs 4 ranks with 1 GPU each, 4 GPUs in all.\n"
            "Free now: 1 of 6 GPUs on 3 nodes.\n"
            "What stands against it on each node:\n"
            "  gpu1: 1 rank would fit; 1 of 2 GPUs free\n"
            "  gpu2: 0 of 2 GPUs free\n"
            "Expected start: not known: nothing was planned in time.\n"
            "1 job ahead of it (policy fifo):\n"
            "  bbbbbbbb big of bob: submitted earlier\n"
        ),
        "",
    )


def test_why_has_the_nodes_in_the_order_of_their_numbers(swarm, agent):
    nodes = [{"node": f"gpu{number}", "fits_ranks": 0, "obstacle": "is full"} for number in (1, 10, 2)]
    agent.answers[f"GET /v1/jobs/{HANDLE}/why"] = why_document(nodes=nodes)
    named = [line.split(":")[0] for line in swarm("why", HANDLE)[1].splitlines() if line.endswith("is full")]
    assert named == ["  gpu1", "  gpu2", "  gpu10"]


SPEED = [
    {"ranks": 1, "nodes": 1, "step_seconds": 0.4, "samples_per_second": 160.0, "source": "measured"},
    {"ranks": 2, "nodes": 1, "step_seconds": 0.22, "samples_per_second": 290.9, "source": "measured"},
    {"ranks": 4, "nodes": 2, "step_seconds": 0.131, "samples_per_second": 488.5, "source": "fitted"},
]
MODEL = {
    "global_batch": 64,
    "speed": [{**row, "is_current": row["ranks"] == 2} for row in SPEED],
    "speed_error_ratio": 0.03,
    "grad_noise": 12.5,
    "remaining_steps": None,
    "remaining_error_ratio": None,
    "warmup_seconds": 28.0,
    "is_prior": False,
}
TABLE = """\
Speed by its model (2 sizes measured, the fit is off by 3%), global batch 64, gradient noise 12.5, \
begins to train 28s after its ranks run:
  RANKS  GPUS  NODES  S/STEP  SAMPLES/S  SPEED-UP  BY
      1     2      1     0.4        160      1.00  measured
      2     4      1    0.22      290.9      1.82  measured, now
      4     8      2   0.131      488.5      3.05  fitted
"""


def test_a_job_that_takes_several_sizes_is_shown_with_its_model_and_why_it_has_this_one(swarm, agent):
    spec = {"ranks": 1, "ranks_most": 4, "gpus_per_rank": 2}
    agent.answers["GET /v1/events"] = {"items": [], "next_cursor": None}
    shown = {"model": MODEL, "size_reason": "one more rank would make it 30% faster, by its model", "world_size": 2}
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(spec=spec, gpus_per_rank=2, **shown)
    _, out, _ = swarm("status", HANDLE)
    assert "Needs:         1 to 4 ranks with 2 GPUs each\n" in out
    assert "Has:           2 ranks: one more rank would make it 30% faster, by its model\n" in out
    assert TABLE in out
    left = {
        "attempt": 1,
        "source": "steps",
        "remaining_seconds": 90.0,
        "remaining_seconds_low": 80.0,
        "remaining_seconds_high": 101.0,
        "oddities": {"contradiction": 3},
        "problem": "contradiction: step 40 is beyond total_steps 30",
    }
    agent.answers[f"GET /v1/jobs/{HANDLE}/why"] = why_document(
        state="running",
        summary="takes 1 to 4 ranks and has 2",
        needs={**spec, "gpus": 2},
        free={"gpus": 0, "total_gpus": 8, "nodes": 2},
        progress=left,
        model=MODEL,
    )
    assert swarm("why", HANDLE)[1] == (
        f"Job {HANDLE} is running: takes 1 to 4 ranks and has 2\n"
        "It needs 1 to 4 ranks with 2 GPUs each.\n"
        "Left: 1:30 (1:20 to 1:41), by the declared steps.\n"
        "Odd about its reports: 3 contradiction; contradiction: step 40 is beyond total_steps 30.\n"
        "Free now: 0 of 8 GPUs on 2 nodes.\n" + TABLE
    )


def test_sizes_that_nobody_ran_are_not_told_for_more_than_they_are(swarm, agent):
    agent.answers["GET /v1/events"] = {"items": [], "next_cursor": None}
    model = {**MODEL, "speed": [{**row, "is_current": False} for row in SPEED[1:]], "is_prior": True}
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document(model=model, gpus_per_rank=1)
    told = (
        "(1 size measured, taken from jobs of its kind, and other sizes are taken to scale perfectly until one was run)"
    )
    assert told in swarm("status", HANDLE)[1]


def test_status_of_an_ended_job(swarm, agent):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = ended(
        3, "failed", detail="rank 2 exited with 3", failed_node="gpu2", failed_rank=2
    )
    code, out, _ = swarm("describe", HANDLE)
    assert code == 0
    for line in ("State:         failed", "Exit code:     3", "Failed on:     gpu2, rank 2", "Variables:     SEED=1"):
        assert line in out.splitlines()


def test_status_tells_which_labels_a_job_requires(swarm, agent):
    job = ended(0, "completed")
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job | {"spec": job["spec"] | {"require": ["nvlink", "engine"]}}
    needs = next(line for line in swarm("status", HANDLE)[1].splitlines() if line.startswith("Needs:"))
    assert needs.endswith(", on nodes with nvlink, engine")


def test_status_shows_what_the_shepherd_was_told_last_where_more_is_asked_for(swarm, agent):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = ended(3, "failed")
    step = {"at": "2026-01-31T11:04:00Z", "told": "TaskReport", "by": "gpu2\x1b[2J", "changes": ["Ended"]}
    agent.answers[f"GET /v1/jobs/{ended(3, 'failed')['id']}/why"] = why_document(trail=[step])
    assert "Trail" not in swarm("status", HANDLE)[1]
    lines = swarm("status", "-v", HANDLE)[1].splitlines()
    assert "Trail of its shepherd:" in lines[-2]
    assert lines[-1].endswith(" TaskReport by gpu2?[2J -> Ended")


def test_an_unknown_job_is_3_and_names_the_nearest(swarm):
    assert swarm("status", "digit") == (3, "", "swarm: cannot show digit: no such job: digit\n  did you mean digits?\n")


def test_an_ambiguous_prefix_lists_the_matches(swarm, agent):
    matches = [{"handle": "k3j9x0ab", "name": "a"}, {"handle": "k3zzzzzz", "name": ""}]
    agent.answers["POST /v1/jobs/k3/cancel"] = (409, problem(409, "ambiguous", "k3 fits 2 jobs", matches=matches))
    code, _, err = swarm("cancel", "k3")
    assert (code, err) == (5, "swarm: cannot cancel k3: k3 fits 2 jobs\n  it may be k3j9x0ab a, k3zzzzzz\n")


def test_cancel_mine_stops_each_live_job(swarm, agent):
    agent.answers["GET /v1/jobs"] = listing(job_document(), job_document(id="other"))
    assert swarm("cancel", "--mine", "--grace", "1s")[0] == 0
    sent = [(path, body) for method, path, body in agent.requests if method == "POST"]
    assert sent == [
        (f"/v1/jobs/{JOB_ID}/cancel", {"grace_seconds": 1.0}),
        ("/v1/jobs/other/cancel", {"grace_seconds": 1.0}),
    ]


def test_cancel_asks_before_it_stops_the_jobs_of_others(swarm, agent):
    agent.answers["GET /v1/jobs"] = listing(job_document(user="bob"))
    code, _, err = swarm("cancel", "--all")
    assert (code, "1 of 1 jobs are not yours" in err) == (2, True)
    assert [method for method, _, _ in agent.requests] == ["GET"]


@pytest.mark.parametrize(
    ("text", "per_rank", "body", "told"),
    [
        ("4", 1, {"ranks": 4, "ranks_most": 0}, "has 2 ranks and gets 4 ranks as soon as there is room"),
        ("4:8", 2, {"ranks": 2, "ranks_most": 4}, "goes on with 2 ranks, of 2 to 4 ranks"),
        ("1", 0, {"ranks": 1, "ranks_most": 0}, "has 2 ranks and gets 1 rank as soon as there is room"),
    ],
)
def test_scale_says_in_ranks_what_was_asked_for_in_gpus(swarm, agent, text, per_rank, body, told):
    job = job_document(gpus_per_rank=per_rank, world_size=2)
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = (200, job)
    agent.answers[f"POST /v1/jobs/{JOB_ID}/scale"] = (202, job)
    assert swarm("scale", HANDLE, text) == (0, f"{HANDLE}\n", f"swarm: job {HANDLE} {told}\n")
    assert ("POST", f"/v1/jobs/{JOB_ID}/scale", body) in agent.requests


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("scale", HANDLE), "name one job and a number of GPUs"),
        (("scale", HANDLE, "0"), "'0' must be at least 1"),
        (("scale", HANDLE, "4:2"), "'4:2' MIN 4 is larger than MAX 2"),
        (("scale", HANDLE, "four"), "'four' must be a whole number"),
        (("scale", HANDLE, "\udcff"), "must be a whole number"),
        (("scale", HANDLE, "3"), "3 cannot be split into ranks of 2 GPUs"),
        (("migrate", HANDLE), "say where it is to go"),
        (("migrate", HANDLE, "--to", " , "), "say where it is to go"),
    ],
)
def test_sizes_and_places_that_cannot_be_are_not_asked_for(swarm, agent, words, problem):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = (200, job_document(gpus_per_rank=2))
    code, _, err = swarm(*words)
    assert (code, problem in err) == (2, True), err
    assert not [method for method, _, _ in agent.requests if method == "POST"]


def test_migrate_names_nodes_to_go_to_and_to_leave(swarm, agent):
    agent.answers[f"POST /v1/jobs/{HANDLE}/migrate"] = (202, job_document())
    assert swarm("migrate", HANDLE, "--to", "gpu4, gpu5", "--off", "gpu1")[0] == 0
    body = {"nodes": ["gpu4", "gpu5"], "avoid": ["gpu1"]}
    assert ("POST", f"/v1/jobs/{HANDLE}/migrate", body) in agent.requests


def test_status_tells_what_changes_of_size_have_cost(swarm, agent):
    change = {"decided_at": "2025-01-31T12:00:00.123Z", "ranks_before": 2, "reason": "somebody wants it elsewhere"}
    changes = [{**change, "ranks_after": 4, "pause_seconds": 3.14}]
    changes += [{**change, "ranks_after": None, "pause_seconds": None}]
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = (200, job_document(rescalings=changes))
    out = swarm("status", HANDLE)[1]
    assert "Rescaled:      2 to 4 ranks, 2025-01-31T12:00:00Z, its ranks ran again after 3.1 s: somebody wants" in out
    assert "Rescaled:      from 2 ranks, 2025-01-31T12:00:00Z, not running again yet: somebody" in out


def world(workers, version=7, **changes):
    """`workers`: node and state by number."""
    items = [{"worker": number, "node": node, "state": state} for number, (node, state) in workers.items()]
    return {"version": version, "workers": items, "lost": [], "last_worker": max(workers, default=0), **changes}


def trains(*numbers, node="n1"):
    return dict.fromkeys(numbers, (node, "training"))


def elastic(workers, **changes):
    """A job whose workers come and go; on n9 they are paused."""
    nodes = dict.fromkeys(node for node, _ in workers.values())
    shares = [{"node": node, "ranks": 1, "first_rank": None, "is_paused": node == "n9"} for node in nodes]
    spec = {"command": ["x"], "ranks": 2, "ranks_most": 4, "gpus_per_rank": 1, "elastic": True}
    return job_document(**{"nodes": shares, "world": world(workers), "spec": spec, "ranks": 2, **changes})


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (elastic(trains(1)), "1 trains (membership 7) on n1 (1: 1)"),
        (
            elastic(trains(1, 3) | trains(4, 5, node="n2") | {6: ("n3", "joining")}),
            "4 train (membership 7) on n1 (2: 1 3), n2 (2: 4 5); joining: 6 on n3",
        ),
        (
            elastic(trains(2) | {7: ("n1", "joining"), 8: ("n2", "joining"), 1: ("n9", "leaving")}),
            "1 trains (membership 7) on n1 (1: 2); joining: 7 on n1, 8 on n2; leaving: 1 on n9",
        ),
        (elastic(trains(2, 3, 4, 7, node="n9")), "4 train (membership 7) on n9 (4: 2-4 7, paused)"),
        (
            elastic({}, world=world({1: ("n1", "joining"), 2: ("n1", "joining")}, version=0)),
            "2 start on n1 (2: 1 2)",
        ),
        (elastic(trains(1, 2), state="ended", end_reason="completed"), "2 trained (membership 7) on n1 (2: 1 2)"),
        (elastic(trains(4), world=world(trains(4), lost=[2, 3])), "1 trains (membership 7) on n1 (1: 4); lost: 2 3"),
        (
            elastic(trains(40), world=world(trains(40), lost=[*range(1, 20)])),
            "1 trains (membership 7) on n1 (1: 40); lost: 12-19 and 11 before",
        ),
    ],
)
def test_status_of_an_elastic_job_says_who_trains_where(swarm, agent, job, line):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job
    out = swarm("status", HANDLE)[1]
    assert f"Workers:       {line}\n" in out
    assert "Nodes:" not in out
    assert "Needs:         2 to 4 ranks with 1 GPU each, elastic\n" in out


@pytest.mark.parametrize("nodes", [1, 8, 64])
def test_sixty_four_workers_are_told_in_a_few_words(swarm, agent, nodes):
    workers = {number: (f"n{(number - 1) * nodes // 64}", "training") for number in range(1, 65)}
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = elastic(workers)
    out = swarm("status", HANDLE)[1]
    (line,) = [line for line in out.splitlines() if line.startswith("Workers:")]
    assert "64 train (membership 7) on n0 (" in line
    assert len(line) < 260
    assert line.endswith(" and 48 more nodes") == (nodes == 64)


def test_an_elastic_job_that_waits_has_neither_workers_nor_nodes(swarm, agent):
    waits = {"version": 0, "workers": [], "lost": [], "last_worker": 0}
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = elastic({}, state="queued", world=waits, started_at=None)
    out = swarm("status", HANDLE)[1]
    assert "Workers:" not in out
    assert "Nodes:" not in out


def test_what_changes_of_an_elastic_job_cost_is_told_to_the_millisecond(swarm, agent):
    change = {"decided_at": "2025-01-31T12:00:00.123Z", "ranks_before": 2, "reason": "it gains"}
    changes = [
        {**change, "ranks_after": 4, "pause_seconds": 0.0432},
        {**change, "ranks_after": None, "pause_seconds": None},
    ]
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = elastic(trains(1, 2), rescalings=changes)
    out = swarm("status", HANDLE)[1]
    assert "Rescaled:      2 to 4 ranks, 2025-01-31T12:00:00Z, paused 0.043 s: it gains\n" in out
    assert "Rescaled:      from 2 ranks, 2025-01-31T12:00:00Z, under way: it gains\n" in out
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = elastic(trains(1, 2), rescalings=changes[::-1])
    assert "Rescaled:      from 2 ranks, 2025-01-31T12:00:00Z, overtaken: it gains\n" in swarm("status", HANDLE)[1]


def test_what_is_wrong_with_workers_is_told_once_for_those_that_say_the_same(swarm, agent):
    waits = "has waited for 30 s for all ranks to call step(), in round 7"
    job = elastic(trains(1, 2, 3))
    for each in job["world"]["workers"]:
        each["problem"] = "stands still: \x1b[31m" if each["worker"] == 2 else waits
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job
    out = swarm("status", HANDLE)[1]
    assert f"Problem:       worker 1 on n1 and 1 other: {waits}\n" in out
    assert "Problem:       worker 2 on" in out
    assert "\x1b" not in out


def test_an_elastic_job_is_scaled_and_migrated_while_it_trains(swarm, agent):
    job = elastic(trains(1, 2), world_size=2)
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job
    agent.answers[f"POST /v1/jobs/{JOB_ID}/scale"] = (202, job)
    agent.answers[f"POST /v1/jobs/{HANDLE}/migrate"] = (202, job)
    told = f"swarm: job {HANDLE} has 2 ranks and gets 4 ranks as soon as there is room, while it trains\n"
    assert swarm("scale", HANDLE, "4") == (0, f"{HANDLE}\n", told)
    told = f"swarm: job {HANDLE} moves while it trains; see swarm status {HANDLE}\n"
    assert swarm("migrate", HANDLE, "--off", "n1") == (0, f"{HANDLE}\n", told)


def test_logs_of_one_rank(swarm, agent):
    agent.stream = lambda _: iter([log("x\n", "1", rank=3)])
    assert swarm("logs", f"{HANDLE}.3", "--timestamps", "--label") == (0, "2025-01-31T12:00:02.000Z 3: x\n", "")
    assert ("GET", f"/v1/jobs/{HANDLE}/logs", {"rank": "3"}) in agent.requests


def test_logs_mark_every_line_with_time_and_rank(swarm, agent):
    agent.stream = lambda _: iter([log("a\nb\n", "1"), log("c\n", "2", rank=1)])
    time = "2025-01-31T12:00:02.000Z"
    assert swarm("logs", "digits", "--timestamps", "--label")[1] == f"{time} 0: a\n{time} 0: b\n{time} 1: c\n"


def test_logs_of_an_attempt_that_is_over_say_so(swarm, agent):
    told = "attempt 1, which is over; the job is queued"
    agent.stream = lambda _: iter([{"type": "attempt", "attempt": 1, "text": told, "cursor": "1"}, log("x\n", "2")])
    assert swarm("logs", HANDLE, "--attempt", "1") == (0, "x\n", f"swarm: {told}\n")
    assert ("GET", f"/v1/jobs/{HANDLE}/logs", {"attempt": "1"}) in agent.requests
    code, _, err = swarm("logs", HANDLE, "--attempt", "1", "-f")
    assert (code, "leave out --follow" in err) == (2, True)


def test_top_prints_one_frame_without_a_terminal(swarm, agent):
    agent.answers["GET /v1/status"] = status_document(
        {"alive": 1, "suspect": 1},
        {"total": 2, "free": 2, "leased": 0},  # gossip is seconds behind the owners
        {"running": 1, "queued": 2},
    )
    agent.answers["GET /v1/gpus"] = listing(
        gpu(0, state="leased", utilisation_ratio=0.5, memory_used_bytes=2**30), gpu(1)
    )
    agent.answers["GET /v1/jobs"] = listing(job_document())
    agent.answers["GET /v1/nodes"] = listing(node("gpu1"))
    code, out, err = swarm("top", "--once")
    assert (code, err) == (0, "")
    assert out.startswith("swarm: 1 node (1 away) | 1 of 2 GPUs busy, 1 free | 1 running, 2 queued | policy las\n")
    assert "0 [#####     ] 50% 1.0 GiB leased  1 free" in out
    agent.answers["GET /v1/nodes"] = listing(node("gpu1", is_draining=True))
    assert "1 of 2 GPUs busy, 0 free" in swarm("top", "--once")[1]


def test_doctor_names_an_unreachable_agent(swarm, point_at):
    point_at("127.0.0.1:1")
    code, out, err = swarm("doctor")
    assert code == 1
    assert "127.0.0.1:1" in out
    assert "failed" in out
    assert "`swarm doctor` looks closer" not in out
    assert err.startswith("swarm: 1 of ")


@pytest.mark.parametrize(
    "words",
    [
        ("status", "a\udcff"),
        ("logs", "a\udcff"),
        ("cancel", "--name", "a\udcff"),
        ("ps", "--user", "a\udcff"),
        ("nodes", "a\udcff"),
        ("events", "--kind", "a\udcff"),
    ],
)
def test_what_is_not_utf_8_names_nothing(swarm, words):
    """Bytes of the command line that no text has come to the program as surrogates."""
    assert swarm(*words) == (2, "", "swarm: 'a\\udcff' is not UTF-8\n  write it in UTF-8\n")


SETTING = {
    "api_version": "v1",
    "policy": "las",
    "parameters": {"quantum": 3.5, "knob": 1.0},
    "elasticity": "on",
    "version": 3,
}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nodes", ""), "'' names no node"),
        (("drain", ""), "'' names no node"),
        (("forget", ""), "'' names no node"),
        (("login", ""), "'' names no agent"),
        (("login", ","), "',' names no agent"),
        (("cancel", "x", "--signal", "\u00b2"), "--signal '\u00b2' is no signal"),
    ],
)
def test_names_and_numbers_that_nobody_would_type_are_usage_errors(swarm, agent, words, told):
    code, _, err = swarm(*words)
    assert (code, told in err, agent.requests) == (2, True, []), err


def test_the_swarms_policy_is_set_against_the_version_that_was_read(swarm, agent):
    setting = {"api_version": "v1", "policy": "fifo", "parameters": {}, "version": 3}
    agent.answers["GET /v1/config"] = setting
    agent.answers["PUT /v1/config"] = lambda body, query: setting | body | {"version": 4}
    assert swarm("config", "set", "--swarm", "policy=las", "quantum=3.5")[:2] == (
        0,
        "policy las, elasticity advise (version 4)\n  quantum = 3.5\n",
    )


def test_jobs_are_restartable_by_the_swarms_setting_and_it_says_so(swarm, agent):
    agent.answers["GET /v1/config"] = SETTING
    agent.answers["PUT /v1/config"] = lambda body, query: SETTING | body
    code, out, _ = swarm("config", "set", "--swarm", "restartable=true")
    assert (code, agent.requests[-1][2]["restartable"]) == (0, True)
    assert "policy las, elasticity on, jobs restartable unless they say no (version 3)\n" in out


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("queues=nan", "parameter queues: 'nan' must be a finite number such as 3, 0.5 or 1e-3"),
        ("queues=1e400", "parameter queues: '1e400' must be a finite number such as 3, 0.5 or 1e-3"),
        ("queues=1_0", "parameter queues: '1_0' must be a finite number such as 3, 0.5 or 1e-3"),
        ("polcy=las", "'polcy' takes no 'las'; did you mean policy?"),
        ("policy=fifo", "policy is given twice"),
        ("las", "'las' is not KEY=VALUE"),
        ("restartable=yes", "restartable: 'yes' says neither yes nor no"),
    ],
)
def test_a_setting_that_cannot_be_is_not_sent(swarm, agent, word, told):
    code, _, err = swarm("config", "set", "--swarm", "policy=las", word)
    assert (code, told in err, agent.requests) == (2, True, []), err


@pytest.mark.parametrize(
    ("key", "sent"),
    [
        ("policy", {"policy": "swarm"}),
        ("quantum", {"policy": "las", "parameters": {"knob": 1.0}}),
        ("elasticity", {"policy": "las", "parameters": {"quantum": 3.5, "knob": 1.0}, "elasticity": "on"}),
        ("restartable", {"policy": "las", "parameters": {"quantum": 3.5, "knob": 1.0}, "restartable": False}),
    ],
)
def test_a_part_of_the_swarms_setting_goes_back_to_its_default(swarm, agent, key, sent):
    agent.answers["GET /v1/config"] = SETTING
    agent.answers["PUT /v1/config"] = lambda body, query: SETTING | body
    assert swarm("config", "unset", "--swarm", key)[0] == 0
    assert agent.requests[-1] == ("PUT", "/v1/config", sent)


def test_what_is_not_set_cannot_be_unset(swarm, agent):
    agent.answers["GET /v1/config"] = SETTING
    known = "policy, elasticity, restartable, quantum, knob"
    told = f"swarm: 'quantm' is not set; did you mean quantum?\n  what can be unset: {known}\n"
    assert swarm("config", "unset", "--swarm", "quantm") == (2, "", told)
    assert swarm("config", "unset", "--swarm")[0] == 2
    assert swarm("config", "view", "--swarm", "policy")[0] == 2
    assert swarm("config", "view", "output")[0] == 2


def test_a_node_is_drained_with_a_reason_and_takes_work_again(swarm, agent):
    def drained(body, _):
        return {"api_version": "v1", "node": "gpu2", "is_draining": body["draining"], "drain_reason": body["reason"]}

    agent.answers["PUT /v1/nodes/gpu2/drain"] = drained
    told = (0, "gpu2\n", "swarm: gpu2 takes no new work; what runs there runs on\n")
    assert swarm("drain", "gpu2", "--reason", "new disk") == told
    assert agent.requests[-1][2] == {"draining": True, "reason": "new disk"}
    assert swarm("drain", "gpu2", "--off") == (0, "gpu2\n", "swarm: gpu2 takes work again\n")
    assert agent.requests[-1][2] == {"draining": False, "reason": ""}
    assert swarm("drain", "gpu2", "--off", "--reason", "done")[0] == 2
    assert swarm("drain", "gpu2", "--off", "--migrate")[0] == 2
    assert swarm("drain")[0] == 2


def test_jobs_of_a_drained_node_are_moved_and_those_that_stay_are_named(swarm, agent):
    agent.answers["PUT /v1/nodes/gpu2/drain"] = {"node": "gpu2", "is_draining": True, "drain_reason": ""}
    there, elsewhere = [{"node": "gpu1"}, {"node": "gpu2"}], [{"node": "gpu1"}]
    first = {**listing(job_document(id="a", handle="aa", nodes=there)), "next_cursor": "more"}
    last = listing(job_document(id="b", handle="bb", nodes=there), job_document(id="c", nodes=elsewhere))
    agent.answers["GET /v1/jobs"] = lambda _, query: last if query.get("cursor") == "more" else first
    agent.answers["POST /v1/jobs/a/migrate"] = (409, problem(409, "conflict", "there is no room elsewhere"))
    agent.answers["POST /v1/jobs/b/migrate"] = (202, job_document(id="b"))
    code, out, err = swarm("drain", "gpu2", "--migrate")
    assert (code, out) == (5, "gpu2\n")
    assert err == (
        "swarm: gpu2 takes no new work\n"
        "swarm: aa stays on gpu2: there is no room elsewhere\n"
        "swarm: bb goes on elsewhere\n"
    )
    assert agent.requests[-1] == ("POST", "/v1/jobs/b/migrate", {"avoid": ["gpu2"]})
    agent.answers["GET /v1/jobs"] = listing()
    assert swarm("drain", "gpu2", "--migrate")[::2] == (
        0,
        "swarm: gpu2 takes no new work\nswarm: nothing runs on gpu2\n",
    )


def test_a_node_is_given_up(swarm, agent):
    agent.answers["DELETE /v1/members/gpu2"] = {"api_version": "v1", "node": "gpu2", "is_forgotten": True}
    told = (0, "gpu2\n", "swarm: gpu2 is given up, and may come back as it likes\n")
    assert swarm("forget", "gpu2") == told
    refused = (409, problem(409, "conflict", "gpu2 is alive", remedy="stop its agent first"))
    agent.answers["DELETE /v1/members/gpu2"] = refused
    assert swarm("forget", "gpu2") == (5, "", "swarm: cannot forget gpu2: gpu2 is alive\n  stop its agent first\n")
    assert swarm("forget")[0] == 2


def test_nodes_say_why_they_drain(swarm, agent):
    agent.answers["GET /v1/nodes"] = listing(node("gpu1", gpus=[], is_draining=True, drain_reason="new disk"))
    assert "draining: new disk" in swarm("nodes")[1]


def test_nodes_say_why_they_are_avoided(swarm, agent):
    reason = "disk nearly full: 59.5 MiB free at /data, and 64 MiB are kept back"
    agent.answers["GET /v1/nodes"] = listing(node("gpu1", gpus=[], is_avoided=True, avoided_reason=reason))
    assert reason in swarm("nodes", "-o", "wide")[1]


@pytest.mark.parametrize("name", [*COMMANDS])
def test_every_command_explains_itself(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: swarm {name}")
    for option in load_command(name).options:
        assert option.hidden or option.later or option.names[-1] in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_command_can_be_read_by_it(name):
    command = load_command(name)
    for example in command.examples:
        program, named, *words = shlex.split(example)
        assert (program, named) == ("swarm", name)
        parse(words, (*command.options, *COMMON), takes_command=command.takes_command)


def test_completion_scripts_are_accepted_by_bash(swarm):
    Path("vars.txt").touch()
    script = swarm("completion", "bash")[1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    fake = (
        'swarm() { case "$*" in "nodes -q") echo node1 node2 ;; "ps "*) echo k3j9x0ab digits ;; '
        '"config view -q") printf "color\\ncontexts.lab\\n" ;; '
        '"local status -q") echo a1 ;; "local status --name X -q") echo x1 x2 ;; esac; }\n'
    )

    def completed(*words, fake=fake):
        asked = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _swarm; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", fake + script + asked], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert completed("swarm", "run", "--gp") == {"--gpus", "--gpus-per-rank", "--gpu-type", "--gpu-mem"}
    assert completed("swarm", "nodes", "n") == {"node1", "node2"}
    assert completed("swarm", "run", "--node", "node2") == {"node2"}
    assert completed("swarm", "ps", "--context", "l") == {"lab"}
    assert completed("swarm", "ps", "--context", "''", fake=fake.replace("contexts.lab", "x")) == set(), "no file names"
    assert completed("swarm", "logs", "d") == {"digits"}
    assert completed("swarm", "ps", "--state", "f") == {"failed"}
    assert completed("swarm", "status", "-o", "y") == {"yaml"}
    assert completed("swarm", "simulate", "''") == {"faults", "replay", "generate", "import"}
    assert completed("swarm", "local", "''") == {"up", "down", "status", "stop", "start"}
    assert completed("swarm", "local", "stop", "''") == {"a1"}
    assert completed("swarm", "local", "stop", "--name", "X", "''") == {"x1", "x2"}
    assert completed("swarm", "local", "--name", "X", "stop", "--kill", "''") == {"x1", "x2"}
    assert completed("swarm", "local", "stop", "''", fake="swarm() { false; }\n") == set(), "no actions for a node"
    assert completed("swarm", "config", "''") == {"view", "set", "unset"}
    assert completed("swarm", "config", "set", "job.q") == {"job.queue"}
    assert completed("swarm", "config", "unset", "''") == {"color", "contexts.lab"}
    assert completed("swarm", "--context", "''") == {"lab"}
    assert completed("swarm", "--context", "lab", "logs", "d") == {"digits"}
    assert completed("swarm", "--con") == {"--context"}
    assert completed("swarm", "help", "pl") | completed("swarm", "help", "comp") == {"completion"}
    assert completed("swarm", "events", "--kind", "h") == {"hold", "holder"}
    assert completed("swarm", "ps", "--user", "''") == completed("swarm", "ps", "''") == set(), "no file names"
    assert completed("swarm", "run", "--env-file", "vars") == completed("swarm", "submit", "vars") == {"vars.txt"}
    for shell in ("zsh", "fish"):
        code, out, _ = swarm("completion", shell)
        assert code == 0
        assert all(name in out for name in [*COMMANDS, *ALIASES])
    contexts = "-l context -r -a \"(swarm config view -q 2>/dev/null | string replace -rf '^contexts\\.' '')\""
    assert out.count(contexts) == len(COMMANDS) + len(ALIASES) + 1


def test_completion_knows_the_kinds_of_events():
    assert set(completion.EVENT_KINDS) == {kind.split(".")[0] for kind in KINDS}


def test_the_version_is_that_of_the_distribution(swarm):
    from importlib.metadata import version

    assert swarm("version") == (0, f"swarm {version('swarmsched')}\n", "")


def test_help_explains_the_swarm_and_each_command(swarm):
    assert swarm("help")[:2] == (0, swarm("--help")[1])
    assert swarm("help", "ps")[:2] == (0, swarm("ps", "--help")[1])
    assert swarm("help", "pss")[0] == 2


def test_nothing_is_free_on_a_node_that_is_gone(swarm, agent):
    gone = node("gpu1", status="failed", gpus=None, gpu_groups=[group("H200", 2)])
    agent.answers["GET /v1/nodes"] = listing(gone)
    line = swarm("nodes")[1].splitlines()[1]
    assert f"-/{gone['total_gpus']}" in line
    assert "2x H200" in line


def test_events_name_their_job_and_are_found_by_its_name(swarm, agent):
    ended_at = "2025-01-31T12:00:00.000Z"
    job = job_document()
    agent.answers["GET /v1/jobs/digits"] = job
    agent.answers["GET /v1/events"] = listing(event(ended_at, "job.ended", job_id=job["id"]))
    code, out, _ = swarm("events", "--job", "digits")
    assert (code, out.splitlines()[1].split()) == (0, [ended_at, "gpu1", "job.ended", HANDLE, "completed"])
    assert ("GET", "/v1/events", {"job": job["id"]}) in agent.requests


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_of_80_columns_has_room_for_the_reason(monkeypatch):
    """Where it runs, since when and who asked give way; a pipe shows all."""
    monkeypatch.setenv("COLUMNS", "80")
    reason = "needs 4 GPUs, 2 free; 3 jobs ahead"
    job = job_document(state="queued", nodes=[], started_at=None, reason=reason, user="ada.lovelace", name="resnet50")
    printer = Printer(color="never", stream=Terminal())
    assert printer.table_lines([read(job, JobDocument)], printer.chosen(ps.COLUMNS)) == [
        "ID        NAME      STATE   GPUS  REASON",
        "k3j9x0ab  resnet50  queued   0/4  needs 4 GPUs, 2 free; 3 jobs ahead",
    ]


@pytest.mark.parametrize("phase", WORDS)
def test_a_terminal_of_80_columns_has_room_for_the_phase_and_the_reason(monkeypatch, phase):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "gpu3 refused: its GPUs are in use"
    job = job_document(state="starting", phase=phase, reason=reason, user="ada.lovelace", name="resnet50")
    printer = Printer(color="never", stream=Terminal())
    (_, line) = printer.table_lines([read(job, JobDocument)], printer.chosen(ps.COLUMNS))
    assert (line.startswith("k3j9x0ab  resnet50  starting: "), line.endswith(reason), len(line) <= 80) == (True,) * 3


def test_a_starting_job_has_the_colour_of_its_state():
    assert state_style("starting: copying") == state_style("starting") != ""


@pytest.mark.parametrize("width", [113, 80, 60, 44])
def test_the_table_of_nodes_fits_a_narrow_terminal(monkeypatch, width):
    """Names, states, free GPUs and jobs are whole; what a node is made of and how busy it is give way."""
    monkeypatch.setenv("COLUMNS", str(width))
    printer = Printer(color="never", stream=Terminal())
    one = read(node("gpu1", jobs=[JOB_ID], gpus=[gpu(0), gpu(1)]), NodeDocument)
    heading, line = printer.table_lines([one], printer.chosen(nodes.COLUMNS))
    assert max(len(heading), len(line)) <= width
    assert ("FREE GPUS" in heading, HANDLE in line, "…" in heading + line) == (True, True, False)


def test_a_narrow_terminal_loses_the_columns_that_say_nothing_first(monkeypatch):
    columns = [Column(title, itemgetter(title)) for title in ("ID", "ETA", "REASON")]
    printer = Printer(color="never", stream=Terminal())
    job = {"ID": "k3j9x0ab", "ETA": "-", "REASON": "needs 6 GPUs, 2 free"}
    monkeypatch.setenv("COLUMNS", "20")
    assert printer.table_lines([job], columns) == ["ID        REASON", "k3j9x0ab  needs 6 G…"]
    monkeypatch.setenv("COLUMNS", "40")
    assert printer.table_lines([job], columns)[0] == "ID        ETA  REASON"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("logs", HANDLE, "-o", "json"), "-o does not go with `swarm logs`"),
        (("logs", HANDLE, "--format", "{{.text}}"), "--format does not go with `swarm logs`"),
        (("--output=json", "wait", HANDLE), "--output does not go with `swarm wait`"),
        (("attach", HANDLE, "-o", "name"), "-o does not go with `swarm attach`"),
        (("login", "gpu1", "-o", "json"), "-o does not go with `swarm login`"),
        (("run", "-o", "json", "--", "true"), "-o does not go with `swarm run`, which prints the job's output"),
        (("ps", "-w", "-o", "json"), "--watch shows tables alone"),
        (("events", "-f", "-o", "yaml"), "-o yaml does not go with --follow"),
        (("events", "-f", "-o", "custom-columns=KIND:kind"), "-o custom-columns does not go with --follow"),
    ],
)
def test_a_format_that_would_have_no_effect_is_refused(swarm, agent, words, told):
    code, out, err = swarm(*words)
    assert (code, out, err.startswith(f"swarm: {told}\n"), agent.requests) == (2, "", True, []), err


def test_the_help_has_formats_only_where_there_is_something_to_shape(swarm):
    assert "--format" in swarm("ps", "--help")[1]
    assert "--format" not in swarm("logs", "--help")[1]
    assert "--verbose" in swarm("logs", "--help")[1]


@pytest.mark.parametrize(
    ("words", "path", "pointer", "told"),
    [
        (("events", "--kind", "foo"), "GET /v1/events", "?kind", "cannot list events: --kind: is wrong"),
        (("migrate", "x", "--to", "a"), "POST /v1/jobs/x/migrate", "/nodes", "cannot migrate x: --to: is wrong"),
        (
            ("cancel", "x", "--grace", "9000d"),
            "POST /v1/jobs/x/cancel",
            "/grace_seconds",
            "cannot cancel x: --grace: is",
        ),
        (("config", "set", "--swarm", "a=1"), "PUT /v1/config", "/parameters/a", "setting: parameters.a: is wrong"),
    ],
)
def test_what_is_wrong_with_a_request_is_named_as_it_was_typed(swarm, agent, words, path, pointer, told):
    errors = [{"pointer": pointer, "detail": "is wrong", "remedy": "mend it"}]
    agent.answers["GET /v1/config"] = SETTING
    agent.answers[path] = (400, problem(400, "bad_parameter", "bad", errors=errors))
    code, _, err = swarm(*words)
    assert (code, told in err) == (2, True), err


def lines_at(width, monkeypatch, *jobs):
    monkeypatch.setenv("COLUMNS", str(width))
    printer = Printer(color="never", stream=Terminal())
    return printer.table_lines(ps.by_turn(jobs), printer.chosen(ps.COLUMNS))


def test_a_long_name_gives_way_before_a_column_does(monkeypatch):
    long = job_document(name="x" * 50)
    titles, line = lines_at(100, monkeypatch, long)
    assert {"ELAPSED", "NODES"} <= set(titles.split())
    assert f" {'x' * 23}… " in line
    assert "x" * 50 in lines_at(160, monkeypatch, long)[1]


def test_jobs_that_wait_are_listed_in_the_order_of_the_queue(swarm, agent):
    def waiting(name, minute, priority=0):
        at = f"2025-01-31T12:{minute:02}:00.000Z"
        return job_document(name=name, state="queued", nodes=[], submitted_at=at, priority=priority)

    running = job_document(name="runs")
    agent.answers["GET /v1/jobs"] = listing(waiting("third", 3), running, waiting("first", 2), waiting("urgent", 4, 9))
    names = [line.split()[1] for line in swarm("ps")[1].splitlines()[1:]]
    assert names == ["runs", "urgent", "first", "third"]
    assert next(job["name"] for job in json.loads(swarm("ps", "-o", "json")[1])["items"]) == "third"


def test_sentences_break_between_words_on_a_terminal_and_not_in_a_pipe(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "Job k3j9x0ab is queued: needs 4 GPUs, 2 free; next in line, when the running jobs end"
    lines = Printer(stream=Terminal()).paragraph(text, 2).split("\n")
    assert max(map(len, lines)) <= 40
    assert [line[:2] for line in lines[1:]] == ["  ", "  "]
    assert " ".join(line.strip() for line in lines) == text
    assert Printer(stream=io.StringIO()).paragraph(text) == text


def test_gpus_of_an_ended_job_are_those_that_it_asked_for(swarm, agent):
    agent.answers["GET /v1/jobs"] = listing(ended())
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = ended()
    assert swarm("ps", "-a")[1].splitlines()[1].split()[4] == "4"
    assert "GPUs:          4, 300 GPU-seconds used" in swarm("status", HANDLE)[1]


def test_a_simulated_gpu_is_called_so_whoever_tells_of_it():
    own = node("gpu1", gpus=[gpu(0, model="Simulated-80G", is_simulated=True)])
    gossiped = node("gpu1", gpus=None, gpu_groups=[group("Simulated-80G", 1)])
    other = node("gpu1", gpus=[gpu(0, is_simulated=True)])
    items = [read(each, NodeDocument) for each in (own, gossiped, other)]
    shown = [next(c for c in nodes.COLUMNS if c.title == "MODEL").show(each) for each in items]
    assert shown == ["1x Simulated-80G", "1x Simulated-80G", "1x NVIDIA H200 (simulated)"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["node", "drain", "X"], "unknown command 'node'; did you mean drain X?"),
        (["job", "cancel", "X"], "unknown command 'job'; did you mean cancel X?"),
        (["node"], "unknown command 'node'; did you mean nodes?"),
        (["uncordon", "X"], "did you mean drain NODE --off?"),
        (["history"], "command 'history' is not available in this version\n  `swarm ps -a` lists ended jobs"),
        (["cp", "x"], "command 'cp' is not available in this version\n  write results to a shared folder"),
    ],
)
def test_a_command_that_is_not_there_names_the_way_of_today(swarm, words, told):
    code, _, err = swarm(*words)
    assert (code, told in err) == (2, True), err


def test_every_command_is_listed_once_in_its_group(swarm):
    out = swarm("--help")[1]
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)
    files = Path(doctor.__file__).parent.glob("*.py")
    assert sorted(listed) == sorted(file.stem for file in files if "\nCOMMAND = " in file.read_text())


@pytest.mark.parametrize(
    ("zone", "shown"),
    [
        ("UTC", "12:00:02.000Z"),
        ("CET-1", "13:00:02.000+01:00"),
        ("EST5", "07:00:02.000-05:00"),
        ("IND-5:30", "17:30:02.000+05:30"),
    ],
)
def test_people_see_the_time_of_their_zone_and_programs_utc(swarm, agent, monkeypatch, zone, shown):
    happened = event("2025-01-31T12:00:02.000Z", "job.ended")
    agent.answers["GET /v1/events"] = {"items": [happened], "next_cursor": None, "silent_nodes": []}
    agent.stream = lambda _: iter([log("a\n", "2")])
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert f"2025-01-31T{shown}" in swarm("events")[1]
        assert swarm("logs", HANDLE, "--timestamps")[1] == f"2025-01-31T{shown} a\n"
        assert happened["time"] in swarm("events", "-o", "json")[1]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_of_an_ended_job_the_output_comes_first_and_the_end_is_told_where_there_is_none(swarm, agent):
    agent.stream = lambda _: iter([state("ended", "1"), log("a\n", "2"), end("3")])
    assert swarm("logs", "-f", HANDLE) == (0, "a\n", "")
    agent.stream = lambda _: iter([state("ended", "1"), end("3", 3, "failed")])
    assert swarm("logs", "-f", HANDLE) == (0, "", f"swarm: job {HANDLE} failed (exit code 3)\n")


def test_status_of_an_ended_job_says_where_what_it_has_written_lies(swarm, agent):
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = ended()
    assert "Left behind" not in swarm("status", HANDLE)[1], "an older agent knows nothing of it"
    left = {"node": "gpu1", "attempt": 1, "path": "/d/jobs/x/1/work", "size_bytes": 5 * 2**30}
    agent.answers[f"GET /v1/jobs/{JOB_ID}/left"] = listing({**left, "until": "2025-02-07T12:00:00.123Z"})
    line = "Left behind:   gpu1, 5.0 GiB in /d/jobs/x/1/work, until 2025-02-07T12:00:00Z at the latest"
    assert line in swarm("status", HANDLE)[1].splitlines()
    agent.answers[f"GET /v1/jobs/{HANDLE}"] = job_document()
    assert "Left behind" not in swarm("status", HANDLE)[1]


def test_an_answer_that_cannot_be_read_is_shown_to_programs_and_explained_to_people(swarm, agent):
    agent.answers["GET /v1/nodes"] = listing(node("gpu1", free_gpus="two", later=1))
    code, out, err = swarm("nodes")
    assert (code, out) == (125, "")
    assert "an agent's answer cannot be read: Expected `int | null`, got `str` - at `$.free_gpus`" in err
    shown = json.loads(swarm("nodes", "-o", "json")[1])["items"][0]
    assert (shown["free_gpus"], shown["later"]) == ("two", 1)


def test_a_node_of_the_version_before_is_shown_without_what_it_does_not_tell(swarm, agent):
    older = node("gpu1")
    assert not {"labels", "is_avoided", "avoided_reason"} & older.keys()
    agent.answers["GET /v1/nodes"] = listing(older)
    heading, line = swarm("nodes", "-o", "wide")[1].splitlines()
    assert line[heading.index("LABELS")] == "-"

"""One job, asked for by any name at any agent."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm_agent.attendance import Attendance
from swarm_agent.http.job_document import ByRecord
from swarm_agent.http.jobs import signal_number
from swarm_agent.http.problem import Problem
from swarm_agent.http.when import rfc3339
from swarm_agent.supervision.kept_work import KeptFolder
from swarmsched import ids
from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.card import card_of
from swarmsched.commands import CancelJob, MigrateJob, ScaleJob, SignalJob
from swarmsched.ids import NodeId
from swarmsched.resources import Demand, Share
from swarmsched.world import Worker, WorkerState, World
from tests.agent.http.test_openapi import Checker
from tests.agent.http.testing import SUBMITTED_UTC_S, a_card, a_record, a_task, an_elastic_record, job_id
from tests.swarmsched.building import make_record

ALPHA = job_id(1, random_part="abcd")
BETA = job_id(2, random_part="abce")


async def test_any_agent_answers_for_a_job_shepherded_elsewhere(n1, n2, n3):
    n1.agent.put(a_record(ALPHA, "n1", spec=JobSpec(command=("true",), name="first")))
    for desk in (n1, n2, n3):
        for reference in (ALPHA, ids.handle(ALPHA), ids.handle(ALPHA).upper(), "abcd", "first", "@last"):
            document = await desk.get(f"/v1/jobs/{reference}")
            assert (document["id"], document["shepherd"], document["source"]) == (ALPHA, "n1", "record")


async def test_the_entry_agent_names_itself(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1"))
    response = await n2.ask("GET", f"/v1/jobs/{ALPHA}")
    assert response.headers["X-Swarm-Node"] == "n2"


async def test_an_ambiguous_prefix_lists_the_matches_of_all_agents(n1, n2, n3):
    n1.agent.put(a_record(ALPHA, "n1"))
    n2.agent.put(a_record(BETA, "n2"))
    for desk in (n1, n2, n3):
        problem = await desk.get("/v1/jobs/abc", 409)
        assert problem["code"] == "ambiguous_job"
        assert {each["id"] for each in problem["matches"]} == {ALPHA, BETA}
        assert ids.handle(ALPHA) in problem["detail"]


async def test_a_whole_handle_wins_over_a_name_and_a_name_over_the_beginning_of_an_id(n1, n2, n3):
    gamma, delta = (job_id(number, random_part=part) for number, part in ((3, "wxyz"), (4, "wxyy")))
    n1.agent.put(a_record(ALPHA, "n1"))
    n2.agent.put(a_record(BETA, "n2"))
    n3.agent.put(a_record(gamma, "n3", spec=JobSpec(command=("true",), name="abc")))
    n3.agent.put(a_record(delta, "n3", spec=JobSpec(command=("true",), name=ids.handle(ALPHA))))
    for desk in (n1, n2, n3):
        for reference, meant in (("abc", gamma), ("abcd", ALPHA), ("abce", BETA), (ids.handle(ALPHA), ALPHA)):
            assert (await desk.get(f"/v1/jobs/{reference}"))["id"] == meant


async def test_a_name_means_its_newest_live_job(n1, n2):
    spec = JobSpec(command=("true",), name="train")
    n1.agent.put(a_record(ALPHA, "n1", spec=spec))
    n2.agent.put(a_record(BETA, "n2", spec=spec, submitted_utc_s=SUBMITTED_UTC_S + 5, state=JobState.ENDED))
    assert (await n2.get("/v1/jobs/train"))["id"] == ALPHA
    n1.agent.change(ALPHA, state=JobState.ENDED)
    assert (await n1.get("/v1/jobs/train"))["id"] == BETA


async def test_last_is_the_newest_of_the_user(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1", spec=JobSpec(command=("true",), user="ann")))
    n2.agent.put(a_record(BETA, "n2", spec=JobSpec(command=("true",), user="bob"), submitted_utc_s=SUBMITTED_UTC_S + 1))
    assert (await n1.get("/v1/jobs/@last"))["id"] == BETA
    assert (await n2.get("/v1/jobs/@last?user=ann"))["id"] == ALPHA
    assert (await n1.get("/v1/jobs/@last?user=eve", 404))["code"] == "unknown_job"


async def test_an_unknown_job_names_the_nearest_and_the_silent(n1, n2, swarm):
    n2.agent.put(a_record(ALPHA, "n2", spec=JobSpec(command=("true",), name="mnist")))
    swarm.down.add("n3")
    swarm.statuses[NodeId("n3")] = "failed"
    problem = await n1.get("/v1/jobs/mnits", 404)
    assert (problem["nearest"], problem["silent_nodes"]) == ("mnist", ["n3"])
    assert problem["detail"] == "there is no job 'mnits'; n3 did not answer and may know it"


async def test_a_name_with_an_apostrophe_can_be_the_nearest(n1):
    n1.agent.put(a_record(ALPHA, "n1", spec=JobSpec(command=("true",), name="ann's run")))
    assert (await n1.get("/v1/jobs/anns%20run", 404))["nearest"] == "ann's run"


async def test_a_job_whose_shepherd_is_silent_is_shown_from_gossip_with_its_age(n1, swarm):
    record = a_record(ALPHA, "n3", state=JobState.RUNNING)
    n1.agent.known_cards = [a_card(record, age_s=7.0)]
    swarm.down.add("n3")
    document = await n1.get(f"/v1/jobs/{ALPHA}")
    assert (document["source"], document["staleness_seconds"], document["spec"]) == ("card", 7.0, None)
    problem = await n1.ask("POST", f"/v1/jobs/{ALPHA}/cancel")
    assert (problem.status, problem.headers["Retry-After"]) == (503, "1")
    assert (await problem.json(content_type=None))["code"] == "shepherd_unreachable"


async def test_a_held_copy_is_shown_when_the_shepherd_is_silent(n1, swarm):
    n1.agent.put(a_record(ALPHA, "n3", holders=(NodeId("n1"), NodeId("n3"))))
    swarm.down.add("n3")
    assert (await n1.get(f"/v1/jobs/{ALPHA}"))["source"] == "record"


async def test_two_agents_that_each_believe_the_other_acts_end_the_chain(n1, n2):
    n1.agent.put(a_record(ALPHA, "n2"))
    n2.agent.put(a_record(ALPHA, "n1"))
    response = await n1.ask("POST", f"/v1/jobs/{ALPHA}/cancel")
    assert response.status == 503
    assert n1.agent.commands == n2.agent.commands == []


async def test_cancel_reaches_the_shepherd_with_grace_and_reason(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1", state=JobState.RUNNING))
    document = await n2.post(f"/v1/jobs/{ALPHA}/cancel", {"grace_seconds": 2, "reason": "wrong data"}, 202)
    assert document["state"] == "stopping"
    assert n1.agent.commands == [CancelJob(ALPHA, 2.0, "wrong data")]


async def test_cancel_and_delete_need_no_body(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1", state=JobState.RUNNING))
    assert (await n2.ask("POST", f"/v1/jobs/{ALPHA}/cancel")).status == 202
    assert (await n2.ask("DELETE", f"/v1/jobs/{ALPHA}")).status == 202
    assert n1.agent.commands == [CancelJob(ALPHA)] * 2


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.ENDED])
async def test_cancel_tells_whether_the_job_had_ended_before(n1, n2, state):
    n1.agent.put(a_record(ALPHA, "n1", state=state, end_reason=EndReason.CANCELLED))
    n2.agent.known_cards = [a_card(n1.agent.known[ALPHA])]
    n1.agent.is_shepherd = lambda _: True
    document = await n2.post(f"/v1/jobs/{ALPHA}/cancel", {}, 202)
    assert document["had_ended"] == (state is JobState.ENDED)


@pytest.mark.parametrize(
    ("body", "pointer"),
    [({"grace_seconds": -1}, "/grace_seconds"), ({"grace": 1}, "/grace"), ({"reason": "x" * 201}, "/reason")],
)
async def test_a_malformed_cancel_does_nothing(n1, body, pointer):
    n1.agent.put(a_record(ALPHA, "n1", state=JobState.RUNNING))
    problem = await n1.post(f"/v1/jobs/{ALPHA}/cancel", body, 422)
    assert problem["errors"][0]["pointer"] == pointer
    assert n1.agent.commands == []


async def test_a_signal_is_refused_by_a_job_that_does_not_run(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1"))
    problem = await n2.post(f"/v1/jobs/{ALPHA}/signal", {"signal": "usr1"}, 409)
    assert (problem["code"], "queued" in problem["detail"]) == ("conflict", True)
    assert n1.agent.commands == [SignalJob(ALPHA, 10)]


@pytest.mark.parametrize(
    ("action", "body", "pointer"),
    [
        ("scale", {}, "/ranks"),
        ("scale", {"ranks": True}, "/ranks"),
        ("scale", {"ranks": 4097}, "/ranks"),
        ("scale", {"ranks": 2, "ranks_most": 2.5}, "/ranks_most"),
        ("scale", {"ranks": 2, "gpus": 2}, "/gpus"),
        ("migrate", {}, ""),
        ("migrate", {"nodes": "n1"}, "/nodes"),
        ("migrate", {"avoid": ["../n1"]}, "/avoid"),
        ("migrate", {"avoid": [None]}, "/avoid"),
    ],
)
async def test_a_malformed_change_of_size_or_place_does_nothing(n1, action, body, pointer):
    n1.agent.put(a_record(ALPHA, "n1", state=JobState.RUNNING))
    problem = await n1.post(f"/v1/jobs/{ALPHA}/{action}", body, 422)
    assert problem["errors"][0]["pointer"] == pointer
    assert n1.agent.commands == []


async def test_a_change_of_size_or_place_is_the_shepherds_to_make(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1", state=JobState.RUNNING))
    scaled = await n2.post(f"/v1/jobs/{ALPHA}/scale", {"ranks": 2, "ranks_most": 4}, 202)
    assert (scaled["ranks"], scaled["ranks_most"]) == (2, 4)
    for unknown in ({"nodes": ["n9"]}, {"avoid": ["n9"]}):
        assert (await n2.post(f"/v1/jobs/{ALPHA}/migrate", unknown, 404))["code"] == "unknown_node"
    await n2.post(f"/v1/jobs/{ALPHA}/migrate", {"avoid": ["n2"]}, 202)
    assert n1.agent.commands == [ScaleJob(ALPHA, 2, 4), MigrateJob(ALPHA, (), (NodeId("n2"),))]


@pytest.mark.parametrize("value", [0, 65, True, "SIGNOPE", None, "RTMIN", 2.0])
def test_what_is_no_signal_is_refused(value):
    with pytest.raises(Problem):
        signal_number(value)


@pytest.mark.parametrize(("value", "number"), [(2, 2), ("INT", 2), ("sigterm", 15), ("SIGKILL", 9)])
def test_signals_by_number_and_name(value, number):
    assert signal_number(value) == number


async def test_why_is_answered_by_the_shepherd(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1"))
    document = await n2.get(f"/v1/jobs/{ALPHA}/why")
    assert (document["summary"], document["nodes"][0]["node"]) == ("needs 4 GPUs, 1 free", "n1")
    step = {"at": "2023-11-14T22:13:20.000Z", "told": "OwnerAnswer", "by": "n2", "changes": ["Placed"]}
    assert document["trail"] == [step]


async def test_why_says_first_that_too_few_holders_are_left_to_decide(n1, swarm):
    n1.agent.put(a_record(ALPHA, "n1", holders=("n1", "n2", "n3")))
    n1.agent.put(a_record(BETA, "n1", holders=("n1", "n2", "n3"), nodes=(("n1", 2),), state=JobState.RUNNING))
    swarm.statuses |= {NodeId("n2"): "failed", NodeId("n3"): "failed"}
    lost = "no majority of its holders is there, and nothing is decided about it: n2, n3 do not answer; n1 does"
    document = await n1.get(f"/v1/jobs/{ALPHA}/why")
    assert document["summary"] == f"{lost} (if those are lost for good: swarm recover {ids.handle(ALPHA)})"
    assert document["sentences"][0] == f"{ids.handle(ALPHA)} is queued: {document['summary']}."
    running = (await n1.get(f"/v1/jobs/{BETA}/why"))["summary"]
    assert (running.startswith(lost), running.endswith("; needs 4 GPUs, 1 free")) == (True, True)


async def test_why_says_first_that_nobody_has_the_files_of_a_job_that_waits(n1):
    spec = JobSpec(("true",), tree="a" * 64, blob_sources=(NodeId("n9"),))
    n1.agent.put(a_record(ALPHA, "n1", spec=spec))
    n1.agent.put(a_record(BETA, "n1", spec=spec, nodes=(("n1", 2),), state=JobState.RUNNING))
    n1.agent.without_files |= {ALPHA, BETA}
    summary = (await n1.get(f"/v1/jobs/{ALPHA}/why"))["summary"]
    assert summary == "no agent that can be reached has its files (n9 took them)"
    assert (await n1.get(f"/v1/jobs/{BETA}/why"))["summary"] == "needs 4 GPUs, 1 free"


async def test_why_counts_what_is_free_where_the_job_may_run(n1):
    n1.agent.put(a_record(ALPHA, "n1", spec=JobSpec(command=("true",), nodes=(NodeId("n2"), NodeId("n3")))))
    n1.agent.put(a_record(BETA, "n1", spec=JobSpec(command=("true",), exclude=(NodeId("n2"), NodeId("n3")))))
    assert (await n1.get(f"/v1/jobs/{ALPHA}/why"))["free"] == {"gpus": 2, "total_gpus": 4, "nodes": 2}
    assert (await n1.get(f"/v1/jobs/{BETA}/why"))["free"] == {"gpus": 1, "total_gpus": 2, "nodes": 1}


@pytest.mark.parametrize("goal", ["running", "done"])
async def test_a_wait_is_woken_by_the_change_wherever_the_shepherd_is(n1, n2, goal):
    n1.agent.put(a_record(ALPHA, "n1"))
    waits = [asyncio.create_task(desk.get(f"/v1/jobs/{ALPHA}/wait?for={goal}&timeout=30")) for desk in (n1, n2)]
    await asyncio.wait(waits, timeout=0.2)
    assert not any(wait.done() for wait in waits)
    started_s = asyncio.get_running_loop().time()
    n1.agent.change(ALPHA, state=JobState.RUNNING, started_utc_s=SUBMITTED_UTC_S)
    if goal == "done":
        n1.agent.change(ALPHA, state=JobState.ENDED, exit_code=3, end_reason=EndReason.FAILED)
    found = await asyncio.gather(*waits)
    assert [each["met"] for each in found] == [True, True]
    assert asyncio.get_running_loop().time() - started_s < 15.0, "half of the time that the wait would have taken"
    assert {each["job"]["exit_code"] for each in found} == ({3} if goal == "done" else {None})


async def test_a_wait_that_is_not_met_says_so(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1"))
    for query in ("timeout=0.05", "timeout=0"):
        document = await n2.get(f"/v1/jobs/{ALPHA}/wait?{query}")
        assert (document["met"], document["job"]["state"]) == (False, "queued")


async def test_an_ended_job_shows_how_it_ended(n1):
    record = a_record(
        ALPHA, "n1", state=JobState.ENDED, signal=9, end_reason=EndReason.OOM, failed_rank=2, failed_node="n3"
    )
    n1.agent.put(record)
    document = await n1.get(
        f"/v1/jobs/{ALPHA}?fields=exit_code,signal,shell_exit_code,end_reason,failed_rank,failed_node"
    )
    assert document == {
        "id": ALPHA, "exit_code": None, "signal": 9, "shell_exit_code": 137,
        "end_reason": "oom", "failed_rank": 2, "failed_node": "n3",
    }  # fmt: skip


async def test_watchers_that_leave_are_forgotten(n1):
    n1.agent.put(a_record(ALPHA, "n1"))
    await n1.get(f"/v1/jobs/{ALPHA}/wait?timeout=0.05")
    changes = next(each.__self__ for each in n1.agent.callbacks if type(each.__self__).__name__ == "JobChanges")
    assert changes._waiting == {}


@pytest.mark.parametrize(
    ("method", "tail"),
    [
        ("GET", ""),
        ("GET", "/why"),
        ("GET", "/wait?timeout=5"),
        ("GET", "/logs"),
        ("POST", "/cancel"),
        ("POST", "/recover"),
    ],
)
async def test_a_job_past_its_retention_is_gone_for_good_and_no_agent_waits_for_its_shepherd(n1, n2, method, tail):
    n1.agent.over.add(ALPHA)
    body = {"force": True} if tail == "/recover" else {}
    for desk in (n1, n2):
        path = f"/v1/jobs/{ALPHA}{tail}"
        problem = await (desk.get(path, 410) if method == "GET" else desk.post(path, body, 410))
        assert problem["code"] == "job_over"
        assert "past its retention" in problem["detail"]


async def test_a_record_that_one_holder_has_dropped_is_shown_by_another(n1, n2, n3):
    n1.agent.over.add(ALPHA)
    n2.agent.put(a_record(ALPHA, "n1", state=JobState.ENDED))
    for desk in (n1, n2, n3):
        assert (await desk.get(f"/v1/jobs/{ALPHA}"))["state"] == "ended"
        assert (await desk.get(f"/v1/jobs/{ALPHA}/wait?timeout=5"))["met"]


WORKERS = {2: "n1", 3: "n2", 5: "n1", 6: "n3", 7: "n1"}
CHANGING = World(4, (2, 3, 5), (6,), (1,), has_trained=True)


async def test_an_elastic_job_tells_which_workers_train_and_which_come_and_go(n1, n2):
    n1.agent.put(an_elastic_record(ALPHA, "n1", WORKERS, CHANGING, last_part=8))
    for desk in (n1, n2):
        document = await desk.get(f"/v1/jobs/{ALPHA}")
        assert document["world"] == {
            "version": 4,
            "workers": [
                {"worker": 2, "node": "n1", "state": "training", "problem": None},
                {"worker": 3, "node": "n2", "state": "training", "problem": None},
                {"worker": 5, "node": "n1", "state": "training", "problem": None},
                {"worker": 6, "node": "n3", "state": "joining", "problem": None},
                {"worker": 7, "node": "n1", "state": "leaving", "problem": None},
            ],
            "lost": [1],
            "last_worker": 8,
        }
        assert document["world_size"] == 3
        nodes = [(each["node"], each["ranks"], each["first_rank"]) for each in document["nodes"]]
        assert nodes == [("n1", 3, None), ("n2", 1, None), ("n3", 1, None)]
        checker = Checker(desk, await desk.get("/openapi.json"))
        await checker.check("GET", "/v1/jobs/{job}", path=f"/v1/jobs/{ALPHA}")
        await checker.check("GET", "/v1/jobs")


async def test_before_an_elastic_attempt_trains_all_its_workers_are_joining(n1):
    n1.agent.put(an_elastic_record(ALPHA, "n1", {1: "n1", 2: "n2"}, World(), state=JobState.STARTING))
    world = (await n1.get(f"/v1/jobs/{ALPHA}"))["world"]
    assert (world["version"], [each["state"] for each in world["workers"]]) == (0, ["joining"] * 2)
    n1.agent.change(ALPHA, state=JobState.QUEUED, shares=())
    waits = await n1.get(f"/v1/jobs/{ALPHA}")
    assert waits["world"] == {"version": 0, "workers": [], "lost": [], "last_worker": 0}


async def test_of_other_jobs_and_of_cards_there_is_no_world_and_each_node_is_there_once(n1, n2):
    n1.agent.put(a_record(ALPHA, "n1", nodes=(("n1", 2), ("n2", 1))))
    document = await n1.get(f"/v1/jobs/{ALPHA}")
    assert document["world"] is None
    assert [each["first_rank"] for each in document["nodes"]] == [0, 2]
    n2.agent.known_cards = [a_card(an_elastic_record(BETA, "n9", WORKERS, CHANGING))]
    document = await n2.get(f"/v1/jobs/{BETA}")
    assert (document["source"], document["world"]) == ("card", None)
    assert [each["node"] for each in document["nodes"]] == ["n1", "n2", "n3"]


async def test_a_node_is_paused_if_any_of_its_workers_is_and_shows_each_as_a_task(n1):
    n1.agent.put(an_elastic_record(ALPHA, "n1", {2: "n1", 5: "n1"}))
    n1.agent.known_tasks = [a_task(ALPHA, 1, part=2), a_task(ALPHA, 1, part=5, is_frozen=True)]
    document = await n1.get(f"/v1/jobs/{ALPHA}")
    assert [(each["node"], each["is_paused"]) for each in document["nodes"]] == [("n1", True)]
    tasks = (await n1.get("/v1/nodes/n1"))["tasks"]
    assert [(each["worker"], each["is_paused"]) for each in tasks] == [(2, False), (5, True)]


async def test_of_each_worker_it_is_told_what_its_agent_knows_to_be_wrong_with_it(n1):
    n1.agent.put(an_elastic_record(ALPHA, "n1", {2: "n1", 5: "n1", 6: "n1", 7: "n9"}))
    waits = Worker(WorkerState.TRAINING, problem="has waited for 30 s")
    n1.agent.known_tasks = [
        a_task(ALPHA, 1, part=2, worker=waits),
        a_task(ALPHA, 1, part=5, worker=Worker(is_silent=True)),
        a_task(ALPHA, 1, part=6),
        a_task(BETA, 1, part=7, worker=waits),
    ]
    document = await n1.get(f"/v1/jobs/{ALPHA}")
    problems = {each["worker"]: each["problem"] for each in document["world"]["workers"]}
    assert problems == {2: "has waited for 30 s", 5: "stands still: it asks for no plans any more", 6: "", 7: None}
    assert (await n1.get(f"/v1/jobs/{ALPHA}?fields=world"))["world"] == document["world"]


def test_the_service_of_an_elastic_job_is_that_of_its_members_since_it_was_counted_last():
    shares = tuple(Share(NodeId("n1"), 1, part=part) for part in (1, 2, 3))
    spec = JobSpec(("true",), demand=Demand(gpus=2), ranks_most=3, elastic=True)
    record = make_record("n1", state=JobState.RUNNING, attempt=1, spec=spec, shares=shares, last_part=3)
    world = World(2, (1, 2), (3,))
    record = replace(record, started_utc_s=100.0, world=world, attained_gpu_s=30.0, counted_s=20.0)
    assert ByRecord(record, 150.0, Attendance(frozenset())).attained_gpu_s == 30.0 + 2 * 2 * 30.0
    assert card_of(record, running_s=50.0).attained_gpu_s == 30.0 + 2 * 2 * 30.0


async def test_folders_that_a_job_has_left_are_found_on_every_node(n1, n2, n3, swarm):
    n1.agent.put(a_record(ALPHA, "n1"))
    for desk, attempt in ((n3, 2), (n2, 1)):
        name = desk.agent.config.name
        desk.agent.kept_folders[ALPHA] = [KeptFolder(attempt, Path(f"/{name}/jobs/{attempt}/work"), 9, 1.8e9)]
    swarm.down.add(NodeId("n3"))
    document = await n1.get(f"/v1/jobs/{ALPHA}/left")
    assert document["silent_nodes"] == ["n3"]
    (item,) = document["items"]
    assert item == {"node": "n2", "attempt": 1, "path": "/n2/jobs/1/work", "size_bytes": 9, "until": rfc3339(1.8e9)}
    swarm.down.clear()
    assert [each["node"] for each in (await n1.get(f"/v1/jobs/{ALPHA}/left"))["items"]] == ["n2", "n3"]


async def test_a_live_job_names_the_agents_that_keep_its_files(n1, n2, n3, swarm):
    spec = JobSpec(("true",), tree="a" * 64, requirements="b" * 64)
    record = a_record(ALPHA, "n1", spec=spec, holders=("n1", "n2", "n3"))
    for desk in (n1, n2, n3):
        desk.agent.put(record)
    for desk in (n1, n3):
        desk.agent.kept_trees.add(spec.tree)
    assert (await n2.get(f"/v1/jobs/{ALPHA}"))["files_on"] == ["n1", "n3"]
    assert (await n2.get(f"/v1/jobs/{ALPHA}?fields=files_on"))["files_on"] == ["n1", "n3"]
    swarm.down.add(NodeId("n3"))
    assert (await n1.get(f"/v1/jobs/{ALPHA}"))["files_on"] == ["n1"]
    n1.agent.change(ALPHA, state=JobState.ENDED)
    assert (await n1.get(f"/v1/jobs/{ALPHA}"))["files_on"] is None
    n1.agent.put(a_record(BETA, "n1", holders=("n1", "n2")))
    assert (await n1.get(f"/v1/jobs/{BETA}"))["files_on"] is None

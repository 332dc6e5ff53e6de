"""How far a job is, told by the agents that run its ranks, whichever agent is asked."""

import time

import pytest

from swarm_agent.task.reports import Reported
from swarmsched.api import JobSpec, JobState
from swarmsched.estimate import Estimate, NoisePoint, SpeedPoint, SpeedQuestion
from swarmsched.ids import JobId, TaskKey
from swarmsched.models.progress import FIGURES
from tests.agent.http.test_openapi import Checker
from tests.agent.http.testing import a_card, a_record, an_elastic_record, job_id

JOB = job_id(1)


def running(desk, *, limit_s: float = 0.0, ran_s: float = 30.0, **changes):
    """A job of four ranks on n2 and n3 that n1 shepherds."""
    spec = JobSpec(command=("true",), ranks=4, time_limit_s=limit_s)
    started = {"state": JobState.RUNNING, "started_utc_s": time.time() - ran_s, **changes}
    return desk.agent.put(a_record(JOB, "n1", spec=spec, nodes=(("n2", 2), ("n3", 2)), **started))


def reports(desk, *told, rank: int = 0, attempt: int = 1, job: JobId = JOB) -> None:
    """The ranks of this node have told so much, a second apart."""
    reported = desk.agent.known_reports[job, attempt] = Reported(reported_utc_s=1.7e9)
    for second, figures in enumerate(told):
        reported.progress.take(rank, figures, float(second))


async def progress_at(desk) -> dict:
    one = (await desk.get(f"/v1/jobs/{JOB}"))["progress"]
    (listed,) = (await desk.get("/v1/jobs"))["items"]
    assert listed["progress"].keys() == one.keys()
    changing = ("ratio", "remaining_seconds") if one["source"] == "time_limit" else ()
    assert {k: v for k, v in listed["progress"].items() if k not in changing} == {
        k: v for k, v in one.items() if k not in changing
    }
    return one


@pytest.mark.parametrize("asked", ["n1", "n2", "n3"])
async def test_every_agent_tells_what_the_owner_of_rank_0_was_told(desks, asked) -> None:
    running(desks["n1"])
    reports(desks["n2"], *({"step": step, "total_steps": 100, "samples": step * 64} for step in range(11)))
    reports(desks["n3"], {"step": 9, "loss": 0.5}, rank=2)
    progress = await progress_at(desks[asked])
    assert progress == {
        "attempt": 1,
        "ratio": 0.1,
        "remaining_seconds": 90.0,
        "remaining_seconds_low": 90.0,
        "remaining_seconds_high": 90.0,
        "source": "steps",
        "rank": 0,
        "step": 10,
        "samples": 640,
        "epoch": None,
        "total_steps": 100,
        "total_epochs": None,
        "target_loss": None,
        "loss": 0.5,
        "grad_noise": None,
        "data_wait": None,
        "global_batch": None,
        "step_seconds": 1.0,
        "samples_per_second": 64.0,
        "reported_at": "2023-11-14T22:13:20.000Z",
        "oddities": {},
        "problem": None,
        "learners": None,
    }


async def test_figures_that_are_for_planners_hide_no_others(desks) -> None:
    running(desks["n1"])
    reports(desks["n2"], dict.fromkeys(FIGURES, 1.0))
    assert (await progress_at(desks["n1"]))["step"] == 1.0


async def test_ranks_that_train_apart_are_told_by_their_numbers(desks) -> None:
    running(desks["n1"])
    for node, learners in (("n2", {0: [5, 4, 0.25]}), ("n3", {1: [3, 2, 0.25]})):
        desks[node].agent.known_reports[JOB, 1] = Reported(learners=learners)
    progress = await progress_at(desks["n1"])
    assert progress["learners"] == [
        {"rank": 0, "rounds": 5, "version": 4, "wait_ratio": 0.25},
        {"rank": 1, "rounds": 3, "version": 2, "wait_ratio": 0.25},
    ]


async def test_without_reports_the_time_limit_tells_and_without_one_nobody_does(n1) -> None:
    running(n1, limit_s=60.0)
    progress = await progress_at(n1)
    assert (progress["source"], progress["step"]) == ("time_limit", None)
    assert 0.5 <= progress["ratio"] <= 1
    assert 0 <= progress["remaining_seconds"] <= 30
    running(n1)
    progress = await progress_at(n1)
    assert (progress["source"], progress["ratio"], progress["remaining_seconds"]) == ("unknown", None, None)


async def test_a_job_that_its_time_limit_will_stop_has_no_longer_than_that(n1, n2) -> None:
    running(n1, limit_s=60.0)
    reports(n2, *({"step": step, "total_steps": 1_000} for step in range(11)))
    progress = await progress_at(n1)
    assert (progress["source"], progress["ratio"], progress["remaining_seconds_high"]) == ("time_limit", 0.01, None)
    assert progress["remaining_seconds"] <= 30


async def test_epochs_tell_where_no_steps_were_declared(n1, n2) -> None:
    running(n1)
    reports(n2, {"epoch": 0.0, "total_epochs": 4}, {"epoch": 0.5})
    progress = await progress_at(n1)
    assert (progress["source"], progress["ratio"], progress["remaining_seconds"]) == ("epochs", 0.125, 7.0)


async def test_an_interval_is_never_that_of_another_rank(n1, n2, n3) -> None:
    running(n1)
    reports(n2, {"step": 0, "total_steps": 100}, {"step": 1})
    reports(n3, *({"step": 10 * step, "total_steps": 1_000} for step in range(10)), rank=2)
    progress = await progress_at(n1)
    assert (progress["remaining_seconds"], progress["remaining_seconds_low"]) == (99.0, None)


async def test_a_curve_of_losses_tells_where_only_a_target_was_declared(n1, n2) -> None:
    running(n1)
    reports(n2, *({"step": step, "loss": 1 / (0.01 * step + 1), "target_loss": 0.25} for step in range(150)))
    progress = await progress_at(n1)
    assert (progress["source"], progress["ratio"]) == ("loss", pytest.approx(0.497, abs=0.02))
    assert progress["remaining_seconds"] == pytest.approx(151, abs=5)


async def test_what_an_earlier_attempt_or_another_job_told_does_not_count(n1, n2) -> None:
    running(n1, attempt=2)
    reports(n2, {"step": 7}, attempt=1)
    reports(n2, {"step": 8}, attempt=2, job=job_id(2))
    assert (await progress_at(n1))["step"] is None
    reports(n2, {"step": 9}, attempt=2)
    assert (await progress_at(n1))["step"] == 9


async def test_an_owner_that_does_not_answer_leaves_the_time_limit(n1, n2, swarm) -> None:
    running(n1, limit_s=60.0)
    reports(n2, {"step": 7})
    swarm.down.add("n2")
    assert (await progress_at(n1))["source"] == "time_limit"


async def test_by_a_card_alone_the_owner_is_asked_all_the_same(n1, n2, n3, swarm) -> None:
    record = running(n1, limit_s=3_600.0)
    n3.agent.known_cards = [a_card(record)]
    reports(n2, {"step": 7})
    swarm.down.add("n1")
    document = await n3.get(f"/v1/jobs/{JOB}")
    assert (document["source"], document["progress"]["step"]) == ("card", 7)
    assert document["progress"]["source"] == "time_limit"


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.STARTING, JobState.ENDED])
async def test_a_job_that_does_not_run_has_no_progress(n1, n2, state) -> None:
    running(n1, state=state, limit_s=60.0)
    reports(n2, {"step": 7})
    assert (await n1.get(f"/v1/jobs/{JOB}"))["progress"] is None


async def test_fields_pick_it_and_documents_are_as_promised(n1, n2) -> None:
    running(n1)
    reports(n2, {"step": 7}, {"step": 8})
    for path in (f"/v1/jobs/{JOB}?fields=progress", "/v1/jobs?fields=progress"):
        document = await n1.get(path)
        (item,) = document.get("items", [document])
        assert (item.keys(), item["progress"]["step"]) == ({"id", "progress"}, 8)
    (item,) = (await n1.get("/v1/jobs?fields=state"))["items"]
    assert item.keys() == {"id", "state"}
    checker = Checker(n1, await n1.get("/openapi.json"))
    await checker.check("GET", "/v1/jobs/{job}", path=f"/v1/jobs/{JOB}")
    await checker.check("GET", "/v1/jobs")


@pytest.mark.parametrize("asked", ["n1", "n2"])
async def test_a_job_that_takes_several_sizes_is_shown_with_its_model(desks, asked) -> None:
    running(desks["n1"])
    points, noise = (SpeedPoint(1, 1, 64, 0.4), SpeedPoint(2, 1, 32, 0.25)), (NoisePoint(64, 12.5),)
    estimate = Estimate(points=points, noise=noise, remaining=900.0, remaining_error=0.1, is_partial=True)
    desks["n1"].agent.questions[JOB] = SpeedQuestion(estimate, 1, 4, 2, held=2, held_nodes=1)
    job = await desks[asked].get(f"/v1/jobs/{JOB}")
    model = job["model"]
    assert [(row["ranks"], row["nodes"], row["source"], row["is_current"]) for row in model["speed"]] == [
        (1, 1, "measured", False),
        (2, 1, "measured", True),
        (3, 2, "fitted", False),
        (4, 2, "fitted", False),
    ]
    assert (model["speed"][1]["step_seconds"], model["speed"][1]["samples_per_second"]) == (0.25, 256.0)
    assert (model["global_batch"], model["grad_noise"]) == (64, 12.5)
    assert (model["remaining_steps"], model["remaining_error_ratio"]) == (900.0, 0.1)
    assert job["size_reason"] == "more would not help it"
    why = await desks[asked].get(f"/v1/jobs/{JOB}/why")
    assert why["model"] == model
    assert why["progress"].keys() == job["progress"].keys()
    checker = Checker(desks[asked], await desks[asked].get("/openapi.json"))
    await checker.check("GET", "/v1/jobs/{job}/why", path=f"/v1/jobs/{JOB}/why")
    await checker.check("GET", "/v1/jobs/{job}", path=f"/v1/jobs/{JOB}")
    assert (await desks[asked].get(f"/v1/jobs/{JOB}?fields=state")).keys() == {"id", "state"}


async def test_of_workers_that_were_the_first_one_after_another_the_last_word_counts(desks) -> None:
    desks["n1"].agent.put(an_elastic_record(JOB, "n1", {3: "n2", 4: "n3"}))
    for desk, part, utc_s, step in (("n2", 1, 1.7e9, 10), ("n3", 4, 1.7e9 + 5, 12), ("n2", 3, 1.7e9 + 60, 80)):
        told = desks[desk].agent.known_reports[TaskKey(JOB, 1, part)] = Reported(reported_utc_s=utc_s)
        told.progress.take(0, {"step": step}, 0.0)
    progress = await progress_at(desks["n1"])
    assert (progress["rank"], progress["step"]) == (0, 80)

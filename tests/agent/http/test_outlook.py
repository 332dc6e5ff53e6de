"""What is expected of jobs, as the API tells it: starts, ends, deadlines and fairness."""

import pytest

from swarmsched.api import JobSpec, JobState
from swarmsched.ids import handle
from swarmsched.view import Outlook, Span
from tests.agent.http.testing import SUBMITTED_UTC_S, a_record, job_id

ALPHA, BETA = job_id(1), job_id(2)
AT = "2023-11-14T22:{}Z"  # SUBMITTED_UTC_S is 22:13:20, and so is the moment of all outlooks here


def expected(one, **more):
    spans = {"start": Span(60.0, 30.0, 90.0), "end": Span(160.0, 130.0, 190.0)}
    return Outlook(one, **{**spans, "alone_s": 80.0, **more})


async def test_a_job_that_waits_is_told_when_it_starts_and_ends_wherever_it_is_shown(n1):
    n1.agent.put(a_record(ALPHA, "n1", submitted_utc_s=SUBMITTED_UTC_S - 40))
    n1.agent.outlooks = [expected(ALPHA)]
    told = {
        "starts_at": AT.format("14:20.000"),
        "starts_at_earliest": AT.format("13:50.000"),
        "starts_at_latest": AT.format("14:50.000"),
        "ends_at": AT.format("16:00.000"),
        "ends_at_earliest": AT.format("15:30.000"),
        "ends_at_latest": AT.format("16:30.000"),
        "deadline": None,
        "ranks_least": None,
        "rho": 2.5,
        "problem": "",
    }
    assert (await n1.get(f"/v1/jobs/{ALPHA}"))["outlook"] == told
    assert (await n1.get(f"/v1/jobs/{ALPHA}/why"))["outlook"] == told
    (item,) = (await n1.get("/v1/jobs"))["items"]
    assert item["outlook"] == told
    assert "outlook" not in (await n1.get("/v1/jobs?fields=state"))["items"][0]


async def test_of_a_job_that_runs_only_the_end_is_to_come_and_of_one_that_has_ended_nothing(n1):
    n1.agent.put(a_record(ALPHA, "n1", state=JobState.RUNNING, started_utc_s=SUBMITTED_UTC_S))
    n1.agent.outlooks = [expected(ALPHA, problem="it would have to wait")]
    outlook = (await n1.get(f"/v1/jobs/{ALPHA}"))["outlook"]
    assert (outlook["starts_at"], outlook["problem"], outlook["ends_at"]) == (None, "", AT.format("16:00.000"))
    n1.agent.change(ALPHA, state=JobState.ENDED)
    assert (await n1.get(f"/v1/jobs/{ALPHA}"))["outlook"] is None
    assert (await n1.get("/v1/jobs?all=1"))["items"][0]["outlook"] is None


@pytest.mark.parametrize(
    ("within_s", "end", "word"),
    [
        (200.0, Span(160.0, 130.0, 190.0), "met"),
        (170.0, Span(160.0, 130.0, 190.0), "likely"),
        (200.0, Span(160.0, 130.0), "likely"),
        (150.0, Span(160.0, 130.0, 190.0), "late"),
        (150.0, None, "unknown"),
    ],
)
async def test_whether_a_deadline_is_met_follows_from_the_expected_end(n1, within_s, end, word):
    spec = JobSpec(("true",), deadline_utc_s=SUBMITTED_UTC_S + within_s)
    n1.agent.put(a_record(ALPHA, "n1", spec=spec))
    n1.agent.outlooks = [expected(ALPHA, end=end, ranks_least=3)]
    outlook = (await n1.get(f"/v1/jobs/{ALPHA}"))["outlook"]
    assert (outlook["deadline"], outlook["ranks_least"]) == (word, 3)


async def test_a_dry_run_and_a_submission_with_a_deadline_tell_what_to_expect_and_others_are_not_kept_waiting(n1):
    spec = {"command": ["true"]}
    dry = await n1.post("/v1/jobs", {"spec": spec, "dry_run": True}, 200)
    assert (dry["outlook"]["starts_at"], dry["outlook"]["starts_at_latest"]) == (AT.format("14:20.000"), None)
    assert [job.job_id for job in n1.agent.hypothetical] == [dry["id"]]
    assert (await n1.post("/v1/jobs", {"spec": spec}, 201))["outlook"] is None
    late = spec | {"deadline_utc_seconds": SUBMITTED_UTC_S + 30}
    dry = await n1.post("/v1/jobs", {"spec": late, "dry_run": True}, 200)
    assert dry["outlook"]["deadline"] == "late"


async def test_the_swarms_status_tells_the_middle_and_the_worst_of_how_fair_it_is(n1, n2):
    assert (await n1.get("/v1/status"))["fairness"] is None
    for one, desk in ((ALPHA, n1), (BETA, n2), (job_id(3), n2)):
        desk.agent.put(a_record(one, desk.agent.config.name, submitted_utc_s=SUBMITTED_UTC_S))
    n1.agent.outlooks = [expected(ALPHA), expected(BETA, alone_s=40.0), expected(job_id(3), end=None)]
    assert (await n1.get("/v1/status"))["fairness"] == {
        "rho_median": 3.0,
        "rho_worst": 4.0,
        "worst_job": {"id": BETA, "handle": handle(BETA)},
        "jobs": 2,
    }


async def test_pauses_are_told_in_seconds_and_as_a_part_of_the_time_since_the_first_start(n1):
    begun, over = SUBMITTED_UTC_S, SUBMITTED_UTC_S + 200
    n1.agent.put(a_record(ALPHA, "n1", paused_s=5.0, state=JobState.ENDED, first_started_utc_s=begun, ended_utc_s=over))
    document = await n1.get(f"/v1/jobs/{ALPHA}")
    assert (document["paused_seconds"], document["paused_ratio"], document["pause_budget_ratio"]) == (5.0, 0.025, 0.05)
    n1.agent.put(a_record(BETA, "n1"))
    assert (await n1.get(f"/v1/jobs/{BETA}"))["paused_ratio"] is None

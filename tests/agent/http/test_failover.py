"""Between two shepherds: what the API does while nobody acts for a job, and when its holders are lost for good."""

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from swarm_agent.attendance import Attendance
from swarm_agent.http.reach import answer_of, items_of
from swarmsched import ids
from swarmsched.api import EndReason, JobState
from swarmsched.commands import CancelJob, RecoverJob, Refused, SignalJob
from swarmsched.errors import AgentUnreachable
from swarmsched.gossip.location import Location
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import NodeId
from swarmsched.record import Leftover
from swarmsched.resources import Share
from swarmsched.view import JobView
from tests.agent.http.testing import a_card, a_record, a_task, holder_of, holders_of, job_id, store_of

JOB = job_id(1, random_part="abcd")
THREE = ("n1", "n2", "n3")


def held_by_all(desks, shepherd="n1", **changes):
    """Everybody has the record; `shepherd` is named in it."""
    record = a_record(JOB, shepherd, holders=THREE, **{"state": JobState.RUNNING, **changes})
    for desk in desks.values():
        desk.agent.known[JOB] = record
    return record


def take_over(desk):
    """This agent acts for the job from now on."""
    desk.agent.change(JOB, shepherd=desk.agent.config.name, epoch=2)


def told(desk, kind):
    return [each for each in desk.agent.commands if isinstance(each, kind)]


# --- Commands while nobody acts


@pytest.mark.parametrize("successor", ["n2", "n3"])
async def test_a_cancel_waits_for_the_next_shepherd(desks, swarm, n2, successor):
    held_by_all(desks)
    swarm.down.add("n1")
    cancel = asyncio.create_task(n2.post(f"/v1/jobs/{JOB}/cancel", {"grace_seconds": 1}, 202))
    await asyncio.wait({cancel}, timeout=0.1)
    assert not cancel.done()
    take_over(desks[successor])
    assert (await cancel)["state"] == "stopping"
    assert told(desks[successor], CancelJob) == [CancelJob(JOB, 1.0)]


@pytest.mark.parametrize("code", ["unavailable", "not_ready"])
async def test_a_cancel_is_repeated_when_the_shepherd_could_not_write(desks, n1, n2, code):
    held_by_all(desks)
    plain, refusals = n1.agent.obey, [Refused(code, "no majority answered")] * 2

    async def unsure(command):
        return refusals.pop() if refusals else await plain(command)

    n1.agent.answer = unsure
    assert (await n2.post(f"/v1/jobs/{JOB}/cancel", {}, 202))["state"] == "stopping"
    assert len(told(n1, CancelJob)) == 3


async def test_after_all_the_waiting_the_answer_says_that_nobody_acts_at_this_moment(desks, swarm, n2):
    held_by_all(desks)
    swarm.down.add("n1")
    problem = await n2.post(f"/v1/jobs/{JOB}/cancel", {}, 503)
    assert problem["code"] == "shepherd_unreachable"
    assert f"no shepherd acts for job {ids.handle(JOB)} at this moment" in problem["detail"]
    assert "nothing was changed; try again" in problem["remedy"]
    assert f"swarm status {ids.handle(JOB)}" in problem["remedy"]
    assert problem["retry_after_seconds"] >= 1


@pytest.mark.parametrize(("action", "body"), [("cancel", {}), ("signal", {"signal": "INT"})])
@pytest.mark.parametrize("asked", ["n1", "n3"])
async def test_without_a_majority_the_answer_says_so_and_names_the_silent_and_the_remedy(
    swarm, n1, n3, asked, action, body
):
    lost_but_for(swarm, n3, place=STALE_PLACE)
    problem = await {"n1": n1, "n3": n3}[asked].post(f"/v1/jobs/{JOB}/{action}", body, 503)
    assert problem["code"] == "shepherd_unreachable"
    assert problem["detail"] == (
        f"no majority of the holders of job {ids.handle(JOB)} is there, and nothing is decided about it: "
        "n8, n9 do not answer; n3 does"
    )
    assert problem["remedy"].startswith("nothing was changed; start the lost agents again")
    assert problem["remedy"].endswith(f"swarm recover {ids.handle(JOB)} --force")


async def test_a_shepherd_that_cannot_write_for_want_of_a_majority_says_that_it_may_still_be_done(n1):
    n1.agent.put(a_record(JOB, "n1", holders=("n1", "n8", "n9"), state=JobState.RUNNING))

    async def unsure(command):
        return Refused("unavailable", "no answer within 10 s; the outcome is unknown")

    n1.agent.answer = unsure
    problem = await n1.post(f"/v1/jobs/{JOB}/cancel", {}, 503)
    assert problem["code"] == "unavailable"
    assert "n8, n9 do not answer; n1 does" in problem["detail"]
    assert "it may still be done once a majority is back" in problem["remedy"]


async def test_one_bound_holds_over_all_tries_of_a_cancel(desks, n1, n2):
    """The shepherd takes the command and never answers."""
    held_by_all(desks)

    async def hang(command):
        await asyncio.Event().wait()

    n1.agent.answer = hang
    started_s = asyncio.get_running_loop().time()
    problem = await n2.post(f"/v1/jobs/{JOB}/cancel", {}, 503)
    assert problem["code"] == "unavailable"
    assert asyncio.get_running_loop().time() - started_s < 8.0


async def test_a_refusal_is_told_at_once(desks, n1, n2):
    held_by_all(desks, state=JobState.QUEUED)
    problem = await n2.post(f"/v1/jobs/{JOB}/signal", {"signal": "INT"}, 409)
    assert problem["code"] == "conflict"
    assert len(told(n1, SignalJob)) == 1


async def test_a_signal_waits_for_the_next_shepherd_as_well(desks, swarm, n2, n3):
    held_by_all(desks)
    swarm.down.add("n1")
    signal = asyncio.create_task(n2.post(f"/v1/jobs/{JOB}/signal", {"signal": "INT"}, 202))
    await asyncio.wait({signal}, timeout=0.1)
    take_over(n3)
    await signal
    assert told(n3, SignalJob) == [SignalJob(JOB, 2)]


@pytest.mark.parametrize("asked", ["n1", "n2"])
async def test_a_signal_that_may_have_arrived_is_not_sent_twice(desks, n1, n2, asked):
    held_by_all(desks)

    async def unsure(command):
        return Refused("unavailable", "no answer within 10 s; the outcome is unknown")

    n1.agent.answer = unsure
    problem = await {"n1": n1, "n2": n2}[asked].post(f"/v1/jobs/{JOB}/signal", {"signal": "INT"}, 503)
    assert problem["code"] == "unavailable"
    assert len(told(n1, SignalJob)) == 1


async def test_a_command_to_a_shepherd_that_dies_over_it_goes_on_at_the_next(desks, swarm, n1, n2, n3):
    """The first hangs as a stopped process does; membership notices before any connection breaks."""
    held_by_all(desks)
    reached = asyncio.Event()

    async def hang(command):
        reached.set()
        await asyncio.Event().wait()

    n1.agent.answer = hang
    cancel = asyncio.create_task(n2.post(f"/v1/jobs/{JOB}/cancel", {}, 202))
    await asyncio.wait_for(reached.wait(), 5)
    swarm.statuses[NodeId("n1")] = "failed"
    swarm.down.add("n1")
    take_over(n3)
    assert (await cancel)["shepherd"] == "n3"


# --- Reading while nobody acts


async def test_a_held_copy_answers_while_nobody_acts(desks, swarm, n2):
    held_by_all(desks)
    swarm.down.add("n1")
    swarm.statuses[NodeId("n1")] = "failed"
    document = await n2.get(f"/v1/jobs/{JOB}")
    assert (document["state"], document["source"], document["shepherd"]) == ("running", "record", "n1")


def lost_but_for(swarm, holder, *, place=None):
    """The shepherd and another holder are gone; `holder` has the record, and n1 knows the job from gossip alone."""
    record = a_record(JOB, "n8", holders=(holder.agent.config.name, "n8", "n9"), state=JobState.RUNNING)
    holder.agent.put(record)
    for agent in swarm.agents.values():
        if agent is not holder.agent:
            agent.known_cards = [a_card(record)]
            agent.known_places = {JOB: place} if place else {}
    return record


def without_times(document):
    return {key: value for key, value in document.items() if key not in ("as_of", "queued_seconds", "elapsed_seconds")}


STALE_PLACE = Location(JOB, 1, 1, NodeId("n8"), (NodeId("n8"), NodeId("n9"), NodeId("n2")), JobState.RUNNING)


@pytest.mark.parametrize("reference", [JOB, ids.handle(JOB), "abcd"])
@pytest.mark.parametrize("place", [None, STALE_PLACE], ids=["no_place", "stale_place"])
async def test_the_last_living_holder_is_found_by_who_has_only_heard_of_the_job(swarm, n1, n2, n3, reference, place):
    """n2 has merely heard of the job as well, and is asked before n3 where it is named as a holder."""
    lost_but_for(swarm, n3, place=place)
    document = await n1.get(f"/v1/jobs/{reference}")
    there = await n3.get(f"/v1/jobs/{JOB}")
    assert without_times(document) == without_times(there)
    assert (document["source"], document["holders"]) == ("record", ["n3", "n8", "n9"])
    assert (document["survives_deaths"], document["has_majority"]) == (0, False)
    assert (await n1.get(f"/v1/jobs/{reference}/why"))["job_id"] == JOB


async def test_recovery_finds_the_last_living_holder_as_well(swarm, n1, n3):
    lost_but_for(swarm, n3, place=STALE_PLACE)
    assert (await n1.post(f"/v1/jobs/{JOB}/recover", {"force": True}, 202))["holders"] == ["n3"]
    assert n3.agent.commands == [RecoverJob(JOB)]


async def test_what_is_known_to_have_ended_is_not_run_again_by_an_older_record(swarm, n1, n3):
    record = lost_but_for(swarm, n3)
    n3.agent.known_places = {JOB: structs.replace(STALE_PLACE, epoch=9, state=JobState.ENDED)}
    for desk in (n1, n3):
        problem = await desk.post(f"/v1/jobs/{JOB}/recover", {"force": True}, 410)
        assert (problem["code"], "as n8 told" in problem["detail"]) == ("job_over", True)
    assert n3.agent.commands == []
    n3.agent.put(structs.replace(record, epoch=10))  # it was recovered before, and runs
    await n1.post(f"/v1/jobs/{JOB}/recover", {"force": True}, 202)


async def test_without_a_living_holder_gossip_tells_who_they_were_and_the_nodes_what_they_do(swarm, n1, n2, n3):
    lost_but_for(swarm, n3, place=STALE_PLACE)
    del n3.agent.known[JOB]
    card = n1.agent.known_cards[0].card
    n1.agent.known_cards = [JobView(structs.replace(card, shares=(Share(NodeId("n2"), 1),), attempt=3), -2.0)]
    n2.agent.known_tasks = [a_task(JOB, 3, is_frozen=True)]
    document = await n1.get(f"/v1/jobs/{JOB}")
    assert (document["source"], document["holders"]) == ("card", ["n8", "n9", "n2"])
    assert (document["has_majority"], document["survives_deaths"]) == (False, None)
    assert [share["is_paused"] for share in document["nodes"]] == [True]


async def test_a_held_copy_is_better_than_what_another_one_has_heard(swarm, n2, n3):
    lost_but_for(swarm, n3)
    assert (await n3.get(f"/v1/jobs/{ids.handle(JOB)[:4]}"))["source"] == "record"


async def test_what_others_have_heard_is_better_than_nothing(swarm, n1, n2, n3):
    lost_but_for(swarm, n3)
    del n3.agent.known[JOB]
    n1.agent.known_cards = []
    assert (await n1.get(f"/v1/jobs/{JOB}"))["source"] == "card"


async def test_a_job_between_two_shepherds_is_not_missing_from_the_list(desks, swarm, n1, n2, n3):
    """The old shepherd is back and does not act any more; later it is gone."""
    held_by_all(desks)
    for desk in desks.values():
        desk.agent.is_shepherd = lambda _: False
    assert [each["id"] for each in (await n3.get("/v1/jobs"))["items"]] == [JOB]
    swarm.statuses[NodeId("n1")] = "failed"
    swarm.down.add("n1")
    for desk in (n2, n3):
        listing = await desk.get("/v1/jobs")
        assert ([each["id"] for each in listing["items"]], listing["total"]) == ([JOB], 1)


async def test_a_wait_goes_on_with_the_next_shepherd(desks, swarm, n1, n2, n3):
    held_by_all(desks)
    wait = asyncio.create_task(n2.get(f"/v1/jobs/{JOB}/wait?timeout=30"))
    await asyncio.wait({wait}, timeout=0.2)
    assert not wait.done()
    swarm.down.add("n1")
    swarm.statuses[NodeId("n1")] = "failed"
    take_over(n3)
    n3.agent.change(JOB, state=JobState.ENDED, exit_code=4, end_reason=EndReason.FAILED)
    found = await asyncio.wait_for(wait, 20)
    assert (found["met"], found["job"]["exit_code"]) == (True, 4)


async def test_a_wait_of_no_time_answers_at_once_wherever_the_shepherd_is(desks, n1, n2):
    n1.agent.put(a_record(JOB, "n1"))
    started_s = asyncio.get_running_loop().time()
    assert not (await n2.get(f"/v1/jobs/{JOB}/wait?timeout=0"))["met"]
    assert asyncio.get_running_loop().time() - started_s < 5.0


# --- Holders


async def test_a_job_tells_its_holders_and_how_many_deaths_it_survives(desks, swarm, n1):
    held_by_all(desks, restarts=2, preemptions=1, leftovers=(Leftover(NodeId("n9"), 3),))
    document = await n1.get(f"/v1/jobs/{JOB}")
    assert (document["holders"], document["leaving_holders"]) == (["n1", "n2", "n3"], [])
    assert (document["survives_deaths"], document["has_majority"], document["is_forced"]) == (1, True, False)
    assert (document["restarts"], document["preemptions"]) == (2, 1)
    assert document["leftovers"] == [{"node": "n9", "attempt": 3}]
    swarm.statuses[NodeId("n3")] = "failed"
    assert (await n1.get(f"/v1/jobs/{JOB}"))["survives_deaths"] == 0
    swarm.statuses[NodeId("n2")] = "failed"
    document = await n1.get(f"/v1/jobs/{JOB}")
    assert (document["survives_deaths"], document["has_majority"]) == (0, False)


ALL = Attendance(frozenset(NodeId(name) for name in ("a", "b", "c", "d", "e")))


@pytest.mark.parametrize(
    ("holders", "leaving", "away", "deaths", "has_majority"),
    [
        ("a", "", "", 0, True),
        ("ab", "", "", 0, True),
        ("ab", "", "b", 0, False),
        ("abc", "", "", 1, True),
        ("abc", "", "c", 0, True),
        ("abc", "", "bc", 0, False),
        ("abcde", "", "", 2, True),
        ("abcde", "", "e", 1, True),
        ("abd", "abc", "", 1, True),
        ("abd", "abc", "c", 0, True),
        ("abd", "abc", "bc", 0, False),
        ("abc", "a", "", 0, True),
        ("", "", "", 0, False),
    ],
)
def test_deaths_survived_by_a_configuration(holders, leaving, away, deaths, has_majority):
    attendance = Attendance(ALL.present - set(away))
    configuration = Configuration(holders_of(*holders), holders_of(*leaving))
    assert attendance.survives_deaths(configuration) == deaths
    assert attendance.has_majority(configuration) == has_majority


def test_a_node_that_came_back_with_another_database_is_not_the_holder_that_it_was():
    attendance = Attendance(ALL.present, {NodeId("a"): store_of("a") + 1, NodeId("b"): store_of("b")})
    assert not attendance.has(holder_of("a"))
    assert attendance.has(holder_of("b"))
    assert attendance.has(holder_of("c"))  # has not told yet
    assert not attendance.has(Holder(NodeId("z"), 1))


async def test_the_status_names_the_jobs_that_survive_the_fewest_deaths(desks, swarm, n1, n2):
    held_by_all(desks)
    alone, lost = job_id(2, random_part="bbbb"), job_id(3, random_part="cccc")
    n2.agent.put(a_record(alone, "n2", state=JobState.RUNNING))
    n2.agent.put(a_record(lost, "n2", holders=("n2", "n8", "n9"), state=JobState.QUEUED))
    n2.agent.put(a_record(job_id(4), "n2", state=JobState.ENDED))
    survival = (await n1.get("/v1/status"))["survival"]
    assert survival["jobs"] == {"0": 1, "1": 1}
    assert (survival["without_majority"], survival["unknown"]) == (1, 0)
    assert [each["id"] for each in survival["weakest"]] == [lost, alone, JOB]


async def test_a_job_known_from_gossip_alone_has_an_unknown_survival(n1, swarm):
    swarm.down |= {"n2", "n3"}
    n1.agent.known_cards = [a_card(a_record(JOB, "n3", state=JobState.RUNNING))]
    survival = (await n1.get("/v1/status"))["survival"]
    assert (survival["unknown"], survival["weakest"]) == (1, [])


# --- Recovery by force


async def test_recovery_is_done_by_any_holder_and_shown(desks, n1, n2):
    n2.agent.put(a_record(JOB, "n8", holders=("n2", "n8", "n9"), state=JobState.RUNNING))
    document = await n1.post(f"/v1/jobs/{JOB}/recover", {"force": True}, 202)
    assert (document["is_forced"], document["holders"]) == (True, ["n2"])
    assert n2.agent.commands == [RecoverJob(JOB)]
    assert (await n1.get(f"/v1/jobs/{JOB}"))["is_forced"]


@pytest.mark.parametrize("body", [{}, {"force": False}, {"force": "yes"}, {"force": 1}, None])
async def test_recovery_without_force_does_nothing(desks, n1, body):
    held_by_all(desks)
    problem = await n1.post(f"/v1/jobs/{JOB}/recover", body, 422)
    assert problem["errors"][0]["pointer"] == "/force"
    assert "never come back" in problem["remedy"]
    assert n1.agent.commands == []


async def test_recovery_without_need_is_refused_with_the_reason(desks, n1, n3):
    async def no(command):
        return Refused("conflict", "2 of 3 holders answer: n1, n2", "nothing needs to be forced")

    held_by_all(desks)
    n1.agent.answer = no
    problem = await n1.post(f"/v1/jobs/{JOB}/recover", {"force": True}, 409)
    assert (problem["code"], problem["detail"]) == ("conflict", "2 of 3 holders answer: n1, n2")


async def test_a_refusal_without_a_remedy_of_its_own_says_that_nothing_needs_to_be_done(desks, n1):
    async def no(command):
        return Refused("conflict", "the job has ended")

    held_by_all(desks)
    n1.agent.answer = no
    problem = await n1.post(f"/v1/jobs/{JOB}/cancel", {}, 409)
    assert problem["remedy"].startswith("nothing needs to be done")


async def test_recovery_is_asked_of_the_shepherd_where_one_acts(desks, n1, n2, n3):
    held_by_all(desks, leftovers=(Leftover(NodeId("n9"), 1),))
    await n2.post(f"/v1/jobs/{JOB}/recover", {"force": True}, 202)
    assert (told(n1, RecoverJob), told(n2, RecoverJob), told(n3, RecoverJob)) == ([RecoverJob(JOB)], [], [])


async def test_recovery_is_done_here_when_the_shepherd_is_gone(desks, swarm, n1, n2, n3):
    held_by_all(desks)
    swarm.down |= {"n1", "n3"}
    assert (await n2.post(f"/v1/jobs/{JOB}/recover", {"force": True}, 202))["is_forced"]
    assert told(n2, RecoverJob) == [RecoverJob(JOB)]


async def test_recovery_of_a_job_whose_holders_are_all_gone_says_so(n1, swarm):
    swarm.down.add("n3")
    n1.agent.known_cards = [a_card(a_record(JOB, "n3", state=JobState.RUNNING))]
    problem = await n1.post(f"/v1/jobs/{JOB}/recover", {"force": True}, 503)
    assert problem["code"] == "shepherd_unreachable"


async def test_recovery_of_an_unknown_job_or_with_unknown_keys_is_refused(n1):
    assert (await n1.post("/v1/jobs/nosuch/recover", {"force": True}, 404))["code"] == "unknown_job"
    problem = await n1.post(f"/v1/jobs/{JOB}/recover", {"force": True, "really": True}, 422)
    assert problem["errors"][0]["pointer"] == "/really"


# --- Paused ranks, witnesses


async def test_a_job_tells_on_which_nodes_its_ranks_are_paused(desks, swarm, n1, n2, n3):
    held_by_all(desks, nodes=(("n1", 1), ("n2", 1), ("n3", 1)))
    n1.agent.known_tasks = [a_task(JOB, 1)]
    n2.agent.known_tasks = [a_task(JOB, 1, is_frozen=True), a_task(job_id(7), 1)]
    swarm.down.add("n3")
    document = await n1.get(f"/v1/jobs/{JOB}")
    assert [share["is_paused"] for share in document["nodes"]] == [False, True, None]


async def test_a_node_shows_its_tasks(desks, n1, n2):
    n2.agent.known_tasks = [a_task(JOB, 2, is_frozen=True)]
    assert (await n1.get("/v1/nodes/n2"))["tasks"] == [
        {"job_id": JOB, "attempt": 2, "worker": None, "stage": "started", "is_paused": True, "problem": ""}
    ]
    assert (await n1.get("/v1/nodes/n1"))["tasks"] == []


async def test_a_witness_is_shown_as_one(n1):
    n1.agent.witnesses.add(NodeId("n3"))
    items = (await n1.get("/v1/nodes"))["items"]
    assert [each["is_witness"] for each in items] == [False, False, True]


@pytest.mark.parametrize(
    ("gone", "status", "words"),
    [([], "ok", "3 members"), (["n3"], "warning", "--witness"), (["n2", "n3"], "ok", "no other member")],
)
async def test_the_doctor_speaks_of_swarms_of_two(n1, swarm, gone, status, words):
    swarm.statuses |= {NodeId(name): "failed" for name in gone}
    found = next(each for each in (await n1.get("/v1/doctor"))["items"] if each["name"] == "holders")
    assert found["status"] == status
    assert words in found["detail"] + found["remedy"]


async def test_the_doctor_of_a_witness_misses_neither_gpus_nor_an_account_for_jobs(n1):
    n1.agent.telemetry = lambda: ("failed", "no NVIDIA driver")
    n1.agent.config = replace(n1.agent.config, witness=True)
    found = {each["name"]: each for each in (await n1.get("/v1/doctor"))["items"]}
    assert found["gpu_readings"]["status"] == "ok"
    assert (found["job_user"]["status"], found["job_user"]["detail"]) == ("ok", "a witness runs no jobs")


# --- Waiting for another agent no longer than it is there


async def test_an_answer_is_not_awaited_from_a_node_that_is_gone():
    ended = asyncio.Event()

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match="n1 is gone"):
        await answer_of(NodeId("n1"), lambda _: True, never())
    assert ended.is_set()


async def test_an_answer_that_is_there_counts_even_if_the_node_is_gone():
    async def at_once():
        return 7

    assert await answer_of(NodeId("n1"), lambda _: True, at_once()) == 7


async def test_a_stream_ends_when_its_node_is_gone_and_is_closed():
    closed, gone = [], []

    async def one_then_silence():
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    stream = items_of(NodeId("n1"), lambda _: bool(gone), one_then_silence())
    assert await anext(stream) == 1
    gone.append(True)
    with pytest.raises(AgentUnreachable, match="gone"):
        await anext(stream)
    assert closed == [True]


async def test_a_stream_passes_on_what_its_source_raises():
    async def broken():
        yield 1
        raise AgentUnreachable(["n1"], "connection reset")

    with pytest.raises(AgentUnreachable, match="reset"):
        assert [item async for item in items_of(NodeId("n1"), lambda _: False, broken())] == [1]

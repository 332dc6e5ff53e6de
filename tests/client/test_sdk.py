import asyncio
import json

import pytest
from aiohttp import web
from msgspec.structs import fields

from swarm_client import SwarmClient
from swarm_client.sdk import SwarmRequestError
from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.documents import OutlookDocument
from swarmsched.errors import AgentUnreachable, ConfigError, JobRejected
from tests.client.testing import JOB_ID, TOKEN, end, ended, job_document, log, problem, state


async def named(request, response):
    """Answers of agents say of which."""
    response.headers["X-Swarm-Node"] = "gpu1"


@pytest.fixture
async def serve():
    """Start real aiohttp servers from route tables; give their addresses."""
    runners = []

    async def begin(routes):
        app = web.Application()
        app.on_response_prepare.append(named)
        for (method, path), handler in routes.items():
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"{host}:{port}"

    yield begin
    for runner in runners:
        await runner.cleanup()


def answer(document, status=200):
    async def handler(request):
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response(problem(401, "unauthorised", "no token"), status=401)
        return web.json_response(document, status=status)

    return handler


def stream(*records):
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for record in records:
            await response.write(json.dumps(record).encode() + b"\n\n")
        return response

    return handler


TICKET = {"job_id": JOB_ID, "handle": "k3j9x0ab", "holders": ["gpu1"], "stores": ["2a"], "node": "gpu1"}


async def test_submit_follow_and_wait(serve):
    seen = []

    async def submit(request):
        seen.append(await request.json())
        return web.json_response(job_document(state="queued", nodes=[]), status=201)

    address = await serve(
        {
            ("POST", "/v1/tickets"): answer(TICKET),
            ("POST", "/v1/jobs"): submit,
            ("GET", f"/v1/jobs/{JOB_ID}/logs"): stream(state("running", "1"), log("a\n", "2", rank=1), end("3")),
            ("GET", f"/v1/jobs/{JOB_ID}/wait"): answer({"met": True, "job": ended()}),
        }
    )
    async with SwarmClient([address], token=TOKEN) as swarm:
        job = await swarm.submit(["python", "train.py"], ranks=4, gpus_per_rank=1)
        assert (job.id, job.state) == (JOB_ID, JobState.QUEUED)
        records = [record async for record in swarm.logs(job.id, follow=True)]
        assert [(record.rank, record.text) for record in records] == [(1, "a\n")]
        job = await swarm.wait(job.id)
    assert (job.is_ended, job.end_reason, job.shell_exit_code) == (True, EndReason.COMPLETED, 0)
    assert seen[0]["ticket"] == {"job_id": JOB_ID, "holders": ["gpu1"], "stores": ["2a"]}
    assert seen[0]["spec"]["ranks"] == 4


async def test_a_wrong_specification_is_refused_before_anything_is_sent():
    async with SwarmClient(["127.0.0.1:1"], token=TOKEN) as swarm:
        with pytest.raises(JobRejected, match="did you mean 'ranks'"):
            await swarm.submit(["true"], rnaks=2)


async def test_a_command_line_in_one_text_is_refused_before_anything_is_sent():
    """Its letters would be the words of the command."""
    async with SwarmClient(["127.0.0.1:1"], token=TOKEN) as swarm:
        with pytest.raises(JobRejected, match="command: is one text, not a list of words"):
            await swarm.submit("echo hi", ranks=1)


@pytest.mark.parametrize("command", [None, 5, [], {"sh": 1}])
async def test_what_is_no_command_is_refused_before_anything_is_sent(command):
    async with SwarmClient(["127.0.0.1:1"], token=TOKEN) as swarm:
        with pytest.raises(JobRejected, match="command: must be a list of at least one word"):
            await swarm.submit(command)


@pytest.mark.parametrize(("spec", "user"), [({}, "ada"), ({"user": "eve"}, "eve")])
async def test_a_job_belongs_to_the_caller_unless_a_user_is_named(serve, monkeypatch, spec, user):
    monkeypatch.setenv("LOGNAME", "ada")
    sent = []

    async def submit(request):
        sent.append((await request.json())["spec"])
        return web.json_response(job_document(), status=201)

    routes = {("POST", "/v1/tickets"): answer(TICKET), ("POST", "/v1/jobs"): submit}
    async with SwarmClient(
        [await serve({**routes, ("GET", "/v1/members"): answer({"items": []})})], token=TOKEN
    ) as swarm:
        await swarm.submit(["true"], ranks=1, **spec)
        await swarm.submit(JobSpec(command=("true",), **spec))
    assert [each["user"] for each in sent] == [user, user]


async def test_a_token_file_that_is_not_there_is_a_documented_error(tmp_path):
    with pytest.raises(ConfigError, match="token_file: "):
        async with SwarmClient(["127.0.0.1:1"], token_file=tmp_path / "none"):
            pass


async def test_the_next_agent_answers_when_one_is_gone(serve):
    address = await serve({("GET", "/v1/jobs"): answer({"items": [job_document()], "next_cursor": None})})
    async with SwarmClient(["127.0.0.1:1", address], token=TOKEN) as swarm:
        assert [job.nodes for job in await swarm.jobs()] == [("gpu1", "gpu2")]


async def test_a_broken_stream_is_resumed_behind_its_cursor_elsewhere(serve):
    path = ("GET", f"/v1/jobs/{JOB_ID}/logs")
    cursors = []

    async def rest(request):
        cursors.append(request.query.get("cursor"))
        return await stream(log("two\n", "c2"), end("c3"))(request)

    first = await serve({path: stream(log("one\n", "c1"))})
    second = await serve({path: rest})
    async with SwarmClient([first, second], token=TOKEN) as swarm:
        assert [record.text async for record in swarm.logs(JOB_ID, follow=True)] == ["one\n", "two\n"]
    assert cursors == ["c1"]


async def test_output_that_is_missing_is_a_record_of_its_own_and_no_line_is_too_long(serve):
    long = "\0" * 131_072
    gap = {
        "type": "gap",
        "rank": 0,
        "node": "gpu1",
        "stream": "system",
        "time": None,
        "skipped_bytes": 7,
        "cursor": "c2",
    }
    path = ("GET", f"/v1/jobs/{JOB_ID}/logs")
    address = await serve({path: stream(log(long, "c1"), gap, end("c3"))})
    async with SwarmClient([address], token=TOKEN) as swarm:
        records = [record async for record in swarm.logs(JOB_ID, follow=True)]
    assert [(record.text, record.skipped_bytes) for record in records] == [(long, 0), ("", 7)]


async def test_a_swarm_that_is_too_busy_is_given_the_same_ticket_again(serve):
    seen = []

    async def submit(request):
        seen.append((await request.json())["ticket"])
        if len(seen) < 7:
            return web.json_response(problem(503, "unavailable", "?", retry_after_seconds=0.01), status=503)
        return web.json_response(job_document(state="queued", nodes=[]), status=201)

    address = await serve({("POST", "/v1/tickets"): answer(TICKET), ("POST", "/v1/jobs"): submit})
    async with SwarmClient([address], token=TOKEN) as swarm:
        assert (await swarm.submit(["true"])).id == JOB_ID
    assert len(seen) == 7
    assert all(each == seen[0] for each in seen)


async def test_errors_are_typed(serve):
    address = await serve(
        {("GET", "/v1/jobs/x"): answer(problem(404, "unknown_job", "no such job", remedy="look"), 404)}
    )
    async with SwarmClient([address], token=TOKEN) as swarm:
        with pytest.raises(SwarmRequestError, match="no such job") as caught:
            await swarm.job("x")
        assert (caught.value.status, caught.value.code, caught.value.remedy) == (404, "unknown_job", "look")
        with pytest.raises(SwarmRequestError, match="no job") as caught:
            await swarm.job("\udcff")
        assert (caught.value.status, caught.value.code) == (404, "unknown_job")
    async with SwarmClient(["127.0.0.1:1"], token=TOKEN) as swarm:
        with pytest.raises(AgentUnreachable):
            await swarm.nodes()


async def test_wait_ends_with_its_time(serve):
    async def never(request):
        await asyncio.sleep(0.02)
        return web.json_response({"met": False, "job": job_document()})

    address = await serve({("GET", f"/v1/jobs/{JOB_ID}/wait"): never})
    async with SwarmClient([address], token=TOKEN) as swarm:
        with pytest.raises(TimeoutError):
            await swarm.wait(JOB_ID, timeout_s=0.1)


async def test_a_wait_goes_on_while_nobody_acts_and_at_agents_that_it_has_only_heard_of(serve):
    answers = [
        problem(503, "shepherd_unreachable", "no shepherd acts for it at this moment"),
        {"met": False, "job": job_document()},
    ]

    async def first(request):
        document = answers.pop()
        return web.json_response(document, status=document.get("status", 200))

    second = await serve({("GET", f"/v1/jobs/{JOB_ID}/wait"): answer({"met": True, "job": ended()})})
    members = {"items": [{"name": "gpu2", "address": second, "status": "alive"}, {"name": "gpu3", "status": "failed"}]}
    address = await serve({("GET", "/v1/members"): answer(members), ("GET", f"/v1/jobs/{JOB_ID}/wait"): first})
    async with SwarmClient([address], token=TOKEN) as swarm:
        assert (await swarm.wait(JOB_ID)).is_ended
    assert answers == []


async def test_a_cancel_that_was_held_back_is_not_held_back_again_elsewhere(serve):
    """One agent has waited for a shepherd in vain; each of the others would do so again."""
    asked = []

    async def held_back(request):
        asked.append(request)
        return web.json_response(problem(503, "shepherd_unreachable", "nobody acts"), status=503)

    addresses = [await serve({("POST", f"/v1/jobs/{JOB_ID}/cancel"): held_back}) for _ in range(2)]
    async with SwarmClient(addresses, token=TOKEN) as swarm:
        with pytest.raises(SwarmRequestError, match="nobody acts"):
            await swarm.cancel(JOB_ID)
    assert len(asked) == 1


async def test_a_wait_for_an_unknown_job_is_refused_at_once(serve):
    address = await serve({("GET", "/v1/jobs/x/wait"): answer(problem(404, "unknown_job", "no such job"), 404)})
    async with SwarmClient([address], token=TOKEN) as swarm:
        with pytest.raises(SwarmRequestError, match="no such job"):
            await swarm.wait("x")


async def test_a_recovery_is_forced_and_its_refusal_typed(serve):
    seen = []

    async def recover(request):
        seen.append(await request.json())
        return web.json_response(job_document(is_forced=True), status=202)

    path = ("POST", f"/v1/jobs/{JOB_ID}/recover")
    address = await serve({path: recover})
    async with SwarmClient([address], token=TOKEN) as swarm:
        assert (await swarm.recover(JOB_ID)).document["is_forced"]
    assert seen == [{"force": True}]
    address = await serve({path: answer(problem(409, "conflict", "2 of 3 holders answer"), 409)})
    async with SwarmClient([address], token=TOKEN) as swarm:
        with pytest.raises(SwarmRequestError, match="2 of 3") as caught:
            await swarm.recover(JOB_ID)
    assert caught.value.code == "conflict"


async def test_all_that_an_agent_told_can_be_had_with_types(serve):
    outlook = dict.fromkeys(each.name for each in fields(OutlookDocument)) | {"rho": 1.5, "problem": ""}
    told = job_document(outlook=outlook, later="x")
    address = await serve({("GET", f"/v1/jobs/{JOB_ID}"): answer(told)})
    async with SwarmClient([address], token=TOKEN) as swarm:
        job = await swarm.job(JOB_ID)
    assert (job.told.outlook.rho, job.told.nodes[1].ranks) == (1.5, 2)
    assert job.document["later"] == "x"

"""Each task runs as the account of its order, and has folders, sockets, environments and warm processes of that."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm_agent.supervision.limits import TaskLimits
from swarm_agent.task.account import Account, JobAccounts, NoAccount, find_account
from swarmsched.effects import StageTask, StartTask
from swarmsched.events import TaskExited, TaskStaged, TaskStageFailed, TaskStarted
from swarmsched.ids import NodeId
from swarmsched.resources import Share
from swarmsched.task import RankExit, TaskFailure, TaskOrder
from tests.agent.supervision.test_stager import FAKE_UV
from tests.agent.supervision.testing import Bench, make_order

IDS = {"ada": "nobody", "bob": "daemon"}  # accounts that every machine has

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run jobs as other accounts"),
]


class ByUser(JobAccounts):
    """Accounts by the user who submitted a job; whoever is in `gone` has none."""

    may_switch = True

    def __init__(self) -> None:
        super().__init__("")
        self.gone: set[str] = set()

    def of(self, order: TaskOrder) -> Account:
        if order.spec.user in self.gone:
            raise NoAccount(f"{order.spec.user} has no account on this machine")
        return dataclasses.replace(find_account(IDS[order.spec.user]), is_personal=True)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for folder in (tmp_path, *tmp_path.parents):  # pytest's folders are root's alone
        if folder.stat().st_mode & 0o011 != 0o011:
            folder.chmod(folder.stat().st_mode | 0o011)
    return tmp_path / "data"


def uid_of(user: str) -> int:
    return find_account(IDS[user]).uid


def owner(path: Path) -> int:
    return path.stat().st_uid


async def staged(bench: Bench, order: TaskOrder) -> None:
    bench.runner.perform(StageTask(order))
    await bench.wait_for(TaskStaged, order.key)


async def test_two_jobs_have_ranks_folders_and_sockets_of_their_own_accounts(data_dir: Path) -> None:
    async with Bench(data_dir, accounts=ByUser()) as bench:
        orders = {user: make_order("sh", "-c", "id -un; echo $HOME; exec sleep 60", user=user) for user in IDS}
        for order in orders.values():
            await staged(bench, order)
            bench.runner.perform(StartTask(order, ()))
        for user, order in orders.items():
            account = find_account(IDS[user])
            out = await bench.wait_for_output(order, account.home.encode())
            assert out.decode().splitlines() == [account.name, account.home]
            task = bench.runner._tasks[order.key]
            assert task.prepared is not None
            assert task.prepared.checkpoint_dir is not None
            for path in (task.prepared.workdir, task.prepared.checkpoint_dir, bench.runner._sockets.path(order.key)):
                assert (owner(path), path.stat().st_mode & 0o022) == (account.uid, 0), path


async def test_an_environment_is_built_anew_for_another_account(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders, tools = tmp_path / "builders", tmp_path / "tools"
    tools.mkdir(mode=0o755)
    builders.touch()
    builders.chmod(0o666)
    (tools / "uv").write_text(FAKE_UV.replace("#!/bin/sh\n", f"#!/bin/sh\n[ $1 = pip ] && id -un >> {builders}\n", 1))
    (tools / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    async with Bench(data_dir, accounts=ByUser()) as bench:
        wanted = await bench.agent.blobs.put_bytes(b"torch\n")
        places = []
        for user in ("ada", "bob", "ada"):
            order = make_order("train", user=user, requirements=wanted)
            await staged(bench, order)
            prepared = bench.runner._tasks[order.key].prepared
            assert prepared is not None
            places.append(prepared.environment_dirs[0])
        assert places[0] == places[2] != places[1]
        assert [owner(place) for place in places] == [0, 0, 0], "what is built is the agent's"
        assert builders.read_text().split() == [IDS["ada"], IDS["bob"]]


async def test_what_waits_for_a_worker_of_one_account_is_not_given_to_another(data_dir: Path) -> None:
    async with Bench(data_dir, accounts=ByUser(), warm_workers=2) as bench:
        one = {"part": 1, "shares": (Share(NodeId("n1"), 1, part=1),)}
        orders = {
            user: replace(make_order("python3", "-c", "import time; time.sleep(60)", user=user), **one) for user in IDS
        }
        for order in orders.values():
            bench.runner.perform(StartTask(order, ()))
            await bench.wait_for(TaskStarted, order.key)
        bench.runner.warm.adjust(bench.runner._warm_starts(), bench.runner._server, TaskLimits(0, "none here"))
        waiting = bench.runner.warm._waiting
        assert len({each.start for each in waiting}) == 2, "of equal ones each can become the other's worker"
        for each in waiting:
            told = (each.directory / "warm").read_text().split("\0")
            assert int(told[0]) == each.start.account.uid
        assert {each.start.account.uid for each in waiting} == {uid_of("ada"), uid_of("bob")}


async def test_a_task_whose_user_has_no_account_is_not_started_and_says_so(data_dir: Path) -> None:
    accounts = ByUser()
    accounts.gone.add("bob")
    async with Bench(data_dir, accounts=accounts) as bench:
        order = make_order("true", user="bob")
        bench.runner.perform(StageTask(order))
        failed = await bench.wait_for(TaskStageFailed, order.key)
        assert (failed.failure, failed.detail) == (TaskFailure.INTERNAL, "n1: bob has no account on this machine")
        again = make_order("true", user="bob")
        bench.runner.perform(StartTask(again, ()))
        exited: TaskExited = await bench.finish(again)
        assert exited.detail == failed.detail


async def test_a_task_that_outlives_the_agent_keeps_the_account_that_it_was_launched_with(data_dir: Path) -> None:
    accounts = ByUser()
    async with Bench(data_dir, accounts=accounts) as bench:
        order = make_order("sh", "-c", "trap 'exit 5' USR1; while :; do sleep 0.05; done", user="ada")
        bench.runner.perform(StartTask(order, ()))
        await bench.wait_for(TaskStarted, order.key)
        await bench.runner.stop()
        accounts.gone.add("ada")
        async with Bench(data_dir, accounts=accounts) as later:
            assert [status.job_id for status in later.found] == [order.job_id]
            assert owner(later.runner._sockets.path(order.key)) == uid_of("ada")
            (rank,) = later.runner._tasks[order.key].link.facts.rank_starts
            os.kill(rank, signal.SIGUSR1)
            exited: TaskExited = await later.finish(order)
            assert exited.exits == (RankExit(0, 5),)

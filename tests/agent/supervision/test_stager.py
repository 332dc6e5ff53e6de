"""Files and environments of tasks, from the order to the running rank, over two nodes in memory."""

import asyncio
import errno
import os
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm_agent.room import RESERVE_BYTES, NoRoom
from swarm_agent.staging import fetch
from swarm_agent.staging.blobs import BlobError, NotStored
from swarm_agent.staging.fetch import NotReached
from swarm_agent.staging.tree import Unpacker
from swarm_agent.supervision.stager import failure_of
from swarmsched.effects import StageTask, StartTask, StopTask
from swarmsched.events import DiskFilled, TaskExited, TaskPhaseChanged, TaskStaged, TaskStageFailed
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import NodeId
from swarmsched.resources import Share
from swarmsched.task import TaskFailure, TaskOrder
from swarmsched.tree import BadTree, EntryKind, Tree, TreeEntry
from tests.agent.supervision.testing import Bench, Network, make_order

FAKE_UV = """#!/bin/sh
case "$1" in
venv) for last; do :; done; mkdir -p $last/bin; printf '#!/bin/sh\\necho from the environment\\n' > $last/bin/train
      chmod 755 $last/bin/train ;;
pip) grep -q nonsense requirements.txt && { echo 'no version of nonsense found'; exit 2; } ;;
esac
exit 0
"""


@pytest.fixture
async def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """n1 runs tasks, n2 holds what was shipped; `uv` is a script."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "uv").write_text(FAKE_UV)
    (tools / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    net = Network()
    async with Bench(tmp_path / "n1", node="n1", net=net) as n1, Bench(tmp_path / "n2", node="n2", net=net) as n2:
        yield n1, n2


async def ship(bench: Bench, files: dict[str, bytes]) -> str:
    entries = [
        TreeEntry(path, EntryKind.FILE, 0o755, len(data), await bench.agent.blobs.put_bytes(data))
        for path, data in files.items()
    ]
    return await bench.agent.blobs.put_bytes(Tree.of(entries).to_bytes())


async def stage_and_run(bench: Bench, order: TaskOrder) -> TaskExited:
    bench.runner.perform(StageTask(order))
    await bench.wait_for(TaskStaged, order.key)
    bench.runner.perform(StartTask(order, ()))
    return await bench.finish(order)


async def test_files_come_from_a_holder_of_the_job_where_those_that_took_them_are_gone(
    nodes: tuple[Bench, Bench],
) -> None:
    n1, n2 = nodes
    tree = await ship(n2, {"run.sh": b"#!/bin/sh\necho shipped\n"})
    text = await n2.agent.blobs.put_bytes(b"something\n")
    order = make_order("./run.sh", tree=tree, requirements=text, blob_sources=("n9",))
    order = replace(order, configuration=Configuration((Holder(NodeId("n2"), 1),)))
    assert (await stage_and_run(n1, order)).exits[0].exit_code == 0
    assert n1.output(order) == b"shipped\n"


def phases(bench: Bench) -> list[str]:
    return [event.phase for event in bench.events if isinstance(event, TaskPhaseChanged)]


async def test_a_shipped_tree_runs_in_a_fresh_copy(nodes: tuple[Bench, Bench]) -> None:
    n1, n2 = nodes
    tree = await ship(n2, {"run.sh": b"#!/bin/sh\ncat data/x; pwd; echo mine > data/x\n", "data/x": b"shipped\n"})
    for attempt in (1, 2):
        order = make_order("./run.sh", attempt=attempt, tree=tree, blob_sources=("n2",))
        exited = await stage_and_run(n1, order)
        assert exited.exits[0].exit_code == 0
        work = n1.config.data_dir / "jobs" / order.job_id / str(attempt) / "work"
        assert n1.output(order).decode().splitlines() == ["shipped", str(work)]
        assert (work / "data" / "x").read_bytes() == b"mine\n"
    assert phases(n1) == ["sync", "sync"]


async def test_workdir_is_a_folder_of_the_tree(nodes: tuple[Bench, Bench]) -> None:
    n1, n2 = nodes
    tree = await ship(n2, {"sub/f": b""})
    order = make_order("ls", tree=tree, blob_sources=("n2",), workdir="sub")
    await stage_and_run(n1, order)
    assert n1.output(order) == b"f\n"


async def test_a_folder_that_was_not_shipped_is_named(nodes: tuple[Bench, Bench]) -> None:
    n1, n2 = nodes
    tree = await ship(n2, {"sub/f": b""})
    order = make_order("ls", tree=tree, blob_sources=("n2",), workdir="sub2")
    n1.runner.perform(StageTask(order))
    failed = await n1.wait_for(TaskStageFailed)
    assert failed.failure is TaskFailure.SYNC
    assert "sub2 does not exist on n1" in failed.detail


async def test_files_that_nobody_has_fail_the_sync_with_the_nodes_asked(
    nodes: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "GIVEN_UP_S", 0.0)
    n1, _ = nodes
    order = make_order("true", tree="0" * 64, blob_sources=("n2", "n7"))
    n1.runner.perform(StageTask(order))
    failed = await n1.wait_for(TaskStageFailed)
    assert failed.failure is TaskFailure.UNREACHABLE  # n7 may have them, and another node may reach it
    assert "n2: does not have it; n7: n7 does not answer" in failed.detail
    assert failed.detail.encode() in n1.output(order)
    assert [record async for record in n1.agent.logs.follow(order.job_id, 1, 0)]  # ends, since the task is over


async def test_a_manifest_that_climbs_out_fails_the_sync_and_writes_nothing(nodes: tuple[Bench, Bench]) -> None:
    n1, n2 = nodes
    evil = b'{"entries":[{"kind":"dir","path":"../../../../evil"}],"format":1}'
    order = make_order("true", tree=await n2.agent.blobs.put_bytes(evil), blob_sources=("n2",))
    n1.runner.perform(StageTask(order))
    failed = await n1.wait_for(TaskStageFailed)
    assert failed.failure is TaskFailure.SYNC
    assert "'..' segment" in failed.detail
    assert not list(n1.config.data_dir.parent.rglob("evil"))


async def test_requirements_are_built_and_come_first_on_the_path(nodes: tuple[Bench, Bench]) -> None:
    n1, n2 = nodes
    requirements = await n2.agent.blobs.put_bytes(b"torch\n")
    order = make_order("train", requirements=requirements, blob_sources=("n2",))
    await stage_and_run(n1, order)
    assert n1.output(order) == b"from the environment\n"
    assert phases(n1) == ["environment"]


async def test_a_failed_build_puts_its_output_in_the_jobs_log(nodes: tuple[Bench, Bench]) -> None:
    n1, n2 = nodes
    requirements = await n2.agent.blobs.put_bytes(b"nonsense\n")
    order = make_order("train", requirements=requirements, blob_sources=("n2",))
    n1.runner.perform(StageTask(order))
    failed = await n1.wait_for(TaskStageFailed)
    assert failed.failure is TaskFailure.ENVIRONMENT
    assert n1.output(order).decode().splitlines()[0] == "no version of nonsense found"
    assert "swarm: n1: environment build failed" in n1.output(order).decode()


async def test_venv_of_the_node_is_used_or_missed_by_name(nodes: tuple[Bench, Bench], tmp_path: Path) -> None:
    n1, _ = nodes
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    order = make_order("sh", "-c", "echo $VIRTUAL_ENV; echo $PATH | cut -d: -f1", venv=str(tmp_path / "venv"))
    n1.runner.perform(StartTask(order, ()))
    await n1.finish(order)
    assert n1.output(order).decode().splitlines() == [f"{tmp_path}/venv", f"{tmp_path}/venv/bin"]
    order = make_order("true", venv="/no/such/venv")
    n1.runner.perform(StartTask(order, ()))
    exited = await n1.finish(order)
    assert exited.failure is TaskFailure.ENVIRONMENT
    assert "/no/such/venv on n1" in exited.detail


async def test_stop_while_staging_abandons_it(nodes: tuple[Bench, Bench], tmp_path: Path) -> None:
    n1, n2 = nodes
    (tmp_path / "tools" / "uv").write_text("#!/bin/sh\nsleep 300\n")
    requirements = await n2.agent.blobs.put_bytes(b"slow\n")
    order = make_order("true", requirements=requirements, blob_sources=("n2",))
    n1.runner.perform(StageTask(order))
    await n1.wait_for(TaskPhaseChanged)
    n1.runner.perform(StopTask(order.job_id, 1, 30.0))
    exited = await n1.finish(order)
    assert exited.exits == ()
    assert not any(isinstance(event, TaskStaged | TaskStageFailed) for event in n1.events)


async def test_a_part_that_is_given_up_while_it_unpacks_is_not_in_the_way_of_the_next(
    nodes: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack, begun = Unpacker.unpack, threading.Event()

    def slow(self: Unpacker, tree: Tree, target: Path) -> None:
        begun.set()
        time.sleep(0.3)
        unpack(self, tree, target)

    monkeypatch.setattr(Unpacker, "unpack", slow)
    n1, _ = nodes
    order = make_order("ls", tree=await ship(n1, {"file": b"x"}))
    folder = n1.config.data_dir / "jobs" / order.job_id / "1"
    (folder / f"work.{os.getpid()}").mkdir(parents=True)  # an agent that was killed may have left one, too
    n1.runner.perform(StageTask(order))
    await asyncio.to_thread(begun.wait)
    n1.runner.perform(StopTask(order.job_id, 1, 0.0))
    await n1.finish(order)
    again = replace(order, part=1, shares=(Share(order.node, 1, part=1),))
    await stage_and_run(n1, again)
    assert n1.output(again) == b"file\n"
    assert not [*folder.glob("work.????????")]


@pytest.mark.parametrize("workdir", ["/" + "a" * 300, "/x" * 3_000])
async def test_a_start_that_the_file_system_refuses_is_told(nodes: tuple[Bench, Bench], workdir: str) -> None:
    n1, _ = nodes
    order = make_order("true", workdir=workdir)
    n1.runner.perform(StartTask(order, ()))
    exited = await n1.finish(order)
    assert (exited.failure, exited.exits) == (TaskFailure.SYNC, ())  # another node refuses it as well
    assert "File name too long" in exited.detail


async def test_files_that_do_not_fit_beside_the_reserve_are_another_nodes_to_take_and_say_what_is_kept_back(
    nodes: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    n1, _ = nodes
    order = make_order("true", tree=await ship(n1, {"f": b"abc"}))
    whole = os.statvfs(n1.runner._config.data_dir)
    blocks = (RESERVE_BYTES - 1) // whole.f_frsize
    full = os.statvfs_result((*tuple(whole)[:4], blocks, *tuple(whole)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    n1.runner.perform(StageTask(order))
    failed = await n1.wait_for(TaskStageFailed)
    assert failed.failure is TaskFailure.UNREACHABLE
    assert "3 bytes do not fit: 64.0 MiB are free at" in failed.detail
    assert failed.detail.endswith(", and 64 MiB are kept back (" + str(n1.runner._jobs_dir / order.job_id / "1/work)"))
    assert (await n1.wait_for(DiskFilled)).shortage.startswith("disk nearly full: ")


async def test_an_environment_whose_interpreter_is_gone_is_not_passed_over_for_that_of_the_node(
    nodes: tuple[Bench, Bench], tmp_path: Path
) -> None:
    n1, _ = nodes
    (venv := tmp_path / "venv" / "bin").mkdir(parents=True)
    (venv / "python").symlink_to(tmp_path / "gone")
    order = make_order("python", "-V", venv=str(venv.parent))
    n1.runner.perform(StartTask(order, ()))
    exited = await n1.finish(order)
    assert (exited.failure, exited.exits) == (TaskFailure.ENVIRONMENT, ())
    assert f"{venv}/python leads to no program" in exited.detail


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (NoRoom(3, 2, Path("/data")), TaskFailure.UNREACHABLE),
        (OSError(errno.ENOSPC, "No space left on device"), TaskFailure.UNREACHABLE),
        (NotStored("0", OSError(errno.EDQUOT, "Disk quota exceeded"), ""), TaskFailure.UNREACHABLE),
        (NotReached("0", "could not be fetched"), TaskFailure.UNREACHABLE),
        (NotStored("0", OSError(errno.EIO, "Input/output error"), ""), TaskFailure.INTERNAL),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), TaskFailure.INTERNAL),
        (PermissionError(errno.EACCES, "Permission denied"), TaskFailure.INTERNAL),
        (OSError(errno.ENAMETOOLONG, "File name too long"), TaskFailure.SYNC),
        (BlobError("0", "could not be fetched"), TaskFailure.SYNC),
        (BadTree("it climbs out"), TaskFailure.SYNC),
        (None, TaskFailure.SYNC),
    ],
)
def test_what_the_system_refuses_is_the_nodes_and_what_a_job_brings_may_be_the_jobs(
    error: Exception | None, failure: TaskFailure
) -> None:
    assert failure_of(error, TaskFailure.SYNC) is failure


async def test_a_task_staged_in_an_earlier_life_starts_without_being_staged_again(tmp_path: Path) -> None:
    order = None
    async with Bench(tmp_path) as first:
        tree = await ship(first, {"f": b"here\n"})
        order = make_order("cat", "f", tree=tree)
        first.runner.perform(StageTask(order))
        await first.wait_for(TaskStaged)
    async with Bench(tmp_path) as second:
        second.runner.perform(StartTask(order, ()))
        await second.finish(order)
        assert second.output(order) == b"here\n"


async def test_without_files_or_workdir_a_task_gets_an_empty_folder(nodes: tuple[Bench, Bench]) -> None:
    n1, _ = nodes
    order = make_order("sh", "-c", "pwd; ls -A | wc -l")
    n1.runner.perform(StartTask(order, ()))
    await n1.finish(order)
    folder, count = n1.output(order).decode().split()
    assert folder == f"{n1.config.data_dir}/jobs/{order.job_id}/1/work"
    assert count == "0"

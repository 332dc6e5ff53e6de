"""A checkpoint comes back on whichever node the next attempt runs."""

import os
import shutil
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm_agent.staging import fetch
from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CommitCheckpoint
from swarmsched.effects import StageTask, StartTask
from swarmsched.events import TaskPhaseChanged, TaskStaged, TaskStageFailed
from swarmsched.ids import NodeId
from swarmsched.resources import Share
from swarmsched.task import TaskFailure, TaskOrder
from tests.agent.supervision.testing import Bench, make_order


async def written(swarm, bench: Bench, content: bytes = b"weights") -> tuple[TaskOrder, Checkpoint]:
    """Attempt 1 of a job, its checkpoint `step-5` committed."""
    rank = await swarm.start(bench)
    rank.write("step-5/model.pt", content).chmod(0o640)
    rank.write("step-5/more/last.json", b"{}")
    assert (await rank.ask("step-5"))["ok"]
    (command,) = [command for command in bench.agent.commands if isinstance(command, CommitCheckpoint)]
    return rank.order, command.checkpoint


def next_attempt(order: TaskOrder, checkpoint: Checkpoint, node: str) -> TaskOrder:
    shares = (Share(NodeId(node), 1),)
    command = make_order("sh", "-c", 'echo "$SWARM_RESUME_FROM"; echo "$SWARM_CHECKPOINT_DIR"').spec.command
    spec = replace(order.spec, command=command)
    return replace(order, attempt=2, node=NodeId(node), shares=shares, spec=spec, checkpoint=checkpoint)


async def resumed(bench: Bench, order: TaskOrder) -> Path:
    """Stage and run the next attempt; where it resumes from, by its own word."""
    assert order.needs_staging
    bench.runner.perform(StageTask(order))
    await bench.wait_for(TaskStaged, order.key)
    bench.runner.perform(StartTask(order, ()))
    await bench.finish(order)
    resume_from, folder = bench.output(order).decode().splitlines()
    assert folder == str(bench.config.data_dir / "checkpoints" / order.job_id / "2")
    return Path(resume_from)


async def not_staged(bench: Bench, order: TaskOrder, failure: TaskFailure = TaskFailure.SYNC) -> str:
    bench.runner.perform(StageTask(order))
    failed = await bench.wait_for(TaskStageFailed, order.key)
    assert failed.failure is failure
    assert failed.detail in bench.output(order).decode()
    return failed.detail


async def test_another_node_gets_the_copy_although_the_writer_is_gone(swarm) -> None:
    first, _, third = [await swarm.node(name) for name in ("n1", "n2", "n3")]
    order, checkpoint = await written(swarm, first, b"w" * 600_000)
    assert set(checkpoint.copies) == {"n1", "n2", "n3"}
    del swarm.net.agents[first.node]
    third.agent.blobs.drop([checkpoint.digest])
    third.runner._checkpoints._kept.retain(order.job_id, ())  # it lost its own copy and has to ask
    order = next_attempt(order, checkpoint, "n3")
    path = await resumed(third, order)
    assert path == third.config.data_dir / "checkpoints" / order.job_id / "1" / "step-5"
    assert (path / "model.pt").read_bytes() == b"w" * 600_000
    assert stat.S_IMODE((path / "model.pt").stat().st_mode) == 0o640
    assert (path / "more" / "last.json").read_bytes() == b"{}"
    assert TaskPhaseChanged(order.job_id, 2, "sync") in third.events
    assert sorted(folder.name for folder in path.parent.parent.iterdir()) == ["1", "2"]


async def test_on_the_writers_node_what_lies_there_is_used_as_it_is(swarm) -> None:
    bench = await swarm.node("n1")
    order, checkpoint = await written(swarm, bench)
    path = bench.config.data_dir / "checkpoints" / order.job_id / "1" / "step-5"
    inode = (path / "model.pt").stat().st_ino
    assert await resumed(bench, next_attempt(order, checkpoint, "n1")) == path
    assert (path / "model.pt").stat().st_ino == inode


async def test_a_file_that_was_written_over_after_its_commit_is_replaced_by_the_copy(swarm) -> None:
    bench = await swarm.node("n1")
    order, checkpoint = await written(swarm, bench, b"good weights")
    path = bench.config.data_dir / "checkpoints" / order.job_id / "1" / "step-5"
    (path / "model.pt").write_bytes(b"half a write")
    (path / "stray").write_bytes(b"")
    assert await resumed(bench, next_attempt(order, checkpoint, "n1")) == path
    assert (path / "model.pt").read_bytes() == b"good weights"
    assert not (path / "stray").exists()
    assert [entry.name for entry in path.parent.iterdir()] == ["step-5"]


async def test_a_copy_survives_the_agent(swarm, tmp_path: Path) -> None:
    async with Bench(tmp_path / "solo", node="n9") as bench:
        order, checkpoint = await written(swarm, bench)
        shutil.rmtree(bench.config.data_dir / "checkpoints" / order.job_id / "1")
    async with Bench(tmp_path / "solo", node="n9") as again:
        path = await resumed(again, next_attempt(order, checkpoint, "n9"))
        assert (path / "model.pt").read_bytes() == b"weights"


async def test_copies_that_do_not_answer_are_named(swarm, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "GIVEN_UP_S", 0.0)
    first, second = await swarm.node("n1"), await swarm.node("n2")
    order, checkpoint = await written(swarm, first)
    third = await swarm.node("n3")
    for name in ("n1", "n2"):
        del swarm.net.agents[NodeId(name)]
    detail = await not_staged(third, next_attempt(order, checkpoint, "n3"), TaskFailure.UNREACHABLE)
    assert "checkpoint 'step-5' of attempt 1 (written on n1) could not be brought to n3" in detail
    assert "copies: n1, n2" in detail
    assert "n1 does not answer" in detail
    assert second.node == "n2"


async def test_a_shared_directory_is_looked_into_and_its_lack_is_told(swarm, tmp_path: Path) -> None:
    shared = {"checkpoint_dir": tmp_path / "shared", "checkpoint_dir_shared": True}
    first, second = await swarm.node("n1", **shared), await swarm.node("n2", **shared)
    order, checkpoint = await written(swarm, first)
    order = next_attempt(order, checkpoint, "n2")
    second.runner.perform(StageTask(order))
    await second.wait_for(TaskStaged)
    second.runner.perform(StartTask(order, ()))
    await second.finish(order)
    path = tmp_path / "shared" / order.job_id / "1" / "step-5"
    assert second.output(order).decode().splitlines() == [str(path), str(path.parent.parent / "2")]

    third = await swarm.node("n3")
    detail = await not_staged(third, replace(order, node=NodeId("n3"), shares=(Share(NodeId("n3"), 1),)))
    assert "is not at" in detail
    assert "same file system on all nodes" in detail


def damage(bench: Bench, order: TaskOrder, content: bytes) -> Path:
    """Its folder is lost and its packed copy has rotted; the job's folder."""
    folder = bench.config.data_dir / "checkpoints" / order.job_id
    shutil.rmtree(folder / "1" / "step-5")
    for path in bench.agent.blobs.directory.glob("??/*"):
        if path.read_bytes() == content:
            path.write_bytes(b"evil")
    return folder


async def test_a_damaged_copy_is_never_unpacked(swarm) -> None:
    bench = await swarm.node("n1")
    order, checkpoint = await written(swarm, bench, b"good")
    folder = damage(bench, order, b"good")
    assert "could not be fetched" in await not_staged(bench, next_attempt(order, checkpoint, "n1"))
    assert [path.name for path in folder.iterdir()] == ["1"]
    assert list((folder / "1").iterdir()) == []


async def test_a_damaged_copy_is_replaced_by_another_nodes(swarm) -> None:
    first, _ = await swarm.node("n1"), await swarm.node("n2")
    order, checkpoint = await written(swarm, first, b"good")
    damage(first, order, b"good")
    path = await resumed(first, next_attempt(order, checkpoint, "n1"))
    assert (path / "model.pt").read_bytes() == b"good"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run a job as another account")
async def test_what_is_restored_belongs_to_the_jobs_account(swarm, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o011 != 0o011:
            folder.chmod(folder.stat().st_mode | 0o011)
    first = await swarm.node("n1", job_user="nobody")
    second = await swarm.node("n2", job_user="nobody")
    rank = await swarm.start(first)
    path = rank.write("step-5")
    refused = await rank.ask("step-5")
    assert "another account" in refused["problem"]
    nobody = rank.folder.stat().st_uid
    os.chown(path, nobody, nobody)
    assert (await rank.ask("step-5"))["ok"]
    checkpoint = next(command.checkpoint for command in first.agent.commands)
    restored = await resumed(second, next_attempt(rank.order, checkpoint, "n2"))
    assert (restored.stat().st_uid, restored.read_bytes()) == (nobody, b"weights")
    assert restored.parent.stat().st_uid == nobody

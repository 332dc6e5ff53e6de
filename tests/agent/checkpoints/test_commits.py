"""From a rank's word to the register: real tasks, real sockets, agents that answer for the core."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm_agent.checkpoints import commits as commits_module
from swarm_agent.checkpoints.copies import _ranked
from swarmsched.commands import CheckpointCommitted, Command, CommitCheckpoint, Refused
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import NodeId
from swarmsched.resources import Share
from swarmsched.tree import Tree
from tests.agent.supervision.testing import DEADLINE_S, Bench, make_order


def committed(bench: Bench) -> list[CommitCheckpoint]:
    return [command for command in bench.agent.commands if isinstance(command, CommitCheckpoint)]


async def until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_checkpoint_is_copied_to_two_peers_and_then_registered(swarm) -> None:
    first = await swarm.node("n1")
    peers = [await swarm.node(name) for name in ("n2", "n3", "n4")]
    rank = await swarm.start(first)
    rank.write("step-10/model.pt", b"m" * 700_000)
    rank.write("step-10/optimizer.pt", b"o" * 10)

    first.agent.answer = lambda command: CheckpointCommitted(command.checkpoint, epoch=7)
    answer = await rank.ask("step-10", wait=True)
    assert answer == {"v": 1, "type": "checkpoint", "ok": True, "name": "step-10", "committed": True, "epoch": 7}
    (command,) = committed(first)
    checkpoint = command.checkpoint
    assert (command.job_id, command.attempt) == (rank.order.job_id, 1)
    assert (checkpoint.name, checkpoint.attempt, checkpoint.node) == ("step-10", 1, "n1")
    assert checkpoint.size_bytes == 700_010
    assert abs(checkpoint.committed_utc_s - time.time()) < 60
    assert checkpoint.copies[0] == "n1"
    assert len(set(checkpoint.copies)) == 3
    for bench in (first, *peers):
        has_it = not bench.agent.blobs.missing([checkpoint.digest])
        assert has_it == (bench.node in checkpoint.copies)
        if has_it:
            tree = Tree.from_bytes(bench.agent.blobs.path(checkpoint.digest).read_bytes())
            assert bench.agent.blobs.missing(tree.blobs) == ()


async def test_nodes_outside_the_gang_and_its_holders_are_preferred() -> None:
    order = make_order("x", shares=(Share(NodeId("a"), 1), Share(NodeId("b"), 1)), node="a", ranks=2)
    order = replace(order, configuration=Configuration((Holder(NodeId("c"), 1),)))
    nodes = [NodeId(name) for name in "bcdef"]
    ranked = _ranked(order, nodes)
    assert (set(ranked[:3]), ranked[3:]) == ({"d", "e", "f"}, ["c", "b"])
    assert _ranked(order, nodes[::-1]) == ranked


async def test_alone_a_checkpoint_counts_with_its_own_copy(swarm) -> None:
    rank = await swarm.start(await swarm.node("n1"))
    rank.write("a")
    assert (await rank.ask("a"))["ok"]
    (command,) = committed(rank.bench)
    assert command.checkpoint.copies == ("n1",)


async def test_a_peer_that_fails_is_replaced_by_another(swarm) -> None:
    first = await swarm.node("n1")
    for name in ("n2", "n3", "n4"):
        bench = await swarm.node(name)
        if name != "n4":
            bench.agent.blobs.limit_bytes = 10  # nothing fits
    rank = await swarm.start(first)
    rank.write("a", b"x" * 1_000)
    assert (await rank.ask("a"))["ok"]
    assert committed(first)[0].checkpoint.copies == ("n1", "n4")


async def test_in_a_shared_directory_nothing_is_copied(swarm, tmp_path: Path) -> None:
    first = await swarm.node("n1", checkpoint_dir=tmp_path / "shared", checkpoint_dir_shared=True)
    second = await swarm.node("n2", checkpoint_dir=tmp_path / "shared", checkpoint_dir_shared=True)
    rank = await swarm.start(first)
    rank.write("dir/a", b"x" * 100)
    assert (await rank.ask("dir"))["ok"]
    checkpoint = committed(first)[0].checkpoint
    assert (checkpoint.digest, checkpoint.copies, checkpoint.size_bytes) == ("", (), 100)
    assert first.agent.blobs.held_bytes == second.agent.blobs.held_bytes == 0


async def test_a_size_that_no_record_can_hold_is_refused(swarm, tmp_path: Path, monkeypatch) -> None:
    """Holes cost nothing, so a file may have any size."""
    rank = await swarm.start(await swarm.node("n1", checkpoint_dir=tmp_path / "shared", checkpoint_dir_shared=True))
    rank.write("a")
    monkeypatch.setattr(commits_module, "size_of", lambda folder, name: 2**60)
    answer = await rank.ask("a")
    assert (answer["error"], answer["problem"].partition(": ")[0]) == (
        "bad_checkpoint",
        "other agents cannot be told of it",
    )
    assert "size_bytes" in answer["problem"]
    assert committed(rank.bench) == []


async def test_the_path_of_a_checkpoint_is_as_good_as_its_name(swarm) -> None:
    rank = await swarm.start(await swarm.node("n1"))
    rank.write("dir/a")
    for name in (f"{rank.folder}/dir", f"{rank.folder}/dir/", "dir/"):
        assert (await rank.ask(name))["name"] == "dir"
    for name in (f"{rank.folder}/dir/a", f"{rank.folder}", f"{rank.folder.parent}/dir"):
        assert (await rank.ask(name))["error"] == "bad_name"


async def test_a_name_that_does_not_exist_is_refused_with_its_full_path(swarm) -> None:
    rank = await swarm.start(await swarm.node("n1"))
    answer = await rank.ask("nothing")
    assert (answer["ok"], answer["error"]) == (False, "not_found")
    assert answer["problem"] == f"{rank.folder}/nothing does not exist"
    assert (await rank.ask("nothing", wait=False))["error"] == "not_found"
    for name in ("../x", "", 5, ".hidden", "a" * 201):
        assert (await rank.ask(name))["error"] == "bad_name"
    rank.write("a")
    assert (await rank.ask("a", wait="yes"))["error"] == "bad_request"
    assert committed(rank.bench) == []


async def test_a_superseded_attempt_is_told_so_and_its_copy_dropped(swarm) -> None:
    rank = await swarm.start(await swarm.node("n1"))
    rank.bench.agent.answer = lambda _: Refused("conflict", "attempt 1 was given up; the present one is 2", "end")
    rank.write("a")
    answer = await rank.ask("a")
    assert (answer["error"], answer["remedy"]) == ("conflict", "end")
    assert answer["problem"] == "it does not count: attempt 1 was given up; the present one is 2"
    assert rank.bench.agent.blobs.held_bytes == 0


async def test_an_open_outcome_keeps_the_copy(swarm) -> None:
    rank = await swarm.start(await swarm.node("n1"))
    rank.bench.agent.answer = lambda _: Refused("unavailable", "no shepherd answered", "again")
    rank.write("a")
    assert (await rank.ask("a"))["error"] == "unavailable"
    assert rank.bench.agent.blobs.missing([committed(rank.bench)[0].checkpoint.digest]) == ()


class Gate:
    """Holds the core's answers back."""

    def __init__(self, bench: Bench) -> None:
        self.is_open = asyncio.Event()
        self.names: list[str] = []
        bench.agent.command = self.command

    async def command(self, command: Command, timeout_s: float = 0.0) -> CheckpointCommitted:
        assert isinstance(command, CommitCheckpoint)
        self.names.append(command.checkpoint.name)
        await self.is_open.wait()
        return CheckpointCommitted(command.checkpoint, epoch=1)


async def test_of_those_that_pile_up_the_newest_wins(swarm) -> None:
    rank = await swarm.start(await swarm.node("n1"))
    gate = Gate(rank.bench)
    for name in ("a", "b", "c"):
        rank.write(name)
    first = asyncio.create_task(rank.ask("a"))
    await until(lambda: gate.names == ["a"])
    desk = rank.bench.runner._checkpoints.commits._desks[rank.order.key]
    second = asyncio.create_task(rank.ask("b"))
    await until(lambda: desk.waiting and desk.waiting.name == "b")
    third = asyncio.create_task(rank.ask("c"))
    told = await second
    assert told["error"] == "superseded"
    assert "newer checkpoint, c" in told["problem"]
    gate.is_open.set()
    assert [answer["ok"] for answer in await asyncio.gather(first, third)] == [True, True]
    assert gate.names == ["a", "c"]


async def test_a_commit_goes_on_when_whoever_asked_is_gone(swarm) -> None:
    rank = await swarm.start(await swarm.node("n1"))
    gate = Gate(rank.bench)
    rank.write("a")
    assert await rank.ask("a", wait=False) == {
        "v": 1, "type": "checkpoint", "ok": True, "name": "a", "committed": False,
    }  # fmt: skip
    waiting = asyncio.create_task(rank.ask("a"))
    await until(lambda: gate.names)
    waiting.cancel()
    gate.is_open.set()
    await until(lambda: not rank.bench.runner._checkpoints.commits._desks)
    assert gate.names[0] == "a"


async def test_the_newest_two_copies_stay_here_and_on_peers(swarm) -> None:
    first, second = await swarm.node("n1"), await swarm.node("n2")
    rank = await swarm.start(first)
    for number in range(4):
        rank.write(f"step-{number}", b"%d" % number * 1_000)
        assert (await rank.ask(f"step-{number}"))["ok"]
    digests = [command.checkpoint.digest for command in committed(first)]
    assert set(first.agent.blobs.missing(digests)) == set(digests[:2])
    assert set(second.agent.blobs.missing(digests)) <= set(digests[:2])
    assert second.agent.blobs.missing(digests[2:]) == ()
    assert digests[0] in second.agent.blobs.missing(digests)


async def test_a_former_first_rank_that_comes_late_takes_no_newer_copy_from_the_nodes_that_it_asks(swarm) -> None:
    first, second, third = [await swarm.node(name) for name in ("n1", "n2", "n3")]
    late, new = await swarm.start(first), await swarm.start(second)
    new.write("step-9", b"new")
    assert (await new.ask("step-9"))["ok"]
    late.write("step-4", b"old")
    assert (await late.ask("step-4"))["ok"]
    (command,) = committed(second)
    for bench in (first, second, third):
        assert bench.agent.blobs.missing([command.checkpoint.digest]) == ()


async def test_a_commit_names_its_part_and_the_world_that_its_worker_trained_in_when_it_asked(swarm) -> None:
    bench = await swarm.node("n1")
    shares = (Share(NodeId("n1"), 1, part=1),)
    order = make_order("sh", "-c", "env -0; echo; exec sleep 600", shares=shares, elastic=True)
    rank = await swarm.start(bench, replace(order, part=1))
    rank.write("a")
    assert (await rank.ask("a"))["ok"]
    assert (await rank.ask("a", world=7))["ok"]
    worker = {"worker": "1", "address": "n1:7000", "version": 3, "trains": 3, "state": "left"}
    assert (await rank.ask("a", **worker | {"type": "member"}))["ok"]
    assert (await rank.ask("a"))["ok"]
    assert [(each.part, each.checkpoint.world) for each in committed(bench)] == [(1, 0), (1, 7), (1, 3)]
    assert (await rank.ask("a", world=-1))["error"] == "bad_request"


async def test_a_fault_of_ours_is_told_and_the_next_commit_works(swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = await swarm.start(await swarm.node("n1"))
    rank.write("a")

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(commits_module, "pack", broken)
        assert (await rank.ask("a"))["error"] == "internal"
    assert (await rank.ask("a"))["ok"]


async def test_a_full_disk_is_told(swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = await swarm.start(await swarm.node("n1"))
    rank.write("a")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(rank.bench.agent.blobs, "import_file", full)
    answer = await rank.ask("a")
    assert (answer["error"], answer["problem"]) == (
        "unreadable",
        f"{rank.folder}/a could not be copied: No space left on device",
    )


async def test_the_checkpoints_of_a_job_have_a_quota_on_each_node(swarm) -> None:
    rank = await swarm.start(await swarm.node("n1", checkpoint_bytes_max=2**20))
    for number, size_bytes in enumerate((400_000, 400_000, 300_000)):
        rank.write(f"c{number}", bytes([number + 1]) * size_bytes)
    assert (await rank.ask("c0"))["ok"]
    assert (await rank.ask("c1"))["ok"]
    answer = await rank.ask("c2")
    assert (answer["error"], "checkpoint_bytes_max is 1048576" in answer["problem"]) == ("too_large", True)
    assert "raise checkpoint_bytes_max" in answer["remedy"]
    rank.write("c3", b"x" * 2**21)
    assert (await rank.ask("c3"))["problem"] == "the checkpoint has more than 1048576 bytes"
    rank.write("c4", b"\2" * 400_000)
    assert (await rank.ask("c4"))["ok"], "what is kept already counts once"


async def test_a_peer_keeps_no_more_of_a_job_than_its_own_quota(swarm) -> None:
    first = await swarm.node("n1")
    await swarm.node("n2", checkpoint_bytes_max=2**20)
    rank = await swarm.start(first)
    rank.write("small", b"x" * 1_000)
    rank.write("large", b"x" * 2**21)
    assert (await rank.ask("small"))["ok"]
    assert (await rank.ask("large"))["ok"]
    assert [command.checkpoint.copies for command in committed(first)] == [("n1", "n2"), ("n1",)]


async def test_commits_of_many_tasks_keep_no_thread_from_others(swarm, monkeypatch) -> None:
    bench = await swarm.node("n1")
    under_way, goes_on = [0], threading.Event()

    def hold(*_: object) -> None:
        under_way[0] += 1
        goes_on.wait(20)
        raise OSError(5, "given up")

    monkeypatch.setattr(bench.agent.blobs, "import_file", hold)
    ranks = [await swarm.start(bench) for _ in range(4)]
    for rank in ranks:
        rank.write("a")
        assert (await rank.ask("a", wait=False))["ok"]
    await until(lambda: under_way[0] == 2)
    many = (os.cpu_count() or 1) + 4  # as many as the threads that all share
    async with asyncio.timeout(10):
        assert await asyncio.gather(*(asyncio.to_thread(int) for _ in range(many))) == [0] * many
    assert under_way == [2]
    goes_on.set()
    await until(lambda: under_way[0] == 4)


async def test_a_peer_refuses_nonsense(swarm) -> None:
    first, second = await swarm.node("n1"), await swarm.node("n2")
    digest = "0" * 64
    good: dict[str, object] = {"job_id": "0" * 26, "digest": digest, "size_bytes": 1, "keep": []}
    bad: list[dict[str, object]] = [{"job_id": "../x"}, {"digest": "x"}, {"size_bytes": "1"}]
    bad += [{"keep": keep} for keep in (None, ["x"], [digest] * 17)]
    for change in bad:
        answers = [item async for item in first.agent.query_stream(second.node, "checkpoint_copy", good | change)]
        assert answers == [{"ok": False, "problem": "the question is malformed"}]
    (answer,) = [item async for item in first.agent.query_stream(second.node, "checkpoint_copy", good)]
    assert "could not be fetched" in answer["problem"]
    huge = good | {"size_bytes": 2**60}
    (answer,) = [item async for item in first.agent.query_stream(second.node, "checkpoint_copy", huge)]
    assert "do not fit" in answer["problem"]


async def test_copies_and_folders_go_when_the_job_has_been_over_for_long(swarm) -> None:
    bench = await swarm.node("n1", work_retention_s=100.0)
    rank = await swarm.start(bench)
    rank.write("a")
    assert (await rank.ask("a"))["ok"]
    digest, job_id = committed(bench)[0].checkpoint.digest, rank.order.job_id
    service, now_s = bench.runner._checkpoints, time.time()

    bench.agent.ended[job_id] = 0.0
    await service.prune(now_s + 1e6)
    bench.agent.ended[job_id] = now_s
    await service.prune(now_s + 99)
    assert (bench.agent.blobs.missing([digest]), rank.folder.exists()) == ((), True)
    del bench.agent.ended[job_id]
    await service.prune(now_s + 50)
    assert (bench.agent.blobs.missing([digest]), rank.folder.exists()) == ((), True)
    bench.agent.ended[job_id] = now_s
    await service.prune(now_s + 101)
    assert (bench.agent.blobs.missing([digest]), rank.folder.exists()) == ((digest,), False)

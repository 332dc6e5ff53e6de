"""Folders of finished tasks: limits of size and age, and what a success leaves."""

import os
import random
import sys
from pathlib import Path

import pytest

from swarm_agent.staging.blobs import BlobStore
from swarm_agent.staging.tree import Unpacker
from swarm_agent.supervision import upkeep
from swarm_agent.supervision.kept_work import SPARED_S, KeptWork
from swarmsched.effects import ForgetTask, StartTask
from swarmsched.ids import AttemptKey, JobId, make_job_id
from swarmsched.tree import EntryKind, Tree, TreeEntry
from tests.agent.supervision.testing import Bench, make_order
from tests.agent.testing import wait_until

DAY_S = 86_400.0
NOW_UTC_S = 1.8e9
MIB = 2**20
JOBS = [make_job_id(0.0, random.Random(number)) for number in range(5)]


def folder_of(root: Path, job: JobId, size_bytes: int) -> Path:
    work = root / job / "1" / "work"
    work.mkdir(parents=True)
    (work / "data").write_bytes(b"x" * size_bytes)
    return work.parent


def test_the_oldest_go_when_all_together_are_too_large(tmp_path: Path) -> None:
    kept = KeptWork(tmp_path, DAY_S, 3 * MIB + MIB // 2)
    folders = [folder_of(tmp_path, job, MIB) for job in JOBS]
    for age, job in enumerate(reversed(JOBS[1:])):
        kept.close(AttemptKey(job, 1), NOW_UTC_S - age, is_success=False)
    kept.prune(NOW_UTC_S, {AttemptKey(JOBS[0], 1)})
    assert [folder.exists() for folder in folders] == [True, False, True, True, True]
    assert not folders[1].parent.exists()


def test_each_goes_after_its_retention_which_begins_with_the_end(tmp_path: Path) -> None:
    kept = KeptWork(tmp_path, DAY_S, 2**40)
    old, young, live, staged = (folder_of(tmp_path, job, 1) for job in JOBS[:4])
    for folder in (old, young, live):
        os.utime(folder, (NOW_UTC_S - 9 * DAY_S,) * 2)
    os.utime(staged, (NOW_UTC_S - SPARED_S / 2,) * 2)
    kept.close(AttemptKey(JOBS[1], 1), NOW_UTC_S - 60.0, is_success=False)
    kept.prune(NOW_UTC_S, {AttemptKey(JOBS[2], 1)})
    assert [folder.exists() for folder in (old, young, live, staged)] == [False, True, True, True]


async def test_a_folder_thousands_deep_costs_the_node_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "TIDY_INTERVAL_S", 0.0)
    async with Bench(tmp_path, work_cache_bytes_max=MIB) as bench:
        script = "import os\nfor _ in range(3000): os.mkdir('a'); os.chdir('a')\nopen('x', 'wb').write(bytes(2**21))"
        for outcome in ("exit(0)", "exit(1)"):
            order = make_order(sys.executable, "-c", f"{script}\n{outcome}")
            bench.runner.perform(StartTask(order, ()))
            await bench.finish(order)
            bench.runner.perform(ForgetTask(order.job_id, 1))
            await wait_until(lambda job=order.job_id: not (tmp_path / "jobs" / job).exists())
    assert "could not" not in caplog.text


async def test_a_success_leaves_what_the_task_wrote_and_a_failure_everything(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    digest = await blobs.put_bytes(b"shipped")
    names = ("train.py", "src/model.py", "log", "moved")
    tree = Tree.of(
        [TreeEntry(name, EntryKind.FILE, 0o644, 7, digest) for name in names]
        + [TreeEntry("link", EntryKind.LINK, target="src"), TreeEntry("out", EntryKind.DIR)]
    )
    kept = KeptWork(tmp_path / "jobs", DAY_S, 2**40)
    for job, is_success in ((JOBS[0], True), (JOBS[1], False)):
        folder = tmp_path / "jobs" / job / "1"
        folder.mkdir(parents=True)
        Unpacker(blobs).unpack(tree, folder / "draft")
        (folder / "draft").rename(folder / "work")
        while folder.stat().st_mtime_ns <= (folder / "work" / "train.py").stat().st_ctime_ns:
            os.utime(folder)  # until the clock of the file system, which goes in steps, has advanced
        with (folder / "work" / "log").open("ab") as file:
            file.write(b"!")
        (folder / "work" / "moved").rename(folder / "work" / "model.pt")
        os.utime(folder / "work" / "model.pt", (1.0, 1.0))
        (folder / "work" / "out" / "best.pt").write_bytes(b"best")
        kept.close(AttemptKey(job, 1), NOW_UTC_S, is_success=is_success)
        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
        if is_success:
            assert found == ["work/log", "work/model.pt", "work/out/best.pt"]
            assert sorted(path.name for path in (folder / "work").iterdir()) == ["log", "model.pt", "out"]
        else:
            assert len(found) == 5


@pytest.mark.parametrize(("code", "is_left"), [(0, False), (1, True)])
async def test_the_folder_of_a_task_without_output_goes_with_its_success(
    tmp_path: Path, code: int, is_left: bool
) -> None:
    async with Bench(tmp_path / "data") as bench:
        order = make_order("sh", "-c", f"exit {code}")
        bench.runner.perform(StartTask(order, ()))
        work = bench.runner.workdir(order.key.of_attempt)
        assert work is not None
        assert work.exists()
        await bench.finish(order)
        before_s = work.parent.stat().st_mtime
        await wait_until(lambda: work.parent.stat().st_mtime > before_s)
        assert work.exists() is is_left


async def test_what_the_output_of_a_task_takes_is_known_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "MEASURE_INTERVAL_S", 0.05)
    async with Bench(tmp_path / "data") as bench:
        order = make_order("head", "-c", "5000", "/dev/zero")
        bench.runner.perform(StartTask(order, ()))
        await bench.finish(order)
        await wait_until(lambda: (bench.agent.logs.held_bytes or 0) >= 5_000)


def test_what_is_kept_of_a_job_is_told_with_its_size_and_until_when(tmp_path: Path) -> None:
    kept = KeptWork(tmp_path, DAY_S, 2**40)
    first = folder_of(tmp_path, JOBS[0], MIB)
    for attempt in (2, 3):
        (tmp_path / JOBS[0] / str(attempt) / "work").mkdir(parents=True)
    (tmp_path / JOBS[0] / "4").mkdir()  # nothing of it is left
    folder_of(tmp_path, JOBS[1], 1)
    kept.close(AttemptKey(JOBS[0], 1), NOW_UTC_S, is_success=False)
    told = kept.of_job(JOBS[0], {AttemptKey(JOBS[0], 3)})
    assert [(each.attempt, each.path) for each in told] == [(1, first / "work"), (2, tmp_path / JOBS[0] / "2" / "work")]
    assert MIB <= told[0].size_bytes < 2 * MIB
    assert told[0].until_utc_s == NOW_UTC_S + DAY_S
    assert kept.of_job(JOBS[2], set()) == []

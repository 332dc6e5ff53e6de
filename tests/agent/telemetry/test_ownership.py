"""Whose process it is, on a /proc made of files."""

import os

from swarm_agent.telemetry.ownership import GRACE_S, Ownership, parent_of

GPU = "GPU-1"


class FakeProc:
    """A folder that looks like /proc."""

    def __init__(self, path):
        self.path = path

    def add(self, pid, parent, command="python"):
        folder = self.path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} ({command}) S {parent} 1 1")
        (folder / "comm").write_text(f"{command}\n")

    def remove(self, pid):
        for file in (self.path / str(pid)).iterdir():
            file.unlink()
        (self.path / str(pid)).rmdir()


def ownership(tmp_path, own):
    proc = FakeProc(tmp_path)
    return proc, Ownership(lambda: dict.fromkeys(own, (GPU,)), tmp_path)


def test_descendants_of_ours_are_ours_however_deep(tmp_path):
    proc, owner = ownership(tmp_path, {10})
    proc.add(10, 1)
    for pid in range(11, 20):
        proc.add(pid, pid - 1)
    owner.refresh(0.0)
    assert owner.classify(19, GPU, None, 0.0).is_own


def test_a_job_on_a_gpu_that_it_was_not_given_is_foreign_there(tmp_path):
    proc, owner = ownership(tmp_path, {10})
    proc.add(10, 1)
    proc.add(11, 10)
    owner.refresh(0.0)
    assert owner.classify(11, GPU, 1, 0.0).is_own
    assert not owner.classify(11, "GPU-2", 1, 0.0).is_own


def test_living_stranger_counts_at_once(tmp_path):
    proc, owner = ownership(tmp_path, {10})
    proc.add(4242, 1, "weird) name (x")
    owner.refresh(0.0)
    stranger = owner.classify(4242, GPU, 3 << 30, 0.0)
    assert not stranger.is_own
    assert stranger.command == "weird) name (x"
    assert str(stranger).endswith("3.0 GiB")


def test_own_process_that_just_ended_has_a_grace(tmp_path):
    own = {10}
    proc, owner = ownership(tmp_path, own)
    proc.add(10, 1)
    proc.add(11, 10)
    owner.refresh(0.0)
    assert owner.classify(11, GPU, 1, 0.0).is_own
    proc.remove(11)
    own.clear()
    owner.refresh(1.0)
    assert owner.classify(11, GPU, 1, 1.0) is None


def test_entry_without_a_process_turns_foreign_after_the_grace(tmp_path):
    _, owner = ownership(tmp_path, set())
    step_s = GRACE_S / 4
    answers = []
    for step in range(6):
        now_s = step * step_s
        owner.refresh(now_s)
        answers.append(owner.classify(77, GPU, 1, now_s))
    assert answers[:4] == [None] * 4
    assert answers[4] is not None
    assert str(answers[4]) == "pid 77 0.0 GiB"


def test_grace_does_not_stay_open_for_a_process_that_keeps_running(tmp_path):
    own = {10}
    proc, owner = ownership(tmp_path, own)
    proc.add(10, 1)
    proc.add(11, 10)
    owner.refresh(0.0)
    owner.classify(11, GPU, 1, 0.0)
    own.clear()
    owner.refresh(0.1)
    assert not owner.classify(11, GPU, 1, 0.1).is_own


def test_a_loop_of_parents_ends(tmp_path):
    proc, owner = ownership(tmp_path, {10})
    proc.add(20, 21)
    proc.add(21, 20)
    owner.refresh(0.0)
    assert not owner.classify(20, GPU, None, 0.0).is_own


def test_parent_of_a_real_process():
    assert parent_of(os.getpid()) == os.getppid()
    assert parent_of(2**22 + 1) == 0

"""What the README promises, from a fresh clone in a fresh folder: `make demo`, with environments of its own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.testbed.netns import why_not

pytestmark = [pytest.mark.acceptance, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
SETUP_LIMIT_S = 1_500


def processes_of(folder):
    """Processes that were started from, run in, or mention a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            if str(folder).encode() in words or str((entry / "cwd").readlink()).startswith(str(folder)):
                found.append((entry.name, words.replace(b"\0", b" ").decode(errors="replace")))
        except OSError:
            continue  # it ended meanwhile
    return found


def left_in(scratch):
    """What is left of ours; torch keeps a compiler cache of its own beside it."""
    return [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]


def run(command, folder, environment, timeout_s):
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def playground(clone):
    """The block of the README that a reader types after the demo."""
    blocks = (clone / "README.md").read_text().split("```")
    return next(block for block in blocks if block.startswith("\n. .venv/bin/activate"))


@pytest.mark.torch
def test_make_demo_runs_from_a_fresh_clone_and_leaves_nothing(tmp_path, stopwatch, report):
    clone, home, scratch = tmp_path / "clone", tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SWARM_", "XDG_", "VIRTUAL_ENV"))}
    environment = {**kept, "HOME": str(home), "TMPDIR": str(scratch)}
    with stopwatch("git clone && make demo, with its set-up"):
        done = run(["make", "demo"], clone, environment, SETUP_LIMIT_S)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    report(done.stdout[-400:].strip())
    assert "test accuracy" in done.stdout
    assert "apart, over the cable" in done.stdout or why_not()
    assert processes_of(tmp_path) == []
    assert left_in(scratch) == []
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert status.stdout == ""
    with stopwatch("make demo again"):
        again = run(["make", "demo"], clone, environment, 450)
    assert again.returncode == 0, again.stderr[-3_000:]
    with stopwatch("the commands of the README's playground"):
        played = run(["bash", "-exc", playground(clone)], clone, environment, 120)
    assert played.returncode == 0, played.stderr[-3_000:]
    assert "I am rank 1 of 2" in played.stdout
    assert processes_of(tmp_path) == []
    assert left_in(scratch) == []

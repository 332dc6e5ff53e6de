"""What the README promises, from a fresh clone in a fresh folder: `make demo`, with environments of its own."""

import os
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.torch
def test_make_demo_runs_from_a_fresh_clone_and_leaves_nothing(tmp_path, stopwatch, report):
    clone, home, scratch = tmp_path / "clone", tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SWARM_", "XDG_", "VIRTUAL_ENV"))}
    environment = {**kept, "HOME": str(home), "TMPDIR": str(scratch)}
    with stopwatch("git clone && make demo, with its set-up"):
        done = subprocess.run(
            ["make", "demo"],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SETUP_LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    report(done.stdout[-400:].strip())
    assert "test accuracy" in done.stdout
    assert processes_of(tmp_path) == []
    assert list(scratch.iterdir()) == []
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert status.stdout == ""
    with stopwatch("make demo again"):
        again = subprocess.run(
            ["make", "demo"], cwd=clone, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert again.returncode == 0, again.stderr[-3_000:]

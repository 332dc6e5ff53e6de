"""Tutorials do what they say: their commands, as a newcomer types them, in a fresh home."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import tutorial

pytestmark = [pytest.mark.acceptance, pytest.mark.cluster]

TORCH = Path(__file__).resolve().parents[2] / ".venv-train"
LIMIT_S = 300


def typed(page, folder, **more):
    """What a shell printed of all commands of a page; the first that fails ends it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SWARM_", "XDG_", "VIRTUAL_ENV"))}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    work = folder / "work"
    work.mkdir(exist_ok=True)
    environment = {**kept, "HOME": str(folder), "PATH": path, **more}
    script = ["bash", "-exc", tutorial.shell_of(page)]
    try:
        done = subprocess.run(
            script, cwd=work, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    finally:
        subprocess.run(["swarm", "local", "down"], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    return done.stdout


def test_the_first_job(tmp_path):
    printed = typed("first-job.md", tmp_path)
    assert "rank 1 of 2" in printed
    assert "needs 4 GPUs, 2 free" in printed


@pytest.mark.torch
def test_the_ten_steps(tmp_path):
    scripts = tutorial.scripts_of("elastic-in-ten-steps.md")
    assert list(scripts) == ["loop.py", "train.py"]
    (tmp_path / "work").mkdir()
    for name, text in scripts.items():
        (tmp_path / "work" / name).write_text(text)
    printed = typed("elastic-in-ten-steps.md", tmp_path, TORCH=str(TORCH))
    assert "2 train (membership 2)" in printed
    assert "lost: " in printed
    assert float(printed.rpartition("accuracy ")[2].split()[0]) > 0.9

"""The last released version, built from the history of this repository."""

import subprocess
import sys
import tarfile
from pathlib import Path

RELEASED, COMMIT = "0.1.0", "dac44cf"
ROOT = Path(__file__).resolve().parents[2]
BUILD_LIMIT_S = 300


def why_not_released() -> str:
    """Why its source cannot be had; empty when it can."""
    asked = subprocess.run(["git", "cat-file", "-e", f"{COMMIT}^{{tree}}"], cwd=ROOT, capture_output=True, check=False)
    return f"the history of this checkout does not reach back to {RELEASED} ({COMMIT})" if asked.returncode else ""


def build_wheel(tree: Path, folder: Path) -> None:
    """Build the wheel of a source tree into the folder."""
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(tree)]
    subprocess.run(command, check=True, timeout=BUILD_LIMIT_S)


def released_wheel(folder: Path) -> Path:
    """Its wheel, built in this folder."""
    packed, tree = folder / "released.tar", folder / "released"
    packed.write_bytes(subprocess.run(["git", "archive", COMMIT], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    with tarfile.open(packed) as tar:
        tar.extractall(tree, filter="data")
    packed.unlink()
    build_wheel(tree, folder)
    return next(folder.glob(f"swarmsched-{RELEASED}-*.whl"))


def install_released(folder: Path) -> Path:
    """Lay it into a folder for PYTHONPATH, without what it depends on; returns that folder."""
    installed = folder / RELEASED
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(installed)]
    subprocess.run([*command, str(released_wheel(folder))], check=True, timeout=BUILD_LIMIT_S)
    return installed

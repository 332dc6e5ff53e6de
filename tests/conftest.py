"""In continuous integration a test that needs root or torch must run: a skip there is a hole that nobody sees."""

import os
from pathlib import Path

import pytest

from swarmsched.models import ONE_THREAD

os.environ.update(ONE_THREAD)  # before any test imports numpy

NEVER_SKIPPED_IN_CI = ("root", "torch")
TRAIN_VENV = Path(__file__).resolve().parents[1] / ".venv-train"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    needs = [name for name in NEVER_SKIPPED_IN_CI if item.get_closest_marker(name)]
    if os.environ.get("CI") == "true" and needs and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"a test marked {needs[0]} may not be skipped in CI: {report.longrepr[2]}"
    return report


@pytest.fixture(scope="session")
def train_venv():
    """The environment with torch that the Makefile makes."""
    if not (TRAIN_VENV / ".stamp").exists() and not (TRAIN_VENV / "bin" / "torchrun").exists():
        pytest.skip(f"there is no {TRAIN_VENV} with torch; `make test` makes it")
    return TRAIN_VENV

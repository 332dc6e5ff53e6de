"""In continuous integration a test that needs root or torch must run: a skip there is a hole that nobody sees."""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from swarmsched.models import ONE_THREAD
from tests.testbed import fake_nvml
from tests.testbed.found import working

os.environ.update(ONE_THREAD)  # before any test imports numpy

GROUP = re.compile(r'xdist_group\("(.+?)"\)')
NEVER_SKIPPED_IN_CI = ("root", "torch")
TRAIN_VENV = Path(__file__).resolve().parents[1] / ".venv-train"


class ByGroup(LoadScopeScheduling):
    """Sends tests of one `xdist_group` to one worker, so that what they share is made once.

    The scheduler of pytest-xdist 3.8 reads groups from the names of tests, to which pytest 9.2 lets it add none.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0]) or nodeid


@cache
def group_of(path: str) -> str:
    """The group that a file's marks name, or nothing."""
    found = GROUP.search((Path(__file__).parents[1] / path).read_text(encoding="utf-8"))
    return found[1] if found else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByGroup(config, log) if config.getvalue("dist") == "loadgroup" else None


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


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    """A folder with a libnvidia-ml.so.1 whose answers come from a state file."""
    compiler = working("gcc", "cc")
    if compiler is None:
        pytest.skip("no C compiler for the fake NVML library (Debian package gcc)")
    folder = tmp_path_factory.mktemp("nvml")
    target, source = folder / "libnvidia-ml.so.1", Path(fake_nvml.__file__).with_suffix(".c")
    flags = ["-O2", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", target, source], check=True)
    return folder


@pytest.fixture
def nvml(nvml_library, tmp_path, monkeypatch):
    """Four GPUs whose state the test changes; samplers and agents find them through the environment."""
    path = tmp_path / "nvml.state"
    state = fake_nvml.State.create(path, gpus=4)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library))
    monkeypatch.setenv("FAKE_NVML_STATE", str(path))
    yield state
    for gpu in range(4):
        state.recover(gpu)

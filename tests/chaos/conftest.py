"""Swarms on hosts of their own; a failed test shows what the agents logged and what the ranks wrote."""

import subprocess
from contextlib import ExitStack

import pytest

from tests.chaos.machines import start_machines
from tests.testbed.netns import why_not

STORY = pytest.StashKey()


@pytest.fixture
def build_swarm(request, tmp_path):
    """Make a swarm of so many machines that see one another."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:

        def build(count, *, gpus=1, settings=None, disks=None, has_debians_hosts=False):
            machines = start_machines(
                tmp_path,
                count,
                gpus=gpus,
                settings=settings,
                disks=disks or {},
                has_debians_hosts=has_debians_hosts,
            )
            swarm = stack.enter_context(machines)
            request.node.stash[STORY] = swarm
            swarm.converge()
            return swarm

        yield build


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 96 MiB: more than is kept back of a disk, so that jobs run there while nothing fills it."""
    if reason := why_not():
        pytest.skip(reason)
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and report.when == "call" and STORY in item.stash:
        report.sections.append(("swarm", item.stash[STORY].story()))
    return report

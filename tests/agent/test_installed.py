"""What an agent finds in the folders of installers."""

from importlib.metadata import version

from swarm_agent.installed import entry_points_of, software_version
from swarmsched.policies.registry import ENTRY_POINTS
from tests.testbed.packages import own_policies


def test_the_version_is_that_of_the_installed_distribution():
    assert software_version() == version("swarmsched")


def test_entry_points_are_those_of_the_group_alone(tmp_path, monkeypatch):
    assert list(entry_points_of("swarmsched.nothing")) == []
    monkeypatch.syspath_prepend(own_policies(tmp_path / "packages").parent)
    assert [each.name for each in entry_points_of(ENTRY_POINTS)] == ["smallest-first", "broken"]

"""What documents repeat from the code stays equal to it."""

from pathlib import Path

from swarmsched.jobs.lifecycle import diagram

ROOT = Path(__file__).resolve().parents[2]


def test_picture_of_the_life_cycle_is_that_of_the_table():
    assert diagram() in (ROOT / "docs/architecture.md").read_text()

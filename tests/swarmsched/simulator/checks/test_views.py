"""Invariant 7: views never go back, and show what owners wrote."""

import pytest
from msgspec.structs import replace

from swarmsched.gossip.member import MemberStatus, MemberView
from swarmsched.gossip.record import NodeRecord, NodeStatus
from swarmsched.ids import NodeId
from swarmsched.simulator.checks.suite import Suite
from swarmsched.simulator.checks.views import SAMPLE_STEPS_MIN, ViewChecker
from swarmsched.simulator.checks.violation import Violation
from tests.swarmsched.simulator.checks.testing import History

B = NodeId("b")
MEMBER = MemberView(B, ("10.0.0.2", 7400), 3, 4, MemberStatus.ALIVE, 0.0, b"", "", 1, 1)
RECORD = NodeRecord(B, generation=3, version=8)


@pytest.fixture
def history():
    history = History(lambda: Suite([ViewChecker()]))
    history["b"].node.generation = 3
    history.step("b")
    history["a"].node.known_members = [MEMBER]
    history["a"].node.known_records = [NodeStatus(RECORD, 0.0)]
    sample(history, "a")
    return history


def sample(history, name):
    for _ in range(SAMPLE_STEPS_MIN):
        history.step(name)


def test_what_grows_is_fine(history):
    history["b"].node.generation = 4
    history.step("b")
    history["a"].node.known_members = [replace(MEMBER, generation=4, incarnation=0)]
    history["a"].node.known_records = [NodeStatus(replace(RECORD, version=9), 0.0)]
    sample(history, "a")
    assert history.suite.get(ViewChecker).sample_count == 2


@pytest.mark.parametrize("change", [{"generation": 2}, {"incarnation": 3}])
def test_a_member_that_grows_younger_is_found(history, change):
    history["a"].node.known_members = [replace(MEMBER, **change)]
    with pytest.raises(Violation, match="knew b as") as caught:
        sample(history, "a")
    assert caught.value.invariant == "7"


def test_an_older_record_is_found(history):
    history["a"].node.known_records = [NodeStatus(replace(RECORD, version=7), 0.0)]
    with pytest.raises(Violation, match="after"):
        sample(history, "a")


def test_a_new_life_of_the_viewer_may_know_less(history):
    history.restart("a")
    history["a"].node.known_members = [replace(MEMBER, incarnation=3)]
    sample(history, "a")


def test_two_values_under_one_stamp_are_found_wherever_they_are(history):
    history["c"].node.known_records = [NodeStatus(replace(RECORD, live_jobs=5), 0.0)]
    with pytest.raises(Violation, match="another record"):
        sample(history, "c")


def test_a_machine_that_has_lost_its_disk_may_use_a_stamp_again_until_it_is_corrected(history):
    history["c"].node.known_records = [NodeStatus(replace(RECORD, store_id=7), 0.0)]
    sample(history, "c")
    history["a"].node.known_records = [NodeStatus(replace(RECORD, store_id=7, live_jobs=5), 0.0)]
    with pytest.raises(Violation, match="another record"):
        sample(history, "a")


def test_figures_of_an_owners_answer_are_not_taken_for_its_record(history):
    history["c"].node.known_records = [NodeStatus(replace(RECORD, live_jobs=5), 0.0, is_repaired=True)]
    sample(history, "c")


def test_a_generation_that_nobody_ever_had_is_found(history):
    history["a"].node.known_members = [replace(MEMBER, generation=9)]
    with pytest.raises(Violation, match="never had one so high"):
        sample(history, "a")


def test_of_a_name_that_two_machines_share_nobody_can_tell_who_wrote_what(history):
    history.suite.name_shared(B)
    history["a"].node.known_members = [replace(MEMBER, generation=9)]
    history["c"].node.known_records = [NodeStatus(replace(RECORD, live_jobs=5), 0.0)]
    sample(history, "a")
    sample(history, "c")
    history["a"].node.known_members = [MEMBER]
    with pytest.raises(Violation, match="knew b as"):
        sample(history, "a")


def test_the_end_of_the_run_looks_at_all(history):
    history["c"].node.known_records = [NodeStatus(replace(RECORD, live_jobs=5), 0.0)]
    with pytest.raises(Violation, match="another record"):
        history.suite.finish()

"""What a model predicted is held against the first report of that size and batch, and of no other."""

from swarmsched.estimate import Estimate, SpeedPoint
from swarmsched.ids import NodeId
from swarmsched.negotiation.placement.foretold import Foretold
from swarmsched.resources import Share
from swarmsched.view import Allocation, Change, Decision
from tests.swarmsched.building import job_id

JOB = job_id(1)
THERE = Allocation((Share(NodeId("a"), 2), Share(NodeId("b"), 1)), 64)


def told(ranks: int, nodes: int, local_batch: int, step_s: float) -> Estimate:
    return Estimate(points=(SpeedPoint(1, 1, 64, 0.4), SpeedPoint(ranks, nodes, local_batch, step_s)))


def test_the_first_report_from_there_tells_how_far_the_model_was_off() -> None:
    foretold = Foretold()
    foretold.note(Decision(JOB, Change.GROW, "it gains", THERE, step_s=0.2))
    for other in (told(2, 2, 32, 0.3), told(3, 1, 21, 0.3), told(3, 2, 40, 0.3), Estimate()):
        assert foretold.check(JOB, other) == []
    (event,) = foretold.check(JOB, told(3, 2, 21, 0.25))
    assert (event.kind, event.job_id, event.fields["error_ratio"]) == ("model.checked", JOB, 0.25)
    assert event.text == "0.2 s a step were predicted for 3 ranks, and 0.25 s measured"
    assert foretold.check(JOB, told(3, 2, 21, 0.25)) == [], "only the first report counts"


def test_what_was_not_predicted_or_is_out_of_date_is_not_checked() -> None:
    foretold = Foretold()
    foretold.note(Decision(JOB, Change.GROW, "it gains", THERE, step_s=0.2))
    foretold.note(Decision(JOB, Change.SHRINK, "makes room", THERE))
    assert foretold.check(JOB, told(3, 2, 21, 0.25)) == []

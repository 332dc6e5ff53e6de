"""What promises nothing durable leaves at once; of one task, its start and its extensions keep their order."""

from swarmsched.api import JobSpec
from swarmsched.effects import ExtendAttempt, Persist, StartTask
from swarmsched.ids import NodeId
from swarmsched.node.urgency import Urgency
from swarmsched.resources import Share
from swarmsched.task import TaskOrder
from tests.swarmsched.building import JOB

ME = NodeId("n1")
START = StartTask(TaskOrder(JOB, 1, 1, ME, JobSpec(("true",)), (Share(ME, 1),), "h", 1), (), 1.0)


def extension(until_s, attempt=1):
    return ExtendAttempt(JOB, attempt, until_s)


def test_an_extension_waits_behind_the_start_of_its_task_and_no_other():
    urgency = Urgency()
    assert not urgency.may_pass(Persist("room", "key", b""))
    assert not urgency.may_pass(START)
    assert not urgency.may_pass(extension(2.0))
    assert urgency.may_pass(extension(2.0, attempt=2))


def test_an_extension_waits_behind_an_older_one_that_waits():
    """Performed after the newer one, the older would let ranks run on, or freeze them."""
    urgency = Urgency()
    waiting = [START, extension(float("inf"))]
    assert not any(urgency.may_pass(effect) for effect in waiting)
    urgency.performed(START)
    assert not urgency.may_pass(extension(3.0))
    urgency.performed(waiting[1])
    assert not urgency.may_pass(extension(4.0))
    urgency.performed(extension(3.0))
    urgency.performed(extension(4.0))
    assert urgency.may_pass(extension(5.0))

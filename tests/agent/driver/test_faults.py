"""What of the core's faults is kept over its lives: marks of events that must not be tried again, and pauses."""

from swarm_agent.faults import CALM_S, REFUSED_S, Faults
from swarmsched.commands import CancelJob, SignalJob
from swarmsched.events import ClientCommandReceived, PeerMessageReceived, TaskExited, TimerFired
from swarmsched.ids import JobId, NodeId
from swarmsched.ledger.message import TaskReportReceived

ERROR = ValueError("x")
JOB, OTHER = JobId("0" * 26), JobId("1" * 26)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def heard(job_id: JobId, attempt: int = 1, sender: str = "n1") -> PeerMessageReceived:
    return PeerMessageReceived(NodeId(sender), TaskReportReceived(job_id, attempt, 1, 1))


def test_a_fault_costs_events_of_its_kind_about_its_job_for_ten_minutes() -> None:
    clock = Clock()
    faults = Faults(clock)
    faults.note(heard(JOB), ERROR)
    assert faults.refuses(heard(JOB, attempt=2, sender="n2"))
    assert not faults.refuses(heard(OTHER))
    assert not faults.refuses(TaskExited(JOB, 1, ()))
    clock.now_s += REFUSED_S
    assert not faults.refuses(heard(JOB))
    assert (faults.counts["steps"], faults.counts["refused_events"]) == (1, 1)


def test_commands_are_told_apart_by_what_they_want() -> None:
    faults = Faults(Clock())
    faults.note(ClientCommandReceived(1, CancelJob(JOB, None, ""), 0.0), ERROR)
    assert faults.refuses(ClientCommandReceived(2, CancelJob(JOB, 5.0, "again"), 0.0))
    assert not faults.refuses(ClientCommandReceived(3, SignalJob(JOB, 15), 0.0))


def test_a_timer_is_never_refused_but_waited_for_longer_and_longer() -> None:
    clock = Clock()
    faults = Faults(clock)
    pauses = [faults.pause_s]
    for _ in range(9):
        faults.note(TimerFired(), ERROR)
        pauses.append(faults.pause_s)
    assert pauses == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert not faults.refuses(TimerFired())
    clock.now_s += CALM_S + 1.0
    faults.note(None, ERROR)
    assert faults.pause_s == 0.0

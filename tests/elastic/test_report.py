"""`swarm_elastic.report` in a process of its own, as a training script has it, against a scripted agent."""

import socket
import threading
from pathlib import Path

import pytest

from swarmsched.models.progress import FIGURES
from tests.elastic.testing import DEADLINE_S, Script, ScriptedAgent

TAKEN = {"v": 1, "type": "report", "ok": True, "ignored": []}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def told(agent: ScriptedAgent) -> list[dict]:
    """What came, without what is the same each time and without the moments."""
    requests = []
    while not agent.requests.empty():
        request = agent.requests.get_nowait()
        assert request.pop("time") > 0
        assert [request.pop(key) for key in ("v", "type", "token")] == [1, "report", "secret"]
        requests.append(request)
    return requests


def test_the_first_report_goes_at_once_and_the_last_before_the_end(folder: Path) -> None:
    """Of all that came within the second between, each figure's newest is in the second request."""
    text = """
print(swarm_elastic.report(step=1, loss=0.5, total_steps=9), flush=True)
sys.stdin.readline()
for step in range(2, 8):
    swarm_elastic.report(step=step, samples=step * 64)
swarm_elastic.report(loss=0.25)
"""
    with ScriptedAgent(folder / "s", lambda _: TAKEN) as agent:
        script = Script(folder, text, RANK="3")
        assert script.line() == "True"
        first = agent.requests.get(timeout=DEADLINE_S)
        script.go_on()
        assert script.finish() == (0, "", "")
        rest = told(agent)
    assert (first["rank"], first["step"], first["loss"], first["total_steps"]) == (3, 1, 0.5, 9)
    assert rest == [{"rank": 3, "step": 7, "samples": 448, "loss": 0.25, "total_steps": 9}]


def test_it_takes_each_figure_that_there_is_by_its_name(folder: Path) -> None:
    figures = {name: number for number, name in enumerate(FIGURES, start=1)}
    with ScriptedAgent(folder / "s", lambda _: TAKEN) as agent:
        script = Script(folder, f"print(swarm_elastic.report(**{figures}))", RANK="0")
        assert script.finish() == (0, "True\n", "")
        assert told(agent) == [{"rank": 0, **figures}]


def test_training_does_not_wait_for_an_agent_that_does_not_read(folder: Path) -> None:
    """Nobody accepts: a hundred thousand reports are put and the process ends by itself; memory is bounded."""
    text = """
import swarm_elastic._reports as reports
print([swarm_elastic.report(step=step, loss=1 / (step + 1)) for step in range(100_000)].count(True))
print(len(reports._reporter()._queue) <= reports.QUEUE_MAX)
"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(folder / "s"))
        listening.listen(1)
        assert Script(folder, text).finish() == (0, "100000\nTrue\n", "")


def test_what_was_not_told_while_the_agent_was_away_is_told_when_it_is_back(folder: Path) -> None:
    script = Script(folder, "swarm_elastic.report(step=5, loss=1)\nprint('put', flush=True)\nsys.stdin.readline()")
    assert script.line() == "put"
    hung_up = threading.Event()

    def answer(request: dict) -> dict | None:
        if hung_up.is_set():
            return TAKEN
        hung_up.set()
        return None

    with ScriptedAgent(folder / "s", answer) as agent:
        assert agent.requests.get(timeout=DEADLINE_S)["step"] == 5
        again = agent.requests.get(timeout=DEADLINE_S)
        script.go_on()
        assert script.finish()[0] == 0
    assert (again["step"], again["loss"]) == (5, 1)


def test_what_was_left_out_is_told_once_on_stderr(folder: Path) -> None:
    text = """
for step in range(3):
    swarm_elastic.report(step=step, loss=float("nan"))
    sys.stdin.readline()
"""
    left_out = {"field": "loss", "problem": "loss nan is not finite", "remedy": "look at the training"}
    with ScriptedAgent(folder / "s", lambda _: {**TAKEN, "ignored": [left_out]}) as agent:
        script = Script(folder, text)
        for step in range(3):
            assert agent.requests.get(timeout=DEADLINE_S)["step"] == step
            script.go_on()
        code, _, err = script.finish()
    assert (code, err.count("not reported: loss nan is not finite")) == (0, 1)


@pytest.mark.parametrize("answer", [[], {}, {"ok": False, "error": "unknown_type"}, {"ok": True, "ignored": [3]}, 7])
def test_an_answer_that_makes_no_sense_does_no_harm(folder: Path, answer: object) -> None:
    text = "swarm_elastic.report(step=1)\nsys.stdin.readline()\nswarm_elastic.report(step=2)"
    with ScriptedAgent(folder / "s", lambda _: answer) as agent:
        script = Script(folder, text, PYTHONWARNINGS="error")
        assert agent.requests.get(timeout=DEADLINE_S)["step"] == 1
        script.go_on()
        assert script.finish()[0] == 0
        assert [request["step"] for request in told(agent)] == [2]


def test_numbers_of_other_kinds_are_taken_and_what_is_none_is_our_callers_mistake(folder: Path) -> None:
    text = """
from decimal import Decimal
from fractions import Fraction
swarm_elastic.report(step=Fraction(6, 2), loss=Decimal("0.5"))
for wrong in ("a", [1], object()):
    try:
        swarm_elastic.report(loss=wrong)
    except TypeError as error:
        print(error)
"""
    with ScriptedAgent(folder / "s", lambda _: TAKEN) as agent:
        code, out, err = Script(folder, text).finish()
        assert told(agent) == [{"rank": 0, "step": 3.0, "loss": 0.5}]
    names = ("str", "list", "object")
    assert (code, out.splitlines(), err) == (0, [f"loss must be a number, not {name}" for name in names], "")


def test_a_forked_child_reports_for_itself(folder: Path) -> None:
    text = """
swarm_elastic.report(step=1)
child = os.fork()
if child == 0:
    swarm_elastic.report(step=2)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    with ScriptedAgent(folder / "s", lambda _: TAKEN) as agent:
        assert Script(folder, text).finish() == (0, "7\n", "")
        assert sorted(request["step"] for request in told(agent)) == [1, 2]


def test_outside_of_a_swarm_nothing_happens_and_nothing_is_said(folder: Path) -> None:
    text = """
import threading
os.environ.pop("SWARM_TASK_SOCKET")
print(swarm_elastic.report(step=1, loss=float("nan")), threading.active_count())
"""
    assert Script(folder, text).finish() == (0, "False 1\n", "")


def test_a_script_goes_on_with_the_batch_that_the_answer_to_a_report_names(folder: Path) -> None:
    """Outside of a swarm, or where nobody chooses one, it keeps its own."""
    text = """
print(swarm_elastic.global_batch(8), flush=True)
swarm_elastic.report(step=1)
while (batch := swarm_elastic.global_batch(8)) == 64:
    pass
print(batch, flush=True)
swarm_elastic.report(step=2)
"""
    with ScriptedAgent(folder / "s", lambda _: {**TAKEN, "global_batch": 256}) as agent:
        script = Script(folder, text, SWARM_GLOBAL_BATCH="64")
        assert [script.line(), script.line()] == ["64", "256"]
        assert script.finish() == (0, "", "")
        assert [(each["step"], each["global_batch"]) for each in told(agent)] == [(1, 64), (2, 256)]
    alone = Script(folder, "print(swarm_elastic.global_batch(8))", SWARM_TASK_SOCKET="")
    assert alone.finish() == (0, "8\n", "")

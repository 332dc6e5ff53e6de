"""`swarm report`, against an agent that is scripted."""

import pytest

from swarm_client.cli import main

TAKEN = {"v": 1, "type": "report", "ok": True, "ignored": []}
ASKED = {"v": 1, "type": "report", "token": "secret", "rank": 0}


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["report", *words])
        return (code, *capsys.readouterr())

    return call


def test_figures_are_sent_as_numbers_and_nothing_is_said(task, report, monkeypatch) -> None:
    task.answers = [TAKEN, TAKEN]
    task.start()
    assert report("step=100", "loss=0.25", "total_steps=9000") == (0, "", "")
    monkeypatch.setenv("RANK", "3")
    assert report("loss=nan", "step=-3") == (0, "", "")
    assert task.requests[0] == ASKED | {"step": 100, "loss": 0.25, "total_steps": 9000}
    assert (task.requests[1]["rank"], str(task.requests[1]["loss"]), task.requests[1]["step"]) == (3, "nan", -3)


def test_what_was_left_out_is_exit_code_1(task, report) -> None:
    left_out = {"field": "loss", "problem": "loss nan is not finite", "remedy": "look at the training"}
    refused = {"ok": False, "error": "too_many", "problem": "more than 100 reports", "remedy": "report less often"}
    task.answers = [TAKEN | {"ignored": [left_out]}, refused, b"[]\n"]
    task.start()
    said = "swarm: left out of the report: loss nan is not finite\n  look at the training\n"
    assert report("step=1", "loss=nan") == (1, "", said)
    assert report("step=1") == (1, "", "swarm: nothing was reported: more than 100 reports\n  report less often\n")
    assert report("step=1") == (1, "", "swarm: nothing was reported: the agent's answer made no sense\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "report needs a figure"),
        (("stpe=3",), "there is no figure 'stpe'; did you mean step?"),
        (("step",), "step is '', not a number"),
        (("step=one",), "step is 'one', not a number"),
        (("step=1_0",), "step is '1_0', not a number"),
        (("step=\u0663",), "step is '\u0663', not a number"),
        (("step=1e400",), "step is '1e400', not a number"),
        (("step=" + "9" * 5_000,), f"step is '{'9' * 40}', not a number"),
        (("step=1", "step=2"), "step is given twice"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_a_usage_error(task, report, words, problem) -> None:
    code, _, err = report(*words)
    assert (code, err.splitlines()[0]) == (2, f"swarm: {problem}")


def test_outside_of_a_task_it_says_so(report) -> None:
    code, _, err = report("step=1")
    assert (code, err.startswith("swarm: not inside a task of a swarm")) == (2, True)

"""`swarm checkpoint`, against an agent that is scripted."""

import threading
from typing import SupportsIndex

import pytest

from swarm_client import task_socket
from swarm_client.cli import main
from swarm_client.cli.status import facts
from swarm_client.reading import read
from swarmsched.documents import JobDocument
from tests.client.testing import job_document

COMMITTED = {"v": 1, "type": "checkpoint", "ok": True, "committed": True, "epoch": 1}
REFUSED = {"ok": False, "error": "not_found", "problem": "/ck/a does not exist", "remedy": "write it first"}


@pytest.fixture
def swarm(capsys: pytest.CaptureFixture[str]):
    def call(*words: str) -> tuple[int, str, str]:
        code = main(["checkpoint", *words])
        return (code, *capsys.readouterr())

    return call


def test_a_checkpoint_without_a_name_is_a_usage_error(task, swarm) -> None:
    assert swarm("") == (2, "", "swarm: the NAME of the checkpoint is empty\n  swarm checkpoint step-1000.pt\n")


def test_a_committed_checkpoint_is_exit_code_0(task, swarm) -> None:
    task.answers = [COMMITTED, COMMITTED]
    task.start()
    assert swarm("step-1.pt") == (0, "", "swarm: checkpoint step-1.pt committed\n")
    assert swarm("-q", "step-2.pt") == (0, "", "")
    asked = {"v": 1, "type": "checkpoint", "token": "secret", "wait": True}
    assert task.requests == [asked | {"name": "step-1.pt"}, asked | {"name": "step-2.pt"}]


def test_without_waiting_it_is_only_taken(task, swarm) -> None:
    task.answers = [{"v": 1, "ok": True, "committed": False}]
    task.start()
    assert swarm("a", "--no-wait") == (0, "", "swarm: checkpoint a taken\n")
    assert task.requests[0]["wait"] is False


def test_a_refusal_is_exit_code_1_with_reason_and_remedy(task, swarm) -> None:
    task.answers = [REFUSED, b"nonsense\n", b"[]\n"]
    task.start()
    assert swarm("a") == (
        1, "", "swarm: checkpoint a was not committed: /ck/a does not exist\n  write it first\n",
    )  # fmt: skip
    for _ in range(2):
        assert swarm("a") == (1, "", "swarm: checkpoint a was not committed: the agent's answer made no sense\n")


def test_outside_of_a_task_it_says_so(swarm) -> None:
    code, out, err = swarm("a")
    assert (code, out) == (2, "")
    assert err.startswith("swarm: not inside a task of a swarm: SWARM_TASK_SOCKET")


@pytest.mark.parametrize("words", [(), ("a", "b"), ("a", "--timeout", "soon"), ("a", "--nowait")])
def test_a_command_line_that_makes_no_sense_is_a_usage_error(task, swarm, words) -> None:
    code, _, err = swarm(*words)
    assert (code, err.startswith("swarm: ")) == (2, True)


def test_an_agent_that_hangs_up_is_asked_again(task, swarm, monkeypatch) -> None:
    monkeypatch.setattr(task_socket, "AGAIN_S", 0.01)
    task.answers = [None, COMMITTED]
    task.start()
    assert swarm("a")[0] == 0
    assert len(task.requests) == 2


def test_an_agent_that_is_away_is_not_waited_for_for_ever(task, swarm) -> None:
    code, _, err = swarm("a", "--timeout", "1s")
    assert code == 1
    assert err.startswith(f"swarm: the agent does not answer at {task.path}: No such file or directory\n")


def test_an_agent_that_says_nothing_is_left_after_the_timeout(task, swarm) -> None:
    release = threading.Event()

    class Slow(list):
        def pop(self, index: SupportsIndex = -1) -> None:
            release.wait(30)

    task.answers = Slow()
    task.start()
    try:
        assert swarm("a", "--timeout", "1s") == (
            1, "", "swarm: no answer of the agent within 1 s\n  it may still be done\n",
        )  # fmt: skip
    finally:
        release.set()


def test_status_tells_what_the_next_attempt_resumes_from() -> None:
    saved = {"name": "step-5", "attempt": 2, "node": "n1", "size_bytes": 3_145_728, "copies": ["n1", "n3"]}
    saved["committed_at"] = "2025-01-31T12:01:16.250Z"
    told = dict(facts(read(job_document(checkpoint=saved), JobDocument)))
    assert told["Checkpoint"] == "step-5 of attempt 2, 3.0 MiB, 2025-01-31T12:01:16Z, copies on n1, n3"
    told = dict(facts(read(job_document(checkpoint=saved | {"copies": []}), JobDocument)))
    assert told["Checkpoint"].endswith("in a shared folder")
    assert "Checkpoint" not in dict(facts(read(job_document(), JobDocument)))

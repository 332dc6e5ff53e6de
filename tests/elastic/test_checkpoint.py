"""`swarm_elastic.checkpoint` in a process of its own, as a training script has it, against a scripted agent."""

import ast
import shutil
import signal
import socket
import threading
from pathlib import Path

import pytest

from tests.elastic.testing import COMMITTED, DEADLINE_S, MANY_FILES, PACKAGE, Script, ScriptedAgent
from tests.testbed.found import working


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_a_checkpoint_is_told_to_the_agent_and_its_result_kept(folder: Path) -> None:
    text = """
import pathlib
print(swarm_elastic.checkpoint(pathlib.Path("step-1")))
print(swarm_elastic.flush())
print(swarm_elastic.last_result, swarm_elastic.dropped)
"""
    with ScriptedAgent(folder / "s") as agent:
        code, out, err = Script(folder, text).finish()
        request = agent.requests.get_nowait()
    assert request == {"v": 1, "type": "checkpoint", "token": "secret", "name": "step-1", "wait": True}
    kept = "CheckpointResult(name='step-1', is_committed=True, epoch=4, error='', problem='', remedy='')"
    assert (code, out.splitlines(), err) == (0, ["True", "True", f"{kept} 0"], "")


def test_waiting_returns_when_it_counts_and_raises_when_it_does_not(folder: Path) -> None:
    text = """
print(swarm_elastic.checkpoint("a", wait=True))
try:
    swarm_elastic.checkpoint("b", wait=True)
except swarm_elastic.CheckpointRefused as refused:
    print(refused.error, "|", refused)
"""
    refusal = {"ok": False, "error": "conflict", "problem": "this attempt was superseded", "remedy": "end it"}

    def answer(request: dict) -> dict:
        return COMMITTED if request["name"] == "a" else {"v": 1, "type": "checkpoint", **refusal}

    with ScriptedAgent(folder / "s", answer):
        code, out, err = Script(folder, text).finish()
    assert out.splitlines() == ["True", "conflict | checkpoint 'b': this attempt was superseded (end it)"]
    assert (code, err) == (0, "")


def test_who_does_not_wait_reads_of_a_refusal_on_stderr_and_in_the_last_result(folder: Path) -> None:
    text = """
print(swarm_elastic.checkpoint("b"), swarm_elastic.flush(), swarm_elastic.last_result.error)
"""
    with ScriptedAgent(folder / "s", lambda _: {"ok": False, "error": "not_found", "problem": "/x/b does not exist"}):
        code, out, err = Script(folder, text).finish()
    assert (code, out.strip()) == (0, "True True not_found")
    assert "checkpoint 'b' was refused: /x/b does not exist" in err


def test_training_does_not_wait_while_the_agent_is_slow_and_the_newest_wins(folder: Path) -> None:
    """The agent answers nothing until the script has named its last checkpoint."""
    text = """
swarm_elastic.checkpoint("first")
sys.stdin.readline()
taken = sum(swarm_elastic.checkpoint("step-%d" % number) for number in range(200))
print(taken, flush=True)
swarm_elastic.flush()
print(swarm_elastic.last_result.name, swarm_elastic.dropped)
"""
    go = threading.Event()

    def answer(request: dict) -> dict:
        go.wait(DEADLINE_S)
        return COMMITTED

    with ScriptedAgent(folder / "s", answer) as agent:
        script = Script(folder, text)
        assert agent.requests.get(timeout=DEADLINE_S)["name"] == "first"
        script.go_on()
        assert script.line() == "200"
        go.set()
        assert script.finish() == (0, "step-199 199\n", "")
    assert agent.requests.get_nowait()["name"] == "step-199"
    assert agent.requests.empty()


def test_names_without_end_cost_bounded_memory(folder: Path) -> None:
    """Faster than the thread can look, what is too much is dropped and said so."""
    text = """
import swarm_elastic._commits as commits
commits.State._start = lambda self: None
print([swarm_elastic.checkpoint("step-%d" % number) for number in range(300)].count(False), swarm_elastic.dropped)
"""
    assert Script(folder, text).finish()[:2] == (0, "44 44\n")


def test_while_the_agent_is_away_only_the_newest_waits_for_it(folder: Path) -> None:
    text = """
for name in ("a", "b", "c"):
    print(swarm_elastic.checkpoint(name))
while swarm_elastic.dropped < 2:
    time.sleep(0.01)
print("dropped", flush=True)
print(swarm_elastic.flush(), swarm_elastic.last_result.name)
"""
    script = Script(folder, text)
    assert [script.line() for _ in range(4)] == ["True", "True", "True", "dropped"]
    with ScriptedAgent(folder / "s") as agent:
        assert script.finish() == (0, "True c\n", "")
    assert agent.requests.get_nowait()["name"] == "c"


def test_an_agent_that_is_killed_in_between_is_asked_again(folder: Path) -> None:
    answers = iter([None, None, COMMITTED])
    with ScriptedAgent(folder / "s", lambda _: next(answers)) as agent:
        script = Script(folder, "print(swarm_elastic.checkpoint('a', wait=True))")
        assert script.finish() == (0, "True\n", "")
    assert [agent.requests.get_nowait()["name"] for _ in range(3)] == ["a", "a", "a"]


def test_the_newest_checkpoint_outlives_an_agent_that_dies_with_the_one_before_it_unread(folder: Path) -> None:
    """The connection is reset then, instead of ended."""
    text = """
from swarm_elastic._commits import state
swarm_elastic.checkpoint("a")
sys.stdin.readline()
swarm_elastic.checkpoint("b")
while not state()._queue.empty():
    time.sleep(0.01)
print("waits", flush=True)
print(swarm_elastic.flush(20), swarm_elastic.last_result.name, swarm_elastic.dropped)
"""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "s"))
        listening.listen()
        script = Script(folder, text)
        connection, _ = listening.accept()
        with connection:
            connection.recv(1, socket.MSG_PEEK)
            script.go_on()
            assert script.line() == "waits"
    with ScriptedAgent(folder / "s") as agent:
        assert script.finish() == (0, "True b 1\n", "")
        assert agent.requests.get_nowait()["name"] == "b"


def test_a_script_may_have_many_files_open(folder: Path) -> None:
    text = f"""{MANY_FILES}
print(swarm_elastic.checkpoint("a", wait=True, timeout_s=20))
"""
    with ScriptedAgent(folder / "s"):
        assert Script(folder, text).finish() == (0, "True\n", "")


def test_whatever_goes_wrong_with_one_checkpoint_is_told_and_the_next_is_committed(folder: Path) -> None:
    """An error that nobody thought of, and nobody to hear of it: the thread that asks lives on."""
    text = """
import swarm_elastic._commits as commits
wrong, request = [RecursionError("too deep")], commits.State._request
def request_in_the_end(self, wish):
    if wrong:
        raise wrong.pop()
    return request(self, wish)
commits.State._request = request_in_the_end
sys.stderr.close()
swarm_elastic.checkpoint("a")
print(swarm_elastic.flush(20), swarm_elastic.last_result.error, swarm_elastic.last_result.problem)
print(swarm_elastic.checkpoint("b", wait=True, timeout_s=20))
"""
    with ScriptedAgent(folder / "s"):
        code, out, _ = Script(folder, text).finish()
    problem = "the agent could not be asked: RecursionError: too deep"
    assert (code, out.splitlines()) == (0, [f"True internal {problem}", "True"])


def test_the_last_checkpoint_is_committed_before_the_process_ends(folder: Path) -> None:
    """A script that saves on SIGTERM and exits must not lose what it saved."""
    text = """
import signal
def save(*_):
    swarm_elastic.checkpoint("last")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(600)
"""
    asked, answered = threading.Event(), threading.Event()

    def answer(request: dict) -> dict:
        asked.set()
        answered.wait(DEADLINE_S)
        return COMMITTED

    with ScriptedAgent(folder / "s", answer) as agent:
        script = Script(folder, text)
        assert script.line() == "up"
        script.process.send_signal(signal.SIGTERM)
        assert asked.wait(DEADLINE_S)
        assert script.process.poll() is None
        answered.set()
        assert script.finish() == (0, "", "")
    assert agent.requests.get_nowait()["name"] == "last"


def test_the_end_is_not_held_up_for_ever_and_what_is_lost_is_told(folder: Path) -> None:
    script = Script(folder, "swarm_elastic.checkpoint('lost')", SWARM_GRACE_SECONDS="0.3")
    assert script.finish() == (0, "", "swarm_elastic: checkpoint 'lost' was not committed before the end\n")


def test_an_answer_that_makes_no_sense_and_a_timeout_are_refusals(folder: Path) -> None:
    text = """
for name in "ab":
    try:
        swarm_elastic.checkpoint(name, wait=True, timeout_s=float(sys.stdin.readline()))
    except swarm_elastic.CheckpointRefused as refused:
        print(refused.error, flush=True)
os._exit(0)
"""
    hold = threading.Event()

    def answer(request: dict) -> object:
        if request["name"] == "b":
            hold.wait(DEADLINE_S)
        return ["what"]

    with ScriptedAgent(folder / "s", answer):
        script = Script(folder, text)
        script.process.stdin.write("30\n0.1\n")
        script.process.stdin.flush()
        assert [script.line(), script.line()] == ["internal", "timeout"]
        hold.set()
        script.finish()


def test_a_forked_child_talks_for_itself_and_ends_by_itself(folder: Path) -> None:
    text = """
swarm_elastic.checkpoint("parent", wait=True)
child = os.fork()
if child == 0:
    swarm_elastic.checkpoint("child", wait=True)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    with ScriptedAgent(folder / "s") as agent:
        assert Script(folder, text).finish() == (0, "7\n", "")
    assert [agent.requests.get_nowait()["name"] for _ in range(2)] == ["parent", "child"]


def test_outside_of_a_swarm_nothing_happens_and_is_told_once(folder: Path) -> None:
    text = """
os.environ.pop("SWARM_TASK_SOCKET")
for _ in range(3):
    print(swarm_elastic.checkpoint("a"), swarm_elastic.checkpoint("a", wait=True))
"""
    code, out, err = Script(folder, text).finish()
    assert (code, out.split()) == (0, ["False"] * 6)
    assert err.count("not run by swarmsched") == 1


def test_a_filter_that_makes_warnings_errors_does_not_end_training(folder: Path) -> None:
    text = "os.environ.pop('SWARM_TASK_SOCKET'); print(swarm_elastic.checkpoint('a'))"
    code, out, err = Script(folder, text, PYTHONWARNINGS="error").finish()
    assert (code, out.strip()) == (0, "False")
    assert "not run by swarmsched" in err


def test_a_name_that_is_no_text_is_our_callers_mistake(folder: Path) -> None:
    code, _, err = Script(folder, "swarm_elastic.checkpoint(3)").finish()
    assert (code, "TypeError: the name of a checkpoint must be text, not int" in err) == (1, True)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_the_source_is_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))


PYENV = Path("~/.pyenv/versions").expanduser()
OLD = working(*map(str, PYENV.glob("3.9.*/bin/python")), "python3.9")


@pytest.mark.skipif(not OLD, reason="needs a Python 3.9")
def test_it_runs_on_python_3_9_without_anything_else_of_ours(folder: Path) -> None:
    text = """
print(swarm_elastic.checkpoint("a", wait=True), swarm_elastic.report(step=1), sys.version_info[:2])
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("swarmsched", "swarm_agent", "swarm_client")))
"""
    shutil.copytree(PACKAGE, folder / "bare" / "swarm_elastic")
    with ScriptedAgent(folder / "s"):
        script = Script(folder, text, python=str(OLD), PYTHONPATH=str(folder / "bare"))
        assert script.finish() == (0, "True True (3, 9)\n[]\n", "")

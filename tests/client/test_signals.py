"""A real process with real signals, against a small real agent."""

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.client.testing import HANDLE, JOB_ID, TOKEN, end, log, state

CANCEL = f"/v1/jobs/{JOB_ID}/cancel"
SIGNAL = f"/v1/jobs/{JOB_ID}/signal"
LOGS = f"/v1/jobs/{JOB_ID}/logs"


@pytest.fixture
def start(agent):
    """Start `swarm WORDS` and give the process; what still runs at the end is killed."""
    started = []

    def begin(*words, window_s=2.0, **options):
        environment = {**os.environ, "SWARM_HOSTS": agent.address, "SWARM_TOKEN": TOKEN}
        code = (  # in the background of a shell without job control these signals are ignored, and stay so
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
            "signal.signal(signal.SIGQUIT, signal.SIG_DFL); signal.signal(signal.SIGHUP, signal.SIG_DFL);"
            "import sys; from swarm_client import attached, cli;"
            f"attached.QUIET_START_S = 300.0; attached.CANCEL_WINDOW_S = {window_s}; sys.exit(cli.main())"
        )
        command = [sys.executable, "-c", code, *words]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(command, env=environment, **pipes)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def running_job(agent, until_path, *last):
    """A stream that says "up", then waits for a request, then gives the last records."""

    def stream(cursor):
        yield state("running", "1")
        yield log("up\n", "2")
        agent.wait_for("POST", until_path, limit_s=60)
        yield from last

    return stream


def read_up(process):
    assert process.stdout.readline() == b"up\n"


def test_a_single_rank_shows_a_part_of_a_line_at_once(start, agent):
    """A prompt, or dots that say that it goes on."""
    may_end = threading.Event()

    def stream(_: str):
        yield state("running", "1", ranks=1, world_size=1)
        yield log("epoch 1...", "2")
        assert may_end.wait(60.0)
        yield end("3")

    agent.stream = stream
    process = start("run", "--no-sync", "--", "x")
    try:
        assert process.stdout.read(10) == b"epoch 1..."
    finally:
        may_end.set()
    assert process.wait(60.0) == 0


def test_first_interrupt_is_forwarded_and_says_so(agent, start):
    agent.stream = running_job(agent, SIGNAL, end("3", 130, "failed", signal=2, exit_code=0))
    process = start("run", "--no-sync", "--", "x")
    read_up(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert agent.wait_for("POST", SIGNAL) == [{"signal": 2}]
    assert err.decode().splitlines() == [
        f"swarm: job {HANDLE}",
        "swarm: Ctrl-C was sent to all ranks; again within 2 s cancels the job",
        f"swarm: job {HANDLE} failed (signal 2)",
    ]


def test_the_first_interrupt_cancels_a_job_that_has_not_started(agent, start):
    def stream(_):
        yield state("queued", "1", nodes=[])
        yield log("up\n", "2")
        agent.wait_for("POST", CANCEL, limit_s=60)
        yield end("3", 143, "cancelled", exit_code=None)

    agent.stream = stream
    process = start("run", "--no-sync", "--", "x")
    read_up(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err.decode().splitlines() == [
        f"swarm: job {HANDLE}",
        f"swarm: cancelling job {HANDLE}; Ctrl-C once more leaves at once",
        f"swarm: job {HANDLE} cancelled",
    ]


def test_a_closed_pipe_leaves_the_job_and_says_so(agent, start):
    """As `swarm run -- yes | head -1` does."""
    reading, writing = os.pipe()
    agent.stream = running_job(agent, CANCEL)
    process = start("run", "--no-sync", "--", "yes", stdout=writing)
    os.close(writing)
    os.close(reading)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141
    assert err.decode().splitlines() == [
        f"swarm: job {HANDLE}",
        f"swarm: nobody reads the output any more; job {HANDLE} goes on (`swarm cancel` stops it)",
    ]
    agent.note("POST", CANCEL, None)


@pytest.mark.parametrize(("text", "is_told"), [(b"hi\n", True), (b"", False)])
def test_standard_input_is_refused_in_words_when_there_is_some(agent, start, tmp_path, text, is_told):
    agent.stream = lambda _: iter([state("running", "1"), end("2")])
    (tmp_path / "input").write_bytes(text)
    with (tmp_path / "input").open("rb") as file:
        _, err = start("run", "--no-sync", "--", "cat", stdin=file).communicate(timeout=60)
    told = "swarm: standard input is not passed to jobs; put it into a file of the working directory\n"
    assert err.decode() == f"swarm: job {HANDLE}\n" + told * is_told


def test_second_interrupt_cancels_and_third_leaves_at_once(agent, start):
    agent.stream = running_job(agent, "/never")
    process = start("run", "--no-sync", "--", "x", window_s=300.0)
    read_up(process)
    process.send_signal(signal.SIGINT)
    agent.wait_for("POST", SIGNAL, limit_s=60)
    process.send_signal(signal.SIGINT)
    agent.wait_for("POST", CANCEL, limit_s=60)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_terminate_cancels_and_returns_the_jobs_code(agent, start):
    agent.stream = running_job(agent, CANCEL, end("3", 143, "cancelled", signal=15, exit_code=0))
    process = start("run", "--no-sync", "--", "x")
    read_up(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143


def test_hangup_detaches_and_leaves_the_job(agent, start):
    agent.stream = running_job(agent, "/never")
    process = start("run", "--no-sync", "--", "x")
    read_up(process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 129
    assert not [path for method, path, _ in agent.requests if path in (CANCEL, SIGNAL)]


def test_hangup_cancels_when_asked_to(agent, start):
    agent.stream = running_job(agent, "/never")
    process = start("run", "--no-sync", "--kill-on-disconnect", "--", "x")
    read_up(process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 129
    agent.wait_for("POST", CANCEL)


def test_interrupt_ends_only_the_viewer_of_logs(agent, start):
    agent.stream = running_job(agent, "/never")
    process = start("logs", "-f", JOB_ID)
    read_up(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert [path for method, path, _ in agent.requests if method == "POST"] == []


def test_a_closed_pipe_is_silent(agent, start):
    def stream(cursor):
        yield state("running", "1")
        for number in range(100_000):
            yield log("x" * 1000 + "\n", str(number))

    agent.stream = stream
    process = start("logs", "-f", JOB_ID)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""


@pytest.mark.parametrize("keys", [b"\x1c", b"\x10\x11"])
def test_detach_keys_leave_the_job_running(agent, start, keys):
    agent.stream = running_job(agent, "/never")
    leader, follower = pty.openpty()
    process = start("run", "--no-sync", "--", "x", stdin=follower, stderr=follower, preexec_fn=lambda: take(follower))
    os.close(follower)
    read_up(process)
    seen = read_until(leader, b"detach: Ctrl-\\ or Ctrl-P Ctrl-Q")
    os.write(leader, keys)
    seen += read_until(leader, b"goes on")
    assert process.wait(timeout=60) == 0
    assert f"swarm attach {HANDLE}".encode() in seen + read_rest(leader)
    os.close(leader)
    assert not [path for method, path, _ in agent.requests if path in (CANCEL, SIGNAL)]


def take(terminal):
    """In the child: a session of its own with the terminal in control."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def read_until(descriptor, text, limit_s=60):
    seen, end_s = b"", time.monotonic() + limit_s
    while text not in seen:
        assert select.select([descriptor], [], [], end_s - time.monotonic())[0], seen
        seen += os.read(descriptor, 1000)
    return seen


def read_rest(descriptor):
    try:
        return os.read(descriptor, 1000) if select.select([descriptor], [], [], 1)[0] else b""
    except OSError:
        return b""

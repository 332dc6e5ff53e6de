"""Real shims and real processes: what runs, what is said, and that nothing survives."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_agent.supervision import readers
from swarm_agent.supervision.forkserver import ForkServer
from swarm_agent.supervision.logs import LogConfig, Stream
from swarm_agent.supervision.orders import FactKind, ReadFacts
from swarm_agent.task import shim
from swarmsched.effects import ForgetTask, SignalTask, StartTask, StopTask
from swarmsched.events import AggregationRead, RankExited, TaskExited, TaskStarted
from swarmsched.ids import NodeId, TaskKey
from swarmsched.resources import Share
from swarmsched.task import RankExit, TaskFailure, TaskOrder
from tests.agent.supervision.testing import DEADLINE_S, Bench, make_order

PYTHON = getattr(sys, "_base_executable", sys.executable)


@pytest.fixture
async def bench(tmp_path: Path):
    async with Bench(tmp_path / "data") as bench:
        yield bench


async def run(bench: Bench, *command: str, **spec) -> tuple[TaskOrder, TaskExited]:
    order = make_order(*command, **spec)
    bench.runner.perform(StartTask(order, ()))
    return order, await bench.finish(order)


def words_of(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def is_alive(pid: int) -> bool:
    fields = shim.read_stat(pid)
    return bool(fields and fields[0] != b"Z")


async def gone(pid: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while is_alive(pid):
            await asyncio.sleep(0.005)


async def test_output_and_exit_code_are_reported(bench: Bench) -> None:
    order, exited = await run(bench, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert exited.exits == (RankExit(0, 3),)
    assert exited.failure is TaskFailure.NONE
    records, _ = bench.agent.logs.read(order.job_id, 1, 0)
    assert sorted((record.stream.value, record.data) for record in records) == [
        ("stderr", b"err\n"),
        ("stdout", b"out\n"),
    ]
    kinds = [type(event).__name__ for event in bench.events if not isinstance(event, AggregationRead)]
    assert kinds == ["TaskStarted", "RankExited", "TaskExited"]


async def test_death_by_signal_is_told_apart_from_an_exit_code(bench: Bench) -> None:
    _, exited = await run(bench, "sh", "-c", "kill -SEGV $$")
    assert exited.exits == (RankExit(0, 0, signal=signal.SIGSEGV),)


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("x.py", " (a file of that name is in the working directory: write python x.py)"),
        ("run", " (a file of that name is in the working directory: write ./run)"),
        ("python train.py", " (it is one word with blanks in it: leave its quotes out, or write bash -c '...')"),
        ("cd", " (it is part of the shell: write bash -c '...')"),
        ("for", " (it is part of the shell: write bash -c '...')"),
        ("srun", " (it is part of Slurm: each rank runs the command itself, so leave it out)"),
        ("A=1", " (a variable is set by an option: -e A=1)"),
        ("nope", ""),
    ],
)
def test_why_a_command_is_not_there_is_told_as_far_as_can_be_seen(tmp_path: Path, command: str, hint: str) -> None:
    for name in ("x.py", "run"):
        (tmp_path / name).touch()
    assert shim.not_found_text(command, str(tmp_path)) == f"{command}: command not found{hint}"


async def test_unknown_command_ends_with_127_and_a_line_in_the_log(bench: Bench) -> None:
    order, exited = await run(bench, "no-such-command-here")
    assert (exited.failure, exited.exits) == (TaskFailure.NOT_FOUND, (RankExit(0, 127),))
    assert bench.output(order) == b"swarm: no-such-command-here: command not found\n"
    assert not any(isinstance(event, TaskStarted) for event in bench.events)


async def test_a_file_in_the_working_directory_is_suggested(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    order, _ = await run(bench, "train.sh", workdir=str(tmp_path))
    assert b"write ./train.sh" in bench.output(order)


@pytest.mark.parametrize("content", [b"echo hi\n", b"#!/bin/sh\n"], ids=["no first line", "no permission"])
async def test_command_that_may_not_be_executed_ends_with_126(bench: Bench, tmp_path: Path, content: bytes) -> None:
    script = tmp_path / "script"
    script.write_bytes(content)
    script.chmod(0o755 if content.startswith(b"echo") else 0o644)
    order, exited = await run(bench, str(script))
    assert (exited.failure, exited.exits) == (TaskFailure.NOT_EXECUTABLE, (RankExit(0, 126),))
    assert f"{script}: cannot be executed".encode() in bench.output(order)


async def test_arguments_too_long_for_the_kernel_are_the_jobs_fault_and_no_node_s(bench: Bench) -> None:
    order, exited = await run(bench, "echo", "x" * 200_000)
    assert exited.failure is TaskFailure.NOT_EXECUTABLE
    assert b"echo: cannot be executed: argument list too long" in bench.output(order)


async def test_missing_interpreter_is_named_as_the_cause(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    order, exited = await run(bench, str(script))
    assert exited.failure is TaskFailure.NOT_FOUND
    assert b"interpreter named in its first line" in bench.output(order)


async def test_missing_working_directory_is_named_with_the_node(bench: Bench) -> None:
    order, exited = await run(bench, "true", workdir="/no/such/folder")
    assert exited.failure is TaskFailure.SYNC
    assert "/no/such/folder does not exist on n1" in exited.detail
    assert b"/no/such/folder does not exist on n1" in bench.output(order)


async def test_output_without_newline_is_readable_at_once(bench: Bench) -> None:
    order = make_order("sh", "-c", "printf 'epoch 1...'; sleep 60")
    bench.runner.perform(StartTask(order, ()))
    assert await bench.wait_for_output(order, b"epoch 1...") == b"epoch 1..."


async def test_a_line_that_is_written_in_parts_is_one_record(bench: Bench) -> None:
    """As `print` does it when output is unbuffered: each word on its own, then the newline."""
    program = "import sys\nfor i in range(50): print('hello', i, 'of', 50); print('oh', i, file=sys.stderr)"
    order, _ = await run(bench, PYTHON, "-u", "-c", program)
    records, _ = bench.agent.logs.read(order.job_id, 1, 0)
    assert all(record.data.endswith(b"\n") for record in records)
    assert b"".join(r.data for r in records if r.stream is Stream.STDOUT) == b"".join(
        b"hello %d of 50\n" % i for i in range(50)
    )


async def test_a_progress_bar_is_not_held_back(bench: Bench) -> None:
    log = shim.LogWriter(str(bench.agent.logs.config.directory / "bar"), 2**20, 2**18)
    rank = shim.Rank(0, log)
    reading, writing = os.pipe()
    rank.pipes[reading] = shim.STDERR
    for part, is_held in ((b"\r 10%", False), (b"\r 20%", False), (b"\n3 pa", True), (b"rts\n", False)):
        os.write(writing, part)
        assert rank.take(reading)
        assert (rank.release_at_s != shim.INFINITE) is is_held
    os.close(reading)
    os.close(writing)


async def test_stop_lets_a_task_end_in_its_grace(bench: Bench) -> None:
    order = make_order("sh", "-c", "trap 'echo saving; exit 7' TERM; echo ready; while :; do sleep 0.02; done")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for_output(order, b"ready")
    bench.runner.perform(StopTask(order.job_id, 1, 600.0))
    exited = await bench.finish(order)
    assert exited.exits == (RankExit(0, 7),)
    assert b"saving" in bench.output(order)


async def test_task_that_ignores_sigterm_is_killed_after_its_grace(bench: Bench) -> None:
    order = make_order("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.02; done")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for_output(order, b"ready")
    began_s = time.monotonic()
    bench.runner.perform(StopTask(order.job_id, 1, 0.3))
    exited = await bench.finish(order)
    assert 0.3 <= time.monotonic() - began_s < make_order().spec.grace_s
    assert exited.exits == (RankExit(0, 0, signal=signal.SIGKILL),)


async def test_a_shorter_grace_shortens_the_wait(bench: Bench) -> None:
    order = make_order("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.02; done")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for_output(order, b"ready")
    bench.runner.perform(StopTask(order.job_id, 1, 600.0))
    bench.runner.perform(StopTask(order.job_id, 1, 0.1))
    assert (await bench.finish(order)).exits == (RankExit(0, 0, signal=signal.SIGKILL),)


DAEMON = """
import os, sys, time
if os.fork():
    os.wait()
    sys.exit(0)
os.setsid()
if os.fork():
    os._exit(0)
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], 'w').write(str(os.getpid()))
time.sleep(300)
"""


async def test_a_daemon_does_not_survive_its_job(bench: Bench, tmp_path: Path) -> None:
    """Double fork, own session, SIGTERM ignored, output closed or not: the shim is its parent at the end."""
    pid_file = tmp_path / "pid"
    wait = f"while [ ! -s {pid_file} ]; do sleep 0.01; done"
    _, exited = await run(bench, "sh", "-c", f'"$0" -c "$1" {pid_file}; {wait}', PYTHON, DAEMON)
    assert exited.exits == (RankExit(0, 0),)
    assert not is_alive(int(pid_file.read_text()))


async def test_a_stopped_daemon_and_a_stopped_rank_are_ended(bench: Bench) -> None:
    order = make_order("sh", "-c", "setsid sleep 300 & echo $!; kill -STOP $!; kill -STOP $$")
    bench.runner.perform(StartTask(order, ()))
    daemon = int((await bench.wait_for_output(order, b"\n")).split()[0])
    bench.runner.perform(StopTask(order.job_id, 1, 0.1))
    await bench.finish(order)
    assert not is_alive(daemon)


async def test_a_stopped_rank_gets_its_grace_as_well(bench: Bench) -> None:
    order = make_order("sh", "-c", "trap 'echo told; exit 3' TERM; echo up; kill -STOP $$")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for_output(order, b"up")
    bench.runner.perform(StopTask(order.job_id, 1, 30.0))
    assert (await bench.finish(order)).exits == (RankExit(0, 3),)


async def test_daemons_in_sessions_of_their_own_get_their_grace_as_well(bench: Bench) -> None:
    daemon = "trap 'echo told; exit' TERM; echo up; while :; do sleep 0.02; done"
    order = make_order("sh", "-c", f'setsid sh -c "{daemon}" & trap "" TERM; wait; while :; do sleep 0.02; done')
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for_output(order, b"up")
    bench.runner.perform(StopTask(order.job_id, 1, 5.0))
    await bench.wait_for_output(order, b"told")
    bench.runner.perform(StopTask(order.job_id, 1, 0.0))
    await bench.finish(order)


async def test_what_slips_away_by_forking_is_killed_again_until_none_is_left(bench: Bench) -> None:
    """The first look at all processes may find each link of the chain just after it has handed over."""
    code = """
import os, sys, time
print("up", flush=True)
while True:
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.03)
"""
    order = make_order(PYTHON, "-c", code, mark := f"chain-{os.getpid()}")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for_output(order, b"up")
    bench.runner.perform(StopTask(order.job_id, 1, 0.0))
    await bench.finish(order)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in words_of(path)]


async def test_a_longer_grace_does_not_put_off_the_end_that_a_shorter_one_has_set(bench: Bench) -> None:
    order = make_order("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.02; done")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for_output(order, b"ready")
    bench.runner.perform(StopTask(order.job_id, 1, 0.5))
    bench.runner.perform(StopTask(order.job_id, 1, 600.0))
    assert (await bench.finish(order)).exits == (RankExit(0, 0, signal=signal.SIGKILL),)


@pytest.mark.parametrize(("number", "reaches_all"), [(signal.SIGUSR1, False), (signal.SIGINT, True)])
async def test_signals_of_a_terminal_reach_all_of_a_rank_and_others_the_rank_alone(
    bench: Bench, number: signal.Signals, reaches_all: bool
) -> None:
    """A launcher passes on itself what is meant for its workers: twice would be once too often."""
    code = f"""
import os, signal, time
child = os.fork()  # 0 in itself; who is left when its parent ends is ended, so that waits
me = "parent" if child else "child"
signal.signal({int(number)}, lambda *_: (os.write(1, (me + " got\\n").encode()), child and os.wait(), os._exit(0)))
os.write(1, (me + " up\\n").encode())
time.sleep(5.0 if me == "parent" or {reaches_all} else 0.5)
os.write(1, (me + " ends\\n").encode())
"""
    order = make_order(PYTHON, "-c", code)
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for_output(order, b"parent up")
    await bench.wait_for_output(order, b"child up")
    bench.runner.perform(SignalTask(order.job_id, 1, int(number)))
    await bench.finish(order)
    output = bench.output(order)
    assert b"parent got" in output
    assert (b"child got" in output) is reaches_all


async def test_signals_reach_the_ranks(bench: Bench) -> None:
    order = make_order("sh", "-c", "trap 'echo got; exit 0' USR1; echo ready; while :; do sleep 0.02; done")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for_output(order, b"ready")
    bench.runner.perform(SignalTask(order.job_id, 1, signal.SIGUSR1))
    assert (await bench.finish(order)).exits == (RankExit(0, 0),)
    assert b"got" in bench.output(order)


async def test_first_rank_to_fail_is_reported_while_others_run(bench: Bench) -> None:
    script = 'if [ "$RANK" = 1 ]; then exit 5; fi; sleep 60'
    order = make_order("sh", "-c", script, shares=(Share(NodeId("n1"), 2),), ranks=2)
    bench.runner.perform(StartTask(order, ()))
    assert (await bench.wait_for(RankExited)).exit == RankExit(1, 5)
    assert not any(isinstance(event, TaskExited) for event in bench.events)
    bench.runner.perform(StopTask(order.job_id, 1, 0.0))
    assert len((await bench.finish(order)).exits) == 2


async def test_a_command_given_before_the_shim_listens_is_obeyed(bench: Bench) -> None:
    order = make_order("sleep", "60")
    bench.runner.perform(StartTask(order, ()))
    bench.runner.perform(StopTask(order.job_id, 1, 5.0))
    await bench.finish(order)


async def test_missing_module_is_named_with_what_to_do(bench: Bench) -> None:
    order, exited = await run(bench, PYTHON, "-c", "import no_such_module_xyz")
    assert exited.exits == (RankExit(0, 1),)
    last = bench.output(order).decode().splitlines()[-1]
    assert "'no_such_module_xyz'" in last
    assert all(option in last for option in ("--venv", "--requirements", "--sync"))


async def test_binary_output_is_kept_byte_for_byte(bench: Bench) -> None:
    order, _ = await run(bench, PYTHON, "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)")
    assert bench.output(order) == bytes(range(256)) * 1000


async def test_a_hundred_megabytes_are_bounded_on_disk(tmp_path: Path) -> None:
    logs = LogConfig(directory=tmp_path / "logs", limit_bytes=8 * 2**20, head_bytes=2**20)
    async with Bench(tmp_path / "data", logs=logs) as bench:
        order = make_order("sh", "-c", "echo first; yes 0123456789abcde | head -c 100000000; echo last")
        folder = logs.directory / order.job_id / "1" / "0"
        folder.mkdir(parents=True)
        (folder / shim.READER_NAME).write_bytes(shim.reader_text(0, 0.0))  # nobody is waited for any more
        bench.runner.perform(StartTask(order, ()))
        exited = await bench.finish(order)
        assert exited.exits == (RankExit(0, 0),)
        on_disk = sum(path.stat().st_size for path in logs.directory.rglob("*.log"))
        assert on_disk <= logs.limit_bytes
        kept, dropped, cursor = 0, 0, ""
        while True:
            records, cursor = bench.agent.logs.read(order.job_id, 1, 0, cursor)
            if not records:
                break
            kept += sum(len(record.data) for record in records)
            dropped += sum(record.dropped_bytes for record in records)
        assert kept + dropped == 100_000_000 + len("first\nlast\n")
        assert dropped > 80_000_000
        assert bench.agent.logs.read(order.job_id, 1, 0)[0][0].data.startswith(b"first\n")
        cut, cursor = bench.agent.logs.tail(order.job_id, 1, 0, 1)
        rest, _ = bench.agent.logs.read(order.job_id, 1, 0, cursor)
        assert b"".join(record.data for record in (*cut, *rest)) == b"last\n"


async def test_rank_has_default_signals_and_no_descriptors_of_ours(bench: Bench) -> None:
    script = "grep -E 'SigIgn|SigBlk' /proc/self/status; ls /proc/self/fd | wc -l"
    order, _ = await run(bench, "sh", "-c", script)
    ignored, count = bench.output(order).decode().rsplit("\n", 2)[:2]
    masks = [int(line.split()[1], 16) for line in ignored.splitlines()]
    assert [mask & 0x7FFF_FFFF for mask in masks] == [0, 0]  # 32 and 33 are the C library's own
    assert int(count) == 4  # standard three, and that of the listing itself


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
async def test_files_of_ranks_have_the_mode_that_their_submitter_is_used_to(bench: Bench) -> None:
    before = os.umask(0o022)
    try:
        order, _ = await run(bench, "sh", "-c", "umask", umask=0o027)
        assert bench.output(order) == b"0027\n"
    finally:
        os.umask(before)


async def test_job_user_owns_the_ranks_and_not_the_shim(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):  # pytest's folders are root's alone
        if folder.stat().st_uid == 0 and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    async with Bench(tmp_path / "data", job_user="nobody") as bench:
        order, exited = await run(bench, "sh", "-c", "id -un; id -Gn; touch mine; echo $HOME; cat /proc/1/environ")
        lines = bench.output(order).decode().splitlines()
        assert lines[0] == "nobody"
        assert lines[2] == "/nonexistent"
        assert "denied" in lines[-1]
        assert exited.exits == (RankExit(0, 1),)


async def test_memory_and_start_of_a_shim_stay_small(bench: Bench) -> None:
    order = make_order("sleep", "60")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for(TaskStarted)
    shim_pid = next(pid for pid in bench.runner.processes() if b"shim" in Path(f"/proc/{pid}/cmdline").read_bytes())
    status = Path(f"/proc/{shim_pid}/status").read_text()
    resident_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident_kb <= 12 * 1024


async def test_processes_are_shims_ranks_and_their_children(bench: Bench) -> None:
    order = make_order("sh", "-c", "sleep 60 & echo $!; wait")
    bench.runner.perform(StartTask(order, ()))
    child = int(await bench.wait_for_output(order, b"\n"))
    await bench.wait_for(TaskStarted)  # output may come before the news of who writes it
    pids = bench.runner.processes()
    assert child in pids
    assert len(pids) == 3
    assert len(bench.runner.own_pids()) == 1
    assert bench.runner.own_pids() < pids


async def test_stopping_what_is_unknown_or_over_is_answered_at_once(bench: Bench) -> None:
    order, exited = await run(bench, "true")
    bench.runner.perform(StopTask(order.job_id, 1, 5.0))
    assert bench.events[-1] == exited
    bench.runner.perform(ForgetTask(order.job_id, 1))
    assert not list((bench.config.data_dir / "tasks").glob(f"{order.job_id}*"))
    bench.runner.perform(StopTask(order.job_id, 1, 5.0))
    assert bench.events[-1] == TaskExited(order.job_id, 1, ())


async def test_a_repeated_start_starts_once(bench: Bench) -> None:
    order = make_order("sh", "-c", "echo once")
    bench.runner.perform(StartTask(order, ()))
    bench.runner.perform(StartTask(order, ()))
    await bench.finish(order)
    assert bench.output(order) == b"once\n"


async def test_killed_shim_is_reported_lost_and_its_ranks_are_ended(bench: Bench) -> None:
    order = make_order("sh", "-c", "setsid sleep 300 & echo $!; exec sleep 300")
    bench.runner.perform(StartTask(order, ()))
    daemon = int(await bench.wait_for_output(order, b"\n"))
    await bench.wait_for(TaskStarted)
    pids = bench.runner.processes()
    shim_pid = next(pid for pid in pids if b"shim" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(shim_pid, signal.SIGKILL)
    exited = await bench.finish(order)
    assert exited.failure is TaskFailure.LOST
    for pid in {daemon, *pids}:
        await gone(pid)
    assert b"supervising process on n1 was killed" in bench.output(order)


async def test_a_shim_that_cannot_start_is_no_lost_task(bench: Bench, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise OSError(28, 'No space left on device')\n")
    bench.runner._server.stop()
    bench.runner._server = ForkServer(sys.executable, broken)
    order, exited = await run(bench, "true")
    assert exited.failure is TaskFailure.INTERNAL
    assert "n1 could not start: OSError: [Errno 28] No space left on device" in exited.detail
    assert exited.detail.encode() in bench.output(order)


async def test_notices_cut_anywhere_and_nonsense_are_understood_as_far_as_possible(bench: Bench) -> None:
    """The FIFO may hold half a line of an earlier life, and a full one is read in pieces."""
    order = make_order("sh", "-c", "echo out; sleep 60")
    os.write(bench.runner._notices._fd, f"7 log 0\nx y facts\n\n\xff {order.job_id}".encode("latin-1"))
    os.write(bench.runner._notices._fd, b" 1 nothing\n")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for(TaskStarted)
    await bench.wait_for_output(order, b"out")


@given(
    st.lists(
        st.tuples(st.sampled_from(["none", "not_found"]), st.text(st.characters(exclude_categories=()))), max_size=5
    )
)
@settings(max_examples=100, deadline=None)
def test_whatever_a_fact_holds_it_is_one_line_and_no_other_fact(texts: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written, read = shim.Facts(f"{folder}/facts", 1), ReadFacts()
        written.add("shim 7 8")
        for failure, text in texts:
            written.add(f"exited 1.0 {failure} {text}")
        written.flush()
        told = read.read(Path(folder) / "facts")
    assert told == [FactKind.SHIM, *[FactKind.EXITED] * len(texts)]
    assert (read.shim_pid, read.shim_start_ticks, read.rank_starts, read.is_damaged) == (7, 8, {}, False)


@pytest.mark.parametrize(
    "end", ["\r", "\r\nshim 1 1", "\x0bexit 0 0 0 0 1.0", "\x1c", "\x85", "\u2028started 1.0 0:1:1"]
)
async def test_a_command_with_line_breaks_fails_alone_and_forges_nothing(bench: Bench, end: str) -> None:
    other = make_order("sh", "-c", "exit 3")
    bench.runner.perform(StartTask(other, ()))
    order, exited = await run(bench, f"./train.sh{end}")
    assert exited.failure is TaskFailure.NOT_FOUND
    assert (await bench.finish(other)).exits == (RankExit(0, 3),)
    assert bench.runner._tasks[TaskKey(order.job_id, 1)].link.facts.shim_pid not in (0, 1)


async def test_a_line_that_no_shim_writes_stops_the_task_which_is_lost(bench: Bench) -> None:
    order = make_order("sleep", "60")
    bench.runner.perform(StartTask(order, ()))
    await bench.wait_for(TaskStarted)
    task = bench.runner._tasks[TaskKey(order.job_id, 1)]
    with task.link.facts_path.open("r+b") as file:
        file.seek(task.link.facts.offset)
        file.write(b": nonsense\n")
    bench.runner._take_facts(task)
    assert (await bench.finish(order)).failure is TaskFailure.LOST


async def test_many_tasks_at_once_all_report(bench: Bench) -> None:
    orders = [make_order("sh", "-c", f"echo {index}; exit {index}") for index in range(24)]
    for order in orders:
        bench.runner.perform(StartTask(order, ()))
    for index, order in enumerate(orders):
        assert (await bench.finish(order)).exits == (RankExit(0, index),)
        assert bench.output(order) == b"%d\n" % index


KINDS = {
    "lines": "import sys; [sys.stdout.write(f'{n} of some words\\n') for n in range(15_000)]",
    "no newlines": "import sys; sys.stdout.buffer.write(bytes(range(1, 10)) * 30_000)",
    "holes": "import sys; sys.stdout.buffer.write(bytes(300_000))",
    "not text": "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1_200)",
    "progress": "import sys; [sys.stdout.write(f'\\r{n} %') for n in range(40_000)]",
    "both": "import sys; [print(n, file=(sys.stderr, sys.stdout)[n % 2], flush=True) for n in range(20_000)]",
    "at the end": "import sys, os; os.write(1, bytes(60_000)); os.write(1, b'x' * 250_000); os._exit(0)",
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rank_waits_for_whoever_reads_all_of_its_output_and_nothing_is_missing(
    tmp_path: Path, kind: str
) -> None:
    """Though it writes three times what is kept, and the readers of its two ranks are slow."""
    expected = subprocess.run([PYTHON, "-c", KINDS[kind]], capture_output=True, check=True)
    logs = LogConfig(directory=tmp_path / "logs", limit_bytes=96 * 1024, head_bytes=16 * 1024)
    order = make_order(PYTHON, "-c", KINDS[kind], ranks=2)

    async def read(bench: Bench, rank: int) -> tuple[bytes, bytes, int]:
        got, most = dict.fromkeys((Stream.STDOUT, Stream.STDERR), b""), 0
        async for record in bench.agent.logs.follow(order.job_id, 1, rank, is_lossless=True):
            assert not record.dropped_bytes
            got[record.stream] += record.data
            with suppress(FileNotFoundError):  # dropped just now
                most = max(most, sum(file.stat().st_size for file in logs.directory.glob(f"*/1/{rank}/*.log")))
            await asyncio.sleep(0.002)
        return got[Stream.STDOUT], got[Stream.STDERR], most

    async with Bench(tmp_path / "data", logs=logs) as bench:
        bench.runner.perform(StartTask(order, ()))
        for out, err, most in await asyncio.gather(read(bench, 0), read(bench, 1)):
            assert (out, err) == (expected.stdout, expected.stderr)
            assert most <= logs.limit_bytes + 2 * shim.RECORD_BYTES_MAX


async def test_a_rank_whose_reader_has_gone_or_takes_nothing_goes_on_and_obeys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "HELD_S", 1.0)
    logs = LogConfig(directory=tmp_path / "logs", limit_bytes=96 * 1024, head_bytes=16 * 1024)
    order = make_order("sh", "-c", "trap 'echo told; exit 5' TERM; while :; do echo some words of a rank; done")
    async with Bench(tmp_path / "data", logs=logs) as bench:
        bench.runner.perform(StartTask(order, ()))
        records = bench.agent.logs.follow(order.job_id, 1, 0, is_lossless=True)
        await anext(records)  # and no more
        log = logs.directory / order.job_id / "1" / "0"

        async def size() -> int:
            await asyncio.sleep(0.3)
            return max(start for start, _ in shim.segments(str(log)))

        held = await size()
        assert held == await size(), "it waits"
        async with asyncio.timeout(DEADLINE_S):
            while await size() == held:
                pass
        bench.runner.perform(StopTask(order.job_id, 1, 5.0))
        exited = await bench.finish(order)
        assert exited.exits == (RankExit(0, 5),)
        assert bench.output(order).endswith(b"told\n")

"""Slurm on this machine beside our agents, in the same run: first lines and two hundred short jobs.

Needs root, munge, and the Slurm that comes first in PATH: Debian's package slurm-wlm, or one built from source, of
22.05 or 26.05.  An own munged, slurmctld and slurmd run on loopback from a temporary folder, with the machine passed
off as one node of 16 CPUs; nothing of an installed cluster is touched.
"""

import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.agent.testing import free_port, wait_until_sync
from tests.benchmarks.bench_swarm import first_line_ms, jobs_per_s
from tests.benchmarks.loopback import compiled_bytecode, settled_agents

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
SLOTS = 16
AGENTS = 4
RUNS = 11
SBATCH_RUNS = 5
ROUNDS = 3
JOBS = 200
SUBMITTERS = 4
DEADLINE_S = 120.0
POLL_S = 0.002
DEFAULT = ""
TUNED = (
    "SchedulerParameters=batch_sched_delay=0,sched_min_interval=1000,sched_interval=1,bf_interval=1,"
    "default_queue_depth=1000,partition_job_depth=1000\n"
)
Row = tuple[str, float, str]


def run() -> list[Row]:
    """(measure, median of several runs, unit); nothing, and why, where Slurm is not installed."""
    missing = [program for program in PROGRAMS if _find(program) is None]
    if missing or os.geteuid():
        why = f"missing: {', '.join(missing)} (Debian: slurm-wlm, munge)" if missing else "its daemons need root here"
        print(f"slurm: not measured: {why}")
        return []
    print(subprocess.run([_find("slurmctld") or "", "-V"], capture_output=True, text=True, check=False).stdout.strip())
    line_ms, jobs = _ours()
    with _cluster(DEFAULT) as folder:
        srun_ms = statistics.median([_srun_ms(folder) for _ in range(RUNS + 1)][1:])
        sbatch_ms = statistics.median([_sbatch_ms(folder) for _ in range(SBATCH_RUNS)])
        default = statistics.median([_jobs_per_s(folder) for _ in range(ROUNDS)])
    with _cluster(TUNED) as folder:
        tuned_sbatch_ms = statistics.median([_sbatch_ms(folder) for _ in range(SBATCH_RUNS)])
        tuned = statistics.median([_jobs_per_s(folder) for _ in range(ROUNDS)])
    return [
        ("slurm: srun to first line", srun_ms, "ms"),
        ("slurm: sbatch to first line", sbatch_ms, "ms"),
        ("slurm: sbatch to first line, tuned", tuned_sbatch_ms, "ms"),
        ("slurm: API submission to first line, ours in the same run", line_ms, "ms"),
        ("slurm: first line, ours as a share of srun", line_ms / srun_ms, "x"),
        ("slurm: first line, ours as a share of sbatch", line_ms / sbatch_ms, "x"),
        (f"slurm: {JOBS} jobs on {SLOTS} slots, default", default, "jobs/s"),
        (f"slurm: {JOBS} jobs on {SLOTS} slots, tuned", tuned, "jobs/s"),
        (f"slurm: {JOBS} jobs on {SLOTS} slots, ours in the same run", jobs, "jobs/s"),
        ("slurm: jobs a second, ours as a multiple of default", jobs / default, "x"),
        ("slurm: jobs a second, ours as a multiple of tuned", jobs / tuned, "x"),
    ]


def _ours() -> tuple[float, float]:
    with compiled_bytecode(), settled_agents(AGENTS, SLOTS // AGENTS) as agents:
        line_ms = first_line_ms(agents[0])
        return line_ms, statistics.median([jobs_per_s(agents) for _ in range(ROUNDS)])


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def _cluster(scheduling: str) -> Iterator[Path]:
    """A cluster of one node; ends what it started, by process."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        folder.chmod(0o755)  # clients of munged must reach its socket
        stack.callback(_end_steps, folder)
        _write_configuration(folder, scheduling)
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
        munged += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        _start(stack, folder, munged)
        wait_until_sync((folder / "munge.socket").exists, 10, "munged listens")
        _start(stack, folder, ["slurmctld", "-D", "-i", "-f", f"{folder}/slurm.conf"])
        _start(stack, folder, ["slurmd", "-D", "-f", f"{folder}/slurm.conf"])
        wait_until_sync(lambda: "idle" in _slurm(folder, "sinfo", "-h", "-o", "%T").stdout, 30, "the node is idle")
        yield folder


def _start(stack: ExitStack, folder: Path, words: list[str]) -> None:
    program = _find(words[0])
    assert program is not None
    with (folder / f"{words[0]}.out").open("wb") as output:
        process = subprocess.Popen(
            [program, *words[1:]], env=_environment(folder), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    stack.callback(_end, process)


def _end_steps(folder: Path) -> None:
    """Step daemons outlive slurmd; those of this cluster have its folder in their environment."""
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and str(folder).encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # it ended meanwhile


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _write_configuration(folder: Path, scheduling: str) -> None:
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1_024))
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(
        f"""ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
{scheduling}NodeName={host} NodeAddr=127.0.0.1 CPUs={SLOTS} State=UNKNOWN
PartitionName=bench Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    )
    (folder / "state").mkdir()
    (folder / "spool").mkdir()


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}


def _slurm(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, env=_environment(folder), cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def _srun_ms(folder: Path) -> float:
    started_s = time.perf_counter()
    with subprocess.Popen(
        ["srun", "-n1", "echo", "hello"], env=_environment(folder), cwd=folder, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        elapsed_ms = (time.perf_counter() - started_s) * 1_000
    assert line == b"hello\n", line
    return elapsed_ms


def _sbatch(folder: Path, output: Path, command: str) -> None:
    done = _slurm(folder, "sbatch", "-n1", f"--output={output}", f"--wrap={command}")
    assert done.returncode == 0, done.stderr


def _sbatch_ms(folder: Path) -> float:
    output = folder / "first-line"
    output.unlink(missing_ok=True)
    started_s = time.perf_counter()
    _sbatch(folder, output, "echo hello")
    _wait_for_bytes(output, 1)
    return (time.perf_counter() - started_s) * 1_000


def _jobs_per_s(folder: Path) -> float:
    """From the first submission until every job has left its mark."""
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    started_s = time.perf_counter()
    threads = [threading.Thread(target=_submit_many, args=(folder, marks)) for _ in range(SUBMITTERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _wait_for_bytes(marks, JOBS)
    return JOBS / (time.perf_counter() - started_s)


def _submit_many(folder: Path, marks: Path) -> None:
    for _ in range(JOBS // SUBMITTERS):
        _sbatch(folder, Path(os.devnull), f"printf x >> {marks}")


def _wait_for_bytes(path: Path, count: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists() or path.stat().st_size < count:
        assert time.monotonic() < deadline_s, f"{path.name} is not complete within {DEADLINE_S:g} s"
        time.sleep(POLL_S)

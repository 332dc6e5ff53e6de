"""Run by root on a machine that it may spoil: what holds jobs to their bookings.  A line a claim, or a traceback.

The machine has the agent's unit as `swarm-agent.service`, with two simulated GPUs and `task_processes_max = 64`.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import swarm_elastic.template
from swarm_agent.supervision.limits import TaskLimits
from swarm_agent.task import shim

GPU_FOLDER = Path("/run/gpus")  # where the agent of this machine is made to look
GROUPS = Path("/sys/fs/cgroup/system.slice")
LIMIT_S = 240.0
CLIENT = "import sys; from swarm_client.cli import main; sys.exit(main())"
HOG = "x = 'x' * 300_000_000"
FORKS = """
import os, sys, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
except OSError as error:
    print("refused:", error.strerror, flush=True)
    time.sleep(300)
"""
OPEN = """
import errno, sys
for path in ("/dev/null", "/dev/nvidia0", "/dev/nvidia1"):
    try:
        open(path)
        print(path, "opened")
    except OSError as error:
        print(path, errno.errorcode[error.errno])
"""
STRAY = """
import subprocess, sys
if "template" in str(sys.orig_argv):
    subprocess.Popen(["sleep", "3000"], start_new_session=True, env={})
def set_num_threads(n): pass
"""
TRAIN = f"""{OPEN}
import os, subprocess, time
subprocess.Popen(["sleep", "3000"], start_new_session=True, env={{}})
print("token", os.environ["MY_TOKEN"], flush=True)
time.sleep(3000)
"""


def swarm(*words: str, is_checked: bool = True) -> str:
    """What a command says."""
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env=os.environ | {"HOME": "/root", "SWARM_TOKEN_FILE": "/var/lib/swarm/token"},
    )  # fmt: skip
    assert done.returncode == 0 or not is_checked, (words, done)
    return done.stdout + (done.stderr if not is_checked else "")


def submit(*words: str) -> str:
    """The id of a new job, which its handle is a part of."""
    handle = swarm("submit", *words).split()[-1]
    return str(job(handle)["id"])


def job(job_id: str) -> dict:
    """Its document."""
    return json.loads(swarm("status", job_id, "-o", "json"))


def until(condition: Callable[[], object], claim: str) -> None:
    """Wait for it, then say it."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, claim
        time.sleep(0.5)
    print("HOLDS", claim, flush=True)


def scope(job_id: str) -> Path:
    """Of a task that runs."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := list(GROUPS.glob(f"swarm-{job_id}-*.scope"))):
        assert time.monotonic() < deadline_s, f"{job_id} has no scope"
        time.sleep(0.5)
    return found[0]


def events(group: Path) -> str:
    """Whether processes are in it, and whether they are frozen."""
    return (group / "ranks/cgroup.events").read_text()


def lend(job_id: str, until_s: float) -> None:
    """Time for its ranks, as the agent gives it."""
    folder = Path(f"/var/lib/swarm/tasks/{job_id}.1")
    (folder / "lease").write_bytes(shim.lease_text(until_s))
    (folder / "commands").write_text("lease\n")


def prepare_gpus() -> None:
    """Device files of two GPUs, and the driver's account of them; no device is behind them (ENXIO)."""
    for minor in range(2):
        folder = GPU_FOLDER / f"0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t Test\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n")
        device = Path(f"/dev/nvidia{minor}")
        os.mknod(device, stat.S_IFCHR, os.makedev(195, minor))
        device.chmod(0o666)


def check_memory() -> None:
    hog = submit("--mem", "100M", "--", "python3", "-c", HOG)
    child = submit("--mem", "100M", "--", "sh", "-c", f'python3 -c "{HOG}"; exit 3')
    for each in (hog, child):
        swarm("wait", each, is_checked=False)
    until(lambda: job(hog)["end_reason"] == "oom", "a job that takes more memory than it booked ends as oom")
    until(lambda: job(child)["end_reason"] == "oom", "so does one whose child was killed for it")
    told = swarm("logs", hog, is_checked=False)
    assert "--mem allows 100 MiB" in told, told


def check_processes() -> None:
    bomb = submit("--", "python3", "-c", FORKS)
    until(lambda: "refused: Resource temporarily unavailable" in swarm("logs", bomb), "a task's processes are limited")
    assert "fine" in swarm("run", "--", "sh", "-c", "sh -c 'echo fine'")
    print("HOLDS its neighbour forks as it likes", flush=True)
    group = scope(bomb)
    swarm("cancel", bomb)
    until(lambda: not group.exists(), "a cancelled task is gone with its scope")


def check_devices() -> None:
    told = swarm("run", "--", "python3", "-c", OPEN)
    assert told.splitlines()[-3:] == ["/dev/null opened", "/dev/nvidia0 EPERM", "/dev/nvidia1 EPERM"], told
    print("HOLDS a task without GPUs can open none", flush=True)


def check_restart() -> None:
    runs = submit("--", "sh", "-c", "setsid sleep 3000 & exec sleep 3000")
    group = scope(runs)
    until(lambda: job(runs)["state"] == "running", "a job runs")
    pids = (group / "ranks/cgroup.procs").read_text()
    assert len(pids.split()) == 2, pids
    subprocess.run(["systemctl", "restart", "swarm-agent"], check=True)
    assert (group / "ranks/cgroup.procs").read_text() == pids
    until(
        lambda: job(runs)["attempt"] == 1 and job(runs)["state"] == "running", "it runs on when the agent is restarted"
    )
    subprocess.run(["systemctl", "stop", "swarm-agent"], check=True)
    lend(runs, shim.now())
    until(lambda: "frozen 1" in events(group), "it is frozen when its time is over")
    lend(runs, shim.INFINITE)
    until(lambda: "frozen 0" in events(group), "it goes on when it is given more")
    subprocess.run(["systemctl", "start", "swarm-agent"], check=True)
    assert (group / "ranks/cgroup.procs").read_text() == pids
    os.kill(int((group / "cgroup.procs").read_text()), 9)
    until(lambda: not group.exists(), "nothing is left when the shim is killed")


def check_waiting() -> None:
    """Beside a worker of an elastic job one waits, with imports that are the job's own code here."""
    folder = Path("/tmp/waiting")
    for module in ("torch/_dynamo", "torch/utils/data", "swarm_elastic"):
        (folder / module).mkdir(parents=True)
    for module in ("torch/_dynamo", "torch/utils", "torch/utils/data", "swarm_elastic"):
        (folder / module / "__init__.py").touch()
    shutil.copy(swarm_elastic.template.__file__, folder / "swarm_elastic")
    (folder / "swarm_elastic/_elastic.py").touch()
    (folder / "torch/__init__.py").write_text(STRAY)
    (folder / "train.py").write_text(TRAIN)
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    words = ("--elastic", "--gpus", "1", "--mem", "200M", "--env", f"PYTHONPATH={folder}", "--env", "MY_TOKEN=hush")
    runs = submit(*words, "--", "/usr/bin/python3", f"{folder}/train.py")
    until(lambda: list(GROUPS.glob("swarm-warm-*.scope")), "what waits for workers is in a scope of its own")
    (group,) = GROUPS.glob("swarm-warm-*.scope")

    def processes() -> dict[int, str]:
        pids = map(int, (group / "cgroup.procs").read_text().split())
        return {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

    until(lambda: sorted(processes().values()) == ["S", "T"], "it stands still, and what its imports began is ended")
    waiting = next(pid for pid, state in processes().items() if state == "T")
    assert b"hush" not in Path(f"/proc/{waiting}/environ").read_bytes()
    assert held_to(group) == [4 * 2**30, 10]
    swarm("scale", runs, "2")
    until(lambda: str(waiting) in tasks_pids(runs), "it becomes a worker, in the scope of its task")
    until(lambda: not group.exists(), "its own is gone then")
    assert [held_to(each) for each in GROUPS.glob(f"swarm-{runs}-*.scope")] == [[200 * 2**20, 100]] * 2
    assert os.getpriority(os.PRIO_PROCESS, waiting) == 0
    until(lambda: swarm("logs", runs).count("token hush") == 2, "it has what its job is given")
    assert [swarm("logs", runs).count(f"/dev/nvidia{minor} EPERM") for minor in range(2)] == [2, 2]
    until(lambda: list(GROUPS.glob("swarm-warm-*.scope")), "another one waits")
    (group,) = GROUPS.glob("swarm-warm-*.scope")
    until(lambda: sorted(processes().values()) == ["S", "T"], "it stands still as well")
    os.kill(next(pid for pid, state in processes().items() if state == "S"), 9)
    until(lambda: not group.exists(), "nothing is left of one whose shim is killed")
    assert len(tasks_pids(runs)) == 4, "two workers and what they have started"
    swarm("cancel", runs, "--grace", "0", is_checked=False)
    until(lambda: not list(GROUPS.glob(f"swarm-{runs}-*.scope")), "the whole of its task ends, what it started as well")


def held_to(group: Path) -> list[int]:
    """The most memory and the share of the CPUs of a scope."""
    return [int((group / name).read_text()) for name in ("memory.max", "cpu.weight")]


def tasks_pids(job_id: str) -> list[str]:
    """Of all its tasks here."""
    return [
        pid for found in GROUPS.glob(f"swarm-{job_id}-*.scope/ranks/cgroup.procs") for pid in found.read_text().split()
    ]


def main() -> None:
    prepare_gpus()
    subprocess.run(["systemctl", "start", "swarm-agent"], check=True)
    complaint = TaskLimits.find(64).complaint
    assert not complaint, complaint
    assert "jobs are held to what they booked" in swarm("doctor", "-o", "wide", is_checked=False)
    print("HOLDS this machine limits tasks", flush=True)
    check_memory()
    check_processes()
    check_devices()
    check_waiting()
    check_restart()
    print("ALL HOLD", flush=True)


if __name__ == "__main__":
    main()

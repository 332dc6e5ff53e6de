"""What a change of members costs a training that goes on: pauses in steps, by the moments at which steps were done.

Workers are processes with real PyTorch on this one machine, with one thread each, and plans come through the agent's
own task socket.  A pause is the time from the last step of the old members to the first of the new ones on a rank that
is in both, less one step of the new ones, in steps of the old ones.  So a slower step with more workers on the same
cores does not count, and the copy of the state does.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.elastic.job import Job, Template, elastic_job, until
from tests.elastic.testing import TRAIN

SCRIPT = Path(__file__).with_name("elastic_worker.py")
MODELS = {"3 M": "3x1024", "25 M": "24x1024", "100 M": "24x2048"}
RUNS = 5
SETTLED_STEPS = 15
TORCHRUN_RUNS = 2
DEADLINE_S = 120.0
RESULT_S = 3_600.0  # of a large model on few cores

Row = tuple[str, float, str]


def run() -> Iterator[Row]:
    """(measure, value, unit): medians, and the longest of the runs, as they come; all take half an hour.

    BENCH_MODELS names the models, as `25M` or `3M,100M`.
    """
    for name in _chosen(os.environ.get("BENCH_MODELS") or ",".join(MODELS)):
        yield from _model(name)


def _chosen(text: str) -> list[str]:
    known = {name.replace(" ", ""): name for name in MODELS}
    asked = [each.replace(" ", "").upper() for each in text.split(",")]
    unknown = [each for each in asked if each not in known]
    if unknown:
        raise SystemExit(f"bench: BENCH_MODELS has no {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[each] for each in asked]


def short() -> Iterator[Row]:
    """The smallest model alone."""
    return _model("3 M")


def _model(name: str) -> Iterator[Row]:
    shape = MODELS[name]
    with _template() as template:
        yield f"{name}: a step of two workers", _step_s(template, shape) * 1e3, "ms"
        for label, goal, change in CHANGES:
            found = [_changed(template, shape, change) for _ in range(RUNS)]
            yield f"{name}: {label}, median of {RUNS} ({goal})", statistics.median(found), "steps"
            yield f"{name}: {label}, longest", max(found), "steps"
        yield from _copy(template, name, shape)
        yield from _overhead(template, name, shape)
    joins = [_torchrun(shape) for _ in range(TORCHRUN_RUNS)]
    yield f"{name}: the same join by torchrun", statistics.median(pause for pause, _ in joins), "steps"
    yield f"{name}: steps that torchrun's join did again", statistics.median(again for _, again in joins), "steps"


@contextmanager
def _template() -> Iterator[Template]:
    template = Template()
    try:
        yield template
    finally:
        template.close()


@contextmanager
def _job(template: Template, shape: str, mode: str, **env: str) -> Iterator[Job]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-elastic-") as folder,
        elastic_job(Path(folder), template, SCRIPT.read_text(), MODEL=shape, MODE=mode, **env) as job,
    ):
        yield job


# Pauses.


def _changed(template: Template, shape: str, change: Callable[[Job], float]) -> float:
    with _job(template, shape, "train") as job:
        return change(job)


def _join(job: Job) -> float:
    _settle(job, "a", "b")
    _come(job, "c")
    return _pause(job, "a", _settle(job, "a", "b", "c"))


def _leave(job: Job) -> float:
    _settle(job, "a", "b", "c")
    return _pause(job, "a", _settle(job, "a", "b"))


def _replace(job: Job) -> float:
    _settle(job, "a", "b")
    _come(job, "c")
    return _pause(job, "a", _settle(job, "a", "c"))


def _move(job: Job) -> float:
    """Both plans: the pause of the old worker at the first, of the new one at the second."""
    _settle(job, "a")
    _come(job, "b")
    first = _pause(job, "a", _settle(job, "a", "b"))
    return first + _pause(job, "b", _settle(job, "b"))


def _kill(job: Job) -> float:
    """From the signal to the first new step, with a step that is done again in it."""
    _settle(job, "a", "b", "c")
    killed_s = time.monotonic()
    job["b"].signal(signal.SIGKILL)
    version = _settle(job, "a", "c")
    lines = job["a"].lines
    first_s = min(line["t"] for line in lines if line["version"] == version)
    return (first_s - killed_s) / _usual_s(lines, version - 1)


CHANGES: list[tuple[str, str, Callable[[Job], float]]] = [
    ("join, pause of those that train", "<= 1 and the copy", _join),
    ("leave, pause of those that stay", "<= 1.5", _leave),
    ("replace one of two, pause", "<= 1", _replace),
    ("move a job of one, pauses of both plans", "<= 4", _move),
    ("kill -9, until the first new step is done", "<= 3", _kill),
]


def _come(job: Job, *names: str) -> None:
    job.start(*(name for name in names if name not in job.workers))
    job.ready(*names)


def _settle(job: Job, *names: str) -> int:
    _come(job, *names)
    return job.switch(*names, past=SETTLED_STEPS, timeout_s=RESULT_S)


def _pause(job: Job, name: str, version: int) -> float:
    lines = job[name].lines
    last_s = max(line["t"] for line in lines if line["version"] == version - 1)
    first_s = min(line["t"] for line in lines if line["version"] == version)
    return (first_s - last_s - _usual_s(lines, version)) / _usual_s(lines, version - 1)


def _usual_s(lines: list[dict], version: int) -> float:
    moments = [line["t"] for line in lines if line["version"] == version][-SETTLED_STEPS:]
    return statistics.median(after - before for before, after in itertools.pairwise(moments))


def _step_s(template: Template, shape: str) -> float:
    with _job(template, shape, "train") as job:
        version = _settle(job, "a", "b")
        return _usual_s(job["a"].lines, version)


# Beside plain DDP, a plain socket and torchrun.


def _overhead(template: Template, name: str, shape: str) -> list[Row]:
    with _job(template, shape, "overhead", MASTER_ADDR="127.0.0.1") as job:
        job.env["MASTER_PORT"] = str(job.free_port())
        _come(job, "a", "b")
        job.publish("a", "b")
        took = _result(job, "a")
    rows = []
    for what, label in (("took", "time"), ("computed", "CPU time")):
        pairs = zip(took[what]["elastic"], took[what]["plain"], strict=True)
        first, median, third = statistics.quantiles((own / plain for own, plain in pairs), n=4)
        rows += [
            (f"{name}: {label} of a step against plain DDP, median of pairs (<= 1.02)", median, ""),
            (f"{name}: {label} of a step against plain DDP, first quarter", first, ""),
            (f"{name}: {label} of a step against plain DDP, third quarter", third, ""),
        ]
    return rows


def _copy(template: Template, name: str, shape: str) -> list[Row]:
    with _job(template, shape, "copy") as job:
        job.env["MASTER_PORT"] = str(job.free_port())
        job.start("a", RANK="0")
        job.start("b", RANK="1")
        took = _result(job, "a")
    rates = {how: took["bytes"] / statistics.median(took[how][1:]) / 1e9 for how in ("group", "socket")}
    return [
        (f"{name}: copy of the state", rates["group"], "GB/s"),
        (f"{name}: copy of the state against a plain socket (>= 0.5)", rates["group"] / rates["socket"], ""),
    ]


def _result(job: Job, name: str) -> dict:
    until(lambda: any("done" in line for line in job[name].lines) or job[name].code, job.problems, RESULT_S)
    return job[name].lines[-1]


def _torchrun(shape: str) -> tuple[float, float]:
    """The pause of a job of one worker that a second one joins, in its steps, and how many steps were done again."""
    with tempfile.TemporaryDirectory(prefix="bench-torchrun-") as folder:
        log, launchers = Path(folder) / "steps.log", []
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{Job.free_port()}", "--rdzv-id=1")
        options = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-conf=last_call_timeout=1")
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "client")}
        env |= {"MODEL": shape, "MODE": "torchrun", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [str(TRAIN.with_name("torchrun")), *rendezvous, *options, str(SCRIPT)]

        def start() -> None:
            with (Path(folder) / f"launcher-{len(launchers)}").open("w") as out:
                launchers.append(subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out))

        def known() -> list[dict]:
            return [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []

        try:
            start()
            until(lambda: len(known()) > 3 * SETTLED_STEPS, lambda: "torchrun trains", RESULT_S)
            start()
            until(
                lambda: sum(line["version"] == 2 for line in known()) > SETTLED_STEPS,
                lambda: "torchrun's join",
                RESULT_S,
            )
        finally:
            for launcher in launchers:
                launcher.terminate()
            for launcher in launchers:
                launcher.wait(DEADLINE_S)
        old, new = ([line for line in known() if line["version"] == world] for world in (1, 2))
        last = max(old, key=lambda line: line["t"])
        first = next(line for line in new if line["step"] > last["step"])
        again = last["step"] - new[0]["step"] + 1
        usual_s = _usual_s(old, 1)
        return (first["t"] - last["t"] - _usual_s(new, 2)) / usual_s, again

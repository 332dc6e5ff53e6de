"""Reads what people bring along from Slurm: GPUs as `--gres` has them, and batch scripts with `#SBATCH` lines.

A batch script runs once, on one node, with all that it asked for, as under Slurm.  One that calls `srun`, or asks for
several nodes, is refused with the command line that does the same here.
"""

# Importing pathlib costs a tenth of what `swarm run` may take.
# ruff: noqa: PTH113, PTH118, PTH119, PTH123

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swarm_client.failure import UsageError
from swarm_client.quantity import clock, deadline, show_moment, size, whole

SCRIPT_BYTES_READ = 2**18
MARK = "#SBATCH"
SHORT = {
    "A": "account", "C": "constraint", "D": "chdir", "G": "gpus", "H": "hold", "J": "job-name", "L": "licenses",
    "N": "nodes", "O": "overcommit", "Q": "quiet", "W": "wait", "a": "array", "c": "cpus-per-task", "d": "dependency",
    "e": "error", "i": "input", "k": "no-kill", "n": "ntasks", "o": "output", "p": "partition", "q": "qos",
    "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip
FLAGS = (
    "contiguous", "exclusive", "hold", "no-kill", "no-requeue", "overcommit", "oversubscribe", "parsable", "quiet",
    "requeue", "spread-job", "use-min-nodes", "verbose", "wait",
)  # fmt: skip
READ = (
    "chdir", "cpus-per-gpu", "cpus-per-task", "deadline", "exclude", "export", "gpus", "gpus-per-node", "gpus-per-task",
    "gres", "job-name", "mem", "mem-per-cpu", "mem-per-gpu", "nodelist", "nodes", "ntasks", "ntasks-per-node",
    "requeue", "time",
)  # fmt: skip
REFUSED = {
    "array": "submit it once for each index: for i in 0 1 2; do swarm submit job.sh $i; done",
    "dependency": "wait for the other job: swarm wait JOB && swarm submit job.sh",
    "input": "read the file in the script",
}
GPUS = re.compile(r"(?:gres/)?gpu(?:[:=]([A-Za-z][\w.-]*))?(?:[:=](\d+))?(?:\([^()]*\))?", re.ASCII)
FROM_NOW = re.compile(r"now\+(\d+)(seconds?|minutes?|hours?|days?)?", re.ASCII)
NEVER_AGAIN = {"restartable": False, "max_restarts": 0}
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun")
OF_TORCH = ("torchrun", "deepspeed", "accelerate")
SRUN = re.compile(r"(?:^|[;&|(])\s*(?:exec\s+)?srun(?=\s|$)", re.MULTILINE)
OF_MPI = re.compile(rb"^\s*(?:from|import)\s+(mpi4py|horovod)\b", re.MULTILINE)


def gres(text: str) -> dict[str, Any]:
    """Keys of a job for `gpu:2`, `gpu:a100:2` or `gpu`; nothing else is counted here."""
    found = GPUS.fullmatch(text.strip())
    if not found:
        raise ValueError("must be gpu:N or gpu:TYPE:N")
    return _gpus(found[1] or "", found[2] or "1")


def _gpus(kind: str, count: str) -> dict[str, Any]:
    return {"gpus": whole(0, 4_096)(count), **({"gpu_type": kind} if kind else {})}


def minutes(text: str) -> float:
    """Seconds of Slurm's times: a bare number is minutes."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return 0.0
    return whole(0, 10**7)(text) * 60.0 if text.isdecimal() else clock(text)


def _deadline(text: str) -> float:
    """Seconds since 1970 of Slurm's `now+2hours` as well."""
    found = FROM_NOW.fullmatch(text.strip().lower())
    return deadline(f"{found[1]}{(found[2] or 's')[0]}" if found else text)


def _size(text: str) -> int:
    return size(f"{text}M" if text.isdecimal() else text)


class BatchScript:
    """A script with `#SBATCH` lines: `values` are keys of a job, `passed_over` the options that mean nothing here."""

    def __init__(self, file: str, words: Sequence[str], cwd: str) -> None:
        self._file = file
        self._options: dict[str, tuple[str, int]] = {}  # name -> value, line
        self.passed_over: list[str] = []
        self._lines = _lines(os.path.join(cwd, file))
        for number, line in enumerate(self._lines, 1):
            if line.startswith(MARK):
                self._take(line.removeprefix(MARK), number)
            elif line.strip() and not line.startswith("#"):
                break
        shebang = self._lines[0].removeprefix("#!").split() if self._lines[0].startswith("#!") else []
        self.values: dict[str, Any] = {"slurm_env": True, "command": [*(shebang or ["bash"]), file, *words]}
        try:
            self._read_shape()
            self._read_rest()
        except ValueError as error:
            raise UsageError(f"{file}: {error}", f"correct its {MARK} line, or give the option here") from error
        self._refuse_several()

    def _take(self, text: str, number: int) -> None:
        words = shlex.split(text, comments=True)
        while words:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                name, value = SHORT.get(word[1:2], word), word[2:].removeprefix("=")
            if not value and not equals and name not in FLAGS and words and not words[0].startswith("-"):
                value = words.pop(0)
            if name == "no-requeue":
                name, value = "requeue", "no"  # the last of the two counts
            if name in REFUSED:
                raise UsageError(f"{self._file}:{number}: --{name} is not available in this version", REFUSED[name])
            if name in READ:
                self._options[name] = (value, number)
            else:
                self.passed_over.append(f"--{name}={value}" if value else f"--{name.lstrip('-')}")

    def _option(self, name: str, read: Any, default: Any = None) -> Any:
        if name not in self._options:
            return default
        value, number = self._options[name]
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f"line {number}: --{name}={value} {error}") from None

    def _read_shape(self) -> None:
        """How much it asks for in all: one rank of it has everything."""
        count = whole(1, 4_096)
        self._nodes = self._option("nodes", lambda text: count(text.partition("-")[0]), 1)
        tasks = self._option("ntasks", count) or self._nodes * self._option("ntasks-per-node", count, 1)
        self._tasks = tasks
        typed = re.compile(r"(?:([A-Za-z][\w.-]*):)?(\d+)", re.ASCII)

        def of_type(text: str) -> dict[str, Any]:
            found = typed.fullmatch(text)
            if not found:
                raise ValueError("must be N or TYPE:N")
            return _gpus(found[1] or "", found[2])

        gpus: dict[str, Any] = {}
        for name, times in (
            ("gres", self._nodes),
            ("gpus-per-node", self._nodes),
            ("gpus-per-task", tasks),
            ("gpus", 1),
        ):
            if found := self._option(name, gres if name == "gres" else of_type):
                gpus = {**found, "gpus": found["gpus"] * times}
        self.values |= gpus if gpus.get("gpus") else {}
        self.values["ranks"] = 1
        held = gpus.get("gpus", 0)
        cpus = self._option("cpus-per-task", count, 0) * tasks or self._option("cpus-per-gpu", count, 0) * held
        memory = self._option("mem", _size, 0) or self._option("mem-per-cpu", _size, 0) * max(cpus, tasks)
        memory = memory or self._option("mem-per-gpu", _size, 0) * held
        self.values |= {key: value for key, value in (("cpus", cpus), ("mem", memory)) if value}

    def _read_rest(self) -> None:
        self.values["name"] = self._option("job-name", str, os.path.basename(self._file))[:63]
        for key, name, read in (
            ("time", "time", minutes),
            ("deadline", "deadline", _deadline),
            ("workdir", "chdir", str),
            ("node", "nodelist", _hosts),
            ("exclude", "exclude", _hosts),
        ):
            if value := self._option(name, read):
                self.values[key] = value
        if "requeue" in self._options:
            self.values |= {"restartable": True} if self._options["requeue"][0] != "no" else NEVER_AGAIN
        exported = [
            part for part in self._option("export", str, "").split(",") if part.upper() not in ("ALL", "NONE", "")
        ]
        if exported:
            self.values["env"] = {name: value if equals else None for name, equals, value in map(_parted, exported)}

    def _refuse_several(self) -> None:
        called = next((number for number, line in enumerate(self._lines, 1) if SRUN.search(line)), 0)
        if called:
            problem = f"{self._file}:{called}: srun is not here: each rank of a job runs the whole script"
            remedy = f"write its command without srun, and then: {self._spoken(self._tasks)}"
        elif self._nodes > 1:
            problem = f"{self._file} asks for {self._nodes} nodes, and would run on the first of them alone"
            count = self.values.get("gpus", 0)
            remedy = f"to run it once on each node: {self._spoken(count or self._nodes, '--per-node' if count else '')}"
        else:
            return
        raise UsageError(problem, remedy)

    def _spoken(self, ranks: int, shape: str = "") -> str:
        """The command line that asks for the same, with so many ranks."""
        values, words = self.values, ["swarm", "submit"]
        words += ["-g", str(values["gpus"])] if values.get("gpus") else []
        words += ["--ranks", str(ranks)] if values.get("gpus", ranks) != ranks or not values.get("gpus") else []
        words += ["--gpu-type", values["gpu_type"]] if values.get("gpu_type") else []
        words += ["-c", str(max(1, values["cpus"] // ranks))] if values.get("cpus") else []
        words += ["--mem", f"{max(1, values['mem'] // 2**20 * self._nodes // ranks)}M"] if values.get("mem") else []
        words += [shape] if shape else []
        words += ["-t", f"{values['time'] / 60:g}m"] if values.get("time") else []
        words += ["--deadline", show_moment(values["deadline"])] if values.get("deadline") else []
        words += ["--restartable"] if values.get("restartable") else []
        words += ["--no-restartable", "--max-restarts", "0"] if values.get("restartable") is False else []
        words += ["-n", values["name"], "--slurm-env", "--", *values["command"]]
        return shlex.join(words)

    def told(self) -> str:
        """What was made of it, in a sentence."""
        passed = ", ".join(self.passed_over)
        output = " (`swarm logs` has what it writes)" if "--output" in passed or "--error" in passed else ""
        text = f"{self._file}: read as {self._spoken(1)}"
        return f"{text}; passed over: {passed}{output}" if passed else text


def _parted(text: str) -> tuple[str, str, str]:
    return text.partition("=")


def _lines(file: str) -> list[str]:
    try:
        with open(file, "rb") as stream:
            return stream.read(SCRIPT_BYTES_READ).decode("utf-8", "replace").splitlines() or [""]
    except OSError:
        return [""]


def is_batch_script(file: str) -> bool:
    """A file with `#SBATCH` lines."""
    return os.path.isfile(file) and any(line.startswith(MARK) for line in _lines(file))


def _hosts(text: str) -> list[str]:
    """Names of `a,gpu[1-3,07]`."""
    names: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", text):
        before, bracket, rest = part.partition("[")
        inner, _, after = rest.partition("]")
        for each in inner.split(",") if bracket else [""]:
            first, dash, last = each.partition("-")
            if not dash:
                names.append(f"{before}{first}{after}")
                continue
            low, high = whole(0, 10**6)(first), whole(0, 10**6)(last)
            names += [f"{before}{number:0{len(first)}}{after}" for number in range(low, min(high, low + 511) + 1)]
    return names


def launch_notes(spec: Mapping[str, Any], folder: str) -> Iterator[str]:
    """Of a command that starts processes itself, or meets others in a way that the ranks here do not."""
    ranks, command = max(spec["ranks"], spec.get("ranks_most") or 0), spec["command"]
    first = os.path.basename(command[0])
    scripts = ["\n".join(_lines(os.path.join(folder, word))) for word in command if word.endswith(".sh")]
    if first == "srun" or any(SRUN.search(text) for text in (*scripts, *command[1:])):
        yield "srun is Slurm's, and is on no node as a rule: each rank runs the command itself, so leave it out"
    if ranks < 2 or spec.get("per_node"):
        return
    module = command[command.index("-m") + 1] if "-m" in command[:-1] and first.startswith("python") else ""
    if first in LAUNCHERS:
        yield f"each of {ranks} ranks runs {first} of its own; for one, on one node: --ranks 1, and {first} -np {ranks}"
    elif first in OF_TORCH or module in ("torch.distributed.run", "torch.distributed.launch"):
        yield f"each of {ranks} ranks runs {module or first} of its own; --per-node starts one on each node"
    for word in command:
        found = OF_MPI.search("\n".join(_lines(os.path.join(folder, word))).encode()) if word.endswith(".py") else None
        if found:
            by = f"`--ranks 1 -- mpirun -np {ranks} python {word}` runs them on one node"
            yield f"{word} imports {found[1].decode()}, and no MPI starts ranks here: each would be alone; {by}"

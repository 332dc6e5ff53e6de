"""Dike's choice of hosts against the best of all choices, measured: real trainings on two kinds of hosts.

Hosts are namespaces with links of a speed and a part of a core; what a kind lacks against the other is told below.
Each number of hosts of each kind trains each model, several times, of which the least time counts: whatever else runs
on this machine makes steps longer.  Finished measurements are lines of a file, under a digest of what trains; what the
file has is not measured again.
"""

import csv
import hashlib
import json
import select
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from swarmsched.estimate import SpeedPoint, StepCost
from swarmsched.ids import NodeId
from swarmsched.models.hosts import MBIT, Offer, corrected
from swarmsched.policies.hosting import choose
from tests.testbed import netns
from tests.testbed.netns import Host, Network, run

ROOT = Path(__file__).resolve().parents[2]
CPU = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
CORE_FLOPS = 80e9
"""Of a core at 2.5 GHz with two units of 256 bits: what a data sheet would tell."""
MEMORY_BYTES = 8e9
PORT = 29_400
PATIENCE_S = 180.0


class NotMeasurable(Exception):
    """Nothing can be measured here, and why."""


class Kind(NamedTuple):
    """Of hosts: how many, the part of a core of each, and its link."""

    hosts: int
    cores: float
    mbit_s: int


FAST, SLOW = Kind(3, 0.12, 200), Kind(3, 0.08, 50)
Layout = tuple[int, int]
"""Hosts of each kind, with a rank each."""


class Plan(NamedTuple):
    """How much is measured."""

    models: tuple[str, ...] = ("transformer", "cnn", "perceptron", "tiny")
    runs: int = 2
    seconds: float = 1.0
    fast: Kind = FAST
    slow: Kind = SLOW

    @property
    def layouts(self) -> list[Layout]:
        every = product(range(self.fast.hosts + 1), range(self.slow.hosts + 1))
        return [each for each in every if any(each)]


QUICK = Plan(("transformer", "perceptron"), 1, 0.5, FAST._replace(hosts=1), SLOW._replace(hosts=1))


def why_not() -> str:
    """Why nothing can be measured here; empty where it can."""
    if reason := netns.why_not():
        return reason
    return "" if (CPU / "cgroup.procs").exists() else f"needs the controller of cores at {CPU}"


class Book:
    """What was measured: seconds of steps by model and layout, and the work of a step as torch counts it."""

    def __init__(self, path: Path, plan: Plan, trainer: Path) -> None:
        self._path, self._plan, self._trainer = path, plan, trainer
        text = b"".join((ROOT / "tests/science" / name).read_bytes() for name in ("rank.py", "outer.py"))
        told = f"{plan.fast._replace(hosts=0)} {plan.slow._replace(hosts=0)} {plan.seconds}"
        self.digest = hashlib.blake2b(text + told.encode(), digest_size=6).hexdigest()

    @cached_property
    def _lines(self) -> list[list[str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as file:
            return [line[1:] for line in csv.reader(file) if line[0] == self.digest]

    def complete(self) -> None:
        """Measure what the file does not have."""
        wanted = product(range(self._plan.runs), self._plan.models, self._plan.layouts)
        missing = [each for each in wanted if len(self.times(each[1], each[2])) <= each[0]]
        if not missing:
            return
        if reason := why_not():
            raise NotMeasurable(reason)
        with _ranks(self._plan, self._trainer) as (hosts, ranks):
            for name, told in ranks[0].works.items():
                self._put("work", name, told)
            for at, (_, model, (fast, slow)) in enumerate(missing):
                chosen = [*range(fast), *range(self._plan.fast.hosts, self._plan.fast.hosts + slow)]
                store = (hosts[chosen[0]].address, PORT + at)
                words = {"model": model, "size": len(chosen), "store": store, "seconds": self._plan.seconds}
                for number, rank in enumerate(chosen):
                    ranks[rank].tell({**words, "rank": number})
                answers = [ranks[rank].heard() for rank in chosen]
                self._put("step", model, str(fast), str(slow), f"{answers[0]:.6g}")

    def _put(self, *words: str) -> None:
        self._lines.append(list(words))
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow([self.digest, *words])

    def times(self, model: str, layout: Layout) -> list[float]:
        """Seconds of a step, of each run."""
        place = ["step", model, *map(str, layout)]
        return [float(line[4]) for line in self._lines if line[:4] == place]

    def work(self, model: str) -> StepCost:
        told = next(line[2] for line in self._lines if line[:2] == ["work", model])
        figures = {name: float(value) for name, _, value in (part.partition("=") for part in told.split(","))}
        return StepCost(int(figures.pop("local_batch")), **figures)  # type: ignore[arg-type]  # figures of a model

    def speed(self, model: str, layout: Layout) -> float:
        """Samples a second, as measured."""
        return sum(layout) * self.work(model).local_batch / min(self.times(model, layout))


class Rank:
    """A process on a host."""

    def __init__(self, host: Host, group: Path, trainer: Path) -> None:
        self._host = host
        call = host.command(str(trainer), "-m", "tests.science.rank", str(group))
        paths = f"{ROOT}:{ROOT / 'client'}"
        variables = {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        self._process = subprocess.Popen(
            call, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.works: Mapping[str, str] = {}

    def tell(self, words: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def heard(self) -> Any:
        """Its answer."""
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline() if is_there else ""
        if not is_there:
            raise RuntimeError(f"a rank has not answered within {PATIENCE_S:g} s")
        if not line:
            raise RuntimeError(f"a rank has ended with {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """Whatever it and its child do."""
        with self._process:
            netns.end_processes(self._host.namespace)


@contextmanager
def _ranks(plan: Plan, trainer: Path) -> Iterator[tuple[Sequence[Host], Sequence[Rank]]]:
    """Hosts, the fast ones first, with a rank on each that is ready to be told what to train."""
    kinds = [kind for kind in (plan.fast, plan.slow) for _ in range(kind.hosts)]
    with ExitStack() as stack:
        network = stack.enter_context(Network.build(len(kinds)))
        ranks = []
        for host, kind in zip(network.hosts, kinds, strict=True):
            shape = ("tbf", "rate", f"{kind.mbit_s}mbit", "burst", "64kb", "latency", "400ms")
            run("tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", "root", *shape)
            group = _own_group() / host.namespace
            group.mkdir(exist_ok=True)
            stack.callback(group.rmdir)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(kind.cores * PERIOD_US)))
            ranks.append(Rank(host, group, trainer))
            stack.callback(ranks[-1].end)
        for rank in ranks:
            rank.works = rank.heard()
        yield network.hosts, ranks


def _own_group() -> Path:
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    return CPU / next(
        (line.split(":", 2)[2].lstrip("/") for line in lines if "cpu" in line.split(":")[1].split(",")), ""
    )


# The choice.


def chosen(work: StepCost, plan: Plan) -> Layout:
    """What the model predicts to be the fastest."""
    offers = [
        Offer(
            NodeId(f"{name}{at}"), 1, 2, MEMORY_BYTES, kind.cores * CORE_FLOPS, network_bytes_per_s=kind.mbit_s * MBIT
        )
        for name, kind in (("fast", plan.fast), ("slow", plan.slow))
        for at in range(kind.hosts)
    ]
    best = choose(work, offers, range(1, len(offers) + 1))
    assert best is not None
    names = [host.node[:4] for host, tasks in best.layout if tasks.workers]
    return names.count("fast"), names.count("slow")


def measured_there(work: StepCost, layout: Layout, step_s: float, plan: Plan) -> StepCost:
    """The work as the first steps on the hosts of a layout show it: its slowest hosts, and its slowest link."""
    slowest = plan.slow if layout[1] else plan.fast
    ranks = sum(layout)
    point = SpeedPoint(ranks, ranks, work.local_batch, step_s)
    return corrected(work, [point], slowest.cores * CORE_FLOPS, slowest.mbit_s * MBIT)


def table(path: Path, trainer: Path, *, is_quick: bool = False) -> str:
    """The rows of docs/research/results.md."""
    plan = QUICK if is_quick else Plan()
    book = Book(path, plan, trainer)
    book.complete()
    told = ["model, MB moved", "best of all, samples/s", "untrained", "after its first steps"]
    told += ["every host", "all fast hosts", "one fast host"]
    lines = [f"| {' | '.join(told)} |", "|---" * len(told) + "|"]
    for model in plan.models:
        work = book.work(model)
        best = max(plan.layouts, key=lambda layout: book.speed(model, layout))
        first = chosen(work, plan)
        then = chosen(measured_there(work, first, min(book.times(model, first)), plan), plan)
        rows = (first, then, (plan.fast.hosts, plan.slow.hosts), (plan.fast.hosts, 0), (1, 0))
        cells = [f"{book.speed(model, each) / book.speed(model, best):.3f} ({_named(each)})" for each in rows]
        begins = [f"{model}, {work.moved_bytes / 1e6:.2g}", f"{book.speed(model, best):.4g} ({_named(best)})"]
        lines.append(f"| {' | '.join([*begins, *cells])} |")
    spread = [(max(times) - min(times)) / median(times) for times in _all_times(book, plan)]
    kinds = " and ".join(
        f"{kind.hosts} with {kind.cores:g} core, {kind.mbit_s} Mbit/s" for kind in (plan.fast, plan.slow)
    )
    counts = f"{len(plan.layouts)} layouts, {plan.runs} runs of {plan.seconds:g} s each"
    lines += ["", f"Hosts: {kinds}; {counts}; runs of a layout differ by {median(spread):.1%} in the median."]
    return "\n".join(lines)


def _all_times(book: Book, plan: Plan) -> Iterator[list[float]]:
    for model, layout in product(plan.models, plan.layouts):
        yield book.times(model, layout)


def _named(layout: Layout) -> str:
    return f"{layout[0]} + {layout[1]}"

"""What `make science` runs: each line of `cells.csv` is a figure of a table, the mean over its workloads."""

import csv
import random
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any

from swarm_client.cli.replay import read_jobs, read_profiles, summary
from swarmsched.ids import NodeId
from swarmsched.replay.churn import churn
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.gossip import GossipReplay
from swarmsched.replay.perfect import PerfectReplay, Ticks
from swarmsched.replay.results import RunLog
from swarmsched.replay.setup import Measured, Replay, prepared
from swarmsched.replay.workload import TraceJob, gpu_batches, gpu_speeds, restart_costs
from swarmsched.simulator.network import NetworkFaults
from swarmsched.view import PolicySetting

SELECTED_BY = {"pollux_jobs": ("load", "workload"), "philly_jobs": ("cluster",), "muri_jobs": ("trace",)}
"""Columns of a trace that choose one workload of it."""
SMALL_AND_HUGE = "small_and_huge"
"""600 small jobs, and six that want the whole cluster: drawn here, not recorded."""
RESTART_COSTS = "restart_costs.csv"
QUICK_LOAD = 0.5
USUAL_PAUSE_S = 30.0


@dataclass(frozen=True)
class Line:
    """One line of the file, all of it text."""

    table: str
    policy: str
    parameters: str  # NAME=VALUE ...
    knows: str
    tick_s: str
    pause_s: str
    trace: str
    load: str  # empty: the trace has none
    workloads: str  # empty: the whole trace
    cluster: str  # servers x GPUs of each, of several classes with their names: 5x4t4+1x8a100
    profiles: str  # folder of the traces; empty: jobs of known length
    gpus_most: str  # MODEL=N ...
    reference: str  # table of the published results, and the policy in it; empty: the line on the exact view
    view: str = ""  # perfect or gossip: jobs ask for their least; empty: on the exact view as the trace says
    loss: str = ""  # ratio of messages
    churn: str = ""  # a table beside this one
    manner: str = ""  # how users submit, as --as has it
    kinds: str = ""  # as --kinds has it; empty: as the manner has it
    interference: str = ""
    costs: str = ""  # a table beside this one: seconds of a restart by model
    told: str = ""  # 1: cards tell what a restart has cost, as they do of jobs that report
    speeds: str = ""  # a table beside this one, of classes of GPUs
    lies: str = ""  # as --lies has it
    keeps: str = ""  # 1: jobs keep their batch

    @property
    def heading(self) -> str:
        """The column of its figure."""
        return f"load {self.load}" if self.profiles else self.trace

    @property
    def is_quick(self) -> bool:
        """Whether a run takes minutes: through gossip it takes 4 at load 0.5, and 9 or more at others."""
        return self.view != "gossip" or float(self.load) <= QUICK_LOAD

    @property
    def place(self) -> str:
        """What is replayed, and where."""
        named = [self.trace, f"load {self.load}" if self.load else "", self.workloads if not self.load else ""]
        servers = re.sub(r"(?<=\d)x(?=\d)", " x ", self.cluster).replace("+", " + ")
        return f"{' '.join(filter(None, named))} on {servers}"

    @property
    def how(self) -> str:
        """How jobs are submitted, and what their physics have beside those of others."""
        parts = [self.manner or "as in simulators"]
        parts += ["no --batch"] * bool(self.keeps)
        parts += [f"interference {self.interference}"] * bool(self.interference)
        parts += [f"restart costs by model{', told' if self.told else ''}"] * bool(self.costs)
        parts += [f"steps told wrong by a factor of {self.lies}"] * bool(self.lies)
        parts += [f"{self.pause_s} s a change"] * (float(self.pause_s) != USUAL_PAUSE_S)
        return ", ".join(parts)

    @property
    def servers(self) -> list[tuple[int, str]]:
        """GPUs of each server, and their class."""
        groups = [re.fullmatch(r"(\d+)x(\d+)(.*)", part) for part in self.cluster.split("+")]
        return [(int(one[2]), one[3]) for one in groups if one for _ in range(int(one[1]))]

    def cells(self, *, is_quick: bool) -> list["Cell"]:
        """One for each workload; the last one alone where it must be quick."""
        workloads = self.workloads.split() or [""]
        return [Cell(self, workload) for workload in (workloads[-1:] if is_quick else workloads)]


@dataclass(frozen=True)
class Cell:
    """One run."""

    line: Line
    workload: str

    @property
    def key(self) -> tuple[str, ...]:
        """All that its result depends on, beside the code."""
        one = self.line
        how = (one.policy, one.parameters, one.knows, one.tick_s, one.pause_s)
        where = (one.trace, one.load, self.workload, one.cluster, one.gpus_most, one.view, one.loss, one.churn)
        return (
            *how,
            *where,
            one.manner,
            one.kinds,
            one.interference,
            one.costs,
            one.told,
            one.speeds,
            one.lies,
            one.keeps,
        )

    def under(self, policy: str) -> "Cell":
        """The same workload under a policy that needs to know nothing, on the exact view; its jobs may be stopped."""
        plain = replace(self.line, policy=policy, parameters="", knows="perfect", view="", loss="", churn="", manner="")
        return Cell(plain, self.workload)

    def settings(self) -> Replay:
        """How it is run."""
        one = self.line
        servers = {NodeId(f"n{number:03}"): each for number, each in enumerate(one.servers, start=1)}
        models = {node: model for node, (_, model) in servers.items() if model}
        cluster = Fleet({node: gpus for node, (gpus, _) in servers.items()}, models)
        if one.churn:
            cluster.events = churn(one.churn, _lines(one.churn), cluster.gpus)
        return Replay(
            PolicySetting(one.policy, _numbers(one.parameters)),
            cluster,
            one.knows,
            Ticks(float(one.tick_s), float(one.pause_s), interference=float(one.interference or 0.0)),
            gpus_most={model: int(most) for model, most in _numbers(one.gpus_most).items()},
            view=one.view or "perfect",
            membership="swim" if one.churn or one.loss else "ideal",  # probes matter where something goes wrong
            faults=NetworkFaults(loss_ratio=float(one.loss or 0.0)),
            asks_least=bool(one.view),
            manner=one.manner,
            kind_by=one.kinds,
            restart_costs=restart_costs(one.costs, _lines(one.costs)) if one.costs else {},
            tells_costs=bool(one.told),
            lies=float(one.lies or 0.0),
            keeps_batch=bool(one.keeps),
            gpu_speeds=gpu_speeds(one.speeds, _lines(one.speeds)) if one.speeds else {},
            gpu_batches=gpu_batches(one.speeds, _lines(one.speeds)) if one.speeds else {},
        )

    def observed(self, traces: Path) -> RunLog:
        """Run it."""
        return self.prepared(traces).run()

    def prepared(self, traces: Path) -> PerfectReplay | GossipReplay:
        """Ready to run."""
        known = _profiles(str(traces / self.line.profiles)) if self.line.profiles else {}
        settings, own = self.settings(), traces / RESTART_COSTS
        if self.line.costs and own.exists():  # of other models than those of the table beside this file
            lines = own.read_text(encoding="utf-8").splitlines()
            settings = replace(settings, restart_costs=restart_costs(str(own), lines))
        return prepared(self.jobs(traces), known, settings, time.thread_time)

    def jobs(self, traces: Path) -> list[TraceJob]:
        """Its workload."""
        if self.line.trace == SMALL_AND_HUGE:
            return _small_and_huge(sum(gpus for gpus, _ in self.line.servers))
        file = str(traces / "workloads" / f"{self.line.trace}.csv")
        values = [each for each in (self.line.load, self.workload) if each]
        chosen = ",".join(map("=".join, zip(SELECTED_BY.get(self.line.trace, ()), values, strict=True)))
        return read_jobs(file, chosen)

    def result(self, traces: Path) -> dict[str, Any]:
        """Run it, and tell what `swarm simulate replay -o json` would, with the processor time that it took."""
        began_s = time.process_time()
        told = summary(self.settings(), self.observed(traces))
        return {**told, "cpu_s": round(time.process_time() - began_s, 1)}

    def reference(self, traces: Path) -> dict[str, str]:
        """The published result for it."""
        table, policy = self.line.reference.split(":")
        gpus = sum(each for each, _ in self.line.servers)
        trace = ":".join([part for part in (self.line.trace, self.line.load, self.workload) if part])
        (found,) = [
            row
            for row in _rows(traces / "reference" / f"{table}.csv")
            if row["policy"] == policy
            and (
                row["trace"] == trace
                if "trace" in row
                else (row["load"], row["workload"]) == (self.line.load, self.workload)
            )
            and ("nodes" not in row or int(row["nodes"]) * int(row["gpus_per_node"]) == gpus)
        ]
        return found


def run(traces: Path, cell: Cell) -> tuple[Cell, dict[str, Any]]:
    """The cell with its result.  Here, since children cannot be told of what is in a `__main__`."""
    return cell, cell.result(traces)


def read_lines(file: Path) -> list[Line]:
    """The lines of the file."""
    return [Line(**row) for row in _rows(file)]


def _rows(file: Path) -> Iterable[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as table:
        return list(csv.DictReader(table))


def _small_and_huge(gpus: int) -> list[TraceJob]:
    """Small ones of one to four GPUs and of ten minutes as a rule, at seven tenths of the cluster; a huge one of 20
    minutes for every hundred of them."""
    chance, at_s, jobs = random.Random(0), 0.0, []
    for number in range(600):
        job = TraceJob(f"small{number}", at_s, chance.choice((1, 1, 2, 4)), chance.lognormvariate(log(600.0), 1.0))
        jobs.append(job)
        if number % 100 == 50:
            jobs.append(TraceJob(f"huge{number}", at_s, gpus, 1_200.0))
        at_s += job.gpus * job.duration_s / (0.7 * gpus)
    return jobs


def _lines(name: str) -> list[str]:
    """Of a table beside this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()


@lru_cache(maxsize=4)
def _profiles(folder: str) -> Measured:
    return read_profiles(folder)


def _numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, _, value in (part.partition("=") for part in text.split())}

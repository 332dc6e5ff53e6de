"""Learners that come, leave and die while they train apart: real processes, real aggregators; the test names plans."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.job import Template, Worker, until
from tests.elastic.test_outer import JOB, Node
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("outer-changes")]

SCRIPT = """
import json, os, time, warnings
import torch
import swarm_elastic

def tell(**told):
    print(json.dumps(told), flush=True)

warnings.simplefilter("always")
torch.set_num_threads(1)
worker, width = int(os.environ["SWARM_WORKER"]), int(os.environ["WIDTH"])
torch.manual_seed(worker)
model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=min(0.003, 1 / width))
chance = torch.Generator().manual_seed(100 + worker)
teacher = torch.randn(16, 1, generator=torch.Generator().manual_seed(7))
changes = []
def on_change():
    changes.append(outer.learners)
with swarm_elastic.Outer(model, optimizer, every=5, batch=16, on_change=on_change) as outer:
    tell(begun=True, merging=outer.is_merging, step=outer.step_number, weight=model[0].weight.flatten()[0].item())
    while not os.path.exists("stop"):
        x = torch.randn(16, 16, generator=chance)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), torch.tanh(x @ teacher))
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        status = outer.status
        rounds = min((each["rounds"] for each in status["shards"]), default=0)
        tell(step=outer.step_number, rounds=rounds, learner=outer.learner, learners=outer.learners, changes=changes)
tell(end=True, loss=loss.item(), weights=[each.flatten()[:4].tolist() for each in model.parameters()])
"""


class Crowd:
    """Workers of one elastic job, each on a node of its own."""

    def __init__(self, folder: Path, template: Template, width: int = 64, script: str = SCRIPT, **env: str) -> None:
        self.folder, self.template, self.env = folder, template, {"SWARM_JOB_ID": JOB, "WIDTH": str(width), **env}
        self.script, self.socket = folder / "train.py", folder
        self.script.write_text(script)
        self.nodes: dict[str, Node] = {}
        self.workers: dict[str, Worker] = {}
        self.version = 0

    def start(self, *names: str) -> None:
        for name in names:
            self.nodes[name] = node = Node(self.folder / f"n{name}", int(name))
            job: Any = self  # as far as workers need one
            self.workers[name] = Worker(job, name, SWARM_TASK_SOCKET=str(node.socket))

    def word(self, name: str):
        return self.nodes[name].memberships.members(self.nodes[name].key).get(name)

    def publish(self, *names: str, lost: tuple[str, ...] = ()) -> None:
        """A plan with these members, once all have come."""
        until(lambda: all(self.word(name) for name in names), self.problems)
        self.version += 1
        members = []
        for name in names:
            secret, _, address = self.word(name).address.rpartition("@")
            members.append({"worker": name, "address": address, "secret": secret})
        plan = {"version": self.version, "epoch": 1, "members": members, "lost": list(lost)}
        for node in self.nodes.values():
            node.loop.call_soon_threadsafe(node.memberships.publish, node.key, plan)

    def train(self, *names: str, rounds: int = 3) -> None:
        """Until these train by the newest plan, all of it, and have merged so many rounds more."""
        until(lambda: all(self.word(name).trains == self.version for name in names), self.problems)
        before = self.rounds(names)
        until(
            lambda: all(now >= was + rounds for now, was in zip(self.rounds(names), before, strict=True)), self.problems
        )
        for number, name in enumerate(names):
            last = self.workers[name].lines[-1]
            assert (last["learner"], last["learners"]) == (number, len(names))

    def rounds(self, names) -> list[int]:
        return [max((line.get("rounds", 0) for line in self.workers[name].lines), default=0) for name in names]

    def ends(self, *names: str) -> None:
        """These come to their end, and have the same weights."""
        (self.folder / "stop").touch()
        assert [self.workers[name].ended() for name in names] == [0] * len(names), self.problems()
        last = [next(line for line in self.workers[name].lines if "end" in line) for name in names]
        assert all(each["weights"] == last[0]["weights"] for each in last)
        assert last[0]["loss"] < 0.3

    def left(self, *names: str) -> None:
        """These have left by the newest plan."""
        for name in names:
            assert self.workers[name].ended() == 0, self.problems()
            assert f"for plan {self.version}" in self.workers[name].err.read_text()
            assert self.word(name).state == "left"

    def problems(self) -> str:
        told = {name: (self.word(name), worker.lines[-1:]) for name, worker in self.workers.items()}
        return f"{told}\n" + "\n".join(worker.err.read_text()[-1_500:] for worker in self.workers.values())

    def close(self) -> None:
        for worker in self.workers.values():
            if worker.code is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.signal(signal.SIGKILL)
                worker.ended()
        for node in self.nodes.values():
            node.close()


@pytest.fixture
def crowd(tmp_path: Path, template: Template) -> Iterator[Callable[..., Crowd]]:
    made: list[Crowd] = []

    def make(**options) -> Crowd:
        made.append(Crowd(tmp_path, template, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_two_become_three_then_one_then_two_and_end_alike(crowd):
    job = crowd(width=32_000)  # three ranges, which move with their hosts
    job.start("1", "2")
    job.publish("1", "2")
    job.train("1", "2")
    job.start("3")
    until(lambda: job.word("3"), job.problems)
    job.publish("1", "2", "3")
    job.train("1", "2", "3")
    begun = job.workers["3"].lines[0]
    assert begun["step"] > 5, "it begins where the others are"
    job.publish("3")
    job.left("1", "2")
    job.train("3")
    job.start("4")
    job.publish("3", "4")
    job.train("3", "4")
    assert job.workers["3"].lines[-1]["changes"] == [1, 2]
    job.ends("3", "4")


def test_one_of_three_is_killed_and_the_others_go_on(crowd):
    job = crowd()
    job.start("1", "2", "3")
    job.publish("1", "2", "3")
    job.train("1", "2", "3")
    job.workers["1"].signal(signal.SIGKILL)
    job.nodes["1"].signal_aggregator(signal.SIGKILL)
    job.publish("2", "3", lost=("1",))
    job.train("2", "3")
    job.ends("2", "3")

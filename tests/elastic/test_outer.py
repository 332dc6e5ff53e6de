"""Ranks that train apart, in processes of their own, against real aggregators; the test is their agents."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from swarm_agent.task.account import Account
from swarm_agent.task.membership import TaskMemberships
from swarm_agent.task.tasksocket import SocketFolder, TaskSockets
from swarmsched.ids import JobId, TaskKey
from tests.agent.aggregation.alone import AloneAggregation
from tests.agent.supervision.testing import make_order
from tests.agent.testing import free_port
from tests.elastic.job import Template, Worker, until
from tests.elastic.testing import TRAIN, ScriptedAgent, needs

pytestmark = [*needs(TRAIN), pytest.mark.xdist_group("elastic")]

SCRIPT = """
import json, os, time, warnings
import torch
import swarm_elastic

def tell(**told):
    print(json.dumps(told), flush=True)

warnings.simplefilter("always")
torch.set_num_threads(1)
rank, width = int(os.environ.get("RANK", "0")), int(os.environ["WIDTH"])
torch.manual_seed(rank)  # ranks begin with other weights: the first rank's are taken
model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
chance = torch.Generator().manual_seed(100 + rank)
teacher = torch.randn(16, 1, generator=torch.Generator().manual_seed(7))
def batch(count=16):
    x = torch.randn(count, 16, generator=chance)
    return x, torch.tanh(x @ teacher)
every = os.environ["EVERY"]
steps, pause_s = int(os.environ["STEPS"]), float(os.environ.get("PAUSE_S", "0"))
with swarm_elastic.Outer(model, optimizer, every=every if every == "auto" else int(every), batch=16,
                         overlap=int(os.environ.get("OVERLAP", "0")), wire=os.environ.get("WIRE", "int8")) as outer:
    tell(begun=True, merging=outer.is_merging, weight=model[0].weight.flatten()[0].item())
    for step in range(1, steps + 1):
        if os.path.exists("stop"):
            break
        began_s = time.monotonic()
        x, y = batch()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        if rank == 2 and step == int(os.environ.get("BREAKS", "0")):
            model[0].weight.grad.fill_(float("nan"))
        optimizer.step()
        time.sleep(pause_s)
        status = outer.status
        rounds, waited_s = [each["rounds"] for each in status["shards"]], status["waited_s"]
        tell(step=step, took_s=time.monotonic() - began_s, rounds=rounds, waited_s=waited_s, every=outer.every)
chance.manual_seed(1)
with torch.no_grad():
    x, y = batch(2_000)
    loss = float(torch.nn.functional.mse_loss(model(x), y))
tell(end=True, loss=loss, weights=model[0].weight.flatten()[:8].tolist())
"""
JOB = JobId("00000000000000000000000001")


class Node:
    """An agent, as far as ranks see it: the real socket and the real aggregator, in a loop of its own."""

    def __init__(self, folder: Path, part: int = 0, attempt: int = 1) -> None:
        """`part` is the number of its worker, where the job is elastic."""
        folder.mkdir()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.aggregation = AloneAggregation("127.0.0.1", lambda key: True, available_bytes=lambda: 1 << 32)
        self.key = TaskKey(JOB, attempt, part)
        self.memberships = TaskMemberships(lambda key: make_order("true"))
        self.reported: dict[str, Any] = {}
        self.sockets = self.call(self._open(folder))

    async def _open(self, folder: Path) -> TaskSockets:
        self.aggregation.start()
        sockets = TaskSockets(SocketFolder(folder))
        sockets.on_request("outer", self.aggregation.handle)
        sockets.on_request("member", self.memberships.handle)
        sockets.on_request("report", self._note)
        sockets.start()
        sockets.open(self.key, "secret", Account("me", "/", "/bin/sh"))
        return sockets

    async def _note(self, _: TaskKey, request: Any) -> dict[str, Any]:
        self.reported |= request
        return {"ok": True}

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    @property
    def socket(self) -> Path:
        return self.sockets.path(self.key)

    def socket_of(self, job: JobId) -> Path:
        """Of another job's task below this agent."""

        async def open_it() -> Path:
            key = TaskKey(job, 1)
            self.sockets.open(key, "secret", Account("me", "/", "/bin/sh"))
            return self.sockets.path(key)

        return Path(self.call(open_it()))

    def signal_aggregator(self, number: int) -> None:
        child = self.aggregation._child
        if child is not None:
            os.kill(child.pid, number)

    def close(self) -> None:
        async def end() -> None:
            self.sockets.stop()
            await self.aggregation.stop()

        self.call(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Gang:
    """The ranks of a job, each below one of the nodes in turn."""

    def __init__(
        self, folder: Path, template: Template, sockets: list[Path], size: int, script: str = SCRIPT, **env: str
    ) -> None:
        self.folder, self.template, self.script = folder, template, folder / "train.py"
        self.script.write_text(script)
        self.env = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.env |= {"SWARM_JOB_ID": JOB, "SWARM_ATTEMPT": "1", "WIDTH": "64", "EVERY": "5", "STEPS": "60", **env}
        self.socket = sockets[0]
        job: Any = self  # as far as workers need one
        self.ranks = [
            Worker(
                job, f"r{rank}", RANK=str(rank), SWARM_WORKER="", SWARM_TASK_SOCKET=str(sockets[rank % len(sockets)])
            )
            for rank in range(size)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            if rank.code is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.signal(signal.SIGKILL)

    def ends(self) -> list[dict]:
        """The last word of each."""
        assert [rank.ended() for rank in self.ranks] == [0] * len(self.ranks), [
            each.err.read_text() for each in self.ranks
        ]
        return [next(line for line in rank.lines if "end" in line) for rank in self.ranks]

    def go_on(self, count: int, of: int = 0) -> None:
        """Until all, or the first so many, have merged so many rounds more."""
        before = self.rounds(of)
        until(lambda: self.rounds(of) >= before + count, lambda: [rank.lines[-1:] for rank in self.ranks])

    def rounds(self, of: int = 0) -> int:
        last = [line for rank in self.ranks[: of or None] for line in rank.lines[-1:]]
        return min((min(line["rounds"]) for line in last if line.get("rounds")), default=0)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(attempt: int = 1) -> Node:
        made.append(Node(tmp_path / f"n{len(made)}", attempt=attempt))
        return made[-1]

    yield make
    for node in made:
        node.close()


def test_ranks_on_two_nodes_merge_in_rounds_and_end_alike(tmp_path, template, nodes):
    """Two shards, one on each node, as the model has more than two pieces."""
    first, second = nodes(), nodes()
    with Gang(tmp_path, template, [first.socket, second.socket], 2, WIDTH="32000", STEPS="20", PAUSE_S="0.05") as gang:
        ends = gang.ends()
    count = 18 * 32_000 + 1
    told = {"parameter_bytes": 4 * count, "largest_bytes": 4 * 16 * 32_000, "moved_bytes": count / 5}
    assert told.items() <= first.reported.items(), "a byte for each number, once in five steps"
    begun = [rank.lines[0] for rank in gang.ranks]
    assert begun[0]["merging"]
    assert begun[0]["weight"] == pytest.approx(begun[1]["weight"], abs=1e-6), "all begin with the first rank's weights"
    last = [rank.lines[-2] for rank in gang.ranks]
    assert [len(each["rounds"]) for each in last] == [2, 2]
    assert all(each >= 3 for line in last for each in line["rounds"])
    assert ends[0]["weights"] == ends[1]["weights"]


@pytest.mark.parametrize("wire", ["int8", "float32"])
def test_what_two_learn_apart_is_better_than_what_one_learns(tmp_path, template, nodes, wire):
    with Gang(tmp_path, template, [nodes().socket], 2, WIRE=wire, PAUSE_S="0.01") as gang:
        together = gang.ends()[0]["loss"]
    (tmp_path / "alone").mkdir()
    with Gang(tmp_path / "alone", template, [gang.socket], 1) as alone:
        assert together < alone.ends()[0]["loss"]
    assert not alone.ranks[0].lines[0]["merging"]


def test_an_aggregator_that_is_killed_costs_a_moment_and_rounds_go_on(tmp_path, template, nodes):
    node = nodes()
    with Gang(tmp_path, template, [node.socket], 3, STEPS="100000", PAUSE_S="0.01") as gang:
        for _ in range(3):
            gang.go_on(3)
            node.signal_aggregator(signal.SIGKILL)
        gang.go_on(3)
        (tmp_path / "stop").touch()
        ends = gang.ends()
    assert node.aggregation.starts == 4
    assert ends[0]["weights"] == ends[1]["weights"]
    assert ends[0]["weights"] == ends[2]["weights"]
    assert ends[0]["loss"] < 0.15
    took = sorted(line["took_s"] for rank in gang.ranks for line in rank.lines if line.get("step", 0) > 20)
    assert took[-1] < 2.0, took[-5:]


def test_an_aggregator_that_stands_still_does_not_stop_training(tmp_path, template, nodes):
    node = nodes()
    with Gang(tmp_path, template, [node.socket], 2, STEPS="100000", PAUSE_S="0.01", OVERLAP="2") as gang:
        gang.go_on(4)
        node.signal_aggregator(signal.SIGSTOP)
        stopped = gang.ranks[0].step
        until(lambda: gang.ranks[0].step >= stopped + 10, lambda: gang.ranks[0].lines[-1:])
        node.signal_aggregator(signal.SIGCONT)
        gang.go_on(3)
        (tmp_path / "stop").touch()
        gang.ends()
    took = sorted(line["took_s"] for line in gang.ranks[0].lines if line.get("step", 0) > 40)
    assert took[len(took) // 2] < 0.2


def test_a_rank_that_stands_still_is_not_waited_for_and_goes_on_later(tmp_path, template, nodes):
    with Gang(tmp_path, template, [nodes().socket], 3, STEPS="100000", PAUSE_S="0.01") as gang:
        gang.go_on(3)
        gang.ranks[2].signal(signal.SIGSTOP)
        gang.go_on(6, of=2)
        gang.ranks[2].signal(signal.SIGCONT)
        gang.go_on(3)
        (tmp_path / "stop").touch()
        ends = gang.ends()
    assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"]


def test_a_round_that_never_comes_is_waited_for_once_and_no_longer_than_its_steps(tmp_path, template, nodes):
    """Of two ranks both make the quorum, and one of them stands still."""
    with Gang(tmp_path, template, [nodes().socket], 2, STEPS="100000", PAUSE_S="0.01") as gang:
        gang.go_on(4)
        gang.ranks[1].signal(signal.SIGSTOP)
        stopped = gang.ranks[0].step
        until(lambda: gang.ranks[0].step >= stopped + 60, lambda: gang.ranks[0].lines[-1:])
        lines = gang.ranks[0].lines
        waited = [line["waited_s"] for line in lines if line.get("step", 0) >= stopped + 1]
        usual_s = sorted(line["took_s"] for line in lines if "took_s" in line)[len(lines) // 2]
        assert waited[-1] - waited[0] < 10 * usual_s
        gang.ranks[1].signal(signal.SIGCONT)
        gang.go_on(2)
        (tmp_path / "stop").touch()
        ends = gang.ends()
    assert ends[0]["weights"] == ends[1]["weights"]


def test_how_often_ranks_merge_is_found_by_what_rounds_cost_alike_for_all_and_outlives_an_aggregator(
    tmp_path, template, nodes
):
    node = nodes()
    with Gang(tmp_path, template, [node.socket], 2, EVERY="auto", STEPS="100000", PAUSE_S="0.004") as gang:

        def last(name):
            return [line.get(name) for rank in gang.ranks for line in rank.lines[-1:]]

        until(lambda: last("every") in ([32, 32], [128, 128]), lambda: [rank.lines[-1:] for rank in gang.ranks])
        found = last("every")[0]
        node.signal_aggregator(signal.SIGKILL)
        gang.go_on(2)
        assert last("every") == [found, found]
        (tmp_path / "stop").touch()
        ends = gang.ends()
    assert ends[0]["weights"] == ends[1]["weights"]
    first = gang.ranks[0].lines
    assert {line["every"] for line in first if 0 < line.get("step", 0) < 640} == {64}


def test_a_rank_whose_weights_are_no_numbers_is_refused_and_told_so_and_harms_nobody(tmp_path, template, nodes):
    with Gang(tmp_path, template, [nodes().socket], 3, STEPS="60", BREAKS="20") as gang:
        ends = gang.ends()
    assert "a contribution is refused: it has values that are not finite" in gang.ranks[2].err.read_text()
    assert ends[0]["weights"] == ends[2]["weights"]
    assert ends[0]["loss"] < 0.3


def test_under_an_agent_that_knows_no_aggregation_training_is_plain_and_says_so(tmp_path, template):
    unknown = {"v": 1, "type": "error", "ok": False, "error": "unknown_type", "problem": "not known", "remedy": ""}
    with (
        ScriptedAgent(tmp_path / "s", lambda _: unknown),
        Gang(tmp_path, template, [tmp_path / "s"], 2, STEPS="6") as gang,
    ):
        gang.ends()
    assert not any(rank.lines[0]["merging"] for rank in gang.ranks)
    assert "ranks train alone" in gang.ranks[0].err.read_text()


def test_outside_of_a_swarm_it_does_nothing(tmp_path, template):
    with Gang(tmp_path, template, [tmp_path], 1, STEPS="6", SWARM_TASK_SOCKET="") as gang:
        gang.ends()
    assert not gang.ranks[0].lines[0]["merging"]
    assert gang.ranks[0].err.read_text() == ""


SAVING = """
import json, os
import torch
import swarm_elastic

rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outer = swarm_elastic.Outer(model, optimizer, every="auto")
if os.path.exists("saved.pt"):
    outer.load_state_dict(torch.load("saved.pt"))
with outer:
    begun = [outer.step_number, outer.every, model.weight.flatten().tolist()]
    while outer.step_number < 7:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    state = outer.state_dict()
    try:
        outer.load_state_dict(state)
    except RuntimeError as error:
        assert "before `with`" in str(error)
    if rank == 0:
        torch.save(state | {"every": 128}, "saved.pt")
try:
    swarm_elastic.Outer(model, optimizer).__enter__()
except RuntimeError as error:
    assert "this process trains already" in str(error)
else:
    raise AssertionError("a second one was taken")
print(json.dumps({"begun": begun, "shown": state["weights"][:4].tolist(), "end": True}), flush=True)
"""


def test_another_attempt_goes_on_from_the_outer_weights_and_at_the_tempo_of_its_checkpoint(tmp_path, template, nodes):
    """The first attempt ends within a round: what its ranks have trained by themselves since is theirs."""
    ends = []
    for attempt in (1, 2):
        socket = nodes(attempt).socket
        with Gang(tmp_path, template, [socket], 2, script=SAVING, SWARM_ATTEMPT=str(attempt)) as gang:
            gang.ends()
            ends.append([rank.lines[-1] for rank in gang.ranks])
    first, second = ends
    assert first[0]["shown"] == first[1]["shown"] == first[0]["begun"][2]
    assert [each["begun"] for each in second] == [[7, 128, first[0]["shown"]]] * 2


def test_one_who_sums_gradients_of_all_ranks_as_well_is_told_so(tmp_path, template, nodes):
    group = "import torch.distributed\ntorch.distributed.init_process_group('gloo')\n"
    with Gang(
        tmp_path, template, [nodes().socket], 2, script=SCRIPT.replace("def tell", group + "def tell", 1)
    ) as gang:
        gang.ends()
    assert "a process group of all 2 ranks is there" in gang.ranks[0].err.read_text()

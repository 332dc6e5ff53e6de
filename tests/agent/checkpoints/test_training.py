"""A training script that checkpoints through `swarm_elastic`, is killed, and goes on elsewhere; and a shell script."""

import asyncio
import subprocess
import sys
from pathlib import Path

from msgspec.structs import replace

from swarm_agent.supervision.orders import order_to_json
from swarmsched.commands import CommitCheckpoint, Refused
from swarmsched.effects import StageTask, StartTask, StopTask
from swarmsched.events import TaskStaged
from swarmsched.ids import NodeId
from swarmsched.resources import Share
from swarmsched.task import TaskOrder
from tests.agent.supervision.testing import Bench, make_order

PYTHON = getattr(sys, "_base_executable", sys.executable)  # which has nothing of ours installed
TRAIN = """
import json, os, sys, time
import swarm_elastic

step, resume_from = 0, os.environ.get("SWARM_RESUME_FROM")
if resume_from:
    step = json.load(open(resume_from))["step"]
print("begin at", step, flush=True)
while step < int(sys.argv[1]):
    step += 1
    name = "step-%d.json" % step
    path = os.path.join(os.environ["SWARM_CHECKPOINT_DIR"], name)
    with open(path, "w") as file:
        json.dump({"step": step}, file)
    swarm_elastic.checkpoint(name, wait=True)
print("reached", step, "dropped", swarm_elastic.dropped, flush=True)
if "hang" in sys.argv:
    time.sleep(600)
"""


def newest(bench: Bench):
    commits = [command for command in bench.agent.commands if isinstance(command, CommitCheckpoint)]
    return commits[-1].checkpoint if commits else None


def elsewhere(order: TaskOrder, bench: Bench, *command: str) -> TaskOrder:
    return replace(
        order,
        attempt=order.attempt + 1,
        node=bench.node,
        shares=(Share(bench.node, 1),),
        spec=replace(order.spec, command=command),
    )


async def test_training_goes_on_from_the_newest_checkpoint_on_another_node(swarm) -> None:
    first, second = await swarm.node("n1"), await swarm.node("n2")
    order = make_order(PYTHON, "-c", TRAIN, "5", "hang")
    first.runner.perform(StartTask(order, ()))
    assert await first.wait_for_output(order, b"dropped 0\n") == b"begin at 0\nreached 5 dropped 0\n"
    first.runner.perform(StopTask(order.job_id, 1, 0.0))
    await first.finish(order)
    checkpoint = newest(first)
    assert (checkpoint.name, checkpoint.copies) == ("step-5.json", ("n1", "n2"))
    del swarm.net.agents[NodeId("n1")]

    again = replace(elsewhere(order, second, PYTHON, "-c", TRAIN, "8"), checkpoint=checkpoint)
    second.runner.perform(StageTask(again))
    await second.wait_for(TaskStaged)
    second.runner.perform(StartTask(again, ()))
    await second.finish(again)
    assert second.output(again) == b"begin at 5\nreached 8 dropped 0\n"
    assert (newest(second).name, newest(second).attempt) == ("step-8.json", 2)


async def test_a_superseded_attempt_learns_it_from_an_exception(swarm) -> None:
    bench = await swarm.node("n1")
    bench.agent.answer = lambda _: Refused("conflict", "attempt 1 was given up; the present one is 2", "end it")
    order = make_order(PYTHON, "-c", TRAIN, "5")
    bench.runner.perform(StartTask(order, ()))
    exited = await bench.finish(order)
    assert exited.exits[0].exit_code == 1
    assert b"CheckpointRefused: checkpoint 'step-1.json': it does not count" in bench.output(order)


SHELL = """
echo weights > "$SWARM_CHECKPOINT_DIR/a"
swarm checkpoint a; echo "committed $?"
swarm checkpoint b; echo "refused $?"
swarm -q checkpoint a --no-wait; echo "taken $?"
unset SWARM_TASK_SOCKET
swarm checkpoint a; echo "outside $?"
"""


async def test_a_shell_script_finds_the_command_and_its_exit_codes(swarm) -> None:
    bench = await swarm.node("n1")
    order = make_order("sh", "-c", f"{{ {SHELL} }} 2>&1", env={"PATH": "/usr/bin:/bin"})
    bench.runner.perform(StartTask(order, ()))
    await bench.finish(order)
    folder = Path(bench.config.data_dir) / "checkpoints" / order.job_id / "1"
    said = bench.output(order).decode().splitlines()
    assert [line for line in said if line.split()[-1].isdecimal()] == [
        "committed 0",
        "refused 1",
        "taken 0",
        "outside 2",
    ]
    assert "swarm: checkpoint a committed" in said
    assert f"swarm: checkpoint b was not committed: {folder}/b does not exist" in said
    assert newest(bench).name == "a"


FIRST_LIFE = """
import asyncio, sys
from pathlib import Path
from swarm_agent.supervision.orders import order_from_json
from tests.agent.supervision.testing import Bench
from swarmsched.effects import StartTask
from swarmsched.events import TaskStarted

async def main():
    bench = Bench(Path(sys.argv[1]))
    await bench.runner.start()
    order, gpus = order_from_json(Path(sys.argv[2]).read_bytes(), Path(sys.argv[2]))
    bench.runner.perform(StartTask(order, gpus))
    await bench.wait_for_output(order, b"first")
    print("started", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

TWO_LIVES = """
import os, sys, time
import swarm_elastic
folder = os.environ["SWARM_CHECKPOINT_DIR"]
open(os.path.join(folder, "one"), "w").write("1")
swarm_elastic.checkpoint("one", wait=True)
print("first", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
open(os.path.join(folder, "two"), "w").write("2")
print("second", swarm_elastic.checkpoint("two", wait=True), flush=True)
"""


async def test_a_rank_finds_the_next_agent_where_it_met_the_last(swarm, tmp_path: Path) -> None:
    order = make_order(PYTHON, "-c", TWO_LIVES, str(tmp_path / "go"), node="n1")
    (tmp_path / "order").write_bytes(order_to_json(order, ()))
    command = [sys.executable, "-c", FIRST_LIFE, str(tmp_path / "n1"), str(tmp_path / "order")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert await asyncio.to_thread(process.stdout.readline) == b"started\n"
    process.kill()
    process.wait()
    process.stdout.close()
    (tmp_path / "go").touch()  # the rank asks while there is no agent
    bench = await swarm.node("n1")
    await bench.finish(order)
    assert bench.output(order) == b"first\nsecond True\n"
    assert newest(bench).name == "two"

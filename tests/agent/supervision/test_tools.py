"""What tasks are given by the agent: checkpoint folder, socket, token, package and command."""

import json
import os
import pwd
import stat
import sys
from pathlib import Path

import pytest

from swarm_agent.supervision.environment import common_environment
from swarm_agent.supervision.tools import Tools, install_tools
from swarm_agent.task.account import Account
from swarm_agent.task.tasksocket import SUN_PATH_BYTES, SocketFolder
from swarmsched.effects import StartTask
from swarmsched.errors import ConfigError
from swarmsched.ids import TaskKey
from tests.agent.supervision.testing import Bench, make_order

REPORT = """
import json, os, stat, sys
import swarm_elastic
folder = os.environ["SWARM_CHECKPOINT_DIR"]
open(os.path.join(folder, "state.pt"), "w").write("weights")
found = os.stat(os.environ["SWARM_TASK_SOCKET"])
print(json.dumps({
    "env": {name: value for name, value in os.environ.items() if name.startswith("SWARM_")},
    "package": os.path.dirname(swarm_elastic.__file__),
    "socket": [stat.S_ISSOCK(found.st_mode), stat.S_IMODE(found.st_mode), found.st_uid],
    "uid": os.getuid(),
}))
"""


PYTHON = getattr(sys, "_base_executable", sys.executable)
SYSTEM_PYTHON = "/usr/bin/python3"  # which every account may execute


async def report(data_dir: Path, python: str = PYTHON, **settings) -> dict:
    async with Bench(data_dir, **settings) as bench:
        order = make_order(python, "-c", REPORT, attempt=3)
        bench.runner.perform(StartTask(order, ()))
        exited = await bench.finish(order)
        output = bench.output(order)
        assert exited.exits[0].exit_code == 0, output
        return json.loads(output) | {"job_id": order.job_id}


async def test_a_task_finds_its_folder_socket_token_and_the_package(tmp_path: Path) -> None:
    data = tmp_path / "data"
    told = await report(data)
    env = told["env"]
    assert env["SWARM_CHECKPOINT_DIR"] == f"{data}/checkpoints/{told['job_id']}/3"
    assert (Path(env["SWARM_CHECKPOINT_DIR"]) / "state.pt").read_text() == "weights"
    assert told["socket"] == [True, 0o600, os.getuid()]
    assert len(env["SWARM_TASK_TOKEN"]) == 32
    assert (env["SWARM_ATTEMPT"], env["SWARM_EPOCH"]) == ("3", "1")
    assert "SWARM_RESUME_FROM" not in env
    assert Path(told["package"]).is_relative_to(data / "tools")
    assert [path.name for path in Path(told["package"]).parent.iterdir()] == ["swarm_elastic"]


async def test_the_socket_goes_with_the_task(tmp_path: Path) -> None:
    told = await report(tmp_path / "data")
    assert not Path(told["env"]["SWARM_TASK_SOCKET"]).exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run a job as another account")
@pytest.mark.skipif(not os.access(SYSTEM_PYTHON, os.X_OK), reason=f"needs {SYSTEM_PYTHON}")
async def test_another_account_can_use_what_it_is_given(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o011 != 0o011:  # pytest's own
            folder.chmod(folder.stat().st_mode | 0o011)
    told = await report(tmp_path / "data", python=SYSTEM_PYTHON, job_user="nobody")
    nobody = pwd.getpwnam("nobody").pw_uid
    assert (told["uid"], told["socket"][2]) == (nobody, nobody)
    written = Path(told["env"]["SWARM_CHECKPOINT_DIR"])
    assert (written.stat().st_uid, stat.S_IMODE(written.stat().st_mode)) == (nobody, 0o700)


async def test_a_checkpoint_root_elsewhere_is_used(tmp_path: Path) -> None:
    told = await report(tmp_path / "data", checkpoint_dir=tmp_path / "disk" / "ck")
    assert told["env"]["SWARM_CHECKPOINT_DIR"] == f"{tmp_path}/disk/ck/{told['job_id']}/3"


async def test_a_checkpoint_root_that_cannot_be_made_stops_the_agent_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint_dir: .*file/ck cannot be created: Not a directory"):
        async with Bench(tmp_path / "data", checkpoint_dir=tmp_path / "file" / "ck"):
            pass


def test_a_long_data_directory_gets_a_short_folder_for_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    folder = SocketFolder(deep)
    assert folder.path != deep / "sockets"
    assert SocketFolder(deep).path == folder.path  # in each life of the agent
    assert SocketFolder(tmp_path / ("e" * 120)).path != folder.path
    assert len(os.fsencode(folder.of(TaskKey(make_order("x").job_id, 1)))) <= SUN_PATH_BYTES
    assert SocketFolder(Path("/var/lib/swarm")).path == Path("/var/lib/swarm/sockets")


def test_a_socket_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sockets").mkdir()
    (tmp_path / "sockets").chmod(0o777)
    folder = SocketFolder(tmp_path)
    folder.path = tmp_path / "sockets"
    with pytest.raises(ConfigError, match="not a directory of this agent's alone"):
        folder.make()
    (tmp_path / "link").symlink_to("/tmp")
    folder.path = tmp_path / "link"
    with pytest.raises(ConfigError, match="not a directory of this agent's alone"):
        folder.make()


def test_tools_are_installed_once_and_come_last(tmp_path: Path) -> None:
    tools = install_tools(tmp_path)
    first = (tools.bin_path / "swarm").stat().st_ino
    assert install_tools(tmp_path) == tools
    assert (tools.bin_path / "swarm").stat().st_ino == first
    assert [path.name for path in tmp_path.iterdir()] == [tools.bin_path.parent.name]

    env = common_environment(
        make_order("x", env={"PYTHONPATH": "/mine"}),
        (),
        inherit={"PATH": "/bin"},
        account=Account("ada", "/home/ada", "/bin/sh"),
        tools=Tools(Path("/t/python"), Path("/t/bin")),
        task={"SWARM_TASK_TOKEN": "s"},
    )
    assert (env["PATH"], env["PYTHONPATH"]) == ("/bin:/t/bin", "/mine:/t/python")
    assert env["SWARM_TASK_TOKEN"] == "s"


async def test_the_swarm_command_is_on_the_path_of_a_task(tmp_path: Path) -> None:
    async with Bench(tmp_path / "data") as bench:
        order = make_order("sh", "-c", "exec swarm checkpoint --help", env={"PATH": "/usr/bin:/bin"})
        bench.runner.perform(StartTask(order, ()))
        await bench.finish(order)
        assert bench.output(order).startswith(b"Usage: swarm checkpoint")

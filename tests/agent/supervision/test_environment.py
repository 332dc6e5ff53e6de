"""The variables of ranks: torch's contract, GPUs, what is inherited and what never is."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from swarm_agent.config import DEFAULT_ENV_ALLOW
from swarm_agent.supervision.environment import (
    common_environment,
    inherited,
    process_ranks,
    rank_environment,
)
from swarm_agent.supervision.orders import order_from_json, order_to_json
from swarm_agent.task.account import FALLBACK_PATH, Account, find_account, passable_path
from swarmsched.api import JobSpec, RankGroup
from swarmsched.errors import ConfigError
from swarmsched.estimate import BatchRange, GpuBatch
from swarmsched.holders import Configuration
from swarmsched.ids import NodeId
from swarmsched.resources import Demand, Gpu, Share
from swarmsched.task import GroupPlace, Meeting, TaskOrder
from tests.agent.supervision.testing import make_gpu, make_order

ACCOUNT = Account("ada", "/home/ada", "/bin/bash")
SHARES = (Share(NodeId("n1"), 2), Share(NodeId("n2"), 2))


def common(order: TaskOrder, gpus: tuple[Gpu, ...] = (), **options) -> dict[str, str]:
    options = {"inherit": {"PATH": "/bin"}, "account": ACCOUNT, **options}
    return common_environment(order, gpus, **options)


def on_node(node: str, **spec) -> TaskOrder:
    return make_order("train", node=node, shares=SHARES, ranks=4, host="10.0.0.1", port=23001, **spec)


def test_ranks_of_two_nodes_agree_on_world_and_meeting_place() -> None:
    seen = []
    for node in ("n1", "n2"):
        order = on_node(node)
        shared = common(order)
        assert (shared["MASTER_ADDR"], shared["MASTER_PORT"]) == ("10.0.0.1", "23001")
        assert (shared["WORLD_SIZE"], shared["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (shared["SWARM_NODE"], shared["SWARM_NODES"], shared["SWARM_NNODES"]) == (node, "n1,n2", "2")
        seen += [(node, shared["NODE_RANK"], *rank_environment(order, index).values()) for index in range(2)]
    assert seen == [
        ("n1", "0", "0", "0", "0"),
        ("n1", "0", "1", "1", "1"),
        ("n2", "1", "2", "0", "2"),
        ("n2", "1", "3", "1", "3"),
    ]
    assert list(rank_environment(on_node("n2"), 1)) == ["RANK", "LOCAL_RANK", "SWARM_RANK"]


INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interfaces(order: TaskOrder, interface: str = "eth0", **options) -> tuple[str | None, ...]:
    shared = common(order, fabric_interface=interface, **options)
    return tuple(shared.get(name) for name in INTERFACES)


def test_ranks_of_several_nodes_are_told_the_interface_of_the_fabric_unless_somebody_says_otherwise() -> None:
    assert interfaces(on_node("n1")) == ("eth0", "eth0", "=eth0")
    assert interfaces(on_node("n1"), "bond0.100:1") == ("bond0.100:1", "bond0.100:1", "=bond0.100")
    assert interfaces(on_node("n1"), "") == (None, None, None)
    said = on_node("n1", env={"GLOO_SOCKET_IFNAME": "ib0"})
    inherit = {"NCCL_SOCKET_IFNAME": "ib1", "GLOO_SOCKET_IFNAME": "ib2"}
    assert interfaces(said, inherit=inherit) == ("ib0", "eth0", "ib1")


def test_ranks_of_one_node_meet_as_they_like_and_workers_that_others_may_join_do_not() -> None:
    alone = make_order("train", shares=(Share(NodeId("n1"), 4),), ranks=4)
    assert interfaces(alone) == (None, None, None)
    assert interfaces(replace(alone, shares=(Share(NodeId("n1"), 1, part=1),), part=1))[0] == "eth0"


def test_every_rank_sees_all_gpus_of_the_job_on_its_node_by_uuid() -> None:
    shared = common(on_node("n1", demand=Demand(gpus=1)), (make_gpu(3), make_gpu(5)))
    assert shared["CUDA_VISIBLE_DEVICES"] == "GPU-0003,GPU-0005"
    assert shared["SWARM_GPUS"] == "GPU-0003,GPU-0005"
    assert "SWARM_SIMULATED_GPUS" not in shared


def test_simulated_gpus_and_none_at_all_show_no_device_to_cuda() -> None:
    simulated = tuple(make_gpu(index, is_simulated=True) for index in range(2))
    shared = common(on_node("n1"), simulated)
    assert (shared["CUDA_VISIBLE_DEVICES"], shared["SWARM_SIMULATED_GPUS"]) == ("", "2")
    assert common(on_node("n1"))["CUDA_VISIBLE_DEVICES"] == ""


def test_per_node_gives_one_process_and_torchrun_its_defaults() -> None:
    order = on_node("n2", per_node=True, demand=Demand(gpus=2))
    shared = common(order, tuple(make_gpu(index) for index in range(4)))
    assert process_ranks(order) == (2,)
    assert rank_environment(order, 0) == {}
    assert {name: value for name, value in shared.items() if name.startswith("PET_")} == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "4",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "23001",
        "PET_RDZV_ID": f"{order.job_id}.1",
    }
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(shared)


def test_a_plain_command_is_told_of_no_ranks_and_one_with_a_gpu_as_many_are() -> None:
    of_ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"}
    for spec, found in (
        ({}, set()),
        ({"env": {"RANK": "0", "WORLD_SIZE": "1"}}, {"RANK", "WORLD_SIZE"}),
        ({"demand": Demand(gpus=1)}, of_ranks),
        ({"ranks_most": 4}, of_ranks),
    ):
        order = make_order("train", host="10.0.0.1", port=23001, **spec)
        variables = common(order) | rank_environment(order, 0)
        assert of_ranks & set(variables) == found
        assert (variables["SWARM_RANK"], variables["MASTER_ADDR"]) == ("0", "10.0.0.1")


def test_slurms_names_are_set_where_they_are_asked_for() -> None:
    seen = {}
    for node in ("n1", "n2"):
        order = on_node(node, slurm_env=True, name="t", demand=Demand(gpus=1, cpus=3))
        for index in range(2):
            gpus = (make_gpu(0), make_gpu(1))
            env = common(order, gpus, workdir=Path("/w")) | rank_environment(order, index)
            seen[env["SLURM_PROCID"]] = (env["SLURM_LOCALID"], env["SLURM_NODEID"], env["SLURMD_NODENAME"])
    assert seen == {"0": ("0", "0", "n1"), "1": ("1", "0", "n1"), "2": ("0", "1", "n2"), "3": ("1", "1", "n2")}
    assert int(env["SLURM_JOB_ID"]) > 0
    assert {name: env[f"SLURM_{name}"] for name in ("NTASKS", "NNODES", "JOB_NUM_NODES", "TASKS_PER_NODE")} == {
        "NTASKS": "4", "NNODES": "2", "JOB_NUM_NODES": "2", "TASKS_PER_NODE": "2(x2)",
    }  # fmt: skip
    assert {name: env[f"SLURM_{name}"] for name in ("JOB_NODELIST", "GPUS_ON_NODE", "CPUS_PER_TASK", "SUBMIT_DIR")} == {
        "JOB_NODELIST": "n1,n2", "GPUS_ON_NODE": "2", "CPUS_PER_TASK": "3", "SUBMIT_DIR": "/w",
    }  # fmt: skip
    launcher = on_node("n2", slurm_env=True, per_node=True)
    env = common(launcher) | rank_environment(launcher, 0)
    assert (env["SLURM_NTASKS"], env["SLURM_PROCID"], env["SLURM_LOCALID"]) == ("2", "1", "0")
    assert not [name for name in common(on_node("n1")) if name.startswith("SLURM")]


def test_users_variables_win_over_defaults_but_not_over_ranks() -> None:
    env = {"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "", "WORLD_SIZE": "99", "MASTER_PORT": "1", "MINE": "x=y"}
    shared = common(on_node("n1", env=env), cpu_count=64)
    assert (shared["OMP_NUM_THREADS"], shared["PYTHONUNBUFFERED"], shared["MINE"]) == ("3", "", "x=y")
    assert (shared["WORLD_SIZE"], shared["MASTER_PORT"]) == ("4", "23001")


@pytest.mark.parametrize(("cpus", "cpu_count", "threads"), [(0, 16, "8"), (0, 1, "1"), (4, 16, "4")])
def test_threads_share_the_cores_among_the_ranks(cpus: int, cpu_count: int, threads: str) -> None:
    assert common(on_node("n1", demand=Demand(cpus=cpus)), cpu_count=cpu_count)["OMP_NUM_THREADS"] == threads


def test_only_allowed_variables_are_inherited_and_secrets_never() -> None:
    own = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "NCCL_DEBUG": "INFO",
        "SWARM_TOKEN": "secret",
        "SWARM_AGENT_TOKEN_FILE": "/etc/swarm/token",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    assert set(inherited(own, DEFAULT_ENV_ALLOW)) == {"PATH", "LC_ALL", "NCCL_DEBUG"}
    assert set(inherited(own, ("*",))) == {"PATH", "LC_ALL", "NCCL_DEBUG", "AWS_SECRET_ACCESS_KEY"}


def test_home_and_user_are_those_of_the_account() -> None:
    shared = common(on_node("n1"), inherit={"HOME": "/root", "USER": "root"})
    assert (shared["HOME"], shared["USER"], shared["SHELL"]) == ("/home/ada", "ada", "/bin/bash")
    assert shared["PATH"]


def test_virtual_environments_come_first_on_the_path() -> None:
    shared = common(on_node("n1", env={"PYTHONHOME": "/x"}), environment_dirs=(Path("/built"), Path("/venv")))
    assert shared["PATH"] == "/built/bin:/venv/bin:/bin"
    assert shared["VIRTUAL_ENV"] == "/built"
    assert "PYTHONHOME" not in shared


def test_unknown_job_user_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="no account 'no-such-user-here'") as caught:
        find_account("no-such-user-here")
    assert "useradd" in caught.value.remedy


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_job_user_is_found_with_its_groups() -> None:
    account = find_account("nobody")
    assert account.uid > 0
    assert account.gid in account.groups
    assert find_account("").uid == -1


def test_a_job_gets_no_folder_of_the_agents_path_that_it_cannot_enter(tmp_path: Path) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        base.chmod(0o755)
        (base / "open").mkdir(mode=0o755)
        (base / "closed" / "bin").mkdir(parents=True)
        (base / "closed").chmod(0o700)
        path = f"{base}/closed/bin:{base}/open:relative:{base}/absent"
        stranger = Account("other", "/", "/bin/sh", 61_234, 61_234)
        assert passable_path(path, stranger) == f"{base}/open"
        assert passable_path(f"{base}/closed/bin", stranger) == FALLBACK_PATH
        assert passable_path(path, find_account("")) == path, "of our own account nothing is hidden"
    finally:
        shutil.rmtree(base)


def test_a_rank_is_told_how_many_samples_fit_into_the_memory_of_its_gpus_where_that_binds_it() -> None:
    limits = BatchRange(256, 512, 8, 64, (GpuBatch("a100", 512), GpuBatch("t4", 16)))
    of_model = {name: replace(make_gpu(0), model=name) for name in ("NVIDIA A100-SXM4-80GB", "Tesla T4", "NVIDIA H200")}

    def told(batches: BatchRange, *models: str) -> str | None:
        env = common(on_node("n1", batches=batches), tuple([of_model[each] for each in models]))
        return env.get("SWARM_LOCAL_BATCH_MOST")

    assert [told(limits, each) for each in of_model] == [None, "16", "64"]
    assert told(limits, "NVIDIA H200", "Tesla T4") == "16", "one process with all of them"
    assert told(BatchRange(256, 256, 1, 256), "Tesla T4") is None
    assert told(BatchRange(), "Tesla T4") is None


def of_group(number: int, **more) -> TaskOrder:
    server = RankGroup("eval-1", ("serve",), ranks=2, env={"OWN": "1"})
    spec = JobSpec(("train",), ranks=4, env={"JOB": "1"}, group="worker", groups=(server,)).of_group(number)
    places = (
        GroupPlace("worker", 4, (NodeId("n1"), NodeId("n2")), Meeting("10.0.0.1", 23001)),
        GroupPlace("eval-1", 2, (NodeId("n2"),), Meeting("10.0.0.2", 23002)),
    )
    order = replace(on_node("n2"), spec=spec, groups=places, secret="abc", **more)
    return replace(order, shares=(Share(NodeId("n2"), 2, part=1, group=1),), part=1) if number else order


def test_ranks_of_a_group_are_told_of_it_as_of_a_job_and_of_all_groups_beside() -> None:
    worker, evaluator = of_group(0, first_number=2), of_group(1)
    assert [rank_environment(worker, index)["RANK"] for index in range(2)] == ["2", "3"]
    assert process_ranks(worker) == (4, 5)
    assert rank_environment(evaluator, 1) == {"RANK": "1", "LOCAL_RANK": "1", "SWARM_RANK": "1"}
    assert process_ranks(evaluator) == (0, 1)
    told, other = common(worker), common(evaluator)
    assert (told["WORLD_SIZE"], other["WORLD_SIZE"], other["NODE_RANK"]) == ("4", "2", "0")
    assert (told["JOB"], other["OWN"], "JOB" in other, "SWARM_WORKER" in other) == ("1", "1", False, False)
    assert (told["SWARM_GROUP"], other["SWARM_GROUP"]) == ("worker", "eval-1")
    for each in (told, other):
        assert each["SWARM_JOB_SECRET"] == "abc"
        assert each["SWARM_GROUPS"] == "worker,eval-1"
        assert (each["SWARM_GROUP_EVAL_1_HOST"], each["SWARM_GROUP_EVAL_1_PORT"]) == ("10.0.0.2", "23002")
        assert (each["SWARM_GROUP_WORKER_NODES"], each["SWARM_GROUP_WORKER_RANKS"]) == ("n1,n2", "4")
    assert not any(name.startswith("SWARM_GROUP") for name in common(on_node("n1")))


def test_a_group_on_one_node_reaches_another_ones_over_the_fabric() -> None:
    assert common(of_group(1), fabric_interface="eth0")["GLOO_SOCKET_IFNAME"] == "eth0"


def test_an_order_of_a_group_is_the_same_when_the_agent_has_started_again(tmp_path) -> None:
    for order in (of_group(0, first_number=2), of_group(1)):
        order = replace(order, configuration=Configuration(), secret="")  # which no file needs to have
        assert order_from_json(order_to_json(order, ()), tmp_path)[0] == order
    shares = json.loads(order_to_json(on_node("n1"), ()))["shares"]
    assert shares == [["n1", 2, 0], ["n2", 2, 0]], "as the released version reads them"

"""The environment of ranks: what of the agent's own they inherit, what the user set, and what torch expects.

Every rank of a node sees all GPUs that the job holds there, and LOCAL_RANK picks one: that is what torchrun's users
write (`torch.cuda.set_device(LOCAL_RANK)`).  With one visible GPU per rank such scripts would ask for GPU 1 of 1.
GPUs are named by UUID, so an order of enumeration cannot mix them up.  Simulated GPUs are never shown to CUDA: the
list is empty, and SWARM_SIMULATED_GPUS says how many there would be.

A job that asks for no GPU and has one rank for good is a plain command: it is not told of ranks, since many scripts
take RANK or LOCAL_RANK for the word of a launcher, and go to meet others.  With GPUs one rank is told as many are, so
that a script runs on one GPU as it does on eight.

Ranks of a job with several groups are told of their own group as if it were the job, and of all groups beside:
SWARM_GROUP, SWARM_GROUPS, and SWARM_GROUP_<NAME>_RANKS, _NODES, _HOST and _PORT for each.

Values win in this order: ours about rank, node and GPUs; the user's; defaults (PYTHONUNBUFFERED=1, so that output
appears when it is printed; OMP_NUM_THREADS, the cores of the node or of the rank's demand divided among ranks);
the agent's own, as far as the allow-list goes; the interfaces of ranks that meet others on other nodes.
"""

import fnmatch
import zlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from swarm_agent.supervision.tools import Tools
from swarm_agent.task.account import FALLBACK_PATH, Account, passable_path
from swarmsched.estimate import BatchRange
from swarmsched.resources import Gpu, ranks_by_node
from swarmsched.task import TaskOrder

NEVER = ("SWARM_TOKEN*", "SWARM_AGENT_*", "SWARM_CLUSTER_KEY*")
"""Not even an allow-list of '*' hands these on."""


def inherited(own: Mapping[str, str], allow: Sequence[str]) -> dict[str, str]:
    """The part of the agent's own environment that matches the allow-list."""
    return {
        name: value
        for name, value in own.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in allow)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in NEVER)
    }


def common_environment(
    order: TaskOrder,
    gpus: Sequence[Gpu],
    *,
    inherit: Mapping[str, str],
    account: Account,
    environment_dirs: Sequence[Path] = (),
    tools: Tools | None = None,
    task: Mapping[str, str] | None = None,
    cpu_count: int = 0,
    fabric_interface: str = "",
    workdir: Path = Path("/"),
) -> dict[str, str]:
    """What all ranks of this node share.

    `environment_dirs` are virtual environments, the first one wins; `tools` come after everything of the user's;
    `task` are further variables of ours; `cpu_count` are the node's cores; `fabric_interface` has the address under
    which ranks of other nodes reach this one's; `workdir` is where ranks start.
    """
    spec = order.spec
    env = {"PATH": FALLBACK_PATH, **_interface_variables(order, fabric_interface), **inherit}
    env["PATH"] = passable_path(env["PATH"], account)
    env |= {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
    env |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(_threads(order, cpu_count))}
    env |= spec.env
    for directory in reversed(environment_dirs):
        env["VIRTUAL_ENV"] = str(directory)
        env["PATH"] = f"{directory}/bin:{env['PATH']}"
        env.pop("PYTHONHOME", None)
    if tools:
        env["PATH"] = f"{env['PATH']}:{tools.bin_path}"
        env["PYTHONPATH"] = ":".join(filter(None, (env.get("PYTHONPATH"), str(tools.python_path))))
    meeting = (
        {} if order.is_worker else _torch_variables(order)
    )  # workers of an elastic job meet by what agents tell them
    slurm = _slurm_variables(order, len(gpus), account.name, workdir) if order.spec.slurm_env else {}
    return (
        env
        | _swarm_variables(order, gpus)
        | _group_variables(order)
        | _gpu_variables(gpus)
        | meeting
        | slurm
        | dict(task or {})
    )


def rank_environment(order: TaskOrder, local_rank: int) -> dict[str, str]:
    """What one rank has of its own.  Little with `per_node`: the launcher that it runs numbers its workers."""
    if order.spec.per_node:
        return _slurm_rank(order, order.node_rank, 0)
    number = order.first_rank - order.first_number + local_rank
    rank = str(number)
    if order.is_worker:  # its rank changes
        return {"LOCAL_RANK": "0", "SWARM_RANK": rank}
    slurm = _slurm_rank(order, number, local_rank)
    if _is_plain(order):
        return {"SWARM_RANK": rank, **slurm}
    return {"RANK": rank, "LOCAL_RANK": str(local_rank), "SWARM_RANK": rank, **slurm}


def _is_plain(order: TaskOrder) -> bool:
    spec = order.spec
    return spec.ranks == 1 and spec.ranks_most <= 1 and not spec.demand.gpus and not spec.per_node


def process_ranks(order: TaskOrder) -> tuple[int, ...]:
    """Numbers of the processes started on this node, among all ranks; one, its first, with `per_node`."""
    count = 1 if order.spec.per_node else order.local_ranks
    return tuple(range(order.first_rank, order.first_rank + count))


def _threads(order: TaskOrder, cpu_count: int) -> int:
    if order.spec.demand.cpus:
        return order.spec.demand.cpus
    beside = ranks_by_node(order.shares)[order.node]
    return max(1, cpu_count // max(1, beside))


def _swarm_variables(order: TaskOrder, gpus: Sequence[Gpu]) -> dict[str, str]:
    spec, nodes = order.spec, list(ranks_by_node(order.shares))
    return {
        "SWARM_JOB_ID": order.job_id,
        "SWARM_JOB_NAME": spec.name,
        "SWARM_ATTEMPT": str(order.attempt),
        "SWARM_EPOCH": str(order.epoch),
        "SWARM_NODE": order.node,
        "SWARM_NODES": ",".join(nodes),
        "SWARM_NNODES": str(len(nodes)),
        "SWARM_NODE_RANK": str(nodes.index(order.node)),
        "SWARM_GPUS": ",".join(gpu.uuid for gpu in gpus),
        "SWARM_GRACE_SECONDS": f"{spec.grace_s:g}",
        **({"SWARM_WORKER": str(order.part)} if order.is_worker else {}),
        **({"SWARM_OUTER": spec.outer} if spec.outer else {}),
        **_local_batch(spec.batches, gpus),
    } | ({"SWARM_GLOBAL_BATCH": str(batch)} if (batch := order.global_batch or spec.batches.first) else {})


def _group_variables(order: TaskOrder) -> dict[str, str]:
    """Where the other groups are; the port of each is kept for its first rank to listen on, and is its MASTER_PORT."""
    if not order.groups:
        return {}
    variables = {"SWARM_GROUP": order.spec.group, "SWARM_GROUPS": ",".join([each.name for each in order.groups])}
    variables["SWARM_JOB_SECRET"] = order.secret
    for each in order.groups:
        name = f"SWARM_GROUP_{each.name.upper().replace('-', '_')}"
        variables |= {f"{name}_RANKS": str(each.ranks), f"{name}_NODES": ",".join(each.nodes)}
        if each.meeting.port:
            variables |= {f"{name}_HOST": each.meeting.host, f"{name}_PORT": str(each.meeting.port)}
    return variables


def _local_batch(batches: BatchRange, gpus: Sequence[Gpu]) -> dict[str, str]:
    """How many samples a rank may take at once on the GPUs that it has here, where that binds it."""
    most = batches.on("+".join({gpu.model for gpu in gpus})).local_most
    return {"SWARM_LOCAL_BATCH_MOST": str(most)} if most < batches.most else {}


def _interface_variables(order: TaskOrder, interface: str) -> dict[str, str]:
    """Over which interface ranks of several nodes meet.

    By themselves gloo and tensorpipe take that of the host's own name, which may be loopback.  NCCL takes a prefix of
    a name unless told otherwise, and knows no labels of addresses.  UCX is told nothing: it would use nothing else.
    """
    nodes = {*ranks_by_node(order.shares), *[node for each in order.groups for node in each.nodes]}
    is_alone = len(nodes) == 1 and not order.is_worker
    if is_alone or not interface:
        return {}
    device = interface.partition(":")[0]
    return {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={device}"}


def _gpu_variables(gpus: Sequence[Gpu]) -> dict[str, str]:
    simulated = sum(gpu.is_simulated for gpu in gpus)
    real = [gpu.uuid for gpu in gpus if not gpu.is_simulated]
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(real)}
    return variables | ({"SWARM_SIMULATED_GPUS": str(simulated)} if simulated else {})


def _torch_variables(order: TaskOrder) -> dict[str, str]:
    """env:// of torch.distributed; with `per_node`, torchrun's defaults (it reads each option from PET_<OPTION>)."""
    host, port = order.rendezvous_host, str(order.rendezvous_port)
    where = {"MASTER_ADDR": host, "MASTER_PORT": port}
    if _is_plain(order):
        return where
    if not order.spec.per_node:
        return where | {
            "WORLD_SIZE": str(order.world_size),
            "LOCAL_WORLD_SIZE": str(order.local_ranks),
            "NODE_RANK": str(order.node_rank),
            "GROUP_RANK": str(order.node_rank),
            "GROUP_WORLD_SIZE": str(len(order.shares)),
        }
    return where | {
        "NODE_RANK": str(order.node_rank),
        "NNODES": str(len(order.shares)),
        "PET_NNODES": str(len(order.shares)),
        "PET_NODE_RANK": str(order.node_rank),
        "PET_NPROC_PER_NODE": str(_workers(order)),
        "PET_MASTER_ADDR": f"[{host}]" if ":" in host else host,
        "PET_MASTER_PORT": port,
        "PET_RDZV_ID": f"{order.job_id}.{order.attempt}",
    }


def _workers(order: TaskOrder) -> int:
    """Workers that a launcher should start on this node: one per GPU, or one per rank without GPUs."""
    return max(1, order.local_ranks * max(1, order.spec.demand.gpus))


def slurm_job_id(job_id: str) -> str:
    """A number made of the job's id: scripts reckon with Slurm's."""
    return str(zlib.crc32(job_id.encode()) or 1)


def _slurm_rank(order: TaskOrder, rank: int, local_rank: int) -> dict[str, str]:
    if not order.spec.slurm_env:
        return {}
    return {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank)}


def _slurm_variables(order: TaskOrder, gpus: int, user: str, workdir: Path) -> dict[str, str]:
    """What scripts written for Slurm look for, by its names; a process of ours is a task of Slurm's."""
    spec, number = order.spec, slurm_job_id(order.job_id)
    by_node = {node: 1 if spec.per_node else ranks for node, ranks in ranks_by_node(order.shares).items()}
    runs = [(ranks, len(list(run))) for ranks, run in groupby(by_node.values())]
    nodes, tasks = ",".join(by_node), str(sum(by_node.values()))
    variables = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), number),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), nodes),
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(by_node))),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), tasks),
        "SLURM_JOB_NAME": spec.name or Path(spec.command[0]).name,
        "SLURM_JOB_USER": user,
        "SLURM_NODEID": str(list(by_node).index(order.node)),
        "SLURMD_NODENAME": order.node,
        "SLURM_STEP_ID": "0",
        "SLURM_RESTART_COUNT": str(order.attempt - 1),
        "SLURM_TASKS_PER_NODE": ",".join(f"{ranks}(x{count})" if count > 1 else str(ranks) for ranks, count in runs),
        "SLURM_LAUNCH_NODE_IPADDR": order.rendezvous_host,
        "SLURM_SUBMIT_DIR": str(workdir),
    }
    if len(runs) == 1:
        variables["SLURM_NTASKS_PER_NODE"] = str(runs[0][0])
    if gpus:
        variables["SLURM_GPUS_ON_NODE"] = str(gpus)
    if spec.demand.cpus:
        variables["SLURM_CPUS_PER_TASK"] = str(spec.demand.cpus * (order.local_ranks if spec.per_node else 1))
    return variables

"""Replays on servers whose cores, networks and classes differ, of jobs that tell what their steps compute and move."""

import pytest
from msgspec.structs import replace

from swarmsched.estimate import StepCost
from swarmsched.replay.cluster import Fleet, read_cluster
from swarmsched.replay.knowledge import NothingKnown
from swarmsched.replay.perfect import Ticks
from swarmsched.replay.setup import Replay, prepared
from swarmsched.replay.table import rows
from swarmsched.replay.workload import trace_jobs
from swarmsched.view import PolicySetting
from tests.swarmsched.replay.testing import ends, replay, rigid

HEAD = "node,gpus,gpu_model,cores,network_mbit_s"
COMPUTES = StepCost(32, 2e12, 1e8, 1e8)
DECODES = StepCost(32, 5e9, 1e6, 1e6, decode_core_s=0.001)
MOVES_MUCH = StepCost(4, 1e11, 5e9, 5e9)


def servers(*told: str) -> Fleet:
    return read_cluster("servers.csv", [HEAD, *told])


def took_s(work: StepCost | None, cluster: Fleet, gpus: int = 2, policy: str = "fifo") -> float:
    """Of a job that takes 100 s on two GPUs of the usual class, with cores and 10 Gbit/s."""
    job = rigid(1, 0.0, gpus, 100.0)
    job.work = work
    return ends(replay([job], policy, cluster, knowledge=NothingKnown()))["job1"]


@pytest.mark.parametrize(
    ("work", "told", "before", "now"),
    [
        (COMPUTES, ("a,2,T4,32,", "b,3,A100,32,", "c,4,T4,32,"), 100.0, 100.0 * 65 / 312),
        (DECODES, ("a,2,T4,4,", "b,3,T4,33,"), 455.0, 100.0),
        (MOVES_MUCH, ("a,1,T4,32,1000", "b,1,T4,32,1000", "c,1,T4,32,40000", "d,1,T4,32,40000"), 1000.0, 28.0),
    ],
)
def test_a_job_is_as_fast_as_its_servers_let_it_be_and_policies_choose_them(
    work: StepCost, told: tuple[str, ...], before: float, now: float
) -> None:
    """`before`: on the fewest nodes, where a job that tells nothing is placed."""
    cluster = servers(*told)
    assert took_s(work, cluster) == pytest.approx(now, rel=0.2)
    first = servers(*told[: 1 if work is not MOVES_MUCH else 2])
    assert took_s(work, first) == pytest.approx(before, rel=0.2)
    assert took_s(None, cluster) == 100.0


def test_jobs_on_one_server_share_its_cores() -> None:
    jobs = [rigid(number, 0.0, 1, 100.0) for number in (1, 2)]
    for job in jobs:
        job.work = replace(DECODES, decode_core_s=0.002)
    alone = ends(replay(jobs[:1], "fifo", servers("a,2,T4,8,"), knowledge=NothingKnown()))["job1"]
    for job in jobs:
        job.progress, job.shares, job.ended_s = 0.0, (), None
    both = ends(replay(jobs, "fifo", servers("a,2,T4,8,"), Ticks(0, 0), NothingKnown()))
    assert both["job1"] == both["job2"] == pytest.approx(alone * 7 / 3, rel=1e-4)


@pytest.mark.parametrize("view", ["perfect", "gossip"])
def test_tables_tell_it_whichever_view_policies_have(view: str) -> None:
    head = "submit_time_s,job_id,num_gpus,duration_s,parameter_bytes,local_batch,sample_flops"
    jobs = trace_jobs(rows("jobs.csv", [head, "0,a,2,100,100000000,32,2000000000000", "0,b,1,50,,,"], ()))
    assert [job.work for job in jobs] == [COMPUTES, None]
    settings = Replay(PolicySetting("backfill"), servers("a,2,T4,32,", "b,3,A100,32,", "c,4,T4,32,"), view=view)
    times = ends(prepared(jobs, {}, settings).run())
    assert times["a"] < 60.0
    assert times["b"] >= 50.0

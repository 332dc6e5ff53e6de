"""Tables of steps a second: how jobs go by them, and what of them cannot be used."""

import pytest

from swarmsched.errors import ConfigError
from swarmsched.replay.cluster import Fleet, read_cluster
from swarmsched.replay.perfect import Ticks
from swarmsched.replay.rates import Rates, rated, read_rates
from swarmsched.replay.setup import Replay, prepared
from swarmsched.replay.table import rows
from swarmsched.replay.workload import TraceJob, trace_jobs
from swarmsched.view import PolicySetting
from tests.swarmsched.replay.testing import ends, traces

GLOBAL = ["model,global_batch_size,num_gpus,iterations_per_s", "a,64,1,1.0", "a,64,2,1.6", "a,64,4,2.0"]
EACH = [
    "gpu,consolidated,model,batch_size,num_gpus,steps_per_s",
    "v100,1,b,16,1,4.0", "v100,1,b,16,2,3.0", "v100,0,b,16,2,2.0", "k80,1,b,16,1,1.0", "k80,1,b,16,2,0",
]  # fmt: skip


def speeds(lines: list[str], model: str, batch: int) -> Rates:
    return read_rates("speeds.csv", lines)[model][batch]


def test_steps_between_two_measured_sizes_take_what_lies_between_and_beyond_the_largest_as_long_as_there() -> None:
    rates = speeds(GLOBAL, "a", 64)
    assert [rates.rate(gpus, frozenset()) for gpus in (1, 2, 4, 8)] == [1.0, 1.6, 2.0, 2.0]
    assert 1.0 / rates.rate(3, frozenset()) == pytest.approx((1 / 1.6 + 1 / 2.0) / 2)


def test_a_step_waits_for_the_slowest_class_and_is_slower_apart_where_that_was_measured() -> None:
    rates = speeds(EACH, "b", 16)
    v100, both = frozenset(["v100"]), frozenset(["v100", "k80"])
    assert (rates.rate(2, v100), rates.rate(2, v100, is_together=False)) == (3.0, 2.0)
    assert (rates.rate(1, both), rates.rate(1, frozenset())) == (1.0, 1.0)
    assert rates.rate(2, frozenset(["k80"])) == 0.0, "it does not fit there"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["model,num_gpus,steps_per_s", "a,1,1"], "has no column 'global_batch_size'"),
        (["model,num_gpus,batch_size", "a,1,1"], "has no column 'iterations_per_s'"),
        (["model,batch_size,steps_per_s", "a,1,1"], "has no column 'num_gpus'"),
        ([GLOBAL[0], "a,64,0,1.0"], "row 2, num_gpus: '0' cannot be used"),
        ([GLOBAL[0], "a,64,1000000000,1.0"], "row 2, num_gpus: '1000000000' cannot be used"),
        ([GLOBAL[0], "a,64,1,1.0", "a,64,2,-1"], "row 3, iterations_per_s: '-1' cannot be used"),
        ([GLOBAL[0], "a,64,1,nan"], "row 2, iterations_per_s: 'nan' cannot be used"),
    ],
)
def test_what_cannot_be_used_is_named_by_file_row_and_column(lines: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=r"speeds\.csv") as refused:
        read_rates("speeds.csv", lines)
    assert text in str(refused.value)


@pytest.mark.parametrize("policy", ["swarm", "fifo"])
def test_a_job_that_does_not_fit_its_gpus_reports_no_step(policy: str) -> None:
    table = read_rates("speeds.csv", [GLOBAL[0], "a,64,1,0", "a,64,2,0", "a,64,4,3"])
    settings = Replay(PolicySetting(policy), Fleet.even(1, 4), "learned")
    jobs = [TraceJob(name, 0.0, 1, model="a", batch=64, steps=50.0) for name in "78"]
    observer = prepared(jobs, table, settings).run()
    assert observer.unfinished()[0]["reason"].startswith("makes no progress on the ")


def test_a_batch_that_was_not_measured_is_named_with_those_that_were() -> None:
    with pytest.raises(ConfigError, match="job '7', batch_size") as refused:
        rated(TraceJob("7", 0.0, 1, model="a", batch=32, steps=1.0), read_rates("speeds.csv", GLOBAL)["a"], 4)
    assert refused.value.remedy == "one of 64"


def run(job: TraceJob, lines: list[str], policy: str, knows: str = "perfect", cluster: Fleet | None = None) -> float:
    settings = Replay(PolicySetting(policy), cluster or Fleet.even(1, 4), knows, Ticks(5.0, 0.0))
    (end_s,) = ends(prepared([job], read_rates("speeds.csv", lines), settings).run()).values()
    return end_s


def test_a_job_takes_its_steps_at_the_speed_of_its_gpus_and_where_batches_are_global_any_number_of_them() -> None:
    job = TraceJob("j", 0.0, 2, model="a", batch=64, steps=160.0)
    assert run(job, GLOBAL, "fifo") == pytest.approx(160.0 / 1.6)
    assert run(job, GLOBAL, "swarm") == pytest.approx(160.0 / 2.0)
    assert run(job, GLOBAL, "swarm", "declared") <= 160.0 / 1.6 + 5.0


def test_where_batches_are_those_of_a_gpu_a_job_keeps_its_size_and_goes_by_the_class_of_its_server() -> None:
    job = TraceJob("j", 0.0, 1, model="b", batch=16, steps=40.0)
    slow, fast = (read_cluster("servers.csv", ["node,gpus,gpu_model", f"n1,4,{gpu}"]) for gpu in ("k80", "v100"))
    assert (run(job, EACH, "swarm", cluster=fast), run(job, EACH, "srtf", cluster=slow)) == (10.0, 40.0)
    with pytest.raises(ConfigError, match="has several classes for model 'b'"):
        run(job, EACH, "fifo")


def test_published_run_times_follow_from_published_speeds() -> None:
    """195 jobs of a production cluster, by the speeds that were measured with their models on A100."""
    folder = traces()
    table = (folder / "profiles" / "elasticflow_throughput.csv").read_text(encoding="utf-8").splitlines()
    rates = read_rates("speeds.csv", [line for line in table if not line.startswith("T4")])
    name = folder / "workloads" / "itp195_jobs.csv"
    jobs = trace_jobs(rows(str(name), name.read_text(encoding="utf-8").splitlines(), ("job_id",)))
    assert len(jobs) == 195
    for job in jobs:
        physics = rated(job, rates[job.model], 8)
        assert job.steps / physics.pace((job.gpus,), 0, 0.0).rate == pytest.approx(job.duration_s, rel=0.002)

"""Others' formats: tiny recordings, written here as their authors describe them, and what is left out of them."""

import csv
import json
from collections.abc import Mapping
from io import StringIO

import pytest

from swarmsched.errors import ConfigError
from swarmsched.replay.formats import FORMATS, TOLD, Imported, imported
from swarmsched.replay.measurements import folder_profiles
from swarmsched.replay.perfect import Ticks
from swarmsched.replay.profiles import Profile
from swarmsched.replay.rates import read_rates
from swarmsched.replay.setup import Replay, prepared
from swarmsched.replay.table import rows, select
from swarmsched.replay.workload import JOBS, TraceJob, trace_jobs
from swarmsched.view import PolicySetting

PLACEMENTS = (
    "placement,local_bsz,step_time,sync_time\n"
    "1,8,1.0,0.0\n1,16,2.0,0.0\n2,8,1.5,0.5\n2,16,2.5,0.5\n11,8,2.0,1.0\n11,16,3.0,1.0\n"
)
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n4,4,8,2.5,1.5\n4,4,16,3.5,1.5\n"
EPOCHS = "progress,iteration,metric,grad_sqr,grad_var\n100,100,0.5,1.0,1.0\n200,200,0.6,1.0,1.0\n"
WORKLOAD = "name,time,application,num_replicas,batch_size\ntoy-0,5,toy,1,8\ntoy-1,20,toy,2,16\n"
POLLUX = {
    "simulator/applications.py": 'A = {"toy": Application(here("toy"), max_epochs=1, max_local_bsz=12)}\n',
    "simulator/traces/toy/placements.csv": PLACEMENTS,
    "simulator/traces/toy/scalability.csv": SCALABILITY,
    "simulator/traces/toy/validation-8.csv": EPOCHS,
    "simulator/traces/toy/validation-32.csv": EPOCHS,
    "simulator/workloads/workload-3.csv": WORKLOAD,
    "simulator/workloads-2.0/workload-3.csv": WORKLOAD,
    "simulator/results-jobload/optimus-2.0/summary.json": json.dumps(
        {"jcts": {"workload-3": {"toy-0": 100, "toy-1": 300}}, "mean": 200}
    ),
    "README.md": "Not read.",
}
SIA = {
    "applications.py": (
        'if self.name == "toy":\n    self.rescale_time = 25\nelif self.name == "gone":\n    self.rescale_time = 9\n'
        'A = {"fast": {"toy": Application("toy", max_epochs=2), "wide": Parallel("wide", num_stages=8)}}\n'
    ),
    "traces/toy/placements-fast-ext.csv": PLACEMENTS,
    "traces/toy/scalability-fast-ext.csv": SCALABILITY,
    "traces/toy/placements-slow.csv": PLACEMENTS.replace("1,16,2.0,0.0\n", "1,10,9.0,0.0\n").replace(",16,", ",10,"),
    "traces/toy/validation-8.csv": EPOCHS,
    "traces/toy/validation-32.csv": EPOCHS,
    "traces/wide/placements-slow.csv": PLACEMENTS,
    "workloads/new/part/workload-1.csv": WORKLOAD,
}
PHILLY = """[
  {"status": "Pass", "vc": "v1", "jobid": "a", "submitted_time": "2017-10-07 01:00:00", "user": "u", "attempts": [
    {"start_time": "2017-10-07 01:01:00", "end_time": "2017-10-07 01:02:00", "detail": [{"ip": "m", "gpus": ["gpu0"]}]},
    {"start_time": "2017-10-07 01:02:00", "end_time": "2017-10-07 01:04:00",
     "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]},
    {"start_time": null, "end_time": null, "detail": []}]},
  {"status": "Killed", "vc": "v2", "jobid": "b", "submitted_time": "2017-10-07 00:59:30", "user": "w", "attempts": [
    {"start_time": "2017-10-07 01:01:00", "end_time": "2017-10-07 01:01:30", "detail": [{"ip": "m", "gpus": ["g"]}]}]},
  {"status": "Failed", "vc": "v2", "jobid": "c", "submitted_time": "2017-10-07 00:59:30", "user": "w", "attempts": []},
  {"status": "Pass", "vc": "v1", "jobid": "d"},
  {"status": "Pass", "vc": "v1", "jobid": "\\u0007", "submitted_time": "2017-10-07 00:59:30", "attempts": [
    {"start_time": "2017-10-07 01:01:00", "end_time": "2017-10-07 01:01:30", "detail": [{"ip": "m", "gpus": ["g"]}]}]},
  7
]
"""
HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    "11,u1,vcA,4,16,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-09 18:42:41,100,0\n"
    "12,u2,vcA,0,16,1,FAILED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-09 18:42:41,100,0\n"
    "13,u2,vcB,1,1,1,FAILED,2020-06-09 18:40:01,2020-06-09 18:41:01,2020-06-09 18:41:51,50,60\n"
    "14,u2,vcB,1,1,1,CANCELLED,2020-06-09 18:40:01,None,None,0,0\n"
    "15,u2,vcB,one,1,1,CANCELLED,2020-06-09 18:40:01,None,None,9,0\n"
    "16,u2,vcB,1,1,1,CANCELLED,yesterday,None,None,9,0\n"
    "17,u2\n"
    "11,u1,vcA,4,16,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-09 18:42:41,100,0\n"
)
TASKS = (
    "j1,ps,1.0,Terminated,100.0,250.0,600.0,29.3,,MISC\n"
    "j1,worker,3.0,Terminated,110.0,200.0,600.0,29.3,50.0,T4\n"
    "j2,tensorflow,2.0,Failed,50.0,80.0,600.0,29.3,100.0,V100\n"
    "j3,worker,1.0,Running,50.0,,600.0,29.3,100.0,V100\n"
    "j4,worker,1.0,Terminated,50.0,50.0,600.0,29.3,100.0,V100\n"
)
OWNERS = "j1,i1,ann,Terminated,90.0,260.0\nj2,i2,bob,Failed,40.0,80.0\n"
ITP = (
    "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"
    "u-1,60,400,bert,900,64,2,50\nu-0,0,100,bert,800,64,1,100\nu-2,70,100,bert,60,64,1,100\n"
)
OLDER = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration\n0,0,100,bert,800,64,1,100\n"
RAW = "job_id,submission_time,duration,num_gpu\nr,5,10,8\n"
SPEEDS = "global_batch_size,1,2,4\n64,1.0,8.0,0\n"


def read(format_name: str, files: Mapping[str, str]) -> Imported:
    return imported(format_name, files, lambda name: StringIO(files[name]))


def jobs_of(found: Imported, name: str, **chosen: str) -> list[TraceJob]:
    """As a replay reads them."""
    return trace_jobs(select(rows(name, StringIO(found.tables[f"workloads/{name}_jobs.csv"]), JOBS), chosen))


def columns_of(found: Imported, table: str, *columns: str) -> list[tuple[str, ...]]:
    return [tuple(row[column] for column in columns) for row in csv.DictReader(StringIO(found.tables[table]))]


def profiles_of(found: Imported) -> dict[str, Profile]:
    names = [name.removeprefix("profiles/") for name in found.tables if name.startswith("profiles/")]
    return folder_profiles("profiles", names, lambda name: StringIO(found.tables[f"profiles/{name}"]))


def test_pollux_gives_workloads_by_load_profiles_with_their_limits_and_published_results() -> None:
    found = read("pollux", POLLUX)
    assert (found.skipped, found.notes) == ([], [])
    jobs = jobs_of(found, "pollux", load="2.0", workload="3")
    assert [(job.job_id, job.submitted_s, job.model, job.gpus, job.batch) for job in jobs] == [
        ("toy-0", 5.0, "toy", 1, 8),
        ("toy-1", 20.0, "toy", 2, 16),
    ]
    assert len(jobs_of(found, "pollux", load="1.0")) == 2
    toy = profiles_of(found)["toy"]
    assert (toy.limits.initial_batch, toy.limits.batch_max, toy.limits.epochs) == (8, 32, 1)
    assert (toy.limits.local_batch_min, toy.limits.local_batch_max) == (8, 12)
    assert toy.step_time((2,), 12) == (2.0, 0.5)
    assert toy.step_time((1, 1, 1, 1), 8) == (2.5, 1.5)
    gain = 2.0 / (1.0 / 2.0 + 1.0)
    assert [job.duration_s for job in jobs] == [100.0, round(100 * 1.5 / gain, 1)]
    run = prepared(jobs, {"toy": toy}, Replay(PolicySetting("fifo"), pacing=Ticks(0.0, 0.0))).run()
    assert {job.label: round((job.ended_s or 0.0) - job.submitted_s, 1) for job in run.finished} == {
        job.job_id: job.duration_s for job in jobs
    }
    figures = ("load", "workload", "policy", "jobs", "avg_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s")
    assert columns_of(found, "reference/pollux_summary.csv", *figures) == [
        ("2.0", "3", "optimus", "2", "200.0", "200.0", "298.0", "315.0")
    ]


def test_rows_that_cannot_be_used_are_told_by_file_and_line_and_the_others_count() -> None:
    broken = {
        **POLLUX,
        "simulator/workloads/workload-3.csv": WORKLOAD + "toy-2,1,other,1,8\ntoy-3,x,toy,1,8\ntoy-0,1,toy,1,8\n,\n",
        "simulator/traces/toy/placements.csv": PLACEMENTS + "1,12,1.0,2.0\n",
        "simulator/results-jobload/optimus-2.0/summary.json": "{",
    }
    found = read("pollux", broken)
    assert [job.job_id for job in jobs_of(found, "pollux", load="1.0")] == ["toy-0", "toy-1"]
    place = "simulator/workloads/workload-3.csv, row"
    assert [error.key for error in found.skipped] == [
        "simulator/traces/toy/placements.csv, row 8, sync_time",
        f"{place} 7",
        f"{place} 4, application",
        f"{place} 5, time",
        f"{place} 6",
        "simulator/results-jobload/optimus-2.0/summary.json",
    ]


def test_sia_gives_profiles_by_class_with_what_all_classes_hold_and_what_a_start_costs() -> None:
    found = read("sia", SIA)
    toy = profiles_of(found)["toy"]
    assert toy.classes == {"fast-ext", "slow"}
    assert (toy.limits.local_batch_min, toy.limits.local_batch_max) == (8, 10)
    assert toy.on(["slow"]).step_time((1,), 10).step_s == 9.0
    assert columns_of(found, "restart_costs.csv", "model", "seconds") == [("toy", "25")]
    assert [job.batch for job in jobs_of(found, "sia", set="new/part", workload="1")] == [8, 16]
    assert found.notes == ["wide is left out: it has no epochs of two batches, or is not data-parallel"]


def test_two_simulators_in_one_folder_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match="has profiles in 2 places") as error:
        read("sia", {**SIA, "adaptdl/traces/toy/placements-slow.csv": PLACEMENTS})
    assert "adaptdl/" in error.value.remedy


def test_philly_counts_the_attempts_of_a_job_that_ended_on_the_most_gpus_of_any() -> None:
    found = read("philly", {"trace/cluster_job_log": PHILLY, "trace/cluster_gpu_util": "not read"})
    jobs = jobs_of(found, "philly")
    assert [(job.job_id, job.submitted_s, job.gpus, job.duration_s, job.user) for job in jobs] == [
        ("b", 0.0, 1, 30.0, "w"),
        ("a", 30.0, 3, 180.0, "u"),
    ]
    assert [job.job_id for job in jobs_of(found, "philly", cluster="v2")] == ["b"]
    assert found.notes == ["attempts not counted, without a beginning or an end: 1"]
    place = "trace/cluster_job_log, row"
    assert [error.key for error in found.skipped] == [
        f"{place} 9, attempts",
        f"{place} 10",
        f"{place} 11, jobid",
        f"{place} 13",
    ]


@pytest.mark.parametrize("text", ['{"a": 1}', '[{"vc": "v"', "[1,", ""])
def test_a_broken_log_of_philly_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cluster_job_log"):
        read("philly", {"cluster_job_log": text})


def test_helios_gives_the_jobs_with_gpus_of_each_cluster() -> None:
    found = read("helios", {"data/Venus/cluster_log.csv": HELIOS})
    jobs = jobs_of(found, "helios", cluster="Venus")
    assert [(job.job_id, job.submitted_s, job.gpus, job.duration_s, job.user) for job in jobs] == [
        ("13", 0.0, 1, 50.0, "u2"),
        ("11", 60.0, 4, 100.0, "u1"),
    ]
    assert found.notes == ["jobs left out, which want no GPU: 1"]
    assert [error.key.removeprefix("data/Venus/cluster_log.csv, row ") for error in found.skipped] == [
        "8",
        "5, duration",
        "6, gpu_num",
        "7, submit_time",
        "9",
    ]


@pytest.mark.parametrize("has_header", [False, True])
def test_pai_adds_up_the_tasks_of_a_job_and_rounds_parts_of_gpus_up(has_header: bool) -> None:
    headers = ("", "")
    if has_header:
        headers = (
            "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n",
            "job_name,inst_id,user,status,start_time,end_time\n",
        )
    found = read("pai", {"pai_task_table.csv": headers[0] + TASKS, "pai_job_table.csv": headers[1] + OWNERS})
    jobs = jobs_of(found, "pai")
    assert [(job.job_id, job.submitted_s, job.gpus, job.duration_s, job.user) for job in jobs] == [
        ("j2", 0.0, 2, 30.0, "bob"),
        ("j1", 50.0, 2, 90.0, "ann"),
    ]
    assert columns_of(found, "workloads/pai_jobs.csv", "gpu_type") == [("V100",), ("T4",)]
    assert len(found.notes) == 2
    first = 4 + has_header
    assert [error.key for error in found.skipped] == [
        f"pai_task_table.csv, row {first}, end_time",
        f"pai_task_table.csv, row {first + 1}, end_time",
    ]


def test_pai_without_its_table_of_jobs_says_what_is_not_known() -> None:
    found = read("pai", {"pai_task_table.csv": TASKS})
    assert [job.submitted_s for job in jobs_of(found, "pai")] == [0.0, 60.0]
    assert any("no pai_job_table.csv" in note for note in found.notes)


def test_elasticflow_gives_deadlines_and_speeds_that_a_replay_goes_by() -> None:
    files = {"t/195job_endtoend_trace.csv": ITP, "t/older.csv": OLDER, "t/raw.csv": RAW, "t/figure.csv": "x,y\n1,2\n"}
    found = read("elasticflow", {**files, "scheduler/throughputs_A100/bert.csv": SPEEDS})
    assert sorted(found.jobs) == [f"workloads/{name}_jobs.csv" for name in ("itp195", "older", "raw")]
    jobs = jobs_of(found, "itp195")
    assert [(job.job_id, job.deadline_s, job.steps) for job in jobs] == [("u-0", 800.0, 100.0), ("u-1", 900.0, 400.0)]
    assert [error.key for error in found.skipped] == ["t/195job_endtoend_trace.csv, row 4, deadline"]
    assert jobs_of(found, "older")[0].deadline_s == 800.0
    assert jobs_of(found, "raw")[0].gpus == 8
    speeds = read_rates("speeds.csv", StringIO(found.tables["profiles/elasticflow_throughput.csv"]))
    run = prepared(jobs, speeds, Replay(PolicySetting("fifo"), pacing=Ticks(0.0, 0.0))).run()
    ends = {job.label: job.ended_s for job in run.finished}
    assert ends == {"u-0": pytest.approx(100.0), "u-1": pytest.approx(110.0)}
    assert found.notes == ["speeds of bert on A100 left out, empty or 0: 1"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_of_something_else_is_refused_with_what_is_looked_for(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(name, {"notes.txt": "", "figure.csv": "x,y\n1,2\n"})
    assert (f"nothing of the format {name}" in str(error.value), TOLD[name] in error.value.remedy) == (True, True)


def test_where_every_row_is_bad_the_first_is_named_and_an_unknown_format_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"the first of 1 bad rows: cluster_log.csv, row 2, gpu_num"):
        read("helios", {"cluster_log.csv": HELIOS.splitlines(keepends=True)[0] + "1,u,v,x,1,1,S,2020-06-09,,,5,0\n"})
    with pytest.raises(ConfigError, match=r"'polux' is not known"):
        read("polux", {})

"""Workloads are read strictly: what is wrong is named by file, row and column."""

import re

import pytest

from swarmsched.errors import ConfigError
from swarmsched.replay.table import rows as table_rows
from swarmsched.replay.table import select
from swarmsched.replay.workload import JOBS, OPTIONAL, TraceJob, gpu_batches, gpu_speeds, restart_costs, trace_jobs

HEAD = "job_id,submit_time_s,num_gpus,duration_s,model,user"
ROWS = ("b,10,2,5.5,,ada", "a,0,1,7,bert,")


def read(*rows: str) -> list[TraceJob]:
    return trace_jobs(table_rows("jobs.csv", [HEAD, *rows], JOBS))


def test_jobs_come_in_order_of_their_submission() -> None:
    first, second = read(*ROWS)
    assert (first.job_id, first.gpus, first.duration_s, first.model) == ("a", 1, 7.0, "bert")
    assert (second.submitted_s, second.kind, first.user, second.user) == (10.0, "", "", "ada")
    assert (first.place, second.place) == ("jobs.csv, row 3, job 'a'", "jobs.csv, row 2, job 'b'")
    assert "bert" not in first.kind
    assert [job.job_id for job in read("j10,0,1,7,,", "j9,0,1,7,,")] == ["j10", "j9"], "names decide nothing"


def test_times_of_a_calendar_are_answered_by_where_to_count_from() -> None:
    with pytest.raises(ConfigError) as found:
        read("a,1700000000,1,7,,")
    assert found.value.remedy == "seconds since the first submission, from 0 to 100,000,000"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("a,nan,1,7,,", "submit_time_s: 'nan'"),
        ("a,-1,1,7,,", "submit_time_s: '-1'"),
        ("a,soon,1,7,,", "submit_time_s: 'soon'"),
        ("a,,1,7,,", "submit_time_s: is empty"),
        ("a,1700000000,1,7,,", "submit_time_s: '1700000000'"),
        ("a,0,,7,,", "num_gpus: is empty"),
        ("a,0,0,7,,", "num_gpus: '0'"),
        ("a,0,1_0,7,,", "num_gpus: '1_0'"),
        (",0,1,7,,", "job_id: is empty"),
        ("a,0,1,1e308,,", "duration_s: '1e308'"),
        ("a,0,1,7,be\trt,", "model: 'be\\trt'"),
        ("a,0,1,7,,\x07", "user: '\\x07'"),
        ("a" * 256 + ",0,1,7,,", f"job_id: '{'a' * 57}...' has 256 characters"),
    ],
)
def test_a_cell_that_cannot_be_used_is_named(row: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"jobs.csv, row 2, {told}")):
        read(row)


def test_a_job_that_is_there_twice_is_named_with_both_rows_unless_one_of_them_was_chosen() -> None:
    with pytest.raises(ConfigError, match=r"jobs\.csv, row 4, job_id: 'b' is there twice, first in jobs\.csv, row 2"):
        read(*ROWS, "b,20,1,7,,")
    table = table_rows("jobs.csv", [HEAD, *ROWS, "b,20,1,7,,eve"], JOBS)
    assert [job.job_id for job in trace_jobs(select(table, {"user": "eve"}))] == ["b"]


WIDE = "job_id,submit_time_s,num_gpus,min_gpus,max_gpus,priority,time_limit_s,deadline_s,restartable,failure"


def wide(row: str) -> TraceJob:
    (job,) = trace_jobs(table_rows("jobs.csv", [WIDE, row], JOBS))
    return job


def test_a_row_may_say_what_its_user_would_and_an_empty_cell_says_nothing() -> None:
    job = wide("a,5,2,1,8,-3,60,100,Yes,0.25")
    assert (job.gpus_least, job.gpus_most, job.priority, job.time_limit_s) == (1, 8, -3, 60.0)
    assert (job.deadline_s, job.restartable, job.failure) == (100.0, True, 0.25)
    assert wide("a,5,2,,,,,,0,").restartable is False
    silent = wide("a,5,2,,,,,,,")
    assert (silent.gpus_least, silent.gpus_most, silent.priority, silent.time_limit_s) == (0, 0, 0, 0.0)
    assert (silent.deadline_s, silent.restartable, silent.failure) == (0.0, None, 0.0)
    assert {*WIDE.split(",")} - {*JOBS} <= {*OPTIONAL}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("a,5,2,0,,,,,,", "min_gpus: '0'"),
        ("a,5,2,4,3,,,,,", "max_gpus: 3 is less than the 4 of min_gpus"),
        ("a,5,2,,,1.5,,,,", "priority: '1.5' is not whole"),
        ("a,5,2,,,1001,,,,", "priority: '1001'"),
        ("a,5,2,,,,0,,,", "time_limit_s: '0'"),
        ("a,5,2,,,,,5,,", "deadline_s: '5' has passed when the job is submitted, at 5"),
        ("a,5,2,,,,,,maybe,", "restartable: 'maybe'"),
        ("a,5,2,,,,,,,1.5", "failure: '1.5'"),
    ],
)
def test_a_word_of_a_user_that_says_nothing_is_named(row: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"jobs.csv, row 2, {told}")):
        wide(row)


def test_restart_costs_and_speeds_of_classes_are_read_by_model() -> None:
    assert restart_costs("c.csv", ["model,seconds", "bert,50", "gpt,250"]) == {"bert": 50.0, "gpt": 250.0}
    with pytest.raises(ConfigError, match=r"c\.csv, row 3, model: 'bert' is there twice"):
        restart_costs("c.csv", ["model,seconds", "bert,50", "bert,60"])
    assert gpu_speeds("s.csv", ["gpu,speed,model", "a100,3,", "a100,2,bert"]) == {
        "": {"a100": 3.0},
        "bert": {"a100": 2.0},
    }
    with pytest.raises(ConfigError, match=r"s\.csv, row 2, speed: '0'"):
        gpu_speeds("s.csv", ["gpu,speed", "a100,0"])
    lines = ["gpu,speed,model,max_local_bsz", "a100,3,,", "a100,2,bert,64", "t4,1,bert,8"]
    assert gpu_speeds("s.csv", lines) == {"": {"a100": 3.0}, "bert": {"a100": 2.0, "t4": 1.0}}
    assert gpu_batches("s.csv", lines) == {"bert": {"a100": 64, "t4": 8}}
    with pytest.raises(ConfigError, match=r"s\.csv, row 2, model"):
        gpu_batches("s.csv", ["gpu,speed,max_local_bsz,model", "a100,3,64,"])
    with pytest.raises(ConfigError, match=r"s\.csv, row 2, max_local_bsz: '0'"):
        gpu_batches("s.csv", ["gpu,speed,max_local_bsz,model", "a100,3,0,bert"])

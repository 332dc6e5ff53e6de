"""Workloads and profiles are read strictly: what is wrong is named by table, row and column."""

import re

import pytest

from swarmsched.errors import ConfigError
from swarmsched.replay.workload import profiles, rows, select, trace_jobs

JOBS = ["job_id,submit_time_s,num_gpus,duration_s,model,user", "b,10,2,5.5,,ada", "a,0,1,7,bert,"]


def read(lines: list[str]) -> list[dict[str, str]]:
    return rows("jobs.csv", lines, ("job_id", "submit_time_s"))


def test_jobs_come_in_order_of_their_submission() -> None:
    first, second = trace_jobs("jobs.csv", read(JOBS))
    assert (first.job_id, first.gpus, first.duration_s, first.model) == ("a", 1, 7.0, "bert")
    assert (second.submitted_s, second.kind, first.user, second.user) == (10.0, "", "", "ada")
    assert "bert" not in first.kind


@pytest.mark.parametrize(
    ("cell", "column"),
    [("nan", "submit_time_s"), ("-1", "submit_time_s"), ("soon", "submit_time_s"), ("", "submit_time_s")],
)
def test_a_cell_that_cannot_be_used_is_named(cell: str, column: str) -> None:
    lines = [JOBS[0], f"a,{cell},1,7,,"]
    with pytest.raises(ConfigError, match=re.escape(f"jobs.csv, row 2, {column}")):
        trace_jobs("jobs.csv", read(lines))


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match="has no column 'submit_time_s'"):
        read(["job_id,start", "a,1"])


def test_rows_are_selected_by_their_values_numbers_as_numbers() -> None:
    assert [row["job_id"] for row in select("jobs.csv", read(JOBS), {"num_gpus": "2.0"})] == ["b"]
    with pytest.raises(ConfigError, match=r"no row of jobs\.csv has num_gpus=3"):
        select("jobs.csv", read(JOBS), {"num_gpus": "3"})
    with pytest.raises(ConfigError, match="has no column 'gpus'"):
        select("jobs.csv", read(JOBS), {"gpus": "3"})


THROUGHPUT = ["model,placement,num_nodes,num_gpus,local_bsz,step_time_s,sync_time_s", "toy,1,1,1,8,0.1,0.0"]
VALIDATION = ["model,batch_size,epoch,progress,grad_sqr,grad_var", "toy,8,1,10,1,2", "toy,16,1,10,1,3"]
MODELS = ["model,init_batch_size,max_batch_size,min_local_bsz,max_local_bsz,epochs", "toy,8,16,4,8,1"]


def test_profiles_are_put_together_from_their_three_tables() -> None:
    profile = profiles(THROUGHPUT, VALIDATION, MODELS)["toy"]
    assert profile.total_progress == 10.0
    assert profile.step_time((1,), 8).step_s == 0.1
    assert profile.gain(16, 0) == pytest.approx((3 + 1) / (3 / 2 + 1))


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ((THROUGHPUT[:1], VALIDATION, MODELS), "throughput: has no row of model 'toy'"),
        ((THROUGHPUT, VALIDATION[:2], MODELS), "validation: has too little of model 'toy'"),
        ((THROUGHPUT, VALIDATION, [MODELS[0], MODELS[1][:-1] + "2"]), "toy at batch 8 has 1 epochs"),
        ((THROUGHPUT, ["model,epoch", "toy,1"], MODELS), "has no column 'batch_size'"),
    ],
)
def test_profiles_that_lack_something_say_what(tables: tuple[list[str], list[str], list[str]], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        profiles(*tables)
    assert told in str(caught.value)

"""`make science`: what is finished is not run again, and what comes out stands in the page."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from swarmsched.replay.workload import restart_costs
from tests.science.__main__ import KEY, ROOT, Science, UsageProblem, science
from tests.science.autops import ROWS, saved
from tests.science.cells import RESTART_COSTS, read_lines
from tests.science.drawn import draw
from tests.science.page import put

JOBS = "load,workload,job_id,submit_time_s,num_gpus,duration_s\n"
LINES = (
    "table,policy,parameters,knows,tick_s,pause_s,trace,load,workloads,cluster,profiles,gpus_most,reference\n"
    "rigid,fifo,,perfect,0,0,pollux_jobs,1.0,1 2,1x2,,,rigid_summary:fifo\n"
    "rigid,backfill,reserves=0,perfect,0,0,pollux_jobs,1.0,2,1x2,,,rigid_summary:fifo\n"
)
PAGE = "before\n<!-- science: origin -->\n<!-- end of origin -->\n"
PAGE += "<!-- science: elastic-batch -->\n<!-- end of elastic-batch -->\n"
PAGE += "<!-- science: autops -->\n<!-- end of autops -->\n"
PAGE += "<!-- science: outer -->\n<!-- end of outer -->\n"
PAGE += "<!-- science: dike -->\n<!-- end of dike -->\n"
PAGE += "<!-- science: rigid -->\nold\n<!-- end of rigid -->\nafter\n"


PRICE_LINES = (
    LINES.partition("\n")[0] + ",view,loss,churn\n"
    "price,swarm,,declared,0,0,pollux_jobs,1.0,1 2,2x2,,,,perfect,,\n"
    "price,swarm,,declared,0,0,pollux_jobs,1.0,1 2,2x2,,,,gossip,,\n"
    "price,swarm,,declared,0,0,pollux_jobs,1.0,2,2x2,,,,gossip,0.05,\n"
)


DRAWN_LINES = (
    "rigid,fifo,,perfect,0,0,philly_jobs,,b,1x64,,,rigid_summary:fifo\n"
    "rigid,tiresias,,perfect,0,0,philly_jobs,,b,1x64,,,rigid_summary:fifo\n"
)


@pytest.fixture
def plan(tmp_path: Path) -> Science:
    traces = tmp_path / "traces"
    (traces / "workloads").mkdir(parents=True)
    (traces / "reference").mkdir()
    (traces / "workloads" / "pollux_jobs.csv").write_text(JOBS + "1.0,1,a,0,2,10\n1.0,1,b,0,2,10\n1.0,2,c,0,1,8\n")
    (traces / "reference" / "rigid_summary.csv").write_text(
        "trace,nodes,gpus_per_node,policy,jobs,avg_jct_s,p50_jct_s,p99_jct_s,makespan_s\n"
        "pollux_jobs:1.0:1,1,2,fifo,2,10,10,19.9,20\npollux_jobs:1.0:1,2,2,fifo,2,1,1,1,1\n"
        "pollux_jobs:1.0:2,1,2,fifo,1,8,8,8,16\n"
    )
    (tmp_path / "lines.csv").write_text(LINES)
    (tmp_path / "page.md").write_text(PAGE)
    environment = {"SCIENCE_TRACES": str(traces), "SCIENCE_RESULTS": str(tmp_path / "results"), "SCIENCE_JOBS": "1"}
    given = Science.from_environment(environment, "abc")
    trainer = tmp_path / "trainer"
    trainer.write_text('#!/bin/sh\necho "| trained by $2 into ${3##*/} $4 |"\n')
    trainer.chmod(0o755)
    page = tmp_path / "page.md"
    given = replace(given, lines=tmp_path / "lines.csv", gaps_s=(9_000.0,), page=page, trainer=trainer)
    return replace(given, hosts_table=lambda path, *_, is_quick: f"| {path.name} {is_quick} |")


def record(plan: Science) -> list[list[str]]:
    return [row[: len(KEY) + 3] for row in csv.reader(plan.record.read_text().splitlines())]


def test_the_page_gets_ratios_with_counts_commit_and_machine_and_a_stopped_run_goes_on(plan):
    science(plan)
    page = plan.page.read_text()
    assert page.startswith("before\n")
    assert page.endswith("<!-- end of rigid -->\nafter\n")
    assert "commit abc, 3 runs" in page
    assert "| 9000 s | 1.00 times the jobs," in page
    assert "| `fifo` | perfect | events, 0 s | fifo | 3 of 3 | 1.250 (1.000 to 1.500) 1.000 .750 |" in page
    assert "| `backfill`, `reserves=0` | perfect | events, 0 s | fifo | 1 of 1 | 1.000 1.000 .500 |" in page
    assert len(record(plan)) == 1 + 3
    lines = plan.record.read_text().splitlines(keepends=True)
    plan.record.write_text("".join(lines[:3]))
    science(plan)
    assert sorted(record(plan)) == sorted(row[: len(KEY) + 3] for row in csv.reader(lines))
    assert plan.record.read_text().startswith("".join(lines[:3])), "what was finished is kept"
    assert plan.page.read_text().partition(" runs,")[0] == page.partition(" runs,")[0]
    science(replace(plan, commit="def"))
    assert len(record(plan)) == 1 + 6, "other code, other results"


def test_policies_against_their_own_published_results_are_listed_workload_by_workload(plan):
    plan.lines.write_text(LINES.replace("rigid,", "published,").replace("1.0,2,1x2,", "1.0,1 2,1x2,"))
    page = PAGE.replace("rigid", "published") + "<!-- science: by workload -->\n<!-- end of by workload -->\n"
    plan.page.write_text(page)
    science(plan)
    told = plan.page.read_text().partition("<!-- science: by workload -->\n")[2]
    assert told == (
        "| policy | load | 1 | 2 |\n|---|---|---|---|\n| `fifo` | 1.0 | 1.500 | 1.000 |\n<!-- end of by workload -->\n"
    )


def test_what_gossip_costs_is_told_against_the_exact_view(plan):
    plan.lines.write_text(PRICE_LINES)
    plan.page.write_text(PAGE.replace("rigid", "price"))
    science(plan)
    page = plan.page.read_text()
    assert "| 1.0 | 0% | stay | 3 of 3 | 1.000 (1.000 to 1.000) | 1.000 | 1.000 |" in page
    assert "| 1.0 | 5% | stay | 1 of 1 | 1.000 | 1.000 | 1.000 |" in page


USERS_LINES = (
    LINES.partition("\n")[0] + ",view,loss,churn,manner,kinds,interference,costs,told,speeds\n"
    "users,fifo,,nothing,0,0,pollux_jobs,1.0,1 2,1x2,,,rigid_summary:fifo,,,,rigid,none,0.25,,,\n"
    "users,fifo,,nothing,0,30,pollux_jobs,1.0,2,1x1small+1x2large,,,best:srtf backfill,,,,,,,restart_costs.csv,1,\n"
    "users,srtf,,perfect,0,0,pollux_jobs,1.0,2,1x1small+1x2large,,,best:srtf,,,,restartable,,,,,\n"
)


def test_a_table_by_users_tells_each_line_with_fairness_changes_and_what_it_is_over(plan):
    plan.lines.write_text(USERS_LINES)
    plan.page.write_text(PAGE.replace("rigid", "users"))
    science(plan)
    rows = [line for line in plan.page.read_text().splitlines() if line.startswith("| pollux_jobs load")]
    assert [row.split(" | ")[1:] for row in rows] == [
        [
            "rigid, interference 0.25, 0 s a change",
            "nothing, kinds by none",
            "`fifo`",
            "3 of 3",
            "12 s",
            "fifo 1.250 (1.000 to 1.500)",
            "1.5",
            "0.96, 1.16, 1.17",
            "0.0, at most 0",
            "0 |",
        ],
        [
            "as in simulators, restart costs by model, told",
            "nothing",
            "`fifo`",
            "1 of 1",
            "38 s",
            "srtf, backfill 4.750",
            "4.8",
            "4.75, 4.75, 4.75",
            "0.0, at most 0",
            "0 |",
        ],
        [
            "restartable, 0 s a change",
            "perfect",
            "`srtf`",
            "1 of 1",
            "8 s",
            "srtf 1.000",
            "1.0",
            "1.00, 1.00, 1.00",
            "0.0, at most 0",
            "0 |",
        ],
    ]
    assert rows[1].startswith("| pollux_jobs load 1.0 on 1 x 1small + 1 x 2large |")
    assert "Commit abc." in plan.page.read_text()


def test_a_record_of_other_columns_is_not_read_as_one_of_these(plan):
    plan.record.parent.mkdir(exist_ok=True)
    plan.record.write_text("commit,policy,avg_jct_s\nabc,fifo,1\n")
    with pytest.raises(UsageProblem, match=r"runs\.csv has other columns; move it away"):
        science(plan)


def test_quick_runs_one_workload_of_each_and_leaves_the_page_alone(plan):
    science(replace(plan, is_quick=True))
    assert plan.page.read_text() == PAGE
    assert "| 1 of 1 | 1.000 1.000 .500 |" in (plan.results / "page.md").read_text()
    assert len(record(plan)) == 1 + 2


def test_quick_runs_nothing_that_takes_half_an_hour(plan):
    plan.lines.write_text(PRICE_LINES)
    plan.page.write_text(PAGE.replace("rigid", "price"))
    science(replace(plan, is_quick=True))
    assert [row[1 + KEY.index("view")] for row in record(plan)[1:]] == ["perfect"]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"SCIENCE_JOBS": "none"}, "SCIENCE_JOBS=none is no number"),
        ({"SCIENCE_TRACES": "/nowhere"}, "SCIENCE_TRACES=/nowhere has no folder of workloads"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(environment, told):
    with pytest.raises(UsageProblem, match=told):
        Science.from_environment(environment, "abc")


def test_the_page_has_the_markers_of_all_tables_and_a_missing_one_is_named():
    page = (ROOT / "docs/research/results.md").read_text()
    tables = {line.table for line in read_lines(ROOT / "tests" / "science" / "cells.csv")} - {"picture"}
    for name in tables | {"origin", "elastic-batch", "by workload", "outer", "autops"}:
        assert "new text" in put(page, name, "new text")
    with pytest.raises(ValueError, match="science: other"):
        put(page, "other", "")


def test_real_trainings_are_run_where_torch_is_and_a_missing_one_is_named(plan):
    science(replace(plan, tables=("outer",)))
    assert "| trained by tests.science.outer into outer.csv  |\n\nCommit abc." in plan.page.read_text()
    with pytest.raises(UsageProblem, match="has no torch; run make setup"):
        science(replace(plan, tables=("outer",), trainer=plan.results / "none"))


def test_packing_reserves_fewer_cores_the_more_jobs_there_are(plan):
    """The goals: 65 % fewer for 20 jobs, 70 % for 40."""
    science(replace(plan, tables=("autops",)))
    assert "| steps, five periods | " in plan.page.read_text()
    few, twenty, forty = (mean(saved(*ROWS[0][1:], count)) for count in (2, 20, 40))
    assert few < 0.65 <= twenty
    assert forty >= 0.70


def test_only_the_tables_that_are_wanted_are_made_and_others_stay(plan):
    science(replace(plan, tables=("elastic-batch",)))
    page = plan.page.read_text()
    assert "Of it are the tables elastic-batch; the others are older." in page
    assert "<!-- science: rigid -->\nold\n" in page
    assert "| 9000 s | 1.00 times the jobs," in page
    assert not plan.record.exists()


def test_who_has_no_recorded_workloads_gets_the_same_rows_of_drawn_ones_and_is_told_so(plan, tmp_path, capsys):
    environment = {"SCIENCE_TRACES": "generated", "SCIENCE_RESULTS": str(tmp_path / "results"), "SCIENCE_JOBS": "1"}
    drawn = Science.from_environment(environment, "abc")
    (tmp_path / "few.csv").write_text(LINES.partition("\n")[0] + "\n" + DRAWN_LINES)
    given = {"page": plan.page, "gaps_s": (9_000.0,), "trainer": plan.trainer, "hosts_table": plan.hosts_table}
    science(replace(drawn, lines=tmp_path / "few.csv", **given))
    assert plan.page.read_text() == PAGE, "the page tells of recorded workloads alone"
    told = (tmp_path / "results" / "generated" / "page.md").read_text()
    assert "Workloads drawn by `swarm simulate generate`" in told.partition("<!-- science: rigid -->")[2]
    rows = {line.partition("`,")[0].partition("` |")[0]: line for line in told.splitlines() if line.startswith("| `")}
    assert "| tiresias | 180 of 180 | 1.000 1.000 1.000 |" in rows["| `tiresias"]
    assert "| tiresias | 180 of 180 | 1.000 1.000 1.000 |" not in rows["| `fifo"]
    assert "draws workloads into" in capsys.readouterr().out


def test_a_line_tells_its_servers_as_people_write_them():
    (line,) = [line for line in read_lines(ROOT / "tests" / "science" / "cells.csv") if line.table == "classes"][:1]
    assert line.place.endswith(" on 5 x 4t4 + 2 x 8rtx + 1 x 8a100")


def test_all_rows_can_be_run_on_drawn_workloads(tmp_path):
    lines = read_lines(ROOT / "tests" / "science" / "cells.csv")
    folder = draw(lines, tmp_path)
    cells = [cell for line in lines for cell in line.cells(is_quick=False)]
    for chosen in {(cell.line.trace, cell.line.load, cell.workload): cell for cell in cells}.values():
        assert chosen.jobs(folder)
    traces = {cell.line.trace: cell.jobs(folder) for cell in cells}
    submitted = {tuple((job.submitted_s, job.gpus) for job in each) for each in traces.values()}
    assert len(submitted) == len(traces), "no two are the same"
    assert all(job.deadline_s for job in traces["itp195_jobs"])
    costs = restart_costs("costs", (folder / RESTART_COSTS).read_text().splitlines())
    assert costs.keys() >= {job.model for job in traces["pollux_jobs"]}
    kinds = {(cell.line.trace, cell.line.load, cell.line.cluster): cell for cell in cells if cell.line.view != "gossip"}
    for cell in kinds.values():
        cell.prepared(folder)


def test_an_unknown_table_is_refused_with_those_that_there_are(plan):
    environment = {"SCIENCE_TRACES": str(plan.traces), "SCIENCE_TABLES": "rigid,prise"}
    with pytest.raises(UsageProblem, match=r"SCIENCE_TABLES=prise is no table; write some of autops, .*outer, .*price"):
        Science.from_environment(environment, "abc")

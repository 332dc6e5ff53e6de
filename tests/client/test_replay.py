"""`swarm simulate replay`: what it prints, how it exits, and what it says of words and tables that cannot be used."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from swarm_client.cli import main
from swarmsched.policies import registry
from tests.testbed.packages import own_policies

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "smallest_first.py"
KIND = "from swarmsched.policies.base import ParameterSpec as Spec, PolicyKind\nKIND = PolicyKind"
JOBS = "job_id,submit_time_s,num_gpus,duration_s,cluster\na,0,2,100,x\nb,10,4,50,x\nc,20,80,5,y\n"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    file = tmp_path / "jobs.csv"
    file.write_text(JOBS)
    return file


def replay(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["simulate", "replay", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_document_counts_what_finished_and_averages_it(capsys, jobs):
    code, out, _ = replay(capsys, str(jobs), "--select", "cluster=x", "--policy", "fifo", "--tick-s", "0", "-o", "json")
    document = json.loads(out)
    assert code == 0
    assert (document["policy"], document["view"], document["jobs"], document["finished"]) == ("fifo", "perfect", 2, 2)
    assert document["avg_jct_s"] == 75.0 + 30.0  # without a tick; each start costs 30 s
    assert document["makespan_s"] == 130.0


def test_a_job_that_can_never_run_is_missing_and_the_exit_code_says_so(capsys, jobs):
    words = [str(jobs), "--policy", "backfill", "--rescale-cost-s", "0"]
    code, out, told = replay(capsys, *words)
    assert code == 1
    assert "finished                            2" in out
    assert "unfinished                          1" in out
    assert told == "swarm: under backfill, 1 of 3 jobs did not finish: c: needs 80 GPUs, and there are 64\n"
    document = json.loads(replay(capsys, *words, "-o", "json")[1])
    assert document["unfinished"] == [{"job_id": "c", "reason": "needs 80 GPUs, and there are 64"}]


def test_of_many_jobs_that_can_never_run_a_few_are_named(capsys, tmp_path):
    file = tmp_path / "wide.csv"
    file.write_text("job_id,submit_time_s,num_gpus,duration_s\n" + "".join(f"j{each},0,99,1\n" for each in range(9)))
    code, _, told = replay(capsys, str(file), "--policy", "fifo")
    assert (code, told.count("needs 99 GPUs"), told.endswith("; and 6 more\n")) == (1, 3, True), told


def test_a_policy_of_an_installed_package_is_replayed_by_its_name(capsys, jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "POLICIES", {**registry.POLICIES})
    monkeypatch.syspath_prepend(own_policies(tmp_path / "packages").parent)
    code, out, told = replay(capsys, str(jobs), "--select", "cluster=x", "--policy", "smallest-first", "-o", "json")
    assert (code, json.loads(out)["policy"]) == (0, "smallest-first")
    left_out = "swarm: left out: policy broken (no_such_package:KIND): ModuleNotFoundError"
    assert told.startswith(left_out)
    del sys.modules["smallest_first"]  # another file of that name is another module


def test_quietly_the_jobs_that_did_not_finish_are_printed_and_nothing_else(capsys, jobs):
    assert replay(capsys, str(jobs), "--policy", "backfill,las", "-q") == (1, "c\n", "")
    assert replay(capsys, str(jobs), "--select", "cluster=x", "-q") == (0, "", "")


def test_servers_of_a_table_fail_and_return(capsys, jobs, tmp_path):
    servers, churn = tmp_path / "servers.csv", tmp_path / "churn.csv"
    servers.write_text("\ufeffnode,gpus\na,2\nb,4\n")
    churn.write_text("time_s,node,event\n50,b,down\n1000,b,up\n")
    words = ["--select", "cluster=x", "--policy", "fifo", "--tick-s", "0", "--rescale-cost-s", "0", "-o", "json"]
    code, out, _ = replay(capsys, str(jobs), "--cluster", str(servers), "--churn", str(churn), *words)
    document = json.loads(out)
    assert code == 0
    assert (document["node_failures"], document["restarts"]) == (1, 1)
    assert document["avg_jct_s"] == (100.0 + 1_040.0) / 2
    assert document["lost_gpu_s"] == 4 * 40.0
    words += ["--checkpoint-s", "15"]
    assert json.loads(replay(capsys, str(jobs), "--cluster", str(servers), "--churn", str(churn), *words)[1])[
        "lost_gpu_s"
    ] == pytest.approx(4 * 10.0)


def test_a_policy_in_a_file_of_ones_own_is_compared_with_others(capsys, jobs):
    words = ["--select", "cluster=x", "--policy", f"{EXAMPLE},fifo", "--parameter", "patience_s=1", "-o", "json"]
    code, out, _ = replay(capsys, str(jobs), "--nodes", "1", *words)
    assert (code, [each["policy"] for each in json.loads(out)["items"]]) == (0, ["smallest-first:1", "fifo"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "FileNotFoundError"),
        ("1 +", "SyntaxError"),
        ("raise ValueError('not today')", "ValueError: not today"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("KIND = 1", "KIND: does not say what the file holds"),
        (f"{KIND}('fifo', '', (), '')", "KIND.name: there is a policy 'fifo' already"),
        (f"{KIND}(5, '', (), 'a:b')", "KIND: Expected `str`, got `int` - at `$.name`"),
        (f"{KIND}('x,y', '', (), 'a:b')", "KIND.name: 'x,y' is no name"),
        (f"{KIND}('own', '', None, 'a:b')", "KIND: Expected `array`, got `null` - at `$.parameters`"),
        (f"{KIND}('own', '', (Spec('a', '', 'much', 0, 1),), 'a:b')", "KIND: Expected `float`, got `str`"),
        (f"{KIND}('own', '', (Spec('a', '', 5, 0, 1),), 'a:b')", "KIND: parameters.a: 5 is out of range"),
        (f"{KIND}('own', '', (), 'own')", "KIND.policy: 'own' leads nowhere: ValueError: "),
        (f"{KIND}('own', '', (), 'no_such:Own')", "KIND.policy: 'no_such:Own' leads nowhere: ModuleNotFoundError"),
        (f"{KIND}('own', '', (), 'math:pi')", "KIND.policy: 'math:pi' is no class with a method 'plan'"),
        (f"{KIND}('own', '', (), 'swarmsched.policies.fifo:Fifo', 'math:pi')", "KIND.order: 'math:pi' is no class"),
    ],
)
def test_a_file_that_holds_no_policy_is_refused_with_what_is_wrong(capsys, jobs, tmp_path, text, told):
    file = tmp_path / f"own_{abs(hash(text))}.py"
    if text is not None:
        file.write_text(text)
    code, _, err = replay(capsys, str(jobs), "--policy", str(file))
    assert (code, told in err, str(file) in err) == (2, True, True), err


@pytest.mark.parametrize("name", ["v1.2.py", ".py", "my-own.py", "class.py"])
def test_a_policy_comes_from_a_file_that_python_can_import(capsys, jobs, tmp_path, name):
    (tmp_path / name).write_text("KIND = 1")
    code, _, err = replay(capsys, str(jobs), "--policy", str(tmp_path / name))
    assert (code, f"no module can be called {Path(name).stem!r}" in err) == (2, True), err


@pytest.mark.parametrize("view", ["perfect", "gossip"])
def test_a_policy_that_ends_the_process_has_failed_and_its_file_is_named(capsys, jobs, tmp_path, view):
    file = tmp_path / f"leaves_{view}.py"
    file.write_text(
        "from swarmsched.policies.base import PolicyKind\n"
        f"KIND = PolicyKind('leaves-{view}', '', (), 'leaves_{view}:Leaves')\n"
        "class Leaves:\n"
        "    def __init__(self, parameters):\n"
        "        raise SystemExit('enough')\n"
        "    def plan(self, view, now_s): ...\n"
    )
    words = ["--select", "cluster=x", "--policy", str(file), "--view", view, "--nodes", "2"]
    code, _, err = replay(capsys, str(jobs), *words)
    assert (code, f"leaves-{view} ({file}): " in err, "SystemExit: enough" in err) == (0, True, True), err
    assert "errors; backfill planned in its place" in err


@pytest.mark.parametrize("module", ["graphlib", "sys"])
def test_a_policy_may_not_have_the_name_of_a_module(capsys, jobs, tmp_path, module):
    (tmp_path / f"{module}.py").write_text("")
    code, _, err = replay(capsys, str(jobs), "--policy", str(tmp_path / f"{module}.py"))
    assert (code, f"another module '{module}'" in err) == (2, True)


def test_jobs_are_submitted_as_users_do_and_the_results_say_how(capsys, jobs, tmp_path):
    costs = tmp_path / "costs.csv"
    costs.write_text("model,seconds\nother,7\n")
    words = ["--select", "cluster=x", "--as", "rigid", "--interference", "0.25", "--restart-costs", str(costs)]
    code, out, _ = replay(capsys, str(jobs), *words, "--tick-s", "0", "-o", "json")
    document = json.loads(out)
    assert (code, document["as"], document["kinds"], document["knows"]) == (0, "rigid", "program", "nothing")
    assert (document["interference"], document["rescales_per_job"], document["rho_p50"]) == (0.25, 0.0, 1.45)
    wide = replay(capsys, str(jobs), "--select", "cluster=x", "--policy", "fifo,las", "-o", "wide")[1].splitlines()
    assert "RHO WORST" in wide[0]
    assert len(wide) == 3


def test_a_policy_that_stops_what_nobody_may_stop_is_told_with_what_lets_it(capsys, tmp_path):
    file = tmp_path / "jobs.csv"
    file.write_text("job_id,submit_time_s,num_gpus,duration_s\nlong,0,4,100000\nshort,5000,4,10\n")
    code, out, told = replay(capsys, str(file), "--as", "rigid", "--policy", "tiresias", "--nodes", "1")
    assert (code, out) == (2, "")
    assert told.startswith("swarm: policy: tiresias stopped job 'long' at 5,040 s, which cannot be stopped")
    assert "--as restartable" in told


def test_jobs_run_through_nodes_that_gossip(capsys, jobs):
    words = ["--view", "gossip", "--select", "cluster=x", "--policy", "fifo", "--rescale-cost-s", "0", "--loss", "0.01"]
    code, out, _ = replay(capsys, str(jobs), "--nodes", "2", *words, "-o", "json")
    document = json.loads(out)
    assert code == 0
    assert (document["view"], document["membership"], document["loss_ratio"]) == ("gossip", "swim", 0.01)
    assert (document["probe_period_s"], document["round_s"]) == (1.0, 1.0)
    assert (document["jobs"], document["finished"]) == (2, 2)
    assert document["avg_jct_s"] == pytest.approx(75.0, abs=3.0)


def test_nodes_of_a_replay_need_not_watch_one_another(capsys, jobs):
    words = ["--view", "gossip", "--membership", "ideal", "--round-s", "5", "--select", "cluster=x", "--policy", "fifo"]
    code, out, _ = replay(capsys, str(jobs), "--nodes", "2", *words, "--rescale-cost-s", "0", "-o", "json")
    document = json.loads(out)
    assert (code, document["membership"], document["probe_period_s"]) == (0, "ideal", 86_400.0)
    assert document["round_s"] == 5.0
    assert document["finished"] == 2
    exact = json.loads(replay(capsys, str(jobs), "--select", "cluster=x", "--policy", "fifo", "-o", "json")[1])
    assert (exact["membership"], "probe_period_s" in exact) == ("perfect", False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "one file of jobs"),
        (("{jobs}", "{jobs}"), "one file of jobs"),
        (("{jobs}", "--policy", "fif"), "did you mean 'fifo'?"),
        (("{jobs}", "--policy", "las", "--parameter", "promote_knob"), "is no NAME=VALUE"),
        (("{jobs}", "--policy", "las", "--parameter", "promote_knob=x"), "is no number"),
        (("{jobs}", "--select", "cluster"), "is no COLUMN=VALUE"),
        (("{jobs}", "--select", "user=ann,user=bob"), "--select user is given twice"),
        (("{jobs}", "--parameter", "pause_s=3", "--parameter", "pause_s=4"), "--parameter pause_s is given twice"),
        (("{jobs}", "--select", "cluster=z"), "no row of"),
        (("{jobs}", "--knows", "all"), "'all' is not known"),
        (("{jobs}", "--as", "instaled"), "as: 'instaled' is not known; did you mean 'installed'?"),
        (("{jobs}", "--as", ""), "--as '' names nothing"),
        (("{jobs}", "--as", "elastic", "--view", "gossip"), "as: 'elastic' has no model of workers"),
        (("{jobs}", "--kinds", "models"), "kinds: 'models' is not known"),
        (("{jobs}", "--interference", "1"), "must be a part, from 0 to below 1"),
        (("{jobs}", "--lies", "-1"), "must be a number from 0 to 5"),
        (("{jobs}", "--lies", "1", "--knows", "perfect"), "--lies is for jobs that report"),
        (("{jobs}", "--restart-costs", "{jobs}"), "has no column 'model'"),
        (("{jobs}", "--gpu-speeds", "{jobs}"), "has no column 'gpu'"),
        (("{jobs}", "--nodes", "0"), "is no number of servers"),
        (("{jobs}", "--nodes", "9" * 5_000), "is no number of servers"),
        (("{jobs}", "--nodes", ""), "is no number of servers"),
        (("{jobs}", "--gpus-per-node", "\u00b2"), "must be a whole number from 1 to 64"),
        (("{jobs}", "--cluster", ""), "--cluster '' names nothing"),
        (("{jobs}", "--profiles", ""), "--profiles '' names nothing"),
        (("{jobs}", "--gpus-most", "bert=nan"), "--gpus-most bert='nan': must be a whole number"),
        (("{jobs}", "--gpus-most", "bert=0"), "--gpus-most bert='0': must be a whole number"),
        (("{jobs}", "--gpus-most", "bert=1"), "there is no profile of model 'bert'"),
        (("{jobs}", "--policy", "las", "--parameter", "promote_knob=1_0"), "is no number"),
        (("{jobs}", "--seeds", "3"), "--seeds cannot go with simulate replay"),
        (("{jobs}", "--break", "quorum-of-one", "--no-shrink"), "--break, --no-shrink cannot go with simulate replay"),
        (("{jobs}", "--view", "central"), "'central' is not known"),
        (("{jobs}", "--view", "gossip", "--tick-s", "60"), "nodes plan when there is news"),
        (("{jobs}", "--loss", "0.1"), "--loss needs a network"),
        (("{jobs}", "--view", "gossip", "--loss", "1"), "must be a part"),
        (("{jobs}", "--view", "gossip", "--loss", "nan"), "must be a part"),
        (("{jobs}", "--view", "gossip", "--delay-s", "1e9"), "must be a number of seconds: 0, or from 1e-06 to 1"),
        (("{jobs}", "--membership", "ideal"), "--membership needs a network"),
        (("{jobs}", "--view", "gossip", "--membership", "raft"), "'raft' is not known"),
        (("{jobs}", "--round-s", "5"), "--round-s needs a network"),
        (("{jobs}", "--view", "gossip", "--round-s", "0"), "must be a number of seconds: from 0.1 to 60"),
        (("{jobs}", "--tick-s", "soon"), "must be a number of seconds"),
        (("{jobs}", "--tick-s", "1e-9"), "must be a number of seconds: 0, or from 1 to 1,000,000"),
        (("{jobs}", "--checkpoint-s", "0"), "must be a number of seconds: from 1 to 100,000,000"),
        (("{jobs}", "--checkpoint-s", "60"), "--checkpoint-s counts where servers fail"),
        (("{jobs}", "--rescale-cost-s", "1e8"), "must be a number of seconds: from 0 to 100,000"),
        (("{jobs}", "--profiles", "/nowhere"), "there is no file"),
        (("{jobs}", "--profiles", "/"), "0 files *throughput.csv"),
        (("{jobs}", "--profiles", "{jobs}"), "has no column 'model'"),
        (("{jobs}", "--cluster", "/nowhere.csv"), "there is no file"),
        (("{jobs}", "--cluster", "{jobs}"), "has no column 'node'"),
        (("{jobs}", "--cluster", "{jobs}", "--nodes", "2"), "leave out --nodes"),
        (("{jobs}", "--churn", "{jobs}"), "has no column 'time_s'"),
        (("/nowhere.csv",), "there is no file"),
        (("\x1b[31m.csv",), "there is no file \\x1b[31m.csv\n"),
        (("/",), "cannot be read: is a directory"),
        (("/dev/null",), "has no column 'job_id'"),
        (("/dev/zero",), "is larger than"),
    ],
)
def test_what_cannot_be_used_is_named(capsys, jobs, words, told):
    code, out, error = replay(capsys, *[word.format(jobs=jobs) for word in words])
    assert (code, out) == (2, "")
    assert told in error


def test_a_table_that_is_not_text_or_lacks_a_column_is_named(capsys, tmp_path):
    file = tmp_path / "odd.csv"
    file.write_bytes(JOBS.encode("utf-16"))
    code, _, error = replay(capsys, str(file))
    assert (code, f"{file}, row 1, column 1: b'\\xff\\xfej" in error) == (2, True), error
    file.write_bytes(JOBS.encode() + b"caf\xe9,0,1,1,x\n")
    code, _, error = replay(capsys, str(file))
    assert (code, f"{file}, row 5, column 1: b'caf\\xe9' is not UTF-8" in error) == (2, True), error
    file.write_text("job_id\na\n")
    code, _, error = replay(capsys, str(file))
    assert code == 2
    assert "has no column 'submit_time_s'" in error


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_tables_come_from_any_system(capsys, tmp_path, end):
    file = tmp_path / "jobs.csv"
    file.write_bytes(("\ufeff" + JOBS.replace("\n", end)).encode())
    assert replay(capsys, str(file), "--select", "cluster=x", "-q")[0] == 0
    file.write_bytes(JOBS.replace("\n", end + end).replace("50", "fifty").encode())
    assert "row 5, duration_s: 'fifty'" in replay(capsys, str(file))[2]


def test_a_table_may_come_through_a_pipe(capsys, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(JOBS,))
    writer.start()
    try:
        assert replay(capsys, str(pipe), "--select", "cluster=x", "-q")[0] == 0
    finally:
        writer.join()


@pytest.mark.parametrize("duration", ["0", "", "0.0001"])
def test_a_job_without_a_run_time_is_named_by_file_and_row(capsys, tmp_path, duration):
    file = tmp_path / "jobs.csv"
    file.write_text(f"job_id,submit_time_s,num_gpus,duration_s\na,0,1,1\nb,0,1,{duration}\n")
    code, _, error = replay(capsys, str(file))
    assert (code, f"{file}, row 3, job 'b', duration_s: " in error) == (2, True), error


@pytest.mark.parametrize(
    ("row", "words", "told"),
    [
        ("a,100000000,1,10", (), "row 2, job 'a': ends at 100,000,010 s at best"),
        ("a,10000000,1,10", ("--view", "gossip"), "row 2, job 'a': ends at 10,000,010 s at best"),
        ("a,0,1,5000000", ("--tick-s", "1"), "tick_s: a plan each 1 s makes more than 2,000,000"),
    ],
)
def test_a_replay_that_would_take_for_ever_is_refused_with_the_job(capsys, tmp_path, row, words, told):
    file = tmp_path / "jobs.csv"
    file.write_text(f"job_id,submit_time_s,num_gpus,duration_s\n{row}\n")
    code, _, error = replay(capsys, str(file), *words)
    assert (code, told in error) == (2, True), error

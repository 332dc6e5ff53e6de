import socket
import sys
import threading
import time

import pytest

from swarm_client import attached
from swarm_client.quantity import deadline
from swarmsched.api import JobSpec
from tests.client.testing import HANDLE, JOB_ID, FakeAgent, end, ended, log, problem, state


def spec_of(agent):
    return agent.wait_for("POST", "/v1/jobs")[0]["spec"]


def test_stdout_is_the_jobs_stdout_and_the_exit_code_is_the_jobs(swarm, agent):
    agent.stream = lambda _: iter(
        [state("running", "1"), log("epoch 1\n", "2"), log("careful\n", "3", stream="stderr"), end("4", 3, "failed")]
    )
    code, out, err = swarm("run", "--no-sync", "-g", "4", "--", "python", "train.py", "--lr", "1")
    assert (code, out) == (3, "epoch 1\n")
    assert err == f"swarm: job {HANDLE}\ncareful\nswarm: job {HANDLE} failed (exit code 3)\n"
    assert spec_of(agent)["command"] == ["python", "train.py", "--lr", "1"]
    assert (spec_of(agent)["ranks"], spec_of(agent)["gpus_per_rank"]) == (4, 1)


def test_the_cause_that_the_agent_told_last_is_not_told_again(swarm, agent):
    cause = "gpu1: environment build failed: no such package"
    lines = [state("starting", "1"), log(f"swarm: {cause}\n", "2", stream="system")]
    agent.stream = lambda _: iter([*lines, end("3", 125, "failed", detail=cause)])
    told = f"swarm: job {HANDLE}\nswarm: {cause}\nswarm: job {HANDLE} failed (exit code 125)\n"
    assert swarm("run", "--no-sync", "--", "x") == (125, "", told)
    agent.stream = lambda _: iter([state("starting", "1"), end("3", 125, "failed", detail=cause)])
    assert swarm("run", "--no-sync", "--", "x")[2].endswith(f"failed (exit code 125): {cause}\n")


def test_output_that_is_not_text_arrives_unchanged(swarm, agent):
    agent.stream = lambda _: iter([state("running", "1"), log("\udcff\x00x", "2"), end("3")])
    assert swarm("run", "--no-sync", "--", "cat") == (0, "\udcff\x00x", f"swarm: job {HANDLE}\n")


def gap(size, cursor, text=""):
    head = {"type": "gap", "rank": 0, "node": "gpu1", "stream": "system", "time": None}
    return head | {"skipped_bytes": size, "text": text, "cursor": cursor}


def missing(text, cursor, *, is_missing=True):
    return {"type": "warning", "text": text, "node": "gpu2", "is_missing": is_missing, "cursor": cursor}


LOSSES = {
    "limit": (gap(7, "3"), "7 bytes are missing"),
    "disk": (gap(8, "3", "the disk was full"), "8 bytes are missing"),
    "node": (
        missing("gpu2 does not answer; its output is missing", "3"),
        "gpu2 does not answer; its output is missing",
    ),
}


@pytest.mark.parametrize(
    "command", [("run", "--no-sync", "-q", "--", "cat"), ("attach", "-q", HANDLE), ("logs", HANDLE)]
)
@pytest.mark.parametrize("what", LOSSES)
def test_a_program_that_reads_less_than_all_is_told_by_the_exit_code(swarm, agent, command, what):
    record, told = LOSSES[what]
    agent.stream = lambda _: iter([state("running", "1"), log("a", "2"), record, log("b", "4"), end("5")])
    code, out, err = swarm(*command)
    assert (code, out) == (125, "ab")
    assert f"is not whole: {told}\n" in err
    assert agent.is_asked_for_all


def test_a_person_sees_what_is_missing_and_slows_nobody_down(swarm, agent, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    agent.stream = lambda _: iter([state("running", "1"), log("a", "2"), LOSSES["disk"][0], end("5")])
    code, out, err = swarm("run", "--no-sync", "-q", "--", "cat")
    assert (code, out) == (0, "a")
    assert err == "swarm: 8 bytes of output of rank 0 were not kept: the disk was full\n"
    assert not agent.is_asked_for_all


def test_what_comes_late_is_not_missing_and_a_failure_keeps_its_own_code(swarm, agent):
    late = missing("gpu2 does not answer", "2", is_missing=False)
    agent.stream = lambda _: iter([state("running", "1"), late, log("a", "3"), end("4")])
    assert swarm("run", "--no-sync", "--", "cat")[:2] == (0, "a")
    agent.stream = lambda _: iter([state("running", "1"), gap(7, "2"), end("4", 3, "failed")])
    assert swarm("run", "--no-sync", "--", "cat")[0] == 3


def test_where_the_output_of_another_attempt_begins_is_said_to_programs(swarm, agent):
    first, second = [state("running", "1"), log("a\n", "2")], [state("running", "3", attempt=2), log("b\n", "4")]
    agent.stream = lambda _: iter([*first, state("queued", "2"), *second, log("c\n", "5"), end("6")])
    code, out, err = swarm("run", "--no-sync", "-q", "--", "cat")
    assert (code, out) == (0, "a\nb\nc\n")
    assert err.count("the output of attempt 2 follows that of attempt 1") == 1


def test_label_marks_each_line_once_even_when_it_comes_in_parts(swarm, agent):
    parts = [log("a", "2"), log("b\n", "3"), log("c\n", "4", rank=1)]
    agent.stream = lambda _: iter([state("running", "1"), *parts, end("5")])
    assert swarm("run", "--no-sync", "--label", "--", "x")[1] == "0: ab\n1: c\n"


def test_label_marks_every_line_of_one_write(swarm, agent):
    traceback = log("Traceback:\n  File x\n\nValueError", "2", rank=3)
    agent.stream = lambda _: iter([state("running", "1"), traceback, end("5")])
    expected = "3: Traceback:\n3:   File x\n3: \n3: ValueError"
    assert swarm("run", "--no-sync", "--label", "--", "x")[1] == expected


def test_lines_of_several_ranks_do_not_mix_and_progress_bars_go_on(swarm, agent):
    parts = [log("a", "2"), log("b", "3", rank=1), log("c\nd", "4"), log("\r10%", "5", rank=2), log("e\n", "6", rank=1)]
    agent.stream = lambda _: iter([state("running", "1"), *parts, log("f", "7", rank=3), end("8")])
    assert swarm("run", "--no-sync", "-g4", "--", "x") == (0, "ac\n\r10%be\nd\nf", f"swarm: job {HANDLE}\n")


@pytest.mark.parametrize(
    "shape",
    [
        {"ranks": 1, "ranks_most": 4},
        {"ranks": 1, "world_size": 2},
        {"ranks": 1, "world": {"version": 1, "workers": [], "lost": [], "last_worker": 2}},
    ],
)
def test_lines_do_not_mix_where_others_may_come_to_write_beside_the_only_rank(swarm, agent, shape):
    parts = [log("a", "2"), log("b\n", "3", rank=4), log("c\n", "4")]
    agent.stream = lambda _: iter([state("running", "1", **{"world_size": 1, **shape}), *parts, end("5")])
    assert swarm("run", "--no-sync", "--", "x")[1] == "b\nac\n"


def test_an_environment_of_the_nodes_and_a_built_one_exclude_one_another(swarm, agent, tmp_path):
    (tmp_path / "r.txt").write_text("torch")
    words = ("run", "--no-sync", "--venv", "/opt/env", "--requirements", str(tmp_path / "r.txt"), "--", "x")
    expected = "swarm: --venv and --requirements exclude one another\n  add what is missing to one of the two\n"
    assert swarm(*words) == (2, "", expected)
    assert agent.requests == []


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ([], (1, 0)),
        (["-g", "0"], (1, 0)),
        (["-g4"], (4, 1)),
        (["--gres=gpu:h200:2"], (2, 1)),
        (["--gpus", "8", "--gpus-per-rank", "2"], (4, 2)),
        (["--gpus", "8", "--ranks", "2"], (2, 4)),
        (["--ranks", "3"], (3, 0)),
        (["--ranks", "3", "--gpus-per-rank", "2"], (3, 2)),
    ],
)
def test_shape_follows_from_gpus_and_ranks(swarm, agent, options, shape):
    code, out, err = swarm("run", "-d", "--no-sync", *options, "--", "true")
    assert (code, out, err) == (0, f"{HANDLE}\n", "")
    assert (spec_of(agent)["ranks"], spec_of(agent)["gpus_per_rank"]) == shape


def test_a_range_of_gpus_is_a_range_of_world_sizes(swarm, agent):
    swarm("submit", "--no-sync", "-g", "2:8", "--gpus-per-rank", "2", "--", "x")
    spec = spec_of(agent)
    assert (spec["ranks"], spec["ranks_most"], spec["gpus_per_rank"]) == (1, 4, 2)
    assert spec["command"] == ["x"]


def test_elastic_is_said_by_an_option_a_job_file_or_a_variable(swarm, agent, tmp_path, monkeypatch):
    swarm("submit", "--no-sync", "-g", "2:4", "--elastic", "--", "x")
    (tmp_path / "job.toml").write_text('command = "x"\ngpus = "2:4"\nelastic = true\n')
    swarm("submit", "--no-sync", "-f", str(tmp_path / "job.toml"))
    monkeypatch.setenv("SWARM_RUN_ELASTIC", "1")
    swarm("submit", "--no-sync", "-g", "2:4", "--", "x")
    specs = [body["spec"] for body in agent.wait_for("POST", "/v1/jobs", 3)]
    assert [(spec["elastic"], spec["ranks"], spec["ranks_most"]) for spec in specs] == [(True, 2, 4)] * 3


def test_whether_it_may_be_begun_again_is_said_by_options_files_and_variables_or_not_at_all(
    swarm, agent, tmp_path, monkeypatch
):
    (tmp_path / "work" / "swarm.toml").write_text("[job]\nrestartable = true\n")
    swarm("submit", "--no-sync", "--", "x")
    swarm("submit", "--no-sync", "--no-restartable", "--", "x")
    (tmp_path / "work" / "swarm.toml").unlink()
    swarm("submit", "--no-sync", "--restartable", "--", "x")
    swarm("submit", "--no-sync", "--", "x")
    monkeypatch.setenv("SWARM_RUN_RESTARTABLE", "1")
    swarm("submit", "--no-sync", "--", "x")
    specs = [body["spec"] for body in agent.wait_for("POST", "/v1/jobs", 5)]
    assert [spec.get("restartable") for spec in specs] == [True, False, True, None, True]


NOON = 1_790_251_200.0  # 2026-09-24T12:00:00Z


@pytest.mark.parametrize(
    ("text", "zone", "seconds"),
    [
        ("2h", "UTC0", 7_200),
        ("1h30m", "UTC0", 5_400),
        ("17:30", "UTC0", 19_800),
        ("17:30:05", "CET-1", 16_205),
        ("11:00", "UTC0", 82_800),  # tomorrow
        ("2026-09-24T13:00+01:00", "UTC0", None),
        ("2026-09-24T14:00+01:00", "UTC0", 3_600),
        ("2026-09-24T13:00:00Z", "CET-1", 3_600),
        ("2026-09-25", "UTC0", 43_200),
        ("2026-09-24 14:00", "CET-1", 3_600),
    ],
)
def test_a_deadline_is_a_time_from_now_of_the_day_or_of_the_calendar(monkeypatch, text, zone, seconds):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        if seconds is None:
            with pytest.raises(ValueError, match="is 0s in the past"):
                deadline(text, NOON)
        else:
            assert deadline(text, NOON) - NOON == seconds
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("2020-01-01", "in the past"),
        ("0s", "is 0s in the past"),
        *[
            (text, "must be a time from now, of the day, or in ISO form")
            for text in ("", "3600", "25:00", "7:3:2:1", "5pm", "9999999d")
        ],
        ("2026-02-30", "must be a time from now"),
    ],
)
def test_a_deadline_that_is_none_is_refused_with_examples(swarm, agent, text, told):
    code, _, err = swarm("submit", "--no-sync", "--deadline", text, "--", "x")
    assert (code, told in err, f"--deadline {text!r}" in err, agent.requests) == (2, True, True, []), err


def test_elastic_and_one_process_for_each_node_exclude_one_another(swarm, agent):
    remedy = "leave one of them out: of an elastic job each rank is a worker of its own"
    expected = f"swarm: --elastic and --per-node exclude one another\n  {remedy}\n"
    assert swarm("run", "--no-sync", "--elastic", "--per-node", "--", "x") == (2, "", expected)
    assert agent.requests == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--batch", "128"], {"global_batch": 128}),
        (
            ["--batch", "128:1024", "--local-batch", "32"],
            {"global_batch": 128, "global_batch_most": 1024, "local_batch_most": 32},
        ),
        (
            ["--batch=128:256", "--local-batch=8:32"],
            {"global_batch": 128, "global_batch_most": 256, "local_batch_least": 8, "local_batch_most": 32},
        ),
        (
            ["--batch=128", "--local-batch=8:32, A100=128,t4 = 16"],
            {
                "global_batch": 128,
                "local_batch_least": 8,
                "local_batch_most": 32,
                "local_batch_most_by_gpu": {"A100": 128, "t4": 16},
            },
        ),
    ],
)
def test_batches_that_the_swarm_may_choose(swarm, agent, options, expected):
    swarm("submit", "--no-sync", *options, "--", "x")
    assert {key: value for key, value in spec_of(agent).items() if "batch" in key} == expected


@pytest.mark.parametrize("value", ["0", "64:32", "64:", ":64", "x", "1:2:3"])
def test_batches_that_cannot_be_are_refused(swarm, value):
    code, _, err = swarm("submit", "--no-sync", "--batch", value, "--", "x")
    assert code == 2
    assert "--batch" in err


WORK = {"local_batch": 32, "sample_flops": 8.2e9, "parameter_bytes": 97 * 2**20}


def test_what_a_model_computes_is_told_by_an_option_or_by_a_table_of_the_job_file(swarm, agent, tmp_path):
    swarm("submit", "--no-sync", "--work", "local_batch=32, sample_flops=8.2e9, parameter_bytes=97M", "--", "x")
    assert spec_of(agent)["work"] == WORK
    (tmp_path / "job.toml").write_text(
        'command = "x"\n[work]\nlocal_batch = 32\nsample_flops = 8.2e9\nparameter_bytes = "97M"\n'
    )
    swarm("submit", "--no-sync", "-f", str(tmp_path / "job.toml"))
    assert spec_of(agent)["work"] == WORK


@pytest.mark.parametrize("value", ["", "32", "local_batch", "local_batch=many", "=3", "parameter_bytes=97X"])
def test_figures_that_are_none_are_refused_with_an_example(swarm, value):
    code, _, err = swarm("submit", "--no-sync", "--work", value, "--", "x")
    assert code == 2
    assert "--work" in err
    assert "sample_flops=8.2e9" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--outer", "--", "x"], "on"),
        (["--outer", "x"], "on"),
        (["--outer", "every=8,quorum=half", "x"], "every=8,quorum=half"),
        (["--outer=wire=float32", "--", "x"], "wire=float32"),
        (["--outer", "--priority", "1", "x"], "on"),
    ],
)
def test_how_ranks_train_apart_may_be_left_to_the_script(swarm, agent, words, told):
    swarm("submit", "--no-sync", *words)
    assert (spec_of(agent)["outer"], spec_of(agent)["command"]) == (told, ["x"])


@pytest.mark.parametrize(("words", "elastic"), [(["--outer"], True), ([], None), (["--outer", "--per-node"], None)])
def test_learners_of_a_job_of_several_sizes_come_and_go_while_they_train(swarm, agent, words, elastic):
    swarm("submit", "--no-sync", "-g", "2:8", *words, "--", "x")
    assert (spec_of(agent)["ranks_most"], spec_of(agent).get("elastic")) == (8, elastic)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("=64", "must be NAME=VALUE, where NAME is every, overlap, quorum, wire"),
        ("hops=3", "'hops=3' must be NAME=VALUE"),
        ("every=0", "every is '0'; it must be a whole number from 1 to 1000000"),
        ("every=2,every=3", "every is given twice"),
        ("quorum=most", "quorum is 'most'; it must be a whole number from 1 to 4096 or half"),
        ("wire=int4", "wire is 'int4'; it must be int8 or float32"),
        ("every=4,overlap=8", "overlap is 8; it must be at most 4 where every is 4"),
        ("every=auto,overlap=9", "overlap is 9; it must be at most 8 where every is auto"),
        ("every=often", "every is 'often'; it must be a whole number from 1 to 1000000 or auto"),
        ("every=99999999999999999999", "every is"),
    ],
)
def test_a_way_of_training_apart_that_is_none_is_refused_by_its_name(swarm, value, named):
    code, _, err = swarm("submit", "--no-sync", f"--outer={value}", "--", "x")
    assert code == 2
    assert "--outer" in err
    assert named in err
    assert "every=64" in err


def test_every_option_reaches_the_specification(swarm, agent, tmp_path):
    (tmp_path / "vars").write_text("# a comment\nexport A='1'\nB=two words\n")
    words = ["-n", "digits", "-c", "8", "--mem", "16G", "--gpu-type", "H200", "--gpu-mem", "80G", "--time=01:30:00"]
    words += ["-p", "-5", "--queue", "default", "-e", "SEED=3", "-e", "LOGNAME", "--env-file", str(tmp_path / "vars")]
    words += [
        "--venv",
        "/opt/env",
        "--per-node",
        "--node",
        "gpu1,gpu2",
        "--exclude",
        "gpu3",
        "--grace",
        "5s",
        "--restartable",
    ]
    swarm("submit", "--no-sync", "-g1", "--on-isolation", "continue", "-w", "/data", *words, "--", "true")
    spec = spec_of(agent)
    spec.pop("umask")
    assert spec == {
        "command": ["true"],
        "name": "digits",
        "user": "ada",
        "ranks": 1,
        "gpus_per_rank": 1,
        "cpus_per_rank": 8,
        "memory_bytes_per_rank": 16 * 2**30,
        "gpu_type": "H200",
        "gpu_memory_bytes": 80 * 2**30,
        "time_limit_seconds": 5400.0,
        "priority": -5,
        "queue": "default",
        "env": {"A": "1", "B": "two words", "SEED": "3", "LOGNAME": "ada"},
        "venv": "/opt/env",
        "per_node": True,
        "nodes": ["gpu1", "gpu2"],
        "exclude": ["gpu3"],
        "grace_seconds": 5.0,
        "on_isolation": "continue",
        "workdir": "/data",
        "restartable": True,
    }


def test_the_specification_uses_only_keys_that_the_agent_knows(swarm, agent):
    from swarmsched.api import JobSpec

    swarm("submit", "--no-sync", "-g2", "-c1", "--mem=1G", "--time=1h", "--node=a", "--venv=/v", "--", "true")
    assert JobSpec.from_json(spec_of(agent)).total_gpus == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "no command was given"),
        (["run", "--gpsu", "2", "--", "x"], "unknown option --gpsu; did you mean --gpus?"),
        (["run", "--restart", "3", "--", "x"], "--restartable lets it be stopped and begun again"),
        (["run", "-n", "@last", "--", "x"], "must not begin with '@' or hold a '/'"),
        *((["run", "-n", name, "--", "x"], "nobody can type it") for name in (".", "..", "-x", " ", "a ", "\tb")),
        (["run", "-f", "a.toml", "-f", "b.toml"], "-f was given twice"),
        (["run", "--tag", "x", "--", "y"], "unknown option --tag\n  `--help`"),
        (["run", "-it", "--", "bash"], "-i is not available in this version\n  jobs are not interactive"),
        (["run", "--tty", "--", "bash"], "--tty is not available in this version\n  jobs are not interactive"),
        (["sbatch", "job.sh"], "unknown command 'sbatch'; did you mean submit?"),
        (["squeue"], "unknown command 'squeue'; did you mean ps?"),
        (["sinfo"], "unknown command 'sinfo'; did you mean nodes?"),
        (["kill", "k3j9x0ab"], "unknown command 'kill'; did you mean cancel?"),
        (["run", "-g", "4:1", "--", "x"], "MIN 4 is larger than MAX 1; write 1:4"),
        (["run", "-g", "0:4", "--", "x"], "MIN '0' must be a whole number from 1 to 4096, as in 2:8"),
        (["run", "-g", "2:", "--", "x"], "MAX '' must be a whole number from 1 to 4096, as in 2:8"),
        (["run", "-g", "1:1000000", "--", "x"], "MAX '1000000' must be a whole number from 1 to 4096, as in 2:8"),
        (["run", "--local-batch", "16:8", "--", "x"], "MIN 16 is larger than MAX 8; write 8:16"),
        (
            ["run", "--local-batch", "a100=8", "--", "x"],
            "begins with 'a100=8'; begin with the limit on all other GPUs, as in 8:64,a100=128,t4=16",
        ),
        (["run", "--local-batch", "8,a100", "--", "x"], "'a100' must be GPU=MAX, as in 8:64,a100=128,t4=16"),
        (["run", "--local-batch", "8,t4=no", "--", "x"], "MAX 'no' of t4 must be a whole number from 1"),
        (["run", "--local-batch", "8,t4=4,T4=8", "--", "x"], "T4 is named twice"),
        (["run", "-g", "1:4", "--gpus-per-rank", "2", "--", "x"], "1 GPU cannot be split into ranks of 2"),
        (["run", "--array", "0-9", "--", "x"], "--array is not available in this version"),
        (["run", "--image=x", "--", "x"], "--image is not available in this version"),
        (["run", "-g", "two", "--", "x"], "must be a whole number"),
        (["run", "-t", "soon", "--", "x"], "must be a duration"),
        (["run", "--mem", "lots", "--", "x"], "must be a size"),
        (["run", "-g", "\u00b2", "--", "x"], "must be a whole number"),
        (["run", "-g", "9" * 5_000, "--", "x"], "must be a whole number"),
        (["run", "-t", "\u00b2m", "--", "x"], "must be a duration"),
        (["run", "-t", "1:\u00b2", "--", "x"], "must be a duration"),
        (["run", "-t", "9" * 400, "--", "x"], "must be a duration"),
        (["run", "--mem", "9" * 400, "--", "x"], "must be a size"),
        (["run", "--gres", "gpu:\u00b2", "--", "x"], "must be gpu:N or gpu:TYPE:N"),
        (["run", "--work", "local_batch=nan", "--", "x"], "must be NAME=NUMBER"),
        (["run", "-g", "1", "--ranks", "3", "--", "x"], "1 GPU cannot be shared by 3 ranks"),
        (["run", "-g", "3", "--ranks", "2", "--", "x"], "3 GPUs cannot be shared by 2 ranks"),
        (["run", "-e", "=1", "--", "x"], "is not K=V"),
        (["run", "-e", "NOT_SET_ANYWHERE", "--", "x"], "no such variable to copy"),
        (["run", "--on-isolation", "puase", "--", "x"], "did you mean pause?"),
        (["run", "-f", "absent.toml"], "does not exist"),
        (["run", "--name"], "--name needs a value"),
        (["run", "-n", "\udcff", "--", "x"], r"name: '\udcff' is not UTF-8"),
        (["run", "--", "echo", "caf\udce9"], r"command: 'caf\udce9' is not UTF-8"),
        (["run", "-e", "A=\udcff", "--", "x"], r"env: '\udcff' is not UTF-8"),
        (["run", "--no-sync", "-w", "/caf\udce9", "--", "x"], r"workdir: '/caf\udce9' is not UTF-8"),
        (["run", "--dry-run=yes", "--", "x"], "--dry-run takes no value"),
        (["rnu"], "unknown command 'rnu'; did you mean run?"),
    ],
)
def test_bad_command_lines_name_the_remedy_and_send_nothing(swarm, agent, words, message):
    code, out, err = swarm(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("swarm: ")
    assert "Traceback" not in err
    assert agent.requests == []


def test_a_job_file_is_read_and_options_win(swarm, agent, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('command = ["python", "a.py"]\ngpus = 4\nsync = false\ntime = "2h"\n[env]\nA = "1"\nB = 2\n')
    swarm("submit", str(file))
    swarm("submit", "-f", str(file), "-g", "2", "-e", "A=9", "--", "python", "b.py")
    first, second = (body["spec"] for body in agent.wait_for("POST", "/v1/jobs", 2))
    assert (first["command"], first["ranks"], first["env"]) == (["python", "a.py"], 4, {"A": "1", "B": "2"})
    assert (second["command"], second["ranks"], second["env"]) == (["python", "b.py"], 2, {"A": "9", "B": "2"})
    assert second["time_limit_seconds"] == 7200.0


GROUPS = """
name = "pair"
sync = false
[env]
BOTH = "1"
[[group]]
name = "worker"
command = ["python", "t.py"]
gpus = "2:4"
elastic = true
env = {OWN = "w"}
[[group]]
name = "server"
command = "serve -p 1"
ranks = 2
cpus = 3
mem = "2G"
require = ["nvlink"]
env = {OWN = "s", BOTH = "2"}
"""


def test_groups_of_a_job_file_are_the_jobs_own_and_others_and_options_are_for_all(swarm, agent, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(GROUPS)
    swarm("submit", "-f", str(file), "-e", "BOTH=3")
    spec = spec_of(agent)
    first = {key: spec[key] for key in ("name", "group", "command", "ranks", "ranks_most", "gpus_per_rank", "elastic")}
    assert first == {
        "name": "pair",
        "group": "worker",
        "command": ["python", "t.py"],
        "ranks": 2,
        "ranks_most": 4,
        "gpus_per_rank": 1,
        "elastic": True,
    }
    assert spec["env"] == {"BOTH": "3", "OWN": "w"}
    (server,) = spec["groups"]
    assert server == {
        "name": "server",
        "command": ["serve", "-p", "1"],
        "ranks": 2,
        "gpus_per_rank": 0,
        "cpus_per_rank": 3,
        "memory_bytes_per_rank": 2 * 2**30,
        "require": ["nvlink"],
        "env": {"OWN": "s", "BOTH": "3"},
    }
    assert JobSpec.from_json(spec).groups[0].demand.labels == ("nvlink",)
    yaml = tmp_path / "job.yaml"
    yaml.write_text("sync: false\ngroup:\n- {name: a, command: x}\n- {name: b, command: y, gpus: 1}\n")
    swarm("submit", "-f", str(yaml))
    second = agent.wait_for("POST", "/v1/jobs", 2)[1]["spec"]
    assert [each["name"] for each in second["groups"]] == ["b"]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("cpus = 3", "cpu = 3", "group 2 (server): cpu is no key of a group; did you mean cpus?"),
        ("cpus = 3", "elastic = true", "group 2 (server): elastic goes with the first group only"),
        ("cpus = 3", 'cpus = "x"', "job.toml:16: cpus: must be a whole number, not 'x'"),
        ('name = "server"\n', "", "group 2: name is missing"),
        ('command = "serve -p 1"\n', "", "group 2 (server): command is missing"),
        ("sync = false", "sync = false\ngpus = 3", "gpus is set beside the groups and in the first of them"),
        ("cpus = 3", "priority = 1", "priority is no key of a group"),
    ],
)
def test_what_is_wrong_with_a_group_of_a_job_file_is_told_with_its_number_and_name(swarm, tmp_path, old, new, told):
    file = tmp_path / "job.toml"
    assert old in GROUPS
    file.write_text(GROUPS.replace(old, new))
    code, _, err = swarm("submit", "-f", str(file))
    assert code == 2
    assert told in err
    file.write_text('[group]\nname = "a"\n')
    assert "write [[group]] and its keys below it" in swarm("submit", "-f", str(file))[2]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.toml", 'command = "x"\ngpus = "2:4"\nbatch = "8:16"\n'),
        ("job.yaml", "command: x\ngpus: 2:4\nbatch: 8:16\n"),
    ],
)
def test_a_job_file_may_hold_ranges(swarm, agent, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    swarm("submit", "--no-sync", "-f", str(tmp_path / name))
    spec = spec_of(agent)
    assert (spec["ranks"], spec["ranks_most"]) == (2, 4)
    assert (spec["global_batch"], spec["global_batch_most"]) == (8, 16)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job.toml", 'command = "x"\n\ngpsu = 4\n', ":3: gpsu: unknown key; did you mean gpus?"),
        ("job.yaml", "command: x\ngpsu: 4\n", ":2: gpsu: unknown key; did you mean gpus?"),
        ("job.toml", 'command = "x"\ngpus = "two"\n', ":2: gpus: must be a whole number"),
        ("job.toml", 'command = "x"\nranks = "4"\n', ":2: ranks: must be a whole number"),
        ("job.yaml", "command: x\ngpus: 4:2\n", ":2: gpus: MIN 4 is larger than MAX 2; write 2:4"),
        ("job.toml", 'command = "x"\ntime = nan\n', ":2: time: nan must be a finite number"),
        ("job.toml", 'command = "x"\ntime = inf\n', ":2: time: inf must be a finite number"),
        ("job.toml", 'command = "x"\n[work]\nlocal_batch = nan\n', "must be NAME=NUMBER"),
        (
            "job.toml",
            'command = "x"\nlocal_batch = "t4=4"\n',
            ":2: local_batch: begins with 't4=4'; begin with the limit",
        ),
        ("job.toml", "command = [\n", "is not TOML"),
        ("job.yaml", "a: [", "is not YAML"),
        ("job.toml", 'command = "x"\narray = "0-9"\n', ":2: array is not available in this version"),
        ("job.yaml", "- x\n", "must be a table"),
    ],
)
def test_a_bad_job_file_is_named_with_its_line(swarm, agent, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    code, _, err = swarm("submit", "-f", str(tmp_path / name))
    assert code == 2
    assert message in err
    assert agent.requests == []


def test_a_rejected_job_names_options_and_remedies(swarm, agent):
    errors = [{"pointer": "/spec/queue", "detail": "there is no queue 'x'", "remedy": "known queues: default"}]
    agent.answers["POST /v1/jobs"] = (422, problem(422, "job_rejected", "bad", errors=errors))
    code, out, err = swarm("run", "--no-sync", "--", "true")
    assert (code, out) == (2, "")
    assert err == "swarm: cannot submit the job: --queue: there is no queue 'x'\n  known queues: default\n"


@pytest.mark.parametrize(
    ("pointer", "shown"),
    [
        ("/spec/nodes/0", "--node"),
        ("/spec/ranks_most", "--gpus"),
        ("/spec/memory_bytes_per_rank", "--mem"),
        ("/spec/global_batch", "--batch"),
        ("/spec/env/SEED", "--env SEED"),
        ("/spec/work/sample_flops", "--work sample_flops"),
        ("/spec/command/2", "command.2"),
        ("/ticket", "ticket"),
    ],
)
def test_the_places_of_a_specification_are_named_by_their_options(swarm, agent, pointer, shown):
    errors = [{"pointer": pointer, "detail": "is wrong", "remedy": "mend it"}] * 2
    agent.answers["POST /v1/jobs"] = (422, problem(422, "invalid", "bad", errors=errors))
    told = f"swarm: cannot submit the job: {shown}: is wrong; {shown}: is wrong\n  mend it\n"
    assert swarm("submit", "--no-sync", "--", "true")[2] == told


def test_of_an_impossible_request_no_field_is_said_to_be_wrong(swarm, agent):
    errors = [{"pointer": "/spec/ranks", "detail": "asked for 900 GiB of memory", "remedy": "ask for less"}]
    asked = problem(422, "impossible_request", "asked for 900 GiB of memory", errors=errors)
    agent.answers["POST /v1/jobs"] = (422, asked)
    told = "swarm: cannot submit the job: asked for 900 GiB of memory\n  ask for less\n"
    assert swarm("submit", "--no-sync", "--", "true")[2] == told


def test_an_impossible_request_is_refused_with_125(swarm, agent):
    document = problem(422, "impossible_request", "asked for 64 GPUs; the swarm has 6", remedy="ask for at most 6")
    agent.answers["POST /v1/jobs"] = (422, document)
    assert swarm("run", "--no-sync", "-g64", "--", "true") == (
        125,
        "",
        "swarm: cannot submit the job: asked for 64 GPUs; the swarm has 6\n  ask for at most 6\n",
    )


def test_a_wrong_token_is_125_for_run_and_4_for_ps(swarm, monkeypatch):
    monkeypatch.setenv("SWARM_TOKEN", "wrong-token")
    assert swarm("run", "--no-sync", "--", "true")[0] == 125
    code, _, err = swarm("ps")
    assert code == 4
    assert err.splitlines()[0] == "swarm: cannot list jobs: the token is missing or wrong"


def test_no_agent_at_all_is_125_and_says_what_to_do(swarm, point_at):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        point_at(address)
        code, out, err = swarm("run", "--no-sync", "--", "true")
    assert (code, out) == (125, "")
    assert err.splitlines()[0].startswith(f"swarm: no agent answered at {address}: ")
    assert "SWARM_HOSTS" in err


def test_a_lost_answer_is_repeated_with_the_same_ticket_at_the_next_agent(swarm, agent, point_at):
    """The first agent takes the job and never answers: the second is asked with the same ticket, one job."""
    release = threading.Event()
    with FakeAgent("gpu2") as second:
        point_at(agent, second)

        def swallow(body, query):
            release.wait(10)
            return 503, problem(503, "not_ready", "late")

        agent.answers["POST /v1/jobs"] = swallow
        code, out, _ = swarm("run", "-d", "--no-sync", "--", "true")
        release.set()
        assert (code, out) == (0, f"{HANDLE}\n")
        tickets = [agent.wait_for("POST", "/v1/jobs")[0]["ticket"], second.wait_for("POST", "/v1/jobs")[0]["ticket"]]
        assert tickets[0] == tickets[1]
        assert list(second.jobs) == [JOB_ID]


def test_the_stream_goes_on_at_another_agent_where_it_broke_off(swarm, agent, point_at):
    with FakeAgent("gpu2") as second:
        point_at(agent, second)
        seen = []
        agent.stream = lambda _: iter([state("running", "1"), log("one\n", "c1")])

        def rest(cursor):
            seen.append(cursor)
            return iter([log("two\n", "c2"), end("c3", 0)])

        second.stream = rest
        agent.answers["POST /v1/tickets"] = lambda body, query: (
            200,
            {"job_id": JOB_ID, "handle": HANDLE, "holders": ["gpu1"], "stores": ["2a"], "node": "gpu1"},
        )

        def once(cursor):
            agent.stream = rest
            return iter([state("running", "1"), log("one\n", "c1")])

        agent.stream = once
        assert swarm("run", "--no-sync", "--", "x") == (0, "one\ntwo\n", f"swarm: job {HANDLE}\n")
        assert seen == ["c1"]


def test_lost_contact_with_an_unknown_outcome_is_125(swarm, agent, monkeypatch):
    monkeypatch.setenv("SWARM_CONTACT_TIMEOUT", "0.2s")
    agent.stream = lambda _: iter([])
    code, out, err = swarm("run", "--no-sync", "--", "x")
    assert (code, out) == (125, "")
    assert f"lost contact with job {JOB_ID}" in err
    assert "its outcome is unknown" in err


def test_a_job_that_waits_is_explained_after_a_while(swarm, agent, monkeypatch):
    monkeypatch.setattr(attached, "QUIET_START_S", 0.1)

    def stream(_):
        yield state("queued", "1", nodes=[], reason="needs 4 GPUs, 2 free")
        agent.wait_for("GET", f"/v1/jobs/{JOB_ID}/logs")
        threading.Event().wait(2.0)
        yield state("starting", "2", phase="place", reason="gpu3 has refused")
        yield state("starting", "3", phase="sync")
        yield state("running", "4")
        yield end("5")

    agent.stream = stream
    code, out, err = swarm("run", "--no-sync", "-g4", "--", "x")
    assert (code, out) == (0, "")
    placing = " starting: reserving resources (gpu3 has refused)"
    told = ("", " queued: needs 4 GPUs, 2 free", placing, " starting: copying files", " running on gpu1, gpu2")
    assert err == "".join(f"swarm: job {HANDLE}{words}\n" for words in told)


def test_timeout_cancels_the_job_and_returns_124(swarm, agent):
    def stream(_):
        yield state("running", "1")
        agent.wait_for("POST", f"/v1/jobs/{JOB_ID}/cancel")
        yield end("2", 143, "cancelled", signal=15, exit_code=0)

    agent.stream = stream
    code, _, err = swarm("run", "--no-sync", "--timeout", "0.1", "--", "x")
    assert code == 124
    assert f"the timeout of 0.1 s was reached: cancelling job {HANDLE}" in err


def test_dry_run_submits_nothing(swarm, agent):
    code, out, _ = swarm("run", "--dry-run", "-g2", "--", "x")
    assert (code, agent.jobs) == (0, {})
    assert out.startswith("would be accepted: ")
    assert [path for _, path, _ in agent.requests] == ["/v1/tickets", "/v1/jobs"]


def test_quiet_says_nothing_of_its_own(swarm, agent):
    agent.stream = lambda _: iter([state("running", "1"), end("2", 1, "failed")])
    assert swarm("run", "-q", "--no-sync", "--", "x") == (1, "", "")


def test_attach_returns_the_jobs_code_and_wait_as_well(swarm, agent):
    agent.stream = lambda _: iter([state("running", "1"), log("x\n", "2"), end("3", 7, "failed")])
    assert swarm("attach", HANDLE)[:2] == (7, "x\n")
    agent.answers[f"GET /v1/jobs/{HANDLE}/wait"] = {"met": True, "job": ended(9, "failed")}
    assert swarm("wait", HANDLE) == (9, "", f"swarm: job {HANDLE} failed (exit code 9)\n")


def test_wait_times_out_with_124(swarm, agent):
    from tests.client.testing import job_document

    agent.answers[f"GET /v1/jobs/{HANDLE}/wait"] = {"met": False, "job": job_document()}
    agent.answers[f"GET /v1/jobs/{JOB_ID}/wait"] = {"met": False, "job": job_document()}
    code, _, err = swarm("wait", HANDLE, "--timeout", "0.05")
    assert code == 124
    assert "is not done after" in err


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        (["--", "python", "train.py"], True),
        (["--", "python3.11", "-m", "train"], True),
        (["--", "torchrun", "train.py"], True),
        (["-g", "1", "--", "python", "train.py"], False),
        (["-g", "0", "--", "python", "train.py"], False),
        (["--ranks", "2", "--", "python", "train.py"], False),
        (["-q", "--", "python", "train.py"], False),
        (["--", "python", "-c", "print(1)"], False),
        (["--", "nvidia-smi"], False),
        (["--", "bash", "train.sh"], False),
    ],
)
def test_that_no_gpu_was_asked_for_is_told_where_it_is_likely_forgotten(swarm, agent, words, is_told):
    assert "no GPU" not in swarm("submit", "--no-sync", *words)[2]
    agent.gpus = 8
    told = "swarm: no GPU was asked for, and the swarm has 8 GPUs: -g N asks for N, -g 0 means none\n"
    assert swarm("submit", "--no-sync", *words)[2] == told * is_told

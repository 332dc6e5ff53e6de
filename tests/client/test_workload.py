"""`swarm simulate generate`: its folder is what a replay takes, and what it says of words that cannot be used."""

import json
import shlex

import pytest

from swarm_client.cli import main


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["simulate", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_that_it_prints_replays_all_jobs_of_the_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = simulate(capsys, "generate", "--count", "6", "--nodes", "4", "--classes", "2", "--seed", "3")
    assert code == 0
    assert out.startswith("generated: 6 jobs in ")
    command = shlex.split(out.rpartition("replay them: ")[2])
    code, out, _ = simulate(capsys, *command[2:], "-o", "json")
    assert code == 0
    told = {each["policy"]: each["finished"] for each in json.loads(out)["items"]}
    assert told == {"swarm": 6, "tiresias": 6, "backfill": 6}
    simulate(capsys, "generate", "--count", "6", "--nodes", "4", "--wishes", "0", "--to", "plain")
    assert simulate(capsys, "replay", "plain/jobs.csv", "--policy", "backfill", "--nodes", "4")[0] == 0


def test_equal_options_write_equal_files_and_quietly_their_names_are_printed(capsys, tmp_path):
    words = ["generate", "--seed", "4", "--count", "5", "-q", "--to"]
    code, out, _ = simulate(capsys, *words, str(tmp_path / "one"))
    simulate(capsys, *words, str(tmp_path / "two"))
    files = [line.removeprefix(f"{tmp_path}/one/") for line in out.splitlines()]
    assert (code, len(files)) == (0, 6)
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("generate", "--load", "0"), "must be a number from 0.01 to 100"),
        (("generate", "--nodes", "2", "--classes", "3"), "--classes: 3 need more than 2 nodes"),
        (("generate", "--nodes", "x"), "--nodes 'x' is no number of servers"),
        (("generate", "--policy", "swarm"), "--policy cannot go with simulate generate"),
        (("replay", "jobs.csv", "--load", "1"), "--load cannot go with simulate replay"),
        (("faults", "--gpus-per-node", "4"), "leave it out: it is for swarm simulate replay"),
        (("generate", "here", "there"), "one kind of simulation"),
        (("generate", "--to", ""), "--to '' names nothing"),
    ],
)
def test_what_cannot_be_used_is_named_with_a_remedy(capsys, words, told):
    code, out, err = simulate(capsys, *words)
    assert (code, out) == (2, "")
    assert told in err


def test_a_folder_that_has_something_is_left_as_it_is(capsys, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "jobs.csv").write_text("mine")
    code, _, err = simulate(capsys, "generate", "--to", str(full))
    assert (code, [each.name for each in full.iterdir()]) == (2, ["jobs.csv"])
    assert "jobs.csv exists" in err
    (tmp_path / "file").write_text("")
    assert "exists" in simulate(capsys, "generate", "--to", str(tmp_path / "file"))[2]


HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    "11,u1,vcA,2,16,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-09 18:42:41,100,0\n"
)


def test_recordings_become_tables_that_a_replay_takes_and_what_was_left_out_is_told(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "data" / "Venus"
    source.mkdir(parents=True)
    (source / "cluster_log.csv").write_text(HELIOS + "12,u1,vcA,x,1,1,F,2020-06-09 18:41:01,,,1,0\n" * 7)
    (tmp_path / "data" / ".git").mkdir()
    (tmp_path / "data" / ".git" / "cluster_log.csv").write_text("no recording")
    code, out, err = simulate(capsys, "import", "helios", "data")
    assert (code, out) == (0, "helios/workloads/helios_jobs.csv  jobs: 1\n")
    assert err.startswith("swarm: 7 left out, all in helios/skipped.csv: Venus/cluster_log.csv, row 3, gpu_num: 'x'")
    assert err.endswith("; ...\n")
    assert len((tmp_path / "helios" / "skipped.csv").read_text().splitlines()) == 1 + 7
    assert simulate(capsys, "replay", "helios/workloads/helios_jobs.csv", "--policy", "fifo")[0] == 0
    code, out, _ = simulate(capsys, "import", "helios", "data/Venus/cluster_log.csv", "--to", "again", "-o", "json")
    assert (code, json.loads(out)["skipped"], json.loads(out)["jobs"]) == (0, 7, {"workloads/helios_jobs.csv": 1})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("import", "helios"), "simulate import takes a format and a path"),
        (("import", "polux", "."), "'polux' is not known"),
        (("import", "philly", "nowhere"), "nothing of the format philly could be used"),
        (("import", "helios", "/nowhere/cluster_log.csv"), "there is no file /nowhere/cluster_log.csv"),
        (("import", "helios", ".", "--seed", "3"), "--seed cannot go with simulate import"),
    ],
)
def test_what_cannot_be_imported_is_named_with_a_remedy(capsys, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    code, out, err = simulate(capsys, *words)
    assert (code, out) == (2, "")
    assert told in err

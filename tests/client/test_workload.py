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
    (full / "mine.csv").write_text("mine")
    code, _, err = simulate(capsys, "generate", "--to", str(full))
    assert (code, [each.name for each in full.iterdir()]) == (2, ["mine.csv"])
    assert "is not empty" in err
    (tmp_path / "file").write_text("")
    assert "exists" in simulate(capsys, "generate", "--to", str(tmp_path / "file"))[2]

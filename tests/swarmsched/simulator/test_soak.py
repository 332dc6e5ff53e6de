import subprocess
from pathlib import Path

import pytest

from swarm_client.simulate import Report, Timed
from swarmsched.simulator.checks.sometimes import NAMES
from swarmsched.simulator.seeds import SeedResult
from tests import soak
from tests.soak import BLOCK, Soak, UsageProblem, append, done_blocks, never_walked


def test_shards_share_all_blocks_and_each_has_its_own():
    whole = list(Soak(0, 1_100).blocks())
    parts = [list(Soak(0, 1_100, shard, 3).blocks()) for shard in (1, 2, 3)]
    assert [len(block) for block in whole] == [BLOCK] * 4 + [100]
    assert sorted((block for part in parts for block in part), key=lambda block: block[0]) == whole


def test_a_finished_block_is_found_in_the_record_of_its_commit_alone(tmp_path):
    record = tmp_path / "soak.csv"
    found = Report()
    found.add(Timed(SeedResult(3, 100, 1, {"seed": 3, "invariant": "5"}, {"task frozen": 2}), 1.0))
    append(record, "abc", range(250), found)
    append(record, "def", range(250, 500), found)
    assert done_blocks(record, "abc") == {(0, 249)}
    assert done_blocks(record, "def") == {(250, 499)}
    assert done_blocks(tmp_path / "none.csv", "abc") == set()
    assert "3:5" in record.read_text().splitlines()[1]


def found_in(seed, sometimes):
    found = Report()
    found.add(Timed(SeedResult(seed, 100, 1, None, sometimes), 1.0))
    return found


def test_a_path_that_no_block_of_the_commit_has_walked_is_named_once_all_blocks_are_there(tmp_path):
    plan = Soak(0, 500, shard=2, shard_count=2, record=tmp_path / "soak.csv")
    rare, *others = NAMES
    append(plan.record, "abc", range(250), found_in(0, dict.fromkeys(others, 1) | {rare: 0}))
    assert never_walked(plan, "abc") == []
    append(plan.record, "def", range(250, 500), found_in(1, {rare: 1}))
    assert never_walked(plan, "abc") == []
    append(plan.record, "abc", range(250, 500), found_in(1, dict.fromkeys(NAMES, 0)))
    assert never_walked(plan, "abc") == [rare]


def test_a_path_that_one_block_has_walked_is_not_named(tmp_path):
    plan = Soak(0, 500, record=tmp_path / "soak.csv")
    rare, *others = NAMES
    append(plan.record, "abc", range(250), found_in(0, dict.fromkeys(others, 1)))
    append(plan.record, "abc", range(250, 500), found_in(1, {rare: 3}))
    assert never_walked(plan, "abc") == []


def test_a_soak_fails_for_a_path_that_was_never_walked_and_says_which(tmp_path, monkeypatch, capsys):
    rare, *others = NAMES
    monkeypatch.setenv("SOAK_RECORD", str(tmp_path / "soak.csv"))
    monkeypatch.setenv("SOAK_SEEDS", "0:2")
    monkeypatch.setattr(soak, "_git", lambda *arguments: "abc" if "log" in arguments else "")
    append(tmp_path / "soak.csv", "abc", range(2), found_in(0, dict.fromkeys(others, 1)))
    assert soak.main() == 1
    assert rare in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("SOAK_SEEDS", "20000"), ("SOAK_SEEDS", "9:3"), ("SOAK_SHARD", "5/4"), ("SOAK_SHARD", "x/y")]
)
def test_a_variable_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(UsageProblem, match=name):
        Soak.from_environment({name: value})


def test_a_changed_tree_is_refused_wherever_the_record_lies(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    tree.mkdir()
    monkeypatch.chdir(tree)
    subprocess.run(["git", "init", "-q"], check=True)
    (tree / "soak.csv").write_text("a record\n")
    (tree / "code.py").write_text("pass\n")
    subprocess.run(["git", "add", "."], check=True)
    assert soak._changed_files(tmp_path / "elsewhere.csv").split() == ["A", "code.py", "A", "soak.csv"]
    assert soak._changed_files(Path("soak.csv")).split() == ["A", "code.py"]

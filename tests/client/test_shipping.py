import io
import os
import re
import subprocess

import pytest

from swarm_client import progress
from swarm_client import tree as tree_module
from swarm_client.cli import main
from swarm_client.config import cache_home
from swarm_client.failure import UsageError
from swarm_client.tree import find_root, scan
from swarmsched.tree import EntryKind, Tree
from tests.client.testing import FakeAgent


def git(folder, *words):
    subprocess.run(
        ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True
    )


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "work" / "project"
    (folder / "sub").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "train.py").write_text("print(1)\n")
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / ".gitignore").write_text("data/\n")
    (folder / "data").mkdir()
    (folder / "data" / "big").write_text("x")
    return folder


def paths(folder, kind="git", exclude=(), cache=""):
    found = scan(str(folder), kind, exclude, cache or f"{cache_home(os.environ)}/c.json")
    return [entry.path for entry in found.tree.entries], found


def test_a_work_tree_is_shipped_without_what_git_ignores(project):
    names, found = paths(project)
    assert names == [".gitignore", "sub/run.sh", "train.py"]
    assert [entry.mode for entry in found.tree.files] == [0o644, 0o755, 0o644]
    assert found.left_out == []


@pytest.mark.parametrize(
    "name", [".env", ".env.local", "a/.ssh/config", ".aws/credentials", "id_ed25519", "deploy.pem", "sub/.git/x"]
)
def test_secrets_are_never_shipped(tmp_path, name):
    folder = tmp_path / "work"
    (folder / "swarm.toml").write_text("")
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nx\n" if name.endswith("pem") else "secret")
    names, _ = paths(folder, "project")
    assert names == ["swarm.toml"]


def not_shipped(err):
    return [line.removeprefix("swarm: not shipped: ") for line in err.splitlines() if "not shipped" in line]


def test_what_is_left_out_is_told_once_and_again_when_it_changes(swarm, project, monkeypatch):
    monkeypatch.chdir(project)
    (project / ".env").write_text("secret")
    assert not_shipped(swarm("run", "-d", "-q", "--", "true")[2]) == []
    assert not_shipped(swarm("run", "-d", "--", "true")[2]) == [".env (may hold secrets)"]
    (project / "train.py").write_text("print(2)\n")
    assert not_shipped(swarm("submit", "--", "true")[2]) == []
    (project / "sub" / ".netrc").write_text("secret")
    both = [".env (may hold secrets)", "sub/.netrc (may hold secrets)"]
    assert not_shipped(swarm("submit", "--", "true")[2]) == both
    assert not_shipped(swarm("run", "-d", "--", "true")[2]) == []


@pytest.mark.parametrize("option", ["-v", "--dry-run"])
def test_all_that_is_left_out_is_listed_on_demand(swarm, project, monkeypatch, option):
    monkeypatch.chdir(project)
    for index in range(7):
        (project / f".env.{index}").write_text("secret")
    short = not_shipped(swarm("run", "-d", "--", "true")[2])
    assert short == [*(f".env.{index} (may hold secrets)" for index in range(5)), "2 more (-v lists all)"]
    for _ in range(2):
        shown = not_shipped(swarm("run", "-d", option, "--", "true")[2])
        assert shown == [f".env.{index} (may hold secrets)" for index in range(7)]


def test_where_nothing_can_be_kept_what_is_left_out_is_told_each_time(swarm, home, project, monkeypatch):
    monkeypatch.chdir(project)
    (project / ".env").write_text("secret")
    (home / "cache" / "swarm").write_text("not a folder")
    for _ in range(2):
        assert not_shipped(swarm("run", "-d", "--", "true")[2]) == [".env (may hold secrets)"]


def test_links_that_lead_out_are_left_out_with_a_reason(project):
    (project / "in").symlink_to("train.py")
    (project / "out").symlink_to("../../etc")
    (project / "absolute").symlink_to("/etc/passwd")
    names, found = paths(project)
    assert "in" in names
    assert not {"out", "absolute"} & set(names)
    assert len(found.left_out) == 2
    assert [e.target for e in found.tree.entries if e.kind is EntryKind.LINK] == ["train.py"]


def test_tracked_files_that_were_deleted_are_no_error(project):
    git(project, "add", "-A")
    git(project, "commit", "-qm", "x")
    (project / "train.py").unlink()
    assert paths(project)[0] == [".gitignore", "sub/run.sh"]


@pytest.mark.parametrize("instead", ["file", "link to a file", "link to a folder"])
def test_files_of_a_tracked_folder_that_became_something_else_count_as_deleted(project, instead):
    git(project, "add", "-A")
    git(project, "commit", "-qm", "x")
    (project / "other").mkdir()
    (project / "other" / "run.sh").touch()
    (project / "sub" / "run.sh").unlink()
    (project / "sub").rmdir()
    if instead == "file":
        (project / "sub").touch()
    else:
        (project / "sub").symlink_to("other" if instead.endswith("folder") else "train.py")
    assert paths(project)[0] == [".gitignore", "other/run.sh", "sub", "train.py"]


def test_a_current_folder_that_is_gone_is_named(swarm, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (["run", "true"], ["ps"]):
        code, _, problem = swarm(*words)
        assert (code, "the current folder does not exist any more" in problem) == (2, True)


def test_home_directories_and_the_root_are_refused(home):
    for folder, what in ((str(home), "a home directory"), (str(home.parent), "a home directory"), ("/", "the root of")):
        with pytest.raises(UsageError, match=what) as caught:
            find_root(folder, [str(home)])
        assert "--no-sync" in caught.value.remedy


def test_from_a_home_directory_a_job_starts_in_an_empty_folder(home, swarm, agent, monkeypatch):
    monkeypatch.chdir(home)
    code, _, err = swarm("run", "-d", "--", "nvidia-smi")
    assert code == 0
    assert "is never shipped: the job starts in an empty folder" in err
    (spec,) = [body["spec"] for body in agent.wait_for("POST", "/v1/jobs")]
    assert not {"tree", "workdir"} & set(spec)
    assert swarm("run", "-d", "--sync", "--", "true")[0] == 2


def test_a_plain_folder_is_shipped_only_while_it_is_small(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    monkeypatch.setattr(tree_module, "SMALL_FILES", 3)
    for number in range(3):
        (folder / f"{number}").write_text("")
    assert paths(folder, "plain")[0] == ["0", "1", "2"]
    (folder / "3").write_text("")
    with pytest.raises(UsageError, match="neither a git work tree nor a project") as caught:
        paths(folder, "plain")
    assert "--no-sync" in caught.value.remedy
    assert "swarm.toml" in caught.value.remedy


def test_the_nearest_project_upward_is_the_root(project, tmp_path, home):
    assert find_root(str(project / "sub"), [str(home)]) == (str(project), "git")
    (project / "sub" / "swarm.toml").write_text("")
    assert find_root(str(project / "sub"), [str(home)]) == (str(project / "sub"), "git")
    assert find_root(str(tmp_path / "work"), [str(home)]) == (str(tmp_path / "work"), "plain")


def test_unchanged_files_are_not_read_again_and_changed_ones_are(project, tmp_path, monkeypatch):
    cache = str(tmp_path / "cache.json")
    old = 1_000_000_000
    for file in (".gitignore", "train.py", "sub/run.sh"):
        os.utime(project / file, (old, old))
    monkeypatch.setattr(tree_module, "RACY_S", -1e9)  # the status change time cannot be set back
    first = paths(project, cache=cache)[1].tree
    read = []
    real = tree_module._hash_file

    def hash_file(full):
        read.append(full)
        return real(full)

    monkeypatch.setattr(tree_module, "_hash_file", hash_file)
    assert paths(project, cache=cache)[1].tree == first
    assert read == []
    (project / "train.py").write_text("print(2)\n")
    assert paths(project, cache=cache)[1].tree != first
    assert read == [str(project / "train.py")]


def test_only_missing_blobs_travel_and_the_sub_folder_is_the_workdir(swarm, agent, project, monkeypatch):
    monkeypatch.chdir(project / "sub")
    assert swarm("run", "-d", "--", "./run.sh")[0] == 0
    (project / "train.py").write_text("print(2)\n")
    assert swarm("run", "-d", "--", "./run.sh")[0] == 0
    first, second = (body["spec"] for body in agent.wait_for("POST", "/v1/jobs", 2))
    assert (first["workdir"], first["blob_sources"]) == ("sub", ["gpu1"])
    tree = Tree.from_bytes(agent.blobs[second["tree"]])
    assert [entry.path for entry in tree.entries] == [".gitignore", "sub/run.sh", "train.py"]
    assert agent.blobs[next(e.sha256 for e in tree.files if e.path == "train.py")] == b"print(2)\n"
    sizes = [len(body) for method, path, body in agent.requests if path == "/v1/blobs"]
    assert len(sizes) == 2
    assert first["tree"] != second["tree"]
    # The second time: the changed file and the manifest, in one pack.
    assert sizes[1] == 40 + len(b"print(2)\n") + 40 + len(agent.blobs[second["tree"]])


def test_large_files_travel_alone(swarm, agent, project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setattr(tree_module, "PACKED_BLOB_BYTES", 4)
    assert swarm("run", "-d", "--", "true")[0] == 0
    assert "PUT" in {method for method, _, _ in agent.requests}
    spec = agent.wait_for("POST", "/v1/jobs")[0]["spec"]
    assert set(Tree.from_bytes(agent.blobs[spec["tree"]]).blobs) <= set(agent.blobs)


def test_another_agent_takes_the_files_when_the_first_fails(swarm, agent, project, monkeypatch, point_at):
    monkeypatch.chdir(project)
    with FakeAgent("gpu2") as second:
        point_at(agent, second)
        agent.store = lambda *_: 1 / 0
        assert swarm("run", "-d", "--", "true")[0] == 0
        spec = (agent.jobs or second.jobs).popitem()[1]["spec"]
        assert spec["blob_sources"] == ["gpu2"]
        assert spec["tree"] in second.blobs


def test_requirements_are_shipped_as_a_blob(swarm, agent, project, monkeypatch):
    monkeypatch.chdir(project)
    (project / "requirements.txt").write_text("numpy\n")
    assert swarm("submit", "--no-sync", "--requirements", "requirements.txt", "--", "true")[0] == 0
    spec = agent.wait_for("POST", "/v1/jobs")[0]["spec"]
    assert agent.blobs == {spec["requirements"]: b"numpy\n"}
    assert "tree" not in spec


def test_no_sync_uses_the_same_path(swarm, agent, tmp_path):
    assert swarm("submit", "--no-sync", "--", "true")[0] == 0
    spec = agent.wait_for("POST", "/v1/jobs")[0]["spec"]
    assert spec["workdir"] == str(tmp_path / "work")
    assert "tree" not in spec


def test_a_program_that_mentions_a_key_header_is_no_key(project):
    (project / "train.py").write_text('HEADER = "-----BEGIN RSA PRIVATE KEY-----"\n')
    assert "train.py" in paths(project)[0]


def test_what_is_much_to_ship_is_told_in_the_unit_of_the_bar(swarm, project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setattr(tree_module, "PACK_BYTES", 2**20)
    (project / "data.bin").write_bytes(b"x" * 1_500 * 2**10)
    assert re.search(
        r"^swarm: shipping 1\.5 MiB in \d files to gpu1$", swarm("run", "-d", "--", "true")[2], re.MULTILINE
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_how_much_is_shipped_and_a_pipe_does_not(swarm, agent, project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "PAUSE_S", 0.0)
    assert "shipping" not in swarm("run", "-d", "--", "true")[2]
    (project / "train.py").write_text("x" * 4096)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert main(["run", "-d", "--", "true"]) == 0
    shown = terminal.getvalue()
    assert "shipping [" in shown
    assert "100%" in shown
    assert shown.endswith(progress.CLEAR_LINE), "the bar is gone when all is sent"

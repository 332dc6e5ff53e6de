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
from swarm_client.tree import Patterns, find_root, scan
from swarmsched.tree import EntryKind, Tree
from tests.client.testing import HANDLE, JOB_ID, FakeAgent, end, log


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


def paths(folder, kind="git", exclude=(), cache="", include=()):
    found = scan(str(folder), kind, exclude, cache or f"{cache_home(os.environ)}/c.json", include)
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


@pytest.mark.parametrize("words", [[], ["-w", "."]])
def test_from_a_home_directory_a_job_starts_in_an_empty_folder(home, swarm, agent, monkeypatch, words):
    monkeypatch.chdir(home)
    code, _, err = swarm("run", "-d", *words, "--", "nvidia-smi")
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


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("data", ["data", "data/x", "sub/data/x"], ["data2", "database/x"]),
        ("data/", ["data/x", "sub/data/x"], ["dat/x"]),
        ("/data", ["data", "data/x"], ["sub/data/x"]),
        ("./data", ["data/x"], ["sub/data/x"]),
        ("*.pt", ["a.pt", "sub/deep/a.pt"], ["a.pth"]),
        ("data/*.bin", ["data/a.bin", "data/sub/a.bin"], ["sub/data/a.bin", "data/a.bit"]),
        ("a/b", ["a/b", "a/b/c"], ["x/a/b", "a/bc"]),
        ("**/a/b", ["a/b", "x/y/a/b"], ["xa/b"]),
        ("a/**/b", ["a/b", "a/x/y/b/c"], ["b", "ab"]),
        ("[ab].pt", ["a.pt"], ["c.pt"]),
    ],
)
def test_patterns_mean_what_they_mean_to_git(pattern, fitting, others):
    patterns = Patterns((pattern,))
    assert [path for path in (*fitting, *others) if patterns.fit(path)] == fitting


@pytest.fixture
def ignoring(project):
    """A work tree that ignores data, weights and a virtual environment, with secrets among them."""
    (project / ".gitignore").write_text("data/\n*.pt\nvenv/\n")
    for name in ("data/deep/b.bin", "data/in/.git/config", "data/.env", "sub/w.pt", "venv/pyvenv.cfg", "venv/lib/x.pt"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("0123456789")
    return project


SHIPPED = [".gitignore", "sub/run.sh", "train.py"]


@pytest.mark.parametrize(
    ("include", "more"),
    [
        (["data/"], ["data/big", "data/deep/b.bin"]),
        (["data/*.bin"], ["data/deep/b.bin"]),
        (["*.pt"], ["sub/w.pt"]),
        (["venv"], ["venv/lib/x.pt", "venv/pyvenv.cfg"]),
        (["*"], ["data/big", "data/deep/b.bin", "sub/w.pt", "venv/lib/x.pt", "venv/pyvenv.cfg"]),
        ([".git", ".env", "data/in/.git"], []),
    ],
)
def test_what_git_ignores_is_shipped_on_demand_and_secrets_never(ignoring, include, more):
    assert paths(ignoring, include=include)[0] == sorted([*SHIPPED, *more])
    assert paths(ignoring, exclude=["data", "*.pt", "venv"], include=include)[0] == sorted([*SHIPPED, *more])


def test_what_a_repository_inside_ignores_is_shipped_on_demand(ignoring):
    inner = ignoring / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / ".gitignore").write_text("*.bin\n")
    (inner / "a.bin").write_text("x")
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "x")
    assert paths(ignoring, include=["*.bin"])[0] == sorted(
        [*SHIPPED, "data/deep/b.bin", "inner/.gitignore", "inner/a.bin"]
    )


def test_an_excluded_or_cached_file_of_a_project_is_shipped_on_demand(tmp_path):
    folder = tmp_path / "work"
    (folder / "swarm.toml").write_text("")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x").write_text("")
    (folder / "a.ckpt").write_text("")
    assert paths(folder, "project", ["*.ckpt"])[0] == ["swarm.toml"]
    both = ["__pycache__/x", "a.ckpt", "swarm.toml"]
    assert paths(folder, "project", ["*.ckpt"], include=["a.ckpt", "__pycache__"])[0] == both


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("", ["--include", "data/deep"]),
        ("", ["--include", "./data/deep/b.bin"]),
        ("data", ["--include", "deep/b.bin"]),
        ("sub", ["--include", "../data/deep/"]),
        ("sub", ["--include", "b.bin"]),
    ],
)
def test_an_included_path_counts_from_where_it_is_typed(swarm, agent, ignoring, monkeypatch, folder, words):
    monkeypatch.chdir(ignoring / folder)
    assert swarm("run", "-d", *words, "--", "true")[::2] == (0, "")
    tree = Tree.from_bytes(agent.blobs[agent.wait_for("POST", "/v1/jobs")[0]["spec"]["tree"]])
    assert [entry.path for entry in tree.entries] == [".gitignore", "data/deep/b.bin", *SHIPPED[1:]]


def test_files_and_jobs_say_what_is_included(swarm, agent, ignoring, monkeypatch):
    monkeypatch.chdir(ignoring)
    (ignoring / "swarm.toml").write_text('sync_include = ["*.pt"]\n[job]\ninclude = ["data/big"]\n')
    (ignoring / "job.toml").write_text('command = "true"\ninclude = "data/deep"\n')
    assert swarm("submit", "--", "true")[0] == swarm("submit", "job.toml")[0] == 0
    shipped = [
        {entry.path for entry in Tree.from_bytes(agent.blobs[body["spec"]["tree"]]).entries}
        for body in agent.wait_for("POST", "/v1/jobs", 2)
    ]
    assert all("sub/w.pt" in each for each in shipped)
    assert [{"data/big", "data/deep/b.bin"} & each for each in shipped] == [{"data/big"}, {"data/deep/b.bin"}]
    (ignoring / "swarm.toml").write_text('sync_include = ["*.pt", "nothing/"]')
    told = "swarm: sync_include 'nothing/' brings nothing\n"
    assert [swarm("run", *words, "--", "true")[2] for words in (["--dry-run"], ["-d"])] == [told, ""]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--include", "nope/"], "--include nope/ brings nothing: no file below"),
        (["--include", ".git"], "--include .git brings nothing: no file below"),
        (["--include", "data/.env"], "brings nothing: data/.env (may hold secrets) is never shipped"),
        (["--include", "../data"], "--include ../data lies outside of"),
        (["--include", "data/", "--no-sync"], "--include and --no-sync exclude one another"),
    ],
)
def test_an_include_that_brings_nothing_is_refused(swarm, ignoring, monkeypatch, words, problem):
    monkeypatch.chdir(ignoring)
    code, _, err = swarm("run", *words, "--", "true")
    assert (code, problem in err) == (2, True), err


def test_a_dry_run_tells_what_would_be_shipped_and_what_git_ignores(swarm, ignoring, monkeypatch):
    monkeypatch.chdir(ignoring)
    out = swarm("run", "--dry-run", "--", "true")[1]
    assert out.splitlines()[-1] == (
        "would be shipped: 3 files, 36 B; not shipped: 6 that git ignores (data/, sub/w.pt, venv/), 51 B"
    )
    out = swarm("run", "--dry-run", "--include", "data/big", "--", "true")[1]
    assert "would be shipped: 4 files, 37 B; not shipped: 5 that git ignores" in out
    assert "would be shipped: no files: with --no-sync" in swarm("run", "--dry-run", "--no-sync", "--", "true")[1]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'data/big'",
            "data/big is ignored by git and was not shipped: --include data/, or keep it on the nodes",
        ),
        (
            "cat: sub/w.pt: No such file or directory",
            "sub/w.pt is ignored by git and was not shipped: --include sub/w.pt, or keep it on the nodes",
        ),
        (f"python3: can't open file '/x/jobs/{JOB_ID}/1/work/sub/w.pt': [Errno 2]", "sub/w.pt is ignored by git"),
        ("OSError: data/deep not found.", "data/deep is ignored by git"),
        ("ModuleNotFoundError: No module named 'data.deep'", "data/deep is ignored by git"),
        ("open: data/.env: No such file or directory", "data/.env is ignored by git"),
        (
            "FileNotFoundError: 'out.ckpt' does not exist",
            "out.ckpt is left out by sync_exclude and was not shipped: --include out.ckpt, or keep it on the nodes",
        ),
        ("cat: .env.x: No such file or directory", ".env.x was not shipped (may hold secrets)"),
        ("cat: ../beside: No such file or directory", "../beside lies outside of "),
        ("cat: train.py: No such file or directory", ""),
        ("cat: other.pt: No such file or directory", ""),
        ("data/big", ""),
    ],
)
@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_a_missing_file_that_lies_here_is_explained(swarm, agent, ignoring, monkeypatch, said, told, stream):
    monkeypatch.chdir(ignoring)
    (ignoring / "swarm.toml").write_text('sync_exclude = ["*.ckpt"]')
    (ignoring / "out.ckpt").write_text("x")
    (ignoring / ".env.x").write_text("x")
    (ignoring.parent / "beside").write_text("x")
    agent.stream = lambda _: iter([log(f"begin\n{said}\n", "1", stream=stream), end("2", 1, "failed")])
    code, _, err = swarm("run", "--", "python", "train.py")
    after = err.partition(f"swarm: job {HANDLE} failed (exit code 1)\n")[2]
    assert (code, after.count("\n")) == (1, bool(told)), err
    assert after.startswith(f"swarm: {told}" if told else "")


def test_nothing_is_explained_of_a_job_that_succeeds_or_where_nobody_wants_words(swarm, agent, ignoring, monkeypatch):
    monkeypatch.chdir(ignoring)
    agent.stream = lambda _: iter([log("cat: data/big: No such file or directory\n", "1"), end("2", 0)])
    assert "ignored" not in swarm("run", "--", "true")[2]
    agent.stream = lambda _: iter([log("cat: data/big: No such file or directory\n", "1"), end("2", 1, "failed")])
    assert "ignored" not in swarm("run", "-q", "--", "true")[2]


def test_what_is_too_large_is_weighed_and_its_largest_parts_are_named(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    (folder / "outputs").mkdir()
    (folder / "outputs" / "a").write_bytes(b"x" * 3_000)
    (folder / "b").write_bytes(b"x" * 2_000)
    monkeypatch.setattr(tree_module, "SMALL_BYTES", 4_000)
    with pytest.raises(UsageError) as caught:
        paths(folder, "plain")
    assert "has 2 files with 4.9 KiB (outputs/ 2.9 KiB, b 2.0 KiB), more than the" in caught.value.problem
    monkeypatch.setattr(tree_module, "TREE_BYTES_LIMIT", 4_000)
    monkeypatch.setattr(tree_module, "_hash_file", lambda _: 1 / 0)  # refused before anything is read
    with pytest.raises(UsageError, match=r"has 2 files with 4.9 KiB \(outputs/ 2.9 KiB") as caught:
        paths(folder, "project")
    assert "sync_exclude" in caught.value.remedy
    monkeypatch.setattr(tree_module, "FILE_BYTES_LIMIT", 2_500)
    with pytest.raises(UsageError, match=r"outputs/a has 2.9 KiB; a file that is shipped has 2.4 KiB at most"):
        paths(folder, "project")


def test_that_nothing_of_a_home_is_shipped_is_told_once_and_where_the_command_needs_it(home, swarm, monkeypatch):
    monkeypatch.chdir(home)
    (home / "train.py").write_text("")
    told = [
        "empty folder" in swarm("run", "-d", *words)[2]
        for words in (["nvidia-smi"], ["nvidia-smi"], ["python", "train.py"], ["python", "x.py"], ["-v", "nvidia-smi"])
    ]
    assert told == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("text", "shipped"),
    [
        ("[project]\nname = 'x'\ndependencies = ['numpy>=1.26', 'torch[a]==2']\n", b"numpy>=1.26\ntorch[a]==2\n"),
        ("[project]\ndependencies = []\n[tool.uv]\ndev-dependencies = ['pytest']\n", b""),
    ],
)
def test_dependencies_of_a_project_are_shipped_as_requirements(swarm, agent, project, monkeypatch, text, shipped):
    monkeypatch.chdir(project)
    (project / "pyproject.toml").write_text(text)
    assert swarm("submit", "--no-sync", "--requirements", "pyproject.toml", "--", "true")[0] == 0
    assert agent.blobs == {agent.wait_for("POST", "/v1/jobs")[0]["spec"]["requirements"]: shipped}


@pytest.mark.parametrize(
    ("name", "text", "problem", "remedy"),
    [
        ("pyproject.toml", "[tool.poetry.dependencies]\nx = '*'\n", "has no list of dependencies", "poetry export"),
        ("pyproject.toml", "[project]\ndynamic = ['dependencies']\n", "has no list of dependencies", "uv export"),
        ("pyproject.toml", "[project]\ndependencies = []\n[tool.uv.sources]\nx = {path = '.'}\n", "names", "uv"),
        ("pyproject.toml", "[project\n", "is not TOML", "requirements.txt"),
        ("uv.lock", "", "is no list of requirements", "uv export"),
        ("poetry.lock", "", "is no list of requirements", "poetry export"),
        ("environment.yml", "", "is no list of requirements", "--venv PATH"),
    ],
)
def test_what_is_no_list_of_requirements_names_the_way_to_one(swarm, agent, tmp_path, name, text, problem, remedy):
    (tmp_path / "work" / name).write_text(text)
    code, _, err = swarm("submit", "--no-sync", "--requirements", name, "--", "true")
    assert (code, problem in err, remedy in err) == (2, True, True), err
    assert agent.requests == []


def test_variables_that_no_record_holds_are_refused_with_the_way_around(swarm, agent, tmp_path):
    (tmp_path / "work" / "vars").write_text("".join(f"NAME_{number}={'x' * 999}\n" for number in range(40)))
    code, _, err = swarm("submit", "--no-sync", "--env-file", "vars", "-e", f"LARGEST={'y' * 1_000}", "--", "true")
    assert (code, agent.requests) == (2, [])
    assert "--env and --env-file have 40.4 KiB, more than 32.0 KiB in all; the largest is LARGEST" in err
    assert "bash -c '. ./vars.sh; exec" in err

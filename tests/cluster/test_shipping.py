"""Files and environments reach the nodes: the real `swarm` command, real agents, no shared file system."""

import base64
import hashlib
import json
import os
import subprocess
import zipfile

import pytest

from tests.agent.testing import start_agents, wait_until_sync
from tests.cluster.conftest import converge

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-shipping")]

LIST = ("sh", "-c", "find . -type f -o -type l | sort")


def git(folder, *words):
    names = ("-c", "user.name=ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)


def fill(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def listed(out):
    return [line.removeprefix("./") for line in out.splitlines()]


def blobs_of(agent):
    return {path.name for path in (agent.data_dir / "blobs").rglob("*") if path.is_file() and len(path.name) >= 60}


@pytest.fixture
def work_tree(shell):
    git(shell.folder, "init", "-q")
    fill(
        shell.folder,
        {
            ".gitignore": "data/\n*.log\n",
            "train.py": "print('trained')\n",
            "untracked.py": "x = 1\n",
            "sub/run.sh": "#!/bin/sh\necho from $(basename $PWD)\n",
            "data/huge.bin": "x",
            "a.log": "noise",
            ".env": "PASSWORD=1",
            "id_rsa": "-----BEGIN OPENSSH PRIVATE KEY-----\n",
            "keys/deploy": "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n",
        },
    )
    (shell.folder / "sub" / "run.sh").chmod(0o755)
    git(shell.folder, "add", "train.py", ".gitignore")
    git(shell.folder, "commit", "-qm", "first")
    return shell.folder


def test_work_tree_reaches_another_node_without_ignored_files_and_secrets(swarm, shell, work_tree):
    """The upload goes to n1; the job runs on n3, which fetches it."""
    code, out, err = shell(swarm[:1], "run", "--node", "n3", "--", *LIST)
    assert code == 0, err
    assert listed(out) == [".gitignore", "sub/run.sh", "train.py", "untracked.py"]


def test_sub_folder_of_the_work_tree_is_where_the_job_starts(swarm, shell, work_tree):
    code, out, err = shell(swarm, "run", "--node", "n2", "--", "./run.sh", folder=work_tree / "sub")
    assert (code, out) == (0, "from sub\n"), err


def test_second_run_uploads_only_what_changed(swarm, shell, work_tree):
    (work_tree / "large.txt").write_text(os.urandom(50_000).hex())
    assert shell(swarm[:1], "run", "--node", "n1", "--", "true")[0] == 0
    before = blobs_of(swarm[0])
    (work_tree / "train.py").write_text("print('trained again')\n")
    code, out, _ = shell(swarm[:1], "run", "--node", "n1", "--", "python3", "train.py")
    assert (code, out) == (0, "trained again\n")
    new = blobs_of(swarm[0]) - before
    assert len(new) == 2, "the changed file and the manifest"
    code, out, _ = shell(swarm[:1], "run", "--node", "n1", "--", "python3", "train.py")
    assert blobs_of(swarm[0]) - before == new


def test_project_file_makes_a_folder_shippable(swarm, shell):
    fill(shell.folder, {"swarm.toml": "", "a/b.txt": "b", ".aws/credentials": "c", ".ssh/config": "y"})
    code, out, err = shell(swarm, "run", "--", *LIST)
    assert code == 0, err
    assert listed(out) == ["a/b.txt", "swarm.toml"]


def test_small_plain_folder_is_shipped_and_a_large_one_is_refused(swarm, shell):
    fill(shell.folder, {"a.txt": "a"})
    assert shell(swarm, "run", "--", "cat", "a.txt")[:2] == (0, "a")
    for number in range(1_001):
        (shell.folder / f"{number}.txt").touch()
    code, out, err = shell(swarm, "run", "--", "cat", "a.txt")
    assert (code, out) == (2, "")
    assert "1,000 files" in err
    assert "--no-sync" in err


@pytest.mark.parametrize("place", ["home", "root"])
def test_home_and_root_are_never_shipped(swarm, shell, place):
    (shell.home / "thesis.txt").write_text("private")
    folder = shell.home if place == "home" else "/"
    code, out, err = shell(swarm, "run", "--", "sh", "-c", "ls -A", folder=folder)
    assert "thesis.txt" not in out
    assert "never shipped" in err
    code, out, err = shell(swarm, "run", "--sync", "--", "true", folder=folder)
    assert (code, out) == (2, "")
    assert "--no-sync" in err


def test_no_sync_uses_the_same_path_on_the_node(swarm, shell):
    code, out, err = shell(swarm, "run", "--no-sync", "--", "pwd")
    assert (code, out) == (0, f"{shell.folder}\n"), err


def make_wheel(folder, version):
    """The smallest installable package."""
    folder.mkdir(exist_ok=True)
    info = f"tinynet-{version}.dist-info"
    files = {
        "tinynet.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinynet\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for name, text in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(text)}\n" for name, text in files.items())
    with zipfile.ZipFile(folder / f"tinynet-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(name, text)
    return folder


def environments(agent):
    return sorted(mark.stem for mark in (agent.data_dir / "envs-done").glob("*.json"))


def test_environment_is_built_once_per_content_with_a_phase_of_its_own(swarm, shell, tmp_path):
    wheels = make_wheel(tmp_path / "wheels", "1.0")
    text = f"--no-index\n--find-links {wheels}\ntinynet==1.0\n"
    (shell.folder / "requirements.txt").write_text(text)
    words = ("run", "-n", "built", "--node", "n2", "--requirements", "requirements.txt", "--")
    program = ("python", "-c", "import sys, tinynet; print(tinynet.VERSION, sys.prefix)")
    with shell.start(swarm, *words, *program) as process:
        phases = set()

        def look():
            code, out, _ = shell(swarm[:1], "ps", "-a", "-o", "json")
            assert code == 0
            phases.update(job["phase"] for job in json.loads(out)["items"] if job["name"] == "built")
            return "environment" in phases

        wait_until_sync(look, what="ps shows the phase")
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out.split()[0]) == (0, "1.0"), err
    first = out.split()[1]
    assert len(environments(swarm[1])) == 1
    code, out, err = shell(swarm, *words, *program)
    assert (code, out) == (0, f"1.0 {first}\n"), err
    assert len(environments(swarm[1])) == 1


def test_failed_environment_shows_the_installers_output_and_exit_code(swarm, shell, tmp_path):
    (tmp_path / "empty").mkdir()
    (shell.folder / "requirements.txt").write_text(f"--no-index\n--find-links {tmp_path / 'empty'}\nnot-a-package\n")
    code, out, err = shell(swarm, "run", "-n", "unbuilt", "--requirements", "requirements.txt", "--", "true")
    assert (code, out) == (125, "")
    assert "not-a-package" in err
    code, out, err = shell(swarm, "logs", "unbuilt")
    assert (code, out) == (0, ""), "what is not the job's own output goes to stderr"
    assert "not-a-package" in err


def test_files_outlive_the_agent_that_took_them(shell):
    """The upload goes to n1, which is killed while the job waits for a GPU."""
    fill(shell.folder, {"swarm.toml": "", "data/numbers.txt": "1 2 3\n", "train.py": "print('trained')\n"})
    with start_agents(3, settings={"warm_workers": 0}) as agents:
        converge(agents)
        first, second, _ = agents
        full = [first.submit("sleep", "300", ranks=2, gpus_per_rank=1, nodes=[name]) for name in ("n1", "n2", "n3")]
        for job in full:
            wait_until_sync(lambda job=job: state_of(second, job["id"]) == "running", what="all GPUs are taken")
        code, out, err = shell([first], "run", "-d", "-q", "-g", "1", "--", "cat", "train.py", "data/numbers.txt")
        assert code == 0, err
        job_id = out.split()[0]
        wait_until_sync(
            lambda: second.get(f"/v1/jobs/{job_id}")["files_on"] == ["n1", "n2", "n3"],
            what="all holders have the files",
        )
        assert "kept on n1, n2, n3" in shell([second], "status", job_id)[1]
        first.kill()
        assert second.call("POST", f"/v1/jobs/{full[2]['id']}/cancel", {"grace_seconds": 0})[0] == 202
        wait_until_sync(lambda: state_of(second, job_id) == "ended", what="it has run")
        document = second.get(f"/v1/jobs/{job_id}")
        assert (document["exit_code"], document["detail"]) == (0, ""), document
        assert shell([second], "logs", job_id)[:2] == (0, "print('trained')\n1 2 3\n")


def state_of(agent, job_id):
    return agent.get(f"/v1/jobs/{job_id}")["state"]

"""Environments by requirements: built once, shared, shown when they fail.  Packages are local folders: no network."""

import asyncio
import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from swarm_agent.staging.requirements import EnvironmentFailed, EnvironmentStore, default_python
from swarm_agent.task.account import find_account

PATH = "/usr/local/bin:/usr/bin:/bin"


def write_fake_installer(path: Path, body: str) -> str:
    """Stands in for `uv`, which is a program of its own: counts its calls, makes the folders that it would."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


INSTALL = """
echo "$@" >> {calls}
case "$1" in
venv) shift; for last; do :; done; mkdir -p $last/bin; ln -s {python} $last/bin/python ;;
pip) grep -q nonsense requirements.txt && {{ echo "no version of nonsense found"; exit 2; }}; {wait} ;;
esac
exit 0
"""


def store(tmp_path: Path, wait: str = ":", **options) -> tuple[EnvironmentStore, Path]:
    calls = tmp_path / "calls"
    body = INSTALL.format(calls=calls, python=sys.executable, wait=wait)
    uv = write_fake_installer(tmp_path / "uv", body)
    return EnvironmentStore(tmp_path / "envs", default_python(), {"PATH": PATH}, uv=uv, **options), calls


def builds(calls: Path) -> int:
    return sum(line.startswith("pip") for line in calls.read_text().splitlines())


ACCOUNT = find_account("")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to build as another user")
async def test_a_build_can_neither_write_as_the_agent_nor_stay_nor_keep_what_it_built() -> None:
    """Packages run what they like as the account of jobs: they plant links and pipes where the agent might write."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        base.chmod(0o755)
        victim, pid_file = base / "victim", base / "out" / "pid"
        victim.write_text("of root's")
        victim.chmod(0o600)
        pid_file.parent.mkdir()
        pid_file.parent.chmod(0o777)
        evil = (
            f"ln -s {victim} .complete; mkfifo pipe; mkdir -p bin deep; echo x > deep/file; chmod 4777 deep/file;"
            f" ln -s {victim} deep/link; setsid sleep 300 > /dev/null 2>&1 & echo $! > {pid_file}"
        )
        envs, calls = store(base, wait=evil)
        calls.touch()
        calls.chmod(0o666)
        path = await envs.ensure(b"evil\n", find_account("nobody"))

        assert victim.read_text() == "of root's"
        assert not Path(f"/proc/{pid_file.read_text().strip()}").exists(), "nothing of a build stays"
        found = {entry.name: entry.lstat() for entry in (path, *path.rglob("*"))}
        assert {status.st_uid for status in found.values()} == {0}
        assert "pipe" not in found
        assert not any(status.st_mode & 0o7022 for status in found.values() if not stat.S_ISLNK(status.st_mode))
        assert stat.S_IMODE(victim.stat().st_mode) == 0o600
        assert await envs.ensure(b"evil\n", find_account("nobody")) == path
        assert builds(calls) == 1


async def test_concurrent_and_later_jobs_share_one_build(tmp_path: Path) -> None:
    envs, calls = store(tmp_path)
    paths = await asyncio.gather(*(envs.ensure(b"torch\n", ACCOUNT) for _ in range(5)))
    assert len(set(paths)) == 1
    assert await envs.ensure(b"torch\n", ACCOUNT) == paths[0]
    assert builds(calls) == 1
    again, _ = store(tmp_path)
    assert await again.ensure(b"torch\n", ACCOUNT) == paths[0]
    assert builds(calls) == 1
    assert await envs.ensure(b"numpy\n", ACCOUNT) != paths[0]


async def test_a_failed_build_shows_its_output_and_is_tried_again(tmp_path: Path) -> None:
    envs, calls = store(tmp_path)
    for attempt in (1, 2):
        with pytest.raises(EnvironmentFailed, match="uv pip install --python ended with 2") as caught:
            await envs.ensure(b"nonsense\n", ACCOUNT)
        assert "no version of nonsense found" in caught.value.output
        assert builds(calls) == attempt
    assert list((tmp_path / "envs").iterdir()) == []


async def test_where_uv_is_found_and_does_not_run_pip_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    async def run(_self: EnvironmentStore, argv: list[str], *_: object, **__: object) -> tuple[int, str]:
        steps.append(Path(argv[0]).name + " " + " ".join(argv[1:5]))
        return (127, "uv: command not found") if argv[1:] == ["--version"] else (0, "3.11")

    monkeypatch.setattr(EnvironmentStore, "_run", run)
    envs, _ = store(tmp_path)
    await envs.ensure(b"numpy\n", ACCOUNT)
    assert [step.startswith("uv") for step in steps] == [False, True, False, False]
    assert steps[-1] == "python -I -m pip install"


async def test_a_build_that_hangs_is_ended_with_all_its_children(tmp_path: Path) -> None:
    envs, _ = store(tmp_path, wait="sleep 300", timeout_s=0.3)
    with pytest.raises(EnvironmentFailed, match=r"not done within 0.3 s"):
        await envs.ensure(b"slow\n", ACCOUNT)
    assert list((tmp_path / "envs").iterdir()) == []


async def test_a_build_goes_on_for_others_and_ends_with_the_last(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    envs, calls = store(tmp_path, wait=f"while [ ! -e {gate} ]; do sleep 0.01; done")
    await envs.name_of(b"x\n", ACCOUNT)  # so that the second joins at once, and not after the first has gone
    first, second = (asyncio.ensure_future(envs.ensure(b"x\n", ACCOUNT)) for _ in range(2))
    async with asyncio.timeout(10.0):
        while not calls.exists() or not builds(calls):
            await asyncio.sleep(0.005)
    first.cancel()
    await asyncio.wait([first])
    gate.touch()
    path = await second
    gate.unlink()
    third = asyncio.ensure_future(envs.ensure(b"y\n", ACCOUNT))
    async with asyncio.timeout(10.0):
        while builds(calls) < 2:
            await asyncio.sleep(0.005)
    third.cancel()
    await asyncio.wait([third])
    assert list((tmp_path / "envs").iterdir()) == [path]


async def test_a_build_that_is_cancelled_while_its_installer_starts_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs, _ = store(tmp_path, wait=f"echo $$ > {tmp_path}/pid; while :; do sleep 0.01; done")
    start = asyncio.create_subprocess_exec

    async def start_and_be_cancelled(*argv, **options):
        process = await start(*argv, **options)
        if "install" in argv:
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                await asyncio.sleep(0.005)
            asked.cancel()
            await asyncio.sleep(0.05)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_be_cancelled)
    asked = asyncio.ensure_future(envs.ensure(b"x\n", ACCOUNT))
    await asyncio.wait([asked])
    assert asked.cancelled()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    assert list((tmp_path / "envs").iterdir()) == []


async def test_who_asks_while_a_given_up_build_is_tidied_gets_one_of_its_own(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    envs, calls = store(tmp_path, wait=f"while [ ! -e {gate} ]; do sleep 0.01; done")
    first = asyncio.ensure_future(envs.ensure(b"x\n", ACCOUNT))
    async with asyncio.timeout(10.0):
        while not calls.exists() or not builds(calls):
            await asyncio.sleep(0.005)
    first.cancel()
    await asyncio.sleep(0)  # the build is cancelled now, and not yet over
    assert not first.done()
    gate.touch()
    path = await envs.ensure(b"x\n", ACCOUNT)
    assert first.cancelled()
    assert builds(calls) == 2
    assert envs.path(path.name) == path


async def test_a_half_built_environment_of_an_earlier_life_is_built_again(tmp_path: Path) -> None:
    envs, calls = store(tmp_path)
    left = tmp_path / "envs" / await envs.name_of(b"x\n", ACCOUNT)
    left.mkdir(parents=True)
    (left / "junk").touch()
    assert await envs.ensure(b"x\n", ACCOUNT) == left
    assert not (left / "junk").exists()
    assert builds(calls) == 1


async def test_the_least_recently_used_environment_goes_unless_in_use(tmp_path: Path) -> None:
    envs, _ = store(tmp_path, limit_bytes=1)
    first = await envs.ensure(b"a\n", ACCOUNT)
    second = await envs.ensure(b"b\n", ACCOUNT, {first})
    assert first.exists()
    third = await envs.ensure(b"c\n", ACCOUNT, {second})
    assert (first.exists(), second.exists(), third.exists()) == (False, True, True)


@pytest.mark.parametrize("text", ["", "{}", '{"size_bytes": null}', "[1]"])
async def test_a_damaged_mark_costs_its_own_environment_alone(tmp_path: Path, text: str) -> None:
    envs, _ = store(tmp_path)
    first = await envs.ensure(b"a\n", ACCOUNT)
    (tmp_path / "envs-done" / f"{first.name}.json").write_text(text)
    second = await envs.ensure(b"b\n", ACCOUNT)
    assert (first.exists(), envs.path(first.name), envs.path(second.name)) == (False, None, second)


async def test_one_whose_mark_goes_this_instant_is_left_alone(tmp_path: Path) -> None:
    """Its environment is being built again."""
    envs, _ = store(tmp_path)
    first = await envs.ensure(b"a\n", ACCOUNT)
    mark = tmp_path / "envs-done" / f"{first.name}.json"
    mark.unlink()
    mark.symlink_to("gone")  # is listed, and not there
    await envs.ensure(b"b\n", ACCOUNT)
    assert first.exists()


async def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    envs = EnvironmentStore(tmp_path, "/no/such/python", {})
    with pytest.raises(EnvironmentFailed, match="/no/such/python"):
        await envs.ensure(b"", ACCOUNT)


async def test_venv_and_pip_build_a_working_environment(tmp_path: Path) -> None:
    """The real tools, with a requirement that needs no download: none at all."""
    envs = EnvironmentStore(tmp_path / "envs", default_python(), {"PATH": PATH}, uv=None)
    path = await envs.ensure(b"# nothing\n", ACCOUNT)
    process = await asyncio.create_subprocess_exec(
        str(path / "bin" / "python"), "-c", "import sys; print(sys.prefix)", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.decode().strip() == str(path)

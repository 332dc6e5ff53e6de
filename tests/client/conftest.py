from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm_client import attached, config
from swarm_client.cli import main
from tests.client.testing import TOKEN, FakeAgent, TaskAgent


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, configuration and state of its own for every test, and no swarm in the environment."""
    import os

    for name in list(os.environ):
        if name.startswith("SWARM_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for kind in ("config", "state", "cache"):
        (folder / kind).mkdir()
    monkeypatch.setattr(config, "SYSTEM_FILE", str(tmp_path / "system.toml"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return folder


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    with FakeAgent() as running:
        yield running


@pytest.fixture
def point_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make agents the swarm that commands talk to."""

    def point(*agents: FakeAgent | str) -> None:
        hosts = ",".join(each if isinstance(each, str) else each.address for each in agents)
        monkeypatch.setenv("SWARM_HOSTS", hosts)
        monkeypatch.setenv("SWARM_TOKEN", TOKEN)

    return point


@pytest.fixture
def swarm(
    agent: FakeAgent,
    point_at: Callable[..., None],
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str, str]]:
    """Run a command against the agent; return exit code, standard output and standard error.

    However slowly it comes here, the start of a job takes no words.
    """
    point_at(agent)
    monkeypatch.setattr(attached, "QUIET_START_S", 300.0)

    def run(*words: str) -> tuple[int, str, str]:
        capfdbinary.readouterr()
        code = main(list(words))
        out, err = capfdbinary.readouterr()
        return code, out.decode("utf-8", "surrogateescape"), err.decode()

    return run


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = TaskAgent(tmp_path / "s", monkeypatch)
    yield task
    task.stop()

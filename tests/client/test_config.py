import os
import socket
import stat
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from swarm_client import __version__
from swarm_client.config import load, user_file
from swarm_client.failure import UsageError
from tests.client.testing import TOKEN, FakeAgent


def write_user(home, text):
    file = home / "config" / "swarm" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_each_source_wins_over_the_weaker_ones(home, tmp_path, monkeypatch):
    (tmp_path / "system.toml").write_text(
        'output = "wide"\ncolor = "never"\nhosts = ["s:1"]\n[job]\nqueue = "default"\n'
    )
    write_user(home, 'output = "yaml"\ncontext = "lab"\n[contexts.lab]\nhosts = ["u:1"]\n[job]\npriority = 1\n')
    (tmp_path / "work" / "swarm.toml").write_text('output = "json"\n[job]\npriority = 2\n')
    folder = tmp_path / "work" / "deep"
    folder.mkdir()
    found = load(os.environ, {}, str(folder))
    assert (found.values["output"], found.origins["output"]) == ("json", str(tmp_path / "work" / "swarm.toml"))
    assert (found.values["color"], found.origins["color"]) == ("never", str(tmp_path / "system.toml"))
    assert (found.values["hosts"], found.origins["hosts"]) == (["u:1"], "context lab")
    assert found.job == {"queue": "default", "priority": 2}
    monkeypatch.setenv("SWARM_OUTPUT", "name")
    monkeypatch.setenv("SWARM_HOSTS", "e:1, e:2")
    monkeypatch.setenv("SWARM_RUN_PRIORITY", "3")
    found = load(os.environ, {"output": "table"}, str(folder))
    assert (found.values["output"], found.origins["output"]) == ("table", "option")
    assert found.values["hosts"] == ["e:1", "e:2"]
    assert (found.job["priority"], found.job_origins["priority"]) == (3, "SWARM_RUN_PRIORITY")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\n\noutptu = "json"\n', ":3: unknown key 'outptu'; did you mean output?"),
        ('[contexts.a]\nhost = ["x"]\n', ":2: host: unknown key; did you mean hosts?"),
        ("[job]\n\ngpsu = 1\n", ":3: gpsu: unknown key; did you mean gpus?"),
        ('output = "xml"\n', ":1: output: must be one of"),
        ("output = \n", "is not TOML"),
        ('context = "absent"\n', "there is no context 'absent'"),
        ('[job]\ncommand = "x"\n', ":2: command belongs into a job file"),
    ],
)
def test_a_bad_file_is_named_with_its_line(home, text, message, swarm):
    file = write_user(home, text)
    code, _, err = swarm("ps")
    assert code == 2
    assert message in err
    assert str(file) in err or "context" in err


def test_a_project_file_may_not_redirect_tokens(home, tmp_path):
    (tmp_path / "work" / "swarm.toml").write_text('hosts = ["evil:1"]\n')
    with pytest.raises(UsageError, match="may not be set in a project file"):
        load(os.environ, {}, str(tmp_path / "work"))


def test_an_unknown_variable_for_jobs_names_the_nearest(monkeypatch, tmp_path):
    monkeypatch.setenv("SWARM_RUN_GPSU", "1")
    with pytest.raises(UsageError, match="SWARM_RUN_GPSU: unknown setting; did you mean gpus"):
        load(os.environ, {}, str(tmp_path))


def test_variables_that_jobs_are_given_are_no_settings(monkeypatch, tmp_path):
    for name in ("SWARM_JOB_ID", "SWARM_GPUS", "SWARM_NODE", "SWARM_ATTEMPT"):
        monkeypatch.setenv(name, "x")
    assert load(os.environ, {}, str(tmp_path)).job == {}


def test_a_token_file_that_others_can_read_is_refused(tmp_path, monkeypatch, swarm):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    monkeypatch.delenv("SWARM_TOKEN")
    monkeypatch.setenv("SWARM_TOKEN_FILE", str(file))
    code, _, err = swarm("ps")
    assert code == 4
    assert err.splitlines()[1] == f"  chmod 600 {file}"


def test_of_a_token_file_with_several_the_first_is_sent(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\nthe-one-that-it-replaces\n")
    file.chmod(0o600)
    monkeypatch.delenv("SWARM_TOKEN", raising=False)
    monkeypatch.setenv("SWARM_TOKEN_FILE", str(file))
    assert load(os.environ, {}, str(tmp_path)).read_token() == TOKEN


def test_login_stores_a_context_and_keeps_what_was_there(home, tmp_path, agent, swarm, monkeypatch):
    file = write_user(home, '# mine\noutput = "wide"\n\n[job]\nqueue = "default"\n')
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    code, _, err = swarm("login", agent.address, "--token-file", str(token), "--name", "lab")
    assert (code, err) == (0, "swarm: context lab is current: 1 of 1 members alive\n")
    assert file.read_text() == (
        f'# mine\noutput = "wide"\ncontext = "lab"\n\n[job]\nqueue = "default"\n\n[contexts.lab]\n'
        f'hosts = ["{agent.address}"]\ntoken_file = "{token}"\n'
    )
    monkeypatch.delenv("SWARM_HOSTS")
    monkeypatch.delenv("SWARM_TOKEN")
    assert swarm("version", "--agents") == (0, f"swarm {__version__}\ngpu1 0.1.0\n", "")


@contextmanager
def stranger_that_says(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Its address, and what it was sent."""
    heads: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = stranger.accept()
                    with connection:
                        heads.append(connection.recv(65_536))
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{stranger.getsockname()[1]}", heads
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_commands_tell_the_version_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_login_without_a_token_of_its_own_sends_none(home, tmp_path, swarm, monkeypatch):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    write_user(home, f'context = "lab"\n\n[contexts.lab]\nhosts = ["127.0.0.1:1"]\ntoken_file = "{token}"\n')
    monkeypatch.delenv("SWARM_TOKEN")
    refusal = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with stranger_that_says(refusal) as (address, heads):
        assert swarm("login", address)[0] != 0
    assert heads
    assert not any(b"Authorization" in head or TOKEN.encode() in head for head in heads)


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "503 Service Unavailable"])
@pytest.mark.parametrize("body", [b"<html></html>", b"{}", b"[1]", b"3", b'{"items": [1]}', b""])
def test_login_to_something_that_is_no_agent_says_so(home, swarm, status, body):
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
    with stranger_that_says(head + body) as (address, _):
        told = f"swarm: what answers at {address} is not an agent\n  check host and port\n"
        assert swarm("login", address) == (125, "", told)
    assert not Path(user_file(os.environ)).exists()


def test_contexts_are_listed_and_forgotten(home, swarm):
    file = home / "config" / "swarm" / "config.toml"
    file.parent.mkdir(parents=True)
    lab = '[contexts.lab]\nhosts = ["10.0.0.5:7433"]\n'
    file.write_text(f'context = "home"\n\n{lab}\n[contexts.home]\nhosts = ["10.0.0.6:7433"]\n')
    out = swarm("config", "view")[1]
    assert [line.split() for line in out.splitlines() if line.startswith("contexts.")] == [
        ["contexts.lab", "10.0.0.5:7433"],
        ["contexts.home", "10.0.0.6:7433"],
    ]
    assert swarm("config", "unset", "contexts.home") == (0, "", f"swarm: contexts.home was removed from {file}\n")
    assert file.read_text().split() == lab.split()
    assert swarm("config", "unset", "contexts.home")[2] == f"swarm: contexts.home is not set in {file}\n"


def test_login_with_a_wrong_token_stores_nothing(home, tmp_path, agent, swarm):
    token = tmp_path / "token"
    token.write_text("wrong" * 8)
    token.chmod(0o600)
    assert swarm("login", agent.address, "--token-file", str(token))[0] == 4
    assert not Path(user_file(os.environ)).exists()


def test_config_set_writes_checked_values_that_are_read_back(home, swarm):
    assert swarm("config", "set", "job.priority", "7")[0] == 0
    assert swarm("config", "set", "output=wide")[0] == 0
    assert stat.S_IMODE(Path(user_file(os.environ)).stat().st_mode) == 0o600
    out = swarm("config", "view", "--origin", "-o", "json")[1]
    assert '"name": "job.priority",\n      "value": 7' in out
    assert swarm("config", "set", "job.prioritty", "7")[0] == 2
    for key in ("contexts.lab", "contexts.lab.hosts"):
        code, _, told = swarm("config", "set", key, "10.0.0.5")
        assert (code, "swarm login HOST --name lab" in told) == (2, True)
    assert swarm("config", "set", "output", "xml")[0] == 2
    assert swarm("config", "unset", "output")[0] == 0
    assert swarm("config", "unset", "job.priority")[0] == 0
    assert load(os.environ, {}, str(home)).job == {}


def test_a_range_of_gpus_can_be_kept_in_the_users_file(home, swarm):
    for text, kept in (("2:4", "2:4"), ("4", 4)):
        assert swarm("config", "set", "job.gpus", text)[0] == 0
        assert load(os.environ, {}, str(home)).job == {"gpus": kept}


@pytest.mark.parametrize("address", ["https://a:1", "a:99999", "a:b", "user@a", "[::1", ""])
def test_an_address_that_cannot_be_used_is_a_usage_error(monkeypatch, swarm, address):
    monkeypatch.setenv("SWARM_HOSTS", f"{address},")
    if address:
        assert swarm("ps")[0] == 2
    else:
        assert swarm("ps")[0] == 125


def test_members_that_were_learnt_replace_a_dead_address(agent, swarm, point_at, monkeypatch):
    with FakeAgent("gpu2") as second:
        point_at(agent)
        members = [{"name": "gpu2", "address": second.address, "status": "alive", "version": ""}]
        agent.answers["GET /v1/jobs"] = second.answers["GET /v1/jobs"] = {"items": []}
        agent.answers["GET /v1/members"] = {"items": members}
        assert swarm("ps")[0] == 0
        agent.__exit__()
        assert swarm("ps")[0] == 0
        assert ("GET", "/v1/jobs") in {(method, path) for method, path, _ in second.requests}

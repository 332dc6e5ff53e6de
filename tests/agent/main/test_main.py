import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_agent.__main__ import _parse, main
from swarm_agent.storage.store import Store
from tests.agent.testing import OWN_ACCOUNT, free_port, start_agents, wait_until_sync


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs swarm-agent with a data directory of its own until it exits."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SWARM_")}

    def start(*options: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        own = ["--name", "a", "--data-dir", str(tmp_path / "data"), "--job-user", OWN_ACCOUNT]
        command = [sys.executable, "-m", "swarm_agent", *own, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)

    return start


def test_generate_key_prints_64_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--generate-key"]) == 0
    assert len(bytes.fromhex(capsys.readouterr().out.strip())) == 32


def test_check_config_says_ok_or_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(f'name = "a"\njob_user = "{OWN_ACCOUNT}"\n')
    assert main(["--check-config", str(file)]) == 0
    assert capsys.readouterr().out == "ok\n"

    file.write_text('name = "a"\nlissten = "x"\n')
    assert main(["--check-config", str(file)]) == 2
    assert f"swarm-agent: {file}:2: lissten: unknown key; did you mean 'listen'?" in capsys.readouterr().err

    file.write_text(f'token_file = "{tmp_path}/absent"\n')
    assert main(["--check-config", str(file)]) == 2
    assert "--generate-key" in capsys.readouterr().err


def test_check_key_and_check_token_judge_a_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "secret"
    file.write_text("x" * 24 + "\n")
    file.chmod(0o600)
    assert main(["--check-token", str(file)]) == 0
    assert main(["--check-key", str(file)]) == 2
    assert f"{file} does not hold 64 hexadecimal digits" in capsys.readouterr().err

    file.write_text("0f" * 32)
    assert main(["--check-key", str(file), "--check-token", str(file)]) == 0
    file.chmod(0o644)
    assert main(["--check-key", str(file)]) == 2
    assert "others could read it" in capsys.readouterr().err


def test_a_key_that_cannot_be_used_exits_2_so_that_the_service_is_not_started_again(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    key = tmp_path / "cluster.key"
    key.write_text("x" * 24)
    key.chmod(0o600)
    result = run("--listen", f"127.0.0.1:{free_port()}", "--cluster-key-file", str(key))

    assert result.returncode == 2
    assert "does not hold 64 hexadecimal digits" in result.stderr


def test_an_unknown_option_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--lisen", "127.0.0.1:1"])
    assert caught.value.code == 2
    assert "did you mean '--listen'?" in capsys.readouterr().err


def test_a_bad_option_value_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen", "0.0.0.0:7433"]) == 2
    assert "advertise" in capsys.readouterr().err


def test_a_flag_needs_no_value_and_takes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _parse(["--witness"]).witness == "true"
    assert _parse(["--witness", "--name", "w"]).witness == "true"
    assert _parse(["--witness", "false"]).witness == "false"
    assert main(["--witness", "--simulated-gpus", "1"]) == 2
    assert "does not go with witness" in capsys.readouterr().err


def test_a_database_of_another_swarm_is_named_with_its_remedy_and_exits_1(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    Store.open(tmp_path / "data" / "agent.db", label="swarm", node="a", keys=(b"k" * 32,)).close()
    result = run("--listen", f"127.0.0.1:{free_port()}")

    assert result.returncode == 1
    assert "belongs to another swarm" in result.stderr
    assert "cluster_key_file" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's jobs could read what is root's")
def test_an_agent_of_roots_without_an_account_for_jobs_exits_2(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    result = run("--job-user", "", "--listen", f"127.0.0.1:{free_port()}")

    assert result.returncode == 2, "starting it again would not help"
    assert "jobs would run as root" in result.stderr


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_in_use_is_named_and_exits_1(run: Callable[..., subprocess.CompletedProcess[str]], kind: int) -> None:
    port = free_port()
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", port))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        result = run("--listen", f"127.0.0.1:{port}")

    assert result.returncode == 1
    assert f"listen: cannot use 127.0.0.1:{port}" in result.stderr
    assert f"ss -lnp 'sport = :{port}'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_damaged_database_is_named_with_its_remedy_and_exits_1(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    database = tmp_path / "data" / "agent.db"
    database.write_bytes(b"garbage" * 1_000)
    result = run("--listen", f"127.0.0.1:{free_port()}")

    assert result.returncode == 1
    assert f"{database}: is damaged" in result.stderr
    assert f"mv {database}" in result.stderr
    assert "Traceback" not in result.stderr
    assert database.read_bytes() == b"garbage" * 1_000


def test_a_running_agent_keeps_its_directory_and_stops_on_sigterm(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    with start_agents(1) as (agent,):
        second = run("--config", str(agent.config_file), "--name", agent.name, "--data-dir", str(agent.data_dir))
        assert second.returncode == 1
        assert f"is in use by another agent, process {agent.process.pid}" in second.stderr
        assert agent.is_live()

        log = agent.log_file.read_text()
        assert f"agent started node=n1 address=127.0.0.1:{agent.address[1]}" in log
        assert "simulated" in log
        assert agent.stop() == 0
        log = agent.log_file.read_text()
        assert "running tasks go on under their shims" in log
        assert "Traceback" not in log


def test_every_start_has_a_higher_generation_on_disk(tmp_path: Path) -> None:
    with start_agents(1) as (agent,):
        generations = []
        for stop in (agent.kill, agent.stop):
            stop()
            with sqlite3.connect(f"file:{agent.data_dir}/agent.db?mode=ro", uri=True) as database:
                row = database.execute("SELECT value FROM about WHERE key = 'generation'").fetchone()
            database.close()
            generations.append(int(row[0]))
            agent.restart()
        assert generations[0] < generations[1]


def test_systemd_is_told_when_the_agent_is_ready_and_that_its_loop_turns(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "150000"}
        environment.pop("WATCHDOG_PID", None)
        command = [sys.executable, "-m", "swarm_agent", "--name", "a", "--data-dir", str(tmp_path / "data")]
        command += ["--job-user", OWN_ACCOUNT]
        command += ["--listen", f"127.0.0.1:{free_port()}", "--simulated-gpus", "1"]
        with subprocess.Popen(
            command,
            env=environment,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                said = manager.recv(100)
                while said == b"WATCHDOG=1":  # on a busy machine the loop turns for a while before all is ready
                    said = manager.recv(100)
                assert said == b"READY=1"
                assert [manager.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3, "for as long as the loop turns"
                process.send_signal(signal.SIGSTOP)
                while select.select([manager], [], [], 1.0)[0]:
                    assert manager.recv(100) == b"WATCHDOG=1"
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGINT)
                while (said := manager.recv(100)) == b"WATCHDOG=1":
                    pass
                assert said == b"STOPPING=1"
                assert process.wait(60) == 0
            finally:
                process.kill()


def test_an_agent_stays_below_its_memory_and_imports_no_numpy() -> None:
    with start_agents(1) as (agent,):

        def resident_kib() -> int:
            status = Path(f"/proc/{agent.process.pid}/status").read_text()
            return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))

        wait_until_sync(lambda: "agent started" in agent.log_file.read_text())
        # What only the start needed is given back right after it.
        wait_until_sync(lambda: resident_kib() < 60_000_000 // 1_024)
        assert "numpy" not in Path(f"/proc/{agent.process.pid}/maps").read_text()

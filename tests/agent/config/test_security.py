import os
import stat
from pathlib import Path

import pytest

from swarm_agent.config import AgentConfig
from swarm_agent.folder import make_folder
from swarm_agent.security import check_job_user, generate_key, job_user_warning, load_secrets
from swarmsched.errors import ConfigError
from swarmsched.ids import NodeId


def secret(file: Path, text: str | None = None, mode: int = 0o600) -> Path:
    file.write_text((text if text is not None else generate_key()) + "\n")
    file.chmod(mode)
    return file


def config(tmp_path: Path, **settings: object) -> AgentConfig:
    return AgentConfig(name=NodeId("a"), data_dir=tmp_path / "data", **settings)  # type: ignore[arg-type]  # by name


def test_an_unexposed_agent_makes_its_own_secrets_once(tmp_path: Path) -> None:
    made = load_secrets(config(tmp_path))

    assert load_secrets(config(tmp_path)) == made
    assert len(made.keyring[0]) == 32
    assert stat.S_IMODE(made.token_file.stat().st_mode) == 0o600
    assert made.tokens[0] not in repr(made)


def test_keys_of_the_ring_follow_the_primary(tmp_path: Path) -> None:
    keys = [secret(tmp_path / f"k{index}", f"{index:064x}") for index in range(2)]
    token = secret(tmp_path / "token", "correct-horse-battery", 0o640)
    loaded = load_secrets(
        config(tmp_path, cluster_key_file=keys[0], keyring_files=(keys[1], keys[0]), token_file=token)
    )

    assert [key[-1] for key in loaded.keyring] == [0, 1]
    assert loaded.tokens == ("correct-horse-battery",)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o700])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = secret(tmp_path / "key", mode=mode)

    with pytest.raises(ConfigError, match=f"mode {mode:04o}") as caught:
        load_secrets(config(tmp_path, cluster_key_file=file))
    assert caught.value.remedy == f"run: chmod 0600 {file}"


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "64 hexadecimal"), ("abc", "64 hexadecimal"), ("g" * 64, "64"), ("é" * 64, "cannot be read")],
)
def test_a_key_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_secrets(config(tmp_path, cluster_key_file=secret(tmp_path / "key", text)))


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="16 to 512"):
        load_secrets(config(tmp_path, token_file=secret(tmp_path / "token", "1234")))


def test_a_token_file_may_hold_several_and_a_bad_one_is_named_by_its_line(tmp_path: Path) -> None:
    old, new = "0" * 64, "1" * 64
    several = secret(tmp_path / "several", f"{new}\n{old}\n{new}\n")
    assert load_secrets(config(tmp_path, token_file=several)).tokens == (new, old)
    with pytest.raises(ConfigError, match=r"line 2 of .* 16 to 512"):
        load_secrets(config(tmp_path, token_file=secret(tmp_path / "bad", f"{new}\nshort\n")))
    with pytest.raises(ConfigError, match="5 tokens, more than 4"):
        load_secrets(config(tmp_path, token_file=secret(tmp_path / "many", "\n".join(str(n) * 16 for n in range(5)))))


def test_a_missing_secret_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        load_secrets(config(tmp_path, token_file=tmp_path / "absent"))
    assert f"swarm-agent --generate-key > {tmp_path / 'absent'}" in caught.value.remedy


def test_a_job_user_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no account 'nobody-of-that-name'"):
        check_job_user(config(tmp_path, job_user="nobody-of-that-name"))


def test_root_is_asked_for_words_before_jobs_run_as_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match="jobs would run as root") as caught:
        check_job_user(config(tmp_path))
    assert '"root" in words' in caught.value.remedy
    check_job_user(config(tmp_path, job_user="root"))
    check_job_user(config(tmp_path, witness=True))


def test_a_folder_has_the_mode_that_was_asked_for_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        make_folder(tmp_path / "a" / "b", 0o711)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o711, 0o711]


def test_only_root_can_start_jobs_as_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65_000)
    with pytest.raises(ConfigError, match="does not run as root"):
        check_job_user(config(tmp_path, job_user="root"))


def test_jobs_that_can_read_the_secrets_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "run as root" in job_user_warning(config(tmp_path, job_user="root"))
    assert job_user_warning(config(tmp_path, job_user="nobody")) == ""
    assert job_user_warning(config(tmp_path, witness=True)) == "", "it runs none"
    monkeypatch.setattr(os, "geteuid", os.getuid if os.getuid() else lambda: 1)
    assert "agent's own user" in job_user_warning(config(tmp_path))

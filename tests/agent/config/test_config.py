from pathlib import Path

import pytest

from swarm_agent import config as config_module
from swarm_agent.config import AgentConfig, load_config, settings_help
from swarmsched.errors import ConfigError
from swarmsched.ids import NodeId


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "agent.toml"


def refused(options: dict[str, str] | None = None, environment: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(options or {}, environment or {})
    return caught.value


def test_options_win_over_environment_over_file_over_default(file: Path) -> None:
    file.write_text('name = "from-file"\ncluster_label = "from-file"\nlog_level = "debug"\n')
    environment = {"SWARM_AGENT_CLUSTER_LABEL": "from-env", "SWARM_AGENT_LOG_LEVEL": "error", "SWARM_TOKEN": "x"}

    config, source = load_config({"log_level": "warning"}, environment, file)
    assert (config.name, config.cluster_label, config.log_level) == ("from-file", "from-env", "warning")
    assert config.listen == ("127.0.0.1", 7433)
    assert source == file


def test_every_kind_of_value_reads_alike_from_file_and_text(file: Path) -> None:
    file.write_text(
        """
        seeds = ["10.0.0.1:7433", "[fd00::1]:7433", "gpu1.example:7433"]
        data_dir = "/tmp/d"
        simulated_gpus = 2
        blob_cache_bytes_max = "20GiB"
        telemetry_period_s = 2
        env_allow = ["PATH", "NCCL_*"]
        rendezvous_ports = "21000-21039"
        """
    )
    as_text = {
        "seeds": "10.0.0.1:7433, [fd00::1]:7433, gpu1.example:7433",
        "data_dir": "/tmp/d",
        "simulated_gpus": "2",
        "blob_cache_bytes_max": str(20 * 2**30),
        "telemetry_period_s": "2.0",
        "env_allow": "PATH,NCCL_*",
        "rendezvous_ports": "21000-21039",
    }
    config, _ = load_config({"name": "a"}, {}, file)

    assert config == load_config({"name": "a", **as_text}, {})[0]
    assert config.seeds == (("10.0.0.1", 7433), ("fd00::1", 7433), ("gpu1.example", 7433))


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one(file: Path) -> None:
    file.write_text('# comment\nname = "a"\n\nlisten_adress = "x"\n')

    with pytest.raises(ConfigError) as caught:
        load_config({}, {}, file)
    assert str(caught.value) == f"{file}:4: listen_adress: unknown key; did you mean 'listen'?"
    file.write_text('name = "a"\n[sedes]\n')
    with pytest.raises(ConfigError, match=r"agent.toml:2: sedes: unknown key; did you mean 'seeds'\?"):
        load_config({}, {}, file)


def test_an_unknown_variable_of_ours_is_an_error() -> None:
    assert "did you mean 'data_dir'?" in str(refused(environment={"SWARM_AGENT_DATADIR": "/d"}))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("name", "a b", "not usable"),
        ("name", "x" * 64, "not usable"),
        ("listen", "7433", "HOST:PORT"),
        ("listen", "127.0.0.1:0", "1 to 65535"),
        ("listen", "127.0.0.1:99999", "1 to 65535"),
        ("listen", "300.1.1.1:1", "HOST:PORT"),
        ("listen", "::1:7433", "[IPV6]:PORT"),
        ("seeds", "10.0.0.1", "HOST:PORT"),
        ("data_dir", "relative", "absolute"),
        ("simulated_gpus", "-1", "0 to 64"),
        ("simulated_gpus", "65", "0 to 64"),
        ("simulated_gpu_memory_bytes", "lots", "512MiB"),
        ("telemetry_period_s", "nan", "seconds"),
        ("telemetry_period_s", "0", "seconds"),
        ("rendezvous_ports", "80-90", "1024"),
        ("rendezvous_ports", "3000-2000", "FIRST-LAST"),
        ("packet_bytes_max", "9000", "1400"),
        ("log_format", "xml", "text, json"),
        ("job_user", "a\nb", "line of text"),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_accepted(key: str, value: str, says: str) -> None:
    error = refused({key: value})

    assert says in str(error)
    assert error.key == f"--{key.replace('_', '-')}"


def test_a_bad_value_in_a_file_is_named_with_its_line(file: Path) -> None:
    file.write_text('name = "a"\nsimulated_gpus = true\n')

    with pytest.raises(ConfigError, match=r"agent.toml:2: simulated_gpus: True is not a whole number"):
        load_config({}, {}, file)


def test_values_given_in_python_are_held_to_the_same_rules() -> None:
    with pytest.raises(ConfigError, match="name"):
        AgentConfig(name=NodeId("not a name"))
    with pytest.raises(ConfigError, match="data_dir"):
        AgentConfig(name=NodeId("a"), data_dir=Path("relative"))
    with pytest.raises(ConfigError, match="telemetry_deadline_s"):
        AgentConfig(name=NodeId("a"), telemetry_period_s=5.0, telemetry_deadline_s=5.0)


@pytest.mark.parametrize(
    ("content", "says"), [("name = a", "is not TOML"), ("\udce9", "cannot be read"), (None, "no such file")]
)
def test_a_file_that_cannot_be_read_is_named(file: Path, content: str | None, says: str) -> None:
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))

    with pytest.raises(ConfigError, match=says) as caught:
        load_config({}, {}, file)
    assert str(file) in str(caught.value)


def test_a_missing_default_file_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "DEFAULT_FILE", tmp_path / "absent.toml")

    assert load_config({}, {})[1] is None
    named = {"SWARM_AGENT_CONFIG": str(tmp_path / "absent.toml")}
    assert "no such file" in str(refused(environment=named))


@pytest.mark.parametrize("listen", ["10.0.0.5:7433", "gpu1:7433", "[fd00::1]:7433"])
def test_an_exposed_address_needs_key_and_token(listen: str) -> None:
    assert refused({"listen": listen}).key == "cluster_key_file"
    error = refused({"listen": listen, "cluster_key_file": "/k"})
    assert error.key == "token_file"
    assert "swarm-agent --generate-key" in error.remedy
    load_config({"listen": listen, "cluster_key_file": "/k", "token_file": "/t"}, {})


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.5.5.5:1", "[::1]:1", "localhost:1"])
def test_loopback_needs_neither(listen: str) -> None:
    load_config({"listen": listen, "people_listen": listen.rpartition(":")[0] + ":2"}, {})


@pytest.mark.parametrize("people", ["10.0.0.5:7434", "0.0.0.0:7434"])
def test_a_door_of_people_that_others_reach_needs_a_token_and_no_key(people: str) -> None:
    assert refused({"people_listen": people}).key == "token_file"
    load_config({"people_listen": people, "token_file": "/t"}, {})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, None),
        ({"people_listen": "127.0.0.1:7434"}, ("127.0.0.1", 7434)),
        ({"people_listen": "swarm.example.org:443"}, ("swarm.example.org", 443)),
        ({"people_listen": "0.0.0.0:7434"}, ("127.0.0.1", 7433 + 1)),
        ({"people_listen": "[::]:7434", "advertise": "10.0.0.5:7433"}, ("10.0.0.5", 7434)),
    ],
)
def test_people_are_told_an_address_that_they_can_ask(options: dict[str, str], told: tuple[str, int] | None) -> None:
    assert load_config({**options, "token_file": "/t"}, {})[0].people_advertised == told


@pytest.mark.parametrize(
    ("listen", "people"), [("127.0.0.1:7433", "127.0.0.1:7433"), ("127.0.0.1:7433", "0.0.0.0:7433")]
)
def test_people_and_agents_cannot_have_one_address(listen: str, people: str) -> None:
    error = refused({"listen": listen, "people_listen": people, "token_file": "/t"})
    assert (error.key, "choose another port" in error.remedy) == ("people_listen", True)


def test_ports_of_jobs_leave_the_door_of_people_out() -> None:
    assert refused({"people_listen": "127.0.0.1:25001", "rendezvous_ports": "25000-25100"}).key == "rendezvous_ports"


def test_a_wildcard_needs_an_address_to_advertise() -> None:
    secrets = {"cluster_key_file": "/k", "token_file": "/t"}
    assert refused({"listen": "0.0.0.0:7433", **secrets}).key == "advertise"

    config, _ = load_config({"listen": "0.0.0.0:7433", "advertise": "10.0.0.5:7433", **secrets}, {})
    assert config.advertised == ("10.0.0.5", 7433)
    assert config.fabric_host == "10.0.0.5"


def test_rendezvous_ports_keep_clear_of_ephemeral_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "range"
    monkeypatch.setattr(config_module, "EPHEMERAL_RANGE_FILE", kernel)
    kernel.write_text("32768\t60999\n")
    assert "overlaps" in str(refused({"rendezvous_ports": "32000-33000"}))
    first, last = AgentConfig(name=NodeId("a")).rendezvous_range
    assert (first, last - first + 1) == (20_000, 20 * 64)
    kernel.write_text("15000\t65000\n")
    assert AgentConfig(name=NodeId("a")).rendezvous_range == (15_000 - 1_280, 14_999)


def test_every_setting_has_a_sentence_of_help() -> None:
    assert {key for key, _ in settings_help()} == set(AgentConfig.__dataclass_fields__)
    assert all(sentence for _, sentence in settings_help())


def test_a_witness_by_file_environment_or_option(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("witness = true\n")
    assert load_config({}, {}, file)[0].witness
    assert load_config({}, {"SWARM_AGENT_WITNESS": "yes"})[0].witness
    assert not load_config({"witness": "false"}, {}, file)[0].witness


@pytest.mark.parametrize("value", ["maybe", "", "2"])
def test_a_witness_is_true_or_false(value: str) -> None:
    with pytest.raises(ConfigError, match="neither true nor false"):
        load_config({"witness": value}, {})


def test_a_witness_offers_no_gpus() -> None:
    with pytest.raises(ConfigError, match="simulated_gpus") as caught:
        AgentConfig(name=NodeId("a"), witness=True, simulated_gpus=2)
    assert caught.value.remedy


def test_checkpoints_are_below_the_data_directory_unless_told_otherwise() -> None:
    assert AgentConfig(name=NodeId("a"), data_dir=Path("/d")).checkpoint_root == Path("/d/checkpoints")
    config = AgentConfig(name=NodeId("a"), checkpoint_dir=Path("/nfs/ck"), checkpoint_dir_shared=True)
    assert config.checkpoint_root == Path("/nfs/ck")
    with pytest.raises(ConfigError, match="checkpoint_dir_shared: needs a checkpoint_dir"):
        AgentConfig(name=NodeId("a"), checkpoint_dir_shared=True)

from collections import Counter
from pathlib import Path

import pytest

from swarm_agent import config as config_module
from swarm_agent import doctor
from swarm_agent.config import AgentConfig
from swarm_agent.startup import running_agent
from swarm_agent.testing import free_port
from swarmsched.ids import NodeId


async def test_a_running_agent_can_be_examined(tmp_path: Path) -> None:
    config = AgentConfig(name=NodeId("a"), listen=("127.0.0.1", free_port()), data_dir=tmp_path / "a", simulated_gpus=1)
    async with running_agent(config) as agent:
        found = doctor.examine(agent)

    assert len({each.name for each in found}) == len(found)
    assert all(each.detail for each in found)
    assert all(bool(each.remedy) == (each.status != "ok") for each in found)


def test_each_trouble_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = tmp_path / "range"
    kernel.write_text("1024 65535")
    monkeypatch.setattr(config_module, "EPHEMERAL_RANGE_FILE", kernel)
    monkeypatch.setattr(doctor, "FREE_BYTES_WANTED", 2**60)
    troubles = [
        doctor._descriptors(256),
        doctor._space(tmp_path),
        doctor._commits(0.2),
        doctor._receive_buffer(200_000),
        doctor._rendezvous(AgentConfig(name=NodeId("a"))),
        doctor._strangers(Counter(wrong_key=3, malformed=9)),
        doctor._lag(30.0),
    ]

    assert {each.status for each in troubles} == {"warning"}
    assert all(each.remedy for each in troubles)
    assert "3 wrong_key" in troubles[5].detail
    assert "malformed" not in troubles[5].detail

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_agent import config as config_module
from swarm_agent import doctor
from swarm_agent.config import AgentConfig
from swarm_agent.eventlog import LoggedEvent
from swarm_agent.startup import running_agent
from swarm_agent.storage.store import DATABASE_FILE, Store
from swarm_agent.task.account import Account
from swarmsched.ids import NodeId
from tests.agent.testing import agent_config


async def test_a_running_agent_can_be_examined(tmp_path: Path) -> None:
    async with running_agent(agent_config(tmp_path)) as agent:
        found = doctor.examine(agent)

    assert len({each.name for each in found}) == len(found)
    assert all(each.detail for each in found)
    assert all(bool(each.remedy) == (each.status != "ok") for each in found)


async def test_a_database_begun_with_a_clock_far_ahead_is_told_of_once_the_clock_is_right(tmp_path: Path) -> None:
    """Others refuse the generation, which stays in the database; this node alone would think that all is well."""
    (tmp_path / "a").mkdir()
    store = Store.open(tmp_path / "a" / DATABASE_FILE, label="swarm", node="a")
    store.next_generation(time.time() + 30 * 86_400)
    store.close()
    async with running_agent(agent_config(tmp_path)) as agent:
        check = next(check for check in agent.readiness.checks() if check.name == "membership")
    assert not check.is_ok
    assert "30 days ahead" in check.detail
    assert f"mv {tmp_path / 'a' / DATABASE_FILE} aside" in check.remedy


def said(kind: str) -> LoggedEvent:
    return LoggedEvent(1, 0.0, kind, "version 7, set on b: there is no policy 'x'")


def test_each_trouble_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = tmp_path / "range"
    kernel.write_text("1024 65535")
    monkeypatch.setattr(config_module, "EPHEMERAL_RANGE_FILE", kernel)
    monkeypatch.setattr(doctor, "FREE_BYTES_WANTED", 2**60)
    hidden = tmp_path / "root" / "python"
    hidden.parent.mkdir(0o700)
    hidden.touch(0o755)
    troubles = [
        doctor._descriptors(256),
        doctor._space(tmp_path),
        doctor._commits(0.2),
        doctor._receive_buffer(200_000),
        doctor._rendezvous(AgentConfig(name=NodeId("a"))),
        doctor._strangers(Counter(wrong_key=3, malformed=9)),
        doctor._lag(30.0),
        doctor._python(Account("trainer", "/", "/bin/sh", uid=54_321, gid=54_321), [hidden]),
        doctor._refused(["a claim about b is refused for its generation"]),
        doctor._setting([said("setting.changed"), said("setting.refused")]),
    ]

    assert {each.status for each in troubles} == {"warning"}
    assert all(each.remedy for each in troubles)
    assert "3 wrong_key" in troubles[5].detail
    assert "malformed" not in troubles[5].detail
    assert str(hidden) in troubles[7].detail
    assert doctor._setting([said("setting.refused"), said("setting.changed")]).status == "ok"


def test_a_python_that_the_account_of_jobs_may_execute_is_no_trouble(tmp_path: Path) -> None:
    trainer = Account("trainer", "/", "/bin/sh", uid=54_321, gid=54_321)
    assert doctor._python(trainer, [Path("/bin/sh")]).status == "ok"
    (tmp_path / "closed").touch(0o700)
    assert doctor._python(replace(trainer, uid=-1), [tmp_path / "closed"]).status == "ok", "the agent's own account"

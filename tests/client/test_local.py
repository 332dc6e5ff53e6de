"""The local swarm with real agents."""

import json
import os
from pathlib import Path

import pytest

from swarm_client import local
from swarm_client.cli import main

pytestmark = pytest.mark.cluster


@pytest.fixture
def local_swarm(capfd):
    def run(*words):
        capfd.readouterr()
        code = main(list(words))
        return code, *capfd.readouterr()

    yield run
    main(["local", "down"])


def test_what_a_named_swarm_advises_concerns_itself(local_swarm):
    """And not the default one, which may run as well."""
    words = ("--name", "two")
    assert local_swarm("local", "status", *words)[2] == (
        "swarm: no local swarm 'two' is up\n  start one: swarm local up --agents 3 --gpus 2 --name two\n"
    )
    try:
        code, out, _ = local_swarm("local", "up", "--agents", "1", "--gpus", "1", *words)
        assert out.startswith("Started 1 agent with 1 simulated GPU (no real device):\n")
        assert (code, out.splitlines()[-1]) == (0, "`swarm local down --name two` removes everything again.")
        assert local_swarm("local", "status")[2] == (
            "swarm: no local swarm 'local' is up\n"
            "  start one: swarm local up --agents 3 --gpus 2, or say which with --name: two\n"
        )
        err = local_swarm("local", "stop", "node1", *words)[2]
        assert err == "swarm: node1 was stopped; `swarm local start node1 --name two` starts it again\n"
        err = local_swarm("local", "stop", "node1", *words)[2]
        assert err == "swarm: node1 does not run\n  start it: swarm local start node1 --name two\n"
    finally:
        _, _, err = local_swarm("local", "down", *words)
    assert err == "swarm: the local swarm of 1 agent is removed\n"


def test_a_local_swarm_runs_a_job_loses_an_agent_and_leaves_no_trace(local_swarm, home):
    before = sorted(home.rglob("*"))
    assert local_swarm("local", "status")[0] == 3
    code, out, _ = local_swarm("local", "up", "--agents", "2", "--gpus", "1")
    assert code == 0
    assert "1 simulated GPU each" in out
    items = json.loads(local_swarm("local", "status", "-o", "json")[1])["items"]
    assert [(item["name"], item["state"]) for item in items] == [("node1", "running"), ("node2", "running")]
    assert all(Path(f"/proc/{item['pid']}").exists() for item in items)
    code, out, err = local_swarm("run", "--no-sync", "-g", "2", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert (code, sorted(out.splitlines())) == (0, ["0 of 2", "1 of 2"])
    assert all(line.startswith("swarm: job ") for line in err.splitlines()), (
        err
    )  # on a busy machine the start takes words
    code, _, err = local_swarm("run", "--no-sync", "--", "sh", "-c", "exit 3")
    assert code == 3
    assert "exited with 3" in err
    assert local_swarm("local", "up")[0] == 5
    assert local_swarm("local", "stop", "node2", "--kill")[0] == 0
    assert local_swarm("local", "stop", "node2")[0] == 5
    assert json.loads(local_swarm("local", "status", "-o", "json")[1])["items"][1]["pid"] is None
    assert local_swarm("local", "start", "node2")[0] == 0
    assert local_swarm("local", "stop", "nodeX")[0] == 3
    pids = [item["pid"] for item in json.loads(local_swarm("local", "status", "-o", "json")[1])["items"]]
    assert local_swarm("local", "down")[0] == 0
    assert not any(local.start_ticks(pid) for pid in pids)
    assert sorted(home.rglob("*")) == before


def test_down_brings_back_the_context_that_was_current(local_swarm, home):
    file = home / "config" / "swarm" / "config.toml"
    file.parent.mkdir(parents=True)
    text = 'context = "lab"\n\n[contexts.lab]\nhosts = ["127.0.0.1:1"]\n'
    file.write_text(text)
    assert local_swarm("local", "up", "--agents", "1", "--gpus", "0")[0] == 0
    assert 'context = "local"' in file.read_text()
    assert local_swarm("local", "down")[0] == 0
    assert file.read_text() == text


def test_an_agent_that_cannot_start_is_explained_and_all_is_removed(local_swarm, home, monkeypatch):
    before = sorted(home.rglob("*"))
    monkeypatch.setattr(local, "free_ports", lambda count: [1] * count)
    monkeypatch.setattr(local.LocalSwarm, "_write_config", broken_config)
    code, _, err = local_swarm("local", "up", "--agents", "1", "--gpus", "0")
    assert code == 125
    assert "node1 ended at its start" in err
    assert "unknown key" in err
    assert sorted(home.rglob("*")) == before


def broken_config(self, index, node, gpus):
    (self.folder / f"{node['name']}.toml").write_text("nonsense = 1\n")


def test_a_reused_process_id_is_never_signalled():
    mine = {"pid": os.getpid(), "start_ticks": local.start_ticks(os.getpid())}
    assert local.is_running(mine)
    assert not local.is_running({**mine, "start_ticks": mine["start_ticks"] + 1})

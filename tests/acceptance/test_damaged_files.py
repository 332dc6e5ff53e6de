"""Bits that flip anywhere below an agent's data_dir: what it has acknowledged it knows, or it comes back as another."""

import random
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.agent.testing import RunningAgent, start_agents, wait_until_sync

pytestmark = [pytest.mark.acceptance]

TRIALS = 24
STARTED = re.compile(rb"agent started .*store=([0-9a-f]{14})")


def files(agent: RunningAgent) -> list[Path]:
    """All but the tools, which are installed again at each start."""
    found = [path for path in agent.data_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in found if "tools" not in path.parts and path.stat().st_size]


def flip(agent: RunningAgent, rng: random.Random) -> str:
    while True:
        with suppress(FileNotFoundError):  # of a task that has just ended
            return flip_once(agent, rng)


def flip_once(agent: RunningAgent, rng: random.Random) -> str:
    database = [path for path in files(agent) if path.name.startswith("agent.db")]
    path = rng.choice(rng.choice([database, files(agent)]))
    at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
    with path.open("r+b") as file:
        file.seek(at)
        (before,) = file.read(1)
        file.seek(at)
        file.write(bytes([before ^ bit]))
    return f"bit {bit} at {at} of {path.relative_to(agent.data_dir)}"


def submitted(agent: RunningAgent) -> set[str]:
    """Jobs that were accepted; one whose acknowledgement a damaged disk keeps from coming is none."""
    ids = set()
    for _ in range(2):
        status, job = agent.call("POST", "/v1/jobs", {"spec": {"command": ["sleep", "300"]}}, timeout_s=40)
        ids |= {job["id"]} if status == 201 else set()
    return ids


def start(agent: RunningAgent) -> str | None:
    """The identity under which it starts, or None where it refuses, saying what to do."""
    begun = agent.log_file.stat().st_size
    try:
        agent.restart()
    except AssertionError:
        said = agent.log_file.read_bytes()[begun:]
        last = said.strip().splitlines()[-1]
        assert last.startswith(b"swarm-agent: "), said[-2_000:].decode(errors="replace")
        return None
    (store,) = STARTED.findall(agent.log_file.read_bytes()[begun:])
    return store.decode()


def begun_anew(agent: RunningAgent) -> str:
    for path in agent.data_dir.glob("agent.db*"):
        path.unlink()
    store = start(agent)
    assert store is not None
    return store


@pytest.mark.parametrize("moment", ["stopped", "running"])
def test_flipped_bits_never_bring_an_older_state_back_under_the_same_identity(moment: str) -> None:
    rng, outcomes = random.Random(7), {"known": 0, "another": 0, "refused": 0}
    with start_agents(1, settings={"limit_tasks": False}) as (agent,):
        (store,) = STARTED.findall(agent.log_file.read_bytes())
        identity, jobs = store.decode(), set[str]()
        for trial in range(TRIALS):
            jobs |= submitted(agent)
            if moment == "running":
                done = flip(agent, rng)
                jobs |= submitted(agent)
                time.sleep(0.5)
                agent.kill()
            else:
                agent.kill()
                done = flip(agent, rng)
            now = start(agent)
            if now != identity:
                outcomes["refused" if now is None else "another"] += 1
                identity, jobs = begun_anew(agent) if now is None else now, set()
                continue
            wait_until_sync(lambda: agent.call("GET", "/v1/jobs")[0] == 200, 30.0, "the agent answers")
            missing = {job for job in jobs if agent.call("GET", f"/v1/jobs/{job}")[0] != 200}
            assert not missing, f"trial {trial}, {done}: {len(missing)} of {len(jobs)} jobs are forgotten"
            outcomes["known"] += 1
    assert outcomes["known"], outcomes
    assert outcomes["another"] + outcomes["refused"], outcomes

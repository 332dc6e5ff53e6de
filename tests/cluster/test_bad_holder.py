"""Holders that cannot be trusted: their database is not what it was, or their answers make no sense."""

import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.agent.testing import RunningAgent, free_port, start_agents, wait_until_sync

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-bad_holder")]

LYING_AGENT = Path(__file__).with_name("lying_agent.py")


# --- What lies on its disk


def change(*statements):
    """Alter a database with these statements."""

    def apply(path):
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    return apply


def cut_short(path):
    path.write_bytes(path.read_bytes()[:5_000])


def overwrite(path):
    path.write_bytes(b"not a database at all" * 1_000)


ASIDE = r"move it aside with: mv \S+agent\.db"
ONE_RECORD = "(SELECT min(key) FROM entries WHERE room = 'register' AND key <> 'schema')"
UNCHECKED = "DELETE FROM checks"  # as if an agent that knows no checksums had written all
DAMAGES = {
    "truncated": (cut_short, "is damaged or not a database", ASIDE),
    "overwritten": (overwrite, "is damaged or not a database", ASIDE),
    "of another swarm": (
        change("UPDATE about SET value = 'elsewhere' WHERE key = 'cluster_label'"),
        "belongs to swarm 'elsewhere', this agent is of swarm 'swarm'",
        "correct cluster_label, set another data_dir",
    ),
    "of another key": (
        change("UPDATE about SET value = '0123' WHERE key = 'swarm'"),
        "belongs to another swarm that is called 'swarm' too",
        "set cluster_key_file to the key of the swarm",
    ),
    "of another node": (
        change("UPDATE about SET value = 'n9' WHERE key = 'node'"),
        "belongs to node 'n9', this agent is of node 'n1'",
        "correct name",
    ),
    "of another program": (change("PRAGMA application_id = 7"), "database of another program", "another data_dir"),
    "from the future": (change("PRAGMA user_version = 99"), "schema version 99, this agent knows 1", "newer agent"),
    "with records of an unknown version": (
        change("UPDATE entries SET value = CAST('99' AS BLOB) WHERE room = 'register' AND key = 'schema'", UNCHECKED),
        "register/schema: unknown schema version '99'",
        "run the version of swarm-agent that wrote it",
    ),
    "with a record that cannot be read": (
        change(f"UPDATE entries SET value = x'93c1' WHERE room = 'register' AND key = {ONE_RECORD}"),
        r"register/\w{26}: unreadable entry",
        ASIDE,
    ),
    "with a record under another job's name": (
        change(f"UPDATE entries SET key = '{'0' * 26}' WHERE room = 'register' AND key = {ONE_RECORD}"),
        r"register/\w{26}: unreadable entry: it is not there any more",
        ASIDE,
    ),
    "of the first version with a record under another job's name": (
        change(f"UPDATE entries SET key = '{'0' * 26}' WHERE room = 'register' AND key = {ONE_RECORD}", UNCHECKED),
        f"register/{'0' * 26}: the entry contradicts itself",
        ASIDE,
    ),
    "with a ledger of an unknown version": (
        change("UPDATE entries SET value = CAST('99' AS BLOB) WHERE room = 'ledger' AND key = 'schema'", UNCHECKED),
        "ledger/schema: unknown schema version '99'",
        "run the version of swarm-agent that wrote it",
    ),
    "with a task that cannot be read": (
        change("INSERT INTO entries VALUES ('task', 'nonsense', x'93c1')"),
        "task/nonsense: unreadable entry",
        ASIDE,
    ),
}


@pytest.fixture(scope="module")
def stopped_agent():
    """An agent that has held a job and is down, and a copy of its database."""
    with start_agents(1) as (agent,):
        agent.ended(agent.submit("true"))
        agent.stop()
        (database,) = agent.data_dir.glob("*.db")
        shutil.copy(database, database.parent / "good")
        yield agent, database


@pytest.mark.parametrize("case", DAMAGES)
def test_database_that_cannot_be_used_is_named_with_a_remedy_and_left_as_it_is(stopped_agent, case):
    agent, database = stopped_agent
    damage, says, remedy = DAMAGES[case]
    shutil.copy(database.parent / "good", database)
    damage(database)
    spoilt = content(database)
    command = [sys.executable, "-m", "swarm_agent", "--config", str(agent.config_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1, done.stderr
    said = "\n".join(line for line in done.stderr.splitlines() if line.startswith("swarm-agent: "))
    assert re.search(says, said), done.stderr
    assert re.search(remedy, said), done.stderr
    assert str(database) in said
    assert "Traceback" not in done.stderr
    assert content(database) == spoilt


def test_records_without_their_version_are_used_if_all_can_be_read_and_the_version_is_written_again(stopped_agent):
    agent, database = stopped_agent
    shutil.copy(database.parent / "good", database)
    change("DELETE FROM entries WHERE room = 'register' AND key = 'schema'", UNCHECKED)(database)
    agent.restart()
    assert agent.get("/v1/jobs?all=true")["items"], "the job is remembered"
    assert agent.ended(agent.submit("true"))["end_reason"] == "completed"
    agent.stop()
    assert "schema" in [key for room, key, _ in content(database) if room == "register"]


def content(database):
    """Its entries, or its bytes if it cannot be read; a start that fails later on may have counted itself."""
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT room, key, value FROM entries ORDER BY room, key").fetchall()
    except sqlite3.DatabaseError:
        return database.read_bytes()


def test_database_that_was_deleted_makes_another_holder_that_forgot_everything(stopped_agent):
    agent, database = stopped_agent
    shutil.copy(database.parent / "good", database)
    agent.restart()
    before = agent.get("/v1/jobs?all=true")["items"]
    assert before, "the job is remembered"
    agent.stop()
    for path in database.parent.glob(database.name + "*"):
        path.unlink()
    agent.restart()
    assert agent.get("/v1/jobs?all=true")["items"] == []
    stores = re.findall(r"agent started .* store=(\w+)", agent.log_file.read_text())
    assert stores[-1] != stores[-2]
    assert agent.ended(agent.submit("true"))["end_reason"] == "completed"
    agent.stop()


# --- What it answers


@contextmanager
def lying_peer(honest, lie):
    """A third agent that joins two honest ones and spoils its answers to register messages; its name is its lie."""
    name = lie.replace("_", "-")
    home = honest.config_file.parent.parent / name
    home.mkdir()
    port = free_port()
    config, log = home / "agent.toml", home / "agent.log"
    lines = honest.config_file.read_text().splitlines()
    changes = {
        "name": name,
        "listen": f"127.0.0.1:{port}",
        "data_dir": str(home / "data"),
        "seeds": ["{}:{}".format(*honest.address)],
    }
    kept = [line for line in lines if line.partition(" =")[0] not in changes]
    config.write_text("\n".join([*kept, *(f"{key} = {value!r}" for key, value in changes.items())]) + "\n")
    with log.open("wb") as stream:
        command = [sys.executable, str(LYING_AGENT), lie, "--config", str(config)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
    agent = RunningAgent(name, ("127.0.0.1", port), config, home / "data", log, honest.token, process)
    try:
        wait_until_sync(agent.is_live, what="the liar answers /livez")
        yield agent
    finally:
        agent.stop()


def unreadable(agent):
    return agent.counted("swarm_messages_dropped_total", channel="peer", reason="malformed")


def senseless(agent):
    return agent.counted("swarm_register_messages_dropped_total", reason="nonsense")


def is_accused(agent, name):
    return f"peer.nonsense: {name} sent a" in agent.log_file.read_text()


def is_complained_of(agent, name):
    return f"peer body dropped reason=malformed source={name}" in agent.log_file.read_text()


NOTICED = {
    "random_bytes": [(unreadable, is_complained_of)],
    "truncated": [(unreadable, is_complained_of)],
    "contradictory": [(senseless, is_accused)],
    "endless_ballots": [(senseless, is_accused)],
    # What follows is what a slow, forgetful or overtaken holder might say as well: it counts for nothing.
    "of_another_job": [],
    "of_another_store": [],
    "refusing": [],
}


def converge(agents):
    names = {agent.name for agent in agents}
    for agent in agents:
        wait_until_sync(lambda agent=agent: alive_seen_by(agent) == names, what=f"{agent.name} sees just {names}")


def alive_seen_by(agent):
    """Names of those whose GPUs it knows as well: only they get a record to hold and ranks to run."""
    known = {node["name"] for node in agent.get("/v1/nodes")["items"] if node["total_gpus"] is not None}
    return known & {each["name"] for each in agent.get("/v1/members")["items"] if each["status"] == "alive"}


@pytest.fixture(scope="module")
def two_honest():
    with start_agents(2) as agents:
        converge(agents)
        yield agents


@pytest.mark.parametrize("lie", NOTICED)
def test_holder_that_answers_nonsense_keeps_no_job_from_being_taken_run_and_ended(two_honest, lie):
    first, second = two_honest
    before = {agent.name: [count(agent) for count, _ in NOTICED[lie]] for agent in two_honest}

    def is_noticed(name):
        return all(
            count(agent) > counted_before and is_told(agent, name)
            for agent in two_honest
            for (count, is_told), counted_before in zip(NOTICED[lie], before[agent.name], strict=True)
        )

    with lying_peer(first, lie) as liar:
        converge([first, second, liar])
        jobs = [submit_held_by_all(agent, liar) for agent in two_honest * 2]
        for job in jobs:
            assert second.ended(job)["shell_exit_code"] == 3
            assert first.output(job) == "done\n"
        wait_until_sync(lambda: is_noticed(liar.name), what=f"both notice {lie}")
    assert "Traceback" not in first.log_file.read_text() + second.log_file.read_text()


def submit_held_by_all(agent, liar):
    """A job whose record all three hold; its shepherd, and with it who asks the liar, is this agent."""
    ticket = {}

    def is_held_by_all():
        ticket.update(agent.call("POST", "/v1/tickets", {})[1])
        return set(ticket["holders"]) == {"n1", "n2", liar.name}

    wait_until_sync(is_held_by_all, what="nobody is suspected when the holders are chosen")
    spec = {"command": ["sh", "-c", "echo done; exit 3"], "nodes": ["n1", "n2"]}
    body = {"ticket": {key: ticket[key] for key in ("job_id", "holders", "stores")}, "spec": spec}
    status, job = agent.call("POST", "/v1/jobs", body)
    assert status == 201, job
    return job

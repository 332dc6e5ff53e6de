"""Disks fill up, lose what was on them, and come back with something else on them."""

import shutil
import sqlite3
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

from tests.agent.testing import wait_until_sync
from tests.chaos.checker import Checker
from tests.chaos.machines import holders_of, spawn

pytestmark = [pytest.mark.root, pytest.mark.chaos]


def is_ready(machine):
    try:
        with urllib.request.urlopen(f"{machine.agent.url}/readyz", timeout=5) as response:
            return response.status == 200
    except urllib.error.HTTPError as error:
        error.close()
        return False


def fill(filler):
    """Write until nothing more fits."""
    with filler.open("ab", buffering=0) as stream, suppress(OSError):
        while stream.write(b"x" * 4_096):
            pass


def test_jobs_go_on_with_two_holders_while_the_disk_of_the_third_is_full(build_swarm, small_disk):
    swarm = build_swarm(4, disks={"n4": small_disk / "data"})
    with Checker(swarm) as checker:
        running = swarm.submit_with(swarm.ticket_held_by("n1", "n4"), "n1", ranks=1, gpus_per_rank=1, nodes=["n2"])
        swarm.wait_for_beats(running, 1)
        filler = small_disk / "filler"
        fill(filler)

        def is_refusing():
            fill(filler)  # what the agent cleared away is filled again
            return not is_ready(swarm["n4"])

        wait_until_sync(is_refusing, 40, "n4 is not ready")
        accepted = len(checker.accepted)
        wait_until_sync(lambda: len(checker.accepted) >= accepted + 3, 60, "jobs are accepted")
        swarm.end(running, 3)
        wait_until_sync(lambda: swarm.document(running, "n1")["state"] == "ended", 30, "the job ends")
        assert swarm["n4"].agent.is_live()
        filler.unlink()
        wait_until_sync(lambda: is_ready(swarm["n4"]), 30, "n4 is ready again")
        assert swarm.wait_ended(running)["shell_exit_code"] == 3
        checker.verify()


def database_of(agent):
    (path,) = agent.data_dir.glob("*.db")
    return path


def truncate(path):
    path.write_bytes(path.read_bytes()[:5_000])


def give_to_another_swarm(path):
    change(path, "UPDATE about SET value = 'elsewhere' WHERE key = 'cluster_label'")


def date_from_the_future(path):
    change(path, "PRAGMA user_version = 99")


def change(path, statement):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


DAMAGES = {
    truncate: "damaged",
    give_to_another_swarm: "belongs to swarm 'elsewhere'",
    date_from_the_future: "schema version 99",
}


def start_in_vain(machine):
    """Exit code and words of an agent that does not start."""
    agent = machine.agent
    said_before = agent.log_file.stat().st_size
    agent.process = spawn(machine.host, agent.config_file, agent.log_file)
    code = agent.process.wait(60)
    return code, agent.log_file.read_bytes()[said_before:].decode()


def test_holder_with_a_spoilt_database_is_refused_and_harms_no_job(build_swarm, tmp_path):
    """The database is left as it is; with a good one back in place the holder votes again."""
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit_with(swarm.ticket_held_by("n1", "n4"), "n1", ranks=1, gpus_per_rank=1, nodes=["n2"])
        swarm.wait_for_beats(job, 1)
        swarm["n4"].stop_agent()
        database = database_of(swarm["n4"].agent)
        change(database, "PRAGMA user_version")
        for damage, says in DAMAGES.items():
            shutil.copy(database, tmp_path / "good.db")
            damage(database)
            spoilt = database.read_bytes()
            code, words = start_in_vain(swarm["n4"])
            assert code == 1, words
            assert says in words
            assert str(database) in words
            assert database.read_bytes() == spoilt
            for path in database.parent.glob(database.name + "-*"):
                path.unlink()
            shutil.copy(tmp_path / "good.db", database)
        swarm["n4"].start_agent()
        swarm.converge()
        swarm.end(job, 6)
        assert swarm.wait_ended(job)["shell_exit_code"] == 6
        checker.verify()


def test_holder_that_lost_its_database_is_replaced_and_the_job_survives_another_death(build_swarm):
    swarm = build_swarm(4)
    with Checker(swarm) as checker:
        job = swarm.submit_with(swarm.ticket_held_by("n1", "n4"), "n1", ranks=1, gpus_per_rank=1, nodes=["n2"])
        swarm.wait_for_beats(job, 1)
        before = swarm.document(job)
        machine = swarm["n4"]
        machine.kill_agent()
        for path in machine.agent.data_dir.glob("*.db*"):
            path.unlink()
        machine.start_agent()
        swarm.converge()
        wait_until_sync(lambda: swarm.document(job, "n1")["version"] > before["version"], 60, "n4 is replaced")
        other = next(name for name in holders_of(swarm.document(job, "n1")) if name not in ("n2", "n4"))
        swarm[other].kill_agent()
        swarm.end(job, 6)
        wait_until_sync(lambda: swarm.document(job)["state"] == "ended", 40, "two holders are enough")
        swarm[other].start_agent()
        swarm.converge()
        assert swarm.wait_ended(job)["shell_exit_code"] == 6
        checker.verify()

"""What a job writes arrives whole in a pipe: real agents and `swarm run`, sizes, kinds of bytes, ranks, slow readers.

The agents keep little of each rank, so that a writer that nobody slows down would have lost most of its output.
"""

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agent.testing import OWN_ACCOUNT, start_agents
from tests.cluster.conftest import converge

pytestmark = [pytest.mark.acceptance, pytest.mark.cluster]

SWARM = Path(sys.executable).with_name("swarm")
KEPT = 4 * 2**20
WRITERS = {
    "random": "out(rng.randbytes(size))",
    "holes": "out(bytes(size))",
    "one line": "out(b'x' * size)",
    "lines": "out(b''.join(b'%d of some words\\n' % n for n in range(size // 18)))",
    "carriage returns": "out(b''.join(b'\\r%d %%' % n for n in range(size // 8)))",
    "not UTF-8": "out((b'\\xff\\xfe\\x80abc\\n' * (size // 7 + 1))[:size])",
    "drops": "[out(rng.randbytes(rng.randrange(1, 9_000))) for _ in range(size // 4_500)]",
    "both": "[(out, err)[n % 2](rng.randbytes(3_000)) for n in range(size // 3_000)]",
}
PROGRAM = """
import os, random, sys
rng, size, rank = random.Random(int(sys.argv[2])), int(sys.argv[1]), int(os.environ.get("RANK", "0"))
def write(fd, data):
    view = memoryview(data)
    while view: view = view[os.write(fd, view):]
out, err = (lambda data: write(1, data)), (lambda data: write(2, data))
"""


@pytest.fixture(scope="module")
def swarm():
    settings = {"task_log_bytes_max": KEPT, "job_user": OWN_ACCOUNT}
    with start_agents(3, settings=settings) as agents:
        converge(agents)
        yield agents


def run(agents, home, *words, **more):
    hosts = ",".join("{}:{}".format(*agent.address) for agent in agents)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SWARM_", "XDG_", "GIT_"))}
    ours = {"HOME": str(home), "SWARM_HOSTS": hosts, "SWARM_TOKEN": agents[0].token}
    return subprocess.Popen([SWARM, *map(str, words)], env=kept | ours, cwd=home, **more)


def taken(process, rng, pauses):
    """Everything from a pipe, slowly; its digest and size."""
    digest, size = hashlib.sha256(), 0
    while data := os.read(process.stdout.fileno(), rng.randrange(1, 2**20)):
        digest.update(data)
        size += len(data)
        if pauses and rng.random() < 0.05:
            time.sleep(rng.choice(pauses))
    return digest.hexdigest(), size


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_of_a_job_arrives_however_slowly_it_is_read(swarm, tmp_path, kind, seed):
    rng = random.Random(f"{kind} {seed}")
    size, pauses = rng.randrange(10, 40) * 10**6 + rng.randrange(10**6), rng.choice([(), (0.05,), (0.5, 3.0)])
    program = PROGRAM + WRITERS[kind]
    local = subprocess.run([sys.executable, "-c", program, str(size), str(seed)], capture_output=True, check=True)
    entry = swarm[rng.randrange(3) :] + swarm
    words = ("run", "-q", "--no-sync", "-g", "1", "--", sys.executable, "-c", program, size, seed)
    with (
        (tmp_path / "err").open("wb") as errors,
        run(entry, tmp_path, *words, stdout=subprocess.PIPE, stderr=errors) as it,
    ):
        found = taken(it, rng, pauses)
    assert it.returncode == 0, (tmp_path / "err").read_bytes()[-500:]
    assert found == (hashlib.sha256(local.stdout).hexdigest(), len(local.stdout))
    assert (tmp_path / "err").read_bytes() == local.stderr


def test_lines_of_ranks_on_two_nodes_are_whole_and_none_is_missing(swarm, tmp_path):
    program = "import os; [print(os.environ['RANK'], n, 'word ' * (n % 90)) for n in range(60_000)]"
    words = ("run", "-q", "--no-sync", "-g", "4", "--", sys.executable, "-c", program)
    with run(swarm, tmp_path, *words, stdout=subprocess.PIPE) as it:
        lines = it.stdout.read().decode().splitlines()
    assert it.returncode == 0
    for rank in range(4):
        expected = [f"{rank} {n} {'word ' * (n % 90)}" for n in range(60_000)]
        assert [line for line in lines if line.startswith(f"{rank} ")] == expected


def test_a_client_that_loses_its_agent_goes_on_behind_the_last_byte(tmp_path):
    """With what is kept by default: some 10 MiB were on their way through the agent that died."""
    data = random.Random(1).randbytes(150 * 10**6)
    (tmp_path / "data").write_bytes(data)
    with start_agents(3, settings={"job_user": OWN_ACCOUNT}) as swarm:
        converge(swarm)
        check_that_it_goes_on(swarm, tmp_path, data)


def check_that_it_goes_on(swarm, tmp_path, data):
    words = ("run", "-q", "--no-sync", "-g", "1", "--node", "n3", "--", "cat", tmp_path / "data")
    with run(swarm, tmp_path, *words, stdout=subprocess.PIPE) as it:
        found = bytearray()
        while part := os.read(it.stdout.fileno(), 2**18):
            found += part
            time.sleep(0.002)
            if len(found) - len(part) < 60 * 10**6 <= len(found):
                swarm[0].kill()
                swarm[0].restart()
    assert (it.returncode, found == data) == (0, True)


def test_who_comes_too_late_for_all_of_it_is_told_so(swarm, tmp_path):
    job = swarm[0].submit("head", "-c", "20000000", "/dev/zero")
    swarm[0].ended(job)
    for command in ("attach", "logs"):
        with run(swarm, tmp_path, command, job["id"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as it:
            out, err = it.communicate()
        told = int(err.split(b"is not whole: ")[1].split()[0])
        assert (it.returncode, len(out) + told) == (125, 20_000_000)

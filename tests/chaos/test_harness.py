"""The hosts, cuts and checks that the other tests here rest on."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.agent.testing import Contact, wait_until_sync
from tests.chaos.checker import Checker
from tests.chaos.history import Beat, JobHistory, gap_s, overlaps
from tests.chaos.view import View, up_file
from tests.testbed.netns import Network, pids_in, run, why_not

pytestmark = pytest.mark.xdist_group("chaos-harness")

SEND = """
import socket, sys
wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    wire.sendto(b'hello', (sys.argv[1], 9999))
except OSError as error:
    print(error.strerror)
"""
LISTEN = """
import socket
wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
wire.bind(('', 9999))
print('ready', flush=True)
while True:
    print(wire.recvfrom(10)[1][0], flush=True)
"""


@pytest.fixture
def network():
    if reason := why_not():
        pytest.skip(reason)
    with Network.build(3) as built:
        yield built


def send(source, target):
    """What a host is told that sends a datagram to another; empty when all seems well."""
    command = source.command(sys.executable, "-c", SEND, target.address)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Listener:
    """A process on a host that says from whom it hears."""

    def __init__(self, host, output):
        self._output = output
        command = host.command(sys.executable, "-c", LISTEN)
        with output.open("w") as stream:
            self.process = subprocess.Popen(command, stdout=stream)
        wait_until_sync(lambda: "ready" in output.read_text(), 10)

    def heard(self, host):
        return self._output.read_text().split().count(host.address)


@pytest.fixture
def listeners(network, tmp_path):
    found = [Listener(host, tmp_path / f"heard{index}") for index, host in enumerate(network.hosts)]
    yield found
    for listener in found:
        listener.process.kill()
        listener.process.wait()


@pytest.mark.root
def test_drop_on_input_is_silent_and_one_way(network, listeners):
    first, second, third = network.hosts
    network.drop(second, [first])
    assert send(first, second) == ""
    assert send(second, first) == ""
    assert send(third, second) == ""
    wait_until_sync(lambda: listeners[0].heard(second) == 1 and listeners[1].heard(third) == 1, 10)
    assert listeners[1].heard(first) == 0
    network.heal()
    send(first, second)
    wait_until_sync(lambda: listeners[1].heard(first) == 1, 10)


@pytest.mark.root
def test_drop_on_output_gives_the_sender_eperm_and_is_one_way(network, listeners):
    first, second, _ = network.hosts
    network.refuse(first, [second])
    assert send(first, second) == "Operation not permitted"
    assert send(second, first) == ""
    wait_until_sync(lambda: listeners[0].heard(second) == 1, 10)
    assert listeners[1].heard(first) == 0


@pytest.mark.root
def test_partition_cuts_both_ways_and_the_tests_reach_both_sides(network, listeners):
    first, second, third = network.hosts
    network.cut([first], [second, third])
    for source, target in ((first, second), (second, first), (second, third)):
        send(source, target)
    wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with wire:
        for host in network.hosts:
            wire.sendto(b"hello", (host.address, 9999))
    wait_until_sync(lambda: listeners[2].heard(second) == 1, 10)
    own = first.address.rsplit(".", 1)[0] + ".254"
    wait_until_sync(lambda: all(own in listener._output.read_text() for listener in listeners), 10)
    assert listeners[0].heard(second) == listeners[1].heard(first) == 0


@pytest.mark.root
def test_loss_hits_about_its_share_and_none_of_the_tests_requests(network):
    first, second, _ = network.hosts
    network.lose(25)
    many = SEND.replace("wire.sendto", "for _ in range(1000): wire.sendto")
    subprocess.run(first.command(sys.executable, "-c", many, second.address), check=True)
    lost = int(re.search(r"counter packets (\d+)", list_input(second)).group(1))
    assert 170 < lost < 330  # six standard deviations
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        for _ in range(100):
            wire.sendto(b"hello", (second.address, 9999))
    assert f"counter packets {lost} " in list_input(second)
    network.heal()
    assert "counter" not in list_input(second)


def list_input(host):
    """The rules of a host's input chain with what they have hit."""
    return run(*host.command("nft", "list", "chain", "inet", "faults", "input"))


@pytest.mark.root
def test_power_cut_ends_everything_on_a_host_and_nothing_elsewhere(network, listeners):
    first, second, _ = network.hosts
    assert first.pids() == [listeners[0].process.pid]
    first.cut_power()
    assert first.pids() == []
    assert second.pids() == [listeners[1].process.pid]
    first.plug_in()
    send(first, second)
    wait_until_sync(lambda: listeners[1].heard(first) == 1, 10)


@pytest.mark.root
def test_network_is_removed_with_its_processes():
    if reason := why_not():
        pytest.skip(reason)
    with Network.build(1) as network:
        (host,) = network.hosts
        process = subprocess.Popen(host.command("sleep", "1000"))
        wait_until_sync(lambda: host.pids() == [process.pid], 10)
    assert process.wait(10) == -9
    with pytest.raises(FileNotFoundError):
        pids_in(host.namespace)


def beat(at_s, attempt=1, rank=0, pid=10):
    return Beat(at_s, attempt, 1, rank, pid, "n1", "beat")


def test_attempts_that_write_at_once_are_found():
    good = [beat(1.0), beat(2.0), beat(3.0, attempt=2, pid=20)]
    assert overlaps(good) == []
    assert "attempt 1 wrote 0.500 s after 2 began" in overlaps([*good, beat(3.5, rank=1, pid=11)])[0]
    assert "ran twice" in overlaps([*good, beat(1.5, pid=12)])[0]
    assert gap_s([beat(1.0), beat(1.2), beat(4.0), beat(4.0, rank=1)]) == pytest.approx(2.8)


def said(epoch, version, state, **more):
    base = {"attempt": 1, "end_reason": None, "shell_exit_code": None, "shepherd": "n1", "source": "record"}
    return {**base, "epoch": epoch, "version": version, "state": state, **more}


def faults_of(*answers):
    history = JobHistory("j")
    for agent, document in answers:
        history.hear(agent, document)
    return history.faults


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([("n1", said(1, 2, "running")), ("n1", said(1, 1, "queued"))], "fell back from (1, 2)"),
        ([("n1", said(1, 2, "running")), ("n2", said(1, 2, "queued"))], "in one version"),
        ([("n1", said(1, 2, "running")), ("n2", said(2, 1, "queued", attempt=2))], "nothing says why"),
        ([("n1", said(1, 2, "ended", shell_exit_code=0)), ("n2", said(2, 1, "running"))], "had ended"),
        ([("n1", said(1, 2, "queued", attempt=3)), ("n2", said(2, 1, "queued"))], "attempt falls"),
    ],
)
def test_answer_that_goes_back_is_found(answers, fault):
    assert fault in faults_of(*answers)[0]


def test_restart_and_a_late_answer_of_another_agent_are_no_faults():
    restarted = said(2, 1, "queued", attempt=2, restarts=1)
    assert faults_of(("n1", said(1, 2, "running")), ("n2", restarted), ("n3", said(1, 2, "running"))) == []


class Impostor(ThreadingHTTPServer):
    """Answers as an agent does: accepts every job, and says at once that it ended as it should.  A liar
    says that it ended with 3, lists no job, and takes back what it said of the job `watched`."""

    def __init__(self, is_liar):
        super().__init__(("127.0.0.1", 0), Answer)
        self.is_liar, self.codes, self.watched_version = is_liar, {}, 5

    def document(self, job):
        if job != "watched":
            return said(1, 4, "ended", shell_exit_code=3 if self.is_liar else self.codes[job])
        self.watched_version += -1 if self.is_liar else 1
        return said(1, self.watched_version, "running")


class Answer(BaseHTTPRequestHandler):
    server: Impostor

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/tickets":
            self.answer(200, {"job_id": f"job{len(self.server.codes)}", "holders": [], "stores": []})
        else:
            job = body["ticket"]["job_id"]
            self.server.codes[job] = int(body["spec"]["command"][-1])
            self.answer(201, {"id": job})

    def do_GET(self):
        if "?" in self.path:
            jobs = [] if self.server.is_liar else self.server.codes
            self.answer(200, {"items": [{"id": job} for job in jobs]})
        else:
            self.answer(200, self.server.document(self.path.rpartition("/")[2]))

    def answer(self, status, document):
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Tests have no use for a log."""


@pytest.fixture
def look_at_impostor(tmp_path):
    """The verdict on an impostor and on what ranks wrote."""
    servers = []

    def look(*, is_liar, written):
        server = Impostor(is_liar)
        servers.append(server)
        threading.Thread(target=server.serve_forever).start()
        swarm = View(tmp_path, {"n1": Contact("n1", ("127.0.0.1", server.server_port), "secret")})
        swarm.beats_dir.mkdir()
        (tmp_path / "token").write_text("secret")
        up_file(tmp_path, "n1").parent.mkdir()
        up_file(tmp_path, "n1").touch()
        swarm.note("watched")
        (swarm.beats_dir / "watched.0").write_text(written)
        with Checker(swarm) as checker:
            assert checker.pid != os.getpid()
            wait_until_sync(lambda: len(checker.accepted) > 2 and heard(checker, "watched") > 1, 30)
            return checker.verdict(5)

    yield look
    for server in servers:
        server.shutdown()
        server.server_close()


def heard(checker, job):
    """How often the checker was answered about that job."""
    observed = [json.loads(line) for line in checker.observations.read_text().splitlines()]
    return sum(each["what"] == "read" and each["job"] == job for each in observed)


ONE_ATTEMPT = "1.0 1 1 0 10 n1 beat\n2.0 1 1 0 10 n1 beat\n"
TWO_AT_ONCE = ONE_ATTEMPT + "1.5 2 2 0 20 n2 begin\n"


def test_checker_finds_nothing_wrong_with_an_honest_agent(look_at_impostor):
    faults, answers = look_at_impostor(is_liar=False, written=ONE_ATTEMPT)
    assert faults == []
    assert answers > 2


def test_checker_finds_every_lie_of_an_agent_and_every_wrong_of_the_ranks(look_at_impostor):
    faults, _ = look_at_impostor(is_liar=True, written=TWO_AT_ONCE)
    for expected in (
        "should have ended with",
        "how often n1 lists accepted jobs",
        "fell back",
        "attempt 1 wrote 0.500 s",
    ):
        assert any(expected in fault for fault in faults), (expected, faults)

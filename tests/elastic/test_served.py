"""Samples that other ranks load: real connections, servers that come late, go and come again, and strangers."""

import os
import pickle
import socket
import struct
import threading
import time
from contextlib import closing

import pytest

from swarm_elastic import _served
from swarm_elastic._served import NoSample, SampleLink, serve, served

SECRET = "5" * 32


class Squares:
    """Sample n is n squared; some have errors."""

    def __len__(self):
        return 1_000

    def __getitem__(self, index):
        if index == 13:
            raise ValueError("13 is unlucky")
        return {"x": index, "y": index * index}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def group(monkeypatch):
    """The variables that a rank of a job with an input group has."""
    port = free_port()
    told = {"HOST": "127.0.0.1", "PORT": str(port)}
    for name, value in told.items():
        monkeypatch.setenv(f"SWARM_GROUP_INPUT_{name}", value)
    monkeypatch.setenv("SWARM_GROUPS", "worker,input")
    monkeypatch.setenv("SWARM_JOB_SECRET", SECRET)
    return port


class Servers:
    """Servers of the group, in threads of this process."""

    def __init__(self):
        self.running = []

    def start(self, port, dataset=None, first=None):
        server = _served._Server(
            ("127.0.0.1" if not socket.has_dualstack_ipv6() else "::", port), dataset, SECRET.encode()
        )
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.running.append(server)
        if first:
            threading.Thread(target=_served._join, args=(first, server.server_address[1]), daemon=True).start()
        return server

    def stop(self):
        for server in self.running:
            server.shutdown()
            server.server_close()
        self.running = []


@pytest.fixture
def servers():
    found = Servers()
    yield found
    found.stop()


def test_samples_come_in_the_order_in_which_they_were_asked_for(group, servers):
    servers.start(group, Squares())
    data = served(Squares())
    assert len(data) == 1_000
    assert data[3] == {"x": 3, "y": 9}
    wanted = [7, 0, 999, 7, 42]
    assert [each["x"] for each in data.__getitems__(wanted)] == wanted
    assert data.__getitems__([]) == []


def test_several_servers_share_the_work_and_one_that_is_gone_costs_no_sample(group, servers, monkeypatch):
    monkeypatch.setattr(_served, "LOOK_AGAIN_S", 0.0)
    asked = {0: 0, 1: 0}

    class Counted(Squares):
        def __init__(self, which):
            self.which = which

        def __getitem__(self, index):
            asked[self.which] += 1
            return super().__getitem__(index)

    servers.start(group, Counted(0))
    second = servers.start(0, Counted(1), ("127.0.0.1", group))
    until_s = time.monotonic() + 10
    while not servers.running[0].others and time.monotonic() < until_s:
        time.sleep(0.01)
    data = served(Squares(), timeout_s=20)
    numbers = [n for n in range(100) if n != 13]
    assert [each["x"] for each in data.__getitems__(numbers)] == numbers
    assert min(asked.values()) > 30
    second.shutdown()
    second.server_close()
    servers.running.remove(second)
    for _ in range(5):
        assert [each["y"] for each in data.__getitems__(numbers)] == [n * n for n in numbers]


def test_whoever_asks_before_anybody_serves_waits_and_gives_up_in_time(group, servers):
    with pytest.raises(NoSample, match=r"no rank at 127\.0\.0\.1:\d+ has served for 0\.3 s"):
        served(Squares(), timeout_s=0.3)[1]
    late = threading.Timer(0.5, lambda: servers.start(group, Squares()))
    late.start()
    assert served(Squares(), timeout_s=20)[5]["y"] == 25


def test_a_server_that_began_anew_is_found_again(group, servers):
    servers.start(group, Squares())
    data = served(Squares(), timeout_s=20)
    assert data[2]["y"] == 4
    for link in list(data._mine.connections.values()):
        link._socket.shutdown(socket.SHUT_RDWR)
    servers.stop()
    servers.start(group, Squares())
    assert data[3]["y"] == 9


def test_the_datasets_own_error_is_told_with_its_sample_and_ends_nothing(group, servers):
    servers.start(group, Squares())
    data = served(Squares())
    with pytest.raises(NoSample, match=r"dataset\[13\] failed where it is served: ValueError: 13 is unlucky"):
        data[13]
    assert data[14]["y"] == 196


def test_a_stranger_is_given_nothing_and_a_stranger_that_serves_is_not_believed(group, servers, monkeypatch):
    servers.start(group, Squares())
    with pytest.raises((OSError, EOFError)):
        SampleLink(("127.0.0.1", group), b"another secret")
    with socket.create_connection(("127.0.0.1", group)) as link:
        link.sendall(b"\0" * 64 + b"G" + struct.pack("!Iq", 8, 1))
        assert len(link.recv(100)) == 32  # its own nonce
        assert link.recv(100) == b""
    monkeypatch.setattr(_served, "GREETING_S", 0.2)
    with socket.create_connection(("127.0.0.1", group)) as silent:
        silent.settimeout(10)
        assert len(silent.recv(100)) == 32
        assert silent.recv(100) == b""  # after its time to show who it is
    with socket.socket() as liar:
        liar.bind(("127.0.0.1", 0))
        liar.listen()

        def answer():
            link, _ = liar.accept()
            with link:
                link.sendall(b"n" * 32)
                link.recv(64)
                link.sendall(b"p" * 32 + b"\0" + struct.pack("!Q", 5) + pickle.dumps(1))

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(OSError, match="is not of this job"):
            SampleLink(liar.getsockname(), SECRET.encode())


def test_questions_that_nobody_would_ask_are_refused(group, servers):
    servers.start(group, Squares())
    with closing(SampleLink(("127.0.0.1", group), SECRET.encode())) as link:
        ask_nonsense(link)
    assert served(Squares())[1]["y"] == 1


def ask_nonsense(link):
    for what, body in ((b"X", b""), (b"G", b""), (b"G", b"1234567"), (b"J", b"1")):
        with pytest.raises(NoSample, match="this is no question"):
            link.ask(what, body)
    with pytest.raises((OSError, EOFError)):
        link.ask(b"G", b"\0" * (8 * _served.INDICES_MOST + 8))


def test_many_threads_and_processes_ask_at_once(group, servers):
    servers.start(group, Squares())
    data, found = served(Squares()), {}

    def ask(first):
        found[first] = [each["x"] for each in data.__getitems__(range(first, first + 50))]

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(100, 900, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[first] == list(range(first, first + 50)) for first in range(100, 900, 50))
    assert pickle.loads(pickle.dumps(data))[4] == {"x": 4, "y": 16}
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writes, str(data[6]["y"]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reads, 10) == b"36"
    assert data[8]["y"] == 64


def test_outside_of_such_a_job_a_dataset_is_itself_and_nothing_is_served(monkeypatch):
    monkeypatch.delenv("SWARM_GROUPS", raising=False)
    monkeypatch.delenv("SWARM_GROUP", raising=False)
    data = Squares()
    assert served(data) is data
    with pytest.raises(RuntimeError, match=r"write a \[\[group\]\] table"):
        serve(data)
    monkeypatch.setenv("SWARM_GROUPS", "worker,other")
    assert served(data) is data

"""Nothing that grows with a user's input keeps the agent from answering: /livez is asked all the while.

What is measured is how long the loop's own thread was busy with something else while a /livez waited: processor time,
so that a machine that others use as well says the same as a quiet one.
"""

import hashlib
import http.client
import json
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from swarm_agent.http.blobs import PACK_TYPE
from swarmsched.tree import Tree, TreeEntry
from tests.agent.testing import start_agents, wait_until_sync

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-responsive")]

PAUSE_S = 0.05
SILENT_S_MAX = 0.5
BLOBS = 20_000
SEVERAL = 5


@contextmanager
def silence(agent):
    """A list that is filled with the longest time, in seconds, that the loop let a /livez wait meanwhile."""
    longest, over = [0.0], threading.Event()
    schedule = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/schedstat")  # of the thread of the loop

    def busy_s():
        return int(schedule.read_text().split()[0]) / 1e9

    def ask():
        while not over.wait(PAUSE_S):
            asked_s = busy_s()
            connection = http.client.HTTPConnection(agent.address[0], agent.address[1], timeout=120)
            try:
                connection.request("GET", "/livez")
                assert connection.getresponse().read()
            finally:
                connection.close()
            longest[0] = max(longest[0], busy_s() - asked_s)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield longest
    finally:
        over.set()
        thread.join()


def send(agent, method, path, body=None, content_type="application/json"):
    connection = http.client.HTTPConnection(agent.address[0], agent.address[1], timeout=300)
    headers = {"Authorization": f"Bearer {agent.token}", "Content-Type": content_type}
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def pack(number):
    for index in range(BLOBS):
        content = b"%d of %d" % (index, number)
        yield hashlib.sha256(content).digest() + len(content).to_bytes(8, "big") + content


def upload(agent, number):
    status, answered = send(agent, "POST", "/v1/blobs", b"".join(pack(number)), PACK_TYPE)
    assert (status, json.loads(answered)["stored"]) == (200, BLOBS)


def submit_deep_tree(agent, number):
    """A manifest of many long paths; its one file is not sent, so staging ends after it was read."""
    digest = hashlib.sha256(b"not sent %d" % number).hexdigest()
    folder = "/".join(["d" * 12] * 60)
    tree = Tree.of([TreeEntry(f"{folder}/{index}", size_bytes=1, sha256=digest) for index in range(26_000)]).to_bytes()
    assert send(agent, "PUT", f"/v1/blobs/{hashlib.sha256(tree).hexdigest()}", tree)[0] == 201
    spec = {"command": ["true"], "tree": hashlib.sha256(tree).hexdigest(), "blob_sources": [agent.name]}
    job = agent.call("POST", "/v1/jobs", {"spec": spec})[1]["id"]
    wait_until_sync(lambda: agent.get(f"/v1/jobs/{job}")["state"] == "ended", 120.0, "the job could not be staged")


def send_unknown_keys(agent, _):
    body = json.dumps({"spec": {f"k{index}": 1 for index in range(70_000)}}).encode()
    status, answered = send(agent, "POST", "/v1/jobs", body)
    assert (status, len(json.loads(answered)["errors"])) == (422, 20)


def read_tail(agent, job):
    assert len(send(agent, "GET", f"/v1/jobs/{job}/logs?tail=1000000")[1]) > 1_000_000


def packed_zeros():
    """A megabyte that would unpack to a gigabyte."""
    packing = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return b"".join([packing.compress(bytes(2**20)) for _ in range(1024)] + [packing.flush()])


def send_packed(agent, path, body, token):
    connection = http.client.HTTPConnection(agent.address[0], agent.address[1], timeout=60)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", "Authorization": f"Bearer {token}"}
    with closing(connection):
        connection.request("POST", path, body, headers)
        return connection.getresponse().status


def at_once(agent, work, arguments):
    with ThreadPoolExecutor(SEVERAL) as pool:
        list(pool.map(lambda argument: work(agent, argument), arguments))


@pytest.fixture(scope="module")
def agent():
    with start_agents(1) as (alone,):
        wait_until_sync(lambda: alone.get("/v1/nodes")["items"][0]["total_gpus"] == 2, what="it knows its GPUs")
        yield alone


@pytest.fixture(scope="module")
def talkative_job(agent):
    job = agent.call("POST", "/v1/jobs", {"spec": {"command": ["seq", "1", "300000"]}})[1]["id"]
    wait_until_sync(lambda: agent.get(f"/v1/jobs/{job}")["state"] == "ended", 60.0, "it has said all")
    return job


@pytest.mark.parametrize("work", [upload, submit_deep_tree, send_unknown_keys, read_tail])
def test_the_agent_answers_while_it_works_for_a_user(agent, talkative_job, work):
    arguments = [talkative_job] * SEVERAL if work is read_tail else range(SEVERAL)
    with silence(agent) as longest:
        at_once(agent, work, arguments[:1] if work in (upload, submit_deep_tree) else arguments)
    assert longest[0] <= SILENT_S_MAX


def test_what_is_sent_packed_is_refused_and_never_unpacked(agent):
    body, doors = packed_zeros(), [("/v1/jobs", "wrong"), ("/v1/jobs", agent.token), ("/peer/v1/query/api", "")]
    with silence(agent) as longest, ThreadPoolExecutor(len(doors) * SEVERAL) as pool:
        told = list(pool.map(lambda door: send_packed(agent, door[0], body, door[1]), doors * SEVERAL))
    assert told == [401, 415, 415] * SEVERAL
    assert longest[0] <= SILENT_S_MAX


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/peer/v1/query/api"), ("POST", "/v1/jobs"), ("PUT", "/v1/config")]
)
def test_whoever_breaks_off_a_body_leaves_no_word_in_the_log(agent, method, path):
    before = agent.log_file.stat().st_size
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {agent.token}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 200\r\n\r\n{"
    for _ in range(20):
        with socket.create_connection(agent.address) as broken:
            broken.sendall(head.encode())
            time.sleep(0.01)  # the head is read, and somebody waits for the rest
    assert send(agent, "GET", "/livez")[0] == 200
    assert agent.log_file.read_bytes()[before:] == b""

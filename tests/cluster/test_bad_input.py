"""Nonsense, forgeries and mistakes, told to real agents through the real command, API and socket."""

import hashlib
import http.client
import json
import os
import re
import socket
import struct
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.agent.testing import start_agents, wait_until_sync

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-bad_input")]


def problem_of(answer, status):
    code, document = answer
    assert code == status, document
    return document


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("run", "--gpsu", "2", "--", "true"), 2, "--gpus"),
        (("ps", "--al"), 2, "--all"),
        (("nodse",), 2, "nodes"),
        (("config", "set", "--swarm", "policcy", "las"), 2, "policy"),
        (("config", "set", "--swarm", "policy", "lass"), 2, "las"),
        (("status", "no-such-job"), 3, "no-such-job"),
        (("run", "--queue", "defualt", "--", "true"), 2, "default"),
        (("run", "--gpus", "64", "--", "true"), 125, "6 GPUs"),
        (("run", "--node", "n9", "--", "true"), 125, "n9"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_mistake_on_the_command_line_names_the_remedy(swarm, shell, words, code, says):
    found, out, err = shell(swarm, *words)
    assert (found, out) == (code, ""), err
    assert says in err
    assert err.startswith("swarm: ")
    assert "Traceback" not in err


def test_unknown_key_of_a_job_file_is_named_with_its_line(swarm, shell):
    (shell.folder / "job.toml").write_text('command = ["true"]\ngpsu = 2\n')
    code, _, err = shell(swarm, "submit", "-f", "job.toml")
    assert code == 2
    assert ":2: gpsu" in err
    assert "gpus" in err.split("gpsu", 1)[1]


def test_unknown_key_of_a_specification_names_the_nearest(swarm):
    body = {"spec": {"command": ["true"], "rankz": 2}}
    problem = problem_of(swarm[0].call("POST", "/v1/jobs", body), 422)
    assert problem["errors"][0]["pointer"] == "/spec/rankz"
    assert "did you mean 'ranks'" in problem["errors"][0]["detail"]


def test_wrong_token_is_401_and_exit_code_4(swarm, shell):
    code, out, err = shell(swarm, "ps", SWARM_TOKEN="wrong" * 10)
    assert (code, out) == (4, "")
    assert "token" in err
    request = urllib.request.Request(swarm[0].url + "/v1/jobs", headers={"Authorization": "Bearer wrong"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as answer:
        assert answer.code == 401
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")


def drops(agent):
    """Refused datagrams by reason, from /metrics."""
    pattern = r'^swarm_messages_dropped_total\{channel="gossip",reason="(\w+)"\} ([0-9.e+]+)$'
    return {reason: float(value) for reason, value in re.findall(pattern, agent.page_of_metrics(), re.MULTILINE)}


def record_packet(agents):
    """A real packet of the swarm: what a new agent with the right key sends to its seed, caught on the way."""
    base = agents[0].config_file.parent.parent
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        wire.bind(("127.0.0.1", 0))
        wire.settimeout(60)
        settings = {
            "name": "recorded",
            "seeds": ["{}:{}".format(*wire.getsockname())],
            "cluster_key_file": str(base / "cluster.key"),
        }
        with start_agents(1, settings=settings):
            return wire.recv(2_000)


def test_datagrams_that_are_not_ours_are_counted_and_harm_nothing(swarm):
    agent = swarm[0]
    genuine = record_packet(swarm)
    altered = genuine[:-1] + bytes([genuine[-1] ^ 1])
    packets = {
        "foreign": b"GET / HTTP/1.1\r\n\r\n",
        "malformed": altered,
        "truncated": genuine[: len(genuine) // 2],
        "empty": b"",
        "oversized": genuine + bytes(3_000),
        "largest": os.urandom(60_000),
    }
    before = drops(agent)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        for packet in packets.values():
            wire.sendto(packet, agent.address)
        wire.sendto(genuine, agent.address)
        wire.sendto(genuine, agent.address)
        for _ in range(2_000):
            wire.sendto(os.urandom(64) + struct.pack("!I", 7), agent.address)

    def counted(reason, least):
        return drops(agent).get(reason, 0) - before.get(reason, 0) >= least

    for reason, least in (("foreign", 100), ("replayed", 1), ("oversized", 2), ("wrong_key", 1)):
        wait_until_sync(lambda reason=reason, least=least: counted(reason, least), what=f"{reason}: {drops(agent)}")
    assert agent.ended(agent.submit("true"))["end_reason"] == "completed"

    def alive():
        return {each["name"] for each in agent.get("/v1/members")["items"] if each["status"] == "alive"}

    wait_until_sync(lambda: {"n1", "n2", "n3"} <= alive(), what="nobody is disturbed")


def put_blob(agent, content):
    digest = hashlib.sha256(content).hexdigest()
    connection = http.client.HTTPConnection(agent.address[0], agent.address[1], timeout=30)
    try:
        connection.request("PUT", f"/v1/blobs/{digest}", content, {"Authorization": f"Bearer {agent.token}"})
        assert connection.getresponse().status in (200, 201)
    finally:
        connection.close()
    return digest


@pytest.mark.parametrize("path", ["../../../../escaped", "/tmp/swarm-escaped", "a/../../escaped"])
def test_archive_that_climbs_out_fails_its_job_and_writes_nothing(swarm, path):
    agent = swarm[0]
    content = b"climbed out\n"
    entry = {"path": path, "kind": "file", "mode": 0o644, "size": len(content), "sha256": put_blob(agent, content)}
    manifest = json.dumps({"entries": [entry], "format": 1}, sort_keys=True, separators=(",", ":")).encode()
    job = agent.submit("true", tree=put_blob(agent, manifest), blob_sources=["n1"], nodes=["n2"])
    done = agent.ended(job)
    assert done["end_reason"] == "failed"
    assert "segment" in json.dumps(done) or "absolute" in json.dumps(done)
    assert not list(agent.config_file.parent.parent.rglob("*escaped*"))
    assert not Path("/tmp/swarm-escaped").exists()


def test_archive_with_a_link_that_leads_out_is_refused(swarm):
    agent = swarm[0]
    entries = [{"kind": "link", "path": "out", "target": "../../../../../../etc"}]
    manifest = json.dumps({"entries": entries, "format": 1}, sort_keys=True, separators=(",", ":")).encode()
    job = agent.submit("cat", "out/passwd", tree=put_blob(agent, manifest), blob_sources=["n1"])
    done = agent.ended(job)
    assert done["end_reason"] == "failed"
    assert "leads out" in json.dumps(done)
    assert "root:" not in agent.output(job)


def test_files_that_no_node_has_fail_the_job_with_the_nodes_asked(swarm):
    job = swarm[0].submit("true", tree="0" * 64, blob_sources=["n2"])
    done = swarm[0].ended(job)
    assert done["end_reason"] == "failed"
    assert "n2" in json.dumps(done)


def post_and_hang_up(agent, path, body):
    """Send a request whole and leave before the answer comes."""
    data = json.dumps(body).encode()
    with socket.create_connection(agent.address, 30) as wire:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{agent.address[1]}\r\nAuthorization: Bearer {agent.token}\r\n"
        wire.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def test_lost_answer_and_a_retry_at_another_agent_make_one_job(swarm):
    _, ticket = swarm[0].call("POST", "/v1/tickets", {})
    body = {
        "ticket": {key: ticket[key] for key in ("job_id", "holders", "stores")},
        "spec": {"command": ["sh", "-c", "echo once"]},
    }
    post_and_hang_up(swarm[0], "/v1/jobs", body)
    status, job = swarm[1].call("POST", "/v1/jobs", body)
    assert status in (200, 201)
    assert swarm[2].ended(job)["end_reason"] == "completed"
    assert swarm[2].output(job) == "once\n"
    listed = [each["id"] for each in swarm[2].get("/v1/jobs?all=true")["items"]]
    assert listed.count(ticket["job_id"]) == 1


def test_recovery_by_force_is_refused_with_the_reason_where_nothing_has_to_be_forced(swarm, shell):
    agent = swarm[0]
    job = agent.submit("sleep", "60", nodes=["n2"])
    wait_until_sync(lambda: agent.get(f"/v1/jobs/{job['id']}")["state"] == "running")
    epoch = agent.get(f"/v1/jobs/{job['id']}")["epoch"]
    handle = job["handle"]
    for entry in swarm:  # whoever is asked
        code, out, err = shell([entry], "recover", handle, "--force")
        assert (code, out) == (5, ""), err
        assert err.startswith(f"swarm: cannot recover {handle}: a majority of its holders is alive (n"), err
        assert "the job needs no force\n  wait: a shepherd acts within 20 s\n" in err
    code, out, err = shell(swarm, "recover", handle)
    assert (code, out) == (2, "")
    assert "nothing needs to be forced, and --force would be refused" in err
    document = agent.get(f"/v1/jobs/{job['id']}")
    assert (document["epoch"], document["is_forced"]) == (epoch, False)
    shell(swarm, "cancel", handle)
    agent.ended(job)
    for words in (("recover", handle), ("recover", handle, "--force")):
        code, out, err = shell(swarm, *words)
        assert (code, out) == (5, ""), err
        assert "has ended" in err
        assert "nothing to recover" in err
    code, _, err = shell(swarm, "recover", "nosuchjob", "--force")
    assert code == 3
    assert "nosuchjob" in err

"""The aggregator's process over real TCP: rounds, repeats, learners that go and come, strangers and broken frames."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from swarmsched.aggregation import frame
from swarmsched.aggregation.blocks import PIECE
from swarmsched.aggregation.frame import FrameKind
from swarmsched.models import ONE_THREAD
from tests.agent.aggregation.learner import KEY, LAYOUT, WAIT_S, WireLearner, connected, opened

SIZE = PIECE + 5_000  # two pieces
RULE = {"rate": 1.0, "momentum": 0.0, "is_quantised": True}


class Child:
    """The process, with the orders of an agent."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "swarm_agent.aggregation.aggregator", "127.0.0.1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ONE_THREAD},
        )
        hello = json.loads(self.process.stdout.readline())
        self.port, self.fingerprint = hello["port"], hello["fingerprint"]
        self.job = ""  # of the present test
        self.last: dict[str, Any] = {"shards": [], "strangers": 0}

    def order(self, learners, number=1, job="", size=SIZE, **plan) -> None:
        job = job or self.job
        told = {"job": job, "attempt": 1, "start": 0, "size": size, "layout": LAYOUT, "key": KEY, "rule": RULE}
        self.tell({"set": told | {"plan": {"number": [1, number], "learners": learners, **plan}}})
        self.told(lambda told: any(each["job"] == job and each["plan"][1] == number for each in told["shards"]))

    def tell(self, order) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def told(self, is_so):
        """The shards of this test, and how many strangers there were in all, once that is so."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            mine = [each for each in self.last["shards"] if each["job"].startswith(self.job)]
            if is_so({**self.last, "shards": mine}):
                return {**self.last, "shards": mine}
            self.last = json.loads(self.process.stdout.readline())
        raise AssertionError(self.last)

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(WAIT_S) == 0
        self.process.stdout.close()


@pytest.fixture(scope="module")
def process() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


@pytest.fixture
def child(process: Child, request: pytest.FixtureRequest) -> Iterator[Child]:
    process.job = request.node.name
    yield process
    while opened:
        opened.pop().close()


def gather(child, *names, size=SIZE):
    """Learners that hold the first version."""
    child.order(list(names), size=size, quorum=len(names))
    learners = [
        WireLearner(child.port, name, np.full(size, at, np.float32), child.job) for at, name in enumerate(names)
    ]
    for each in learners:
        each.greet()
    for each in learners:
        each.until(FrameKind.STATE)
        assert (each.weights == 0.0).all(), "those of the first in the plan"
    return learners


def test_rounds_of_three_learners_leave_the_same_bits_with_all_of_them(child):
    learners = gather(child, "a", "b", "c")
    for number in range(1, 4):
        for each, value in zip(learners, (1.0, 2.0, 6.0), strict=True):
            each.contribute(np.full(SIZE, value, np.float32))
        for each in learners:
            told = each.until(FrameKind.NEXT)
            assert told.version[0] == number
            assert told.counted == dict.fromkeys("abc", number - 1)
    assert len({each.weights.tobytes() for each in learners}) == 1
    assert np.allclose(learners[0].weights, -9.0, atol=0.1)
    learners[0].contribute(np.ones(SIZE, np.float32))  # whose connection counts the bytes and the work until then
    (told,) = child.told(lambda told: told["shards"][0]["link_bytes"] > 4 * 3 * SIZE)["shards"]
    assert 0.0 < told["cpu_s"] < 10.0
    assert 0.0 <= told["wait_s"] < 10.0


def test_two_jobs_share_one_aggregator_and_know_nothing_of_each_other(child):
    first = gather(child, "a", "b")
    name = child.job + " other"
    child.order(["a"], job=name, size=2_000)
    other = WireLearner(child.port, "a", np.ones(2_000, np.float32), name)
    other.greet()
    other.until(FrameKind.STATE)
    other.contribute(np.ones(2_000, np.float32))
    assert other.until(FrameKind.NEXT).counted == {"a": 0}
    for each in first:
        each.contribute(np.ones(SIZE, np.float32))
    assert first[0].until(FrameKind.NEXT).counted == {"a": 0, "b": 0}
    child.tell({"drop": [name, 1, 0]})
    with pytest.raises((EOFError, OSError)):
        other.until(FrameKind.NEXT)
    told = child.told(lambda told: len(told["shards"]) == 1)
    assert [each["job"] for each in told["shards"]] == [child.job]


def test_half_a_contribution_counts_nothing_and_a_repeat_after_it_once(child):
    a, b = gather(child, "a", "b")
    a.contribute(np.full(SIZE, 5.0, np.float32), pieces=1)
    a.tls.close()
    a.tls = connected(child.port)
    a.greet()
    a.until(FrameKind.WELCOME)
    a.contribute(np.full(SIZE, 1.0, np.float32))
    a.contribute(np.full(SIZE, 1.0, np.float32))
    b.contribute(np.full(SIZE, 1.0, np.float32))
    b.until(FrameKind.NEXT)
    assert np.allclose(b.weights, -1.0, atol=0.01)


def test_a_learner_that_comes_back_hears_what_was_counted_and_gets_the_weights(child):
    a, b = gather(child, "a", "b")
    a.contribute(np.ones(SIZE, np.float32))
    child.told(lambda told: told["shards"] and told["shards"][0]["waiting"] == ["a"])
    a.tls.close()
    b.contribute(np.ones(SIZE, np.float32))
    assert b.until(FrameKind.NEXT).counted == {"a": 0, "b": 0}
    a.tls = connected(child.port)
    a.greet()
    assert a.until(FrameKind.STATE).counted == {"a": 0, "b": 0}
    assert a.weights.tobytes() == b.weights.tobytes()


def test_a_successor_takes_the_weights_from_those_that_were_shown_them():
    first = Child()
    first.job = "job"
    a, b = gather(first, "a", "b")
    for each in (a, b):
        each.contribute(np.ones(SIZE, np.float32))
    a.until(FrameKind.NEXT)  # b is not told any more
    first.process.kill()
    first.process.wait(WAIT_S)
    first.process.stdin.close()
    first.process.stdout.close()
    second = Child()
    second.job = "job"
    second.order(["a", "b"], number=2)
    for each in (a, b):
        each.tls = connected(second.port)
        each.greet(plan=(1, 2))
    a.until(FrameKind.ASK)
    a.until(FrameKind.WELCOME)
    assert b.until(FrameKind.STATE).counted == {"a": 0, "b": 0}
    assert a.weights.tobytes() == b.weights.tobytes()
    assert np.allclose(a.weights, -1.0, atol=0.01)
    second.end()
    while opened:
        opened.pop().close()


def test_an_older_plan_and_another_layout_are_refused_by_name(child):
    a, _ = gather(child, "a", "b")
    child.order(["a", "b"], number=3)
    a.contribute(np.ones(SIZE, np.float32))
    assert a.until(FrameKind.REFUSED).objection == "OLD_PLAN"
    a.greet(plan=(1, 1))
    assert a.until(FrameKind.AWAY).objection == "OLD_PLAN"
    a.greet(plan=(1, 3), layout="other")
    assert a.until(FrameKind.AWAY).objection == "OTHER_LAYOUT"
    told = child.told(lambda told: told["shards"][0]["refused"].get("OTHER_LAYOUT"))
    assert told["shards"][0]["refused"] == {"OLD_PLAN": 2, "OTHER_LAYOUT": 1}


def test_values_that_are_no_numbers_are_refused_and_the_round_goes_on(child):
    a, b = gather(child, "a", "b")
    a.contribute(np.ones(SIZE, np.float32), scale=np.nan)
    assert a.until(FrameKind.REFUSED).objection == "NOT_FINITE"
    for each in (a, b):
        each.contribute(np.ones(SIZE, np.float32))
    assert b.until(FrameKind.NEXT).counted == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    "data",
    [
        "another key",
        frame.frame(FrameKind.DELTA, frame.FrameDelta((1, 1), (0, 0, 0, 0), 1, 1, 0)),
        frame.HEAD.pack(1, frame.HELLO_BYTES_MAX + 1, 0),
        frame.HEAD.pack(1, 10, 1 << 31),
        frame.HEAD.pack(77, 2, 0) + b"{}",
        frame.HEAD.pack(1, 2, 0) + b"[]",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["key", "order", "fields", "content", "kind", "json", "http"],
)
def test_strangers_are_hung_up_on_and_nothing_is_kept_of_them(child, data):
    if data == "another key":
        hello = frame.FrameHello(child.job, 1, 0, (1, 1), "a", LAYOUT, (-1, 0, 0, 0), "another key")
        data = frame.frame(FrameKind.HELLO, hello)
    child.order(["a"])
    before = child.last["strangers"]
    stranger = connected(child.port)
    stranger.settimeout(WAIT_S)
    stranger.sendall(data)
    assert stranger.recv(1) == b""
    told = child.told(lambda told: told["strangers"] > before)
    assert told["shards"][0]["connected"] == []


def test_one_that_does_not_speak_tls_harms_nobody(child):
    with socket.create_connection(("127.0.0.1", child.port), WAIT_S) as plain, suppress(ConnectionResetError):
        plain.sendall(b"\0" * 500)
        while plain.recv(100):
            pass
    gather(child, "a", size=3_000)


@pytest.mark.parametrize(("at", "length"), [(1, 5_020), (0, 100), (9, 0)])
def test_a_learner_that_sends_a_piece_out_of_turn_or_of_another_length_is_hung_up_on(child, at, length):
    (learner,) = gather(child, "a")
    delta = frame.FrameDelta((1, 1), frame.to_wire(learner.version), 1, 1, at)
    learner.tls.sendall(frame.frame(FrameKind.DELTA, delta, length) + b"\0" * length)
    with pytest.raises((EOFError, OSError)):
        learner.until(FrameKind.NEXT)
    assert child.told(lambda told: told["shards"][0]["connected"] == [])["shards"][0]["rounds"] == 0


def test_learners_know_the_process_by_its_fingerprint(child):
    tls = connected(child.port)
    assert hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest() == child.fingerprint
    tls.close()

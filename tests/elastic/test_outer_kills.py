"""An aggregator that is killed at a chosen moment of a round: nobody waits longer than told, and nothing is lost.

The ranks reach their shard through a relay of this test, which sees how far a contribution or an answer has come, holds
back the rest, and has the aggregator killed then.
"""

import signal
import socket
import threading
import time
from contextlib import suppress
from statistics import median

import pytest

from tests.agent.testing import free_port
from tests.elastic.test_outer import Gang, Node
from tests.elastic.testing import TRAIN, needs

pytestmark = [*needs(TRAIN), pytest.mark.acceptance, pytest.mark.xdist_group("elastic-kills")]

PHASES = ("idle", "half a contribution", "before the answer", "half an answer")
TIMES = 5
WIDTH = 4_000
ROUND_BYTES = 18 * WIDTH  # of one learner, one way: a byte for each parameter
SMALL_BYTES = ROUND_BYTES // 4  # greetings, and pings, are less
STEP_S, EVERY = 0.1, 20
MOST_STEPS = 1.5 + 1.0  # as told, and what a busy machine adds to a step of this length
QUIET_S = 0.1


class Relay:
    """Between ranks and their aggregator.  `kill_in` arms it for one phase; it kills once."""

    def __init__(self, kill) -> None:
        self._kill = kill
        self._phase = ""
        self._up: dict[int, int] = {}  # bytes of the contribution that each connection sends
        self._down: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ports: dict[str, str] = {}  # of aggregators, by the address that ranks know
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.killed = threading.Event()

    def front(self, address: str) -> str:
        """The address under which ranks find an aggregator."""
        for front, behind in self._ports.items():
            if behind == address:
                return front
        listening = socket.create_server(("127.0.0.1", free_port()))
        front = f"127.0.0.1:{listening.getsockname()[1]}"
        self._ports[front] = address
        self._sockets.append(listening)
        self._start(self._serve, listening, address)
        return front

    def behind(self, front: str) -> str:
        """The aggregator's own address."""
        return self._ports.get(front, front)

    def kill_in(self, phase: str) -> None:
        with self._lock:
            self.killed.clear()
            self._phase = phase

    def close(self) -> None:
        """End all connections and threads."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _start(self, target, *args) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _serve(self, listening, address) -> None:
        host, _, port = address.rpartition(":")
        with suppress(OSError):  # it is shut down at the end
            while True:
                near, _ = listening.accept()
                self._sockets.append(near)
                try:
                    far = socket.create_connection((host, int(port)))
                except OSError:
                    near.shutdown(socket.SHUT_RDWR)
                    continue
                self._sockets.append(far)
                number = near.fileno()
                self._up[number] = self._down[number] = 0
                self._start(self._pump, number, near, far, self._sent)
                self._start(self._pump, number, far, near, self._answered)

    def _pump(self, number, source, sink, seen) -> None:
        with suppress(OSError):
            while piece := source.recv(4_096):
                seen(number, len(piece))
                sink.sendall(piece)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _sent(self, number: int, count: int) -> None:
        with self._lock:
            self._up[number] += count
            if self._down[number] > SMALL_BYTES:
                self._up[number], self._down[number] = count, 0  # a new round
            if self._phase == "half a contribution" and self._up[number] > ROUND_BYTES // 2:
                self._end()

    def _answered(self, number: int, count: int) -> None:
        with self._lock:
            self._down[number] += count
            if self._phase == "before the answer" and self._up[number] > ROUND_BYTES // 2:
                self._end()
            if self._phase == "half an answer" and self._down[number] > ROUND_BYTES // 2:
                self._end()

    def _end(self) -> None:
        self._phase = ""
        self._kill()
        self.killed.set()


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path / "n")
    yield made
    made.close()


@pytest.fixture
def relay(node):
    made = Relay(lambda: node.signal_aggregator(signal.SIGKILL))
    yield made
    made.close()


@pytest.mark.parametrize("phase", PHASES)
def test_an_aggregator_is_killed_in_each_phase_of_a_round(tmp_path, template, node, relay, capsys, phase):
    handle = node.aggregation.handle

    async def relayed(key, request):
        answer = await handle(key, {**request, "known": relay.behind(request.get("known", ""))})
        return {**answer, "address": relay.front(answer["address"])}

    node.sockets.on_request("outer", relayed)
    given = {"STEPS": "100000", "PAUSE_S": str(STEP_S), "WIDTH": str(WIDTH), "EVERY": str(EVERY)}
    with Gang(tmp_path, template, [node.socket], 3, **given) as gang:
        gang.go_on(3)
        recovered_s = []
        for _ in range(TIMES):
            if phase == "idle":
                gang.go_on(1)
                time.sleep(QUIET_S)
                node.signal_aggregator(signal.SIGKILL)
            else:
                relay.kill_in(phase)
                assert relay.killed.wait(30), phase
            killed_s = time.monotonic()
            gang.go_on(3)
            recovered_s.append(time.monotonic() - killed_s)
        (tmp_path / "stop").touch()
        ends = gang.ends()
    assert node.aggregation.starts == TIMES + 1
    assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"]
    lines = [line for rank in gang.ranks for line in rank.lines if line.get("step", 0) > 10]
    usual_s = median(line["took_s"] for line in lines if line["step"] % EVERY == 0)
    longest_s = max(line["took_s"] for line in lines)
    cost = (longest_s - usual_s) / STEP_S
    with capsys.disabled():
        print(
            f"\n  killed in {phase}: a step with a round took {usual_s:.3f} s, the longest {longest_s:.3f} s, "
            f"{cost:.2f} steps more; three rounds later within {max(recovered_s):.1f} s; loss {ends[0]['loss']:.4f}"
        )
    assert cost < MOST_STEPS
    assert [rank.err.read_text() for rank in gang.ranks] == [""] * 3

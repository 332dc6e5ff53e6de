"""The HTTP client against raw bytes on a real socket."""

import socket
import threading

import pytest

from swarm_client.address import parse_address
from swarm_client.conversation import Unreached
from swarm_client.failure import Failure
from swarm_client.http import ConnectionBroken, SizedBody, Waiter, connect, parse_events


@pytest.fixture
def serve():
    """Answer each request with given bytes and close; return the address and what was received."""
    threads, sockets = [], []

    def begin(data, pieces=1, until=b"\r\n\r\n"):
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(10)
        sockets.append(listener)
        received = bytearray()

        def work():
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(10)
                while until not in received:
                    received.extend(sock.recv(65536))
                step = max(1, len(data) // pieces)
                for start in range(0, len(data), step):
                    sock.sendall(data[start : start + step])

        thread = threading.Thread(target=work)
        thread.start()
        threads.append(thread)
        return listener.getsockname(), received

    yield begin
    for thread in threads:
        thread.join(10)
    for sock in sockets:
        sock.close()


def ask(address, method="GET", body=b""):
    connection = connect(address, Waiter(), 5.0)
    try:
        response = connection.request(method, "/x", {"A": "b"}, body, 5.0)
        return response.status, response.headers, response.read(5.0)
    finally:
        connection.close()


def test_a_counted_answer_is_read_to_its_length(serve):
    address, received = serve(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A:  b \r\n\r\nhelloREST")
    status, headers, body = ask(address)
    assert (status, headers["x-a"], body) == (200, "b", b"hello")
    assert bytes(received).startswith(b"GET /x HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_a_chunked_answer_is_joined_however_it_is_cut(serve, pieces):
    chunks = b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
    address, _ = serve(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks, pieces)
    assert ask(address)[2] == b"hello world"


def test_interim_answers_are_skipped_and_no_length_means_until_close(serve):
    address, _ = serve(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\nrest")
    assert ask(address)[2] == b"rest"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "closed"),
        (b"SSH-2.0-OpenSSH_9\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "length 'x'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no size"),
        (b"HTTP/1.1 200 OK\r\nbroken\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000, "too long"),
    ],
)
def test_a_broken_answer_is_an_error_of_the_connection(serve, data, message):
    address, _ = serve(data)
    with pytest.raises(ConnectionBroken, match=message):
        ask(address)


def test_a_streamed_body_is_sent_with_its_length(serve):
    address, received = serve(b"HTTP/1.1 204 No Content\r\n\r\n", until=b"abcd")
    assert ask(address, "PUT", SizedBody(4, iter([b"ab", b"cd"])))[0] == 204
    assert b"Content-Length: 4\r\n" in received


def test_nobody_there_is_told_with_the_cause():
    nobody = ("127.0.0.1", 1)
    assert connect(nobody, Waiter(), 5.0) == Unreached(nobody, "connection refused")
    assert connect(("nobody.invalid", 1), Waiter(), 5.0).address == ("nobody.invalid", 1)


def test_an_address_that_does_not_answer_is_given_up_in_time():
    """A listener whose backlog is full takes no connection and refuses none, as a dead host does."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        fill = [socket.socket() for _ in range(3)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(silent.getsockname())
        assert connect(silent.getsockname(), Waiter(), 0.1) == Unreached(silent.getsockname(), "no answer", True)
        for sock in fill:
            sock.close()


def test_events_are_grouped_and_comments_skipped():
    lines = [b": heartbeat", b"id: 1", b"event: log", b"data: a", b"data:b", b"", b"", b"data: last", b"", b"data: cut"]
    assert [(e.id, e.kind, e.data) for e in parse_events(iter(lines))] == [
        ("1", "log", "a\nb"),
        ("1", "message", "last"),
    ]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a", ("a", 7433)),
        ("a:1", ("a", 1)),
        ("http://a:1/", ("a", 1)),
        ("[::1]:2", ("::1", 2)),
        ("::1", ("::1", 7433)),
        ("[::1]", ("::1", 7433)),
    ],
)
def test_addresses_are_read(text, address):
    assert parse_address(text, 7433) == address


@pytest.mark.parametrize("text", ["", "a:0", "a:65536", "a:x", "[::1", "[::1]x", "a/b", "https://a"])
def test_unusable_addresses_are_refused(text):
    with pytest.raises(Failure):
        parse_address(text, 7433)

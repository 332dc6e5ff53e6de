"""Where ranges are hosted, by the plan alone, and boards, which show nothing to strangers."""

import socket
import time
from random import Random

import pytest

from swarm_elastic import _board
from swarm_elastic._board import Board, read
from swarm_elastic._plan import hosts_of

pytestmark = pytest.mark.xdist_group("roster")


@pytest.mark.parametrize("seed", range(20))
def test_each_hosts_an_equal_share_and_all_come_to_the_same_however_they_are_named(seed):
    chance = Random(seed)
    count, learners = chance.randint(1, 8), [str(each) for each in chance.sample(range(100), chance.randint(1, 9))]
    hosts = hosts_of(count, learners)
    assert set(hosts) <= set(learners)
    assert max(map(hosts.count, learners)) <= -(-count // len(learners))
    chance.shuffle(learners)
    assert hosts_of(count, learners) == hosts


def test_few_ranges_move_when_a_learner_comes_or_leaves():
    """Of eight at most three on average, where shares that stay equal make two move."""
    moved = 0
    for first in range(0, 1_000, 10):
        names = [str(first + each) for each in range(3)]
        before, after = hosts_of(8, names), hosts_of(8, [*names, str(first + 3)])
        moved += sum(was != now for was, now in zip(before, after, strict=True))
    assert moved <= 300


@pytest.fixture(scope="module")
def board():
    found = Board("127.0.0.1")
    yield found
    found.close()


def place(board):
    host, port = board.address.rsplit(":", 1)
    return host, int(port)


def test_a_board_shows_what_was_shown_last_to_who_has_its_secret(board):
    board.show("step", "1")
    board.show("step", "2")
    assert read(place(board), board.secret, "step") == "2"
    assert read(place(board), board.secret, "other") is None
    for secret in ("", "0" * 32, board.secret[:-1]):
        with pytest.raises(ConnectionError):
            read(place(board), secret, "step")


@pytest.mark.parametrize(
    "said", [b"", b"\n", b"[]\n", b'["x"]\n', b"{}\n", b"1\n", b"\xff\xfe\n", b"[" * 1_020 + b"\n"]
)
def test_a_stranger_is_hung_up_on_and_harms_nobody(board, said, monkeypatch, capfd):
    monkeypatch.setattr(_board._Reader, "timeout", 0.05)
    board.show("step", "1")
    with socket.create_connection(place(board), 2) as stranger:
        stranger.sendall(said)
        began_s = time.monotonic()
        assert stranger.recv(100) == b""
        assert time.monotonic() - began_s < 1.0
    assert read(place(board), board.secret, "step") == "1"
    assert capfd.readouterr().err == ""


def test_a_board_that_is_closed_is_away():
    board = Board("127.0.0.1")
    board.close()
    with pytest.raises(ConnectionRefusedError):
        read(place(board), board.secret, "step")

"""Jobs that have ended: the same few at all agents, and nobody's push out those of others."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from swarmsched.api import EndReason, JobState
from swarmsched.card import JobCard, card_of, decode_card, encode_card, tombstone
from swarmsched.effects import Persist, SendPeer
from swarmsched.events import PeerMessageReceived
from swarmsched.gossip.exchange import FullStateAnswer, FullStateRequest
from swarmsched.gossip.history import HISTORY_ROOM, OF_USER_MOST, History
from swarmsched.gossip.library import HISTORY_STAGE
from swarmsched.ids import JobId, NodeId
from swarmsched.record import JobRecord
from swarmsched.view import HISTORY_LIMIT
from tests.swarmsched.building import job_id, make_record
from tests.swarmsched.gossip.state_testing import StateNetwork

A, B, C = NodeId("n000"), NodeId("n001"), NodeId("n002")
UTC = 1_700_000_000


def ended(number: int, user: str = "ada", **changes: Any) -> JobCard:
    last = replace(card_of(make_record("n1")), job_id=job_id(number), user=user, first_started_utc_s=UTC + number)
    return replace(tombstone(last, has_completed=True, ended_utc_s=UTC + 100 + number), **changes)


def noted(*cards: JobCard) -> History:
    history = History()
    for card in cards:
        history.note(*encode_card(card))
        history.validate()
    return history


def record(number: int, utc_s: float = UTC, **changes: Any) -> JobRecord:
    return replace(make_record("n000"), job_id=job_id(number), submitted_utc_s=utc_s, **changes)


def test_what_is_kept_does_not_depend_on_the_order_in_which_it_came() -> None:
    rng = random.Random(1)
    heard = [encode_card(ended(number, rng.choice("abbccccddddddddeeeeeeeeeeeeeeee"))) for number in range(900)]
    kept = set()
    for _ in range(4):
        rng.shuffle(heard)
        history = History()
        for each in (*heard, *heard[:30]):
            history.note(*each)
        history.validate()
        kept.add((history.digest, history.ended))
    assert len(kept) == 1


def test_one_users_jobs_push_out_nobody_elses() -> None:
    few = [ended(number, "bob") for number in range(OF_USER_MOST // 2)]
    flood = [ended(10_000 + number, f"user{number % 40}") for number in range(4 * HISTORY_LIMIT)]
    history = noted(*few)
    for card in flood:
        history.note(*encode_card(card))
    counts = [sum(each.card.user == user for each in history.ended) for user in ("bob", "user3", "user39")]
    assert len(history) == HISTORY_LIMIT
    assert max(counts) - min(counts) <= 1
    alone = noted(*[ended(number, "eve") for number in range(OF_USER_MOST + 9)])
    assert [each.card.job_id for each in alone.ended] == [job_id(number) for number in range(9, OF_USER_MOST + 9)]


@pytest.mark.parametrize(
    "changes",
    [{"ended_utc_s": 0}, {"first_started_utc_s": 0.0}, {"state_index": 0}],
    ids=["nobody-told-when", "never-ran", "lives"],
)
def test_who_teaches_nothing_is_not_kept(changes: dict[str, Any]) -> None:
    assert not noted(ended(1, **changes)).ended


def test_it_comes_back_from_disk_and_nonsense_there_is_left_out() -> None:
    history = noted(*[ended(number) for number in range(5)])
    changes = dict(history.take_changes())
    stored = {str(job_id): body for job_id, body in changes.items() if body}
    again = History()
    again.restore({**stored, "x": b"", "y": b"\x91", "z": stored[job_id(1)][:-3]})
    assert (again.ended, again.digest, again.take_changes()) == (history.ended, history.digest, [])


def test_a_disk_is_told_what_has_come_and_what_has_gone() -> None:
    history = noted(*[ended(number) for number in range(OF_USER_MOST)])
    assert len(history.take_changes()) == OF_USER_MOST
    history.note(*encode_card(ended(OF_USER_MOST)))
    told = dict(history.take_changes())
    assert told.pop(job_id(0)) is None
    assert list(told) == [job_id(OF_USER_MOST)]
    assert not history.has_changes


@dataclass
class _Swarm:
    """Planes that have found one another."""

    net: StateNetwork

    def end(self, node: NodeId, number: int, lived_s: float = 40.0) -> None:
        running = record(number, state=JobState.RUNNING, first_started_utc_s=UTC, started_utc_s=UTC)
        plane = self.net.planes[node]
        self.net.perform(node, plane.publish_card(card_of(running), self.net.now_s))
        self.net.run(lived_s)
        over = replace(running, state=JobState.ENDED, end_reason=EndReason.COMPLETED, ended_utc_s=UTC + lived_s)
        over = replace(over, attained_gpu_s=2 * lived_s)
        self.net.perform(node, plane.withdraw_card(over.job_id, self.net.now_s, over))

    def known(self, node: NodeId) -> list[JobId]:
        return [each.card.job_id for each in self.net.planes[node].history]


@pytest.fixture(name="swarm")
def made_swarm() -> _Swarm:
    net = StateNetwork(3, 5)
    net.connect()
    net.run(5.0)
    return _Swarm(net)


def test_all_agents_hear_of_the_end_with_the_final_service(swarm: _Swarm) -> None:
    swarm.end(A, 1)
    swarm.net.run(5.0, validate=True)
    for node in (A, B, C):
        (job,) = swarm.net.planes[node].history
        told = (job.card.job_id, job.has_completed, job.ended_utc_s, job.card.attained_gpu_s, job.card.program)
        assert told == (job_id(1), True, UTC + 40, 80.0, "true")
        assert swarm.net.planes[node].counters["ended_jobs"] == 1


def test_one_short_job_a_second_is_told_of(swarm: _Swarm) -> None:
    for number in range(4):
        swarm.end(A, number, lived_s=1.5 if number < 2 else 0.2)
    swarm.net.run(5.0)
    assert swarm.known(B) == [job_id(0), job_id(1)]


def test_who_comes_later_and_who_was_cut_off_learn_what_has_ended(swarm: _Swarm) -> None:
    net = swarm.net
    net.cut = {(B, A), (B, C), (A, B), (C, B)}
    net.connect()
    swarm.end(A, 1)
    swarm.end(B, 2)
    net.run(400.0)
    assert (swarm.known(A), swarm.known(B)) == ([job_id(1)], [job_id(2)]), "their last cards are forgotten by now"
    net.cut = set()
    late = NodeId("n003")
    net.add(late, 7)
    net.connect()
    net.run(6.0)
    assert len(swarm.known(late)) == 1
    net.run(400.0, validate=True)
    assert all(swarm.known(node) == [job_id(1), job_id(2)] for node in net.nodes)


def test_it_is_written_down_within_seconds_and_read_again(swarm: _Swarm) -> None:
    swarm.end(A, 1)
    swarm.net.run(15.0)
    for node in (A, B, C):
        (stored,) = [each for at, each in swarm.net.effects if at == node and isinstance(each, Persist)]
        assert (stored.room, stored.key) == (HISTORY_ROOM, job_id(1))
        plane = swarm.net.add(node, 9)
        plane.restore_learned({stored.key: stored.value or b""}, {})
        assert swarm.known(node) == [job_id(1)]
    written = len(swarm.net.effects)
    swarm.net.connect()
    swarm.net.run(200.0)
    assert len(swarm.net.effects) == written, "what comes back from disk is no news"


def test_an_agent_that_keeps_no_history_is_told_none(swarm: _Swarm) -> None:
    swarm.end(A, 1)
    stages = {}
    for history in (0, 1):
        plane = swarm.net.planes[A]
        effects = plane.step(PeerMessageReceived(B, FullStateRequest(0, b"", history)), swarm.net.now_s)
        pages = [each.message for each in effects if isinstance(each, SendPeer)]
        stages[history] = [each.stage for each in pages if isinstance(each, FullStateAnswer)]
    assert HISTORY_STAGE not in stages[0]
    assert stages[1].count(HISTORY_STAGE) == 1


def test_the_last_card_of_an_older_agent_is_read() -> None:
    """It says neither how it ended nor when."""
    _, body = encode_card(tombstone(card_of(make_record("n1"))))
    assert decode_card(body).ended_utc_s == 0

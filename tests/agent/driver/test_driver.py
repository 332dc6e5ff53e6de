import asyncio
import errno
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from swarm_agent import barrier, driver
from swarm_agent.driver import Driver
from swarm_agent.faults import Faults
from swarmsched.authority.message import ContactAnswered, LeaseGranted, LeaseRenewal, OwnerContact
from swarmsched.effects import Announce, Effect, ExtendAttempt, Persist, ReplyToClient, SendDatagram, SendPeer
from swarmsched.errors import RemoteProtocolError
from swarmsched.events import DatagramReceived, Event, LoopLagged, PeerMessageReceived, TimerFired, WorkLagged
from swarmsched.ids import JobId, NodeId
from tests.agent.testing import ControlledStore, ScriptedMachine, wait_until


def packet(payload: bytes) -> DatagramReceived:
    return DatagramReceived(("127.0.0.1", 1), payload)


def entry(key: str) -> Persist:
    return Persist("register", key, b"v")


def message(text: str) -> SendPeer:
    return SendPeer(NodeId("b"), text)


HINT = SendDatagram(("127.0.0.1", 2), b"hint")


class Rig:
    """A driver over a scripted machine; `script` maps a packet's payload to the effects of that step."""

    def __init__(self, script: dict[bytes, Sequence[Effect]] | None = None) -> None:
        self.script = script or {}
        self.machine = ScriptedMachine(self.respond)
        self.store = ControlledStore()
        self.performed: list[Effect] = []
        self.complaints: list[str] = []
        self.driver = Driver(self.machine, self.store, self.performed.append, self.complaints.append)

    def respond(self, event: Event) -> Sequence[Effect]:
        return self.script.get(event.payload, ()) if isinstance(event, DatagramReceived) else ()


@pytest.fixture
async def rig() -> AsyncIterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**script: Sequence[Effect]) -> Rig:
        rigs.append(Rig({key.encode(): effects for key, effects in script.items()}))
        rigs[-1].driver.start()
        return rigs[-1]

    yield make
    for each in rigs:
        each.store.is_open, each.store.error = True, None
        each.store.allow(10)
        await each.driver.stop()


async def test_an_answer_leaves_only_after_its_commit(rig: Callable[..., Rig]) -> None:
    r = rig(a=[entry("x"), message("yes")])
    r.driver.post(packet(b"a"))
    await wait_until(lambda: r.store.attempts == 1)
    await asyncio.sleep(0)
    assert r.performed == []

    r.store.allow()
    await wait_until(lambda: r.performed)
    assert r.performed == [message("yes")]
    assert r.store.committed == [(entry("x"),)]


async def test_effects_before_the_first_persist_and_datagrams_do_not_wait(rig: Callable[..., Rig]) -> None:
    r = rig(a=[message("first"), entry("x"), HINT, message("second")])
    r.driver.post(packet(b"a"))

    await wait_until(lambda: r.store.attempts == 1)
    assert r.performed == [HINT, message("first")]
    r.store.allow()
    await wait_until(lambda: len(r.performed) == 3)
    assert r.performed[-1] == message("second")


async def test_a_lease_does_not_wait_for_the_disk_but_a_holders_no_does(rig: Callable[..., Rig]) -> None:
    granted, over = (SendPeer(NodeId("b"), message) for message in (LeaseGranted(1), ContactAnswered(1)))
    r = rig(a=[entry("x"), over, granted])
    r.driver.post(packet(b"a"))

    await wait_until(lambda: r.store.attempts == 1)
    assert r.performed == [granted]
    r.store.allow()
    await wait_until(lambda: len(r.performed) == 2)
    assert r.performed[-1] == over


async def test_events_that_waited_make_the_node_late_and_urgent_ones_pass_them() -> None:
    now_s = 100.0
    machine, store, lags = ScriptedMachine(), ControlledStore(), []
    late = Driver(machine, store, lambda effect: None, clock=lambda: now_s)
    late.tell_lag(lags.append)
    work, lease = (PeerMessageReceived(NodeId("b"), message) for message in ("work", LeaseGranted(1)))
    late.post(work)
    now_s += 3.0
    late.post(lease)
    late.start()
    await late.settled()
    assert machine.events == [WorkLagged(3.0), lease, work]
    assert lags == [3.0]
    assert await late.stop()


async def test_contacts_and_renewals_do_not_wait_for_the_disk(rig: Callable[..., Rig]) -> None:
    """Ranks would freeze, and shepherds change, because of a disk that has nothing to do with them."""
    contact, renewal = SendPeer(NodeId("b"), OwnerContact(1, ())), SendPeer(NodeId("b"), LeaseRenewal(1))
    extension = ExtendAttempt(JobId("j"), 1, 5.0)
    it = rig(a=[entry("k"), message("answer")], b=[contact, renewal, extension])
    it.driver.post(packet(b"a"))
    it.driver.post(packet(b"b"))
    await wait_until(lambda: it.performed == [contact, renewal, extension])


async def test_a_disk_that_takes_long_is_named_before_it_refuses(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barrier, "STALLED_S", 0.01)
    it = rig(a=[entry("k")])
    it.driver.post(packet(b"a"))
    await wait_until(lambda: it.complaints)
    assert "takes longer than" in it.complaints[0]
    it.store.allow()
    await wait_until(lambda: it.complaints[-1] == "")


async def test_a_later_step_waits_behind_a_pending_commit_and_shares_the_next(rig: Callable[..., Rig]) -> None:
    """The second and third step come while the first commit runs: neither may overtake, both share one commit."""
    r = rig(a=[entry("x"), message("1")], b=[message("2"), entry("y")], c=[entry("z"), message("3")])
    r.driver.post(packet(b"a"))
    await wait_until(lambda: r.store.attempts == 1)
    r.driver.post(packet(b"b"))
    r.driver.post(packet(b"c"))
    await wait_until(lambda: len(r.machine.events) == 3)
    assert r.performed == []

    r.store.allow()
    await wait_until(lambda: r.store.attempts == 2)
    assert r.performed == [message("1"), message("2")]
    r.store.allow()
    await wait_until(lambda: len(r.performed) == 3)
    assert r.performed == [message("1"), message("2"), message("3")]
    assert r.store.committed == [(entry("x"),), (entry("y"), entry("z"))]


async def test_events_of_one_turn_share_one_commit(rig: Callable[..., Rig]) -> None:
    r = rig(a=[entry("x")], b=[entry("y")])
    r.store.is_open = True
    r.driver.post(packet(b"a"))
    r.driver.post(packet(b"b"))

    await r.driver.settled()
    assert r.store.committed == [(entry("x"), entry("y"))]


async def test_settled_waits_for_the_effects_of_what_was_posted(rig: Callable[..., Rig]) -> None:
    r = rig(a=[entry("x"), message("yes")])
    r.driver.post(packet(b"a"))
    settled = asyncio.ensure_future(r.driver.settled())
    await wait_until(lambda: r.store.attempts == 1)
    assert not settled.done()

    r.store.allow()
    await settled
    assert r.performed == [message("yes")]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), sqlite3.OperationalError("database or disk is full")]
)
async def test_a_full_disk_acknowledges_nothing_and_loses_nothing(
    rig: Callable[..., Rig], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barrier, "RETRY_S", 0.01)
    r = rig(a=[entry("x"), ReplyToClient(1, "done")], b=[entry("y"), message("late")])
    r.store.is_open, r.store.error = True, error
    r.driver.post(packet(b"a"))
    await wait_until(lambda: r.store.attempts >= 3)
    r.driver.post(packet(b"b"))
    await wait_until(lambda: len(r.machine.events) == 2)
    assert r.performed == []
    assert str(error) in r.driver.barrier.complaint

    r.store.error = None
    await wait_until(lambda: len(r.performed) == 2)
    assert r.performed == [ReplyToClient(1, "done"), message("late")]
    assert r.store.committed == [(entry("x"),), (entry("y"),)]
    assert [bool(complaint) for complaint in r.complaints] == [True, False]


async def test_peers_are_refused_once_the_backlog_of_a_full_disk_is_long(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "BACKLOG_LIMIT", 5)
    r = rig(a=[entry("x"), message("m")])
    r.store.is_open, r.store.error = True, OSError(errno.ENOSPC, "full")
    r.driver.post(packet(b"a"))
    await wait_until(lambda: r.driver.barrier.complaint)
    assert not r.driver.is_overloaded

    for _ in range(3):
        r.driver.post(packet(b"a"))
    await wait_until(lambda: r.driver.is_overloaded)


async def test_a_step_that_raises_ends_the_core_and_keeps_what_was_decided_before(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    r = rig(good=[entry("x"), message("fine")])

    def respond(event: Event) -> Sequence[Effect]:
        if event == packet(b"bad"):
            raise ValueError("a poisoned record")
        return Rig.respond(r, event)

    r.machine.respond = respond
    r.driver.post(packet(b"good"))
    with caplog.at_level(logging.ERROR):
        r.driver.post(packet(b"bad"))
        r.driver.post(packet(b"good"))
        await r.driver.failed.wait()
    r.store.allow(10)
    assert await r.driver.stop()
    assert r.performed == [message("fine")]
    assert [event for event in r.machine.events if isinstance(event, DatagramReceived)] == [
        packet(b"good"),
        packet(b"bad"),
    ]
    assert "DatagramReceived" in caplog.text
    assert "a poisoned record" in caplog.text


async def test_a_deadline_that_raises_ends_the_core_too(rig: Callable[..., Rig]) -> None:
    class Broken(ScriptedMachine):
        @property
        def next_deadline_s(self) -> float:
            raise KeyError("no such job")

    faults = Faults()
    under_test = Driver(Broken(lambda event: []), ControlledStore(), lambda effect: None, faults=faults)
    under_test.start()
    await under_test.failed.wait()
    assert (faults.counts["steps"], faults.last) == (1, "no event: KeyError: 'no such job'")
    assert await under_test.stop()


async def test_a_message_that_breaks_the_protocol_is_dropped_and_told(rig: Callable[..., Rig]) -> None:
    def respond(event: Event) -> Sequence[Effect]:
        if event == packet(b"bad"):
            raise RemoteProtocolError("names shepherd x", peer="n2")
        return [message("good")]

    performed: list[Effect] = []
    refused: list[RemoteProtocolError] = []
    machine = ScriptedMachine(respond)
    under_test = Driver(machine, ControlledStore(), performed.append, on_refused=refused.append)
    under_test.post(packet(b"bad"))
    under_test.post(packet(b"good"))
    under_test.start()
    await wait_until(lambda: performed == [message("good")])
    assert [error.peer for error in refused] == ["n2"]
    assert not under_test.failed.is_set()
    assert await under_test.stop()


async def test_what_brought_the_core_down_is_not_handed_over_again() -> None:
    """Peers repeat: without this, one message would end the core at every start."""

    def respond(event: Event) -> Sequence[Effect]:
        if event == packet(b"bad"):
            raise ValueError("again")
        return [message("good")]

    faults, performed = Faults(), list[Effect]()
    for _ in range(2):
        under_test = Driver(ScriptedMachine(respond), ControlledStore(), performed.append, faults=faults)
        under_test.post(packet(b"bad"))
        under_test.post(packet(b"good"))
        under_test.start()
        await wait_until(lambda driver=under_test: driver.failed.is_set() or bool(performed))
        assert await under_test.stop()
    assert performed == [message("good")]
    assert faults.counts == {"steps": 1, "effects": 0, "refused_events": 1}


async def test_an_effect_that_fails_does_not_stop_those_behind_it() -> None:
    performed: list[Effect] = []

    def perform(effect: Effect) -> None:
        if effect == message("bad"):
            raise RuntimeError("port broke")
        performed.append(effect)

    machine = ScriptedMachine(lambda event: [message("bad"), message("good")])
    faults = Faults()
    under_test = Driver(machine, ControlledStore(), perform, faults=faults)
    under_test.post(packet(b""))
    under_test.start()
    await wait_until(lambda: performed == [message("good")])
    assert faults.counts["effects"] == 1
    assert not under_test.failed.is_set()
    assert await under_test.stop()


async def test_the_timer_fires_at_the_machines_deadline_and_once(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.machine.deadline_s = time.monotonic() + 0.05
    r.driver.post(packet(b""))

    await wait_until(lambda: TimerFired() in r.machine.events)
    r.driver.post(packet(b""))
    await r.driver.settled()
    assert r.machine.events.count(TimerFired()) == 1


async def test_a_stalled_loop_is_reported_before_anything_else(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.machine.deadline_s = time.monotonic() + 0.01
    r.driver.post(packet(b"before"))
    await r.driver.settled()
    time.sleep(0.3)
    r.driver.post(packet(b"after"))

    await wait_until(lambda: packet(b"after") in r.machine.events)
    lags = [event for event in r.machine.events if isinstance(event, LoopLagged)]
    assert max(each.lag_s for each in lags) > 0.2
    assert r.machine.events.index(lags[0]) < r.machine.events.index(packet(b"after"))


async def test_stop_writes_what_is_pending(rig: Callable[..., Rig]) -> None:
    r = rig(a=[entry("x"), Announce("job.ended", "done")])
    r.driver.post(packet(b"a"))
    await wait_until(lambda: r.store.attempts == 1)
    stopping = asyncio.ensure_future(r.driver.stop())
    r.store.allow()

    assert await stopping
    assert r.performed == [Announce("job.ended", "done")]


async def test_stop_tells_when_the_disk_refused_to_the_end(rig: Callable[..., Rig]) -> None:
    r = rig(a=[entry("x")])
    r.store.is_open, r.store.error = True, OSError(errno.ENOSPC, "full")
    r.driver.post(packet(b"a"))
    await wait_until(lambda: r.driver.barrier.complaint)

    assert not await r.driver.stop(timeout_s=0.05)


async def test_observers_are_called_once_a_turn(rig: Callable[..., Rig]) -> None:
    r = rig()
    calls: list[int] = []
    r.driver.on_stepped(lambda: calls.append(len(r.machine.events)))
    r.driver.post(packet(b"1"))
    r.driver.post(packet(b"2"))

    await r.driver.settled()
    assert calls == [2]

import random
from typing import Any

import pytest

from swarmsched.api import JobSpec
from swarmsched.effects import Announce, Persist, SendDatagram, StartTask
from swarmsched.errors import StorageError
from swarmsched.events import LoopLagged, ResourcesRead, TasksFound, TimerFired
from swarmsched.gossip.identity import GENERATION_KEY, GENERATION_ROOM
from swarmsched.ids import JobId, NodeId
from swarmsched.resources import NodeResources, Share
from swarmsched.simulator.host import Host
from swarmsched.simulator.loop import EventLoop
from swarmsched.simulator.observer import InvariantViolated
from swarmsched.simulator.tasks import read_command
from swarmsched.task import TaskOrder


class ScriptedNode:
    """Answers each event that is a list of effects with that list; remembers all others."""

    def __init__(self, config, restored, rng) -> None:
        self.config, self.restored = config, restored
        self.seen: list[object] = []
        self.next_deadline_s = float("inf")

    def step(self, event, now_s):
        if isinstance(event, list):
            return event
        self.seen.append(event)
        return []


class Air:
    def __init__(self) -> None:
        self.sent: list[object] = []

    def send_datagram(self, source, effect) -> None:
        self.sent.append(effect)

    def send_peer(self, source, effect) -> None:
        self.sent.append(effect)

    def are_connected(self, one, other) -> bool:
        return True


def make_host(seed: int = 1) -> tuple[Any, EventLoop, Air]:
    """A host, any since its node is scripted, whose events are the effects that they lead to."""
    loop, air = EventLoop(), Air()
    host = Host(
        node_id=NodeId("a"),
        address=("10.0.0.1", 7400),
        resources=NodeResources((), 8, 1),
        seeds=(),
        loop=loop,
        rng=random.Random(seed),
        surroundings=air,
        behaviour=read_command,
        make_node=ScriptedNode,  # type: ignore[arg-type]
    )
    host.start()
    return host, loop, air


def write(key: str) -> Persist:
    return Persist("meta", key, key.encode())


def say(text: str) -> Announce:
    return Announce("test", text)


def said(host: Host) -> list[str]:
    return [announcement.text for _, announcement in host.history]


def test_an_agent_starts_with_its_disk_its_tasks_and_a_reading():
    host, loop, _ = make_host()
    loop.run_for(0.0)
    assert [type(event) for event in host.node.seen] == [TasksFound, ResourcesRead]
    loop.run_for(11.0)
    assert [type(event) for event in host.node.seen].count(ResourcesRead) == 3


def test_the_timer_fires_when_the_nodes_deadline_has_come_and_not_before():
    host, loop, _ = make_host()
    host.node.next_deadline_s = 3.0
    host.post("anything")
    loop.run_for(2.9)
    assert TimerFired() not in host.node.seen
    loop.run_for(0.2)
    assert TimerFired() in host.node.seen


def test_only_datagrams_pass_a_write_that_is_not_yet_on_disk():
    host, loop, air = make_host()
    packet = SendDatagram(("10.0.0.2", 7400), b"x")
    host.post([say("before"), write("k"), say("after"), packet])
    loop.run_for(0.0)
    assert (said(host), air.sent, host.disk) == (["before"], [packet], {})
    host.post([say("later step")])
    loop.run_for(0.0)
    assert said(host) == ["before"]
    loop.run_for(1.0)
    assert said(host) == ["before", "after", "later step"]
    assert host.disk == {"meta": {"k": b"k"}}


def test_a_crash_loses_what_was_not_on_disk_and_what_waited_behind_it():
    outcomes = set()
    for seed in range(20):
        host, loop, _ = make_host(seed)
        host.post([write("k"), say("after")])
        loop.run_for(0.0)
        host.crash()
        loop.run_for(5.0)
        assert said(host) == []
        outcomes.add("k" in host.disk.get("meta", {}))
    assert outcomes == {False, True}  # the fsync may have reached the disk without anybody being told


def test_a_restart_has_a_higher_generation_and_the_written_entries():
    host, loop, _ = make_host()
    generation = host.generation
    host.post([write("k"), write("gone"), Persist("meta", "gone", None)])
    loop.run_for(1.0)
    host.crash()
    assert not host.is_up
    host.start()
    assert host.generation == generation + 1
    assert host.node.restored.room("meta") == {"k": b"k"}


def test_a_restart_has_a_higher_generation_than_its_last_life_rose_to():
    host, loop, _ = make_host()
    risen_to = host.generation + 50
    host.post([Persist(GENERATION_ROOM, GENERATION_KEY, b"%d" % risen_to)])
    loop.run_for(1.0)
    host.crash()
    host.start()
    assert host.generation == risen_to + 1


def test_events_for_an_earlier_life_are_lost():
    host, loop, _ = make_host()
    host.post("for the first life")
    host.crash()
    host.start()
    loop.run_for(0.0)
    assert "for the first life" not in host.node.seen


def test_a_paused_node_sees_everything_afterwards_and_how_late_it_was():
    host, loop, _ = make_host()
    loop.run_for(1.0)
    host.pause()
    host.node.seen.clear()
    host.post("meanwhile")
    loop.run_for(3.0)
    assert host.node.seen == []
    host.go_on()
    loop.run_for(0.0)
    assert host.node.seen == [LoopLagged(3.0), "meanwhile"]


def test_a_deadline_that_passed_during_a_pause_is_seen_after_it():
    host, loop, _ = make_host()
    host.node.next_deadline_s = 2.0
    loop.run_for(1.0)
    host.pause()
    loop.run_for(3.0)
    assert TimerFired() not in host.node.seen
    host.go_on()
    loop.run_for(0.1)
    assert TimerFired() in host.node.seen


def test_a_pause_does_not_perform_effects_until_it_ends():
    host, loop, _ = make_host()
    host.post([write("k"), say("after")])
    loop.run_for(0.0)
    host.pause()
    loop.run_for(3.0)
    assert said(host) == []
    host.go_on()
    loop.run_for(0.1)
    assert said(host) == ["after"]


def test_an_agent_that_cannot_start_breaks_a_rule():
    host, _, _ = make_host()
    host.crash()

    def refuse(config, restored, rng):
        raise StorageError("register/schema", "unknown schema version none", "")

    host._make_node = refuse
    with pytest.raises(InvariantViolated, match=r"StorageError.*unknown schema version none") as seen:
        host.start()
    assert seen.value.invariant == "every agent starts again"


def test_an_agent_whose_core_raises_is_a_violation_and_starts_again_from_its_disk():
    host, loop, _ = make_host()
    host.post([write("x"), say("told")])
    loop.run_for(1.0)
    host.post([write("lost")])
    host.post(0)  # `step` takes no number
    host.node.step = lambda event, now_s: event if isinstance(event, list) else 1 // event
    with pytest.raises(InvariantViolated, match=r"ZeroDivisionError.* while a handled 0"):
        loop.run_for(1.0)
    assert not host.is_up
    generation = host.generation
    loop.run_for(2.0)
    assert host.is_up
    assert host.generation > generation
    assert host.node.restored.room("meta")["x"] == b"x"


def test_tasks_outlive_the_database():
    host, loop, _ = make_host()
    store = host.storage.store_id
    shares = (Share(NodeId("a"), 1),)
    order = TaskOrder(JobId("01hf7yatfm22f9ckwwzd5v6xwp"), 1, 1, NodeId("a"), JobSpec(("sleep", "99")), shares, "", 0)
    host.tasks.perform(StartTask(order, (), 1e9))
    loop.run_for(1.0)
    host.lose_database()
    assert host.storage.store_id != store
    assert [task.key for task in host.tasks.running] == [order.key]

"""Two machines of one name, or one in another's place: what the second says ends, repeats and revives nothing."""

import copy

import pytest
from msgspec.structs import replace

from swarmsched.api import JobState
from swarmsched.commands import CancelJob, RecoverJob, Refused
from swarmsched.effects import SendDatagram
from swarmsched.holder.presence import NAMESAKE_S
from swarmsched.ids import NodeId
from swarmsched.task import TaskFailure, TaskStage
from tests.swarmsched.simulator.testing import Watched


def running(watched, **spec):
    job = watched.submit(2, "sleep", "300", **spec)
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    (share,) = watched.swarm.record(job).shares
    watched.swarm.run_for(10.0)
    return job, watched.swarm.hosts[share.node], watched.swarm.hosts[watched.swarm.record(job).shepherd]


def put_another_in_its_place(watched, host):
    """Of the same name, with an empty disk and another address."""
    host.wipe()
    host.address = ("10.200.0.1", host.address[1])
    watched.swarm._by_address[host.address] = host  # machines do not move otherwise
    host.start()


def test_that_the_second_machine_leaves_is_no_loss_of_the_first():
    watched = Watched(5, 2, 109)  # what the second machine says is all that the shepherd hears for a while
    job, owner, boss = running(watched)
    namesake = watched.swarm.add_namesake(owner.node_id)
    namesake.start()
    watched.swarm.run_for(15.0)
    holding, shepherd = boss.node._holding, boss.node._placement.shepherds.jobs[job]
    assert watched.swarm.run_until(lambda: bool(shepherd.namesakes.standing(boss.now_s, NAMESAKE_S)), 120.0)
    assert watched.swarm.run_until(lambda: holding._look_s - boss.now_s < 0.15, 2.0)  # the first refutes after 0.2 s
    for effect in namesake.node._membership.leave(namesake.now_s):
        if isinstance(effect, SendDatagram):
            watched.swarm.send_datagram(namesake, effect)
    watched.swarm.run_for(2.0)
    namesake.crash()
    watched.swarm.run_for(20.0)
    assert (watched.swarm.record(job).attempt, len(owner.tasks.running)) == (1, 1)


@pytest.mark.parametrize("seed", [3, 5, 10])  # the shepherd believes in the second machine
def test_a_job_on_a_shared_name_can_be_stopped(seed):
    watched = Watched(5, 2, seed)
    job, owner, boss = running(watched)
    watched.swarm.add_namesake(owner.node_id).start()
    watched.swarm.run_for(25.0)
    assert boss.node.address_of(owner.node_id) != owner.address
    watched.swarm.ask(boss.node_id, CancelJob(job))
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.ENDED, 60.0)


def test_what_was_said_of_a_leftover_does_not_count_against_the_next_attempt_there():
    watched = Watched(5, 2, 7)
    only = (NodeId("n000"),)
    job, owner, boss = running(watched, node=NodeId("n004"), nodes=only, max_restarts=1)
    put_another_in_its_place(watched, owner)
    watched.swarm.run_for(3.0)
    watched.submit(2, "sleep", "30", node=NodeId("n004"), nodes=only)
    assert watched.swarm.loop.run_until(lambda: boss.node.record(job).state is JobState.QUEUED, 30.0)
    assert watched.swarm.loop.run_until(lambda: boss.node.record(job).state is JobState.STARTING, 60.0)
    boss.node._holding._look_s = boss.now_s  # it looks once a second
    watched.swarm.run_for(30.0)
    assert watched.state(job) is JobState.RUNNING


def test_a_job_that_runs_in_the_replaced_machine_needs_no_force():
    watched = Watched(5, 2, 7)
    job, owner, boss = running(watched, node=NodeId("n004"), nodes=(NodeId("n000"),))
    put_another_in_its_place(watched, owner)
    watched.swarm.run_for(40.0)
    assert (boss.node.record(job).attempt, boss.node.record(job).reason) == (2, "")
    assert isinstance(watched.swarm.ask(boss.node_id, RecoverJob(job)), Refused)


@pytest.mark.parametrize("seed", range(1, 9))
def test_the_agent_on_a_copy_of_the_owners_disk_cannot_say_that_the_ranks_were_lost(seed):
    """It finds the folder of a task without a shim, as after a power cut."""
    watched = Watched(5, 2, seed)
    job, owner, boss = running(watched, node=NodeId("n004"), nodes=(NodeId("n000"),))
    assert boss is not owner  # a copied shepherd speaks for its jobs, too
    clone = watched.swarm.add_namesake(owner.node_id)
    clone.storage.rooms.update(copy.deepcopy(owner.storage.rooms))
    clone.storage.store_id = owner.storage.store_id
    lost = tuple(
        replace(each, status=replace(each.status, stage=TaskStage.EXITED, failure=TaskFailure.LOST))
        for each in owner.tasks.found()
    )
    clone.tasks.found = lambda: lost
    clone.start()
    watched.swarm.run_for(60.0)
    assert (watched.swarm.record(job).attempt, len(owner.tasks.running)) == (1, 1)

"""Real nodes in virtual time: whoever dies, the job goes on, and no two of its attempts run at once."""

import pytest

from swarmsched.api import EndReason, Isolation, JobSpec, JobState
from swarmsched.authority.timing import FREEZE_AFTER_S
from swarmsched.checkpoint import Checkpoint
from swarmsched.commands import CancelJob, CommitCheckpoint, CreateTicket, JobAccepted, RecoverJob, Refused, SubmitJob
from swarmsched.gossip.record import NodeFlag
from swarmsched.ids import NodeId
from swarmsched.jobs.register import UPDATE_TIMEOUT_S
from swarmsched.simulator.tasks import RankPlan
from swarmsched.task import TaskFailure
from tests.swarmsched.simulator.testing import Watched

SEED = 7


@pytest.fixture
def watched():
    return Watched(5, 2, SEED)


def running(watched, ranks=2, seconds="300", **spec):
    job = watched.submit(ranks, "sleep", seconds, **spec)
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    return job


def host_of(watched, job):
    (node,) = {share.node for share in watched.swarm.record(job).shares}
    return watched.swarm.hosts[node]


def shepherd_of(watched, job):
    return watched.swarm.hosts[watched.swarm.record(job).shepherd]


def is_running_again(watched, job, attempt):
    record = watched.swarm.record(job)
    return record.state is JobState.RUNNING and record.attempt >= attempt


def test_another_holder_acts_within_20_s_of_its_shepherds_death_and_the_ranks_run_on(watched):
    job = running(watched, node=NodeId("n004"), nodes=(NodeId("n000"),))
    owner = host_of(watched, job)
    started = owner.tasks.start_count
    shepherd_of(watched, job).cut_power()
    assert watched.swarm.run_until(lambda: any(h.node.is_shepherd(job) for h in watched.swarm.up), 20.0)
    watched.swarm.run_for(5.0)
    record = watched.swarm.record(job)
    assert (record.epoch, record.attempt, record.state) == (2, 1, JobState.RUNNING)
    assert owner.tasks.start_count == started


def test_a_gang_that_lost_a_node_runs_again_elsewhere_within_15_s(watched):
    job = running(watched, ranks=4)
    victim = next(s.node for s in watched.swarm.record(job).shares if s.node != watched.swarm.record(job).shepherd)
    watched.swarm.run_for(15.0)
    watched.swarm.hosts[victim].cut_power()
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 15.0)
    record = watched.swarm.record(job)
    assert record.restarts == 1
    assert victim not in {share.node for share in record.shares}


@pytest.mark.parametrize("phase_s", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_machine_that_stands_still_for_6_s_costs_no_attempt(watched, phase_s, max_restarts):
    job = running(watched, ranks=4, max_restarts=max_restarts, nodes=(NodeId("n000"), NodeId("n001")))
    watched.swarm.run_for(10.0 + phase_s)
    owner = watched.swarm.hosts[NodeId("n001")]
    owner.pause()
    watched.swarm.run_for(6.0)
    owner.go_on()
    watched.swarm.run_for(30.0)
    record = watched.swarm.record(job)
    assert (record.state, record.attempt) == (JobState.RUNNING, 1)
    assert not any(task.is_frozen for host in watched.swarm.up for task in host.tasks.running)


def test_a_machine_that_stands_still_for_longer_loses_its_attempt_when_another_may_start(watched):
    job = running(watched, max_restarts=3)
    watched.swarm.run_for(10.0)
    owner = host_of(watched, job)
    began_s = watched.swarm.loop.now_s
    owner.pause()
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 15.0)
    assert FREEZE_AFTER_S - 2.0 < watched.swarm.loop.now_s - began_s < 10.0


def test_ranks_that_are_cut_off_freeze_and_are_killed_once_the_job_went_on_without_them(watched):
    job = running(watched)
    watched.swarm.run_for(10.0)
    owner = host_of(watched, job)
    others = [node for node in watched.nodes if node != owner.node_id]
    watched.swarm.network.partition([owner.node_id], others)
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 20.0)
    (frozen,) = owner.tasks.running
    assert frozen.is_frozen
    watched.swarm.network.heal()
    assert watched.swarm.run_until(lambda: not owner.tasks.running, 20.0)
    assert watched.swarm.record(job).attempt == 2


def test_a_job_that_is_to_go_on_in_isolation_is_never_started_again_before_its_owner_answers(watched):
    job = running(watched, on_isolation=Isolation.CONTINUE)
    owner = host_of(watched, job)
    others = [node for node in watched.nodes if node != owner.node_id]
    watched.swarm.network.partition([owner.node_id], others)
    watched.swarm.run_for(120.0)
    (task,) = owner.tasks.running
    assert not task.is_frozen
    assert all(not host.tasks.running for host in watched.swarm.up if host is not owner)
    watched.swarm.network.heal()
    watched.swarm.run_for(60.0)
    assert owner.tasks.running == (task,)
    assert watched.swarm.record(job).attempt == 1


def test_an_operator_may_declare_the_isolated_owner_lost(watched):
    job = running(watched, on_isolation=Isolation.CONTINUE, node=NodeId("n000"), nodes=(NodeId("n001"), NodeId("n002")))
    host_of(watched, job).cut_power()
    watched.swarm.run_for(40.0)
    assert watched.swarm.record(job).attempt == 1
    accepted = watched.swarm.ask(watched.swarm.record(job).shepherd, RecoverJob(job))
    assert isinstance(accepted, JobAccepted)
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 20.0)


def test_a_job_is_restarted_as_often_as_it_may_be_and_then_ends_as_lost(watched):
    job = running(watched, max_restarts=1)
    first = host_of(watched, job)
    first.cut_power()
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 40.0)
    first.start()
    watched.swarm.run_for(20.0)
    host_of(watched, job).cut_power()
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.ENDED, 60.0)
    assert watched.swarm.record(job).end_reason is EndReason.NODE_LOST


def test_a_stopped_job_ends_although_its_node_never_comes_back(watched):
    job = running(watched, node=NodeId("n000"), nodes=(NodeId("n004"),), time_limit_s=2.0)
    host_of(watched, job).cut_power()
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.ENDED, 40.0)
    assert watched.swarm.record(job).end_reason is EndReason.TIMEOUT


def test_a_lost_holder_is_replaced(watched):
    job = running(watched, node=NodeId("n000"), nodes=(NodeId("n000"),))
    lost = next(holder for holder in watched.swarm.record(job).holders if holder.node != "n000")
    watched.swarm.hosts[lost.node].cut_power()

    def is_replaced():
        record = watched.swarm.record(job)
        return lost not in record.holders and not record.leaving_holders

    assert watched.swarm.run_until(is_replaced, 60.0)
    assert len(watched.swarm.record(job).holders) == 3


def test_a_holder_that_lost_its_disk_is_another_holder(watched):
    job = running(watched, node=NodeId("n000"), nodes=(NodeId("n000"),))
    wiped = next(holder for holder in watched.swarm.record(job).holders if holder.node != "n000")
    host = watched.swarm.hosts[wiped.node]
    host.cut_power()
    host.wipe()
    host.start()
    assert watched.swarm.run_until(lambda: wiped not in watched.swarm.record(job).configuration.members, 60.0)


def test_a_job_without_a_majority_waits_until_an_operator_forces_it(watched):
    job = running(watched, node=NodeId("n000"), nodes=(NodeId("n000"),))
    dead = [holder.node for holder in watched.swarm.record(job).holders if holder.node != "n000"]
    refused = watched.swarm.ask(NodeId("n000"), RecoverJob(job))
    assert isinstance(refused, Refused)
    assert "needs no force" in refused.problem
    for node in dead:
        watched.swarm.hosts[node].cut_power()
    watched.swarm.run_for(FREEZE_AFTER_S + 15.0)
    epoch = watched.swarm.record(job).epoch
    assert not any(host.node.is_shepherd(job) for host in watched.swarm.up)
    accepted = watched.swarm.ask(NodeId("n000"), RecoverJob(job))
    assert isinstance(accepted, JobAccepted)
    assert accepted.record.is_forced
    assert accepted.record.epoch >= epoch + 1000
    assert watched.swarm.run_until(lambda: watched.swarm.record(job).configuration.is_quorum(live(watched)), 10.0)


def test_a_job_is_forced_once_however_often_that_is_asked_for(watched):
    job = running(watched, node=NodeId("n000"), nodes=(NodeId("n000"),))
    for holder in watched.swarm.record(job).holders:
        if holder.node != "n000":
            watched.swarm.hosts[holder.node].cut_power()
    watched.swarm.run_for(FREEZE_AFTER_S + 15.0)
    epoch = watched.swarm.record(job).epoch
    host = watched.swarm.hosts[NodeId("n000")]
    asked = [watched.swarm.begin(NodeId("n000"), RecoverJob(job)) for _ in range(3)]
    assert watched.swarm.run_until(lambda: all(request_id in host.replies for request_id in asked), 10.0)
    assert [host.replies[request_id].record.epoch for request_id in asked] == [epoch + 1000] * 3
    assert sum(event.kind == "job.taken_over" for _, event in host.history) == 1


def live(watched):
    return [host.node._config.own.holder for host in watched.swarm.up]  # its identity has no other reader


def test_a_checkpoint_counts_once_the_register_has_it_and_only_of_the_present_attempt(watched):
    job = running(watched)
    owner = host_of(watched, job)
    told = watched.swarm.ask(owner.node_id, CommitCheckpoint(job, 1, Checkpoint("step-10", 1, owner.node_id)))
    assert told.checkpoint.name == "step-10"
    assert watched.swarm.record(job).checkpoint.name == "step-10"
    watched.swarm.run_for(10.0)
    others = [node for node in watched.nodes if node != owner.node_id]
    watched.swarm.network.partition([owner.node_id], others)
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 20.0)
    (again,) = host_of(watched, job).tasks.running
    assert again.order.checkpoint.name == "step-10"
    watched.swarm.network.heal()
    late = watched.swarm.ask(owner.node_id, CommitCheckpoint(job, 1, Checkpoint("step-11", 1, owner.node_id)), 60.0)
    assert isinstance(late, Refused)
    assert watched.swarm.record(job).checkpoint.name == "step-10"


def test_the_same_ticket_at_another_holder_makes_no_second_job(watched):
    job = running(watched)
    record = watched.swarm.record(job)
    other = next(holder.node for holder in record.holders if holder.node != record.shepherd)
    again = watched.swarm.ask(other, SubmitJob(job, record.holders, record.spec))
    assert isinstance(again, JobAccepted)
    assert again.was_known
    assert again.record.job_id == job


def test_a_node_that_everybody_submits_to_hands_jobs_over(watched):
    jobs = [watched.submit(1, "sleep", "600", gpus=0, node=NodeId("n000")) for _ in range(40)]

    def most():
        shepherds = [watched.swarm.record(job).shepherd for job in jobs]
        return max(shepherds.count(node) for node in watched.nodes)

    assert watched.swarm.run_until(lambda: most() <= 24, 60.0)
    assert watched.swarm.run_until(
        lambda: all(any(h.node.is_shepherd(job) for h in watched.swarm.up) for job in jobs), 20.0
    )


def test_a_ticket_given_to_all_its_holders_at_once_makes_one_record(watched):
    """Their first records differ, in time at least; whatever follows must descend from the one that was decided."""
    ticket = watched.swarm.ask(NodeId("n000"), CreateTicket())
    submit = SubmitJob(ticket.job_id, ticket.holders, JobSpec(("sleep", "5")))
    asked = [(holder.node, watched.swarm.begin(holder.node, submit)) for holder in ticket.holders]
    watched.swarm.run_for(3.0)
    told = [watched.swarm.hosts[node].replies[request] for node, request in asked]
    made = {(reply.record.shepherd, reply.record.submitted_utc_s) for reply in told if isinstance(reply, JobAccepted)}
    assert len(made) == 1
    watched.finish([ticket.job_id], 60.0)
    record = watched.swarm.record(ticket.job_id)
    assert {record.submitted_utc_s} == {submitted_utc_s for _, submitted_utc_s in made}
    assert record.attempt == 1


def ended_by(watched, job, limit_s):
    assert watched.swarm.run_until(lambda: watched.swarm.record(job).is_ended, limit_s)
    return watched.swarm.record(job)


def test_a_shepherd_that_lost_its_disk_does_not_keep_others_from_its_jobs(watched):
    """It comes back at once, knows nothing of the job, and holds leases for the jobs that it is given next."""
    job = running(watched, node=NodeId("n004"), nodes=(NodeId("n000"),))
    shepherd = shepherd_of(watched, job)
    shepherd.cut_power()
    shepherd.wipe()
    shepherd.start()
    watched.swarm.run_for(3.0)
    for _ in range(6):
        watched.submit(2, "sleep", "300", node=shepherd.node_id)
    assert watched.swarm.run_until(lambda: any(h.node.is_shepherd(job) for h in watched.swarm.up), 20.0)
    assert watched.swarm.record(job).attempt == 1


def test_a_result_is_not_given_to_a_shepherd_that_lost_its_disk(watched):
    job = watched.submit(2, "sleep", "10", node=NodeId("n004"), nodes=(NodeId("n000"),))
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    watched.swarm.run_for(5.0)
    shepherd = shepherd_of(watched, job)
    shepherd.cut_power()
    shepherd.wipe()
    shepherd.start()
    record = ended_by(watched, job, 60.0)
    assert (record.end_reason, record.attempt) == (EndReason.COMPLETED, 1)
    watched.assert_settled()


def test_a_result_that_nobody_waits_for_is_forgotten_although_its_shepherd_is_gone_for_ever(watched):
    job = watched.submit(
        2, "sleep", "5", node=NodeId("n004"), nodes=(NodeId("n000"),), max_restarts=0, on_isolation=Isolation.PAUSE
    )
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    owner = host_of(watched, job)
    owner.crash()
    shepherd_of(watched, job).cut_power()
    assert ended_by(watched, job, 60.0).end_reason is EndReason.NODE_LOST
    owner.start()
    watched.assert_settled()


def test_an_end_that_was_not_decided_is_decided_once_a_majority_is_there_again():
    """The shepherd alone has the end on its disk, and its lease for another job keeps the other holder waiting."""
    watched = Watched(3, 2, SEED)
    me = NodeId("n000")
    shepherd, other = watched.swarm.hosts[me], watched.swarm.hosts[NodeId("n002")]
    job = watched.submit(1, "sleep", "2", node=me, nodes=(me,))
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    watched.swarm.hosts[NodeId("n001")].cut_power()
    other.crash()
    assert watched.swarm.run_until(lambda: not shepherd.node.is_shepherd(job), 20.0)
    watched.swarm.run_for(UPDATE_TIMEOUT_S)
    other.start()
    watched.submit(1, "sleep", "300", node=me)
    assert not other.node.record(job).is_ended
    assert watched.swarm.run_until(lambda: other.node.record(job).is_ended, 20.0)


def test_what_a_second_machine_of_the_owners_name_does_not_know_is_not_lost(watched):
    job = running(watched)
    owner = host_of(watched, job)
    watched.swarm.run_for(10.0)
    watched.swarm.add_namesake(owner.node_id).start()
    watched.swarm.run_for(60.0)
    assert (watched.swarm.record(job).attempt, len(owner.tasks.running)) == (1, 1)


def test_a_job_goes_on_elsewhere_once_only_a_second_machine_of_the_owners_name_is_left(watched):
    job = running(watched)
    owner = host_of(watched, job)
    watched.swarm.run_for(10.0)
    namesake = watched.swarm.add_namesake(owner.node_id)
    namesake.start()
    watched.swarm.run_for(20.0)
    owner.cut_power()
    watched.swarm.run_for(10.0)
    namesake.crash()
    namesake.start()
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 60.0)
    assert owner.node_id not in {share.node for share in watched.swarm.record(job).shares}


def test_a_node_that_nobody_has_heard_of_since_the_agents_restarted_is_lost(watched):
    job = running(watched)
    owner = host_of(watched, job)
    watched.swarm.run_for(10.0)
    owner.cut_power()
    others = [host for host in watched.swarm.hosts.values() if host is not owner]
    for host in others:
        host.crash()
    for host in others:
        host.start()
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 60.0)
    assert owner.node_id not in {share.node for share in watched.swarm.record(job).shares}


def test_service_that_a_gang_has_had_counts_although_its_shepherd_died_with_some_of_its_ranks(watched):
    three = tuple(map(NodeId, ("n000", "n001", "n002")))
    job = running(watched, ranks=4, node=three[0], nodes=three)
    assert three[0] in {share.node for share in watched.swarm.record(job).shares}
    watched.swarm.run_for(100.0)
    shepherd_of(watched, job).cut_power()
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 16.0)
    assert watched.swarm.record(job).attained_gpu_s > 4 * 100.0


def test_a_database_that_is_lost_beside_living_ranks_frees_no_gpu_before_they_have_ended():
    """Its file was moved aside: what the new, empty one does not know still runs."""
    watched = Watched(5, 1, SEED, behaviour=lambda order, rank: RankPlan(200.0, obeys_sigterm=False))
    job = running(watched, ranks=1)
    host = next(each for each in watched.swarm.up if each.tasks.running)
    host.crash()
    host.storage.wipe()
    watched.checks.disk_wiped(host)
    host.start()
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 30.0)


@pytest.mark.parametrize(("nodes", "isolation"), [(1, Isolation.PAUSE), (3, Isolation.CONTINUE), (3, Isolation.PAUSE)])
def test_ranks_whose_files_are_lost_in_a_power_cut_run_again(nodes, isolation):
    """The order had reached the disk, and what the shim had written had not."""
    watched = Watched(nodes, 1, SEED)
    job = running(watched, ranks=1, on_isolation=isolation)
    host = host_of(watched, job)
    host.cut_power()
    host.tasks.wipe()
    watched.swarm.run_for(2.0)
    host.start()
    assert watched.swarm.run_until(lambda: is_running_again(watched, job, 2), 60.0)


def test_an_owner_that_restarts_finds_the_holders_although_all_that_its_order_names_are_gone():
    watched = Watched(9, 1, SEED)
    job = job_on_a_node_that_holds_nothing_of_it(watched)
    for holder in watched.swarm.record(job).holders:
        watched.swarm.hosts[holder.node].cut_power()
        watched.swarm.hosts[holder.node].is_lost = True
        watched.swarm.run_for(120.0)
    host = host_of(watched, job)
    host.crash()
    host.start()
    watched.swarm.run_for(2 * FREEZE_AFTER_S)
    assert [task.is_frozen for task in host.tasks.running] == [False]


def job_on_a_node_that_holds_nothing_of_it(watched):
    while True:
        job = running(watched, ranks=1, seconds="3000")
        if host_of(watched, job).node_id not in {holder.node for holder in watched.swarm.record(job).holders}:
            return job
        watched.swarm.ask(shepherd_of(watched, job).node_id, CancelJob(job, 0.0))


def test_a_full_disk_freezes_no_ranks_and_its_node_says_so_and_gets_no_more_work():
    watched = Watched(5, 2, SEED)
    job = job_on_a_node_that_holds_nothing_of_it(watched)
    host = host_of(watched, job)
    host.storage.full_until_s = watched.swarm.loop.now_s + 60.0
    pinned = watched.submit(1, "sleep", "5", node=shepherd_of(watched, job).node_id, nodes=(host.node_id,))
    changes = []

    def look():
        changes.extend(task.is_frozen for task in host.tasks.running)
        return False

    watched.swarm.run_until(look, 40.0)
    assert not any(changes)
    assert all(says_that_its_disk_stalls(other, host) for other in watched.swarm.up if other is not host)
    watched.finish([pinned], 60.0)
    assert watched.swarm.record(job).restarts == 0


def test_a_holder_whose_disk_is_full_is_replaced_and_a_shepherd_succeeded():
    watched = Watched(5, 2, SEED)
    job = job_on_a_node_that_holds_nothing_of_it(watched)
    host = shepherd_of(watched, job)
    host.storage.full_until_s = watched.swarm.loop.now_s + 300.0
    host.command(1, CreateTicket())
    watched.submit(1, "sleep", "1", node=host_of(watched, job).node_id, nodes=(host.node_id,))
    others = [each for each in watched.swarm.up if each is not host]

    def is_replaced():
        record = next((each.node.record(job) for each in others if each.node.is_shepherd(job)), None)
        return record is not None and host.node_id not in {holder.node for holder in record.configuration.members}

    assert watched.swarm.run_until(is_replaced, 90.0)


def test_a_job_that_no_node_but_one_with_a_full_disk_can_start_waits_for_that_and_runs():
    watched = Watched(3, 2, SEED)
    ailing, well, full = (watched.swarm.hosts[node] for node in watched.nodes)
    ailing.tasks.ailment = TaskFailure.SYNC
    full.storage.full_until_s = watched.swarm.loop.now_s + 60.0
    full.command(1, CreateTicket())
    watched.submit(1, "sleep", "1", node=well.node_id, nodes=(full.node_id,))
    assert watched.swarm.run_until(lambda: says_that_its_disk_stalls(well, full), 40.0)
    job = watched.submit(3, "sleep", "5", node=well.node_id, tree="0" * 64)
    assert watched.swarm.run_until(lambda: watched.swarm.record(job).relaunches > 0, 40.0)
    assert says_that_its_disk_stalls(well, full)
    watched.finish([job], 120.0)
    record = watched.swarm.record(job)
    assert (record.end_reason, {share.node for share in record.shares}) == (
        EndReason.COMPLETED,
        {well.node_id, full.node_id},
    )


def says_that_its_disk_stalls(viewer, host):
    records = {status.record.node_id: status.record for status in viewer.node.node_records(viewer.now_s)}
    return records[host.node_id].has(NodeFlag.DISK_STALLED)


def test_every_agent_hears_of_new_holders_although_the_epoch_stays(watched):
    """A client that finds no shepherd asks the holders that are told of, and those of before may be gone."""
    job = job_on_a_node_that_holds_nothing_of_it(watched)
    record = watched.swarm.record(job)
    lost = next(each.node for each in record.holders if each.node != record.shepherd)
    watched.swarm.hosts[lost].cut_power()

    def all_know():
        now = watched.swarm.record(job)
        told = [set(location.holders) for host in watched.swarm.up if (location := host.node.locations().get(job))]
        is_told = len(told) == len(watched.swarm.up)
        return (
            is_told
            and lost not in now.configuration.nodes
            and all(names == set(now.configuration.nodes) for names in told)
        )

    assert watched.swarm.run_until(all_know, 90.0)
    assert watched.swarm.record(job).epoch == record.epoch

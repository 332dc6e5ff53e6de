"""Whole swarms of real nodes in virtual time: they find one another, place gangs, and never break a safety rule."""

import pytest

from swarmsched.api import EndReason, JobSpec, JobState
from swarmsched.commands import (
    CancelJob,
    CreateTicket,
    JobAccepted,
    Refused,
    SetSwarmSetting,
    SettingStored,
    SubmitJob,
    TicketIssued,
)
from swarmsched.errors import JobError, UnknownJob
from swarmsched.ids import NodeId, make_job_id
from swarmsched.node.node import Node
from swarmsched.resources import Demand
from swarmsched.simulator.checks.violation import Violation
from swarmsched.simulator.network import NetworkFaults
from swarmsched.simulator.swarm import SimulatedSwarm
from swarmsched.simulator.tasks import RankPlan
from swarmsched.view import PolicySetting
from tests.swarmsched.simulator.testing import Watched


@pytest.fixture(scope="module")
def crowd() -> Watched:
    """Fifty agents with four GPUs each, in one process."""
    return Watched(50, 4, seed=11, faults=NetworkFaults(delay_median_s=0.001))


def test_fifty_nodes_find_one_another(crowd):
    assert crowd.swarm.loop.now_s < 15.0
    assert len(crowd.swarm.alive_seen_by(NodeId("n049"))) == 50


def test_gangs_of_all_sizes_submitted_anywhere_run_to_the_end_all_or_nothing(crowd):
    jobs = [crowd.submit(ranks, "sleep", "2") for ranks in (1, 2, 3, 5, 8, 13, 21, 40, 100, 150)]
    crowd.finish(jobs, 60.0)
    records = [crowd.swarm.record(job) for job in jobs]
    assert {record.end_reason for record in records} == {EndReason.COMPLETED}
    assert all(sum(share.ranks for share in record.shares) == record.spec.ranks for record in records)
    assert crowd.gangs.widest_gang >= 25
    assert crowd.bookings.busiest_count == 4
    crowd.assert_settled()


def test_the_same_seed_gives_the_same_history():
    def history(seed: int) -> list[tuple[float, str, str]]:
        watched = Watched(4, 2, seed, NetworkFaults(loss_ratio=0.1, duplicate_ratio=0.1))
        jobs = [watched.submit(ranks, "sleep", "1") for ranks in (1, 4, 6)]
        watched.finish(jobs, 60.0)
        return [(at_s, one.kind, one.text) for host in watched.swarm.hosts.values() for at_s, one in host.history]

    assert history(5) == history(5)
    assert history(5) != history(6)


def test_a_node_without_peers_runs_jobs():
    watched = Watched(1, 2, seed=1)
    job = watched.submit(2, "sleep", "1")
    watched.finish([job], 10.0)
    watched.assert_settled()


def test_the_first_failing_ranks_code_is_the_jobs_code_and_the_gang_goes_with_it():
    plans = {3: RankPlan(1.0, 7)}
    watched = Watched(3, 2, seed=2, behaviour=lambda order, rank: plans.get(rank, RankPlan(500.0)))
    job = watched.submit(6, "train")
    watched.finish([job], 30.0)
    record = watched.swarm.record(job)
    assert (record.end_reason, record.exit_code, record.failed_rank) == (EndReason.FAILED, 7, 3)
    watched.assert_settled()


def test_a_job_that_must_wait_starts_when_its_gpus_come_free():
    watched = Watched(3, 2, seed=3)
    first = watched.submit(6, "sleep", "5", node=watched.nodes[0])
    watched.swarm.run_for(1.0)
    second = watched.submit(4, "sleep", "1", node=watched.nodes[1])
    watched.swarm.run_for(2.0)
    assert watched.state(first) is JobState.RUNNING
    assert watched.state(second) is JobState.QUEUED
    watched.finish([first, second], 20.0)
    gap_s = watched.swarm.record(second).started_utc_s - watched.swarm.record(first).ended_utc_s
    assert 0.0 <= gap_s < 3.0


def test_more_than_the_swarm_has_is_refused_at_submit():
    watched = Watched(3, 2, seed=4)
    watched.swarm.run_for(6.0)  # before, the swarm's totals are not trusted
    with pytest.raises(JobError, match="impossible"):
        watched.submit(7, "true")


def test_a_ticket_used_at_two_agents_makes_one_job():
    watched = Watched(3, 2, seed=5)
    ticket = watched.swarm.ask(watched.nodes[0], CreateTicket())
    assert isinstance(ticket, TicketIssued)
    submit = SubmitJob(ticket.job_id, ticket.holders, JobSpec(command=("sleep", "1"), demand=Demand(gpus=1)))
    replies = [watched.swarm.ask(node, submit) for node in (watched.nodes[0], watched.nodes[0], watched.nodes[1])]
    assert [isinstance(reply, JobAccepted) and reply.was_known for reply in replies[:2]] == [False, True]
    watched.finish([ticket.job_id], 20.0)
    assert sum(host.tasks.start_count for host in watched.swarm.hosts.values()) == 1


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.01, 0.06, 2.0])
def test_a_cancelled_job_ends_whatever_it_was_doing(after_s):
    watched = Watched(3, 2, seed=6)
    node = watched.nodes[0]
    job = watched.submit(5, "sleep", "500", node=node)
    watched.swarm.run_for(after_s)
    assert isinstance(watched.swarm.ask(node, CancelJob(job)), JobAccepted)
    watched.finish([job], 15.0)
    assert watched.swarm.record(job).end_reason is EndReason.CANCELLED
    watched.assert_settled()


def test_a_time_limit_ends_the_job():
    watched = Watched(2, 2, seed=7)
    job = watched.submit(4, "sleep", "500", time_limit_s=3.0)
    watched.finish([job], 20.0)
    assert watched.swarm.record(job).end_reason is EndReason.TIMEOUT
    watched.assert_settled()


def test_a_policy_set_at_one_agent_reaches_all():
    watched = Watched(5, 1, seed=8)
    assert isinstance(watched.swarm.ask(watched.nodes[2], SetSwarmSetting(PolicySetting("las"))), SettingStored)
    names = [host.node for host in watched.swarm.up]
    assert watched.swarm.run_until(lambda: all(node.setting.policy == "las" for node in names), 10.0)
    refused = watched.swarm.ask(watched.nodes[0], SetSwarmSetting(PolicySetting("lass")))
    assert isinstance(refused, Refused)
    job = watched.submit(5, "sleep", "1")
    watched.finish([job], 20.0)


def test_the_agent_of_a_running_task_restarts_and_finds_it_again():
    watched = Watched(3, 2, seed=9)
    shepherd = watched.nodes[0]
    job = watched.submit(6, "sleep", "10", node=shepherd)
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    owner = watched.swarm.hosts[watched.nodes[2]]
    owner.crash()
    watched.swarm.run_for(2.0)
    owner.start()
    watched.finish([job], 40.0)
    record = watched.swarm.record(job)
    assert (record.end_reason, record.attempt) == (EndReason.COMPLETED, 1)
    assert owner.tasks.start_count == 1
    watched.assert_settled()


@pytest.mark.parametrize("exit_while_down", [False, True])
def test_an_exit_is_heard_although_the_owner_restarted_in_the_meantime(exit_while_down):
    """The owner's count of revisions begins again; the news must still be taken for news."""
    watched = Watched(2, 1, seed=17)
    job = watched.submit(2, "sleep", "5", node=watched.nodes[0])
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    owner = watched.swarm.hosts[watched.nodes[1]]
    owner.crash()
    watched.swarm.run_for(6.0 if exit_while_down else 1.0)
    owner.start()
    watched.finish([job], 30.0)
    assert watched.swarm.record(job).end_reason is EndReason.COMPLETED
    watched.assert_settled()


def test_an_exit_is_heard_although_the_owner_died_before_its_report_was_acknowledged():
    """The lease has ended on disk, the report is lost: the restarted owner must still know whom to tell."""
    watched = Watched(2, 1, seed=18)
    shepherd, owner = (watched.swarm.hosts[node] for node in watched.nodes)
    job = watched.submit(2, "sleep", "5", node=shepherd.node_id)
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    watched.swarm.network.cut(owner.node_id, shepherd.node_id)
    watched.swarm.run_for(6.0)
    owner.crash()
    watched.swarm.network.heal()
    owner.start()
    watched.finish([job], 60.0)
    watched.assert_settled()


def test_the_shepherd_restarts_under_a_higher_epoch_and_the_job_runs_on():
    watched = Watched(3, 2, seed=10)
    shepherd = watched.nodes[0]
    job = watched.submit(6, "sleep", "10", node=shepherd)
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    watched.swarm.hosts[shepherd].crash()
    watched.swarm.run_for(3.0)
    watched.swarm.hosts[shepherd].start()
    watched.finish([job], 40.0)
    record = watched.swarm.record(job)
    assert (record.end_reason, record.attempt, record.epoch) == (EndReason.COMPLETED, 1, 2)
    assert sum(host.tasks.start_count for host in watched.swarm.hosts.values()) == 3
    watched.assert_settled()


@pytest.mark.parametrize("crash_after_s", [0.0005, 0.001, 0.002, 0.004, 0.008, 0.03, 0.06, 0.08])
def test_a_shepherd_that_dies_in_the_middle_of_placement_finishes_it_when_it_is_back(crash_after_s):
    watched = Watched(3, 2, seed=12)
    shepherd = watched.nodes[1]
    job = watched.submit(6, "sleep", "2", node=shepherd)
    watched.swarm.run_for(crash_after_s)
    watched.swarm.hosts[shepherd].crash()
    watched.swarm.run_for(1.0)
    watched.swarm.hosts[shepherd].start()
    watched.finish([job], 60.0)
    assert watched.swarm.record(job).end_reason is EndReason.COMPLETED
    watched.assert_settled()


def test_an_agent_that_was_stopped_for_half_a_minute_goes_on_with_its_jobs():
    watched = Watched(4, 2, seed=13)
    paused = watched.swarm.hosts[watched.nodes[0]]
    job = watched.submit(8, "sleep", "10", node=watched.nodes[0])
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 10.0)
    paused.pause()
    watched.swarm.run_for(30.0)
    paused.go_on()
    watched.finish([job], 30.0)
    assert watched.swarm.run_until(watched.swarm.is_converged, 30.0)
    watched.assert_settled()


def test_a_split_swarm_becomes_one_again_and_keeps_no_wrong_booking():
    watched = Watched(6, 2, seed=14)
    left, right = watched.nodes[:3], watched.nodes[3:]
    watched.swarm.network.partition(left, right)
    watched.swarm.run_for(30.0)
    assert watched.swarm.alive_seen_by(left[0]) == left
    jobs = [watched.submit(4, "sleep", "1", node=node) for node in (left[0], right[0])]
    watched.finish(jobs, 30.0)
    watched.swarm.network.heal()
    assert watched.swarm.run_until(watched.swarm.is_converged, 30.0)
    whole = watched.submit(12, "sleep", "1")
    watched.finish([whole], 30.0)
    watched.assert_settled()


@pytest.mark.parametrize("seed", range(20, 28))
def test_under_faults_every_gang_still_ends_and_no_rule_is_broken(seed):
    faults = NetworkFaults(loss_ratio=0.1, duplicate_ratio=0.2, delay_median_s=0.003, delay_sigma=1.0)
    watched = Watched(5, 2, seed, faults)
    swarm, rng = watched.swarm, watched.swarm.rng
    jobs = [watched.submit(rng.choice([1, 2, 3, 5, 8]), "sleep", str(rng.randint(1, 4))) for _ in range(8)]
    for _ in range(4):
        victim = swarm.hosts[rng.choice(watched.nodes)]
        swarm.run_for(rng.uniform(0.1, 3.0))
        victim.crash()
        swarm.run_for(rng.uniform(0.05, 3.0))
        victim.start()
    swarm.network.faults = NetworkFaults()
    assert swarm.run_until(swarm.is_converged, 30.0)
    watched.finish(jobs, 120.0)
    assert {swarm.record(job).end_reason for job in jobs} == {EndReason.COMPLETED}
    watched.assert_settled()


# --- negative controls: a rule broken on purpose must be seen


def test_the_checker_sees_an_owner_that_forgets_what_it_booked():
    def forgetful(config, restored, rng) -> Node:
        node = Node(config, restored, rng)
        ledger = node.ledger
        ledger._free_devices = lambda taken: list(ledger._resources.gpus)
        return node

    def run() -> None:
        watched = Watched(2, 2, seed=15, make_node=forgetful)
        watched.finish([watched.submit(4, "sleep", "5") for _ in range(3)], 30.0)

    with pytest.raises(AssertionError, match=r"is booked for|starts on GPUs of|booked twice"):
        run()


def test_the_checker_sees_a_launch_before_all_have_committed(monkeypatch):
    from swarmsched.effects import SendPeer
    from swarmsched.ledger.message import CommitRequest, LaunchRequest

    honest_step = Node.step

    def hasty_step(self, event, now_s):
        """Every commit is followed at once by a launch of the same owner."""
        effects = []
        for effect in honest_step(self, event, now_s):
            effects.append(effect)
            if isinstance(effect, SendPeer) and isinstance(effect.message, CommitRequest):
                commit = effect.message
                launch = LaunchRequest(
                    commit.job_id, commit.epoch, commit.attempt, commit.command_id + 1000, commit.shepherd
                )
                effects.append(SendPeer(effect.recipient, launch))
        return effects

    monkeypatch.setattr(Node, "step", hasty_step)

    def try_many():
        for seed in range(32):  # owners ask the holders before they start, and mostly all have committed by then
            watched = Watched(4, 2, seed, faults=NetworkFaults(delay_median_s=0.01, delay_sigma=2.0))
            watched.finish([watched.submit(8, "sleep", "1")], 30.0)

    with pytest.raises(Violation, match="with commits"):
        try_many()


def test_an_unknown_job_is_said_to_be_unknown():
    swarm = SimulatedSwarm(1, 1, seed=1)
    swarm.start()
    with pytest.raises(UnknownJob):
        swarm.record(make_job_id(1.0, swarm.rng))


def test_a_second_machine_of_one_name_puts_it_in_conflict_until_one_is_left():
    watched = Watched(3, 2, 21)
    swarm, name = watched.swarm, NodeId("n001")
    namesake = swarm.add_namesake(name)
    namesake.start()
    assert swarm.run_until(lambda: statuses(swarm, name) == {"conflict"}, 10.0)
    running = watched.submit(4, "sleep", "2", node=NodeId("n000"))
    watched.finish([running], 15.0)
    assert name not in {share.node for share in swarm.record(running).shares}
    namesake.cut_power()
    swarm.hosts[name].crash()
    swarm.hosts[name].start()
    assert swarm.run_until(lambda: statuses(swarm, name) == {"alive"}, 15.0)
    watched.finish([watched.submit(6, "sleep", "1")], 20.0)
    watched.assert_settled()


def statuses(swarm, name):
    views = [member for host in swarm.up for member in host.node.members(host.now_s)]
    return {member.status.value for member in views if member.node_id == name}

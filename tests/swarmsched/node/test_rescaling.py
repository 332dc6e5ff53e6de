"""Real nodes in virtual time: jobs that take several sizes get others while they run, as far as the swarm allows."""

import pytest

from swarmsched.api import EndReason, JobState
from swarmsched.commands import JobAccepted, ScaleJob, SetSwarmSetting, SettingStored
from swarmsched.errors import ConfigError
from swarmsched.ids import NodeId
from swarmsched.policies.calm import JUST_S
from swarmsched.resources import world_size
from swarmsched.simulator.workload import behave
from swarmsched.view import Elasticity, PolicySetting
from tests.swarmsched.simulator.testing import Watched

N0, N1 = NodeId("n000"), NodeId("n001")


def swarm(elasticity, policy="swarm", parameters=None):
    """Three machines of two GPUs; ranks commit a checkpoint each second, and report how fast they are."""
    watched = Watched(3, 2, 5, behaviour=behave)
    setting = PolicySetting(policy, {"pause_s": 1.0} if parameters is None else parameters, elasticity)
    assert isinstance(watched.swarm.ask(N0, SetSwarmSetting(setting)), SettingStored)
    watched.swarm.run_for(5.0)
    return watched


def test_who_changes_how_far_the_swarm_may_go_leaves_an_event_that_says_so():
    (told,) = [event for event in events(swarm(Elasticity.OFF), "setting.changed") if event.node == N0]
    assert told.text == "policy swarm (pause_s=1), elasticity off, version 1, set on n000"
    assert told.fields == {"policy": "swarm", "elasticity": "off", "version": 1, "pause_s": 1.0}


def ranks(watched, job):
    return world_size(watched.swarm.record(job).shares)


def running(watched, seconds, **spec):
    job = watched.submit(1, "train", seconds, "1.0", **spec)
    assert watched.swarm.run_until(lambda: watched.state(job) is JobState.RUNNING, 20.0)
    return job


def events(watched, kind):
    return [event for host in watched.swarm.up for _, event in host.history if event.kind == kind]


def beside(watched, seconds, **spec):
    """A job that leaves one GPU to the next one, and that one, which would take up to six."""
    other = watched.submit(5, "train", "12", "1.0", node=N1)
    assert watched.swarm.run_until(lambda: watched.state(other) is JobState.RUNNING, 20.0)
    job = running(watched, seconds, ranks_most=6, **spec)
    assert ranks(watched, job) == 1
    watched.finish([other], 60.0)
    return job


def test_a_job_grows_into_what_comes_free_and_gives_it_back_to_who_waits():
    watched = swarm(Elasticity.ON)
    job = beside(watched, "300")
    assert watched.swarm.run_until(lambda: ranks(watched, job) > 3, 40.0)
    late = watched.submit(3, "train", "20", "1.0", node=N1)
    assert watched.swarm.run_until(lambda: watched.state(late) is JobState.RUNNING, JUST_S + 15.0)
    record = watched.swarm.record(job)
    assert record.rescales >= 2
    assert (record.restarts, record.preemptions) == (0, 0)
    assert record.checkpoint is not None
    watched.finish([job, late], 900.0)
    assert watched.swarm.record(job).end_reason is EndReason.COMPLETED
    assert len(events(watched, "job.rescaled")) == watched.swarm.record(job).rescales


def test_a_job_of_one_size_that_may_have_others_from_now_on_grows_although_nothing_else_happens():
    watched = swarm(Elasticity.ON)
    job = running(watched, "300")
    watched.swarm.run_for(30.0)
    assert ranks(watched, job) == 1
    scaled = watched.swarm.ask(watched.swarm.record(job).shepherd, ScaleJob(job, 1, 4))
    assert isinstance(scaled, JobAccepted)
    assert watched.swarm.run_until(lambda: ranks(watched, job) == 4, 30.0)


def test_under_optimus_who_came_first_gives_gpus_to_who_comes_later():
    watched = swarm(Elasticity.ON, "optimus", {})
    first = running(watched, "600", ranks_most=6)
    assert watched.swarm.run_until(lambda: ranks(watched, first) == 6, 60.0)
    late = watched.submit(2, "train", "20", "1.0")
    assert watched.swarm.run_until(lambda: watched.state(late) is JobState.RUNNING, 40.0)
    assert events(watched, "plan.ignored") == []


def test_under_elastic_batch_a_job_grows_into_what_another_leaves():
    watched = swarm(Elasticity.ON, "elastic-batch", {})
    long, short = (watched.submit(gpus, "train", time_s, "1.0", node=N1) for gpus, time_s in ((4, "900"), (1, "20")))
    assert watched.swarm.run_until(lambda: watched.state(short) is JobState.RUNNING, 20.0)
    job = running(watched, "900", ranks_most=6)
    assert (watched.state(long), ranks(watched, job)) == (JobState.RUNNING, 1)
    watched.finish([short], 120.0)
    assert watched.swarm.run_until(lambda: ranks(watched, job) == 2, 60.0)


def test_a_plan_that_failed_is_made_again_soon():
    watched = Watched(1, 1, 5, behaviour=behave)
    watched.swarm.ask(N0, SetSwarmSetting(PolicySetting("tiresias")))
    first, second = watched.submit(1, "train", "20", "0"), watched.submit(1, "train", "20", "0")
    assert watched.swarm.run_until(lambda: watched.state(first) is JobState.RUNNING, 20.0)
    host = watched.swarm.hosts[N0]
    plan, failed = host.make_plan, []

    def fails_once(setting, view, now_s):
        if any(job.job_id == first for job in view.jobs) or failed:
            return plan(setting, view, now_s)
        failed.append(now_s)
        raise ConfigError("planner", "the process died", "")

    host.make_plan = fails_once
    watched.finish([first], 60.0)
    assert watched.swarm.run_until(lambda: watched.state(second) is JobState.RUNNING, 6.0)
    assert failed


def test_what_it_measured_with_other_sizes_is_told_after_its_shepherd_has_died():
    watched = swarm(Elasticity.ON)
    job = beside(watched, "300", node=N1)
    assert watched.swarm.run_until(lambda: len(points(watched, job)) > 1, 60.0)
    first = watched.swarm.record(job).shepherd
    watched.swarm.hosts[first].cut_power()
    assert watched.swarm.run_until(lambda: watched.swarm.record(job).shepherd != first, 60.0)
    watched.swarm.run_for(5.0)
    assert len(points(watched, job)) > 1


def points(watched, job):
    """Measured configurations, as another machine knows them from the job's card."""
    views = [view for host in watched.swarm.up for view in host.node.foreign_jobs() if view.job_id == job]
    return max((view.card.estimate.points for view in views if view.card.estimate), key=len, default=())


def test_its_card_tells_what_a_change_costs_until_its_ranks_train_again():
    watched = swarm(Elasticity.ON)
    job = beside(watched, "300", node=N1)
    assert watched.swarm.run_until(lambda: len(points(watched, job)) > 1, 60.0)
    cards = [view.card for host in watched.swarm.up for view in host.node.foreign_jobs() if view.job_id == job]
    told = max(cards, key=lambda card: card.stamp)
    assert 1.0 <= told.estimate.warmup_s < 3.0, "they report with their first checkpoint, after a second"
    assert told.pause_s == watched.swarm.record(job).pause_s + told.estimate.warmup_s


@pytest.mark.parametrize(("elasticity", "advice"), [(Elasticity.ADVISE, True), (Elasticity.OFF, False)])
def test_a_running_job_keeps_its_size_where_that_is_the_swarms_wish(elasticity, advice):
    watched = swarm(elasticity)
    job = beside(watched, "60")
    watched.swarm.run_for(30.0)
    assert (ranks(watched, job), watched.swarm.record(job).rescales) == (1, 0)
    assert bool(events(watched, "plan.advised")) is advice


def test_a_job_that_names_one_size_is_never_touched():
    watched = swarm(Elasticity.ON)
    job = running(watched, "60")
    watched.swarm.run_for(40.0)
    assert (ranks(watched, job), watched.swarm.record(job).rescales) == (1, 0)


def test_the_next_job_of_its_kind_begins_with_what_it_measured_wherever_it_is_submitted():
    watched = swarm(Elasticity.ON)
    first = running(watched, "60", ranks_most=6, name="digits")
    assert watched.swarm.run_until(lambda: points(watched, first), 40.0)
    known = points(watched, first)
    watched.finish([first], 120.0)
    second = running(watched, "60", ranks_most=6, name="digits", node=N1)
    shepherd = watched.swarm.hosts[watched.swarm.record(second).shepherd].node
    assert shepherd.speed_question(second).estimate.points == known
    assert watched.swarm.run_until(lambda: not shepherd.speed_question(second).estimate.is_prior, 40.0)
    own = watched.swarm.hosts[N1].resources.gpus[0]
    assert shepherd.speed_question(second).estimate.gpu == own.model, "the class on which it was measured"

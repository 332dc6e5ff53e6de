"""How users submit the jobs of a replay decides what planners see of them, and what may be done to them."""

from collections.abc import Iterator, Sequence

import pytest

from swarmsched.card import LIVE_PAUSE_S, JobCard
from swarmsched.errors import ConfigError
from swarmsched.gossip.setting import SwarmSetting
from swarmsched.policies.registry import compute_plan
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.perfect import PerfectReplay, Ticks
from swarmsched.replay.setup import MANNERS, Replay, prepared
from swarmsched.replay.workload import TraceJob
from swarmsched.resources import Share
from swarmsched.view import ClusterView, Plan, PolicySetting
from tests.swarmsched.replay.testing import made_up

PROFILES = {"toy": made_up()}
PAUSE_S = 30.0


def settings(manner: str, policy: str = "swarm", **more: str | bool) -> Replay:
    given = {"knowledge": MANNERS[manner].knows if manner else "perfect", **more}
    return Replay(PolicySetting(policy), Fleet.even(2, 4), pacing=Ticks(0.0, PAUSE_S), manner=manner, **given)  # type: ignore[arg-type]


def jobs(count: int = 3, gpus: int = 4) -> list[TraceJob]:
    return [TraceJob(f"j{number}", 40.0 * number, gpus, model="toy", batch=64) for number in range(count)]


def views(rows: Sequence[TraceJob], how: Replay) -> Iterator[ClusterView]:
    """What the planner sees at each of its plans."""
    seen: list[ClusterView] = []

    def plan(view: ClusterView, now_s: float) -> Plan:
        seen.append(view)
        return compute_plan(how.setting, view, now_s)

    run = prepared(rows, PROFILES, how)
    assert isinstance(run, PerfectReplay)
    run._plan = plan
    run.run()
    return iter(seen)


def cards(manner: str, **more: str) -> list[JobCard]:
    """Of the first job at all plans, the running ones in order."""
    found = views(jobs(), settings(manner, **more))
    return [job.card for view in found for job in view.jobs if job.card.submitted_utc_s == 1.0 and job.shares]


def test_a_rigid_job_says_nothing_and_takes_what_it_asked_for():
    for card in cards("rigid"):
        assert (card.ranks, card.elastic, card.estimate, card.name) == (4, None, None, "")
        assert (card.restartable, card.has_checkpoint, card.pause_s) == (False, False, 0.0)
        assert card.program, "of what it runs its agent knows"


def test_a_restartable_one_differs_by_its_word_alone():
    pairs = list(zip(cards("rigid"), cards("restartable"), strict=True))
    assert pairs
    assert all(not one.restartable and other.restartable and not other.has_checkpoint for one, other in pairs)


def test_a_policy_that_stops_a_rigid_job_ends_the_replay_and_is_named():
    rows = [TraceJob("long", 0.0, 8, 1e5), TraceJob("short", 4_000.0, 8, 10.0)]
    with pytest.raises(ConfigError, match="tiresias stopped job 'long' at 4,000 s, which cannot be stopped"):
        prepared(rows, {}, settings("rigid", "tiresias")).run()
    stopped = prepared(rows, {}, settings("restartable", "tiresias")).run()
    assert {job.label: job.preemptions for job in stopped.finished} == {"short": 0, "long": 1}
    long = next(job for job in stopped.finished if job.label == "long")
    assert long.ended_s == pytest.approx(1e5 + 10.0 + 3 * PAUSE_S), "it goes on where it was"


def test_an_installed_job_asks_for_its_least_and_takes_other_sizes_once_it_trains():
    found = cards("installed")
    assert {card.ranks for card in found} == {1}
    before = [card for card in found if card.running_s < PAUSE_S]
    assert before
    assert all(card.elastic is None and not card.has_checkpoint for card in before)
    after = [card for card in found if card.running_s > PAUSE_S]
    assert after
    assert all(card.elastic and not card.elastic.is_live and card.has_checkpoint for card in after)
    assert all(card.pause_s == PAUSE_S for card in found), "its start has been measured"


def test_an_elastic_job_may_be_changed_at_once_and_tells_what_that_costs():
    found = cards("elastic")
    assert all(card.elastic and card.elastic.is_live and card.pause_s == LIVE_PAUSE_S for card in found)


def test_a_change_while_it_trains_costs_a_second_and_no_pause_of_its_start():
    run = prepared(jobs(1), PROFILES, settings("elastic"))
    assert isinstance(run, PerfectReplay)
    (job,) = run._to_come
    one, two = ([view.node for view in run._cluster.views(())][:count] for count in (1, 2))
    job.allocate([Share(node, 1) for node in one], 0, 0.0, PAUSE_S)
    assert job.pause_s == PAUSE_S
    job.allocate([Share(node, 1) for node in two], 0, 0.0, PAUSE_S)
    assert job.pause_s == PAUSE_S, "its start goes on"
    job.advance(0.0, 100.0)
    job.allocate([Share(node, 1) for node in one], 0, 100.0, PAUSE_S)
    assert job.pause_s == LIVE_PAUSE_S
    job.allocate((), 0, 100.0, PAUSE_S)
    job.allocate([Share(node, 1) for node in one], 0, 100.0, PAUSE_S)
    assert job.pause_s == PAUSE_S


def test_policies_go_as_far_as_the_default_of_a_swarm_lets_them():
    assert settings("installed").setting.elasticity is SwarmSetting().elasticity
    assert settings("").setting == PolicySetting("swarm")


def test_who_names_no_range_of_batches_keeps_his():
    (job,) = prepared(jobs(1), PROFILES, settings("installed", keeps_batch=True)).run().finished
    assert job.batch == 64
    assert job.elastic
    assert (job.elastic.batches.first, job.elastic.batches.most, job.elastic.ranks_most) == (64, 64, 8)
    (free,) = prepared(jobs(1), PROFILES, settings("installed")).run().finished
    assert free.batch != 64


def test_without_a_manner_a_plan_may_stop_any_job_and_change_any_that_takes_several_sizes():
    for manner_less in cards(""):
        assert manner_less.has_checkpoint
        assert manner_less.elastic is not None
        assert manner_less.name
        assert not manner_less.program


@pytest.mark.parametrize(
    ("kind_by", "told"), [("name", (True, False)), ("program", (False, True)), ("none", (False,) * 2)]
)
def test_a_kind_is_told_by_name_by_program_or_not_at_all(kind_by, told):
    assert {(bool(card.name), bool(card.program)) for card in cards("installed", kind_by=kind_by)} == {told}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"manner": "instaled"}, "as: 'instaled' is not known; did you mean 'installed'"),
        ({"kind_by": "model"}, "kinds: 'model' is not known"),
        ({"view": "gossip", "manner": "elastic"}, "as: 'elastic' has no model"),
    ],
)
def test_words_that_say_nothing_are_named(more, message):
    with pytest.raises(ConfigError, match=message):
        prepared(jobs(), PROFILES, Replay(PolicySetting("swarm"), Fleet.even(1, 4), **more))

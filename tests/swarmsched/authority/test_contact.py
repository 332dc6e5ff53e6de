"""The owner's side: what counts, from when it counts, and under whose holders."""

import math

import pytest

from swarmsched.api import Isolation
from swarmsched.authority.contact import CONTACT_GAP_S, ContactLine
from swarmsched.authority.message import TASKS_MAX, ContactAnswered, TaskNews, TaskStanding
from swarmsched.authority.timing import CONTACT_PERIOD_S, FREEZE_AFTER_S
from swarmsched.effects import ExtendAttempt
from swarmsched.holders import Configuration, Holder
from swarmsched.ids import AttemptKey, JobId, NodeId
from tests.swarmsched.building import JOB, holders_of

OTHER_JOB = JobId("01hzzzzzzzabcdefghjkmnpqrt")
ME, A, B, C, D, E = (NodeId(name) for name in ("me", "a", "b", "c", "d", "e"))


THREE = Configuration(holders_of(A, B, C))
STAMP = (1, 5)
KEY = AttemptKey(JOB, 1)
UNKNOWN, OVER, VALID = TaskStanding.UNKNOWN, TaskStanding.OVER, TaskStanding.VALID


@pytest.fixture
def line():
    return ContactLine(ME, 7)


def watch(line, configuration=THREE, now_s=0.0, job_id=JOB, attempt=1, stamp=STAMP, isolation=Isolation.PAUSE):
    line.watch(AttemptKey(job_id, attempt), configuration, stamp, isolation, now_s)


def contacts(line, now_s):
    """What is sent at that time, by recipient."""
    return {effect.recipient: effect.message for effect in line.on_timer(now_s)}


def news(standing=VALID, stamp=STAMP, configuration=THREE, job_id=JOB):
    return TaskNews(job_id, 1, standing, stamp[0], stamp[1], configuration)


def answer(line, sent, *nodes, news=(), now_s=0.5):
    effects = []
    for node in nodes:
        effects += line.answered(node, ContactAnswered(sent[node].sequence, tuple(news)), now_s)
    return effects


def extend(until_s):
    return ExtendAttempt(JOB, 1, until_s)


def test_a_new_task_gets_no_time_before_a_majority_has_spoken(line):
    watch(line, now_s=3.0)
    assert line.deadline_s(KEY) == 3.0
    sent = contacts(line, 3.0)
    assert answer(line, sent, A) == []
    assert answer(line, sent, B) == [extend(3.0 + FREEZE_AFTER_S)]
    assert line.deadline_s(KEY) == 3.0 + FREEZE_AFTER_S


def test_a_contact_goes_to_every_holder_at_once_and_then_every_period(line):
    assert line.next_deadline_s == math.inf
    watch(line, now_s=1.0)
    assert line.next_deadline_s == 1.0
    assert list(contacts(line, 1.0)) == [A, B, C]
    assert line.next_deadline_s == 1.0 + CONTACT_PERIOD_S
    assert contacts(line, 1.0 + CONTACT_PERIOD_S - 0.1) == {}
    assert list(contacts(line, 1.0 + CONTACT_PERIOD_S)) == [A, B, C]


def test_one_contact_carries_all_tasks_between_the_two(line):
    watch(line)
    watch(line, Configuration(holders_of(A, D, ME)), job_id=OTHER_JOB, stamp=(2, 9))
    sent = contacts(line, 0.0)
    assert [(task.job_id, task.attempt, task.epoch, task.version) for task in sent[A].tasks] == [
        (JOB, 1, 1, 5),
        (OTHER_JOB, 1, 2, 9),
    ]
    assert [task.job_id for task in sent[B].tasks] == [JOB]
    assert [task.job_id for task in sent[ME].tasks] == [OTHER_JOB]


def test_many_tasks_in_a_moment_do_not_make_as_many_contacts(line):
    watch(line)
    contacts(line, 0.0)
    watch(line, job_id=OTHER_JOB, now_s=0.001)
    assert contacts(line, 0.001) == {}
    assert line.next_deadline_s == CONTACT_GAP_S
    assert len(contacts(line, CONTACT_GAP_S)[A].tasks) == 2


def test_more_tasks_than_a_contact_holds_go_in_several(line):
    for attempt in range(TASKS_MAX + 1):
        watch(line, Configuration(holders_of(A)), attempt=attempt)
    first, second = line.on_timer(0.0)
    assert (len(first.message.tasks), len(second.message.tasks)) == (TASKS_MAX, 1)
    effects = line.answered(A, ContactAnswered(second.message.sequence), 0.1)
    assert effects == [ExtendAttempt(JOB, TASKS_MAX, FREEZE_AFTER_S)]


def test_the_majoritys_oldest_contact_counts_from_its_sending(line):
    watch(line)
    first, second, third = (contacts(line, now_s) for now_s in (0.0, 2.0, 4.0))
    assert answer(line, second, A, now_s=9.0) == []
    assert answer(line, first, B, now_s=9.0) == [extend(0.0 + FREEZE_AFTER_S)]
    assert answer(line, third, C, now_s=9.0) == [extend(2.0 + FREEZE_AFTER_S)]
    assert answer(line, third, A, now_s=9.0) == [extend(4.0 + FREEZE_AFTER_S)]
    assert answer(line, third, B, now_s=9.0) == []


def test_doubled_invented_and_strange_answers_count_for_nothing(line):
    watch(line)
    sent = contacts(line, 0.0)
    assert answer(line, sent, A) == []
    assert answer(line, sent, A) == []
    assert line.answered(B, ContactAnswered(sent[B].sequence + 100), 0.5) == []
    assert line.answered(D, ContactAnswered(sent[B].sequence), 0.5) == []
    assert line.answered(A, ContactAnswered(sent[B].sequence), 0.5) == []
    assert line.deadline_s(KEY) == 0.0


def test_an_answer_to_an_earlier_life_counts_for_nothing():
    earlier = ContactLine(ME, 7)
    watch(earlier)
    old = contacts(earlier, 0.0)
    line = ContactLine(ME, 8)
    watch(line, now_s=100.0)
    contacts(line, 100.0)
    assert answer(line, old, A, B, C, now_s=100.1) == []


def test_a_restarted_agent_extends_with_the_first_majority(line):
    """The shim keeps the deadline of the earlier life, which this one neither knows nor shortens."""
    watch(line, now_s=100.0)
    sent = contacts(line, 100.0)
    assert answer(line, sent, C, news=[news(UNKNOWN)]) == []
    assert answer(line, sent, A, B) == [extend(100.0 + FREEZE_AFTER_S)]


def test_watching_again_changes_nothing(line):
    watch(line)
    answer(line, contacts(line, 0.0), A, B)
    watch(line, Configuration(holders_of(D)), now_s=5.0, stamp=(9, 9))
    assert line.deadline_s(KEY) == FREEZE_AFTER_S
    assert list(contacts(line, 5.0)) == [A, B, C]


@pytest.mark.parametrize("standing", [OVER, UNKNOWN])
def test_another_answer_than_valid_withdraws_an_earlier_valid(line, standing):
    watch(line)
    first = contacts(line, 0.0)
    answer(line, first, A)
    second = contacts(line, 2.0)
    assert answer(line, second, A, news=[news(standing)]) == []
    assert answer(line, second, B) == []
    assert answer(line, second, C) == [extend(2.0 + FREEZE_AFTER_S)]


def test_time_once_given_is_not_taken_back(line):
    watch(line)
    answer(line, contacts(line, 0.0), A, B)
    assert answer(line, contacts(line, 2.0), A, B, C, news=[news(UNKNOWN)]) == []
    assert line.deadline_s(KEY) == FREEZE_AFTER_S


def test_an_older_valid_does_not_undo_a_newer_over(line):
    watch(line)
    first, second = contacts(line, 0.0), contacts(line, 2.0)
    answer(line, second, A, news=[news(OVER)])
    answer(line, first, A)
    assert answer(line, second, B) == []


def test_an_older_over_does_not_undo_a_newer_valid(line):
    watch(line)
    first, second = contacts(line, 0.0), contacts(line, 2.0)
    answer(line, second, A)
    answer(line, first, A, news=[news(OVER)])
    assert answer(line, second, B) == [extend(2.0 + FREEZE_AFTER_S)]


def test_a_task_is_over_when_a_majority_says_so(line):
    watch(line)
    sent = contacts(line, 0.0)
    answer(line, sent, A, news=[news(OVER)])
    answer(line, sent, B, news=[news(UNKNOWN)])
    assert line.over == []
    answer(line, sent, C, news=[news(OVER)])
    assert line.over == [KEY]
    line.forget(KEY)
    assert line.over == []


def test_an_ended_task_gets_no_more_time_and_is_over_when_a_majority_says_so(line):
    watch(line)
    answer(line, contacts(line, 0.0), A, B)
    line.ended(KEY)
    assert answer(line, contacts(line, 2.0), A, B) == []
    assert line.over == []
    answer(line, contacts(line, 4.0), A, B, news=[news(OVER)])
    assert line.over == [KEY]


def test_an_ended_task_is_over_too_when_a_majority_has_no_record_of_its_job_any_more(line):
    """Past its retention: nobody will ever ask for the result.  One that runs is another matter."""
    watch(line)
    forgotten = TaskNews(JOB, 1, UNKNOWN)
    answer(line, contacts(line, 0.0), A, B, news=[forgotten])
    assert line.over == []
    line.ended(KEY)
    assert line.over == [KEY]


def test_an_ended_task_is_not_over_when_holders_have_merely_been_left(line):
    watch(line)
    line.ended(KEY)
    answer(line, contacts(line, 0.0), A, B, news=[news(UNKNOWN)])
    assert line.over == []


def test_news_of_another_task_does_not_touch_this_one(line):
    watch(line)
    sent = contacts(line, 0.0)
    assert answer(line, sent, A, B, news=[news(OVER, job_id=OTHER_JOB)]) == [extend(FREEZE_AFTER_S)]


JOINT = Configuration(holders_of(D, E, A), leaving=holders_of(A, B, C))
FINAL = Configuration(holders_of(D, E, A))


def test_answers_of_left_holders_do_not_count_once_their_successors_are_known(line):
    """B and C have been left and do not know; A's word turns theirs away, though it came with a yes of its own."""
    watch(line)
    sent = contacts(line, 0.0)
    assert answer(line, sent, A, news=[news(VALID, (1, 7), FINAL)]) == []
    assert answer(line, sent, B, C) == []
    assert line.next_deadline_s == 0.5
    assert list(contacts(line, 0.5)) == [A, D, E]
    assert contacts(line, CONTACT_PERIOD_S) == {}


def test_a_joint_configuration_needs_both_majorities(line):
    watch(line)
    sent = contacts(line, 0.0)
    assert answer(line, sent, A, news=[news(VALID, (1, 6), JOINT)]) == []
    assert answer(line, sent, B) == []
    assert answer(line, contacts(line, 0.5), D) == [extend(0.0 + FREEZE_AFTER_S)]


def test_news_that_is_not_newer_replaces_nothing(line):
    watch(line, FINAL, stamp=(1, 7))
    answer(line, contacts(line, 0.0), A, news=[news(VALID, (1, 6), JOINT)])
    assert list(contacts(line, 2.0)) == [D, E, A]


def test_news_without_holders_replaces_nothing(line):
    watch(line)
    answer(line, contacts(line, 0.0), A, news=[news(UNKNOWN, (9, 9), Configuration())])
    sent = contacts(line, 2.0)
    assert list(sent) == [A, B, C]
    assert (sent[A].tasks[0].epoch, sent[A].tasks[0].version) == STAMP


def test_a_record_with_the_same_holders_is_followed_once_a_majority_has_it(line):
    watch(line)
    sent = contacts(line, 0.0)
    answer(line, sent, A, news=[news(VALID, (6, 6))])
    assert contacts(line, 2.0)[B].tasks[0].epoch == 1
    answer(line, sent, B, news=[news(VALID, (1, 8))])
    tasks = contacts(line, 4.0)[B].tasks
    assert [(task.epoch, task.version) for task in tasks] == [(1, 8)]


def test_a_holder_that_lags_behind_counts_while_its_holders_are_known(line):
    watch(line, stamp=(1, 9))
    sent = contacts(line, 0.0)
    answer(line, sent, A, news=[news(VALID, (1, 8))])
    assert answer(line, sent, B) == [extend(FREEZE_AFTER_S)]


def test_a_holder_that_lags_behind_with_unknown_holders_does_not_count(line):
    watch(line, stamp=(1, 9))
    sent = contacts(line, 0.0)
    answer(line, sent, A, news=[news(VALID, (1, 8), JOINT)])
    assert answer(line, sent, B) == []


def test_a_holder_that_lags_behind_with_the_former_holders_counts(line):
    """The first news of a change came from its proposer, which died: nobody else has heard of it for a while."""
    watch(line)
    sent = contacts(line, 0.0)
    answer(line, sent, A, news=[news(VALID, (1, 6), JOINT)])
    later = contacts(line, 2.0)
    behind = [news(VALID, STAMP, THREE)]
    assert answer(line, later, B, news=behind) == []
    assert answer(line, later, D, news=[news(VALID, (1, 6), JOINT)]) == [extend(0.0 + FREEZE_AFTER_S)]


def test_the_store_that_is_gone_does_not_speak_for_the_present_one(line):
    replaced = Configuration((Holder(A, 2), Holder(B, 1)), leaving=(Holder(A, 1), Holder(B, 1)))
    watch(line, replaced)
    sent = contacts(line, 0.0)
    assert len(line.on_timer(0.0)) == 0
    assert answer(line, sent, A, B) == []


def test_ranks_run_without_limit_where_nothing_is_decided_without_this_node(line):
    for configuration in (
        Configuration(holders_of(ME)),
        Configuration(holders_of(A, ME)),
        Configuration(holders_of(A, ME), leaving=holders_of(ME)),
    ):
        line = ContactLine(ME, 7)
        watch(line, configuration)
        sent = contacts(line, 0.0)
        assert line.deadline_s(KEY) == 0.0
        assert answer(line, sent, ME) == [extend(math.inf)]
        assert line.deadline_s(KEY) == math.inf


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(holders_of(A)),
        Configuration(holders_of(A, B)),
        Configuration(holders_of(ME, A, B)),
        Configuration(holders_of(ME, A, B), leaving=holders_of(ME, B, C)),
        Configuration(holders_of(A, ME), leaving=holders_of(A)),
        Configuration(holders_of(ME), leaving=holders_of(A, B, C)),
        Configuration(holders_of(A, B, C), leaving=holders_of(ME)),
    ],
)
def test_ranks_need_contact_where_others_may_decide(line, configuration):
    watch(line, configuration)
    effects = answer(line, contacts(line, 0.0), *dict.fromkeys(holder.node for holder in configuration.members))
    assert effects[-1].until_s == FREEZE_AFTER_S


def test_a_joint_record_that_only_this_node_has_accepted_sets_no_ranks_free(line):
    """It may never be decided; what the leaving holder decides instead may be that the attempt is over."""
    joint = Configuration(holders_of(A, ME), leaving=holders_of(A))
    watch(line, Configuration(holders_of(A)))
    assert line.learned(JOB, (1, 6), joint, 1.0) == []
    sent = contacts(line, 1.0)
    assert answer(line, sent, ME) == []
    assert answer(line, sent, A) == [extend(1.0 + FREEZE_AFTER_S)]


def test_a_job_that_asked_for_it_runs_on_from_the_start(line):
    watch(line, isolation=Isolation.CONTINUE)
    assert line.deadline_s(KEY) == math.inf
    sent = contacts(line, 0.0)
    answer(line, sent, A, B, news=[news(OVER)])
    assert line.over == [KEY]


def test_a_late_order_does_not_let_ranks_run_free_under_holders_that_have_gone(line):
    watch(line, Configuration(holders_of(ME)))
    sent = contacts(line, 0.0)
    assert answer(line, sent, ME, news=[news(UNKNOWN, (2, 9), THREE)]) == []
    assert line.deadline_s(KEY) == 0.0


def test_ranks_that_ran_free_get_a_deadline_when_others_may_decide(line):
    watch(line, Configuration(holders_of(ME)))
    answer(line, contacts(line, 0.0), ME)
    answer(line, contacts(line, 2.0), ME)
    joint = Configuration(holders_of(ME, A, B), leaving=holders_of(ME))
    assert line.learned(JOB, (1, 6), joint, 3.0) == [
        extend(2.0 + FREEZE_AFTER_S)
    ]  # the next record needs A and B alone
    assert line.learned(JOB, (1, 7), Configuration(holders_of(ME, A, B)), 3.5) == []
    assert line.learned(JOB, (1, 7), Configuration(holders_of(ME)), 3.5) == []
    assert line.learned(OTHER_JOB, (1, 8), Configuration(holders_of(ME)), 3.5) == []
    sent = contacts(line, 4.0)
    assert answer(line, sent, ME, A) == [extend(4.0 + FREEZE_AFTER_S)]


def test_contacts_end_with_the_last_task(line):
    watch(line)
    sent = contacts(line, 0.0)
    line.forget(KEY)
    line.forget(KEY)
    assert answer(line, sent, A, B, C) == []
    assert line.on_timer(CONTACT_PERIOD_S) == []
    assert line.next_deadline_s == math.inf
    assert line.deadline_s(KEY) == -math.inf


def test_unanswered_contacts_are_not_kept(line):
    watch(line)
    for turn in range(1_000):
        contacts(line, turn * CONTACT_PERIOD_S)
    assert len(line._lines[A].sent) <= FREEZE_AFTER_S / CONTACT_PERIOD_S + 1


def test_a_broken_quorum_can_be_put_in():
    line = ContactLine(ME, 7, quorum=lambda _count: 1)
    watch(line)
    assert answer(line, contacts(line, 0.0), A) == [extend(FREEZE_AFTER_S)]

import pytest

from swarmsched.api import JobState
from swarmsched.errors import InvalidTransition
from swarmsched.jobs.lifecycle import TRANSITIONS, JobEvent, diagram, next_state


def walk(*events: JobEvent) -> JobState:
    state = JobState.QUEUED
    for event in events:
        state = next_state(state, event, "job")
    return state


def test_a_job_runs_and_ends():
    assert walk(JobEvent.PLACED, JobEvent.STARTED) is JobState.RUNNING
    assert walk(JobEvent.PLACED, JobEvent.STARTED, JobEvent.EXITED) is JobState.ENDED


def test_a_short_job_may_exit_before_the_last_owner_said_that_it_started():
    assert walk(JobEvent.PLACED, JobEvent.EXITED) is JobState.ENDED


def test_a_failed_start_that_is_not_the_jobs_fault_is_tried_again():
    assert walk(JobEvent.PLACED, JobEvent.START_ABORTED, JobEvent.PLACED) is JobState.STARTING


def test_stopping_a_queued_job_ends_it_at_once_and_a_placed_one_waits_for_its_processes():
    assert walk(JobEvent.STOP_REQUESTED) is JobState.ENDED
    assert walk(JobEvent.PLACED, JobEvent.STOP_REQUESTED) is JobState.STOPPING
    assert walk(JobEvent.PLACED, JobEvent.STARTED, JobEvent.STOP_REQUESTED) is JobState.STOPPING


def test_a_stop_may_overtake_the_start_report_and_be_repeated():
    path = (JobEvent.PLACED, JobEvent.STOP_REQUESTED, JobEvent.STARTED, JobEvent.STOP_REQUESTED, JobEvent.EXITED)
    assert walk(*path) is JobState.ENDED


def test_ending_is_final():
    assert not [event for state, event in TRANSITIONS if state is JobState.ENDED]


def test_only_reports_that_no_process_is_left_lead_out_of_states_that_may_have_some():
    wishes = {JobEvent.STOP_REQUESTED, JobEvent.PLACED, JobEvent.STARTED}
    for (state, event), following in TRANSITIONS.items():
        if state is not JobState.QUEUED and following in (JobState.ENDED, JobState.QUEUED):
            assert event not in wishes


def test_every_state_can_reach_the_end():
    reachable = {JobState.ENDED}
    for _ in JobState:
        reachable |= {state for (state, _), following in TRANSITIONS.items() if following in reachable}
    assert reachable == set(JobState)


def test_a_missing_edge_names_job_state_and_event():
    with pytest.raises(InvalidTransition, match="job7: no transition from ended on started"):
        next_state(JobState.ENDED, JobEvent.STARTED, "job7")


def test_the_diagram_shows_every_edge():
    text = diagram()
    assert text.startswith("stateDiagram-v2\n    [*] --> queued\n")
    assert text.endswith("    ended --> [*]\n")
    assert "    starting --> ended: exited\n" in text
    for (state, event), following in TRANSITIONS.items():
        (line,) = [each for each in text.splitlines() if each.startswith(f"    {state.value} --> {following.value}:")]
        assert event.value in line

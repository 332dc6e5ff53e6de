import pytest

from swarmsched.simulator.loop import EventLoop, Spins


def test_callbacks_run_in_order_of_time_and_ties_in_order_of_scheduling():
    loop, seen = EventLoop(), []
    loop.call_at(2.0, lambda: seen.append("late"))
    loop.call_at(1.0, lambda: seen.append("first"))
    loop.call_at(1.0, lambda: seen.append("second"))
    loop.run_for(5.0)
    assert seen == ["first", "second", "late"]
    assert loop.now_s == 5.0


def test_time_stands_at_the_callback_while_it_runs():
    loop, seen = EventLoop(), []
    loop.call_later(1.5, lambda: seen.append(loop.now_s))
    loop.run_for(10.0)
    assert seen == [1.5]


def test_a_cancelled_timer_does_nothing():
    loop, seen = EventLoop(), []
    timer = loop.call_later(1.0, lambda: seen.append("never"))
    timer.cancel()
    timer.cancel()
    loop.run_for(2.0)
    assert seen == []


def test_a_callback_in_the_past_runs_now_and_not_before_what_is_due():
    loop, seen = EventLoop(), []
    loop.run_for(3.0)
    loop.call_at(3.0, lambda: seen.append("due"))
    loop.call_at(1.0, lambda: seen.append("past"))
    loop.run_for(0.0)
    assert seen == ["due", "past"]
    assert loop.now_s == 3.0


def test_run_until_stops_at_the_condition_or_the_limit():
    loop, seen = EventLoop(), []
    for second in range(1, 6):
        loop.call_at(float(second), lambda: seen.append(loop.now_s))
    assert loop.run_until(lambda: len(seen) == 2, 10.0)
    assert loop.now_s == 2.0
    assert not loop.run_until(lambda: False, 2.5)
    assert loop.now_s == 4.5
    assert len(seen) == 4


@pytest.mark.parametrize("step_s", [0.0, 1e-9, 1e-5])
def test_a_loop_that_would_never_come_to_the_next_second_says_what_it_is_at(step_s):
    loop = EventLoop(callbacks_most=10_000)

    def spin():
        loop.post_later(step_s, spin)

    loop.run_for(7.5)
    loop.post_later(0.0, spin)
    with pytest.raises(Spins, match=r"10,000 callbacks within a virtual second; the next is .*spin"):
        loop.run_for(60.0)
    assert 7.5 <= loop.now_s < 8.6


def test_a_busy_loop_goes_on():
    loop, seen = EventLoop(callbacks_most=100), []
    for at in range(900):
        loop.post_at(at / 90, seen.append, at)
    loop.run_for(60.0)
    assert len(seen) == 900

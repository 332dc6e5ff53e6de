from swarmsched.simulator.loop import EventLoop


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

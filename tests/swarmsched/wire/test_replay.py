"""The replay window."""

import random

from swarmsched.wire.replay import REPLAY_WINDOW, ReplayWindow


def test_each_counter_is_accepted_once() -> None:
    window = ReplayWindow()
    assert [window.accept(counter) for counter in (0, 1, 1, 0, 5, 3, 3, 5)] == [
        True, True, False, False, True, True, False, False,
    ]  # fmt: skip


def test_reordering_within_the_window_is_accepted_and_older_ones_are_not() -> None:
    window = ReplayWindow()
    assert window.accept(10_000)
    assert window.accept(10_000 - REPLAY_WINDOW + 1)
    assert not window.accept(10_000 - REPLAY_WINDOW)
    assert not window.accept(0)


def test_a_jump_beyond_the_window_forgets_nothing_that_could_be_replayed() -> None:
    window = ReplayWindow()
    for counter in range(50):
        window.accept(counter)
    assert window.accept(2**64 - 1)
    assert not any(window.accept(counter) for counter in range(50))
    assert window._seen.bit_length() <= REPLAY_WINDOW


def test_it_agrees_with_a_set_of_everything_seen() -> None:
    rng = random.Random(7)
    window, seen, highest = ReplayWindow(64), set[int](), -1
    for _ in range(20_000):
        counter = max(0, highest + rng.randint(-100, 5))
        expected = counter not in seen and counter > highest - 64
        assert window.accept(counter) is expected
        if expected:
            seen.add(counter)
            highest = max(highest, counter)

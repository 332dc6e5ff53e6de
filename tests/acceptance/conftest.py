"""Checks of the whole product that take minutes: `make acceptance`.  They print the times that they measure."""

import time
from contextlib import contextmanager

import pytest


@pytest.fixture
def report(request, capsys):
    """Print one line that is seen without -s."""

    def say(text):
        with capsys.disabled():
            print(f"\n  {request.node.name}: {text}", flush=True)

    return say


@pytest.fixture
def stopwatch(report):
    """Print how long a block took."""

    @contextmanager
    def measure(what):
        began_s = time.monotonic()
        yield
        report(f"{what}: {time.monotonic() - began_s:.1f} s")

    return measure

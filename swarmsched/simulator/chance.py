"""Chance of a run: one seed, and a generator of its own for each component. A draw added in one place does not change
what happens in the others."""

import random


def stream(seed: int, name: str) -> random.Random:
    """The generator of the component `name`; equal arguments give equal draws in every process."""
    return random.Random(f"{seed}/{name}")  # reproducible on purpose, no secret hangs on it

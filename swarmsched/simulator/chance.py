"""Chance: one seed for a run, and a generator of its own for each component, so that a draw added in one place does
not change what happens in the others."""

import random


def stream(seed: int, name: str) -> random.Random:
    """The generator of the component `name`; equal arguments give equal draws in every process."""
    return random.Random(f"{seed}/{name}")  # reproducible on purpose, no secret hangs on it

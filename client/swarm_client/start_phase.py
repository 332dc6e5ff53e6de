"""What a starting job is doing, in words: the API's `phase` is for programs."""

from __future__ import annotations

WORDS = {
    "place": ("reserving", "reserving resources"),
    "sync": ("copying", "copying files"),
    "environment": ("building", "building the environment"),
    "launch": ("launching", "launching the ranks"),
}
"""For a column of a table, which must leave room for the others, and for a sentence."""


def with_phase(state: str, phase: str, *, is_brief: bool = False) -> str:
    """`starting: copying files`, or `starting: copying`; a phase that only newer agents know is shown as it is."""
    brief, whole = WORDS.get(phase, (phase, phase))
    words = brief if is_brief else whole
    return f"{state}: {words}" if words else state

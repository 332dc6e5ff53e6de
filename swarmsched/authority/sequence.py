"""Numbers of renewals and contacts, by which an answer names the sending that it answers.

An answer counts from the *sending* of what it answers, so an answer to an earlier life of this agent must find no
sending of this life under its number.
"""

from collections.abc import Iterator
from itertools import count

LIFE_BITS = 21  # two million numbers a life; a life that needs more has lasted longer than that many seconds
GENERATION_BITS = 32  # seconds since 1970 until 2106; together they fit the 53 bits of a message's number


def sequences(generation: int) -> Iterator[int]:
    """The numbers of one life: above those of all lives with a lower generation."""
    return count((generation % 2**GENERATION_BITS) << LIFE_BITS)

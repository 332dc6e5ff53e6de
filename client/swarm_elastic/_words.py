"""Control words: what every rank tells all others in the same reduction as the gradients of a step.

Each rank has a slot that is zero with all others, so that the sum is a table of what each of them said.  All read the
same table, so all decide the same, in the same step, without another message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from swarm_elastic import _ranges

DATA_WORDS = _ranges.WORDS
WORD_MAX = 1 << 24  # up to here float32 is exact
SAMPLES_MAX = WORD_MAX - 1  # of a step


class Words(NamedTuple):
    """One rank's.

    `ready` is how many versions above the present one the plan is that this rank could switch to, 0 for none;
    `samples` how many are in its gradient, `loss` their mean; `batch` the global batch that it was told to train with,
    of which the first rank's counts; `norm` the squared norm of its own gradient where that was measured, else 0;
    `done` is 1 when it has come to the end of its steps; `data` what its data pipeline says; `rates` and `state` are
    digests of its rates and of all that is to be the same on all ranks, 0 where it has not looked.
    """

    ready: int = 0
    samples: int = 0
    loss: float = 0.0
    batch: int = 0
    norm: float = 0.0
    done: int = 0
    data: Sequence[int] = ()
    rates: int = 0
    state: int = 0


FIXED_WORDS = 6
FORMER_SLOT_WORDS = FIXED_WORDS + DATA_WORDS  # of the first version, which has no digests
SLOT_WORDS = FORMER_SLOT_WORDS + 2


def table_words(size: int, slot: int = SLOT_WORDS) -> int:
    """How many float32 words the table of so many ranks has."""
    return size * slot


def write(table: torch.Tensor, rank: int, size: int, words: Words) -> None:
    """Make the flat `table` this rank's part of the sum."""
    assert len(words.data) <= DATA_WORDS
    counts = (words.ready, words.samples, words.batch, words.rates, words.state, *words.data)
    assert all(0 <= word < WORD_MAX for word in counts)
    table.zero_()
    data = [*words.data, *[0] * (DATA_WORDS - len(words.data))]
    row = table.view(size, -1)[rank]
    row.copy_(torch.tensor([*words[:FIXED_WORDS], *data, words.rates, words.state], dtype=torch.float32)[: len(row)])


def read(table: torch.Tensor, size: int) -> list[Words]:
    """What all ranks said, in rank order, from the sum."""
    rows = table.view(size, -1).tolist()
    return [_words(row) for row in rows]


def _words(row: list[float]) -> Words:
    ready, samples, loss, batch, norm, done = row[:FIXED_WORDS]
    data, digests = (
        [int(word) for word in part] for part in (row[FIXED_WORDS:FORMER_SLOT_WORDS], row[FORMER_SLOT_WORDS:])
    )
    return Words(int(ready), int(samples), loss, int(batch), norm, int(done), tuple(data), *digests)

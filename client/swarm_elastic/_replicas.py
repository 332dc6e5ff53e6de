"""Whether all ranks hold the same: digests of rates, weights, buffers and parts, and who is wrong where they differ.

A short digest of each rank travels with the sums of a step.  Where digests differ, the ranks tell each other of each
item, and then of those that differ how large they are: what differs by rounding alone, as on GPUs of two kinds or with
other numbers of threads, is no fault.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from swarm_elastic._handover import COPIES, hyperparameters, is_dense, plain

EVERY_STEPS = 100
WORD = (1 << 24) - 1  # digests in the table are from 1 to it; 0: not told
HASH = 1 << 48
ROUNDING = 1e-5  # relative; of types that are coarser, one unit in the last place
NAMED_MAX = 4  # items in an error
TOLD_MAX = 64  # items that are looked at in detail
CHUNK = 1 << 20
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Item = tuple[str, Any]  # its name, and what it holds


class Difference(NamedTuple):
    """`culprits` are the ranks that are wrong, all where nobody knows; none: it is but rounding."""

    culprits: frozenset[int]
    problem: str


class Twin:
    """This rank's copy; `items` gives what is to be the same on all ranks, `buffers` what passes may move."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        items: Callable[[], Iterator[Item]],
        buffers: Callable[[], Iterator[Item]],
    ) -> None:
        self._optimizer, self._items, self._buffers = optimizer, items, buffers
        self._rates: tuple[list[Any], int] = [], 0  # as they were when they were digested last
        self._before: list[int] = []  # hashes of the buffers, before the passes of this step
        self._moving: set[str] = set()  # buffers that passes have changed: each rank's own
        self.is_proven = True  # unless it was given the state of others, and not found equal to them since

    def prove(self, *, is_equal: bool) -> None:
        """The replica was found equal to others, or was given their state and not compared yet."""
        self.is_proven = is_equal

    def begin(self, *, is_checked: bool) -> None:
        """Before the passes of a step."""
        self._before = hashes([value for _, value in self._buffers()]) if is_checked else []

    def rates(self) -> int:
        """A digest of all that the optimizer goes by beside gradients."""
        values = [value for group in self._optimizer.param_groups for value in hyperparameters(group).values()]
        if values != self._rates[0] or any(isinstance(value, torch.Tensor) for value in values):
            self._rates = values, _word(repr(_told(plain(values))))
        return self._rates[1]

    def state(self) -> int:
        """A digest of all that is compared."""
        return _word(repr(self._hashes()))

    def saved(self) -> int:
        """A digest of all that a checkpoint holds."""
        return _word(repr(hashes([value for _, value in self._all()])))

    def compare(self, gather: Callable[[list[int]], list[list[int]]], workers: Sequence[str]) -> Difference | None:
        """With all ranks, which call this together; None where nothing differs but what is each rank's own."""
        names = [name for name, _ in self._all()]
        told = gather([*self._hashes(), int(self.is_proven)])
        columns = [{row[at] for row in told} for at in range(len(names))]
        differing = [at for at, hashed in enumerate(columns) if len(hashed) > 1 and 0 not in hashed][:TOLD_MAX]
        proven = [rank for rank, row in enumerate(told) if row[-1]]
        if not differing:
            return None
        held = [value for _, value in self._all()]
        told = gather([word for at in differing for word in _measured(held[at])])
        width = len(told[0]) // len(differing)
        measures = [[Measure.read(row[at : at + width]) for at in range(0, len(row), width)] for row in told]
        right = _most_agreed(measures, proven or range(len(told)))
        base = 0 if right is None else right
        wrong = [rank for rank in range(len(told)) if not _are_equal(measures[base], measures[rank])]
        problem = _problem([names[at] for at in differing], measures, base, wrong, workers)
        culprits = range(len(told)) if right is None else wrong
        return Difference(frozenset(culprits), problem or f"{names[differing[0]]} differs by rounding")

    def _all(self) -> Iterator[Item]:
        for number, group in enumerate(self._optimizer.param_groups):
            yield f"parameter group {number}", hyperparameters(group)
        yield from self._items()
        yield from self._buffers()

    def _hashes(self) -> list[int]:
        """Of each item; 0 for one that is this rank's own."""
        items = list(self._all())
        found = hashes([value for _, value in items])
        if self._before:
            own = [name for name, _ in self._buffers()]
            now = found[len(found) - len(own) :]
            self._moving.update(name for at, name in enumerate(own) if self._before[at] != now[at])
        moving = self._moving
        is_own = [name in moving or (bool(moving) and name.startswith(COPIES)) for name, _ in items]
        return [0 if is_own[at] else hashed for at, hashed in enumerate(found)]


class Measure(NamedTuple):
    """How large an item is: equal ones differ by rounding at most."""

    exact: float  # a hash of all that is no fraction
    numbers: float  # of the logarithms of numbers, and of the norms of tensors
    tensors: float  # of the directions of tensors
    rounding: float  # that may be between two ranks
    rate: float  # for a message

    def is_equal(self, other: Measure) -> bool:
        """But for rounding; what is not finite is equal where its bits are, which was looked at before."""
        bound = max(self.rounding, other.rounding)
        is_near = abs(self.numbers - other.numbers) <= bound and abs(self.tensors - other.tensors) <= bound
        return self.exact == other.exact and is_near

    @staticmethod
    def read(row: Sequence[int]) -> Measure:
        """From words."""
        return Measure(*(struct.unpack("<d", struct.pack("<q", word))[0] for word in row))


def hashes(values: Sequence[Any]) -> list[int]:
    """One for each value, from 1 on; tensors are summed up where they are, and waited for once for each device."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    places: dict[int, tuple[torch.device, int]] = {}
    leaves = [list(_leaves(value)) for value in values]
    for each in leaves:
        for leaf in each:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in places:
                mine = sums.setdefault(leaf.device, [])
                places[id(leaf)] = leaf.device, len(mine)
                mine.append(_bits(leaf))
    known = {device: torch.stack(each).tolist() for device, each in sums.items()}

    def told(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        device, at = places[id(leaf)]
        return known[device][at]

    return [_hash(repr([told(leaf) for leaf in each])) for each in leaves]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of its bits, read as whole numbers."""
    flat = _flat(tensor)
    return flat.view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    tensor = tensor if is_dense(tensor) else tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def _measured(value: Any) -> list[int]:
    """The words of a `Measure`."""
    exact: list[Any] = []
    numbers = tensors = 0.0
    rounding = ROUNDING
    for turn, leaf in enumerate(_leaves(value), 1):
        number, weight = leaf, 1 + 1 / turn
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            direction, number = _directed(leaf)
            tensors += weight * direction
            rounding = max(rounding, torch.finfo(leaf.dtype).eps)
        elif isinstance(leaf, torch.Tensor):
            number = int(_bits(leaf))
        if isinstance(number, float) and number and math.isfinite(number):
            exact.append(number > 0)
            numbers += weight * math.log(abs(number))
        else:
            exact.append(number)
    rate = value.get("lr", 0.0) if isinstance(value, Mapping) else 0.0
    measure = Measure(float(_hash(repr(exact))), numbers, tensors, rounding, float(rate))
    return [struct.unpack("<q", struct.pack("<d", each))[0] for each in measure]


def _directed(tensor: torch.Tensor) -> tuple[float, float]:
    """The projection of its direction on a fixed one of plus and minus one, and its norm."""
    flat = _flat(tensor)
    signs = torch.randint(0, 2, (min(CHUNK, len(flat)),), generator=torch.Generator().manual_seed(len(flat)))
    signs = (2.0 * signs - 1.0).to(flat.device, torch.float64)
    parts = [part.to(torch.float64) for part in flat.split(CHUNK)] if len(flat) else []
    sums = [torch.stack((part @ signs[: len(part)], part @ part)) for part in parts]
    projected, squared = torch.stack(sums).sum(0).tolist() if sums else (0.0, 0.0)
    norm = math.sqrt(squared)
    return (projected / norm if norm else 0.0), norm


def _leaves(value: Any) -> Iterator[Any]:
    """Names, numbers, texts and tensors in a state, in order."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _leaves(each)
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, torch.Tensor):
        yield value if value.layout == torch.strided and not value.is_meta else str(value.shape)
    else:
        yield value if isinstance(value, (bool, int, float, str, bytes, type(None))) else type(value).__name__


def _told(value: Any) -> Any:
    """With numbers for tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_told(each) for each in value] if isinstance(value, (list, tuple)) else value


def _most_agreed(measures: Sequence[Sequence[Measure]], judges: Sequence[int]) -> int | None:
    """Of those that may judge one whom more than half of them agree with."""
    for rank in judges:
        if 2 * sum(_are_equal(measures[rank], measures[other]) for other in judges) > len(judges):
            return rank
    return None


def _are_equal(own: Sequence[Measure], others: Sequence[Measure]) -> bool:
    return all(map(Measure.is_equal, own, others))


def _problem(
    names: Sequence[str],
    measures: Sequence[Sequence[Measure]],
    right: int,
    wrong: Sequence[int],
    workers: Sequence[str],
) -> str:
    """Who differs from whom, and in what."""
    told = []
    for rank in wrong:
        differing = [at for at in range(len(names)) if not measures[right][at].is_equal(measures[rank][at])]
        listed = [_named(names[at], measures[rank][at], measures[right][at]) for at in differing[:NAMED_MAX]]
        more = f" and {len(differing) - NAMED_MAX} more" if len(differing) > NAMED_MAX else ""
        told.append(f"worker {workers[rank]} differs from worker {workers[right]} in {', '.join(listed)}{more}")
    return "; ".join(told)


def _named(name: str, wrong: Measure, right: Measure) -> str:
    return f"{name} (lr {wrong.rate:g}, not {right.rate:g})" if wrong.rate != right.rate else name


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return ((zlib.crc32(data) << 16) ^ zlib.adler32(data)) % (HASH - 1) + 1


def _word(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % WORD + 1

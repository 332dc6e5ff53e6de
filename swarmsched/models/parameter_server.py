"""Steps a second of training with parameter servers, by workers and servers (Peng et al., Optimus, EuroSys 2018, 3.2).

With p servers and w workers, synchronous training at a fixed global batch M makes

    1 / (a * M / w + b + c * w / p + d * w + e * p)

steps a second, and asynchronous training, all workers together, `w / (a + b * w / p + c * w + d * p)`.  Both are linear
in parameters that cannot be negative once inverted.  They are fitted in relative error, and what was measured wins over
the fit: one server with one worker, where the search for more begins, is off by up to a factor of two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from swarmsched.errors import ConfigError

TASKS_MOST = 65_535
RATE_LEAST, RATE_MOST = 1e-9, 1e9
"""Steps a second that a measurement may tell."""

Floats = NDArray[np.float64]


class ServerPoint(NamedTuple):
    """A measured configuration: steps a second, asynchronously those of all workers together."""

    servers: int
    workers: int
    steps_per_s: float


@dataclass(frozen=True)
class ServerSpeed:
    """The parameters in seconds (`a` by sample), and measurements: geometric means by (servers, workers)."""

    parameters: tuple[float, ...]
    batch: int  # global; 0: asynchronous
    measured: Mapping[tuple[int, int], float]

    def steps_per_s(self, servers: int, workers: int) -> float:
        """As measured, or else predicted; ConfigError for less than one of each."""
        _check("configuration", ServerPoint(servers, workers, 1.0))
        known = self.measured.get((servers, workers))
        return known or self.predicted(servers, workers)

    def predicted(self, servers: int, workers: int) -> float:
        """By the fit alone."""
        seconds = float(np.dot(_terms(servers, workers, self.batch), self.parameters))
        return (1.0 if self.batch else workers) / seconds


def fit_servers(points: Sequence[ServerPoint], batch: int) -> ServerSpeed | None:
    """The model of one job; `batch` is the global one, 0 for asynchronous training.

    None while fewer configurations were measured than there are parameters; ConfigError names the bad point.
    """
    if not 0 <= batch < 2**32:
        raise ConfigError("batch", f"{batch} is no batch", "samples of all workers together, or 0 for asynchronous")
    logs: dict[tuple[int, int], list[float]] = {}
    for number, point in enumerate(points):
        _check(f"points[{number}]", point)
        logs.setdefault(point[:2], []).append(log(point.steps_per_s))
    measured = {each: exp(sum(found) / len(found)) for each, found in sorted(logs.items())}
    if len(measured) < len(_terms(1, 1, batch)):
        return None
    seconds = [(1.0 if batch else workers) / rate for (_, workers), rate in measured.items()]
    rows = np.array([_terms(*each, batch) for each in measured]) / np.array(seconds)[:, None]
    scales = rows.max(axis=0)
    found, _ = nnls(rows / scales, np.ones(len(rows)))
    return ServerSpeed(tuple((found / scales).tolist()), batch, measured)


def _terms(servers: int, workers: int, batch: int) -> tuple[float, ...]:
    shared = (1.0, workers / servers, float(workers), float(servers))
    return (batch / workers, *shared) if batch else shared


def _check(field: str, point: ServerPoint) -> None:
    for name, count in (("servers", point.servers), ("workers", point.workers)):
        if not 1 <= count <= TASKS_MOST:
            raise ConfigError(f"{field}.{name}", f"{count} is out of range", f"from 1 to {TASKS_MOST}")
    if not RATE_LEAST <= point.steps_per_s <= RATE_MOST:
        problem = f"{point.steps_per_s} is no speed"
        raise ConfigError(f"{field}.steps_per_s", problem, f"from {RATE_LEAST:g} to {RATE_MOST:g}; leave it out")

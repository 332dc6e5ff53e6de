"""The experiment of Optimus, nine jobs on thirteen servers, with and without its placement; steps by a small physics.

A rank is one worker with one parameter server, as both of the paper's baselines have them.  The seven CPU servers hold
three such pairs and the six GPU servers one, by the cores that the public code asks for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from random import Random
from statistics import median

import numpy as np
import pytest

from swarmsched.estimate import BatchRange, Estimate, Resizable, SpeedPoint
from swarmsched.ids import JobId, NodeId
from swarmsched.policies.optimus import _placed, _Sized
from swarmsched.policies.registry import compute_plan
from swarmsched.policies.resizing import opened
from swarmsched.policies.room import Room, may_resize
from swarmsched.replay.cluster import Fleet
from swarmsched.replay.job import ReplayJob
from swarmsched.replay.knowledge import NothingKnown
from swarmsched.replay.perfect import PerfectReplay, Planner, Ticks
from swarmsched.replay.physics import TruePace
from swarmsched.replay.profiles import Shape
from swarmsched.view import ClusterView, Plan, PolicySetting
from tests.swarmsched.models.test_parameter_server import SYNCHRONOUS

PAIRS = {NodeId(f"c{number}"): 3 for number in range(7)} | {NodeId(f"g{number}"): 1 for number in range(6)}
MOST = 12  # pairs of one job
TICK_S, PAUSE_S = 600.0, 30.0

Remote = Callable[[Shape], float]
"""Transfer of a layout, as part of that of workers and servers that never share a machine."""


def apart(shape: Shape) -> float:
    """Spread over the least allocated hosts whatever their role: next to no worker shares one with its servers."""
    return 1.0


def own_bandwidth(shape: Shape) -> float:
    """Each server's connections are limited one by one, as the paper's theorem has it."""
    return 1.0 - min(shape) / sum(shape)


def shared_bandwidth(shape: Shape) -> float:
    """All tasks of a host share its network."""
    return max(pairs * (sum(shape) - pairs) for pairs in shape) / sum(shape)


@dataclass(frozen=True)
class Servers:
    """Synchronous steps by a published surface; what crosses the network depends on the layout."""

    model: str
    total: float  # steps
    remote: Remote

    def step_s(self, shape: Shape) -> float:
        batch, (sample_s, fixed_s, shared_s, worker_s, server_s) = SYNCHRONOUS[self.model]
        pairs = sum(shape)
        transfer_s = shared_s + (worker_s + server_s) * pairs
        return sample_s * batch / pairs + fixed_s + transfer_s * self.remote(shape)

    def pace(self, shape: Shape, batch: int, progress: float) -> TruePace:
        """The batch is fixed."""
        return TruePace(1.0 / self.step_s(shape), self.total)

    def on(self, gpus: object) -> "Servers":
        """All are alike."""
        return self

    def alone_s(self, cluster: Fleet) -> float:
        """Nobody asks here."""
        return 0.0


class Measurements(NothingKnown):
    """Speeds as they are in even layouts on the fewest servers of three pairs, and the steps that are left."""

    def believed(self, job: ReplayJob, told: Estimate | None) -> Estimate:
        """Exact."""
        assert isinstance(job.physics, Servers)
        batch, points = SYNCHRONOUS[job.physics.model][0], []
        for pairs in range(1, MOST + 1):
            nodes = ceil(pairs / 3)
            shape = tuple([pairs // nodes + (at < pairs % nodes) for at in range(nodes)])
            points.append(SpeedPoint(pairs, nodes, ceil(batch / pairs), job.physics.step_s(shape)))
        return Estimate(points=tuple(points), remaining=max(1e-6, job.physics.total - job.progress))


def fair(view: ClusterView, now_s: float) -> Plan:
    """Everybody the same number of pairs, the first to come those that are over; placed as Optimus would."""
    waiting, _, room, pairs = opened(view, may_resize)
    each, over = divmod(pairs, len(waiting))
    ordered = sorted(waiting, key=lambda one: (one.card.submitted_utc_s, one.job_id))
    sized = [
        _Sized(job, 1, np.zeros(MOST + 1), 1.0, ranks=min(MOST, each + (at < over))) for at, job in enumerate(ordered)
    ]
    return Plan(tuple(_placed(sized, room, Room(view.nodes))))


def jobs(seed: int, remote: Remote) -> list[ReplayJob]:
    """Nine in 12,000 s, each 2,000 to 8,000 s long on four servers with a worker and a parameter server apart."""
    rng, found = Random(seed), []
    for number, model in enumerate([*SYNCHRONOUS, rng.choice([*SYNCHRONOUS])]):
        batch, arrival_s = SYNCHRONOUS[model][0], rng.uniform(0.0, 12_000.0)
        steps = rng.uniform(2_000.0, 8_000.0) / Servers(model, 1.0, apart).step_s((1, 1, 1, 1))
        elastic = Resizable(1, MOST, BatchRange(batch, batch, 1, batch))
        physics = Servers(model, steps, remote)
        found.append(ReplayJob(JobId(f"{number:026d}"), model, "", arrival_s, 4, physics, elastic, batch=batch))
    return found


def times(plan: Planner, seed: int, remote: Remote) -> tuple[float, float]:
    """Mean completion time, and the time from the first arrival to the last end, in seconds."""
    work = jobs(seed, remote)
    began_s = min(job.submitted_s for job in work)
    observer = PerfectReplay(work, Fleet(PAIRS), plan, Measurements(), Ticks(TICK_S, PAUSE_S)).run()
    assert len(observer.finished) == len(work)
    assert not observer.policy_errors, observer.first_policy_error
    ends = [job.ended_s or 0.0 for job in observer.finished]
    return (sum(ends) - sum(job.submitted_s for job in work)) / len(work), max(ends) - began_s


optimus = partial(compute_plan, PolicySetting("optimus"))


def ratios(remote: Remote, seeds: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Mean completion time and makespan in units of Optimus with both of its parts; medians."""
    both = [times(optimus, seed, remote) for seed in seeds]
    others: dict[str, tuple[Planner, Remote]] = {
        "sizes alone": (optimus, apart),
        "placement alone": (fair, remote),
        "neither": (fair, apart),
    }
    found = {}
    for name, (plan, layout) in others.items():
        pairs = [(times(plan, seed, layout), one) for seed, one in zip(seeds, both, strict=True)]
        mean, span = (median(other[at] / one[at] for other, one in pairs) for at in (0, 1))
        found[name] = (mean, span)
    return found


@pytest.mark.parametrize("remote", [own_bandwidth, shared_bandwidth])
def test_optimus_is_far_ahead_of_fair_shares_and_most_of_it_is_placement(remote: Remote) -> None:
    """As the paper's 2.39 and 1.63 must be too, which are not reached here."""
    found = ratios(remote, range(8))
    assert found["neither"][0] > 1.4
    assert found["neither"][1] > 1.0
    assert found["sizes alone"][0] > 1.25
    assert found["neither"][0] > 1.02 * found["sizes alone"][0]


def test_even_and_few_hosts_are_best_where_connections_have_bandwidth_of_their_own() -> None:
    """The paper's theorem; where all tasks of a host share its network, four servers can be better than two."""
    shapes = [(4,), (2, 2), (3, 1), (1, 1, 1, 1)]
    own = [own_bandwidth(shape) for shape in shapes]
    assert own == [0.0, 0.5, 0.75, 0.75]
    assert [shared_bandwidth(shape) for shape in shapes] == [0.0, 1.0, 0.75, 0.75]

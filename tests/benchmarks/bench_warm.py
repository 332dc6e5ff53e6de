"""How long a live elastic job waits for a newcomer: from `scale` until all train with it, with a process that waits."""

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.agent.testing import RunningAgent, start_agents, wait_until_sync
from tests.cluster.elastic_job import ElasticJob

VENV = Path(__file__).resolve().parents[2] / ".venv-train"
GPUS, EPOCHS = 6, 400
COLD_PAUSE_S = 5.0  # between two starts without a process that waits
POLL_S = 0.01
READY_S = 60.0

Row = tuple[str, float, str]


def run() -> Iterator[Row]:
    """(measure, median of five newcomers, unit), one agent with and one without."""
    if not VENV.exists():
        print("warm: there is no .venv-train with torch; `make test` makes it", file=sys.stderr)
        return
    waits = {warm: _waits(warm) for warm in (1, 0)}
    for warm, label in ((1, "one process waits with torch imported"), (0, "warm_workers = 0")):
        yield f"from scale until all train with the newcomer, {label}", statistics.median(waits[warm]), "s"
        yield f"the longest, {label}", max(waits[warm]), "s"
    yield "without over with", statistics.median(waits[0]) / statistics.median(waits[1]), "x"


def _waits(warm: int) -> list[float]:
    with start_agents(1, GPUS, {"warm_workers": warm}) as (agent,):
        job = ElasticJob([agent], VENV, epochs=EPOCHS, ranks=1)
        job.trains_with(1)
        return [_grow(agent, job, ranks, is_warm=bool(warm)) for ranks in range(2, GPUS + 1)]


def _grow(agent: RunningAgent, job: ElasticJob, ranks: int, *, is_warm: bool) -> float:
    if is_warm:
        wait_until_sync(lambda: agent.counted("swarm_warm_workers"), READY_S)
    else:
        time.sleep(COLD_PAUSE_S)
    begun_s = time.monotonic()
    agent.call("POST", f"/v1/jobs/{job.id}/scale", {"ranks": ranks})
    while [each["ranks_after"] for each in job.now["rescalings"]][-1:] != [ranks]:
        time.sleep(POLL_S)
    return time.monotonic() - begun_s

"""Whole agents that are killed: when the others' logs say so, and how soon an agent is back."""

import json
import math
import statistics
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from tests.agent.testing import RunningAgent, start_agents, wait_until_sync
from tests.benchmarks.loopback import CONVERGED_TIMEOUT_S, compiled_bytecode, resident_bytes, sees_all

GPUS = 2
DETECTION_LIMIT_S = 40.0
IDLE_S = 5.0
AFTERMATH_S = 12.0


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """Times in seconds.  `comeback_s`: killed and started at once, until it has everybody's record; with the number
    of agents that called it failed."""

    failed_s: list[float]
    suspected_s: list[float]
    comeback_s: list[float]
    comebacks_failed: int
    resident_bytes: float


def agent_figures(count: int, kills: int) -> AgentFigures:
    """Agents on loopback; `kills` of them die one after another, then as many are killed and started at once."""
    with compiled_bytecode(), start_agents(count, GPUS, {"log_format": "json"}) as agents:
        _wait_for_all(agents)
        time.sleep(IDLE_S)
        size = statistics.median(resident_bytes(agent.process.pid) for agent in agents)
        failed_s, suspected_s = [], []
        for victim in agents[1 : kills + 1]:
            survivors = [agent for agent in agents if agent is not victim]
            said_s = _killed(victim, survivors)
            failed_s.append(max(said_s["failed"]))
            suspected_s += said_s["suspect"]
            victim.restart()
            _wait_for_all(agents)
        returned = [_comeback(victim, agents) for victim in agents[1 : kills + 1]]
        return AgentFigures(
            failed_s, suspected_s, [time_s for time_s, _ in returned], sum(failed for _, failed in returned), size
        )


def _killed(victim: RunningAgent, survivors: list[RunningAgent]) -> dict[str, list[float]]:
    """When each survivor's log first calls it suspect and failed."""
    killed_s = time.time()
    victim.kill()

    def first_s(agent: RunningAgent, *statuses: str) -> float:
        return min(
            (at_s for at_s, status in _said(agent, victim.name, killed_s) if status in statuses), default=math.inf
        )

    def is_known() -> bool:
        return all(first_s(agent, "failed") < math.inf for agent in survivors)

    wait_until_sync(is_known, DETECTION_LIMIT_S, f"all call {victim.name} failed")
    return {
        "failed": [first_s(agent, "failed") - killed_s for agent in survivors],
        "suspect": [first_s(agent, "suspect", "failed") - killed_s for agent in survivors],
    }


def _comeback(victim: RunningAgent, agents: list[RunningAgent]) -> tuple[float, int]:
    killed_s = time.time()
    victim.kill()
    victim.restart()
    wait_until_sync(lambda: sees_all(victim, len(agents)), CONVERGED_TIMEOUT_S, f"{victim.name} sees all")
    back_s = time.time() - killed_s
    time.sleep(AFTERMATH_S)
    others = [agent for agent in agents if agent is not victim]
    verdicts = [status for agent in others for _, status in _said(agent, victim.name, killed_s)]
    return back_s, verdicts.count("failed")


def _said(agent: RunningAgent, subject: str, since_s: float) -> list[tuple[float, str]]:
    """(wall time, status) of each line on a member from then on."""
    told = f"member.changed: {subject} is "
    documents = [json.loads(line) for line in agent.log_file.read_text().splitlines() if told in line]
    said = [(datetime.fromisoformat(document["time"]).timestamp(), document["status"]) for document in documents]
    return [(at_s, status) for at_s, status in said if at_s >= since_s]


def _wait_for_all(agents: list[RunningAgent]) -> None:
    for agent in agents:
        wait_until_sync(partial(sees_all, agent, len(agents)), CONVERGED_TIMEOUT_S, f"{agent.name} sees all")

"""Faults as data: what goes wrong, when, and for how long.

A plan is a list of faults that was drawn before the run, each complete in itself: it begins and it ends, and leaving
one out changes nothing about the others.  So a plan can be printed, cut down to what a failure needs, and replayed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

FAULT_CLASSES: Mapping[str, str] = {
    "loss": "messages are lost, up to 30 %",
    "duplicate": "messages arrive twice, up to 50 %",
    "replay": "old messages arrive again seconds later, up to 50 %",
    "delay": "every message takes longer, log-normally, and messages overtake one another",
    "clog": "one link holds everything back for a while",
    "partition": "the swarm falls into two parts",
    "one-way-partition": "one part of the swarm does not hear another, which hears it",
    "crash": "an agent is killed, what it had not made durable is lost, and started again after a while",
    "restart": "an agent is killed and started again at once, once or several times",
    "power-cut": "a machine is off for a while: its tasks end with it",
    "lost-host": "a machine is off for ever",
    "lost-holders": "a job's first holders are killed one after another, then the agents beside its ranks restart",
    "wipe": "a machine comes back with an empty disk",
    "pause": "an agent stands still, for up to a minute",
    "slow-loop": "an agent's event loop is late again and again",
    "slow-disk": "commits take up to seconds",
    "full-disk": "commits do not complete for a while",
    "clock-drift": "a machine's monotonic clock runs up to 5 % fast or slow",
    "clock-jump": "wall clocks are set up to an hour forward or back",
    "send-error": "the kernel refuses to send to some peers (EPERM)",
    "slow-planner": "an agent's planner takes seconds, or fails",
    "gpu-trouble": "a GPU vanishes, fails, is used by strangers or cannot be read for a while",
    "failing-starts": "a machine fails every start for a while: no process, environment or file is to be had",
    "short-disk": "a machine's disk is nearly full for a while, and takes no files of jobs",
    "lost-files": "a machine is off for a while, and what its tasks wrote in the last half minute is lost",
    "lost-database": "an agent's database is gone while its tasks run on",
    "same-name": "a second machine speaks under a name that is taken, until it is switched off",
    "lost-connection": "the members of an elastic gang lose one another, or a switch succeeds on one only; all live",
    "killed-workers": "all workers of an elastic gang that train are killed at once",
    "killed-shim": "the shim of a task is killed, where others of its job are beside it if there are any",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the class `kind`, from `at_s` on; the parameters are JSON values and depend on the class."""

    at_s: float
    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """An object of plain values."""
        return {"at_s": self.at_s, "class": self.kind, **self.parameters}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read back what `to_json` wrote; ValueError for a class that does not exist."""
        parameters = dict(document)
        at_s, kind = float(parameters.pop("at_s")), str(parameters.pop("class"))
        if kind not in FAULT_CLASSES:
            raise ValueError(f"class {kind!r} is not one of {', '.join(FAULT_CLASSES)}")
        return cls(at_s, kind, parameters)


FaultPlan = Sequence[Fault]

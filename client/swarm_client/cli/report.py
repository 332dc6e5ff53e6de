"""`swarm report`: inside a task, what `swarm_elastic.report` is for scripts that are not Python."""

from __future__ import annotations

import os

from swarm_client.failure import OK, Failure, UsageError
from swarm_client.options import Arguments, Command, nearest
from swarm_client.quantity import number
from swarm_client.session import Session
from swarm_client.task_socket import ask_agent

TIMEOUT_S = 2.0
SHOWN = 40
NOT_FINITE = ("nan", "inf", "infinity")
FIGURES = (
    "step",
    "samples",
    "epoch",
    "loss",
    "grad_noise",
    "data_wait",
    "total_steps",
    "total_epochs",
    "target_loss",
    "global_batch",
    "parameter_bytes",
    "moved_bytes",
    "largest_bytes",
    "sample_flops",
    "decode_core_s",
)

COMMAND = Command(
    "report",
    "Tell how far the job that this runs in has come: `swarm ps` and `swarm status` show it.",
    positionals="FIGURE=NUMBER...",
    details=f"Figures: {', '.join(FIGURES)}.\n"
    "Counts are those since the beginning of training; samples are those of all ranks.\n"
    "Exit code: 0 taken, 1 not taken or the agent did not answer, 2 not inside a task.",
    examples=("swarm report step=100 loss=0.31 total_steps=9000",),
    has_output=False,
)


def execute(session: Session, arguments: Arguments) -> int:
    """Exit code: 0 when all figures were taken, 1 when not, 2 outside of a task."""
    if not arguments.positionals:
        raise UsageError("report needs a figure", "swarm report step=100 loss=0.31")
    figures: dict[str, float] = {}
    for word in arguments.positionals:
        name, value = _figure(word)
        if name in figures:
            raise UsageError(f"{name} is given twice", "give it once")
        figures[name] = value
    rank = os.environ.get("RANK", "0")
    answer = ask_agent({"type": "report", "rank": int(rank) if rank.isdecimal() else 0, **figures}, TIMEOUT_S)
    if answer.get("ok") is not True:
        problem = str(answer.get("problem") or "the agent's answer made no sense")
        raise Failure(f"nothing was reported: {problem}", str(answer.get("remedy") or ""))
    ignored = answer.get("ignored")
    if isinstance(ignored, list) and ignored:
        problems = "; ".join(str(each["problem"]) for each in ignored)
        raise Failure(f"left out of the report: {problems}", str(ignored[0]["remedy"]))
    return OK


def _figure(word: str) -> tuple[str, float]:
    name, _, text = word.partition("=")
    if name not in FIGURES:
        raise UsageError(f"there is no figure {name!r}{nearest(name, FIGURES)}", f"figures: {', '.join(FIGURES)}")
    try:
        return name, number(text)
    except ValueError:
        if text.lower().lstrip("+-") in NOT_FINITE:  # training that diverged: the agent counts it, and takes the others
            return name, float(text)
        raise UsageError(f"{name} is {text[:SHOWN]!r}, not a number", f"swarm report {name}=100") from None

"""What the swarm believes of a job's speed, as a small table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swarm_client.output import Column, Printer, Row
from swarm_client.quantity import show_count, show_duration, show_ratio

COLUMNS: tuple[Column[Row], ...] = (
    Column("RANKS", lambda row: str(row["ranks"]), is_right=True),
    Column("GPUS", lambda row: str(row["gpus"]), is_right=True),
    Column("NODES", lambda row: str(row["nodes"]), is_right=True),
    Column("S/STEP", lambda row: f"{row['step_seconds']:.3g}", is_right=True),
    Column("SAMPLES/S", lambda row: f"{row['samples_per_second']:.4g}", is_right=True),
    Column("SPEED-UP", lambda row: f"{row['speed_up']:.2f}", is_right=True),
    Column("BY", lambda row: row["source"] + ", now" * row["is_current"]),
)


def model_lines(model: Mapping[str, Any], gpus_per_rank: int, printer: Printer) -> Iterator[str]:
    """A heading, and a row for each world size; the speed-up is over the first of them."""
    rows, first = model["speed"], model["speed"][0]["samples_per_second"]
    added = [
        {**row, "gpus": row["ranks"] * gpus_per_rank, "speed_up": row["samples_per_second"] / first} for row in rows
    ]
    yield f"{_heading(model)}:"
    yield from (f"  {line}" for line in printer.table_lines(added, COLUMNS))


def _heading(model: Mapping[str, Any]) -> str:
    measured = sum(row["source"] == "measured" for row in model["speed"])
    fit = f", the fit is off by {show_ratio(model['speed_error_ratio'])}" if measured > 1 else ""
    if measured == 1 < len(model["speed"]):
        fit = ", and other sizes are taken to scale perfectly until one was run"
    noise = f", gradient noise {model['grad_noise']:.3g}" if model.get("grad_noise") is not None else ""
    prior = ", taken from jobs of its kind" if model.get("is_prior") else ""
    warmup_s = model.get("warmup_seconds")
    warmup = f", begins to train {show_duration(warmup_s)} after its ranks run" if warmup_s else ""
    return (
        f"Speed by its model ({show_count(measured, 'size')} measured{prior}{fit}), "
        f"global batch {model['global_batch']}{noise}{warmup}"
    )

"""What the swarm believes of a job's speed, as a small table for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm_client.output import Column, Printer
from swarm_client.quantity import show_count, show_duration, show_ratio

if TYPE_CHECKING:
    from swarmsched.documents import ModelDocument, SpeedDocument

COLUMNS: tuple[Column[tuple[SpeedDocument, int, float]], ...] = (
    Column("RANKS", lambda row: str(row[0].ranks), is_right=True),
    Column("GPUS", lambda row: str(row[1]), is_right=True),
    Column("NODES", lambda row: str(row[0].nodes), is_right=True),
    Column("S/STEP", lambda row: f"{row[0].step_seconds:.3g}", is_right=True),
    Column("SAMPLES/S", lambda row: f"{row[0].samples_per_second:.4g}", is_right=True),
    Column("SPEED-UP", lambda row: f"{row[2]:.2f}", is_right=True),
    Column("BY", lambda row: row[0].source + ", now" * row[0].is_current),
)
"""Of a speed, with the GPUs that it takes and what it gains."""


def model_lines(model: ModelDocument, gpus_per_rank: int, printer: Printer) -> Iterator[str]:
    """A heading, and a row for each world size; the speed-up is over the first of them."""
    first = model.speed[0].samples_per_second
    added = [(row, row.ranks * gpus_per_rank, row.samples_per_second / first) for row in model.speed]
    yield f"{_heading(model)}:"
    yield from (f"  {line}" for line in printer.table_lines(added, COLUMNS))


def _heading(model: ModelDocument) -> str:
    measured = sum(row.source == "measured" for row in model.speed)
    fit = f", the fit is off by {show_ratio(model.speed_error_ratio)}" if measured > 1 else ""
    if measured == 1 < len(model.speed):
        fit = ", and other sizes are taken to scale perfectly until one was run"
    noise = f", gradient noise {model.grad_noise:.3g}" if model.grad_noise is not None else ""
    prior = ", taken from jobs of its kind" if model.is_prior else ""
    warmup_s = model.warmup_seconds
    warmup = f", begins to train {show_duration(warmup_s)} after its ranks run" if warmup_s else ""
    return (
        f"Speed by its model ({show_count(measured, 'size')} measured{prior}{fit}), "
        f"global batch {model.global_batch}{noise}{warmup}"
    )

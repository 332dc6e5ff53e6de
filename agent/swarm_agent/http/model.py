"""What the swarm believes of a job's speed, by world size: measured where it ran, else as the planner's fit has it."""

from swarm_agent.http.exchange import Document
from swarm_agent.http.schema import COUNT, FLAG, NUMBER, SECONDS, Schema, array, choice, maybe, record
from swarmsched.estimate import Estimate, SpeedQuestion, SpeedTable

SPEED: Schema = {
    "ranks": COUNT,
    "nodes": COUNT,
    "step_seconds": SECONDS,
    "samples_per_second": NUMBER,
    "source": choice("measured", "fitted"),
    "is_current": FLAG,
}
MODEL: Schema = {
    "global_batch": COUNT,
    "speed": array(record(SPEED)),
    "speed_error_ratio": NUMBER,
    "grad_noise": maybe(NUMBER),
    "remaining_steps": maybe(NUMBER),
    "remaining_error_ratio": maybe(NUMBER),
    "warmup_seconds": maybe(SECONDS),
    "is_prior": FLAG,
}
"""Of jobs that take several sizes and have reported; the noise is of the largest batch that was measured."""


def model_document(question: SpeedQuestion, table: SpeedTable) -> Document:
    """Of the world sizes that were asked for."""
    estimate: Estimate = question.estimate
    return {
        "global_batch": table.global_batch,
        "speed": [
            {
                "ranks": row.ranks,
                "nodes": row.nodes,
                "step_seconds": row.step_s,
                "samples_per_second": row.samples_per_s,
                "source": "measured" if row.is_measured else "fitted",
                "is_current": row.ranks == question.held,
            }
            for row in table.rows
        ],
        "speed_error_ratio": table.error,
        "grad_noise": estimate.noise[-1].noise if estimate.noise else None,
        "remaining_steps": estimate.remaining or None,
        "remaining_error_ratio": estimate.remaining_error if estimate.remaining else None,
        "warmup_seconds": estimate.warmup_s or None,
        "is_prior": estimate.is_prior,
    }

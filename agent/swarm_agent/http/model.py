"""What the swarm believes of a job's speed, by world size: measured where it ran, else as the planner's fit has it."""

from swarmsched.documents import ModelDocument, SpeedDocument
from swarmsched.estimate import Estimate, SpeedQuestion, SpeedTable


def model_document(question: SpeedQuestion, table: SpeedTable) -> ModelDocument:
    """Of the world sizes that were asked for."""
    estimate: Estimate = question.estimate
    return ModelDocument(
        global_batch=table.global_batch,
        speed=[
            SpeedDocument(
                ranks=row.ranks,
                nodes=row.nodes,
                step_seconds=row.step_s,
                samples_per_second=row.samples_per_s,
                source="measured" if row.is_measured else "fitted",
                is_current=row.ranks == question.held,
            )
            for row in table.rows
        ],
        speed_error_ratio=table.error,
        grad_noise=estimate.noise[-1].noise if estimate.noise else None,
        remaining_steps=estimate.remaining or None,
        remaining_error_ratio=estimate.remaining_error if estimate.remaining else None,
        warmup_seconds=estimate.warmup_s or None,
        is_prior=estimate.is_prior,
    )

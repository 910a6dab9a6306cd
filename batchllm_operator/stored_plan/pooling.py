"""What a plan says of its model's vectors."""

from __future__ import annotations

from pydantic import Field

from batchllm_operator.stored_plan.counts import Frozen


class PlannedPooling(Frozen):
    """Of the model's files, for the tasks `embed` and `pool`."""

    embedding_size: int | None = Field(default=None, ge=1)
    """Numbers of an embedding, if the task is to embed."""
    score_labels: tuple[str, ...] = ()
    """Names of the scores of a pooling head, in their order; none if the model has none."""
    reason_against_sharing: str | None = None
    """Why each prompt is planned by itself; None if prompts share prefixes."""

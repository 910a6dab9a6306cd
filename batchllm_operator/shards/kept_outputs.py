"""Outputs of a published plan for a plan that asks only its failed rows again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.errors import IncompleteRunError, PlanError
from batchllm_operator.shards.joining import FinishedRound
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def why_not_retried(plan: StoredPlan) -> str | None:
    """The reason why only all rows of a plan can be asked again; None if its failed rows can."""
    manifest = plan.manifest
    if len(manifest.spec.rounds) > 1:
        return "some prompts need answers to others"
    if manifest.row_parts:
        return "it was planned on Spark"
    prompts = manifest.spec.prompts.keys()
    if prompts and prompts & set(plan.rows_schema().names):
        return "some of its answers were taken by --only"
    return None


class KeptOutputs:
    """The outputs of a plan's parts that have no error, for the same rows in the same order.

    Raises `PlanError`: the plan isn't one of those, or its parts are gone.
    """

    def __init__(self, plan: StoredPlan) -> None:
        self.plan_id = plan.manifest.retries or plan.manifest.plan_id
        """Of the first plan that asked the rows."""
        cure = "leave --retry out to plan all rows"
        if (reason := why_not_retried(plan)) is not None:
            raise PlanError(
                f"plan {plan.folder.uri}: its failed rows aren't apart: {reason}; {cure}"
            )
        try:
            self._sources = FinishedRound.of(plan).outputs
        except IncompleteRunError as error:
            raise PlanError(f"{error}. Where they were removed, {cure}") from error
        self.has_output = np.zeros(plan.manifest.counts.num_rows, dtype=np.bool_)
        """By row; by ask in a job of several prompts."""
        for kept in self._parts(["row_idxs", "error"]):
            self.has_output[pc.list_flatten(kept["row_idxs"]).to_numpy()] = True

    def outputs(self, columns: list[str]) -> Iterator[pa.Table]:
        """These columns of parts, with all tokens of the prompts cached: nothing is computed."""
        place = columns.index("num_cached_tokens")
        for kept in self._parts(columns):
            yield kept.set_column(place, columns[place], kept["num_prompt_tokens"])

    def _parts(self, columns: list[str]) -> Iterator[pa.Table]:
        for source in self._sources:
            for part in source.parts(columns):
                yield part.filter(pc.is_null(part["error"]))

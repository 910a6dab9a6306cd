"""The failed rows of a run, from its plan and its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from batchllm_operator.commit.partition import FinishedShard
from batchllm_operator.shards.parts import errors_in
from batchllm_operator.shards.row_errors import NUM_EXAMPLES, RowErrors
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def find_errors(
    plan: StoredPlan, shards: Sequence[FinishedShard], num_examples: int = NUM_EXAMPLES
) -> RowErrors:
    """Collect the errors of planning and of the shards' parts."""
    errors = RowErrors(num_examples)
    errors.add_rejected(plan)
    for shard in shards:
        for error, row_idxs in _failed_requests(shard):
            errors.add(error, row_idxs)
    return errors


def _failed_requests(shard: FinishedShard) -> Iterator[tuple[str, list[int]]]:
    entries = [entry for entry in shard.entries if entry.num_failed_rows]
    for part in replace(shard, entries=entries).parts(["row_idxs", "error"]):
        yield from errors_in(part)

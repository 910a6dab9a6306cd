"""Stops a run whose failed rows alone make commit refuse the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from batchllm_operator.row_error import RowError
from batchllm_operator.run.shard_queue import ShardQueue
from batchllm_operator.run.shard_run import ShardRun
from batchllm_operator.shards.parts import part_schema, read_ledger
from batchllm_operator.shards.row_errors import RowErrors, are_too_many, too_many_failed
from batchllm_operator.shards.spills import read_spills, stored_errors
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def check_failures(plan: StoredPlan, runs: Sequence[ShardRun], shards: ShardQueue) -> None:
    """Check that commit can still publish.

    Failed rows are those that planning has rejected, those of `runs`, and those of other shards as
    they were last seen.

    Raises:
        FailedRowsError: there are more than the spec allows.
    """
    spec, counts = plan.manifest.spec, plan.manifest.counts
    others = {idx: each.num_failed for idx, each in shards.elsewhere().items()}
    num_others = sum(others.values())
    num_own = sum(run.num_failed_rows for run in runs)
    num_failed = counts.num_rejected_rows + num_own + num_others
    if not are_too_many(spec, num_failed, counts.num_rows):
        return
    errors = RowErrors()
    if num_own:
        found = [run.errors() for run in runs]
    else:  # another shard tells the kinds
        shard_idx = max(others, key=lambda idx: others[idx])
        found, num_others = [_stored(plan, shard_idx)], num_others - others[shard_idx]
    errors.add_all(chain.from_iterable(found))
    if counts.num_rejected_rows:
        errors.add_rejected(plan)
    raise too_many_failed(
        spec,
        counts.num_rows,
        plan,
        errors,
        verdict="commit would publish nothing, so the run stops",
        cure="To go on all the same, raise max_failed_fraction in the spec, plan again and run:"
        " finished rows are kept",
        num_others=num_others,
    )


def _stored(plan: StoredPlan, shard_idx: int) -> Iterator[tuple[RowError, list[int]]]:
    """The error and the rows of each request of a shard that is stored as failed."""
    folder, plan_id = plan.run_folder(shard_idx), plan.manifest.plan_id
    entries = read_ledger(folder, plan_id)
    schema = part_schema(plan.manifest.spec)
    spilled = read_spills(folder, plan_id, shard_idx, entries, schema)
    return stored_errors(folder, entries.values(), spilled.values())

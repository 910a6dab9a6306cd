"""Progress of a shard, made up."""

from datetime import UTC, datetime
from typing import Any

from batchllm_operator.shards.attempts import PROGRESS_FILE, ShardProgress, attempt_name
from batchllm_operator.stored_plan.counts import NOTHING, Counts
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def counts(**fields: Any) -> Counts:
    """Counts that are 0 but for these."""
    return Counts(**{**dict(NOTHING), **fields})


def shard_progress(**changes: Any) -> ShardProgress:
    """Of a shard that is half done; `changes` may name fields of `done`, and `num_rows_done`."""
    fields: dict[str, Any] = {
        "plan_id": "plan-abc",
        "shard_idx": 3,
        "attempt": 2,
        "host": "node-1",
        "state": "running",
        "worker": 0,
        "num_workers": 1,
        "started_at": datetime(2026, 1, 31, 2, tzinfo=UTC),
        "updated_at": datetime(2026, 1, 31, 2, 10, tzinfo=UTC),
        "elapsed_s": 600.5,
        "engine_start_s": 40.0,
        "num_gpus": 2,
        "num_rows": 100,
        "num_parts": 10,
        "num_parts_done": 4,
        "computed_tokens_per_s": 12.5,
        "output_tokens_per_s": 2.5,
        "eta_s": 590.0,
        "num_rows_done": 50,
        "num_failed_rows": 1,
        "num_logical_tokens": 1000,
        "num_prompt_tokens": 900,
        "num_cached_tokens": 500,
        "num_output_tokens": 77,
        **changes,
    }
    done = {
        name: fields.pop(name) for name in list(fields) if name not in ShardProgress.model_fields
    }
    done["num_rows"] = done.pop("num_rows_done")
    held_s = {"gpu_held_s": fields["elapsed_s"]}
    return ShardProgress(**{**held_s, **fields, "done": fields.get("done", counts(**done))})


def leave_progress(plan: StoredPlan, shard_idx: int, attempt: int = 1, **changes: Any) -> None:
    """Write the progress of an attempt at a shard, half done but for `changes`, as attempts do."""
    shard = plan.shard(shard_idx)
    of_plan = {"plan_id": plan.manifest.plan_id, "shard_idx": shard_idx, "attempt": attempt}
    sizes = {"num_rows": shard.num_rows, "num_parts": shard.num_parts, "num_parts_done": 0}
    progress = shard_progress(**{**of_plan, **sizes, **changes})
    folder = plan.run_folder(shard_idx).child(attempt_name(attempt))
    folder.write_bytes(PROGRESS_FILE, progress.to_bytes())

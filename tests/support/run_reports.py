"""A run report in which every part of the page has something to show."""

from datetime import UTC, datetime
from typing import Any

from support.shard_progress import counts

from batchllm_operator.prefixes.sharing import Histogram, LargeGroup, PlanSharing, TreeNode
from batchllm_operator.stored_plan.bill import Bill, EarlierRun
from batchllm_operator.stored_plan.counts import PlanCounts
from batchllm_operator.stored_plan.run_report import (
    ErrorKind,
    FailedRow,
    RunReport,
    SampleRow,
    ShardRun,
)
from batchllm_operator.stored_plan.timeline import Timeline, WorkBar

PLAN_URI = "/lake/out/_batchllm/snippets/2026-01-31/plan-0123456789abcdef"


def make_report(**changes: Any) -> RunReport:
    """As little as a report holds, but for `changes`; those of `plan` and `done` by field."""
    plan = {
        "num_rows": 1234,
        "num_rejected_rows": 34,
        "num_duplicate_rows": 56,
        "num_requests": 1144,
        "num_groups": 300,
        "num_shared_groups": 250,
        "num_logical_tokens": 100_000,
        "num_planned_tokens": 38_800,
        "num_optimal_tokens": 34_600,
        "num_algorithm_1_saved_tokens": 0,
        "num_exact_saved_tokens": 0,
        **changes.pop("plan", {}),
    }
    done = {
        "num_requests": 1144,
        "num_rows": 1200,
        "num_logical_tokens": 100_000,
        "num_prompt_tokens": 95_000,
        "num_cached_tokens": 55_000,
        "num_output_tokens": 9_876,
        "engine_s": 12.34,
        **changes.pop("done", {}),
    }
    empty = Histogram(edges=(), counts=())
    fields: dict[str, Any] = {
        "job": "snippets",
        "ds": "2026-01-31",
        "run_id": "snippets/2026-01-31/0123456789abcdef",
        "plan_uri": PLAN_URI,
        "table_uri": "/lake/out",
        "report_uri": f"{PLAN_URI}/report.json",
        "model": "/models/tiny",
        "committed_at": datetime(2026, 2, 1, 3, 4, tzinfo=UTC),
        "plan": PlanCounts(**plan),
        "done": counts(**done),
        "errors_by_kind": {"prompt_too_long": 4, "null_value": 30},
        "bill": Bill(gpu_s=None, usd_per_hour=None),
        "num_shards": 4,
        "sharing": PlanSharing(prefix_lengths=empty, share_degrees=empty, largest_groups=()),
        "sample_rows": (
            SampleRow(key={"id": "a-1"}, generated_text="A snippet."),
            SampleRow(key={"id": "b", "lang": "de"}, generated_text="Zwei\nZeilen"),
            SampleRow(key={"id": "c"}, generated_text="long " * 100),
        ),
        **changes,
    }
    return RunReport(**fields)


def make_timeline(shard_idx: int = 0, num_bins: int = 60, **changes: Any) -> Timeline:
    fields: dict[str, Any] = {
        "shard_idx": shard_idx,
        "worker": 0,
        "num_steps": 600,
        "duration_s": 30.0,
        "chunk_size": 2048,
        "bin_s": 30.0 / num_bins,
        "num_decode_tokens": tuple(100.0 + idx for idx in range(num_bins)),
        "num_distinct_tokens": tuple(900.0 - 10 * idx for idx in range(num_bins)),
        "num_prefix_tokens": tuple(700.0 if idx % 7 else 0.0 for idx in range(num_bins)),
        "kv_used": tuple(min(1.0, idx / 40) for idx in range(num_bins)),
        "kv_held": tuple(0.1 for _ in range(num_bins)),
        "valley": tuple(1.0 if 40 <= idx < 48 else 0.0 for idx in range(num_bins)),
        "num_valley_steps": 60,
        "valley_share": 0.125,
        "num_preempted": 2,
        **changes,
    }
    return Timeline(**fields)


def _earlier(ds: str, gpu_s: float | None, cost_usd: float | None) -> EarlierRun:
    return EarlierRun(
        ds=ds,
        num_rows=1200,
        num_failed_rows=3,
        achieved_saving=0.5,
        gpu_s=gpu_s,
        cost_usd=cost_usd,
        unshared_usd=cost_usd and 2 * cost_usd,
    )


def _bar(
    worker: int, shard_idx: int, attempt: int, start_s: float, end_s: float, how: str = "finished"
) -> WorkBar:
    fields: dict[str, Any] = {"host": "node-1", "shard_idx": shard_idx, "attempt": attempt}
    return WorkBar(worker=worker, start_s=start_s, end_s=end_s, ending=how, **fields)


def make_full_report(**changes: Any) -> RunReport:
    """With a bill, errors, shards, timelines and shared prefixes."""
    shards = tuple(
        ShardRun(
            shard_idx=idx,
            done=counts(
                num_rows=300,
                num_failed_rows=idx,
                num_requests=286,
                num_prompt_tokens=9_600,
                num_output_tokens=2_400,
                engine_s=2.5 + idx,
            ),
            num_attempts=1 + idx % 2,
            gpu_s=20.0 + idx,
            predicted_gpu_s=4.0,
        )
        for idx in range(4)
    )
    fields: dict[str, Any] = {
        "bill": Bill(
            gpu_s=86.0,
            start_gpu_s=20.0,
            usd_per_hour=3.0,
            gpu="H100",
            predicted_gpu_s=40.0,
            unshared_gpu_s=90.0,
        ),
        "earlier": (
            _earlier("2026-01-28", 80.0, 0.0667),
            _earlier("2026-01-29", None, None),
            _earlier("2026-01-30", 96.0, 0.08),
        ),
        "failed_rows": (
            FailedRow({"id": "n-1"}, "null_value", "column 'body' is null"),
            FailedRow({"id": "n-2"}, "null_value", "column 'body' is null"),
            FailedRow({"id": "long-1"}, "prompt_too_long", "9,000 tokens"),
        ),
        "retry": f"batchllm job --retry {PLAN_URI}",
        "work": (
            _bar(0, 0, 1, 0.0, 20.0),
            _bar(0, 2, 1, 20.0, 30.0, "silent"),
            _bar(1, 1, 1, 0.0, 22.0),
            _bar(1, 2, 2, 22.0, 44.0),
        ),
        "num_attempts": 4,
        "errors": (
            ErrorKind(
                kind="null_value",
                num_rows=30,
                example_keys=({"id": "n-1"}, {"id": "n-2"}),
                example_error="null_value: column 'body' is null",
            ),
            ErrorKind(
                kind="prompt_too_long",
                num_rows=4,
                example_keys=({"id": "long-1"},),
                example_error="prompt_too_long: 9,000 tokens",
            ),
        ),
        "shards": shards,
        "timelines": (make_timeline(3), make_timeline(2)),
        "sharing": PlanSharing(
            prefix_lengths=Histogram(edges=(64, 128, 256, 512), counts=(20, 200, 30)),
            share_degrees=Histogram(edges=(1, 2, 4, 8), counts=(50, 94, 1000)),
            largest_groups=(
                LargeGroup(
                    num_requests=9,
                    num_prefix_tokens=500,
                    num_saved_tokens=4000,
                    first_words="… How to prune roses",
                ),
            ),
            tree=tuple(
                TreeNode(level=level, num_requests=size, num_tokens=num, num_saved_tokens=num_saved)
                for level, size, num, num_saved in (
                    *((0, 1144, 0, 56_000), (1, 900, 40, 48_000), (2, 300, 30, 9_000)),
                    *((2, 200, 10, 2_000), (1, 100, 30, 3_000)),
                )
            ),
        ),
        **changes,
    }
    return make_report(**fields)

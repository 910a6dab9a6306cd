"""Shards of a plan: ranges of the sorted prompts, and counts that engines achieve."""

from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.fake_job import DS, document_rows, fake_spec, finish, planned, write_table
from support.staged_job import run_only

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.cost import MODEL_SHAPES, EngineLimits, find_gpu
from batchllm_operator.plan.arrange import usual_num_shards
from batchllm_operator.plan.estimate import Target
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.stored_plan.stored_plan import StoredPlan

TARGET = Target(find_gpu("H100"), MODEL_SHAPES["Mistral-7B"], EngineLimits())


def site_rows(num_sites: int = 5, num_documents: int = 4, num_queries: int = 3) -> list[Any]:
    """Three levels of prefixes."""
    return [
        {
            "row_key": f"{site}-{document}-{query}",
            "document": f"Site {site} has rules. " * 6 + f"This is text {document}. " * 6,
            "query": f"question {query}",
        }
        for query in range(num_queries)
        for document in range(num_documents)
        for site in range(num_sites)
    ]


def plan_sites(folder: Path, num_shards: int | None, **changes: Any) -> StoredPlan:
    return planned(folder, site_rows(), planner={"num_shards": num_shards}, **changes)


def read_shards(plan: StoredPlan) -> list[list[dict[str, Any]]]:
    return [
        pq.read_table(plan.folder.full_path(shard.file)).to_pylist()
        for shard in plan.manifest.shards
    ]


def num_computed(prompts: list[list[int]], block_size: int) -> int:
    """By an engine that forgets nothing, prompt after prompt."""
    seen: set[tuple[int, ...]] = set()
    computed = 0
    for prompt in prompts:
        blocks = [tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)]
        num_found = sum(block in seen for block in blocks)
        computed += len(prompt) - min(num_found, (len(prompt) - 1) // block_size) * block_size
        seen.update(blocks)
    return computed


@pytest.mark.parametrize("num_shards", [1, 3, 7])
@pytest.mark.parametrize("block_size", [None, 5])
def test_planned_is_what_the_shards_engines_compute(
    tmp_path: Path, num_shards: int, block_size: int | None
) -> None:
    plan = plan_sites(tmp_path, num_shards, engine={"block_size": block_size})
    shards = [[row["prompt_token_ids"] for row in rows] for rows in read_shards(plan)]
    computed = [num_computed(prompts, block_size or 16) for prompts in shards]
    assert [shard.num_prefill_tokens for shard in plan.manifest.shards] == computed
    counts = plan.manifest.counts
    assert counts.num_planned_tokens == sum(computed)
    everything = [prompt for prompts in shards for prompt in prompts]
    assert counts.num_optimal_tokens == num_computed(everything, block_size or 16)


def test_a_shard_is_a_range_of_the_sorted_prompts_and_of_groups(tmp_path: Path) -> None:
    plan = plan_sites(tmp_path, 7)
    shards = read_shards(plan)
    for rows, following in pairwise(shards):
        assert max(row["prompt_token_ids"] for row in rows) < min(
            row["prompt_token_ids"] for row in following
        )
    requests = [row for rows in shards for row in rows]
    ids = [group_id for group_id, _ in groupby(requests, key=itemgetter("group_id"))]
    assert ids == list(range(plan.manifest.counts.num_groups)), "in the order of the plan"
    assert [row["request_idx"] for row in requests] == list(range(len(requests)))
    assert plan.manifest.imbalance < 1.2


def test_blocks_of_another_size_change_what_is_planned_but_no_shard(tmp_path: Path) -> None:
    small, large = (plan_sites(tmp_path, 3, engine={"block_size": size}) for size in (4, 64))
    assert small.folder == large.folder
    assert small.manifest.counts.num_planned_tokens < large.manifest.counts.num_planned_tokens


@pytest.mark.parametrize("num_shards", [1, 3])
def test_what_is_planned_is_achieved(tmp_path: Path, num_shards: int) -> None:
    plan = plan_sites(tmp_path, num_shards)
    for shard_idx in range(len(plan.manifest.shards)):  # an engine each
        run_only(plan, shard_idx)
    report = commit_run(plan.folder.uri)
    assert report.achieved_saving == pytest.approx(report.planned_saving, abs=0.01)
    assert 0.5 < report.plan.planned_saving_ratio <= report.plan.optimal_saving_ratio


def test_hashes_of_prefixes_follow_the_groups(tmp_path: Path) -> None:
    """A group in two shards is two groups, by which a later plan knows the same prefix."""
    estimate = {"estimated_output_tokens": {"learned": True}}
    write_table(tmp_path / "documents", document_rows(3, 30))
    planner = {"num_shards": 5, **estimate}
    plan = plan_job(fake_spec(tmp_path, planner=planner), DS)
    hashes = pq.read_table(plan.folder.full_path("groups.parquet"))["prefix_hash"].to_pylist()
    assert len(hashes) == plan.manifest.counts.num_groups > 3
    prefixes: dict[tuple[int, ...], set[int]] = {}
    for row in (row for rows in read_shards(plan) for row in rows):
        cut = row["num_prefix_tokens"] // 64 * 64
        if cut:
            prefix = tuple(row["prompt_token_ids"][:cut])
            prefixes.setdefault(prefix, set()).add(hashes[row["group_id"]])
    assert len(prefixes) == 3
    assert all(len(found) == 1 for found in prefixes.values())
    assert len(set.union(*prefixes.values())) == 3


# How many shards, if the spec doesn't say


@pytest.mark.parametrize(
    ("seconds", "num_shards"),
    [
        (0, 1),
        (119, 1),
        (120, 1),
        (121, 2),
        (3600, 30),
        (119_999, 1000),
        (120_001, 1000),
        (1e9, 1000),
    ],
)
def test_a_shard_is_two_minutes_of_predicted_work(seconds: float, num_shards: int) -> None:
    assert usual_num_shards(seconds * 1e9, TARGET) == num_shards


def test_two_minutes_are_those_of_an_engine_with_all_its_gpus() -> None:
    wide = replace(TARGET, gpu=replace(TARGET.gpu, memory_bytes=10e9))
    assert wide.balance_limits.num_gpus == 4
    assert usual_num_shards(3600e9, wide) == 8


@pytest.mark.parametrize(
    ("num_tokens", "num_shards"), [(0, 1), (10**6, 1), (10**6 + 1, 2), (10**8, 100), (10**10, 1000)]
)
def test_a_shard_is_a_million_tokens_without_a_prediction(num_tokens: int, num_shards: int) -> None:
    assert usual_num_shards(num_tokens, None) == num_shards


def test_a_job_is_cut_by_its_predicted_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow GPU makes a small job take minutes."""
    gpu = replace(TARGET.gpu, bf16_flop_per_s=TARGET.gpu.bf16_flop_per_s / 10_000)
    slow = replace(TARGET, gpu=gpu)
    monkeypatch.setattr("batchllm_operator.plan.given.find_target", lambda spec: slow)
    plan = plan_sites(tmp_path, None)
    assert plan.manifest.estimate is not None
    num_shards = len(plan.manifest.shards)
    assert num_shards > 5
    assert num_shards == pytest.approx(plan.manifest.estimate.gpu_s / 120, rel=0.2, abs=1)
    again = plan_sites(tmp_path, None, engine={"max_num_seqs": 3, "replicas": 2})
    assert again.folder == plan.folder, "engines and their number don't change the cut"


def test_a_job_is_cut_by_its_tokens_without_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchllm_operator.plan.arrange._SHARD_TOKENS", 500.0)
    plan = plan_sites(tmp_path, None)
    num_tokens = plan.manifest.counts.num_optimal_tokens + 60 * 8  # outputs
    assert len(plan.manifest.shards) == -(-num_tokens // 500) > 2
    assert finish(plan).num_rows_out == 60

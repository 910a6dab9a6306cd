"""Tables at the edges of what a plan can meet: all alike, nothing alike, nothing, enormous."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from support.fake_job import DS, fake_spec, write_table

from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.stored_plan.stored_plan import StoredPlan


def plan(folder: Path, prompts: Sequence[str], **changes: Any) -> StoredPlan:
    """Plan a table of prompts as they are."""
    write_table(
        folder / "documents", [{"row_key": n, "text": text} for n, text in enumerate(prompts)]
    )
    prompt = {"system": None, "template": "{text}"}
    output = {"uri": str(folder / "out"), "carry": []}
    return plan_job(fake_spec(folder, prompt=prompt, output=output, **changes), DS)


def groups_of(plan: StoredPlan) -> list[tuple[int, list[str]]]:
    """Each group's prefix length and its members' prompts."""
    groups: dict[int, tuple[int, list[str]]] = {}
    for shard in plan.manifest.shards:
        for row in pq.read_table(plan.folder.full_path(shard.file)).to_pylist():
            members = groups.setdefault(row["group_id"], (row["num_prefix_tokens"], []))[1]
            members.append(bytes(row["prompt_token_ids"]).decode())
    return [groups[group_id] for group_id in sorted(groups)]


def test_empty_prompts_are_rejected_row_by_row(tmp_path: Path) -> None:
    planned = plan(tmp_path, ["", "a", "", "ab"], max_failed_fraction=1.0)
    assert planned.manifest.counts.num_rejected_rows == 2
    errors = pq.read_table(planned.folder.full_path("rows.parquet"))["error"].to_pylist()
    assert [error is None for error in errors] == [False, True, False, True]
    nothing = plan(tmp_path, ["", ""], max_failed_fraction=1.0)
    assert nothing.manifest.counts.num_requests == 0
    assert nothing.manifest.shards == ()


def test_a_prompt_that_goes_on_from_another(tmp_path: Path) -> None:
    prompts = ["once upon a time" + " there was" * n for n in range(6)]
    planned = plan(tmp_path, prompts, planner={"num_shards": 1})
    counts = planned.manifest.counts
    cached = sum(len(prompt) // 16 * 16 for prompt in prompts[:-1])
    assert counts.num_optimal_tokens == counts.num_logical_tokens - cached
    assert sorted(p for _, members in groups_of(planned) for p in members) == prompts
    for cut, members in groups_of(planned):
        assert len({member[:cut] for member in members}) == 1


def test_a_prompt_of_a_million_tokens(tmp_path: Path) -> None:
    long = "".join(chr(97 + n * n % 26) for n in range(1_000_000))
    prompts = [long + "x", "short", long + "y", long[:500_000]]
    planned = plan(
        tmp_path, prompts, engine={"max_model_len": 2_000_000}, planner={"num_shards": 1}
    )
    counts = planned.manifest.counts
    assert counts.num_requests == 4
    assert counts.num_optimal_tokens == 1_000_000 + 2 + len("short")
    assert sorted(p for _, members in groups_of(planned) for p in members) == sorted(prompts)

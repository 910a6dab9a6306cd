"""Tables at the edges of what a plan can meet: all alike, nothing alike, nothing, enormous."""

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

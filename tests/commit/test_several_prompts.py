"""Answers to several prompts as structs of an output table, in each format."""

from typing import Any

import pyarrow as pa
import pytest
from support.fake_job import DS, document_rows, finish
from support.lake_tables import Lake, open_lake
from support.prompts_job import PROMPTS, rows_by_key, several

from batchllm_operator.commit.failed_rows import find_failed_rows
from batchllm_operator.errors import TableError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec

EARLIER = "2026-01-30"
ROWS = document_rows(4, 3)
ROWS[2] = {**ROWS[2], "query": None}
OTHER = {
    **PROMPTS,
    "summary": {"template": "{document}\n\nBriefly:", "sampling": {"max_tokens": 8}},
}


@pytest.fixture(autouse=True)
def two_days(lakes: tuple[Lake, Lake]) -> None:
    for ds in (EARLIER, DS):
        lakes[0].append(ds, pa.Table.from_pylist(ROWS))


def spec_of(lakes: tuple[Lake, Lake], prompts: dict[str, Any]) -> JobSpec:
    source, target = lakes
    output = {"uri": target.address, "staging_uri": target.staging}
    place = {"uri": source.address, "key": "row_key"}
    return several("unused", prompts, input=place, output=output, max_failed_fraction=0.5)


def test_structs_are_published_and_taken_over(lakes: tuple[Lake, Lake]) -> None:
    spec = spec_of(lakes, PROMPTS)
    for ds in (EARLIER, DS):
        finish(plan_job(spec, ds))
    before = rows_by_key(spec)
    assert before == {
        key: {**row, "run_id": before[key]["run_id"]}
        for key, row in rows_by_key(spec, EARLIER).items()
    }
    assert before[ROWS[2]["row_key"]]["topic"]["status"] == "rejected"
    kind = open_lake(lakes[1]).snapshot(DS).schema.field("relevant").type
    assert {kind.field(idx).name for idx in range(kind.num_fields)} >= {"label", "error", "status"}
    other = spec_of(lakes, OTHER)
    plan = plan_job(other, DS, ["summary"])
    assert plan.manifest.counts.num_requests == 4
    finish(plan)
    after = rows_by_key(other)
    for key, row in after.items():
        assert row["topic"] == before[key]["topic"] and row["relevant"] == before[key]["relevant"]
        assert row["summary"]["generated_text"] != before[key]["summary"]["generated_text"]
    found = find_failed_rows(plan.folder.uri, 5)
    assert [(row.prompt, row.kind) for row in found.rows] == [
        ("relevant", "null_value"),
        ("topic", "null_value"),
    ]


def test_a_prompt_with_other_fields_does_not_fit_its_column(lakes: tuple[Lake, Lake]) -> None:
    if not lakes[1].has_versions:
        pytest.skip("a partition of plain Parquet has columns of its own")
    finish(plan_job(spec_of(lakes, PROMPTS), DS))
    probable = {**PROMPTS["summary"], "sampling": {"max_tokens": 8, "logprobs": 0}}
    with pytest.raises(TableError, match="column 'summary' holds struct"):
        plan_job(spec_of(lakes, {**PROMPTS, "summary": probable}), DS)

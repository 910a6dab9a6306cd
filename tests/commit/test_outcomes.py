"""What became of each row: the columns `status` and `error`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from support.answers_job import asking, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt
from support.lake_tables import Lake, open_lake

from batchllm_operator.answers import Answers
from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.engine import EngineOutput, EngineRequest
from batchllm_operator.engine.fake import FakeEngine
from batchllm_operator.errors import TableError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.row_error import RowError
from batchllm_operator.spec import JobSpec

EARLIER = "2026-01-30"
WITHOUT_STATUS = {
    **dict.fromkeys(["row_key", "generated_text", "finish_reason"], pa.string()),
    **dict.fromkeys(["num_prompt_tokens", "num_cached_tokens", "num_output_tokens"], pa.int32()),
    **dict.fromkeys(["model", "run_id", "query"], pa.string()),
}
"""What another program may have created, but for the partition column."""
ERROR = pa.struct([("kind", pa.string()), ("message", pa.string())])
ROWS: list[dict[str, Any]] = [
    *document_rows(1, 1),
    {"row_key": "rejected", "document": None, "query": "q"},
    {"row_key": "failed", "document": "#", "query": "q"},
    {"row_key": "invalid", "document": "no number", "query": "q"},
    {"row_key": "ok", "document": "ends", "query": "q"},
]
FOUND = {
    "d0-q0": ("cut_off", None),
    "rejected": ("rejected", {"kind": "null_value", "message": "column 'document' is null"}),
    "failed": ("failed", {"kind": "engine_error", "message": "error token in the prompt"}),
    "invalid": ("invalid_output", {"kind": "invalid_output", "message": "not this: but that"}),
    "ok": ("ok", None),
}
LEFT_OUT = {"sampling": {"max_tokens": 8, "ignore_eos": True}}
CHOICE = {"response_format": {"type": "choice", "choices": ["no", "yes"]}}
CLASSIFY = {"task": "classify", "labels": ["no", "yes"]}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine ends an answer if the prompt says so; another one can't be used."""
    answer = FakeEngine._answer
    invalid = fake_text(list(expected_prompt(ROWS[3]).encode()))

    def as_asked(self: FakeEngine, request: EngineRequest, *args: Any) -> EngineOutput:
        output = answer(self, request, *args)
        ends = b"ends" in bytes(request.prompt_token_ids)
        return replace(output, finish_reason="stop") if ends else output

    def fault(self: Answers, text: str, raw: Mapping[str, Any]) -> RowError | None:
        return RowError("invalid_output", "not this: but that") if text == invalid else None

    monkeypatch.setattr(FakeEngine, "_answer", as_asked)
    monkeypatch.setattr(Answers, "fault", fault)


@pytest.fixture(autouse=True)
def two_days(lakes: tuple[Lake, Lake]) -> None:
    for ds in (EARLIER, DS):
        rows = pa.Table.from_pylist(ROWS)
        lakes[0].append(ds, rows.append_column("Status", pa.array(["mine"] * len(ROWS))))


def spec_of(
    lakes: tuple[Lake, Lake], output: Mapping[str, Any] | None = None, **changes: Any
) -> JobSpec:
    source, target = lakes
    place = {"uri": target.address, "staging_uri": target.staging, "carry": ["query"]}
    extra_args = {"byte_tokens": True, "error_token_id": ord("#")}
    fields: dict[str, Any] = {
        "input": {"uri": source.address, "key": "row_key"},
        "output": {**place, **(output or {})},
        "engine": {"backend": "fake", "extra_args": extra_args},
        "max_failed_fraction": 1.0,
    }
    return asking("unused", **{**fields, **changes})


def read(lake: Lake, ds: str = DS) -> dict[str, dict[str, Any]]:
    """The partition's rows, by key."""
    table = open_lake(lake)
    snapshot = table.snapshot(ds)
    batches = table.scan(snapshot, snapshot.schema.names)
    return {row["row_key"]: row for batch in batches for row in batch.to_pylist()}


def columns_of(lake: Lake) -> dict[str, pa.DataType]:
    schema = open_lake(lake).snapshot(DS).schema
    return {field.name: field.type for field in schema if field.name != "ds"}


def test_a_new_table_tells_what_became_of_each_row(lakes: tuple[Lake, Lake], engine: None) -> None:
    spec = spec_of(lakes)
    run_and_commit(spec)
    assert {key: (row["status"], row["error"]) for key, row in read(lakes[1]).items()} == FOUND
    columns = columns_of(lakes[1])
    assert (columns["status"], columns["error"]) == (pa.string(), ERROR)
    names = list(columns)
    assert names[names.index("error") - 1] == "status"
    run_and_commit(spec, EARLIER)
    assert columns_of(lakes[1]) == columns
    assert open_lake(lakes[1]).partitions() == [EARLIER, DS]


def test_a_table_without_status_gains_it_if_it_may(lakes: tuple[Lake, Lake], engine: None) -> None:
    if not lakes[1].has_versions:
        pytest.skip("plain Parquet has no tables of other programs")
    lakes[1].create(pa.schema({**WITHOUT_STATUS, "error": ERROR}))
    spec = spec_of(lakes)
    with pytest.raises(TableError, match=r"has no column 'status'; set output\.add_columns"):
        plan_job(spec, DS)
    run_and_commit(spec_of(lakes, output={"add_columns": True}))
    assert {key: (row["status"], row["error"]) for key, row in read(lakes[1]).items()} == FOUND


@pytest.mark.parametrize(
    "ask", [LEFT_OUT, CLASSIFY, CHOICE], ids=["ignore_eos", "classify", "choice"]
)
def test_where_each_answer_is_whole_none_is_cut_off(
    lakes: tuple[Lake, Lake], engine: None, ask: dict[str, Any]
) -> None:
    run_and_commit(spec_of(lakes, **ask))
    found = read(lakes[1])
    assert (found["d0-q0"]["finish_reason"], found["d0-q0"]["status"]) == ("length", "ok")
    assert found["rejected"]["status"] == "rejected"

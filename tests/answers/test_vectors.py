"""Jobs whose answers are vectors: embeddings, and scores of pooling heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.answers_job import asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, fake_spec, write_table
from support.lake_tables import LAKES

from batchllm_operator.engine.fake import FAKE_SIZE, fake_vector
from batchllm_operator.errors import SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spec import JobSpec

NEXT = "2026-02-01"
COLUMNS = {"embed": "embedding", "pool": "scores"}
TASKS = sorted(COLUMNS)


def pooling(folder: Path | str, task: str = "embed", **changes: Any) -> JobSpec:
    return asking(folder, task=task, **changes)


def vector_of(row: dict[str, Any], size: int = FAKE_SIZE) -> list[float]:
    return fake_vector(list(expected_prompt(row).encode()), size)


@pytest.mark.parametrize("task", TASKS)
def test_each_row_has_its_vector(tmp_path: Path, task: str) -> None:
    rows = document_rows(4, 3)
    rows[2] = {**rows[2], "document": None}
    rows[5] = {**rows[8], "row_key": "a duplicate"}
    write_table(tmp_path / "documents", rows)
    spec = pooling(tmp_path, task, max_failed_fraction=0.1)
    plan = run_and_commit(spec)
    assert plan.manifest.counts.num_duplicate_rows == 1
    assert plan.manifest.planned_saving_ratio > 0.3
    found = published(spec)
    assert [row["row_key"] for row in found] == [row["row_key"] for row in rows]
    for published_row, row in zip(found, rows, strict=True):
        assert "generated_text" not in published_row
        if row["document"] is None:
            assert published_row["error"] is not None
            assert published_row[COLUMNS[task]] is None
        else:
            assert published_row["error"] is None
            assert published_row[COLUMNS[task]] == vector_of(row)
            assert published_row["num_prompt_tokens"] == len(expected_prompt(row))


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_of_exactly_the_models_length_has_its_vector(tmp_path: Path, task: str) -> None:
    rows = document_rows(1, 2)
    length = len(expected_prompt(rows[0]))
    rows[1] = {**rows[1], "query": rows[0]["query"] + "!"}
    write_table(tmp_path / "documents", rows)
    engine = {"backend": "fake", "max_model_len": length, "extra_args": {"byte_tokens": True}}
    spec = pooling(tmp_path, task, engine=engine, max_failed_fraction=0.5)
    run_and_commit(spec)
    fits, is_longer = published(spec)
    assert fits[COLUMNS[task]] == vector_of(rows[0])
    assert is_longer["error"]["kind"] == "prompt_too_long"


def test_column_types(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(1, 2))
    for task, kind in {
        "embed": pa.list_(pa.float32(), FAKE_SIZE),
        "pool": pa.list_(pa.float32()),
    }.items():
        run_and_commit(pooling(tmp_path, task, name=task, output={"uri": f"{tmp_path}/{task}"}))
        schema = pq.read_schema(tmp_path / task / f"ds={DS}" / "data.parquet")
        assert schema.field(COLUMNS[task]).type == kind
        texts = {"generated_text", "finish_reason", "num_output_tokens"}
        assert not texts & set(schema.names)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", LAKES)
def test_every_format_holds_vectors(
    kind: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = LAKES[kind]
    source, target = (make(str(tmp_path), tmp_path, monkeypatch, name) for name in ("docs", "out"))
    rows = document_rows(3, 2)
    source.append(DS, pa.Table.from_pylist([*rows, {"row_key": "none", "query": "what?"}]))
    spec = pooling(
        tmp_path,
        task,
        input={"uri": source.address, "key": "row_key"},
        output={"uri": target.address, "staging_uri": target.staging},
        max_failed_fraction=0.5,
    )
    for _ in range(2):  # the table is there then
        run_and_commit(spec)
        found = {row["row_key"]: row[COLUMNS[task]] for row in published(spec)}
        assert found == {"none": None, **{row["row_key"]: vector_of(row) for row in rows}}


@pytest.mark.parametrize("task", TASKS)
def test_a_later_day_reuses_vectors(tmp_path: Path, task: str) -> None:
    write_table(tmp_path / "documents", document_rows(3, 2))
    spec = pooling(tmp_path, task, reuse_outputs=True)
    run_and_commit(spec)
    later = [*document_rows(3, 2), {"row_key": "new", "document": "Another.", "query": "now?"}]
    write_table(tmp_path / "documents", later, NEXT)
    plan = run_and_commit(spec, NEXT)
    assert plan.manifest.counts.num_reused_rows == 6
    for found, row in zip(published(spec, NEXT), later, strict=True):
        assert found[COLUMNS[task]] == vector_of(row)


def test_other_dimensions_reuse_nothing(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(3, 2))
    run_and_commit(pooling(tmp_path, reuse_outputs=True))
    for other in ({"dimensions": 4}, {"normalize": False}):
        spec = pooling(tmp_path, embedding=other, reuse_outputs=True)
        assert plan_job(spec, DS).manifest.counts.num_reused_rows == 0


def test_fewer_dimensions(tmp_path: Path) -> None:
    write_table(tmp_path / "documents", document_rows(2, 2))
    spec = pooling(tmp_path, embedding={"dimensions": 5})
    run_and_commit(spec)
    found = published(spec)
    assert [row["embedding"] for row in found] == [vector_of(row, 5) for row in document_rows(2, 2)]
    schema = pq.read_schema(tmp_path / "out" / f"ds={DS}" / "data.parquet")
    assert schema.field("embedding").type == pa.list_(pa.float32(), 5)


@pytest.mark.parametrize("task", TASKS)
def test_a_vector_that_is_not_of_numbers_is_a_row_error(tmp_path: Path, task: str) -> None:
    rows = document_rows(3, 4)
    rows[7]["query"] = "~"
    write_table(tmp_path / "documents", rows)
    engine = {"backend": "fake", "extra_args": {"byte_tokens": True, "nan_token_id": ord("~")}}
    spec = pooling(tmp_path, task, engine=engine, max_failed_fraction=0.1, reuse_outputs=True)
    run_and_commit(spec)
    wrong = published(spec)[7]
    assert "not_finite" in str(wrong["error"])
    assert sum(row["error"] is not None for row in published(spec)) == 1
    plan = plan_job(spec.model_copy(update={"name": "job"}), DS)
    assert plan.manifest.counts.num_reused_rows == 11


def write_config(folder: Path, **config: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "mode", "is_shared"),
    [
        ({"model_type": "qwen2"}, None, True),
        ({"model_type": "qwen2"}, "pooling_mode_lasttoken", True),
        ({"model_type": "qwen2"}, "pooling_mode_mean_tokens", False),
        ({"model_type": "qwen2", "is_causal": False}, None, False),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, None, False),
        ({"model_type": "bert"}, "pooling_mode_cls_token", False),
        ({"model_type": "modernbert"}, None, False),
    ],
)
def test_prefixes_are_shared_as_the_files_say(
    tmp_path: Path, config: dict[str, Any], mode: str | None, is_shared: bool
) -> None:
    model = tmp_path / "model"
    write_config(model, **config)
    if mode is not None:
        write_config(model / "1_Pooling", **{mode: True})
        module = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
        (model / "modules.json").write_text(json.dumps([module]))
    write_table(tmp_path / "documents", document_rows(3, 4))
    manifest = plan_job(pooling(tmp_path, model={"path": str(model)}), DS).manifest
    assert (manifest.planned_saving_ratio > 0) == is_shared
    assert (manifest.counts.num_shared_groups > 0) == is_shared
    assert manifest.pooling is not None
    assert (manifest.pooling.reason_against_sharing is None) == is_shared


def test_names_of_scores_are_the_models(tmp_path: Path) -> None:
    labels = {"0": "no", "1": "yes"}
    model = write_config(tmp_path / "model", model_type="qwen2", id2label=labels)
    write_table(tmp_path / "documents", document_rows(1, 2))
    plan = run_and_commit(pooling(tmp_path, "pool", model={"path": model}))
    assert plan.manifest.pooling is not None
    assert plan.manifest.pooling.score_labels == ("no", "yes")
    field = pq.read_schema(tmp_path / "out" / f"ds={DS}" / "data.parquet").field("scores")
    assert json.loads(field.metadata[b"batchllm.labels"]) == ["no", "yes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"max_tokens": 8}}, "generates no tokens; leave sampling out"),
        ({"labels": ["a", "b"]}, "are for task: classify"),
        ({"label_values": {"a": 1, "b": 2}}, "are for task: classify"),
        ({"task": "pool", "embedding": {"normalize": False}}, "embedding is for task: embed"),
        ({"task": "generate", "embedding": {"dimensions": 8}}, "embedding is for task: embed"),
        ({"embedding": {"dimensions": 0}}, "dimensions"),
        ({"planner": {"estimated_output_tokens": 4}}, "generates no tokens; leave it out"),
        ({"output": {"uri": "/lake/out", "carry": ["embedding"]}}, "writes a column of that name"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        pooling("/lake", **changes)


def test_a_key_may_be_named_like_a_column_of_texts() -> None:
    spec = pooling("/lake", output={"uri": "/lake/out", "carry": ["generated_text"]})
    assert "generated_text" not in spec.output_columns


def test_identity_knows_the_embedding_and_older_manifests_keep_their_bytes(tmp_path: Path) -> None:
    assert pooling("/lake").identity != pooling("/lake", embedding={"normalize": False}).identity
    assert pooling("/lake").identity != pooling("/lake", "pool").identity
    write_table(tmp_path / "documents", document_rows(1, 2))
    stored = json.loads(plan_job(fake_spec(tmp_path), DS).manifest.to_bytes())
    assert "pooling" not in stored

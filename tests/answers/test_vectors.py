"""Jobs whose answers are vectors: embeddings, and scores of pooling heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.answers_job import asking, published, run_and_commit
from support.fake_job import DS, document_rows, expected_prompt, write_table

from batchllm_operator.answers.fakes import fake_vector
from batchllm_operator.answers.vectors import FAKE_SIZE
from batchllm_operator.plan.plan_job import plan_job

COLUMNS = {"embed": "embedding", "pool": "scores"}


@pytest.mark.parametrize("task", COLUMNS)
def test_a_prompt_of_exactly_the_models_length_has_its_vector(tmp_path: Path, task: str) -> None:
    rows = document_rows(1, 2)
    length = len(expected_prompt(rows[0]))
    rows[1] = {**rows[1], "query": rows[0]["query"] + "!"}
    write_table(tmp_path / "documents", rows)
    engine = {"backend": "fake", "max_model_len": length, "extra_args": {"byte_tokens": True}}
    spec = asking(tmp_path, task=task, engine=engine, max_failed_fraction=0.5)
    run_and_commit(spec)
    fits, is_longer = published(spec)
    assert fits[COLUMNS[task]] == fake_vector(list(expected_prompt(rows[0]).encode()), FAKE_SIZE)
    assert is_longer["error"]["kind"] == "prompt_too_long"


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
    manifest = plan_job(asking(tmp_path, task="embed", model={"path": str(model)}), DS).manifest
    assert (manifest.counts.planned_saving_ratio > 0) == is_shared
    assert (manifest.counts.num_shared_groups > 0) == is_shared
    assert (manifest.answers.reason_against_sharing is None) == is_shared


def test_names_of_scores_are_the_models(tmp_path: Path) -> None:
    labels = {"0": "no", "1": "yes"}
    model = write_config(tmp_path / "model", model_type="qwen2", id2label=labels)
    write_table(tmp_path / "documents", document_rows(1, 2))
    plan = run_and_commit(asking(tmp_path, task="pool", model={"path": model}))
    assert plan.manifest.answers.score_labels == ("no", "yes")
    field = pq.read_schema(tmp_path / "out" / f"ds={DS}" / "data.parquet").field("scores")
    assert json.loads(field.metadata[b"batchllm.labels"]) == ["no", "yes"]

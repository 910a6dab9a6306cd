"""Vectors of jobs that embed or pool are those of stock vLLM, and prefixes are shared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.demo_job import DS, Demo, Job

LABELS = ("good", "bad", "ugly")
PROMPT: dict[str, Any] = {"system": None, "template": "Document: {document}\nQuery: {query}"}
FEW: dict[str, Any] = {"filter": [{"column": "package", "op": "<", "value": "h"}]}


def with_head(model: Path, folder: Path) -> Path:
    """The demo's model with a head of three labels in place of its output layer; the folder."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    size = weights.pop("lm_head.weight").shape[1]
    generator = torch.Generator().manual_seed(0)
    weights["score.weight"] = torch.randn(len(LABELS), size, generator=generator) / size**0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen2ForSequenceClassification"]
    config["id2label"] = {str(idx): label for idx, label in enumerate(LABELS)}
    config["label2id"] = {label: idx for idx, label in enumerate(LABELS)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def encoder(model: Path, folder: Path) -> Path:
    """A BERT with the demo's tokens; the folder."""
    from transformers import BertConfig, BertModel

    shutil.copytree(model, folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = BertConfig(
        vocab_size=size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return folder


def stock_vectors(demo: Demo, model: Path, task: str) -> np.ndarray[Any, Any]:
    """float64 [num_rows, size], in the table's order."""
    texts = [f"Document: {row['document']}\nQuery: {row['query']}" for row in demo.rows("h")]
    return np.array(demo.stock(task, texts, model))


def pooled(demo: Demo, name: str, model: Path, task: str, **changes: Any) -> Job:
    spec: dict[str, Any] = {"task": task, "sampling": {"max_tokens": 1}, "prompt": PROMPT}
    return demo.run_job(name, **{**spec, "input": FEW, "model": {"path": str(model)}, **changes})


def vectors(job: Job, column: str) -> np.ndarray[Any, Any]:
    """float64 [num_rows, size], in the table's order."""
    assert job.table["error"].null_count == len(job.table)
    return np.array(job.table[column].to_pylist(), dtype=np.float64)


def test_embeddings_equal_stock(demo: Demo) -> None:
    wanted = stock_vectors(demo, demo.model, "embed")
    assert len(wanted) > 50
    for scheduler in ("batchllm", "stock"):
        job = pooled(
            demo, f"embed-{scheduler}", demo.model, "embed", engine={"scheduler": scheduler}
        )
        found = vectors(job, "embedding")
        assert job.table.schema.field("embedding").type == pa.list_(pa.float32(), wanted.shape[1])
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-4)
        report = job.report
        assert report["planned_saving_ratio"] > 0.3
        assert report["achieved_saving_ratio"] > report["planned_saving_ratio"] - 0.01
    assert len(np.unique(wanted[:, 0].round(3))) > 10


def test_scores_of_a_head_equal_stock(demo: Demo) -> None:
    model = with_head(demo.model, demo.folder / "head")
    wanted = stock_vectors(demo, model, "classify")
    job = pooled(demo, "pool", model, "pool")
    np.testing.assert_allclose(vectors(job, "scores"), wanted, atol=1e-4)
    assert wanted.std(axis=0).min() > 0.01
    assert job.report["achieved_saving_ratio"] > job.report["planned_saving_ratio"] - 0.01
    names = pq.read_schema(demo.folder / "out-pool" / f"ds={DS}" / "data.parquet").field("scores")
    assert json.loads(names.metadata[b"batchllm.labels"]) == list(LABELS)


def test_an_encoder_is_planned_without_sharing(demo: Demo) -> None:
    model = encoder(demo.model, demo.folder / "bert")
    wanted = stock_vectors(demo, model, "embed")
    job = pooled(demo, "bert", model, "embed")
    np.testing.assert_allclose(vectors(job, "embedding"), wanted, atol=1e-4)
    assert job.plan["num_shared_groups"] == 0
    assert job.report["achieved_saving_ratio"] == pytest.approx(
        job.report["planned_saving_ratio"], abs=1e-3
    )


def test_a_model_without_a_head_is_refused(demo: Demo) -> None:
    spec = demo.write_spec("no-head", task="pool", sampling={"max_tokens": 1})
    plan = demo.run("plan", "--job", str(spec), "--ds", DS)
    code, output = demo.start(
        "run", "--plan", plan["plan_uri"], "--worker", "0", "--num-workers", "1"
    ).end()
    assert code == 2, output
    assert "vLLM can't on this model" in output

"""Vectors of jobs that embed or pool are those of other libraries, and prefixes are shared."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.demo_job import DS, Demo, Job
from support.messy_table import answerable, messy_rows

from batchllm_operator.errors import SpecError

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


def test_embeddings_of_an_encoder_are_those_of_sentence_transformers(
    real: Demo, minilm: Path
) -> None:
    """As that library computes them for this model: the mean over tokens, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (kind.from_pretrained(minilm) for kind in (AutoTokenizer, AutoModel))
    texts = ["{document}\n{query}".format(**row) for row in answerable(messy_rows())]
    given = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        states, mask = model(**given).last_hidden_state, given["attention_mask"][:, :, None]
    means = (states * mask).sum(1) / mask.sum(1)
    wanted = torch.nn.functional.normalize(means).numpy()

    changes = {"prompt": {"system": None, "template": "{document}\n{query}"}, "input": {}}
    own = {"engine": {"max_model_len": None}, "max_failed_fraction": 0.1}
    job = pooled(real, "minilm", minilm, "embed", **changes, **own)
    found = job.table.filter(pc.is_null(job.table["error"]))["embedding"].to_pylist()
    np.testing.assert_allclose(np.array(found), wanted, rtol=0, atol=1e-5)
    assert job.plan.manifest.counts.num_shared_groups == 0
    assert job.report["achieved_saving_ratio"] == job.report["planned_saving_ratio"]


def test_a_model_without_a_head_is_refused(demo: Demo) -> None:
    with pytest.raises(SpecError, match="vLLM can't on this model"):
        demo.run_job("no-head", task="pool", sampling={"max_tokens": 1})

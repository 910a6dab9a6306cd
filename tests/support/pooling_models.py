"""Models that pool, made of the demo's or in miniature, with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LABELS = ("good", "bad", "ugly")


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

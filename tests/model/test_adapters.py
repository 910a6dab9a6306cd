"""Adapters on the hub, here in its local cache."""

from __future__ import annotations

import logging
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters import write_adapter

from batchllm_operator.errors import ModelError
from batchllm_operator.model import check_adapters, find_adapters
from batchllm_operator.spec import ModelSpec

MODULES = {"model.layers.0.self_attn.q_proj": (8, 8)}
COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def publish(cache: Path, name: str, commit: str) -> Path:
    """The empty folder of a commit, to which the branch `main` points."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def test_its_version_is_the_commit(cache: Path) -> None:
    model = ModelSpec(path="we/base", adapters={"a": "we/tuned"}, adapter="a")
    for commit in COMMITS:
        folder = publish(cache, "we/tuned", commit)
        write_adapter(folder, MODULES, rank_pattern={"k_proj": 32})
        [adapter] = find_adapters(model)
        assert (adapter.folder, adapter.version) == (folder, f"commit:{commit}")
        assert adapter.rank == 32


def test_an_unknown_name(cache: Path) -> None:
    model = ModelSpec(path="we/base", adapters={"a": "we/unknown"}, adapter="a")
    with pytest.raises(ModelError, match=r"model\.adapters\.a: we/unknown: the hub"):
        find_adapters(model)


def test_a_model_on_the_hub_is_compared_once_its_weights_are_here(cache: Path) -> None:
    write_adapter(publish(cache, "we/tuned", COMMITS[0]), MODULES)
    model = ModelSpec(path="we/base", adapters={"a": "we/tuned"}, adapter="a")
    folder = publish(cache, "we/base", COMMITS[1])
    assert len(find_adapters(model)) == 1
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: np.zeros((8, 16), "<f4")}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="16 inputs in the model, and 8 in the adapter"):
        find_adapters(model)


@pytest.mark.parametrize(
    ("base", "warns"), [("we/base", False), ("We/Base", False), ("we/other", True), (None, False)]
)
def test_another_base_model_is_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture, base: str | None, warns: bool
) -> None:
    folder = publish(cache, "we/tuned", COMMITS[0])
    write_adapter(folder, MODULES, base_model_name_or_path=base)
    model = ModelSpec(path="we/base", adapters={"a": "we/tuned"}, adapter="a")
    with caplog.at_level(logging.WARNING):
        check_adapters(model, find_adapters(model), None, chat=False)
    assert ("was trained on we/other" in caplog.text) == warns

"""A folder's version changes when the model in it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from batchllm_operator.model import files, folder_digest


def test_the_version_of_a_folder_changes_with_its_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WHOLE_FILE_BYTES", 100)
    monkeypatch.setattr(files, "_END_BYTES", 10)
    monkeypatch.setattr(files, "_SAMPLE_BYTES", 1)
    monkeypatch.setattr(files, "_NUM_SAMPLES", 4)
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(1000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    versions = [folder_digest(tmp_path)]
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "download.lock").write_text("x")
    assert folder_digest(tmp_path) == versions[0]
    for position in (5, 500, 995):  # only some of a large file is read
        weights[position] = 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        versions.append(folder_digest(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    versions.append(folder_digest(tmp_path))
    assert len(set(versions)) == 5


@pytest.mark.parametrize("changed", ["model.layers.0.mlp.up_proj", "model.layers.1.k_proj"])
def test_the_version_of_a_folder_changes_with_each_tensor(
    tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters merged into the weights leave sizes and both ends of the files as they were."""
    monkeypatch.setattr(files, "_WHOLE_FILE_BYTES", 100)
    monkeypatch.setattr(files, "_END_BYTES", 1000)
    monkeypatch.setattr(files, "_SAMPLE_BYTES", 16)
    names = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.k_proj", "model.norm"]
    weights = {name: np.zeros((64, 64), np.float16) for name in names}
    versions = []
    for _ in range(2):
        save_file(weights, tmp_path / "model.safetensors")
        versions.append(folder_digest(tmp_path))
        weights[changed] = weights[changed] + np.float16(0.5)
    assert versions[0] != versions[1]


@pytest.mark.parametrize(
    "header", [b"", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0, 1e9]}}', b'{"a": {}}', b"\xff"]
)
def test_weights_that_are_not_what_they_are_called_have_a_version(
    tmp_path: Path, header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WHOLE_FILE_BYTES", 100)
    data = len(header).to_bytes(8, "little") + header + bytes(200)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert folder_digest(tmp_path).startswith("sha256:")

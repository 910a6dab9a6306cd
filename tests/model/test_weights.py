"""A model whose weights can't be loaded is refused by `plan`, not by an engine that has started."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prompts.test_tokenizer import build_tokenizer
from safetensors.numpy import save_file
from support.adapters import write_adapter
from support.fake_job import DS, document_rows, write_table

from batchllm_operator.errors import ModelError
from batchllm_operator.model import ModelFiles, check_weights, find_adapters
from batchllm_operator.spec import ModelSpec

WEIGHTS = {"weight": np.zeros((4, 4), "<f4")}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n"
SHARDS = ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        if name.endswith(".safetensors"):
            save_file(WEIGHTS, folder / name)
        else:
            (folder / name).write_bytes(b"some bytes")
    return folder


def write_index(folder: Path, *names: str) -> None:
    shards = {f"weight.{number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def refusal(folder: Path, load_format: str = "auto") -> str:
    with pytest.raises(ModelError) as caught:
        check_weights(ModelFiles(str(folder)), load_format)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "load_format"),
    [
        (["model.safetensors"], "auto"),
        (["pytorch_model.bin", "training_args.bin"], "auto"),
        (["model.pt"], "auto"),
        (["consolidated.safetensors"], "auto"),
        (["model.gguf", "model.safetensors"], "auto"),
        (["config.json"], "dummy"),
        (["config.json"], "tensorizer"),
        (["model-00001-of-00001.safetensors"], "safetensors"),
    ],
)
def test_weights_that_vllm_loads_are_accepted(
    tmp_path: Path, names: list[str], load_format: str
) -> None:
    check_weights(ModelFiles(str(write(tmp_path, *names))), load_format)


@pytest.mark.parametrize(
    ("names", "load_format", "message"),
    [
        (["config.json", "tokenizer.json"], "auto", "has no weights (*.safetensors, *.bin, *.pt)"),
        (["training_args.bin"], "auto", "has no weights"),
        (["model.onnx", "tf_model.h5"], "auto", "has no weights"),
        (["pytorch_model.bin"], "safetensors", "has no weights (*.safetensors)"),
        (["model.Q4_K_M.gguf"], "auto", "GGUF isn't supported"),
        (["adapter_config.json", "adapter_model.safetensors"], "auto", "is a LoRA adapter"),
        (SHARDS, "auto", "model-00002-of-00003.safetensors"),
    ],
)
def test_missing_weights_are_named(
    tmp_path: Path, names: list[str], load_format: str, message: str
) -> None:
    assert message in refusal(write(tmp_path, *names), load_format)


def test_shards_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    names = [f"part-{letter}.safetensors" for letter in "abcdef"]
    write(tmp_path, "part-a.safetensors")
    write_index(tmp_path, *names)
    message = refusal(tmp_path)
    assert "part-b.safetensors, part-c.safetensors, part-d.safetensors and 2 more" in message
    (tmp_path / "part-a.safetensors").unlink()
    assert "part-a.safetensors" in refusal(tmp_path)
    write(tmp_path, *names)
    check_weights(ModelFiles(str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (POINTER, "git lfs pull"),
        (b"not a model", "isn't a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0{}", "has no weights in it"),
    ],
)
def test_a_file_without_weights_in_it_is_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert f"model.safetensors {message}" in refusal(tmp_path) or message in refusal(tmp_path)


def test_a_download_that_was_cut_off_is_named_with_its_size(tmp_path: Path) -> None:
    path = write(tmp_path, "model.safetensors") / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-16])
    assert f"is cut off: it has {size - 16} bytes" in refusal(tmp_path)


@pytest.mark.parametrize("fault", ["missing", "pointer"])
def test_an_adapter_without_weights_is_refused(tmp_path: Path, fault: str) -> None:
    folder = write_adapter(tmp_path / "tuned", {"q_proj": (4, 4)})
    weights = folder / "adapter_model.safetensors"
    if fault == "missing":
        weights.unlink()
    else:
        weights.write_bytes(POINTER)
    model = ModelSpec(path=str(tmp_path), adapters={"a": str(folder)}, adapter="a")
    with pytest.raises(ModelError, match=r"model\.adapters\.a: .*adapter_model\.safetensors"):
        find_adapters(model)


@pytest.mark.parametrize(
    "path", ["/models/m.gguf", "owner/m-GGUF/m.Q4_0.gguf", "owner/m-GGUF:Q4_K_M", "m.GGUF"]
)
def test_a_gguf_file_is_refused_with_advice(path: str) -> None:
    with pytest.raises(ModelError, match=r"GGUF isn't supported; .*safetensors"):
        ModelFiles(path)


def test_plan_refuses_a_model_without_weights_that_the_fake_engine_takes(
    tmp_path: Path, batchllm: Any
) -> None:
    model = build_tokenizer(tmp_path / "model")
    write_table(tmp_path / "documents", document_rows(1, 2))
    spec = {
        "spec_version": 1,
        "name": "job",
        "input": {"uri": str(tmp_path / "documents"), "key": "row_key"},
        "prompt": {"template": "{document}"},
        "model": {"path": str(model)},
        "output": {"uri": str(tmp_path / "out")},
    }
    path = tmp_path / "job.yaml"
    for task in ("generate", "embed", "pool"):
        path.write_text(yaml.safe_dump({**spec, "task": task}))
        outcome = batchllm("plan", "--job", path, "--ds", DS)
        assert outcome.code == 2
        assert f"error: model {model}: has no weights" in outcome.err
    path.write_text(yaml.safe_dump({**spec, "engine": {"backend": "fake"}}))
    assert batchllm("plan", "--job", path, "--ds", DS).code == 0

"""Code that a model brings along runs only if the spec says so, and then the log says so."""

import ast
import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from prompts.test_tokenizer import build_tokenizer
from support.fake_job import fake_spec

import batchllm_operator
from batchllm_operator.engine.vllm.openai_requests import ServedModel, parse_arguments
from batchllm_operator.errors import ModelError, SpecError
from batchllm_operator.plan.estimate import find_target
from batchllm_operator.prompts import load_tokenizer
from batchllm_operator.spec import JobSpec, ModelSpec

DS = "2026-01-31"
CODE = """
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnConfig(PretrainedConfig):
    model_type = "own"
    max_position_embeddings = 321


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
KINDS = {
    "config": ("config.json", {"AutoConfig": "own_code.OwnConfig"}),
    "tokenizer": ("tokenizer_config.json", {"AutoTokenizer": [None, "own_code.OwnTokenizer"]}),
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder with code in it, which leaves a mark when it runs."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = build_tokenizer(tmp_path / "model")
    name, auto_map = KINDS[request.param]
    fields: dict[str, Any] = json.loads((folder / name).read_text())
    fields["auto_map"] = auto_map
    if request.param == "config":
        fields["model_type"] = "own"
    else:
        fields["tokenizer_class"] = "OwnTokenizer"
    (folder / name).write_text(json.dumps(fields))
    (folder / "own_code.py").write_text(CODE.format(marker=str(tmp_path / "it ran")))
    return folder


def spec_of(model: Path, **fields: Any) -> JobSpec:
    return fake_spec(model.parent, model={"path": str(model), **fields}, engine={"backend": "vllm"})


def test_it_is_off_unless_the_spec_says_so() -> None:
    assert ModelSpec(path="x").trust_remote_code is False
    described = JobSpec.model_json_schema()["$defs"]["ModelSpec"]["properties"]
    assert described["trust_remote_code"]["default"] is False


@pytest.mark.parametrize("fields", [{}, {"trust_remote_code": False}])
def test_code_of_a_model_does_not_run(
    model: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        try:
            load_tokenizer(spec_of(model, **fields), DS)
        except ModelError as error:
            assert "custom code" in str(error)
    find_target(spec_of(model, **fields))
    assert not (model.parent / "it ran").exists()
    assert "trust_remote_code" not in caplog.text


def test_code_of_a_trusted_model_runs_and_the_log_says_so(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_tokenizer(spec_of(model, trust_remote_code=True), DS)
    assert (model.parent / "it ran").exists()
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message == f"model {model}: runs code of its own (trust_remote_code)"


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize("model", ["config"], indirect=True)
def test_code_of_a_batch_files_model_runs_only_by_vllms_argument(
    model: Path, is_trusted: bool
) -> None:
    arguments = ["--trust-remote-code"] if is_trusted else []
    with contextlib.suppress(SpecError):  # the model has no layers
        ServedModel({"model": str(model), **parse_arguments(arguments)})
    assert (model.parent / "it ran").exists() == is_trusted


LOADERS = {"from_pretrained", "EngineArgs", "LLM", "LLMEngine", "ModelConfig", "AsyncEngineArgs"}
LOADERS |= {
    "get_config",
    "get_tokenizer",
    "cached_tokenizer_from_config",
    "from_config",
    "pipeline",
}


def test_each_place_that_loads_a_model_takes_it_from_the_spec() -> None:
    """Another place has to be added here, with a test that it does."""
    root = Path(batchllm_operator.__file__).parent
    found = set()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in LOADERS:
                    found.add((path.relative_to(root).as_posix(), name))
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert not isinstance(node.value, ast.Constant), path
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                        assert ast.unparse(value).endswith("model.trust_remote_code"), path
    assert found == {
        ("engine/vllm/engine.py", "EngineArgs"),
        ("engine/vllm/formats.py", "get_tokenizer"),
        ("engine/vllm/openai_requests.py", "AsyncEngineArgs"),
        ("model/tokenizer.py", "from_pretrained"),
        ("simulate/vllm_config.py", "ModelConfig"),
    }
